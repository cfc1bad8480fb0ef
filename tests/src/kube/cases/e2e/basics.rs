//! Which ports are served, and by whom.

use anyhow::{Result, ensure};
use serde_json::json;

use super::{
    Case, Stage, asks, both, clusters, connects, delete, in_families, node_ports, refused, served, tried, unserved,
};
use crate::{
    kube::stage::{From, PORT, StagePod},
    lab::plan::{self, CLOSED, TARGET, TARGET_DF, TARGET_SECOND},
};

/// The cases.
pub(super) const CASES: &[Case] = &[
    Case::e2e("serve_a_basic_endpoint", basic),
    Case::e2e("multiport_endpoints", multiport),
    Case::e2e("same_port_different_protocols", protocols),
    Case::e2e("functioning_node_port", node_port),
    Case::e2e("slices_with_several_ports", slices_ports),
    Case::e2e("slices_with_several_addresses", slices_addresses),
];

fn basic(stage: &Stage<'_>) -> Result<String> {
    let service = stage.service(both)?;
    let client = stage.client(1)?;
    let check = |pods: &[&StagePod]| -> Result<()> {
        stage.have(&service, pods)?;
        for family in stage.families() {
            for from in [From::Pod(&client), From::Node(3)] {
                let target = service.cluster(*family)?;
                if pods.is_empty() {
                    refused(stage, &from, target)?;
                } else {
                    served(stage, &from, target, pods)?;
                }
            }
        }
        Ok(())
    };
    check(&[])?;
    let one = stage.pod(1)?;
    check(&[&one])?;
    let two = stage.pod(2)?;
    check(&[&one, &two])?;
    stage.end(&one)?;
    check(&[&two])?;
    stage.end(&two)?;
    check(&[])?;
    Ok(in_families(
        stage,
        "none, one, two, one and no pod, from a pod and from a node",
    ))
}

fn multiport(stage: &Stage<'_>) -> Result<String> {
    // Each name is of that container's port which has it, and not every pod has both.
    let pod = |node, ports: &[(&str, u16)]| {
        let mut object = stage.pod_object(node);
        object["spec"]["containers"][0]["ports"] = ports
            .iter()
            .map(|(name, port)| json!({"name": name, "containerPort": port}))
            .collect();
        stage.make_pod(&object)
    };
    let service = stage.service(|spec| {
        spec["ports"] = json!([
            {"name": "first", "protocol": "TCP", "port": 80, "targetPort": "one"},
            {"name": "second", "protocol": "TCP", "port": 81, "targetPort": "two"},
        ]);
    })?;
    let first = pod(1, &[("one", TARGET)])?;
    let second = pod(2, &[("two", TARGET_SECOND)])?;
    let client = stage.client(3)?;
    let check = |firsts: &[&StagePod], seconds: &[&StagePod]| -> Result<()> {
        let all: Vec<&StagePod> = firsts.iter().chain(seconds).copied().collect();
        stage.have(&service, &all)?;
        for family in stage.families() {
            let ip = service.cluster(*family)?.ip();
            for (number, target, pods) in [(80, TARGET, firsts), (81, TARGET_SECOND, seconds)] {
                let at = plan::at(ip, number);
                if pods.is_empty() {
                    let dialled = stage.dial(&From::Pod(&client), at)?;
                    ensure!(
                        dialled == Err(crate::lab::dial::Failure::Refused),
                        "a port without an endpoint: {dialled:?}"
                    );
                    continue;
                }
                for met in connects(stage, &From::Pod(&client), at, pods)? {
                    ensure!(met.own.port() == target, "port {number} met {met:?}");
                }
            }
        }
        Ok(())
    };
    check(&[&first], &[&second])?;
    let third = pod(1, &[("one", TARGET), ("two", TARGET_SECOND)])?;
    check(&[&first, &third], &[&second, &third])?;
    stage.end(&first)?;
    stage.end(&third)?;
    check(&[], &[&second])?;
    Ok(in_families(
        stage,
        "two ports with pods of their own, one in both, and one port without any",
    ))
}

