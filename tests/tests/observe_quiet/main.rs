//! Observe mode writes nothing: what the node has, what applications see and what servers see is the same without the agent,
//! beside it and after it.

mod snapshot;
mod talk;

use std::{
    io::Write as _,
    net::SocketAddr,
    process::{Command, ExitCode, Stdio},
};

use anyhow::{Context, Result, ensure};
use lb_tests::{
    agent::{Agent, Node, must, trial, until},
    beside::{self, Beside, endpoint, endpoints, in_rules, six, vip},
    bpf,
    objects::{cluster_ip, ready, service, slice, with},
    runner,
};
use lb_user::{
    lab::{client::Client, link, nft, server::Manner},
    model::Protocol,
};
use serde_json::json;

use self::{
    snapshot::{Hooks, Snapshot, difference},
    talk::Ears,
};

/// The Service that the load goes to, in rules of iptables where there are any.
const LOADED: u8 = 11;
/// The dual-stack Service, TCP and UDP, that is listened to byte by byte.
const HEARD: u8 = 12;
/// New connections a second during all of it.
const RATE: f64 = 100.0;
/// Where the agent serves metrics, the one listener that it may have: `127.0.0.1:9975` as the kernel writes it.
const METRICS: &str = "tcp 0100007F:26F7";

fn main() -> ExitCode {
    runner::run(vec![
        trial("a_change_is_seen", change_is_seen),
        trial("nothing_is_written", nothing_is_written),
    ])
}

/// The node, its rules, its Services and everything that goes on there.
struct Scene<'n> {
    node: &'n Node,
    ears: Ears,
    load: Client,
    _beside: Beside<'n>,
    _servers: lb_user::lab::Server,
}

impl<'n> Scene<'n> {
    fn new(node: &'n Node) -> Result<Self> {
        let beside = Beside::new(node, 1)?;
        until("the link's own address", || snapshot::is_settled(node))?;
        let servers = beside.serve(&endpoints(LOADED, 3), Manner::Greet)?;
        let (v4, v6) = (
            endpoint(HEARD, 1),
            SocketAddr::new(six(u16::from(HEARD), 1), beside::TARGET),
        );
        for pod in [v4, v6] {
            beside.add_pod(pod.ip())?;
        }
        let heard = [vip(HEARD), SocketAddr::new("fd00:96::12".parse()?, beside::PORT)];
        let mut services = Vec::new();
        for (frontend, pod) in heard.into_iter().zip([v4, v6]) {
            for protocol in [Protocol::Tcp, Protocol::Udp] {
                let word = if protocol == Protocol::Tcp { "tcp" } else { "udp" };
                services.push(nft::Service {
                    name: format!("ULMVA6XW-default/heard/{word}/"),
                    frontend,
                    protocol,
                    endpoints: vec![pod],
                });
            }
        }
        let loaded = in_rules("loaded", vip(LOADED), &endpoints(LOADED, 3));
        if !by_iptables(node, loaded.frontend, &loaded.endpoints)? {
            services.push(loaded);
        }
        beside.translate(&services)?;

        let addresses = |n: u8| -> Vec<_> { (1..=n).map(|i| ready(&endpoint(LOADED, i).ip().to_string())).collect() };
        let object = service("loaded", cluster_ip(&[&vip(LOADED).ip().to_string()]));
        node.write("loaded.yaml", &[object, slice("loaded-v4", "loaded", &addresses(3))])?;
        let ports = json!([
            {"name": "t", "port": 80, "targetPort": 8080, "protocol": "TCP"},
            {"name": "u", "port": 80, "targetPort": 8080, "protocol": "UDP"},
        ]);
        let spec = cluster_ip(
            &heard
                .map(|frontend| frontend.ip().to_string())
                .each_ref()
                .map(String::as_str),
        );
        let of_slice = json!([
            {"name": "t", "protocol": "TCP", "port": 8080},
            {"name": "u", "protocol": "UDP", "port": 8080},
        ]);
        let slices = [("heard-v4", v4), ("heard-v6", v6)].map(|(name, pod)| {
            with(
                &slice(name, "heard", &[ready(&pod.ip().to_string())]),
                "/ports",
                of_slice.clone(),
            )
        });
        node.write(
            "heard.yaml",
            &[&[service("heard", with(&spec, "/ports", ports))][..], &slices].concat(),
        )?;
        let ears = Ears::open(&beside.pods, heard.into_iter().zip([v4, v6]).collect())?;
        let load = beside.load_on(vip(LOADED), RATE)?;
        Ok(Self {
            node,
            ears,
            load,
            _beside: beside,
            _servers: servers,
        })
    }

    /// Waits until the load has made so many more connections.
    fn go_on(&self, connections: u64) -> Result<()> {
        let goal = self.load.made() + connections;
        until("the load to go on", || {
            must(self.load.made() >= goal, || format!("{} of {goal}", self.load.made()))
        })
    }
}

