//! The state maps in memory: an honest fake of the kernel's.
//!
//! It proves what follows from plans alone: their order, what stands in the maps after every single write, what is read
//! back, what a full map or a refusal at any write leaves behind. It cannot prove that the kernel's maps behave so (the
//! test `sock_maps` compares both on the same plans), nor anything about programs, memory ordering, per-CPU state,
//! concurrency or time. A table or a list counts as one write: nothing names it while it is written.

use std::collections::{HashMap, HashSet};

use aya::{maps::MapError, sys::SyscallError};
use lb_common::{
    affinity::Membership,
    backend::{Backend, BackendCounters, ServiceCounters, state},
    frontend::{Frontend, FrontendKey},
    maps as names,
    set::{ListEntry, SLOTS_PER_ELEMENT, SetWord, elements_for, slot_of},
};

use super::{
    kernel::MapsError,
    maps::{Maps, OpenIds, is_backend_idle, is_service_idle},
    window::WindowError,
};
use crate::{
    compile::{Capacity, Contents, List, Source, table_hash},
    plan::{ListWrite, Phase, Plan},
};

/// One write: to which map, and which entries of an array it touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Store {
    /// The map's name.
    pub map: &'static str,
    /// The first entry, for arrays; 0 for hash maps.
    pub first: u32,
    /// Number of entries, for arrays; 0 for hash maps.
    pub count: u32,
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fault {
    /// Nothing.
    #[default]
    None,
    /// Every write after so many more is refused with EIO: the agent might as well have died there.
    After(usize),
    /// One write, after so many more, is refused with EIO.
    Once(usize),
}

/// The state maps as flat arrays and hash maps of plain memory.
#[derive(Clone, Debug)]
pub struct Memory {
    capacity: Capacity,
    /// How many memberships fit, where the map is smaller than the compiler believes.
    pub max_memberships: usize,
    /// How many frontends fit, where the map is smaller than the compiler believes.
    pub max_frontends: usize,
    /// How many source ranges fit, where the map is smaller than the compiler believes.
    pub max_sources: usize,
    /// What goes wrong.
    pub fault: Fault,
    /// Writes so far.
    pub writes: usize,
    /// The frontend map.
    pub frontends: HashMap<FrontendKey, Frontend>,
    /// The words of the sets, by id.
    pub sets: Vec<u64>,
    /// All lists.
    pub lists: Vec<ListEntry>,
    /// All tables, four slots an element.
    pub tables: Vec<u64>,
    /// The backends, by id.
    pub backends: Vec<Backend>,
    /// The memberships of sets with affinity.
    pub memberships: HashSet<Membership>,
    /// The source ranges.
    pub sources: HashSet<Source>,
    /// Counters of backends that are not all zero, by id.
    pub backend_counters: HashMap<u32, BackendCounters>,
    /// Counters of Services that are not all zero, by id.
    pub service_counters: HashMap<u32, ServiceCounters>,
}

impl Memory {
    /// Empty maps.
    pub fn new(capacity: Capacity) -> Self {
        Self {
            capacity,
            max_memberships: capacity.memberships as usize,
            max_frontends: capacity.frontends as usize,
            max_sources: capacity.sources as usize,
            fault: Fault::None,
            writes: 0,
            frontends: HashMap::new(),
            sets: vec![0; capacity.sets as usize],
            lists: vec![ListEntry::default(); capacity.lists as usize],
            tables: vec![0; capacity.tables as usize],
            backends: vec![Backend::default(); capacity.backends as usize],
            memberships: HashSet::new(),
            sources: HashSet::new(),
            backend_counters: HashMap::new(),
            service_counters: HashMap::new(),
        }
    }

    /// Carries out a plan and shows the maps after every single write.
    ///
    /// # Errors
    /// When a map has no room, an entry lies beyond its array, or the [`Fault`] says so.
    pub fn carry_out(&mut self, plan: &Plan, each: &mut dyn FnMut(&Self, Store)) -> Result<(), MapsError> {
        for phase in Phase::ORDER {
            self.phase(phase, plan, each)?;
        }
        Ok(())
    }

