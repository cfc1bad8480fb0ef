//! What all cases share: addresses, Services, steps and what a step must have done.
//!
//! A step is one packet at one hook. It states the verdict, the packet afterwards and every counter of the programs that moved;
//! what it does not state must not have moved.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use anyhow::Result;
use lb_common::{
    abi::{TCP, UDP},
    addr::Port,
    counter::{action, hook},
    event::ConnRecord,
    flow::{Flow, TupleEntry, TupleKey},
    frontend::flag,
    select::{self, Tables},
};
use lb_tests::{
    packet::{self, Packet, check, flags, hex, same, tell},
    plane::{Device, Hook, Plane, Rules, Verdict, node_address},
    world::Dial,
};

/// A second of the flow clock.
pub(crate) const SECOND: u64 = 1_000_000_000;

/// A Service with the four kinds of frontends.
#[derive(Clone, Debug)]
pub(crate) struct Web {
    pub(crate) id: u32,
    pub(crate) proto: u8,
    /// The address inside the cluster.
    pub(crate) cluster: SocketAddr,
    /// A node's address and the node port.
    pub(crate) node: SocketAddr,
    pub(crate) external: SocketAddr,
    pub(crate) balancer: SocketAddr,
    /// The set of clients inside, and that of clients outside.
    pub(crate) sets: (u32, u32),
    /// Ids and addresses.
    pub(crate) backends: Vec<(u32, SocketAddr)>,
}

impl Web {
    /// The frontends that are served outside.
    pub(crate) fn outside(&self) -> [SocketAddr; 3] {
        [self.node, self.external, self.balancer]
    }

    /// Members of a set, with equal weights.
    pub(crate) fn members(&self, which: impl IntoIterator<Item = usize>) -> Vec<(u32, u16)> {
        which.into_iter().map(|i| (self.backends[i].0, 1)).collect()
    }
}

/// The programs, and what they are told.
pub(crate) struct Scene {
    pub(crate) plane: Plane,
    pub(crate) rules: Rules,
    pub(crate) dial: Dial,
}

/// What became of a packet.
#[must_use = "a step says what it expects"]
pub(crate) struct Seen {
    hook: Hook,
    went_in: Vec<u8>,
    bare: bool,
    pub(crate) verdict: Verdict,
    pub(crate) out: Vec<u8>,
    moved: BTreeMap<(u32, u32), u64>,
}

impl Scene {
    /// Enters the devices: two uplinks and two guests, each with an address of the node.
    pub(crate) fn new(dial: Dial) -> Result<Self> {
        let plane = Plane::enter()?;
        let mut rules = Rules::default();
        let both = |device| [node_address(device, false), node_address(device, true)];
        for device in [Device::Uplink, Device::Second] {
            rules.uplink(plane.index(device), &both(device));
        }
        for device in [Device::Guest, Device::OtherGuest] {
            rules.guest(plane.index(device), &both(device));
        }
        Ok(Self { plane, rules, dial })
    }

    /// An address of the family: one of 256 in one of 256 groups.
    pub(crate) fn address(&self, group: u8, n: u8) -> IpAddr {
        match self.dial {
            Dial::V6 => Ipv6Addr::new(0x2001, 0xdb8, 0xff, u16::from(group), 0, 0, 0, u16::from(n)).into(),
            Dial::V4 | Dial::Mapped => Ipv4Addr::new(10, group, 7, n).into(),
        }
    }

    /// A client outside.
    pub(crate) fn client(&self, n: u8) -> SocketAddr {
        SocketAddr::new(self.address(200, n), 40_000)
    }

    /// A guest, whose sockets nobody sees.
    pub(crate) fn guest(&self, n: u8) -> SocketAddr {
        SocketAddr::new(self.address(20, n), 45_000)
    }

    /// The node's own address on a device.
    pub(crate) fn node(&self, device: Device) -> IpAddr {
        node_address(device, self.dial == Dial::V6)
    }

