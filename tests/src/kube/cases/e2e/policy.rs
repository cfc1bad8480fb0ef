//! internalTrafficPolicy Local: a node's clients meet its own endpoints or none.

use anyhow::{Result, ensure};
use serde_json::json;

use super::{Case, Stage, both, fail_at_once, host_client, host_pod, in_families, served};
use crate::{
    kube::stage::From,
    lab::{dial::Failure, plan},
};

/// The cases.
pub(super) const CASES: &[Case] = &[
    Case::e2e("internal_traffic_policy_local_pod_to_pod", |stage| {
        local(stage, Network::Own, Network::Own)
    }),
    Case::e2e("internal_traffic_policy_local_host_network_to_pod", |stage| {
        local(stage, Network::Host, Network::Own)
    }),
    Case::e2e("internal_traffic_policy_local_pod_to_host_network", |stage| {
        local(stage, Network::Own, Network::Host)
    }),
];

/// Whose network a Pod has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Network {
    /// Its own.
    Own,
    /// Its node's.
    Host,
}

fn local(stage: &Stage<'_>, clients: Network, servers: Network) -> Result<String> {
    let mut service = stage.service(|spec| {
        both(spec);
        spec["internalTrafficPolicy"] = json!("Local");
    })?;
    let client = |node| match clients {
        Network::Own => stage.client(node),
        Network::Host => host_client(stage, node),
    };
    let server = |node| match servers {
        Network::Own => stage.pod(node),
        Network::Host => host_pod(stage, node),
    };
    let (here, elsewhere) = (client(1)?, client(2)?);
    let (first, third) = (server(1)?, server(3)?);
    stage.have(&service, &[&first, &third])?;
    for family in stage.families() {
        let target = service.cluster(*family)?;
        for met in served(stage, &From::Pod(&here), target, &[&first])? {
            // A process of a node has more than one address, of which the kernel takes the nearest.
            let gateway = (clients == Network::Host).then(|| plan::pod_gateway(*family, 1));
            let own = [Some(here.place.ip(*family)), gateway];
            ensure!(own.contains(&Some(met.peer.ip())), "{met:?}");
        }
        // At the socket hooks, where silence is impossible, this is said at once.
        fail_at_once(stage, &From::Pod(&elsewhere), target, Failure::Unreachable)?;
        served(stage, &From::Node(3), target, &[&third])?;
    }
    stage.change(&mut service, &json!({"internalTrafficPolicy": "Cluster"}))?;
    stage.cluster.settle()?;
    for family in stage.families() {
        let target = service.cluster(*family)?;
        served(stage, &From::Pod(&elsewhere), target, &[&first, &third])?;
    }
    stage.change(&mut service, &json!({"internalTrafficPolicy": "Local"}))?;
    // The endpoint elsewhere stays: still nobody here, and nobody is asked elsewhere.
    stage.end(&first)?;
    stage.have(&service, &[&third])?;
    for family in stage.families() {
        let target = service.cluster(*family)?;
        fail_at_once(stage, &From::Pod(&here), target, Failure::Unreachable)?;
        fail_at_once(stage, &From::Node(2), target, Failure::Unreachable)?;
    }
    for pod in [&here, &elsewhere, &third] {
        stage.end(pod)?;
    }
    Ok(in_families(
        stage,
        "own endpoints alone, unreachable at once where there is none",
    ))
}
