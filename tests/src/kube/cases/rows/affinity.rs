//! ClientIP affinity, of clients outside and of pods (C18).

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::{Case, Scene, Stage, routed};
use crate::{
    kube::stage::{From, StagePod, StageService},
    lab::plan::Family,
};

/// The cases.
pub const CASES: &[Case] = &[
    Case::row("C18", "a_client_stays_with_its_pod_until_the_timeout", sticks),
    Case::row("C18", "switching_affinity_acts_at_once", switched),
    Case::row("C18", "affinity_ends_with_the_pod_that_it_is_to", ends),
];

fn sticky(seconds: Option<u32>) -> Value {
    match seconds {
        Some(seconds) => json!({
            "sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": seconds}},
        }),
        None => json!({"sessionAffinity": "ClientIP"}),
    }
}

fn put(spec: &mut Value, fields: Value) {
    if let (Some(spec), Value::Object(fields)) = (spec.as_object_mut(), fields) {
        spec.extend(fields);
    }
}

/// The one pod that so many connections meet.
fn one_of(stage: &Stage<'_>, from: &From<'_>, target: std::net::SocketAddr, count: usize) -> Result<String> {
    let names: BTreeSet<String> = stage
        .dial_many(from, target, count)?
        .into_iter()
        .map(|met| met.name)
        .collect();
    ensure!(names.len() == 1, "one client met {names:?}");
    names.into_iter().next().context("connections met somebody")
}

/// The timeouts that a node's agent has for a Service's frontends.
fn timeouts(stage: &Stage<'_>, service: &StageService) -> Result<BTreeSet<Option<u32>>> {
    let view = stage.cluster.node(1).ask(|agent| agent.service(&service.name))?;
    Ok(view.frontends.iter().map(|front| front.affinity_seconds).collect())
}

/// Who dials and where: a client outside by a load balancer's address, and a pod by the cluster's.
fn ways<'p>(
    client: &'p StagePod,
    service: &StageService,
    family: Family,
    n: u8,
) -> Result<[(From<'p>, std::net::SocketAddr); 2]> {
    Ok([
        (From::Outside, routed(family, n)),
        (From::Pod(client), service.cluster(family)?),
    ])
}

fn sticks(stage: &Stage<'_>) -> Result<String> {
    const N: u8 = 40;
    let pods = stage.pods(&[1, 2, 3])?;
    let all: Vec<_> = pods.iter().collect();
    let client = stage.client(1)?;
    let service = stage.balancer(N, |spec| put(spec, sticky(Some(100))))?;
    stage.have(&service, &all)?;
    ensure!(
        timeouts(stage, &service)? == [Some(100)].into(),
        "the timeout is not the Service's"
    );
    let node = stage.cluster.node(1);
    let mut most = 0;
    for family in stage.families() {
        for (from, target) in ways(&client, &service, *family, N)? {
            let first = one_of(stage, &from, target, 12)?;
            // Each connection begins the time anew.
            for _ in 0..3 {
                node.age_affinity(60)?;
                let now = one_of(stage, &from, target, 1)?;
                ensure!(
                    now == first,
                    "from {from}, after less than the timeout: {now}, and {first} before"
                );
            }
            let mut met = BTreeSet::new();
            for _ in 0..20 {
                node.age_affinity(101)?;
                met.insert(one_of(stage, &from, target, 2)?);
            }
            ensure!(met.len() > 1, "from {from}, after each timeout the choice was {met:?}");
            most = most.max(met.len());
        }
    }
    Ok(format!(
        "one pod while it lasted, up to {most} over twenty ends; outside and from a pod"
    ))
}

fn switched(stage: &Stage<'_>) -> Result<String> {
    const N: u8 = 41;
    let pods = stage.pods(&[1, 2])?;
    let all: Vec<_> = pods.iter().collect();
    let client = stage.client(1)?;
    let mut service = stage.balancer(N, |_| {})?;
    stage.have(&service, &all)?;
    let off = json!({"sessionAffinity": "None", "sessionAffinityConfig": Value::Null});
    let steps = [
        (None, off.clone()),
        (Some(10_800), sticky(None)),
        (Some(86_400), sticky(Some(86_400))),
        (None, off),
        (Some(1), sticky(Some(1))),
        (Some(50), sticky(Some(50))),
    ];
    for (seconds, fields) in steps {
        stage.change(&mut service, &fields)?;
        stage.cluster.settle()?;
        let found = timeouts(stage, &service)?;
        ensure!(found == [seconds].into(), "the agent has {found:?} and not {seconds:?}");
        for family in stage.families() {
            for (from, target) in ways(&client, &service, *family, N)? {
                match seconds {
                    None => stage.meet(&from, target, &all)?,
                    // What one second is over before is not told here.
                    Some(1) => {}
                    Some(seconds) => {
                        let first = one_of(stage, &from, target, 6)?;
                        stage.cluster.node(1).age_affinity(u64::from(seconds) - 10)?;
                        let now = one_of(stage, &from, target, 6)?;
                        ensure!(now == first, "{seconds} s from {from}: {now} after {first}");
                    }
                }
            }
        }
    }
    let node = stage.cluster.node(1);
    for family in stage.families() {
        for (from, target) in ways(&client, &service, *family, N)? {
            let mut met = BTreeSet::new();
            for _ in 0..20 {
                node.age_affinity(51)?;
                met.insert(one_of(stage, &from, target, 1)?);
            }
            ensure!(met.len() == 2, "from {from}, the last timeout does not act: {met:?}");
        }
    }
    Ok("off, the default of 10800 s, a day, off, 1 s and 50 s, each live".to_owned())
}

fn ends(stage: &Stage<'_>) -> Result<String> {
    const N: u8 = 42;
    let pods = stage.pods(&[1, 2])?;
    let all: Vec<_> = pods.iter().collect();
    let client = stage.client(1)?;
    let service = stage.balancer(N, |spec| put(spec, sticky(None)))?;
    stage.have(&service, &all)?;
    // Who had which pod first, and who came to have which.
    let mut firsts = Vec::new();
    for family in stage.families() {
        for (from, target) in ways(&client, &service, *family, N)? {
            firsts.push((from, target, one_of(stage, &from, target, 6)?));
        }
    }
    for (leaving, staying) in [(&pods[0], &pods[1]), (&pods[1], &pods[0])] {
        stage.set_ready(leaving, false)?;
        stage.have(&service, &[staying])?;
        for (from, target, _) in &firsts {
            stage.meet(from, *target, &[staying])?;
        }
        // What a client has now is what it keeps.
        stage.set_ready(leaving, true)?;
        stage.have(&service, &all)?;
        for (from, target, _) in &firsts {
            stage
                .meet(from, *target, &[staying])
                .context("when the other is back")?;
        }
    }
    stage.terminate(&pods[0])?;
    stage.have(&service, &[&pods[1]])?;
    for (from, target, first) in &firsts {
        stage
            .meet(from, *target, &[&pods[1]])
            .with_context(|| format!("it had {first} at first"))?;
    }
    Ok("moved when its pod was not ready or terminated, stayed when that came back".to_owned())
}
