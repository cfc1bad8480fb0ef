//! From what a Service wants to what the maps should hold: ids, lists and tables.
//!
//! Pure: no map is touched here, and time comes in as an argument. What a [`Compiled`] names is allocated and is not
//! given to anybody else until [`Compiler::retire`] and a grace. The order of writes is `plan`'s business.

mod contents;
mod frontends;
mod members;
mod restored;
mod sources;
mod space;

use std::collections::{HashMap, HashSet};

use lb_common::{
    addr::{Addr, Port},
    affinity::Membership,
    backend::{Backend, state},
    frontend::{Frontend, FrontendKey},
    maglev,
    set::{SetWord, elements_for},
};

use crate::{
    datapath::maps::OpenIds,
    model::{self, DesiredService, SetName},
};

use frontends::{Side, Use, key, set_ids, uses, value};
use members::{Placed, digest, list_order};
use restored::Restored;

pub use contents::{Contents, List, table_hash};
pub use frontends::proto;
pub use members::slots_of;
pub use sources::Source;
pub use space::{Full, GRACE_MS, Ids, Space};

/// Capacities, in entries of the maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Frontends.
    pub frontends: u32,
    /// Services.
    pub services: u32,
    /// Sets.
    pub sets: u32,
    /// Backends.
    pub backends: u32,
    /// List entries.
    pub lists: u32,
    /// Table elements.
    pub tables: u32,
    /// Memberships of sets with affinity.
    pub memberships: u32,
    /// Source ranges.
    pub sources: u32,
}

/// One Service as the maps should hold it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiled {
    /// The Service's id.
    pub service_id: u32,
    /// Its frontends, sorted by key.
    pub frontends: Box<[(FrontendKey, Frontend)]>,
    /// Its sets, in the order of their names.
    pub sets: Box<[CompiledSet]>,
    /// Its backends with their ids, sorted by (protocol, address, port).
    pub backends: Box<[(u32, Backend)]>,
    /// Who is admitted at its frontends with source ranges, sorted, each once.
    pub sources: Box<[Source]>,
}

impl Compiled {
    /// Finds a backend by address.
    pub fn backend_id(&self, proto: u8, addr: Addr, port: Port) -> Option<u32> {
        self.backends
            .binary_search_by_key(&(proto, addr, port), |(_, b)| order(b))
            .ok()
            .map(|i| self.backends[i].0)
    }

    /// The memberships of its sets with affinity.
    pub fn memberships(&self) -> impl Iterator<Item = Membership> {
        self.sets.iter().flat_map(CompiledSet::memberships)
    }
}

fn order(backend: &Backend) -> (u8, Addr, Port) {
    (backend.proto, backend.addr, backend.port)
}

/// One set as the maps should hold it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompiledSet {
    /// What the set is within its Service.
    pub name: SetName,
    /// Its id.
    pub set_id: u32,
    /// Its word; a count of 0 is an empty set without list and table.
    pub word: SetWord,
    /// Its Maglev table.
    pub table: Table,
    /// Backend id and weight of each member, in the list's order.
    pub members: Box<[(u32, u16)]>,
    /// Whether memberships are kept for it.
    pub affinity: bool,
}

impl CompiledSet {
    /// Its memberships where it has affinity: its members that may get new flows.
    pub fn memberships(&self) -> impl Iterator<Item = Membership> {
        let set_id = self.set_id;
        self.members
            .iter()
            .filter(|(_, weight)| self.affinity && *weight > 0)
            .map(move |(backend_id, _)| Membership {
                set_id,
                backend_id: *backend_id,
            })
    }
}

/// Where a Maglev table lies, and what it holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// Offset in the table array, in elements.
    pub offset: u32,
    /// Size in slots; 0 is no table.
    pub slots: u32,
    /// Hash of the slots.
    pub content: u64,
    /// Digest of the members that it was built from.
    digest: u128,
}

/// A table that is to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableWrite {
    /// Offset in the table array, in elements.
    pub offset: u32,
    /// The slots.
    pub slots: Vec<u16>,
}

#[derive(Debug)]
struct Shared {
    table: Table,
    users: u32,
}

