//! Packets that go out: a backend's answers to clients outside, and a client's packets to a backend beyond the uplink.

use aya_ebpf::{bindings::{__sk_buff, BPF_NOEXIST}, helpers::bpf_get_prandom_u32, programs::TcContext};
use lb_common::{
    addr::{Addr, Port},
    counter::{action, hook},
    flow::{Flow, PORT_TRIES, TupleEntry, TupleKey, flag, side},
    packet::{self, Packet, fragment, kind},
};

use super::{
    NEXT, SHOT, clock, errors, fragments,
    rewrite::{End, rewrite},
    skb,
    table::{self, BACK, MIDDLE},
};
use crate::{
    count::count,
    maps::{FLOWS, INTERFACES, SETTINGS, TUPLES},
};

/// The egress program, for interfaces whose link header has `link` bytes.
#[inline(always)]
pub fn egress(ctx: &TcContext, link: usize) -> i32 {
    let skb = ctx.skb.skb;
    let mut packet = packet::read(&skb::Bytes(skb), link, skb::protocol(skb));
    if packet.kind != kind::TRANSPORT {
        return errors::aside(skb, &packet, hook::EGRESS);
    }
    if packet.fragment != fragment::WHOLE && !fragments::complete(&mut packet) {
        count(hook::EGRESS, action::FRAGMENT_UNKNOWN);
        return NEXT;
    }
    let key = TupleKey::between(packet.src, packet.src_port, packet.dst, packet.dst_port, packet.proto);
    let entry = table::entry(&key);
    if entry.stamp == 0 || entry.role() != MIDDLE {
        count(hook::EGRESS, action::MISS);
        return NEXT;
    }
    let Some(flow) = FLOWS.get_ptr_mut(entry.slot) else {
        count(hook::EGRESS, action::MISS);
        return NEXT;
    };
    // SAFETY: a live array element; what others write meanwhile are single fields of their own.
    let flow = unsafe { &mut *flow };
    if !table::is_of(flow, entry) {
        count(hook::EGRESS, action::MISS);
        return NEXT;
    }
    // Where client and backend are one address, ports tell them apart.
    if flow.is_backend(&packet.src, packet.src_port) && flow.is_client(&packet.dst, packet.dst_port) {
        let now = clock::tick();
        let event = flow.note_backend(packet.tcp_flags, now);
        table::follow(hook::EGRESS, flow, event);
        table::see(flow, now);
        return done(rewrite(skb, &packet, End::Source, &flow.vip, flow.vip_port));
    }
    if flow.flags & (flag::MASQUERADE | flag::HAIRPIN) == 0 {
        count(hook::EGRESS, action::MISS);
        return NEXT;
    }
    if flow.source_port.0 == 0 {
        let verdict = assign(skb, &packet, entry.slot);
        if verdict != ASSIGNED {
            return verdict;
        }
    }
    done(rewrite(skb, &packet, End::Source, &flow.source, flow.source_port))
}

#[inline(always)]
fn done(rewritten: bool) -> i32 {
    count(
        hook::EGRESS,
        if rewritten {
            action::TRANSLATED
        } else {
            action::INCONSISTENT
        },
    );
    NEXT
}

/// The flow has a source now.
const ASSIGNED: i32 = i32::MAX;

