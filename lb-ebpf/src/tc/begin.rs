//! A packet from outside, or from a guest, that no flow is known of: is it for a frontend, and which backend gets it?

use aya_ebpf::{
    bindings::__sk_buff,
    maps::lpm_trie::Key,
};
use lb_common::{
    abi::TCP,
    addr::{Addr, Port},
    affinity::AffinityKey,
    counter::{action, hook},
    event::tcp_flag,
    flow::{Flow, TupleKey, flag, is_syn, sent, side, state, version},
    frontend::{self, Frontend, SourceKey},
    hash,
    packet::{Packet, Read},
    select,
};

use super::{
    NEXT, SHOT, clock, ingress, refuse,
    rewrite::{End, rewrite},
    skb,
    table::{self, FRONT, MIDDLE, NO_SLOT},
};
use crate::{
    count::{add, count},
    lookup::{self, By, NO_ENTRY},
    maps::{BACKEND_STATS, FLOWS, INTERFACES, LISTS, SERVICE_STATS, SOURCES},
};

/// Why a flow begins.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// Nothing was known.
    Unknown = 0,
    /// A SYN on the tuple of an earlier flow.
    Reuse = 1,
    /// A datagram whose flow's backend has left.
    BackendLeft = 2,
}

/// Backends that are tried where the client talks to one already, from the same port, through another frontend.
const TRIES: u32 = 3;

/// The sequence number of a TCP packet, as it lies on the wire; 0 if it is not there.
#[inline(always)]
pub fn sequence(skb: *mut __sk_buff, packet: &Packet) -> u32 {
    match skb::Bytes(skb).read::<[u8; 4]>(packet.transport as usize + 4) {
        Some(bytes) => u32::from_ne_bytes(bytes),
        None => 0,
    }
}

/// Begins a flow, if the packet is for a frontend that its sender may use.
#[inline(never)]
pub fn begin(skb: *mut __sk_buff, packet: &Packet, why: u32) -> i32 {
    let Some(found) = lookup::frontend(packet.dst, packet.dst_port, packet.proto) else {
        count(hook::INGRESS, action::MISS);
        return NEXT;
    };
    // SAFETY: an element of the map; removed elements stay readable until the program ends.
    let front = unsafe { *found };
    let Some(interface) = INTERFACES.get_ptr(&skb::ifindex(skb)) else {
        count(hook::INGRESS, action::MISS);
        return NEXT;
    };
    // SAFETY: as above.
    let guest = unsafe { (*interface).side } == side::GUEST;
    if !guest && front.flags & frontend::flag::OUTSIDE == 0 {
        count(hook::INGRESS, action::MISS);
        return NEXT;
    }
    if !guest && front.flags & frontend::flag::SOURCE_RANGES != 0 {
        let source = SourceKey {
            service_id: front.service_id,
            addr: packet.src,
        };
        if SOURCES.get(&Key::new(SourceKey::BITS, source)).is_none() {
            count(hook::INGRESS, action::SOURCE_DENIED);
            return SHOT;
        }
    }
    place(skb, packet, why, &front, guest)
}