fn protocols(stage: &Stage<'_>) -> Result<String> {
    let mut tcp = json!({"name": "tcp", "protocol": "TCP", "port": PORT, "targetPort": TARGET});
    let mut udp = json!({"name": "udp", "protocol": "UDP", "port": PORT, "targetPort": TARGET_DF});
    let mut service = stage.service(|spec| {
        spec["type"] = json!("NodePort");
        spec["ports"] = json!([tcp, udp]);
    })?;
    let pod = stage.pod(1)?;
    let client = stage.client(2)?;
    let node_port = |protocol: usize| service.object["spec"]["ports"][protocol]["nodePort"].clone();
    ensure!(
        node_port(0) == node_port(1),
        "{} and {} are not one node port for both protocols",
        node_port(0),
        node_port(1)
    );
    // An update that names none would be given two.
    tcp["nodePort"] = node_port(0);
    udp["nodePort"] = node_port(0);
    for (with_tcp, with_udp) in [(true, true), (false, true), (true, false), (true, true)] {
        let mut ports = Vec::new();
        if with_tcp {
            ports.push(tcp.clone());
        }
        if with_udp {
            ports.push(udp.clone());
        }
        stage.change(&mut service, &json!({"ports": ports}))?;
        stage.have(&service, &[&pod])?;
        let outside: Result<Vec<_>> = (stage.families().iter())
            .map(|family| service.node_port(*family, 3))
            .collect();
        for (from, targets) in [
            (From::Pod(&client), clusters(stage, &service)?),
            (From::Outside, outside?),
        ] {
            // TCP and UDP in turn.
            for (n, (target, met)) in tried(stage, &from, &targets)?.into_iter().enumerate() {
                let wanted = [with_tcp.then_some(TARGET), with_udp.then_some(TARGET_DF)][n % 2];
                let port = met.as_ref().ok().map(|met| met.own.port());
                ensure!(port == wanted, "{from} to {target}: {met:?}, and {wanted:?} was wanted");
            }
        }
    }
    Ok(in_families(
        stage,
        "both protocols at one number, each alone, and both again",
    ))
}

fn node_port(stage: &Stage<'_>) -> Result<String> {
    let service = stage.service(node_ports)?;
    let (one, two) = (stage.pod(1)?, stage.pod(2)?);
    let client = stage.client(3)?;
    stage.have(&service, &[&one, &two])?;
    let mut dialled = [0_u64; plan::NODES as usize + 1];
    for family in stage.families() {
        for node in 1..=plan::NODES {
            let target = service.node_port(*family, node)?;
            let met = served(stage, &From::Outside, target, &[&one, &two])?;
            dialled[usize::from(node)] += met.len() as u64;
            for met in met {
                // A pod of the node itself sees the client, one elsewhere the node.
                let here =
                    met.own.ip() == stage_ip(&one, &two, &met.name, *family) && node_of(&one, &two, &met.name) == node;
                let source = if here {
                    plan::client(*family, 1)
                } else {
                    plan::node(*family, node)
                };
                ensure!(met.peer.ip() == source, "{met:?} and not {source}");
            }
            for from in [From::Pod(&client), From::Node(3)] {
                // Another node's port is that node's to serve.
                dialled[usize::from(node)] += served(stage, &from, target, &[&one, &two])?.len() as u64;
            }
        }
    }
    for node in 1..=plan::NODES {
        stage.wait_connects(node, &service, dialled[usize::from(node)])?;
    }
    let closed = service.node_port(stage.families()[0], 1)?;
    delete(stage, &service)?;
    refused(stage, &From::Outside, closed)?;
    unserved(stage, &From::Pod(&client), &[closed])?;
    Ok(in_families(
        stage,
        "each node's port from outside, from a pod and from a node; closed with the Service",
    ))
}

fn node_of(one: &StagePod, two: &StagePod, name: &str) -> u8 {
    if one.name == name {
        one.place.node
    } else {
        two.place.node
    }
}

fn stage_ip(one: &StagePod, two: &StagePod, name: &str, family: plan::Family) -> std::net::IpAddr {
    if one.name == name {
        one.place.ip(family)
    } else {
        two.place.ip(family)
    }
}

