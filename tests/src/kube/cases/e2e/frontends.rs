//! What stands before endpoints, or before none: external addresses, labels that withhold a Service, refusals.

use anyhow::{Result, ensure};
use serde_json::json;

use super::{
    Case, Stage, both, clusters, delete, held_nowhere, in_families, load_balancer, node_ports, refused, relabel,
    routed, served, unserved,
};
use crate::{
    agent::until,
    kube::stage::{Conditions, From, PORT, StageService},
    lab::plan,
};

/// The cases.
pub(super) const CASES: &[Case] = &[
    Case::e2e("external_ip_not_assigned_to_a_node", external_ip),
    Case::e2e("unready_pods_with_publish_not_ready_addresses", published),
    Case::e2e("unready_pods_without_publish_not_ready_addresses", unpublished),
    Case::e2e("service_proxy_name", proxy_name),
    Case::e2e("headless_label", headless),
    Case::e2e("rejected_with_no_endpoints", rejected),
    Case::e2e("rejected_with_no_endpoints_under_local_policies", rejected_local),
    Case::e2e("rejected_with_evicted_pods_alone", evicted),
];

fn external_ip(stage: &Stage<'_>) -> Result<String> {
    let addresses: Vec<_> = stage.families().iter().map(|family| routed(*family, 201)).collect();
    let service = stage.service(|spec| {
        both(spec);
        spec["externalIPs"] = json!(addresses);
    })?;
    let (one, two) = (stage.pod(1)?, stage.pod(2)?);
    let client = stage.client(3)?;
    stage.have(&service, &[&one, &two])?;
    for address in &addresses {
        let target = plan::at(*address, PORT);
        for from in [From::Pod(&client), From::Node(2), From::Outside] {
            served(stage, &from, target, &[&one, &two])?;
        }
    }
    delete(stage, &service)?;
    let targets: Vec<_> = addresses.iter().map(|address| plan::at(*address, PORT)).collect();
    unserved(stage, &From::Pod(&client), &targets)?;
    Ok(in_families(
        stage,
        "from a pod, from a node and from outside; not after the Service",
    ))
}

fn published(stage: &Stage<'_>) -> Result<String> {
    let mut service = stage.service(|spec| {
        node_ports(spec);
        spec["publishNotReadyAddresses"] = json!(true);
    })?;
    let pod = stage.pod(1)?;
    let client = stage.client(2)?;
    let reached = |service: &StageService| -> Result<()> {
        stage.cluster.settle()?;
        for family in stage.families() {
            served(stage, &From::Pod(&client), service.cluster(*family)?, &[&pod])?;
            served(stage, &From::Outside, service.node_port(*family, 3)?, &[&pod])?;
        }
        Ok(())
    };
    stage.set_ready(&pod, false)?;
    until("the pod to be unready", || {
        let path = format!("/api/v1/namespaces/default/pods/{}", pod.name);
        let found = stage.cluster.api().get(&path)?.unwrap_or_default();
        ensure!(found["status"]["containerStatuses"][0]["ready"] == false, "{found}");
        Ok(())
    })?;
    stage.wait_endpoints(&service, &[&pod])?;
    reached(&service)?;
    stage.change(&mut service, &json!({"publishNotReadyAddresses": false}))?;
    stage.have(&service, &[])?;
    for family in stage.families() {
        refused(stage, &From::Pod(&client), service.cluster(*family)?)?;
        refused(stage, &From::Outside, service.node_port(*family, 3)?)?;
    }
    stage.change(&mut service, &json!({"publishNotReadyAddresses": true}))?;
    stage.wait_endpoints(&service, &[&pod])?;
    reached(&service)?;
    // One that terminates is published as well, ready or not.
    stage.terminate(&pod)?;
    let published = Conditions {
        ready: true,
        serving: false,
        terminating: true,
    };
    stage.wait_conditions(&service, &pod, published)?;
    reached(&service)?;
    Ok(in_families(
        stage,
        "served unready, refused unpublished, served again, served while it terminates",
    ))
}

fn unpublished(stage: &Stage<'_>) -> Result<String> {
    let service = stage.service(node_ports)?;
    let mut object = stage.pod_object(1);
    object["metadata"]["annotations"] = json!({crate::kube::kubelet::READY: "false"});
    let pod = stage.make_pod(&object)?;
    let client = stage.client(2)?;
    let unready = Conditions {
        ready: false,
        serving: false,
        terminating: false,
    };
    for _ in 0..2 {
        stage.wait_conditions(&service, &pod, unready)?;
        stage.cluster.settle()?;
        for family in stage.families() {
            refused(stage, &From::Pod(&client), service.cluster(*family)?)?;
            refused(stage, &From::Outside, service.node_port(*family, 1)?)?;
        }
        stage.set_ready(&pod, true)?;
        stage.have(&service, &[&pod])?;
        for family in stage.families() {
            served(stage, &From::Pod(&client), service.cluster(*family)?, &[&pod])?;
            served(stage, &From::Outside, service.node_port(*family, 1)?, &[&pod])?;
        }
        stage.set_ready(&pod, false)?;
    }
    Ok(in_families(stage, "refused while unready, served while ready, twice"))
}

