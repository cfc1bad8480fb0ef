//! UDP through the hooks: whom the application hears, what is remembered, and that it is forgotten again.

use std::{
    io::ErrorKind,
    net::{SocketAddr, UdpSocket},
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use lb_common::{
    addr::Addr,
    counter::action,
    event::outcome,
    maps,
    socket::{CHAIN_WALK, phase},
};
use lb_tests::{
    datapath::{Datapath, Setup},
    runner, socket,
    world::{Dial, VIP_PORT, World, service},
};
use lb_user::{
    lab::server::Manner,
    model::{DesiredService, Protocol, WhenEmpty},
};
use nix::errno::Errno;

fn main() -> ExitCode {
    runner::run(runner::each(
        &Dial::ALL,
        &[
            ("k20_k46_a_connected_socket_hears_the_vip", connected),
            ("k20_k46_an_unconnected_socket_hears_the_vip", unconnected),
            ("one_socket_on_several_vips", several_vips),
            ("k20_two_vips_that_share_a_backend", shared_backend),
            ("k45_a_pod_asked_directly_answers_as_itself", directly),
            ("k45_connected_then_connected_elsewhere", connected_elsewhere),
            ("disconnected_then_unconnected", disconnected),
            ("k40_hairpin", hairpin),
            ("k35_c11_an_empty_set_refuses_connect_and_send", empty_refuses),
            ("c9_an_empty_local_set_is_unreachable", empty_is_unreachable),
            ("a_long_chain_is_swept", long_chain),
            ("a_full_map_says_enobufs", full),
            ("c19_a_flow_is_resolved_anew_when_its_backend_is_gone", backend_gone),
            ("c19_a_flow_begun_early_works_once_an_endpoint_comes", first_endpoint),
            ("opted_out_cgroups_pass", opted_out),
            ("traffic_of_others_is_untouched", untouched),
            ("a_packet_of_a_known_flow_is_no_new_flow", known_flow),
        ],
    ))
}

fn vip(dial: Dial) -> SocketAddr {
    vip_number(dial, 10)
}

fn vip_number(dial: Dial, n: u8) -> SocketAddr {
    SocketAddr::new(dial.vip(n), VIP_PORT)
}

fn dns(dial: Dial, backends: &[SocketAddr]) -> DesiredService {
    service("dns", vip(dial), Protocol::Udp, backends)
}

/// An unconnected socket that does not wait for ever.
fn open(dial: Dial) -> Result<UdpSocket> {
    let socket = UdpSocket::bind(dial.any())?;
    socket.set_read_timeout(Some(Duration::from_secs(10)))?;
    Ok(socket)
}

/// Sends a datagram, and returns the backend that answered and whom the answer came from.
fn ask(socket: &UdpSocket, to: SocketAddr) -> Result<(SocketAddr, SocketAddr)> {
    socket.send_to(b"?", to).with_context(|| format!("send to {to}"))?;
    hear(socket)
}

fn hear(socket: &UdpSocket) -> Result<(SocketAddr, SocketAddr)> {
    let mut buffer = [0; 128];
    let (len, from) = socket.recv_from(&mut buffer).context("receive")?;
    let name = std::str::from_utf8(&buffer[..len])?.trim_end().parse()?;
    Ok((name, from))
}

/// Nothing is remembered of any UDP socket.
fn all_forgotten(dp: &Datapath) {
    for map in [maps::SOCKETS, maps::UDP_REVERSE, maps::UDP_SOCKETS] {
        assert_eq!(dp.entries(map), 0, "{map}");
    }
}

fn connected(dial: Dial) -> Result<()> {
    let world = World::enter(3)?;
    let backends = dial.backends(3);
    let server = world.serve(&backends, Manner::Datagram)?;
    let mut dp = Datapath::start(Setup::default())?;
    let dns = dns(dial, &backends);
    dp.apply(&dns)?;

    let dialled = dial.as_dialled(vip(dial));
    let socket = open(dial)?;
    socket.connect(dialled)?;
    assert_eq!(socket.peer_addr()?, dialled);
    let mut first = None;
    for _ in 0..3 {
        socket.send(b"?")?;
        let (name, from) = hear(&socket)?;
        assert_eq!(from, dialled);
        assert_eq!(*first.get_or_insert(name), name, "one socket stays with one backend");
    }
    let backend = first.context("three answers")?;
    assert_eq!(server.count(backend), 3);
    let state = dp.socket(socket::cookie(&socket)?).context("state while it is open")?;
    assert_eq!(
        (state.phase, state.proto, state.vip),
        (phase::OPEN, 17, Addr::from(dial.vip(10)))
    );
    assert_eq!(state.backend_id, dp.backend_id(&dns, backend)?);
    assert_eq!(dp.count(dial.connect_hook(), action::TRANSLATED)?, 1);
    assert_eq!(dp.count(dial.receive_hook(), action::TRANSLATED)?, 3);
    let counters = dp.service_counters(&dns)?;
    assert_eq!((counters.connects, counters.established, counters.closed), (1, 1, 0));

    drop(socket);
    all_forgotten(&dp);
    assert_eq!(dp.service_counters(&dns)?.closed, 1);
    let records = dp.wait_connections(1)?;
    assert_eq!((records[0].outcome, records[0].proto), (outcome::ESTABLISHED, 17));
    Ok(())
}

fn unconnected(dial: Dial) -> Result<()> {
    let world = World::enter(3)?;
    let backends = dial.backends(3);
    let _server = world.serve(&backends, Manner::Datagram)?;
    let mut dp = Datapath::start(Setup::default())?;
    let dns = dns(dial, &backends);
    dp.apply(&dns)?;

    let dialled = dial.as_dialled(vip(dial));
    let socket = open(dial)?;
    let (backend, from) = ask(&socket, dialled)?;
    assert_eq!(from, dialled);
    assert_eq!(
        ask(&socket, dialled)?,
        (backend, dialled),
        "one socket stays with one backend"
    );
    assert_eq!(dp.count(dial.send_hook(), action::TRANSLATED)?, 2);
    assert_eq!(dp.count(dial.receive_hook(), action::TRANSLATED)?, 2);
    let reverse: Vec<_> = dp.kernel().reverse_entries().collect();
    assert_eq!(reverse.len(), 1, "{reverse:?}");
    assert_eq!(reverse[0].0.cookie, socket::cookie(&socket)?);
    assert_eq!(reverse[0].0.addr, Addr::from(backend.ip()));
    assert_eq!(reverse[0].1.backend_id, dp.backend_id(&dns, backend)?);
    assert_eq!(dp.entries(maps::UDP_SOCKETS), 1);
    drop(socket);
    all_forgotten(&dp);
    Ok(())
}

fn several_vips(dial: Dial) -> Result<()> {
    let world = World::enter(4)?;
    let _server = world.serve(&dial.backends(4), Manner::Datagram)?;
    let mut dp = Datapath::start(Setup::default())?;
    for i in 0..4 {
        let name = format!("dns{i}");
        let frontend = vip_number(dial, 20 + i as u8);
        dp.apply(&service(&name, frontend, Protocol::Udp, &[dial.backend(i)]))?;
    }
    let socket = open(dial)?;
    // All are asked before the first answer is read: each answer must be told by its backend alone.
    for i in 0..4 {
        socket.send_to(b"?", dial.as_dialled(vip_number(dial, 20 + i)))?;
    }
    for _ in 0..4 {
        let (name, from) = hear(&socket)?;
        let i = (0..4).find(|&i| dial.backend(i) == name).context("a backend of ours")?;
        assert_eq!(from, dial.as_dialled(vip_number(dial, 20 + i as u8)));
    }
    assert_eq!((dp.entries(maps::UDP_REVERSE), dp.entries(maps::UDP_SOCKETS)), (4, 1));
    drop(socket);
    all_forgotten(&dp);
    Ok(())
}

fn shared_backend(dial: Dial) -> Result<()> {
    let world = World::enter(1)?;
    let backend = dial.backend(0);
    let _server = world.serve(&[backend], Manner::Datagram)?;
    let mut dp = Datapath::start(Setup::default())?;
    let (one, two) = (vip_number(dial, 21), vip_number(dial, 22));
    dp.apply(&service("one", one, Protocol::Udp, &[backend]))?;
    dp.apply(&service("two", two, Protocol::Udp, &[backend]))?;
    let socket = open(dial)?;
    for vip in [one, two, one, one, two] {
        let dialled = dial.as_dialled(vip);
        assert_eq!(
            ask(&socket, dialled)?,
            (backend, dialled),
            "the answer shows the one last sent to"
        );
    }
    assert_eq!(dp.entries(maps::UDP_REVERSE), 1, "the tuples are identical");
    drop(socket);
    all_forgotten(&dp);
    Ok(())
}

fn directly(dial: Dial) -> Result<()> {
    let world = World::enter(1)?;
    let backend = dial.backend(0);
    let _server = world.serve(&[backend], Manner::Datagram)?;
    let mut dp = Datapath::start(Setup::default())?;
    dp.apply(&dns(dial, &[backend]))?;
    let socket = open(dial)?;
    let (through, direct) = (dial.as_dialled(vip(dial)), dial.as_dialled(backend));
    for to in [direct, through, direct, through, direct] {
        assert_eq!(ask(&socket, to)?, (backend, to));
    }
    assert_eq!(dp.count(dial.send_hook(), action::MISS)?, 3);
    assert_eq!(dp.count(dial.send_hook(), action::TRANSLATED)?, 2);
    drop(socket);
    all_forgotten(&dp);
    Ok(())
}

fn connected_elsewhere(dial: Dial) -> Result<()> {
    let world = World::enter(2)?;
    let (backend, other) = (dial.backend(0), dial.backend(1));
    let _server = world.serve(&[backend, other], Manner::Datagram)?;
    let mut dp = Datapath::start(Setup::default())?;
    let dns = dns(dial, &[backend]);
    dp.apply(&dns)?;
    let socket = open(dial)?;
    let cookie = socket::cookie(&socket)?;
    let dialled = dial.as_dialled(vip(dial));
    // The frontend, another pod, the frontend again, and at last its backend directly.
    for (to, name) in [
        (dialled, backend),
        (dial.as_dialled(other), other),
        (dialled, backend),
        (dial.as_dialled(backend), backend),
    ] {
        socket.connect(to)?;
        assert_eq!(socket.peer_addr()?, to);
        socket.send(b"?")?;
        assert_eq!(hear(&socket)?, (name, to));
        assert_eq!(dp.socket(cookie).is_some(), to == dialled, "after {to}");
    }
    let counters = dp.service_counters(&dns)?;
    assert_eq!((counters.connects, counters.established, counters.closed), (2, 2, 2));
    drop(socket);
    all_forgotten(&dp);
    dp.wait_connections(2)?;
    Ok(())
}

fn disconnected(dial: Dial) -> Result<()> {
    let world = World::enter(1)?;
    let backend = dial.backend(0);
    let _server = world.serve(&[backend], Manner::Datagram)?;
    let mut dp = Datapath::start(Setup::default())?;
    let dns = dns(dial, &[backend]);
    dp.apply(&dns)?;
    let socket = open(dial)?;
    let (dialled, direct) = (dial.as_dialled(vip(dial)), dial.as_dialled(backend));
    socket.connect(dialled)?;
    socket::disconnect(&socket)?;
    assert_eq!(socket::peer(&socket), Err(Errno::ENOTCONN));
    assert_eq!(ask(&socket, direct)?, (backend, direct));
    assert_eq!(ask(&socket, dialled)?, (backend, dialled));
    drop(socket);
    all_forgotten(&dp);
    let counters = dp.service_counters(&dns)?;
    assert_eq!((counters.established, counters.closed), (1, 1));
    Ok(())
}

fn hairpin(dial: Dial) -> Result<()> {
    let _world = World::enter(0)?;
    let own = SocketAddr::new(dial.near(), 8080);
    let server = UdpSocket::bind(own)?;
    server.set_read_timeout(Some(Duration::from_secs(10)))?;
    let mut dp = Datapath::start(Setup::default())?;
    dp.apply(&dns(dial, &[own]))?;
    let dialled = dial.as_dialled(vip(dial));
    for connect in [false, true] {
        let socket = open(dial)?;
        if connect {
            socket.connect(dialled)?;
            socket.send(b"?")?;
        } else {
            socket.send_to(b"?", dialled)?;
        }
        let (_, from) = server.recv_from(&mut [0; 8])?;
        assert_eq!(from.ip(), dial.near(), "the source is the pod's own address");
        server.send_to(own.to_string().as_bytes(), from)?;
        assert_eq!(hear(&socket)?, (own, dialled));
    }
    all_forgotten(&dp);
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
    let mut dns = dns(dial, &[]);
    dns.frontends[0].when_empty = when_empty;
    dp.apply(&dns)?;
    let dialled = dial.as_dialled(vip(dial));
    let socket = open(dial)?;
    let began = Instant::now();
    let refused = |result: std::io::Result<()>| result.err().and_then(|e| e.raw_os_error());
    assert_eq!(refused(socket.send_to(b"?", dialled).map(drop)), Some(errno as i32));
    assert_eq!(refused(socket.connect(dialled)), Some(errno as i32));
    assert!(began.elapsed() < Duration::from_millis(900), "{:?}", began.elapsed());
    assert_eq!(dp.count(dial.send_hook(), counted)?, 1);
    assert_eq!(dp.count(dial.connect_hook(), counted)?, 1);
    assert_eq!(dp.service_counters(&dns)?.rejected, 2);
    drop(socket);
    all_forgotten(&dp);
    assert_eq!(dp.connections()?, []);
    Ok(())
}

fn long_chain(dial: Dial) -> Result<()> {
    let beyond = 5;
    let all = CHAIN_WALK as usize + beyond;
    // Backends on one address: what counts is that there are many.
    let world = World::enter(1)?;
    let backends: Vec<SocketAddr> = (0..all)
        .map(|i| SocketAddr::new(dial.backend(0).ip(), 9_000 + i as u16))
        .collect();
    let _server = world.serve(&backends, Manner::Datagram)?;
    let mut dp = Datapath::start(Setup::default())?;
    let mut frontends = Vec::new();
    for (i, backend) in backends.iter().enumerate() {
        let frontend = SocketAddr::new(dial.vip(10), 1_000 + i as u16);
        dp.apply(&service(&format!("dns{i}"), frontend, Protocol::Udp, &[*backend]))?;
        frontends.push(frontend);
    }
    let (short, long) = (open(dial)?, open(dial)?);
    for (i, frontend) in frontends.iter().enumerate() {
        let dialled = dial.as_dialled(*frontend);
        assert_eq!(ask(&long, dialled)?, (backends[i], dialled));
        if i < CHAIN_WALK as usize {
            assert_eq!(ask(&short, dialled)?, (backends[i], dialled));
        }
    }
    let mut lengths: Vec<u32> = dp.kernel().udp_sockets().map(|(_, head)| head.length).collect();
    lengths.sort_unstable();
    assert_eq!(lengths, [CHAIN_WALK, all as u32]);
    // A sweep takes nothing from the living.
    assert_eq!(dp.kernel_mut().sweep_reverse()?, 0);
    drop(short);
    assert_eq!(
        dp.entries(maps::UDP_REVERSE),
        all as u64,
        "a chain as long as the walk goes with its socket"
    );
    drop(long);
    assert_eq!(dp.entries(maps::UDP_SOCKETS), 0);
    assert_eq!(dp.entries(maps::UDP_REVERSE), beyond as u64);
    assert_eq!(dp.kernel_mut().sweep_reverse()?, beyond as u64);
    all_forgotten(&dp);
    Ok(())
}

fn full(dial: Dial) -> Result<()> {
    let world = World::enter(1)?;
    let backend = dial.backend(0);
    let _server = world.serve(&[backend], Manner::Datagram)?;
    let mut dp = Datapath::start(Setup {
        sockets: 2,
        ..Setup::default()
    })?;
    let dns = dns(dial, &[backend]);
    dp.apply(&dns)?;
    let dialled = dial.as_dialled(vip(dial));
    let (one, two, three) = (open(dial)?, open(dial)?, open(dial)?);
    ask(&one, dialled)?;
    two.connect(dialled)?;
    let no_room = |result: std::io::Result<()>| result.err().and_then(|e| e.raw_os_error());
    assert_eq!(no_room(three.send_to(b"?", dialled).map(drop)), Some(libc::ENOBUFS));
    assert_eq!(no_room(three.connect(dialled)), Some(libc::ENOBUFS));
    assert_eq!(dp.count(dial.send_hook(), action::STATE_FULL)?, 1);
    assert_eq!(dp.count(dial.connect_hook(), action::STATE_FULL)?, 1);
    assert_eq!(dp.service_counters(&dns)?.connects, 2, "what failed is no flow");
    // Those that have their place go on.
    assert_eq!(ask(&one, dialled)?.1, dialled);
    // And a place that is given back is taken.
    drop(one);
    assert_eq!(ask(&three, dialled)?, (backend, dialled));
    drop((two, three));
    all_forgotten(&dp);
    Ok(())
}

fn backend_gone(dial: Dial) -> Result<()> {
    let world = World::enter(3)?;
    let backends = dial.backends(3);
    let _server = world.serve(&backends, Manner::Datagram)?;
    let mut dp = Datapath::start(Setup::default())?;
    let mut dns = dns(dial, &backends);
    dp.apply(&dns)?;
    let dialled = dial.as_dialled(vip(dial));
    let sockets: Vec<UdpSocket> = (0..12).map(|_| open(dial)).collect::<Result<_>>()?;
    let mut met = Vec::new();
    for socket in &sockets {
        met.push(ask(socket, dialled)?.0);
    }
    let gone = met[0];
    dns.sets[0].members.retain(|m| m.addr != gone.ip());
    dp.apply(&dns)?;
    for (socket, before) in sockets.iter().zip(&met) {
        let (now, from) = ask(socket, dialled)?;
        assert_eq!(from, dialled);
        assert_ne!(now, gone, "the backend is gone");
        // Maglev moves few of the others; that is its own test. Here: whoever moved still hears the VIP.
        ensure!(backends.contains(&now), "{now} for {before}");
    }
    drop(sockets);
    all_forgotten(&dp);
    Ok(())
}

fn first_endpoint(dial: Dial) -> Result<()> {
    let world = World::enter(1)?;
    let backend = dial.backend(0);
    let _server = world.serve(&[backend], Manner::Datagram)?;
    let mut dp = Datapath::start(Setup::default())?;
    let mut dns = dns(dial, &[]);
    dp.apply(&dns)?;
    let dialled = dial.as_dialled(vip(dial));
    let socket = open(dial)?;
    let refused = socket.send_to(b"?", dialled).expect_err("nobody is there");
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    dns.sets = service("dns", vip(dial), Protocol::Udp, &[backend]).sets;
    dp.apply(&dns)?;
    assert_eq!(ask(&socket, dialled)?, (backend, dialled));
    // And when the last one goes, the flow is refused again; its memory goes with the socket.
    dns.sets[0].members.clear();
    dp.apply(&dns)?;
    assert!(socket.send_to(b"?", dialled).is_err());
    drop(socket);
    all_forgotten(&dp);
    Ok(())
}

fn opted_out(dial: Dial) -> Result<()> {
    let world = World::enter(1)?;
    world.add_far_address(dial.vip(10))?;
    let backend = dial.backend(0);
    let _server = world.serve(&[backend, vip(dial)], Manner::Datagram)?;
    let mut dp = Datapath::start(Setup::default())?;
    dp.apply(&dns(dial, &[backend]))?;
    let pod = dp.cgroup().below("pod")?;
    let id = std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(pod.path())?);
    dp.kernel_mut().opt_out(id)?;
    let dialled = dial.as_dialled(vip(dial));
    pod.join()?;
    let socket = open(dial)?;
    assert_eq!(ask(&socket, dialled)?, (vip(dial), dialled));
    let other = open(dial)?;
    other.connect(dialled)?;
    other.send(b"?")?;
    assert_eq!(hear(&other)?, (vip(dial), dialled));
    pod.leave()?;
    // A send on a connected socket runs no hook, except that the kernel turns an IPv4-mapped one into one that names its peer.
    let sends = if dial == Dial::Mapped { 2 } else { 1 };
    assert_eq!(dp.count(dial.send_hook(), action::OPTED_OUT)?, sends);
    assert_eq!(dp.count(dial.connect_hook(), action::OPTED_OUT)?, 1);
    all_forgotten(&dp);
    Ok(())
}

