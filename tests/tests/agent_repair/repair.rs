//! What is lost, damaged or too much, and how it heals.

use std::{
    fs,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use aya::maps::{HashMap, LpmTrie, Map, MapData, lpm_trie::Key};
use lb_common::{
    addr::{Addr, Port},
    backend::Backend,
    frontend::{Frontend, FrontendKey, SourceKey},
    set::{ListEntry, SetWord},
};
use lb_tests::{
    agent::{
        Node, must, until,
        web::{BACKENDS, BACKENDS6, VIP, pinned_array, pinned_map, serve_all, write_web},
    },
    bpf,
    objects::{cluster_ip, ready, service, slice, with},
    runner,
};
use lb_user::{lab::server::Manner, view::MapDumpView};
use serde_json::json;

pub(super) fn lost_link(node: &Node) -> Result<()> {
    let _servers = serve_all(node, Manner::Greet)?;
    write_web(node, &BACKENDS)?;
    let agent = node.start(&[])?;
    let link = node.own_pins().join("link-connect4");

    let lost = Instant::now();
    fs::remove_file(&link)?;
    until("the removed link", || Ok(node.dial(VIP).map(drop)?))?;
    in_time("the removed link", lost)?;
    until("the repair to be counted", || {
        let repairs = agent.status()?.sync.repairs;
        must(repairs >= 1, || format!("{repairs} repairs"))
    })?;
    let lost = Instant::now();
    bpf::detach_pinned_link(&link)?;
    bpf::detach_pinned_link(&node.own_pins().join("link-getpeername6"))?;
    until("the detached links", || {
        let attached = bpf::attached_hooks(node.cgroup().path())?;
        must(attached.len() == bpf::HOOKS.len(), || {
            format!("only {attached:?} are attached")
        })
    })?;
    in_time("the detached links", lost)?;
    node.dial(VIP)?;
    until("the repairs to be counted", || {
        let repairs = agent.status()?.sync.repairs;
        let series = agent.metrics()?.get("evenkeel_repairs_total").copied();
        must(repairs == 3 && series == Some(3.0), || {
            format!("{repairs} repairs, {series:?} in the metrics")
        })
    })?;
    agent.stop()
}

/// Links are back within five seconds of their loss; in a guest, within the patience of every wait.
fn in_time(what: &str, lost: Instant) -> Result<()> {
    let took = lost.elapsed();
    must(took < Duration::from_secs(5) || runner::in_guest(), || {
        format!("{what} took {took:?}")
    })
}

fn frontends(node: &Node) -> Result<HashMap<MapData, FrontendKey, Frontend>> {
    Ok(Map::HashMap(pinned_map(node, "FRONTENDS")?).try_into()?)
}

fn sources(node: &Node) -> Result<LpmTrie<MapData, SourceKey, u32>> {
    Ok(Map::LpmTrie(pinned_map(node, "SOURCES")?).try_into()?)
}

type Damage<'d> = Box<dyn Fn() -> Result<()> + 'd>;

pub(super) fn damaged_contents(node: &Node) -> Result<()> {
    let _servers = serve_all(node, Manner::Greet)?;
    write_web(node, &BACKENDS)?;
    let agent = node.start(&[])?;
    agent.wait_backends(&[&BACKENDS[..], &BACKENDS6[..]].concat())?;
    let before = agent.dump_state()?;
    let key = FrontendKey::new(
        Addr::from("10.96.0.10".parse::<std::net::IpAddr>()?),
        Port::new(80),
        lb_common::abi::TCP,
    );
    let foreign = FrontendKey::new(
        Addr::from("10.96.9.9".parse::<std::net::IpAddr>()?),
        Port::new(80),
        lb_common::abi::TCP,
    );
    let own = frontends(node)?.get(&key, 0)?;
    let word = SetWord(pinned_array::<u64>(node, "SETS")?.get(&own.set_id, 0)?);
    let header = pinned_array::<ListEntry>(node, "LISTS")?.get(&word.offset(), 0)?;
    let first = pinned_array::<ListEntry>(node, "LISTS")?.get(&(word.offset() + 1), 0)?;

    let damages: Vec<(&str, Damage<'_>)> = vec![
        ("a deleted frontend", Box::new(|| Ok(frontends(node)?.remove(&key)?))),
        (
            "a foreign frontend",
            Box::new(|| Ok(frontends(node)?.insert(foreign, own, 0)?)),
        ),
        (
            "a frontend of another set",
            Box::new(|| {
                let wrong = Frontend {
                    set_id: own.set_id + 7,
                    ..own
                };
                Ok(frontends(node)?.insert(key, wrong, 0)?)
            }),
        ),
        (
            "a set without members",
            Box::new(|| Ok(pinned_array::<u64>(node, "SETS")?.set(own.set_id, 0, 0)?)),
        ),
        (
            "a set that points elsewhere",
            Box::new(|| {
                let wrong = SetWord::new(word.offset() + 1, word.count(), word.generation());
                Ok(pinned_array::<u64>(node, "SETS")?.set(own.set_id, wrong.0, 0)?)
            }),
        ),
        (
            "a list with a wrong header",
            Box::new(|| {
                let wrong = ListEntry {
                    b: header.b + 1,
                    ..header
                };
                Ok(pinned_array::<ListEntry>(node, "LISTS")?.set(word.offset(), wrong, 0)?)
            }),
        ),
        (
            "a list with a wrong member",
            Box::new(|| {
                let wrong = ListEntry { a: 99, ..first };
                Ok(pinned_array::<ListEntry>(node, "LISTS")?.set(word.offset() + 1, wrong, 0)?)
            }),
        ),
        (
            "a wrong table",
            Box::new(|| Ok(pinned_array::<u64>(node, "TABLES")?.set(header.a, u64::MAX, 0)?)),
        ),
        (
            "a source range of nobody",
            Box::new(|| {
                let everybody = SourceKey {
                    service_id: own.service_id,
                    addr: foreign.addr,
                };
                Ok(sources(node)?.insert(&Key::new(SourceKey::BITS - 32, everybody), 1, 0)?)
            }),
        ),
        (
            "a backend elsewhere",
            Box::new(|| {
                let mut backends = pinned_array::<Backend>(node, "BACKENDS")?;
                let wrong = Backend {
                    port: Port::new(1),
                    ..backends.get(&first.a, 0)?
                };
                Ok(backends.set(first.a, wrong, 0)?)
            }),
        ),
        (
            "a vacant backend",
            Box::new(|| Ok(pinned_array::<Backend>(node, "BACKENDS")?.set(first.a, Backend::default(), 0)?)),
        ),
    ];
    let mut repairs = agent.status()?.sync.repairs;
    for (what, damage) in damages {
        damage().with_context(|| what.to_owned())?;
        // The contents are looked at each minute, and at once when a link was lost.
        fs::remove_file(node.own_pins().join("link-sock_release"))?;
        let now = until(what, || {
            let now = agent.status()?.sync.repairs;
            must(now >= repairs + 2, || format!("{now} repairs after {repairs}"))?;
            Ok(now)
        })?;
        repairs = now;
        let after = agent.dump_state()?;
        for (map, dump) in &before {
            let (old, new) = (without_publication(dump), without_publication(&after[map]));
            must(old == new, || {
                format!("{what}: {map} is not as before:\n{old:#?}\n{new:#?}")
            })?;
        }
        let met = node.dial_many(VIP, 60).with_context(|| what.to_owned())?;
        must(met.len() == 3, || format!("{what}: only {met:?} were met"))?;
    }
    let series = agent.metrics()?.get("evenkeel_repairs_total").copied();
    must(series == Some(repairs as f64), || {
        format!("{repairs} repairs, {series:?} in the metrics")
    })?;
    agent.stop()
}

/// A dump without the number of the publication, which a repair may raise.
fn without_publication(dump: &MapDumpView) -> Vec<(String, String)> {
    dump.rows
        .iter()
        .map(|row| {
            let value = row
                .value
                .split(' ')
                .filter(|word| !word.starts_with("generation="))
                .collect::<Vec<_>>();
            (row.key.clone(), value.join(" "))
        })
        .collect()
}

pub(super) fn capacity(node: &Node) -> Result<()> {
    let _servers = serve_all(node, Manner::Greet)?;
    let of = |number: u8| {
        let name = format!("s{number}");
        let object = service(&name, cluster_ip(&[&format!("10.96.1.{number}")]));
        (
            format!("{name}.yaml"),
            [object, slice(&format!("{name}-v4"), &name, &[ready(BACKENDS[0])])],
        )
    };
    // One frontend is the self-probe's.
    let agent = node.start(&["--max-frontends", "3", "--metrics-address", "127.0.0.1:9975"])?;
    for number in [1, 2] {
        let (file, objects) = of(number);
        node.write(&file, &objects)?;
        until("a Service that fits", || {
            Ok(node.dial(&format!("10.96.1.{number}:80")).map(drop)?)
        })?;
    }
    let (file, objects) = of(3);
    node.write(&file, &objects)?;
    until("the Service that does not fit to be told", || {
        let sync = agent.status()?.sync;
        let told = sync
            .last_error
            .as_deref()
            .is_some_and(|error| error.contains("default/s3"));
        must(told && sync.failures > 0, || format!("{sync:?}"))
    })?;
    must(node.dial("10.96.1.3:80").is_err(), || "it is served".to_owned())?;

    // One that is served and grows beyond the room keeps what it has, and the others are changed as ever.
    let grown = with(
        &of(1).1[0],
        "/spec/ports",
        json!([{"name": "a", "port": 80}, {"name": "b", "port": 81}]),
    );
    node.write("s1.yaml", &[grown, of(1).1[1].clone()])?;
    until("the growth to be told", || {
        let sync = agent.status()?.sync;
        let told = sync
            .last_error
            .as_deref()
            .is_some_and(|error| error.contains("default/s1"));
        must(told, || format!("{sync:?}"))
    })?;
    node.dial("10.96.1.1:80")
        .context("the old state of what does not fit any more")?;
    let (file, objects) = of(2);
    node.write(
        &file,
        &[objects[0].clone(), slice("s2-v4", "s2", &[ready(BACKENDS[1])])],
    )?;
    until("another Service's change", || {
        let met = node.dial("10.96.1.2:80")?;
        must(met.ip().to_string() == BACKENDS[1], || format!("met {met}"))
    })?;

    // Room heals.
    let (file, objects) = of(1);
    node.write(&file, &objects)?;
    node.manifests().remove("s2.yaml")?;
    until("the freed room to be used", || {
        Ok(node.dial("10.96.1.3:80").map(drop)?)
    })?;
    until("no error", || {
        let sync = agent.status()?.sync;
        must(sync.last_error.is_none() && sync.pending_since.is_none(), || {
            format!("{sync:?}")
        })
    })?;
    node.dial("10.96.1.1:80")?;
    agent.stop()
}

pub(super) fn backend_capacity(node: &Node) -> Result<()> {
    let _servers = serve_all(node, Manner::Greet)?;
    let small = service("small", cluster_ip(&["10.96.1.1"]));
    node.write(
        "small.yaml",
        &[small, slice("small-v4", "small", &[ready(BACKENDS[0])])],
    )?;
    // Id 0 is nobody's, and one backend is the self-probe's: two are left.
    let agent = node.start(&["--max-backends", "4"])?;
    node.dial("10.96.1.1:80")?;
    let large = service("large", cluster_ip(&["10.96.1.2"]));
    let all = BACKENDS.map(ready);
    node.write("large.yaml", &[large.clone(), slice("large-v4", "large", &all)])?;
    until("the Service that does not fit to be told", || {
        let error = agent.status()?.sync.last_error;
        let told = error
            .as_deref()
            .is_some_and(|error| error.contains("default/large") && error.contains("--max-backends"));
        must(told, || format!("{error:?}"))
    })?;
    must(node.dial("10.96.1.2:80").is_err(), || "it is served".to_owned())?;
    node.dial("10.96.1.1:80")?;
    node.write("large.yaml", &[large, slice("large-v4", "large", &all[..1])])?;
    until("what fits to be served", || Ok(node.dial("10.96.1.2:80").map(drop)?))?;
    until("no error", || {
        let sync = agent.status()?.sync;
        must(sync.last_error.is_none() && sync.pending_since.is_none(), || {
            format!("{sync:?}")
        })
    })?;
    agent.stop()
}