/// kube-proxy's iptables rules in small; false where there is no iptables.
fn by_iptables(node: &Node, frontend: SocketAddr, endpoints: &[SocketAddr]) -> Result<bool> {
    let chains: Vec<_> = (0..endpoints.len())
        .map(|i| format!(":KUBE-SEP-{i} - [0:0]\n"))
        .collect();
    let choices: Vec<_> = (endpoints.iter().enumerate())
        .map(|(i, endpoint)| {
            let left = endpoints.len() - i;
            let chance = format!("-m statistic --mode random --probability {:.10} ", 1.0 / left as f64);
            let choice = if left > 1 { chance.as_str() } else { "" };
            format!(
                "-A KUBE-SVC-LOADED {choice}-j KUBE-SEP-{i}\n\
                 -A KUBE-SEP-{i} -p tcp -m tcp -j DNAT --to-destination {endpoint}\n"
            )
        })
        .collect();
    let text = format!(
        "*nat\n:KUBE-SERVICES - [0:0]\n:KUBE-SVC-LOADED - [0:0]\n{}\
         -A PREROUTING -j KUBE-SERVICES\n-A OUTPUT -j KUBE-SERVICES\n\
         -A KUBE-SERVICES -d {}/32 -p tcp -m tcp --dport {} -j KUBE-SVC-LOADED\n{}COMMIT\n",
        chains.concat(),
        frontend.ip(),
        frontend.port(),
        choices.concat(),
    );
    let mut command = Command::new("iptables-restore");
    command.stdin(Stdio::piped()).stderr(Stdio::piped());
    let mut child = match node.netns().place(&mut command).spawn() {
        Ok(child) => child,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error).context("start iptables-restore"),
    };
    let mut stdin = child.stdin.take().context("its input")?;
    stdin.write_all(text.as_bytes())?;
    drop(stdin);
    let ended = child.wait_with_output()?;
    ensure!(
        ended.status.success(),
        "iptables-restore: {}",
        String::from_utf8_lossy(&ended.stderr)
    );
    Ok(true)
}

/// Asks everything of the agent that makes it read the node.
fn interrogate(agent: &Agent) -> Result<()> {
    agent.diagnosis("loaded")?;
    agent.status()?;
    agent.reuse()?;
    agent.metrics().map(drop)
}

fn nothing_is_written(node: &Node) -> Result<()> {
    let scene = Scene::new(node)?;
    scene.go_on(50)?;
    let (before, hooks) = (Snapshot::take(node)?, Hooks::look(node)?);
    let talk = scene.ears.talk(node.netns())?;
    ensure!(hooks.is_bare(), "not a bare node: {hooks:?}");
    ensure!(before.len() > 200, "the snapshot is empty: {}", before.len());

    let agent = node.start(&["--mode", "observe"])?;
    until("the load to be told by endpoint", || {
        let told = agent.diagnosis("loaded")?.attribution;
        must(told.attributed >= 100 && told.unknown * 20 <= told.connects, || {
            format!("{told:?}")
        })
    })?;
    // At once, and once more after everything was asked and the loops have gone round.
    for connections in [0, 400] {
        interrogate(&agent)?;
        scene.go_on(connections)?;
        let during = Snapshot::take(node)?;
        let changed = difference(&before, &during);
        must(changed == [format!("+ {METRICS}")], || {
            format!("changed while it observes: {changed:#?}")
        })?;
        let hooks = Hooks::look(node)?;
        must(
            hooks.cgroup == ["sock_ops", "sock_release"] && hooks.sees_packets(),
            || format!("{hooks:?}"),
        )?;
        let beside = scene.ears.talk(node.netns())?;
        must(beside == talk, || format!("without: {talk:#?}\nbeside: {beside:#?}"))?;
    }
    agent.stop()?;
    let after = Snapshot::take(node)?;
    let changed = difference(&before, &after);
    must(changed.is_empty(), || format!("changed for good: {changed:#?}"))?;
    let left = Hooks::look(node)?;
    must(left == hooks, || format!("left behind: {left:?}"))?;
    must(!node.pins().exists(), || "pins are left".to_owned())?;
    let alone = scene.ears.talk(node.netns())?;
    must(alone == talk, || format!("before: {talk:#?}\nafter: {alone:#?}"))?;
    must(scene.load.failed() == 0, || {
        format!("{} connections failed", scene.load.failed())
    })?;

    // The hooks that are asked after are those that balancing uses: there they are found. It starts beside no other proxy.
    nft::load(node.netns(), "flush ruleset\n")?;
    let agent = scene.node.start(&["--mode", "balance"])?;
    let attached = bpf::attached_hooks(node.cgroup().path())?;
    must(attached.len() == bpf::HOOKS.len(), || format!("only {attached:?}"))?;
    agent.stop()
}

/// The negative control: each kind of change is found, and named.
fn change_is_seen(node: &Node) -> Result<()> {
    let scene = Scene::new(node)?;
    let before = Snapshot::take(node)?;
    let same = difference(&before, &Snapshot::take(node)?);
    must(same.is_empty(), || format!("the snapshot moves by itself: {same:#?}"))?;
    node.netns().write_sysctl("ipv4/tcp_tw_reuse", "0")?;
    node.netns()
        .write_sysctl("netfilter/nf_conntrack_tcp_timeout_time_wait", "77")?;
    link::add_address(node.netns(), beside::UPLINK, beside::own(77).into(), 16)?;
    nft::load(node.netns(), "add table ip changed\n")?;
    let _listener = node
        .netns()
        .run(|| std::net::TcpListener::bind(("127.0.0.1", 7777)))??;
    let changed = difference(&before, &Snapshot::take(node)?);
    for kind in [
        "ipv4/tcp_tw_reuse",
        "nf_conntrack_tcp_timeout_time_wait",
        "ip -j addr",
        "nft -s",
        "+ tcp 0100007F:1E61",
    ] {
        must(changed.iter().any(|line| line.contains(kind)), || {
            format!("{kind} is not among the changes: {changed:#?}")
        })?;
    }
    drop(scene);
    Ok(())
}
