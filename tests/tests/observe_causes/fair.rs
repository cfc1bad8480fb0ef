//! Services on which all is well, watched at the same time: none of them may raise an alarm at any moment.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use lb_tests::{
    agent::{NODE_NAME, Node, must, until},
    beside::{Beside, endpoint, endpoints, in_rules, vip},
    objects::{cluster_ip, endpoint as with_conditions, ready, service, slice, with},
};
use lb_user::{lab::server::Manner, view::VerdictKind};
use serde_json::{Value, json};

/// How long they are watched.
const WATCHED: Duration = Duration::from_secs(15);
/// New connections a second of each.
const RATE: f64 = 50.0;
/// A choice among three endpoints for all the time.
const FAIR: (&str, u8) = ("fair", 20);
/// A third endpoint joins, and gets its share.
const GROWS: (&str, u8) = ("grows", 21);
/// A third endpoint is another zone's.
const ELSEWHERE: (&str, u8) = ("elsewhere", 22);
/// A third endpoint is not ready.
const STARTS: (&str, u8) = ("starts", 23);

fn write(node: &Node, (name, number): (&str, u8), endpoints: &[Value]) -> Result<()> {
    let object = service(name, cluster_ip(&[&vip(number).ip().to_string()]));
    let slices = slice(&format!("{name}-v4"), name, endpoints);
    node.write(&format!("{name}.yaml"), &[object, slices])
}

fn address(number: u8, n: u8) -> String {
    endpoint(number, n).ip().to_string()
}

fn all_ready(number: u8, count: u8) -> Vec<Value> {
    (1..=count).map(|n| ready(&address(number, n))).collect()
}

pub(super) fn silence(node: &Node) -> Result<()> {
    let scene = Beside::new(node, 1)?;
    let all = [FAIR, GROWS, ELSEWHERE, STARTS];
    let everyone: Vec<_> = all.iter().flat_map(|(_, number)| endpoints(*number, 3)).collect();
    let _servers = scene.serve(&everyone, Manner::Greet)?;
    let rules = |(name, number), count| in_rules(name, vip(number), &endpoints(number, count));
    scene.translate(&[rules(FAIR, 3), rules(GROWS, 2), rules(ELSEWHERE, 2), rules(STARTS, 2)])?;

    let zone = |name: &str| json!({"forZones": [{"name": name}]});
    let hinted = |n: u8, name: &str| with(&ready(&address(ELSEWHERE.1, n)), "/hints", zone(name));
    let starting = with_conditions(&address(STARTS.1, 3), false, false, false);
    node.write(
        "node.yaml",
        &[json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": NODE_NAME, "labels": {"topology.kubernetes.io/zone": "a"}},
        })],
    )?;
    write(node, FAIR, &all_ready(FAIR.1, 3))?;
    write(node, GROWS, &all_ready(GROWS.1, 2))?;
    write(node, ELSEWHERE, &[hinted(1, "a"), hinted(2, "a"), hinted(3, "b")])?;
    write(node, STARTS, &[&all_ready(STARTS.1, 2)[..], &[starting]].concat())?;
    let agent = node.start(&["--mode", "observe"])?;
    let clients = all
        .iter()
        .map(|(_, number)| scene.load_on(vip(*number), RATE))
        .collect::<Result<Vec<_>>>()?;
    let n = |name: &str| -> Result<u64> { Ok(agent.diagnosis(name)?.new_connections.map_or(0, |new| new.n)) };
    for (name, _) in all {
        until("traffic", || {
            let n = n(name)?;
            must(n >= 60, || format!("{n} connections to {name}"))
        })?;
    }

    scene.change(&rules(GROWS, 2), &rules(GROWS, 3))?;
    write(node, GROWS, &all_ready(GROWS.1, 3))?;
    let began = Instant::now();
    // Every look must find silence; the last one is what the rest is asked of.
    while began.elapsed() < WATCHED {
        for (name, _) in all {
            let seen = agent.diagnosis(name)?;
            let silent =
                seen.starved.is_empty() && ![VerdictKind::Starved, VerdictKind::Uneven].contains(&seen.verdict);
            must(silent, || format!("an alarm for {name}: {seen:#?}"))?;
        }
        std::thread::sleep(Duration::from_millis(250));
    }
    for client in clients {
        must(client.failed() == 0, || "a connection failed".to_owned())?;
    }

    // They were judged, not overlooked.
    for (name, number) in all {
        let seen = agent.diagnosis(name)?;
        let told = seen.attribution;
        must(told.attributed >= 400 && told.unknown * 50 <= told.connects, || {
            format!("{name}: {seen:#?}")
        })?;
        let third = (seen.endpoints.iter())
            .find(|found| found.addr == endpoint(number, 3).ip())
            .with_context(|| format!("the third endpoint of {name} is not listed: {seen:#?}"))?;
        let excluded = match name {
            "elsewhere" => Some("topology"),
            "starts" => Some("not_ready"),
            _ => None,
        };
        must(third.excluded.as_deref() == excluded, || format!("{name}: {third:#?}"))?;
        let status = if excluded.is_some() { "excluded" } else { "fair" };
        must(third.status == status, || format!("{name}: {third:#?}"))?;
        if name == GROWS.0 {
            must(third.born.is_some() && third.connects >= 50, || format!("{third:#?}"))?;
        }
    }
    agent.stop()
}
