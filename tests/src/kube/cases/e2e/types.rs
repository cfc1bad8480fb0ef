//! Every change of a Service's type to ExternalName, which no proxy serves, and from it.

use std::net::SocketAddr;

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use super::{
    Case, Stage, asks, clusters, connects, held, held_nowhere, in_families, refused, routed, served, unserved,
};
use crate::{
    kube::stage::{From, PORT, StagePod, StageService},
    lab::plan,
};

/// The cases.
pub(super) const CASES: &[Case] = &[
    Case::e2e("change_of_type_from_external_name_to_cluster_ip", |stage| {
        from_name(stage, "ClusterIP")
    }),
    Case::e2e("change_of_type_from_external_name_to_node_port", |stage| {
        from_name(stage, "NodePort")
    }),
    Case::e2e("change_of_type_from_external_name_to_load_balancer", |stage| {
        from_name(stage, "LoadBalancer")
    }),
    Case::e2e("change_of_type_from_cluster_ip_to_external_name", |stage| {
        to_name(stage, "ClusterIP")
    }),
    Case::e2e("change_of_type_from_node_port_to_external_name", |stage| {
        to_name(stage, "NodePort")
    }),
    Case::e2e("change_of_type_from_load_balancer_to_external_name", |stage| {
        to_name(stage, "LoadBalancer")
    }),
];

/// The load balancer's address of these cases, in the first family.
fn balanced(stage: &Stage<'_>) -> SocketAddr {
    plan::at(routed(stage.families()[0], 204), PORT)
}

/// A Service of a type is served by all the addresses that it has, from outside too.
fn serves(
    stage: &Stage<'_>,
    kind: &str,
    service: &mut StageService,
    pods: &[&StagePod],
    client: &StagePod,
) -> Result<()> {
    if kind == "LoadBalancer" {
        stage.give_address(service, balanced(stage).ip(), "VIP")?;
    }
    stage.have(service, pods)?;
    for family in stage.families() {
        served(stage, &From::Pod(client), service.cluster(*family)?, pods)?;
        if kind != "ClusterIP" {
            // A change of type gives each protocol a number of its own.
            connects(stage, &From::Outside, service.node_port_of(0, *family, 2)?, pods)?;
            asks(stage, &From::Outside, service.node_port_of(1, *family, 2)?, pods)?;
        }
    }
    if kind == "LoadBalancer" {
        served(stage, &From::Outside, balanced(stage), pods)?;
        served(stage, &From::Pod(client), balanced(stage), pods)?;
    }
    Ok(())
}

fn name_spec() -> Value {
    json!({"type": "ExternalName", "externalName": "elsewhere.example"})
}

fn from_name(stage: &Stage<'_>, kind: &str) -> Result<String> {
    let pods = stage.pods(&[1, 2])?;
    let all: Vec<&StagePod> = pods.iter().collect();
    let client = stage.client(3)?;
    let mut service = stage.named_service("s", name_spec(), &json!({}))?;
    stage.cluster.settle()?;
    held_nowhere(stage, &service)?;
    let mut spec = stage.service_spec();
    spec["type"] = json!(kind);
    spec["ports"] = Stage::both_ports();
    spec["externalName"] = json!(null);
    stage.change(&mut service, &spec)?;
    serves(stage, kind, &mut service, &all, &client)?;
    Ok(in_families(stage, "not held while it is a name, served after"))
}

fn to_name(stage: &Stage<'_>, kind: &str) -> Result<String> {
    let pods = stage.pods(&[1, 2])?;
    let all: Vec<&StagePod> = pods.iter().collect();
    let client = stage.client(3)?;
    let mut service = stage.service(|spec| {
        spec["type"] = json!(kind);
        spec["ports"] = Stage::both_ports();
    })?;
    serves(stage, kind, &mut service, &all, &client)?;
    let before = service.clone();
    ensure!(held(stage, 1, &service)? > 0, "node 1 holds nothing of what it serves");
    stage.change(&mut service, &name_spec())?;
    stage.cluster.settle()?;
    held_nowhere(stage, &service)?;
    unserved(stage, &From::Pod(&client), &clusters(stage, &before)?)?;
    for family in stage.families() {
        if kind != "ClusterIP" {
            refused(stage, &From::Outside, before.node_port(*family, 2)?)?;
        }
    }
    if kind == "LoadBalancer" {
        unserved(stage, &From::Outside, &[balanced(stage)])?;
    }
    Ok(in_families(stage, "served before, held by no agent after"))
}
