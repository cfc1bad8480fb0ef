//! What the kernel tells: connection records from the ring buffer, and readings of counters.
//!
//! The reading (IO) is here; what records mean is `analysis`. Memory is bounded: the reuse tracker by its capacity, the
//! windows and histograms by the number of Services with traffic, none of which outlives its Service.

pub mod audience;
pub mod clients;
pub mod decode;
mod directory;
pub mod events;
pub mod flows;
pub mod ring;
pub mod sets;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, SystemTime},
};

use lb_common::{
    addr::{Addr, Port},
    backend::ServiceCounters,
    event::{ConnRecord, PacketRecord, mark, outcome, tcp_flag},
    frontend::FrontendKey,
};

use crate::{
    analysis::{
        calls::{self, Calls},
        history::Histories,
        passage::{Ends, Packet, Passages},
        ports::{Destination, Ports},
        reuse::{self, ClientTuple, Outcome, ReuseConfig, ReuseCounts, ReuseTracker},
        stickiness::{Client, Stickiness},
        window::Window,
    },
    metrics::{Buckets, families::CONNECT_EDGES},
    view::{EventView, Origin, Timestamp},
};
use audience::Audience;
use clients::Caller;
use decode::{DecodeError, Record};
pub use directory::{Directory, UsableBackends};
use events::Followers;
use sets::{AlarmChange, Sample, Traffic, Watch};

/// Connections through observed interfaces that are followed at once.
const MAX_PASSAGES: usize = 65_536;
/// Tuples with a backend in them that are remembered.
const MAX_BACKEND_TUPLES: usize = 16_384;
/// Clients whose stickiness is followed.
const MAX_CLIENTS: usize = 16_384;
/// Closed connections whose ports are held to be in use.
const MAX_WAITING_PORTS: usize = 65_536;

/// Network namespaces whose Pod is remembered before those without remembered calls are forgotten: twice as many as there can
/// be calls, so that it happens seldom and always makes room.
const MAX_HOMES: usize = 2 * calls::DEFAULT_CAPACITY;

/// A set by (Service id, set id).
pub type SetKey = (u32, u32);

/// All that is kept of what the kernel told.
#[derive(Debug)]
pub struct Observation {
    reuse: ReuseTracker,
    backend_reuse: ReuseTracker,
    latencies: HashMap<u32, Buckets>,
    sets: BTreeMap<SetKey, Watch>,
    histories: Histories<SetKey>,
    passages: Passages,
    directory: Arc<Directory>,
    stickiness: Stickiness,
    ports: Ports,
    calls: Calls<Client>,
    /// Whose network namespaces are, by cookie.
    homes: HashMap<u64, Caller>,
    /// Those who follow events.
    pub followers: Followers,
    /// Records taken.
    pub records: u64,
    /// Packet records taken.
    pub packets: u64,
    /// Bytes that were no record.
    pub malformed: u64,
}

impl Observation {
    /// Nothing seen yet; `horizon_ns` is the longest interval that counts as tuple reuse.
    pub fn new(horizon_ns: u64, directory: Arc<Directory>) -> Self {
        Self {
            reuse: ReuseTracker::new(ReuseConfig {
                horizon_ns,
                ..ReuseConfig::default()
            }),
            backend_reuse: ReuseTracker::new(ReuseConfig {
                horizon_ns,
                capacity: MAX_BACKEND_TUPLES,
                ..ReuseConfig::default()
            }),
            latencies: HashMap::new(),
            sets: BTreeMap::new(),
            histories: Histories::new(monotonic_ns()),
            passages: Passages::new(MAX_PASSAGES),
            directory,
            stickiness: Stickiness::new(MAX_CLIENTS),
            ports: Ports::new(MAX_WAITING_PORTS),
            calls: Calls::default(),
            homes: HashMap::new(),
            followers: Followers::default(),
            records: 0,
            packets: 0,
            malformed: 0,
        }
    }

