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
    event::{ConnRecord, kind, mark},
    flow::{
        Event, Flow, LOOKS, SEEN_STEP_NS, SERIAL_MASK, TupleEntry, TupleKey, flag, role, serial_of, slot_at, state,
        state_of, version,
    },
};

use super::{clock, sight};
use crate::{
    count::{count, ended_outside, established_outside},
    emit, lookup,
    maps::{BACKENDS, FLOW_HAND, FLOWS, SETTINGS, TUPLES},
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

/// The version of a slot's flow, if it still is the one that an entry means; 0, which no flow has, if not.
#[inline(always)]
pub fn version_of(flow: &Flow, entry: TupleEntry) -> u32 {
    // SAFETY: four aligned bytes of a live array element; what changes afterwards is noticed by the swap.
    let seen = unsafe { core::ptr::read_volatile(&raw const flow.version) };
    if serial_of(seen) == entry.serial() && state_of(seen) >= state::LIVE {
        seen
    } else {
        0
    }
}

/// Whether a slot still has the flow that an entry means.
#[inline(always)]
pub fn is_of(flow: &Flow, entry: TupleEntry) -> bool {
    version_of(flow, entry) != 0
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

/// Begins to give a flow a source; false if somebody else does.
#[inline(always)]
pub fn claim(flow: *mut Flow) -> bool {
    // SAFETY: four aligned bytes of a live array element.
    unsafe {
        let (before, _) =
            atomic_cxchg::<u32, { AtomicOrdering::AcqRel }, { AtomicOrdering::Acquire }>(&raw mut (*flow).claim, 0, 1);
        before == 0
    }
}

/// Gives up giving a flow a source.
#[inline(always)]
pub fn unclaim(flow: *mut Flow) {
    // SAFETY: as above.
    let _ = unsafe { atomic_xchg::<u32, { AtomicOrdering::AcqRel }>(&raw mut (*flow).claim, 0) };
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

/// Whether the flow's frontend is another Service's by now, or nobody's.
#[inline(always)]
pub fn has_moved(flow: &Flow) -> bool {
    match lookup::frontend(flow.vip, flow.vip_port, flow.proto) {
        // SAFETY: an element of the map; removed elements stay readable until the program ends.
        Some(front) => unsafe { (*front).service_id != flow.service_id },
        None => true,
    }
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
pub fn follow(hook: u32, slot: u32, event: Event) {
    match event {
        Event::Nothing => {}
        Event::Established => _ = established(slot),
        Event::Ended(result) => _ = ended(hook, slot, result as u32),
    }
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn established(slot: u32) -> u32 {
    let Some(flow) = FLOWS.get_ptr(slot) else {
        return 0;
    };
    // SAFETY: a live array element.
    let flow = unsafe { &*flow };
    if flow.proto == TCP {
        established_outside(flow.backend_id, flow.service_id);
    }
    1
}

/// Ends a flow that goes on having its slot and tuples, for the packets that are still to come.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn ended(hook: u32, slot: u32, result: u32) -> u32 {
    let Some(flow) = FLOWS.get_ptr_mut(slot) else {
        return 0;
    };
    // SAFETY: a live array element.
    let seen = unsafe { (*flow).version };
    if state_of(seen) == state::LIVE && swap(flow, seen, version(serial_of(seen), state::ENDED)) {
        tell(hook, flow, result as u8);
    }
    1
}

/// Counts a TCP flow's end and writes its record. UDP has no ends.
#[inline(always)]
fn tell(hook: u32, flow: *mut Flow, result: u8) {
    // SAFETY: a live array element.
    let (proto, flags, backend_id, service_id) =
        unsafe { ((*flow).proto, (*flow).flags, (*flow).backend_id, (*flow).service_id) };
    if proto != TCP {
        return;
    }
    // Where its beginning was not counted, an end would leave fewer than no connections open.
    if flags & flag::RESUMED == 0 {
        ended_outside(backend_id, service_id, result);
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
/// 0 if it was somebody else's by now, or with [`IF_SILENT`] has seen a packet meanwhile, else 1.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn retire(hook: u32, slot: u32, seen: u32, result: u32) -> u32 {
    let Some(flow) = FLOWS.get_ptr_mut(slot) else {
        return 0;
    };
    let serial = serial_of(seen);
    if !swap(flow, seen, version(serial, state::BUSY)) {
        return 0;
    }
    if result & IF_SILENT != 0 {
        let now = clock::now();
        // SAFETY: a live array element, which is ours while it is busy.
        let (expired, evictable) = unsafe { ((*flow).is_expired(now), (*flow).is_evictable(now)) };
        if !expired && !evictable {
            publish(flow, seen);
            return 0;
        }
    }
    if state_of(seen) == state::LIVE {
        tell(hook, flow, (result & 0xff) as u8);
    }
    forget(slot, serial, role::FRONT);
    forget(slot, serial, role::MIDDLE);
    forget(slot, serial, role::BACK);
    publish(flow, version(serial, state::FREE));
    1
}

/// Beside a result: only if the flow is silent still, once nobody else can change it.
pub const IF_SILENT: u32 = 1 << 8;

/// Removes a tuple if it leads to this flow, and not to a later one.
#[inline(never)]
fn forget(slot: u32, serial: u32, role: u32) {
    if !aim_at(slot, role) {
        return;
    }
    let Some(key) = sight::key() else { return };
    let entry = entry(key);
    if entry.slot == slot && entry.serial() == serial {
        let _ = TUPLES.remove(key);
    }
}

/// Makes the key of one of a flow's tuples; false if it has no such tuple.
#[inline(always)]
fn aim_at(slot: u32, role: u32) -> bool {
    let Some(flow) = FLOWS.get_ptr(slot) else {
        return false;
    };
    // SAFETY: a live array element, which is ours.
    let flow = unsafe { &*flow };
    let proto = flow.proto as u32;
    let (client_port, backend_port) = (flow.client_port.0 as u32, flow.backend_port.0 as u32);
    match role {
        role::FRONT => sight::aim(&flow.client, client_port, &flow.vip, flow.vip_port.0 as u32, proto),
        role::MIDDLE => sight::aim(&flow.client, client_port, &flow.backend, backend_port, proto),
        _ => {
            if flow.source_port.0 == 0 {
                return false;
            }
            sight::aim(
                &flow.backend,
                backend_port,
                &flow.source,
                flow.source_port.0 as u32,
                proto,
            );
        }
    }
    true
}

/// Lets one of a flow's tuples lead to it, whatever it led to before; false if there is no room.
#[inline(never)]
pub fn lead(slot: u32, serial: u32, role: u32) -> bool {
    if !aim_at(slot, role) {
        return false;
    }
    match sight::key() {
        Some(key) => TUPLES
            .insert(key, &TupleEntry::new(slot, serial, role), BPF_ANY as u64)
            .is_ok(),
        None => false,
    }
}

/// No slot.
pub const NO_SLOT: u32 = u32::MAX;

/// Takes a slot for a new flow, which is busy then; [`NO_SLOT`] where the hand finds none that may be taken.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn take(hook: u32) -> u32 {
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
    let mut found = NO_SLOT;
    let mut found_seen = 0;
    let mut action = action::EVICTED;
    let mut look = 0;
    while look < LOOKS {
        // With a relaxed order the compiler takes the instruction that returns nothing, and its operand for the result.
        // SAFETY: eight aligned bytes of a live array element.
        let turn = unsafe { atomic_xadd::<u64, u64, { AtomicOrdering::AcqRel }>(hand, 1) };
        let slot = slot_at(turn, look, slots);
        look += 1;
        let Some(flow) = FLOWS.get_ptr(slot) else {
            continue;
        };
        // SAFETY: a live array element; what changes after this is noticed by the swap.
        let seen = unsafe { core::ptr::read_volatile(&raw const (*flow).version) };
        // SAFETY: as above.
        let flow = unsafe { &*flow };
        if state_of(seen) == state::FREE {
            found = slot;
            found_seen = seen;
            action = NO_ACTION;
            break;
        }
        if state_of(seen) == state::BUSY {
            continue;
        }
        if flow.is_expired(now) {
            found = slot;
            found_seen = seen;
            action = action::RECLAIMED;
            break;
        }
        if found == NO_SLOT && flow.is_evictable(now) {
            found = slot;
            found_seen = seen;
        }
    }
    let Some(flow) = FLOWS.get_ptr_mut(found) else {
        return NO_SLOT;
    };
    if action != NO_ACTION {
        // SAFETY: as above.
        let result = unsafe { (*flow).outcome_of_silence() } as u32;
        // Somebody else may have been faster: then the packet is lost, and comes again.
        if retire(hook, found, found_seen, result | IF_SILENT) == 0 {
            return NO_SLOT;
        }
        count(hook, action);
    }
    if own(flow, version(serial_of(found_seen), state::FREE)) {
        found
    } else {
        NO_SLOT
    }
}

/// A free slot was found: nothing had to be given up.
const NO_ACTION: u32 = u32::MAX;

/// Owns a free slot, for a flow with the next serial number.
#[inline(always)]
fn own(flow: *mut Flow, free: u32) -> bool {
    let next = (serial_of(free) + 1) & SERIAL_MASK;
    // 0 is the serial number of entries that lead nowhere.
    let next = if next == 0 { 1 } else { next };
    swap(flow, free, version(next, state::BUSY))
}
