//! The maps of a loaded object: carrying out plans, and reading everything back.

use std::{
    collections::{BTreeMap, HashMap as StdMap},
    os::fd::{AsFd, AsRawFd, BorrowedFd},
};

use aya::{
    Ebpf,
    maps::{HashMap, Map, MapData, MapError, PerCpuArray, RingBuf},
};
use lb_common::{
    affinity::{Affinity, AffinityKey, Membership},
    backend::{Backend, BackendCounters, EndpointKey, ServiceCounters, state},
    counter,
    frontend::{Frontend, FrontendKey},
    maps as names,
    set::{ListEntry, SLOTS_PER_ELEMENT, SetWord, elements_for, slot_of},
    socket::{ChainHead, Passage, Reverse, ReverseKey, SocketState},
};
use thiserror::Error;

use super::{
    flows::Flows,
    index::{BackendIndex, backend_key},
    load::LoadError,
    sources::Sources,
    window::{Array, Window, WindowError},
};
use crate::{
    compile::{Capacity, Contents, List, TableWrite, table_hash},
    plan::{ListWrite, Phase, Plan},
};

/// Why a map could not be read or written.
#[derive(Debug, Error)]
pub enum MapsError {
    /// A hash map.
    #[error("{operation} map {map}: {source}")]
    Map {
        /// `update`, `read`, `delete from`.
        operation: &'static str,
        /// The map.
        map: &'static str,
        /// The cause.
        source: MapError,
    },
    /// An array that is mapped.
    #[error("map {map}: {source}")]
    Window {
        /// The map.
        map: &'static str,
        /// The cause.
        source: WindowError,
    },
}

impl MapsError {
    /// True if the map has no room: the state before stands, and nothing but this entry is lost.
    pub fn is_full(&self) -> bool {
        match self {
            Self::Map {
                source: MapError::SyscallError(error),
                ..
            } => matches!(error.io_error.raw_os_error(), Some(libc::E2BIG | libc::ENOSPC)),
            _ => false,
        }
    }
}

/// What the kernel says of a map itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Its id.
    pub id: u32,
    /// The kernel's name of its type.
    pub kind: &'static str,
    /// Bytes of a key.
    pub key_size: u32,
    /// Bytes of a value.
    pub value_size: u32,
    /// Entries that fit.
    pub max_entries: u32,
    /// Kernel memory that is accounted to it, in bytes; `None` where the kernel does not tell.
    pub memory: Option<u64>,
}

/// The maps of the datapath.
pub struct Kernel {
    facts: BTreeMap<&'static str, Facts>,
    frontends: HashMap<MapData, FrontendKey, Frontend>,
    sets: Array<u64>,
    lists: Array<ListEntry>,
    tables: Array<u64>,
    backends: Array<Backend>,
    backend_stats: Array<BackendCounters>,
    service_stats: Array<ServiceCounters>,
    affinity: HashMap<MapData, AffinityKey, Affinity>,
    memberships: HashMap<MapData, Membership, u32>,
    sources: Sources,
    sockets: HashMap<MapData, u64, SocketState>,
    udp_reverse: HashMap<MapData, ReverseKey, Reverse>,
    udp_sockets: HashMap<MapData, u64, ChainHead>,
    opted_out: HashMap<MapData, u64, u32>,
    dials: HashMap<MapData, FrontendKey, u64>,
    passages: HashMap<MapData, FrontendKey, Passage>,
    counters: PerCpuArray<MapData, u64>,
    flows: Flows,
    index: Option<BackendIndex>,
}

impl std::fmt::Debug for Kernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kernel")
            .field("facts", &self.facts)
            .finish_non_exhaustive()
    }
}

