//! The difference between what the kernel holds and what it should hold, as steps in their one right order.
//!
//! Add: backend → table → list → set → source ranges → frontend. Remove: frontend → source ranges → set → backend. So
//! whoever sees a frontend finds its set and who is admitted, and whoever sees a set finds its members. Every step is idempotent, and a set changes in one store.
//! Pure: carrying steps out is `datapath`'s business, in the order of [`Phase::ORDER`].

use std::collections::{BTreeMap, BTreeSet, HashSet};

use lb_common::{
    affinity::Membership,
    backend::Backend,
    frontend::{Frontend, FrontendKey},
    set::SetWord,
};

use crate::compile::{Compiled, CompiledSet, Contents, Source, TableWrite};

/// A list that is to be written beside the old one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListWrite {
    /// Index of the header.
    pub offset: u32,
    /// Offset of the table, in elements.
    pub table: u32,
    /// Size of the table, in slots.
    pub slots: u32,
    /// Backend id and weight of each member.
    pub members: Box<[(u32, u16)]>,
}

/// A kind of write; all writes of one kind come before those of the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Counters of fresh ids are set to zero.
    ZeroCounters,
    /// Backends are written.
    PutBackends,
    /// Tables are written beside the old ones.
    WriteTables,
    /// Lists are written beside the old ones.
    WriteLists,
    /// Memberships are removed: an affinity that ends a moment early is chosen anew.
    DropMemberships,
    /// Memberships are written: an affinity that is honoured a moment early is no harm.
    PutMemberships,
    /// Words of sets are written, each in one store.
    FlipSets,
    /// Source ranges are written: a frontend that asks for them finds them.
    PutSources,
    /// Frontends are removed.
    DropFrontends,
    /// Frontends are written.
    PutFrontends,
    /// Source ranges are removed: no frontend asks for them any more, or the ones that it asks for are there.
    DropSources,
    /// Words of sets are set to zero.
    DropSets,
    /// Backends become vacant.
    DropBackends,
}

impl Phase {
    /// The one right order. What is removed from a hash map makes room for what is put there; source ranges need room for both.
    pub const ORDER: [Self; 13] = [
        Self::ZeroCounters,
        Self::PutBackends,
        Self::WriteTables,
        Self::WriteLists,
        Self::DropMemberships,
        Self::PutMemberships,
        Self::FlipSets,
        Self::PutSources,
        Self::DropFrontends,
        Self::PutFrontends,
        Self::DropSources,
        Self::DropSets,
        Self::DropBackends,
    ];
}

/// What is to be written, kind by kind; [`Phase::ORDER`] is the order in which it is carried out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Backends to write.
    pub put_backends: BTreeMap<u32, Backend>,
    /// Ids that are in use for the first time: their counters start at zero.
    pub fresh_backends: BTreeSet<u32>,
    /// Services that are in use for the first time: their counters start at zero.
    pub fresh_services: BTreeSet<u32>,
    /// Tables to write beside the old ones.
    pub tables: Vec<TableWrite>,
    /// Lists to write beside the old ones.
    pub lists: Vec<ListWrite>,
    /// Memberships to write.
    pub put_memberships: BTreeSet<Membership>,
    /// Sets to flip.
    pub flip_sets: BTreeMap<u32, SetWord>,
    /// Frontends to write.
    pub put_frontends: BTreeMap<FrontendKey, Frontend>,
    /// Frontends to remove.
    pub drop_frontends: BTreeSet<FrontendKey>,
    /// Source ranges to write.
    pub put_sources: BTreeSet<Source>,
    /// Source ranges to remove.
    pub drop_sources: BTreeSet<Source>,
    /// Sets to clear.
    pub drop_sets: BTreeSet<u32>,
    /// Memberships to remove.
    pub drop_memberships: BTreeSet<Membership>,
    /// Backends to make vacant.
    pub drop_backends: BTreeSet<u32>,
}

/// Number of writes, by kind, for logs and tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Size {
    /// Writes that add or change.
    pub puts: usize,
    /// Writes that remove.
    pub drops: usize,
}