    /// A Service of policy Cluster: flows from outside leave the uplink with the node's own source.
    pub(crate) fn serve(&mut self, id: u8, proto: u8, backends: usize) -> Result<Web> {
        let number = u16::from(id);
        let port = 80 + number;
        let web = Web {
            id: u32::from(id),
            proto,
            cluster: SocketAddr::new(self.address(96, id), port),
            node: SocketAddr::new(self.node(Device::Uplink), 30_000 + number),
            external: SocketAddr::new(self.address(97, id), port),
            balancer: SocketAddr::new(self.address(98, id), port),
            sets: (u32::from(id) * 2, u32::from(id) * 2 + 1),
            backends: (0..backends)
                .map(|i| {
                    let end = SocketAddr::new(self.address(id, 10 + i as u8), 8_000 + number);
                    (u32::from(id) * 16 + 1 + i as u32, end)
                })
                .collect(),
        };
        for &(backend, end) in &web.backends {
            self.rules.add_backend(backend, web.id, end, proto);
        }
        let all = web.members(0..backends);
        self.rules.publish(web.sets.0, &all);
        self.rules.publish(web.sets.1, &all);
        self.rules.frontend(web.cluster, proto, web.id, web.sets, 0);
        for (kind, end) in (1..).zip(web.outside()) {
            let flags = flag::OUTSIDE | flag::MASQUERADE_OUTSIDE | kind << flag::KIND_SHIFT;
            self.rules.frontend(end, proto, web.id, web.sets, flags);
        }
        self.write()?;
        Ok(web)
    }

    /// Changes the flags of a frontend.
    pub(crate) fn change_flags(&mut self, end: SocketAddr, proto: u8, change: impl FnOnce(&mut u32)) -> Result<()> {
        let key = lb_tests::plane::key(end, proto);
        change(&mut self.rules.frontends.get_mut(&key).expect("a frontend").flags);
        self.write()
    }

    /// Publishes a set anew.
    pub(crate) fn publish(&mut self, set: u32, members: &[(u32, u16)]) -> Result<()> {
        self.rules.publish(set, members);
        self.write()
    }

    /// Writes the rules to the maps.
    pub(crate) fn write(&mut self) -> Result<()> {
        self.plane.write(&self.rules)
    }

    /// Lets time pass.
    pub(crate) fn pass(&mut self, nanoseconds: u64) {
        let mut settings = self.plane.settings();
        settings.clock_offset_ns += nanoseconds;
        self.plane.set_settings(settings);
    }

    /// Makes the flow table small.
    pub(crate) fn shrink(&mut self, slots: u32) {
        let mut settings = self.plane.settings();
        settings.flow_slots = slots;
        self.plane.set_settings(settings);
    }

    /// The backend that a set gives to a client's packet.
    pub(crate) fn choice(&self, set: u32, client: SocketAddr, vip: SocketAddr, proto: u8) -> (u32, SocketAddr) {
        let word = self.rules.word(set);
        let header = self.rules.list(word.offset()).expect("a set with members");
        let hash = select::packet_hash(
            client.ip().into(),
            Port::new(client.port()),
            vip.ip().into(),
            Port::new(vip.port()),
            proto,
        );
        let id = select::pick(&self.rules, word, header, hash).expect("a member").backend;
        let backend = &self.rules.backends[&id];
        (id, lb_tests::plane::end(backend.addr, backend.port))
    }

    /// A packet comes in.
    pub(crate) fn comes(&mut self, device: Device, packet: &Packet) -> Seen {
        self.run(Hook::Ingress, device, &packet.bytes())
    }

    /// A packet goes out.
    pub(crate) fn leaves(&mut self, device: Device, packet: &Packet) -> Seen {
        self.run(Hook::Egress, device, &packet.bytes())
    }

    /// Bytes at a hook.
    pub(crate) fn run(&mut self, hook: Hook, device: Device, bytes: &[u8]) -> Seen {
        self.plane.forget_counters_of_programs().expect("counters");
        let (verdict, out) = self
            .plane
            .run(hook, device, bytes)
            .expect("a packet that the kernel takes");
        Seen {
            hook,
            went_in: bytes.to_vec(),
            bare: false,
            verdict,
            out,
            moved: self.plane.moved().expect("counters"),
        }
    }

