//! What is served from outside, and to whom: node ports, addresses of load balancers, source ranges, external IPs (C12 to C16).

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::{AT_ONCE, BOTH, Case, Changed, Over, Scene, Stage, give_ingress, port_over, routed, served_at};
use crate::{
    kube::stage::{From, StageService},
    lab::{
        dial::{Dialer, Failure, patience},
        plan::{self, Family},
    },
};

/// The cases.
pub const CASES: &[Case] = &[
    Case::row("C12", "node_ports_are_served_on_primary_addresses_alone", primary),
    Case::row("C12", "node_ports_are_served_on_the_addresses_of_given_blocks", blocks),
    Case::row("C13", "addresses_of_load_balancers_are_served_by_their_mode", modes),
    Case::row("C14", "source_ranges_admit_whom_they_name", ranges),
    Case::row("C15", "external_ips_are_served_unless_switched_off", external_ips),
    Case::row("C16", "a_load_balancer_needs_no_node_port", no_node_port),
];

fn primary(stage: &Stage<'_>) -> Result<String> {
    let pods = stage.pods(&[2, 3])?;
    let all: Vec<_> = pods.iter().collect();
    let mut spec = stage.two_ports();
    spec["type"] = json!("NodePort");
    let service = stage.named_service("port", spec, &json!({}))?;
    let client = stage.client(1)?;
    stage.have(&service, &all)?;
    for node in 1..=plan::NODES {
        for family in stage.families() {
            stage.meet(&From::Outside, port_over(&service, *family, node, Over::Tcp)?, &all)?;
            let target = port_over(&service, *family, node, Over::Udp)?;
            stage
                .attempt(&From::Outside, Over::Udp, target, patience())?
                .with_context(|| format!("ask {target}"))?;
        }
        let wanted: BTreeSet<IpAddr> = stage
            .families()
            .iter()
            .map(|family| plan::node(*family, node))
            .collect();
        let found = served_at(stage, node, &service, "NodePort")?;
        ensure!(found == wanted, "node {node} serves {found:?} and not {wanted:?}");
        stage.wait_connects(node, &service, (super::MANY as u64 + 1) * stage.families().len() as u64)?;
    }
    // The own node's by a pod and by the node, and neither localhost nor another address that the node has.
    for family in stage.families() {
        let target = port_over(&service, *family, 1, Over::Tcp)?;
        stage.meet(&From::Pod(&client), target, &all)?;
        let localhost: IpAddr = match family {
            Family::V4 => Ipv4Addr::LOCALHOST.into(),
            Family::V6 => Ipv6Addr::LOCALHOST.into(),
        };
        for (from, address) in [
            (From::Node(1), localhost),
            (From::Outside, plan::pod_gateway(*family, 1)),
        ] {
            let target = plan::at(address, target.port());
            let met = stage.attempt(&from, Over::Tcp, target, AT_ONCE)?;
            ensure!(met == Err(Failure::Refused), "{target} from {from}: {met:?}");
        }
    }
    Ok("TCP and UDP on three nodes; not on localhost, nor on another address of a node".to_owned())
}

fn blocks(stage: &Stage<'_>) -> Result<String> {
    // A pod of node 3 gives it a further address, its end of the pod's link.
    let pod = stage.pod(3)?;
    let mut spec = stage.two_ports();
    spec["type"] = json!("NodePort");
    let service = stage.named_service("port", spec, &json!({}))?;
    stage.have(&service, &[&pod])?;
    let blocks = Family::ALL.map(|family| {
        let (block, length) = plan::pod_block(family, 3);
        format!("{block}/{length}")
    });
    let changed = Changed::restart(stage.cluster.node(3), &["--nodeport-addresses", &blocks.join(",")])?;
    stage.cluster.settle()?;
    let wanted: BTreeSet<IpAddr> = stage
        .families()
        .iter()
        .map(|family| plan::pod_gateway(*family, 3))
        .collect();
    let found = served_at(stage, 3, &service, "NodePort")?;
    ensure!(found == wanted, "node 3 serves {found:?} and not {wanted:?}");
    for family in stage.families() {
        let at_node = port_over(&service, *family, 3, Over::Tcp)?;
        let in_block = plan::at(plan::pod_gateway(*family, 3), at_node.port());
        for from in [From::Outside, From::Node(3)] {
            stage.meet(&from, in_block, &[&pod])?;
            let met = stage.attempt(&from, Over::Tcp, at_node, AT_ONCE)?;
            ensure!(met == Err(Failure::Refused), "{at_node} from {from}: {met:?}");
        }
    }
    changed.put_back()?;
    stage.cluster.settle()?;
    for family in stage.families() {
        stage.meet(&From::Outside, port_over(&service, *family, 3, Over::Tcp)?, &[&pod])?;
    }
    Ok("an address within the blocks, not the primary one, which came back".to_owned())
}

