//! Who calls which Service: the call graph's memory.
//!
//! One edge a (client, Service), with what was counted on it. The memory is bounded: beyond its capacity the edge that was
//! noted longest ago is forgotten, and counted. What a client is (a workload, an address) is the caller's key; how the graph
//! looks is `view`. Invariant: `recency` holds exactly one turn for each edge, the turn that the edge itself names.

use std::{
    collections::{BTreeMap, HashMap},
    hash::Hash,
};

/// Edges remembered unless told otherwise.
pub const DEFAULT_CAPACITY: usize = 4_096;

/// What was counted on one edge.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallCounts {
    /// Connections that ended, and attempts that failed.
    pub connections: u64,
    /// Attempts that failed.
    pub failures: u64,
    /// When the latest of them ended, in nanoseconds of the caller's clock.
    pub last_ns: u64,
}

#[derive(Clone, Debug)]
struct Edge {
    counts: CallCounts,
    turn: u64,
}

/// The calls of clients to Services, by a key for clients that the caller chooses.
#[derive(Clone, Debug)]
pub struct Calls<C> {
    capacity: usize,
    edges: HashMap<(C, u32), Edge>,
    /// Edges by the turn of their latest note, oldest first.
    recency: BTreeMap<u64, (C, u32)>,
    turn: u64,
    forgotten: u64,
}

impl<C: Clone + Eq + Hash> Default for Calls<C> {
    fn default() -> Self {
        Self::new(DEFAULT_CAPACITY)
    }
}

impl<C: Clone + Eq + Hash> Calls<C> {
    /// Makes an empty memory of at most `capacity` edges (at least one).
    pub fn new(capacity: usize) -> Self {
        Self {
            capacity: capacity.max(1),
            edges: HashMap::new(),
            recency: BTreeMap::new(),
            turn: 0,
            forgotten: 0,
        }
    }

    /// Notes one connection of `client` to `service` that ended, or failed to begin, at `at_ns`.
    ///
    /// The key is cloned only for an edge that is new.
    pub fn note(&mut self, client: C, service: u32, failed: bool, at_ns: u64) {
        self.turn += 1;
        let key = (client, service);
        if let Some(edge) = self.edges.get_mut(&key) {
            edge.counts.add(failed, at_ns);
            self.recency.remove(&edge.turn);
            edge.turn = self.turn;
            self.recency.insert(self.turn, key);
            return;
        }
        if self.edges.len() >= self.capacity
            && let Some((_, oldest)) = self.recency.pop_first()
        {
            self.edges.remove(&oldest);
            self.forgotten += 1;
        }
        let mut counts = CallCounts::default();
        counts.add(failed, at_ns);
        let edge = Edge {
            counts,
            turn: self.turn,
        };
        self.edges.insert(key.clone(), edge);
        self.recency.insert(self.turn, key);
    }

    /// Forgets the edges of a Service that is gone; they are not counted as forgotten.
    pub fn forget_service(&mut self, service: u32) {
        self.edges.retain(|&(_, of), _| of != service);
        self.recency.retain(|_, &mut (_, of)| of != service);
    }

    /// The edges, the one noted longest ago first: (client, Service, counts).
    pub fn iter(&self) -> impl Iterator<Item = (&C, u32, CallCounts)> {
        self.recency
            .values()
            .filter_map(|key| Some((&key.0, key.1, self.edges.get(key)?.counts)))
    }

    /// Edges remembered now.
    pub fn len(&self) -> usize {
        self.edges.len()
    }

    /// Whether no edge is remembered.
    pub fn is_empty(&self) -> bool {
        self.edges.is_empty()
    }

    /// Edges forgotten for want of room since the start; one that came back and was forgotten again counts twice.
    pub fn forgotten(&self) -> u64 {
        self.forgotten
    }
}

