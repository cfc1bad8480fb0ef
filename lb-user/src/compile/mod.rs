//! From what a Service wants to what the maps should hold: ids, lists and tables.
//!
//! Pure: no map is touched here, and time comes in as an argument. What a [`Compiled`] names is allocated and is not
//! given to anybody else until [`Compiler::retire`] and a grace. The order of writes is `plan`'s business.

mod contents;
mod space;

use std::collections::{HashMap, HashSet};

use lb_common::{
    abi::{TCP, UDP},
    addr::{Addr, Port},
    backend::{Backend, state},
    frontend::{Frontend, FrontendKey, flag},
    hash, maglev,
    set::{SetWord, elements_for},
};

use crate::model::{self, DesiredService, FrontendKind, Protocol, SetName, WhenEmpty};

pub use contents::{Contents, List, table_hash};
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
}

impl Compiled {
    /// Finds a backend by address.
    pub fn backend_id(&self, proto: u8, addr: Addr, port: Port) -> Option<u32> {
        self.backends
            .binary_search_by_key(&(proto, addr, port), |(_, b)| order(b))
            .ok()
            .map(|i| self.backends[i].0)
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
    generation: u32,
    restored: Restored,
}

/// What the kernel held at the start and no Service has claimed yet.
#[derive(Debug, Default)]
struct Restored {
    frontends: HashMap<FrontendKey, Frontend>,
    sets: HashMap<u32, (SetWord, List)>,
    backends: HashMap<(u32, FrontendKey), u32>,
    services: HashSet<u32>,
    /// Offset and slots → content of each table that a restored list names.
    tables: HashMap<(u32, u32), u64>,
    /// Lists that a claimed set has replaced; the kernel names them until the first plan is carried out.
    replaced: Vec<(u32, u32)>,
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
            generation: 0,
            restored: Restored::default(),
        }
    }

    /// A compiler that goes on with what the maps hold: ids stay, and unchanged lists and tables are not written again.
    pub fn restore(capacity: Capacity, contents: &Contents) -> Self {
        let mut this = Self::new(capacity);
        this.services.adopt(
            contents
                .frontends
                .values()
                .map(|f| f.service_id)
                .chain(contents.backends.values().map(|b| b.service_id)),
        );
        this.sets.adopt(
            contents
                .sets
                .keys()
                .copied()
                .chain(contents.frontends.values().map(|f| f.set_id)),
        );
        this.backends.adopt(contents.backends.keys().copied());
        let mut sets: Vec<_> = contents.sets.iter().collect();
        sets.sort_by_key(|(id, _)| **id);
        for (id, word) in sets {
            this.generation = this.generation.max(word.generation());
            if word.count() == 0 {
                this.restored.sets.insert(*id, (*word, List::default()));
                continue;
            }
            let Some(list) = contents.lists.get(id) else {
                continue;
            };
            let adopted = this.lists.adopt(word.offset(), u32::from(word.count()) + 1);
            let key = (list.table, list.slots);
            let known = this.restored.tables.contains_key(&key);
            if adopted && (known || this.tables.adopt(list.table, elements_for(list.slots))) {
                this.restored.tables.insert(key, list.content);
                this.restored.sets.insert(*id, (*word, list.clone()));
            }
        }
        this.restored.frontends.clone_from(&contents.frontends);
        let of_frontends = contents.frontends.values().map(|f| f.service_id);
        let of_backends = contents.backends.values().map(|b| b.service_id);
        this.restored.services = of_frontends.chain(of_backends).collect();
        this.restored.backends = contents
            .backends
            .iter()
            .map(|(id, b)| {
                (
                    (b.service_id, FrontendKey::new(b.addr, b.port, b.proto)),
                    *id,
                )
            })
            .collect();
        this
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
        let result = self.try_compile(desired, old, tables, &mut taken);
        if let Ok(compiled) = &result {
            let before = old.map_or(0, |old| old.frontends.len() as u32);
            self.frontends = self.frontends + compiled.frontends.len() as u32 - before;
        } else {
            tables.truncate(written);
            self.give_back(taken);
        }
        result
    }

    fn try_compile(
        &mut self,
        desired: &DesiredService,
        old: Option<&Compiled>,
        tables: &mut Vec<TableWrite>,
        taken: &mut Taken,
    ) -> Result<Compiled, Full> {
        let before = old.map_or(0, |old| old.frontends.len());
        if self.frontends as usize + desired.frontends.len() - before.min(desired.frontends.len())
            > self.capacity.frontends as usize
        {
            return Err(Full {
                what: "frontends",
                capacity: self.capacity.frontends,
                flag: "raise --max-frontends",
            });
        }
        let keys: Vec<FrontendKey> = desired
            .frontends
            .iter()
            .map(|f| FrontendKey::new(f.addr.into(), Port::new(f.port.get()), proto(f.protocol)))
            .collect();
        let service_id = match old {
            Some(old) => old.service_id,
            None => match self.restored_service(&keys) {
                Some(id) => id,
                None => taken.service(self.services.take()?),
            },
        };
        let backends = self.compile_backends(desired, old, service_id, taken)?;
        let mut sets = Vec::with_capacity(desired.sets.len());
        for (index, set) in desired.sets.iter().enumerate() {
            let affinity = desired
                .frontends
                .iter()
                .any(|f| f.set == index && f.affinity_seconds.is_some());
            let used_by = || {
                desired
                    .frontends
                    .iter()
                    .zip(&keys)
                    .filter(|(f, _)| f.set == index)
                    .map(|(_, key)| *key)
            };
            sets.push(self.compile_set(set, affinity, &backends, old, used_by, tables, taken)?);
        }
        let mut frontends: Vec<(FrontendKey, Frontend)> = desired
            .frontends
            .iter()
            .zip(&keys)
            .map(|(frontend, key)| (*key, value(frontend, service_id, sets[frontend.set].set_id)))
            .collect();
        frontends.sort_by_key(|(key, _)| *key);
        Ok(Compiled {
            service_id,
            frontends: frontends.into(),
            sets: sets.into(),
            backends: backends.into(),
        })
    }

    fn restored_service(&mut self, keys: &[FrontendKey]) -> Option<u32> {
        let id = keys
            .iter()
            .filter_map(|key| self.restored.frontends.get(key))
            .map(|frontend| frontend.service_id)
            .find(|id| self.restored.services.contains(id))?;
        self.restored.services.remove(&id);
        Some(id)
    }

    fn compile_backends(
        &mut self,
        desired: &DesiredService,
        old: Option<&Compiled>,
        service_id: u32,
        taken: &mut Taken,
    ) -> Result<Vec<(u32, Backend)>, Full> {
        let mut wanted: HashMap<(u8, Addr, Port), u8> = HashMap::new();
        for set in &desired.sets {
            let proto = proto(set.name.protocol);
            let all = set.members.iter().map(|m| (m, state::ACTIVE));
            for (member, state) in all.chain(set.draining.iter().map(|m| (m, state::DRAINING))) {
                let key = (proto, member.addr.into(), Port::new(member.port.get()));
                let entry = wanted.entry(key).or_insert(state);
                // Usable in one set is usable: the Local and Cluster views may differ.
                if state == state::ACTIVE {
                    *entry = state;
                }
            }
        }
        let mut backends = Vec::with_capacity(wanted.len());
        for ((proto, addr, port), state) in wanted {
            let known = old
                .and_then(|old| old.backend_id(proto, addr, port))
                .or_else(|| {
                    self.restored
                        .backends
                        .remove(&(service_id, FrontendKey::new(addr, port, proto)))
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
        backends.sort_by_key(|(_, b)| order(b));
        Ok(backends)
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "one private step of one function, split for reading"
    )]
    fn compile_set<K: Iterator<Item = FrontendKey>>(
        &mut self,
        set: &model::BackendSet,
        affinity: bool,
        backends: &[(u32, Backend)],
        old: Option<&Compiled>,
        used_by: impl Fn() -> K,
        tables: &mut Vec<TableWrite>,
        taken: &mut Taken,
    ) -> Result<CompiledSet, Full> {
        let members = list_order(set, backends);
        let before = old.and_then(|old| old.sets.iter().find(|s| s.name == set.name));
        let restored = match before {
            Some(_) => None,
            None => used_by()
                .filter_map(|key| self.restored.frontends.get(&key).map(|f| f.set_id))
                .find_map(|id| self.restored.sets.remove(&id).map(|found| (id, found))),
        };
        let set_id = match (before, &restored) {
            (Some(before), _) => before.set_id,
            (None, Some((id, _))) => *id,
            (None, None) => taken.set(self.sets.take()?),
        };
        let list: Box<[(u32, u16)]> = members.iter().map(|m| (m.backend_id, m.weight)).collect();
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
                        self.replace_restored(word);
                    }
                    // No list and no table: the count of 0 says so, the generation keeps the word from being zero.
                    SetWord::new(0, 0, generation)
                }
            };
            let mut empty = done(word, Table::default());
            empty.members = Box::default();
            return Ok(empty);
        }
        let table = self.table(
            &members,
            restored.as_ref().map(|(_, (_, l))| l),
            tables,
            taken,
        )?;
        if let Some((_, (word, old_list))) = restored {
            if old_list.members == list
                && (old_list.table, old_list.slots) == (table.offset, table.slots)
            {
                return Ok(done(word, table));
            }
            self.replace_restored(word);
        }
        let offset = taken.list(
            self.lists.take(list.len() as u32 + 1)?,
            list.len() as u32 + 1,
        );
        Ok(done(
            SetWord::new(offset, list.len() as u16, generation),
            table,
        ))
    }

    /// A restored set's list is replaced. Its room is freed by [`Compiler::forget_restored`], its table too if nobody
    /// took it.
    fn replace_restored(&mut self, word: SetWord) {
        if word.count() > 0 {
            self.restored
                .replaced
                .push((word.offset(), u32::from(word.count()) + 1));
        }
    }

    fn next_generation(&mut self) -> u32 {
        self.generation = (self.generation + 1) & 0x00ff_ffff;
        // Zero is left out, so that no word of a published set is the zero word.
        self.generation = self.generation.max(1);
        self.generation
    }

    /// The table of these members: one that is shared, one that the kernel holds already, or a new one.
    fn table(
        &mut self,
        members: &[Placed],
        restored: Option<&List>,
        writes: &mut Vec<TableWrite>,
        taken: &mut Taken,
    ) -> Result<Table, Full> {
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
        let offset = match restored {
            Some(list) if list.slots == slots && list.content == hash => {
                // Adopted: from now on it belongs to this digest.
                self.restored.tables.remove(&(list.table, list.slots));
                list.table
            }
            _ => {
                let len = elements_for(slots);
                let offset = taken.table(self.tables.take(len)?, len);
                writes.push(TableWrite {
                    offset,
                    slots: content,
                });
                offset
            }
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
                if same.is_none_or(|same| {
                    same.word.offset() != set.word.offset() || same.word.count() == 0
                }) {
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
            self.frontends -= old.frontends.len() as u32;
        }
    }

    /// Frees what `new` took beyond `old`: the kernel refused it, and `old` stands.
    pub fn withdraw(&mut self, new: &Compiled, old: Option<&Compiled>, now_ms: u64) {
        self.retire(new, old, now_ms);
        if let Some(old) = old {
            self.frontends = self.frontends + old.frontends.len() as u32 - new.frontends.len() as u32;
        }
    }

    fn unshare(&mut self, table: Table, now_ms: u64) {
        if let Some(shared) = self.shared.get_mut(&table.digest) {
            shared.users -= 1;
            if shared.users == 0 {
                self.shared.remove(&table.digest);
                self.tables
                    .release(table.offset, elements_for(table.slots), now_ms);
            }
        }
    }

    /// Frees what the kernel held at the start and nobody has claimed; call it after the first full plan.
    pub fn forget_restored(&mut self, now_ms: u64) {
        let restored = std::mem::take(&mut self.restored);
        for (id, (word, _)) in &restored.sets {
            self.sets.release(*id, now_ms);
            if word.count() > 0 {
                self.lists
                    .release(word.offset(), u32::from(word.count()) + 1, now_ms);
            }
        }
        for (offset, len) in restored.replaced {
            self.lists.release(offset, len, now_ms);
        }
        for (offset, slots) in restored.tables.keys() {
            self.tables.release(*offset, elements_for(*slots), now_ms);
        }
        for id in restored.backends.values() {
            self.backends.release(*id, now_ms);
        }
        for id in restored.services {
            self.services.release(id, now_ms);
        }
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
    pub fn usage(&self) -> [(&'static str, u32, u32); 5] {
        use lb_common::maps;
        [
            (maps::FRONTENDS, self.frontends, self.capacity.frontends),
            (maps::SETS, self.sets.used(), self.sets.capacity()),
            (
                maps::BACKENDS,
                self.backends.used(),
                self.backends.capacity(),
            ),
            (maps::LISTS, self.lists.used(), self.lists.capacity()),
            (maps::TABLES, self.tables.used(), self.tables.capacity()),
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

/// A member in its place in the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Placed {
    identity: u64,
    weight: u16,
    backend_id: u32,
}

/// Builds the table of a compiled set again, from its Service's backends; `None` if they do not belong together.
pub fn slots_of(service: &Compiled, set: &CompiledSet) -> Option<Vec<u16>> {
    let backends: HashMap<u32, &Backend> = service.backends.iter().map(|(id, b)| (*id, b)).collect();
    let mut seen: HashMap<Addr, u32> = HashMap::with_capacity(set.members.len());
    for (id, _) in &set.members {
        *seen.entry(backends.get(id)?.addr).or_default() += 1;
    }
    let members: Vec<maglev::Member> = set
        .members
        .iter()
        .map(|(id, weight)| {
            let backend = backends.get(id)?;
            Some(maglev::Member {
                identity: identity(backend.addr, backend.port, seen[&backend.addr] > 1),
                weight: *weight,
            })
        })
        .collect::<Option<_>>()?;
    let slots = maglev::build(&members, set.table.slots)?;
    (table_hash(slots.iter().copied()) == set.table.content).then_some(slots)
}

/// What makes an endpoint the same on every node: its address, and its port where the address occurs twice.
fn identity(addr: Addr, port: Port, with_port: bool) -> u64 {
    let words = addr.words.map(|w| u64::from(u32::from_be(w)));
    let port = if with_port { u64::from(port.get()) } else { 0 };
    [words[0] << 32 | words[1], words[2] << 32 | words[3], port]
        .into_iter()
        .fold(0, hash::combine)
}

/// The members in the order of the list: by identity, which is the same on every node. The identity of an endpoint is
/// its address, so that ports of one Service share a table; where an address occurs twice its port tells them apart.
fn list_order(set: &model::BackendSet, backends: &[(u32, Backend)]) -> Vec<Placed> {
    let proto = proto(set.name.protocol);
    let mut seen: HashMap<Addr, u32> = HashMap::with_capacity(set.members.len());
    for member in &set.members {
        *seen.entry(member.addr.into()).or_default() += 1;
    }
    let mut placed: Vec<Placed> = set
        .members
        .iter()
        .filter_map(|member| {
            let (addr, port) = (Addr::from(member.addr), Port::new(member.port.get()));
            let found = backends
                .binary_search_by_key(&(proto, addr, port), |(_, b)| order(b))
                .ok()?;
            let identity = identity(addr, port, seen[&addr] > 1);
            Some(Placed {
                identity,
                weight: member.weight,
                backend_id: backends[found].0,
            })
        })
        .collect();
    placed.sort_unstable();
    placed
}

/// 128 bits that stand for the members' identities and weights, in order.
fn digest(members: &[Placed]) -> u128 {
    let fold = |seed: u64| {
        members.iter().fold(seed, |h, m| {
            hash::combine(hash::combine(h, m.identity), u64::from(m.weight))
        })
    };
    u128::from(fold(0x0065_7665_6e6b)) << 64 | u128::from(fold(0x6b65_656c))
}

/// The protocol's number in keys and values.
pub fn proto(protocol: Protocol) -> u8 {
    match protocol {
        Protocol::Tcp => TCP,
        Protocol::Udp => UDP,
    }
}

fn value(frontend: &model::Frontend, service_id: u32, set_id: u32) -> Frontend {
    let kind = match frontend.kind {
        FrontendKind::ClusterIp => 0,
        FrontendKind::NodePort => 1,
        FrontendKind::ExternalIp => 2,
        FrontendKind::LoadBalancer => 3,
    };
    let empty = match frontend.when_empty {
        WhenEmpty::Refuse => 0,
        WhenEmpty::Unreachable => flag::UNREACHABLE_WHEN_EMPTY,
    };
    Frontend {
        service_id,
        set_id,
        flags: kind << flag::KIND_SHIFT | empty,
        affinity_seconds: frontend.affinity_seconds.unwrap_or(0),
    }
}

#[cfg(test)]
pub(crate) mod tests;