    /// Bytes at a hook of a device without link headers.
    pub(crate) fn run_bare(&mut self, hook: Hook, device: Device, bytes: &[u8]) -> Seen {
        self.plane.forget_counters_of_programs().expect("counters");
        let (verdict, out) = self
            .plane
            .run_bare(hook, device, bytes)
            .expect("a packet that the kernel takes");
        Seen {
            hook,
            went_in: bytes.to_vec(),
            bare: true,
            verdict,
            out,
            moved: self.plane.moved().expect("counters"),
        }
    }

    /// The flow of a client with a frontend, and its entry.
    pub(crate) fn flow_of(&self, one: SocketAddr, other: SocketAddr, proto: u8) -> Option<(TupleEntry, Flow)> {
        let entry = self.plane.tuple(&tuple(one, other, proto))?;
        Some((entry, self.plane.flow(entry.slot)))
    }

    /// The only record that was written since the last call.
    pub(crate) fn record(&mut self) -> Result<ConnRecord> {
        let records = self.plane.records()?;
        anyhow::ensure!(records.len() == 1, "one record is wanted: {records:#?}");
        Ok(records[0])
    }

    /// A client's SYN that begins a flow to the backend it is given; returns that backend.
    pub(crate) fn begin(&mut self, client: SocketAddr, vip: SocketAddr) -> SocketAddr {
        let syn = syn(client, vip);
        let seen = self.comes(Device::Uplink, &syn);
        let (entry, flow) = self.flow_of(client, vip, TCP).expect("a flow");
        assert_eq!(entry.serial(), flow.serial());
        let backend = lb_tests::plane::end(flow.backend, flow.backend_port);
        seen.becomes(&syn.to(backend), &[action::NEW_FLOW, action::TRANSLATED]);
        backend
    }

    /// The three packets that open a connection.
    pub(crate) fn open(&mut self, client: SocketAddr, vip: SocketAddr) -> SocketAddr {
        let backend = self.begin(client, vip);
        self.answer(client, vip, backend, flags::SYN | flags::ACK, &[action::TRANSLATED]);
        self.say(client, vip, backend, flags::ACK, &[action::TRANSLATED]);
        backend
    }

    /// Both FINs of a connection; the record is left to be read.
    pub(crate) fn close(&mut self, client: SocketAddr, vip: SocketAddr, backend: SocketAddr) {
        let fin = flags::FIN | flags::ACK;
        self.say(client, vip, backend, fin, &[action::TRANSLATED]);
        self.answer(client, vip, backend, fin, &[action::TRANSLATED, action::RECORDED]);
        self.say(client, vip, backend, flags::ACK, &[action::TRANSLATED]);
    }

    /// A packet of a client outside, on a flow whose backend is known.
    pub(crate) fn say(&mut self, client: SocketAddr, vip: SocketAddr, backend: SocketAddr, flags: u8, counts: &[u32]) {
        let packet = packet::tcp(client, vip, flags);
        self.comes(Device::Uplink, &packet)
            .becomes(&packet.clone().to(backend), counts);
    }

    /// A packet of a backend to a client outside.
    pub(crate) fn answer(
        &mut self,
        client: SocketAddr,
        vip: SocketAddr,
        backend: SocketAddr,
        flags: u8,
        counts: &[u32],
    ) {
        let packet = packet::tcp(backend, client, flags);
        self.leaves(Device::Uplink, &packet)
            .becomes(&packet.clone().from(vip), counts);
    }
}

/// A client's SYN.
pub(crate) fn syn(client: SocketAddr, vip: SocketAddr) -> Packet {
    packet::tcp(client, vip, flags::SYN)
}

/// A client's first packet of a protocol.
pub(crate) fn hello(client: SocketAddr, vip: SocketAddr, proto: u8) -> Packet {
    match proto {
        UDP => packet::udp(client, vip, b"question"),
        _ => syn(client, vip),
    }
}

/// A backend's first packet of a protocol.
pub(crate) fn reply(backend: SocketAddr, client: SocketAddr, proto: u8) -> Packet {
    match proto {
        UDP => packet::udp(backend, client, b"a longer answer"),
        _ => packet::tcp(backend, client, flags::SYN | flags::ACK),
    }
}

