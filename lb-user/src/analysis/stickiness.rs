//! Whether a client keeps meeting the backend it met before: what tells affinity from port reuse.
//!
//! Of consecutive connections of one client to one Service, how many met the backend of the client's previous one? Under
//! affinity nearly all do, whatever their source ports. Where a proxy pins reused tuples, only a repeated source port does:
//! consecutive connections come from different ports, each pinned to a backend of its own, so that they meet the same one no
//! more often than chance. Therefore a pair with one source port proves neither, and is counted apart.
//!
//! Chance is Σ p² over the shares that were observed; for a client that is alone and sticky it is 1, and then the number
//! proves nothing (`cause` compares with a fair choice as well). Counts are recent: they cover the last one to two
//! [`SPAN_NS`]. Memory is bounded: beyond the capacity the client that was heard of longest ago is forgotten, and counted.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

/// Half of the longest time that the counts cover, in nanoseconds.
pub const SPAN_NS: u64 = 300_000_000_000;

/// Backends counted apart for each Service and span; those beyond it share one count, which can only make chance look larger.
const MAX_BACKENDS: usize = 4096;
/// Stands for the backends beyond [`MAX_BACKENDS`].
const OTHERS: u32 = u32::MAX;

/// Who connects: a network namespace and an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Client {
    /// The network namespace's cookie; 0 outside the node.
    pub netns: u64,
    /// The address, IPv4 mapped into IPv6.
    pub address: [u8; 16],
}

impl Client {
    /// Stands for all clients outside the node together, where single ones would take too much room. Cookies count from 1 on
    /// and never come to this one.
    pub const OUTSIDE: Self = Self {
        netns: u64::MAX,
        address: [0; 16],
    };
}

/// What was counted of one Service, over the last one to two spans.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StickinessCounts {
    /// Connections whose backend was seen.
    pub connections: u64,
    /// Consecutive connections of one client from different source ports.
    pub pairs: u64,
    /// Those that met the same backend.
    pub same: u64,
    /// Consecutive connections of one client from one source port; not among the pairs.
    pub same_port_pairs: u64,
    /// Distinct clients that are remembered.
    pub clients: usize,
    /// Σ p² over the backends' observed shares: how often chance alone meets the same backend; none without connections.
    pub chance: Option<f64>,
}

impl StickinessCounts {
    /// The share of pairs that met the same backend; none without pairs.
    pub fn share(&self) -> Option<f64> {
        (self.pairs > 0).then(|| self.same as f64 / self.pairs as f64)
    }
}

/// A client's latest connection to a Service.
#[derive(Clone, Copy, Debug)]
struct Last {
    backend: u32,
    port: u16,
    /// When it was heard of, counted in connections: the age by which it is forgotten.
    turn: u64,
}

/// Counts of one Service in one span.
#[derive(Clone, Debug, Default)]
struct Span {
    pairs: u64,
    same: u64,
    same_port_pairs: u64,
    backends: BTreeMap<u32, u64>,
}

#[derive(Clone, Debug, Default)]
struct Service {
    current: Span,
    previous: Span,
    clients: HashSet<Client>,
}

/// Folds connections, in the order of their starts, into counts of stickiness by Service.
#[derive(Clone, Debug)]
pub struct Stickiness {
    capacity: usize,
    /// Clients in network namespaces of this node, and those outside: neither drives the other out.
    clients: [HashMap<(u32, Client), Last>; 2],
    /// (turn, Service, client), oldest first; entries whose turn no longer matches the client's are stale.
    order: [VecDeque<(u64, u32, Client)>; 2],
    services: BTreeMap<u32, Service>,
    turn: u64,
    span_start_ns: u64,
    evicted: u64,
}

impl Stickiness {
    /// Makes a tracker that remembers at most so many clients of this node, and as many outside (each counted once a Service), at
    /// some 200 bytes each.
    pub fn new(capacity: usize) -> Self {
        Self {
            capacity: capacity.max(1),
            clients: Default::default(),
            order: Default::default(),
            services: BTreeMap::new(),
            turn: 0,
            span_start_ns: 0,
            evicted: 0,
        }
    }

