//! Which endpoints a connection can meet.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use anyhow::{Context, Result};
use lb_tests::{
    agent::{Agent, NODE_NAME, Node, must, until},
    objects::{cluster_ip, endpoint, ready, service, slice, with},
};
use lb_user::lab::{Server, client::Failure, server::Manner};
use nix::errno::Errno;
use serde_json::{Value, json};

use super::{FAMILIES, Family, VIPS, all_ready, at, fails, meets, passes, serve_all, write_slices};

pub(super) fn families(node: &Node) -> Result<()> {
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

pub(super) fn ports(node: &Node) -> Result<()> {
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
        datagrams.push(Server::start(
            node.netns(),
            &[SocketAddr::new(address, 8053)],
            Manner::Datagram,
        )?);
        datagrams.push(Server::start(
            node.netns(),
            &[SocketAddr::new(address, 9090)],
            Manner::Greet,
        )?);
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

pub(super) fn slices(node: &Node) -> Result<()> {
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
        Ok(agent
            .backends()?
            .iter()
            .map(|backend| (backend.addr, backend.id))
            .collect())
    };
    let before = ids(&agent)?;
    write("two", &[1, 2])?;
    met(&[0, 1, 2])?;
    write("one", &[0])?;
    met(&[0, 1, 2])?;
    must(ids(&agent)? == before, || {
        "an endpoint that moved became another".to_owned()
    })?;
    node.manifests().remove("one.yaml")?;
    met(&[1, 2])?;
    node.manifests().remove("two.yaml")?;
    for family in &FAMILIES {
        fails(node, &at(family.vip, 80), Errno::ECONNREFUSED)?;
    }
    agent.stop()
}

pub(super) fn conditions(node: &Node) -> Result<()> {
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

pub(super) fn duplicates(node: &Node) -> Result<()> {
    let _servers = serve_all(node)?;
    node.write("web.yaml", &[service("web", cluster_ip(&VIPS))])?;
    let mut objects = Vec::new();
    for (family, suffix) in FAMILIES.iter().zip(["v4", "v6"]) {
        let [a, b, _] = family.backends;
        // The first address twice, once not ready: the ready one counts, and once.
        objects.push(slice(
            &format!("a-{suffix}"),
            "web",
            &[endpoint(a, false, false, false), ready(b)],
        ));
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

pub(super) fn terminating(node: &Node) -> Result<()> {
    let _servers = serve_all(node)?;
    node.write("web.yaml", &[service("web", cluster_ip(&VIPS))])?;
    let steps: [(&str, [(bool, bool, bool); 3], &[usize]); 4] = [
        (
            "a ready one wins",
            [(true, true, false), (false, true, true), (false, false, true)],
            &[0],
        ),
        (
            "none is ready",
            [(false, false, false), (false, true, true), (false, false, true)],
            &[1],
        ),
        (
            "none serves",
            [(false, false, false), (false, false, true), (false, false, true)],
            &[],
        ),
        (
            "ready again",
            [(false, true, true), (true, true, false), (true, true, false)],
            &[1, 2],
        ),
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

pub(super) fn hints(node: &Node) -> Result<()> {
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

pub(super) fn internal_local(node: &Node) -> Result<()> {
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

pub(super) fn external_local(node: &Node) -> Result<()> {
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

pub(super) fn no_endpoint(node: &Node) -> Result<()> {
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
            must(outcome == Err(Failure::Connect(Errno::ECONNREFUSED)), || {
                format!("UDP, {policy}: {outcome:?}")
            })?;
        }
    }
    until("the refusals to be counted", || {
        let web = agent.service("web")?;
        // Two protocols of two families under two policies, and those made while waiting.
        must(web.failed.get("no_backend").is_some_and(|count| *count >= 8), || {
            format!("{web:?}")
        })
    })?;
    agent.stop()
}