fn slices_ports(stage: &Stage<'_>) -> Result<String> {
    let service = stage.service(|spec| {
        spec["selector"] = json!(null);
        spec["ports"] = json!([
            {"name": "first", "protocol": "TCP", "port": 80},
            {"name": "second", "protocol": "TCP", "port": 81},
            {"name": "third", "protocol": "UDP", "port": 80},
        ]);
    })?;
    let (one, two) = (stage.pod(1)?, stage.pod(2)?);
    let client = stage.client(3)?;
    for family in stage.families() {
        // The first slice has two ports, the second one of those and another.
        let endpoints = |pod: &StagePod| json!([{"addresses": [pod.place.ip(*family)], "conditions": {"ready": true}}]);
        let mut slice = stage.slice_object("a", &service.name, *family, &endpoints(&one));
        slice["ports"] = json!([
            {"name": "first", "protocol": "TCP", "port": TARGET},
            {"name": "third", "protocol": "UDP", "port": TARGET_DF},
        ]);
        stage.put(&slice)?;
        let mut slice = stage.slice_object("b", &service.name, *family, &endpoints(&two));
        slice["ports"] = json!([
            {"name": "first", "protocol": "TCP", "port": TARGET_SECOND},
            {"name": "second", "protocol": "TCP", "port": TARGET},
        ]);
        stage.put(&slice)?;
    }
    stage.cluster.settle()?;
    for family in stage.families() {
        let ip = service.cluster(*family)?.ip();
        let (first, second) = (plan::at(ip, 80), plan::at(ip, 81));
        for from in [From::Pod(&client), From::Node(1)] {
            for met in connects(stage, &from, first, &[&one, &two])? {
                let port = if met.name == one.name { TARGET } else { TARGET_SECOND };
                ensure!(met.own.port() == port, "{met:?}");
            }
            for met in connects(stage, &from, second, &[&two])? {
                ensure!(met.own.port() == TARGET, "{met:?}");
            }
            for met in asks(stage, &from, first, &[&one])? {
                ensure!(met.own.port() == TARGET_DF, "{met:?}");
            }
        }
    }
    Ok(in_families(
        stage,
        "three ports over two slices, one port of both with a number of each slice",
    ))
}

fn slices_addresses(stage: &Stage<'_>) -> Result<String> {
    let service = stage.service(|spec| spec["selector"] = json!(null))?;
    let pods = stage.pods(&[1, 2, 3, 1])?;
    let never = stage.pod(2)?;
    let client = stage.client(3)?;
    for family in stage.families() {
        let endpoint = |pod: &StagePod| json!({"addresses": [pod.place.ip(*family)], "conditions": {"ready": true}});
        let first = json!([endpoint(&pods[0]), endpoint(&pods[1])]);
        stage.slice("a", &service.name, *family, &first)?;
        // Further addresses of an endpoint are not for proxies.
        let mut several = endpoint(&pods[3]);
        several["addresses"] = json!([pods[3].place.ip(*family), never.place.ip(*family)]);
        stage.slice("b", &service.name, *family, &json!([endpoint(&pods[2]), several]))?;
    }
    stage.cluster.settle()?;
    let all: Vec<&StagePod> = pods.iter().collect();
    for family in stage.families() {
        for from in [From::Pod(&client), From::Node(2)] {
            connects(stage, &from, service.cluster(*family)?, &all)?;
        }
    }
    // One of a slice's addresses goes, the others stay.
    for family in stage.families() {
        let left = json!([{"addresses": [pods[1].place.ip(*family)], "conditions": {"ready": true}}]);
        stage.slice("a", &service.name, *family, &left)?;
    }
    stage.cluster.settle()?;
    for family in stage.families() {
        connects(stage, &From::Pod(&client), service.cluster(*family)?, &all[1..])?;
    }
    let other = plan::at(service.cluster(stage.families()[0])?.ip(), CLOSED);
    unserved(stage, &From::Pod(&client), &[other])?;
    Ok(in_families(
        stage,
        "four pods in two slices, then three; never the second address of an endpoint",
    ))
}
