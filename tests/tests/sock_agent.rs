//! The life of the agent's process: restart, upgrade, repair, modes, capacity, health, metrics.

use std::{
    collections::BTreeMap,
    fs,
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use aya::maps::{Array, HashMap, Map, MapData};
use lb_common::{
    addr::{Addr, Port},
    backend::Backend,
    frontend::{Frontend, FrontendKey},
    set::{ListEntry, SetWord},
};
use lb_tests::{
    agent::{Agent, Node, PATIENCE, must, trial, until},
    bpf,
    objects::{cluster_ip, ready, service, slice, with},
    runner,
};
use lb_user::{
    lab::{
        client::{Client, Load, read_name},
        holds_within,
        server::Manner,
    },
    view::{MapDumpView, Mode},
};
use serde_json::json;

const VIP: &str = "10.96.0.10:80";
const VIP6: &str = "[fd00:96::10]:80";
const BACKENDS: [&str; 3] = ["10.244.1.1", "10.244.1.2", "10.244.1.3"];
const BACKENDS6: [&str; 2] = ["fd00:244::1", "fd00:244::2"];

fn main() -> ExitCode {
    runner::run(vec![
        trial("c24_a_killed_agent_fails_no_connection_and_changes_nothing", kill),
        trial("a_terminated_agent_leaves_the_datapath_in_balance", terminate_balance),
        trial("a_terminated_agent_leaves_nothing_in_observe", terminate_observe),
        trial("c24_a_restart_applies_what_changed_meanwhile", changed_meanwhile),
        trial("c24_an_unreadable_folder_deletes_nothing", unreadable_folder),
        trial("pins_of_another_abi_are_replaced_without_a_failed_connection", other_abi),
        trial("a_second_agent_is_refused", second_agent),
        trial("modes_are_switched_by_a_restart", switch_modes),
        trial("a_lost_link_is_attached_again", lost_link),
        trial("damaged_contents_are_repaired", damaged_contents),
        trial("observe_mode_sees_and_does_not_touch", observe),
        trial("what_does_not_fit_is_reported_and_heals", capacity),
        trial("readiness_follows_the_datapath", readiness),
        trial("metrics_equal_the_traffic", metrics),
    ])
}

/// A dual-stack Service `web` with three IPv4 and two IPv6 backends.
fn write_web(node: &Node, v4: &[&str]) -> Result<()> {
    let web = service("web", cluster_ip(&["10.96.0.10", "fd00:96::10"]));
    node.write("web.yaml", &[web])?;
    write_endpoints(node, v4)?;
    let v6: Vec<_> = BACKENDS6.iter().map(|address| ready(address)).collect();
    node.write("web-v6.yaml", &[slice("web-v6", "web", &v6)])
}

fn write_endpoints(node: &Node, v4: &[&str]) -> Result<()> {
    let v4: Vec<_> = v4.iter().map(|address| ready(address)).collect();
    node.write("web-v4.yaml", &[slice("web-v4", "web", &v4)])
}

fn serve_all(node: &Node, manner: Manner) -> Result<lb_user::lab::Server> {
    let all: Vec<&str> = BACKENDS.iter().chain(&BACKENDS6).copied().collect();
    node.serve(&all, manner)
}

/// Greets, and shows that the connection lives: what is sent comes back.
fn echo(stream: &mut TcpStream) -> Result<()> {
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    stream.write_all(b"ping\n")?;
    let mut answer = [0; 5];
    stream.read_exact(&mut answer)?;
    must(&answer == b"ping\n", || format!("{answer:?} came back"))
}

fn started(agent: &Agent) -> Result<u64> {
    Ok(agent.service("web")?.connects)
}

fn kill(node: &Node) -> Result<()> {
    let _staying = node.serve(&["10.244.2.1"], Manner::Stay)?;
    let _servers = serve_all(node, Manner::Greet)?;
    write_web(node, &BACKENDS)?;
    let long = service("long", cluster_ip(&["10.96.0.20"]));
    node.write("long.yaml", &[long, slice("long-v4", "long", &[ready("10.244.2.1")])])?;
    let agent = node.start(&[])?;
    agent.wait_backends(&[&BACKENDS[..], &BACKENDS6[..], &["10.244.2.1"]].concat())?;

    let mut open = node.open("10.96.0.20:80")?;
    read_name(&mut open)?;
    let before = agent.dump_state()?;
    let ids = ids(&agent)?;
    let client = Client::start(
        node.netns(),
        &Load {
            concurrency: 2,
            rate: Some(100.0),
            ..Load::tcp(VIP.parse()?)
        },
    )?;
    must(holds_within(PATIENCE, || client.made() >= 20), || "no connection was made".to_owned())?;
    agent.kill()?;
    let killed_at = client.made();
    must(holds_within(PATIENCE, || client.made() >= killed_at + 20), || {
        "no connection was made while the agent was dead".to_owned()
    })?;
    echo(&mut open)?;
    must(open.peer_addr()? == "10.96.0.20:80".parse::<SocketAddr>()?, || {
        "the peer's name changed".to_owned()
    })?;

    let agent = node.start(&[])?;
    let restarted_at = client.made();
    must(holds_within(PATIENCE, || client.made() >= restarted_at + 20), || {
        "no connection was made after the restart".to_owned()
    })?;
    let attempts = client.stop();
    let failed: Vec<_> = attempts.iter().filter(|attempt| attempt.outcome.is_err()).collect();
    must(failed.is_empty(), || format!("{} of {} failed: {:?}", failed.len(), attempts.len(), failed[0]))?;
    echo(&mut open)?;

    let after = agent.dump_state()?;
    for (map, dump) in &before {
        let (old, new) = (shown_rows(dump, &ids), shown_rows(&after[map], &ids));
        must(!old.is_empty() || *map == "MEMBERS", || format!("{map} has no row"))?;
        must(old == new, || format!("{map} changed:\n{old:#?}\n{new:#?}"))?;
    }
    let count = started(&agent)?;
    must(count == attempts.len() as u64, || {
        format!("{count} connections are counted, and {} were made", attempts.len())
    })?;
    let now = self::ids(&agent)?;
    must(ids == now, || format!("ids changed: {ids:?} {now:?}"))?;
    agent.stop()
}

/// The ids that people's Services have in the kernel: all but the self-probe's.
#[derive(Debug, PartialEq, Eq)]
struct Ids {
    services: Vec<u32>,
    sets: Vec<u32>,
    backends: Vec<u32>,
}

fn ids(agent: &Agent) -> Result<Ids> {
    let services = agent.services()?;
    let mut sets = Vec::new();
    for service in &services {
        sets.extend(agent.tables(&service.name)?.iter().map(|table| table.set_id));
    }
    let mut backends: Vec<u32> = agent.backends()?.iter().map(|backend| backend.id).collect();
    backends.sort_unstable();
    Ok(Ids {
        services: services.iter().map(|service| service.id).collect(),
        sets,
        backends,
    })
}

/// The rows that belong to people's Services. The self-probe's are left out: its listener has another port each time.
fn shown_rows(dump: &MapDumpView, ids: &Ids) -> Vec<String> {
    let number = |text: &str| text.parse::<u32>().ok();
    let of_set = |key: &str| {
        let id = key.split(' ').find_map(number);
        id.is_some_and(|id| ids.sets.contains(&id))
    };
    dump.rows
        .iter()
        .filter(|row| match dump.name.as_str() {
            "FRONTENDS" | "BACKENDS" => {
                let id = row.value.split(' ').find_map(|word| number(word.strip_prefix("service=")?));
                id.is_some_and(|id| ids.services.contains(&id))
            }
            _ => of_set(&row.key),
        })
        .map(|row| format!("{} {}", row.key, row.value))
        .collect()
}

fn terminate_balance(node: &Node) -> Result<()> {
    let _servers = serve_all(node, Manner::Greet)?;
    write_web(node, &BACKENDS)?;
    let agent = node.start(&[])?;
    node.dial(VIP)?;
    agent.stop()?;
    must(node.pins().join("1/link-connect4").exists(), || "the link's pin is gone".to_owned())?;
    let met = node.dial_many(VIP, 60)?;
    must(met.len() == 3, || format!("without an agent only {met:?} were met"))?;
    let met = node.dial_many(VIP6, 60)?;
    must(met.len() == 2, || format!("without an agent only {met:?} were met"))?;
    let cleanup = node.run(&["cleanup", "--pin-name", node.pin_name()])?;
    must(cleanup.status.success(), || format!("{cleanup:?}"))?;
    nothing_is_left(node)?;
    must(node.dial(VIP).is_err(), || "a connection is still translated".to_owned())
}

fn nothing_is_left(node: &Node) -> Result<()> {
    must(!node.pins().exists(), || format!("pins are left: {:?}", fs::read_dir(node.pins())))?;
    // The kernel frees a link shortly after its last reference is gone.
    until("no program on the cgroup", || {
        let left = bpf::attached_hooks(node.cgroup().path())?;
        must(left.is_empty(), || format!("{left:?} are still attached"))
    })
}

fn terminate_observe(node: &Node) -> Result<()> {
    write_web(node, &BACKENDS)?;
    let agent = node.start(&["--mode", "observe"])?;
    must(node.pins().join("1/link-sock_ops").exists(), || "no link is pinned".to_owned())?;
    agent.stop()?;
    nothing_is_left(node)
}

fn changed_meanwhile(node: &Node) -> Result<()> {
    let _servers = serve_all(node, Manner::Greet)?;
    write_web(node, &BACKENDS[..2])?;
    let old = service("old", cluster_ip(&["10.96.0.30"]));
    node.write("old.yaml", &[old, slice("old-v4", "old", &[ready(BACKENDS[0])])])?;
    let kept = service("kept", cluster_ip(&["10.96.0.40"]));
    node.write("kept.yaml", &[kept, slice("kept-v4", "kept", &[ready(BACKENDS[0])])])?;
    let agent = node.start(&[])?;
    node.dial("10.96.0.30:80")?;
    node.dial_many(VIP, 20)?;
    let (kept_before, web_before) = (agent.tables("kept")?, agent.tables("web")?);
    let web = agent.service("web")?;
    agent.kill()?;

    node.manifests().remove("old.yaml")?;
    write_endpoints(node, &[BACKENDS[1], BACKENDS[2]])?;
    let new = service("new", cluster_ip(&["10.96.0.50"]));
    node.write("new.yaml", &[new, slice("new-v4", "new", &[ready(BACKENDS[2])])])?;
    let agent = node.start(&[])?;

    must(node.dial("10.96.0.30:80").is_err(), || "the removed Service is still served".to_owned())?;
    let third = SocketAddr::new(BACKENDS[2].parse()?, 8080);
    must(node.dial("10.96.0.50:80")? == third, || "the new Service is not served".to_owned())?;
    let met: Vec<_> = node.dial_many(VIP, 40)?.into_keys().collect();
    must(met == [SocketAddr::new(BACKENDS[1].parse()?, 8080), third], || format!("{met:?} were met"))?;
    // What did not change was not written: the same lists, published as often as before.
    let kept_after = agent.tables("kept")?;
    must(kept_before == kept_after, || format!("{kept_before:#?} became {kept_after:#?}"))?;
    let web_after = agent.tables("web")?;
    let v6 = |tables: &[lb_user::view::TableView]| tables.iter().find(|table| table.set.contains("IPv6")).cloned();
    must(v6(&web_before) == v6(&web_after), || "the other family's set changed".to_owned())?;
    must(agent.service("web")?.id == web.id, || "the Service's id changed".to_owned())?;
    let connects = started(&agent)?;
    must(connects == 60, || format!("{connects} connections are counted; 60 were made"))?;
    agent.stop()
}

fn unreadable_folder(node: &Node) -> Result<()> {
    let _servers = serve_all(node, Manner::Greet)?;
    write_web(node, &BACKENDS)?;
    let agent = node.start(&[])?;
    node.dial(VIP)?;
    agent.kill()?;

    // The start refuses a folder that is not there: a wrong flag is not an order to forget everything.
    let away = node.folder().join("away");
    let place = node.manifests().path().to_owned();
    fs::rename(&place, &away)?;
    let (code, said) = node.run_agent(&mut node.agent_command(&[]))?;
    must(code == 2 && said.contains("manifests"), || format!("{code}: {said}"))?;
    node.dial(VIP).context("with no folder")?;

    // A folder that comes and goes while the agent runs keeps the kernel's state, and heals.
    fs::rename(&away, &place)?;
    let agent = node.start(&[])?;
    let before = agent.dump_state()?;
    fs::rename(&place, &away)?;
    until("the loss to be told", || {
        let status = agent.status()?;
        let told = status.problems.iter().any(|problem| problem.origin == place.display().to_string());
        must(told && status.source.last_error.is_some(), || format!("{status:?}"))
    })?;
    node.dial(VIP).context("after the folder went")?;
    must(agent.dump_state()? == before, || "the kernel's state changed".to_owned())?;
    fs::rename(&away, &place)?;
    until("the problem to go", || {
        let status = agent.status()?;
        must(status.problems.is_empty() && status.source.last_error.is_none(), || format!("{status:?}"))
    })?;
    must(agent.dump_state()? == before, || "the kernel's state changed".to_owned())?;

    // A link that dangles at the start is such a folder as well: the kernel's state stands until it can be read.
    agent.kill()?;
    let through = node.folder().join("through");
    std::os::unix::fs::symlink(&place, &through)?;
    let source = format!("dir:{}", through.display());
    let agent = node.start(&["--source", &source])?;
    node.dial(VIP)?;
    agent.stop()
}

fn other_abi(node: &Node) -> Result<()> {
    let _staying = node.serve(&["10.244.2.1"], Manner::Stay)?;
    let _servers = serve_all(node, Manner::Greet)?;
    write_web(node, &BACKENDS)?;
    let long = service("long", cluster_ip(&["10.96.0.20"]));
    node.write("long.yaml", &[long, slice("long-v4", "long", &[ready("10.244.2.1")])])?;
    let agent = node.start(&[])?;
    let mut open = node.open("10.96.0.20:80")?;
    read_name(&mut open)?;
    agent.kill()?;
    // To the next agent these are a whole, working datapath of ABI 0.
    fs::rename(node.pins().join("1"), node.pins().join("0")).context("rename the folder of pins")?;

    let client = Client::start(
        node.netns(),
        &Load {
            concurrency: 2,
            rate: Some(200.0),
            ..Load::tcp(VIP.parse()?)
        },
    )?;
    must(holds_within(PATIENCE, || client.made() >= 20), || "no connection was made".to_owned())?;
    let agent = node.start(&[])?;
    until("the old pins to go", || {
        must(!node.pins().join("0").exists(), || "the old folder is still there".to_owned())
    })?;
    let replaced_at = client.made();
    must(holds_within(PATIENCE, || client.made() >= replaced_at + 20), || {
        "no connection was made after the replacement".to_owned()
    })?;
    let attempts = client.stop();
    let failed: Vec<_> = attempts.iter().filter(|attempt| attempt.outcome.is_err()).collect();
    must(failed.is_empty(), || format!("{} of {} failed: {:?}", failed.len(), attempts.len(), failed[0]))?;

    must(open.peer_addr()? == "10.96.0.20:80".parse::<SocketAddr>()?, || {
        format!("the peer's name became {:?}", open.peer_addr())
    })?;
    echo(&mut open)?;
    for (name, hook) in bpf::HOOKS {
        let count = bpf::attached(node.cgroup().path(), hook)?;
        must(count == 1, || format!("{count} programs are attached at {name}"))?;
    }
    let status = agent.status()?;
    must(status.programs.iter().all(|program| program.attached), || format!("{:?}", status.programs))?;
    agent.stop()
}

fn second_agent(node: &Node) -> Result<()> {
    write_web(node, &BACKENDS)?;
    let agent = node.start(&[])?;
    let other = node.folder().join("other.sock").display().to_string();
    let (code, said) = node.run_agent(&mut node.agent_command(&["--metrics-address", "none", "--socket", &other]))?;
    must(code == 1 && said.contains("another agent holds"), || format!("{code}: {said}"))?;
    must(said.trim_end().lines().count() == 1, || format!("more than one sentence: {said}"))?;
    must(agent.status()?.health.ready, || "the first agent suffered".to_owned())?;
    agent.stop()
}

fn switch_modes(node: &Node) -> Result<()> {
    let _servers = serve_all(node, Manner::Greet)?;
    write_web(node, &BACKENDS)?;
    let agent = node.start(&[])?;
    node.dial(VIP)?;
    agent.stop()?;

    let agent = node.start(&["--mode", "observe"])?;
    must(agent.status()?.mode == Mode::Observe, || "not observing".to_owned())?;
    only_following(node)?;
    must(node.dial(VIP).is_err(), || "a connection is translated in observe mode".to_owned())?;
    agent.kill()?;

    let agent = node.start(&["--mode", "balance"])?;
    must(agent.status()?.mode == Mode::Balance, || "not balancing".to_owned())?;
    for target in [VIP, VIP6] {
        node.dial(target)?;
    }
    let attached = bpf::attached_hooks(node.cgroup().path())?;
    must(attached.len() == bpf::HOOKS.len(), || format!("only {attached:?} are attached"))?;
    agent.stop()
}

/// In observe mode nothing may be attached that can write to traffic.
fn only_following(node: &Node) -> Result<()> {
    until("the rewriting links to go", || {
        let attached = bpf::attached_hooks(node.cgroup().path())?;
        must(attached == ["sock_ops", "sock_release"], || format!("{attached:?} are attached"))
    })?;
    let mut links: Vec<String> = fs::read_dir(node.pins().join("1"))?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<Result<_>>()?;
    links.retain(|name| name.starts_with("link-"));
    links.sort();
    must(links == ["link-sock_ops", "link-sock_release"], || format!("{links:?} are pinned"))
}

fn lost_link(node: &Node) -> Result<()> {
    let _servers = serve_all(node, Manner::Greet)?;
    write_web(node, &BACKENDS)?;
    let agent = node.start(&[])?;
    let link = node.pins().join("1/link-connect4");

    fs::remove_file(&link)?;
    until("the removed link", || Ok(node.dial(VIP).map(drop)?))?;
    until("the repair to be counted", || {
        let repairs = agent.status()?.sync.repairs;
        must(repairs >= 1, || format!("{repairs} repairs"))
    })?;
    bpf::detach_pinned_link(&link)?;
    bpf::detach_pinned_link(&node.pins().join("1/link-getpeername6"))?;
    until("the detached links", || {
        let attached = bpf::attached_hooks(node.cgroup().path())?;
        must(attached.len() == bpf::HOOKS.len(), || format!("only {attached:?} are attached"))
    })?;
    node.dial(VIP)?;
    until("the repairs to be counted", || {
        let repairs = agent.status()?.sync.repairs;
        let series = agent.metrics()?.get("evenkeel_repairs_total").copied();
        must(repairs == 3 && series == Some(3.0), || format!("{repairs} repairs, {series:?} in the metrics"))
    })?;
    agent.stop()
}

/// A state map of the running agent, as root may open it.
fn pinned(node: &Node, name: &str) -> Result<MapData> {
    Ok(MapData::from_pin(node.pins().join("1").join(name))?)
}

fn array<T: aya::Pod>(node: &Node, name: &str) -> Result<Array<MapData, T>> {
    Ok(Map::Array(pinned(node, name)?).try_into()?)
}

fn frontends(node: &Node) -> Result<HashMap<MapData, FrontendKey, Frontend>> {
    Ok(Map::HashMap(pinned(node, "FRONTENDS")?).try_into()?)
}

fn damaged_contents(node: &Node) -> Result<()> {
    let _servers = serve_all(node, Manner::Greet)?;
    write_web(node, &BACKENDS)?;
    let agent = node.start(&[])?;
    agent.wait_backends(&[&BACKENDS[..], &BACKENDS6[..]].concat())?;
    let before = agent.dump_state()?;
    let key = FrontendKey::new(Addr::from("10.96.0.10".parse::<std::net::IpAddr>()?), Port::new(80), lb_common::abi::TCP);
    let foreign = FrontendKey::new(Addr::from("10.96.9.9".parse::<std::net::IpAddr>()?), Port::new(80), lb_common::abi::TCP);
    let own = frontends(node)?.get(&key, 0)?;
    let word = SetWord(array::<u64>(node, "SETS")?.get(&own.set_id, 0)?);
    let header = array::<ListEntry>(node, "LISTS")?.get(&word.offset(), 0)?;
    let first = array::<ListEntry>(node, "LISTS")?.get(&(word.offset() + 1), 0)?;

    type Damage<'d> = Box<dyn Fn() -> Result<()> + 'd>;
    let damages: Vec<(&str, Damage<'_>)> = vec![
        ("a deleted frontend", Box::new(|| Ok(frontends(node)?.remove(&key)?))),
        ("a foreign frontend", Box::new(|| Ok(frontends(node)?.insert(foreign, own, 0)?))),
        (
            "a frontend of another set",
            Box::new(|| {
                let wrong = Frontend { set_id: own.set_id + 7, ..own };
                Ok(frontends(node)?.insert(key, wrong, 0)?)
            }),
        ),
        ("a set without members", Box::new(|| Ok(array::<u64>(node, "SETS")?.set(own.set_id, 0, 0)?))),
        (
            "a set that points elsewhere",
            Box::new(|| {
                let wrong = SetWord::new(word.offset() + 1, word.count(), word.generation());
                Ok(array::<u64>(node, "SETS")?.set(own.set_id, wrong.0, 0)?)
            }),
        ),
        (
            "a list with a wrong header",
            Box::new(|| {
                let wrong = ListEntry { b: header.b + 1, ..header };
                Ok(array::<ListEntry>(node, "LISTS")?.set(word.offset(), wrong, 0)?)
            }),
        ),
        (
            "a list with a wrong member",
            Box::new(|| {
                let wrong = ListEntry { a: 99, ..first };
                Ok(array::<ListEntry>(node, "LISTS")?.set(word.offset() + 1, wrong, 0)?)
            }),
        ),
        (
            "a wrong table",
            Box::new(|| Ok(array::<u64>(node, "TABLES")?.set(header.a, u64::MAX, 0)?)),
        ),
        (
            "a backend elsewhere",
            Box::new(|| {
                let mut backends = array::<Backend>(node, "BACKENDS")?;
                let wrong = Backend {
                    port: Port::new(1),
                    ..backends.get(&first.a, 0)?
                };
                Ok(backends.set(first.a, wrong, 0)?)
            }),
        ),
        (
            "a vacant backend",
            Box::new(|| Ok(array::<Backend>(node, "BACKENDS")?.set(first.a, Backend::default(), 0)?)),
        ),
    ];
    let mut repairs = agent.status()?.sync.repairs;
    for (what, damage) in damages {
        damage().with_context(|| what.to_owned())?;
        // The contents are looked at each minute, and at once when a link was lost.
        fs::remove_file(node.pins().join("1/link-sock_release"))?;
        let now = until(what, || {
            let now = agent.status()?.sync.repairs;
            must(now >= repairs + 2, || format!("{now} repairs after {repairs}"))?;
            Ok(now)
        })?;
        repairs = now;
        let after = agent.dump_state()?;
        for (map, dump) in &before {
            let (old, new) = (without_publication(dump), without_publication(&after[map]));
            must(old == new, || format!("{what}: {map} is not as before:\n{old:#?}\n{new:#?}"))?;
        }
        let met = node.dial_many(VIP, 60).with_context(|| what.to_owned())?;
        must(met.len() == 3, || format!("{what}: only {met:?} were met"))?;
    }
    let series = agent.metrics()?.get("evenkeel_repairs_total").copied();
    must(series == Some(repairs as f64), || format!("{repairs} repairs, {series:?} in the metrics"))?;
    agent.stop()
}

/// A dump without the number of the publication, which a repair may raise.
fn without_publication(dump: &MapDumpView) -> Vec<(String, String)> {
    dump.rows
        .iter()
        .map(|row| {
            let value = row.value.split(' ').filter(|word| !word.starts_with("generation=")).collect::<Vec<_>>();
            (row.key.clone(), value.join(" "))
        })
        .collect()
}

fn observe(node: &Node) -> Result<()> {
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
    must(server.count(VIP.parse()?) == 60, || "the server saw other connections".to_owned())?;
    // Nobody listens on this port of the address, but the Service has it as a frontend only.
    until("60 connections to be seen", || {
        let web = agent.service("web")?;
        must(web.connects == 60 && web.active == 0 && web.failed.is_empty(), || format!("{web:?}"))
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
        (r#"evenkeel_service_connects_total{namespace="default",service="web"}"#, 61.0),
        (r#"evenkeel_service_connects_failed_total{namespace="default",service="web",reason="refused"}"#, 1.0),
        (r#"evenkeel_service_connections_active{namespace="default",service="web"}"#, 0.0),
        (r#"evenkeel_mode{mode="observe"}"#, 1.0),
    ] {
        must(metrics.get(series) == Some(&value), || format!("{series} is {:?}, not {value}", metrics.get(series)))?;
    }
    agent.stop()
}

fn capacity(node: &Node) -> Result<()> {
    let _servers = serve_all(node, Manner::Greet)?;
    let of = |number: u8| {
        let name = format!("s{number}");
        let object = service(&name, cluster_ip(&[&format!("10.96.1.{number}")]));
        (format!("{name}.yaml"), [object, slice(&format!("{name}-v4"), &name, &[ready(BACKENDS[0])])])
    };
    // One frontend is the self-probe's.
    let agent = node.start(&["--max-frontends", "3", "--metrics-address", "127.0.0.1:9975"])?;
    for number in [1, 2] {
        let (file, objects) = of(number);
        node.write(&file, &objects)?;
        until("a Service that fits", || Ok(node.dial(&format!("10.96.1.{number}:80")).map(drop)?))?;
    }
    let (file, objects) = of(3);
    node.write(&file, &objects)?;
    until("the Service that does not fit to be told", || {
        let sync = agent.status()?.sync;
        let told = sync.last_error.as_deref().is_some_and(|error| error.contains("default/s3"));
        must(told && sync.failures > 0, || format!("{sync:?}"))
    })?;
    must(node.dial("10.96.1.3:80").is_err(), || "it is served".to_owned())?;

    // One that is served and grows beyond the room keeps what it has, and the others are changed as ever.
    let grown = with(&of(1).1[0], "/spec/ports", json!([{"name": "a", "port": 80}, {"name": "b", "port": 81}]));
    node.write("s1.yaml", &[grown, of(1).1[1].clone()])?;
    until("the growth to be told", || {
        let sync = agent.status()?.sync;
        let told = sync.last_error.as_deref().is_some_and(|error| error.contains("default/s1"));
        must(told, || format!("{sync:?}"))
    })?;
    node.dial("10.96.1.1:80").context("the old state of what does not fit any more")?;
    let (file, objects) = of(2);
    node.write(&file, &[objects[0].clone(), slice("s2-v4", "s2", &[ready(BACKENDS[1])])])?;
    until("another Service's change", || {
        let met = node.dial("10.96.1.2:80")?;
        must(met.ip().to_string() == BACKENDS[1], || format!("met {met}"))
    })?;

    // Room heals.
    let (file, objects) = of(1);
    node.write(&file, &objects)?;
    node.manifests().remove("s2.yaml")?;
    until("the freed room to be used", || Ok(node.dial("10.96.1.3:80").map(drop)?))?;
    until("no error", || {
        let sync = agent.status()?.sync;
        must(sync.last_error.is_none() && sync.pending_since.is_none(), || format!("{sync:?}"))
    })?;
    node.dial("10.96.1.1:80")?;
    agent.stop()
}

fn readiness(node: &Node) -> Result<()> {
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
        must(reason.trim_end().lines().count() == 1, || format!("more than one sentence: {reason}"))?;
    }
    node.dial(VIP).context("ready means that connections are translated")?;
    agent.wait_ready()?;
    for path in ["/healthz", "/livez"] {
        let page = agent.get(path)?;
        let body: serde_json::Value = serde_json::from_str(&page.body)?;
        let whole = page.status == 200 && page.head.contains("application/json");
        must(whole && body["nodeEligible"] == true && body["currentTime"].is_string(), || format!("{path}: {page:?}"))?;
    }
    must(agent.get("/nothing")?.status == 404, || "an unknown page is answered".to_owned())?;

    // Links that are lost again and again: the probe sees it between two repairs.
    let links = ["link-connect4", "link-sock_ops"].map(|name| node.pins().join("1").join(name));
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

fn metrics(node: &Node) -> Result<()> {
    let _servers = serve_all(node, Manner::Greet)?;
    let _staying = node.serve(&["10.244.2.1"], Manner::Stay)?;
    write_web(node, &BACKENDS)?;
    let long = service("long", cluster_ip(&["10.96.0.20"]));
    node.write("long.yaml", &[long, slice("long-v4", "long", &[ready("10.244.2.1")])])?;
    // Nobody listens on port 8080 of this address, and nobody is behind the other Service.
    let refusing = service("refusing", cluster_ip(&["10.96.0.60"]));
    node.add_addresses(&["10.244.3.1"])?;
    node.write("refusing.yaml", &[refusing, slice("r-v4", "refusing", &[ready("10.244.3.1")])])?;
    node.write("empty.yaml", &[service("empty", cluster_ip(&["10.96.0.70"]))])?;
    let agent = node.start(&["--backend-metrics"])?;
    agent.wait_backends(&[&BACKENDS[..], &BACKENDS6[..], &["10.244.2.1", "10.244.3.1"]].concat())?;

    node.netns().set_local_ports(40_000, 40_019)?;
    let met = node.dial_many(VIP, 100)?;
    let mut open = node.open("10.96.0.20:80")?;
    read_name(&mut open)?;
    for _ in 0..3 {
        must(node.dial("10.96.0.60:80").is_err(), || "a connection to nobody".to_owned())?;
    }
    for _ in 0..2 {
        must(node.dial("10.96.0.70:80").is_err(), || "a connection to nobody".to_owned())?;
    }
    let of = |name: &str, service: &str| format!(r#"{name}{{namespace="default",service="{service}"}}"#);
    let failed = |service: &str, reason: &str| {
        format!(r#"evenkeel_service_connects_failed_total{{namespace="default",service="{service}",reason="{reason}"}}"#)
    };
    let wanted = BTreeMap::from([
        (of("evenkeel_service_connects_total", "web"), 100.0),
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
            must(found.get(series) == Some(value), || format!("{series} is {:?}, not {value}", found.get(series)))?;
        }
        // 100 connections on 20 ports, and few others: at least 80 reuses, judged as they close.
        let reuses: f64 = sum(&found, "evenkeel_tuple_reuse_total{");
        must((80.0..100.0).contains(&reuses), || format!("{reuses} reuses"))?;
        Ok(found)
    })?;
    for (backend, count) in met {
        let series = format!(
            r#"evenkeel_backend_connects_total{{namespace="default",service="web",backend="{backend}"}}"#
        );
        must(found.get(&series) == Some(&(count as f64)), || format!("{series} is {:?}, not {count}", found.get(&series)))?;
    }
    let page = agent.get("/metrics")?;
    let content_type = page.head.to_ascii_lowercase();
    must(content_type.contains("content-type: text/plain; version=0.0.4"), || page.head.clone())?;

    // A Service's series go a minute after it.
    node.manifests().remove("web.yaml")?;
    let gone = of("evenkeel_service_connects_total", "web");
    let deadline = Duration::from_secs(60) + PATIENCE;
    must(holds_within(deadline, || agent.metrics().is_ok_and(|found| !found.contains_key(&gone))), || {
        format!("{gone} is still there")
    })?;
    let Some(kept) = agent.metrics()?.get(&of("evenkeel_service_connects_total", "long")).copied() else {
        bail!("the series of a Service that stays is gone");
    };
    must(kept == 1.0, || format!("{kept} connections"))?;
    drop(open);
    agent.stop()
}

fn sum(metrics: &BTreeMap<String, f64>, prefix: &str) -> f64 {
    metrics.iter().filter(|(series, _)| series.starts_with(prefix)).map(|(_, value)| value).sum()
}
