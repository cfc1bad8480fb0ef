//! What the maps mean, without the numbers that depend on history.
//!
//! Two kernels may serve the same and yet differ: in ids, in where lists and tables lie, in the publication that a set's word
//! counts. Here each id is replaced by what it stands for (a backend by its address and state, a set by its members, its
//! table slot by slot and who may be remembered), and what nothing names is counted. Two equal meanings serve every client
//! alike, and neither kernel holds anything that the other does not.

use std::{collections::BTreeMap, net::IpAddr};

use lb_common::{
    backend::{Backend, state},
    frontend::{FrontendKey, flag},
};
use lb_user::{
    compile::Contents,
    datapath::{fake::Memory, maps::Maps},
};

/// A backend by address, port, protocol and state.
type Place = (IpAddr, u16, u8, u8);

/// What a set means to its clients.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Set {
    /// Each member and its weight, sorted.
    members: Vec<(Place, u16)>,
    /// Who is met at each slot.
    slots: Vec<Place>,
    /// Whom a client's memory may name, sorted.
    remembered: Vec<Place>,
}

/// What clients of one frontend meet.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Frontend {
    flags: u32,
    affinity_seconds: u32,
    inside: Set,
    outside: Option<Set>,
    /// Who is admitted, where source ranges count: leading bits and first address.
    admitted: Vec<(u32, IpAddr)>,
}

/// What the maps mean.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Meaning {
    frontends: BTreeMap<FrontendKey, Frontend>,
    /// How many backends there are of each place.
    backends: BTreeMap<Place, usize>,
    sets: usize,
    memberships: usize,
    sources: usize,
}

const NOBODY: Place = (IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED), 0, 0, state::VACANT);

fn place(backend: &Backend) -> Place {
    (backend.addr.into(), backend.port.get(), backend.proto, backend.state)
}

fn set(memory: &Memory, contents: &Contents, id: u32) -> Set {
    let of = |id: u32| contents.backends.get(&id).map_or(NOBODY, place);
    let list = contents.lists.get(&id);
    let mut members: Vec<(Place, u16)> = list
        .iter()
        .flat_map(|list| list.members.iter())
        .map(|(backend_id, weight)| (of(*backend_id), *weight))
        .collect();
    members.sort_unstable();
    let slots = list.map_or_else(Vec::new, |list| {
        let slots = memory
            .table(list.table, list.slots)
            .expect("a list names a table within the array");
        let met = |slot: u16| list.members.get(usize::from(slot)).map_or(NOBODY, |(id, _)| of(*id));
        slots.into_iter().map(met).collect()
    });
    let named = contents.memberships.iter().filter(|membership| membership.set_id == id);
    let mut remembered: Vec<Place> = named.map(|membership| of(membership.backend_id)).collect();
    remembered.sort_unstable();
    Set {
        members,
        slots,
        remembered,
    }
}

impl Meaning {
    /// Reads what the maps mean now.
    pub(super) fn of(memory: &Memory) -> Self {
        let contents = memory.dump().expect("memory is read");
        let mut backends = BTreeMap::new();
        for backend in contents.backends.values() {
            *backends.entry(place(backend)).or_default() += 1;
        }
        let frontends = contents.frontends.iter().map(|(key, frontend)| {
            let limited = frontend.flags & flag::SOURCE_RANGES != 0;
            let sources = contents
                .sources
                .iter()
                .filter(|source| limited && source.key.service_id == frontend.service_id);
            let mut admitted: Vec<_> = sources.map(|source| (source.bits, source.key.addr.into())).collect();
            admitted.sort_unstable();
            let meaning = Frontend {
                flags: frontend.flags,
                affinity_seconds: frontend.affinity_seconds,
                inside: set(memory, &contents, frontend.set_id),
                outside: (frontend.flags & flag::OUTSIDE != 0).then(|| set(memory, &contents, frontend.outside_set_id)),
                admitted,
            };
            (*key, meaning)
        });
        Self {
            frontends: frontends.collect(),
            backends,
            sets: contents.sets.len(),
            memberships: contents.memberships.len(),
            sources: contents.sources.len(),
        }
    }

    /// How many frontends and backends are here that are not in `other`.
    pub(super) fn beyond(&self, other: &Self) -> usize {
        let frontends = self
            .frontends
            .keys()
            .filter(|key| !other.frontends.contains_key(key))
            .count();
        let backends = self
            .backends
            .iter()
            .map(|(place, count)| count.saturating_sub(other.backends.get(place).copied().unwrap_or_default()));
        frontends + backends.sum::<usize>()
    }

    /// The first differences from what it should be, one a line.
    pub(super) fn differences(&self, wanted: &Self) -> String {
        let mut lines = Vec::new();
        for key in self.frontends.keys().chain(wanted.frontends.keys()) {
            let at = (IpAddr::from(key.addr), key.port.get(), key.proto);
            match (self.frontends.get(key), wanted.frontends.get(key)) {
                (found, wanted) if found == wanted => {}
                (Some(_), None) => lines.push(format!("frontend {at:?} is served, and should be gone")),
                (None, Some(_)) => lines.push(format!("frontend {at:?} is missing")),
                (Some(found), Some(wanted)) => {
                    let told = |frontend: &Frontend| {
                        let Frontend {
                            flags,
                            affinity_seconds,
                            inside,
                            outside,
                            admitted,
                        } = frontend;
                        let outside = outside.as_ref().map(|set| (&set.members, &set.remembered));
                        format!(
                            "{flags:#x} {affinity_seconds} s {:?} {:?} {outside:?} {admitted:?}",
                            inside.members, inside.remembered
                        )
                    };
                    lines.push(format!(
                        "frontend {at:?}: found {}; wanted {}",
                        told(found),
                        told(wanted)
                    ));
                }
                (None, None) => {}
            }
        }
        if self.backends != wanted.backends {
            lines.push(format!(
                "backends: found {:?}; wanted {:?}",
                self.backends, wanted.backends
            ));
        }
        let counts = |meaning: &Self| (meaning.sets, meaning.memberships, meaning.sources);
        if counts(self) != counts(wanted) {
            lines.push(format!(
                "sets, memberships, source ranges: found {:?}; wanted {:?}",
                counts(self),
                counts(wanted)
            ));
        }
        lines.dedup();
        lines.truncate(20);
        lines.join("\n")
    }
}
