//! Endpoints that terminate: what load balancers are told of them, and when they are fallen back to.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::{Case, Stage, delete, fail_at_once, in_families, load_balancer, refused, routed, served, silent};
use crate::{
    agent::until,
    kube::stage::{Conditions, From, PORT, StagePod, StageService},
    lab::{
        dial::Failure,
        plan::{self, Family},
    },
};

/// The cases.
pub(super) const CASES: &[Case] = &[
    Case::e2e("health_check_node_port_with_only_terminating_endpoints", health),
    Case::e2e("fallback_to_terminating_endpoints_internal_cluster", internal_cluster),
    Case::e2e("fallback_to_terminating_endpoints_internal_local", internal_local),
    Case::e2e("fallback_to_terminating_endpoints_external_cluster", external_cluster),
    Case::e2e("fallback_to_terminating_endpoints_external_local", external_local),
];

/// A load balancer's Service with an address of the first family, under a policy for both kinds of traffic.
fn balanced(stage: &Stage<'_>, internal: &str, external: &str) -> Result<StageService> {
    let mut service = stage.service(|spec| {
        load_balancer(spec);
        spec["internalTrafficPolicy"] = json!(internal);
        spec["externalTrafficPolicy"] = json!(external);
    })?;
    stage.give_address(&mut service, routed(stage.families()[0], 205), "VIP")?;
    Ok(service)
}

/// Begins pods' termination, and returns when agents know them as terminating and serving.
fn drain(stage: &Stage<'_>, service: &StageService, pods: &[&StagePod]) -> Result<()> {
    for pod in pods {
        stage.terminate(pod)?;
    }
    for pod in pods {
        stage.wait_conditions(service, pod, Conditions::DRAINING)?;
    }
    stage.cluster.settle()
}

/// Has a terminating pod fail its probe, and returns when agents know.
fn fail_probe(stage: &Stage<'_>, service: &StageService, pod: &StagePod) -> Result<()> {
    stage.set_ready(pod, false)?;
    let ended = Conditions {
        serving: false,
        ..Conditions::DRAINING
    };
    stage.wait_conditions(service, pod, ended)?;
    stage.cluster.settle()
}

/// Waits until a node's health check says this: status and local endpoints.
fn says(stage: &Stage<'_>, family: Family, node: u8, port: u16, wanted: (u16, u64)) -> Result<()> {
    let target = plan::at(plan::node(family, node), port);
    until("the answer to a health check", || {
        let page = stage.cluster.outside().get(target, "/")?;
        let body: Value = serde_json::from_str(&page.body).with_context(|| format!("{page:?}"))?;
        let found = (page.status, body["localEndpoints"].as_u64().unwrap_or(u64::MAX));
        ensure!(found == wanted, "{page:?} is not {wanted:?}");
        Ok(())
    })
    .with_context(|| format!("node {node}, {family}"))
}

fn health(stage: &Stage<'_>) -> Result<String> {
    let service = balanced(stage, "Cluster", "Local")?;
    let port = service.object["spec"]["healthCheckNodePort"].as_u64();
    let port = u16::try_from(port.context("the API server gives no health check port")?)?;
    // Endpoints are told by address, and a pod has one of each family.
    let one_pod = stage.families().len() as u64;
    let (one, two) = (stage.pod(1)?, stage.pod(2)?);
    stage.have(&service, &[&one, &two])?;
    for family in stage.families() {
        for (node, wanted) in [(1, (200, one_pod)), (2, (200, one_pod)), (3, (503, 0))] {
            says(stage, *family, node, port, wanted)?;
        }
    }
    drain(stage, &service, &[&one])?;
    for family in stage.families() {
        for (node, wanted) in [(1, (503, 0)), (2, (200, one_pod)), (3, (503, 0))] {
            says(stage, *family, node, port, wanted)?;
        }
        // New load is to go elsewhere; what comes all the same is served.
        served(stage, &From::Outside, service.node_port(*family, 1)?, &[&one])?;
    }
    served(
        stage,
        &From::Outside,
        plan::at(routed(stage.families()[0], 205), PORT),
        &[&one],
    )?;
    drain(stage, &service, &[&two])?;
    for family in stage.families() {
        for node in 1..=plan::NODES {
            says(stage, *family, node, port, (503, 0))?;
        }
    }
    let again = stage.pod(1)?;
    stage.have(&service, &[&again])?;
    for family in stage.families() {
        says(stage, *family, 1, port, (200, one_pod))?;
        says(stage, *family, 2, port, (503, 0))?;
    }
    delete(stage, &service)?;
    for family in stage.families() {
        let target = plan::at(plan::node(*family, 1), port);
        until("the health check's port to close", || {
            let page = stage.cluster.outside().get(target, "/").map(|page| page.status);
            ensure!(page == Err(Failure::Refused), "{page:?}");
            Ok(())
        })?;
    }
    Ok(in_families(
        stage,
        "503 with terminating endpoints alone, which serve on; 200 with a ready one",
    ))
}

