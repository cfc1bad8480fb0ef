//! `sock_ops`: the life of a TCP connection, between its SYN and its end.
//!
//! The program runs some nine times a connection, on both ends; all but three callbacks of client sockets leave at
//! once. It stores nothing to its context.

use crate::{
    count::{add, count},
    ctx, emit, globals, lookup,
    maps::{BACKEND_STATS, DIALS, SERVICE_STATS, SOCKETS},
};
use aya_ebpf::{
    bindings::{
        BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB, BPF_SOCK_OPS_STATE_CB, BPF_SOCK_OPS_STATE_CB_FLAG,
        BPF_SOCK_OPS_TCP_CONNECT_CB, bpf_sock_ops,
    },
    helpers::{bpf_get_netns_cookie, bpf_get_socket_cookie, bpf_skc_to_tcp_sock, bpf_sock_ops_cb_flags_set},
    programs::SockOpsContext,
};
use lb_common::{
    abi::TCP,
    addr::{Addr, Port},
    counter::{action, hook},
    event::outcome,
    frontend::FrontendKey,
    maps::feature,
    socket::{SocketState, mark, phase},
};

const AF_INET: u32 = 2;
const TCP_CLOSE: u32 = 7;
const ECONNREFUSED: u32 = 111;
const ETIMEDOUT: u32 = 110;
const ENETUNREACH: u32 = 101;
const EHOSTUNREACH: u32 = 113;

macro_rules! read {
    ($ops:expr, $($field:tt)+) => {
        // SAFETY: the hook's context is valid while the program runs.
        unsafe { core::ptr::read_volatile(&raw const (*$ops).$($field)+) }
    };
}

#[inline(always)]
pub fn follow(ctx: &SockOpsContext) -> u32 {
    let ops = ctx.ops;
    match read!(ops, op) {
        BPF_SOCK_OPS_TCP_CONNECT_CB => dialling(ops),
        BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB => established(ops),
        BPF_SOCK_OPS_STATE_CB => {
            // SAFETY: the arguments of a state callback are the old and the new state.
            let new_state = unsafe { core::ptr::read_volatile(&raw const (*ops).__bindgen_anon_1.args[1]) };
            if new_state == TCP_CLOSE {
                closed(ops);
            }
        }
        _ => {}
    }
    0
}

/// The state of the callback's socket.
#[inline(always)]
fn state(ops: *mut bpf_sock_ops) -> Option<&'static mut SocketState> {
    // SAFETY: the helper takes the program's context.
    let cookie = unsafe { bpf_get_socket_cookie(ops.cast()) };
    // SAFETY: an element of the map that only this socket's own calls change.
    SOCKETS.get_ptr_mut(&cookie).map(|state| unsafe { &mut *state })
}

/// The SYN is about to leave: the socket has its source address and port now.
#[inline(always)]
fn dialling(ops: *mut bpf_sock_ops) {
    if globals::has(feature::OBSERVE) && !discover(ops) {
        count(hook::SOCK_OPS, action::MISS);
        return;
    }
    let Some(state) = state(ops) else { return };
    if state.phase != phase::DIALLED {
        return;
    }
    state.client = local(ops);
    state.client_port = Port::new(read!(ops, local_port) as u16);
    state.start_ns = ctx::now();
    state.phase = phase::SYN_SENT;
    // Other programs' flags stay.
    let flags = read!(ops, bpf_sock_ops_cb_flags) | BPF_SOCK_OPS_STATE_CB_FLAG;
    // SAFETY: the helper takes the program's context.
    unsafe { bpf_sock_ops_cb_flags_set(ops, flags as i32) };
}

/// Observe mode: no connect hook ran, so the frontend, or the backend itself, is found by the address that the SYN goes to.
#[inline(always)]
fn discover(ops: *mut bpf_sock_ops) -> bool {
    let vip = remote(ops);
    let vip_port = Port(remote_port(ops));
    let (service_id, backend_id, marks) = if let Some(frontend) = lookup::frontend(vip, vip_port, TCP) {
        // SAFETY: an element of the map; removed elements stay readable until the program ends.
        (unsafe { (*frontend).service_id }, 0, 0)
    } else if let Some((service_id, backend_id)) = lookup::endpoint(vip, vip_port) {
        (service_id, backend_id, mark::DIRECT)
    } else {
        return false;
    };
    let client = local(ops);
    let client_port = Port::new(read!(ops, local_port) as u16);
    let state = SocketState {
        vip,
        client,
        start_ns: 0,
        established_ns: 0,
        service_id,
        backend_id,
        vip_port,
        client_port,
        proto: TCP,
        phase: phase::DIALLED,
        marks,
    };
    // SAFETY: the helper takes the program's context.
    let cookie = unsafe { bpf_get_socket_cookie(ops.cast()) };
    if SOCKETS.insert(&cookie, &state, 0).is_err() {
        count(hook::SOCK_OPS, action::STATE_FULL);
        return false;
    }
    if globals::has(feature::PACKETS) {
        // A packet that is routed or bridged loses its socket: then its source tells whose it is.
        let _ = DIALS.insert(&FrontendKey::new(client, client_port, TCP), &cookie, 0);
    }
    // SAFETY: live elements of their arrays.
    unsafe {
        if let Some(stats) = SERVICE_STATS.get_ptr_mut(service_id) {
            if marks & mark::DIRECT != 0 {
                add(&raw mut (*stats).direct);
            } else {
                add(&raw mut (*stats).connects);
            }
        }
        if marks & mark::DIRECT != 0
            && let Some(stats) = BACKEND_STATS.get_ptr_mut(backend_id)
        {
            add(&raw mut (*stats).direct.connects);
        }
    }
    true
}

