//! A packet from outside, or from a guest, that no flow is known of: is it for a frontend, and which backend gets it?

use aya_ebpf::{bindings::__sk_buff, maps::lpm_trie::Key};
use lb_common::{
    abi::TCP,
    addr::{Addr, Port},
    affinity::AffinityKey,
    counter::{action, hook},
    event::tcp_flag,
    flow::{BACKEND_TRIES, Flow, flag, is_syn, role, sent, side, state, version},
    frontend::{self, Frontend, SourceKey},
    hash, select,
};

use super::{
    NEXT, clock, done, pass, refuse,
    rewrite::{End, rewrite},
    shoot, sight, skb,
    table::{self, NO_SLOT},
};
use crate::{
    count::{add, count},
    lookup::{self, By, NO_ENTRY},
    maps::{BACKEND_STATS, BACKENDS, FLOWS, INTERFACES, LISTS, SERVICE_STATS, SOURCES},
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
    /// No port was free for the flow's source: its client is refused.
    Exhausted = 3,
}

/// What [`admit`] says.
mod admission {
    /// Not for us: the packet passes.
    pub const FOREIGN: u32 = 0;
    /// The source is not admitted.
    pub const DENIED: u32 = 1;
    /// For a frontend, from outside.
    pub const OUTSIDE: u32 = 2;
    /// For a frontend, from a guest.
    pub const GUEST: u32 = 3;
}

/// Finds the frontend that the packet is for, and whether its sender may use it.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn admit(ifindex: u32) -> u32 {
    let Some(packet) = sight::packet() else {
        return admission::FOREIGN;
    };
    let Some(front) = lookup::frontend(packet.dst, packet.dst_port, packet.proto) else {
        return admission::FOREIGN;
    };
    let Some(interface) = INTERFACES.get_ptr(&ifindex) else {
        return admission::FOREIGN;
    };
    // SAFETY: elements of their maps; removed elements stay readable until the program ends.
    let (front, behind) = unsafe { (&*front, (*interface).side) };
    sight::keep_front(front);
    if behind == side::GUEST {
        return admission::GUEST;
    }
    if front.flags & frontend::flag::OUTSIDE == 0 {
        return admission::FOREIGN;
    }
    if front.flags & frontend::flag::SOURCE_RANGES != 0 {
        let source = SourceKey {
            service_id: front.service_id,
            addr: packet.src,
        };
        if SOURCES.get(&Key::new(SourceKey::BITS, source)).is_none() {
            return admission::DENIED;
        }
    }
    admission::OUTSIDE
}

/// Begins a flow, if the packet is for a frontend that its sender may use.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn begin(skb: *mut __sk_buff, why: u32) -> i32 {
    if why == Why::Exhausted as u32 {
        return refuse::refuse(skb, action::REFUSED);
    }
    let admission = admit(skb::ifindex(skb));
    if admission == admission::DENIED {
        return shoot(hook::INGRESS, action::SOURCE_DENIED);
    }
    if admission == admission::FOREIGN {
        return pass(hook::INGRESS, action::MISS);
    }
    place(skb, why, admission == admission::GUEST)
}

/// No backend: nobody is usable.
const NOBODY: u64 = 0;
/// No backend: the client talks to each that was tried already.
const COLLISION: u64 = u64::MAX;
/// The flow of this very client and frontend is there, its first tuple is not: in the low half its slot.
const ADOPTED: u64 = 1 << 63;