impl Kernel {
    /// Takes the maps out of a loaded object; the ring buffer comes apart, for another reader.
    ///
    /// # Errors
    /// When a map is missing, or a pinned one has another layout.
    pub fn take(object: &mut Ebpf, index_backends: bool) -> Result<(Self, RingBuf<MapData>), LoadError> {
        let mut facts = BTreeMap::new();
        let all = names::STATE_MAPS.into_iter().chain(names::SOCKET_MAPS);
        for name in all.chain(names::FLOW_MAPS).chain(names::PASSING_MAPS) {
            facts.insert(name, facts_of(object, name)?);
        }
        let events = RingBuf::try_from(take(object, names::EVENTS)?).map_err(map_error(names::EVENTS))?;
        let index: HashMap<MapData, EndpointKey, u32> = hash(object, names::BACKEND_INDEX)?;
        let mut kernel = Self {
            frontends: hash(object, names::FRONTENDS)?,
            sets: array(object, names::SETS)?,
            lists: array(object, names::LISTS)?,
            tables: array(object, names::TABLES)?,
            backends: array(object, names::BACKENDS)?,
            backend_stats: array(object, names::BACKEND_STATS)?,
            service_stats: array(object, names::SERVICE_STATS)?,
            affinity: hash(object, names::AFFINITY)?,
            memberships: hash(object, names::MEMBERS)?,
            sources: Sources::try_from(take(object, names::SOURCES)?).map_err(map_error(names::SOURCES))?,
            sockets: hash(object, names::SOCKETS)?,
            udp_reverse: hash(object, names::UDP_REVERSE)?,
            udp_sockets: hash(object, names::UDP_SOCKETS)?,
            opted_out: hash(object, names::OPTED_OUT)?,
            dials: hash(object, names::DIALS)?,
            passages: hash(object, names::PASSAGES)?,
            counters: PerCpuArray::try_from(take(object, names::COUNTERS)?).map_err(map_error(names::COUNTERS))?,
            flows: Flows::take(object)?,
            index: None,
            facts,
        };
        if index_backends {
            let mut held = Vec::new();
            scan(names::BACKENDS, &kernel.backends, |id, backend| {
                if backend.state != state::VACANT {
                    held.push((id, backend));
                }
            })?;
            kernel.index = Some(BackendIndex::rebuild(index, held)?);
        }
        Ok((kernel, events))
    }

    /// The capacities of the maps as they are in the kernel, which for pinned maps are those of their first agent.
    pub fn capacity(&self) -> Capacity {
        Capacity {
            frontends: self.limit(names::FRONTENDS),
            services: self.service_stats.len(),
            sets: self.sets.len(),
            backends: self.backends.len(),
            lists: self.lists.len().min(1 << lb_common::set::OFFSET_BITS),
            tables: self.tables.len(),
            memberships: self.limit(names::MEMBERS),
            sources: self.limit(names::SOURCES),
        }
    }

    /// Carries out a plan, in its order. What was written before an error stays written; a later plan repairs it.
    ///
    /// # Errors
    /// When a map has no room, or the kernel refuses.
    pub fn apply(&mut self, plan: &Plan) -> Result<(), MapsError> {
        Phase::ORDER
            .into_iter()
            .try_for_each(|phase| self.carry_out(phase, plan))
    }

    fn carry_out(&mut self, phase: Phase, plan: &Plan) -> Result<(), MapsError> {
        match phase {
            Phase::ZeroCounters => self.zero_counters(plan),
            Phase::PutBackends => self.put_backends(plan),
            Phase::WriteTables => self.write_tables(&plan.tables),
            Phase::WriteLists => self.write_lists(&plan.lists),
            Phase::DropMemberships => {
                let mut all = plan.drop_memberships.iter();
                all.try_for_each(|membership| remove(names::MEMBERS, &mut self.memberships, membership))
            }
            Phase::PutMemberships => {
                let mut all = plan.put_memberships.iter();
                all.try_for_each(|membership| put(names::MEMBERS, &mut self.memberships, membership, &1))
            }
            Phase::FlipSets => self.flip(plan.flip_sets.iter().map(|(id, word)| (*id, *word))),
            Phase::PutSources => self.sources.put(&plan.put_sources),
            Phase::DropSources => self.sources.remove(&plan.drop_sources),
            Phase::DropFrontends => {
                let mut all = plan.drop_frontends.iter();
                all.try_for_each(|key| remove(names::FRONTENDS, &mut self.frontends, key))
            }
            Phase::PutFrontends => {
                let mut all = plan.put_frontends.iter();
                all.try_for_each(|(key, value)| put(names::FRONTENDS, &mut self.frontends, key, value))
            }
            Phase::DropSets => self.flip(plan.drop_sets.iter().map(|id| (*id, SetWord::default()))),
            Phase::DropBackends => self.drop_backends(plan),
        }
    }

