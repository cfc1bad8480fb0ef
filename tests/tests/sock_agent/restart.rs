//! What an end, a restart, an upgrade and a change of mode leave as it was.

use std::{fs, net::SocketAddr};

use anyhow::{Context, Result};
use lb_common::set::{ListEntry, SetWord};
use lb_tests::{
    agent::{
        Agent, Node, must, patience, until,
        web::{
            BACKENDS, BACKENDS6, VIP, VIP6, echo, only_following, pinned_array, serve_all, started, write_endpoints,
            write_web,
        },
    },
    bpf,
    objects::{cluster_ip, ready, service, slice, with},
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

pub(super) fn kill(node: &Node) -> Result<()> {
    let _staying = node.serve(&["10.244.2.1"], Manner::Stay)?;
    let _servers = serve_all(node, Manner::Greet)?;
    write_web(node, &BACKENDS)?;
    let spec = with(&cluster_ip(&["10.96.0.20"]), "/type", json!("LoadBalancer"));
    let spec = with(
        &spec,
        "/loadBalancerSourceRanges",
        json!(["192.0.2.0/24", "203.0.113.7/32"]),
    );
    let status = json!({"loadBalancer": {"ingress": [{"ip": "198.51.100.20"}]}});
    let long = with(&service("long", spec), "/status", status);
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
    must(holds_within(patience(), || client.made() >= 20), || {
        "no connection was made".to_owned()
    })?;
    agent.kill()?;
    let killed_at = client.made();
    must(holds_within(patience(), || client.made() >= killed_at + 20), || {
        "no connection was made while the agent was dead".to_owned()
    })?;
    echo(&mut open)?;
    must(open.peer_addr()? == "10.96.0.20:80".parse::<SocketAddr>()?, || {
        "the peer's name changed".to_owned()
    })?;

    let agent = node.start(&[])?;
    let restarted_at = client.made();
    must(holds_within(patience(), || client.made() >= restarted_at + 20), || {
        "no connection was made after the restart".to_owned()
    })?;
    let attempts = client.stop();
    let failed: Vec<_> = attempts.iter().filter(|attempt| attempt.outcome.is_err()).collect();
    must(failed.is_empty(), || {
        format!("{} of {} failed: {:?}", failed.len(), attempts.len(), failed[0])
    })?;
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
    let in_lists = started_in_lists(node, &agent)?;
    must(in_lists == attempts.len() as u64, || {
        format!("the lists count {in_lists} starts of {}", attempts.len())
    })?;
    let now = self::ids(&agent)?;
    must(ids == now, || format!("ids changed: {ids:?} {now:?}"))?;
    agent.stop()
}

/// Connections started by the members of the IPv4 set of `web`, as its list in the kernel counts them.
fn started_in_lists(node: &Node, agent: &Agent) -> Result<u64> {
    let tables = agent.tables("web")?;
    let table = tables
        .iter()
        .find(|table| table.set.contains("IPv4"))
        .context("no set of IPv4")?;
    let word = SetWord(pinned_array::<u64>(node, "SETS")?.get(&table.set_id, 0)?);
    let lists = pinned_array::<ListEntry>(node, "LISTS")?;
    let members = 1..=u32::from(word.count());
    members
        .map(|member| Ok(lists.get(&(word.offset() + member), 0)?.c))
        .sum()
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
    let of = |ids: &[u32], key: &str| {
        let id = key.split(' ').find_map(number);
        id.is_some_and(|id| ids.contains(&id))
    };
    dump.rows
        .iter()
        .filter(|row| match dump.name.as_str() {
            "FRONTENDS" | "BACKENDS" => {
                let id = row
                    .value
                    .split(' ')
                    .find_map(|word| number(word.strip_prefix("service=")?));
                id.is_some_and(|id| ids.services.contains(&id))
            }
            "SOURCES" => of(&ids.services, &row.key),
            _ => of(&ids.sets, &row.key),
        })
        .map(|row| format!("{} {}", row.key, row.value))
        .collect()
}

pub(super) fn terminate_balance(node: &Node) -> Result<()> {
    let _servers = serve_all(node, Manner::Greet)?;
    write_web(node, &BACKENDS)?;
    let agent = node.start(&[])?;
    node.dial(VIP)?;
    agent.stop()?;
    must(node.own_pins().join("link-connect4").exists(), || {
        "the link's pin is gone".to_owned()
    })?;
    let met = node.dial_many(VIP, 60)?;
    must(met.len() == 3, || format!("without an agent only {met:?} were met"))?;
    let met = node.dial_many(VIP6, 60)?;
    must(met.len() == 2, || format!("without an agent only {met:?} were met"))?;
    node.cleanup()?;
    nothing_is_left(node)?;
    must(node.dial(VIP).is_err(), || {
        "a connection is still translated".to_owned()
    })
}

fn nothing_is_left(node: &Node) -> Result<()> {
    must(!node.pins().exists(), || {
        format!("pins are left: {:?}", fs::read_dir(node.pins()))
    })?;
    // The kernel frees a link shortly after its last reference is gone.
    until("no program on the cgroup", || {
        let left = bpf::attached_hooks(node.cgroup().path())?;
        must(left.is_empty(), || format!("{left:?} are still attached"))
    })
}

pub(super) fn terminate_observe(node: &Node) -> Result<()> {
    write_web(node, &BACKENDS)?;
    let agent = node.start(&["--mode", "observe"])?;
    must(node.own_pins().join("link-sock_ops").exists(), || {
        "no link is pinned".to_owned()
    })?;
    agent.stop()?;
    nothing_is_left(node)
}

pub(super) fn changed_meanwhile(node: &Node) -> Result<()> {
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

    must(node.dial("10.96.0.30:80").is_err(), || {
        "the removed Service is still served".to_owned()
    })?;
    let third = SocketAddr::new(BACKENDS[2].parse()?, 8080);
    must(node.dial("10.96.0.50:80")? == third, || {
        "the new Service is not served".to_owned()
    })?;
    let met: Vec<_> = node.dial_many(VIP, 40)?.into_keys().collect();
    must(met == [SocketAddr::new(BACKENDS[1].parse()?, 8080), third], || {
        format!("{met:?} were met")
    })?;
    // What did not change was not written: the same lists, published as often as before.
    let kept_after = agent.tables("kept")?;
    must(kept_before == kept_after, || {
        format!("{kept_before:#?} became {kept_after:#?}")
    })?;
    let web_after = agent.tables("web")?;
    let v6 = |tables: &[lb_user::view::TableView]| tables.iter().find(|table| table.set.contains("IPv6")).cloned();
    must(v6(&web_before) == v6(&web_after), || {
        "the other family's set changed".to_owned()
    })?;
    must(agent.service("web")?.id == web.id, || {
        "the Service's id changed".to_owned()
    })?;
    let connects = started(&agent)?;
    must(connects == 60, || {
        format!("{connects} connections are counted; 60 were made")
    })?;
    agent.stop()
}

pub(super) fn unreadable_folder(node: &Node) -> Result<()> {
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
        let told = status
            .problems
            .iter()
            .any(|problem| problem.origin == place.display().to_string());
        must(told && status.source.last_error.is_some(), || format!("{status:?}"))
    })?;
    node.dial(VIP).context("after the folder went")?;
    must(agent.dump_state()? == before, || {
        "the kernel's state changed".to_owned()
    })?;
    fs::rename(&away, &place)?;
    until("the problem to go", || {
        let status = agent.status()?;
        must(status.problems.is_empty() && status.source.last_error.is_none(), || {
            format!("{status:?}")
        })
    })?;
    must(agent.dump_state()? == before, || {
        "the kernel's state changed".to_owned()
    })?;

    agent.stop()
}