    /// Takes a connection that a client began at `start_ns`; one whose backend was not seen is not for here.
    pub fn push(&mut self, service: u32, client: Client, client_port: u16, backend: u32, start_ns: u64) {
        self.advance(start_ns);
        self.turn += 1;
        let last = Last {
            backend,
            port: client_port,
            turn: self.turn,
        };
        let previous = self.clients[side(&client)].insert((service, client), last);
        self.order[side(&client)].push_back((self.turn, service, client));
        let counts = self.services.entry(service).or_default();
        let span = &mut counts.current;
        match previous {
            Some(previous) if previous.port == client_port => span.same_port_pairs += 1,
            Some(previous) => {
                span.pairs += 1;
                span.same += u64::from(previous.backend == backend);
            }
            None => {
                counts.clients.insert(client);
            }
        }
        let known = span.backends.contains_key(&backend) || span.backends.len() < MAX_BACKENDS;
        *span.backends.entry(if known { backend } else { OTHERS }).or_default() += 1;
        self.make_room(side(&client));
    }

    /// Says what time it is, so that old counts go also while nobody connects.
    pub fn advance(&mut self, now_ns: u64) {
        let past = now_ns.saturating_sub(self.span_start_ns);
        if past < SPAN_NS {
            return;
        }
        self.span_start_ns = now_ns;
        for service in self.services.values_mut() {
            let ended = std::mem::take(&mut service.current);
            service.previous = if past < 2 * SPAN_NS { ended } else { Span::default() };
        }
    }

    /// What was counted of a Service lately; nothing before its first connection.
    pub fn service(&self, service: u32) -> StickinessCounts {
        let Some(counts) = self.services.get(&service) else {
            return StickinessCounts::default();
        };
        let (current, previous) = (&counts.current, &counts.previous);
        let mut backends = current.backends.clone();
        for (&backend, count) in &previous.backends {
            *backends.entry(backend).or_default() += count;
        }
        StickinessCounts {
            connections: backends.values().sum(),
            pairs: current.pairs + previous.pairs,
            same: current.same + previous.same,
            same_port_pairs: current.same_port_pairs + previous.same_port_pairs,
            clients: counts.clients.len(),
            chance: chance_of_shares(backends.into_values()),
        }
    }

    /// Drops a Service, when it has gone.
    pub fn forget_service(&mut self, service: u32) {
        self.services.remove(&service);
        for side in 0..2 {
            self.clients[side].retain(|&(of, _), _| of != service);
            self.order[side].retain(|&(_, of, _)| of != service);
        }
    }

    /// Clients remembered now, each counted once a Service.
    pub fn clients(&self) -> usize {
        self.clients.iter().map(HashMap::len).sum()
    }

    /// Clients forgotten for want of room.
    pub fn evicted(&self) -> u64 {
        self.evicted
    }

    fn make_room(&mut self, side: usize) {
        let (clients, order) = (&mut self.clients[side], &mut self.order[side]);
        while clients.len() > self.capacity
            && let Some((turn, service, client)) = order.pop_front()
        {
            if clients.get(&(service, client)).is_some_and(|last| last.turn == turn) {
                clients.remove(&(service, client));
                if let Some(service) = self.services.get_mut(&service) {
                    service.clients.remove(&client);
                }
                self.evicted += 1;
            }
        }
        // A client that connects often leaves stale entries behind; sweep before they outnumber the live ones.
        if order.len() > 2 * self.capacity.max(8) {
            order.retain(|&(turn, service, client)| {
                clients.get(&(service, client)).is_some_and(|last| last.turn == turn)
            });
        }
    }
}

/// Which of two memories is for a client: 0 for those in a network namespace of this node, 1 for those outside.
const fn side(client: &Client) -> usize {
    (client.netns == 0) as usize
}

