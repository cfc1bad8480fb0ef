//! The maps of the packets that are translated: the flow table, its tuples, settings, and the interfaces.
//!
//! Flows are written by the kernel programs alone; here they are read, as whole records: a record that changes owner while it
//! is read is read again. What the agent writes are the settings and the interfaces. Which interface is what is decided
//! elsewhere.

use std::sync::atomic::{AtomicU32, Ordering, fence};

use aya::{
    Ebpf,
    maps::{HashMap, Map, MapData, MapError},
};
use lb_common::{
    flow::{Flow, FragmentKey, FragmentPorts, Interface, Settings, TupleEntry, TupleKey, serial_of, state, state_of},
    maps as names,
};

use super::{
    census::{open, open_array, open_lru},
    kernel::{Kernel, MapsError, array, hash, put, read_error, remove, window_error},
    load::LoadError,
    window::{Array, Window},
};

/// Flows that are mapped at a time: 512 KiB.
const WINDOW: u32 = 4_096;
/// How often a record that changes its owner while it is read is read again.
const ATTEMPTS: usize = 8;

/// The maps of translated packets.
pub struct Flows {
    table: Array<Flow>,
    tuples: HashMap<MapData, TupleKey, TupleEntry>,
    settings: Array<Settings>,
    interfaces: HashMap<MapData, u32, Interface>,
    hand: aya::maps::Array<MapData, u64>,
    fragments: HashMap<MapData, FragmentKey, FragmentPorts>,
}

impl std::fmt::Debug for Flows {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Flows")
            .field("slots", &self.slots())
            .finish_non_exhaustive()
    }
}

impl Flows {
    /// Takes the maps out of a loaded object, and tells the programs how large the flow table is.
    pub(super) fn take(object: &mut Ebpf) -> Result<Self, LoadError> {
        let hand = object
            .take_map(names::FLOW_HAND)
            .ok_or(LoadError::Missing(names::FLOW_HAND))?;
        let mut flows = Self {
            table: array(object, names::FLOWS)?,
            tuples: hash(object, names::TUPLES)?,
            settings: array(object, names::SETTINGS)?,
            interfaces: hash(object, names::INTERFACES)?,
            hand: aya::maps::Array::try_from(hand).map_err(|source| LoadError::Map {
                name: names::FLOW_HAND,
                source,
            })?,
            fragments: hash(object, names::FRAGMENTS)?,
        };
        let settings = flows.settings().map_err(LoadError::Settings)?;
        let flow_slots = flows.slots();
        flows
            .write(Settings { flow_slots, ..settings })
            .map_err(LoadError::Settings)?;
        Ok(flows)
    }

    /// Opens the maps of a kernel once more, to read them; none where one of them cannot be opened.
    pub(super) fn reopen(kernel: &Kernel) -> Option<Self> {
        let facts = |name: &str| kernel.facts().get(name);
        let hand = MapData::from_id(facts(names::FLOW_HAND)?.id).ok()?;
        let (table, settings) = (facts(names::FLOWS)?, facts(names::SETTINGS)?);
        Some(Self {
            table: open_array(table.id, table.max_entries)?,
            tuples: open(facts(names::TUPLES)?.id)?,
            settings: open_array(settings.id, settings.max_entries)?,
            interfaces: open(facts(names::INTERFACES)?.id)?,
            hand: aya::maps::Array::try_from(Map::Array(hand)).ok()?,
            fragments: open_lru(facts(names::FRAGMENTS)?.id)?,
        })
    }

    /// Slots of the flow table, as it is in the kernel.
    pub fn slots(&self) -> u32 {
        self.table.len()
    }

