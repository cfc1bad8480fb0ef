//! What a real kube-proxy wrote, loaded again: each of its modes is told, what others write is not taken for it, and whether it
//! runs is seen by its process and by what it says.

use std::{
    fs,
    io::{Read, Write},
    net::TcpListener,
    process::{Command, Stdio},
    thread,
};

use anyhow::{Context, Result, ensure};
use lb_user::{
    lab::{Child, Netns, link, nft},
    node::{
        kube_proxy::{METRICS_PORT, Running},
        owners::{self, Owner, System},
        proxy::Kind,
    },
};

use super::{address, found, look, no_pins};

const NFTABLES: &str = include_str!("captured/nftables.nft");
const IPTABLES: [&str; 2] = [
    include_str!("captured/iptables.v4"),
    include_str!("captured/iptables.v6"),
];
const AFTER_CLEANUP: &str = include_str!("captured/after-cleanup.v4");
const DOCKER: &str = include_str!("captured/docker.v4");

/// Hands a text of `iptables-save` to one of the two iptables.
fn restore(netns: &Netns, backend: &str, family: usize, text: &str) -> Result<()> {
    let tool = format!("ip{}tables-{backend}-restore", ["", "6"][family]);
    let mut command = Command::new(&tool);
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = netns.place(&mut command).spawn().with_context(|| tool.clone())?;
    child.stdin.take().context("its input")?.write_all(text.as_bytes())?;
    let output = child.wait_with_output()?;
    ensure!(
        output.status.success(),
        "{tool}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

fn owners(netns: &Netns) -> Result<Vec<Owner>> {
    let folder = no_pins()?;
    let owners = netns.run(|| owners::find(folder.path()))?;
    ensure!(owners.unseen.is_empty(), "{:?}", owners.unseen);
    Ok(owners.found)
}

fn only(netns: &Netns, system: System, trace: &str) -> Result<()> {
    let found = owners(netns)?;
    let shown: Vec<_> = found.iter().map(|owner| (owner.system, owner.trace.as_str())).collect();
    ensure!(shown == [(system, trace)], "{shown:?}");
    Ok(())
}

/// Endpoints that the captured rules have, and some that they have not.
const ENDPOINTS: [(&str, &str, &str); 6] = [
    ("10.96.0.10:80", "10.244.1.5:8080", "programmed"),
    ("10.96.0.10:80", "10.244.2.6:8080", "programmed"),
    ("10.96.0.10:80", "10.244.2.7:8080", "absent"),
    ("[fd00:10::10]:80", "[fd00:244:1::5]:8080", "programmed"),
    ("192.0.2.10:30080", "10.244.2.6:8080", "programmed"),
    ("10.96.0.77:80", "10.244.1.5:8080", "no frontend"),
];

/// Whether the rules are read as those of a mode, endpoints included.
fn is_read(netns: &Netns, kind: Kind) -> Result<()> {
    let (proxy, table) = look(netns, &[address("10.96.0.10:80")])?;
    ensure!(proxy.kind == kind, "{proxy:?}");
    for (frontend, endpoint, expected) in ENDPOINTS {
        let finding = found(&table, frontend, endpoint);
        ensure!(finding == expected, "{frontend} {endpoint}: {finding}");
    }
    Ok(())
}

#[test]
fn kube_proxys_own_nftables_are_recognised() -> Result<()> {
    let netns = Netns::new()?;
    nft::load(&netns, NFTABLES)?;
    let trace = "table ip kube-proxy (22 chains, 3 Service ports), table ip6 kube-proxy (18 chains, 1 Service ports)";
    only(&netns, System::KubeProxyNftables, trace)?;
    is_read(&netns, Kind::KubeProxyNftables)
}

#[test]
fn kube_proxys_own_iptables_are_recognised_where_they_are_nftables() -> Result<()> {
    let netns = Netns::new()?;
    for (family, rules) in IPTABLES.into_iter().enumerate() {
        restore(&netns, "nft", family, rules)?;
    }
    let trace = "chain KUBE-SERVICES in table ip nat (and 4 of Service ports), chain KUBE-SERVICES in table ip6 nat (and 2 of Service ports)";
    only(&netns, System::KubeProxyIptables, trace)?;
    is_read(&netns, Kind::KubeProxyIptables)
}

#[test]
fn kube_proxys_own_iptables_are_recognised_in_the_old_iptables() -> Result<()> {
    let netns = Netns::new()?;
    let mut list = Command::new("iptables-legacy");
    let there = netns.place(list.args(["-t", "nat", "-S"])).output()?;
    if !there.status.success() {
        println!(
            "SKIP kube_proxy::kube_proxys_own_iptables_are_recognised_in_the_old_iptables: this kernel has no old iptables"
        );
        return Ok(());
    }
    for (family, rules) in IPTABLES.into_iter().enumerate() {
        restore(&netns, "legacy", family, rules)?;
    }
    let place = "in the old iptables' table";
    let trace = format!(
        "chain KUBE-SERVICES {place} ip nat (and 4 of Service ports), chain KUBE-SERVICES {place} ip6 nat (and 2 of Service ports)"
    );
    only(&netns, System::KubeProxyIptables, &trace)?;
    is_read(&netns, Kind::KubeProxyIptables)
}

#[test]
fn the_ipvs_mode_is_recognised_by_its_device_and_its_addresses() -> Result<()> {
    let (netns, other) = (Netns::new()?, Netns::new()?);
    link::join((&netns, "kube-ipvs0"), (&other, "other"))?;
    for text in ["10.96.0.1", "10.96.0.10"] {
        link::add_address(&netns, "kube-ipvs0", text.parse()?, 32)?;
    }
    let found = owners(&netns)?;
    ensure!(
        found.len() == 1 && found[0].system == System::KubeProxyIpvs,
        "{found:?}"
    );
    ensure!(
        found[0].trace.contains("device kube-ipvs0 with ") && found[0].trace.contains("0 virtual servers"),
        "{found:?}"
    );
    // The chains that this mode has beside the device.
    nft::load(
        &netns,
        "table ip nat { chain KUBE-SERVICES { }\n chain KUBE-LOAD-BALANCER { }\n chain KUBE-NODE-PORT { }\n }\n",
    )?;
    let found = owners(&netns)?;
    ensure!(
        found.len() == 1 && found[0].system == System::KubeProxyIpvs,
        "{found:?}"
    );
    ensure!(found[0].trace.contains("KUBE-LOAD-BALANCER"), "{found:?}");
    Ok(())
}

#[test]
fn what_others_write_is_not_taken_for_kube_proxy() -> Result<()> {
    for (backend, rules) in [("nft", AFTER_CLEANUP), ("nft", DOCKER)] {
        let netns = Netns::new()?;
        restore(&netns, backend, 0, rules)?;
        let found = owners(&netns)?;
        ensure!(found.is_empty(), "{found:?} in {rules}");
    }
    let netns = Netns::new()?;
    let rules = [super::service(
        "shop/web/tcp/http",
        "10.96.0.10:80",
        &["10.244.1.1:8080"],
    )];
    // The lab's own rules have kube-proxy's layout and another name.
    nft::load(&netns, &nft::render_all(&rules))?;
    nft::load(
        &netns,
        "table ip kube-proxy-lite { chain services { }\n }\n\
         table inet kube-proxy { chain services { }\n }\n\
         table ip mangle { chain KUBE-KUBELET-CANARY { }\n chain KUBE-IPTABLES-HINT { }\n }\n\
         table ip nat { chain KUBE-POSTROUTING { }\n chain KUBE-MARK-MASQ { }\n }\n",
    )?;
    let found = owners(&netns)?;
    ensure!(found.is_empty(), "{found:?}");
    Ok(())
}

#[test]
fn a_running_kube_proxy_is_seen_in_its_own_namespace_alone() -> Result<()> {
    let (netns, elsewhere) = (Netns::new()?, Netns::new()?);
    let folder = tempfile::tempdir()?;
    let program = folder.path().join("kube-proxy");
    fs::copy("/bin/sleep", &program)?;
    let mut command = Command::new(&program);
    netns.place(command.arg("600"));
    let process = Child::start(&mut command, &folder.path().join("log"))?;
    // The name is the new program's once it has been started.
    let running = lb_tests::agent::until("the process to bear its name", || {
        let running = netns.run(Running::find)?;
        ensure!(running.is_certain(), "{running:?}");
        Ok(running)
    })?;
    assert_eq!(running.process, Some(process.pid()));
    assert!(!elsewhere.run(Running::find)?.is_certain());
    drop(process);
    assert_eq!(netns.run(Running::find)?, Running::default());
    Ok(())
}

/// Answers one connection as kube-proxy does, or as anybody else.
fn answer_once(listener: &TcpListener, body: &str) -> Result<()> {
    let (mut stream, _) = listener.accept()?;
    let mut request = [0; 1024];
    let length = stream.read(&mut request)?;
    ensure!(
        request[..length].starts_with(b"GET /proxyMode HTTP/1.0\r\n"),
        "another request"
    );
    write!(stream, "HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\n{body}")?;
    Ok(())
}

#[test]
fn a_kube_proxy_in_another_program_tells_its_mode() -> Result<()> {
    let netns = Netns::new()?;
    let listener = netns.run(|| TcpListener::bind(("0.0.0.0", METRICS_PORT)))??;
    for (body, mode) in [("ipvs", Some("ipvs")), ("welcome", None)] {
        let running = thread::scope(|scope| {
            let answered = scope.spawn(|| answer_once(&listener, body));
            let running = netns.run(Running::find)?;
            answered.join().expect("no panic")?;
            anyhow::Ok(running)
        })?;
        assert_eq!(running.mode.as_deref(), mode);
        assert_eq!(
            (running.is_certain(), running.ports.contains(&METRICS_PORT)),
            (mode.is_some(), true)
        );
        // This test holds the port, and may be seen.
        assert!(!running.is_likely());
    }
    Ok(())
}