/// A label with this name and value withholds a Service from birth, and a live one while it is there.
fn withheld(stage: &Stage<'_>, label: &str, value: &str) -> Result<()> {
    let pod = stage.pod(1)?;
    let client = stage.client(2)?;
    let spec = |port: u16| {
        let mut spec = stage.service_spec();
        node_ports(&mut spec);
        for one in spec["ports"].as_array_mut().into_iter().flatten() {
            one["port"] = json!(port);
        }
        spec
    };
    let up = |service: &StageService| -> Result<()> {
        stage.cluster.settle()?;
        for family in stage.families() {
            served(stage, &From::Pod(&client), service.cluster(*family)?, &[&pod])?;
            served(stage, &From::Outside, service.node_port(*family, 1)?, &[&pod])?;
        }
        Ok(())
    };
    let down = |service: &StageService| -> Result<()> {
        held_nowhere(stage, service)?;
        unserved(stage, &From::Pod(&client), &clusters(stage, service)?)?;
        for family in stage.families() {
            refused(stage, &From::Outside, service.node_port(*family, 1)?)?;
        }
        Ok(())
    };
    let live = stage.named_service("live", spec(PORT), &json!({}))?;
    let born = stage.named_service("born", spec(PORT), &json!({"labels": {label: value}}))?;
    // The headless label is a word for the controllers too, which give that Service's endpoints all the same.
    stage.have(&live, &[&pod])?;
    stage.have(&born, &[&pod])?;
    up(&live)?;
    down(&born)?;
    relabel(stage, &live, &json!({label: value}))?;
    relabel(stage, &born, &json!({label: null}))?;
    down(&live)?;
    // The controllers may write slices anew for either change.
    stage.wait_endpoints(&born, &[&pod])?;
    up(&born)?;
    relabel(stage, &live, &json!({label: null}))?;
    stage.wait_endpoints(&live, &[&pod])?;
    up(&live)?;
    up(&born)
}

fn proxy_name(stage: &Stage<'_>) -> Result<String> {
    withheld(stage, "service.kubernetes.io/service-proxy-name", "somebody-else")?;
    Ok(in_families(
        stage,
        "withheld from birth and while alive, served when the label went",
    ))
}

fn headless(stage: &Stage<'_>) -> Result<String> {
    withheld(stage, "service.kubernetes.io/headless", "")?;
    Ok(in_families(
        stage,
        "withheld from birth and while alive, served when the label went",
    ))
}

/// A load balancer's Service without endpoints refuses everybody, by each kind of address.
fn refuses(stage: &Stage<'_>, policy: &str) -> Result<()> {
    let addresses: Vec<_> = stage.families().iter().map(|family| routed(*family, 202)).collect();
    let mut service = stage.service(|spec| {
        load_balancer(spec);
        spec["externalIPs"] = json!(addresses);
        spec["externalTrafficPolicy"] = json!(policy);
        spec["internalTrafficPolicy"] = json!(policy);
    })?;
    stage.give_address(&mut service, routed(stage.families()[0], 203), "VIP")?;
    let client = stage.client(2)?;
    stage.have(&service, &[])?;
    let check = || -> Result<()> {
        for (family, external) in stage.families().iter().zip(&addresses) {
            let (cluster, node) = (service.cluster(*family)?, service.node_port(*family, 1)?);
            let external = plan::at(*external, PORT);
            for from in [From::Pod(&client), From::Node(1)] {
                for target in [cluster, node, external] {
                    refused(stage, &from, target)?;
                }
            }
            for target in [node, external] {
                refused(stage, &From::Outside, target)?;
            }
        }
        let balanced = plan::at(routed(stage.families()[0], 203), PORT);
        refused(stage, &From::Outside, balanced)?;
        refused(stage, &From::Pod(&client), balanced)
    };
    check()?;
    // Served once, and refused again when the pod is gone.
    let pod = stage.pod(1)?;
    stage.have(&service, &[&pod])?;
    let inside = From::Node(1);
    for family in stage.families() {
        served(stage, &inside, service.cluster(*family)?, &[&pod])?;
        served(stage, &From::Outside, service.node_port(*family, 1)?, &[&pod])?;
    }
    stage.end(&pod)?;
    stage.have(&service, &[])?;
    check()
}

fn rejected(stage: &Stage<'_>) -> Result<String> {
    refuses(stage, "Cluster")?;
    Ok(in_families(
        stage,
        "TCP and UDP, by cluster, node, external and load balancer's address",
    ))
}

fn rejected_local(stage: &Stage<'_>) -> Result<String> {
    refuses(stage, "Local")?;
    Ok(in_families(
        stage,
        "TCP and UDP, by cluster, node, external and load balancer's address",
    ))
}

fn evicted(stage: &Stage<'_>) -> Result<String> {
    let service = stage.service(node_ports)?;
    let pod = stage.pod(1)?;
    let client = stage.client(2)?;
    stage.have(&service, &[&pod])?;
    let path = format!("/api/v1/namespaces/default/pods/{}/status", pod.name);
    let failed = json!({"status": {"phase": "Failed", "reason": "Evicted", "message": "the node was low on memory"}});
    stage.cluster.api().patch(&path, &failed)?;
    stage.have(&service, &[])?;
    for family in stage.families() {
        refused(stage, &From::Pod(&client), service.cluster(*family)?)?;
        refused(stage, &From::Outside, service.node_port(*family, 2)?)?;
        // The pod would answer: it is not asked.
        stage.dial(&From::Pod(&client), pod.at(*family))??;
    }
    Ok(in_families(stage, "refused though the pod's process serves"))
}
