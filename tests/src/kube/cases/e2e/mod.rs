//! The behaviours of Kubernetes' own tests (sig-network, Services), each by its name.
//!
//! Every change is made at the API server and waited for there and in the agents (`Cluster::settle`); what clients meet afterwards
//! must be right at the first look. Each Service serves TCP and UDP at one port, unless its case says otherwise.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::{Case, Stage};
use crate::{
    kube::stage::{From, StagePod, StageService},
    lab::{
        dial::{Failure, silence},
        plan::{self, Family},
        serve::Met,
    },
};

mod affinity;
mod basics;
mod datagrams;
mod frontends;
mod lifecycle;
mod outages;
mod policy;
mod sources;
mod terminating;
mod types;

/// The cases.
pub fn all() -> Vec<Case> {
    [
        basics::CASES,
        sources::CASES,
        frontends::CASES,
        types::CASES,
        affinity::CASES,
        lifecycle::CASES,
        policy::CASES,
        terminating::CASES,
        datagrams::CASES,
        outages::CASES,
    ]
    .concat()
}

/// Has a Service serve TCP and UDP.
fn both(spec: &mut Value) {
    spec["ports"] = Stage::both_ports();
}

/// Has a Service serve TCP and UDP, at node ports too.
fn node_ports(spec: &mut Value) {
    both(spec);
    spec["type"] = json!("NodePort");
}

/// Has a Service serve TCP and UDP as a load balancer's.
fn load_balancer(spec: &mut Value) {
    both(spec);
    spec["type"] = json!("LoadBalancer");
}

/// How many dials leave out none of so many pods: chance does so in less than one of 1,000,000 runs.
fn enough(pods: usize) -> usize {
    match pods {
        0 | 1 => 3,
        2 => 24,
        more => 14 * more + 4,
    }
}

/// Connections to an address must meet exactly these Pods, each of them, and at once; returns whom they met.
fn connects(stage: &Stage<'_>, from: &From<'_>, target: SocketAddr, pods: &[&StagePod]) -> Result<Vec<Met>> {
    let met = stage.dial_many(from, target, enough(pods.len()));
    of_all(met, pods).with_context(|| format!("connections of {from} to {target}"))
}

/// Datagrams to an address, each from a socket of its own, must meet exactly these Pods, each of them, and at once.
fn asks(stage: &Stage<'_>, from: &From<'_>, target: SocketAddr, pods: &[&StagePod]) -> Result<Vec<Met>> {
    let met = stage.through(from, |dialer| dialer.ask_many(target, enough(pods.len())))?;
    of_all(met, pods).with_context(|| format!("datagrams of {from} to {target}"))
}

fn of_all(met: Result<Vec<Met>>, pods: &[&StagePod]) -> Result<Vec<Met>> {
    let met = met?;
    let wanted: BTreeSet<&str> = pods.iter().map(|pod| &*pod.name).collect();
    let found: BTreeSet<&str> = met.iter().map(|met| &*met.name).collect();
    ensure!(found == wanted, "they met {found:?} and not {wanted:?}");
    Ok(met)
}

/// Connections and datagrams must meet exactly these Pods, each of them, and at once; returns whom they met.
fn served(stage: &Stage<'_>, from: &From<'_>, target: SocketAddr, pods: &[&StagePod]) -> Result<Vec<Met>> {
    let mut met = connects(stage, from, target, pods)?;
    met.extend(asks(stage, from, target, pods)?);
    Ok(met)
}

/// A connection and a datagram must fail so, and long before a SYN would be repeated.
fn fail_at_once(stage: &Stage<'_>, from: &From<'_>, target: SocketAddr, how: Failure) -> Result<()> {
    let limit = Duration::from_millis(900);
    let began = Instant::now();
    let (dialled, asked) = stage.through(from, |dialer| {
        let dialer = dialer.within(limit);
        (dialer.dial(target), dialer.ask(target))
    })?;
    ensure!(dialled == Err(how), "a connection of {from} to {target}: {dialled:?}");
    ensure!(asked == Err(how), "a datagram of {from} to {target}: {asked:?}");
    ensure!(
        began.elapsed() < limit,
        "{target} took {:?} to fail for {from}",
        began.elapsed()
    );
    Ok(())
}

/// A connection and a datagram must be refused at once.
fn refused(stage: &Stage<'_>, from: &From<'_>, target: SocketAddr) -> Result<()> {
    fail_at_once(stage, from, target, Failure::Refused)
}

