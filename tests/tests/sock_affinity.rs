//! ClientIP affinity at the socket hooks (C18): a client is a network namespace.

use std::{
    collections::BTreeSet,
    net::{SocketAddr, TcpStream, UdpSocket},
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use lb_common::{affinity::AffinityKey, backend::state, maps};
use lb_tests::{
    datapath::{Datapath, Setup},
    runner, socket,
    world::{Dial, VIP_PORT, World, service},
};
use lb_user::{
    lab::{Netns, client, link, server::Manner},
    model::{DesiredService, Member, Protocol},
    plan::Plan,
};

fn main() -> ExitCode {
    runner::run(runner::each(
        &Dial::ALL,
        &[
            ("c18_one_client_meets_one_backend", one_backend),
            ("c18_the_timeout_is_refreshed_and_honoured", timeout),
            ("c18_it_ends_when_the_backend_is_no_member", no_member),
            ("c18_k26_it_ends_when_the_backend_is_draining", draining),
            ("c18_it_ends_when_the_backend_is_ejected", ejected),
            ("c18_two_namespaces_are_two_clients", two_clients),
            ("c18_toggling_acts_live", toggling),
            ("c18_udp_too", udp),
        ],
    ))
}

const BACKENDS: usize = 5;

fn vip(dial: Dial) -> SocketAddr {
    SocketAddr::new(dial.vip(10), VIP_PORT)
}

fn sticky(dial: Dial, seconds: u32) -> DesiredService {
    let mut web = service("web", vip(dial), Protocol::Tcp, &dial.backends(BACKENDS));
    web.frontends[0].affinity_seconds = Some(seconds);
    web
}

/// The backend that one new connection meets.
fn meet(dial: Dial) -> Result<SocketAddr> {
    let mut stream = TcpStream::connect(dial.as_dialled(vip(dial)))?;
    Ok(client::read_name(&mut stream)?)
}

/// The backends that so many new connections meet.
fn meet_many(dial: Dial, count: usize) -> Result<BTreeSet<SocketAddr>> {
    (0..count).map(|_| meet(dial)).collect()
}

/// The one backend that ten connections meet.
fn meet_one(dial: Dial) -> Result<SocketAddr> {
    let met = meet_many(dial, 10)?;
    ensure!(met.len() == 1, "affinity was broken: {met:?}");
    met.into_iter().next().context("ten connections")
}

fn one_backend(dial: Dial) -> Result<()> {
    let world = World::enter(BACKENDS)?;
    let _server = world.serve(&dial.backends(BACKENDS), Manner::Greet)?;
    let mut dp = Datapath::start(Setup::default())?;
    let web = sticky(dial, 10_800);
    dp.apply(&web)?;
    let backend = meet_one(dial)?;
    let set_id = dp.compiled(&web).sets[0].set_id;
    let cookie = socket::netns_cookie(&socket::tcp(dial)?)?;
    let (_, memory) = dp
        .kernel()
        .affinities()
        .find(|(key, _)| *key == AffinityKey::inside(cookie, set_id))
        .context("the client is remembered")?;
    assert_eq!(memory.backend_id, dp.backend_id(&web, backend)?);
    assert_eq!(dp.entries(maps::MEMBERS), BACKENDS as u64);
    assert_eq!(dp.service_counters(&web)?.connects, 10);
    assert_eq!(dp.backend_counters(&web, backend)?.inside.connects, 10);
    dp.remove(&web.name)?;
    assert_eq!(dp.entries(maps::MEMBERS), 0);
    Ok(())
}

fn timeout(dial: Dial) -> Result<()> {
    let world = World::enter(BACKENDS)?;
    let _server = world.serve(&dial.backends(BACKENDS), Manner::Greet)?;
    let mut dp = Datapath::start(Setup::default())?;
    let seconds = 2;
    let web = sticky(dial, seconds);
    dp.apply(&web)?;
    let first = meet(dial)?;
    let set_id = dp.compiled(&web).sets[0].set_id;
    let memory = |dp: &Datapath| {
        dp.kernel()
            .affinities()
            .find(|(key, _)| key.set_id == set_id && key.client == client_of(dial))
            .map(|(_, memory)| memory.last_ns)
    };
    // Used again and again it lasts beyond its timeout: every connect refreshes it.
    let mut last = memory(&dp).context("remembered")?;
    let began = Instant::now();
    while began.elapsed() < Duration::from_millis(2_500) {
        assert_eq!(meet(dial)?, first, "after {:?}", began.elapsed());
        let now = memory(&dp).context("remembered")?;
        assert!(now > last);
        last = now;
    }
    // Left alone it ends: then a choice is fresh, and the others get their turns. One choice may hit the same backend by
    // chance; the memory's time shows that it was made anew all the same.
    let mut others = 0;
    for _ in 0..4 {
        let idle = Instant::now();
        let before = meet(dial)?;
        while idle.elapsed() < Duration::from_millis(2_100) {
            thread::sleep(Duration::from_millis(20));
        }
        if meet(dial)? != before {
            others += 1;
            break;
        }
    }
    assert!(
        others > 0,
        "four times in a row the same of five backends: 1 in 625 by chance"
    );
    Ok(())
}

/// This thread's namespace as the affinity map has it.
fn client_of(dial: Dial) -> lb_common::addr::Addr {
    let cookie = socket::tcp(dial)
        .map_err(std::io::Error::from)
        .and_then(socket::netns_cookie)
        .expect("a socket and its namespace");
    AffinityKey::inside(cookie, 0).client
}

fn no_member(dial: Dial) -> Result<()> {
    let world = World::enter(BACKENDS)?;
    let _server = world.serve(&dial.backends(BACKENDS), Manner::Greet)?;
    let mut dp = Datapath::start(Setup::default())?;
    let mut web = sticky(dial, 10_800);
    dp.apply(&web)?;
    let first = meet_one(dial)?;
    let gone = remove_member(&mut web, first);
    dp.apply(&web)?;
    let second = meet_one(dial)?;
    assert_ne!(second, first);
    // It does not come back by itself when the backend does: the client has another one now.
    web.sets[0].members.push(gone);
    web.sets[0].members.sort_unstable();
    dp.apply(&web)?;
    assert_eq!(meet_one(dial)?, second);
    Ok(())
}

fn remove_member(web: &mut DesiredService, backend: SocketAddr) -> Member {
    let members = &mut web.sets[0].members;
    let index = members.iter().position(|m| m.addr == backend.ip()).expect("a member");
    members.remove(index)
}

fn draining(dial: Dial) -> Result<()> {
    let world = World::enter(BACKENDS)?;
    let _server = world.serve(&dial.backends(BACKENDS), Manner::Greet)?;
    let mut dp = Datapath::start(Setup::default())?;
    let mut web = sticky(dial, 10_800);
    dp.apply(&web)?;
    let first = meet_one(dial)?;
    let member = remove_member(&mut web, first);
    web.sets[0].draining.push(member);
    dp.apply(&web)?;
    assert_ne!(meet_one(dial)?, first);
    Ok(())
}

fn ejected(dial: Dial) -> Result<()> {
    let world = World::enter(BACKENDS)?;
    let _server = world.serve(&dial.backends(BACKENDS), Manner::Greet)?;
    let mut dp = Datapath::start(Setup::default())?;
    let web = sticky(dial, 10_800);
    dp.apply(&web)?;
    let first = meet_one(dial)?;
    let id = dp.backend_id(&web, first)?;
    let (_, mut backend) = *dp
        .compiled(&web)
        .backends
        .iter()
        .find(|(i, _)| *i == id)
        .context("compiled")?;
    backend.state = state::EJECTED;
    let mut plan = Plan::default();
    plan.put_backends.insert(id, backend);
    dp.kernel_mut().apply(&plan)?;
    let second = meet_one(dial)?;
    assert_ne!(second, first);
    Ok(())
}

fn two_clients(dial: Dial) -> Result<()> {
    let world = World::enter(BACKENDS)?;
    let _server = world.serve(&dial.backends(BACKENDS), Manner::Greet)?;
    // More clients, each on a link of its own.
    let mut clients = Vec::new();
    for i in 0..6u8 {
        let netns = Netns::new()?;
        let device = format!("down{i}");
        link::join((&netns, "up"), (&world.far, &device))?;
        let (near, gateway): (SocketAddr, SocketAddr) = match dial {
            Dial::V4 | Dial::Mapped => (format!("10.2.{i}.1:0").parse()?, format!("10.2.{i}.2:0").parse()?),
            Dial::V6 => (format!("[fd02:{i}::1]:0").parse()?, format!("[fd02:{i}::2]:0").parse()?),
        };
        let prefix = if dial == Dial::V6 { 64 } else { 24 };
        link::add_address(&netns, "up", near.ip(), prefix)?;
        link::add_address(&world.far, &device, gateway.ip(), prefix)?;
        link::add_default_route(&netns, "up", gateway.ip())?;
        clients.push(netns);
    }
    let mut dp = Datapath::start(Setup::default())?;
    let web = sticky(dial, 10_800);
    dp.apply(&web)?;
    let mut met = BTreeSet::new();
    for netns in &clients {
        met.insert(netns.run(|| meet_one(dial))??);
    }
    // Six clients on five backends: all on one would be 1 in 3,125 by chance.
    assert!(met.len() > 1, "{met:?}");
    let set_id = dp.compiled(&web).sets[0].set_id;
    let remembered = dp
        .kernel()
        .affinities()
        .filter(|(key, _)| key.set_id == set_id && key.origin == 0);
    assert!(remembered.count() >= clients.len());
    Ok(())
}

fn toggling(dial: Dial) -> Result<()> {
    let world = World::enter(BACKENDS)?;
    let _server = world.serve(&dial.backends(BACKENDS), Manner::Greet)?;
    let mut dp = Datapath::start(Setup::default())?;
    let mut web = sticky(dial, 10_800);
    for _ in 0..2 {
        web.frontends[0].affinity_seconds = None;
        dp.apply(&web)?;
        assert_eq!(dp.entries(maps::MEMBERS), 0, "memberships are kept for affinity alone");
        assert!(meet_many(dial, 20)?.len() > 1, "without affinity connections spread");
        web.frontends[0].affinity_seconds = Some(10_800);
        dp.apply(&web)?;
        assert_eq!(dp.entries(maps::MEMBERS), BACKENDS as u64);
        meet_one(dial)?;
    }
    // A changed timeout acts on what is remembered already.
    let before = meet_one(dial)?;
    web.frontends[0].affinity_seconds = Some(1);
    dp.apply(&web)?;
    assert_eq!(meet(dial)?, before);
    Ok(())
}

fn udp(dial: Dial) -> Result<()> {
    let world = World::enter(BACKENDS)?;
    let backends = dial.backends(BACKENDS);
    let _server = world.serve(&backends, Manner::Datagram)?;
    let mut dp = Datapath::start(Setup::default())?;
    let mut dns = service("dns", vip(dial), Protocol::Udp, &backends);
    dns.frontends[0].affinity_seconds = Some(10_800);
    dp.apply(&dns)?;
    let dialled = dial.as_dialled(vip(dial));
    let mut met = BTreeSet::new();
    for i in 0..10 {
        let socket = UdpSocket::bind(dial.any())?;
        socket.set_read_timeout(Some(Duration::from_secs(10)))?;
        if i % 2 == 0 {
            socket.connect(dialled)?;
            socket.send(b"?")?;
        } else {
            socket.send_to(b"?", dialled)?;
        }
        let mut buffer = [0; 128];
        let (len, from) = socket.recv_from(&mut buffer)?;
        assert_eq!(from, dialled);
        met.insert(String::from_utf8_lossy(&buffer[..len]).into_owned());
    }
    assert_eq!(met.len(), 1, "{met:?}");
    assert_eq!(dp.service_counters(&dns)?.connects, 10);
    Ok(())
}