/// Chooses a backend and makes the flow.
#[inline(always)]
fn place(skb: *mut __sk_buff, packet: &Packet, why: u32, front: &Frontend, guest: bool) -> i32 {
    let set_id = if guest { front.set_id } else { front.outside_set_id };
    let word = lookup::word(set_id);
    if word.count() == 0 {
        return nobody(skb, packet, front, guest);
    }
    let key = AffinityKey::outside(packet.src, set_id);
    let mut hash = select::packet_hash(packet.src, packet.src_port, packet.dst, packet.dst_port, packet.proto);
    let mut backend_id = 0;
    let mut list_entry = NO_ENTRY;
    let mut addr = Addr::ZERO;
    let mut port = Port(0);
    let mut collides = true;
    let mut tries = 0;
    while tries < TRIES {
        tries += 1;
        let Some(chosen) = lookup::choose(word, set_id, front.affinity_seconds, &key, hash, By::Hash) else {
            return nobody(skb, packet, front, guest);
        };
        backend_id = chosen.id;
        list_entry = chosen.entry;
        let Some(found) = lookup::address(chosen.id) else {
            count(hook::INGRESS, action::INCONSISTENT);
            return NEXT;
        };
        (addr, port) = found;
        let middle = TupleKey::between(packet.src, packet.src_port, addr, port, packet.proto);
        if !is_taken(&middle) {
            collides = false;
            break;
        }
        hash = hash::mix(hash);
    }
    if collides {
        count(hook::INGRESS, action::COLLISION);
        return refuse::refuse_quietly(skb, packet);
    }
    let resumed = packet.proto == TCP && !is_syn(packet.tcp_flags);
    if resumed && packet.tcp_flags & tcp_flag::RST != 0 {
        // It ends what nobody here knows: there is nothing to remember.
        return ingress::done(rewrite(skb, packet, End::Destination, &addr, port));
    }
    let slot = table::take(hook::INGRESS);
    if slot == NO_SLOT {
        count(hook::INGRESS, action::FLOWS_FULL);
        return SHOT;
    }
    let Some(flow) = FLOWS.get_ptr_mut(slot) else {
        count(hook::INGRESS, action::FLOWS_FULL);
        return SHOT;
    };
    // SAFETY: a live array element, which is ours while it is busy.
    let flow = unsafe { &mut *flow };
    let now = clock::now();
    flow.client = packet.src;
    flow.vip = packet.dst;
    flow.backend = addr;
    flow.source = Addr::ZERO;
    flow.start_ns = now;
    flow.established_ns = 0;
    flow.seen_ns = now;
    flow.isn = if resumed || packet.proto != TCP { 0 } else { sequence(skb, packet) };
    flow.service_id = front.service_id;
    flow.set_id = set_id;
    flow.backend_id = backend_id;
    flow.generation = word.generation();
    flow.client_port = packet.src_port;
    flow.vip_port = packet.dst_port;
    flow.backend_port = port;
    flow.source_port = Port(0);
    flow.proto = packet.proto;
    let mut flags = 0;
    if !guest && front.flags & frontend::flag::MASQUERADE_OUTSIDE != 0 {
        flags |= flag::MASQUERADE;
    }
    if addr.same(&packet.src) {
        flags |= flag::HAIRPIN;
    }
    if resumed {
        flags |= flag::RESUMED;
    }
    flow.flags = flags;
    flow.client_sent = sent::ANY;
    // Who is in the middle of a connection has been answered, as far as anybody can tell.
    flow.backend_sent = if resumed { sent::ANY } else { 0 };
    if resumed {
        // Its FIN must be noted as that of any other flow.
        let _ = flow.note_client(packet.tcp_flags);
    }
    let serial = flow.serial();
    table::publish(flow, version(serial, state::LIVE));
    enter(flow, slot, serial, packet, why, list_entry);
    ingress::done(rewrite(skb, packet, End::Destination, &addr, port))
}

/// Lets the tuples lead to a new flow, and counts it.
#[inline(always)]
fn enter(flow: &Flow, slot: u32, serial: u32, packet: &Packet, why: u32, list_entry: u32) {
    let proto = packet.proto;
    let front = TupleKey::between(packet.src, packet.src_port, packet.dst, packet.dst_port, proto);
    let middle = TupleKey::between(packet.src, packet.src_port, flow.backend, flow.backend_port, proto);
    // Both have room: the map holds three tuples a slot. Without memory the flow's next packet is placed by its hash again,
    // and this one's answer is lost.
    let _ = table::lead(&middle, slot, serial, MIDDLE);
    let _ = table::lead(&front, slot, serial, FRONT);
    if why == Why::BackendLeft as u32 {
        count(hook::INGRESS, action::RERESOLVED);
    } else if flow.flags & flag::RESUMED != 0 {
        count(hook::INGRESS, action::RESUMED);
        return;
    } else {
        count(hook::INGRESS, action::NEW_FLOW);
        if why == Why::Reuse as u32 {
            count(hook::INGRESS, action::REUSED);
        }
    }
    // SAFETY: live elements of their arrays.
    unsafe {
        if let Some(stats) = BACKEND_STATS.get_ptr_mut(flow.backend_id) {
            add(&raw mut (*stats).outside.connects);
        }
        if let Some(stats) = SERVICE_STATS.get_ptr_mut(flow.service_id) {
            add(&raw mut (*stats).connects);
            add(&raw mut (*stats).attributed);
            add(&raw mut (*stats).outside);
        }
        if list_entry != NO_ENTRY
            && let Some(member) = LISTS.get_ptr_mut(list_entry)
        {
            add(&raw mut (*member).c);
        }
    }
}

/// Whether client and backend have a flow with each other that goes on: another one between them could not be told from it.
#[inline(always)]
fn is_taken(middle: &TupleKey) -> bool {
    let entry = table::entry(middle);
    if entry.stamp == 0 {
        return false;
    }
    let Some(flow) = FLOWS.get_ptr_mut(entry.slot) else {
        return false;
    };
    // SAFETY: a live array element.
    let flow = unsafe { &*flow };
    table::is_of(flow, entry) && !flow.is_closed() && !flow.is_expired(clock::tick())
}

/// What is said where a set has no usable backend.
#[inline(always)]
fn nobody(skb: *mut __sk_buff, packet: &Packet, front: &Frontend, guest: bool) -> i32 {
    // SAFETY: a live array element.
    if let Some(stats) = SERVICE_STATS.get_ptr_mut(front.service_id) {
        unsafe { add(&raw mut (*stats).rejected) };
    }
    let silent = if guest {
        frontend::flag::UNREACHABLE_WHEN_EMPTY
    } else {
        frontend::flag::SILENT_WHEN_EMPTY_OUTSIDE
    };
    if front.flags & silent != 0 {
        count(hook::INGRESS, action::POLICY_DROPPED);
        return SHOT;
    }
    refuse::refuse(skb, packet)
}
