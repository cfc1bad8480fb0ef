//! How soon clients come back on the same tuple, and whether they meet the same backend again.
//!
//! One record a connection comes in, at the connection's end, in nearly the order of the ends. The tracker puts that order
//! right within a disorder window and then needs one fact a tuple: its latest close and the backend that had it. A new
//! connection that starts after that close and within the horizon is a *reuse*; one that started before it is an *overlap*
//! and is counted apart. Of two connections that overlap, the one that ends later is the overlap, unless openings are
//! reported too (records without an end): then it is the one that began later. Time comes from the records alone.

mod clients;
mod counts;
mod memory;
mod pending;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    hash::{DefaultHasher, Hash, Hasher},
};

use clients::Clients;
pub use clients::ServiceClient;
pub use counts::{EDGES_SECONDS, INTERVAL_BUCKETS, Outcome, ReuseCounts, chance_of_same};
use memory::Memory;
use pending::Pending;

/// What a client repeats when it reuses a source port: everything of a connection but the backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientTuple {
    /// The client's network namespace cookie; 0 outside the node.
    pub netns: u64,
    /// The client's address, IPv4 mapped into IPv6.
    pub client: [u8; 16],
    /// The address dialled, IPv4 mapped into IPv6.
    pub vip: [u8; 16],
    /// The client's port, host order.
    pub client_port: u16,
    /// The port dialled, host order.
    pub vip_port: u16,
    /// The IP protocol number.
    pub protocol: u8,
}

impl ClientTuple {
    /// 128 bits that stand for the tuple: a third of its size, and two tuples share them with a chance of 2⁻¹²⁸.
    fn digest(&self) -> Digest {
        let half = |salt: u8| {
            let mut hasher = DefaultHasher::new();
            salt.hash(&mut hasher);
            self.hash(&mut hasher);
            hasher.finish()
        };
        [half(0), half(1)]
    }
}

type Digest = [u64; 2];

/// One connection's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnRecord {
    /// When it was dialled, in nanoseconds of the kernel's monotonic clock.
    pub start_ns: u64,
    /// When it ended, on the same clock; 0 says that it has only been opened, and its end is still to come.
    pub end_ns: u64,
    /// Who dialled what.
    pub tuple: ClientTuple,
    /// The Service's id.
    pub service: u32,
    /// The id of the backend that got it; [`UNKNOWN_BACKEND`] where somebody else chose it out of sight.
    pub backend: u32,
}

/// Stands for a backend that was not seen; no backend has this id.
pub const UNKNOWN_BACKEND: u32 = 0;

/// The tracker's bounds.
#[derive(Clone, Copy, Debug)]
pub struct ReuseConfig {
    /// The longest interval, in nanoseconds, that still is a reuse (itself included).
    pub horizon_ns: u64,
    /// How much later than its successor, in nanoseconds between their ends, a record may come and still be put in order.
    pub disorder_ns: u64,
    /// Tuples remembered of this node's namespaces, and as many of clients outside, at some 200 bytes each; beyond it the one that
    /// closed longest ago is forgotten.
    pub capacity: usize,
    /// Records held back for ordering; beyond it the earliest are judged at once.
    pub pending: usize,
}

impl Default for ReuseConfig {
    fn default() -> Self {
        Self {
            horizon_ns: 120_000_000_000,
            disorder_ns: 1_000_000_000,
            capacity: 65_536,
            pending: 16_384,
        }
    }
}

/// Connections of one tuple whose opening was reported and whose end was not; more than a few are never tracked.
const MAX_OPEN: usize = 4;

/// What is remembered of a tuple.
#[derive(Clone, Debug, Default)]
struct LastUse {
    /// The latest close; 0 while only openings are known.
    end_ns: u64,
    backend: u32,
    /// (start, backend) of connections known to be open.
    open: Vec<(u64, u32)>,
    /// When anything was last heard of the tuple: the age by which it is evicted.
    touched_ns: u64,
}

/// A connection and what it was judged to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Judged {
    /// The connection.
    pub record: ConnRecord,
    /// How it stands to the previous use of its tuple.
    pub outcome: Outcome,
}

