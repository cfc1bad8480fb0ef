//! Which backend somebody else's proxy chose, as the observer tells it beside what the servers themselves counted.
//!
//! The node of these tests is the near namespace: its own processes dial (hostNetwork clients), and so does a pod behind a
//! veth pair of its own. The proxies are rules as kube-proxy writes them in nftables and in iptables, and a HAProxy.

use std::{
    collections::BTreeMap,
    fs,
    io::{Read, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream},
    process::{Command, ExitCode, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use lb_common::{
    backend::Tally,
    counter::{action, hook},
    event::{ConnRecord, outcome},
    maps,
};
use lb_tests::{
    datapath::{Datapath, Setup, wait_until},
    runner::{self, skip, test},
    world::{Dial, VIP_PORT, World, service},
};
use lb_user::{
    datapath::load::{Mode, REWRITING},
    lab::{Child, Netns, Server, client, link, nft, server::Manner},
    model::{DesiredService, Protocol},
};

/// Backends of each test.
const BACKENDS: usize = 3;
/// Connections of each test: enough that every backend gets some.
const CONNECTIONS: usize = 60;

fn main() -> ExitCode {
    let mut tests = runner::each(
        &Dial::ALL,
        &[
            ("nftables::host_client", |dial| {
                through_rules(dial, Rules::Nftables, From::Node)
            }),
            ("nftables::pod_client", |dial| {
                through_rules(dial, Rules::Nftables, From::Pod)
            }),
            ("iptables::host_client", |dial| {
                through_rules(dial, Rules::Iptables, From::Node)
            }),
            ("iptables::pod_client", |dial| {
                through_rules(dial, Rules::Iptables, From::Pod)
            }),
            ("haproxy::its_own_dials_are_direct_ones", haproxy),
            ("two_services_on_the_same_endpoints_are_kept_apart", two_services),
            ("what_was_open_before_is_unknown", open_before),
            ("without_interfaces_all_is_unknown", no_interfaces),
        ],
    );
    tests.push(test("a_masqueraded_pod_is_unknown_and_no_passage", masqueraded));
    runner::run(tests)
}

/// Whose rules translate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rules {
    Nftables,
    Iptables,
}

/// Who dials.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum From {
    Node,
    Pod,
}

fn observe(packets: bool) -> Setup {
    Setup {
        mode: Mode::Observe,
        index_backends: packets,
        ..Setup::default()
    }
}

fn vip(dial: Dial, n: u8) -> SocketAddr {
    SocketAddr::new(dial.vip(n), VIP_PORT)
}

fn web(dial: Dial) -> DesiredService {
    service("web", vip(dial, 10), Protocol::Tcp, &dial.backends(BACKENDS))
}

/// The node, its pod and the servers.
struct Scene {
    world: World,
    pod: Netns,
    server: Server,
}

impl Scene {
    fn new(dial: Dial, manner: Manner) -> Result<Self> {
        let world = World::enter(BACKENDS)?;
        let pod = Netns::new()?;
        link::join((&world.near, "pod0"), (&pod, "eth0"))?;
        for (node, own, prefix) in [
            (
                IpAddr::from(Ipv4Addr::new(10, 1, 0, 1)),
                IpAddr::from(Ipv4Addr::new(10, 1, 0, 2)),
                24,
            ),
            (
                Ipv6Addr::new(0xfd01, 0, 0, 0, 0, 0, 0, 1).into(),
                Ipv6Addr::new(0xfd01, 0, 0, 0, 0, 0, 0, 2).into(),
                64,
            ),
        ] {
            link::add_address(&world.near, "pod0", node, prefix)?;
            link::add_address(&pod, "eth0", own, prefix)?;
            link::add_default_route(&pod, "eth0", node)?;
        }
        for dial in [Dial::V4, Dial::V6] {
            link::add_default_route(&world.far, "down", dial.near())?;
        }
        world.near.write_sysctl("ipv4/ip_forward", "1")?;
        world.near.write_sysctl("ipv6/conf/all/forwarding", "1")?;
        let server = world.serve(&dial.backends(BACKENDS), manner)?;
        Ok(Self { world, pod, server })
    }

    /// Runs where the client lives.
    fn as_client<T: Send>(&self, from: From, work: impl FnOnce() -> T + Send) -> Result<T> {
        match from {
            From::Node => Ok(work()),
            From::Pod => Ok(self.pod.run(work)?),
        }
    }

