//! What is served from outside, and to whom: node ports, external IPs, addresses of load balancers, source ranges.

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;

use super::{Case, refused_quickly, unserved};
use crate::{
    lab::{
        Lab,
        dial::{Dialer, Failure},
        plan::{self, Family},
    },
    runner::scaled,
};

/// The cases.
pub const CASES: &[Case] = &[
    Case::new("C12", "node_ports_are_served_on_every_node", node_ports),
    Case::new("C12", "node_ports_are_not_served_elsewhere", elsewhere),
    Case::new("C13", "an_address_of_a_load_balancer_is_served", load_balancer),
    Case::new("C13", "an_address_that_a_proxy_handles_is_left_alone", proxy_mode),
    Case::new(
        "C13",
        "an_address_that_several_nodes_get_is_served_by_each",
        several_nodes,
    ),
    Case::new("C14", "source_ranges_admit_whom_they_name", source_ranges),
    Case::new("C15", "external_ips_are_served_unless_switched_off", external_ips),
    Case::new("C16", "a_load_balancer_needs_no_node_port", no_node_port),
];

fn node_ports(lab: &Lab, family: Family) -> Result<String> {
    let service = lab.service(family);
    let (here, there) = (lab.pod(2, 1), lab.pod(3, 1));
    service.apply(&[here.ready(family), there.ready(family)])?;
    let each = scaled(12, 8);
    for node in 1..=plan::NODES {
        let begun = lab.node(node).counted("new_flow")?;
        let target = service.node_port(node);
        let mut met = lab.outside().dial_many(target, each)?;
        met.extend(lab.outside().ask_many(target, each)?);
        for pod in [here, there] {
            // A backend of the node itself sees the client, one elsewhere the node.
            let source = if pod.node == node {
                plan::client(family, 1)
            } else {
                plan::node(family, node)
            };
            let of_pod: Vec<_> = met.iter().filter(|met| met.name == pod.name).collect();
            ensure!(!of_pod.is_empty(), "node {node} never chose {}", pod.name);
            ensure!(of_pod.iter().all(|met| met.peer.ip() == source), "{of_pod:?}");
        }
        service.wait_connects(node, 2 * each as u64)?;
        lab.node(node).wait_counted("new_flow", begun + 2 * each as u64)?;
    }
    Ok(format!("{} connections and datagrams by each of three nodes", 2 * each))
}

fn elsewhere(lab: &Lab, family: Family) -> Result<String> {
    let service = lab.service(family);
    service.apply(&[lab.pod(1, 1).ready(family)])?;
    let port = service.node_port(1).port();
    let other = plan::at(plan::pod_gateway(family, 1), port);
    let met = lab.outside().dial(other);
    ensure!(met == Err(Failure::Refused), "{other}: {met:?}");
    let node = lab.node(1);
    let localhost = match family {
        Family::V4 => plan::at(std::net::Ipv4Addr::LOCALHOST.into(), port),
        Family::V6 => plan::at(std::net::Ipv6Addr::LOCALHOST.into(), port),
    };
    let met = node.inside(|| Dialer::new(&node.netns).dial(localhost))?;
    ensure!(met == Err(Failure::Refused), "{localhost}: {met:?}");
    lab.outside().dial(service.node_port(1))?;
    Ok("another address of the node and localhost refuse".to_owned())
}

fn load_balancer(lab: &Lab, family: Family) -> Result<String> {
    let service = lab.service(family).load_balancer("VIP");
    service.apply(&[lab.pod(1, 1).ready(family), lab.pod(2, 1).ready(family)])?;
    let each = scaled(16, 8);
    let met = lab.outside().dial_many(service.routed(), each)?;
    for pod in [lab.pod(1, 1), lab.pod(2, 1)] {
        ensure!(
            met.iter().any(|met| met.name == pod.name),
            "{} was never chosen",
            pod.name
        );
    }
    lab.outside().ask(service.routed())?;
    service.wait_connects(1, each as u64 + 1)?;
    Ok(format!("{each} connections over two pods, one of them elsewhere"))
}

