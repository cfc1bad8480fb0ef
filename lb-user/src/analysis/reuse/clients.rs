//! Reuse by client: who comes back on its ports, bounded.
//!
//! Beyond the capacity the client that was heard of longest ago is forgotten, and counted: its numbers begin anew when it comes back.

use std::collections::{BTreeMap, HashMap};

use super::{Outcome, ReuseCounts};

/// A client of one Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServiceClient {
    /// The Service's id.
    pub service: u32,
    /// The client's network namespace cookie; 0 outside the node.
    pub netns: u64,
    /// Its address, IPv4 mapped into IPv6.
    pub address: [u8; 16],
}

/// Counts by client.
#[derive(Debug)]
pub(super) struct Clients {
    capacity: usize,
    counts: HashMap<ServiceClient, (u64, ReuseCounts)>,
    /// Clients by the turn of their latest connection, oldest first.
    recency: BTreeMap<u64, ServiceClient>,
    turn: u64,
    forgotten: u64,
}

impl Clients {
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            capacity: capacity.max(1),
            counts: HashMap::new(),
            recency: BTreeMap::new(),
            turn: 0,
            forgotten: 0,
        }
    }

    pub(super) fn add(&mut self, client: ServiceClient, outcome: Outcome) {
        self.turn += 1;
        let (turn, counts) = self.counts.entry(client).or_default();
        self.recency.remove(turn);
        *turn = self.turn;
        counts.add(outcome);
        self.recency.insert(self.turn, client);
        if self.counts.len() > self.capacity
            && let Some((_, oldest)) = self.recency.pop_first()
        {
            self.counts.remove(&oldest);
            self.forgotten += 1;
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&ServiceClient, &ReuseCounts)> {
        self.counts.iter().map(|(client, (_, counts))| (client, counts))
    }

    pub(super) fn forget_service(&mut self, service: u32) {
        for (_, (turn, _)) in self.counts.extract_if(|client, _| client.service == service) {
            self.recency.remove(&turn);
        }
    }

    pub(super) fn forgotten(&self) -> u64 {
        self.forgotten
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(service: u32, n: u8) -> ServiceClient {
        ServiceClient {
            service,
            netns: 1,
            address: [n; 16],
        }
    }

    #[test]
    fn the_client_of_longest_ago_is_forgotten_and_counted() {
        let mut clients = Clients::new(2);
        clients.add(client(1, 1), Outcome::First);
        clients.add(client(1, 2), Outcome::First);
        clients.add(client(1, 1), Outcome::SameBackend(5));
        clients.add(client(2, 3), Outcome::First);
        let mut kept: Vec<_> = clients
            .iter()
            .map(|(client, counts)| (*client, counts.connections))
            .collect();
        kept.sort();
        assert_eq!(kept, [(client(1, 1), 2), (client(2, 3), 1)]);
        assert_eq!(clients.forgotten(), 1);
        clients.forget_service(1);
        assert_eq!(clients.iter().count(), 1);
        assert_eq!(clients.recency.len(), 1);
    }
}
