//! What the kernel tells: connection records from the ring buffer, and readings of counters.
//!
//! The reading (IO) is here; what records mean is `analysis`. Memory is bounded: the reuse tracker by its capacity, the
//! windows and histograms by the number of Services with traffic, none of which outlives its Service.

pub mod decode;
pub mod ring;

use std::{
    collections::{BTreeMap, HashMap},
    net::SocketAddr,
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicU64, Ordering},
    },
};

use lb_common::{
    addr::{Addr, Port},
    event::{ConnRecord, PacketRecord, outcome, tcp_flag},
    frontend::FrontendKey,
};

use crate::analysis::{
    passage::{Ends, Packet, Passages},
    reuse::{self, ClientTuple, ReuseConfig, ReuseTracker},
    window::{Reading, Window},
};
use crate::metrics::{Buckets, families::CONNECT_EDGES};
use decode::{DecodeError, Record};

/// How far the windows of evenness look back, in nanoseconds.
pub const WINDOW_NS: u64 = 60_000_000_000;
/// The most readings a window keeps: one a second.
const WINDOW_READINGS: usize = 60;

/// Which backend ids may get new connections; written by the reconciler, read while records are judged.
#[derive(Debug)]
pub struct UsableBackends {
    words: Box<[AtomicU64]>,
}

