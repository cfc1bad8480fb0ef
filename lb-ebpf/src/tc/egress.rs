//! Packets that go out: a backend's answers to clients outside, and a client's packets to a backend beyond the uplink.

use aya_ebpf::{
    bindings::{__sk_buff, BPF_NOEXIST},
    programs::TcContext,
};
use lb_common::{
    addr::{Addr, Port},
    counter::{action, hook},
    flow::{Flow, PORT_TRIES, TupleEntry, TupleKey, flag, role, side},
    hash,
    packet::kind,
    select,
};

use super::{
    NEXT, SHOT, clock, done, errors, pass,
    rewrite::{End, rewrite},
    shoot, sight, skb, table,
};
use crate::maps::{FLOWS, INTERFACES, SETTINGS, TUPLES};

/// The egress program, for interfaces whose link header has `link` bytes.
#[inline(always)]
pub fn egress(ctx: &TcContext, link: u32) -> i32 {
    let skb = ctx.skb.skb;
    let seen = sight::look(skb, link);
    if seen != kind::TRANSPORT as u32 {
        return errors::aside(skb, seen, hook::EGRESS);
    }
    let verdict = go_out(skb);
    if verdict < WANTS_SOURCE {
        return verdict;
    }
    // Not one within the other: their stacks together would be too much for kernel 6.1.
    let assigned = assign(skb, (verdict - WANTS_SOURCE) as u32);
    if assigned != ASSIGNED {
        return assigned;
    }
    let verdict = go_out(skb);
    if verdict < WANTS_SOURCE { verdict } else { SHOT }
}

/// What [`go_out`] says, with the flow's slot added, where the flow is to get a source first.
const WANTS_SOURCE: i32 = 1 << 28;

/// Translates a packet of a flow that is known.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn go_out(skb: *mut __sk_buff) -> i32 {
    let Some(packet) = sight::packet() else {
        return NEXT;
    };
    let key = TupleKey::between(packet.src, packet.src_port, packet.dst, packet.dst_port, packet.proto);
    let entry = table::entry(&key);
    if entry.stamp == 0 || entry.role() != role::MIDDLE {
        return pass(hook::EGRESS, action::MISS);
    }
    let Some(flow) = FLOWS.get_ptr_mut(entry.slot) else {
        return pass(hook::EGRESS, action::MISS);
    };
    // SAFETY: a live array element; what others write meanwhile are single fields of their own.
    let flow = unsafe { &mut *flow };
    let now = clock::tick();
    if !table::is_of(flow, entry) || flow.is_expired(now) {
        return pass(hook::EGRESS, action::MISS);
    }
    // Where client and backend are one address, ports tell them apart.
    if flow.is_backend(&packet.src, packet.src_port) && flow.is_client(&packet.dst, packet.dst_port) {
        // The first answer's time is told, and a tick may lie before the SYN.
        let answered = if flow.is_answered() { now } else { clock::now() };
        let event = flow.note_backend(packet.tcp_flags, answered);
        table::follow(hook::EGRESS, entry.slot, event);
        table::see(flow, now);
        return done(
            hook::EGRESS,
            rewrite(skb, packet, End::Source, &flow.vip, flow.vip_port),
        );
    }
    if flow.flags & (flag::MASQUERADE | flag::HAIRPIN) == 0 {
        return pass(hook::EGRESS, action::MISS);
    }
    if flow.source_port.0 == 0 {
        // Slots take 24 bits, as the map of them has at most so many.
        return WANTS_SOURCE + (entry.slot & SLOT_MASK) as i32;
    }
    done(
        hook::EGRESS,
        rewrite(skb, packet, End::Source, &flow.source, flow.source_port),
    )
}

/// The most slots that there may be.
const SLOT_MASK: u32 = (1 << 24) - 1;

/// The flow has a source now.
const ASSIGNED: i32 = i32::MAX;

