//! What the kernel held at the start: ids and room that Services claim when they are first compiled.
//!
//! Nothing of it is handed out to anybody else until it has been claimed and retired, or left over and freed. A claim by
//! a compilation that fails in the end is undone, so that the kernel's old state stays whose it was.

use std::collections::{HashMap, HashSet};

use lb_common::{
    frontend::{Frontend, FrontendKey, flag},
    set::{SetWord, elements_for},
};

use super::{
    Capacity, Compiled, CompiledSet, Compiler, Contents, List, Shared, Side, Source, Table, Use,
    members::{digest, placed},
    order, set_ids,
};
use crate::model::{DesiredService, FrontendKind, Protocol, Scope, SetName};

type TableKey = (u32, u32);

/// What no Service has claimed yet.
#[derive(Debug, Default)]
pub(super) struct Restored {
    frontends: HashMap<FrontendKey, Frontend>,
    sets: HashMap<u32, (SetWord, List)>,
    /// How many uses each set has, by frontends and sides.
    named: HashMap<u32, u32>,
    backends: HashMap<(u32, FrontendKey), u32>,
    /// Each Service, and whether it has a ClusterIP frontend.
    services: HashMap<u32, bool>,
    /// Offset and slots → content of each table that a restored list names.
    tables: HashMap<TableKey, u64>,
    /// Which table stands for the members of a restored list, by their digest. (A list whose backends are lost has none.)
    by_digest: HashMap<u128, TableKey>,
    /// Lists that a claimed set has replaced, or that nobody can claim; the kernel names them until the first plan is
    /// carried out. Offset and length.
    replaced: Vec<(u32, u32)>,
    /// Ids of sets that are named but lost, or whose list is foreign: nobody can claim them.
    stray_sets: Vec<u32>,
    /// Ids of backends that another id has the address of: nobody can claim them.
    stray_backends: Vec<u32>,
    /// What the compilation in progress has claimed.
    claims: Vec<Claim>,
}

#[derive(Debug)]
enum Claim {
    Service(u32, bool),
    Set(u32, SetWord, List),
    Backend((u32, FrontendKey), u32),
    Table(TableKey, u64),
    Replaced,
}

/// What is left over in the end.
#[derive(Debug)]
pub(super) struct Left {
    pub(super) sets: Vec<u32>,
    pub(super) lists: Vec<(u32, u32)>,
    pub(super) tables: Vec<TableKey>,
    pub(super) backends: Vec<u32>,
    pub(super) services: Vec<u32>,
}

fn is_cluster_ip(frontend: &Frontend) -> bool {
    frontend.flags >> flag::KIND_SHIFT & flag::KIND_MASK == 0
}

impl Restored {
    /// A new compilation begins: what was claimed so far is so for good.
    pub(super) fn begin(&mut self) {
        self.claims.clear();
    }

    /// Gives back what was claimed since [`Self::begin`].
    pub(super) fn undo(&mut self) {
        while let Some(claim) = self.claims.pop() {
            match claim {
                Claim::Service(id, cluster) => {
                    self.services.insert(id, cluster);
                }
                Claim::Set(id, word, list) => {
                    self.sets.insert(id, (word, list));
                }
                Claim::Backend(key, id) => {
                    self.backends.insert(key, id);
                }
                Claim::Table(key, content) => {
                    self.tables.insert(key, content);
                }
                Claim::Replaced => {
                    self.replaced.pop();
                }
            }
        }
    }

    /// The id of the Service that had these frontends: by its cluster IPs, which other addresses (that move between
    /// Services) count for nothing beside.
    pub(super) fn claim_service(&mut self, desired: &DesiredService, keys: &[FrontendKey]) -> Option<u32> {
        let mut votes: HashMap<u32, (u32, u32)> = HashMap::new();
        for (wanted, key) in desired.frontends.iter().zip(keys) {
            let Some(held) = self.frontends.get(key) else { continue };
            if self.services.contains_key(&held.service_id) {
                let (cluster, all) = votes.entry(held.service_id).or_default();
                *cluster += u32::from(wanted.kind == FrontendKind::ClusterIp && is_cluster_ip(held));
                *all += 1;
            }
        }
        let (id, (cluster, _)) = votes.into_iter().max_by_key(|(id, votes)| (*votes, u32::MAX - id))?;
        let has_cluster_ip = *self.services.get(&id)?;
        if cluster == 0 && has_cluster_ip {
            return None;
        }
        self.services.remove(&id);
        self.claims.push(Claim::Service(id, has_cluster_ip));
        Some(id)
    }

