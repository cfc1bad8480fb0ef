//! TCP connects through the hooks: what the application sees, what the maps hold, and what is left alone.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    os::{
        fd::{AsFd, FromRawFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use lb_common::{
    addr::{Addr, Port},
    counter::{action, hook},
    event::outcome,
    maps,
    socket::phase,
};
use lb_tests::{
    datapath::{Datapath, Setup, wait_until},
    runner::{self, skip},
    socket,
    world::{Dial, VIP_PORT, World, service},
};
use lb_user::{
    lab::{ChildCgroup, client, server::Manner},
    model::{DesiredService, Protocol, WhenEmpty},
};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::socket::{SockFlag, SockProtocol, SockType, getsockopt, sockopt::SocketError},
};

/// Refusals come at once: no timer of the kernel is this short in any of the cases here.
const AT_ONCE: Duration = Duration::from_millis(900);

fn main() -> ExitCode {
    runner::run(runner::each(
        &Dial::ALL,
        &[
            ("k20_translated_and_the_peer_is_the_vip", translated),
            ("k45_a_failed_dial_then_a_direct_one", dial_again),
            ("k45_disconnected_then_direct", disconnected),
            ("k11_one_source_port_direct_and_through_the_vip", one_source_port),
            ("k35_c11_an_empty_set_refuses_at_once", empty_refuses),
            ("c9_an_empty_local_set_is_unreachable_at_once", empty_is_unreachable),
            ("k40_hairpin", hairpin),
            ("k48_mptcp", mptcp),
            ("direct_traffic_is_untouched", direct),
            ("the_protocol_is_part_of_the_frontend", other_protocol),
            ("ping_sockets_pass", ping),
            ("opted_out_cgroups_pass", opted_out),
            ("non_blocking_connect", non_blocking),
            ("a_full_socket_map_is_no_obstacle", full),
            ("k24_losing_all_backends_leaves_connections_alone", losing_all),
        ],
    ))
}

fn vip(dial: Dial) -> SocketAddr {
    vip_number(dial, 10)
}

fn vip_number(dial: Dial, n: u8) -> SocketAddr {
    SocketAddr::new(dial.vip(n), VIP_PORT)
}

/// A TCP Service on the VIP.
fn web(dial: Dial, backends: &[SocketAddr]) -> DesiredService {
    service("web", vip(dial), Protocol::Tcp, backends)
}

/// Connects, and reads the name of the backend that answers.
fn connect(address: SocketAddr) -> Result<(TcpStream, SocketAddr)> {
    let mut stream = TcpStream::connect(address).with_context(|| format!("connect to {address}"))?;
    let name = client::read_name(&mut stream)?;
    Ok((stream, name))
}

/// The connection carries its own bytes and nobody else's.
fn echoes(stream: &mut TcpStream, word: &[u8]) -> Result<()> {
    stream.write_all(word)?;
    let mut answer = vec![0; word.len()];
    stream.read_exact(&mut answer)?;
    ensure!(answer == word, "{answer:?} came back for {word:?}");
    Ok(())
}

fn translated(dial: Dial) -> Result<()> {
    let world = World::enter(3)?;
    let backends = dial.backends(3);
    let server = world.serve(&backends, Manner::Stay)?;
    let mut dp = Datapath::start(Setup::default())?;
    let web = web(dial, &backends);
    dp.apply(&web)?;

    let dialled = dial.as_dialled(vip(dial));
    let (mut stream, backend) = connect(dialled)?;
    ensure!(backends.contains(&backend), "{backend} answered");
    assert_eq!(server.count(backend), 1);
    assert_eq!(stream.peer_addr()?, dialled);
    echoes(&mut stream, b"ping")?;

    let cookie = socket::cookie(&stream)?;
    let state = dp.socket(cookie).context("the socket has state while it is open")?;
    let local = stream.local_addr()?;
    assert_eq!(
        (state.vip, state.vip_port.get()),
        (Addr::from(vip(dial).ip()), VIP_PORT)
    );
    assert_eq!(
        (state.client, state.client_port.get()),
        (Addr::from(dial.near()), local.port())
    );
    assert_eq!((state.phase, state.proto), (phase::OPEN, 6));
    assert_eq!(state.backend_id, dp.backend_id(&web, backend)?);
    assert_eq!(state.service_id, dp.compiled(&web).service_id);
    assert!(state.start_ns <= state.established_ns);

    assert_eq!(dp.count(dial.connect_hook(), action::TRANSLATED)?, 1);
    assert_eq!(dp.count(dial.peer_hook(), action::TRANSLATED)?, 1);
    let counters = dp.backend_counters(&web, backend)?.inside;
    assert_eq!((counters.connects, counters.established, counters.closed), (1, 1, 0));
    let counters = dp.service_counters(&web)?;
    assert_eq!((counters.connects, counters.established, counters.closed), (1, 1, 0));
    assert_eq!(dp.kernel().started(dp.set_word(&web))?.iter().sum::<u64>(), 1);

    drop(stream);
    assert_eq!(dp.socket(cookie), None, "the state ends with the socket");
    assert_eq!(dp.entries(maps::SOCKETS), 0);
    assert_eq!(dp.backend_counters(&web, backend)?.inside.closed, 1);
    let records = dp.wait_connections(1)?;
    assert_eq!(records[0].outcome, outcome::ESTABLISHED);
    // Nothing else happened: no miss, no loss, no contradiction.
    let names = |hook: u32| hook::NAMES[hook as usize];
    let moved: Vec<_> = dp.moved()?.into_iter().collect();
    let mut wanted = vec![
        ((names(dial.connect_hook()), "translated"), 1),
        ((names(dial.peer_hook()), "translated"), 1),
        (("sock_release", "recorded"), 1),
    ];
    wanted.sort_unstable();
    assert_eq!(moved, wanted);
    Ok(())
}