/// Gives a flow the node's own source on the interface that it leaves by; else the verdict for its packet.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn assign(skb: *mut __sk_buff, slot: u32) -> i32 {
    let (Some(packet), Some(flow), Some(settings)) = (sight::packet(), FLOWS.get_ptr_mut(slot), SETTINGS.get_ptr(0))
    else {
        return NEXT;
    };
    let Some(interface) = INTERFACES.get_ptr(&skb::ifindex(skb)) else {
        return pass(hook::EGRESS, action::MISS);
    };
    // SAFETY: live elements of their maps; removed elements stay readable until the program ends.
    let (flow, first, last, behind, addr) = unsafe {
        let addr = if packet.is_v6 {
            &(*interface).v6
        } else {
            &(*interface).v4
        };
        let (first, last) = ((*settings).first_port, (*settings).last_port);
        (&mut *flow, first, last, (*interface).side, addr)
    };
    // A guest behind this interface meets another source than the client's where it would meet itself alone.
    let wanted = if behind == side::GUEST {
        flag::HAIRPIN
    } else {
        flag::MASQUERADE
    };
    if flow.flags & wanted == 0 {
        return pass(hook::EGRESS, action::MISS);
    }
    if addr.same(&Addr::ZERO) || last < first {
        return shoot(hook::EGRESS, action::NO_SOURCE);
    }
    // Two processors may see packets of one flow: one of them gives it a source, the other's packet comes again.
    if !table::claim(flow) {
        return shoot(hook::EGRESS, action::NO_SOURCE);
    }
    let ours = TupleEntry::new(slot, flow.serial(), role::BACK);
    let ports = (last - first) as u32 + 1;
    let now = clock::now();
    // A client that comes again from its own port gets the same one first, also where the flow was lost in between.
    let hash = select::packet_hash(flow.client, flow.client_port, flow.vip, flow.vip_port, flow.proto);
    let start = hash::scale((hash >> 32) as u32, ports);
    // The port whose flow ended first of those that were looked at: its backend may still remember it.
    let mut spare = Port(0);
    let mut spare_seen = u64::MAX;
    let mut tries = 0;
    while tries < PORT_TRIES {
        // A range may be smaller than the number of tries.
        let port = Port::new((first as u32 + (start + tries) % ports) as u16);
        tries += 1;
        aim(flow, addr, port);
        let Some(key) = sight::key() else { return NEXT };
        if TUPLES.insert(key, &ours, BPF_NOEXIST as u64).is_ok() {
            flow.source = *addr;
            flow.source_port = port;
            return ASSIGNED;
        }
        let seen = given_up(key, now);
        if seen < spare_seen {
            spare_seen = seen;
            spare = port;
        }
    }
    if spare.0 != 0 {
        aim(flow, addr, spare);
        let Some(key) = sight::key() else { return NEXT };
        let holder = table::entry(key);
        if let Some(held) = FLOWS.get_ptr(holder.slot) {
            // SAFETY: a live array element.
            let held = unsafe { &*held };
            let seen = table::version_of(held, holder);
            if seen != 0 {
                let _ = table::retire(hook::EGRESS, holder.slot, seen, held.outcome_of_silence() as u32);
                // Which made keys of its own.
                aim(flow, addr, spare);
            } else {
                // It leads nowhere: its flow went while the tuple could not be removed.
                let _ = TUPLES.remove(key);
            }
        }
        if TUPLES.insert(key, &ours, BPF_NOEXIST as u64).is_ok() {
            flow.source = *addr;
            flow.source_port = spare;
            return ASSIGNED;
        }
    }
    table::unclaim(flow);
    flow.flags |= flag::EXHAUSTED;
    shoot(hook::EGRESS, action::PORTS_EXHAUSTED)
}

/// Makes the key of a backend's answers to one of the node's own sources.
#[inline(always)]
fn aim(flow: &Flow, addr: &Addr, port: Port) {
    let backend_port = flow.backend_port.0 as u32;
    sight::aim(&flow.backend, backend_port, addr, port.0 as u32, flow.proto as u32);
}

/// Since when nobody needs the flow that holds a source port; [`u64::MAX`] if it goes on.
#[inline(always)]
fn given_up(key: &TupleKey, now: u64) -> u64 {
    let holder = table::entry(key);
    if holder.role() != role::BACK {
        return u64::MAX;
    }
    let Some(held) = FLOWS.get_ptr(holder.slot) else {
        return u64::MAX;
    };
    // SAFETY: a live array element.
    let held = unsafe { &*held };
    if !table::is_of(held, holder) {
        0
    } else if held.is_closed() || held.is_evictable(now) || held.is_expired(now) {
        held.seen_ns
    } else {
        u64::MAX
    }
}