impl UsableBackends {
    /// Room for ids `0..capacity`.
    pub fn new(capacity: u32) -> Self {
        Self {
            words: (0..capacity.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Says whether a backend may get new connections.
    pub fn set(&self, id: u32, usable: bool) {
        if let Some(word) = self.words.get(id as usize / 64) {
            let bit = 1u64 << (id % 64);
            if usable {
                word.fetch_or(bit, Ordering::Relaxed);
            } else {
                word.fetch_and(!bit, Ordering::Relaxed);
            }
        }
    }

    /// Whether a backend may get new connections.
    pub fn get(&self, id: u32) -> bool {
        self.words
            .get(id as usize / 64)
            .is_some_and(|word| word.load(Ordering::Relaxed) & (1 << (id % 64)) != 0)
    }
}

/// Whose address is whose, for the packets of observed interfaces: (Service id, backend id; 0 for a frontend).
#[derive(Debug, Default)]
pub struct Directory {
    entries: RwLock<HashMap<FrontendKey, (u32, u32)>>,
}

impl Directory {
    /// Files an address.
    pub fn put(&self, key: FrontendKey, service_id: u32, backend_id: u32) {
        self.write().insert(key, (service_id, backend_id));
    }

    /// Forgets an address, if it still is this Service's.
    pub fn remove(&self, key: &FrontendKey, service_id: u32) {
        let mut entries = self.write();
        if entries.get(key).is_some_and(|(owner, _)| *owner == service_id) {
            entries.remove(key);
        }
    }

    fn find(&self, key: &FrontendKey) -> Option<(u32, u32)> {
        self.entries
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(key)
            .copied()
    }

    fn write(&self) -> std::sync::RwLockWriteGuard<'_, HashMap<FrontendKey, (u32, u32)>> {
        // Each entry is written whole: a panic elsewhere leaves nothing half done.
        self.entries.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Connections through observed interfaces that are followed at once.
const MAX_PASSAGES: usize = 65_536;

/// All that is kept of what the kernel told.
#[derive(Debug)]
pub struct Observation {
    reuse: ReuseTracker,
    latencies: HashMap<u32, Buckets>,
    windows: HashMap<u32, BTreeMap<u32, Window>>,
    passages: Passages,
    directory: Arc<Directory>,
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
            latencies: HashMap::new(),
            windows: HashMap::new(),
            passages: Passages::new(MAX_PASSAGES),
            directory,
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
        if record.outcome == outcome::ESTABLISHED && record.established_ns > record.start_ns {
            let seconds = (record.established_ns - record.start_ns) as f64 / 1e9;
            self.latencies
                .entry(record.service_id)
                .or_insert_with(|| Buckets::new(CONNECT_EDGES))
                .observe(seconds);
        }
        // A connection without a source port sent no packet: it used no tuple.
        if record.client_port.0 == 0 {
            return;
        }
        self.reuse.push(
            reuse::ConnRecord {
                start_ns: record.start_ns,
                end_ns: record.end_ns,
                tuple: ClientTuple {
                    netns: record.netns_cookie,
                    client: octets(record.client),
                    vip: octets(record.vip),
                    client_port: record.client_port.get(),
                    vip_port: record.vip_port.get(),
                    protocol: record.proto,
                },
                service: record.service_id,
                backend: record.backend_id,
            },
            |id, _| usable.get(id),
        );
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
        self.reuse.push(
            reuse::ConnRecord {
                start_ns: passage.start_ns,
                end_ns: passage.end_ns,
                tuple: ClientTuple {
                    netns: 0,
                    client: octets(client.ip().into()),
                    vip: octets(server.ip().into()),
                    client_port: client.port(),
                    vip_port: server.port(),
                    protocol: record.proto,
                },
                service,
                backend,
            },
            |id, _| usable.get(id),
        );
    }

    /// Connections through observed interfaces: followed now, and dropped for want of room.
    pub fn passages(&self) -> (usize, u64) {
        (self.passages.len(), self.passages.dropped())
    }

    /// Says what time it is, by the kernel's monotonic clock: records that were held back for order are judged.
    pub fn advance(&mut self, now_ns: u64, usable: &UsableBackends) {
        self.reuse.advance(now_ns, |id, _| usable.get(id));
    }

    /// Takes a reading of one set's members.
    pub fn read_set(&mut self, service_id: u32, set_id: u32, now_ns: u64, members: &[Reading]) {
        self.windows
            .entry(service_id)
            .or_default()
            .entry(set_id)
            .or_insert_with(|| Window::new(WINDOW_NS, WINDOW_READINGS))
            .read(now_ns, members);
    }

    /// The windows of a Service, by set id.
    pub fn windows(&self, service_id: u32) -> impl Iterator<Item = (u32, &Window)> {
        self.windows
            .get(&service_id)
            .into_iter()
            .flatten()
            .map(|(id, window)| (*id, window))
    }

    /// Connect latencies of a Service.
    pub fn latencies(&self, service_id: u32) -> Option<&Buckets> {
        self.latencies.get(&service_id)
    }

    /// The tuple tracker.
    pub fn reuse(&self) -> &ReuseTracker {
        &self.reuse
    }

    /// Forgets Services that are gone.
    pub fn keep_services(&mut self, keep: impl Fn(u32) -> bool) {
        self.latencies.retain(|id, _| keep(*id));
        self.windows.retain(|id, _| keep(*id));
        let gone: Vec<u32> = self
            .reuse
            .services()
            .map(|(id, _)| id)
            .filter(|id| !keep(*id))
            .collect();
        for id in gone {
            self.reuse.forget_service(id);
        }
    }
}

fn octets(addr: Addr) -> [u8; 16] {
    let mut octets = [0; 16];
    for (chunk, word) in octets.chunks_exact_mut(4).zip(addr.words) {
        chunk.copy_from_slice(&word.to_ne_bytes());
    }
    octets
}

/// Now, by the clock that records carry (`CLOCK_MONOTONIC`, nanoseconds).
pub fn monotonic_ns() -> u64 {
    use nix::time::{ClockId, clock_gettime};
    clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(0, |t| t.tv_sec() as u64 * 1_000_000_000 + t.tv_nsec() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use lb_common::event::kind;

    fn record(port: u16, backend_id: u32, start_ns: u64, end_ns: u64) -> ConnRecord {
        ConnRecord {
            kind: kind::CONNECTION,
            errno: 0,
            start_ns,
            established_ns: start_ns + 70_000,
            end_ns,
            netns_cookie: 1,
            client: Addr::from_v4(1),
            vip: Addr::from_v4(2),
            service_id: 1,
            backend_id,
            client_port: Port::new(port),
            vip_port: Port::new(80),
            proto: 6,
            outcome: outcome::ESTABLISHED,
            pad: 0,
        }
    }

    #[test]
    fn reuse_is_told_by_backend_and_by_whether_the_earlier_one_is_still_usable() {
        let usable = UsableBackends::new(128);
        usable.set(1, true);
        usable.set(65, true);
        let mut seen = Observation::new(120_000_000_000, Arc::default());
        let second = 1_000_000_000;
        seen.connection(&record(4000, 1, second, 2 * second), &usable);
        seen.connection(&record(4000, 1, 3 * second, 4 * second), &usable);
        seen.connection(&record(4000, 65, 5 * second, 6 * second), &usable);
        usable.set(65, false);
        seen.connection(&record(4000, 1, 7 * second, 8 * second), &usable);
        seen.connection(&record(4001, 1, 7 * second, 8 * second), &usable);
        seen.advance(100 * second, &usable);
        let total = seen.reuse().total();
        assert_eq!((total.same_backend, total.moved, total.stale_backend), (1, 1, 1));
        let latencies = seen.latencies(1).expect("five samples");
        assert_eq!(latencies.count(), 5);
        assert_eq!(
            latencies.cumulative().next(),
            Some((CONNECT_EDGES[0], 5)),
            "70 µs lies below the first edge"
        );
        seen.keep_services(|_| false);
        assert!(seen.latencies(1).is_none());
    }

    #[test]
    fn connections_that_pass_through_are_tuple_uses_as_well() {
        let (usable, directory) = (UsableBackends::new(128), Arc::new(Directory::default()));
        usable.set(9, true);
        let backend = FrontendKey::new(Addr::from_v4(7), Port::new(8080), 6);
        directory.put(backend, 3, 9);
        let mut seen = Observation::new(120_000_000_000, directory.clone());
        let send = |seen: &mut Observation, forth: bool, flags: u8, time_ns: u64| {
            let (client, server) = ((Addr::from_v4(1), Port::new(4000)), (backend.addr, backend.port));
            let ((src, src_port), (dst, dst_port)) = if forth { (client, server) } else { (server, client) };
            let record = PacketRecord {
                kind: kind::PACKET,
                ifindex: 2,
                time_ns,
                src,
                dst,
                src_port,
                dst_port,
                flags,
                proto: 6,
                direction: 0,
                pad: 0,
            };
            seen.packet(&record, &usable);
        };
        for second in 0..3 {
            let t = (second + 1) * 1_000_000_000;
            send(&mut seen, true, tcp_flag::SYN, t);
            send(&mut seen, false, tcp_flag::SYN | tcp_flag::ACK, t + 1);
            send(&mut seen, false, tcp_flag::FIN | tcp_flag::ACK, t + 2);
            send(&mut seen, true, tcp_flag::FIN | tcp_flag::ACK, t + 3);
        }
        seen.advance(100_000_000_000, &usable);
        let counts = seen.reuse().service(3).expect("the backend's Service");
        assert_eq!((counts.connections, counts.same_backend), (3, 2));
        assert_eq!(seen.packets, 12);
        directory.remove(&backend, 4);
        assert!(
            directory.find(&backend).is_some(),
            "another Service's removal does not forget it"
        );
    }

    #[test]
    fn usable_backends_beyond_the_room_are_not_usable() {
        let usable = UsableBackends::new(64);
        usable.set(64, true);
        assert!(!usable.get(64));
        usable.set(63, true);
        assert!(usable.get(63));
        usable.set(63, false);
        assert!(!usable.get(63));
    }
}