    /// The id of a Service's backend.
    pub(super) fn claim_backend(&mut self, service_id: u32, key: FrontendKey) -> Option<u32> {
        let id = self.backends.remove(&(service_id, key))?;
        self.claims.push(Claim::Backend((service_id, key), id));
        Some(id)
    }

    /// The Service's set that these uses name, if it may become the one with `members`: nobody else names it, or it
    /// stays as it is. Else the others would meet these members until they are written themselves.
    pub(super) fn claim_set(
        &mut self,
        service_id: u32,
        used_by: &[Use],
        members: &[(u32, u16)],
    ) -> Option<(u32, (SetWord, List))> {
        let mut candidates: Vec<(u32, u32)> = Vec::new();
        let held = used_by
            .iter()
            .filter_map(|by| Some((by.side, self.frontends.get(&by.key)?)));
        for id in held
            .filter(|(_, held)| held.service_id == service_id)
            .filter_map(|(side, held)| side.set_id(held))
        {
            match candidates.iter_mut().find(|(known, _)| *known == id) {
                Some((_, count)) => *count += 1,
                None => candidates.push((id, 1)),
            }
        }
        let (id, _) = candidates.into_iter().find(|(id, count)| {
            self.sets
                .get(id)
                .is_some_and(|(_, list)| self.named.get(id) == Some(count) || *list.members == *members)
        })?;
        let (word, list) = self.sets.remove(&id)?;
        self.claims.push(Claim::Set(id, word, list.clone()));
        Some((id, (word, list)))
    }

    /// The offset of the table that stood for these members, if it has this content and nobody has claimed it yet.
    ///
    /// Tables of other members may have the same content (all tables of one member have): those are left to their own, who
    /// would have to move otherwise.
    pub(super) fn claim_table(&mut self, digest: u128, slots: u32, content: u64) -> Option<u32> {
        let key = self.by_digest.get(&digest).copied().filter(|key| key.1 == slots)?;
        if self.tables.get(&key) != Some(&content) {
            return None;
        }
        self.tables.remove(&key);
        self.claims.push(Claim::Table(key, content));
        Some(key.0)
    }

    /// A claimed set gets another list. The old one's room is freed with what is left over, its table too if nobody
    /// claims it.
    pub(super) fn replace(&mut self, word: SetWord) {
        if word.count() > 0 {
            self.replaced.push((word.offset(), u32::from(word.count()) + 1));
            self.claims.push(Claim::Replaced);
        }
    }

    /// What nobody has claimed.
    pub(super) fn into_left(self) -> Left {
        let unclaimed = self.sets.values().map(|(word, _)| word).filter(|word| word.count() > 0);
        let lists = unclaimed.map(|word| (word.offset(), u32::from(word.count()) + 1));
        Left {
            lists: lists.chain(self.replaced).collect(),
            sets: self.sets.into_keys().chain(self.stray_sets).collect(),
            tables: self.tables.into_keys().collect(),
            backends: self.backends.into_values().chain(self.stray_backends).collect(),
            services: self.services.into_keys().collect(),
        }
    }
}

