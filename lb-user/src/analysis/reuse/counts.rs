//! What is counted of tuple reuse.

/// Upper edges of the interval histogram, in seconds: those of TIME_WAIT (60 s) and of connection tracking (120 s) among them.
pub const EDGES_SECONDS: [f64; 9] = [0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0];
/// Buckets of the interval histogram: one an edge, and one for longer intervals (a horizon above the last edge).
pub const INTERVAL_BUCKETS: usize = EDGES_SECONDS.len() + 1;

/// How one connection stands to the previous use of its tuple; intervals in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// No use of the tuple ended within the horizon.
    First,
    /// Reused, and met the backend of the previous use.
    SameBackend(u64),
    /// Reused, and met another backend though the previous one was usable.
    Moved(u64),
    /// Reused, and the previous use's backend was no longer usable.
    StaleBackend(u64),
    /// Reused, and the backend of one of the two uses was not seen: somebody else chose it.
    UnknownBackend(u64),
    /// Began while another use of the tuple was open.
    Overlap,
    /// Came too late to be judged.
    Late,
}

/// Counts of one Service, or of all.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReuseCounts {
    /// Connections taken in, of any outcome.
    pub connections: u64,
    /// Reuses that met the same backend.
    pub same_backend: u64,
    /// Reuses that met another one.
    pub moved: u64,
    /// Reuses whose previous backend was no longer usable.
    pub stale_backend: u64,
    /// Reuses of which one backend or both were not seen: somebody else translates (observe mode).
    pub unknown_backend: u64,
    /// Connections that overlapped another use of their tuple; not among the reuses.
    pub overlap: u64,
    /// Reuses by interval; bucket i ends with [`EDGES_SECONDS`]`[i]` (included), the last one is open.
    pub intervals: [u64; INTERVAL_BUCKETS],
    /// Sum of the reuses' intervals, in seconds.
    pub interval_seconds: f64,
}

impl ReuseCounts {
    /// All reuses.
    pub fn total(&self) -> u64 {
        self.same_backend + self.moved + self.stale_backend + self.unknown_backend
    }

    /// The share of the same backend among the reuses that could have met it; none without such.
    pub fn same_share(&self) -> Option<f64> {
        let comparable = self.same_backend + self.moved;
        (comparable > 0).then(|| self.same_backend as f64 / comparable as f64)
    }

    /// Counts one connection.
    pub(super) fn add(&mut self, outcome: Outcome) {
        self.connections += 1;
        let interval_ns = match outcome {
            Outcome::First | Outcome::Late => return,
            Outcome::Overlap => {
                self.overlap += 1;
                return;
            }
            Outcome::SameBackend(interval_ns) => {
                self.same_backend += 1;
                interval_ns
            }
            Outcome::Moved(interval_ns) => {
                self.moved += 1;
                interval_ns
            }
            Outcome::StaleBackend(interval_ns) => {
                self.stale_backend += 1;
                interval_ns
            }
            Outcome::UnknownBackend(interval_ns) => {
                self.unknown_backend += 1;
                interval_ns
            }
        };
        let seconds = interval_ns as f64 / 1e9;
        let bucket = EDGES_SECONDS.partition_point(|&edge| edge < seconds);
        self.intervals[bucket] += 1;
        self.interval_seconds += seconds;
    }
}

/// The probability that two independent choices by weight meet the same backend: Σw², which is 1/k for equal weights.
///
/// None without an eligible backend.
pub fn chance_of_same(weights: impl IntoIterator<Item = u32>) -> Option<f64> {
    let (sum, squares) = weights.into_iter().fold((0.0, 0.0), |(sum, squares), weight| {
        let weight = f64::from(weight);
        (sum + weight, squares + weight * weight)
    });
    (sum > 0.0).then(|| squares / (sum * sum))
}
