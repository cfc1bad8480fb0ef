//! How much of the ephemeral port range a client has used up towards one destination.
//!
//! The range counts per destination: a client can have one connection a port to each, and when a few Services with few backends
//! take all its traffic, `connect()` fails with EADDRNOTAVAIL long before the node is busy. A port counts as used while its
//! connection is open and for 60 seconds after its end. The latter is TIME_WAIT, which only the side that closed first keeps:
//! where the servers close first, the client's port is free at once. So what is said here is an *upper bound* (and a port that is
//! open again within those seconds counts twice; the ratio never exceeds 1).
//!
//! Memory is bounded: beyond the capacity the ends of longest ago are forgotten, and counted. Time comes from the caller.

use std::collections::{HashMap, VecDeque};

use super::stickiness::Client;

/// For how long a port counts as used after its connection's end, in nanoseconds: a TCP socket's TIME_WAIT.
pub const TIME_WAIT_NS: u64 = 60_000_000_000;

/// Whom a client connects to, as its socket has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Destination {
    /// The address, IPv4 mapped into IPv6.
    pub address: [u8; 16],
    /// The port, host order.
    pub port: u16,
    /// The IP protocol number.
    pub protocol: u8,
}

/// One client towards one destination.
type Pair = (Client, Destination);

/// What is used of the range by one client towards one destination.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PortUse {
    /// The Service that the destination belongs to.
    pub service: u32,
    /// Who connects.
    pub client: Client,
    /// To whom.
    pub destination: Destination,
    /// Open connections.
    pub open: u64,
    /// Ports whose connection ended less than 60 seconds ago.
    pub waiting: u64,
    /// Ports in the range.
    pub range: u32,
    /// (open + waiting) / range, 1 at most.
    pub ratio: f64,
}

#[derive(Clone, Debug, Default)]
struct Used {
    service: u32,
    open: u64,
    /// When the latest connection of a port ended.
    ended: HashMap<u16, u64>,
}

/// Follows the ports in use.
#[derive(Clone, Debug)]
pub struct Ports {
    capacity: usize,
    pairs: HashMap<Pair, Used>,
    /// (end, pair, port), in the order of their coming; entries whose time no longer matches the port's are stale.
    order: VecDeque<(u64, Pair, u16)>,
    /// Ports that wait, over all pairs.
    waiting: usize,
    evicted: u64,
    refused: u64,
}

impl Ports {
    /// Makes a tracker of at most so many waiting ports, at some 150 bytes each, and as many pairs with open connections.
    pub fn new(capacity: usize) -> Self {
        Self {
            capacity: capacity.max(1),
            pairs: HashMap::new(),
            order: VecDeque::new(),
            waiting: 0,
            evicted: 0,
            refused: 0,
        }
    }

    /// Takes the end of a connection; ends come in nearly in their order.
    pub fn ended(&mut self, service: u32, client: Client, destination: Destination, client_port: u16, end_ns: u64) {
        let pair = (client, destination);
        let used = self.pairs.entry(pair).or_default();
        used.service = service;
        let end = used.ended.entry(client_port).or_insert_with(|| {
            self.waiting += 1;
            0
        });
        // One that comes late changes nothing, and the same end twice needs no second entry.
        if end_ns <= *end && *end > 0 {
            return;
        }
        *end = end_ns;
        self.order.push_back((end_ns, pair, client_port));
        while self.waiting > self.capacity
            && let Some((end_ns, pair, port)) = self.order.pop_front()
        {
            self.evicted += u64::from(self.free(end_ns, pair, port));
        }
        if self.order.len() > 2 * self.capacity.max(8) {
            let pairs = &self.pairs;
            self.order.retain(|(end_ns, pair, port)| {
                (pairs.get(pair)).is_some_and(|used| used.ended.get(port) == Some(end_ns))
            });
        }
    }