/// What comes of a connection and of a datagram to each address, in turn; all are on their way at the same time.
fn tried(
    stage: &Stage<'_>,
    from: &From<'_>,
    targets: &[SocketAddr],
) -> Result<Vec<(SocketAddr, Result<Met, Failure>)>> {
    stage.through(from, |dialer| {
        let dialer = dialer.within(silence());
        thread::scope(|scope| {
            let dials: Vec<_> = targets
                .iter()
                .flat_map(|target| {
                    [
                        (*target, scope.spawn(move || dialer.dial(*target))),
                        (*target, scope.spawn(move || dialer.ask(*target))),
                    ]
                })
                .collect();
            dials
                .into_iter()
                .map(|(target, dial)| match dial.join() {
                    Ok(met) => Ok((target, met)),
                    Err(_) => bail!("a thread that dialled panicked"),
                })
                .collect()
        })
    })?
}

/// Neither a connection nor a datagram to any of these addresses may get any answer.
fn silent(stage: &Stage<'_>, from: &From<'_>, targets: &[SocketAddr]) -> Result<()> {
    for (target, met) in tried(stage, from, targets)? {
        ensure!(met == Err(Failure::Silent), "{from} to {target}: {met:?} is no silence");
    }
    Ok(())
}

/// Nobody must serve these addresses: whatever the network does with them, no pod answers.
fn unserved(stage: &Stage<'_>, from: &From<'_>, targets: &[SocketAddr]) -> Result<()> {
    for (target, met) in tried(stage, from, targets)? {
        ensure!(
            matches!(met, Err(Failure::Silent | Failure::Unreachable | Failure::Refused)),
            "{target} should lead {from} nowhere, and met {met:?}"
        );
    }
    Ok(())
}

/// A Service's cluster addresses, of each family.
fn clusters(stage: &Stage<'_>, service: &StageService) -> Result<Vec<SocketAddr>> {
    stage.families().iter().map(|family| service.cluster(*family)).collect()
}

/// How many addresses and ports the agent of a node serves for a Service; none where it does not know it.
fn held(stage: &Stage<'_>, node: u8, service: &StageService) -> Result<usize> {
    let services = stage.cluster.node(node).ask(crate::agent::Agent::services)?;
    Ok(services
        .iter()
        .filter(|one| one.namespace == "default" && one.name == service.name)
        .map(|one| one.frontends.len())
        .sum())
}

/// No agent may serve anything for a Service.
fn held_nowhere(stage: &Stage<'_>, service: &StageService) -> Result<()> {
    for node in 1..=plan::NODES {
        let found = held(stage, node, service)?;
        ensure!(found == 0, "node {node} serves {found} addresses of {}", service.name);
    }
    Ok(())
}

/// Deletes a Service, and returns when all agents know.
fn delete(stage: &Stage<'_>, service: &StageService) -> Result<()> {
    stage.cluster.api().delete(&service.path(), None)?;
    stage.cluster.settle()
}

/// Changes a Service's labels; null removes one.
fn relabel(stage: &Stage<'_>, service: &StageService, labels: &Value) -> Result<()> {
    let change = json!({"metadata": {"labels": labels}});
    stage.cluster.api().patch(&service.path(), &change)?;
    stage.cluster.settle()
}

/// A ready Pod with its node's own network.
fn host_pod(stage: &Stage<'_>, node: u8) -> Result<StagePod> {
    let mut object = stage.pod_object(node);
    object["spec"]["hostNetwork"] = json!(true);
    stage.make_pod(&object)
}

/// A Pod with its node's own network that no Service of the case selects.
fn host_client(stage: &Stage<'_>, node: u8) -> Result<StagePod> {
    let mut object = stage.pod_object(node);
    object["spec"]["hostNetwork"] = json!(true);
    object["metadata"]["labels"] = json!({"role": "client"});
    stage.make_pod(&object)
}

/// Address `n` of those that the router sends to node 1, which no node has.
fn routed(family: Family, n: u8) -> IpAddr {
    plan::routed(family, n)
}

/// The word on a case that ran in every family of its stack.
fn in_families(stage: &Stage<'_>, what: &str) -> String {
    let families: Vec<String> = stage.families().iter().map(ToString::to_string).collect();
    format!("{what}, {}", families.join(" and "))
}