/// Ids and room, and what the kernel held when the agent started.
#[derive(Debug)]
pub struct Compiler {
    capacity: Capacity,
    services: Ids,
    sets: Ids,
    backends: Ids,
    lists: Space,
    tables: Space,
    shared: HashMap<u128, Shared>,
    frontends: u32,
    memberships: u32,
    sources: u32,
    generation: u32,
    restored: Restored,
}

impl Compiler {
    /// A compiler for empty maps.
    pub fn new(capacity: Capacity) -> Self {
        Self {
            capacity,
            services: Ids::new("Services", "raise --max-services", capacity.services),
            sets: Ids::new("backend sets", "raise --max-frontends", capacity.sets),
            backends: Ids::new("backends", "raise --max-backends", capacity.backends),
            lists: Space::new("list entries", "raise --max-backends", capacity.lists),
            tables: Space::new("table elements", "raise --max-backends", capacity.tables),
            shared: HashMap::new(),
            frontends: 0,
            memberships: 0,
            sources: 0,
            generation: 0,
            restored: Restored::default(),
        }
    }

    /// Compiles a Service; `old` is what it was compiled to before. New tables go to `tables`.
    ///
    /// # Errors
    /// When a map has no room; nothing is then taken, and `old` stands.
    pub fn compile(
        &mut self,
        desired: &DesiredService,
        old: Option<&Compiled>,
        tables: &mut Vec<TableWrite>,
    ) -> Result<Compiled, Full> {
        let mut taken = Taken::default();
        let written = tables.len();
        self.restored.begin();
        let result = self
            .try_compile(desired, old, tables, &mut taken)
            .and_then(|compiled| self.count(old, Some(&compiled)).map(|()| compiled));
        if result.is_err() {
            tables.truncate(written);
            self.give_back(taken);
            self.restored.undo();
        }
        result
    }

    /// Counts what hash maps hold after a change; nothing is counted if it does not fit.
    fn count(&mut self, old: Option<&Compiled>, new: Option<&Compiled>) -> Result<(), Full> {
        let frontends = |service: Option<&Compiled>| service.map_or(0, |service| service.frontends.len() as u32);
        let members = |service: Option<&Compiled>| service.map_or(0, |service| service.memberships().count() as u32);
        let wanted_frontends = self.frontends + frontends(new) - frontends(old);
        let wanted_members = self.memberships + members(new) - members(old);
        // Whoever shrinks is never refused.
        if wanted_frontends > self.capacity.frontends.max(self.frontends) {
            return Err(Full {
                what: "frontends",
                capacity: self.capacity.frontends,
                flag: "raise --max-frontends",
            });
        }
        if wanted_members > self.capacity.memberships.max(self.memberships) {
            return Err(Full {
                what: "members of sets with ClientIP affinity",
                capacity: self.capacity.memberships,
                flag: "fewer Services can have affinity",
            });
        }
        self.count_sources(old, new)?;
        self.frontends = wanted_frontends;
        self.memberships = wanted_members;
        Ok(())
    }

    fn try_compile(
        &mut self,
        desired: &DesiredService,
        old: Option<&Compiled>,
        tables: &mut Vec<TableWrite>,
        taken: &mut Taken,
    ) -> Result<Compiled, Full> {
        let keys: Vec<FrontendKey> = desired.frontends.iter().map(key).collect();
        let service_id = match old {
            Some(old) => old.service_id,
            None => match self.restored.claim_service(desired, &keys) {
                Some(id) => id,
                None => taken.service(self.services.take()?),
            },
        };
        let backends = self.compile_backends(desired, old, service_id, taken)?;
        let mut sets = Vec::with_capacity(desired.sets.len());
        for (index, set) in desired.sets.iter().enumerate() {
            let uses = desired
                .frontends
                .iter()
                .zip(&keys)
                .flat_map(|(frontend, key)| uses(frontend, *key));
            let used_by: Vec<Use> = uses.filter(|(set, _)| *set == index).map(|(_, by)| by).collect();
            let affinity = desired.frontends.iter().any(|frontend| {
                let met = frontend.set == index || frontend.outside.is_some_and(|outside| outside.set == index);
                met && frontend.affinity_seconds.is_some()
            });
            sets.push(self.compile_set(set, service_id, affinity, &backends, old, &used_by, tables, taken)?);
        }
        let mut frontends: Vec<(FrontendKey, Frontend)> = desired
            .frontends
            .iter()
            .zip(&keys)
            .map(|(frontend, key)| (*key, value(frontend, service_id, &sets)))
            .collect();
        frontends.sort_by_key(|(key, _)| *key);
        Ok(Compiled {
            service_id,
            frontends: frontends.into(),
            sets: sets.into(),
            backends: backends.into(),
            sources: sources::compile(&desired.sources, service_id),
        })
    }