    fn zero_counters(&mut self, plan: &Plan) -> Result<(), MapsError> {
        each_window(
            names::BACKEND_STATS,
            &self.backend_stats,
            plan.fresh_backends.iter().map(|id| (*id, 1)),
            |window, at, _| window.set(at, BackendCounters::default()),
        )?;
        each_window(
            names::SERVICE_STATS,
            &self.service_stats,
            plan.fresh_services.iter().map(|id| (*id, 1)),
            |window, at, _| window.set(at, ServiceCounters::default()),
        )
    }

    fn put_backends(&mut self, plan: &Plan) -> Result<(), MapsError> {
        if let Some(index) = &mut self.index {
            for (id, backend) in &plan.put_backends {
                index.add(*id, backend_key(backend))?;
            }
        }
        each_window(
            names::BACKENDS,
            &self.backends,
            plan.put_backends.keys().map(|id| (*id, 1)),
            |window, at, id| window.set(at, plan.put_backends[&id]),
        )
    }

    fn drop_backends(&mut self, plan: &Plan) -> Result<(), MapsError> {
        each_window(
            names::BACKENDS,
            &self.backends,
            plan.drop_backends.iter().map(|id| (*id, 1)),
            |window, at, _| {
                // The address stays readable for a program that is in the middle of a choice.
                let mut backend = window.get(at);
                backend.state = state::VACANT;
                window.set(at, backend);
            },
        )?;
        if let Some(index) = &mut self.index {
            for id in &plan.drop_backends {
                index.remove(*id)?;
            }
        }
        Ok(())
    }

    fn write_tables(&mut self, tables: &[TableWrite]) -> Result<(), MapsError> {
        let by_offset: StdMap<u32, &TableWrite> = tables.iter().map(|t| (t.offset, t)).collect();
        let mut ranges: Vec<(u32, u32)> = tables
            .iter()
            .map(|t| (t.offset, elements_for(t.slots.len() as u32)))
            .collect();
        ranges.sort_unstable();
        each_window(names::TABLES, &self.tables, ranges.into_iter(), |window, at, offset| {
            for (i, four) in by_offset[&offset].slots.chunks(SLOTS_PER_ELEMENT as usize).enumerate() {
                let element = four.iter().rev().fold(0u64, |e, slot| e << 16 | u64::from(*slot));
                window.set(at + i as u32, element);
            }
        })
    }

    fn write_lists(&mut self, lists: &[ListWrite]) -> Result<(), MapsError> {
        let by_offset: StdMap<u32, &ListWrite> = lists.iter().map(|l| (l.offset, l)).collect();
        let mut ranges: Vec<(u32, u32)> = lists.iter().map(|l| (l.offset, l.members.len() as u32 + 1)).collect();
        ranges.sort_unstable();
        each_window(names::LISTS, &self.lists, ranges.into_iter(), |window, at, offset| {
            let list = by_offset[&offset];
            let header = ListEntry {
                a: list.table,
                b: list.slots,
                c: 0,
            };
            window.set(at, header);
            for (i, (backend_id, weight)) in list.members.iter().enumerate() {
                let member = ListEntry {
                    a: *backend_id,
                    b: u32::from(*weight),
                    c: 0,
                };
                window.set(at + 1 + i as u32, member);
            }
        })
    }

