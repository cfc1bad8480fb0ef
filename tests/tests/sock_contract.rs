//! What a service proxy owes its cluster, end to end: from a manifest through the agent and the kernel to a connection.
//!
//! Each name begins with its row of the contract. What the rows mean in every corner is tested where it is decided; here
//! a real connection proves that it arrives, for IPv4 and IPv6.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use lb_tests::{
    agent::{Agent, NODE_NAME, NODE_V4, NODE_V6, Node, must, trial, until},
    objects::{cluster_ip, endpoint, ready, service, slice, with},
    runner,
};
use lb_user::lab::{
    Server,
    client::{Failure, Load},
    server::Manner,
};
use nix::errno::Errno;
use serde_json::{Value, json};

fn main() -> ExitCode {
    runner::run(vec![
        trial("c01_only_services_that_are_ours", ours),
        trial("c02_families_are_independent", families),
        trial("c03_ports_match_by_name_and_protocol", ports),
        trial("c04_slices_merge_and_endpoints_move", slices),
        trial("c05_conditions_that_are_not_said", conditions),
        trial("c06_one_address_is_one_backend", duplicates),
        trial("c07_serving_and_terminating_when_none_is_ready", terminating),
        trial("c08_hints_for_the_node_then_the_zone", hints),
        trial("c09_internal_policy_local", internal_local),
        trial("c10_external_policy_local_from_inside", external_local),
        trial("c11_no_endpoint_refuses_at_once", no_endpoint),
        trial("c12_node_ports_on_the_nodes_addresses", node_ports),
        trial("c13_load_balancer_addresses", load_balancer),
        trial("c15_external_addresses", external_ips),
        trial("c18_affinity_is_switched_live", affinity),
        trial("the_older_service_owns_an_address", ownership),
        trial("bad_input_is_told_and_harms_nobody_else", bad_input),
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

fn ours(node: &Node) -> Result<()> {
    let _servers = serve_all(node)?;
    let web = service("web", cluster_ip(&VIPS));
    write_slices(node, all_ready)?;
    node.write("web.yaml", &[web.clone()])?;
    let agent = node.start(&[])?;
    let served = |yes: bool| -> Result<()> {
        for family in &FAMILIES {
            let target = at(family.vip, 80);
            if yes {
                meets(node, &target, &family.backends)?;
            } else {
                passes(node, &target)?;
            }
        }
        Ok(())
    };
    served(true)?;
    for label in ["service.kubernetes.io/service-proxy-name", "service.kubernetes.io/headless"] {
        node.write("web.yaml", &[with(&web, "/metadata/labels", json!({label: "other"}))])?;
        served(false).with_context(|| format!("with the label {label}"))?;
        node.write("web.yaml", &[web.clone()])?;
        served(true).with_context(|| format!("after the label {label}"))?;
    }
    let headless = service("web", cluster_ip(&["None"]));
    let external = service("web", json!({"type": "ExternalName", "externalName": "example.org"}));
    for (what, object) in [("headless", headless), ("ExternalName", external)] {
        node.write("web.yaml", &[object])?;
        served(false).context(what)?;
        node.write("web.yaml", &[web.clone()])?;
        served(true).context(what)?;
    }
    agent.stop()?;

    let labelled = with(&web, "/metadata/labels", json!({"service.kubernetes.io/service-proxy-name": "mine"}));
    let agent = node.start(&["--proxy-name", "mine"])?;
    served(false).context("an agent with a name, a Service without")?;
    node.write("web.yaml", &[labelled])?;
    served(true).context("an agent with a name, a Service with it")?;
    agent.stop()
}

fn families(node: &Node) -> Result<()> {
    let _servers = serve_all(node)?;
    node.write("web.yaml", &[service("web", cluster_ip(&VIPS))])?;
    let [v4, v6] = &FAMILIES;
    let mut named = slice("web-names", "web", &[json!({"addresses": ["web.example.org"]})]);
    named["addressType"] = json!("FQDN");
    // The second address of an endpoint is not one of its own.
    let two = json!({"addresses": [v4.backends[0], v4.backends[1]]});
    node.write("web-slices.yaml", &[named.clone(), slice("web-v4", "web", &[two])])?;
    let agent = node.start(&[])?;
    meets(node, &at(v4.vip, 80), &v4.backends[..1])?;
    fails(node, &at(v6.vip, 80), Errno::ECONNREFUSED)?;
    let problems = agent.status()?.problems;
    must(problems.is_empty(), || format!("{problems:?}"))?;

    node.write("web-slices.yaml", &[named, slice("web-v6", "web", &all_ready(v6))])?;
    meets(node, &at(v6.vip, 80), &v6.backends)?;
    fails(node, &at(v4.vip, 80), Errno::ECONNREFUSED)?;
    agent.stop()
}

fn ports(node: &Node) -> Result<()> {
    let _servers = serve_all(node)?;
    let spec = json!({
        "clusterIP": VIPS[0], "clusterIPs": VIPS,
        "ports": [
            {"name": "web", "port": 80, "protocol": "TCP"},
            {"name": "names", "port": 80, "protocol": "UDP"},
            {"name": "admin", "port": 81, "protocol": "TCP"},
            {"name": "none", "port": 82, "protocol": "TCP"},
        ],
    });
    node.write("web.yaml", &[service("web", spec)])?;
    let mut datagrams = Vec::new();
    let mut objects = Vec::new();
    for (family, name) in FAMILIES.iter().zip(["web-v4", "web-v6"]) {
        let address: IpAddr = family.backends[0].parse()?;
        // TCP listens on 8080 and 9090, UDP on 8053.
        datagrams.push(Server::start(node.netns(), &[SocketAddr::new(address, 8053)], Manner::Datagram)?);
        datagrams.push(Server::start(node.netns(), &[SocketAddr::new(address, 9090)], Manner::Greet)?);
        objects.push(with(
            &slice(name, "web", &[ready(family.backends[0])]),
            "/ports",
            json!([
                {"name": "names", "port": 8053, "protocol": "UDP"},
                {"name": "admin", "port": 9090, "protocol": "TCP"},
                {"name": "web", "port": 8080, "protocol": "TCP"},
                // Of the right name and the wrong protocol, and without a number.
                {"name": "none", "port": 8080, "protocol": "UDP"},
                {"name": "none", "protocol": "TCP"},
            ]),
        ));
    }
    node.write("web-slices.yaml", &objects)?;
    let agent = node.start(&[])?;
    for family in &FAMILIES {
        let port_of = |port: u16| -> Result<u16> { Ok(node.dial(&at(family.vip, port))?.port()) };
        until("TCP ports", || {
            let found = (port_of(80)?, port_of(81)?);
            must(found == (8080, 9090), || format!("{found:?}"))
        })?;
        let met = node.ask_datagram(&at(family.vip, 80))?;
        must(met.port() == 8053, || format!("UDP met {met}"))?;
        fails(node, &at(family.vip, 82), Errno::ECONNREFUSED)?;
        passes(node, &at(family.vip, 83))?;
    }
    agent.stop()
}

fn slices(node: &Node) -> Result<()> {
    let _servers = serve_all(node)?;
    node.write("web.yaml", &[service("web", cluster_ip(&VIPS))])?;
    let write = |file: &str, pick: &[usize]| -> Result<()> {
        let mut objects = Vec::new();
        for (family, suffix) in FAMILIES.iter().zip(["v4", "v6"]) {
            let endpoints: Vec<Value> = pick.iter().map(|&i| ready(family.backends[i])).collect();
            objects.push(slice(&format!("{file}-{suffix}"), "web", &endpoints));
        }
        node.write(&format!("{file}.yaml"), &objects)
    };
    write("one", &[0, 1])?;
    write("two", &[2])?;
    let agent = node.start(&[])?;
    let met = |pick: &[usize]| -> Result<()> {
        for family in &FAMILIES {
            let addresses: Vec<&str> = pick.iter().map(|&i| family.backends[i]).collect();
            meets(node, &at(family.vip, 80), &addresses)?;
        }
        Ok(())
    };
    met(&[0, 1, 2])?;
    // The second endpoint moves: it is in both slices, then in the other alone.
    let ids = |agent: &Agent| -> Result<BTreeSet<(IpAddr, u32)>> {
        Ok(agent.backends()?.iter().map(|backend| (backend.addr, backend.id)).collect())
    };
    let before = ids(&agent)?;
    write("two", &[1, 2])?;
    met(&[0, 1, 2])?;
    write("one", &[0])?;
    met(&[0, 1, 2])?;
    must(ids(&agent)? == before, || "an endpoint that moved became another".to_owned())?;
    node.manifests().remove("one.yaml")?;
    met(&[1, 2])?;
    node.manifests().remove("two.yaml")?;
    for family in &FAMILIES {
        fails(node, &at(family.vip, 80), Errno::ECONNREFUSED)?;
    }
    agent.stop()
}

fn conditions(node: &Node) -> Result<()> {
    let _servers = serve_all(node)?;
    node.write("web.yaml", &[service("web", cluster_ip(&VIPS))])?;
    write_slices(node, |family| {
        let [a, b, c] = family.backends;
        vec![
            json!({"addresses": [a]}),
            json!({"addresses": [b], "conditions": {}}),
            json!({"addresses": [c], "conditions": {"ready": false}}),
        ]
    })?;
    let agent = node.start(&[])?;
    for family in &FAMILIES {
        meets(node, &at(family.vip, 80), &family.backends[..2])?;
    }
    // Serving when it does not say: the third counts among those that serve while they end.
    write_slices(node, |family| {
        vec![json!({"addresses": [family.backends[2]], "conditions": {"ready": false, "terminating": true}})]
    })?;
    for family in &FAMILIES {
        meets(node, &at(family.vip, 80), &family.backends[2..])?;
    }
    agent.stop()
}

fn duplicates(node: &Node) -> Result<()> {
    let _servers = serve_all(node)?;
    node.write("web.yaml", &[service("web", cluster_ip(&VIPS))])?;
    let mut objects = Vec::new();
    for (family, suffix) in FAMILIES.iter().zip(["v4", "v6"]) {
        let [a, b, _] = family.backends;
        // The first address twice, once not ready: the ready one counts, and once.
        objects.push(slice(&format!("a-{suffix}"), "web", &[endpoint(a, false, false, false), ready(b)]));
        objects.push(slice(&format!("b-{suffix}"), "web", &[ready(a), ready(b)]));
    }
    node.write("web-slices.yaml", &objects)?;
    let agent = node.start(&[])?;
    for family in &FAMILIES {
        meets(node, &at(family.vip, 80), &family.backends[..2])?;
    }
    let tables = agent.tables("web")?;
    must(tables.len() == 2, || format!("{tables:?}"))?;
    for table in tables {
        let whole = table.backends.len() == 2 && table.backends.iter().all(|backend| backend.weight == 1);
        must(whole, || format!("{table:?}"))?;
    }
    agent.stop()
}

fn terminating(node: &Node) -> Result<()> {
    let _servers = serve_all(node)?;
    node.write("web.yaml", &[service("web", cluster_ip(&VIPS))])?;
    let steps: [(&str, [(bool, bool, bool); 3], &[usize]); 4] = [
        ("a ready one wins", [(true, true, false), (false, true, true), (false, false, true)], &[0]),
        ("none is ready", [(false, false, false), (false, true, true), (false, false, true)], &[1]),
        ("none serves", [(false, false, false), (false, false, true), (false, false, true)], &[]),
        ("ready again", [(false, true, true), (true, true, false), (true, true, false)], &[1, 2]),
    ];
    let mut agent = None;
    for (what, states, wanted) in steps {
        write_slices(node, |family| {
            let states = family.backends.into_iter().zip(states);
            states.map(|(address, (r, s, t))| endpoint(address, r, s, t)).collect()
        })?;
        if agent.is_none() {
            agent = Some(node.start(&[])?);
        }
        for family in &FAMILIES {
            let target = at(family.vip, 80);
            let addresses: Vec<&str> = wanted.iter().map(|&i| family.backends[i]).collect();
            if addresses.is_empty() {
                fails(node, &target, Errno::ECONNREFUSED).context(what)?;
            } else {
                meets(node, &target, &addresses).context(what)?;
            }
        }
    }
    agent.context("it was started")?.stop()
}

fn hints(node: &Node) -> Result<()> {
    let _servers = serve_all(node)?;
    node.write("web.yaml", &[service("web", cluster_ip(&VIPS))])?;
    let in_zone = |zone: &str| {
        json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": NODE_NAME, "labels": {"topology.kubernetes.io/zone": zone}},
        })
    };
    node.write("node.yaml", &[in_zone("a")])?;
    let hinted = |address: &str, hints: Value| with(&ready(address), "/hints", hints);
    let zones = |family: &Family| {
        let zone = |name: &str| json!({"forZones": [{"name": name}]});
        vec![
            hinted(family.backends[0], zone("a")),
            hinted(family.backends[1], zone("b")),
            hinted(family.backends[2], zone("a")),
        ]
    };
    write_slices(node, zones)?;
    let agent = node.start(&[])?;
    for family in &FAMILIES {
        meets(node, &at(family.vip, 80), &[family.backends[0], family.backends[2]])?;
    }
    node.write("node.yaml", &[in_zone("b")])?;
    for family in &FAMILIES {
        meets(node, &at(family.vip, 80), &family.backends[1..2]).context("in the other zone")?;
    }
    node.write("node.yaml", &[in_zone("c")])?;
    for family in &FAMILIES {
        meets(node, &at(family.vip, 80), &family.backends).context("in a zone without endpoints")?;
    }
    write_slices(node, |family| {
        let for_node = |name: &str| json!({"forNodes": [{"name": name}], "forZones": [{"name": "c"}]});
        vec![
            hinted(family.backends[0], for_node("node-b")),
            hinted(family.backends[1], for_node(NODE_NAME)),
        ]
    })?;
    for family in &FAMILIES {
        meets(node, &at(family.vip, 80), &family.backends[1..2]).context("a hint for this node")?;
    }
    write_slices(node, |family| {
        let mut endpoints = zones(family);
        endpoints[1] = ready(family.backends[1]);
        endpoints
    })?;
    for family in &FAMILIES {
        meets(node, &at(family.vip, 80), &family.backends).context("one endpoint without a hint")?;
    }
    agent.stop()
}

/// An endpoint on a node.
fn on(node_name: &str, address: &str) -> Value {
    with(&ready(address), "/nodeName", json!(node_name))
}

fn internal_local(node: &Node) -> Result<()> {
    let _servers = serve_all(node)?;
    let mut spec = cluster_ip(&VIPS);
    spec["internalTrafficPolicy"] = json!("Local");
    node.write("web.yaml", &[service("web", spec)])?;
    write_slices(node, |family| {
        let [a, b, c] = family.backends;
        vec![on(NODE_NAME, a), on("node-b", b), on("node-b", c)]
    })?;
    let agent = node.start(&[])?;
    for family in &FAMILIES {
        meets(node, &at(family.vip, 80), &family.backends[..1])?;
    }
    write_slices(node, |family| vec![on("node-b", family.backends[1])])?;
    for family in &FAMILIES {
        fails(node, &at(family.vip, 80), Errno::EHOSTUNREACH).context("endpoints elsewhere alone")?;
    }
    write_slices(node, |_| Vec::new())?;
    for family in &FAMILIES {
        fails(node, &at(family.vip, 80), Errno::ECONNREFUSED).context("C11: no endpoint anywhere")?;
    }
    agent.stop()
}

fn external_local(node: &Node) -> Result<()> {
    let _servers = serve_all(node)?;
    let spec = json!({
        "type": "LoadBalancer", "clusterIP": VIPS[0], "clusterIPs": VIPS, "externalTrafficPolicy": "Local",
        "externalIPs": FAMILIES.each_ref().map(|family| family.external),
        "ports": [{"port": 80, "nodePort": 30_080}],
    });
    node.write("web.yaml", &[service("web", spec)])?;
    write_slices(node, |family| vec![on("node-b", family.backends[0])])?;
    let agent = node.start(&[])?;
    for family in &FAMILIES {
        for target in [at(family.vip, 80), at(family.external, 80), at(family.node, 30_080)] {
            meets(node, &target, &family.backends[..1])?;
        }
    }
    agent.stop()
}

fn no_endpoint(node: &Node) -> Result<()> {
    let mut spec = cluster_ip(&VIPS);
    spec["ports"] = json!([{"name": "t", "port": 80}, {"name": "u", "port": 53, "protocol": "UDP"}]);
    node.write("web.yaml", &[service("web", spec.clone())])?;
    let agent = node.start(&[])?;
    for policy in ["Cluster", "Local"] {
        spec["internalTrafficPolicy"] = json!(policy);
        node.write("web.yaml", &[service("web", spec.clone())])?;
        for family in &FAMILIES {
            fails(node, &at(family.vip, 80), Errno::ECONNREFUSED)?;
            let outcome = node.ask_datagram(&at(family.vip, 53));
            must(outcome == Err(Failure::Connect(Errno::ECONNREFUSED)), || format!("UDP, {policy}: {outcome:?}"))?;
        }
    }
    until("the refusals to be counted", || {
        let web = agent.service("web")?;
        // Two protocols of two families under two policies, and those made while waiting.
        must(web.failed.get("no_backend").is_some_and(|count| *count >= 8), || format!("{web:?}"))
    })?;
    agent.stop()
}

fn node_ports(node: &Node) -> Result<()> {
    let _servers = serve_all(node)?;
    let spec = json!({
        "type": "NodePort", "clusterIP": VIPS[0], "clusterIPs": VIPS,
        "ports": [{"port": 80, "nodePort": 30_080}],
    });
    node.write("web.yaml", &[service("web", spec)])?;
    write_slices(node, all_ready)?;
    let addresses: Vec<&str> = FAMILIES.iter().map(|family| family.node).collect();
    let others: Vec<&str> = FAMILIES.iter().map(|family| family.other_node).collect();
    node.add_addresses(&others)?;
    let mut flags = Vec::new();
    for address in addresses.iter().chain(&others) {
        flags.extend(["--node-address", *address]);
    }
    let blocks = format!("{}/32,{}/128", FAMILIES[0].other_node, FAMILIES[1].other_node);
    // By name: whether the first and the other addresses serve.
    for (which, first, other) in [("primary", true, false), ("all", true, true), (&blocks, false, true)] {
        let mut flags = flags.clone();
        flags.extend(["--nodeport-addresses", which]);
        let agent = node.start(&flags)?;
        for family in &FAMILIES {
            meets(node, &at(family.vip, 80), &family.backends)?;
            for (address, served) in [(family.node, first), (family.other_node, other), (family.loopback, false)] {
                let target = at(address, 30_080);
                if served {
                    meets(node, &target, &family.backends).with_context(|| which.to_owned())?;
                } else {
                    // The address is the host's own, and nobody listens there.
                    fails(node, &target, Errno::ECONNREFUSED).with_context(|| which.to_owned())?;
                }
            }
        }
        let kinds: BTreeSet<String> = agent.service("web")?.frontends.into_iter().map(|f| f.kind).collect();
        must(kinds == BTreeSet::from(["ClusterIP".to_owned(), "NodePort".to_owned()]), || format!("{kinds:?}"))?;
        agent.stop()?;
    }
    Ok(())
}

fn load_balancer(node: &Node) -> Result<()> {
    let _servers = serve_all(node)?;
    let spec = json!({
        "type": "LoadBalancer", "clusterIP": VIPS[0], "clusterIPs": VIPS,
        // C16: it works without node ports.
        "allocateLoadBalancerNodePorts": false,
        "ports": [{"port": 80}],
    });
    let web = service("web", spec);
    let with_mode = |mode: &str| {
        let entry = |family: &Family| json!({"ip": family.external, "ipMode": mode});
        let mut ingress: Vec<Value> = FAMILIES.iter().map(entry).collect();
        ingress.push(json!({"hostname": "lb.example.org"}));
        with(&web, "/status", json!({"loadBalancer": {"ingress": ingress}}))
    };
    node.write("web.yaml", &[with_mode("VIP")])?;
    write_slices(node, all_ready)?;
    let agent = node.start(&[])?;
    for family in &FAMILIES {
        meets(node, &at(family.external, 80), &family.backends)?;
    }
    node.write("web.yaml", &[with_mode("Proxy")])?;
    for family in &FAMILIES {
        passes(node, &at(family.external, 80))?;
        meets(node, &at(family.vip, 80), &family.backends)?;
    }
    let problems = agent.status()?.problems;
    must(problems.is_empty(), || format!("{problems:?}"))?;
    agent.stop()
}

fn external_ips(node: &Node) -> Result<()> {
    let _servers = serve_all(node)?;
    let mut spec = cluster_ip(&VIPS);
    spec["externalIPs"] = json!(FAMILIES.each_ref().map(|family| family.external));
    node.write("web.yaml", &[service("web", spec)])?;
    write_slices(node, all_ready)?;
    let agent = node.start(&[])?;
    for family in &FAMILIES {
        meets(node, &at(family.external, 80), &family.backends)?;
    }
    agent.stop()?;
    let agent = node.start(&["--external-ips", "false"])?;
    for family in &FAMILIES {
        passes(node, &at(family.external, 80))?;
        meets(node, &at(family.vip, 80), &family.backends)?;
    }
    agent.stop()
}

fn affinity(node: &Node) -> Result<()> {
    let _servers = serve_all(node)?;
    let plain = cluster_ip(&VIPS);
    let mut sticky = plain.clone();
    sticky["sessionAffinity"] = json!("ClientIP");
    sticky["sessionAffinityConfig"] = json!({"clientIP": {"timeoutSeconds": 600}});
    node.write("web.yaml", &[service("web", plain.clone())])?;
    write_slices(node, all_ready)?;
    let agent = node.start(&[])?;
    for family in &FAMILIES {
        meets(node, &at(family.vip, 80), &family.backends).context("without affinity")?;
    }
    node.write("web.yaml", &[service("web", sticky)])?;
    let mut chosen = Vec::new();
    for family in &FAMILIES {
        let one = until("one backend alone", || {
            let met = node.dial_many(&at(family.vip, 80), 24)?;
            match met.into_keys().collect::<Vec<_>>()[..] {
                [one] => Ok(one.ip().to_string()),
                ref several => bail!("{several:?} were met"),
            }
        })?;
        chosen.push(one);
    }
    let seconds: BTreeSet<Option<u32>> = agent.service("web")?.frontends.iter().map(|f| f.affinity_seconds).collect();
    must(seconds == BTreeSet::from([Some(600)]), || format!("{seconds:?}"))?;

    // An endpoint that is no longer usable holds nobody.
    write_slices(node, |family| {
        all_ready(family)
            .into_iter()
            .filter(|endpoint| !chosen.iter().any(|one| endpoint["addresses"][0] == json!(one)))
            .collect()
    })?;
    for (family, old) in FAMILIES.iter().zip(&chosen) {
        let next = until("another backend", || {
            let met = node.dial(&at(family.vip, 80))?;
            must(met.ip().to_string() != *old, || format!("still {met}"))?;
            Ok(met.ip().to_string())
        })?;
        // The new choice is kept.
        meets(node, &at(family.vip, 80), &[&next])?;
    }
    write_slices(node, all_ready)?;
    node.write("web.yaml", &[service("web", plain)])?;
    for family in &FAMILIES {
        meets(node, &at(family.vip, 80), &family.backends).context("without affinity again")?;
    }
    agent.stop()
}

fn ownership(node: &Node) -> Result<()> {
    let _servers = serve_all(node)?;
    let created = |name: &str, when: &str, vips: &[&str]| {
        with(&service(name, cluster_ip(vips)), "/metadata/creationTimestamp", json!(when))
    };
    let slices_of = |name: &str, pick: usize| -> Vec<Value> {
        let named = FAMILIES.iter().zip(["v4", "v6"]);
        named
            .map(|(family, suffix)| slice(&format!("{name}-{suffix}"), name, &[ready(family.backends[pick])]))
            .collect()
    };
    let younger_vips = FAMILIES.each_ref().map(|family| family.other_vip);
    // The younger Service comes first, and asks for the older one's addresses beside none of its own.
    let write = |name: &str, when: &str, pick: usize, vips: &[&str]| -> Result<()> {
        let mut objects = slices_of(name, pick);
        objects.push(created(name, when, vips));
        node.write(&format!("{name}.yaml"), &objects)
    };
    write("younger", "2026-02-01T00:00:00Z", 1, &VIPS)?;
    let agent = node.start(&[])?;
    for family in &FAMILIES {
        meets(node, &at(family.vip, 80), &family.backends[1..2])?;
    }
    write("older", "2026-01-01T00:00:00Z", 0, &VIPS)?;
    for family in &FAMILIES {
        meets(node, &at(family.vip, 80), &family.backends[..1]).context("the older one wins")?;
    }
    let problems = agent.status()?.problems;
    let told = |address: &str| {
        problems.iter().any(|problem| {
            problem.object == "Service default/younger"
                && problem.origin.contains("younger.yaml")
                && problem.message.contains(address)
                && problem.message.contains("default/older")
        })
    };
    must(FAMILIES.iter().all(|family| told(family.vip)), || format!("{problems:?}"))?;
    // Addresses of its own are served meanwhile, and the contested ones come back when they are let go.
    write("younger", "2026-02-01T00:00:00Z", 1, &younger_vips)?;
    for family in &FAMILIES {
        meets(node, &at(family.other_vip, 80), &family.backends[1..2])?;
    }
    write("younger", "2026-02-01T00:00:00Z", 1, &VIPS)?;
    node.manifests().remove("older.yaml")?;
    for family in &FAMILIES {
        meets(node, &at(family.vip, 80), &family.backends[1..2]).context("the other one takes over")?;
    }
    until("no problem", || {
        let problems = agent.status()?.problems;
        must(problems.is_empty(), || format!("{problems:?}"))
    })?;
    agent.stop()
}

fn bad_input(node: &Node) -> Result<()> {
    let _servers = serve_all(node)?;
    node.write("good.yaml", &[service("web", cluster_ip(&VIPS))])?;
    write_slices(node, all_ready)?;
    let agent = node.start(&[])?;
    let good = || -> Result<()> {
        for family in &FAMILIES {
            meets(node, &at(family.vip, 80), &family.backends)?;
        }
        Ok(())
    };
    good()?;

    let bad = |pointer: &str, value: Value| with(&service("bad", cluster_ip(&[FAMILIES[0].other_vip])), pointer, value);
    let endpoints = slice("bad-v4", "bad", &[ready(FAMILIES[0].backends[0])]);
    let weighted = with(&endpoints, "/metadata/annotations", json!({"evenkeel.io/weight": "heavy"}));
    let cases: [(&str, Value, &str, &str); 6] = [
        ("an address", bad("/spec/clusterIPs/0", json!("10.96.0.300")), "Service default/bad", "spec.clusterIPs[0]"),
        ("a port", bad("/spec/ports/0/port", json!(70_000)), "Service default/bad", "spec.ports[0].port"),
        ("a protocol", bad("/spec/ports/0/protocol", json!("ICMP")), "Service default/bad", "spec.ports[0].protocol"),
        ("a type of field", bad("/spec/ports", json!("eighty")), "Service default/bad", "spec.ports"),
        (
            "an endpoint",
            with(&endpoints, "/endpoints/0/addresses/0", json!("10.244.1.x")),
            "EndpointSlice default/bad-v4",
            "endpoints[0].addresses[0]",
        ),
        ("an annotation", weighted, "EndpointSlice default/bad-v4", "evenkeel.io/weight"),
    ];
    for (what, object, named, field) in cases {
        node.write("bad.yaml", &[object])?;
        let problem = until(what, || {
            let problems = agent.status()?.problems;
            match &problems[..] {
                [one] if one.object == named && one.field.contains(field) => Ok(one.clone()),
                other => bail!("{other:?}"),
            }
        })?;
        let whole = problem.origin.contains("bad.yaml") && !problem.message.contains('\n') && !problem.message.is_empty();
        must(whole, || format!("{what}: {problem:?}"))?;
        good().context(what)?;
        node.manifests().remove("bad.yaml")?;
        until("the problem to go with its file", || {
            let problems = agent.status()?.problems;
            must(problems.is_empty(), || format!("{problems:?}"))
        })?;
    }

    // A file that cannot be read at all is told with its place, and what it said before still holds.
    node.manifests().write("good.yaml", "apiVersion: v1\nkind: Service\nmetadata: {name: [\n")?;
    until("broken YAML to be told", || {
        let problems = agent.status()?.problems;
        match &problems[..] {
            [one] if one.origin.contains("good.yaml") && one.message.contains("no valid YAML") => Ok(()),
            other => bail!("{other:?}"),
        }
    })?;
    good().context("with its broken manifest")?;
    node.write("good.yaml", &[service("web", cluster_ip(&VIPS))])?;
    until("the fixed file to heal", || {
        let problems = agent.status()?.problems;
        must(problems.is_empty(), || format!("{problems:?}"))
    })?;
    good()?;
    agent.stop()
}
