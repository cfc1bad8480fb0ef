//! Weights beyond the standard fields (C23).

use anyhow::{Context, Result, ensure};
use lb_user::source::convert::ANNOTATION_WEIGHT;
use serde_json::{Value, json};

use super::{Case, Scene, Stage, ready, routed};
use crate::{
    agent::Agent,
    kube::stage::{From, StagePod, StageService},
};

/// The cases.
pub const CASES: &[Case] = &[
    Case::row("C23", "an_annotation_leads_new_connections_to_a_subset", subset),
    Case::row("C23", "a_private_traffic_distribution_is_nobodys", private),
];

/// How many of so many connections met a pod, from a client inside and from outside.
fn shares(stage: &Stage<'_>, client: &StagePod, service: &StageService, n: u8, pod: &StagePod) -> Result<Vec<usize>> {
    let mut shares = Vec::new();
    for family in stage.families() {
        for (from, target) in [
            (From::Pod(client), service.cluster(*family)?),
            (From::Outside, routed(*family, n)),
        ] {
            let met = stage.dial_many(&from, target, 100)?;
            shares.push(met.iter().filter(|met| met.name == pod.name).count());
        }
    }
    Ok(shares)
}

fn subset(stage: &Stage<'_>) -> Result<String> {
    const N: u8 = 70;
    let pods = stage.pods(&[1, 2])?;
    let client = stage.client(1)?;
    let service = stage.balancer(N, |spec| spec["selector"] = Value::Null)?;
    let weigh = |weight: &Value| -> Result<()> {
        for family in stage.families() {
            stage.slice("stable", &service.name, *family, &json!([ready(&pods[0], *family)]))?;
            let mut canary = stage.slice_object("canary", &service.name, *family, &json!([ready(&pods[1], *family)]));
            if !weight.is_null() {
                canary["metadata"]["annotations"] = json!({ANNOTATION_WEIGHT: weight});
            }
            stage.put(&canary)?;
        }
        stage.cluster.settle()
    };
    // Bounds of five standard deviations around what the weights say.
    let steps = [
        (Value::Null, 25..=75, 1),
        (json!("0"), 0..=0, 0),
        (json!("9"), 75..=100, 9),
        (json!("0"), 0..=0, 0),
        (Value::Null, 25..=75, 1),
    ];
    let mut told = Vec::new();
    for (weight, bounds, held) in steps {
        weigh(&weight)?;
        let of_canary = shares(stage, &client, &service, N, &pods[1])?;
        ensure!(
            of_canary.iter().all(|share| bounds.contains(share)),
            "weight {weight}: {of_canary:?} of 100"
        );
        let all = stage.cluster.node(1).ask(Agent::backends)?;
        for family in stage.families() {
            let own = all
                .iter()
                .filter(|one| one.service == service.name && one.addr == pods[1].place.ip(*family));
            let weights: Vec<u32> = own.map(|one| one.weight).collect();
            let fits = !weights.is_empty() && weights.iter().all(|found| (*found > 0) == (held > 0));
            // One that gets nothing new may be held no longer.
            ensure!(
                fits || (held == 0 && weights.is_empty()),
                "weight {weight}: the agent has {weights:?}"
            );
        }
        told.push(of_canary);
    }
    // A weight that is none loses its slice, and the operator is told.
    weigh(&json!("many"))?;
    stage.holds(1, &service, &[&pods[0]])?;
    for family in stage.families() {
        stage.meet(&From::Pod(&client), service.cluster(*family)?, &[&pods[0]])?;
    }
    let problems = stage.cluster.node(1).ask(|agent| Ok(agent.status()?.problems))?;
    ensure!(
        problems
            .iter()
            .any(|one| one.object.contains(&stage.name) && one.field.contains(ANNOTATION_WEIGHT)),
        "{problems:?} tells nothing of the weight"
    );
    weigh(&Value::Null)?;
    stage.holds(1, &service, &[&pods[0], &pods[1]])?;
    Ok(format!(
        "of 100 connections with weights 1, 0, 9, 0 and 1 of 1: {told:?}"
    ))
}

fn private(stage: &Stage<'_>) -> Result<String> {
    let pods = stage.pods(&[1, 3])?;
    let all: Vec<_> = pods.iter().collect();
    let mut service = stage.service(|_| {})?;
    let client = stage.client(1)?;
    stage.have(&service, &all)?;
    // The API server takes none, so no product can rely on one.
    let refused = stage.change(
        &mut service,
        &json!({"trafficDistribution": "evenkeel.io/least-loaded"}),
    );
    let refused = refused.err().context("the API server took a private value")?;
    ensure!(format!("{refused:#}").contains("trafficDistribution"), "{refused:#}");
    // An annotation of the Service's own that weighs nothing changes nothing.
    let annotation = json!({"metadata": {"annotations": {"evenkeel.io/unknown": "x"}}});
    stage.cluster.api().patch(&service.path(), &annotation)?;
    stage.have(&service, &all)?;
    for slice in stage.slices(&service)? {
        ensure!(slice["endpoints"][0]["hints"].is_null(), "{slice}");
    }
    for family in stage.families() {
        stage.meet(&From::Pod(&client), service.cluster(*family)?, &all)?;
    }
    Ok("refused by the API server, and an unknown annotation changes nothing".to_owned())
}