    fn flip(&mut self, words: impl Iterator<Item = (u32, SetWord)>) -> Result<(), MapsError> {
        let words: StdMap<u32, SetWord> = words.collect();
        let mut ids: Vec<(u32, u32)> = words.keys().map(|id| (*id, 1)).collect();
        ids.sort_unstable();
        each_window(names::SETS, &self.sets, ids.into_iter(), |window, at, id| {
            window.publish(at, words[&id].0);
        })
    }

    /// Reads all state back.
    ///
    /// # Errors
    /// When the kernel refuses a read.
    pub fn dump(&self) -> Result<Contents, MapsError> {
        let mut contents = Contents::default();
        for entry in &self.frontends {
            let (key, value) = entry.map_err(read_error(names::FRONTENDS))?;
            contents.frontends.insert(key, value);
        }
        for key in self.memberships.keys() {
            contents.memberships.insert(key.map_err(read_error(names::MEMBERS))?);
        }
        contents.sources = self.sources.read()?;
        scan(names::BACKENDS, &self.backends, |id, backend| {
            if backend.state != state::VACANT {
                contents.backends.insert(id, backend);
            }
        })?;
        scan(names::SETS, &self.sets, |id, word| {
            if word != 0 {
                contents.sets.insert(id, SetWord(word));
            }
        })?;
        let mut lists: Vec<(u32, SetWord)> = contents.sets.iter().map(|(id, word)| (*id, *word)).collect();
        lists.sort_by_key(|(_, word)| word.offset());
        let mut hashes: StdMap<(u32, u32), u64> = StdMap::new();
        for (id, word) in lists {
            if word.count() == 0 {
                continue;
            }
            // A word that names what lies beyond the array is foreign: it has no list, and will be replaced.
            if let Ok(list) = self.list(word, &mut hashes) {
                contents.lists.insert(id, list);
            }
        }
        Ok(contents)
    }

    fn list(&self, word: SetWord, hashes: &mut StdMap<(u32, u32), u64>) -> Result<List, WindowError> {
        let window = self.lists.window(word.offset(), u32::from(word.count()) + 1)?;
        let header = window.get(0);
        let members = (1..window.len())
            .map(|i| window.get(i))
            .map(|entry| (entry.a, entry.b as u16))
            .collect();
        let content = *hashes
            .entry((header.a, header.b))
            .or_insert_with(|| self.table(header.a, header.b).map_or(0, table_hash));
        Ok(List {
            table: header.a,
            slots: header.b,
            members,
            content,
        })
    }

    /// Reads a Maglev table.
    ///
    /// # Errors
    /// When it lies beyond the array.
    pub fn table(&self, offset: u32, slots: u32) -> Result<Vec<u16>, WindowError> {
        let window = self.tables.window(offset, elements_for(slots))?;
        Ok((0..slots)
            .map(|slot| slot_of(window.get(slot / SLOTS_PER_ELEMENT), slot))
            .collect())
    }

    /// Connections started on each member of a published list, in its order.
    ///
    /// # Errors
    /// When it lies beyond the array.
    pub fn started(&self, word: SetWord) -> Result<Vec<u64>, WindowError> {
        if word.count() == 0 {
            return Ok(Vec::new());
        }
        let window = self.lists.window(word.offset() + 1, u32::from(word.count()))?;
        Ok((0..window.len()).map(|i| window.get(i).c).collect())
    }