fn untouched(dial: Dial) -> Result<()> {
    let world = World::enter(1)?;
    let backend = dial.backend(0);
    let _server = world.serve(&[backend], Manner::Datagram)?;
    let mut dp = Datapath::start(Setup::default())?;
    dp.apply(&dns(dial, &[backend]))?;
    let direct = dial.as_dialled(backend);
    let socket = open(dial)?;
    assert_eq!(ask(&socket, direct)?, (backend, direct));
    assert_eq!(dp.count(dial.send_hook(), action::MISS)?, 1);
    assert_eq!(dp.count(dial.receive_hook(), action::MISS)?, 1);
    all_forgotten(&dp);
    Ok(())
}

fn known_flow(dial: Dial) -> Result<()> {
    let world = World::enter(2)?;
    let backends = dial.backends(2);
    let _server = world.serve(&backends, Manner::Datagram)?;
    let mut dp = Datapath::start(Setup::default())?;
    let dns = dns(dial, &backends);
    dp.apply(&dns)?;
    let dialled = dial.as_dialled(vip(dial));
    let (one, two) = (open(dial)?, open(dial)?);
    for _ in 0..5 {
        ask(&one, dialled)?;
        ask(&two, dialled)?;
    }
    assert_eq!(dp.service_counters(&dns)?.connects, 2);
    assert_eq!(dp.kernel().started(dp.set_word(&dns))?.iter().sum::<u64>(), 2);
    assert_eq!(dp.count(dial.send_hook(), action::TRANSLATED)?, 10);
    Ok(())
}
