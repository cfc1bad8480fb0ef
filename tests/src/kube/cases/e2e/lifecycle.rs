//! Services that come, go and come again.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::{Case, Stage, both, clusters, delete, held_nowhere, in_families, node_ports, refused, served, unserved};
use crate::{
    agent::until,
    kube::stage::{From, StagePod, StageService},
};

/// The cases.
pub(super) const CASES: &[Case] = &[
    Case::e2e("up_and_down_services", up_and_down),
    Case::e2e("recreated_service", recreated),
    Case::e2e("recreated_service_at_once_for_other_pods", replaced),
];

/// A pod of one of a case's groups.
fn member(stage: &Stage<'_>, group: &str, node: u8) -> Result<StagePod> {
    let mut object = stage.pod_object(node);
    object["metadata"]["labels"] = json!({"app": format!("{}-{group}", stage.name)});
    stage.make_pod(&object)
}

/// The spec of a Service of a group.
fn spec_of(stage: &Stage<'_>, group: &str, kind: fn(&mut Value)) -> Value {
    let mut spec = stage.service_spec();
    kind(&mut spec);
    spec["selector"] = json!({"app": format!("{}-{group}", stage.name)});
    spec
}

fn up_and_down(stage: &Stage<'_>) -> Result<String> {
    let client = stage.client(1)?;
    let group = |name: &str| -> Result<(StageService, Vec<StagePod>)> {
        let pods = [2, 3].map(|node| member(stage, name, node));
        let pods = pods.into_iter().collect::<Result<Vec<_>>>()?;
        let service = stage.named_service(name, spec_of(stage, name, both), &json!({}))?;
        Ok((service, pods))
    };
    let up = |(service, pods): &(StageService, Vec<StagePod>)| -> Result<()> {
        let all: Vec<&StagePod> = pods.iter().collect();
        stage.have(service, &all)?;
        for family in stage.families() {
            for from in [From::Pod(&client), From::Node(2)] {
                served(stage, &from, service.cluster(*family)?, &all)?;
            }
        }
        Ok(())
    };
    let first = group("first")?;
    let second = group("second")?;
    up(&first)?;
    up(&second)?;
    delete(stage, &first.0)?;
    held_nowhere(stage, &first.0)?;
    for from in [From::Pod(&client), From::Node(2)] {
        unserved(stage, &from, &clusters(stage, &first.0)?)?;
    }
    up(&second)?;
    let third = group("third")?;
    up(&second)?;
    up(&third)?;
    for family in stage.families() {
        ensure!(
            second.0.cluster(*family)? != third.0.cluster(*family)?,
            "two Services have one address"
        );
    }
    // A Service whose pods are all gone refuses; the others go on.
    for pod in &second.1 {
        stage.end(pod)?;
    }
    stage.have(&second.0, &[])?;
    for family in stage.families() {
        refused(stage, &From::Pod(&client), second.0.cluster(*family)?)?;
    }
    up(&third)?;
    Ok(in_families(
        stage,
        "two up, one of them down, a third up, the second without pods",
    ))
}

/// Waits until all slices of a Service belong to it as it is now, not to one of the same name before.
fn wait_for_own_slices(stage: &Stage<'_>, service: &StageService, pods: &[&StagePod]) -> Result<()> {
    let own = &service.object["metadata"]["uid"];
    until("slices of the new Service alone", || {
        let slices = stage.slices(service)?;
        for slice in &slices {
            let owner = &slice["metadata"]["ownerReferences"][0]["uid"];
            ensure!(owner == own, "a slice is {owner}'s and not {own}'s");
        }
        ensure!(
            slices.len() == stage.families().len(),
            "there are {} slices",
            slices.len()
        );
        Ok(())
    })?;
    stage.have(service, pods)
}

/// The same addresses and ports, to be asked for again.
fn again(spec: &mut Value, before: &StageService) {
    let had = &before.object["spec"];
    spec["clusterIP"] = had["clusterIP"].clone();
    spec["clusterIPs"] = had["clusterIPs"].clone();
    spec["ports"] = had["ports"].clone();
}

fn all_serve(stage: &Stage<'_>, service: &StageService, client: &StagePod, pods: &[&StagePod]) -> Result<()> {
    for family in stage.families() {
        served(stage, &From::Pod(client), service.cluster(*family)?, pods)?;
        served(stage, &From::Outside, service.node_port(*family, 1)?, pods)?;
    }
    Ok(())
}

fn recreated(stage: &Stage<'_>) -> Result<String> {
    let (one, two) = (member(stage, "a", 1)?, member(stage, "a", 2)?);
    let client = stage.client(3)?;
    let first = stage.named_service("s", spec_of(stage, "a", node_ports), &json!({}))?;
    stage.have(&first, &[&one, &two])?;
    all_serve(stage, &first, &client, &[&one, &two])?;
    delete(stage, &first)?;
    held_nowhere(stage, &first)?;
    unserved(stage, &From::Pod(&client), &clusters(stage, &first)?)?;
    for family in stage.families() {
        refused(stage, &From::Outside, first.node_port(*family, 1)?)?;
    }
    let mut spec = spec_of(stage, "a", node_ports);
    again(&mut spec, &first);
    let second = stage.named_service("s", spec, &json!({}))?;
    same_place(&first, &second)?;
    wait_for_own_slices(stage, &second, &[&one, &two])?;
    all_serve(stage, &second, &client, &[&one, &two])?;
    Ok(in_families(
        stage,
        "served, gone, and served again at the same addresses",
    ))
}

fn replaced(stage: &Stage<'_>) -> Result<String> {
    let (one, two) = (member(stage, "a", 1)?, member(stage, "b", 2)?);
    let client = stage.client(3)?;
    let mut service = stage.named_service("s", spec_of(stage, "a", node_ports), &json!({}))?;
    stage.have(&service, &[&one])?;
    all_serve(stage, &service, &client, &[&one])?;
    for (group, pod) in [("b", &two), ("a", &one), ("b", &two)] {
        // No agent is waited for in between: it may see one change or both at once.
        stage.cluster.api().delete(&service.path(), None)?;
        let mut spec = spec_of(stage, group, node_ports);
        again(&mut spec, &service);
        let next = stage.named_service("s", spec, &json!({}))?;
        same_place(&service, &next)?;
        service = next;
        wait_for_own_slices(stage, &service, &[pod])?;
        all_serve(stage, &service, &client, &[pod]).with_context(|| format!("for group {group}"))?;
    }
    Ok(in_families(
        stage,
        "three times deleted and made at once, each time for other pods",
    ))
}

/// Two Services must be two, with the same addresses.
fn same_place(first: &StageService, second: &StageService) -> Result<()> {
    let (before, after) = (&first.object, &second.object);
    ensure!(
        before["metadata"]["uid"] != after["metadata"]["uid"],
        "the API server did not make a new Service"
    );
    ensure!(
        before["spec"]["clusterIPs"] == after["spec"]["clusterIPs"],
        "{} and {}",
        before["spec"]["clusterIPs"],
        after["spec"]["clusterIPs"]
    );
    Ok(())
}