/// Chooses a backend: its id in the low half, its list entry in the high one; or one of the words above.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn choose(set_id: u32, affinity_seconds: u32) -> u64 {
    let Some(packet) = sight::packet() else {
        return NOBODY;
    };
    let word = lookup::word(set_id);
    let client = AffinityKey::outside(packet.src, set_id);
    let mut hash = select::packet_hash(packet.src, packet.src_port, packet.dst, packet.dst_port, packet.proto);
    // What the client remembers is asked once: whoever is met there already is met by no other way.
    let mut seconds = affinity_seconds;
    let mut tries = 0;
    while tries < BACKEND_TRIES {
        tries += 1;
        let Some(chosen) = lookup::choose(word, set_id, seconds, &client, hash, By::Hash) else {
            return NOBODY;
        };
        let holder = holder(chosen.id);
        if holder == FREE {
            if affinity_seconds != 0 && chosen.entry != NO_ENTRY {
                lookup::remember(&client, chosen.id);
            }
            return (chosen.entry as u64 & LIST_MASK) << 32 | chosen.id as u64;
        }
        if holder != TAKEN {
            return ADOPTED | holder as u64;
        }
        seconds = 0;
        hash = hash::mix(hash);
    }
    COLLISION
}

/// List entries take 24 bits; [`NO_ENTRY`] has more, and stays apart from all of them.
const LIST_MASK: u64 = 0x7fff_ffff;

/// Chooses a backend, makes the flow and sends the packet on.
#[inline(always)]
fn place(skb: *mut __sk_buff, why: u32, guest: bool) -> i32 {
    let (Some(packet), Some(front)) = (sight::packet(), sight::front()) else {
        return NEXT;
    };
    let set_id = if guest { front.set_id } else { front.outside_set_id };
    let chosen = choose(set_id, front.affinity_seconds);
    if chosen == NOBODY {
        return nobody(skb, front, guest);
    }
    if chosen == COLLISION {
        return refuse::refuse(skb, action::COLLISION);
    }
    if chosen & ADOPTED != 0 {
        return adopt(skb, chosen as u32);
    }
    let Some(backend) = BACKENDS.get_ptr(chosen as u32) else {
        return pass(hook::INGRESS, action::INCONSISTENT);
    };
    // SAFETY: a live array element.
    let (addr, port) = unsafe { (&(*backend).addr, (*backend).port) };
    // A reset ends what nobody here knows, and what neither begins nor acknowledges belongs to nothing: there is nothing to remember.
    if packet.proto != TCP
        || is_syn(packet.tcp_flags)
        || packet.tcp_flags & (tcp_flag::ACK | tcp_flag::RST) == tcp_flag::ACK
    {
        let slot = table::take(hook::INGRESS);
        if slot == NO_SLOT {
            return shoot(hook::INGRESS, action::FLOWS_FULL);
        }
        make(slot, set_id, chosen, why, guest as u32);
    }
    done(hook::INGRESS, rewrite(skb, packet, End::Destination, addr, port))
}

/// Makes a flow in a slot that is ours, and lets its tuples lead there.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn make(slot: u32, set_id: u32, chosen: u64, why: u32, guest: u32) -> u32 {
    let backend_id = chosen as u32;
    let (Some(packet), Some(front)) = (sight::packet(), sight::front()) else {
        return 0;
    };
    let (Some(flow), Some(backend)) = (FLOWS.get_ptr_mut(slot), BACKENDS.get_ptr(backend_id)) else {
        return 0;
    };
    // SAFETY: live array elements; the flow is ours while it is busy.
    let (flow, backend) = unsafe { (&mut *flow, &*backend) };
    let resumed = packet.proto == TCP && !is_syn(packet.tcp_flags);
    let now = clock::now();
    flow.client = packet.src;
    flow.vip = packet.dst;
    flow.backend = backend.addr;
    flow.source = Addr::ZERO;
    flow.start_ns = now;
    flow.established_ns = 0;
    flow.seen_ns = now;
    flow.isn = packet.sequence;
    flow.service_id = front.service_id;
    flow.set_id = set_id;
    flow.backend_id = backend_id;
    flow.generation = lookup::word(set_id).generation();
    flow.client_port = packet.src_port;
    flow.vip_port = packet.dst_port;
    flow.backend_port = backend.port;
    flow.source_port = Port(0);
    flow.claim = 0;
    flow.proto = packet.proto;
    let mut flags = 0;
    if guest == 0 && front.flags & frontend::flag::MASQUERADE_OUTSIDE != 0 {
        flags |= flag::MASQUERADE;
    }
    if flow.backend.same(&flow.client) {
        flags |= flag::HAIRPIN;
    }
    if resumed {
        flags |= flag::RESUMED;
    }
    flow.flags = flags;
    flow.client_sent = sent::ANY;
    // Who seems to be in the middle of a connection may be nobody: it is kept for long once both have spoken.
    flow.backend_sent = 0;
    // A FIN must be noted as that of any other flow; a connection does not end by it.
    let _ = flow.note_client(packet.tcp_flags);
    let serial = flow.serial();
    table::publish(flow, version(serial, state::LIVE));
    enter(flow, slot, serial, why, (chosen >> 32) as u32);
    1
}