/// A source that says nothing at the start: the agent is not ready, and what the kernel holds goes on being served.
pub(super) fn silent_source(node: &Node) -> Result<()> {
    let _servers = serve_all(node, Manner::Greet)?;
    write_web(node, &BACKENDS)?;
    let agent = node.start(&[])?;
    let before = agent.dump_state()?;
    agent.kill()?;

    // Nobody listens on this port of the namespace.
    let agent = node.launch(&["--source", "kube", "--kube-url", "http://127.0.0.1:9"])?;
    let page = until("the unready agent to answer", || {
        let page = agent.get("/readyz")?;
        let told = agent.status()?.source.last_error.is_some();
        must(told, || "the source's error is not told".to_owned())?;
        Ok(page)
    })?;
    must(
        page.status == 503 && page.body.contains("first synchronisation"),
        || format!("{page:?}"),
    )?;
    let status = agent.status()?;
    must(
        !status.source.synced && !status.health.ready && status.health.live,
        || format!("{status:?}"),
    )?;
    must(node.run(&["status"])?.status.code() == Some(1), || {
        "`status` found nothing wrong".to_owned()
    })?;
    for target in [VIP, VIP6] {
        node.dial_many(target, 20)?;
    }
    must(agent.dump_state()? == before, || {
        "the kernel's state changed".to_owned()
    })?;
    agent.stop()?;

    node.dial(VIP)?;
    let agent = node.start(&[])?;
    let connects = started(&agent)?;
    must(connects == 41, || {
        format!("{connects} connections are counted; 41 were made")
    })?;
    agent.stop()
}

