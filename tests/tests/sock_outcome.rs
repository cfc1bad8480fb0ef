//! How connections end, or do not begin: one true record each, and counters that add up.

use std::{
    fs::File,
    io::Read,
    net::{SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::fd::OwnedFd,
    process::ExitCode,
};

use anyhow::Result;
use lb_common::{
    addr::Addr,
    counter::{action, hook},
    event::{ConnRecord, outcome},
    maps,
};
use lb_tests::{
    bpf::{self, insn},
    datapath::{Datapath, Setup, wait_until},
    runner, socket, tool,
    world::{Dial, VIP_PORT, World, service},
};
use lb_user::{
    datapath::load::Mode,
    lab::{client, nft, server::Manner},
    model::{DesiredService, Protocol},
    observe::monotonic_ns,
};
use nix::{
    errno::Errno,
    sys::socket::{SockFlag, SockType, setsockopt, sockopt},
};

fn main() -> ExitCode {
    runner::run(runner::each(
        &Dial::ALL,
        &[
            ("established_and_closed", established),
            ("refused", refused),
            ("timed_out", timed_out),
            ("unreachable_without_a_route", no_route),
            ("unreachable_says_a_router", router_says_no),
            ("no_local_port", no_local_port),
            ("abandoned", abandoned),
            ("reset_by_the_peer", reset_by_peer),
            ("open_ones_are_established_minus_closed", active),
            ("k47_callback_flags_of_others_stay", other_flags),
            ("a_full_ring_loses_and_counts", full_ring),
            ("a_dial_that_failed_and_one_that_works_are_two_records", two_dials),
            ("observe_mode_records_and_rewrites_nothing", observe),
        ],
    ))
}

fn vip(dial: Dial) -> SocketAddr {
    SocketAddr::new(dial.vip(10), VIP_PORT)
}

fn web(dial: Dial, backends: &[SocketAddr]) -> DesiredService {
    service("web", vip(dial), Protocol::Tcp, backends)
}

/// The address of a backend that lies behind the router.
fn beyond(dial: Dial) -> Result<SocketAddr> {
    Ok(match dial {
        Dial::V4 | Dial::Mapped => "10.1.0.1:8080",
        Dial::V6 => "[fd01::1]:8080",
    }
    .parse()?)
}

/// Runs `ip` in the clients' namespace.
fn ip(world: &World, arguments: &[&str]) -> Result<()> {
    tool::run(&world.near, "ip", arguments).map(drop)
}

/// The servers' namespace swallows what comes to the backends' port.
fn swallow(world: &World) -> Result<()> {
    let rules = "table inet lab {\nchain input {\ntype filter hook input priority 0;\ntcp dport 8080 drop\n}\n}\n";
    Ok(nft::load(&world.far, rules)?)
}

/// What every record of this dial must hold; returns it for the rest.
fn only_record(dp: &mut Datapath, web: &DesiredService, dial: Dial, result: u8) -> Result<ConnRecord> {
    let record = dp.wait_connections(1)?[0];
    assert_eq!(record.outcome, result, "{record:?}");
    assert_eq!(
        (record.vip, record.vip_port.get(), record.proto),
        (Addr::from(dial.vip(10)), VIP_PORT, 6)
    );
    assert_eq!(record.service_id, dp.compiled(web).service_id);
    assert!(0 < record.start_ns && record.start_ns <= record.end_ns && record.end_ns <= monotonic_ns());
    let counters = dp.service_counters(web)?;
    for (i, failed) in counters.failed.iter().enumerate() {
        let wanted = u64::from(result != outcome::ESTABLISHED && i == usize::from(result));
        assert_eq!(*failed, wanted, "failures of outcome {i}");
    }
    if result != outcome::ESTABLISHED {
        assert_eq!(record.established_ns, 0);
        assert_eq!((counters.connects, counters.established, counters.closed), (1, 0, 0));
    }
    assert_eq!(dp.entries(maps::SOCKETS), 0);
    Ok(record)
}

fn established(dial: Dial) -> Result<()> {
    let world = World::enter(1)?;
    let backend = dial.backend(0);
    let _server = world.serve(&[backend], Manner::Greet)?;
    let mut dp = Datapath::start(Setup::default())?;
    let web = web(dial, &[backend]);
    dp.apply(&web)?;
    let before = monotonic_ns();
    let mut stream = TcpStream::connect(dial.as_dialled(vip(dial)))?;
    let connected = monotonic_ns();
    assert_eq!(client::read_name(&mut stream)?, backend);
    // The server has closed already; the connection ends with its socket.
    assert_eq!(stream.read(&mut [0; 8])?, 0);
    assert_eq!(dp.connections()?, []);
    let (local, netns) = (stream.local_addr()?, socket::netns_cookie(&stream)?);
    let closing = monotonic_ns();
    drop(stream);
    let record = only_record(&mut dp, &web, dial, outcome::ESTABLISHED)?;
    assert!(
        before <= record.start_ns && record.start_ns < record.established_ns,
        "{record:?}"
    );
    assert!(
        record.established_ns <= connected,
        "the latency is that of connect() at most: {record:?}"
    );
    assert!(closing <= record.end_ns, "{record:?}");
    assert_eq!(
        (record.client, record.client_port.get()),
        (Addr::from(dial.near()), local.port())
    );
    assert_eq!((record.netns_cookie, record.errno), (netns, 0));
    assert_eq!(record.backend_id, dp.backend_id(&web, backend)?);
    Ok(())
}

fn refused(dial: Dial) -> Result<()> {
    let _world = World::enter(1)?;
    let backend = dial.backend(0);
    let mut dp = Datapath::start(Setup::default())?;
    let web = web(dial, &[backend]);
    dp.apply(&web)?;
    let fd = socket::tcp(dial)?;
    assert_eq!(socket::dial(&fd, dial.as_dialled(vip(dial))), Err(Errno::ECONNREFUSED));
    // The record is there before the socket is closed, and closing it adds none.
    assert_eq!(dp.wait_connections(1)?.len(), 1);
    drop(fd);
    let record = only_record(&mut dp, &web, dial, outcome::REFUSED)?;
    assert_eq!(record.errno, Errno::ECONNREFUSED as u32);
    assert_eq!(record.client, Addr::from(dial.near()));
    assert_ne!(record.client_port.get(), 0);
    assert_eq!(dp.backend_counters(&web, backend)?.inside.failed, 1);
    Ok(())
}

fn timed_out(dial: Dial) -> Result<()> {
    let world = World::enter(1)?;
    world.near.write_sysctl("ipv4/tcp_syn_retries", "1")?;
    swallow(&world)?;
    let backend = dial.backend(0);
    let mut dp = Datapath::start(Setup::default())?;
    let web = web(dial, &[backend]);
    dp.apply(&web)?;
    let fd = socket::tcp(dial)?;
    setsockopt(&fd, sockopt::TcpUserTimeout, &500)?;
    assert_eq!(socket::dial(&fd, dial.as_dialled(vip(dial))), Err(Errno::ETIMEDOUT));
    drop(fd);
    let record = only_record(&mut dp, &web, dial, outcome::TIMED_OUT)?;
    assert_eq!(record.errno, Errno::ETIMEDOUT as u32);
    assert!(record.end_ns - record.start_ns >= 500_000_000, "{record:?}");
    assert_eq!(dp.backend_counters(&web, backend)?.inside.failed, 1);
    Ok(())
}

fn no_route(dial: Dial) -> Result<()> {
    let world = World::enter(0)?;
    let family = if dial == Dial::V6 { "-6" } else { "-4" };
    ip(&world, &[family, "route", "del", "default"])?;
    let mut dp = Datapath::start(Setup::default())?;
    let web = web(dial, &[beyond(dial)?]);
    dp.apply(&web)?;
    let fd = socket::tcp(dial)?;
    assert_eq!(socket::dial(&fd, dial.as_dialled(vip(dial))), Err(Errno::ENETUNREACH));
    assert_eq!(
        dp.connections()?,
        [],
        "the attempt ends with its socket, or with the next dial"
    );
    drop(fd);
    let record = only_record(&mut dp, &web, dial, outcome::UNREACHABLE)?;
    assert_eq!(record.client, Addr::ZERO, "no SYN has left");
    Ok(())
}

fn router_says_no(dial: Dial) -> Result<()> {
    let world = World::enter(0)?;
    world.far.write_sysctl("ipv4/ip_forward", "1")?;
    world.far.write_sysctl("ipv6/conf/all/forwarding", "1")?;
    let mut dp = Datapath::start(Setup::default())?;
    let web = web(dial, &[beyond(dial)?]);
    dp.apply(&web)?;
    let fd = socket::tcp(dial)?;
    let errno = socket::dial(&fd, dial.as_dialled(vip(dial))).expect_err("nobody is there");
    assert!(matches!(errno, Errno::ENETUNREACH | Errno::EHOSTUNREACH), "{errno}");
    drop(fd);
    let record = only_record(&mut dp, &web, dial, outcome::UNREACHABLE)?;
    assert_eq!(record.errno, errno as u32);
    assert_eq!(record.client, Addr::from(dial.near()));
    Ok(())
}

fn no_local_port(dial: Dial) -> Result<()> {
    let world = World::enter(1)?;
    let backend = dial.backend(0);
    let _server = world.serve(&[backend], Manner::Stay)?;
    world.near.set_local_ports(40_000, 40_001)?;
    let mut dp = Datapath::start(Setup::default())?;
    let web = web(dial, &[backend]);
    dp.apply(&web)?;
    let dialled = dial.as_dialled(vip(dial));
    let held = (TcpStream::connect(dialled)?, TcpStream::connect(dialled)?);
    let fd = socket::tcp(dial)?;
    assert_eq!(socket::dial(&fd, dialled), Err(Errno::EADDRNOTAVAIL));
    drop(fd);
    let record = dp.wait_connections(1)?[0];
    assert_eq!(record.outcome, outcome::NO_LOCAL_PORT, "{record:?}");
    assert_eq!(record.client_port.get(), 0);
    let counters = dp.service_counters(&web)?;
    assert_eq!(counters.failed[usize::from(outcome::NO_LOCAL_PORT)], 1);
    assert_eq!((counters.connects, counters.established), (3, 2));
    drop(held);
    assert_eq!(dp.entries(maps::SOCKETS), 0);
    Ok(())
}

fn abandoned(dial: Dial) -> Result<()> {
    let world = World::enter(1)?;
    swallow(&world)?;
    let mut dp = Datapath::start(Setup::default())?;
    let web = web(dial, &[dial.backend(0)]);
    dp.apply(&web)?;
    let fd = socket::make(dial, SockType::Stream, SockFlag::SOCK_NONBLOCK, None)?;
    assert_eq!(socket::dial(&fd, dial.as_dialled(vip(dial))), Err(Errno::EINPROGRESS));
    drop(fd);
    let record = only_record(&mut dp, &web, dial, outcome::ABANDONED)?;
    assert_ne!(record.client_port.get(), 0, "the SYN has left");
    assert_eq!(dp.backend_counters(&web, dial.backend(0))?.inside.failed, 1);
    Ok(())
}

fn reset_by_peer(dial: Dial) -> Result<()> {
    let world = World::enter(1)?;
    let backend = dial.backend(0);
    let listener = world.far.run(|| TcpListener::bind(backend))??;
    let mut dp = Datapath::start(Setup::default())?;
    let web = web(dial, &[backend]);
    dp.apply(&web)?;
    let dialled = dial.as_dialled(vip(dial));
    let mut stream = TcpStream::connect(dialled)?;
    let (accepted, _) = listener.accept()?;
    let linger = libc::linger {
        l_onoff: 1,
        l_linger: 0,
    };
    setsockopt(&accepted, sockopt::Linger, &linger)?;
    assert_eq!(dp.service_counters(&web)?.closed, 0);
    drop(accepted);
    // The record comes with the reset; the socket is still open.
    let records = dp.wait_connections(1)?;
    assert_eq!(records[0].outcome, outcome::ESTABLISHED);
    assert_ne!(records[0].established_ns, 0);
    assert_eq!(dp.service_counters(&web)?.closed, 1);
    let error = stream.read(&mut [0; 8]).expect_err("a reset");
    assert_eq!(error.raw_os_error(), Some(libc::ECONNRESET));
    drop(stream);
    dp.wait_connections(1)?;
    assert_eq!(dp.service_counters(&web)?.closed, 1);
    assert_eq!(dp.entries(maps::SOCKETS), 0);
    Ok(())
}

fn active(dial: Dial) -> Result<()> {
    let world = World::enter(2)?;
    let backends = dial.backends(2);
    let _server = world.serve(&backends, Manner::Stay)?;
    let mut dp = Datapath::start(Setup::default())?;
    let web = web(dial, &backends);
    dp.apply(&web)?;
    let mut streams = Vec::new();
    for _ in 0..10 {
        let mut stream = TcpStream::connect(dial.as_dialled(vip(dial)))?;
        let name = client::read_name(&mut stream)?;
        streams.push((stream, name));
    }
    for left in (0..=10).rev() {
        let open = |backend: SocketAddr| streams.iter().filter(|(_, name)| *name == backend).count() as u64;
        for &backend in &backends {
            let counters = dp.backend_counters(&web, backend)?;
            assert_eq!(counters.inside.established - counters.inside.closed, open(backend));
        }
        let counters = dp.service_counters(&web)?;
        assert_eq!(counters.established - counters.closed, left);
        streams.pop();
    }
    dp.wait_connections(10)?;
    Ok(())
}

/// A program of somebody else: asks for the callback of round-trip times when a connect begins, and counts them.
fn round_trip_counter(counter: &OwnedFd) -> Result<OwnedFd> {
    const MOV_REG: u8 = 0xbf;
    const MOV: u8 = 0xb7;
    const LOAD_WORD: u8 = 0x61;
    const STORE_WORD: u8 = 0x62;
    const JUMP_NOT_EQUAL: u8 = 0x55;
    const JUMP_EQUAL: u8 = 0x15;
    const CALL: u8 = 0x85;
    const EXIT: u8 = 0x95;
    const ADD: u8 = 0x07;
    const LOAD_WIDE: u8 = 0x18;
    const ATOMIC: u8 = 0xdb;
    let map = std::os::fd::AsRawFd::as_raw_fd(counter);
    Ok(bpf::load_sock_ops(&[
        insn(MOV_REG, 6, 1, 0, 0),
        insn(LOAD_WORD, 2, 6, 0, 0),
        // BPF_SOCK_OPS_TCP_CONNECT_CB: bpf_sock_ops_cb_flags_set(ctx, BPF_SOCK_OPS_RTT_CB_FLAG)
        insn(JUMP_NOT_EQUAL, 2, 0, 3, 3),
        insn(MOV_REG, 1, 6, 0, 0),
        insn(MOV, 2, 0, 0, 8),
        insn(CALL, 0, 0, 0, 59),
        // BPF_SOCK_OPS_RTT_CB: counter[0] += 1
        insn(LOAD_WORD, 2, 6, 0, 0),
        insn(JUMP_NOT_EQUAL, 2, 0, 9, 12),
        insn(STORE_WORD, 10, 0, -4, 0),
        insn(MOV_REG, 2, 10, 0, 0),
        insn(ADD, 2, 0, 0, -4),
        insn(LOAD_WIDE, 1, 1, 0, map),
        insn(0, 0, 0, 0, 0),
        insn(CALL, 0, 0, 0, 1),
        insn(JUMP_EQUAL, 0, 0, 2, 0),
        insn(MOV, 1, 0, 0, 1),
        insn(ATOMIC, 0, 1, 0, 0),
        insn(MOV, 0, 0, 0, 1),
        insn(EXIT, 0, 0, 0, 0),
    ])?)
}

fn other_flags(dial: Dial) -> Result<()> {
    let world = World::enter(1)?;
    let backend = dial.backend(0);
    let _server = world.serve(&[backend], Manner::Stay)?;
    let mut dp = Datapath::start(Setup::default())?;
    let web = web(dial, &[backend]);
    dp.apply(&web)?;
    let counter = bpf::counter()?;
    let other = round_trip_counter(&counter)?;
    // Programs of a child run before those of its parent: ours sees the other's flags.
    let pod = dp.cgroup().below("pod")?;
    let _link = bpf::attach_sock_ops(&other, File::open(pod.path())?)?;
    pod.join()?;
    let mut stream = TcpStream::connect(dial.as_dialled(vip(dial)))?;
    pod.leave()?;
    client::read_name(&mut stream)?;
    let before = bpf::read_counter(&counter)?;
    wait_until("the other program hears of round trips", || {
        let echoed = std::io::Write::write_all(&mut stream, b"ping").and_then(|()| stream.read_exact(&mut [0; 4]));
        echoed.is_ok() && bpf::read_counter(&counter).is_ok_and(|now| now > before)
    })?;
    // And ours still hears of the end.
    assert_eq!(dp.service_counters(&web)?.established, 1);
    drop(stream);
    only_record(&mut dp, &web, dial, outcome::ESTABLISHED)?;
    Ok(())
}

fn full_ring(dial: Dial) -> Result<()> {
    let _world = World::enter(1)?;
    let mut dp = Datapath::start(Setup::default())?;
    let dns = service("dns", vip(dial), Protocol::Udp, &[dial.backend(0)]);
    dp.apply(&dns)?;
    // Each further dial of a connected UDP socket ends the one before. A record takes its bytes and a header of eight.
    let fits = maps::EVENT_BYTES as usize / (size_of::<ConnRecord>() + 8);
    let beyond = 1_000;
    let socket = UdpSocket::bind(dial.any())?;
    let dialled = dial.as_dialled(vip(dial));
    for _ in 0..=fits + beyond {
        socket.connect(dialled)?;
    }
    let all = (fits + beyond) as u64;
    let written = dp.count(dial.connect_hook(), action::RECORDED)?;
    let lost = dp.count(dial.connect_hook(), action::RECORD_LOST)?;
    assert_eq!(written + lost, all);
    assert!(lost >= beyond as u64 && written > 0, "{written} written, {lost} lost");
    assert_eq!(
        dp.connections()?.len() as u64,
        written,
        "what is counted as written can be read"
    );
    // Read, it has room again; and the counters of connections have missed nothing.
    drop(socket);
    assert_eq!(dp.connections()?.len() as u64, written + 1);
    assert_eq!(dp.count(hook::SOCK_RELEASE, action::RECORDED)?, 1);
    let counters = dp.service_counters(&dns)?;
    assert_eq!(
        (counters.connects, counters.established, counters.closed),
        (all + 1, all + 1, all + 1)
    );
    dp.forget_records()
}

fn two_dials(dial: Dial) -> Result<()> {
    let world = World::enter(1)?;
    let backend = dial.backend(0);
    let mut dp = Datapath::start(Setup::default())?;
    let web = web(dial, &[backend]);
    dp.apply(&web)?;
    let dialled = dial.as_dialled(vip(dial));
    let fd = socket::tcp(dial)?;
    assert_eq!(socket::dial(&fd, dialled), Err(Errno::ECONNREFUSED));
    let _server = world.serve(&[backend], Manner::Stay)?;
    socket::dial(&fd, dialled)?;
    assert_eq!(socket::peer(&fd)?, dialled);
    drop(fd);
    let outcomes: Vec<u8> = dp.wait_connections(2)?.iter().map(|r| r.outcome).collect();
    assert_eq!(outcomes, [outcome::REFUSED, outcome::ESTABLISHED]);
    let counters = dp.service_counters(&web)?;
    assert_eq!((counters.connects, counters.established, counters.closed), (2, 1, 1));
    Ok(())
}

fn observe(dial: Dial) -> Result<()> {
    let world = World::enter(1)?;
    world.add_far_address(dial.vip(10))?;
    let _server = world.serve(&[vip(dial), dial.backend(0)], Manner::Stay)?;
    let mut dp = Datapath::start(Setup {
        mode: Mode::Observe,
        ..Setup::default()
    })?;
    let web = web(dial, &[dial.backend(0)]);
    dp.apply(&web)?;
    let mut stream = TcpStream::connect(dial.as_dialled(vip(dial)))?;
    assert_eq!(client::read_name(&mut stream)?, vip(dial), "nothing is rewritten");
    assert_eq!(dp.service_counters(&web)?.established, 1);
    let local = stream.local_addr()?;
    drop(stream);
    let record = only_record(&mut dp, &web, dial, outcome::ESTABLISHED)?;
    assert_eq!(
        (record.client, record.client_port.get()),
        (Addr::from(dial.near()), local.port())
    );
    assert_eq!(record.backend_id, 0, "nobody knows whom somebody else's proxy chose");
    // What is no frontend is counted and forgotten.
    drop(TcpStream::connect(dial.as_dialled(dial.backend(0)))?);
    assert_eq!(dp.count(hook::SOCK_OPS, action::MISS)?, 1);
    assert_eq!(dp.entries(maps::SOCKETS), 0);
    dp.wait_connections(1)?;
    Ok(())
}
