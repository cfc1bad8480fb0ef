//! The programs and the model on the same packets: whatever they disagree on is a [`Difference`].
//!
//! Times are judged, not foretold: what the programs note must be a time of the step, and the model takes it over. Nothing else
//! is ever taken over.

use std::{collections::BTreeMap, fmt, sync::Arc};

use anyhow::Result;
use lb_common::{
    addr::Port,
    event::ConnRecord,
    flow::{Flow, SEEN_STEP_NS, Settings, TupleEntry, TupleKey, role},
};
use lb_user::observe::monotonic_ns;

use super::{Lead, Model, Pair, Role};
use crate::{
    packet::{hex, same, tell},
    plane::{Device, Hook, Plane, Rules, Verdict, end},
};

/// Something that the programs and the model do not agree on.
#[derive(Clone, Debug)]
pub struct Difference(pub String);

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Difference {}

/// The programs, and the model beside them.
#[derive(Debug)]
pub struct Duel {
    /// The programs.
    pub plane: Plane,
    /// The model.
    pub model: Model,
    /// Packets so far, by hook.
    packets: BTreeMap<u32, u64>,
}

/// What the programs did with a packet.
struct Seen {
    verdict: Verdict,
    out: Vec<u8>,
    records: Vec<ConnRecord>,
    /// By the monotonic clock.
    span: Span,
}

/// When a step began and ended.
#[derive(Clone, Copy)]
struct Span {
    /// The clock's last tick before the step: programs that read the coarse clock are as late as that.
    tick: u64,
    end: u64,
}

impl Span {
    /// Whether a time that the program noted is one of the step, or of the tick before.
    fn holds(self, time: u64) -> bool {
        (self.tick..=self.end).contains(&time)
    }

    /// By a clock that is so much ahead.
    fn later(self, offset: u64) -> Self {
        Self {
            tick: self.tick.wrapping_add(offset),
            end: self.end.wrapping_add(offset),
        }
    }
}

impl Duel {
    /// Begins with empty maps.
    pub fn enter() -> Result<Self> {
        let plane = Plane::enter()?;
        let model = Model::new(plane.settings());
        Ok(Self {
            plane,
            model,
            packets: BTreeMap::new(),
        })
    }

    /// Changes what the maps say of Services.
    pub fn change(&mut self, change: impl FnOnce(&mut Rules)) -> Result<()> {
        change(Arc::make_mut(&mut self.model.rules));
        self.plane.write(&self.model.rules)
    }

    /// Changes what is said of the node. The flow table keeps what lies beyond a smaller number of slots.
    pub fn set(&mut self, change: impl FnOnce(&mut Settings)) {
        change(&mut self.model.settings);
        self.plane.set_settings(self.model.settings);
    }

    /// Runs a packet through both, and compares all that it touched but counters.
    pub fn step(&mut self, hook: Hook, device: Device, bytes: &[u8]) -> Result<(Verdict, Vec<u8>)> {
        let tick = coarse_ns();
        let begin = monotonic_ns();
        let (verdict, out) = self.plane.run(hook, device, bytes)?;
        let end = monotonic_ns();
        *self.packets.entry(hook.number()).or_default() += 1;
        let seen = Seen {
            verdict,
            out,
            records: self.plane.records()?,
            span: Span { tick, end },
        };
        let before = self.model.clone();
        let mut judged = self.judge(hook, device, bytes, &seen, begin);
        // Where a limit of time lies within the step, the programs may have read the clock on the other side of it.
        for now in [tick, end] {
            if judged.is_err() {
                let model = std::mem::replace(&mut self.model, before.clone());
                if self.judge(hook, device, bytes, &seen, now).is_ok() {
                    judged = Ok(());
                } else {
                    self.model = model;
                }
            }
        }
        judged.map_err(|why| {
            Difference(format!(
                "{hook:?} on {device:?}: {why}\n     in {}{}",
                tell(bytes, false),
                hex(bytes)
            ))
        })?;
        Ok((seen.verdict, seen.out))
    }