pub(super) fn other_abi(node: &Node) -> Result<()> {
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
    fs::rename(node.own_pins(), node.pins().join("0")).context("rename the folder of pins")?;

    let client = Client::start(
        node.netns(),
        &Load {
            concurrency: 2,
            rate: Some(200.0),
            ..Load::tcp(VIP.parse()?)
        },
    )?;
    must(holds_within(patience(), || client.made() >= 20), || {
        "no connection was made".to_owned()
    })?;
    let agent = node.start(&[])?;
    until("the old pins to go", || {
        must(!node.pins().join("0").exists(), || {
            "the old folder is still there".to_owned()
        })
    })?;
    let replaced_at = client.made();
    must(holds_within(patience(), || client.made() >= replaced_at + 20), || {
        "no connection was made after the replacement".to_owned()
    })?;
    let attempts = client.stop();
    let failed: Vec<_> = attempts.iter().filter(|attempt| attempt.outcome.is_err()).collect();
    must(failed.is_empty(), || {
        format!("{} of {} failed: {:?}", failed.len(), attempts.len(), failed[0])
    })?;

    must(open.peer_addr()? == "10.96.0.20:80".parse::<SocketAddr>()?, || {
        format!("the peer's name became {:?}", open.peer_addr())
    })?;
    echo(&mut open)?;
    for (name, hook) in bpf::HOOKS {
        let count = bpf::attached(node.cgroup().path(), hook)?;
        must(count == 1, || format!("{count} programs are attached at {name}"))?;
    }
    let status = agent.status()?;
    must(status.programs.iter().all(|program| program.attached), || {
        format!("{:?}", status.programs)
    })?;
    agent.stop()
}

pub(super) fn second_agent(node: &Node) -> Result<()> {
    write_web(node, &BACKENDS)?;
    let agent = node.start(&[])?;
    let other = node.folder().join("other.sock").display().to_string();
    let (code, said) = node.run_agent(&mut node.agent_command(&["--metrics-address", "none", "--socket", &other]))?;
    must(code == 1 && said.contains("another agent holds"), || {
        format!("{code}: {said}")
    })?;
    must(said.trim_end().lines().count() == 1, || {
        format!("more than one sentence: {said}")
    })?;
    must(agent.status()?.health.ready, || "the first agent suffered".to_owned())?;
    agent.stop()
}

pub(super) fn switch_modes(node: &Node) -> Result<()> {
    let _servers = serve_all(node, Manner::Greet)?;
    write_web(node, &BACKENDS)?;
    let agent = node.start(&[])?;
    node.dial(VIP)?;
    agent.stop()?;

    let agent = node.start(&["--mode", "observe"])?;
    must(agent.status()?.mode == Mode::Observe, || "not observing".to_owned())?;
    only_following(node)?;
    must(node.dial(VIP).is_err(), || {
        "a connection is translated in observe mode".to_owned()
    })?;
    agent.kill()?;

    let agent = node.start(&["--mode", "balance"])?;
    must(agent.status()?.mode == Mode::Balance, || "not balancing".to_owned())?;
    for target in [VIP, VIP6] {
        node.dial(target)?;
    }
    let attached = bpf::attached_hooks(node.cgroup().path())?;
    must(attached.len() == bpf::HOOKS.len(), || {
        format!("only {attached:?} are attached")
    })?;
    agent.stop()
}