    /// Takes the bytes of one record.
    pub fn take(&mut self, bytes: &[u8], usable: &UsableBackends) {
        match decode::record(bytes) {
            Ok(Record::Connection(record)) => self.connection(&record, usable),
            Ok(Record::Packet(record)) => self.packet(&record, usable),
            Err(error) => self.count_malformed(error),
        }
    }

    fn count_malformed(&mut self, error: DecodeError) {
        if self.malformed == 0 {
            tracing::error!(%error, "the ring buffer holds something that is no record; it is counted and left out");
        }
        self.malformed += 1;
    }

    fn connection(&mut self, record: &ConnRecord, usable: &UsableBackends) {
        self.records += 1;
        let (service, backend) = (record.service_id, record.backend_id);
        let direct = self.is_direct(record);
        if !direct && record.outcome == outcome::ESTABLISHED && record.established_ns > record.start_ns {
            let seconds = (record.established_ns - record.start_ns) as f64 / 1e9;
            self.latencies
                .entry(service)
                .or_insert_with(|| Buckets::new(CONNECT_EDGES))
                .observe(seconds);
        }
        let client = Client {
            netns: record.netns_cookie,
            address: record.client.octets(),
        };
        self.house(&client);
        let outside = record.marks & mark::OUTSIDE != 0;
        self.calls.note(
            self.as_caller(client, outside),
            service,
            record.outcome != outcome::ESTABLISHED,
            record.end_ns,
        );
        if !self.followers.is_empty() {
            self.tell_connection(record, &client);
        }
        // A connection without a source port sent no packet: it used no tuple.
        if record.client_port.0 == 0 {
            return;
        }
        let client_port = record.client_port.get();
        // Who dials an endpoint itself has chosen it: that says nothing of how others choose for it.
        if backend != 0 && !direct {
            self.stickiness
                .push(service, client, client_port, backend, record.start_ns);
        }
        let destination = Destination {
            address: record.vip.octets(),
            port: record.vip_port.get(),
            protocol: record.proto,
        };
        // The range of ports that is measured is this node's; whoever is outside has one of its own.
        if !outside {
            // A socket's state has no namespace: for the ports, the address alone is the client.
            let on_its_own = Client { netns: 0, ..client };
            self.ports
                .ended(service, on_its_own, destination, client_port, record.end_ns);
        }
        self.push_use(
            reuse::ConnRecord {
                start_ns: record.start_ns,
                end_ns: record.end_ns,
                tuple: ClientTuple {
                    netns: record.netns_cookie,
                    client: client.address,
                    vip: destination.address,
                    client_port,
                    vip_port: destination.port,
                    protocol: record.proto,
                },
                service,
                backend,
            },
            direct,
            usable,
        );
    }

    /// As whom a client calls: those outside that are no Pod of this node are one caller, so that the world outside does not
    /// drive the node's own clients out of the memory.
    fn as_caller(&self, client: Client, outside: bool) -> Client {
        if outside && self.directory.caller(address(client.address)).is_none() {
            Client::OUTSIDE
        } else {
            client
        }
    }

    /// Whether a connection was dialled to an endpoint's own address.
    fn is_direct(&self, record: &ConnRecord) -> bool {
        record.backend_id != 0
            && (self.directory)
                .find(&FrontendKey::new(record.vip, record.vip_port, record.proto))
                .is_some_and(|(_, backend)| backend != 0)
    }

    /// A packet of an observed interface; the connections that it ends are tuple uses like those of sockets here.
    fn packet(&mut self, record: &PacketRecord, usable: &UsableBackends) {
        self.packets += 1;
        let at = |addr: Addr, port: Port| SocketAddr::new(addr.into(), port.get());
        let packet = Packet {
            src: at(record.src, record.src_port),
            dst: at(record.dst, record.dst_port),
            syn: record.flags & tcp_flag::SYN != 0,
            ack: record.flags & tcp_flag::ACK != 0,
            fin: record.flags & tcp_flag::FIN != 0,
            rst: record.flags & tcp_flag::RST != 0,
            time_ns: record.time_ns,
        };
        let Some(passage) = self.passages.take(&packet) else {
            return;
        };
        let Ends { client, server } = passage.ends;
        let key = FrontendKey::new(server.ip().into(), Port::new(server.port()), record.proto);
        let Some((service, backend)) = self.directory.find(&key) else {
            return;
        };
        self.push_use(
            reuse::ConnRecord {
                start_ns: passage.start_ns,
                end_ns: passage.end_ns,
                tuple: ClientTuple {
                    netns: 0,
                    client: Addr::from(client.ip()).octets(),
                    vip: Addr::from(server.ip()).octets(),
                    client_port: client.port(),
                    vip_port: server.port(),
                    protocol: record.proto,
                },
                service,
                backend,
            },
            backend != 0,
            usable,
        );
    }