fn dial_again(dial: Dial) -> Result<()> {
    let world = World::enter(2)?;
    let (dead, alive) = (dial.backend(0), dial.backend(1));
    let _server = world.serve(&[alive], Manner::Stay)?;
    let mut dp = Datapath::start(Setup::default())?;
    let web = web(dial, &[dead]);
    dp.apply(&web)?;

    let fd = socket::tcp(dial)?;
    assert_eq!(socket::dial(&fd, dial.as_dialled(vip(dial))), Err(Errno::ECONNREFUSED));
    let direct = dial.as_dialled(alive);
    socket::dial(&fd, direct)?;
    assert_eq!(socket::peer(&fd)?, direct, "the socket shows whom it dialled last");
    assert_eq!(dp.entries(maps::SOCKETS), 0, "nothing is remembered of the frontend");
    assert_eq!(dp.count(dial.connect_hook(), action::MISS)?, 1);
    let records = dp.wait_connections(1)?;
    assert_eq!(records[0].outcome, outcome::REFUSED);
    drop(fd);
    dp.wait_connections(1)?;
    Ok(())
}

fn disconnected(dial: Dial) -> Result<()> {
    let world = World::enter(2)?;
    let (backend, other) = (dial.backend(0), dial.backend(1));
    let _server = world.serve(&[backend, other], Manner::Stay)?;
    let mut dp = Datapath::start(Setup::default())?;
    let web = web(dial, &[backend]);
    dp.apply(&web)?;

    let fd = socket::tcp(dial)?;
    let dialled = dial.as_dialled(vip(dial));
    socket::dial(&fd, dialled)?;
    assert_eq!(socket::peer(&fd)?, dialled);
    socket::disconnect(&fd)?;
    assert_eq!(socket::peer(&fd), Err(Errno::ENOTCONN));
    let direct = dial.as_dialled(other);
    socket::dial(&fd, direct)?;
    assert_eq!(socket::peer(&fd)?, direct);
    assert_eq!(dp.entries(maps::SOCKETS), 0);
    let counters = dp.service_counters(&web)?;
    assert_eq!(
        (counters.established, counters.closed),
        (1, 1),
        "the first connection has ended"
    );

    // And back to the frontend: the socket is as good as new.
    socket::disconnect(&fd)?;
    socket::dial(&fd, dialled)?;
    assert_eq!(socket::peer(&fd)?, dialled);
    drop(fd);
    let records = dp.wait_connections(2)?;
    assert!(
        records.iter().all(|r| r.outcome == outcome::ESTABLISHED),
        "{records:#?}"
    );
    let counters = dp.service_counters(&web)?;
    assert_eq!((counters.connects, counters.established, counters.closed), (2, 2, 2));
    Ok(())
}

