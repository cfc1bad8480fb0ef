//! Which connections a set's endpoints are judged by.
//!
//! A backend's counters tell the connections of this node's own sockets from those that came in as packets, and no more. A set
//! is for the ones, for the others, or for both: under externalTrafficPolicy Local outside clients meet fewer endpoints than
//! local ones do, and whoever judged all endpoints by all connections would call the rest starved. Pure. Invariant: a set is
//! judged by counters that no other set of the Service adds to unevenly, or not at all.

use std::collections::BTreeMap;

use lb_common::{
    backend::{BackendCounters, Tally},
    frontend::flag,
};

use crate::compile::{Compiled, CompiledSet};

/// Whose connections count for a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Audience {
    /// Those of sockets on this node.
    pub inside: bool,
    /// Those that came in as packets: from outside the node, or from a guest.
    pub outside: bool,
    /// Other sets choose among some of the same endpoints for the same clients: nobody can be judged.
    pub mixed: bool,
}

impl Default for Audience {
    fn default() -> Self {
        Self::INSIDE
    }
}

impl Audience {
    /// The node's own sockets alone.
    pub const INSIDE: Self = Self {
        inside: true,
        outside: false,
        mixed: false,
    };
    /// Packets from outside alone.
    pub const OUTSIDE: Self = Self {
        inside: false,
        outside: true,
        mixed: false,
    };
    /// Both, which meet the same endpoints.
    pub const ALL: Self = Self {
        inside: true,
        outside: true,
        mixed: false,
    };

    /// Whether these are some of those clients, and can be judged by alone as well as together with the rest.
    pub const fn is_part_of(self, others: Self) -> bool {
        !self.mixed && !others.mixed && (others.inside || !self.inside) && (others.outside || !self.outside)
    }

    /// What a backend had of these clients.
    pub fn of(self, counters: &BackendCounters) -> Tally {
        let mut sum = Tally::default();
        if self.inside {
            add(&mut sum, &counters.inside);
        }
        if self.outside {
            add(&mut sum, &counters.outside);
        }
        sum
    }
}

/// A backend's connections through frontends, wherever they came from.
pub fn total(counters: &BackendCounters) -> Tally {
    Audience::ALL.of(counters)
}

/// The connections of a tally that are open, once those that fell silent are settled (see [`super::flows::Silent`]).
pub fn open(tally: &Tally) -> u64 {
    tally.established.saturating_sub(tally.closed)
}

fn add(sum: &mut Tally, other: &Tally) {
    sum.connects += other.connects;
    sum.established += other.established;
    sum.failed += other.failed;
    sum.closed += other.closed;
}

/// The audience of each of a Service's sets, in their order.
///
/// `guests`: whether packets of guests are translated; they count as outside, and meet the endpoints that local clients do.
pub fn audiences(service: &Compiled, guests: bool) -> Vec<Audience> {
    let place: BTreeMap<u32, usize> = (service.sets.iter().enumerate())
        .map(|(index, set)| (set.set_id, index))
        .collect();
    // [inside, outside] for each set: who may reach it.
    let mut reached = vec![[false; 2]; service.sets.len()];
    for (_, frontend) in &service.frontends {
        if let Some(&index) = place.get(&frontend.set_id) {
            reached[index][0] = true;
            reached[index][1] |= guests;
        }
        if let Some(&index) = place.get(&frontend.outside_set_id)
            && frontend.flags & flag::OUTSIDE != 0
        {
            reached[index][1] = true;
        }
    }
    let shared = if service.sets.len() > 1 {
        partly_shared(&service.sets)
    } else {
        Vec::new()
    };
    (0..service.sets.len())
        .map(|index| {
            let alone = |side: usize| {
                let mut others = shared.iter().filter(|(set, _)| *set == index);
                reached[index][side] && others.all(|(_, other)| !reached[*other][side])
            };
            let (inside, outside) = (alone(0), alone(1));
            let mixed = !inside && !outside;
            Audience {
                inside: if mixed { reached[index][0] } else { inside },
                outside: if mixed { reached[index][1] } else { outside },
                mixed,
            }
        })
        .collect()
}

/// Pairs (set, other) where the other has some of the set's eligible members and lacks others: its connections make the set's
/// members uneven. One that has all of them, or none, does not.
fn partly_shared(sets: &[CompiledSet]) -> Vec<(usize, usize)> {
    let eligible = |set: &CompiledSet| set.members.iter().filter(|(_, weight)| *weight > 0).count();
    let mut holders: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for (index, set) in sets.iter().enumerate() {
        for (id, _) in set.members.iter().filter(|(_, weight)| *weight > 0) {
            holders.entry(*id).or_default().push(index);
        }
    }
    let mut common: BTreeMap<(usize, usize), usize> = BTreeMap::new();
    for together in holders.values().filter(|together| together.len() > 1) {
        for &set in together {
            for &other in together.iter().filter(|other| **other != set) {
                *common.entry((set, other)).or_default() += 1;
            }
        }
    }
    (common.into_iter())
        .filter(|((set, _), count)| *count < eligible(&sets[*set]))
        .map(|(pair, _)| pair)
        .collect()
}