    /// Notes the use of a tuple: one with a frontend in it, or (`direct`) one with a backend. The latter always meets the same
    /// backend again, and is counted apart.
    fn push_use(&mut self, used: reuse::ConnRecord, direct: bool, usable: &UsableBackends) {
        if direct {
            self.backend_reuse.push(used, |id, _| usable.get(id));
            return;
        }
        self.reuse.push(used, |id, _| usable.get(id));
        self.tell_reuses();
    }

    /// Connections through observed interfaces: followed now, and dropped for want of room.
    pub fn passages(&self) -> (usize, u64) {
        (self.passages.len(), self.passages.dropped())
    }

    /// Says what time it is, by the kernel's monotonic clock: records that were held back for order are judged.
    pub fn advance(&mut self, now_ns: u64, usable: &UsableBackends) {
        self.reuse.advance(now_ns, |id, _| usable.get(id));
        self.backend_reuse.advance(now_ns, |id, _| usable.get(id));
        self.tell_reuses();
        self.stickiness.advance(now_ns);
        self.ports.advance(now_ns);
    }

    /// Takes a reading of one set's members; returns the alarms that begin or end.
    pub fn read_set(
        &mut self,
        key: SetKey,
        now_ns: u64,
        traffic: Traffic,
        audience: Audience,
        service: &ServiceCounters,
        samples: &[Sample],
    ) -> Vec<AlarmChange> {
        let watch = self.sets.entry(key).or_default();
        if watch.is_idle(now_ns, audience, samples) {
            return Vec::new();
        }
        let nothing = ReuseCounts::default();
        let reuse = self.reuse.service(key.0).unwrap_or(&nothing);
        let mut changes = watch.read(now_ns, traffic, audience, service, samples, reuse);
        for change in &mut changes {
            if change.raised {
                change.alarm.endpoint = self.directory.backend(change.alarm.backend);
                watch.locate(change.alarm.backend, change.alarm.endpoint);
            }
        }
        if self.histories.follows(&key) {
            let imbalance = watch.imbalance();
            let dispersion = imbalance.dispersion.filter(|_| !imbalance.insufficient);
            self.histories
                .read(key, now_ns, &watch.last_reading(), &watch.open_counts(), dispersion);
        }
        changes
    }

    /// Says how many connections each client has open towards each destination, in place of what was said before.
    pub fn set_open_ports(&mut self, open: &HashMap<(u32, Client, Destination), u64>) {
        let known: Vec<_> = (self.ports.uses(1))
            .filter(|used| used.open > 0)
            .map(|used| (used.service, used.client, used.destination))
            .filter(|key| !open.contains_key(key))
            .collect();
        for (service, client, destination) in known {
            self.ports.set_open(service, client, destination, 0);
        }
        for ((service, client, destination), count) in open {
            self.ports.set_open(*service, *client, *destination, *count);
        }
    }

    /// The watches of a Service, by set id.
    pub fn watches(&self, service_id: u32) -> impl Iterator<Item = (u32, &Watch)> {
        self.sets
            .range((service_id, 0)..=(service_id, u32::MAX))
            .map(|((_, set), watch)| (*set, watch))
    }

    /// When the youngest of the alarms that hold was raised, nanoseconds of the monotonic clock; 0 without any.
    pub fn last_raised_ns(&self) -> u64 {
        let alarms = self.sets.values().flat_map(Watch::alarms);
        alarms.map(|alarm| alarm.raised_ns).max().unwrap_or(0)
    }