    /// The counters of backends `1..end`, by id.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn backend_counters(&self, end: u32, mut each: impl FnMut(u32, BackendCounters)) -> Result<(), MapsError> {
        scan_to(names::BACKEND_STATS, &self.backend_stats, end, &mut each)
    }

    /// The counters of several backends, by id.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn backend_counters_of(
        &self,
        ids: impl IntoIterator<Item = u32>,
    ) -> Result<StdMap<u32, BackendCounters>, MapsError> {
        let mut ids: Vec<u32> = ids.into_iter().collect();
        ids.sort_unstable();
        let mut found = StdMap::with_capacity(ids.len());
        each_window(
            names::BACKEND_STATS,
            &self.backend_stats,
            ids.into_iter().map(|id| (id, 1)),
            |window, at, id| {
                found.insert(id, window.get(at));
            },
        )?;
        Ok(found)
    }

    /// The counters of one backend.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn backend_counter(&self, id: u32) -> Result<BackendCounters, MapsError> {
        let window = self
            .backend_stats
            .window(id, 1)
            .map_err(window_error(names::BACKEND_STATS))?;
        Ok(window.get(0))
    }

    /// The counters of one Service.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn service_counter(&self, id: u32) -> Result<ServiceCounters, MapsError> {
        let window = self
            .service_stats
            .window(id, 1)
            .map_err(window_error(names::SERVICE_STATS))?;
        Ok(window.get(0))
    }

    /// The counters of Services `0..end`, by id.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn service_counters(&self, end: u32, mut each: impl FnMut(u32, ServiceCounters)) -> Result<(), MapsError> {
        scan_to(names::SERVICE_STATS, &self.service_stats, end, &mut each)
    }

    /// The per-CPU counters, summed, by index of [`lb_common::counter::index`].
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn counters(&self) -> Result<Vec<u64>, MapsError> {
        (0..counter::COUNTERS)
            .map(|i| {
                let values = self.counters.get(&i, 0).map_err(read_error(names::COUNTERS))?;
                Ok(values.iter().sum())
            })
            .collect()
    }

    /// Opts a cgroup out, by id.
    ///
    /// # Errors
    /// When the map has no room.
    pub fn opt_out(&mut self, cgroup_id: u64) -> Result<(), MapsError> {
        put(names::OPTED_OUT, &mut self.opted_out, &cgroup_id, &1)
    }

    /// Opts in whoever is not in `keep`.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn opt_in_all_but(&mut self, keep: &[u64]) -> Result<(), MapsError> {
        let held: Vec<u64> = self.opted_out.keys().flatten().collect();
        for id in held.iter().filter(|id| !keep.contains(id)) {
            remove(names::OPTED_OUT, &mut self.opted_out, id)?;
        }
        Ok(())
    }

    /// Removes reverse entries whose socket is gone: those beyond the walk of the socket's release. Returns how many.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn sweep_reverse(&mut self) -> Result<u64, MapsError> {
        let mut alive: StdMap<u64, bool> = StdMap::new();
        let mut leftovers = Vec::new();
        for key in self.udp_reverse.keys() {
            // The map changes while it is walked: a key that vanished restarts the walk, an error ends it.
            let Ok(key) = key else { break };
            let known = *alive
                .entry(key.cookie)
                .or_insert_with(|| self.udp_sockets.get(&key.cookie, 0).is_ok());
            if !known {
                leftovers.push(key);
            }
        }
        for key in &leftovers {
            remove(names::UDP_REVERSE, &mut self.udp_reverse, key)?;
        }
        Ok(leftovers.len() as u64)
    }

    /// Entries of a hash map, counted by walking it; `None` for arrays and unknown names.
    pub fn count_entries(&self, map: &str) -> Option<u64> {
        let count = match map {
            names::FRONTENDS => self.frontends.keys().flatten().count(),
            names::AFFINITY => self.affinity.keys().flatten().count(),
            names::MEMBERS => self.memberships.keys().flatten().count(),
            names::SOURCES => self.sources.len(),
            names::SOCKETS => self.sockets.keys().flatten().count(),
            names::UDP_REVERSE => self.udp_reverse.keys().flatten().count(),
            names::UDP_SOCKETS => self.udp_sockets.keys().flatten().count(),
            names::OPTED_OUT => self.opted_out.keys().flatten().count(),
            names::DIALS => self.dials.keys().flatten().count(),
            names::PASSAGES => self.passages.keys().flatten().count(),
            names::BACKEND_INDEX => self.index.as_ref()?.len(),
            _ => return self.flows.count_entries(map),
        };
        Some(count as u64)
    }

    /// The maps of translated packets.
    pub fn flows(&self) -> &Flows {
        &self.flows
    }

    /// The maps of translated packets, to be written.
    pub fn flows_mut(&mut self) -> &mut Flows {
        &mut self.flows
    }

    /// What the kernel says of each map, by name.
    pub fn facts(&self) -> &BTreeMap<&'static str, Facts> {
        &self.facts
    }

    fn limit(&self, map: &str) -> u32 {
        self.facts.get(map).map_or(0, |facts| facts.max_entries)
    }

    /// The state of sockets, by cookie.
    pub fn sockets(&self) -> impl Iterator<Item = (u64, SocketState)> + '_ {
        self.sockets.iter().flatten()
    }

    /// Sources of followed sockets, with the sockets' cookies.
    pub fn dials(&self) -> impl Iterator<Item = (FrontendKey, u64)> + '_ {
        self.dials.iter().flatten()
    }

    /// Clients without a followed socket.
    pub fn passages(&self) -> impl Iterator<Item = (FrontendKey, Passage)> + '_ {
        self.passages.iter().flatten()
    }

    /// The reverse entries of UDP sockets.
    pub fn reverse_entries(&self) -> impl Iterator<Item = (ReverseKey, Reverse)> + '_ {
        self.udp_reverse.iter().flatten()
    }

    /// The UDP sockets with reverse entries, by cookie.
    pub fn udp_sockets(&self) -> impl Iterator<Item = (u64, ChainHead)> + '_ {
        self.udp_sockets.iter().flatten()
    }

    /// The remembered clients.
    pub fn affinities(&self) -> impl Iterator<Item = (AffinityKey, Affinity)> + '_ {
        self.affinity.iter().flatten()
    }

    /// What is remembered of one client.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn affinity(&self, key: &AffinityKey) -> Result<Option<Affinity>, MapsError> {
        match self.affinity.get(key, 0) {
            Ok(memory) => Ok(Some(memory)),
            Err(MapError::KeyNotFound) => Ok(None),
            Err(error) => Err(read_error(names::AFFINITY)(error)),
        }
    }

    /// Whether a backend is a usable member of a set with affinity.
    pub fn is_member(&self, membership: &Membership) -> bool {
        self.memberships.get(membership, 0).is_ok()
    }

    /// The opted-out cgroups.
    pub fn opted_out(&self) -> impl Iterator<Item = u64> + '_ {
        self.opted_out.keys().flatten()
    }
}

