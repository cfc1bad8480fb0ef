//! What a service proxy owes its cluster, end to end: from a manifest through the agent and the kernel to a connection.
//!
//! Each name begins with its row of the contract. What the rows mean in every corner is tested where it is decided; here
//! a real connection proves that it arrives, for IPv4 and IPv6.

mod endpoints;
mod services;

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    process::ExitCode,
    time::Duration,
};

use anyhow::Result;
use lb_tests::{
    agent::{NODE_V4, NODE_V6, Node, must, trial, until},
    objects::{ready, slice},
    runner,
};
use lb_user::lab::{
    Server,
    client::{Failure, Load},
    server::Manner,
};
use nix::errno::Errno;
use serde_json::Value;

fn main() -> ExitCode {
    runner::run(vec![
        trial("c01_only_services_that_are_ours", services::ours),
        trial("c02_families_are_independent", endpoints::families),
        trial("c03_ports_match_by_name_and_protocol", endpoints::ports),
        trial("c04_slices_merge_and_endpoints_move", endpoints::slices),
        trial("c05_conditions_that_are_not_said", endpoints::conditions),
        trial("c06_one_address_is_one_backend", endpoints::duplicates),
        trial("c07_serving_and_terminating_when_none_is_ready", endpoints::terminating),
        trial("c08_hints_for_the_node_then_the_zone", endpoints::hints),
        trial("c09_internal_policy_local", endpoints::internal_local),
        trial("c10_external_policy_local_from_inside", endpoints::external_local),
        trial("c11_no_endpoint_refuses_at_once", endpoints::no_endpoint),
        trial("c12_node_ports_on_the_nodes_addresses", services::node_ports),
        trial("c13_load_balancer_addresses", services::load_balancer),
        trial("c15_external_addresses", services::external_ips),
        trial("c18_affinity_is_switched_live", services::affinity),
        trial("the_older_service_owns_an_address", services::ownership),
        trial("bad_input_is_told_and_harms_nobody_else", services::bad_input),
    ])
}

/// A family's addresses.
struct Family {
    vip: &'static str,
    other_vip: &'static str,
    external: &'static str,
    backends: [&'static str; 3],
    node: &'static str,
    other_node: &'static str,
    loopback: &'static str,
}

const FAMILIES: [Family; 2] = [
    Family {
        vip: "10.96.0.10",
        other_vip: "10.96.0.20",
        external: "198.51.100.7",
        backends: ["10.244.1.1", "10.244.1.2", "10.244.1.3"],
        node: NODE_V4,
        other_node: "192.0.2.11",
        loopback: "127.0.0.1",
    },
    Family {
        vip: "fd00:96::10",
        other_vip: "fd00:96::20",
        external: "2001:db8:7::7",
        backends: ["fd00:244::1", "fd00:244::2", "fd00:244::3"],
        node: NODE_V6,
        other_node: "2001:db8::11",
        loopback: "::1",
    },
];

const VIPS: [&str; 2] = [FAMILIES[0].vip, FAMILIES[1].vip];

fn at(address: &str, port: u16) -> String {
    if address.contains(':') {
        format!("[{address}]:{port}")
    } else {
        format!("{address}:{port}")
    }
}

fn serve_all(node: &Node) -> Result<Server> {
    let all: Vec<&str> = FAMILIES.iter().flat_map(|family| family.backends).collect();
    node.serve(&all, Manner::Greet)
}

/// Writes one slice a family for the Service `web`, of what a function says of the family's backends.
fn write_slices(node: &Node, endpoints: impl Fn(&Family) -> Vec<Value>) -> Result<()> {
    let slices: Vec<Value> = FAMILIES
        .iter()
        .zip(["web-v4", "web-v6"])
        .map(|(family, name)| (name, endpoints(family)))
        .filter(|(_, endpoints)| !endpoints.is_empty())
        .map(|(name, endpoints)| slice(name, "web", &endpoints))
        .collect();
    node.write("web-slices.yaml", &slices)
}

fn all_ready(family: &Family) -> Vec<Value> {
    family.backends.iter().map(|address| ready(address)).collect()
}

/// Waits until connections to a target meet exactly these addresses.
fn meets(node: &Node, target: &str, addresses: &[&str]) -> Result<()> {
    let wanted: BTreeSet<IpAddr> = addresses.iter().map(|text| Ok(text.parse()?)).collect::<Result<_>>()?;
    until("the right backends to be met", || {
        let met: BTreeSet<IpAddr> = node.dial_many(target, 24)?.keys().map(SocketAddr::ip).collect();
        must(met == wanted, || format!("{target} leads to {met:?}, not {wanted:?}"))
    })
}

/// Waits until connections to a target fail with an errno, and then within a second.
fn fails(node: &Node, target: &str, errno: Errno) -> Result<()> {
    until("the right failure", || {
        let attempt = node.attempt(&Load::tcp(target.parse()?));
        let quick = attempt.took < Duration::from_secs(1);
        must(attempt.outcome == Err(Failure::Connect(errno)) && quick, || {
            format!("{target}: {:?} after {:?}, not {errno}", attempt.outcome, attempt.took)
        })
    })
}

/// Waits until a target is served by nobody here: the namespace has no route to it.
fn passes(node: &Node, target: &str) -> Result<()> {
    fails(node, target, Errno::ENETUNREACH)
}