    /// The watch of a set.
    pub fn watch(&self, key: SetKey) -> Option<&Watch> {
        self.sets.get(&key)
    }

    /// The watch of a set, to be told why its endpoints starve.
    pub fn watch_mut(&mut self, key: SetKey) -> Option<&mut Watch> {
        self.sets.get_mut(&key)
    }

    /// The windows of a Service, by set id.
    pub fn windows(&self, service_id: u32) -> impl Iterator<Item = (u32, &Window)> {
        self.watches(service_id).map(|(id, watch)| (id, watch.window()))
    }

    /// The sets over time.
    pub fn histories(&self) -> &Histories<SetKey> {
        &self.histories
    }

    /// Connect latencies of a Service.
    pub fn latencies(&self, service_id: u32) -> Option<&Buckets> {
        self.latencies.get(&service_id)
    }

    /// The tuple tracker.
    pub fn reuse(&self) -> &ReuseTracker {
        &self.reuse
    }

    /// The tracker of tuples with a backend in them.
    pub fn backend_reuse(&self) -> &ReuseTracker {
        &self.backend_reuse
    }

    /// How faithful clients are.
    pub fn stickiness(&self) -> &Stickiness {
        &self.stickiness
    }

    /// What is used of the port range.
    pub fn ports(&self) -> &Ports {
        &self.ports
    }

    /// Who calls whom.
    pub fn calls(&self) -> &Calls<Client> {
        &self.calls
    }

    /// Who a client is, where the node's Pods have told it.
    ///
    /// A network namespace is never another Pod's, while an address soon is. So the namespace counts first: it names a client
    /// whose Pod is gone, and one whose connection failed before it had an address.
    pub fn caller(&self, client: &Client) -> Option<Caller> {
        if *client == Client::OUTSIDE {
            return Some(Caller::Outside);
        }
        let home = self.homes.get(&client.netns).cloned();
        home.or_else(|| self.directory.caller(address(client.address)))
    }

    /// Notes whose network namespace a client's is. What the Pods say now corrects what they said before they knew better.
    fn house(&mut self, client: &Client) {
        // Without a cookie it is no namespace at all.
        if client.netns == 0 {
            return;
        }
        let Some(caller) = self.directory.caller(address(client.address)) else {
            return;
        };
        if self.homes.len() >= MAX_HOMES && !self.homes.contains_key(&client.netns) {
            let calling: BTreeSet<u64> = self.calls.iter().map(|(client, _, _)| client.netns).collect();
            self.homes.retain(|netns, _| calling.contains(netns));
        }
        self.homes.insert(client.netns, caller);
    }

    /// Forgets Services that are gone.
    pub fn keep_services(&mut self, keep: impl Fn(u32) -> bool) {
        let mut gone: HashSet<u32> = self.reuse.services().map(|(id, _)| id).collect();
        gone.extend(self.backend_reuse.services().map(|(id, _)| id));
        gone.extend(self.calls.iter().map(|(_, id, _)| id));
        gone.extend(self.latencies.keys());
        gone.extend(self.sets.keys().map(|(id, _)| id));
        gone.retain(|id| !keep(*id));
        self.forget_services(&gone);
    }

    /// Forgets all that was counted of these Services, before their ids are given to others.
    pub fn forget_services(&mut self, gone: &HashSet<u32>) {
        if gone.is_empty() {
            return;
        }
        self.latencies.retain(|id, _| !gone.contains(id));
        self.sets.retain(|(id, _), _| !gone.contains(id));
        self.histories.retain(|(id, _)| !gone.contains(id));
        // Of the others most have had no connection, and cost nothing here.
        let known: HashSet<u32> = (self.reuse.services().chain(self.backend_reuse.services()))
            .map(|(id, _)| id)
            .chain(self.calls.iter().map(|(_, id, _)| id))
            .filter(|id| gone.contains(id))
            .collect();
        for id in known {
            self.reuse.forget_service(id);
            self.backend_reuse.forget_service(id);
            self.stickiness.forget_service(id);
            self.ports.forget_service(id);
            self.calls.forget_service(id);
        }
    }

