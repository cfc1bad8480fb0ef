//! Counting: per-CPU counters by hook and action, and shared counters by Service and backend.

use crate::maps::{BACKEND_STATS, COUNTERS, SERVICE_STATS};
use lb_common::{counter, event::outcome};

/// Adds one to the counter of (hook, action), and returns its new value on this CPU.
#[inline(always)]
pub fn count(hook: u32, action: u32) -> u64 {
    match COUNTERS.get_ptr_mut(counter::index(hook, action)) {
        // SAFETY: the pointer is this CPU's own slot, not null (checked by the match, which the verifier sees), and
        // programs are not preempted by themselves on one CPU.
        Some(slot) => unsafe {
            let value = (*slot).wrapping_add(1);
            *slot = value;
            value
        },
        None => 0,
    }
}

/// Adds one to a counter that all CPUs share.
///
/// # Safety
///
/// `counter` points to eight aligned bytes of a map value.
#[inline(always)]
pub unsafe fn add(counter: *mut u64) {
    // `AtomicU64::fetch_add` does not compile for the target: its result would need an instruction that the base
    // instruction set lacks. With the result unused this becomes `lock *(u64 *) += 1`.
    // SAFETY: the caller's.
    unsafe {
        core::intrinsics::atomic_xadd::<u64, u64, { core::intrinsics::AtomicOrdering::Relaxed }>(counter, 1);
    }
}

/// Counts a connection from outside as established, for its backend and Service.
#[inline(always)]
pub fn established_outside(backend_id: u32, service_id: u32) {
    // SAFETY: live elements of their arrays.
    unsafe {
        if let Some(stats) = BACKEND_STATS.get_ptr_mut(backend_id) {
            add(&raw mut (*stats).outside.established);
        }
        if let Some(stats) = SERVICE_STATS.get_ptr_mut(service_id) {
            add(&raw mut (*stats).established);
        }
    }
}

/// Counts the end of a connection from outside: it was established, or failed with another of [`outcome`].
#[inline(always)]
pub fn ended_outside(backend_id: u32, service_id: u32, result: u8) {
    // SAFETY: live elements of their arrays; the index of `failed` is masked into its length.
    unsafe {
        if let Some(stats) = BACKEND_STATS.get_ptr_mut(backend_id) {
            if result == outcome::ESTABLISHED {
                add(&raw mut (*stats).outside.closed);
            } else {
                add(&raw mut (*stats).outside.failed);
            }
        }
        if let Some(stats) = SERVICE_STATS.get_ptr_mut(service_id) {
            if result == outcome::ESTABLISHED {
                add(&raw mut (*stats).closed);
            } else {
                let failed = (&raw mut (*stats).failed).cast::<u64>();
                add(failed.add((result & 7) as usize));
            }
        }
    }
}