fn modes(stage: &Stage<'_>) -> Result<String> {
    const N: u8 = 20;
    let pods = stage.pods(&[1, 2])?;
    let all: Vec<_> = pods.iter().collect();
    let client = stage.client(3)?;
    let mut service = stage.balancer(N, |_| {})?;
    stage.have(&service, &all)?;
    let vip = |served: &StageService| -> Result<()> {
        for family in stage.families() {
            stage.meet(&From::Outside, routed(*family, N), &all)?;
            stage.attempt(&From::Outside, Over::Udp, routed(*family, N), patience())??;
            stage.meet(&From::Pod(&client), routed(*family, N), &all)?;
        }
        let wanted: BTreeSet<IpAddr> = stage.families().iter().map(|family| plan::routed(*family, N)).collect();
        let found = served_at(stage, 1, served, "LoadBalancer")?;
        ensure!(found == wanted, "{found:?} and not {wanted:?}");
        Ok(())
    };
    vip(&service)?;
    stage.wait_connects(1, &service, (super::MANY as u64 + 1) * stage.families().len() as u64)?;
    let steps = [
        ("Proxy", None),
        ("a host name", Some(json!([{"hostname": "balancer.example"}]))),
        ("nothing", Some(json!([]))),
    ];
    for (what, ingress) in steps {
        match ingress {
            None => stage.give_addresses(&mut service, N, "Proxy")?,
            Some(ingress) => give_ingress(stage, &mut service, &ingress)?,
        }
        stage.cluster.settle()?;
        for node in 1..=plan::NODES {
            let found = served_at(stage, node, &service, "LoadBalancer")?;
            ensure!(found.is_empty(), "{what}: node {node} serves {found:?}");
        }
        for family in stage.families() {
            stage.unserved(&From::Outside, routed(*family, N))?;
            stage.unserved(&From::Pod(&client), routed(*family, N))?;
            // The node port beside it is.
            let target = port_over(&service, *family, 2, Over::Tcp)?;
            stage
                .attempt(&From::Outside, Over::Tcp, target, patience())?
                .context(what)?;
        }
    }
    stage.give_addresses(&mut service, N, "VIP")?;
    stage.cluster.settle()?;
    vip(&service)?;
    Ok("VIP is served; Proxy, a host name and nothing leave the address alone; VIP again".to_owned())
}

fn ranges(stage: &Stage<'_>) -> Result<String> {
    const N: u8 = 21;
    let pod = stage.pod(1)?;
    let client = stage.client(1)?;
    let admitted: Vec<String> = stage
        .families()
        .iter()
        .map(|family| format!(" {}/{} ", plan::client(*family, 1), family.host_len()))
        .collect();
    let mut service = stage.balancer(N, |spec| spec["loadBalancerSourceRanges"] = json!(admitted))?;
    stage.have(&service, &[&pod])?;
    let node = stage.cluster.node(1);
    let stranger = |family: Family, over: Over, target| {
        let limit = super::SILENCE;
        let dialer = Dialer::new(&stage.cluster.wires.client).from(plan::at(plan::client(family, 2), 0));
        match over {
            Over::Tcp => dialer.within(limit).dial(target),
            Over::Udp => dialer.within(limit).ask(target),
        }
    };
    let denied = node.counted("source_denied")?;
    for family in stage.families() {
        let target = routed(*family, N);
        stage.meet(&From::Outside, target, &[&pod])?;
        for over in BOTH {
            let met = stranger(*family, over, target);
            ensure!(
                met == Err(Failure::Silent),
                "{over:?} from outside of the ranges: {met:?}"
            );
        }
        // Sockets of the node and node ports have no ranges.
        stage.meet(&From::Pod(&client), target, &[&pod])?;
        stage.meet(&From::Node(1), target, &[&pod])?;
        let met = stranger(*family, Over::Tcp, port_over(&service, *family, 1, Over::Tcp)?);
        met.context("a node port")?;
    }
    node.wait_counted("source_denied", denied + 2 * stage.families().len() as u64)?;
    // Everybody of each family; then ranges of the other family alone, which say nothing of this one.
    let everybody = ["0.0.0.0/0", "::/0"];
    for (what, all) in [("everybody", &everybody[..]), ("no range", &[])] {
        stage.change(&mut service, &json!({"loadBalancerSourceRanges": all}))?;
        stage.cluster.settle()?;
        for family in stage.families() {
            stranger(*family, Over::Tcp, routed(*family, N)).context(what)?;
        }
    }
    if let [family] = stage.families() {
        let other = if *family == Family::V4 {
            "2001:db8:ffff::/48"
        } else {
            "198.18.0.0/15"
        };
        stage.change(&mut service, &json!({"loadBalancerSourceRanges": [other]}))?;
        stage.cluster.settle()?;
        stranger(*family, Over::Tcp, routed(*family, N)).context("ranges of the other family alone")?;
    } else {
        stage.change(&mut service, &json!({"loadBalancerSourceRanges": ["198.18.0.0/15"]}))?;
        stage.cluster.settle()?;
        let met = stranger(Family::V4, Over::Tcp, routed(Family::V4, N));
        ensure!(met == Err(Failure::Silent), "{met:?}");
        stranger(Family::V6, Over::Tcp, routed(Family::V6, N)).context("the family without a range")?;
    }
    // A range that holds the node's own address admits the node.
    let own: Vec<String> = stage
        .families()
        .iter()
        .map(|family| format!("{}/{}", plan::node(*family, 1), family.host_len()))
        .collect();
    stage.change(&mut service, &json!({"loadBalancerSourceRanges": own}))?;
    stage.cluster.settle()?;
    for family in stage.families() {
        stage.meet(&From::Node(1), routed(*family, N), &[&pod])?;
        stage.silent(&From::Outside, Over::Tcp, routed(*family, N))?;
    }
    Ok("dropped outside of the ranges, served inside; spaces, /0, the other family, the node itself".to_owned())
}