    /// Connections that each backend's own server has counted.
    fn served(&self, dial: Dial) -> Vec<u64> {
        dial.backends(BACKENDS)
            .into_iter()
            .map(|b| self.server.count(b))
            .collect()
    }
}

/// Connections that the observer has counted, by backend.
fn told(dp: &Datapath, service: &DesiredService, dial: Dial) -> Result<Vec<u64>> {
    let all = dial.backends(BACKENDS);
    all.into_iter()
        .map(|backend| Ok(dp.backend_counters(service, backend)?.inside.connects))
        .collect()
}

fn dial_all(target: SocketAddr, count: usize) -> Result<()> {
    for _ in 0..count {
        let mut stream =
            TcpStream::connect_timeout(&target, Duration::from_secs(5)).with_context(|| format!("connect {target}"))?;
        client::read_name(&mut stream)?;
    }
    Ok(())
}

/// The rules of one Service in the node's namespace.
fn translate(scene: &Scene, rules: Rules, dial: Dial) -> Result<()> {
    match rules {
        Rules::Nftables => {
            let rules = nft::Service {
                name: "test/web/tcp/".to_owned(),
                frontend: vip(dial, 10),
                protocol: Protocol::Tcp,
                endpoints: dial.backends(BACKENDS),
            };
            Ok(nft::load(&scene.world.near, &nft::render_all(&[rules]))?)
        }
        Rules::Iptables => iptables(&scene.world.near, vip(dial, 10), &dial.backends(BACKENDS)),
    }
}

/// kube-proxy's iptables mode in small: a Service's chain that jumps to an endpoint's by chance, and DNAT in each of those.
fn iptables(node: &Netns, frontend: SocketAddr, endpoints: &[SocketAddr]) -> Result<()> {
    let program = if frontend.is_ipv6() {
        "ip6tables-restore"
    } else {
        "iptables-restore"
    };
    let mut lines = vec!["*nat".to_owned()];
    lines.extend(["KUBE-SERVICES", "KUBE-SVC-WEB"].map(|chain| format!(":{chain} - [0:0]")));
    lines.extend((0..endpoints.len()).map(|i| format!(":KUBE-SEP-{i} - [0:0]")));
    lines.extend(["PREROUTING", "OUTPUT"].map(|chain| format!("-A {chain} -j KUBE-SERVICES")));
    let (address, port) = (frontend.ip(), frontend.port());
    lines.push(format!(
        "-A KUBE-SERVICES -d {address} -p tcp -m tcp --dport {port} -j KUBE-SVC-WEB"
    ));
    for (i, endpoint) in endpoints.iter().enumerate() {
        let chance = match endpoints.len() - i {
            1 => String::new(),
            left => format!("-m statistic --mode random --probability {:.10} ", 1.0 / left as f64),
        };
        lines.push(format!("-A KUBE-SVC-WEB {chance}-j KUBE-SEP-{i}"));
        lines.push(format!(
            "-A KUBE-SEP-{i} -p tcp -m tcp -j DNAT --to-destination {endpoint}"
        ));
    }
    lines.push("COMMIT\n".to_owned());
    let text = lines.join("\n");
    let mut command = Command::new(program);
    command.stdin(Stdio::piped()).stderr(Stdio::piped());
    let mut child = node
        .place(&mut command)
        .spawn()
        .with_context(|| format!("start {program}"))?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(text.as_bytes())?;
    }
    let ended = child.wait_with_output()?;
    ensure!(
        ended.status.success(),
        "{program}: {}",
        String::from_utf8_lossy(&ended.stderr)
    );
    Ok(())
}