    /// Runs a packet through the model as of a time, and compares what it comes to with what the programs did.
    fn judge(&mut self, hook: Hook, device: Device, bytes: &[u8], seen: &Seen, now: u64) -> Result<(), String> {
        let plane = &self.plane;
        let index = plane.index(device);
        let wanted = self
            .model
            .run(hook, index, bytes, now, &|slot| plane.flow(slot).source_port.get())?;
        self.compare_step(seen, &wanted)
    }

    fn compare_step(&mut self, seen: &Seen, wanted: &super::Outcome) -> Result<(), String> {
        let Seen {
            verdict, out, records, ..
        } = seen;
        let span = seen.span.later(self.model.settings.clock_offset_ns);
        if *verdict != wanted.verdict || (*verdict != Verdict::Drop && !same(out, &wanted.packet, false)) {
            return Err(format!(
                "\n  model {:?} {}{}\nprogram {verdict:?} {}{}",
                wanted.verdict,
                tell(&wanted.packet, false),
                hex(&wanted.packet),
                tell(out, false),
                hex(out)
            ));
        }
        for (slot, before) in std::mem::take(&mut self.model.touched) {
            let found = self.plane.flow(slot);
            let flow = &mut self.model.flows[slot as usize];
            take_times(flow, &found, &before, span);
            if *flow != found {
                return Err(format!("slot {slot}\n  model {flow:?}\nprogram {found:?}"));
            }
        }
        let mut foretold = std::mem::take(&mut self.model.records);
        for (record, written) in foretold.iter_mut().zip(records) {
            if span.holds(written.end_ns) {
                record.end_ns = written.end_ns;
            }
        }
        if foretold != *records {
            return Err(format!("records\n  model {foretold:#?}\nprogram {records:#?}"));
        }
        for client in std::mem::take(&mut self.model.remembered) {
            let found = self.plane.affinity(client).map_err(|error| error.to_string())?;
            let memory = self.model.affinity.get_mut(&client);
            if let (Some(found), Some(memory)) = (found, memory)
                && seen.span.holds(found.last_ns)
            {
                memory.1 = found.last_ns;
            }
        }
        Ok(())
    }

    /// Compares every counter, and whether each packet was counted once.
    pub fn compare_counters(&self) -> Result<(), Difference> {
        let moved = self.plane.moved().map_err(|error| Difference(error.to_string()))?;
        if moved != self.model.counts {
            return Err(Difference(format!(
                "counters (hook, action)\n  model {:?}\nprogram {moved:?}",
                self.model.counts
            )));
        }
        for (hook, packets) in &self.packets {
            let counted: u64 = ONCE.iter().filter_map(|action| moved.get(&(*hook, *action))).sum();
            if counted != *packets {
                return Err(Difference(format!(
                    "hook {hook}: {packets} packets, of which {counted} are counted: {moved:?}"
                )));
            }
        }
        Ok(())
    }

    /// Compares all that the maps hold.
    pub fn compare_all(&self) -> Result<(), Difference> {
        self.compare_counters()?;
        for (id, wanted) in &self.model.services {
            let found = self.plane.service(*id);
            if found != *wanted {
                return Err(Difference(format!(
                    "Service {id}\n  model {wanted:?}\nprogram {found:?}"
                )));
            }
        }
        for (id, wanted) in &self.model.backends {
            let found = self.plane.backend(*id).outside;
            if found != *wanted {
                return Err(Difference(format!(
                    "backend {id}\n  model {wanted:?}\nprogram {found:?}"
                )));
            }
        }
        for (slot, wanted) in self.model.flows.iter().enumerate() {
            let found = self.plane.flow(slot as u32);
            if found != *wanted {
                return Err(Difference(format!(
                    "slot {slot}\n  model {wanted:?}\nprogram {found:?}"
                )));
            }
        }
        let failed = |error: anyhow::Error| Difference(error.to_string());
        let found: BTreeMap<Pair, Lead> = self.plane.tuples().map_err(failed)?.iter().map(plain).collect();
        let wanted: BTreeMap<Pair, Lead> = self.model.pairs.iter().map(|(pair, lead)| (*pair, *lead)).collect();
        if found != wanted {
            let only = |one: &BTreeMap<Pair, Lead>, other: &BTreeMap<Pair, Lead>| -> Vec<String> {
                one.iter()
                    .filter(|(pair, lead)| other.get(pair) != Some(lead))
                    .map(|entry| format!("{entry:?}"))
                    .collect()
            };
            return Err(Difference(format!(
                "tuples\n  model {:#?}\nprogram {:#?}",
                only(&wanted, &found),
                only(&found, &wanted)
            )));
        }
        let hand = self.plane.hand().map_err(failed)?;
        if hand != self.model.hand {
            return Err(Difference(format!(
                "the hand\n  model {}\nprogram {hand}",
                self.model.hand
            )));
        }
        let found: BTreeMap<_, _> = self
            .plane
            .affinities()
            .map_err(failed)?
            .into_iter()
            .map(|(key, memory)| ((std::net::IpAddr::from(key.client), key.set_id), memory.backend_id))
            .collect();
        let wanted: BTreeMap<_, _> = self
            .model
            .affinity
            .iter()
            .map(|(key, memory)| (*key, memory.0))
            .collect();
        if found != wanted {
            return Err(Difference(format!("affinity\n  model {wanted:?}\nprogram {found:?}")));
        }
        Ok(())
    }
}

