//! Counting the entries of maps that the kernel programs fill.
//!
//! A hash map is counted by walking it, two system calls an entry: with a hundred thousand sockets that is tens of
//! milliseconds. The census has handles of its own, so that nobody waits for it who has to write to the kernel.

use aya::maps::{HashMap, Map, MapData};
use lb_common::{
    affinity::{Affinity, AffinityKey},
    flow::{Flow, Settings},
    maps as names,
    socket::{ChainHead, Reverse, ReverseKey, SocketState},
};

use super::{
    flows,
    kernel::{Kernel, MapsError, window_error},
    window::Array,
};
use crate::observe::flows::FlowCounts;

/// Handles of the maps that programs fill.
pub struct Census {
    sockets: Option<HashMap<MapData, u64, SocketState>>,
    reverse: Option<HashMap<MapData, ReverseKey, Reverse>>,
    udp_sockets: Option<HashMap<MapData, u64, ChainHead>>,
    affinity: Option<HashMap<MapData, AffinityKey, Affinity>>,
    flows: Option<Array<Flow>>,
    settings: Option<Array<Settings>>,
    capacity: [u64; 4],
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
    pub flows: FlowCounts,
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
            flows: facts(names::FLOWS).and_then(|f| open_array(f.id, f.max_entries)),
            settings: facts(names::SETTINGS).and_then(|f| open_array(f.id, f.max_entries)),
            capacity: COUNTED.map(|name| facts(name).map_or(0, |f| u64::from(f.max_entries))),
        }
    }

    /// The states of the sockets that are followed; entries come and go while they are read.
    pub fn sockets(&self) -> impl Iterator<Item = SocketState> + '_ {
        let all = self.sockets.iter().flat_map(|map| map.iter().flatten());
        all.map(|(_, state)| state)
    }

    /// Slots of the flow table; 0 where it cannot be read.
    pub fn flow_slots(&self) -> u32 {
        self.flows.as_ref().map_or(0, Array::len)
    }

    /// What the flow clock shows when the monotonic one shows this.
    pub fn flow_now_ns(&self, monotonic_ns: u64) -> u64 {
        let window = self.settings.as_ref().and_then(|settings| settings.window(0, 1).ok());
        monotonic_ns.wrapping_add(window.map_or(0, |window| window.get(0).clock_offset_ns))
    }

    /// Every flow of the table, also those that have expired; one that begins or ends meanwhile is seen or not.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn flows(&self, mut each: impl FnMut(&Flow)) -> Result<(), MapsError> {
        let Some(table) = &self.flows else { return Ok(()) };
        flows::scan(table, |_, flow| each(flow)).map_err(window_error(names::FLOWS))
    }

    /// Counts everything; entries come and go meanwhile. The flow table is passed through once; `now_ns` is the monotonic clock's.
    pub fn count(&self, now_ns: u64) -> Counted {
        let mut flows = FlowCounts::of_slots(self.flow_slots());
        let flow_now_ns = self.flow_now_ns(now_ns);
        if let Err(error) = self.flows(|flow| flows.add(flow, flow_now_ns)) {
            tracing::warn!(%error, "the flow table could not be read whole");
        }
        let mut usage = self.usage();
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

fn open<K: aya::Pod, V: aya::Pod>(id: u32) -> Option<HashMap<MapData, K, V>> {
    HashMap::try_from(Map::HashMap(MapData::from_id(id).ok()?)).ok()
}

fn open_lru<K: aya::Pod, V: aya::Pod>(id: u32) -> Option<HashMap<MapData, K, V>> {
    HashMap::try_from(Map::LruHashMap(MapData::from_id(id).ok()?)).ok()
}

fn open_array<T: aya::Pod>(id: u32, len: u32) -> Option<Array<T>> {
    Some(Array::new(MapData::from_id(id).ok()?, len))
}