fn external_ips(stage: &Stage<'_>) -> Result<String> {
    const N: u8 = 22;
    let pods = stage.pods(&[1, 2])?;
    let all: Vec<_> = pods.iter().collect();
    stage.route(N, &[1])?;
    let addresses: BTreeSet<IpAddr> = stage.families().iter().map(|family| plan::routed(*family, N)).collect();
    let mut spec = stage.two_ports();
    spec["type"] = json!("NodePort");
    spec["externalIPs"] = json!(addresses);
    let service = stage.named_service("external", spec, &json!({}))?;
    let (near, far) = (stage.client(1)?, stage.client(2)?);
    stage.have(&service, &all)?;
    ensure!(
        served_at(stage, 1, &service, "ExternalIP")? == addresses,
        "not served by the agent"
    );
    for family in stage.families() {
        stage.meet(&From::Outside, routed(*family, N), &all)?;
        stage.attempt(&From::Outside, Over::Udp, routed(*family, N), patience())??;
        stage.meet(&From::Pod(&near), routed(*family, N), &all)?;
    }
    let changed = Changed::restart(stage.cluster.node(1), &["--external-ips", "false"])?;
    stage.cluster.settle()?;
    let left = served_at(stage, 1, &service, "ExternalIP")?;
    ensure!(left.is_empty(), "switched off, and {left:?} is served");
    for family in stage.families() {
        stage.unserved(&From::Outside, routed(*family, N))?;
        stage.unserved(&From::Pod(&near), routed(*family, N))?;
        stage.meet(&From::Outside, port_over(&service, *family, 1, Over::Tcp)?, &all)?;
        // The other nodes serve it on.
        stage.meet(&From::Pod(&far), routed(*family, N), &all)?;
    }
    changed.put_back()?;
    stage.cluster.settle()?;
    for family in stage.families() {
        stage.meet(&From::Outside, routed(*family, N), &all)?;
    }
    Ok("served, not served while one node has it switched off, and served again".to_owned())
}

fn no_node_port(stage: &Stage<'_>) -> Result<String> {
    const N: u8 = 23;
    let pods = stage.pods(&[1, 2])?;
    let all: Vec<_> = pods.iter().collect();
    let service = stage.balancer(N, |spec| spec["allocateLoadBalancerNodePorts"] = json!(false))?;
    stage.have(&service, &all)?;
    ensure!(
        service.node_port(Family::V4, 1).is_err(),
        "the API server gave a node port: {}",
        service.object
    );
    let found = served_at(stage, 1, &service, "NodePort")?;
    ensure!(found.is_empty(), "{found:?} is served");
    for family in stage.families() {
        stage.meet(&From::Outside, routed(*family, N), &all)?;
        stage.attempt(&From::Outside, Over::Udp, routed(*family, N), patience())??;
    }
    stage.wait_connects(1, &service, (super::MANY as u64 + 1) * stage.families().len() as u64)?;
    Ok("TCP and UDP by the address alone".to_owned())
}