/// Clients whose reuse is counted apart, inside and outside each, at some 250 bytes each.
const MAX_CLIENTS: usize = 4_096;

/// Judged connections that are kept for whoever asked for reports.
const MAX_REPORTED: usize = 16_384;

/// Folds connection records into counts of tuple reuse.
#[derive(Debug)]
pub struct ReuseTracker {
    /// Reuses that were judged, while they are asked for.
    reported: Option<Vec<Judged>>,
    config: ReuseConfig,
    pending: Pending,
    /// Tuples of this node's namespaces, and those of clients outside: the world outside, which may be large, drives none of the
    /// node's own out.
    memories: [Memory; 2],
    total: ReuseCounts,
    services: BTreeMap<u32, ReuseCounts>,
    /// By client, inside and outside apart like the tuples.
    clients: [Clients; 2],
    late: u64,
    malformed: u64,
}

impl ReuseTracker {
    /// Makes an empty tracker.
    pub fn new(config: ReuseConfig) -> Self {
        Self {
            pending: Pending::new(config.disorder_ns, config.pending),
            config,
            memories: Default::default(),
            total: ReuseCounts::default(),
            services: BTreeMap::new(),
            clients: [Clients::new(MAX_CLIENTS), Clients::new(MAX_CLIENTS)],
            late: 0,
            malformed: 0,
            reported: None,
        }
    }

    /// Says whether reuses shall be kept one by one, to be taken by [`Self::take_reported`].
    pub fn report(&mut self, wanted: bool) {
        if wanted != self.reported.is_some() {
            self.reported = wanted.then(Vec::new);
        }
    }

