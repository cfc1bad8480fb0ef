//! What the observer makes of connections from outside: whom it judges by them, and where they are shown.

use std::collections::BTreeSet;

use anyhow::{Context, Result, bail, ensure};
use lb_user::{
    control,
    view::{Answer, AudienceView, BackendView, DiagnosisView, GraphView, Query, ServiceFilter, VerdictKind},
};

use super::Case;
use crate::{
    agent::{must, until},
    lab::{
        Lab,
        plan::{self, Family},
        service::Service,
    },
    runner::scaled,
};

/// The cases.
pub const CASES: &[Case] = &[Case::new(
    "OBSERVE",
    "connections_from_outside_that_stay_on_the_node_starve_nobody",
    local,
)];

fn filter(service: &Service<'_>) -> ServiceFilter {
    ServiceFilter {
        namespace: Some("default".to_owned()),
        name: Some(service.name.clone()),
    }
}

fn diagnoses(lab: &Lab, service: &Service<'_>) -> Result<Vec<DiagnosisView>> {
    let query = Query::Diagnose {
        filter: filter(service),
    };
    match control::ask(&lab.node(1).socket(), &query)? {
        Answer::DiagnosisList { items, .. } => Ok(items),
        other => bail!("not diagnoses: {other:?}"),
    }
}

/// The sets of a Service's TCP port that had connections since they are watched.
fn busy(lab: &Lab, service: &Service<'_>) -> Result<Vec<DiagnosisView>> {
    let mut found = diagnoses(lab, service)?;
    found.retain(|one| one.set.contains("/TCP/") && one.verdict != VerdictKind::NoTraffic);
    Ok(found)
}

fn graph(lab: &Lab, service: &Service<'_>) -> Result<GraphView> {
    let query = Query::Graph {
        filter: filter(service),
    };
    match control::ask(&lab.node(1).socket(), &query)? {
        Answer::Graph(view) => Ok(view),
        other => bail!("not a graph: {other:?}"),
    }
}

fn backends(lab: &Lab, service: &Service<'_>) -> Result<Vec<BackendView>> {
    let query = Query::Backends {
        filter: filter(service),
    };
    match control::ask(&lab.node(1).socket(), &query)? {
        Answer::BackendList { items } => Ok(items),
        other => bail!("not backends: {other:?}"),
    }
}

/// Three endpoints, of which one is on the node that outside clients come to under a Local policy: it has most connections,
/// and the others have no less than their due.
fn local(lab: &Lab, family: Family) -> Result<String> {
    let service = lab
        .service(family)
        .load_balancer("VIP")
        .with("externalTrafficPolicy", "Local");
    let pods = [(1, 1), (2, 1), (3, 1)].map(|(node, n)| lab.pod(node, n));
    service.apply(&pods.map(|pod| pod.ready(family)))?;
    let pair = || -> Result<()> {
        let met = lab.outside().dial(service.routed())?;
        ensure!(met.name == pods[0].name, "{met:?}");
        let caller = lab.pod(1, 2);
        (lab.node(1).inside(|| caller.dialer().dial(service.cluster()))?).context("a pod's connection")?;
        Ok(())
    };
    // What was counted before the first reading is nobody's: it may be older than the agent.
    let mut begun = 0;
    until("both sets to be read twice", || {
        pair()?;
        begun += 1;
        let sets = busy(lab, &service)?;
        must(sets.len() == 2, || format!("{sets:?}"))
    })?;
    let (inside, each) = (scaled(90, 45), 3);
    for _ in 0..inside {
        pair()?;
        for _ in 1..each {
            lab.outside().dial(service.routed())?;
        }
    }
    let (of_node, from_outside) = (begun + inside, begun + inside * each);
    service.wait_connects(1, (of_node + from_outside) as u64)?;
    let judged = until("the sets to be read whole", || {
        let sets = busy(lab, &service)?;
        let seen = |audience: AudienceView| -> u64 {
            let sets = sets.iter().filter(|one| one.audience == audience);
            sets.flat_map(|one| &one.endpoints)
                .map(|endpoint| endpoint.connects)
                .sum()
        };
        let (node, outside) = (seen(AudienceView::Node), seen(AudienceView::Outside));
        let whole = (inside..=of_node).contains(&(node as usize))
            && (inside * each..=from_outside).contains(&(outside as usize));
        must(whole, || {
            format!("{node} of {of_node} and {outside} of {from_outside} in {sets:?}")
        })?;
        Ok(sets)
    })?;
    for one in &judged {
        ensure!(one.starved.is_empty(), "nobody starves: {one:?}");
        ensure!(
            !matches!(one.verdict, VerdictKind::Starved | VerdictKind::Uneven),
            "{one:?}"
        );
        ensure!(one.attribution.outside == from_outside as u64, "{:?}", one.attribution);
    }
    let sets: BTreeSet<&str> = judged.iter().map(|one| one.set.as_str()).collect();
    ensure!(sets.len() == 2, "one set for each side: {sets:?}");
    for backend in backends(lab, &service)?.iter().filter(|one| one.protocol == "TCP") {
        let is_local = backend.addr == pods[0].ip(family);
        ensure!(
            backend.outside == if is_local { from_outside as u64 } else { 0 },
            "{backend:?}"
        );
        ensure!(
            backend.connects > backend.outside,
            "those of the node count too: {backend:?}"
        );
    }
    let shown = lab.node(1).ask(|agent| agent.service(&service.name))?;
    ensure!(
        shown.outside == from_outside as u64 && shown.connects == (of_node + from_outside) as u64,
        "{shown:?}"
    );
    let metrics = lab.node(1).ask(crate::agent::Agent::metrics)?;
    let series = format!(
        "evenkeel_service_outside_connects_total{{namespace=\"default\",service=\"{}\"}}",
        service.name
    );
    ensure!(
        metrics.get(&series) == Some(&(from_outside as f64)),
        "{series}: {:?}",
        metrics.get(&series)
    );
    // All of them are one caller: the world has more addresses than there is memory.
    until("the calls to be told", || {
        let calls = graph(lab, &service)?.calls;
        let outside: Vec<_> = calls.iter().filter(|call| call.client.kind == "Outside").collect();
        must(
            outside.len() == 1 && outside[0].connections == from_outside as u64 && calls.len() == 2,
            || format!("{calls:?}; the client is {}", plan::client(family, 1)),
        )
    })?;
    Ok(format!(
        "{from_outside} of {} connections from outside, all to {}",
        of_node + from_outside,
        pods[0].name
    ))
}
