//! A third endpoint that starves, each time for another reason.

use std::{
    fmt::Write as _,
    io::Read,
    net::SocketAddr,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context, Result};
use lb_tests::{
    agent::{Agent, Node, must, until},
    beside::{Beside, TABLE, connect_from, endpoint, endpoints, in_rules, own, vip},
    objects::{cluster_ip, ready, service, slice, with},
};
use lb_user::{
    lab::{client::read_name, server::Manner},
    view::{DiagnosisView, StarvedView, VerdictKind},
};
use serde_json::json;

/// The Service of each test.
const WEB: SocketAddr = vip(10);
/// Connections that keep-alive clients hold: as many as prove within some twenty seconds that none are dialled any more.
const KEPT: usize = 900;
/// How long after its birth an endpoint's starvation may take to be told, in seconds.
const SOON: f64 = 45.0;
/// Clients of the test of affinity, and the pause between two connections of each.
const CLIENTS: u8 = 6;
const PAUSE: Duration = Duration::from_millis(10);

/// Writes the endpoints of `web` in the manifest.
fn write_endpoints(node: &Node, count: u8) -> Result<()> {
    let all: Vec<_> = (endpoints(1, count).iter())
        .map(|endpoint| ready(&endpoint.ip().to_string()))
        .collect();
    node.write("web-v4.yaml", &[slice("web-v4", "web", &all)])
}

fn write_service(node: &Node) -> Result<()> {
    node.write("web.yaml", &[service("web", cluster_ip(&[&WEB.ip().to_string()]))])
}

/// Waits until the third endpoint is told to starve, alone, and from the first moment on for this cause.
fn starves(agent: &Agent, cause: &str, view: &str) -> Result<DiagnosisView> {
    let verdict = until("the verdict", || {
        let verdict = agent.diagnosis("web")?;
        must(verdict.verdict == VerdictKind::Starved, || {
            format!("{verdict:#?}\n{:?}", agent.diagnosis("web"))
        })?;
        Ok(verdict)
    })?;
    let [
        StarvedView {
            addr,
            port,
            cause: found,
            view: seen_in,
            seconds_to_verdict,
            because,
            ..
        },
    ] = verdict.starved.as_slice()
    else {
        anyhow::bail!("one endpoint starves: {verdict:#?}");
    };
    must(SocketAddr::new(*addr, *port) == endpoint(1, 3), || {
        format!("another endpoint: {verdict:#?}")
    })?;
    must(found == cause && seen_in == view, || {
        format!("{found} in the view of {seen_in} connections: {verdict:#?}")
    })?;
    must(!because.is_empty() && !verdict.advice.is_empty(), || {
        format!("no reasons, or no advice: {verdict:#?}")
    })?;
    let seconds = seconds_to_verdict.context("its birth was seen")?;
    must(seconds <= SOON, || format!("{seconds} s to the verdict"))?;
    Ok(verdict)
}

pub(super) fn long_lived(node: &Node) -> Result<()> {
    let scene = Beside::new(node, 1)?;
    let _servers = scene.serve(&endpoints(1, 3), Manner::Stay)?;
    let before = in_rules("web", WEB, &endpoints(1, 2));
    scene.translate(std::slice::from_ref(&before))?;
    write_service(node)?;
    write_endpoints(node, 2)?;
    let agent = node.start(&["--mode", "observe"])?;
    let kept = node.netns().run(|| -> Result<Vec<_>> {
        (0..KEPT)
            .map(|_| {
                let mut stream = connect_from(own(1).into(), WEB)?;
                read_name(&mut stream)?;
                Ok(stream)
            })
            .collect()
    })??;
    until("all to be seen open", || {
        let seen = agent.diagnosis("web")?;
        let open = seen.open_connections.map_or(0, |open| open.n);
        must(open == KEPT as u64 && seen.starved.is_empty(), || format!("{seen:#?}"))
    })?;
    scene.change(&before, &in_rules("web", WEB, &endpoints(1, 3)))?;
    write_endpoints(node, 3)?;
    let verdict = starves(&agent, "long_lived", "open")?;
    // The two views are told apart: new connections were fair while there were any, the open ones are not.
    let uneven = (verdict.open_connections.as_ref()).is_some_and(|open| open.alarm && open.n == KEPT as u64);
    let fair = (verdict.new_connections.as_ref()).is_none_or(|new| !new.alarm);
    must(verdict.starved[0].seen == 0 && uneven && fair, || {
        format!("{verdict:#?}")
    })?;

    // Clients that dial anew heal it: the alarm ends with it.
    drop(kept);
    until("the end of the alarm", || {
        let verdict = agent.diagnosis("web")?;
        must(verdict.starved.is_empty(), || format!("{verdict:#?}"))
    })?;
    agent.stop()
}

