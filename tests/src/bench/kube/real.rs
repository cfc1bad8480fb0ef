//! Changes behind the real kube-apiserver: from the moment the write is sent to it until a connection meets the new endpoint.
//!
//! etcd, kube-apiserver and its controllers run in a namespace of the lab's; one proxy at a time follows them on a node, over TLS,
//! kube-proxy in protobuf as it is by default. The write itself is in the time, and most of it: this is what a user waits for.

use std::{
    net::{IpAddr, Ipv4Addr},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use lb_user::lab::{
    Netns,
    link::{self, Hop},
    mounts::BpfFs,
};
use serde_json::{Value, json};

use super::{
    Options, PATIENCE,
    arm::dial_until,
    proxy::{Api as Source, Home, Kind, Proxy},
    town::{TARGET, Town},
};
use crate::{
    bench::{
        Bench,
        dial::{Acceptor, Manner, Met},
        place::{enter, serve_in},
        report::Metric,
        stats,
    },
    kube::{api::Api, control::ControlPlane},
    lab::topology::{Wires, place},
};

/// Changes of one proxy, and how long they may take together.
const CHANGES: u32 = 50;
const ENOUGH: Duration = Duration::from_secs(15);
/// How long a start may take.
const START: Duration = Duration::from_secs(90);
/// Writers that fill the API server.
const WRITERS: usize = 6;
/// The name that the proxies know their node by.
const NODE: &str = "bench";

/// Measures every proxy with so many Services.
pub(super) fn measure(
    bench: &Bench,
    bpf: &BpfFs,
    options: &Options,
    count: u32,
    metrics: &mut Vec<Metric>,
) -> Result<()> {
    let own = Netns::current()?;
    let folder = tempfile::Builder::new().prefix("evenkeel-bench-").tempdir()?;
    let wires = Wires::new()?;
    bench.say("kube: a real control plane starts");
    let plane = ControlPlane::start(&wires, folder.path())?;
    let town = Town::new(count);
    fill(plane.api(), town)?;
    bench.say(&format!("kube: {count} Services are in the real API server"));
    let cgroup = bench.home.below("node")?;
    let node = wires.node(1);
    let _backends = backends(node)?;
    let mut changes = 0;
    let measured = (|| {
        for kind in options.kinds() {
            let home = Home {
                netns: node,
                cgroup: &cgroup,
                bpf,
                folder: folder.path(),
                node: NODE,
            };
            let mut took = one(&plane, home, kind, town, &mut changes)?;
            bench.say(&format!(
                "kube: real API server, {count} Services, {kind}: {:.1} ms from the write (p50 of {})",
                stats::median(&mut took),
                took.len()
            ));
            metrics.push(super::spread_of(
                format!("kube_write_to_answer_ms_p99.{kind}@{count}"),
                &mut took,
            ));
        }
        Ok(())
    })();
    own.enter_current_thread()?;
    enter(&bench.home)?;
    measured
}

/// One proxy's changes, in milliseconds.
fn one(plane: &ControlPlane, home: Home<'_>, kind: Kind, town: Town, changes: &mut u32) -> Result<Vec<f64>> {
    enter(home.cgroup)?;
    home.netns.enter_current_thread()?;
    let kubeconfig = plane.kubeconfig();
    let mut proxy = Proxy::start(kind, home, Source::Kubeconfig(&kubeconfig))?;
    let target = town.marked_frontend();
    let met = |change: u32| Met::Backend(Town::marked_endpoint(change));
    if dial_until(target, met(*changes), START)?.is_none() {
        proxy.check()?;
        anyhow::bail!("{kind} does not serve within {} s", START.as_secs());
    }
    let path = format!(
        "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/{}",
        name_of(&town.marked_slice(0))
    );
    let mut took = Vec::new();
    let first = Instant::now();
    while took.len() < CHANGES as usize && first.elapsed() < ENOUGH {
        *changes += 1;
        let fields = json!({"endpoints": town.marked_slice(*changes)["endpoints"]});
        let began = Instant::now();
        let served = thread::scope(|scope| -> Result<Option<Instant>> {
            // The dialler does not wait for the API server's answer.
            let written = scope.spawn(|| plane.api().patch(&path, &fields));
            let served = dial_until(target, met(*changes), PATIENCE)?;
            written.join().map_err(|_| anyhow::anyhow!("the writer panicked"))??;
            Ok(served)
        })?;
        let served =
            served.with_context(|| format!("{kind} does not serve a change within {} s", PATIENCE.as_secs()))?;
        took.push(served.saturating_duration_since(began).as_secs_f64() * 1e3);
    }
    proxy.end(home.netns, home.bpf)?;
    Ok(took)
}

/// The machine behind the node that all endpoints are on.
fn backends(node: &Netns) -> Result<(Netns, Acceptor)> {
    let machine = place(false)?;
    link::join((node, "pods9"), (&machine, "node9"))?;
    let (near, far) = (IpAddr::from([10, 9, 0, 1]), IpAddr::from([10, 9, 0, 2]));
    link::add_address(node, "pods9", near, 24)?;
    link::add_address(&machine, "node9", far, 24)?;
    link::add_default_route(&machine, "node9", near)?;
    link::own_block(&machine, Ipv4Addr::new(10, 128, 0, 0), 9)?;
    link::set_route(node, (IpAddr::from([10, 128, 0, 0]), 9), &[Hop::through("pods9", far)])?;
    let acceptor = serve_in(&machine, TARGET, Manner::Tell)?;
    Ok((machine, acceptor))
}

/// Writes the node, the Services and their slices.
fn fill(api: &Api, town: Town) -> Result<()> {
    let mut objects: Vec<Value> = town.objects().collect();
    for object in &mut objects {
        // The server gives these; and slices of ours are none of its controllers'.
        if let Some(metadata) = object["metadata"].as_object_mut() {
            metadata.remove("uid");
            metadata.remove("creationTimestamp");
            metadata.remove("generateName");
        }
        if object["kind"] == "EndpointSlice" {
            object["metadata"]["labels"]["endpointslice.kubernetes.io/managed-by"] = json!("evenkeel-bench");
        }
    }
    let part = objects.len().div_ceil(WRITERS);
    thread::scope(|scope| {
        let writers: Vec<_> = objects
            .chunks(part)
            .map(|objects| {
                scope.spawn(move || -> Result<()> {
                    for object in objects {
                        api.create(collection(object), object)?;
                    }
                    Ok(())
                })
            })
            .collect();
        for writer in writers {
            writer.join().map_err(|_| anyhow::anyhow!("a writer panicked"))??;
        }
        Ok(())
    })
}

fn collection(object: &Value) -> &'static str {
    match object["kind"].as_str() {
        Some("Node") => "/api/v1/nodes",
        Some("Service") => "/api/v1/namespaces/default/services",
        _ => "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices",
    }
}

fn name_of(object: &Value) -> String {
    object["metadata"]["name"].as_str().unwrap_or_default().to_owned()
}
