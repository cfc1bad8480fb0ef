//! Pods that terminate, and connections that end before their time.

use anyhow::{Context, Result, ensure};
use lb_common::flow::sent;

use super::Case;
use crate::{
    agent::until,
    lab::{
        Lab,
        plan::{self, Family},
        state::Transport,
    },
    runner::scaled,
};

/// The cases.
pub const CASES: &[Case] = &[
    Case::new("C20", "connections_to_a_terminating_pod_are_left_alone", left_alone),
    Case::new("K6", "no_syn_goes_to_a_terminating_pod", no_syn),
    Case::new("K9", "a_reset_ends_its_own_flow_in_both_directions", resets),
];

fn left_alone(lab: &Lab, family: Family) -> Result<String> {
    let service = lab.service(family).load_balancer("VIP");
    let pods = [lab.pod(1, 1), lab.pod(2, 1)];
    let other = lab.pod(1, 2);
    let mut talks = Vec::new();
    for pod in pods {
        service.apply(&[pod.ready(family)])?;
        let talk = lab.outside().open(service.routed())?;
        ensure!(talk.met.name == pod.name, "{:?}", talk.met);
        talks.push(talk);
    }
    for (what, endpoints) in [
        ("draining", pods.map(|pod| pod.draining(family))),
        ("ending", pods.map(|pod| pod.ending(family))),
    ] {
        let mut all = endpoints.to_vec();
        all.push(other.ready(family));
        service.apply(&all)?;
        for talk in &mut talks {
            talk.transfer(50_000, || Ok(()))
                .with_context(|| format!("{what}: {:?}", talk.met))?;
        }
        for met in lab.outside().dial_many(service.routed(), 6)? {
            ensure!(met.name == other.name, "{what}: a new connection went to {met:?}");
        }
    }
    for talk in talks {
        talk.close()?;
    }
    service.wait_connects(1, 14)?;
    Ok("transfers go on while draining and while ending; new connections go elsewhere".to_owned())
}

fn no_syn(lab: &Lab, family: Family) -> Result<String> {
    let service = lab.service(family).load_balancer("VIP");
    let (leaving, staying) = (lab.add_pod(1)?, lab.pod(1, 1));
    service.apply(&[leaving.ready(family), staying.ready(family)])?;
    // Tuples that have met the pod that will leave, and have just closed.
    let mut ports = Vec::new();
    for _ in 0..64 {
        let port = lab.next_port();
        let from = plan::at(plan::client(family, 1), port);
        let talk = until("the wires to the new pod", || {
            Ok(lab.outside().from(from).open(service.routed())?)
        })?;
        let name = talk.met.name.clone();
        talk.have_closed()?;
        if name == leaving.name {
            ports.push(from);
        }
        if ports.len() == scaled(12, 6) {
            break;
        }
    }
    ensure!(!ports.is_empty(), "none of 64 connections met {}", leaving.name);
    service.apply(&[leaving.draining(family), staying.ready(family)])?;
    let accepted = leaving.accepted();
    for _ in 0..2 {
        for from in &ports {
            let talk = lab.outside().from(*from).open(service.routed())?;
            ensure!(talk.met.name == staying.name, "a reused tuple went to {:?}", talk.met);
            talk.have_closed()?;
        }
    }
    lab.outside().dial_many(service.routed(), scaled(30, 10))?;
    ensure!(leaving.accepted() == accepted, "the terminating pod got connections");
    // Where it is the only one left, it serves.
    service.apply(&[leaving.draining(family)])?;
    let met = lab.outside().dial(service.routed())?;
    ensure!(met.name == leaving.name, "the last pod terminates and serves: {met:?}");
    Ok(format!("{} tuples that had met it, and new ones", ports.len()))
}

fn resets(lab: &Lab, family: Family) -> Result<String> {
    let mut flows = 0;
    for pod in [lab.pod(1, 1), lab.pod(2, 1)] {
        let service = lab.service(family).load_balancer("VIP");
        service.apply(&[pod.ready(family)])?;
        let target = service.routed();
        let mut bystander = lab.outside().open(target)?;
        for by_client in [false, true] {
            let from = plan::at(plan::client(family, 1), lab.next_port());
            let talk = lab.outside().from(from).open(target)?;
            let before = (lab.node(1).flow(Transport::Tcp, from, target)?).context("an open connection's flow")?;
            ensure!(!before.is_closed(), "{before:?}");
            if by_client {
                talk.reset()?;
            } else {
                talk.have_reset()?;
            }
            let after = until("the reset to be seen", || {
                let flow = (lab.node(1).flow(Transport::Tcp, from, target)?).context("the flow")?;
                ensure!(flow.is_closed(), "{flow:?}");
                Ok(flow)
            })?;
            ensure!(after.start_ns == before.start_ns, "{after:?} after {before:?}");
            let reset = (after.client_sent & sent::RST != 0, after.backend_sent & sent::RST != 0);
            ensure!(reset == (by_client, !by_client), "who reset: {after:?}");
            // The tuple is free for a new connection at once.
            let talk = lab.outside().from(from).open(target)?;
            let anew = (lab.node(1).flow(Transport::Tcp, from, target)?).context("the new flow")?;
            ensure!(
                anew.start_ns > before.start_ns && !anew.is_closed(),
                "{anew:?} after {before:?}"
            );
            talk.have_closed()?;
            bystander
                .say("still here")
                .context("another connection of the client")?;
            flows += 1;
        }
        let own = bystander.own()?;
        let other = (lab.node(1).flow(Transport::Tcp, own, target)?).context("the other flow")?;
        ensure!(!other.is_closed(), "a reset closed another flow: {other:?}");
    }
    Ok(format!(
        "{flows} flows reset by either side, their tuples used again at once"
    ))
}
