//! The contract, row by row, against the real control plane.
//!
//! Here is what the rows share: Services with a UDP port besides, addresses of a load balancer in every family, and how the API
//! server's state and the agents' are looked at. Every check after [`Scene::settle`] is a strict one: what must hold then holds at
//! once, and is not waited for.

pub mod affinity;
pub mod annotation;
pub mod conditions;
pub mod ending;
pub mod endpoints;
pub mod frontends;
pub mod health;
pub mod policy;
pub mod selection;
pub mod sources;
pub mod start;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use lb_user::view::BackendState;
use serde_json::{Value, json};

use super::{Case, Stage};
use crate::{
    agent::until,
    kube::stage::{From, PORT, StagePod, StageService},
    lab::{
        complain,
        dial::Failure,
        node::LabNode,
        plan::{self, Family},
        serve::Met,
    },
};

/// How long nobody must answer where the drop is counted besides: shorter than a SYN is repeated.
const SILENCE: Duration = Duration::from_millis(150);
/// How long an answer of the kind "at once" may take: shorter than a SYN is repeated.
const AT_ONCE: Duration = Duration::from_millis(900);
/// Connections after which each of three pods was met, but for one chance in 100,000; of two, one in 4 billion.
const MANY: usize = 32;

/// Over which protocol somebody dials.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Over {
    Tcp,
    Udp,
}

const BOTH: [Over; 2] = [Over::Tcp, Over::Udp];

