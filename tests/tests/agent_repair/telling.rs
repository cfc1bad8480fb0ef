//! What the agent says of itself and of the traffic.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context, Result};
use lb_tests::{
    agent::{
        Node, must, patience, until,
        web::{BACKENDS, BACKENDS6, VIP, only_following, serve_all, write_web},
    },
    bpf,
    objects::{cluster_ip, ready, service, slice},
};
use lb_user::lab::{client::read_name, holds_within, server::Manner};

pub(super) fn observe(node: &Node) -> Result<()> {
    // Somebody else serves the address: here the address is the host's own.
    node.add_addresses(&["10.96.0.10"])?;
    let server = lb_user::lab::Server::start(node.netns(), &[VIP.parse()?], Manner::Greet)?;
    write_web(node, &BACKENDS)?;
    let agent = node.start(&["--mode", "observe"])?;
    only_following(node)?;

    node.netns().set_local_ports(40_000, 40_019)?;
    for _ in 0..60 {
        let met = node.dial(VIP)?;
        must(met == VIP.parse()?, || format!("sent to {VIP}, met {met}"))?;
    }
    must(server.count(VIP.parse()?) == 60, || {
        "the server saw other connections".to_owned()
    })?;
    until("60 connections to be seen", || {
        let web = agent.service("web")?;
        must(web.connects == 60 && web.active == 0 && web.failed.is_empty(), || {
            format!("{web:?}")
        })
    })?;
    until("the reuse to be seen", || {
        let reuse = agent.reuse()?;
        // 60 connections over at most 20 ports are at least 40 reuses.
        must(reuse.connections == 60 && reuse.total >= 40, || format!("{reuse:?}"))
    })?;
    drop(server);
    must(node.dial(VIP).is_err(), || "a connection without a server".to_owned())?;
    until("the refusal to be seen", || {
        let web = agent.service("web")?;
        must(web.failed.get("refused") == Some(&1), || format!("{web:?}"))
    })?;
    let metrics = agent.metrics()?;
    for (series, value) in [
        (
            r#"evenkeel_service_connects_total{namespace="default",service="web"}"#,
            61.0,
        ),
        (
            r#"evenkeel_service_connects_failed_total{namespace="default",service="web",reason="refused"}"#,
            1.0,
        ),
        (
            r#"evenkeel_service_connections_active{namespace="default",service="web"}"#,
            0.0,
        ),
        (r#"evenkeel_mode{mode="observe"}"#, 1.0),
    ] {
        must(metrics.get(series) == Some(&value), || {
            format!("{series} is {:?}, not {value}", metrics.get(series))
        })?;
    }
    agent.stop()
}

pub(super) fn readiness(node: &Node) -> Result<()> {
    let _servers = serve_all(node, Manner::Greet)?;
    write_web(node, &BACKENDS)?;
    // The first agent that anybody sees here is not ready before its folder was read: it answers before that or not at all.
    let mut agent = node.launch(&[])?;
    let mut seen = BTreeMap::new();
    until("readiness", || {
        let page = agent.get("/readyz")?;
        seen.entry(page.status).or_insert(page.body.clone());
        must(page.status == 200, || format!("{page:?}"))
    })?;
    if let Some(reason) = seen.get(&503) {
        must(reason.trim_end().lines().count() == 1, || {
            format!("more than one sentence: {reason}")
        })?;
    }
    node.dial(VIP).context("ready means that connections are translated")?;
    agent.wait_ready()?;
    for path in ["/healthz", "/livez"] {
        let page = agent.get(path)?;
        let body: serde_json::Value = serde_json::from_str(&page.body)?;
        let whole = page.status == 200 && page.head.contains("application/json");
        must(
            whole && body["nodeEligible"] == true && body["currentTime"].is_string(),
            || format!("{path}: {page:?}"),
        )?;
    }
    must(agent.get("/nothing")?.status == 404, || {
        "an unknown page is answered".to_owned()
    })?;

    // Links that are lost again and again: the probe sees it between two repairs.
    let links = ["link-connect4", "link-sock_ops"].map(|name| node.own_pins().join(name));
    let page = until("not ready", || {
        for link in &links {
            // Between a repair's removal and its new pin there is nothing to detach.
            let _ = bpf::detach_pinned_link(link);
        }
        let page = agent.get("/readyz")?;
        must(page.status == 503, || format!("{page:?}"))?;
        Ok(page)
    })?;
    must(page.body.contains("self-probe"), || format!("{page:?}"))?;
    agent.wait_ready()?;
    node.dial(VIP)?;
    agent.stop()
}

pub(super) fn metrics(node: &Node) -> Result<()> {
    let _servers = serve_all(node, Manner::Greet)?;
    let _staying = node.serve(&["10.244.2.1"], Manner::Stay)?;
    write_web(node, &BACKENDS)?;
    let long = service("long", cluster_ip(&["10.96.0.20"]));
    node.write("long.yaml", &[long, slice("long-v4", "long", &[ready("10.244.2.1")])])?;
    // Nobody listens on port 8080 of this address, and nobody is behind the other Service.
    let refusing = service("refusing", cluster_ip(&["10.96.0.60"]));
    node.add_addresses(&["10.244.3.1"])?;
    node.write(
        "refusing.yaml",
        &[refusing, slice("r-v4", "refusing", &[ready("10.244.3.1")])],
    )?;
    node.write("empty.yaml", &[service("empty", cluster_ip(&["10.96.0.70"]))])?;
    let agent = node.start(&["--backend-metrics"])?;
    agent.wait_backends(&[&BACKENDS[..], &BACKENDS6[..], &["10.244.2.1", "10.244.3.1"]].concat())?;

    node.netns().set_local_ports(40_000, 40_019)?;
    let met = node.dial_many(VIP, 100)?;
    let mut open = node.open("10.96.0.20:80")?;
    read_name(&mut open)?;
    for _ in 0..3 {
        must(node.dial("10.96.0.60:80").is_err(), || {
            "a connection to nobody".to_owned()
        })?;
    }
    for _ in 0..2 {
        must(node.dial("10.96.0.70:80").is_err(), || {
            "a connection to nobody".to_owned()
        })?;
    }
    let of = |name: &str, service: &str| format!(r#"{name}{{namespace="default",service="{service}"}}"#);
    let failed = |service: &str, reason: &str| {
        format!(
            r#"evenkeel_service_connects_failed_total{{namespace="default",service="{service}",reason="{reason}"}}"#
        )
    };
    let wanted = BTreeMap::from([
        (of("evenkeel_service_connects_total", "web"), 100.0),
        (of("evenkeel_service_connects_attributed_total", "web"), 100.0),
        (of("evenkeel_service_direct_connects_total", "web"), 0.0),
        (of("evenkeel_service_connects_total", "long"), 1.0),
        (of("evenkeel_service_connects_total", "refusing"), 3.0),
        (of("evenkeel_service_connections_active", "web"), 0.0),
        (of("evenkeel_service_connections_active", "long"), 1.0),
        (failed("refusing", "refused"), 3.0),
        (failed("empty", "no_backend"), 2.0),
        (failed("web", "refused"), 0.0),
        (of("evenkeel_connect_duration_seconds_count", "web"), 100.0),
        (r#"evenkeel_events_lost_total{source="ring_buffer"}"#.to_owned(), 0.0),
        (r#"evenkeel_events_lost_total{source="malformed"}"#.to_owned(), 0.0),
        (r#"evenkeel_mode{mode="balance"}"#.to_owned(), 1.0),
        ("evenkeel_problems".to_owned(), 0.0),
    ]);
    let found = until("the metrics to equal the traffic", || {
        let found = agent.metrics()?;
        for (series, value) in &wanted {
            must(found.get(series) == Some(value), || {
                format!("{series} is {:?}, not {value}", found.get(series))
            })?;
        }
        // A client of a local backend has the backend's own address: 100 connections over at most 60 tuples of IPv4.
        let reuses: f64 = sum(&found, "evenkeel_tuple_reuse_total{");
        must((40.0..100.0).contains(&reuses), || format!("{reuses} reuses"))?;
        Ok(found)
    })?;
    for (backend, count) in met {
        let series =
            format!(r#"evenkeel_backend_connects_total{{namespace="default",service="web",backend="{backend}"}}"#);
        must(found.get(&series) == Some(&(count as f64)), || {
            format!("{series} is {:?}, not {count}", found.get(&series))
        })?;
    }
    let page = agent.get("/metrics")?;
    let content_type = page.head.to_ascii_lowercase();
    must(content_type.contains("content-type: text/plain; version=0.0.4"), || {
        page.head.clone()
    })?;

    // A Service's series go a minute after it.
    node.manifests().remove("web.yaml")?;
    let gone = of("evenkeel_service_connects_total", "web");
    let deadline = Duration::from_mins(1) + patience();
    must(
        holds_within(deadline, || {
            agent.metrics().is_ok_and(|found| !found.contains_key(&gone))
        }),
        || format!("{gone} is still there"),
    )?;
    let kept = agent
        .metrics()?
        .get(&of("evenkeel_service_connects_total", "long"))
        .copied();
    must(kept == Some(1.0), || {
        format!("the Service that stays has {kept:?} connections")
    })?;
    drop(open);
    agent.stop()
}

fn sum(metrics: &BTreeMap<String, f64>, prefix: &str) -> f64 {
    metrics
        .iter()
        .filter(|(series, _)| series.starts_with(prefix))
        .map(|(_, value)| value)
        .sum()
}
