//! What load balancers outside and those who watch the agent are told (C21, C22).

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::{Case, Scene, Stage, routed};
use crate::{
    agent::{Page, until},
    kube::{
        kubelet,
        stage::{From, StageService},
    },
    lab::{
        complain,
        dial::Failure,
        node,
        plan::{self, Family},
    },
};

/// The cases.
pub const CASES: &[Case] = &[
    Case::row("C21", "each_node_tells_a_load_balancer_of_its_own_endpoints", tells),
    Case::row("C21", "the_port_goes_with_the_service_and_with_its_policy", closes),
    Case::row("C22", "a_node_that_leaves_is_not_eligible_and_lives", leaves),
];

/// Fetches what a node says on a Service's health-check port, from outside.
fn ask(stage: &Stage<'_>, family: Family, node: u8, port: u16) -> Result<Page, Failure> {
    let target = plan::at(plan::node(family, node), port);
    stage
        .cluster
        .outside()
        .within(Duration::from_secs(2))
        .get(target, "/healthz")
}

/// Waits until every node says so many endpoints; the port may open a moment after the frontends.
fn say(stage: &Stage<'_>, service: &StageService, wanted: [usize; 3]) -> Result<()> {
    let port = health_port(service)?;
    for family in stage.families() {
        for (node, wanted) in (1..).zip(wanted) {
            until("the answer to a health check", || {
                let page = ask(stage, *family, node, port)?;
                let body: Value = serde_json::from_str(&page.body).with_context(|| format!("{page:?}"))?;
                let status = if wanted > 0 { 200 } else { 503 };
                ensure!(
                    page.status == status && body["localEndpoints"] == wanted,
                    "{page:?}, and not {wanted}"
                );
                ensure!(
                    body["service"] == json!({"namespace": "default", "name": service.name}),
                    "{page:?}"
                );
                ensure!(body["serviceProxyHealthy"] == true, "{page:?}");
                let head = page.head.to_lowercase();
                let weight = format!("x-load-balancing-endpoint-weight: {wanted}");
                ensure!(head.lines().any(|line| line == weight), "{page:?} has no {weight}");
                ensure!(head.contains("content-type: application/json"), "{page:?}");
                Ok(())
            })
            .with_context(|| format!("node {node} in {family}"))?;
        }
    }
    Ok(())
}

fn health_port(service: &StageService) -> Result<u16> {
    let port = service.object["spec"]["healthCheckNodePort"].as_u64();
    Ok(u16::try_from(port.with_context(|| {
        format!("no health-check port: {}", service.object)
    })?)?)
}

/// Waits until no node listens on a port.
fn closed(stage: &Stage<'_>, port: u16) -> Result<()> {
    for family in stage.families() {
        for node in 1..=plan::NODES {
            until("a port to close", || {
                let page = ask(stage, *family, node, port);
                ensure!(matches!(page, Err(Failure::Refused)), "node {node} says {page:?}");
                Ok(())
            })?;
        }
    }
    Ok(())
}

fn tells(stage: &Stage<'_>) -> Result<String> {
    const N: u8 = 60;
    let pods = stage.pods(&[1, 1, 2])?;
    let service = stage.balancer(N, |spec| spec["externalTrafficPolicy"] = json!("Local"))?;
    stage.have(&service, &[&pods[0], &pods[1], &pods[2]])?;
    // Addresses are counted, and a pod has one of each family.
    let families = stage.families().len();
    say(stage, &service, [2 * families, families, 0])?;
    stage.set_ready(&pods[1], false)?;
    stage.have(&service, &[&pods[0], &pods[2]])?;
    say(stage, &service, [families, families, 0])?;
    // One that only terminates still serves, and new load is to go elsewhere.
    stage.terminate(&pods[0])?;
    stage.have(&service, &[&pods[2]])?;
    say(stage, &service, [0, families, 0])?;
    for family in stage.families() {
        stage.meet(&From::Outside, routed(*family, N), &[&pods[0]])?;
    }
    let third = stage.pod(3)?;
    stage.have(&service, &[&pods[2], &third])?;
    say(stage, &service, [0, families, families])?;
    Ok("200 with the count where pods are ready, 503 elsewhere and where they only terminate".to_owned())
}

