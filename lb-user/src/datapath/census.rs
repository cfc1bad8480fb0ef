//! Counting the entries of maps that the kernel programs fill.
//!
//! A hash map is counted by walking it, two system calls an entry: with a hundred thousand sockets that is tens of
//! milliseconds, and a pass over the flow table reads all its slots. The census has handles of its own, so that nobody waits
//! for it who has to write to the kernel, and whoever asks soon after another is given the same counts.

use std::sync::{Arc, Mutex, PoisonError};

use aya::maps::{HashMap, Map, MapData};
use lb_common::{
    affinity::{Affinity, AffinityKey},
    flow::Flow,
    maps as names,
    socket::{ChainHead, Reverse, ReverseKey, SocketState},
};

use super::{
    flows::Flows,
    kernel::{Kernel, MapsError},
    window::Array,
};
use crate::observe::flows::FlowCounts;

/// Handles of the maps that programs fill.
pub struct Census {
    sockets: Option<HashMap<MapData, u64, SocketState>>,
    reverse: Option<HashMap<MapData, ReverseKey, Reverse>>,
    udp_sockets: Option<HashMap<MapData, u64, ChainHead>>,
    affinity: Option<HashMap<MapData, AffinityKey, Affinity>>,
    packets: Option<Flows>,
    capacity: [u64; 4],
    counted_flows: Kept<FlowCounts>,
    counted_maps: Kept<Vec<(&'static str, u64, u64)>>,
}

impl std::fmt::Debug for Census {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Census")
            .field("capacity", &self.capacity)
            .finish_non_exhaustive()
    }
}

/// What a census found.
#[derive(Clone, Debug, Default)]
pub struct Counted {
    /// (map, entries, capacity) of each map.
    pub usage: Vec<(&'static str, u64, u64)>,
    /// The flow table.
    pub flows: Arc<FlowCounts>,
}

/// How old counts may be that people and scrapers are given, in nanoseconds.
pub const FRESH_NS: u64 = 1_000_000_000;
/// How old counts may be of what takes hours to change, in nanoseconds.
pub const RECENT_NS: u64 = 10 * FRESH_NS;

/// A result that those who ask soon after each other share; it is made by one of them, while the others wait.
struct Kept<T>(Mutex<Option<(u64, Arc<T>)>>);

impl<T> Kept<T> {
    const fn new() -> Self {
        Self(Mutex::new(None))
    }

    /// The result, made anew where the last one was begun `most_ns` ago or longer.
    fn get(&self, now_ns: u64, most_ns: u64, make: impl FnOnce() -> T) -> Arc<T> {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((begun_ns, result)) = &*kept
            && now_ns.saturating_sub(*begun_ns) < most_ns
        {
            return result.clone();
        }
        let result = Arc::new(make());
        *kept = Some((now_ns, result.clone()));
        result
    }
}

/// The hash maps that are counted by walking them, in the order of the census.
const COUNTED: [&str; 4] = [names::SOCKETS, names::UDP_REVERSE, names::UDP_SOCKETS, names::AFFINITY];

impl Census {
    /// Opens the maps of a kernel once more. One that cannot be opened is left out of the counts.
    pub fn new(kernel: &Kernel) -> Self {
        let facts = |name: &str| kernel.facts().get(name);
        Self {
            sockets: facts(names::SOCKETS).and_then(|f| open(f.id)),
            reverse: facts(names::UDP_REVERSE).and_then(|f| open(f.id)),
            udp_sockets: facts(names::UDP_SOCKETS).and_then(|f| open(f.id)),
            affinity: facts(names::AFFINITY).and_then(|f| open_lru(f.id)),
            packets: Flows::reopen(kernel),
            capacity: COUNTED.map(|name| facts(name).map_or(0, |f| u64::from(f.max_entries))),
            counted_flows: Kept::new(),
            counted_maps: Kept::new(),
        }
    }

    /// The states of the sockets that are followed; entries come and go while they are read.
    pub fn sockets(&self) -> impl Iterator<Item = SocketState> + '_ {
        let all = self.sockets.iter().flat_map(|map| map.iter().flatten());
        all.map(|(_, state)| state)
    }

    /// The maps of translated packets, to be read; none where they cannot be opened.
    pub fn packet_maps(&self) -> Option<&Flows> {
        self.packets.as_ref()
    }

