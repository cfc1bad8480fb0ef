//! The packet observer: which packets it records, how it reads them, and that it touches none.

use std::{
    io::Read,
    net::{IpAddr, SocketAddr, TcpStream},
    os::fd::AsFd,
    process::ExitCode,
};

use anyhow::{Context, Result, ensure};
use aya::programs::{Program, SchedClassifier};
use lb_common::{
    addr::Addr,
    counter::{action, hook},
    event::{PacketRecord, tcp_flag},
};
use lb_tests::{
    bpf,
    datapath::{Datapath, Setup, wait_until},
    runner::{self, skip, test},
    tool,
    world::{Dial, PORT, VIP_PORT, World, service},
};
use lb_user::{
    datapath::load::Mode,
    lab::{Netns, client, link, server::Manner},
    model::{DesiredService, Protocol},
    observe::monotonic_ns,
};

const INGRESS: u8 = 0;
const EGRESS: u8 = 1;
/// `TC_ACT_UNSPEC`: the next program decides.
const NEXT: i32 = -1;

fn main() -> ExitCode {
    let mut tests = runner::each(
        &[Dial::V4, Dial::V6],
        &[
            ("a_connection_is_its_syn_and_its_fins", connection),
            ("a_refused_dial_is_a_syn_and_a_reset", refused),
            ("what_is_no_frontend_and_no_backend_is_not_recorded", foreign),
            ("a_backend_that_left_is_not_recorded", backend_left),
        ],
    );
    tests.push(test("vlan_tagged_packets_are_read", vlan));
    tests.push(test("crafted::every_form_of_header", crafted));
    tests.push(test("crafted::flags", flags));
    tests.push(test("crafted::cut_off_anywhere", truncated));
    tests.push(test("crafted::garbage", garbage));
    tests.push(test("links_go_with_their_owner", links_go));
    runner::run(tests)
}

/// In balance mode sockets that dial a backend's own address are not followed: what they send passes through.
fn setup() -> Setup {
    Setup {
        mode: Mode::Balance,
        index_backends: true,
        ..Setup::default()
    }
}

fn vip(dial: Dial) -> SocketAddr {
    SocketAddr::new(dial.vip(10), VIP_PORT)
}

fn web(dial: Dial) -> DesiredService {
    service("web", vip(dial), Protocol::Tcp, &[dial.backend(0)])
}

/// (direction, source, destination, flags) of a record.
type Seen = (u8, SocketAddr, SocketAddr, u8);

fn seen(record: &PacketRecord) -> Seen {
    let end = |addr: Addr, port: lb_common::addr::Port| SocketAddr::new(IpAddr::from(addr), port.get());
    (
        record.direction,
        end(record.src, record.src_port),
        end(record.dst, record.dst_port),
        record.flags & (tcp_flag::SYN | tcp_flag::FIN | tcp_flag::RST | tcp_flag::ACK),
    )
}

fn wait_packets(dp: &mut Datapath, count: usize) -> Result<Vec<PacketRecord>> {
    let mut error = None;
    wait_until(&format!("{count} packets"), || match dp.packets() {
        Ok(packets) => packets.len() >= count,
        Err(e) => {
            error = Some(e);
            true
        }
    })?;
    error.map_or(Ok(()), Err)?;
    let packets = dp.packets()?;
    ensure!(packets.len() == count, "{count} packets are wanted: {packets:#?}");
    Ok(packets)
}