fn closes(stage: &Stage<'_>) -> Result<String> {
    const N: u8 = 61;
    let pod = stage.pod(1)?;
    let mut service = stage.balancer(N, |spec| spec["externalTrafficPolicy"] = json!("Local"))?;
    stage.have(&service, &[&pod])?;
    let families = stage.families().len();
    say(stage, &service, [families, 0, 0])?;
    let first = health_port(&service)?;
    stage.change(&mut service, &json!({"externalTrafficPolicy": "Cluster"}))?;
    stage.cluster.settle()?;
    closed(stage, first)?;
    stage.change(&mut service, &json!({"externalTrafficPolicy": "Local"}))?;
    stage.cluster.settle()?;
    say(stage, &service, [families, 0, 0])?;
    let second = health_port(&service)?;
    // A node port has no such port at all.
    stage.change(&mut service, &json!({"type": "NodePort", "healthCheckNodePort": 0}))?;
    stage.cluster.settle()?;
    closed(stage, second)?;
    stage.change(&mut service, &json!({"type": "LoadBalancer"}))?;
    stage.cluster.settle()?;
    say(stage, &service, [families, 0, 0])?;
    let third = health_port(&service)?;
    stage.cluster.api().delete(&service.path(), None)?;
    stage.cluster.settle()?;
    closed(stage, third)?;
    Ok(format!(
        "ports {first}, {second} and {third}, closed under Cluster, as a node port, and without the Service"
    ))
}

/// A node that is registered as it was when the value goes.
struct Registered<'c, 's>(&'s Stage<'c>, u8);

impl Registered<'_, '_> {
    fn path(&self) -> String {
        format!("/api/v1/nodes/{}", node::name(self.1))
    }

    fn restore(&self) -> Result<()> {
        let api = self.0.cluster.api();
        if api.get(&self.path())?.is_some() {
            let plain = json!({"metadata": {"finalizers": Value::Null}, "spec": {"taints": Value::Null}});
            api.patch(&self.path(), &plain)?;
        }
        until("the node to be as it was", || {
            kubelet::register(api, self.1)?;
            let found = api.get(&self.path())?.context("it is not there")?;
            ensure!(found["metadata"]["deletionTimestamp"].is_null(), "it goes still");
            Ok(())
        })
    }
}

impl Drop for Registered<'_, '_> {
    fn drop(&mut self) {
        if let Err(error) = self.restore() {
            complain("a node of the lab could not be registered again", &format!("{error:#}"));
        }
    }
}

fn leaves(stage: &Stage<'_>) -> Result<String> {
    const NODE: u8 = 3;
    let pod = stage.pod(1)?;
    let service = stage.service(|spec| spec["type"] = json!("NodePort"))?;
    stage.have(&service, &[&pod])?;
    let registered = Registered(stage, NODE);
    let api = stage.cluster.api();
    let healthy = |eligible: bool| -> Result<()> {
        until("the node's health", || {
            let (health, live) = stage
                .cluster
                .node(NODE)
                .ask(|agent| Ok((agent.get("/healthz")?, agent.get("/livez")?)))?;
            ensure!(health.status == if eligible { 200 } else { 503 }, "{health:?}");
            ensure!(live.status == 200, "{live:?}");
            for page in [health, live] {
                let body: Value = serde_json::from_str(&page.body)?;
                ensure!(body["nodeEligible"] == eligible, "{page:?}");
                ensure!(
                    body["lastUpdated"].is_string() && body["currentTime"].is_string(),
                    "{page:?}"
                );
            }
            Ok(())
        })?;
        // The others are what they were, and the node serves on.
        let other = stage.cluster.node(1).ask(|agent| agent.get("/healthz"))?;
        ensure!(other.status == 200, "{other:?}");
        for family in stage.families() {
            stage.meet(&From::Outside, service.node_port(*family, NODE)?, &[&pod])?;
        }
        Ok(())
    };
    healthy(true)?;
    let taint = json!([{"key": "ToBeDeletedByClusterAutoscaler", "value": "1", "effect": "NoSchedule"}]);
    api.patch(&registered.path(), &json!({"spec": {"taints": taint}}))?;
    healthy(false)?;
    let other = json!([{"key": "lab.evenkeel.io/another", "effect": "NoSchedule"}]);
    api.patch(&registered.path(), &json!({"spec": {"taints": other}}))?;
    healthy(true)?;
    api.patch(
        &registered.path(),
        &json!({"metadata": {"finalizers": ["lab.evenkeel.io/stay"]}}),
    )?;
    api.delete(&registered.path(), None)?;
    healthy(false)?;
    registered.restore()?;
    healthy(true)?;
    Ok("503 while tainted and while being deleted, alive and serving all the time".to_owned())
}