    /// Says how many connections of a client to a destination are open now.
    pub fn set_open(&mut self, service: u32, client: Client, destination: Destination, open: u64) {
        let pair = (client, destination);
        if !self.pairs.contains_key(&pair) && self.pairs.len() >= 2 * self.capacity {
            self.refused += u64::from(open > 0);
            return;
        }
        let used = self.pairs.entry(pair).or_default();
        used.service = service;
        used.open = open;
        if open == 0 && used.ended.is_empty() {
            self.pairs.remove(&pair);
        }
    }

    /// Frees the ports whose time is over at `now_ns`.
    pub fn advance(&mut self, now_ns: u64) {
        while let Some(&(end_ns, pair, port)) = self.order.front()
            && end_ns.saturating_add(TIME_WAIT_NS) <= now_ns
        {
            self.order.pop_front();
            self.free(end_ns, pair, port);
        }
    }

    /// The client and destination that come nearest to running out, of `range` ephemeral ports; none while none is used.
    pub fn worst(&self, range: u32) -> Option<PortUse> {
        self.uses(range).max_by(|a, b| a.ratio.total_cmp(&b.ratio))
    }

    /// The same among the clients of one Service.
    pub fn worst_of(&self, service: u32, range: u32) -> Option<PortUse> {
        self.uses(range)
            .filter(|used| used.service == service)
            .max_by(|a, b| a.ratio.total_cmp(&b.ratio))
    }

    /// What every client uses towards every destination, in no order.
    pub fn uses(&self, range: u32) -> impl Iterator<Item = PortUse> {
        self.pairs.iter().map(move |(&(client, destination), used)| {
            let waiting = used.ended.len() as u64;
            let ports = used.open.saturating_add(waiting) as f64;
            PortUse {
                service: used.service,
                client,
                destination,
                open: used.open,
                waiting,
                range,
                // A range of no port is used up.
                ratio: (ports / f64::from(range)).min(1.0),
            }
        })
    }

    /// Drops a Service's clients, when the Service has gone.
    pub fn forget_service(&mut self, service: u32) {
        let waiting = &mut self.waiting;
        self.pairs.retain(|_, used| {
            let kept = used.service != service;
            if !kept {
                *waiting -= used.ended.len();
            }
            kept
        });
    }

    /// Clients and destinations with a port in use.
    pub fn pairs(&self) -> usize {
        self.pairs.len()
    }

    /// Ports forgotten for want of room while they still waited.
    pub fn evicted(&self) -> u64 {
        self.evicted
    }

    /// Reports of open connections that found no room.
    pub fn refused(&self) -> u64 {
        self.refused
    }