    /// Forgets sets that are no more; returns the alarms that end with them.
    pub fn keep_sets(&mut self, keep: &HashSet<SetKey>) -> Vec<(SetKey, AlarmChange)> {
        self.histories.retain(|key| keep.contains(key));
        let gone = self.sets.extract_if(.., |key, _| !keep.contains(key));
        gone.flat_map(|(key, watch)| watch.end().into_iter().map(move |change| (key, change)))
            .collect()
    }

    fn tell_connection(&mut self, record: &ConnRecord, by: &Client) {
        let Some(name) = self.directory.service(record.service_id) else {
            return;
        };
        if !self.followers.want(&name) {
            return;
        }
        let at = |addr: Addr, port: Port| SocketAddr::new(addr.into(), port.get());
        let seconds = |from: u64, to: u64| to.saturating_sub(from) as f64 / 1e9;
        let event = EventView::Connection {
            time: wall(record.end_ns),
            namespace: name.namespace.to_string(),
            service: name.name.to_string(),
            client: at(record.client, record.client_port),
            origin: if record.marks & mark::OUTSIDE != 0 {
                Origin::Outside
            } else {
                Origin::Node
            },
            workload: self.caller(by).and_then(|caller| caller.workload()),
            frontend: at(record.vip, record.vip_port),
            protocol: if record.proto == lb_common::abi::UDP {
                "UDP"
            } else {
                "TCP"
            }
            .to_owned(),
            backend: self.directory.backend(record.backend_id),
            outcome: (outcome::NAMES.get(usize::from(record.outcome)).copied())
                .unwrap_or("other")
                .to_owned(),
            errno: (record.errno != 0).then_some(record.errno),
            connect_seconds: (record.established_ns > 0).then(|| seconds(record.start_ns, record.established_ns)),
            duration_seconds: seconds(record.start_ns, record.end_ns),
        };
        self.followers.tell(&name, &event);
    }

    fn tell_reuses(&mut self) {
        self.reuse.report(!self.followers.is_empty());
        for judged in self.reuse.take_reported() {
            let Some(name) = self.directory.service(judged.record.service) else {
                continue;
            };
            let (interval_ns, outcome) = match judged.outcome {
                Outcome::SameBackend(ns) => (ns, "same_backend"),
                Outcome::Moved(ns) => (ns, "moved"),
                Outcome::StaleBackend(ns) => (ns, "stale_backend"),
                Outcome::UnknownBackend(ns) => (ns, "unknown_backend"),
                Outcome::First | Outcome::Overlap | Outcome::Late => continue,
            };
            let tuple = judged.record.tuple;
            let event = EventView::Reuse {
                time: wall(judged.record.end_ns),
                namespace: name.namespace.to_string(),
                service: name.name.to_string(),
                client: SocketAddr::new(address(tuple.client), tuple.client_port),
                // A client without a namespace is known by its packets alone.
                origin: if tuple.netns == 0 {
                    Origin::Outside
                } else {
                    Origin::Node
                },
                interval_seconds: interval_ns as f64 / 1e9,
                outcome: outcome.to_owned(),
            };
            self.followers.tell(&name, &event);
        }
    }
}

/// The wall clock's time of a moment of the monotonic clock.
pub fn wall(at_ns: u64) -> Timestamp {
    let ago = Duration::from_nanos(monotonic_ns().saturating_sub(at_ns));
    Timestamp::from_system(SystemTime::now().checked_sub(ago).unwrap_or(SystemTime::UNIX_EPOCH))
}

/// An address from its 16 bytes, IPv4 unmapped.
pub fn address(octets: [u8; 16]) -> IpAddr {
    IpAddr::from(octets).to_canonical()
}

/// Now, by the clock that records carry (`CLOCK_MONOTONIC`, nanoseconds).
pub fn monotonic_ns() -> u64 {
    use nix::time::{ClockId, clock_gettime};
    clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(0, |t| t.tv_sec() as u64 * 1_000_000_000 + t.tv_nsec() as u64)
}