/// Σ p² over observed counts: how often two independent choices with these shares meet the same backend.
///
/// None without any count.
pub fn chance_of_shares(counts: impl IntoIterator<Item = u64>) -> Option<f64> {
    let (sum, squares) = counts.into_iter().fold((0.0, 0.0), |(sum, squares), count| {
        let count = count as f64;
        (sum + count, squares + count * count)
    });
    (sum > 0.0).then(|| squares / (sum * sum))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{super::simulated::Dice, *};

    const SECOND: u64 = 1_000_000_000;

    fn client(n: u64) -> Client {
        Client {
            netns: n + 1,
            address: [7; 16],
        }
    }

    #[test]
    fn affinity_sticks_whatever_the_port() {
        let mut seen = Stickiness::new(1000);
        let mut dice = Dice(1);
        for i in 0..3_000_u64 {
            let who = dice.below(30);
            seen.push(1, client(who), (1_000 + i) as u16, (who % 3) as u32, i * SECOND / 100);
        }
        let found = seen.service(1);
        assert_eq!((found.same, found.clients), (found.pairs, 30));
        assert_eq!(found.pairs, 2_970);
        assert!(
            found.chance.is_some_and(|chance| (0.33..0.36).contains(&chance)),
            "{found:?}"
        );
    }

    #[test]
    fn port_reuse_meets_the_same_no_more_than_chance() {
        // Two hundred ports in turn, each pinned to one of two backends for ever.
        let mut seen = Stickiness::new(1000);
        let mut dice = Dice(2);
        let pinned: Vec<u32> = (0..200).map(|_| dice.below(2) as u32).collect();
        for i in 0..10_000_u64 {
            let port = dice.below(200) as usize;
            seen.push(1, client(1), port as u16, pinned[port], i * SECOND / 100);
        }
        let found = seen.service(1);
        let share = found.share().unwrap();
        assert!((share - found.chance.unwrap()).abs() < 0.03, "{found:?}");
        assert!(found.same_port_pairs > 0, "one port twice in a row proves nothing");
        assert_eq!(found.pairs + found.same_port_pairs, 9_999);
    }

    #[test]
    fn counts_are_of_the_last_two_spans() {
        let mut seen = Stickiness::new(10);
        for i in 0..10 {
            seen.push(1, client(1), i, 5, SPAN_NS + u64::from(i));
        }
        assert_eq!(seen.service(1).pairs, 9);
        seen.advance(2 * SPAN_NS + 10);
        assert_eq!(seen.service(1).pairs, 9, "the previous span still counts");
        seen.push(1, client(1), 99, 6, 2 * SPAN_NS + 11);
        assert_eq!((seen.service(1).pairs, seen.service(1).same), (10, 9));
        seen.advance(3 * SPAN_NS + 10);
        assert_eq!((seen.service(1).pairs, seen.service(1).same), (1, 0));
        seen.advance(9 * SPAN_NS);
        assert_eq!((seen.service(1).connections, seen.service(1).chance), (0, None));
    }

    #[test]
    fn services_do_not_mix_and_can_go() {
        let mut seen = Stickiness::new(10);
        seen.push(1, client(1), 1, 5, 1);
        seen.push(2, client(1), 2, 6, 2);
        assert_eq!((seen.service(1).pairs, seen.service(2).pairs), (0, 0));
        seen.forget_service(1);
        assert_eq!((seen.clients(), seen.service(1).connections), (1, 0));
        assert_eq!(seen.service(3), StickinessCounts::default());
    }

    #[test]
    fn the_client_heard_of_longest_ago_is_forgotten() {
        let mut seen = Stickiness::new(2);
        for (who, port) in [(1, 1), (2, 2), (1, 3), (3, 4), (1, 5)] {
            seen.push(1, client(who), port, 9, 0);
        }
        assert_eq!((seen.clients(), seen.evicted(), seen.service(1).clients), (2, 1, 2));
        assert_eq!(seen.service(1).pairs, 2, "client 1 was kept");
        seen.push(1, client(2), 6, 9, 0);
        assert_eq!(seen.service(1).pairs, 2, "client 2 was not");
    }

    proptest! {
        #[test]
        fn memory_is_bounded_and_nothing_is_lost(
            pushes in proptest::collection::vec((0_u32..3, 0_u64..40, 0_u16..5, 0_u32..4, 0_u64..SPAN_NS / 20), 0..300),
            capacity in 1_usize..20,
        ) {
            let mut seen = Stickiness::new(capacity);
            let mut now = 0;
            let mut distinct = 0;
            for (service, who, port, backend, by) in pushes {
                now += by;
                let before = seen.clients[0].contains_key(&(service, client(who)));
                distinct += usize::from(!before);
                seen.push(service, client(who), port, backend, now);
                prop_assert!(seen.clients() <= capacity);
                prop_assert!(seen.order.iter().all(|order| order.len() <= 2 * capacity.max(8) + 1));
                prop_assert_eq!(seen.clients() + seen.evicted() as usize, distinct);
                let by_service: usize = (0..3).map(|id| seen.service(id).clients).sum();
                prop_assert_eq!(by_service, seen.clients());
                let found = seen.service(service);
                prop_assert!(found.same <= found.pairs);
                prop_assert!(found.pairs + found.same_port_pairs <= found.connections);
                prop_assert!(found.chance.is_some_and(|chance| chance > 0.0 && chance <= 1.0));
            }
        }
    }
}
