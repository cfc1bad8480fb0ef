//! Writing records into the ring buffer, with few wake-ups and every loss counted.

use crate::{
    count::{add, count},
    ctx, globals,
    maps::{BACKEND_STATS, DIALS, EVENTS, SERVICE_STATS},
};
use aya_ebpf::bindings::{BPF_RB_FORCE_WAKEUP, BPF_RB_NO_WAKEUP};
use lb_common::{
    counter::action,
    event::{ConnRecord, RECORDS_PER_WAKEUP, kind, outcome},
    frontend::FrontendKey,
    maps::feature,
    socket::{SocketState, mark, phase},
};

/// Writes a record of type `T`, filled by `fill`.
#[inline(always)]
pub fn record<T>(hook: u32, fill: impl FnOnce(*mut T)) {
    let Some(mut entry) = EVENTS.reserve_bytes(size_of::<T>(), 0) else {
        count(hook, action::RECORD_LOST);
        return;
    };
    fill(entry.as_mut_ptr().cast::<T>());
    let written = count(hook, action::RECORDED);
    let flags = if written % RECORDS_PER_WAKEUP == 0 {
        BPF_RB_FORCE_WAKEUP
    } else {
        BPF_RB_NO_WAKEUP
    };
    entry.submit(flags as u64);
}

/// Whether the application dialled the backend's own address. Only observe mode follows such sockets.
#[inline(always)]
fn is_direct(state: &SocketState) -> bool {
    globals::has(feature::OBSERVE) && state.marks & mark::DIRECT != 0
}

// Apart from `count::established_outside` and `ended_outside`: one function for all, told at run time whose connections they are, makes
// kernel 6.1 verify a third more.

/// Counts a connection as established.
#[inline(always)]
pub fn established(state: &SocketState) {
    // SAFETY: live elements of their arrays.
    unsafe {
        if let Some(stats) = BACKEND_STATS.get_ptr_mut(state.backend_id) {
            if is_direct(state) {
                add(&raw mut (*stats).direct.established);
            } else {
                add(&raw mut (*stats).inside.established);
            }
        }
        if !is_direct(state)
            && let Some(stats) = SERVICE_STATS.get_ptr_mut(state.service_id)
        {
            add(&raw mut (*stats).established);
        }
    }
}

/// Ends a connection: counts its outcome, writes its record, and marks the state as recorded.
#[inline(always)]
pub fn connection(hook: u32, netns_cookie: u64, state: &mut SocketState, result: u8, errno: u32) {
    // SAFETY: live elements of their arrays; the index of `failed` is masked into its length.
    unsafe {
        let backend = BACKEND_STATS.get_ptr_mut(state.backend_id);
        let service = SERVICE_STATS.get_ptr_mut(state.service_id);
        if result == outcome::ESTABLISHED {
            if let Some(stats) = backend {
                if is_direct(state) {
                    add(&raw mut (*stats).direct.closed);
                } else {
                    add(&raw mut (*stats).inside.closed);
                }
            }
            if !is_direct(state)
                && let Some(stats) = service
            {
                add(&raw mut (*stats).closed);
            }
        } else {
            if let Some(stats) = backend {
                if is_direct(state) {
                    add(&raw mut (*stats).direct.failed);
                } else {
                    add(&raw mut (*stats).inside.failed);
                }
            }
            if !is_direct(state)
                && let Some(stats) = service
            {
                let failed = (&raw mut (*stats).failed).cast::<u64>();
                add(failed.add((result & 7) as usize));
            }
        }
    }
    let end_ns = ctx::now();
    // A dial that sent no SYN has no time of its own but its end.
    let start_ns = if state.start_ns == 0 { end_ns } else { state.start_ns };
    record::<ConnRecord>(hook, |record| {
        // SAFETY: the ring buffer's reservation of the record's size, aligned to eight bytes.
        unsafe {
            (*record).kind = kind::CONNECTION;
            (*record).errno = errno;
            (*record).start_ns = start_ns;
            (*record).established_ns = state.established_ns;
            (*record).end_ns = end_ns;
            (*record).netns_cookie = netns_cookie;
            (*record).client = state.client;
            (*record).vip = state.vip;
            (*record).service_id = state.service_id;
            (*record).backend_id = state.backend_id;
            (*record).client_port = state.client_port;
            (*record).vip_port = state.vip_port;
            (*record).proto = state.proto;
            (*record).outcome = result;
            (*record).marks = 0;
        }
    });
    state.phase = phase::RECORDED;
}

/// Forgets whose source this was, if it still is this socket's: a port is given to several sockets that dial several peers.
#[inline(always)]
pub fn forget_source(state: &SocketState, cookie: u64) {
    if !globals::has(feature::PACKETS) {
        return;
    }
    let client = FrontendKey::new(state.client, state.client_port, state.proto);
    if let Some(owner) = DIALS.get_ptr(&client)
        // SAFETY: an element of the map; removed elements stay readable until the program ends.
        && unsafe { *owner } == cookie
    {
        let _ = DIALS.remove(&client);
    }
}