    /// Slots of the flow table; 0 where it cannot be read.
    pub fn flow_slots(&self) -> u32 {
        self.packets.as_ref().map_or(0, Flows::slots)
    }

    /// What the flow clock shows when the monotonic one shows this.
    pub fn flow_now_ns(&self, monotonic_ns: u64) -> u64 {
        let settings = self.packets.as_ref().and_then(|packets| packets.settings().ok());
        monotonic_ns.wrapping_add(settings.map_or(0, |settings| settings.clock_offset_ns))
    }

    /// Every flow of the table, also those that have expired; one that begins or ends meanwhile is seen or not.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn flows(&self, mut each: impl FnMut(&Flow)) -> Result<(), MapsError> {
        let Some(packets) = &self.packets else { return Ok(()) };
        packets.scan(|_, flow| each(flow))
    }

    /// What the flow table has, as it was `most_ns` ago or later; `now_ns` is the monotonic clock's. One pass over the table
    /// serves all who ask meanwhile.
    pub fn flow_counts(&self, now_ns: u64, most_ns: u64) -> Arc<FlowCounts> {
        self.counted_flows.get(now_ns, most_ns, || {
            let mut counts = FlowCounts::of_slots(self.flow_slots());
            let flow_now_ns = self.flow_now_ns(now_ns);
            if let Err(error) = self.flows(|flow| counts.add(flow, flow_now_ns)) {
                tracing::warn!(%error, "the flow table could not be read whole");
            }
            counts
        })
    }

    /// Counts everything, [`FRESH_NS`] ago or later; entries come and go meanwhile. `now_ns` is the monotonic clock's.
    pub fn count(&self, now_ns: u64) -> Counted {
        let flows = self.flow_counts(now_ns, FRESH_NS);
        let mut usage = (*self.counted_maps.get(now_ns, FRESH_NS, || self.usage())).clone();
        if flows.slots > 0 {
            usage.push((names::FLOWS, flows.live(), flows.slots));
            usage.push((names::TUPLES, flows.tuples, flows.max_tuples()));
        }
        Counted { usage, flows }
    }

    /// (map, entries, capacity) of each hash map.
    fn usage(&self) -> Vec<(&'static str, u64, u64)> {
        let counts = [
            self.sockets.as_ref().map(|map| map.keys().flatten().count()),
            self.reverse.as_ref().map(|map| map.keys().flatten().count()),
            self.udp_sockets.as_ref().map(|map| map.keys().flatten().count()),
            self.affinity.as_ref().map(|map| map.keys().flatten().count()),
        ];
        COUNTED
            .into_iter()
            .zip(counts)
            .zip(self.capacity)
            .filter_map(|((name, count), capacity)| Some((name, count? as u64, capacity)))
            .collect()
    }
}

pub(super) fn open<K: aya::Pod, V: aya::Pod>(id: u32) -> Option<HashMap<MapData, K, V>> {
    HashMap::try_from(Map::HashMap(MapData::from_id(id).ok()?)).ok()
}

pub(super) fn open_lru<K: aya::Pod, V: aya::Pod>(id: u32) -> Option<HashMap<MapData, K, V>> {
    HashMap::try_from(Map::LruHashMap(MapData::from_id(id).ok()?)).ok()
}

pub(super) fn open_array<T: aya::Pod>(id: u32, len: u32) -> Option<Array<T>> {
    Some(Array::new(MapData::from_id(id).ok()?, len))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_asks_soon_after_another_is_given_the_same_counts() {
        let kept = Kept::new();
        let mut passes = 0;
        let mut ask = |now_ns, most_ns| {
            *kept.get(now_ns, most_ns, || {
                passes += 1;
                passes
            })
        };
        let start = 5 * FRESH_NS;
        assert_eq!(ask(start, FRESH_NS), 1);
        assert_eq!(ask(start + FRESH_NS - 1, FRESH_NS), 1);
        assert_eq!(
            ask(start - 1, FRESH_NS),
            1,
            "one who waited for the pass has an earlier time"
        );
        assert_eq!(
            ask(start + FRESH_NS, RECENT_NS),
            1,
            "others are content with older counts"
        );
        assert_eq!(ask(start + FRESH_NS, FRESH_NS), 2);
        assert_eq!(ask(start + 2 * FRESH_NS - 1, FRESH_NS), 2);
    }
}
