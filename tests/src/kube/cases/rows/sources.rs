//! Whose address a server sees (C17).

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::{BOTH, Case, Over, Scene, Stage, port_over, routed};
use crate::{
    kube::stage::From,
    lab::{dial::patience, plan, state::Transport},
};

/// The cases.
pub const CASES: &[Case] = &[
    Case::row("C17", "sources_from_outside_are_kept_but_towards_other_nodes", outside),
    Case::row("C17", "sources_from_inside_are_kept", inside),
];

fn outside(stage: &Stage<'_>) -> Result<String> {
    const N: u8 = 30;
    let pod = stage.pod(1)?;
    let service = stage.balancer(N, |_| {})?;
    stage.have(&service, &[&pod])?;
    for (node, kept) in [(1, true), (3, false)] {
        stage.route(N, &[node])?;
        for family in stage.families() {
            let source = if kept {
                plan::client(*family, 1)
            } else {
                plan::node(*family, node)
            };
            for target in [routed(*family, N), port_over(&service, *family, node, Over::Tcp)?] {
                let talk = stage
                    .cluster
                    .outside()
                    .open(target)
                    .with_context(|| format!("{target}"))?;
                let (own, met) = (talk.own()?, &talk.met);
                ensure!(met.peer.ip() == source && met.name == pod.name, "{met:?} by {target}");
                ensure!((met.peer == own) == kept, "the port too: {met:?} of {own}");
                let flow = stage.cluster.node(node).flow(Transport::Tcp, own, target)?;
                let flow = flow.context("the flow of an open connection")?;
                ensure!(flow.is_answered() && !flow.is_closed(), "{flow:?}");
                ensure!((flow.source_port.get() == 0) == kept, "{flow:?}");
            }
            let met = stage.attempt(&From::Outside, Over::Udp, routed(*family, N), patience())??;
            ensure!(met.peer.ip() == source, "{met:?}");
        }
        stage.wait_connects(node, &service, 3 * stage.families().len() as u64)?;
    }
    Ok("the client's to a pod of the node, the node's own to one elsewhere; TCP, UDP and their flows".to_owned())
}

fn inside(stage: &Stage<'_>) -> Result<String> {
    let pods = stage.pods(&[1, 2])?;
    let spec = {
        let mut spec = stage.two_ports();
        spec["type"] = json!("NodePort");
        spec
    };
    let service = stage.named_service("s", spec, &json!({}))?;
    let client = stage.client(1)?;
    let all: Vec<_> = pods.iter().collect();
    stage.have(&service, &all)?;
    let mut own = 0;
    for family in stage.families() {
        for over in BOTH {
            for target in [service.cluster(*family)?, port_over(&service, *family, 1, over)?] {
                // A pod that selects none, one that may meet itself, and the node.
                let clients = [
                    (From::Pod(&client), client.place.ip(*family)),
                    (From::Pod(&pods[0]), pods[0].place.ip(*family)),
                    (From::Node(1), plan::node(*family, 1)),
                ];
                for (from, source) in clients {
                    for _ in 0..8 {
                        let met = stage.attempt(&from, over, target, patience())?;
                        let met = met.with_context(|| format!("from {from}, {over:?} to {target}"))?;
                        // A node reaches its own pods from its end of their links.
                        let from_link = matches!(from, From::Node(_))
                            && met.name == pods[0].name
                            && met.peer.ip() == plan::pod_gateway(*family, 1);
                        ensure!(met.peer.ip() == source || from_link, "from {from}: {met:?}");
                        own += u32::from(met.own.ip() == source);
                    }
                }
            }
        }
    }
    ensure!(own > 0, "no pod met itself");
    stage.wait_connects(1, &service, 96 * stage.families().len() as u64)?;
    Ok(format!(
        "96 connections and datagrams a family, {own} of them of a pod to itself"
    ))
}