impl Compiler {
    /// A compiler that goes on with what the maps hold: ids stay, and unchanged lists and tables are not written again.
    /// Ids beyond the maps are foreign, and passed over.
    ///
    /// What an earlier agent had freed counts as free: its grace passes while the programs are loaded anew. Ids with open
    /// connections are [withheld](Self::withhold).
    pub fn restore(capacity: Capacity, contents: &Contents) -> Self {
        let mut this = Self::new(capacity);
        let service_ids = contents.frontends.values().map(|f| f.service_id);
        let service_ids: HashSet<u32> = service_ids
            .chain(contents.backends.values().map(|b| b.service_id))
            .chain(contents.sources.iter().map(|source| source.key.service_id))
            .filter(|id| *id > 0 && *id < capacity.services)
            .collect();
        this.services.adopt(service_ids.iter().copied());
        let named = contents.frontends.values().flat_map(set_ids);
        let named: HashSet<u32> = named
            .chain(contents.sets.keys().copied())
            .filter(|id| *id > 0 && *id < capacity.sets)
            .collect();
        this.sets.adopt(named.iter().copied());
        let mut backend_ids: Vec<u32> = contents.backends.keys().copied().collect();
        backend_ids.retain(|id| *id > 0 && *id < capacity.backends);
        backend_ids.sort_unstable();
        this.backends.adopt(backend_ids.iter().copied());

        let mut sorted: Vec<u32> = named.into_iter().collect();
        sorted.sort_unstable();
        for id in sorted {
            if !this.restore_set(id, contents) {
                this.restored.stray_sets.push(id);
            }
        }
        let restored = &mut this.restored;
        restored.services = service_ids.into_iter().map(|id| (id, false)).collect();
        for frontend in contents.frontends.values() {
            for set_id in set_ids(frontend) {
                *restored.named.entry(set_id).or_default() += 1;
            }
            if let Some(has_cluster_ip) = restored.services.get_mut(&frontend.service_id) {
                *has_cluster_ip |= is_cluster_ip(frontend);
            }
        }
        restored.frontends.clone_from(&contents.frontends);
        for id in backend_ids {
            let backend = &contents.backends[&id];
            let key = FrontendKey::new(backend.addr, backend.port, backend.proto);
            if let Some(other) = restored.backends.insert((backend.service_id, key), id) {
                restored.stray_backends.push(other);
            }
        }
        this
    }

    /// Takes note of a set, its list and its table; false if they are not whole.
    fn restore_set(&mut self, id: u32, contents: &Contents) -> bool {
        let Some(word) = contents.sets.get(&id).copied() else {
            return false;
        };
        self.generation = self.generation.max(word.generation());
        if word.count() == 0 {
            self.restored.sets.insert(id, (word, List::default()));
            return true;
        }
        let Some(list) = contents.lists.get(&id) else {
            return false;
        };
        let range = (word.offset(), u32::from(word.count()) + 1);
        if !self.lists.adopt(range.0, range.1) {
            return false;
        }
        let key = (list.table, list.slots);
        let known = self.restored.tables.contains_key(&key);
        if !known && !self.tables.adopt(list.table, elements_for(list.slots)) {
            self.restored.replaced.push(range);
            return false;
        }
        self.restored.tables.insert(key, list.content);
        let backends: Vec<_> = (list.members.iter())
            .filter_map(|(id, _)| Some((*id, *contents.backends.get(id)?)))
            .collect();
        if let Some(members) = placed(&list.members, &backends) {
            self.restored.by_digest.entry(digest(&members)).or_insert(key);
        }
        self.restored.sets.insert(id, (word, list.clone()));
        true
    }