    /// What the programs know of the node.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn settings(&self) -> Result<Settings, MapsError> {
        let window = self.settings.window(0, 1).map_err(window_error(names::SETTINGS))?;
        Ok(window.get(0))
    }

    fn write(&mut self, settings: Settings) -> Result<(), MapsError> {
        let mut window = self.settings.window(0, 1).map_err(window_error(names::SETTINGS))?;
        window.set(0, settings);
        Ok(())
    }

    /// Sets the range of the node's own source ports, both ends included, host order.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn set_ports(&mut self, first_port: u16, last_port: u16) -> Result<(), MapsError> {
        let settings = self.settings()?;
        self.write(Settings {
            first_port,
            last_port,
            ..settings
        })
    }

    /// Sets the flow clock forward from the monotonic one, in nanoseconds: tests let time pass by it.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn set_clock_offset(&mut self, clock_offset_ns: u64) -> Result<(), MapsError> {
        let settings = self.settings()?;
        self.write(Settings {
            clock_offset_ns,
            ..settings
        })
    }

    /// Says what an interface is, by its index: before the programs are attached there, and whenever its addresses change.
    ///
    /// # Errors
    /// When the map has no room.
    pub fn put_interface(&mut self, index: u32, interface: &Interface) -> Result<(), MapsError> {
        put(names::INTERFACES, &mut self.interfaces, &index, interface)
    }

    /// Forgets an interface, after the programs are detached there.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn remove_interface(&mut self, index: u32) -> Result<(), MapsError> {
        remove(names::INTERFACES, &mut self.interfaces, &index)
    }

    /// What the programs know of interfaces, by index.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn interfaces(&self) -> Result<Vec<(u32, Interface)>, MapsError> {
        let mut all = Vec::new();
        for entry in &self.interfaces {
            all.push(entry.map_err(read_error(names::INTERFACES))?);
        }
        all.sort_by_key(|(index, _)| *index);
        Ok(all)
    }

    /// Where a tuple leads, and the flow; no flow where its slot has another one by now.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn find(&self, tuple: &TupleKey) -> Result<Option<(TupleEntry, Option<Flow>)>, MapsError> {
        let entry = match self.tuples.get(tuple, 0) {
            Ok(entry) => entry,
            Err(MapError::KeyNotFound) => return Ok(None),
            Err(error) => return Err(read_error(names::TUPLES)(error)),
        };
        let flow = self.get(entry.slot)?.filter(|flow| flow.serial() == entry.serial());
        Ok(Some((entry, flow)))
    }

    /// The flow in a slot; none in a free one, or beyond the table.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn get(&self, slot: u32) -> Result<Option<Flow>, MapsError> {
        if slot >= self.slots() {
            return Ok(None);
        }
        let window = self.table.window(slot, 1).map_err(window_error(names::FLOWS))?;
        Ok(whole(&window, 0))
    }

    /// Reads every flow, with its slot: one pass through memory, without a system call a flow. A flow that begins or ends
    /// meanwhile is seen or not.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn scan(&self, mut each: impl FnMut(u32, &Flow)) -> Result<(), MapsError> {
        let mut first = 0;
        while first < self.slots() {
            let count = WINDOW.min(self.slots() - first);
            let window = self.table.window(first, count).map_err(window_error(names::FLOWS))?;
            for at in 0..count {
                if let Some(flow) = whole(&window, at) {
                    each(first + at, &flow);
                }
            }
            first += count;
        }
        Ok(())
    }

    /// All tuples, with where they lead. The map changes while it is walked: an entry may be seen twice, or not.
    pub fn tuples(&self) -> impl Iterator<Item = (TupleKey, TupleEntry)> + '_ {
        self.tuples.iter().flatten()
    }

    /// The datagrams in fragments that are remembered. The map changes while it is walked.
    pub fn fragments(&self) -> impl Iterator<Item = (FragmentKey, FragmentPorts)> + '_ {
        self.fragments.iter().flatten()
    }

    /// How many slots were looked at for new flows, ever.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn hand(&self) -> Result<u64, MapsError> {
        self.hand.get(&0, 0).map_err(read_error(names::FLOW_HAND))
    }

    /// Entries of one of these maps, counted by walking it; `None` for other names.
    pub(super) fn count_entries(&self, map: &str) -> Option<u64> {
        match map {
            names::FLOWS => {
                let mut count = 0;
                self.scan(|_, _| count += 1).ok()?;
                Some(count)
            }
            names::TUPLES => Some(self.tuples.keys().flatten().count() as u64),
            names::INTERFACES => Some(self.interfaces.keys().flatten().count() as u64),
            names::FRAGMENTS => Some(self.fragments.keys().flatten().count() as u64),
            _ => None,
        }
    }
}

/// Reads the flow of one slot as it was at one moment; none where the slot is free, or changes its flow again and again.
fn whole(window: &Window<Flow>, at: u32) -> Option<Flow> {
    const VERSION: usize = std::mem::offset_of!(Flow, version);
    // SAFETY: the field lies in a live element of the window, aligned to four bytes, and programs write it atomically.
    let version = unsafe { AtomicU32::from_ptr(window.element(at).cast::<u8>().add(VERSION).cast()) };
    for _ in 0..ATTEMPTS {
        let before = version.load(Ordering::Acquire);
        match state_of(before) {
            state::FREE => return None,
            state::BUSY => continue,
            _ => {}
        }
        let flow = window.get(at);
        fence(Ordering::Acquire);
        let after = version.load(Ordering::Relaxed);
        // Between two states of one flow nothing moves that names it.
        if serial_of(before) == serial_of(after) && state_of(after) != state::BUSY {
            return Some(flow);
        }
    }
    None
}
