//! How full the flow table is, and with what: counted in one pass over its slots.
//!
//! Pure. Tuples are not counted by walking their map, which costs two system calls each: a flow has two, and a third once it
//! has the node's own source.

use lb_common::{flow::Flow, maps::TUPLES_PER_FLOW};

use crate::view::{ConnState, is_live};

/// What a pass over the flow table found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowCounts {
    /// Live flows, in the order of [`ConnState::OF_FLOWS`].
    by_state: [u64; ConnState::OF_FLOWS.len()],
    /// Tuples that lead to a live flow. Those of expired flows are in the map until their slot is taken again, and go as soon as
    /// it is: they stand in nobody's way.
    pub tuples: u64,
    /// Slots of the table.
    pub slots: u64,
}

impl FlowCounts {
    /// Nothing counted yet in a table of so many slots.
    pub fn of_slots(slots: u32) -> Self {
        Self {
            slots: u64::from(slots),
            ..Self::default()
        }
    }

    /// Counts the flow of one slot; `now_ns` is the flow clock's.
    pub fn add(&mut self, flow: &Flow, now_ns: u64) {
        if !is_live(flow, now_ns) {
            return;
        }
        self.tuples += if flow.source_port.0 == 0 { 2 } else { 3 };
        let state = ConnState::of_flow(flow);
        for (count, known) in self.by_state.iter_mut().zip(ConnState::OF_FLOWS) {
            *count += u64::from(known == state);
        }
    }

    /// Live flows.
    pub fn live(&self) -> u64 {
        self.by_state.iter().sum()
    }

    /// Tuples that fit.
    pub fn max_tuples(&self) -> u64 {
        self.slots * u64::from(TUPLES_PER_FLOW)
    }

    /// Live flows by state, every state.
    pub fn by_state(&self) -> impl Iterator<Item = (&'static str, u64)> {
        ConnState::OF_FLOWS
            .into_iter()
            .zip(self.by_state)
            .map(|(state, count)| (state.name(), count))
    }
}

#[cfg(test)]
mod tests {
    use lb_common::{
        abi::{TCP, UDP},
        addr::Port,
        flow::{DATAGRAM_UNANSWERED_NS, sent, state, version},
    };

    use super::*;

    #[test]
    fn live_flows_count_by_state_and_with_their_tuples_and_expired_ones_not_at_all() {
        let flow = |proto: u8, client_sent: u8, backend_sent: u8| Flow {
            proto,
            client_sent,
            backend_sent,
            seen_ns: 1_000,
            version: version(7, state::LIVE),
            ..Flow::default()
        };
        let masqueraded = Flow {
            source_port: Port::new(10_000),
            ..flow(TCP, sent::ANY, sent::ANY)
        };
        let ended = Flow {
            version: version(8, state::ENDED),
            ..flow(TCP, sent::ANY | sent::FIN, sent::ANY | sent::FIN)
        };
        let mut counts = FlowCounts::of_slots(100);
        for flow in [masqueraded, ended, flow(TCP, sent::ANY, 0), flow(UDP, sent::ANY, 0)] {
            counts.add(&flow, 2_000);
        }
        counts.add(&flow(UDP, sent::ANY, 0), 1_001 + DATAGRAM_UNANSWERED_NS);
        assert_eq!((counts.live(), counts.tuples, counts.max_tuples()), (4, 9, 300));
        let told: Vec<_> = counts.by_state().filter(|(_, count)| *count > 0).collect();
        assert_eq!(
            told,
            [("syn_sent", 1), ("established", 1), ("closed", 1), ("unanswered", 1)]
        );
        assert_eq!(counts.by_state().count(), 6);
    }

    #[test]
    fn a_table_that_expired_flows_fill_is_not_under_pressure() {
        let mut counts = FlowCounts::of_slots(8);
        for slot in 0..8 {
            let flow = Flow {
                proto: UDP,
                source_port: Port::new(10_000 + slot),
                seen_ns: 1_000,
                version: version(7, state::LIVE),
                ..Flow::default()
            };
            counts.add(&flow, 1_001 + DATAGRAM_UNANSWERED_NS);
        }
        assert_eq!((counts.live(), counts.tuples), (0, 0));
    }
}