/// Each packet is counted as one of these, once.
pub const ONCE: [u32; 14] = {
    use lb_common::counter::action::{
        COLLISION, FLOWS_FULL, FRAGMENT_UNKNOWN, ICMP_TRANSLATED, INCONSISTENT, MALFORMED, MISS, NO_SOURCE,
        POLICY_DROPPED, PORTS_EXHAUSTED, REFUSED, SOURCE_DENIED, TRANSLATED, UNANSWERED,
    };
    [
        MISS,
        TRANSLATED,
        REFUSED,
        INCONSISTENT,
        POLICY_DROPPED,
        SOURCE_DENIED,
        FLOWS_FULL,
        PORTS_EXHAUSTED,
        NO_SOURCE,
        FRAGMENT_UNKNOWN,
        ICMP_TRANSLATED,
        MALFORMED,
        UNANSWERED,
        COLLISION,
    ]
};

/// Takes over the times that the program has noted, if they are times of the step.
fn take_times(flow: &mut Flow, found: &Flow, before: &Flow, span: Span) {
    if flow.start_ns != before.start_ns && span.holds(found.start_ns) {
        flow.start_ns = found.start_ns;
    }
    if flow.established_ns != before.established_ns && span.holds(found.established_ns) {
        flow.established_ns = found.established_ns;
    }
    if flow.seen_ns != before.seen_ns && span.holds(found.seen_ns) {
        flow.seen_ns = found.seen_ns;
    } else if flow.seen_ns != found.seen_ns {
        // At the edge of a step of the time last seen, it depends on the tick whether it is written.
        let silent = span.end.saturating_sub(before.seen_ns);
        let edge = SEEN_STEP_NS..=SEEN_STEP_NS + (span.end - span.tick);
        if edge.contains(&silent) && (found.seen_ns == before.seen_ns || span.holds(found.seen_ns)) {
            flow.seen_ns = found.seen_ns;
        }
    }
}

/// A tuple's key and entry in the model's words.
fn plain((key, entry): (&TupleKey, &TupleEntry)) -> (Pair, Lead) {
    let of = |addr, port: Port| end(addr, port);
    let pair = Pair::of(of(key.low, key.low_port), of(key.high, key.high_port), key.proto);
    let role = match entry.role() {
        role::FRONT => Role::Front,
        role::MIDDLE => Role::Middle,
        _ => Role::Back,
    };
    let lead = Lead {
        slot: entry.slot,
        serial: entry.serial(),
        role,
    };
    (pair, lead)
}

/// Records are compared whole; this is here so that a new field is not forgotten.
const _: () = assert!(size_of::<ConnRecord>() == 88);

/// The clock's last tick, nanoseconds (`CLOCK_MONOTONIC_COARSE`): what `bpf_ktime_get_coarse_ns` reads.
fn coarse_ns() -> u64 {
    use nix::time::{ClockId, clock_gettime};
    clock_gettime(ClockId::CLOCK_MONOTONIC_COARSE)
        .map_or(0, |time| time.tv_sec() as u64 * 1_000_000_000 + time.tv_nsec() as u64)
}