fn one_source_port(dial: Dial) -> Result<()> {
    let world = World::enter(1)?;
    let backend = dial.backend(0);
    let _server = world.serve(&[backend], Manner::Stay)?;
    let mut dp = Datapath::start(Setup::default())?;
    dp.apply(&web(dial, &[backend]))?;
    let (direct, through) = (dial.as_dialled(backend), dial.as_dialled(vip(dial)));

    for (first, second) in [(direct, through), (through, direct)] {
        let one = socket::tcp(dial)?;
        socket::bind_shared(&one, dial.any())?;
        socket::dial(&one, first)?;
        let mut one = TcpStream::from(one);
        assert_eq!(client::read_name(&mut one)?, backend);
        let port = one.local_addr()?.port();

        let two = socket::tcp(dial)?;
        socket::bind_shared(&two, SocketAddr::new(dial.any().ip(), port))?;
        if let Err(errno) = socket::dial(&two, second) {
            assert_eq!(errno, Errno::EADDRNOTAVAIL);
        } else {
            let mut two = TcpStream::from(two);
            assert_eq!(client::read_name(&mut two)?, backend);
            echoes(&mut two, b"two")?;
        }
        echoes(&mut one, b"one")?;
        assert_eq!(one.peer_addr()?, first);
    }
    assert_eq!(dp.entries(maps::SOCKETS), 0);
    Ok(())
}

fn empty_refuses(dial: Dial) -> Result<()> {
    refuses_with(dial, WhenEmpty::Refuse, Errno::ECONNREFUSED, action::REFUSED)
}

fn empty_is_unreachable(dial: Dial) -> Result<()> {
    refuses_with(dial, WhenEmpty::Unreachable, Errno::EHOSTUNREACH, action::UNREACHABLE)
}

fn refuses_with(dial: Dial, when_empty: WhenEmpty, errno: Errno, counted: u32) -> Result<()> {
    let _world = World::enter(0)?;
    let mut dp = Datapath::start(Setup::default())?;
    let mut web = web(dial, &[]);
    web.frontends[0].when_empty = when_empty;
    dp.apply(&web)?;
    let fd = socket::tcp(dial)?;
    let began = Instant::now();
    assert_eq!(socket::dial(&fd, dial.as_dialled(vip(dial))), Err(errno));
    assert!(began.elapsed() < AT_ONCE, "{:?}", began.elapsed());
    assert_eq!(dp.count(dial.connect_hook(), counted)?, 1);
    let counters = dp.service_counters(&web)?;
    assert_eq!((counters.rejected, counters.connects), (1, 0));
    assert_eq!(dp.entries(maps::SOCKETS), 0);
    drop(fd);
    assert_eq!(dp.connections()?, [], "no connection, no record");
    Ok(())
}

fn hairpin(dial: Dial) -> Result<()> {
    let _world = World::enter(0)?;
    let own = SocketAddr::new(dial.near(), 8080);
    // The pod's own server: it sees who comes.
    let listener = std::net::TcpListener::bind(own)?;
    let mut dp = Datapath::start(Setup::default())?;
    let web = web(dial, &[own]);
    dp.apply(&web)?;
    let dialled = dial.as_dialled(vip(dial));
    let stream = TcpStream::connect(dialled)?;
    let (_accepted, from) = listener.accept()?;
    assert_eq!(from.ip(), dial.near(), "the source is the pod's own address");
    assert_eq!(from.port(), stream.local_addr()?.port());
    assert_eq!(stream.peer_addr()?, dialled);
    assert_eq!(dp.backend_counters(&web, own)?.inside.established, 1);
    Ok(())
}

fn mptcp(dial: Dial) -> Result<()> {
    let world = World::enter(1)?;
    let backend = dial.backend(0);
    let _server = world.serve(&[backend], Manner::Stay)?;
    let mut dp = Datapath::start(Setup::default())?;
    let web = web(dial, &[backend]);
    dp.apply(&web)?;
    let fd = mptcp_socket(dial)?;
    let dialled = dial.as_dialled(vip(dial));
    socket::dial(&fd, dialled)?;
    let mut stream = TcpStream::from(fd);
    assert_eq!(client::read_name(&mut stream)?, backend);
    echoes(&mut stream, b"mptcp")?;
    assert_eq!(stream.peer_addr()?, dialled);
    assert_eq!(dp.count(dial.connect_hook(), action::TRANSLATED)?, 1);
    let counters = dp.service_counters(&web)?;
    assert_eq!((counters.connects, counters.established, counters.closed), (1, 1, 0));
    drop(stream);
    assert_eq!(
        dp.entries(maps::SOCKETS),
        0,
        "the state of the first subflow ends with the socket"
    );
    assert_eq!(dp.wait_connections(1)?[0].outcome, outcome::ESTABLISHED);
    assert_eq!(dp.service_counters(&web)?.closed, 1);

    // One whose connect fails leaves nothing either.
    let refusing = service(
        "refusing",
        vip_number(dial, 11),
        Protocol::Tcp,
        &[SocketAddr::new(backend.ip(), 9)],
    );
    dp.apply(&refusing)?;
    let fd = mptcp_socket(dial)?;
    assert_eq!(
        socket::dial(&fd, dial.as_dialled(vip_number(dial, 11))),
        Err(Errno::ECONNREFUSED)
    );
    drop(fd);
    assert_eq!(dp.entries(maps::SOCKETS), 0);
    assert_eq!(dp.wait_connections(2)?[1].outcome, outcome::REFUSED);
    Ok(())
}

