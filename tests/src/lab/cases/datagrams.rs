//! UDP flows from outside: when they stay, when they are chosen anew, and datagrams longer than a packet.

use anyhow::{Context, Result, ensure};

use super::Case;
use crate::lab::{
    Lab,
    dial::Failure,
    plan::{self, Family},
    pod::Pod,
    state::Transport,
};

/// The cases.
pub const CASES: &[Case] = &[
    Case::new("C19", "a_flow_is_chosen_anew_when_its_pod_is_gone", gone),
    Case::new("C19", "a_flow_stays_with_a_pod_that_terminates", terminating),
    Case::new(
        "C19",
        "a_flow_that_began_before_the_first_endpoint_works",
        first_endpoint,
    ),
    Case::new("C19", "a_restart_of_the_agent_purges_no_flow", restart),
    Case::new("FRAG", "long_datagrams_are_translated_in_fragments", fragments),
];

/// Two pods: the one that was met, and the other.
fn met_and_other<'p>(name: &str, a: &'p Pod, b: &'p Pod) -> (&'p Pod, &'p Pod) {
    if name == a.name { (a, b) } else { (b, a) }
}

fn gone(lab: &Lab, family: Family) -> Result<String> {
    let service = lab.service(family).load_balancer("VIP");
    let (a, b) = (lab.pod(1, 1), lab.pod(2, 1));
    service.apply(&[a.ready(family), b.ready(family)])?;
    let counted = lab.node(1).counted("reresolved")?;
    let socket = lab.outside().datagrams(service.routed())?;
    let first = socket.ask("?")?;
    ensure!(
        socket.ask("?")?.name == first.name,
        "two datagrams of a flow met two pods"
    );
    let (_, other) = met_and_other(&first.name, a, b);
    service.apply(&[other.ready(family)])?;
    for _ in 0..3 {
        let met = socket.ask("?").context("after the pod was gone")?;
        ensure!(met.name == other.name, "{met:?}");
    }
    lab.node(1).wait_counted("reresolved", counted + 1)?;
    ensure!(
        lab.node(1).counted("reresolved")? == counted + 1,
        "one flow was chosen anew more than once"
    );
    service.wait_connects(1, 2)?;
    Ok(format!("from {} to {} with the next datagram", first.name, other.name))
}

fn terminating(lab: &Lab, family: Family) -> Result<String> {
    let service = lab.service(family).load_balancer("VIP");
    let (a, b) = (lab.pod(1, 1), lab.pod(2, 1));
    service.apply(&[a.ready(family), b.ready(family)])?;
    let counted = lab.node(1).counted("reresolved")?;
    let socket = lab.outside().datagrams(service.routed())?;
    let first = socket.ask("?")?;
    let (kept, other) = met_and_other(&first.name, a, b);
    service.apply(&[kept.draining(family), other.ready(family)])?;
    for _ in 0..3 {
        let met = socket.ask("?")?;
        ensure!(met == first, "a flow left a pod that only terminates: {met:?}");
    }
    for _ in 0..8 {
        let met = lab.outside().ask(service.routed())?;
        ensure!(met.name == other.name, "a new flow went to a terminating pod: {met:?}");
    }
    ensure!(lab.node(1).counted("reresolved")? == counted, "a flow was chosen anew");
    Ok(format!(
        "the flow stayed with {}, eight new ones met {}",
        kept.name, other.name
    ))
}

fn first_endpoint(lab: &Lab, family: Family) -> Result<String> {
    let service = lab.service(family).load_balancer("VIP");
    service.apply(&[])?;
    let socket = lab.outside().datagrams(service.routed())?;
    let refused = socket.ask("?");
    ensure!(refused == Err(Failure::Refused), "without an endpoint: {refused:?}");
    service.apply(&[lab.pod(1, 1).ready(family)])?;
    let met = socket.ask("?").context("with the first endpoint")?;
    ensure!(met.name == "pod-1-1", "{met:?}");
    service.wait_connects(1, 1)?;
    Ok("refused before, served on the same socket after".to_owned())
}

fn restart(lab: &Lab, family: Family) -> Result<String> {
    let service = lab.service(family).load_balancer("VIP");
    service.apply(&[lab.pod(1, 1).ready(family), lab.pod(2, 1).ready(family)])?;
    let mut sockets = Vec::new();
    for _ in 0..6 {
        let socket = lab.outside().datagrams(service.routed())?;
        let met = socket.ask("?")?;
        let flow = lab.node(1).flow(Transport::Udp, socket.own()?, service.routed())?;
        sockets.push((socket, met, flow.context("the flow of a datagram that was answered")?));
    }
    let all_same = |when: &str| -> Result<()> {
        for (socket, before, flow) in &sockets {
            let met = socket.ask("?").with_context(|| when.to_owned())?;
            ensure!(met == *before, "{when}: {met:?}, and {before:?} before");
            let now = lab.node(1).flow(Transport::Udp, socket.own()?, service.routed())?;
            ensure!(
                now.is_some_and(|now| now.start_ns == flow.start_ns),
                "{when}: another flow, {now:?} after {flow:?}"
            );
        }
        Ok(())
    };
    lab.node(1).stop()?;
    all_same("while no agent runs")?;
    lab.node(1).start()?;
    all_same("after a restart")?;
    lab.node(1).kill()?;
    lab.node(1).start()?;
    all_same("after the agent was killed")?;
    Ok("six flows as they were, by source and pod".to_owned())
}

fn fragments(lab: &Lab, family: Family) -> Result<String> {
    let mut words = Vec::new();
    for pod in [lab.pod(1, 1), lab.pod(2, 1)] {
        let service = lab.service(family);
        service.apply(&[pod.ready(family)])?;
        let unknown = lab.node(1).counted("fragment_unknown")?;
        let socket = lab.outside().datagrams(service.node_port(1))?;
        for (len, answer) in [(8_000, 60), (60, 8_000), (8_000, 8_000)] {
            let (met, back) = socket
                .exchange_long(len, answer)
                .with_context(|| format!("{len} bytes to {}, {answer} back", pod.name))?;
            ensure!(met.name == pod.name && met.len == Some(len), "{met:?} of {len} bytes");
            ensure!(back >= answer, "{back} of {answer} bytes came back");
            let source = if pod.node == 1 {
                plan::client(family, 1)
            } else {
                plan::node(family, 1)
            };
            ensure!(met.peer.ip() == source, "{met:?}");
        }
        ensure!(
            lab.node(1).counted("fragment_unknown")? == unknown,
            "fragments without a first one were seen"
        );
        service.wait_connects(1, 1)?;
        words.push(pod.name.clone());
    }
    Ok(format!("8,000 bytes there and back, {}", words.join(" and ")))
}
