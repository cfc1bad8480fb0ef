//! A packet that no flow is known of: is it for a frontend that its sender may use, and which backend gets it?

use std::net::SocketAddr;

use lb_common::{
    abi::TCP,
    addr::Port,
    backend::state as backend_state,
    counter::action,
    flow::{Flow, flag, is_syn, sent, side, state, version},
    frontend::{Frontend, flag as front_flag},
    hash,
    select::{self, Tables},
};

use super::{Model, Outcome, Pair, Role, Step, answer, backend, client, rewrite::End, vip};
use crate::{
    packet::flags,
    plane::{Rules, Verdict, end, key},
};

/// Why a flow begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Why {
    /// Nothing was known.
    Unknown,
    /// A SYN on the tuple of another.
    Reuse,
    /// A datagram whose backend has left.
    BackendLeft,
    /// The last one found no port: nothing begins.
    Exhausted,
}

/// What became of the choice.
enum Choice {
    Backend(u32),
    /// The flow of this client and frontend itself, in a slot.
    Known(u32),
    Nobody,
    Collision,
}

/// Who has a flow between a client and a backend.
enum Holder {
    Nobody,
    /// The flow that the packet is of.
    Same(u32),
    /// The client, through another frontend.
    Other,
}

impl Model {
    pub(super) fn begin(&mut self, step: Step<'_>, why: Why) -> Outcome {
        if why == Why::Exhausted {
            return self.refuse(step, action::REFUSED);
        }
        let found = self.rules.frontends.get(&key(step.dst(), step.parsed.proto)).copied();
        let behind = self.rules.interfaces.get(&step.device).map(|interface| interface.side);
        let (Some(front), Some(behind)) = (found, behind) else {
            return self.miss(step);
        };
        let guest = behind == side::GUEST;
        if !guest && !Rules::has(&front, front_flag::OUTSIDE) {
            return self.miss(step);
        }
        let denied =
            Rules::has(&front, front_flag::SOURCE_RANGES) && !self.rules.admits(front.service_id, step.parsed.src);
        if !guest && denied {
            self.count(step.hook, action::SOURCE_DENIED);
            return step.dropped();
        }
        let set = if guest { front.set_id } else { front.outside_set_id };
        match self.choose(step, &front, set) {
            Choice::Backend(id) => self.go(step, why, &front, set, id, guest),
            Choice::Known(slot) => {
                let to = backend(&self.flows[slot as usize]);
                self.lead(step.src(), step.dst(), slot, Role::Front);
                self.count(step.hook, action::TRANSLATED);
                step.with(End::Destination, to)
            }
            Choice::Nobody => self.nobody(step, &front, guest),
            Choice::Collision => self.refuse(step, action::COLLISION),
        }
    }

    pub(super) fn miss(&mut self, step: Step<'_>) -> Outcome {
        self.count(step.hook, action::MISS);
        step.untouched()
    }

    fn refuse(&mut self, step: Step<'_>, why: u32) -> Outcome {
        let Some(packet) = answer::to(step.bytes, &step.parsed) else {
            self.count(step.hook, action::UNANSWERED);
            return step.dropped();
        };
        self.count(step.hook, why);
        Outcome {
            verdict: Verdict::Answer,
            packet,
        }
    }

    fn nobody(&mut self, step: Step<'_>, front: &Frontend, guest: bool) -> Outcome {
        self.services.entry(front.service_id).or_default().rejected += 1;
        let silent = if guest {
            front_flag::UNREACHABLE_WHEN_EMPTY
        } else {
            front_flag::SILENT_WHEN_EMPTY_OUTSIDE
        };
        if Rules::has(front, silent) {
            self.count(step.hook, action::POLICY_DROPPED);
            return step.dropped();
        }
        self.refuse(step, action::REFUSED)
    }

    /// The backend that a client remembers, else that of its hash; another, while it talks to that one from the same port.
    fn choose(&mut self, step: Step<'_>, front: &Frontend, set: u32) -> Choice {
        let word = self.rules.word(set);
        if word.count() == 0 {
            return Choice::Nobody;
        }
        let header = self.rules.list(word.offset()).expect("a published set has a list");
        let (src, dst) = (step.src(), step.dst());
        let mut hash = select::packet_hash(
            src.ip().into(),
            Port::new(src.port()),
            dst.ip().into(),
            Port::new(dst.port()),
            step.parsed.proto,
        );
        for attempt in 0..3 {
            let remembered = if attempt == 0 {
                self.remembered(step, front, set)
            } else {
                None
            };
            let by_hash = || select::pick(&*self.rules, word, header, hash).map(|pick| pick.backend);
            let Some(chosen) = remembered.or_else(by_hash) else {
                return Choice::Nobody;
            };
            match self.holder(step, chosen) {
                Holder::Nobody => {
                    if front.affinity_seconds != 0 && remembered.is_none() {
                        self.remember(step, set, chosen);
                    }
                    return Choice::Backend(chosen);
                }
                Holder::Same(slot) => return Choice::Known(slot),
                Holder::Other => {}
            }
            hash = hash::mix(hash);
        }
        Choice::Collision
    }