    /// The reuses that were judged since the last call; those beyond a bound are left out.
    pub fn take_reported(&mut self) -> Vec<Judged> {
        self.reported.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Takes a record, and judges those that its coming proves to be in order.
    ///
    /// `usable(backend, at_ns)` says whether a backend could get new connections at that time.
    pub fn push(&mut self, record: ConnRecord, mut usable: impl FnMut(u32, u64) -> bool) {
        if record.end_ns == 0 {
            self.open(record);
            return;
        }
        if record.end_ns < record.start_ns {
            self.malformed += 1;
            return;
        }
        self.pending.push(record);
        while let Some(next) = self.pending.pop_settled() {
            self.judge(next, &mut usable);
        }
    }

    /// Says that every record that ended before `now_ns` minus the disorder window has come in, and judges those held back.
    pub fn advance(&mut self, now_ns: u64, mut usable: impl FnMut(u32, u64) -> bool) {
        self.pending.advance(now_ns);
        while let Some(next) = self.pending.pop_settled() {
            self.judge(next, &mut usable);
        }
    }

    /// Judges everything that was held back, as at the end of a run.
    pub fn drain(&mut self, usable: impl FnMut(u32, u64) -> bool) {
        self.advance(u64::MAX, usable);
    }

    /// Counts over all Services.
    pub fn total(&self) -> &ReuseCounts {
        &self.total
    }

    /// Counts by Service id.
    pub fn services(&self) -> impl Iterator<Item = (u32, &ReuseCounts)> {
        self.services.iter().map(|(&id, counts)| (id, counts))
    }

    /// Counts of one Service; none before its first connection.
    pub fn service(&self, id: u32) -> Option<&ReuseCounts> {
        self.services.get(&id)
    }

    /// Drops a Service's counts, when the Service has gone; the totals keep them.
    pub fn forget_service(&mut self, id: u32) {
        self.services.remove(&id);
        for clients in &mut self.clients {
            clients.forget_service(id);
        }
    }

    /// Counts by client, of those that are remembered; in no order.
    pub fn clients(&self) -> impl Iterator<Item = (&ServiceClient, &ReuseCounts)> {
        self.clients.iter().flat_map(Clients::iter)
    }

    /// Clients forgotten for want of room.
    pub fn clients_forgotten(&self) -> u64 {
        self.clients.iter().map(Clients::forgotten).sum()
    }

    /// Tuples remembered now.
    pub fn tuples(&self) -> usize {
        self.memories.iter().map(Memory::len).sum()
    }

    /// Records held back now until their order is certain.
    pub fn held_back(&self) -> usize {
        self.pending.len()
    }

    /// Tuples forgotten for want of room while their last use was still within the horizon.
    pub fn evicted(&self) -> u64 {
        self.memories.iter().map(Memory::evicted).sum()
    }

    /// Records that came later than the disorder window allows; they are counted as connections and not judged.
    pub fn late(&self) -> u64 {
        self.late
    }

    /// Records that ended before they started; they are left out altogether.
    pub fn malformed(&self) -> u64 {
        self.malformed
    }

    fn open(&mut self, record: ConnRecord) {
        let tuple = record.tuple.digest();
        let entry = self.memories[side(record.tuple.netns)].entry(tuple);
        // The kernel does not hand out one full tuple twice: an open use with the same backend must have ended unreported.
        entry.open.retain(|&(_, backend)| backend != record.backend);
        if entry.open.len() < MAX_OPEN {
            entry.open.push((record.start_ns, record.backend));
        }
        self.touch(&record.tuple, tuple, record.start_ns.max(1));
    }

    fn judge(&mut self, record: ConnRecord, usable: &mut impl FnMut(u32, u64) -> bool) {
        let tuple = record.tuple.digest();
        let entry = self.memories[side(record.tuple.netns)].entry(tuple);
        let inside_open = entry.inside_open(&record);
        let outcome = entry.classify(&record, self.config.horizon_ns, usable);
        // Its own opening, and any older one that the same full tuple proves over.
        entry
            .open
            .retain(|&(start_ns, backend)| backend != record.backend || start_ns > record.start_ns);
        // A use inside one that is still open is no predecessor of anything: the open one will end later.
        if outcome != Outcome::Late && !inside_open {
            entry.end_ns = record.end_ns;
            entry.backend = record.backend;
        }
        self.late += u64::from(outcome == Outcome::Late);
        if let Some(reported) = &mut self.reported
            && reported.len() < MAX_REPORTED
            && !matches!(outcome, Outcome::First | Outcome::Late | Outcome::Overlap)
        {
            reported.push(Judged { record, outcome });
        }
        self.total.add(outcome);
        self.services.entry(record.service).or_default().add(outcome);
        let client = ServiceClient {
            service: record.service,
            netns: record.tuple.netns,
            address: record.tuple.client,
        };
        self.clients[side(client.netns)].add(client, outcome);
        self.touch(&record.tuple, tuple, record.end_ns);
    }

    fn touch(&mut self, tuple: &ClientTuple, digest: Digest, at_ns: u64) {
        let ReuseConfig {
            capacity, horizon_ns, ..
        } = self.config;
        self.memories[side(tuple.netns)].touch(digest, at_ns, capacity, horizon_ns);
    }
}

/// Which of two memories is for a client: 0 for those in a network namespace of this node, 1 for those outside.
const fn side(netns: u64) -> usize {
    (netns == 0) as usize
}

impl LastUse {
    /// Whether a connection began while one that is still open was using the tuple.
    fn inside_open(&self, record: &ConnRecord) -> bool {
        self.open
            .iter()
            .any(|&(start_ns, backend)| start_ns < record.start_ns && backend != record.backend)
    }

    fn classify(&self, record: &ConnRecord, horizon_ns: u64, usable: &mut impl FnMut(u32, u64) -> bool) -> Outcome {
        if self.end_ns > record.end_ns {
            return Outcome::Late;
        }
        if self.end_ns > record.start_ns || self.inside_open(record) {
            return Outcome::Overlap;
        }
        let interval_ns = record.start_ns - self.end_ns;
        if self.end_ns == 0 || interval_ns > horizon_ns {
            return Outcome::First;
        }
        if self.backend == UNKNOWN_BACKEND || record.backend == UNKNOWN_BACKEND {
            Outcome::UnknownBackend(interval_ns)
        } else if !usable(self.backend, record.start_ns) {
            Outcome::StaleBackend(interval_ns)
        } else if self.backend == record.backend {
            Outcome::SameBackend(interval_ns)
        } else {
            Outcome::Moved(interval_ns)
        }
    }
}