/// kube-proxy's rules for session affinity: a set of clients an endpoint, asked before the choice.
///
/// The choice goes in turn, so that the clients are spread evenly; nothing is taken out, so that clients stay where they are.
fn affine(count: u8, fresh: u8) -> String {
    let port = "ULMVA6XW-default/web/tcp/";
    let table = format!("ip {TABLE}");
    let name = |e: &SocketAddr| format!("{port}__{}/{}", e.ip(), e.port());
    let mut text = String::new();
    let mut line = |content: String| {
        let _ = writeln!(text, "{content}");
    };
    line(format!(
        "add chain {table} service-{port}\nflush chain {table} service-{port}"
    ));
    let all = endpoints(1, count);
    for endpoint in all.iter().skip(usize::from(count - fresh)) {
        let name = name(endpoint);
        line(format!(
            "add set {table} affinity-{name} {{ type ipv4_addr ; flags dynamic,timeout ; timeout 10800s ; }}\n\
             add chain {table} endpoint-{name}\n\
             add rule {table} endpoint-{name} update @affinity-{name} {{ ip saddr }}\n\
             add rule {table} endpoint-{name} meta l4proto tcp dnat to {endpoint}"
        ));
    }
    for endpoint in &all {
        let name = name(endpoint);
        line(format!(
            "add rule {table} service-{port} ip saddr @affinity-{name} goto endpoint-{name}"
        ));
    }
    let choices: Vec<_> = (all.iter().enumerate())
        .map(|(n, endpoint)| format!("{n} : goto endpoint-{}", name(endpoint)))
        .collect();
    line(format!(
        "add rule {table} service-{port} numgen inc mod {count} vmap {{ {} }}",
        choices.join(", ")
    ));
    text
}

pub(super) fn affinity(node: &Node) -> Result<()> {
    let scene = Beside::new(node, CLIENTS)?;
    let servers = scene.serve(&endpoints(1, 3), Manner::Greet)?;
    let table = format!("ip {TABLE}");
    scene.load(&format!(
        "add table {table}\n\
         add map {table} service-ips {{ type ipv4_addr . inet_proto . inet_service : verdict ; }}\n\
         add chain {table} services\n\
         add rule {table} services ip daddr . meta l4proto . th dport vmap @service-ips\n\
         add chain {table} nat-output {{ type nat hook output priority -100 ; }}\n\
         add rule {table} nat-output jump services\n\
         {}\
         add element {table} service-ips {{ {} . tcp . {} : goto service-ULMVA6XW-default/web/tcp/ }}\n",
        affine(2, 2),
        WEB.ip(),
        WEB.port(),
    ))?;
    let spec = with(
        &cluster_ip(&[&WEB.ip().to_string()]),
        "/sessionAffinity",
        json!("ClientIP"),
    );
    node.write("web.yaml", &[service("web", spec)])?;
    write_endpoints(node, 2)?;
    let agent = node.start(&["--mode", "observe"])?;

    let stop = AtomicBool::new(false);
    thread::scope(|scope| -> Result<()> {
        for n in 1..=CLIENTS {
            let stop = &stop;
            scope.spawn(move || {
                let dialled = node.netns().run(|| -> Result<()> {
                    while !stop.load(Ordering::Relaxed) {
                        let mut stream = connect_from(own(n).into(), WEB)?;
                        read_name(&mut stream)?;
                        // The server's end comes first, so that the port is free again.
                        let _ = stream.read(&mut [0; 1])?;
                        thread::sleep(PAUSE);
                    }
                    Ok(())
                });
                dialled.map_err(anyhow::Error::from).flatten()
            });
        }
        let told = || -> Result<()> {
            until("traffic to both", || {
                let seen = agent.diagnosis("web")?;
                let fair = seen
                    .new_connections
                    .is_some_and(|new| !new.insufficient && new.n >= 100);
                must(fair && seen.starved.is_empty(), || format!("{seen:#?}"))
            })?;
            scene.load(&affine(3, 1))?;
            write_endpoints(node, 3)?;
            let verdict = starves(&agent, "affinity", "new")?;
            let third = servers.count(endpoint(1, 3));
            must(third == 0 && verdict.starved[0].seen == 0, || {
                format!("{third} connections reached it: {verdict:#?}")
            })
        };
        let told = told();
        stop.store(true, Ordering::Relaxed);
        told
    })?;
    agent.stop()
}

pub(super) fn not_programmed(node: &Node) -> Result<()> {
    let scene = Beside::new(node, 1)?;
    let _servers = scene.serve(&endpoints(1, 3), Manner::Greet)?;
    let rules = in_rules("web", WEB, &endpoints(1, 2));
    scene.translate(std::slice::from_ref(&rules))?;
    write_service(node)?;
    write_endpoints(node, 2)?;
    let agent = node.start(&["--mode", "observe"])?;
    let client = scene.load_on(WEB, 60.0)?;
    until("traffic to both", || {
        let seen = agent.diagnosis("web")?;
        let n = seen.new_connections.map_or(0, |new| new.n);
        must(n >= 60 && seen.starved.is_empty(), || format!("{seen:#?}"))
    })?;
    write_endpoints(node, 3)?;
    let verdict = starves(&agent, "not_programmed", "new")?;
    let programmed: Vec<_> = verdict.endpoints.iter().map(|endpoint| endpoint.programmed).collect();
    must(programmed == [Some(true), Some(true), Some(false)], || {
        format!("{programmed:?}")
    })?;

    // The proxy learns of it: the alarm ends.
    scene.change(&rules, &in_rules("web", WEB, &endpoints(1, 3)))?;
    until("the end of the alarm", || {
        let verdict = agent.diagnosis("web")?;
        must(verdict.starved.is_empty(), || format!("{verdict:#?}"))
    })?;
    must(client.failed() == 0, || "a connection failed".to_owned())?;
    drop(client);
    agent.stop()
}
