//! The flow clock: the monotonic clock and what tests add to it.

use aya_ebpf::helpers::{bpf_ktime_get_coarse_ns, bpf_ktime_get_ns};

use crate::maps::SETTINGS;

/// What tests add, in nanoseconds.
#[inline(always)]
fn offset() -> u64 {
    match SETTINGS.get_ptr(0) {
        // SAFETY: a live array element.
        Some(settings) => unsafe { (*settings).clock_offset_ns },
        None => 0,
    }
}

/// The time, in nanoseconds.
#[inline(always)]
pub fn now() -> u64 {
    // SAFETY: the helper takes nothing.
    unsafe { bpf_ktime_get_ns() }.wrapping_add(offset())
}

/// The time as of the last tick, in nanoseconds: good for how long a flow is silent, and cheap enough for every packet.
///
/// # Kernel
/// 5.11.
#[inline(always)]
pub fn tick() -> u64 {
    // SAFETY: the helper takes nothing.
    unsafe { bpf_ktime_get_coarse_ns() }.wrapping_add(offset())
}
