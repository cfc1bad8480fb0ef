//! The flow table: slots given out by a hand that goes round, and what a flow's end tells.

use std::net::SocketAddr;

use lb_common::{
    abi::TCP,
    backend::state as backend_state,
    counter::action,
    event::{ConnRecord, kind, mark, outcome},
    flow::{Event, Flow, LOOKS, SEEN_STEP_NS, SERIAL_MASK, flag, slot_at, state, version},
};

use super::{Lead, Model, Pair, Role, backend, client, source, vip};
use crate::plane::Hook;

impl Model {
    /// The flow that a pair of ends leads to, if it still does.
    pub(super) fn flow_of(&mut self, pair: Pair) -> Option<(Lead, Flow)> {
        let lead = *self.pairs.get(&pair)?;
        let flow = *self.flows.get(lead.slot as usize)?;
        if flow.serial() != lead.serial || flow.state() < state::LIVE {
            return None;
        }
        self.touch(lead.slot);
        Some((lead, flow))
    }

    pub(super) fn flow_mut(&mut self, slot: u32) -> &mut Flow {
        self.touch(slot);
        &mut self.flows[slot as usize]
    }

    /// What state the backend of a flow is in; vacant, if its id has another address by now.
    pub(super) fn state_of(&self, flow: &Flow) -> u8 {
        match self.rules.backends.get(&flow.backend_id) {
            Some(found) if crate::plane::end(found.addr, found.port) == backend(flow) => found.state,
            _ => backend_state::VACANT,
        }
    }

    /// Whether a flow's frontend is another Service's by now, or nobody's.
    pub(super) fn has_moved(&self, flow: &Flow) -> bool {
        let found = self.rules.frontends.get(&crate::plane::key(vip(flow), flow.proto));
        found.is_none_or(|front| front.service_id != flow.service_id)
    }

    /// Notes that a packet was seen.
    pub(super) fn see(&mut self, slot: u32, now: u64) {
        let flow = self.flow_mut(slot);
        if now.saturating_sub(flow.seen_ns) > SEEN_STEP_NS {
            flow.seen_ns = now;
        }
    }

    /// Counts what a packet meant.
    pub(super) fn follow(&mut self, hook: Hook, slot: u32, event: Event, now: u64) {
        let flow = self.flows[slot as usize];
        match event {
            Event::Nothing => {}
            Event::Established => {
                if flow.proto == TCP {
                    self.backends.entry(flow.backend_id).or_default().established += 1;
                    self.services.entry(flow.service_id).or_default().established += 1;
                }
            }
            Event::Ended(result) => {
                if flow.state() == state::LIVE {
                    self.flow_mut(slot).version = version(flow.serial(), state::ENDED);
                    self.tell(hook, &flow, result, now);
                }
            }
        }
    }

    /// Counts the end of a TCP flow, and writes its record.
    fn tell(&mut self, hook: Hook, flow: &Flow, result: u8, now: u64) {
        if flow.proto != TCP {
            return;
        }
        if flow.flags & flag::RESUMED == 0 {
            let of_backend = self.backends.entry(flow.backend_id).or_default();
            let of_service = self.services.entry(flow.service_id).or_default();
            if result == outcome::ESTABLISHED {
                of_backend.closed += 1;
                of_service.closed += 1;
            } else {
                of_backend.failed += 1;
                of_service.failed[usize::from(result)] += 1;
            }
        }
        self.count(hook, action::RECORDED);
        self.records.push(ConnRecord {
            kind: kind::CONNECTION,
            start_ns: flow.start_ns,
            established_ns: flow.established_ns,
            end_ns: now,
            client: flow.client,
            vip: flow.vip,
            service_id: flow.service_id,
            backend_id: flow.backend_id,
            client_port: flow.client_port,
            vip_port: flow.vip_port,
            proto: flow.proto,
            outcome: result,
            marks: mark::OUTSIDE,
            ..ConnRecord::default()
        });
    }

    /// Takes a flow out of the table.
    pub(super) fn retire(&mut self, hook: Hook, slot: u32, result: u8, now: u64) {
        let flow = self.flows[slot as usize];
        if flow.state() == state::LIVE {
            self.tell(hook, &flow, result, now);
        }
        let mut ends: Vec<(SocketAddr, SocketAddr)> =
            vec![(client(&flow), vip(&flow)), (client(&flow), backend(&flow))];
        ends.extend(source(&flow).map(|source| (source, backend(&flow))));
        for (one, other) in ends {
            let pair = Pair::of(one, other, flow.proto);
            if self
                .pairs
                .get(&pair)
                .is_some_and(|lead| lead.slot == slot && lead.serial == flow.serial())
            {
                self.pairs.remove(&pair);
            }
        }
        self.flow_mut(slot).version = version(flow.serial(), state::FREE);
    }

    /// Takes a slot for a new flow and gives it its serial number.
    pub(super) fn take(&mut self, hook: Hook, now: u64) -> Option<u32> {
        let slots = self.settings.flow_slots;
        if slots == 0 {
            return None;
        }
        let mut evictable = None;
        let mut found = None;
        for look in 0..LOOKS {
            let slot = slot_at(self.hand, look, slots);
            self.hand += 1;
            self.touch(slot);
            let flow = &self.flows[slot as usize];
            if flow.state() == state::FREE {
                found = Some((slot, None));
                break;
            }
            if flow.is_expired(now) {
                found = Some((slot, Some(action::RECLAIMED)));
                break;
            }
            if evictable.is_none() && flow.is_evictable(now) {
                evictable = Some((slot, Some(action::EVICTED)));
            }
        }
        let (slot, why) = found.or(evictable)?;
        if let Some(why) = why {
            let result = self.flows[slot as usize].outcome_of_silence();
            self.retire(hook, slot, result, now);
            self.count(hook, why);
        }
        let next = (self.flows[slot as usize].serial() + 1) & SERIAL_MASK;
        self.flow_mut(slot).version = version(next.max(1), state::BUSY);
        Some(slot)
    }

    /// Lets a pair lead to a flow.
    pub(super) fn lead(&mut self, one: SocketAddr, other: SocketAddr, slot: u32, role: Role) {
        let flow = self.flows[slot as usize];
        let lead = Lead {
            slot,
            serial: flow.serial(),
            role,
        };
        self.pairs.insert(Pair::of(one, other, flow.proto), lead);
    }
}