fn connection(dial: Dial) -> Result<()> {
    let world = World::enter(1)?;
    let _server = world.serve(&[dial.backend(0)], Manner::Stay)?;
    let mut dp = Datapath::start(setup())?;
    dp.apply(&web(dial))?;
    dp.observe_interface("up")?;
    let ifindex = link::index_of(&world.near, "up")?;
    let before = monotonic_ns();
    let mut stream = TcpStream::connect(dial.backend(0))?;
    let near = stream.local_addr()?;
    client::read_name(&mut stream)?;
    // Packets that begin and end nothing are not recorded, however many.
    for _ in 0..5 {
        std::io::Write::write_all(&mut stream, b"ping")?;
        stream.read_exact(&mut [0; 4])?;
    }
    let opening = wait_packets(&mut dp, 2)?;
    drop(stream);
    let all = wait_packets(&mut dp, 4)?;
    assert_eq!(opening, all[..2]);
    let far = dial.backend(0);
    let (syn, fin, ack) = (tcp_flag::SYN, tcp_flag::FIN, tcp_flag::ACK);
    let wanted: [Seen; 4] = [
        (EGRESS, near, far, syn),
        (INGRESS, far, near, syn | ack),
        (EGRESS, near, far, fin | ack),
        (INGRESS, far, near, fin | ack),
    ];
    assert_eq!(all.iter().map(seen).collect::<Vec<_>>(), wanted);
    for record in &all {
        assert_eq!(
            (record.ifindex, record.proto, record.kind, record.pad),
            (ifindex, 6, 2, 0)
        );
        assert!(before <= record.time_ns && record.time_ns <= monotonic_ns());
    }
    assert!(all.is_sorted_by_key(|record| record.time_ns));
    assert_eq!(dp.count(hook::TC, action::RECORDED)?, 4);
    assert_eq!(dp.count(hook::TC, action::MISS)?, 0);
    Ok(())
}

fn refused(dial: Dial) -> Result<()> {
    let _world = World::enter(1)?;
    let mut dp = Datapath::start(setup())?;
    dp.apply(&web(dial))?;
    dp.observe_interface("up")?;
    TcpStream::connect(dial.backend(0)).expect_err("nobody listens");
    let packets = wait_packets(&mut dp, 2)?;
    assert_eq!(seen(&packets[0]).3, tcp_flag::SYN);
    assert_eq!(
        (seen(&packets[1]).0, seen(&packets[1]).3),
        (INGRESS, tcp_flag::RST | tcp_flag::ACK)
    );
    Ok(())
}

fn foreign(dial: Dial) -> Result<()> {
    let world = World::enter(2)?;
    let _server = world.serve(&[dial.backend(1)], Manner::Greet)?;
    let mut dp = Datapath::start(setup())?;
    dp.apply(&web(dial))?;
    dp.observe_interface("up")?;
    let mut stream = TcpStream::connect(dial.backend(1))?;
    client::read_name(&mut stream)?;
    drop(stream);
    // The SYN was looked at, and found to be nobody's.
    wait_until("the miss is counted", || {
        dp.count(hook::TC, action::MISS).is_ok_and(|n| n == 1)
    })?;
    assert_eq!(dp.packets()?, []);
    assert_eq!(dp.count(hook::TC, action::RECORDED)?, 0);
    Ok(())
}

fn backend_left(dial: Dial) -> Result<()> {
    let _world = World::enter(1)?;
    let mut dp = Datapath::start(setup())?;
    let mut web = web(dial);
    dp.apply(&web)?;
    // A second Service on the same backend keeps it in the index.
    let other = service(
        "other",
        SocketAddr::new(dial.vip(11), VIP_PORT),
        Protocol::Tcp,
        &[dial.backend(0)],
    );
    dp.apply(&other)?;
    dp.observe_interface("up")?;
    web.sets[0].members.clear();
    dp.apply(&web)?;
    // Nobody listens: a dial is two packets exactly.
    TcpStream::connect(dial.backend(0)).expect_err("nobody listens");
    wait_packets(&mut dp, 2)?;
    dp.remove(&other.name)?;
    TcpStream::connect(dial.backend(0)).expect_err("nobody listens");
    wait_until("it is nobody's", || {
        dp.count(hook::TC, action::MISS).is_ok_and(|misses| misses == 1)
    })?;
    assert_eq!(dp.packets()?.len(), 2);
    Ok(())
}

/// Runs `ip` in a namespace.
fn ip(netns: &Netns, arguments: &[&str]) -> Result<()> {
    tool::run(netns, "ip", arguments).map(drop)
}