/// Gives a flow the node's own source on the interface that it leaves by; else the verdict for its packet.
#[inline(never)]
fn assign(skb: *mut __sk_buff, packet: &Packet, slot: u32) -> i32 {
    let (Some(flow), Some(settings)) = (FLOWS.get_ptr_mut(slot), SETTINGS.get_ptr(0)) else {
        count(hook::EGRESS, action::MISS);
        return NEXT;
    };
    let Some(interface) = INTERFACES.get_ptr(&skb::ifindex(skb)) else {
        count(hook::EGRESS, action::MISS);
        return NEXT;
    };
    // SAFETY: live elements of their maps; removed elements stay readable until the program ends.
    let (flow, first, last, behind, addr) = unsafe {
        let addr = if packet.is_v6 { (*interface).v6 } else { (*interface).v4 };
        let (first, last) = ((*settings).first_port, (*settings).last_port);
        (&mut *flow, first, last, (*interface).side, addr)
    };
    // A guest behind this interface is met by the source of its like alone where it would meet itself.
    let wanted = if behind == side::GUEST { flag::HAIRPIN } else { flag::MASQUERADE };
    if flow.flags & wanted == 0 {
        count(hook::EGRESS, action::MISS);
        return NEXT;
    }
    if addr.same(&Addr::ZERO) || last < first {
        count(hook::EGRESS, action::NO_SOURCE);
        return SHOT;
    }
    let serial = flow.serial();
    let (backend, backend_port, proto) = (flow.backend, flow.backend_port, flow.proto);
    let ports = (last - first) as u32 + 1;
    let now = clock::now();
    // SAFETY: the helper takes nothing.
    let start = unsafe { bpf_get_prandom_u32() } % ports;
    let mut closed_port = 0;
    let mut tries = 0;
    while tries < PORT_TRIES {
        let at = start + tries;
        let at = if at >= ports { at - ports } else { at };
        let port = Port::new((first as u32 + at) as u16);
        tries += 1;
        let key = TupleKey::between(backend, backend_port, addr, port, proto);
        match claim(&key, slot, serial, now) {
            Claim::Ours => {
                flow.source = addr;
                flow.source_port = port;
                return ASSIGNED;
            }
            Claim::Closed if closed_port == 0 => closed_port = port.0,
            _ => {}
        }
    }
    // Nothing is free: what has ended gives way, though its backend may still remember it.
    if closed_port != 0 {
        let key = TupleKey::between(backend, backend_port, addr, Port(closed_port), proto);
        let holder = table::entry(&key);
        if let Some(held) = FLOWS.get_ptr_mut(holder.slot) {
            // SAFETY: a live array element.
            let (is_holder, seen) = unsafe { (table::is_of(&*held, holder) && (*held).is_closed(), (*held).version) };
            if is_holder {
                let _ = table::retire(hook::EGRESS, holder.slot, seen, 0);
            }
        }
        if let Claim::Ours = claim(&key, slot, serial, now) {
            flow.source = addr;
            flow.source_port = Port(closed_port);
            return ASSIGNED;
        }
    }
    flow.flags |= flag::EXHAUSTED;
    count(hook::EGRESS, action::PORTS_EXHAUSTED);
    SHOT
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Claim {
    Ours,
    Taken,
    Closed,
}

/// Takes a source port towards a backend, if nobody has it whose flow goes on or ended but now.
#[inline(always)]
fn claim(key: &TupleKey, slot: u32, serial: u32, now: u64) -> Claim {
    let ours = TupleEntry::new(slot, serial, BACK);
    if TUPLES.insert(key, &ours, BPF_NOEXIST as u64).is_ok() {
        return Claim::Ours;
    }
    let holder = table::entry(key);
    if holder.stamp != 0
        && let Some(held) = FLOWS.get_ptr_mut(holder.slot)
    {
        // SAFETY: a live array element.
        let held: &Flow = unsafe { &*held };
        if table::is_of(held, holder) {
            if !held.is_expired(now) {
                return if held.is_closed() { Claim::Closed } else { Claim::Taken };
            }
            let result = held.outcome_of_silence() as u32;
            if !table::retire(hook::EGRESS, holder.slot, held.version, result) {
                return Claim::Taken;
            }
        } else if holder.role() != BACK {
            return Claim::Taken;
        } else {
            // It leads nowhere: its flow went while nobody could remove it.
            let _ = TUPLES.remove(key);
        }
    }
    if TUPLES.insert(key, &ours, BPF_NOEXIST as u64).is_ok() {
        Claim::Ours
    } else {
        Claim::Taken
    }
}