/// What the rows do on a stage.
trait Scene {
    /// The `spec` of a Service of this case's Pods: TCP and UDP port 80.
    fn two_ports(&self) -> Value;
    /// A `spec` of both ports without a selector: its slices are made by hand.
    fn by_hand(&self) -> Value;
    /// A load balancer's Service with the addresses `routed(family, n)` of its families, which the router sends to node 1.
    fn balancer(&self, n: u8, change: impl FnOnce(&mut Value)) -> Result<StageService>;
    /// Gives a load balancer's Service the addresses `routed(family, n)` of its families.
    fn give_addresses(&self, service: &mut StageService, n: u8, ip_mode: &str) -> Result<()>;
    /// Has the router send the addresses `routed(family, n)` to nodes.
    fn route(&self, n: u8, nodes: &[u8]) -> Result<()>;
    /// Waits until some of a Service's endpoints in the API server are as wanted, and every agent has what the API server has.
    fn slices_say(&self, service: &StageService, what: &str, wanted: impl Fn(&[Value]) -> bool) -> Result<()>;
    /// Connections must meet exactly these pods, each of them, now.
    fn meet(&self, from: &From<'_>, target: SocketAddr, pods: &[&StagePod]) -> Result<()>;
    /// One attempt over a protocol, which may take so long.
    fn attempt(&self, from: &From<'_>, over: Over, target: SocketAddr, limit: Duration)
    -> Result<Result<Met, Failure>>;
    /// Both protocols must fail as given, at once.
    fn fail(&self, from: &From<'_>, target: SocketAddr, how: Failure) -> Result<()>;
    /// Nobody must answer over a protocol.
    fn silent(&self, from: &From<'_>, over: Over, target: SocketAddr) -> Result<()>;
    /// Nobody must serve an address: silence, or a word that it cannot be reached.
    fn unserved(&self, from: &From<'_>, target: SocketAddr) -> Result<()>;
    /// The backends that may get connections by a node's agent must be exactly these pods, in each family.
    fn holds(&self, node: u8, service: &StageService, pods: &[&StagePod]) -> Result<()>;
}

impl Scene for Stage<'_> {
    fn two_ports(&self) -> Value {
        let mut spec = self.service_spec();
        spec["ports"] = Stage::both_ports();
        spec
    }

    fn by_hand(&self) -> Value {
        let mut spec = self.two_ports();
        spec["selector"] = Value::Null;
        spec
    }

    fn balancer(&self, n: u8, change: impl FnOnce(&mut Value)) -> Result<StageService> {
        let mut spec = self.two_ports();
        spec["type"] = json!("LoadBalancer");
        change(&mut spec);
        let mut service = self.named_service("lb", spec, &json!({}))?;
        self.give_addresses(&mut service, n, "VIP")?;
        self.route(n, &[1])?;
        Ok(service)
    }

    fn give_addresses(&self, service: &mut StageService, n: u8, ip_mode: &str) -> Result<()> {
        let families = self.families().iter();
        let ingress: Vec<Value> = families
            .map(|family| json!({"ip": plan::routed(*family, n), "ipMode": ip_mode}))
            .collect();
        give_ingress(self, service, &json!(ingress))
    }

    fn route(&self, n: u8, nodes: &[u8]) -> Result<()> {
        self.families().iter().try_for_each(|family| {
            let block = (plan::routed(*family, n), family.host_len());
            self.cluster.wires.route_to_nodes(block, nodes)
        })
    }

    fn slices_say(&self, service: &StageService, what: &str, wanted: impl Fn(&[Value]) -> bool) -> Result<()> {
        until("the endpoint controller", || {
            for family in self.families() {
                let found = endpoints(self, service, *family)?;
                ensure!(wanted(&found), "{what} in {family}: {found:?}");
            }
            Ok(())
        })?;
        self.cluster.settle()
    }

    fn meet(&self, from: &From<'_>, target: SocketAddr, pods: &[&StagePod]) -> Result<()> {
        let wanted: BTreeSet<&str> = pods.iter().map(|pod| &*pod.name).collect();
        let count = if pods.len() > 1 { MANY } else { 6 };
        let met = self
            .dial_many(from, target, count)
            .with_context(|| format!("from {from}"))?;
        let names: BTreeSet<&str> = met.iter().map(|met| &*met.name).collect();
        ensure!(
            names == wanted,
            "from {from}: {target} meets {names:?} and not {wanted:?}"
        );
        Ok(())
    }

    fn attempt(
        &self,
        from: &From<'_>,
        over: Over,
        target: SocketAddr,
        limit: Duration,
    ) -> Result<Result<Met, Failure>> {
        self.through(from, |dialer| match over {
            Over::Tcp => dialer.within(limit).dial(target),
            Over::Udp => dialer.within(limit).ask(target),
        })
    }

    fn fail(&self, from: &From<'_>, target: SocketAddr, how: Failure) -> Result<()> {
        for over in BOTH {
            let began = Instant::now();
            let met = self.attempt(from, over, target, AT_ONCE)?;
            let took = began.elapsed();
            ensure!(
                met == Err(how) && took < AT_ONCE,
                "from {from}, {over:?} to {target} is to be {how} at once, and after {took:.1?} it is {met:?}"
            );
        }
        Ok(())
    }

    fn silent(&self, from: &From<'_>, over: Over, target: SocketAddr) -> Result<()> {
        let met = self.attempt(from, over, target, SILENCE)?;
        ensure!(
            met == Err(Failure::Silent),
            "from {from}, {over:?} to {target} is to meet silence, and meets {met:?}"
        );
        Ok(())
    }

    fn unserved(&self, from: &From<'_>, target: SocketAddr) -> Result<()> {
        let met = self.attempt(from, Over::Tcp, target, SILENCE)?;
        ensure!(
            matches!(met, Err(Failure::Silent | Failure::Unreachable)),
            "from {from}: {target} is to lead nowhere, and meets {met:?}"
        );
        Ok(())
    }

    fn holds(&self, node: u8, service: &StageService, pods: &[&StagePod]) -> Result<()> {
        let families = self.families();
        let wanted: BTreeSet<IpAddr> = families
            .iter()
            .flat_map(|family| pods.iter().map(|pod| pod.place.ip(*family)))
            .collect();
        let all = backends(self, node, service)?;
        let found: BTreeSet<IpAddr> = all
            .iter()
            .filter(|(_, state)| **state == BackendState::Active)
            .map(|(addr, _)| *addr)
            .collect();
        ensure!(
            found == wanted,
            "node {node} holds {found:?} for {}, and not {wanted:?}",
            service.name
        );
        Ok(())
    }
}

/// Sets what a load balancer's Service has as ingress.
fn give_ingress(stage: &Stage<'_>, service: &mut StageService, ingress: &Value) -> Result<()> {
    let status = json!({"status": {"loadBalancer": {"ingress": ingress}}});
    service.object = stage
        .cluster
        .api()
        .patch(&format!("{}/status", service.path()), &status)?;
    Ok(())
}

/// The address `routed(family, n)` with the Services' port.
fn routed(family: Family, n: u8) -> SocketAddr {
    plan::at(plan::routed(family, n), PORT)
}

/// The node port of a Service over a protocol: its ports are those of [`Scene::two_ports`].
fn port_over(service: &StageService, family: Family, node: u8, over: Over) -> Result<SocketAddr> {
    service.node_port_of(usize::from(over == Over::Udp), family, node)
}

/// The endpoints of a family that the API server's slices of a Service have.
fn endpoints(stage: &Stage<'_>, service: &StageService, family: Family) -> Result<Vec<Value>> {
    Ok(stage
        .slices(service)?
        .iter()
        .filter(|slice| slice["addressType"] == family.kubernetes_name())
        .flat_map(|slice| slice["endpoints"].as_array().cloned().unwrap_or_default())
        .collect())
}

/// The backends that a node's agent has for a Service, over all of its ports.
fn backends(stage: &Stage<'_>, node: u8, service: &StageService) -> Result<BTreeMap<IpAddr, BackendState>> {
    let all = stage.cluster.node(node).ask(crate::agent::Agent::backends)?;
    Ok(all
        .into_iter()
        .filter(|backend| backend.service == service.name)
        .map(|backend| (backend.addr, backend.state))
        .collect())
}

/// The addresses at which a node's agent serves a Service, by kind.
fn served_at(stage: &Stage<'_>, node: u8, service: &StageService, kind: &str) -> Result<BTreeSet<IpAddr>> {
    let view = stage.cluster.node(node).ask(|agent| agent.service(&service.name))?;
    let of_kind = view.frontends.into_iter().filter(|front| front.kind == kind);
    Ok(of_kind.map(|front| front.addr).collect())
}

/// How often the socket programs of a node have told a connect something, by the name in metrics.
fn told_sockets(node: &LabNode, action: &str) -> Result<u64> {
    let metrics = node.ask(crate::agent::Agent::metrics)?;
    let hooks = ["connect4", "connect6"].into_iter();
    let counts: Vec<f64> = hooks
        .filter_map(|hook| {
            let series = format!("evenkeel_connects_total{{action=\"{action}\",hook=\"{hook}\"}}");
            metrics.get(&series).copied()
        })
        .collect();
    ensure!(!counts.is_empty(), "no socket program counts {action:?}");
    Ok(counts.iter().sum::<f64>() as u64)
}

/// Whether an agent serves a Service at all.
fn knows(stage: &Stage<'_>, node: u8, service: &StageService) -> Result<bool> {
    let all = stage.cluster.node(node).ask(crate::agent::Agent::services)?;
    Ok(all.iter().any(|view| view.name == service.name))
}

/// An endpoint of a pod for a slice made by hand.
fn endpoint(pod: &StagePod, family: Family, conditions: &Value) -> Value {
    json!({
        "addresses": [pod.place.ip(family)], "conditions": conditions,
        "nodeName": crate::lab::node::name(pod.place.node),
        "targetRef": {"kind": "Pod", "namespace": "default", "name": pod.name},
    })
}

/// A ready endpoint of a pod for a slice made by hand.
fn ready(pod: &StagePod, family: Family) -> Value {
    endpoint(
        pod,
        family,
        &json!({"ready": true, "serving": true, "terminating": false}),
    )
}

/// An agent that runs with other flags; it is stopped with the value, and the next case starts it with the ordinary ones.
struct Changed<'c>(Option<&'c LabNode>);

impl<'c> Changed<'c> {
    fn restart(node: &'c LabNode, flags: &[&str]) -> Result<Self> {
        node.stop()?;
        let changed = Self(Some(node));
        node.launch_with(flags)?;
        node.wait_ready()?;
        Ok(changed)
    }

    /// Starts it with the ordinary flags again.
    fn put_back(mut self) -> Result<()> {
        self.0.take().map_or(Ok(()), |node| node.restart_with(&[]))
    }
}

impl Drop for Changed<'_> {
    fn drop(&mut self) {
        if let Some(Err(error)) = self.0.take().map(LabNode::stop) {
            complain("an agent of the lab could not be stopped", &format!("{error:#}"));
        }
    }
}

/// All cases.
pub fn all() -> Vec<Case> {
    [
        selection::CASES,
        endpoints::CASES,
        conditions::CASES,
        policy::CASES,
        frontends::CASES,
        sources::CASES,
        affinity::CASES,
        ending::CASES,
        health::CASES,
        annotation::CASES,
        start::CASES,
    ]
    .concat()
}