fn vlan() -> Result<()> {
    let world = World::enter(0)?;
    for (netns, device, address) in [(&world.near, "up", "10.3.0.1/24"), (&world.far, "down", "10.3.0.2/24")] {
        let made = ip(
            netns,
            &[
                "link", "add", "link", device, "name", "tagged", "type", "vlan", "id", "7",
            ],
        );
        made.map_err(|error| skip(format!("this kernel has no VLAN devices ({error})")))?;
        ip(netns, &["link", "set", "tagged", "up"])?;
        ip(netns, &["address", "add", address, "dev", "tagged"])?;
    }
    let backend: SocketAddr = "10.3.0.2:8080".parse()?;
    let _server = world.serve(&[backend], Manner::Greet)?;
    let mut dp = Datapath::start(setup())?;
    dp.apply(&service("web", vip(Dial::V4), Protocol::Tcp, &[backend]))?;
    dp.observe_interface("up")?;
    let mut stream = TcpStream::connect(backend)?;
    client::read_name(&mut stream)?;
    let packets = wait_at_least(&mut dp, 2)?;
    assert_eq!(
        seen(&packets[0]),
        (EGRESS, stream.local_addr()?, backend, tcp_flag::SYN)
    );
    assert_eq!(
        seen(&packets[1]),
        (INGRESS, backend, stream.local_addr()?, tcp_flag::SYN | tcp_flag::ACK)
    );
    Ok(())
}

fn wait_at_least(dp: &mut Datapath, count: usize) -> Result<Vec<PacketRecord>> {
    wait_until(&format!("{count} packets"), || {
        dp.packets().is_ok_and(|packets| packets.len() >= count)
    })?;
    dp.packets()
}

/// A TCP segment in its packet, built up header by header.
#[derive(Clone, Debug, Default)]
struct Packet {
    bytes: Vec<u8>,
}

impl Packet {
    fn ethernet(ether_type: u16) -> Self {
        let mut bytes = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
        bytes.extend(ether_type.to_be_bytes());
        Self { bytes }
    }

    fn tag(mut self, id: u16, ether_type: u16) -> Self {
        self.bytes.extend(id.to_be_bytes());
        self.bytes.extend(ether_type.to_be_bytes());
        self
    }

    /// `words` is the length of the header in words of four bytes, options of zeroes included.
    fn v4(mut self, words: u8, protocol: u8, fragment: u16) -> Self {
        let mut header = vec![0x40 | words, 0, 0, 60, 0, 1];
        header.extend(fragment.to_be_bytes());
        header.extend([64, protocol, 0, 0]);
        header.extend([10, 0, 0, 1]);
        header.extend([10, 0, 0, 10]);
        header.resize(header.len().max(usize::from(words) * 4), 0);
        self.bytes.extend(header);
        self
    }