fn internal_cluster(stage: &Stage<'_>) -> Result<String> {
    let service = balanced(stage, "Cluster", "Cluster")?;
    let (one, two) = (stage.pod(1)?, stage.pod(2)?);
    let client = stage.client(3)?;
    stage.have(&service, &[&one, &two])?;
    let check = |pods: &[&StagePod]| -> Result<()> {
        for family in stage.families() {
            for from in [From::Pod(&client), From::Node(1)] {
                served(stage, &from, service.cluster(*family)?, pods)?;
            }
        }
        Ok(())
    };
    drain(stage, &service, &[&one])?;
    check(&[&two]).context("while one is ready")?;
    drain(stage, &service, &[&two])?;
    check(&[&one, &two]).context("when all terminate")?;
    fail_probe(stage, &service, &two)?;
    check(&[&one]).context("when one of them serves no more")?;
    let ready = stage.pod(2)?;
    stage.have(&service, &[&ready])?;
    check(&[&ready]).context("with a ready one")?;
    stage.end(&ready)?;
    stage.end(&one)?;
    stage.have(&service, &[])?;
    for family in stage.families() {
        refused(stage, &From::Pod(&client), service.cluster(*family)?)?;
    }
    Ok(in_families(
        stage,
        "ready before terminating, all that serve while none is ready, then refused",
    ))
}

fn internal_local(stage: &Stage<'_>) -> Result<String> {
    let service = balanced(stage, "Local", "Cluster")?;
    let (one, two) = (stage.pod(1)?, stage.pod(2)?);
    let clients = [stage.client(1)?, stage.client(2)?, stage.client(3)?];
    stage.have(&service, &[&one, &two])?;
    let check = |first: Option<&StagePod>, second: Option<&StagePod>| -> Result<()> {
        for family in stage.families() {
            let target = service.cluster(*family)?;
            for (client, pod) in clients.iter().zip([first, second, None]) {
                for from in [From::Pod(client), From::Node(client.place.node)] {
                    match pod {
                        Some(pod) => drop(served(stage, &from, target, &[pod])?),
                        None => fail_at_once(stage, &from, target, Failure::Unreachable)?,
                    }
                }
            }
        }
        Ok(())
    };
    check(Some(&one), Some(&two))?;
    drain(stage, &service, &[&one])?;
    check(Some(&one), Some(&two)).context("while the other node's is ready")?;
    let ready = stage.pod(1)?;
    stage.have(&service, &[&ready, &two])?;
    check(Some(&ready), Some(&two)).context("with a ready one beside it")?;
    stage.end(&ready)?;
    drain(stage, &service, &[&two])?;
    check(Some(&one), Some(&two)).context("when all terminate")?;
    fail_probe(stage, &service, &one)?;
    check(None, Some(&two)).context("when it serves no more")?;
    Ok(in_families(
        stage,
        "a node's own terminating pod while it has no ready one, wherever others are ready",
    ))
}

fn external_cluster(stage: &Stage<'_>) -> Result<String> {
    let service = balanced(stage, "Cluster", "Cluster")?;
    let (one, two) = (stage.pod(1)?, stage.pod(2)?);
    stage.have(&service, &[&one, &two])?;
    let check = |pods: &[&StagePod]| -> Result<()> {
        for family in stage.families() {
            for node in 1..=plan::NODES {
                served(stage, &From::Outside, service.node_port(*family, node)?, pods)?;
            }
        }
        let address = plan::at(routed(stage.families()[0], 205), PORT);
        served(stage, &From::Outside, address, pods).map(drop)
    };
    drain(stage, &service, &[&one])?;
    check(&[&two]).context("while one is ready")?;
    drain(stage, &service, &[&two])?;
    check(&[&one, &two]).context("when all terminate")?;
    fail_probe(stage, &service, &one)?;
    check(&[&two]).context("when one of them serves no more")?;
    let ready = stage.pod(3)?;
    stage.have(&service, &[&ready])?;
    check(&[&ready]).context("with a ready one")?;
    stage.end(&ready)?;
    stage.end(&two)?;
    stage.have(&service, &[])?;
    for family in stage.families() {
        refused(stage, &From::Outside, service.node_port(*family, 3)?)?;
    }
    Ok(in_families(
        stage,
        "ready before terminating, all that serve while none is ready, then refused",
    ))
}

fn external_local(stage: &Stage<'_>) -> Result<String> {
    let service = balanced(stage, "Cluster", "Local")?;
    let (one, two) = (stage.pod(1)?, stage.pod(2)?);
    stage.have(&service, &[&one, &two])?;
    let check = |by_node: [Option<&StagePod>; 3]| -> Result<()> {
        let mut nowhere = Vec::new();
        for family in stage.families() {
            for (node, pod) in (1..).zip(by_node) {
                let target = service.node_port(*family, node)?;
                let Some(pod) = pod else {
                    nowhere.push(target);
                    continue;
                };
                for met in served(stage, &From::Outside, target, &[pod])? {
                    ensure!(met.peer.ip() == plan::client(*family, 1), "{met:?}");
                }
            }
        }
        silent(stage, &From::Outside, &nowhere)
    };
    drain(stage, &service, &[&one])?;
    check([Some(&one), Some(&two), None]).context("while the other node's is ready")?;
    let address = plan::at(routed(stage.families()[0], 205), PORT);
    served(stage, &From::Outside, address, &[&one])?;
    let ready = stage.pod(1)?;
    stage.have(&service, &[&ready, &two])?;
    served(stage, &From::Outside, address, &[&ready]).context("with a ready one beside it")?;
    // From inside the policy is the cluster's: ready ones alone.
    served(stage, &From::Node(3), address, &[&ready, &two]).context("from inside")?;
    stage.end(&ready)?;
    drain(stage, &service, &[&two])?;
    served(stage, &From::Outside, address, &[&one]).context("when all terminate")?;
    fail_probe(stage, &service, &one)?;
    silent(stage, &From::Outside, &[address]).context("when it serves no more")?;
    served(stage, &From::Outside, service.node_port(Family::V4, 2)?, &[&two])?;
    Ok(in_families(
        stage,
        "a node's own terminating pod while it has no ready one, silence where it has none",
    ))
}
