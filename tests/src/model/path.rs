//! The way of a packet: in, out, and errors about either.

use std::net::SocketAddr;

use lb_common::{
    abi::TCP,
    addr::{Addr, Port},
    backend::state as backend_state,
    counter::action,
    event::outcome,
    flow::{Flow, flag, is_syn, side},
};

use super::{
    Kind, Model, Outcome, Pair, Place, Role, Step, backend,
    begin::Why,
    client, inside,
    rewrite::{self, End},
    source, vip,
};
use crate::plane::Hook;

/// Ports that are tried; where a range has no more than these, all of it is tried.
const TRIES: usize = lb_common::flow::PORT_TRIES as usize;

impl Model {
    pub(super) fn path(&mut self, mut step: Step<'_>) -> Outcome {
        match step.parsed.kind {
            Kind::Foreign => self.miss(step),
            Kind::Malformed => {
                self.count(step.hook, action::MALFORMED);
                step.untouched()
            }
            Kind::Error => self.error(step),
            Kind::Transport => {
                if !self.complete(&mut step) {
                    self.count(step.hook, action::FRAGMENT_UNKNOWN);
                    return step.untouched();
                }
                match step.hook {
                    Hook::Ingress => self.comes(step),
                    Hook::Egress => self.leaves(step),
                }
            }
        }
    }

    /// Notes the ports of a first fragment, and gives them to the later ones.
    fn complete(&mut self, step: &mut Step<'_>) -> bool {
        let packet = &mut step.parsed;
        let datagram = (packet.src, packet.dst, packet.id, packet.proto);
        match packet.place {
            Place::Whole => true,
            Place::First => {
                self.fragments.insert(datagram, (packet.src_port, packet.dst_port));
                true
            }
            Place::Later => match self.fragments.get(&datagram) {
                Some(ports) => {
                    (packet.src_port, packet.dst_port) = *ports;
                    true
                }
                None => false,
            },
        }
    }

    fn comes(&mut self, step: Step<'_>) -> Outcome {
        let Some((lead, flow)) = self.flow_of(step.pair()) else {
            return self.begin(step, Why::Unknown);
        };
        let expired = flow.is_expired(step.now);
        match lead.role {
            Role::Back if !expired && step.src() == backend(&flow) => {
                self.count(step.hook, action::TRANSLATED);
                step.with(End::Destination, client(&flow))
            }
            Role::Front if step.src() == client(&flow) => self.forward(step, lead.slot, flow, expired),
            Role::Middle if (expired || flow.is_closed()) && is_syn(step.parsed.flags) => {
                self.retire(step.hook, lead.slot, flow.outcome_of_silence(), step.now);
                self.miss(step)
            }
            _ => self.miss(step),
        }
    }

    /// A client's packet of a known flow.
    fn forward(&mut self, step: Step<'_>, slot: u32, flow: Flow, expired: bool) -> Outcome {
        let why = if expired {
            Why::Unknown
        } else {
            self.distrust(step, &flow)
        };
        if expired || why != Why::Unknown {
            let result = if why == Why::Exhausted {
                outcome::NO_LOCAL_PORT
            } else {
                flow.outcome_of_silence()
            };
            self.retire(step.hook, slot, result, step.now);
            return self.begin(step, why);
        }
        let event = self.flow_mut(slot).note_client(step.parsed.flags);
        self.follow(step.hook, slot, event, step.now);
        self.see(slot, step.now);
        self.count(step.hook, action::TRANSLATED);
        step.with(End::Destination, backend(&flow))
    }

    fn distrust(&self, step: Step<'_>, flow: &Flow) -> Why {
        if flow.flags & flag::EXHAUSTED != 0 {
            return Why::Exhausted;
        }
        let of_backend = self.state_of(flow);
        if step.parsed.proto != TCP {
            let gone = of_backend == backend_state::VACANT || self.has_moved(flow);
            return if gone { Why::BackendLeft } else { Why::Unknown };
        }
        let current = flow.generation == self.rules.word(flow.set_id).generation();
        let stays = flow.repeats(step.parsed.seq.to_be()) || flow.is_open() && current;
        if is_syn(step.parsed.flags) && !(stays && of_backend == backend_state::ACTIVE) {
            Why::Reuse
        } else {
            Why::Unknown
        }
    }

    fn leaves(&mut self, step: Step<'_>) -> Outcome {
        let found = self
            .flow_of(step.pair())
            .filter(|(lead, flow)| lead.role == Role::Middle && !flow.is_expired(step.now));
        let Some((lead, flow)) = found else {
            return self.miss(step);
        };
        let slot = lead.slot;
        if step.src() == backend(&flow) && step.dst() == client(&flow) {
            let event = self.flow_mut(slot).note_backend(step.parsed.flags, step.now);
            self.follow(step.hook, slot, event, step.now);
            self.see(slot, step.now);
            self.count(step.hook, action::TRANSLATED);
            return step.with(End::Source, vip(&flow));
        }
        if flow.flags & (flag::MASQUERADE | flag::HAIRPIN) == 0 {
            return self.miss(step);
        }
        if let Some(source) = source(&flow) {
            self.count(step.hook, action::TRANSLATED);
            return step.with(End::Source, source);
        }
        self.assign(step, slot, &flow)
    }