#[inline(always)]
fn established(ops: *mut bpf_sock_ops) {
    let Some(state) = state(ops) else { return };
    if state.phase != phase::SYN_SENT {
        return;
    }
    state.established_ns = ctx::now();
    state.phase = phase::OPEN;
    emit::established(state);
}

/// The kernel is done with the connection: a failed attempt, a reset, or a close by the peer and then by us.
#[inline(always)]
fn closed(ops: *mut bpf_sock_ops) {
    let Some(state) = state(ops) else { return };
    let (result, errno) = match state.phase {
        phase::OPEN => (outcome::ESTABLISHED, 0),
        phase::SYN_SENT => {
            let errno = socket_error(ops);
            let result = match errno {
                ECONNREFUSED => outcome::REFUSED,
                ETIMEDOUT => outcome::TIMED_OUT,
                EHOSTUNREACH | ENETUNREACH => outcome::UNREACHABLE,
                0 => outcome::ABANDONED,
                _ => outcome::OTHER,
            };
            (result, errno)
        }
        _ => return,
    };
    // SAFETY: the helper takes the program's context.
    let netns_cookie = unsafe { bpf_get_netns_cookie(ops.cast()) };
    emit::connection(hook::SOCK_OPS, netns_cookie, state, result, errno);
    // SAFETY: the helper takes the program's context.
    emit::forget_source(state, unsafe { bpf_get_socket_cookie(ops.cast()) });
}

/// The socket's pending error: sock_ops has no field for it, so it is read from `struct sock` at the offset that the
/// loader found in the running kernel's BTF.
#[inline(always)]
fn socket_error(ops: *mut bpf_sock_ops) -> u32 {
    let offset = globals::sk_err_offset();
    if offset == 0 {
        return 0;
    }
    // SAFETY: the union's members are the same eight bytes.
    let sk = unsafe { (*ops).__bindgen_anon_2.sk };
    if sk.is_null() {
        return 0;
    }
    // SAFETY: the helper takes a socket of the context, checked for null.
    let tcp = unsafe { bpf_skc_to_tcp_sock(sk.cast()) };
    if tcp.is_null() {
        return 0;
    }
    // SAFETY: `struct tcp_sock` begins with `struct sock`; the verifier checks the offset against the kernel's types,
    // and a fault reads as zero.
    unsafe { core::ptr::read_volatile(tcp.cast::<u8>().add(offset).cast::<u32>()) }
}

/// Both forms are read, then one is chosen: a choice between two reads becomes one read through a chosen pointer, and
/// the verifier refuses a pointer computed from a context ("dereference of modified ctx ptr").
macro_rules! end {
    ($ops:expr, $ip4:ident, $ip6:ident) => {{
        let v4 = read!($ops, $ip4);
        let v6 = Addr {
            words: [
                read!($ops, $ip6[0]),
                read!($ops, $ip6[1]),
                read!($ops, $ip6[2]),
                read!($ops, $ip6[3]),
            ],
        };
        if read!($ops, family) == AF_INET {
            Addr::from_v4(v4)
        } else {
            v6
        }
    }};
}

/// The socket's own address.
#[inline(always)]
fn local(ops: *mut bpf_sock_ops) -> Addr {
    end!(ops, local_ip4, local_ip6)
}

/// The peer's address.
#[inline(always)]
fn remote(ops: *mut bpf_sock_ops) -> Addr {
    end!(ops, remote_ip4, remote_ip6)
}

/// The remote port, network order. The kernel gives it in network order in a word, that is in the word's upper half
/// on little-endian machines.
#[inline(always)]
fn remote_port(ops: *mut bpf_sock_ops) -> u16 {
    let word = read!(ops, remote_port);
    (u32::from_be(word) as u16).to_be()
}