fn through_rules(dial: Dial, rules: Rules, from: From) -> Result<()> {
    let scene = Scene::new(dial, Manner::Stay)?;
    translate(&scene, rules, dial)?;
    let mut dp = Datapath::start(observe(true))?;
    let web = web(dial);
    dp.apply(&web)?;
    for interface in ["lo", "up", "pod0"] {
        dp.observe_interface(interface)?;
    }
    let target = dial.as_dialled(vip(dial, 10));
    // While a connection is open it is counted as open, at the backend that serves it.
    let open = scene.as_client(from, || -> Result<(TcpStream, SocketAddr)> {
        let mut stream = TcpStream::connect_timeout(&target, Duration::from_secs(5))?;
        let name = client::read_name(&mut stream)?;
        Ok((stream, name))
    })??;
    let at = dp.backend_counters(&web, open.1)?.inside;
    assert_eq!((at.connects, at.established, at.closed), (1, 1, 0));
    drop(open);

    scene.as_client(from, || dial_all(target, CONNECTIONS - 1))??;
    let records = dp.wait_connections(CONNECTIONS)?;
    let served = scene.served(dial);
    assert_eq!(told(&dp, &web, dial)?, served);
    assert!(
        served.iter().all(|count| *count > 0),
        "a test of three backends: {served:?}"
    );
    let counters = dp.service_counters(&web)?;
    assert_eq!(
        (counters.connects, counters.attributed, counters.direct),
        (CONNECTIONS as u64, CONNECTIONS as u64, 0)
    );
    let mut by_record: BTreeMap<u32, u64> = BTreeMap::new();
    for record in &records {
        assert_eq!(
            (record.outcome, record.vip),
            (outcome::ESTABLISHED, vip(dial, 10).ip().into())
        );
        *by_record.entry(record.backend_id).or_default() += 1;
    }
    for (backend, count) in dial.backends(BACKENDS).into_iter().zip(&served) {
        assert_eq!(by_record.get(&dp.backend_id(&web, backend)?), Some(count), "{backend}");
        let counters = dp.backend_counters(&web, backend)?;
        assert_eq!(
            (
                counters.inside.established,
                counters.inside.closed,
                counters.inside.failed
            ),
            (*count, *count, 0)
        );
        assert_eq!(counters.direct, Tally::default());
    }
    // What belongs to a followed socket passes as nothing else.
    assert_eq!(dp.packets()?, []);
    assert_eq!(
        (
            dp.entries(maps::DIALS),
            dp.entries(maps::PASSAGES),
            dp.entries(maps::SOCKETS)
        ),
        (0, 0, 0)
    );
    let rewriting: Vec<_> = REWRITING
        .iter()
        .filter(|name| dp.object().program(name).is_some_and(|p| p.fd().is_ok()))
        .collect();
    assert!(rewriting.is_empty(), "loaded in observe mode: {rewriting:?}");
    Ok(())
}

fn haproxy(dial: Dial) -> Result<()> {
    if Command::new("haproxy").arg("-v").output().is_err() {
        return Err(skip("there is no haproxy on this machine"));
    }
    let scene = Scene::new(dial, Manner::Stay)?;
    let frontend = vip(dial, 10);
    link::add_address(
        &scene.world.near,
        "lo",
        frontend.ip(),
        if frontend.is_ipv6() { 128 } else { 32 },
    )?;
    let mut dp = Datapath::start(observe(true))?;
    let web = web(dial);
    dp.apply(&web)?;
    for interface in ["lo", "up", "pod0"] {
        dp.observe_interface(interface)?;
    }
    let folder = tempfile::tempdir()?;
    let config = folder.path().join("haproxy.cfg");
    let head = format!(
        "defaults\n mode tcp\n timeout connect 5s\n timeout client 30s\n timeout server 30s\n\
         listen web\n bind {frontend}\n balance roundrobin\n"
    );
    let servers = dial.backends(BACKENDS).into_iter().enumerate();
    let text = servers.fold(head, |text, (i, backend)| text + &format!(" server s{i} {backend}\n"));
    fs::write(&config, text)?;
    let mut command = Command::new("haproxy");
    command.args(["-db", "-f"]).arg(&config);
    scene.world.near.place(&mut command);
    dp.cgroup().place(&mut command)?;
    let proxy = Child::start(&mut command, &folder.path().join("haproxy.log"))?;
    let target = dial.as_dialled(frontend);
    let mut dialled = 0;
    wait_until("haproxy listens", || {
        dialled += 1;
        TcpStream::connect(target).is_ok_and(|mut stream| stream.read(&mut [0; 1]).is_ok())
    })?;
    let probing = dp.service_counters(&web)?.direct;
    let before = dp.service_counters(&web)?.connects;
    assert_eq!(before, dialled);
    for from in [From::Node, From::Pod] {
        scene.as_client(from, || dial_all(target, CONNECTIONS / 2))??;
    }
    let counters = dp.service_counters(&web)?;
    assert_eq!(counters.connects - before, CONNECTIONS as u64);
    assert_eq!(counters.attributed, 0, "nobody can say which dial became which");
    assert_eq!(counters.direct - probing, CONNECTIONS as u64);
    let direct: Vec<u64> = dial
        .backends(BACKENDS)
        .into_iter()
        .map(|backend| Ok(dp.backend_counters(&web, backend)?.direct.connects))
        .collect::<Result<_>>()?;
    assert_eq!(direct, scene.served(dial));
    drop(proxy);
    Ok(())
}