fn proxy_mode(lab: &Lab, family: Family) -> Result<String> {
    let service = lab.service(family).load_balancer("Proxy");
    service.apply(&[lab.pod(1, 1).ready(family)])?;
    unserved(&lab.outside(), service.routed())?;
    lab.outside().dial(service.node_port(1))?;
    service.wait_connects(1, 1)?;
    Ok("the address leads nowhere, the node port is served".to_owned())
}

fn several_nodes(lab: &Lab, family: Family) -> Result<String> {
    let service = lab.service(family).load_balancer("VIP");
    service.route_to(&[1, 2, 3])?;
    service.apply(&[lab.pod(1, 1).ready(family), lab.pod(2, 1).ready(family)])?;
    let each = scaled(40, 24);
    lab.outside().dial_many(service.routed(), each)?;
    let mut counts = Vec::new();
    for node in 1..=plan::NODES {
        counts.push(service.connects(node)?);
    }
    ensure!(counts.iter().all(|count| *count > 0), "connections by node: {counts:?}");
    ensure!(counts.iter().sum::<u64>() == each as u64, "{counts:?} are not {each}");
    Ok(format!("{counts:?} of {each} connections by node"))
}

fn source_ranges(lab: &Lab, family: Family) -> Result<String> {
    let admitted = plan::client(family, 1);
    let other = match family {
        Family::V4 => "2001:db8:ffff::/48",
        Family::V6 => "198.18.0.0/15",
    };
    let service = lab.service(family).load_balancer("VIP").with(
        "loadBalancerSourceRanges",
        json!([format!(" {admitted}/{} ", family.host_len()), other]),
    );
    service.apply(&[lab.pod(1, 1).ready(family)])?;
    let denied = lab.node(1).counted("source_denied")?;
    let stranger = lab.outside().from(plan::at(plan::client(family, 2), 0));
    lab.outside().dial(service.routed()).context("the admitted client")?;
    stranger.expect_silence(service.routed())?;
    let asked = stranger.within(crate::lab::dial::silence()).ask(service.routed());
    ensure!(
        asked == Err(Failure::Silent),
        "a datagram from outside the range: {asked:?}"
    );
    lab.node(1).wait_counted("source_denied", denied + 2)?;
    stranger
        .dial(service.node_port(1))
        .context("node ports have no ranges")?;
    let everybody = match family {
        Family::V4 => "0.0.0.0/0",
        Family::V6 => "::/0",
    };
    let service = service.with("loadBalancerSourceRanges", json!([everybody]));
    service.apply(&[lab.pod(1, 1).ready(family)])?;
    stranger.dial(service.routed()).context("a range of everybody")?;
    Ok("dropped outside of the range, served inside, and to all under /0".to_owned())
}

fn external_ips(lab: &Lab, family: Family) -> Result<String> {
    let mut service = lab.service(family);
    service.spec["externalIPs"] = json!([service.routed_ip()]);
    service.apply(&[lab.pod(1, 1).ready(family), lab.pod(2, 1).ready(family)])?;
    let each = scaled(6, 4);
    lab.outside().dial_many(service.routed(), each)?;
    lab.outside().ask(service.routed())?;
    service.wait_connects(1, each as u64 + 1)?;
    lab.node(1).restart_with(&["--external-ips", "false"])?;
    let unserved = unserved(&lab.outside(), service.routed());
    let node_port = lab.outside().dial(service.node_port(1));
    lab.node(1).restart_with(&[])?;
    unserved?;
    node_port.context("the node port beside it")?;
    lab.outside().dial(service.routed()).context("switched on again")?;
    Ok("served, not served while switched off, and served again".to_owned())
}

fn no_node_port(lab: &Lab, family: Family) -> Result<String> {
    let mut service = lab
        .service(family)
        .load_balancer("VIP")
        .with("allocateLoadBalancerNodePorts", false);
    let Some(ports) = service.spec["ports"].as_array_mut() else {
        bail!("a Service has ports");
    };
    for port in ports {
        if let Some(port) = port.as_object_mut() {
            port.remove("nodePort");
        }
    }
    service.apply(&[lab.pod(1, 1).ready(family)])?;
    lab.outside().dial(service.routed())?;
    lab.outside().ask(service.routed())?;
    service.wait_connects(1, 2)?;
    refused_quickly(&lab.outside(), service.node_port(1))?;
    Ok("the address is served, no port of the node is".to_owned())
}
