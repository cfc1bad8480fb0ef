//! How full the flow table is, and with what: counted in one pass over its slots.
//!
//! Pure. Tuples are not counted by walking their map, which costs two system calls each: a flow has two, and a third once it
//! has the node's own source.

use std::collections::HashMap;

use lb_common::{
    abi::TCP,
    backend::{BackendCounters, ServiceCounters},
    flow::{Flow, flag, state},
    maps::TUPLES_PER_FLOW,
};

use crate::view::{ConnState, is_live};

/// TCP connections that fell silent: they have expired, and their end is counted when their slot is taken, which may be days
/// later. Until then the kernel's counters have them open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Silent {
    backends: HashMap<u32, u64>,
    services: HashMap<u32, u64>,
}

impl Silent {
    fn add(&mut self, flow: &Flow, now_ns: u64) {
        // Whose beginning was not counted as established will not be counted as closed.
        let counted = flow.flags & flag::RESUMED == 0 && flow.is_answered();
        if flow.proto == TCP && counted && flow.state() == state::LIVE && flow.is_expired(now_ns) {
            *self.backends.entry(flow.backend_id).or_default() += 1;
            *self.services.entry(flow.service_id).or_default() += 1;
        }
    }

    /// Counts what a backend has of them as closed.
    pub fn settle_backend(&self, id: u32, counters: &mut BackendCounters) {
        counters.outside.closed += self.backends.get(&id).copied().unwrap_or(0);
    }

    /// Counts what a Service has of them as closed.
    pub fn settle_service(&self, id: u32, counters: &mut ServiceCounters) {
        counters.closed += self.services.get(&id).copied().unwrap_or(0);
    }
}

/// What a pass over the flow table found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FlowCounts {
    /// Live flows, in the order of [`ConnState::OF_FLOWS`].
    by_state: [u64; ConnState::OF_FLOWS.len()],
    /// Tuples that lead to a live flow. Those of expired flows are in the map until their slot is taken again, and go as soon as
    /// it is: they stand in nobody's way.
    pub tuples: u64,
    /// Slots of the table.
    pub slots: u64,
    /// Connections whose end is still to be counted.
    pub silent: Silent,
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
            self.silent.add(flow, now_ns);
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
        abi::UDP,
        addr::Port,
        backend::Tally,
        flow::{DATAGRAM_ONCE_NS, ESTABLISHED_NS, UNANSWERED_NS, sent, version},
    };

    use super::*;
    use crate::observe::audience;

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
            ..flow(TCP, sent::ANY | sent::AGAIN, sent::ANY)
        };
        let ended = Flow {
            version: version(8, state::ENDED),
            ..flow(TCP, sent::ANY | sent::FIN, sent::ANY | sent::FIN)
        };
        let mut counts = FlowCounts::of_slots(100);
        for flow in [masqueraded, ended, flow(TCP, sent::ANY, 0), flow(UDP, sent::ANY, 0)] {
            counts.add(&flow, 2_000);
        }
        counts.add(&flow(UDP, sent::ANY, 0), 1_001 + DATAGRAM_ONCE_NS);
        assert_eq!((counts.live(), counts.tuples, counts.max_tuples()), (4, 9, 300));
        let told: Vec<_> = counts.by_state().filter(|(_, count)| *count > 0).collect();
        assert_eq!(
            told,
            [("syn_sent", 1), ("established", 1), ("closed", 1), ("unanswered", 1)]
        );
        assert_eq!(counts.by_state().count(), 6);
    }

    #[test]
    fn connections_that_fell_silent_are_not_open_though_their_end_is_not_counted_yet() {
        let flow = Flow {
            proto: TCP,
            client_sent: sent::ANY | sent::AGAIN,
            backend_sent: sent::ANY,
            seen_ns: 1_000,
            version: version(7, state::LIVE),
            service_id: 3,
            backend_id: 5,
            ..Flow::default()
        };
        let late = 1_001 + ESTABLISHED_NS;
        let alive = Flow { seen_ns: late, ..flow };
        let ended = Flow {
            version: version(8, state::ENDED),
            ..flow
        };
        let resumed = Flow {
            flags: flag::RESUMED,
            ..flow
        };
        let datagrams = Flow { proto: UDP, ..flow };
        let unanswered = Flow {
            backend_sent: 0,
            ..flow
        };
        const { assert!(UNANSWERED_NS < ESTABLISHED_NS) };
        let mut counts = FlowCounts::of_slots(8);
        for flow in [flow, alive, ended, resumed, datagrams, unanswered] {
            counts.add(&flow, late);
        }
        // Two were counted as established and not as closed, and one of them is silent.
        let mut backend = BackendCounters {
            outside: Tally {
                established: 9,
                closed: 7,
                ..Tally::default()
            },
            ..BackendCounters::default()
        };
        counts.silent.settle_backend(5, &mut backend);
        assert_eq!(audience::open(&backend.outside), 1);
        let mut service = ServiceCounters {
            established: 9,
            closed: 7,
            ..ServiceCounters::default()
        };
        counts.silent.settle_service(3, &mut service);
        assert_eq!(service.closed, 8);
        counts.silent.settle_service(5, &mut service);
        assert_eq!(service.closed, 8, "another Service has none");
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
            counts.add(&flow, 1_001 + DATAGRAM_ONCE_NS);
        }
        assert_eq!((counts.live(), counts.tuples), (0, 0));
    }
}