    /// Affinity knows nothing of what tests add to the clock.
    fn monotonic(&self, step: Step<'_>) -> u64 {
        step.now.wrapping_sub(self.settings.clock_offset_ns)
    }

    fn remembered(&mut self, step: Step<'_>, front: &Frontend, set: u32) -> Option<u32> {
        if front.affinity_seconds == 0 {
            return None;
        }
        let now = self.monotonic(step);
        let timeout = u64::from(front.affinity_seconds) * 1_000_000_000;
        let is_member = |rules: &Rules, id: u32| {
            rules
                .sets
                .get(&set)
                .is_some_and(|found| found.sticky && found.members.iter().any(|m| m.0 == id && m.1 > 0))
        };
        let (id, last) = *self.affinity.get(&(step.parsed.src, set))?;
        let active = self
            .rules
            .backends
            .get(&id)
            .is_some_and(|b| b.state == backend_state::ACTIVE);
        if now.wrapping_sub(last) >= timeout || !is_member(&self.rules, id) || !active {
            return None;
        }
        self.remember(step, set, id);
        Some(id)
    }

    fn remember(&mut self, step: Step<'_>, set: u32, id: u32) {
        let client = (step.parsed.src, set);
        self.affinity.insert(client, (id, self.monotonic(step)));
        self.remembered.push(client);
    }

    fn end_of(&self, id: u32) -> SocketAddr {
        let backend = &self.rules.backends[&id];
        end(backend.addr, backend.port)
    }

    /// Who has a flow between the client and a backend that goes on.
    fn holder(&mut self, step: Step<'_>, id: u32) -> Holder {
        let pair = Pair::of(step.src(), self.end_of(id), step.parsed.proto);
        let held = self
            .flow_of(pair)
            .filter(|(lead, flow)| lead.role == Role::Middle && !flow.is_closed() && !flow.is_expired(step.now));
        let Some((lead, flow)) = held else {
            return Holder::Nobody;
        };
        let same = vip(&flow) == step.dst() && client(&flow) == step.src();
        let begins = step.parsed.proto == TCP && is_syn(step.parsed.flags);
        match (same, begins) {
            (true, false) => Holder::Same(lead.slot),
            (true, true) => Holder::Nobody,
            (false, _) => Holder::Other,
        }
    }

    /// Makes the flow, and sends the packet to its backend.
    fn go(&mut self, step: Step<'_>, why: Why, front: &Frontend, set: u32, id: u32, guest: bool) -> Outcome {
        let backend = self.end_of(id);
        let tcp = step.parsed.proto == TCP;
        let acknowledges = step.parsed.flags & (flags::ACK | flags::RST) == flags::ACK;
        if !tcp || is_syn(step.parsed.flags) || acknowledges {
            let Some(slot) = self.take(step.hook, step.now) else {
                self.count(step.hook, action::FLOWS_FULL);
                return step.dropped();
            };
            self.make(step, why, (slot, front, set, id), guest);
        }
        self.count(step.hook, action::TRANSLATED);
        step.with(End::Destination, backend)
    }

    fn make(&mut self, step: Step<'_>, why: Why, (slot, front, set, id): (u32, &Frontend, u32, u32), guest: bool) {
        let (src, dst, backend) = (step.src(), step.dst(), self.end_of(id));
        let tcp = step.parsed.proto == TCP;
        let resumed = tcp && !is_syn(step.parsed.flags);
        let mut bits = 0;
        if !guest && Rules::has(front, front_flag::MASQUERADE_OUTSIDE) {
            bits |= flag::MASQUERADE;
        }
        if backend.ip() == src.ip() {
            bits |= flag::HAIRPIN;
        }
        if resumed {
            bits |= flag::RESUMED;
        }
        let serial = self.flows[slot as usize].serial();
        let mut flow = Flow {
            client: src.ip().into(),
            vip: dst.ip().into(),
            backend: backend.ip().into(),
            start_ns: step.now,
            seen_ns: step.now,
            version: version(serial, state::LIVE),
            isn: step.parsed.seq.to_be(),
            service_id: front.service_id,
            set_id: set,
            backend_id: id,
            generation: self.rules.word(set).generation(),
            client_port: Port::new(src.port()),
            vip_port: Port::new(dst.port()),
            backend_port: Port::new(backend.port()),
            proto: step.parsed.proto,
            flags: bits,
            client_sent: sent::ANY,
            ..Flow::default()
        };
        let _ = flow.note_client(step.parsed.flags);
        *self.flow_mut(slot) = flow;
        self.lead(src, backend, slot, Role::Middle);
        self.lead(src, dst, slot, Role::Front);
        match why {
            Why::BackendLeft => self.count(step.hook, action::RERESOLVED),
            _ if resumed => {
                self.count(step.hook, action::RESUMED);
                return;
            }
            _ => self.count(step.hook, action::NEW_FLOW),
        }
        if why == Why::Reuse {
            self.count(step.hook, action::REUSED);
        }
        self.backends.entry(id).or_default().connects += 1;
        let service = self.services.entry(front.service_id).or_default();
        service.connects += 1;
        service.attributed += 1;
        service.outside += 1;
    }
}
