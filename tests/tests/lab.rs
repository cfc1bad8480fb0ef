//! The laboratory itself: what it makes works, and it is gone afterwards.

use std::{
    collections::BTreeMap,
    fs,
    io::{Read, Write},
    net::{IpAddr, SocketAddr},
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use lb_user::{
    lab::{
        self, Child, ChildCgroup, Netns, Server, cgroup,
        client::{self, Attempt, Client, Failure, Load, Way},
        link,
        mounts::BpfFs,
        nft,
        server::Manner,
    },
    model::Protocol,
};

/// A client namespace and a server namespace with a link, two addresses a family on the server's side.
fn pair() -> Result<(Netns, Netns)> {
    let (near, far) = (Netns::new()?, Netns::new()?);
    link::join((&near, "up"), (&far, "down"))?;
    for (netns, device, address, prefix) in [
        (&near, "up", "10.0.0.1", 24),
        (&near, "up", "fd00::1", 64),
        (&far, "down", "10.0.0.2", 24),
        (&far, "down", "10.0.0.3", 24),
        (&far, "down", "fd00::2", 64),
        (&far, "down", "fd00::3", 64),
    ] {
        link::add_address(netns, device, address.parse::<IpAddr>()?, prefix)?;
    }
    link::add_default_route(&near, "up", "10.0.0.2".parse()?)?;
    link::add_default_route(&near, "up", "fd00::2".parse()?)?;
    Ok((near, far))
}

fn addresses(texts: &[&str]) -> Result<Vec<SocketAddr>> {
    texts
        .iter()
        .map(|t| t.parse().with_context(|| (*t).to_owned()))
        .collect()
}

fn per_backend(attempts: &[Attempt]) -> BTreeMap<SocketAddr, usize> {
    let mut counts = BTreeMap::new();
    for attempt in attempts {
        if let Ok(backend) = attempt.outcome {
            *counts.entry(backend).or_default() += 1;
        }
    }
    counts
}

fn wait_until(what: &str, condition: impl FnMut() -> bool) -> Result<()> {
    ensure!(
        lab::holds_within(Duration::from_secs(5), condition),
        "not within 5 s: {what}"
    );
    Ok(())
}

#[test]
fn tcp_round_trips_over_both_families_and_mapped() -> Result<()> {
    let (near, far) = pair()?;
    let listen = addresses(&["10.0.0.2:80", "10.0.0.3:80", "[fd00::2]:80"])?;
    let server = Server::start(&far, &listen, Manner::Greet)?;
    for (dial, answers) in [
        ("10.0.0.2:80", "10.0.0.2:80"),
        ("10.0.0.3:80", "10.0.0.3:80"),
        ("[::ffff:10.0.0.3]:80", "10.0.0.3:80"),
        ("[fd00::2]:80", "[fd00::2]:80"),
    ] {
        let load = Load {
            total: Some(50),
            ..Load::tcp(dial.parse()?)
        };
        let attempts = Client::start(&near, &load)?.wait();
        assert_eq!(
            per_backend(&attempts),
            BTreeMap::from([(answers.parse()?, 50)]),
            "dialling {dial}"
        );
    }
    let counts: Vec<_> = listen.iter().map(|&a| server.count(a)).collect();
    assert_eq!(counts, [50, 100, 50]);
    Ok(())
}

#[test]
fn udp_round_trips_on_connected_and_unconnected_sockets() -> Result<()> {
    let (near, far) = pair()?;
    let listen = addresses(&["10.0.0.2:53", "[fd00::3]:53"])?;
    let server = Server::start(&far, &listen, Manner::Datagram)?;
    for way in [Way::UdpConnected, Way::UdpUnconnected] {
        for &target in &listen {
            let load = Load {
                way,
                total: Some(20),
                ..Load::tcp(target)
            };
            let attempts = Client::start(&near, &load)?.wait();
            assert_eq!(per_backend(&attempts), BTreeMap::from([(target, 20)]), "{way:?}");
        }
    }
    assert_eq!(server.count(listen[0]), 40);
    Ok(())
}

#[test]
fn two_hundred_ports_carry_thousands_of_connections_when_the_server_closes_first() -> Result<()> {
    let (near, far) = pair()?;
    near.set_local_ports(40_000, 40_199)?;
    let listen = addresses(&["10.0.0.2:80"])?;
    let _server = Server::start(&far, &listen, Manner::Greet)?;
    let load = Load {
        total: Some(5_000),
        ..Load::tcp(listen[0])
    };
    let began = Instant::now();
    let attempts = Client::start(&near, &load)?.wait();
    let rate = 5_000.0 / began.elapsed().as_secs_f64();
    println!("{rate:.0} connections a second");
    assert_eq!(per_backend(&attempts), BTreeMap::from([(listen[0], 5_000)]));
    assert!(attempts.is_sorted_by_key(|a| a.started));
    Ok(())
}

#[test]
fn a_pace_is_kept_and_a_stop_is_prompt() -> Result<()> {
    let (near, far) = pair()?;
    let listen = addresses(&["10.0.0.2:80"])?;
    let _server = Server::start(&far, &listen, Manner::Greet)?;
    let load = Load {
        rate: Some(100.0),
        ..Load::tcp(listen[0])
    };
    let began = Instant::now();
    let client = Client::start(&near, &load)?;
    wait_until("30 attempts", || client.made() >= 30)?;
    let took = began.elapsed();
    // The thirtieth is due 0.29 s after the start, never earlier.
    assert!(took >= Duration::from_millis(280), "{took:?}");
    let stopping = Instant::now();
    let attempts = client.stop();
    assert!(stopping.elapsed() < Duration::from_secs(1));
    assert!(attempts.iter().all(|a| a.outcome.is_ok()));
    Ok(())
}

#[test]
fn failures_say_where_and_why() -> Result<()> {
    let (near, far) = pair()?;
    let once = |target: &str, timeout_ms| -> Result<Failure> {
        let load = Load {
            timeout: Duration::from_millis(timeout_ms),
            ..Load::tcp(target.parse()?)
        };
        let attempt = near.run(|| client::try_once(&load))?;
        attempt.outcome.err().with_context(|| format!("{target} answered"))
    };
    assert_eq!(
        once("10.0.0.2:81", 2_000)?.to_string(),
        "connect: ECONNREFUSED: Connection refused"
    );
    // Nobody has this address: the gateway is a host that does not forward, so nothing ever comes back.
    far.write_sysctl("ipv4/ip_forward", "0")?;
    assert_eq!(
        once("192.0.2.1:80", 100)?.to_string(),
        "connect: ETIMEDOUT: Connection timed out"
    );
    Ok(())
}

#[test]
fn a_staying_server_echoes_until_the_client_leaves() -> Result<()> {
    let (near, far) = pair()?;
    let listen = addresses(&["10.0.0.2:7"])?;
    let server = Server::start(&far, &listen, Manner::Stay)?;
    let mut streams = Vec::new();
    for _ in 0..50 {
        let connected = near.run(|| client::connect_tcp(listen[0], Duration::from_secs(2)))?;
        streams.push(connected?);
    }
    for stream in &mut streams {
        assert_eq!(client::read_name(stream)?, listen[0]);
        stream.write_all(b"ping")?;
        let mut answer = [0; 4];
        stream.read_exact(&mut answer)?;
        assert_eq!(&answer, b"ping");
    }
    assert_eq!(server.count(listen[0]), 50);
    // Stopping the server ends what is open.
    drop(server);
    let ended = streams[0].read(&mut [0; 4]);
    assert!(matches!(ended, Ok(0) | Err(_)), "{ended:?}");
    // The port is free again at once.
    let _again = Server::start(&far, &listen, Manner::Stay)?;
    Ok(())
}

#[test]
fn namespaces_leave_no_trace() -> Result<()> {
    let devices = || -> Result<usize> { Ok(fs::read_to_string("/proc/thread-self/net/dev")?.lines().count()) };
    let before = devices()?;
    let (near, far) = pair()?;
    assert_eq!(devices()?, before, "a device shows up in the caller's own namespace");
    drop(near);
    // The kernel takes a namespace down with its devices, and a pair's other end goes too: nothing held it any more.
    wait_until("the namespace is gone", || link::index_of(&far, "down").is_err())
}

#[test]
fn a_child_runs_inside_namespace_and_cgroup_and_dies_on_drop() -> Result<()> {
    let netns = Netns::new()?;
    let group = ChildCgroup::new("lab.test")?;
    let path = group.path().to_owned();
    assert_eq!(path.parent(), Some(cgroup::hierarchy()?.as_path()));
    let dir = tempfile::tempdir()?;
    let log = dir.path().join("log");
    let mut command = Command::new("sh");
    command.args([
        "-c",
        "cat /proc/self/cgroup; readlink /proc/self/ns/net; echo done; exec sleep 60",
    ]);
    netns.place(&mut command);
    group.place(&mut command)?;
    let mut child = Child::start(&mut command, &log)?;
    wait_until("the child's output", || {
        fs::read_to_string(&log).is_ok_and(|t| t.contains("done"))
    })?;
    let said = fs::read_to_string(&log)?;
    let name = path.file_name().and_then(|n| n.to_str()).context("a name")?;
    assert!(said.contains(name), "{said}");
    let inode = netns.run(|| fs::read_link("/proc/thread-self/ns/net"))??;
    assert!(said.contains(inode.to_str().context("text")?), "{said}");
    assert!(child.ended()?.is_none());
    let process = format!("/proc/{}", child.pid());
    drop(child);
    assert!(!Path::new(&process).exists());
    drop(group);
    assert!(!path.exists());
    Ok(())
}

#[test]
fn joining_moves_this_process_and_leaving_takes_it_back() -> Result<()> {
    let here = || -> Result<String> { Ok(fs::read_to_string("/proc/self/cgroup")?) };
    let before = here()?;
    let group = ChildCgroup::new("lab.join")?;
    let pod = group.below("pod")?;
    pod.join()?;
    pod.join()?;
    let path = format!(
        "{}/pod",
        group.path().file_name().and_then(|n| n.to_str()).context("a name")?
    );
    assert!(here()?.contains(&path));
    let path = group.path().to_owned();
    // Whoever forgets to leave is taken back by the drop.
    drop(pod);
    assert_eq!(here()?, before);
    drop(group);
    assert!(!path.exists());
    Ok(())
}

#[test]
fn a_stale_cgroup_is_removed_and_a_living_ones_is_not() -> Result<()> {
    // A process that has ended and been reaped: its number is free.
    let mut gone = Command::new("true").spawn()?;
    let gone_pid = gone.id();
    gone.wait()?;
    let mut alive = Command::new("cat").stdin(Stdio::piped()).spawn()?;
    let top = cgroup::hierarchy()?;
    let stale = top.join(format!("evenkeel-lab.stale-{gone_pid}-0"));
    let living = top.join(format!("evenkeel-lab.stale-{}-0", alive.id()));
    fs::create_dir(&stale)?;
    fs::create_dir(&living)?;
    let made = ChildCgroup::new("lab.new");
    let kept = living.exists();
    fs::remove_dir(&living)?;
    drop(alive.stdin.take());
    alive.wait()?;
    let made = made?;
    assert!(!stale.exists());
    assert!(kept);
    assert!(made.path().exists());
    Ok(())
}

#[test]
fn the_private_bpf_file_system_is_seen_from_inside_alone() -> Result<()> {
    // On a thread of its own: the other tests stay in the machine's mount namespace.
    let path = thread::spawn(|| -> Result<_> {
        let bpf = BpfFs::enter_private()?;
        let folder = bpf.folder("pins")?;
        assert!(folder.is_dir());
        let mounts = fs::read_to_string("/proc/thread-self/mountinfo")?;
        let line = format!(" {} ", bpf.path().display());
        assert!(
            mounts.lines().any(|l| l.contains(&line) && l.contains(" - bpf ")),
            "{mounts}"
        );
        Ok(folder)
    })
    .join()
    .expect("no panic")?;
    assert!(!path.exists());
    Ok(())
}

#[test]
fn nftables_rules_balance_change_and_refuse() -> Result<()> {
    let (near, far) = pair()?;
    let listen = addresses(&["10.0.0.2:8080", "10.0.0.3:8080"])?;
    let _server = Server::start(&far, &listen, Manner::Greet)?;
    let service = |endpoints: &[SocketAddr]| nft::Service {
        name: "default/web/tcp/http".to_owned(),
        frontend: SocketAddr::from(([10, 96, 0, 10], 80)),
        protocol: Protocol::Tcp,
        endpoints: endpoints.to_vec(),
    };
    let dial = |total| -> Result<_> {
        let load = Load {
            total: Some(total),
            ..Load::tcp(SocketAddr::from(([10, 96, 0, 10], 80)))
        };
        Ok(Client::start(&near, &load)?.wait())
    };
    let mut all = nft::fillers(50, 2);
    all.push(service(&listen[..1]));
    nft::load(&near, &nft::render_all(&all))?;
    assert_eq!(per_backend(&dial(100)?), BTreeMap::from([(listen[0], 100)]));
    nft::load(&near, &nft::render_change(&service(&listen[..1]), &service(&listen)))?;
    let both = per_backend(&dial(400)?);
    assert!(both.values().all(|&n| n > 100) && both.len() == 2, "{both:?}");
    nft::load(&near, &nft::render_change(&service(&listen), &service(&[])))?;
    assert!(dial(10)?.iter().all(|a| a.outcome.is_err()));
    nft::load(&near, &nft::render_change(&service(&[]), &service(&listen[1..])))?;
    assert_eq!(per_backend(&dial(50)?), BTreeMap::from([(listen[1], 50)]));
    Ok(())
}