/// Lets the tuples lead to a new flow, and counts it.
#[inline(always)]
fn enter(flow: &Flow, slot: u32, serial: u32, why: u32, list_entry: u32) {
    // Both have room: the map holds three tuples a slot. Without memory the flow's next packet is placed by its hash again,
    // and this one's answer is lost.
    let _ = table::lead(slot, serial, role::MIDDLE);
    let _ = table::lead(slot, serial, role::FRONT);
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
        if let Some(member) = LISTS.get_ptr_mut(list_entry) {
            add(&raw mut (*member).c);
        }
    }
}

/// Nobody has a flow between the client and a backend.
const FREE: u32 = u32::MAX;
/// The client has a flow with a backend through another frontend, which goes on: another one between them could not be told
/// from it.
const TAKEN: u32 = u32::MAX - 1;

/// Who has a flow between the packet's sender and a backend: [`FREE`], [`TAKEN`], or the slot of the flow that the packet is of.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn holder(backend_id: u32) -> u32 {
    let (Some(packet), Some(backend)) = (sight::packet(), BACKENDS.get_ptr(backend_id)) else {
        return FREE;
    };
    // SAFETY: a live array element.
    let (addr, port) = unsafe { (&(*backend).addr, (*backend).port.0 as u32) };
    sight::aim(&packet.src, packet.src_port.0 as u32, addr, port, packet.proto as u32);
    let Some(key) = sight::key() else { return FREE };
    let entry = table::entry(key);
    if entry.stamp == 0 || entry.role() != role::MIDDLE {
        return FREE;
    }
    let Some(flow) = FLOWS.get_ptr(entry.slot) else {
        return FREE;
    };
    // SAFETY: a live array element.
    let flow = unsafe { &*flow };
    if !table::is_of(flow, entry) || flow.is_closed() || flow.is_expired(clock::tick()) {
        return FREE;
    }
    let same = flow.is_vip(&packet.dst, packet.dst_port) && flow.is_client(&packet.src, packet.src_port);
    if same && !(packet.proto == TCP && is_syn(packet.tcp_flags)) {
        entry.slot
    } else if same {
        // A SYN begins a connection of its own: its flow takes the tuple over.
        FREE
    } else {
        TAKEN
    }
}

/// Lets the first tuple of a flow lead to it again, and sends the packet on: two processors began it at once, or there was no
/// memory for the tuple.
#[inline(always)]
fn adopt(skb: *mut __sk_buff, slot: u32) -> i32 {
    let (Some(packet), Some(flow)) = (sight::packet(), FLOWS.get_ptr(slot)) else {
        return NEXT;
    };
    // SAFETY: a live array element.
    let flow = unsafe { &*flow };
    let _ = table::lead(slot, flow.serial(), role::FRONT);
    done(
        hook::INGRESS,
        rewrite(skb, packet, End::Destination, &flow.backend, flow.backend_port),
    )
}

/// What is said where a set has no usable backend.
#[inline(always)]
fn nobody(skb: *mut __sk_buff, front: &Frontend, guest: bool) -> i32 {
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
        return shoot(hook::INGRESS, action::POLICY_DROPPED);
    }
    refuse::refuse(skb, action::REFUSED)
}
