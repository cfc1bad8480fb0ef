//! UDP of one client that keeps its source port: it goes on when its server is another.
//!
//! Inside the cluster the socket that stays open is not connected, and a connected one is made anew for each datagram, as
//! Kubernetes' own tests do: one that stays connected to a cluster address belongs to the pod that it was connected to.

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::{Case, Stage, host_client, in_families, node_ports};
use crate::{
    agent::until,
    kube::{
        kubelet::READY,
        stage::{Conditions, From, StagePod, StageService},
    },
    lab::{
        dial::{Datagrams, Dialer, Failure, silence},
        plan::{self, Family},
        serve::Met,
    },
};

/// The cases.
pub(super) const CASES: &[Case] = &[
    Case::e2e("udp_preserved_when_a_server_pod_cycles_from_a_pod", |stage| {
        cycles(stage, Kind::Pod)
    }),
    Case::e2e(
        "udp_preserved_when_a_server_pod_cycles_from_a_host_network_pod",
        |stage| cycles(stage, Kind::HostNetwork),
    ),
    Case::e2e("udp_preserved_when_a_server_pod_cycles_through_a_node_port", |stage| {
        cycles(stage, Kind::NodePort)
    }),
    Case::e2e(
        "udp_preserved_when_unready_endpoints_become_ready_from_a_pod",
        |stage| becomes_ready(stage, Kind::Pod),
    ),
    Case::e2e(
        "udp_preserved_when_unready_endpoints_become_ready_from_a_host_network_pod",
        |stage| becomes_ready(stage, Kind::HostNetwork),
    ),
    Case::e2e(
        "udp_preserved_when_unready_endpoints_become_ready_through_a_node_port",
        |stage| becomes_ready(stage, Kind::NodePort),
    ),
];

/// The source port of the socket that stays open.
const STAYING: u16 = 21_001;
/// The source port of sockets that are made anew for each datagram, connected to the Service.
const ANEW: u16 = 21_002;

/// Who sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Pod,
    HostNetwork,
    NodePort,
}

/// A client with its source ports, in each family.
struct Client<'s> {
    stage: &'s Stage<'s>,
    kind: Kind,
    pod: Option<StagePod>,
    senders: Vec<(Family, std::net::SocketAddr, Datagrams)>,
}

impl<'s> Client<'s> {
    fn new(stage: &'s Stage<'s>, kind: Kind, service: &StageService) -> Result<Self> {
        let pod = match kind {
            Kind::Pod => Some(stage.client(3)?),
            Kind::HostNetwork => Some(host_client(stage, 3)?),
            Kind::NodePort => None,
        };
        let mut client = Self {
            stage,
            kind,
            pod,
            senders: Vec::new(),
        };
        for family in stage.families() {
            let target = match kind {
                Kind::NodePort => service.node_port(*family, 1)?,
                _ => service.cluster(*family)?,
            };
            let source = plan::at(client.ip(*family), STAYING);
            let socket = client.dials(|dialer| {
                let dialer = dialer.from(source).within(silence());
                // From outside packets are translated, whatever the socket is.
                if kind == Kind::NodePort {
                    dialer.datagrams(target)
                } else {
                    dialer.unconnected(target)
                }
            })?;
            client.senders.push((*family, target, socket?));
        }
        Ok(client)
    }

    fn ip(&self, family: Family) -> std::net::IpAddr {
        match &self.pod {
            Some(pod) => pod.place.ip(family),
            None => plan::client(family, 1),
        }
    }