    /// Frees a port if this is its latest end; says whether it did.
    fn free(&mut self, end_ns: u64, pair: Pair, port: u16) -> bool {
        let Some(used) = self.pairs.get_mut(&pair) else {
            return false;
        };
        if used.ended.get(&port) != Some(&end_ns) {
            return false;
        }
        used.ended.remove(&port);
        self.waiting -= 1;
        if used.open == 0 && used.ended.is_empty() {
            self.pairs.remove(&pair);
        }
        true
    }
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "edges are exact")]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn client(n: u64) -> Client {
        Client {
            netns: n,
            address: [1; 16],
        }
    }

    fn destination(port: u16) -> Destination {
        Destination {
            address: [2; 16],
            port,
            protocol: 6,
        }
    }

    #[test]
    fn a_port_waits_sixty_seconds_after_its_end() {
        let mut ports = Ports::new(100);
        for port in 0..50 {
            ports.ended(1, client(1), destination(80), port, SECOND);
        }
        ports.set_open(1, client(1), destination(80), 25);
        let found = ports.worst(100).unwrap();
        assert_eq!((found.open, found.waiting, found.ratio), (25, 50, 0.75));
        ports.advance(61 * SECOND - 1);
        assert_eq!(ports.worst(100).unwrap().waiting, 50);
        ports.advance(61 * SECOND);
        assert_eq!(ports.worst(100).unwrap().ratio, 0.25);
        ports.set_open(1, client(1), destination(80), 0);
        assert_eq!((ports.worst(100), ports.pairs()), (None, 0));
    }

    #[test]
    fn a_port_used_again_counts_once_and_from_its_latest_end() {
        let mut ports = Ports::new(100);
        ports.ended(1, client(1), destination(80), 7, SECOND);
        ports.ended(1, client(1), destination(80), 7, 40 * SECOND);
        ports.ended(1, client(1), destination(80), 7, 30 * SECOND);
        ports.advance(70 * SECOND);
        assert_eq!(ports.worst(10).unwrap().waiting, 1);
        ports.advance(100 * SECOND);
        assert!(ports.worst(10).is_none());
    }

    #[test]
    fn the_range_counts_for_each_destination_apart() {
        let mut ports = Ports::new(100);
        for port in 0..20 {
            ports.ended(1, client(1), destination(80), port, SECOND);
            ports.ended(2, client(1), destination(81), port % 10, SECOND);
            ports.ended(2, client(2), destination(81), port % 5, SECOND);
        }
        assert_eq!(
            ports.worst(40).map(|found| (found.service, found.ratio)),
            Some((1, 0.5))
        );
        let of_two = ports.worst_of(2, 40).unwrap();
        assert_eq!((of_two.client, of_two.ratio), (client(1), 0.25));
        assert!(ports.worst_of(3, 40).is_none());
        ports.forget_service(1);
        assert_eq!(ports.worst(40).unwrap().service, 2);
    }

    #[test]
    fn the_ratio_is_one_at_most() {
        let mut ports = Ports::new(10);
        ports.set_open(1, client(1), destination(80), 1_000);
        assert_eq!(ports.worst(10).unwrap().ratio, 1.0);
        assert_eq!(ports.worst(0).unwrap().ratio, 1.0);
    }

    #[test]
    fn want_of_room_is_counted() {
        let mut ports = Ports::new(3);
        for port in 0..5 {
            ports.ended(1, client(1), destination(80), port, SECOND + u64::from(port));
        }
        assert_eq!((ports.evicted(), ports.worst(10).unwrap().waiting), (2, 3));
        for n in 2..9 {
            ports.set_open(1, client(n), destination(80), 1);
        }
        assert_eq!((ports.pairs(), ports.refused()), (6, 2));
    }

    proptest! {
        #[test]
        fn counts_are_those_of_a_plain_list(
            ends in proptest::collection::vec((0_u64..4, 0_u16..3, 0_u16..30, 0_u64..20), 0..200),
        ) {
            let mut ports = Ports::new(10_000);
            let mut list = Vec::new();
            let mut now = 1;
            for (who, to, port, by) in ends {
                now += by * SECOND;
                ports.ended(1, client(who), destination(to), port, now);
                list.push(((who, to, port), now));
                ports.advance(now);
                let mut waiting: Vec<_> =
                    list.iter().filter(|(_, end)| end + TIME_WAIT_NS > now).map(|&(key, _)| key).collect();
                waiting.sort_unstable();
                waiting.dedup();
                let found: u64 = ports.uses(100).map(|used| used.waiting).sum();
                prop_assert_eq!(found, waiting.len() as u64);
            }
        }

        #[test]
        fn memory_is_bounded(
            steps in proptest::collection::vec((0_u64..30, 0_u16..9, any::<u16>(), 0_u64..100, 0_u64..3), 0..300),
            capacity in 1_usize..30,
        ) {
            let mut ports = Ports::new(capacity);
            for (who, to, port, at, open) in steps {
                ports.ended(u32::from(to), client(who), destination(to), port, at * SECOND);
                ports.set_open(u32::from(to), client(who), destination(to + 9), open);
                if open == 2 {
                    ports.forget_service(u32::from(to));
                }
                let waiting: u64 = ports.uses(1).map(|used| used.waiting).sum();
                prop_assert_eq!(waiting as usize, ports.waiting);
                prop_assert!(ports.waiting <= capacity);
                prop_assert!(ports.order.len() <= 2 * capacity.max(8) + 1);
                prop_assert!(ports.pairs() <= 3 * capacity + 1);
            }
        }
    }
}