    fn phase(&mut self, phase: Phase, plan: &Plan, each: &mut dyn FnMut(&Self, Store)) -> Result<(), MapsError> {
        match phase {
            Phase::ZeroCounters => {
                for id in &plan.fresh_backends {
                    self.write(names::BACKEND_STATS, (*id, 1), each, |this| {
                        this.backend_counters.remove(id);
                    })?;
                }
                for id in &plan.fresh_services {
                    self.write(names::SERVICE_STATS, (*id, 1), each, |this| {
                        this.service_counters.remove(id);
                    })?;
                }
            }
            Phase::PutBackends => {
                for (id, backend) in &plan.put_backends {
                    self.write(names::BACKENDS, (*id, 1), each, |this| {
                        this.backends[*id as usize] = *backend;
                    })?;
                }
            }
            Phase::WriteTables => {
                for table in &plan.tables {
                    let range = (table.offset, elements_for(table.slots.len() as u32));
                    self.write(names::TABLES, range, each, |this| {
                        this.write_table(table.offset, &table.slots);
                    })?;
                }
            }
            Phase::WriteLists => {
                for list in &plan.lists {
                    let range = (list.offset, list.members.len() as u32 + 1);
                    self.write(names::LISTS, range, each, |this| this.write_list(list))?;
                }
            }
            Phase::DropMemberships => {
                for membership in &plan.drop_memberships {
                    self.write(names::MEMBERS, (0, 0), each, |this| {
                        this.memberships.remove(membership);
                    })?;
                }
            }
            Phase::PutMemberships => {
                for membership in &plan.put_memberships {
                    if self.memberships.len() >= self.max_memberships && !self.memberships.contains(membership) {
                        return Err(refusal(names::MEMBERS, libc::E2BIG));
                    }
                    self.write(names::MEMBERS, (0, 0), each, |this| {
                        this.memberships.insert(*membership);
                    })?;
                }
            }
            Phase::FlipSets => {
                for (id, word) in &plan.flip_sets {
                    self.write(names::SETS, (*id, 1), each, |this| this.sets[*id as usize] = word.0)?;
                }
            }
            Phase::PutSources => {
                for source in &plan.put_sources {
                    // The kernel's trie says this where its hash maps say E2BIG.
                    if self.sources.len() >= self.max_sources && !self.sources.contains(source) {
                        return Err(refusal(names::SOURCES, libc::ENOSPC));
                    }
                    self.write(names::SOURCES, (0, 0), each, |this| {
                        this.sources.insert(*source);
                    })?;
                }
            }
            Phase::DropSources => {
                for source in &plan.drop_sources {
                    self.write(names::SOURCES, (0, 0), each, |this| {
                        this.sources.remove(source);
                    })?;
                }
            }
            Phase::DropFrontends => {
                for key in &plan.drop_frontends {
                    self.write(names::FRONTENDS, (0, 0), each, |this| {
                        this.frontends.remove(key);
                    })?;
                }
            }
            Phase::PutFrontends => {
                for (key, value) in &plan.put_frontends {
                    if self.frontends.len() >= self.max_frontends && !self.frontends.contains_key(key) {
                        return Err(refusal(names::FRONTENDS, libc::E2BIG));
                    }
                    self.write(names::FRONTENDS, (0, 0), each, |this| {
                        this.frontends.insert(*key, *value);
                    })?;
                }
            }
            Phase::DropSets => {
                for id in &plan.drop_sets {
                    self.write(names::SETS, (*id, 1), each, |this| this.sets[*id as usize] = 0)?;
                }
            }
            Phase::DropBackends => {
                for id in &plan.drop_backends {
                    self.write(names::BACKENDS, (*id, 1), each, |this| {
                        this.backends[*id as usize].state = state::VACANT;
                    })?;
                }
            }
        }
        Ok(())
    }

    fn write(
        &mut self,
        map: &'static str,
        (first, count): (u32, u32),
        each: &mut dyn FnMut(&Self, Store),
        write: impl FnOnce(&mut Self),
    ) -> Result<(), MapsError> {
        match &mut self.fault {
            Fault::None => {}
            Fault::After(left) | Fault::Once(left) if *left > 0 => *left -= 1,
            Fault::After(_) => return Err(refusal(map, libc::EIO)),
            Fault::Once(_) => {
                self.fault = Fault::None;
                return Err(refusal(map, libc::EIO));
            }
        }
        let end = u64::from(first) + u64::from(count);
        let len = self.len(map);
        if end > u64::from(len) {
            let source = WindowError::Beyond { first, end, len };
            return Err(MapsError::Window { map, source });
        }
        write(self);
        self.writes += 1;
        each(self, Store { map, first, count });
        Ok(())
    }

