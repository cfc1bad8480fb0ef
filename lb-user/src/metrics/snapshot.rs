//! The numbers of one moment, as plain data.

use crate::{
    analysis::{
        cause::Cause,
        imbalance::{Imbalance, Share},
        reuse::ReuseCounts,
    },
    source::kube::RequestCounts,
    view::{BackendCountsView, Mode, Timestamp},
};

/// Why connections fail to establish; the values of the label `reason`, and the order of [`ServiceSample::failed`].
pub const FAILURE_REASONS: [&str; 7] = [
    "refused",
    "timed_out",
    "unreachable",
    "no_local_port",
    "abandoned",
    "other",
    "no_backend",
];

/// What a reused tuple met; the values of the label `outcome`, and the order of [`ServiceSample::reuse`].
pub const REUSE_OUTCOMES: [&str; 4] = ["same_backend", "moved", "stale_backend", "unknown_backend"];

/// Reuses in the order of [`REUSE_OUTCOMES`].
pub fn reuse_outcomes(counts: &ReuseCounts) -> [u64; REUSE_OUTCOMES.len()] {
    [
        counts.same_backend,
        counts.moved,
        counts.stale_backend,
        counts.unknown_backend,
    ]
}

/// All numbers at one moment.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// When it was taken.
    pub time: Timestamp,
    /// When the agent started.
    pub started: Timestamp,
    /// The agent's version.
    pub version: &'static str,
    /// The version of the layout shared with the kernel programs.
    pub abi: u32,
    /// The agent's mode.
    pub mode: Mode,
    /// What the kernel programs did; every pair that can occur, also at 0.
    pub connects: Vec<ConnectSample>,
    /// The Services that exist now.
    pub services: Vec<ServiceSample>,
    /// Tuple reuse over all Services.
    pub reuse: ReuseCounts,
    /// Tuples forgotten for want of room within the horizon.
    pub reuse_evicted: u64,
    /// What else was forgotten for want of room, by kind; every kind, also at 0.
    pub forgotten: Vec<(&'static str, u64)>,
    /// From an endpoint's change to its effect.
    pub network_programming: Buckets,
    /// How long applications took, by kind; every kind that can occur, also at 0.
    pub sync: Vec<SyncSample>,
    /// When changes were last applied.
    pub sync_last: Option<Timestamp>,
    /// When a change last came in.
    pub sync_last_queued: Option<Timestamp>,
    /// When the source last confirmed its objects, by kind of object.
    pub source_synced: Vec<(&'static str, Option<Timestamp>)>,
    /// Flows from outside by state, every state also at 0; none in observe mode.
    pub flows: Vec<(&'static str, u64)>,
    /// The kernel's maps.
    pub maps: Vec<MapSample>,
    /// The kernel's programs; empty where run statistics are off.
    pub programs: Vec<ProgramSample>,
    /// Records lost, by where; every place that can lose some, also at 0.
    pub events_lost: Vec<(&'static str, u64)>,
    /// Things put right in the kernel.
    pub repairs: u64,
    /// Fields and objects of the input that were not taken.
    pub problems: u64,
    /// What is told under kube-proxy's names, where that was asked for.
    pub kube_proxy: Option<KubeProxySample>,
}

/// HTTP statuses of probes, in the order of [`KubeProxySample::healthz`].
pub const PROBE_CODES: [&str; 2] = ["200", "503"];

/// What is told under kube-proxy's names and nowhere else.
#[derive(Clone, Debug, PartialEq)]
pub struct KubeProxySample {
    /// How long applications took, over [`super::families::kube_proxy::SYNC_EDGES`].
    pub sync: Buckets,
    /// From the changes that slices are annotated with to their effect, over [`super::families::PROGRAMMING_EDGES`].
    pub programming: Buckets,
    /// Changes of Services that came in, and those that wait.
    pub service_changes: (u64, u64),
    /// Changes of EndpointSlices that came in, and those that wait.
    pub endpoint_changes: (u64, u64),
    /// Answers to `/healthz`, in the order of [`PROBE_CODES`].
    pub healthz: [u64; PROBE_CODES.len()],
    /// Answers to `/livez`, in the order of [`PROBE_CODES`].
    pub livez: [u64; PROBE_CODES.len()],
    /// Requests to the API server; none with another source.
    pub requests: Option<RequestCounts>,
    /// Resident memory in bytes; none where the kernel does not tell.
    pub resident_bytes: Option<u64>,
    /// Seconds on CPUs; none where the kernel does not tell.
    pub cpu_seconds: Option<f64>,
}

/// How often a hook did something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectSample {
    /// The hook's name.
    pub hook: &'static str,
    /// What it did.
    pub action: &'static str,
    /// How often.
    pub total: u64,
}

/// The numbers of one Service.
#[derive(Clone, Debug, PartialEq)]
pub struct ServiceSample {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// New connections and flows.
    pub connects: u64,
    /// Those of them that came in as packets.
    pub outside: u64,
    /// Those of them whose backend is known.
    pub attributed: u64,
    /// Connections that dialled an endpoint's own address; not among the new ones.
    pub direct: u64,
    /// Connections that failed, in the order of [`FAILURE_REASONS`].
    pub failed: [u64; FAILURE_REASONS.len()],
    /// Time from connect() to established, over [`super::families::CONNECT_EDGES`].
    pub latency: Buckets,
    /// Connections established and not yet ended.
    pub active: u64,
    /// Its backends by state.
    pub backends: BackendCountsView,
    /// The window's evenness; none while nothing was counted.
    pub imbalance: Option<Imbalance>,
    /// The evenness of the open connections; none while there are none.
    pub open_imbalance: Option<Imbalance>,
    /// Starved endpoints, in the order of [`Cause::ALL`].
    pub starved: [u64; Cause::ALL.len()],
    /// Used part of the port range, of the client and destination that come nearest to its end.
    pub ports_used: f64,
    /// Reuses of tuples, in the order of [`REUSE_OUTCOMES`].
    pub reuse: [u64; REUSE_OUTCOMES.len()],
    /// Its backends' numbers; empty unless asked for.
    pub by_backend: Vec<BackendSample>,
}

impl ServiceSample {
    /// Whether this node's clients ever dialled it.
    pub fn has_traffic(&self) -> bool {
        self.connects > 0 || self.direct > 0 || self.active > 0 || self.failed.iter().any(|&count| count > 0)
    }
}

/// The numbers of one backend of one Service.
#[derive(Clone, Debug, PartialEq)]
pub struct BackendSample {
    /// `ADDR:PORT`.
    pub backend: String,
    /// Times it was chosen.
    pub connects: u64,
    /// Connections established and not yet ended.
    pub active: u64,
    /// The new connections that evenness is judged by, and those that its weight entitled it to; none before two readings.
    pub judged: Option<Share>,
}

/// How long applications of one kind took.
#[derive(Clone, Debug, PartialEq)]
pub struct SyncSample {
    /// The kind, such as `full` or `change`.
    pub kind: &'static str,
    /// The durations, over [`super::families::SYNC_EDGES`].
    pub durations: Buckets,
}

/// How full a map is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapSample {
    /// The map's name.
    pub map: &'static str,
    /// Entries in use.
    pub entries: u64,
    /// Entries that fit.
    pub max_entries: u64,
}

/// A program's run statistics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramSample {
    /// The program's name.
    pub program: String,
    /// How often it ran.
    pub runs: u64,
    /// Nanoseconds spent in it.
    pub run_nanoseconds: u64,
}

