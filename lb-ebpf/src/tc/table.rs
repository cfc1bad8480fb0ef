//! The flow table: slots, tuples, and what becomes of a flow.
//!
//! A flow's version is changed by compare-and-swap alone. Whoever turns it to [`state::BUSY`] owns the slot until it gives the
//! version another state; whoever turns [`state::LIVE`] to [`state::ENDED`] counts the end. So each flow is ended once, and a
//! slot has one owner, on as many processors as there are.

use aya_ebpf::bindings::BPF_ANY;
use core::intrinsics::{AtomicOrdering, atomic_cxchg, atomic_xadd, atomic_xchg};
use lb_common::{
    abi::TCP,
    backend::state as backend_state,
    counter::action,
    event::{ConnRecord, kind, mark, outcome},
    flow::{Event, Flow, HAND_STEPS, SEEN_STEP_NS, SERIAL_MASK, TupleEntry, TupleKey, role, state, version},
};

use super::clock;
use crate::{
    count::{add, count},
    emit,
    maps::{BACKEND_STATS, BACKENDS, FLOW_HAND, FLOWS, SERVICE_STATS, SETTINGS, TUPLES},
};

/// Where a tuple leads; an entry of serial number 0, which no flow has, if nowhere.
#[inline(always)]
pub fn entry(key: &TupleKey) -> TupleEntry {
    match TUPLES.get_ptr(key) {
        // SAFETY: an element of the map; removed elements stay readable until the program ends, and what they lead to is
        // told by the serial number.
        Some(entry) => unsafe { *entry },
        None => TupleEntry { slot: 0, stamp: 0 },
    }
}

/// Whether a slot still has the flow that an entry means.
#[inline(always)]
pub fn is_of(flow: &Flow, entry: TupleEntry) -> bool {
    flow.serial() == entry.serial() && flow.state() >= state::LIVE
}

/// Changes a flow's version; false if somebody else has.
#[inline(always)]
fn swap(flow: *mut Flow, from: u32, to: u32) -> bool {
    // SAFETY: four aligned bytes of a live array element.
    unsafe {
        let (before, _) = atomic_cxchg::<u32, { AtomicOrdering::AcqRel }, { AtomicOrdering::Acquire }>(
            &raw mut (*flow).version,
            from,
            to,
        );
        before == from
    }
}

/// Gives the version of a slot that the caller owns another value, after all that the slot has was written.
#[inline(always)]
pub fn publish(flow: *mut Flow, version: u32) {
    // SAFETY: four aligned bytes of a live array element.
    let _ = unsafe { atomic_xchg::<u32, { AtomicOrdering::AcqRel }>(&raw mut (*flow).version, version) };
}

/// Notes that a packet was seen, not with every one.
#[inline(always)]
pub fn see(flow: &mut Flow, now_ns: u64) {
    if flow.idle_ns(now_ns) > SEEN_STEP_NS {
        flow.seen_ns = now_ns;
    }
}

/// Whether the flow's backend has left the maps: its id is vacant, or somebody else's.
#[inline(always)]
pub fn has_left(flow: &Flow) -> bool {
    backend_state_of(flow) == backend_state::VACANT
}

/// Whether the flow's backend may get new flows.
#[inline(always)]
pub fn is_usable(flow: &Flow) -> bool {
    backend_state_of(flow) == backend_state::ACTIVE
}

#[inline(always)]
fn backend_state_of(flow: &Flow) -> u8 {
    let Some(backend) = BACKENDS.get_ptr(flow.backend_id) else {
        return backend_state::VACANT;
    };
    // SAFETY: a live array element.
    unsafe {
        if (*backend).addr.same(&flow.backend) && (*backend).port.0 == flow.backend_port.0 {
            (*backend).state
        } else {
            backend_state::VACANT
        }
    }
}