/// Entries that one window covers at most, so that a batch maps little at a time.
const WINDOW: u32 = 32_768;

/// Runs `each` for every range (sorted by offset), mapping as few windows as are needed: (window, index in it, offset).
fn each_window<T: aya::Pod>(
    map: &'static str,
    array: &Array<T>,
    ranges: impl Iterator<Item = (u32, u32)>,
    mut each: impl FnMut(&mut Window<T>, u32, u32),
) -> Result<(), MapsError> {
    let mut ranges = ranges.peekable();
    while let Some((first, len)) = ranges.next() {
        let mut batch = vec![(first, len)];
        let mut end = first.saturating_add(len);
        while let Some((offset, len)) = ranges
            .next_if(|(offset, len)| offset.saturating_add(*len).saturating_sub(first) <= WINDOW && *offset >= first)
        {
            batch.push((offset, len));
            end = end.max(offset.saturating_add(len));
        }
        let mut window = array.window(first, end - first).map_err(window_error(map))?;
        for (offset, _) in batch {
            each(&mut window, offset - first, offset);
        }
    }
    Ok(())
}

fn scan<T: aya::Pod>(map: &'static str, array: &Array<T>, mut each: impl FnMut(u32, T)) -> Result<(), MapsError> {
    scan_to(map, array, array.len(), &mut each)
}

fn scan_to<T: aya::Pod>(
    map: &'static str,
    array: &Array<T>,
    end: u32,
    each: &mut impl FnMut(u32, T),
) -> Result<(), MapsError> {
    let end = end.min(array.len());
    let mut first = 0;
    while first < end {
        let count = WINDOW.min(end - first);
        let window = array.window(first, count).map_err(window_error(map))?;
        for i in 0..count {
            each(first + i, window.get(i));
        }
        first += count;
    }
    Ok(())
}