fn mptcp_socket(dial: Dial) -> Result<OwnedFd> {
    let family = if dial == Dial::V4 {
        libc::AF_INET
    } else {
        libc::AF_INET6
    };
    // SAFETY: the call takes numbers.
    let raw = unsafe { libc::socket(family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, libc::IPPROTO_MPTCP) };
    if raw < 0 {
        return Err(skip(format!("this kernel has no MPTCP ({})", Errno::last())));
    }
    // SAFETY: the kernel has just given us this descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

fn direct(dial: Dial) -> Result<()> {
    let world = World::enter(1)?;
    let backend = dial.backend(0);
    let _server = world.serve(&[backend], Manner::Stay)?;
    let mut dp = Datapath::start(Setup::default())?;
    dp.apply(&web(dial, &[backend]))?;
    let (stream, name) = connect(dial.as_dialled(backend))?;
    assert_eq!(name, backend);
    assert_eq!(stream.peer_addr()?, dial.as_dialled(backend));
    assert_eq!(dp.entries(maps::SOCKETS), 0);
    drop(stream);
    let mut wanted = vec![
        ((hook::NAMES[dial.connect_hook() as usize], "miss"), 1),
        ((hook::NAMES[dial.peer_hook() as usize], "miss"), 1),
    ];
    wanted.sort_unstable();
    assert_eq!(dp.moved()?.into_iter().collect::<Vec<_>>(), wanted);
    assert_eq!(dp.connections()?, []);
    Ok(())
}

fn other_protocol(dial: Dial) -> Result<()> {
    let world = World::enter(1)?;
    // The frontend's own address answers too, so that what is not translated can be told.
    world.add_far_address(dial.vip(10))?;
    let _server = world.serve(&[vip(dial)], Manner::Stay)?;
    let mut dp = Datapath::start(Setup::default())?;
    dp.apply(&service("dns", vip(dial), Protocol::Udp, &dial.backends(1)))?;
    let (_stream, name) = connect(dial.as_dialled(vip(dial)))?;
    assert_eq!(name, vip(dial), "a UDP frontend does not take TCP");
    assert_eq!(dp.count(dial.connect_hook(), action::MISS)?, 1);
    assert_eq!(dp.count(dial.connect_hook(), action::TRANSLATED)?, 0);
    Ok(())
}

fn ping(dial: Dial) -> Result<()> {
    let world = World::enter(1)?;
    world.near.write_sysctl("ipv4/ping_group_range", "0 0")?;
    let mut dp = Datapath::start(Setup::default())?;
    dp.apply(&web(dial, &dial.backends(1)))?;
    let protocol = if dial == Dial::V4 {
        SockProtocol::Icmp
    } else {
        SockProtocol::IcmpV6
    };
    let fd = socket::make(dial, SockType::Datagram, SockFlag::empty(), Some(protocol))?;
    let dialled = dial.as_dialled(vip(dial));
    match socket::dial(&fd, dialled) {
        Ok(()) => assert_eq!(socket::peer(&fd)?, dialled),
        // ICMPv6 does not go to an IPv4-mapped address.
        Err(errno) => assert!(dial == Dial::Mapped, "{errno}"),
    }
    assert_eq!(dp.count(dial.connect_hook(), action::TRANSLATED)?, 0);
    assert_eq!(dp.entries(maps::SOCKETS), 0);
    Ok(())
}

fn opted_out(dial: Dial) -> Result<()> {
    let world = World::enter(1)?;
    world.add_far_address(dial.vip(10))?;
    let backend = dial.backend(0);
    let _server = world.serve(&[backend, vip(dial)], Manner::Stay)?;
    let mut dp = Datapath::start(Setup::default())?;
    dp.apply(&web(dial, &[backend]))?;
    let pod = dp.cgroup().below("pod")?;
    let container = ChildCgroup::below(&pod, "container")?;
    let other = dp.cgroup().below("other")?;
    let id = std::fs::metadata(pod.path())?.ino();
    dp.kernel_mut().opt_out(id)?;

    let dialled = dial.as_dialled(vip(dial));
    let mut passed = 0;
    for (place, is_out) in [(&pod, true), (&container, true), (&other, false)] {
        place.join()?;
        let (stream, name) = connect(dialled)?;
        place.leave()?;
        assert_eq!(stream.peer_addr()?, dialled);
        assert_eq!(
            name,
            if is_out { vip(dial) } else { backend },
            "from {}",
            place.path().display()
        );
        passed += u64::from(is_out);
        assert_eq!(dp.count(dial.connect_hook(), action::OPTED_OUT)?, passed);
    }
    assert_eq!(dp.count(dial.connect_hook(), action::TRANSLATED)?, 1);
    // Opted in again, the same cgroup is translated.
    dp.kernel_mut().opt_in_all_but(&[])?;
    container.join()?;
    let (_stream, name) = connect(dialled)?;
    container.leave()?;
    assert_eq!(name, backend);
    Ok(())
}

fn non_blocking(dial: Dial) -> Result<()> {
    let world = World::enter(1)?;
    let backend = dial.backend(0);
    let _server = world.serve(&[backend], Manner::Stay)?;
    let mut dp = Datapath::start(Setup::default())?;
    let web = web(dial, &[backend]);
    dp.apply(&web)?;
    let fd = socket::make(dial, SockType::Stream, SockFlag::SOCK_NONBLOCK, None)?;
    let dialled = dial.as_dialled(vip(dial));
    let begun = socket::dial(&fd, dialled);
    // Over a pair of devices in one machine the answer may be there before the call returns.
    assert!(matches!(begun, Err(Errno::EINPROGRESS) | Ok(())), "{begun:?}");
    let mut polled = [PollFd::new(fd.as_fd(), PollFlags::POLLOUT)];
    assert_eq!(poll(&mut polled, PollTimeout::from(10_000u16))?, 1);
    assert_eq!(getsockopt(&fd, SocketError)?, 0);
    // A second call asks for the first one's end: it must not choose again.
    assert!(matches!(socket::dial(&fd, dialled), Ok(()) | Err(Errno::EISCONN)));
    assert_eq!(socket::peer(&fd)?, dialled);
    assert_eq!(dp.backend_counters(&web, backend)?.inside.established, 1);
    drop(fd);
    let records = dp.wait_connections(1)?;
    assert_eq!(records[0].outcome, outcome::ESTABLISHED);
    assert_eq!(records[0].client, Addr::from(dial.near()));
    assert_ne!(records[0].client_port, Port(0));
    Ok(())
}

fn full(dial: Dial) -> Result<()> {
    let world = World::enter(1)?;
    let backend = dial.backend(0);
    let _server = world.serve(&[backend], Manner::Stay)?;
    let mut dp = Datapath::start(Setup {
        sockets: 2,
        ..Setup::default()
    })?;
    let web = web(dial, &[backend]);
    dp.apply(&web)?;
    let dialled = dial.as_dialled(vip(dial));
    let mut streams = Vec::new();
    for _ in 0..3 {
        let (mut stream, name) = connect(dialled)?;
        assert_eq!(name, backend);
        echoes(&mut stream, b"full")?;
        streams.push(stream);
    }
    assert_eq!(dp.entries(maps::SOCKETS), 2);
    assert_eq!(dp.count(dial.connect_hook(), action::STATE_FULL)?, 1);
    assert_eq!(dp.count(dial.connect_hook(), action::TRANSLATED)?, 3);
    // The one without state works, and shows the backend: that is the limit, and it is counted.
    assert_eq!(streams[2].peer_addr()?, dial.as_dialled(backend));
    assert_eq!(dp.service_counters(&web)?.connects, 3);
    assert_eq!(dp.service_counters(&web)?.established, 2);
    // Room again: the next one is followed.
    streams.truncate(1);
    wait_until("a closed socket frees its state", || dp.entries(maps::SOCKETS) == 1)?;
    let (stream, _) = connect(dialled)?;
    assert_eq!(stream.peer_addr()?, dialled);
    Ok(())
}

fn losing_all(dial: Dial) -> Result<()> {
    let world = World::enter(2)?;
    let backends = dial.backends(2);
    let _server = world.serve(&backends, Manner::Stay)?;
    let mut dp = Datapath::start(Setup::default())?;
    let mut web = web(dial, &backends);
    dp.apply(&web)?;
    let dialled = dial.as_dialled(vip(dial));
    let (mut stream, _) = connect(dialled)?;
    web.sets[0].members.clear();
    dp.apply(&web)?;
    assert_eq!(socket::dial(&socket::tcp(dial)?, dialled), Err(Errno::ECONNREFUSED));
    echoes(&mut stream, b"still here")?;
    assert_eq!(stream.peer_addr()?, dialled);
    // The frontend too may go: the socket keeps what it dialled.
    dp.remove(&web.name)?;
    assert_eq!(stream.peer_addr()?, dialled);
    echoes(&mut stream, b"still here")
}