/// The key of what two ends send each other.
pub(crate) fn tuple(one: SocketAddr, other: SocketAddr, proto: u8) -> TupleKey {
    TupleKey::between(
        one.ip().into(),
        Port::new(one.port()),
        other.ip().into(),
        Port::new(other.port()),
        proto,
    )
}

impl Seen {
    /// The packet goes on as another.
    #[track_caller]
    pub(crate) fn becomes(self, packet: &Packet, counts: &[u32]) {
        let wanted = packet.bytes();
        self.judge(Verdict::Next, Some(&wanted), counts);
    }

    /// The packet goes on as it was.
    #[track_caller]
    pub(crate) fn untouched(self, counts: &[u32]) {
        let wanted = self.went_in.clone();
        assert_eq!(self.out, wanted, "not a byte may change: {}", self.told());
        self.judge(Verdict::Next, Some(&wanted), counts);
    }

    /// The packet ends here, without a word.
    #[track_caller]
    pub(crate) fn dropped(self, counts: &[u32]) {
        self.judge(Verdict::Drop, None, counts);
    }

    /// The packet is answered, to whoever the link says has sent it.
    #[track_caller]
    pub(crate) fn answered(self, packet: &Packet, counts: &[u32]) {
        let mut wanted = packet.bytes();
        if !self.bare {
            let (to, from) = wanted[..12].split_at_mut(6);
            to.swap_with_slice(from);
        }
        self.judge(Verdict::Answer, Some(&wanted), counts);
        let faults = check(&self.out, self.bare);
        assert!(faults.is_empty(), "{}", self.told());
    }

    /// Counters alone, whatever came out.
    #[track_caller]
    pub(crate) fn counted(self, counts: &[u32]) {
        self.judge(self.verdict, None, counts);
    }

    /// What came out, for steps whose packet is not known beforehand; verdict and counters are as stated.
    #[track_caller]
    pub(crate) fn passed(self, counts: &[u32]) -> Vec<u8> {
        self.judge(Verdict::Next, None, counts);
        self.out
    }

    #[track_caller]
    fn judge(&self, verdict: Verdict, wanted: Option<&[u8]>, counts: &[u32]) {
        let mut counted: BTreeMap<(u32, u32), u64> = BTreeMap::new();
        for action in counts {
            *counted.entry((self.hook.number(), *action)).or_default() += 1;
        }
        let moved_as_wanted = self.moved == counted;
        let packet_as_wanted = wanted.is_none_or(|wanted| same(&self.out, wanted, self.bare));
        if self.verdict != verdict || !moved_as_wanted || !packet_as_wanted {
            let wanted = wanted.map_or("(any packet)".to_owned(), |bytes| {
                format!("{}{}", tell(bytes, self.bare), hex(bytes))
            });
            panic!(
                "{}\n wanted {verdict:?} {:?}\n        {wanted}\n   seen {:?} {:?}",
                self.told(),
                names(&counted),
                self.verdict,
                names(&self.moved),
            );
        }
        if self.verdict == Verdict::Next && check(&self.went_in, self.bare).is_empty() {
            let mut faults = check(&self.out, self.bare);
            // Nobody looks at the transport checksum of a packet that comes back in an error: it may be cut off.
            faults.retain(|fault| !matches!(fault.what, "inner TCP" | "inner UDP"));
            assert!(faults.is_empty(), "{}", self.told());
        }
    }

    fn told(&self) -> String {
        format!(
            "{:?}\n     in {}\n    out {}{}",
            self.hook,
            tell(&self.went_in, self.bare),
            tell(&self.out, self.bare),
            hex(&self.out)
        )
    }
}

/// Counters by their names.
fn names(moved: &BTreeMap<(u32, u32), u64>) -> Vec<String> {
    moved
        .iter()
        .map(|((hook, action), count)| {
            format!(
                "{}/{}: {count}",
                hook::NAMES[*hook as usize],
                action::NAMES[*action as usize]
            )
        })
        .collect()
}