/// Counts what a packet meant for its flow.
#[inline(always)]
pub fn follow(hook: u32, flow: *mut Flow, event: Event) {
    match event {
        Event::Nothing => {}
        Event::Established => established(flow),
        Event::Ended(result) => ended(hook, flow, result as u32),
    }
}

#[inline(always)]
fn established(flow: *mut Flow) {
    // SAFETY: live elements of their arrays.
    unsafe {
        if (*flow).proto != TCP {
            return;
        }
        if let Some(stats) = BACKEND_STATS.get_ptr_mut((*flow).backend_id) {
            add(&raw mut (*stats).outside.established);
        }
        if let Some(stats) = SERVICE_STATS.get_ptr_mut((*flow).service_id) {
            add(&raw mut (*stats).established);
        }
    }
}

/// Ends a flow that goes on having its slot and tuples, for the packets that are still to come.
#[inline(never)]
fn ended(hook: u32, flow: *mut Flow, result: u32) {
    // SAFETY: a live array element.
    let seen = unsafe { (*flow).version };
    if seen & 3 == state::LIVE && swap(flow, seen, version(seen >> 2, state::ENDED)) {
        tell(hook, flow, result as u8);
    }
}

/// Counts a TCP flow's end and writes its record. UDP has no ends.
#[inline(always)]
fn tell(hook: u32, flow: *mut Flow, result: u8) {
    // SAFETY: live elements of their arrays; the index of `failed` is masked into its length.
    unsafe {
        if (*flow).proto != TCP {
            return;
        }
        let backend = BACKEND_STATS.get_ptr_mut((*flow).backend_id);
        let service = SERVICE_STATS.get_ptr_mut((*flow).service_id);
        if result == outcome::ESTABLISHED {
            if let Some(stats) = backend {
                add(&raw mut (*stats).outside.closed);
            }
            if let Some(stats) = service {
                add(&raw mut (*stats).closed);
            }
        } else {
            if let Some(stats) = backend {
                add(&raw mut (*stats).outside.failed);
            }
            if let Some(stats) = service {
                let failed = (&raw mut (*stats).failed).cast::<u64>();
                add(failed.add((result & 7) as usize));
            }
        }
    }
    let end_ns = clock::now();
    emit::record::<ConnRecord>(hook, |record| {
        // SAFETY: the ring buffer's reservation of the record's size, aligned to eight bytes; a live array element.
        unsafe {
            (*record).kind = kind::CONNECTION;
            (*record).errno = 0;
            (*record).start_ns = (*flow).start_ns;
            (*record).established_ns = (*flow).established_ns;
            (*record).end_ns = end_ns;
            (*record).netns_cookie = 0;
            (*record).client = (*flow).client;
            (*record).vip = (*flow).vip;
            (*record).service_id = (*flow).service_id;
            (*record).backend_id = (*flow).backend_id;
            (*record).client_port = (*flow).client_port;
            (*record).vip_port = (*flow).vip_port;
            (*record).proto = (*flow).proto;
            (*record).outcome = result;
            (*record).marks = mark::OUTSIDE;
        }
    });
}

/// Takes a flow that is `seen` out of the table: ends it, if nobody has, and removes its tuples. The slot is free then.
///
/// False if it was somebody else's by now.
#[inline(never)]
pub fn retire(hook: u32, slot: u32, seen: u32, result: u32) -> bool {
    let Some(flow) = FLOWS.get_ptr_mut(slot) else {
        return false;
    };
    let serial = seen >> 2;
    if !swap(flow, seen, version(serial, state::BUSY)) {
        return false;
    }
    if seen & 3 == state::LIVE {
        tell(hook, flow, result as u8);
    }
    // SAFETY: a live array element, which is ours while it is busy.
    let flow_ref = unsafe { &*flow };
    let proto = flow_ref.proto;
    let (client, client_port) = (flow_ref.client, flow_ref.client_port);
    let (backend, backend_port) = (flow_ref.backend, flow_ref.backend_port);
    let front = TupleKey::between(client, client_port, flow_ref.vip, flow_ref.vip_port, proto);
    forget(&front, slot, serial);
    let middle = TupleKey::between(client, client_port, backend, backend_port, proto);
    forget(&middle, slot, serial);
    if flow_ref.source_port.0 != 0 {
        let back = TupleKey::between(backend, backend_port, flow_ref.source, flow_ref.source_port, proto);
        forget(&back, slot, serial);
    }
    publish(flow, version(serial, state::FREE));
    true
}