pub(super) fn put<K: aya::Pod, V: aya::Pod>(
    map: &'static str,
    into: &mut HashMap<MapData, K, V>,
    key: &K,
    value: &V,
) -> Result<(), MapsError> {
    into.insert(key, value, 0).map_err(|source| MapsError::Map {
        operation: "update",
        map,
        source,
    })
}

pub(super) fn remove<K: aya::Pod, V: aya::Pod>(
    map: &'static str,
    from: &mut HashMap<MapData, K, V>,
    key: &K,
) -> Result<(), MapsError> {
    removed(map, from.remove(key))
}

/// Removing what is not there is the wanted end.
pub(super) fn removed(map: &'static str, result: Result<(), MapError>) -> Result<(), MapsError> {
    match result {
        Ok(()) | Err(MapError::KeyNotFound) => Ok(()),
        Err(MapError::SyscallError(error)) if error.io_error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        Err(source) => Err(MapsError::Map {
            operation: "delete from",
            map,
            source,
        }),
    }
}

pub(super) fn read_error(map: &'static str) -> impl Fn(MapError) -> MapsError {
    move |source| MapsError::Map {
        operation: "read",
        map,
        source,
    }
}

pub(super) fn window_error(map: &'static str) -> impl Fn(WindowError) -> MapsError {
    move |source| MapsError::Window { map, source }
}

fn map_error(name: &'static str) -> impl Fn(MapError) -> LoadError {
    move |source| LoadError::Map { name, source }
}

fn take(object: &mut Ebpf, name: &'static str) -> Result<Map, LoadError> {
    object.take_map(name).ok_or(LoadError::Missing(name))
}

pub(super) fn hash<K: aya::Pod, V: aya::Pod>(
    object: &mut Ebpf,
    name: &'static str,
) -> Result<HashMap<MapData, K, V>, LoadError> {
    // aya compares the sizes of key and value.
    HashMap::try_from(take(object, name)?).map_err(map_error(name))
}

fn facts_of(object: &Ebpf, name: &'static str) -> Result<Facts, LoadError> {
    let (data, kind) = match object.map(name).ok_or(LoadError::Missing(name))? {
        Map::Array(data) => (data, "array"),
        Map::PerCpuArray(data) => (data, "percpu_array"),
        Map::HashMap(data) => (data, "hash"),
        Map::LruHashMap(data) => (data, "lru_hash"),
        Map::LpmTrie(data) => (data, "lpm_trie"),
        Map::RingBuf(data) => (data, "ringbuf"),
        _ => {
            return Err(LoadError::Layout {
                name,
                found: "another type of map".to_owned(),
                wanted: "the type of this build".to_owned(),
            });
        }
    };
    let info = data.info().map_err(map_error(name))?;
    Ok(Facts {
        id: info.id(),
        kind,
        key_size: info.key_size(),
        value_size: info.value_size(),
        max_entries: info.max_entries(),
        memory: memory_of(data.fd().as_fd()),
    })
}

/// The memory accounted to a map, which the kernel tells beside its descriptor.
fn memory_of(map: BorrowedFd<'_>) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", map.as_raw_fd())).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("memlock:"))?;
    line.trim().parse().ok()
}

pub(super) fn array<T: aya::Pod>(object: &mut Ebpf, name: &'static str) -> Result<Array<T>, LoadError> {
    let Map::Array(data) = take(object, name)? else {
        return Err(LoadError::Layout {
            name,
            found: "another type of map".to_owned(),
            wanted: "an array".to_owned(),
        });
    };
    let info = data.info().map_err(map_error(name))?;
    let wanted = size_of::<T>() as u32;
    if info.value_size() != wanted {
        return Err(LoadError::Layout {
            name,
            found: format!("value size {}", info.value_size()),
            wanted: format!("value size {wanted}"),
        });
    }
    let len = info.max_entries();
    Ok(Array::new(data, len))
}