    /// Gives a flow the node's own source.
    fn assign(&mut self, step: Step<'_>, slot: u32, flow: &Flow) -> Outcome {
        let Some(interface) = self.rules.interfaces.get(&step.device).copied() else {
            return self.miss(step);
        };
        let wanted = if interface.side == side::GUEST {
            flag::HAIRPIN
        } else {
            flag::MASQUERADE
        };
        if flow.flags & wanted == 0 {
            return self.miss(step);
        }
        let addr = if step.parsed.src.is_ipv6() {
            interface.v6
        } else {
            interface.v4
        };
        let range = self.settings.first_port..=self.settings.last_port;
        if addr == Addr::ZERO || range.is_empty() {
            self.count(step.hook, action::NO_SOURCE);
            return step.dropped();
        }
        let small = range.clone().count() <= TRIES;
        let pair = |port: u16| Pair::of(SocketAddr::new(addr.into(), port), backend(flow), flow.proto);
        let is_free = |model: &Self, port: u16| !model.pairs.contains_key(&pair(port));
        let chosen = Some((step.port_of)(slot)).filter(|port| *port != 0);
        if chosen.is_some_and(|port| !range.contains(&port)) {
            self.complaint = Some(format!("port {chosen:?} is not in {range:?}"));
        }
        let port = match chosen {
            Some(port) if is_free(self, port) => Some(port),
            // In a large range, all that were tried may have been taken; in a small one none may be free.
            Some(port) if !small || !range.clone().any(|port| is_free(self, port)) => {
                let oldest = range
                    .clone()
                    .filter_map(|port| self.given_up(pair(port), step.now))
                    .min();
                let this = self.given_up(pair(port), step.now);
                (this.is_some() && (!small || this == oldest)).then_some(port)
            }
            _ => None,
        };
        let Some(port) = port else {
            let could = range
                .clone()
                .any(|port| is_free(self, port) || self.given_up(pair(port), step.now).is_some());
            if chosen.is_some() || small && could {
                self.complaint = Some(format!("a port of {range:?} was free: {could}; {chosen:?} was chosen"));
            }
            self.flow_mut(slot).flags |= flag::EXHAUSTED;
            self.count(step.hook, action::PORTS_EXHAUSTED);
            return step.dropped();
        };
        if let Some((lead, held)) = self.flow_of(pair(port)) {
            self.retire(step.hook, lead.slot, held.outcome_of_silence(), step.now);
        }
        let node = SocketAddr::new(addr.into(), port);
        let flow = self.flow_mut(slot);
        (flow.source, flow.source_port, flow.claim) = (addr, Port::new(port), 1);
        self.lead(node, backend(&self.flows[slot as usize]), slot, Role::Back);
        self.count(step.hook, action::TRANSLATED);
        step.with(End::Source, node)
    }

    /// Since when nobody needs the flow that holds a source; `None` if it goes on, or it is no source of a flow.
    fn given_up(&mut self, pair: Pair, now: u64) -> Option<u64> {
        let lead = *self.pairs.get(&pair)?;
        if lead.role != Role::Back {
            return None;
        }
        match self.flow_of(pair) {
            None => Some(0),
            Some((_, held)) if held.is_closed() || held.is_evictable(now) || held.is_expired(now) => Some(held.seen_ns),
            Some(_) => None,
        }
    }

    /// An ICMP error: whoever sent the packet inside must know it again.
    fn error(&mut self, step: Step<'_>) -> Outcome {
        let about = inside(step.bytes, &step.parsed);
        if about.kind != Kind::Transport {
            return self.miss(step);
        }
        // An error that goes to another than who sent the packet is not about it.
        if about.src != step.parsed.dst {
            return self.miss(step);
        }
        let (src, dst) = (
            SocketAddr::new(about.src, about.src_port),
            SocketAddr::new(about.dst, about.dst_port),
        );
        let Some((lead, flow)) = self.flow_of(Pair::of(src, dst, about.proto)) else {
            return self.miss(step);
        };
        let of_client = match lead.role {
            Role::Back => dst == backend(&flow),
            Role::Front | Role::Middle => src == client(&flow) && dst != client(&flow),
        };
        let ends = if of_client {
            (client(&flow), vip(&flow))
        } else {
            (backend(&flow), source(&flow).unwrap_or(client(&flow)))
        };
        let (mut from, mut to) = (step.parsed.src, step.parsed.dst);
        match step.hook {
            Hook::Ingress => to = ends.0.ip(),
            // Its receiver talks to this address; under another's, it would be dropped on its way.
            Hook::Egress if of_client => from = vip(&flow).ip(),
            Hook::Egress => from = source(&flow).map_or(from, |source| source.ip()),
        }
        let mut outcome = step.untouched();
        if rewrite::rewrite_error(&mut outcome.packet, &step.parsed, &about, ends, (from, to)) {
            self.count(step.hook, action::ICMP_TRANSLATED);
            outcome
        } else {
            self.miss(step)
        }
    }
}