    fn v6(mut self, next: u8) -> Self {
        self.bytes.extend([0x60, 0, 0, 0, 0, 40, next, 64]);
        for end in [1u16, 10] {
            self.bytes.extend([0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
            self.bytes.extend(end.to_be_bytes());
        }
        self
    }

    fn raw(mut self, bytes: &[u8]) -> Self {
        self.bytes.extend(bytes);
        self
    }

    fn tcp(mut self, flags: u8) -> Self {
        self.bytes.extend(40_000u16.to_be_bytes());
        self.bytes.extend(PORT.to_be_bytes());
        self.bytes
            .extend([0, 0, 0, 1, 0, 0, 0, 0, 0x50, flags, 0xff, 0xff, 0, 0, 0, 0]);
        self
    }
}

const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;
const VLAN: u16 = 0x8100;
const QINQ: u16 = 0x88a8;
const TCP: u8 = 6;
const SYN: u8 = tcp_flag::SYN;

/// The programs with both families' backend 0 in their maps, for packets that are never sent.
fn bench() -> Result<(World, Datapath)> {
    let world = World::enter(1)?;
    let mut dp = Datapath::start(setup())?;
    dp.apply(&web(Dial::V4))?;
    let mut six = web(Dial::V6);
    six.name = lb_user::model::ObjectName::new("test", "web6");
    dp.apply(&six)?;
    Ok((world, dp))
}

/// Runs the packet through both programs: it must pass untouched. Returns what was recorded.
fn run(dp: &mut Datapath, packet: &[u8]) -> Result<Vec<PacketRecord>> {
    dp.forget_records()?;
    for name in ["tc_ingress", "tc_egress"] {
        let program: &SchedClassifier = match dp.object().program(name) {
            Some(Program::SchedClassifier(program)) => program,
            _ => anyhow::bail!("no program {name}"),
        };
        let (verdict, after) = bpf::run_on_packet(program.fd()?.as_fd(), packet)?;
        assert_eq!(verdict, NEXT, "{name} on {packet:?}");
        assert_eq!(after, packet, "{name} changed the packet");
    }
    dp.packets()
}

fn crafted() -> Result<()> {
    let (_world, mut dp) = bench()?;
    let eth = Packet::ethernet;
    let recorded: [(&str, Packet, Dial); 12] = [
        ("plain v4", eth(IPV4).v4(5, TCP, 0).tcp(SYN), Dial::V4),
        (
            "v4 that may not be fragmented",
            eth(IPV4).v4(5, TCP, 0x4000).tcp(SYN),
            Dial::V4,
        ),
        ("v4, first fragment", eth(IPV4).v4(5, TCP, 0x2000).tcp(SYN), Dial::V4),
        ("v4 with one option", eth(IPV4).v4(6, TCP, 0).tcp(SYN), Dial::V4),
        ("v4 with all options", eth(IPV4).v4(15, TCP, 0).tcp(SYN), Dial::V4),
        ("v4 in a VLAN", eth(VLAN).tag(7, IPV4).v4(5, TCP, 0).tcp(SYN), Dial::V4),
        (
            "v6 in two VLANs",
            eth(QINQ).tag(7, VLAN).tag(8, IPV6).v6(TCP).tcp(SYN),
            Dial::V6,
        ),
        ("plain v6", eth(IPV6).v6(TCP).tcp(SYN), Dial::V6),
        (
            "v6, hop-by-hop",
            eth(IPV6).v6(0).raw(&[TCP, 0, 0, 0, 0, 0, 0, 0]).tcp(SYN),
            Dial::V6,
        ),
        (
            "v6, long destination options",
            eth(IPV6).v6(60).raw(&[TCP, 2]).raw(&[0; 22]).tcp(SYN),
            Dial::V6,
        ),
        (
            "v6, first fragment",
            eth(IPV6).v6(44).raw(&[TCP, 0, 0, 1, 0, 0, 0, 9]).tcp(SYN),
            Dial::V6,
        ),
        (
            "v6, hop-by-hop, routing, destination",
            eth(IPV6)
                .v6(0)
                .raw(&[43, 0, 0, 0, 0, 0, 0, 0])
                .raw(&[60, 0, 0, 0, 0, 0, 0, 0])
                .raw(&[TCP, 0, 0, 0, 0, 0, 0, 0])
                .tcp(SYN),
            Dial::V6,
        ),
    ];
    for (name, packet, dial) in recorded {
        let records = run(&mut dp, &packet.bytes).with_context(|| name.to_owned())?;
        let near = SocketAddr::new(dial.near(), 40_000);
        let wanted: Vec<Seen> = [INGRESS, EGRESS].map(|d| (d, near, dial.backend(0), SYN)).into();
        assert_eq!(records.iter().map(seen).collect::<Vec<_>>(), wanted, "{name}");
    }
    let passed: [(&str, Packet); 9] = [
        ("UDP", eth(IPV4).v4(5, 17, 0).tcp(SYN)),
        ("v4, later fragment", eth(IPV4).v4(5, TCP, 0x2010).tcp(SYN)),
        ("v4 with a header of four words", eth(IPV4).v4(4, TCP, 0).tcp(SYN)),
        (
            "v6, later fragment",
            eth(IPV6).v6(44).raw(&[TCP, 0, 0, 8, 0, 0, 0, 9]).tcp(SYN),
        ),
        ("v6, no next header", eth(IPV6).v6(59).tcp(SYN)),
        ("v6, ICMP", eth(IPV6).v6(58).tcp(SYN)),
        (
            "three VLANs",
            eth(VLAN).tag(1, VLAN).tag(2, VLAN).tag(3, IPV4).v4(5, TCP, 0).tcp(SYN),
        ),
        ("ARP", eth(0x0806).raw(&[0; 28])),
        (
            "seven extension headers",
            (0..7)
                .fold(eth(IPV6).v6(0), |p, _| p.raw(&[0, 0, 0, 0, 0, 0, 0, 0]))
                .tcp(SYN),
        ),
    ];
    for (name, packet) in passed {
        assert_eq!(run(&mut dp, &packet.bytes)?, [], "{name}");
    }
    Ok(())
}

fn flags() -> Result<()> {
    let (_world, mut dp) = bench()?;
    for flags in 0..=u8::MAX {
        let packet = Packet::ethernet(IPV4).v4(5, TCP, 0).tcp(flags);
        let records = run(&mut dp, &packet.bytes)?;
        let begins_or_ends = flags & (tcp_flag::SYN | tcp_flag::FIN | tcp_flag::RST) != 0;
        assert_eq!(records.len(), if begins_or_ends { 2 } else { 0 }, "flags {flags:#x}");
        assert!(records.iter().all(|record| record.flags == flags));
    }
    Ok(())
}

fn truncated() -> Result<()> {
    let (_world, mut dp) = bench()?;
    for packet in [
        Packet::ethernet(IPV4).v4(7, TCP, 0).tcp(SYN),
        Packet::ethernet(VLAN)
            .tag(7, IPV6)
            .v6(0)
            .raw(&[TCP, 0, 0, 0, 0, 0, 0, 0])
            .tcp(SYN),
    ] {
        let whole = packet.bytes.len();
        // The kernel itself refuses less than an Ethernet header.
        for len in 14..whole {
            match run(&mut dp, &packet.bytes[..len]) {
                Ok(records) => assert_eq!(records, [], "{len} of {whole} bytes"),
                // And, on some kernels, an IP packet without its IP header.
                Err(error) => {
                    let refused = error
                        .downcast_ref::<std::io::Error>()
                        .and_then(std::io::Error::raw_os_error);
                    ensure!(refused == Some(libc::EINVAL) && len < 14 + 40, "{len} bytes: {error:#}");
                }
            }
        }
        assert_eq!(run(&mut dp, &packet.bytes)?.len(), 2);
    }
    Ok(())
}

fn garbage() -> Result<()> {
    let (_world, mut dp) = bench()?;
    // A fixed sequence of bytes without order: the same packets on every run.
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for i in 0..runner::scaled(3_000, 500) {
        let len = 60 + (random() % 200) as usize;
        let ether_type = [IPV4, IPV6, VLAN, QINQ][i % 4];
        let mut packet = Packet::ethernet(ether_type).bytes;
        packet.resize_with(len, || random() as u8);
        // Half of them look like IP to the parser, and lead it deeper.
        if i % 8 == 0 {
            packet[14] = 0x45 + (packet[14] & 0xa);
            packet[23] = TCP;
        }
        // Random addresses are nobody's.
        assert_eq!(run(&mut dp, &packet)?, [], "{packet:?}");
    }
    Ok(())
}

fn links_go() -> Result<()> {
    let world = World::enter(1)?;
    let dial = Dial::V4;
    let _server = world.serve(&[dial.backend(0)], Manner::Greet)?;
    let mut dp = Datapath::start(setup())?;
    dp.apply(&web(dial))?;
    dp.observe_interface("up")?;
    drop(TcpStream::connect(dial.backend(0))?);
    wait_at_least(&mut dp, 2)?;
    drop(dp);
    // The next owner finds nothing of it: one record a packet, not two.
    let mut dp = Datapath::start(setup())?;
    dp.apply(&web(dial))?;
    let before = dp.count(hook::TC, action::RECORDED)?;
    drop(TcpStream::connect(dial.backend(0))?);
    assert_eq!(dp.count(hook::TC, action::RECORDED)?, before, "nobody observes");
    dp.observe_interface("up")?;
    let mut stream = TcpStream::connect(dial.backend(0))?;
    client::read_name(&mut stream)?;
    let near = stream.local_addr()?;
    let packets = wait_at_least(&mut dp, 2)?;
    let syns = packets
        .iter()
        .map(seen)
        .filter(|(direction, from, _, flags)| (*direction, *from, *flags) == (EGRESS, near, SYN));
    assert_eq!(syns.count(), 1);
    Ok(())
}