    fn compile_backends(
        &mut self,
        desired: &DesiredService,
        old: Option<&Compiled>,
        service_id: u32,
        taken: &mut Taken,
    ) -> Result<Vec<(u32, Backend)>, Full> {
        let mut wanted: Vec<((u8, Addr, Port), u8)> = Vec::new();
        for set in &desired.sets {
            let proto = proto(set.name.protocol);
            let all = set.members.iter().map(|m| (m, state::ACTIVE));
            let all = all.chain(set.draining.iter().map(|m| (m, state::DRAINING)));
            wanted.extend(all.map(|(m, state)| ((proto, m.addr.into(), Port::new(m.port.get())), state)));
        }
        // Usable in one set is usable: the Local and Cluster views may differ. ACTIVE sorts first, and the first is kept.
        wanted.sort_unstable();
        wanted.dedup_by_key(|(key, _)| *key);
        let mut backends = Vec::with_capacity(wanted.len());
        for ((proto, addr, port), state) in wanted {
            let known = old.and_then(|old| old.backend_id(proto, addr, port)).or_else(|| {
                self.restored
                    .claim_backend(service_id, FrontendKey::new(addr, port, proto))
            });
            let id = match known {
                Some(id) => id,
                None => taken.backend(self.backends.take()?),
            };
            let backend = Backend {
                addr,
                port,
                proto,
                state,
                service_id,
                pad: [0; 2],
            };
            backends.push((id, backend));
        }
        Ok(backends)
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "one private step of one function, split for reading"
    )]
    fn compile_set(
        &mut self,
        set: &model::BackendSet,
        service_id: u32,
        affinity: bool,
        backends: &[(u32, Backend)],
        old: Option<&Compiled>,
        used_by: &[Use],
        tables: &mut Vec<TableWrite>,
        taken: &mut Taken,
    ) -> Result<CompiledSet, Full> {
        let members = list_order(set, backends);
        let list: Box<[(u32, u16)]> = members.iter().map(|m| (m.backend_id, m.weight)).collect();
        let before = old.and_then(|old| old.sets.iter().find(|s| s.name == set.name));
        let restored = match before {
            Some(_) => None,
            None => self.restored.claim_set(service_id, used_by, &list),
        };
        let set_id = match (before, &restored) {
            (Some(before), _) => before.set_id,
            (None, Some((id, _))) => *id,
            (None, None) => taken.set(self.sets.take()?),
        };
        let done = |word, table| CompiledSet {
            name: set.name.clone(),
            set_id,
            word,
            table,
            members: list.clone(),
            affinity,
        };
        let empty = !list.iter().any(|(_, weight)| *weight > 0);
        if let Some(before) = before {
            let same = before.members == list && before.table.digest == digest(&members);
            if before.word.count() > 0 && same {
                if let Some(shared) = self.shared.get_mut(&before.table.digest) {
                    shared.users += 1;
                    taken.shared.push(before.table.digest);
                }
                return Ok(done(before.word, before.table));
            }
            if before.word.count() == 0 && empty {
                return Ok(CompiledSet {
                    affinity,
                    ..before.clone()
                });
            }
        }
        let generation = self.next_generation();
        if empty {
            let word = match restored {
                Some((_, (word, _))) if word.count() == 0 => word,
                other => {
                    if let Some((_, (word, _))) = other {
                        self.restored.replace(word);
                    }
                    // No list and no table: the count of 0 says so, the generation keeps the word from being zero.
                    SetWord::new(0, 0, generation)
                }
            };
            let mut empty = done(word, Table::default());
            empty.members = Box::default();
            return Ok(empty);
        }
        let table = self.table(&members, tables, taken)?;
        if let Some((_, (word, old_list))) = restored {
            if old_list.members == list && (old_list.table, old_list.slots) == (table.offset, table.slots) {
                return Ok(done(word, table));
            }
            self.restored.replace(word);
        }
        let offset = taken.list(self.lists.take(list.len() as u32 + 1)?, list.len() as u32 + 1);
        Ok(done(SetWord::new(offset, list.len() as u16, generation), table))
    }

    fn next_generation(&mut self) -> u32 {
        self.generation = (self.generation + 1) & 0x00ff_ffff;
        // Zero is left out, so that no word of a published set is the zero word.
        self.generation = self.generation.max(1);
        self.generation
    }

    /// The table of these members: one that is shared, one that the kernel holds already, or a new one.
    fn table(&mut self, members: &[Placed], writes: &mut Vec<TableWrite>, taken: &mut Taken) -> Result<Table, Full> {
        let digest = digest(members);
        if let Some(shared) = self.shared.get_mut(&digest) {
            shared.users += 1;
            taken.shared.push(digest);
            return Ok(shared.table);
        }
        let build: Vec<maglev::Member> = members
            .iter()
            .map(|m| maglev::Member {
                identity: m.identity,
                weight: m.weight,
            })
            .collect();
        let slots = maglev::slots_for(members.len());
        let content = maglev::build(&build, slots).ok_or(Full {
            what: "slots of a Maglev table",
            capacity: slots,
            flag: "a Service port can have 65521 endpoints",
        })?;
        let hash = table_hash(content.iter().copied());
        let offset = if let Some(offset) = self.restored.claim_table(digest, slots, hash) {
            offset
        } else {
            let len = elements_for(slots);
            let offset = taken.table(self.tables.take(len)?, len);
            writes.push(TableWrite { offset, slots: content });
            offset
        };
        let table = Table {
            offset,
            slots,
            content: hash,
            digest,
        };
        self.shared.insert(digest, Shared { table, users: 1 });
        taken.shared.push(digest);
        Ok(table)
    }

    fn give_back(&mut self, taken: Taken) {
        for id in taken.services {
            self.services.untake(id);
        }
        for id in taken.sets {
            self.sets.untake(id);
        }
        for id in taken.backends {
            self.backends.untake(id);
        }
        for (offset, len) in taken.lists {
            self.lists.untake(offset, len);
        }
        for digest in taken.shared {
            if let Some(shared) = self.shared.get_mut(&digest) {
                shared.users -= 1;
                if shared.users == 0 {
                    // A table that was taken is given back below, one that was adopted by `Restored::undo`.
                    self.shared.remove(&digest);
                }
            }
        }
        for (offset, len) in taken.tables {
            self.tables.untake(offset, len);
        }
    }

    /// Frees what `old` had and `new` has not; call it once the plan from `old` to `new` has been carried out.
    pub fn retire(&mut self, old: &Compiled, new: Option<&Compiled>, now_ms: u64) {
        for set in &old.sets {
            let same = new.and_then(|new| new.sets.iter().find(|s| s.set_id == set.set_id));
            if same.is_none() {
                self.sets.release(set.set_id, now_ms);
            }
            if set.word.count() > 0 {
                if same.is_none_or(|same| same.word.offset() != set.word.offset() || same.word.count() == 0) {
                    self.lists
                        .release(set.word.offset(), u32::from(set.word.count()) + 1, now_ms);
                }
                // Every compiled set counts as a user of its table: the new one was counted when it was compiled.
                self.unshare(set.table, now_ms);
            }
        }
        let kept: HashSet<u32> = new
            .map(|new| new.backends.iter().map(|(id, _)| *id).collect())
            .unwrap_or_default();
        for (id, _) in &old.backends {
            if !kept.contains(id) {
                self.backends.release(*id, now_ms);
            }
        }
        if new.is_none() {
            self.services.release(old.service_id, now_ms);
            // Nothing is never too much.
            let _ = self.count(Some(old), None);
        }
    }

    /// Frees what `new` took beyond `old`: the kernel refused it, and `old` stands.
    pub fn withdraw(&mut self, new: &Compiled, old: Option<&Compiled>, now_ms: u64) {
        self.retire(new, old, now_ms);
        if let Some(old) = old {
            // What stands is counted, whether or not it fits beside what came meanwhile.
            self.frontends = self.frontends + old.frontends.len() as u32 - new.frontends.len() as u32;
            self.memberships = self.memberships + old.memberships().count() as u32 - new.memberships().count() as u32;
            self.sources = self.sources + old.sources.len() as u32 - new.sources.len() as u32;
        }
    }

    /// Takes a frontend out of what a Service was compiled to: another Service has taken it over.
    pub fn cede(&mut self, service: &mut Compiled, key: &FrontendKey) {
        let before = service.frontends.len();
        let kept = service.frontends.iter().filter(|(k, _)| k != key).copied();
        service.frontends = kept.collect();
        self.frontends -= (before - service.frontends.len()) as u32;
    }

    fn unshare(&mut self, table: Table, now_ms: u64) {
        if let Some(shared) = self.shared.get_mut(&table.digest) {
            shared.users -= 1;
            if shared.users == 0 {
                self.shared.remove(&table.digest);
                self.tables.release(table.offset, elements_for(table.slots), now_ms);
            }
        }
    }

    /// Frees what the kernel held at the start and nobody has claimed; call it after the first full plan.
    pub fn forget_restored(&mut self, now_ms: u64) {
        let left = std::mem::take(&mut self.restored).into_left();
        for id in left.sets {
            self.sets.release(id, now_ms);
        }
        for (offset, len) in left.lists {
            self.lists.release(offset, len, now_ms);
        }
        for (offset, slots) in left.tables {
            self.tables.release(offset, elements_for(slots), now_ms);
        }
        for id in left.backends {
            self.backends.release(id, now_ms);
        }
        for id in left.services {
            self.services.release(id, now_ms);
        }
    }

    /// Lets ids that nothing stands behind, but that have open connections, wait until those have ended; only before the first
    /// compilation.
    pub fn withhold(&mut self, open: &OpenIds, now_ms: u64) {
        self.backends.withhold(&open.backends.iter().copied().collect(), now_ms);
        self.services.withhold(&open.services.iter().copied().collect(), now_ms);
    }

    /// Makes available what was freed: after the grace, and once no open connection refers to it.
    pub fn reclaim(
        &mut self,
        now_ms: u64,
        backend_idle: impl FnMut(u32) -> bool,
        service_idle: impl FnMut(u32) -> bool,
    ) {
        self.sets.reclaim(now_ms, |_| true);
        self.backends.reclaim(now_ms, backend_idle);
        self.services.reclaim(now_ms, service_idle);
        self.lists.reclaim(now_ms);
        self.tables.reclaim(now_ms);
    }

    /// (used, capacity) of each kind of room, by map name.
    pub fn usage(&self) -> [(&'static str, u32, u32); 7] {
        use lb_common::maps;
        [
            (maps::FRONTENDS, self.frontends, self.capacity.frontends),
            (maps::SETS, self.sets.used(), self.sets.capacity()),
            (maps::BACKENDS, self.backends.used(), self.backends.capacity()),
            (maps::LISTS, self.lists.used(), self.lists.capacity()),
            (maps::TABLES, self.tables.used(), self.tables.capacity()),
            (maps::MEMBERS, self.memberships, self.capacity.memberships),
            (maps::SOURCES, self.sources, self.capacity.sources),
        ]
    }
}

/// What one compilation has taken so far.
#[derive(Debug, Default)]
struct Taken {
    services: Vec<u32>,
    sets: Vec<u32>,
    backends: Vec<u32>,
    lists: Vec<(u32, u32)>,
    tables: Vec<(u32, u32)>,
    shared: Vec<u128>,
}

impl Taken {
    fn service(&mut self, id: u32) -> u32 {
        self.services.push(id);
        id
    }

    fn set(&mut self, id: u32) -> u32 {
        self.sets.push(id);
        id
    }

    fn backend(&mut self, id: u32) -> u32 {
        self.backends.push(id);
        id
    }

    fn list(&mut self, offset: u32, len: u32) -> u32 {
        self.lists.push((offset, len));
        offset
    }

    fn table(&mut self, offset: u32, len: u32) -> u32 {
        self.tables.push((offset, len));
        offset
    }
}

#[cfg(test)]
pub(crate) mod tests;