/// Removes a tuple if it leads to this flow, and not to a later one.
#[inline(always)]
fn forget(key: &TupleKey, slot: u32, serial: u32) {
    let entry = entry(key);
    if entry.slot == slot && entry.serial() == serial {
        let _ = TUPLES.remove(key);
    }
}

/// No slot.
pub const NO_SLOT: u32 = u32::MAX;

/// Takes a slot for a new flow, which is busy then; [`NO_SLOT`] where the hand finds none that may be taken.
#[inline(never)]
pub fn take(hook: u32) -> u32 {
    let Some(settings) = SETTINGS.get_ptr(0) else {
        return NO_SLOT;
    };
    let Some(hand) = FLOW_HAND.get_ptr_mut(0) else {
        return NO_SLOT;
    };
    // SAFETY: a live array element.
    let slots = unsafe { (*settings).flow_slots };
    if slots == 0 {
        return NO_SLOT;
    }
    let now = clock::now();
    let mut spare = NO_SLOT;
    let mut spare_version = 0;
    let mut step = 0;
    while step < HAND_STEPS {
        step += 1;
        // SAFETY: eight aligned bytes of a live array element.
        let turn = unsafe { atomic_xadd::<u64, u64, { AtomicOrdering::Relaxed }>(hand, 1) };
        let slot = (turn % slots as u64) as u32;
        let Some(flow) = FLOWS.get_ptr_mut(slot) else {
            continue;
        };
        // SAFETY: a live array element; what changes under us is noticed by the swap.
        let (seen, expired, evictable) = unsafe {
            (
                core::ptr::read_volatile(&raw const (*flow).version),
                (*flow).is_expired(now),
                (*flow).is_evictable(now),
            )
        };
        match seen & 3 {
            state::FREE => {
                if own(flow, seen) {
                    return slot;
                }
            }
            state::BUSY => {}
            _ if expired => {
                if reuse(hook, slot, flow, seen) {
                    count(hook, action::RECLAIMED);
                    return slot;
                }
            }
            _ if evictable && spare == NO_SLOT => {
                spare = slot;
                spare_version = seen;
            }
            _ => {}
        }
    }
    if spare != NO_SLOT
        && let Some(flow) = FLOWS.get_ptr_mut(spare)
        && reuse(hook, spare, flow, spare_version)
    {
        count(hook, action::EVICTED);
        return spare;
    }
    NO_SLOT
}

/// Owns a free slot, for a flow with the next serial number.
#[inline(always)]
fn own(flow: *mut Flow, seen: u32) -> bool {
    let next = ((seen >> 2) + 1) & SERIAL_MASK;
    // 0 is the serial number of entries that lead nowhere.
    let next = if next == 0 { 1 } else { next };
    swap(flow, seen, version(next, state::BUSY))
}

#[inline(always)]
fn reuse(hook: u32, slot: u32, flow: *mut Flow, seen: u32) -> bool {
    // SAFETY: a live array element.
    let result = unsafe { (*flow).outcome_of_silence() };
    retire(hook, slot, seen, result as u32) && own(flow, version(seen >> 2, state::FREE))
}

/// Lets a tuple lead to a flow, whatever it led to before; false if there is no room.
#[inline(always)]
pub fn lead(key: &TupleKey, slot: u32, serial: u32, role: u32) -> bool {
    TUPLES.insert(key, &TupleEntry::new(slot, serial, role), BPF_ANY as u64).is_ok()
}

/// The roles by the names that this room uses.
pub use role::{BACK, FRONT, MIDDLE};