    fn dials<T>(&self, work: impl FnOnce(Dialer<'_>) -> T) -> Result<T> {
        let from = self.pod.as_ref().map_or(From::Outside, From::Pod);
        self.stage.through(&from, work)
    }

    /// Sends one datagram from each source port in each family; gives what came of them.
    fn send(&self) -> Result<Vec<Result<Met, Failure>>> {
        let mut all = Vec::new();
        for (family, target, socket) in &self.senders {
            all.push(socket.ask("still there?"));
            let source = plan::at(self.ip(*family), ANEW);
            all.push(self.dials(|dialer| dialer.from(source).within(silence()).ask(*target))?);
        }
        Ok(all)
    }

    /// Every datagram must meet a pod, and now.
    fn meets(&self, pod: &StagePod) -> Result<()> {
        for _ in 0..3 {
            for met in self.send()? {
                let met = met.with_context(|| format!("a datagram to {}", pod.name))?;
                ensure!(met.name == pod.name, "{met:?} and not {}", pod.name);
                // Through a node port of another node, the node stands before the client.
                let sources = Family::ALL.map(|family| {
                    if self.kind == Kind::NodePort && pod.place.node != 1 {
                        plan::node(family, 1)
                    } else {
                        self.ip(family)
                    }
                });
                ensure!(sources.contains(&met.peer.ip()), "{met:?}");
            }
        }
        Ok(())
    }
}

fn cycles(stage: &Stage<'_>, kind: Kind) -> Result<String> {
    let service = stage.service(node_ports)?;
    let mut current = stage.pod(1)?;
    stage.have(&service, &[&current])?;
    let client = Client::new(stage, kind, &service)?;
    client.meets(&current)?;
    let chosen_anew = stage.cluster.node(1).counted("reresolved")?;
    for (turn, node) in [2, 1, 3].into_iter().enumerate() {
        let next = stage.pod(node)?;
        stage.have(&service, &[&current, &next])?;
        let met = client.send()?;
        for met in &met {
            ensure!(met.is_ok(), "while both are there: {met:?}");
        }
        if turn == 1 {
            // One that is told to go and takes its time.
            stage.terminate(&current)?;
            stage.wait_conditions(&service, &current, Conditions::DRAINING)?;
            stage.cluster.settle()?;
            for met in client.send()? {
                ensure!(met.is_ok(), "while one terminates: {met:?}");
            }
        }
        stage.end(&current)?;
        // The client sends on, while the news travels.
        until("the next pod", || {
            for met in client.send()? {
                let met = met?;
                ensure!(met.name == next.name, "{met:?}");
            }
            Ok(())
        })?;
        stage.have(&service, &[&next])?;
        client.meets(&next)?;
        current = next;
    }
    if kind == Kind::NodePort {
        // Two source ports in each family, three times.
        let flows = 2 * stage.families().len() as u64;
        (stage.cluster.node(1)).wait_counted("reresolved", chosen_anew + 3 * flows)?;
    }
    if let (Kind::HostNetwork, Some(pod)) = (kind, &client.pod) {
        stage.end(pod)?;
    }
    Ok(in_families(stage, "three times another pod, the same two source ports"))
}

fn becomes_ready(stage: &Stage<'_>, kind: Kind) -> Result<String> {
    let service = stage.service(node_ports)?;
    let mut object = stage.pod_object(1);
    object["metadata"]["annotations"] = json!({READY: "false"});
    let pod = stage.make_pod(&object)?;
    let unready = Conditions {
        ready: false,
        serving: false,
        terminating: false,
    };
    stage.wait_conditions(&service, &pod, unready)?;
    stage.cluster.settle()?;
    let client = Client::new(stage, kind, &service)?;
    for _ in 0..3 {
        for met in client.send()? {
            ensure!(met == Err(Failure::Refused), "before any is ready: {met:?}");
        }
    }
    stage.set_ready(&pod, true)?;
    until("the pod to be met", || {
        for met in client.send()? {
            met?;
        }
        Ok(())
    })?;
    stage.have(&service, &[&pod])?;
    client.meets(&pod)?;
    // And once more on the same sockets.
    stage.set_ready(&pod, false)?;
    stage.have(&service, &[])?;
    for met in client.send()? {
        ensure!(met == Err(Failure::Refused), "when none is ready any more: {met:?}");
    }
    stage.set_ready(&pod, true)?;
    stage.have(&service, &[&pod])?;
    client.meets(&pod)?;
    if let (Kind::HostNetwork, Some(pod)) = (kind, &client.pod) {
        stage.end(pod)?;
    }
    Ok(in_families(
        stage,
        "refused while unready, met when ready, twice, from the same two source ports",
    ))
}