fn two_services(dial: Dial) -> Result<()> {
    let scene = Scene::new(dial, Manner::Stay)?;
    translate(&scene, Rules::Nftables, dial)?;
    let mut dp = Datapath::start(observe(true))?;
    let web = web(dial);
    // It comes later, so that anybody's entry is its.
    let other = service("other", vip(dial, 11), Protocol::Tcp, &dial.backends(BACKENDS));
    dp.apply(&web)?;
    dp.apply(&other)?;
    dp.observe_interface("up")?;
    dial_all(dial.as_dialled(vip(dial, 10)), CONNECTIONS)?;
    assert_eq!(told(&dp, &web, dial)?, scene.served(dial));
    assert_eq!(told(&dp, &other, dial)?, [0; BACKENDS]);
    // When the other goes, anybody's entry is the first one's again: a direct dial finds it.
    dp.remove(&other.name)?;
    dial_all(dial.as_dialled(dial.backend(0)), 1)?;
    assert_eq!(dp.backend_counters(&web, dial.backend(0))?.direct.connects, 1);
    Ok(())
}

fn open_before(dial: Dial) -> Result<()> {
    let scene = Scene::new(dial, Manner::Stay)?;
    translate(&scene, Rules::Nftables, dial)?;
    let target = dial.as_dialled(vip(dial, 10));
    let mut earlier = TcpStream::connect(target)?;
    client::read_name(&mut earlier)?;
    let mut dp = Datapath::start(observe(true))?;
    let web = web(dial);
    dp.apply(&web)?;
    dp.observe_interface("up")?;
    // It goes on, and ends, without being taken for anything.
    earlier.write_all(b"ping")?;
    earlier.read_exact(&mut [0; 4])?;
    drop(earlier);
    dial_all(target, 1)?;
    let records: Vec<ConnRecord> = dp.wait_connections(1)?;
    assert_ne!(records[0].backend_id, 0);
    assert_eq!(told(&dp, &web, dial)?.iter().sum::<u64>(), 1);
    assert_eq!(dp.packets()?, []);
    let counters = dp.service_counters(&web)?;
    assert_eq!((counters.connects, counters.established, counters.closed), (1, 1, 1));
    Ok(())
}

fn no_interfaces(dial: Dial) -> Result<()> {
    let scene = Scene::new(dial, Manner::Stay)?;
    translate(&scene, Rules::Nftables, dial)?;
    let mut dp = Datapath::start(observe(true))?;
    let web = web(dial);
    dp.apply(&web)?;
    dial_all(dial.as_dialled(vip(dial, 10)), 3)?;
    let counters = dp.service_counters(&web)?;
    assert_eq!((counters.connects, counters.attributed), (3, 0));
    assert!(dp.wait_connections(3)?.iter().all(|record| record.backend_id == 0));
    assert_eq!(
        (dp.entries(maps::DIALS), dp.entries(maps::SOCKETS)),
        (0, 0),
        "a socket's end cleans up"
    );
    Ok(())
}

/// A pod's SYN that leaves under the node's address can be told to be nobody's, and nothing else.
fn masqueraded() -> Result<()> {
    let dial = Dial::V4;
    let scene = Scene::new(dial, Manner::Stay)?;
    translate(&scene, Rules::Nftables, dial)?;
    nft::load(
        &scene.world.near,
        "table ip leaving {\n chain post { type nat hook postrouting priority 100;\n oifname up masquerade\n }\n}\n",
    )?;
    let mut dp = Datapath::start(observe(true))?;
    let web = web(dial);
    dp.apply(&web)?;
    for interface in ["lo", "up", "pod0"] {
        dp.observe_interface(interface)?;
    }
    scene.as_client(From::Pod, || dial_all(vip(dial, 10), 5))??;
    let counters = dp.service_counters(&web)?;
    assert_eq!((counters.connects, counters.attributed, counters.direct), (5, 0, 0));
    assert_eq!(dp.packets()?, []);
    assert_eq!(dp.count(hook::TC, action::MISS)?, 5);
    // The node's own connections keep their sockets, whatever becomes of their source.
    dial_all(vip(dial, 10), 5)?;
    assert_eq!(dp.service_counters(&web)?.attributed, 5);
    Ok(())
}