    /// Entries of an array; a hash map is bounded by its number of keys instead.
    fn len(&self, map: &str) -> u32 {
        match map {
            names::SETS => self.sets.len() as u32,
            names::LISTS => self.lists.len() as u32,
            names::TABLES => self.tables.len() as u32,
            names::BACKENDS | names::BACKEND_STATS => self.backends.len() as u32,
            names::SERVICE_STATS => self.capacity.services,
            _ => u32::MAX,
        }
    }

    fn write_table(&mut self, offset: u32, slots: &[u16]) {
        for (i, four) in slots.chunks(SLOTS_PER_ELEMENT as usize).enumerate() {
            let element = four.iter().rev().fold(0u64, |e, slot| e << 16 | u64::from(*slot));
            self.tables[offset as usize + i] = element;
        }
    }

    fn write_list(&mut self, list: &ListWrite) {
        let at = list.offset as usize;
        let header = ListEntry {
            a: list.table,
            b: list.slots,
            c: 0,
        };
        self.lists[at] = header;
        for (i, (backend_id, weight)) in list.members.iter().enumerate() {
            self.lists[at + 1 + i] = ListEntry {
                a: *backend_id,
                b: u32::from(*weight),
                c: 0,
            };
        }
    }

    /// The list that a word names; `None` if it lies beyond the array.
    fn list(&self, word: SetWord) -> Option<List> {
        let at = word.offset() as usize;
        let entries = self.lists.get(at..=at + usize::from(word.count()))?;
        let (header, members) = entries.split_first()?;
        Some(List {
            table: header.a,
            slots: header.b,
            members: members.iter().map(|entry| (entry.a, entry.b as u16)).collect(),
            content: self.table(header.a, header.b).map_or(0, table_hash),
        })
    }
}

impl Maps for Memory {
    fn capacity(&self) -> Capacity {
        self.capacity
    }

    fn apply(&mut self, plan: &Plan) -> Result<(), MapsError> {
        self.carry_out(plan, &mut |_, _| ())
    }

    fn dump(&self) -> Result<Contents, MapsError> {
        let sets: HashMap<u32, SetWord> = (0u32..)
            .zip(&self.sets)
            .filter(|(_, word)| **word != 0)
            .map(|(id, word)| (id, SetWord(*word)))
            .collect();
        Ok(Contents {
            lists: sets
                .iter()
                .filter(|(_, word)| word.count() > 0)
                .filter_map(|(id, word)| Some((*id, self.list(*word)?)))
                .collect(),
            sets,
            frontends: self.frontends.clone(),
            backends: (0u32..)
                .zip(&self.backends)
                .filter(|(_, backend)| backend.state != state::VACANT)
                .map(|(id, backend)| (id, *backend))
                .collect(),
            memberships: self.memberships.clone(),
            sources: self.sources.clone(),
        })
    }

    fn table(&self, offset: u32, slots: u32) -> Result<Vec<u16>, WindowError> {
        let end = u64::from(offset) + u64::from(elements_for(slots));
        let elements = self
            .tables
            .get(offset as usize..end as usize)
            .ok_or(WindowError::Beyond {
                first: offset,
                end,
                len: self.tables.len() as u32,
            })?;
        Ok((0..slots)
            .map(|slot| slot_of(elements[(slot / SLOTS_PER_ELEMENT) as usize], slot))
            .collect())
    }

    fn backend_counter(&self, id: u32) -> Result<BackendCounters, MapsError> {
        Ok(self.backend_counters.get(&id).copied().unwrap_or_default())
    }

    fn service_counter(&self, id: u32) -> Result<ServiceCounters, MapsError> {
        Ok(self.service_counters.get(&id).copied().unwrap_or_default())
    }

    fn open_ids(&self) -> Result<OpenIds, MapsError> {
        let backends = self.backend_counters.iter().filter(|(_, c)| !is_backend_idle(c));
        let services = self.service_counters.iter().filter(|(_, c)| !is_service_idle(c));
        Ok(OpenIds {
            backends: backends.map(|(id, _)| *id).collect(),
            services: services.map(|(id, _)| *id).collect(),
        })
    }
}

fn refusal(map: &'static str, errno: i32) -> MapsError {
    MapsError::Map {
        operation: "update",
        map,
        source: MapError::SyscallError(SyscallError {
            call: "bpf_map_update_elem",
            io_error: std::io::Error::from_raw_os_error(errno),
        }),
    }
}
