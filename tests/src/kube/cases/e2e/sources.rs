//! Whom servers see: the client itself.

use anyhow::{Result, ensure};

use super::{Case, Stage, both, host_client, host_pod, in_families, node_ports, served};
use crate::{kube::stage::From, lab::plan};

/// The cases.
pub(super) const CASES: &[Case] = &[
    Case::e2e("preserve_source_pod_ip", preserve),
    Case::e2e("hairpin", hairpin),
    Case::e2e("hairpin_of_a_host_network_pod", host_hairpin),
];

fn preserve(stage: &Stage<'_>) -> Result<String> {
    let service = stage.service(both)?;
    let (one, two) = (stage.pod(1)?, stage.pod(2)?);
    let clients = [stage.client(1)?, stage.client(3)?];
    let host = host_client(stage, 3)?;
    stage.have(&service, &[&one, &two])?;
    for family in stage.families() {
        for client in clients.iter().chain([&host]) {
            for met in served(stage, &From::Pod(client), service.cluster(*family)?, &[&one, &two])? {
                ensure!(
                    met.peer.ip() == client.place.ip(*family),
                    "{met:?}, and {} dialled",
                    client.place.ip(*family)
                );
            }
        }
    }
    stage.end(&host)?;
    Ok(in_families(
        stage,
        "two pods and one with its node's network, to pods here and elsewhere",
    ))
}

fn hairpin(stage: &Stage<'_>) -> Result<String> {
    let service = stage.service(node_ports)?;
    let pod = stage.pod(1)?;
    stage.have(&service, &[&pod])?;
    for family in stage.families() {
        for target in [service.cluster(*family)?, service.node_port(*family, 1)?] {
            for met in served(stage, &From::Pod(&pod), target, &[&pod])? {
                ensure!(met.peer.ip() == pod.place.ip(*family), "{target}: {met:?}");
            }
        }
    }
    // With another pod beside it, it meets itself as well as the other.
    let other = stage.pod(2)?;
    stage.have(&service, &[&pod, &other])?;
    for family in stage.families() {
        for met in served(stage, &From::Pod(&pod), service.cluster(*family)?, &[&pod, &other])? {
            ensure!(met.peer.ip() == pod.place.ip(*family), "{met:?}");
        }
    }
    Ok(in_families(
        stage,
        "a pod alone and beside another, by cluster address and node port",
    ))
}

fn host_hairpin(stage: &Stage<'_>) -> Result<String> {
    let service = stage.service(node_ports)?;
    let pod = host_pod(stage, 2)?;
    stage.have(&service, &[&pod])?;
    for family in stage.families() {
        for target in [service.cluster(*family)?, service.node_port(*family, 2)?] {
            for met in served(stage, &From::Pod(&pod), target, &[&pod])? {
                ensure!(met.peer.ip() == plan::node(*family, 2), "{target}: {met:?}");
            }
        }
    }
    stage.end(&pod)?;
    Ok(in_families(stage, "by cluster address and node port"))
}
