//! `connect4` and `connect6`: TCP, MPTCP and connected UDP sockets.
//!
//! Every connect sets or clears the socket's state, so that a socket which first dialled a frontend and then something
//! else shows the right peer.

use crate::{
    count::{add, count},
    ctx::{self, FAIL, Family, PASS},
    datagram, emit, globals,
    lookup::{self, By, Chosen},
    maps::{BACKEND_STATS, LISTS, SERVICE_STATS, SOCKETS},
    mptcp::IPPROTO_MPTCP,
};
use aya_ebpf::{bindings::BPF_NOEXIST, helpers::bpf_set_retval, programs::SockAddrContext};
use aya_log_ebpf::debug;
use lb_common::{
    abi::{TCP, UDP},
    addr::{Addr, Port},
    counter::action,
    event::outcome,
    frontend::{Frontend, flag},
    maps::feature,
    socket::{SocketState, phase},
};

const ECONNREFUSED: i32 = 111;
const EHOSTUNREACH: i32 = 113;
const ENOBUFS: i32 = 105;

#[inline(always)]
pub fn connect(ctx: &SockAddrContext, family: Family, hook: u32) -> i32 {
    let protocol = ctx::protocol(ctx);
    let (proto, by) = if protocol == TCP as u32 || protocol == IPPROTO_MPTCP {
        (TCP, By::Load)
    } else if protocol == UDP as u32 {
        (UDP, By::Hash)
    } else {
        return PASS;
    };
    let (vip, vip_port) = ctx::address(ctx, family);
    let Some(frontend) = lookup::frontend(vip, vip_port, proto) else {
        count(hook, action::MISS);
        forget(ctx, hook, proto, vip, vip_port);
        return PASS;
    };
    if lookup::opted_out() {
        count(hook, action::OPTED_OUT);
        forget(ctx, hook, proto, vip, vip_port);
        return PASS;
    }
    // SAFETY: an element of the map; removed elements stay readable until the program ends.
    let frontend = unsafe { &*frontend };
    let cookie = ctx::socket_cookie(ctx);
    let Some(chosen) = lookup::choose_for_socket(ctx, frontend, cookie, by) else {
        forget(ctx, hook, proto, vip, vip_port);
        return refuse(hook, frontend);
    };
    let Some((addr, port)) = lookup::address(chosen.id) else {
        count(hook, action::INCONSISTENT);
        return PASS;
    };
    if family == Family::V4 && !addr.is_v4() {
        count(hook, action::INCONSISTENT);
        return PASS;
    }

    if globals::has(feature::STATE) {
        if proto == UDP && !datagram::remember(cookie, vip, vip_port, addr, port, chosen.id).is_kept() {
            count(hook, action::STATE_FULL);
            return fail(ENOBUFS);
        }
        let state = SocketState {
            vip,
            client: Addr::ZERO,
            // A TCP connection's time begins when its SYN leaves, which `sock_ops` notes: a clock read costs a tenth of a
            // microsecond, and an agent that does not follow connections has no use for it.
            start_ns: if proto == UDP { ctx::now() } else { 0 },
            established_ns: 0,
            service_id: frontend.service_id,
            backend_id: chosen.id,
            vip_port,
            client_port: Port(0),
            proto,
            phase: match protocol {
                IPPROTO_MPTCP => phase::UNTRACKED,
                _ if proto == UDP => phase::OPEN,
                _ => phase::DIALLED,
            },
            marks: 0,
        };
        if !keep(ctx, hook, cookie, &state) {
            // A connection works without its state, only `getpeername` shows the backend.
            count(hook, action::STATE_FULL);
        } else if proto == UDP {
            // Nothing answers a UDP connect: it is open at once.
            emit::established(&state);
        }
    }
    started(frontend.service_id, &chosen);
    count(hook, action::TRANSLATED);
    debug!(ctx, "service {} backend {}", frontend.service_id, chosen.id);
    ctx::set_address(ctx, family, &addr, port);
    PASS
}

/// Counts a new connection or flow for its Service and backend.
#[inline(always)]
pub fn started(service_id: u32, chosen: &Chosen) {
    // SAFETY: each pointer is a live array element of its map.
    unsafe {
        // `NO_ENTRY` is beyond the array, and then there is nothing to count on.
        if let Some(entry) = LISTS.get_ptr_mut(chosen.entry) {
            add(&raw mut (*entry).c);
        }
        if let Some(stats) = BACKEND_STATS.get_ptr_mut(chosen.id) {
            add(&raw mut (*stats).inside.connects);
        }
        if let Some(stats) = SERVICE_STATS.get_ptr_mut(service_id) {
            add(&raw mut (*stats).connects);
        }
    }
}

/// Answers a frontend without a usable backend, at once.
#[inline(always)]
pub fn refuse(hook: u32, frontend: &Frontend) -> i32 {
    if let Some(stats) = SERVICE_STATS.get_ptr_mut(frontend.service_id) {
        // SAFETY: a live array element.
        unsafe { add(&raw mut (*stats).rejected) };
    }
    if frontend.flags & flag::UNREACHABLE_WHEN_EMPTY != 0 {
        count(hook, action::UNREACHABLE);
        fail(EHOSTUNREACH)
    } else {
        count(hook, action::REFUSED);
        fail(ECONNREFUSED)
    }
}

/// Fails the system call with `errno`; without the helper it would be EPERM.
#[inline(always)]
pub fn fail(errno: i32) -> i32 {
    // SAFETY: the helper takes a number.
    unsafe { bpf_set_retval(-errno) };
    FAIL
}

/// Keeps the socket's state. False if the map is full.
#[inline(always)]
fn keep(ctx: &SockAddrContext, hook: u32, cookie: u64, state: &SocketState) -> bool {
    if SOCKETS.insert(&cookie, state, BPF_NOEXIST as u64).is_ok() {
        return true;
    }
    // Either the socket has dialled before, or the map is full.
    end_earlier(ctx, hook, cookie);
    SOCKETS.insert(&cookie, state, 0).is_ok()
}

/// Writes the record of an earlier dial of the same socket that no socket callback has ended.
#[inline(always)]
fn end_earlier(ctx: &SockAddrContext, hook: u32, cookie: u64) {
    if let Some(earlier) = SOCKETS.get_ptr_mut(&cookie) {
        // SAFETY: an element of the map that only this socket's own calls change.
        let earlier = unsafe { &mut *earlier };
        let result = match earlier.phase {
            // An IPv6 dial stores its destination before it looks for a route: this hook cannot tell the two apart.
            phase::DIALLED if !earlier.vip.is_v4() => outcome::OTHER,
            phase::DIALLED if ctx::has_destination(ctx) => outcome::NO_LOCAL_PORT,
            phase::DIALLED => outcome::UNREACHABLE,
            phase::SYN_SENT => outcome::ABANDONED,
            phase::OPEN => outcome::ESTABLISHED,
            _ => return,
        };
        emit::connection(hook, ctx::netns_cookie(ctx), earlier, result, 0);
    }
}

/// Clears what the socket remembers of an earlier dial: it goes elsewhere now.
#[inline(always)]
fn forget(ctx: &SockAddrContext, hook: u32, proto: u8, addr: Addr, port: Port) {
    if !globals::has(feature::STATE) {
        return;
    }
    let cookie = ctx::socket_cookie(ctx);
    if SOCKETS.get_ptr(&cookie).is_some() {
        end_earlier(ctx, hook, cookie);
        let _ = SOCKETS.remove(&cookie);
    }
    if proto == UDP {
        datagram::forget(cookie, addr, port);
    }
}