impl Plan {
    /// True if there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.size() == Size::default()
    }

    /// How much there is to do.
    pub fn size(&self) -> Size {
        Size {
            puts: self.put_backends.len()
                + self.tables.len()
                + self.lists.len()
                + self.put_memberships.len()
                + self.flip_sets.len()
                + self.put_sources.len()
                + self.put_frontends.len(),
            drops: self.drop_frontends.len()
                + self.drop_sources.len()
                + self.drop_sets.len()
                + self.drop_memberships.len()
                + self.drop_backends.len(),
        }
    }

    /// From one compilation of a Service to the next; `None` is its absence.
    pub fn between(old: Option<&Compiled>, new: Option<&Compiled>) -> Self {
        let mut plan = Self::default();
        if let Some(new) = new {
            plan.add(old, new);
        }
        if let Some(old) = old {
            plan.remove(old, new);
        }
        plan
    }

    fn add(&mut self, old: Option<&Compiled>, new: &Compiled) {
        if old.is_none() {
            self.fresh_services.insert(new.service_id);
        }
        for (id, backend) in &new.backends {
            match old.and_then(|old| old.backend_id(backend.proto, backend.addr, backend.port)) {
                Some(known) if known == *id => {
                    if old.is_some_and(|old| !old.backends.contains(&(*id, *backend))) {
                        self.put_backends.insert(*id, *backend);
                    }
                }
                _ => {
                    self.put_backends.insert(*id, *backend);
                    self.fresh_backends.insert(*id);
                }
            }
        }
        for set in &new.sets {
            let before = old.and_then(|old| old.sets.iter().find(|s| s.set_id == set.set_id));
            if before.is_none_or(|before| before.word != set.word) {
                if set.word.count() > 0 {
                    self.lists.push(list_write(set));
                }
                self.flip_sets.insert(set.set_id, set.word);
            }
            let known: HashSet<Membership> = before.into_iter().flat_map(CompiledSet::memberships).collect();
            self.put_memberships
                .extend(set.memberships().filter(|m| !known.contains(m)));
        }
        for (key, value) in &new.frontends {
            let known = old.and_then(|old| find(&old.frontends, key));
            if known != Some(*value) {
                self.put_frontends.insert(*key, *value);
            }
        }
        let known = old.map_or(&[][..], |old| &old.sources);
        let fresh = new.sources.iter().filter(|source| known.binary_search(source).is_err());
        self.put_sources.extend(fresh);
    }

    fn remove(&mut self, old: &Compiled, new: Option<&Compiled>) {
        for (key, _) in &old.frontends {
            if new.is_none_or(|new| find(&new.frontends, key).is_none()) {
                self.drop_frontends.insert(*key);
            }
        }
        let kept = new.map_or(&[][..], |new| &new.sources);
        let gone = old.sources.iter().filter(|source| kept.binary_search(source).is_err());
        self.drop_sources.extend(gone);
        for set in &old.sets {
            let after = new.and_then(|new| new.sets.iter().find(|s| s.set_id == set.set_id));
            if after.is_none() {
                self.drop_sets.insert(set.set_id);
            }
            let kept: HashSet<Membership> = after.into_iter().flat_map(CompiledSet::memberships).collect();
            self.drop_memberships
                .extend(set.memberships().filter(|m| !kept.contains(m)));
        }
        let kept: HashSet<u32> = new
            .map(|new| new.backends.iter().map(|(id, _)| *id).collect())
            .unwrap_or_default();
        self.drop_backends
            .extend(old.backends.iter().map(|(id, _)| *id).filter(|id| !kept.contains(id)));
    }

    /// From what the kernel holds to what all Services want: at the first sync, and to repair.
    ///
    /// Tables are compared by their content; the ones that differ are named in `broken`, for the caller to build.
    pub fn against<'a>(
        contents: &Contents,
        services: impl Iterator<Item = &'a Compiled>,
        broken: &mut Vec<&'a CompiledSet>,
    ) -> Self {
        let mut plan = Self::default();
        let mut backends = HashSet::new();
        let mut sets = HashSet::new();
        let mut frontends = HashSet::new();
        let mut memberships_wanted = HashSet::new();
        let mut sources = HashSet::new();
        let mut services_known: HashSet<u32> = contents.frontends.values().map(|f| f.service_id).collect();
        services_known.extend(contents.backends.values().map(|b| b.service_id));
        for service in services {
            if !services_known.contains(&service.service_id) {
                plan.fresh_services.insert(service.service_id);
            }
            for (id, backend) in &service.backends {
                backends.insert(*id);
                match contents.backends.get(id) {
                    Some(held) if held == backend => {}
                    held => {
                        plan.put_backends.insert(*id, *backend);
                        if held.is_none_or(|h| (h.addr, h.port, h.proto) != (backend.addr, backend.port, backend.proto))
                        {
                            plan.fresh_backends.insert(*id);
                        }
                    }
                }
            }
            for set in &service.sets {
                sets.insert(set.set_id);
                let held_word = contents.sets.get(&set.set_id).copied().unwrap_or_default();
                if set.word.count() > 0 {
                    let held = contents.lists.get(&set.set_id);
                    let list_is_right = held.is_some_and(|list| {
                        held_word == set.word
                            && list.members == set.members
                            && (list.table, list.slots) == (set.table.offset, set.table.slots)
                    });
                    if !list_is_right {
                        plan.lists.push(list_write(set));
                    }
                    if !held.is_some_and(|list| {
                        list.content == set.table.content
                            && (list.table, list.slots) == (set.table.offset, set.table.slots)
                    }) {
                        broken.push(set);
                    }
                }
                if held_word != set.word {
                    plan.flip_sets.insert(set.set_id, set.word);
                }
                for membership in set.memberships() {
                    memberships_wanted.insert(membership);
                    if !contents.memberships.contains(&membership) {
                        plan.put_memberships.insert(membership);
                    }
                }
            }
            for (key, value) in &service.frontends {
                frontends.insert(*key);
                if contents.frontends.get(key) != Some(value) {
                    plan.put_frontends.insert(*key, *value);
                }
            }
            sources.extend(&service.sources);
        }
        plan.put_sources = sources.difference(&contents.sources).copied().collect();
        plan.drop_sources = contents.sources.difference(&sources).copied().collect();
        plan.drop_frontends = contents
            .frontends
            .keys()
            .filter(|k| !frontends.contains(*k))
            .copied()
            .collect();
        plan.drop_sets = contents.sets.keys().filter(|id| !sets.contains(*id)).copied().collect();
        plan.drop_memberships = contents
            .memberships
            .iter()
            .filter(|m| !memberships_wanted.contains(*m))
            .copied()
            .collect();
        plan.drop_backends = contents
            .backends
            .keys()
            .filter(|id| !backends.contains(*id))
            .copied()
            .collect();
        plan
    }

    /// Adds the plan of another Service; what one puts, the other's removal does not take away.
    pub fn merge(&mut self, other: Self) {
        self.put_backends.extend(other.put_backends);
        self.fresh_backends.extend(other.fresh_backends);
        self.fresh_services.extend(other.fresh_services);
        self.tables.extend(other.tables);
        self.lists.extend(other.lists);
        self.put_memberships.extend(other.put_memberships);
        self.flip_sets.extend(other.flip_sets);
        self.put_frontends.extend(other.put_frontends);
        self.put_sources.extend(other.put_sources);
        self.drop_sources.extend(other.drop_sources);
        self.drop_frontends.extend(other.drop_frontends);
        self.drop_sets.extend(other.drop_sets);
        self.drop_memberships.extend(other.drop_memberships);
        self.drop_backends.extend(other.drop_backends);
        self.drop_frontends.retain(|key| !self.put_frontends.contains_key(key));
    }
}

fn find(frontends: &[(FrontendKey, Frontend)], key: &FrontendKey) -> Option<Frontend> {
    frontends
        .binary_search_by_key(key, |(k, _)| *k)
        .ok()
        .map(|i| frontends[i].1)
}

fn list_write(set: &CompiledSet) -> ListWrite {
    ListWrite {
        offset: set.word.offset(),
        table: set.table.offset,
        slots: set.table.slots,
        members: set.members.clone(),
    }
}

#[cfg(test)]
mod tests;