    /// What the kernel holds of a Service that could not be compiled: its old state, to stand. `None` if it holds
    /// nothing whole of it. Frontends in `elsewhere` have gone to other Services.
    pub fn as_found(
        &mut self,
        desired: &DesiredService,
        contents: &Contents,
        elsewhere: &HashSet<FrontendKey>,
    ) -> Option<Compiled> {
        self.restored.begin();
        let keys: Vec<FrontendKey> = desired.frontends.iter().map(super::key).collect();
        let service_id = self.restored.claim_service(desired, &keys)?;
        let mut backends: Vec<_> = contents.backends.iter().map(|(id, b)| (*id, *b)).collect();
        backends.retain(|(_, backend)| backend.service_id == service_id);
        backends.retain(|(id, b)| {
            let key = FrontendKey::new(b.addr, b.port, b.proto);
            self.restored.backends.get(&(service_id, key)) == Some(id)
        });
        backends.sort_by_key(|(_, backend)| order(backend));
        let mut frontends: Vec<(FrontendKey, Frontend)> = contents
            .frontends
            .iter()
            .filter(|(key, held)| held.service_id == service_id && !elsewhere.contains(*key))
            .map(|(key, held)| (*key, *held))
            .collect();
        frontends.sort_by_key(|(key, _)| *key);

        let mut sets: Vec<CompiledSet> = Vec::new();
        let uses = frontends
            .iter()
            .flat_map(|(key, held)| Side::BOTH.map(|side| (*key, side, side.set_id(held))));
        for (key, side, set_id) in uses {
            let Some(set_id) = set_id.filter(|id| sets.iter().all(|set| set.set_id != *id)) else {
                continue;
            };
            let Some((word, list)) = self.restored.sets.get(&set_id).cloned() else {
                continue;
            };
            let Some(members) = placed(&list.members, &backends) else {
                continue;
            };
            let table = if word.count() > 0 {
                self.table_as_found(&list, digest(&members))
            } else {
                Table::default()
            };
            self.restored.sets.remove(&set_id);
            let wanted = desired.frontends.iter().zip(&keys).find(|(_, wanted)| **wanted == key);
            let wanted = wanted.and_then(|(wanted, _)| match side {
                Side::Inside => Some(wanted.set),
                Side::Outside => Some(wanted.outside?.set),
            });
            let name = wanted.map(|index| desired.sets[index].name.clone());
            let name = name.filter(|name| sets.iter().all(|set| set.name != *name));
            sets.push(CompiledSet {
                name: name.unwrap_or_else(|| unknown(set_id, &key)),
                set_id,
                word,
                table,
                members: list.members,
                affinity: contents.memberships.iter().any(|m| m.set_id == set_id),
            });
        }
        let whole = |held: &Frontend| set_ids(held).all(|id| sets.iter().any(|set| set.set_id == id));
        frontends.retain(|(_, held)| whole(held));
        sets.sort_by(|a, b| a.name.cmp(&b.name));
        for (_, backend) in &backends {
            let key = FrontendKey::new(backend.addr, backend.port, backend.proto);
            self.restored.backends.remove(&(service_id, key));
        }
        let mut sources: Vec<Source> = contents.sources.iter().copied().collect();
        sources.retain(|source| source.key.service_id == service_id);
        sources.sort_unstable();
        let found = Compiled {
            service_id,
            frontends: frontends.into(),
            sets: sets.into(),
            backends: backends.into(),
            sources: sources.into(),
        };
        self.sources += found.sources.len() as u32;
        self.frontends += found.frontends.len() as u32;
        self.memberships += found.memberships().count() as u32;
        Some(found)
    }

    fn table_as_found(&mut self, list: &List, digest: u128) -> Table {
        let place = (list.table, list.slots);
        let holder = self
            .shared
            .iter_mut()
            .find(|(_, shared)| (shared.table.offset, shared.table.slots) == place);
        if let Some((_, shared)) = holder {
            shared.users += 1;
            return shared.table;
        }
        self.restored.tables.remove(&place);
        // Another table may stand for these members by now; then this one goes under a digest that no members have.
        let digest = if self.shared.contains_key(&digest) {
            !u128::from(list.table)
        } else {
            digest
        };
        let table = Table {
            offset: list.table,
            slots: list.slots,
            content: list.content,
            digest,
        };
        self.shared.insert(digest, Shared { table, users: 1 });
        table
    }
}

/// A name for a set that nothing wanted stands for.
fn unknown(set_id: u32, key: &FrontendKey) -> SetName {
    SetName {
        port_name: format!("set {set_id} of an earlier agent").into(),
        protocol: if key.proto == lb_common::abi::UDP {
            Protocol::Udp
        } else {
            Protocol::Tcp
        },
        ipv6: !key.addr.is_v4(),
        scope: Scope::Cluster,
    }
}
