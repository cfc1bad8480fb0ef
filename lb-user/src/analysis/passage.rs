//! Connections that pass through: from the packets that begin and end them to one life each.
//!
//! A SYN without ACK opens a passage; a reset closes it at once, a FIN of both ends closes it at the later one. Where only one
//! direction is seen, the next SYN on the same ends closes it at the FIN that was seen (else at the last packet). Memory is bounded:
//! the oldest passage is dropped, and counted. Time comes from the packets alone.

use std::{
    collections::{HashMap, VecDeque},
    net::SocketAddr,
};

/// The two ends of a passage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ends {
    /// Who sent the SYN.
    pub client: SocketAddr,
    /// Whom it was sent to.
    pub server: SocketAddr,
}

/// A packet that begins or ends a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    /// Its source.
    pub src: SocketAddr,
    /// Its destination.
    pub dst: SocketAddr,
    /// The SYN flag.
    pub syn: bool,
    /// The ACK flag.
    pub ack: bool,
    /// The FIN flag.
    pub fin: bool,
    /// The RST flag.
    pub rst: bool,
    /// When it was seen, nanoseconds of the monotonic clock.
    pub time_ns: u64,
}

/// A passage that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Passage {
    /// Its ends.
    pub ends: Ends,
    /// When its SYN was first seen.
    pub start_ns: u64,
    /// When it ended.
    pub end_ns: u64,
}

#[derive(Clone, Copy, Debug)]
struct Open {
    start_ns: u64,
    last_ns: u64,
    /// When the client's and the server's FIN were seen; 0 before.
    fins: [u64; 2],
}

/// The passages that are open.
#[derive(Debug)]
pub struct Passages {
    open: HashMap<Ends, Open>,
    /// (start, ends), oldest first; an entry whose start no longer matches is stale.
    order: VecDeque<(u64, Ends)>,
    capacity: usize,
    dropped: u64,
}

impl Passages {
    /// Follows at most `capacity` passages at once.
    pub fn new(capacity: usize) -> Self {
        Self {
            open: HashMap::new(),
            order: VecDeque::new(),
            capacity: capacity.max(1),
            dropped: 0,
        }
    }

    /// Takes a packet; returns the passage that it ends.
    pub fn take(&mut self, packet: &Packet) -> Option<Passage> {
        let forth = Ends {
            client: packet.src,
            server: packet.dst,
        };
        let back = Ends {
            client: packet.dst,
            server: packet.src,
        };
        if packet.syn && !packet.ack && !packet.rst {
            return self.begin(forth, packet.time_ns);
        }
        let (ends, side) = if self.open.contains_key(&forth) {
            (forth, 0)
        } else if self.open.contains_key(&back) {
            (back, 1)
        } else {
            return None;
        };
        let open = self.open.get_mut(&ends)?;
        open.last_ns = open.last_ns.max(packet.time_ns);
        if packet.fin {
            open.fins[side] = packet.time_ns;
        }
        if packet.rst || open.fins.iter().all(|fin| *fin > 0) {
            return self.end(ends);
        }
        None
    }

    fn begin(&mut self, ends: Ends, time_ns: u64) -> Option<Passage> {
        let ended = match self.open.get_mut(&ends) {
            // Nobody closed it: the same SYN once more.
            Some(open) if open.fins == [0, 0] => {
                open.last_ns = time_ns;
                return None;
            }
            Some(_) => self.end(ends),
            None => None,
        };
        let open = Open {
            start_ns: time_ns,
            last_ns: time_ns,
            fins: [0, 0],
        };
        self.open.insert(ends, open);
        self.order.push_back((time_ns, ends));
        self.make_room();
        ended
    }

    fn end(&mut self, ends: Ends) -> Option<Passage> {
        let open = self.open.remove(&ends)?;
        let fin = open.fins[0].max(open.fins[1]);
        Some(Passage {
            ends,
            start_ns: open.start_ns,
            end_ns: if fin > 0 { fin } else { open.last_ns },
        })
    }