impl CallCounts {
    fn add(&mut self, failed: bool, at_ns: u64) {
        self.connections += 1;
        self.failures += u64::from(failed);
        // Records come nearly in the order of their ends, not quite.
        self.last_ns = self.last_ns.max(at_ns);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn edges(calls: &Calls<&'static str>) -> Vec<(&'static str, u32, u64, u64, u64)> {
        calls
            .iter()
            .map(|(&client, service, counts)| (client, service, counts.connections, counts.failures, counts.last_ns))
            .collect()
    }

    #[test]
    fn an_edge_counts_connections_failures_and_the_latest_end() {
        let mut calls = Calls::default();
        calls.note("nginx", 7, false, 50);
        calls.note("nginx", 7, true, 40);
        calls.note("nginx", 8, false, 60);
        calls.note("batch", 7, false, 70);
        assert_eq!(
            edges(&calls),
            [("nginx", 7, 2, 1, 50), ("nginx", 8, 1, 0, 60), ("batch", 7, 1, 0, 70)]
        );
        assert_eq!((calls.len(), calls.is_empty(), calls.forgotten()), (3, false, 0));
    }

    #[test]
    fn the_edge_noted_longest_ago_makes_room() {
        let mut calls = Calls::new(2);
        calls.note("a", 1, false, 1);
        calls.note("b", 1, false, 2);
        calls.note("a", 1, false, 3);
        calls.note("c", 1, false, 4);
        assert_eq!(edges(&calls), [("a", 1, 2, 0, 3), ("c", 1, 1, 0, 4)]);
        assert_eq!(calls.forgotten(), 1);
    }

    #[test]
    fn a_service_that_is_gone_takes_its_edges_along() {
        let mut calls = Calls::new(2);
        calls.note("a", 1, false, 1);
        calls.note("a", 2, false, 2);
        calls.forget_service(1);
        calls.note("b", 2, false, 3);
        assert_eq!(edges(&calls), [("a", 2, 1, 0, 2), ("b", 2, 1, 0, 3)]);
        assert_eq!(calls.forgotten(), 0, "there was room again");
    }

    #[test]
    fn a_memory_without_room_keeps_one_edge() {
        let mut calls = Calls::new(0);
        calls.note("a", 1, false, 1);
        calls.note("b", 1, false, 2);
        assert_eq!((calls.len(), calls.forgotten()), (1, 1));
    }

    /// A list in the order of notes, searched from end to end.
    #[derive(Default)]
    struct Plain {
        edges: Vec<((u8, u32), CallCounts)>,
        forgotten: u64,
    }

    impl Plain {
        fn note(&mut self, key: (u8, u32), failed: bool, at_ns: u64, capacity: usize) {
            let found = self.edges.iter().position(|(edge, _)| *edge == key);
            let mut counts = found.map_or_else(CallCounts::default, |index| self.edges.remove(index).1);
            if self.edges.len() == capacity {
                self.edges.remove(0);
                self.forgotten += 1;
            }
            counts.connections += 1;
            counts.failures += u64::from(failed);
            counts.last_ns = counts.last_ns.max(at_ns);
            self.edges.push((key, counts));
        }
    }

    proptest! {
        #[test]
        fn the_memory_is_a_bounded_list_by_recency(
            steps in prop::collection::vec((0_u8..6, 0_u32..4, any::<bool>(), 0_u64..1_000, prop::bool::weighted(0.1)), 0..200),
            capacity in 1_usize..12,
        ) {
            let mut calls = Calls::new(capacity);
            let mut plain = Plain::default();
            for (client, service, failed, at_ns, forget) in steps {
                if forget {
                    calls.forget_service(service);
                    plain.edges.retain(|((_, of), _)| *of != service);
                } else {
                    calls.note(client, service, failed, at_ns);
                    plain.note((client, service), failed, at_ns, capacity);
                }
                let found: Vec<_> = calls.iter().map(|(&client, service, counts)| ((client, service), counts)).collect();
                prop_assert_eq!(&found, &plain.edges);
                prop_assert_eq!(calls.forgotten(), plain.forgotten);
                prop_assert_eq!(calls.len(), calls.recency.len());
            }
        }
    }
}