#[cfg(test)]
mod tests {
    use lb_common::{
        addr::{Addr, Port},
        frontend::{Frontend, FrontendKey},
        set::SetWord,
    };

    use super::*;
    use crate::{
        compile::Table,
        model::{Protocol, Scope, SetName},
    };

    fn set(set_id: u32, scope: Scope, members: &[u32]) -> CompiledSet {
        CompiledSet {
            name: SetName {
                port_name: "".into(),
                protocol: Protocol::Tcp,
                ipv6: false,
                scope,
            },
            set_id,
            word: SetWord::new(0, members.len() as u16, 1),
            table: Table::default(),
            members: members.iter().map(|id| (*id, 1)).collect(),
            affinity: false,
        }
    }

    /// A Service with the frontends (set, outside set; 0 for one that is not served outside).
    fn service(frontends: &[(u32, u32)], sets: Vec<CompiledSet>) -> Compiled {
        let value = |(index, (set_id, outside)): (usize, &(u32, u32))| {
            let key = FrontendKey::new(Addr::from_v4(index as u32), Port::new(80), 6);
            let frontend = Frontend {
                service_id: 1,
                set_id: *set_id,
                flags: if *outside > 0 { flag::OUTSIDE } else { 0 },
                affinity_seconds: 0,
                outside_set_id: if *outside > 0 { *outside } else { *set_id },
                pad: 0,
            };
            (key, frontend)
        };
        Compiled {
            service_id: 1,
            frontends: frontends.iter().enumerate().map(value).collect(),
            sets: sets.into(),
            backends: Box::default(),
            sources: Box::default(),
        }
    }

    const CLUSTER: u32 = 10;
    const LOCAL: u32 = 11;

    fn both(local: &[u32]) -> Vec<CompiledSet> {
        vec![
            set(CLUSTER, Scope::Cluster, &[1, 2, 3]),
            set(LOCAL, Scope::Local, local),
        ]
    }

    #[test]
    fn one_set_for_all_counts_all() {
        let only = vec![set(CLUSTER, Scope::Cluster, &[1, 2, 3])];
        let node_port = service(&[(CLUSTER, 0), (CLUSTER, CLUSTER)], only.clone());
        assert_eq!(audiences(&node_port, false), [Audience::ALL]);
        let cluster_ip = service(&[(CLUSTER, 0)], only);
        assert_eq!(audiences(&cluster_ip, false), [Audience::INSIDE]);
        assert_eq!(audiences(&cluster_ip, true), [Audience::ALL], "guests dial it as well");
    }

    #[test]
    fn under_external_policy_local_each_set_has_its_own_clients() {
        let found = audiences(&service(&[(CLUSTER, 0), (CLUSTER, LOCAL)], both(&[1])), false);
        assert_eq!(found, [Audience::INSIDE, Audience::OUTSIDE]);
        // Guests choose among all endpoints and count as outside: the Local set's share stays even, the others' would not.
        let found = audiences(&service(&[(CLUSTER, 0), (CLUSTER, LOCAL)], both(&[1, 2])), true);
        assert_eq!(found, [Audience::INSIDE, Audience::OUTSIDE]);
    }

    #[test]
    fn what_cannot_be_told_apart_is_not_judged() {
        // internalTrafficPolicy Local for the ClusterIP, all endpoints for local clients of the node port.
        let service_of = |local: &[u32]| service(&[(LOCAL, 0), (CLUSTER, CLUSTER)], both(local));
        let found = audiences(&service_of(&[1, 2]), false);
        assert_eq!(found, [Audience::OUTSIDE, Audience::INSIDE]);
        assert_eq!(
            audiences(&service_of(&[1, 2, 3]), false),
            [Audience::ALL, Audience::INSIDE],
            "the same endpoints"
        );
        assert_eq!(
            audiences(&service_of(&[]), false),
            [Audience::ALL, Audience::INSIDE],
            "none of them here"
        );
        let guests = audiences(&service_of(&[1, 2]), true);
        assert!(guests[0].mixed && guests[0].inside && guests[0].outside, "{guests:?}");
        assert_eq!(guests[1], Audience::ALL);
    }

    #[test]
    fn a_backend_is_counted_for_whom_it_serves() {
        let counters = BackendCounters {
            inside: Tally {
                connects: 10,
                established: 8,
                closed: 3,
                ..Tally::default()
            },
            outside: Tally {
                connects: 7,
                established: 6,
                failed: 1,
                closed: 2,
            },
            ..BackendCounters::default()
        };
        let started = |audience: Audience| audience.of(&counters).connects;
        assert_eq!(
            [Audience::INSIDE, Audience::OUTSIDE, Audience::ALL].map(started),
            [10, 7, 17]
        );
        assert_eq!(open(&total(&counters)), 9);
    }
}