    fn make_room(&mut self) {
        while self.open.len() > self.capacity || self.order.len() > 2 * self.capacity {
            let Some((start_ns, ends)) = self.order.pop_front() else {
                return;
            };
            let current = self.open.get(&ends).is_some_and(|open| open.start_ns == start_ns);
            if current && self.open.len() > self.capacity {
                self.open.remove(&ends);
                self.dropped += 1;
            } else if current {
                // Still open, and there is room: it stays, as the youngest.
                self.order.push_back((start_ns, ends));
                if self.order.len() <= 2 * self.capacity + 1 && self.order.len() <= self.open.len() + 1 {
                    return;
                }
            }
        }
    }

    /// Passages that are open now.
    pub fn len(&self) -> usize {
        self.open.len()
    }

    /// True if none is open.
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// Passages dropped for want of room.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn packet(src: u16, dst: u16, flags: &str, time_ns: u64) -> Packet {
        let at = |port| SocketAddr::from(([10, 0, 0, 1], port));
        Packet {
            src: at(src),
            dst: at(dst),
            syn: flags.contains('S'),
            ack: flags.contains('A'),
            fin: flags.contains('F'),
            rst: flags.contains('R'),
            time_ns,
        }
    }

    fn ended(passage: Option<Passage>) -> Option<(u16, u64, u64)> {
        passage.map(|p| (p.ends.client.port(), p.start_ns, p.end_ns))
    }

    #[test]
    fn both_fins_end_a_passage_whoever_closes_first() {
        for (first, second) in [((4000, 80), (80, 4000)), ((80, 4000), (4000, 80))] {
            let mut seen = Passages::new(8);
            assert_eq!(seen.take(&packet(4000, 80, "S", 1)), None);
            assert_eq!(seen.take(&packet(80, 4000, "SA", 2)), None);
            assert_eq!(seen.take(&packet(first.0, first.1, "FA", 3)), None);
            assert_eq!(
                ended(seen.take(&packet(second.0, second.1, "FA", 5))),
                Some((4000, 1, 5))
            );
            assert!(seen.is_empty());
            assert_eq!(seen.take(&packet(80, 4000, "R", 6)), None, "it is over");
        }
    }

    #[test]
    fn a_reset_of_either_end_ends_it() {
        let mut seen = Passages::new(8);
        seen.take(&packet(4000, 80, "S", 1));
        assert_eq!(ended(seen.take(&packet(80, 4000, "RA", 2))), Some((4000, 1, 2)));
    }

    #[test]
    fn a_repeated_syn_is_the_same_passage_until_somebody_closed() {
        let mut seen = Passages::new(8);
        seen.take(&packet(4000, 80, "S", 1));
        assert_eq!(seen.take(&packet(4000, 80, "S", 1_000)), None);
        // Only this direction is seen: the next SYN tells that the FIN was the end.
        seen.take(&packet(4000, 80, "FA", 2_000));
        assert_eq!(ended(seen.take(&packet(4000, 80, "S", 9_000))), Some((4000, 1, 2_000)));
        assert_eq!(seen.len(), 1);
    }

    #[test]
    fn the_oldest_is_dropped_and_counted() {
        let mut seen = Passages::new(2);
        for port in 1..=3 {
            seen.take(&packet(port, 80, "S", u64::from(port)));
        }
        assert_eq!((seen.len(), seen.dropped()), (2, 1));
        assert_eq!(seen.take(&packet(1, 80, "R", 9)), None);
        assert_eq!(ended(seen.take(&packet(2, 80, "R", 9))), Some((2, 2, 9)));
    }

    proptest! {
        #[test]
        fn memory_is_bounded_whatever_comes(packets in prop::collection::vec((1u16..20, 1u16..20, 0usize..6), 0..400)) {
            let mut seen = Passages::new(8);
            for (time, (src, dst, flags)) in packets.into_iter().enumerate() {
                let flags = ["S", "SA", "FA", "R", "RA", "SR"][flags];
                if let Some(passage) = seen.take(&packet(src, dst, flags, time as u64)) {
                    prop_assert!(passage.start_ns <= passage.end_ns);
                }
                prop_assert!(seen.len() <= 8);
                prop_assert!(seen.order.len() <= 17);
            }
        }
    }
}
