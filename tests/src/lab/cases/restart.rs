//! Agents that come and go: the kernel goes on, and what a table has lost is found again.

use anyhow::{Context, Result, ensure};
use lb_common::flow::flag;

use super::{Case, unserved};
use crate::{
    agent::until,
    lab::{
        Lab,
        hammer::Hammer,
        plan::{self, Family},
        state::Transport,
    },
    runner::scaled,
};

/// The cases.
pub const CASES: &[Case] = &[
    Case::new("K31", "node_ports_never_vanish_at_a_restart", never_vanish),
    Case::new("K21", "a_restart_forgets_no_pod_that_terminates", draining),
    Case::new("RESTART", "a_transfer_survives_whatever_the_agent_does", transfer),
    Case::new(
        "RESUME",
        "a_connection_that_the_table_lost_goes_on_with_its_pod",
        resume,
    ),
    Case::new("MOVE", "another_node_chooses_the_same_pod_for_a_tuple", moved),
];

fn never_vanish(lab: &Lab, family: Family) -> Result<String> {
    let service = lab.service(family);
    service.apply(&[lab.pod(1, 1).ready(family), lab.pod(2, 1).ready(family)])?;
    let node = lab.node(1);
    let few = scaled(20, 3) as u64;
    let hammer = Hammer::start(&lab.wires.client, service.node_port(1))?;
    hammer.wait_for(few)?;
    node.stop()?;
    hammer.wait_for(few).context("while no agent runs")?;
    node.start()?;
    hammer.wait_for(few).context("after a restart")?;
    node.kill()?;
    hammer.wait_for(few).context("after the agent was killed")?;
    node.start()?;
    hammer.wait_for(few).context("after the next start")?;
    let made = hammer.finish()?;
    let counted = service.connects(1)?;
    ensure!(counted >= made, "{made} connections were made, {counted} are counted");
    Ok(format!(
        "{made} connections beside a stop, a kill and two starts, none failed"
    ))
}

fn draining(lab: &Lab, family: Family) -> Result<String> {
    let service = lab.service(family);
    let (leaving, staying) = (lab.pod(1, 1), lab.pod(1, 2));
    service.apply(&[leaving.ready(family), staying.ready(family)])?;
    // A connection that the leaving pod keeps.
    let mut talk = None;
    for _ in 0..40 {
        let open = lab.outside().open(service.node_port(1))?;
        if open.met.name == leaving.name {
            talk = Some(open);
            break;
        }
    }
    let mut talk = talk.context("none of 40 connections met one of two pods")?;
    service.apply(&[leaving.draining(family), staying.ready(family)])?;
    lab.node(1).kill()?;
    lab.node(1).start()?;
    talk.say("still here")
        .context("the connection of the terminating pod")?;
    for met in lab.outside().dial_many(service.node_port(1), scaled(12, 6))? {
        ensure!(met.name == staying.name, "{met:?}");
    }
    service.apply(&[leaving.ready(family), staying.ready(family)])?;
    let met = lab.outside().dial_many(service.node_port(1), scaled(30, 16))?;
    ensure!(
        met.iter().any(|met| met.name == leaving.name),
        "a pod that came back gets nothing"
    );
    Ok("no new connection while terminating, some when ready again".to_owned())
}

fn transfer(lab: &Lab, family: Family) -> Result<String> {
    let node = lab.node(1);
    let len = scaled(2_000_000, 200_000);
    for pod in [lab.pod(1, 1), lab.pod(2, 1)] {
        let service = lab.service(family).load_balancer("VIP");
        let other = lab.pod(1, 2);
        service.apply(&[pod.ready(family)])?;
        let mut talk = lab.outside().open(service.routed())?;
        let own = talk.own()?;
        let before = (node.flow(Transport::Tcp, own, service.routed())?).context("the flow")?;
        let steps: [(&str, &dyn Fn() -> Result<()>); 4] = [
            ("the agent stops", &|| node.stop()),
            ("it starts again", &|| node.start()),
            ("it is killed and starts", &|| node.kill().and_then(|()| node.start())),
            ("other endpoints take over", &|| {
                service.apply(&[pod.draining(family), other.ready(family)])
            }),
        ];
        for (what, step) in steps {
            talk.transfer(len, step)
                .with_context(|| format!("{what}, {}", pod.name))?;
        }
        let after = (node.flow(Transport::Tcp, own, service.routed())?).context("the flow")?;
        ensure!(after.start_ns == before.start_ns, "{after:?} after {before:?}");
        let met = lab.outside().dial(service.routed())?;
        ensure!(met.name == other.name, "{met:?}");
        talk.close()?;
    }
    Ok(format!(
        "four transfers of {len} bytes to each of two pods, one flow each"
    ))
}

fn resume(lab: &Lab, family: Family) -> Result<String> {
    let node = lab.node(1);
    let service = lab.service(family).load_balancer("VIP");
    service.apply(&[lab.pod(1, 1).ready(family), lab.pod(1, 2).ready(family)])?;
    let mut talks = Vec::new();
    for _ in 0..scaled(10, 4) {
        talks.push(lab.outside().open(service.routed())?);
    }
    // As after a reboot of everything but the connections: no programs, no flows.
    node.wipe()?;
    // The kernel takes programs off a device a little after their last holder is gone.
    until("nobody to translate", || unserved(&lab.outside(), service.routed()))?;
    node.start()?;
    lab.outside().dial(service.routed()).context("with fresh tables")?;
    let resumed = node.counted("resumed")?;
    for talk in &mut talks {
        talk.transfer(20_000, || Ok(()))
            .with_context(|| format!("with {:?}", talk.met))?;
        let flow = node.flow(Transport::Tcp, talk.own()?, service.routed())?;
        let flow = flow.context("the flow that was taken up")?;
        ensure!(flow.flags & flag::RESUMED != 0 && flow.is_answered(), "{flow:?}");
    }
    node.wait_counted("resumed", resumed + talks.len() as u64)?;
    let count = talks.len();
    for talk in talks {
        talk.close()?;
    }
    Ok(format!("{count} connections went on with the pods that they had"))
}

fn moved(lab: &Lab, family: Family) -> Result<String> {
    let service = lab.service(family).load_balancer("VIP");
    let endpoints: Vec<_> = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1)]
        .map(|(node, n)| lab.pod(node, n).ready(family))
        .into();
    service.apply(&endpoints)?;
    let mut met = Vec::new();
    for _ in 0..scaled(16, 6) {
        met.push((plan::at(plan::client(family, 1), lab.next_port()), String::new()));
    }
    for node in 1..=plan::NODES {
        service.route_to(&[node])?;
        for (from, before) in &mut met {
            let talk = lab.outside().from(*from).open(service.routed())?;
            let name = talk.met.name.clone();
            talk.have_closed()?;
            ensure!(
                before.is_empty() || *before == name,
                "{from} met {name} through node {node}, and {before} before"
            );
            *before = name;
        }
    }
    Ok(format!(
        "{} tuples met the same pods through each of three nodes",
        met.len()
    ))
}
