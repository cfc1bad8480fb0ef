//! Which Services are served, on which addresses, for whom.

use std::collections::BTreeSet;

use anyhow::{Context, Result, bail};
use lb_tests::{
    agent::{Node, must, until},
    objects::{cluster_ip, ready, service, slice, with},
};
use nix::errno::Errno;
use serde_json::{Value, json};

use super::{FAMILIES, Family, VIPS, all_ready, at, fails, meets, passes, serve_all, write_slices};

pub(super) fn ours(node: &Node) -> Result<()> {
    let _servers = serve_all(node)?;
    let web = service("web", cluster_ip(&VIPS));
    write_slices(node, all_ready)?;
    node.write("web.yaml", std::slice::from_ref(&web))?;
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
    for label in [
        "service.kubernetes.io/service-proxy-name",
        "service.kubernetes.io/headless",
    ] {
        node.write("web.yaml", &[with(&web, "/metadata/labels", json!({label: "other"}))])?;
        served(false).with_context(|| format!("with the label {label}"))?;
        node.write("web.yaml", std::slice::from_ref(&web))?;
        served(true).with_context(|| format!("after the label {label}"))?;
    }
    let headless = service("web", cluster_ip(&["None"]));
    let external = service("web", json!({"type": "ExternalName", "externalName": "example.org"}));
    for (what, object) in [("headless", headless), ("ExternalName", external)] {
        node.write("web.yaml", &[object])?;
        served(false).context(what)?;
        node.write("web.yaml", std::slice::from_ref(&web))?;
        served(true).context(what)?;
    }
    agent.stop()?;

    let labelled = with(
        &web,
        "/metadata/labels",
        json!({"service.kubernetes.io/service-proxy-name": "mine"}),
    );
    let agent = node.start(&["--proxy-name", "mine"])?;
    served(false).context("an agent with a name, a Service without")?;
    node.write("web.yaml", &[labelled])?;
    served(true).context("an agent with a name, a Service with it")?;
    agent.stop()
}

pub(super) fn node_ports(node: &Node) -> Result<()> {
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
            for (address, served) in [
                (family.node, first),
                (family.other_node, other),
                (family.loopback, false),
            ] {
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
        must(
            kinds == BTreeSet::from(["ClusterIP".to_owned(), "NodePort".to_owned()]),
            || format!("{kinds:?}"),
        )?;
        agent.stop()?;
    }
    Ok(())
}

pub(super) fn load_balancer(node: &Node) -> Result<()> {
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

pub(super) fn external_ips(node: &Node) -> Result<()> {
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

pub(super) fn affinity(node: &Node) -> Result<()> {
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
    let seconds: BTreeSet<Option<u32>> = agent
        .service("web")?
        .frontends
        .iter()
        .map(|f| f.affinity_seconds)
        .collect();
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

pub(super) fn ownership(node: &Node) -> Result<()> {
    let _servers = serve_all(node)?;
    let created = |name: &str, when: &str, vips: &[&str]| {
        with(
            &service(name, cluster_ip(vips)),
            "/metadata/creationTimestamp",
            json!(when),
        )
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
    must(FAMILIES.iter().all(|family| told(family.vip)), || {
        format!("{problems:?}")
    })?;
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

pub(super) fn bad_input(node: &Node) -> Result<()> {
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
    let weighted = with(
        &endpoints,
        "/metadata/annotations",
        json!({"evenkeel.io/weight": "heavy"}),
    );
    let cases: [(&str, Value, &str, &str); 6] = [
        (
            "an address",
            bad("/spec/clusterIPs/0", json!("10.96.0.300")),
            "Service default/bad",
            "spec.clusterIPs[0]",
        ),
        (
            "a port",
            bad("/spec/ports/0/port", json!(70_000)),
            "Service default/bad",
            "spec.ports[0].port",
        ),
        (
            "a protocol",
            bad("/spec/ports/0/protocol", json!("ICMP")),
            "Service default/bad",
            "spec.ports[0].protocol",
        ),
        (
            "a type of field",
            bad("/spec/ports", json!("eighty")),
            "Service default/bad",
            "spec.ports",
        ),
        (
            "an endpoint",
            with(&endpoints, "/endpoints/0/addresses/0", json!("10.244.1.x")),
            "EndpointSlice default/bad-v4",
            "endpoints[0].addresses[0]",
        ),
        (
            "an annotation",
            weighted,
            "EndpointSlice default/bad-v4",
            "evenkeel.io/weight",
        ),
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
        let whole =
            problem.origin.contains("bad.yaml") && !problem.message.contains('\n') && !problem.message.is_empty();
        must(whole, || format!("{what}: {problem:?}"))?;
        good().context(what)?;
        node.manifests().remove("bad.yaml")?;
        until("the problem to go with its file", || {
            let problems = agent.status()?.problems;
            must(problems.is_empty(), || format!("{problems:?}"))
        })?;
    }

    // A file that cannot be read at all is told with its place, and what it said before still holds.
    node.manifests()
        .write("good.yaml", "apiVersion: v1\nkind: Service\nmetadata: {name: [\n")?;
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