/// Counts by bucket, with their sum.
#[derive(Clone, Debug, PartialEq)]
pub struct Buckets {
    edges: &'static [f64],
    /// One an edge, and one above the last; not cumulative.
    counts: Box<[u64]>,
    sum: f64,
}

impl Buckets {
    /// Makes empty buckets; an edge belongs to the bucket that it ends.
    pub fn new(edges: &'static [f64]) -> Self {
        Self {
            edges,
            counts: vec![0; edges.len() + 1].into(),
            sum: 0.0,
        }
    }

    /// Takes counts from elsewhere: one an edge and one above the last; none if there are not as many.
    pub fn from_counts(edges: &'static [f64], counts: &[u64], sum: f64) -> Option<Self> {
        (counts.len() == edges.len() + 1).then(|| Self {
            edges,
            counts: counts.into(),
            sum,
        })
    }

    /// Counts one value; one that is not a number is left out.
    pub fn observe(&mut self, value: f64) {
        if value.is_nan() {
            return;
        }
        let bucket = self.edges.partition_point(|&edge| edge < value);
        self.counts[bucket] += 1;
        self.sum += value;
    }

    /// Adds other counts over the same edges; those over other edges are left out.
    pub fn add(&mut self, other: &Self) {
        if self.edges == other.edges {
            for (own, other) in self.counts.iter_mut().zip(&other.counts) {
                *own += other;
            }
            self.sum += other.sum;
        }
    }

    /// All values counted.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The sum of all values counted.
    pub fn sum(&self) -> f64 {
        self.sum
    }

    /// (edge, values up to it), the open bucket left out.
    pub fn cumulative(&self) -> impl Iterator<Item = (f64, u64)> {
        self.edges.iter().zip(&self.counts).scan(0, |sum, (&edge, count)| {
            *sum += count;
            Some((edge, *sum))
        })
    }
}
