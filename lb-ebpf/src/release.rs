//! `sock_release`: the socket is closed by its application; its state ends here.

use crate::{
    emit, globals,
    maps::{SOCKETS, UDP_REVERSE, UDP_SOCKETS},
    mptcp::{self, IPPROTO_MPTCP},
};
use aya_ebpf::{
    helpers::{bpf_get_netns_cookie, bpf_get_socket_cookie},
    programs::SockContext,
};
use lb_common::{
    abi::{TCP, UDP},
    counter::hook,
    event::outcome,
    socket::{CHAIN_WALK, ReverseKey, SocketState, phase},
};

const PASS: i32 = 1;
const AF_INET: u32 = 2;

#[inline(always)]
pub fn release(ctx: &SockContext) -> i32 {
    // SAFETY: the helper takes the program's context.
    let mut cookie = unsafe { bpf_get_socket_cookie(ctx.sock.cast()) };
    // SAFETY: a field of the context.
    let protocol = unsafe { core::ptr::read_volatile(&raw const (*ctx.sock).protocol) };
    if protocol == IPPROTO_MPTCP {
        cookie = mptcp::subflow_cookie(ctx.sock.cast());
    }
    if let Some(state) = SOCKETS.get_ptr_mut(&cookie) {
        // SAFETY: an element of the map that only this socket's own calls change.
        let state = unsafe { &mut *state };
        end(ctx, state);
        emit::forget_source(state, cookie);
        let _ = SOCKETS.remove(&cookie);
    }
    if protocol == UDP as u32 {
        cut_chain(cookie);
    }
    PASS
}

#[inline(always)]
fn end(ctx: &SockContext, state: &mut SocketState) {
    let result = match state.phase {
        phase::OPEN => outcome::ESTABLISHED,
        // The application did not wait for the answer.
        phase::SYN_SENT => outcome::ABANDONED,
        // No SYN ever left. `connect` fails with EADDRNOTAVAIL after its route lookup, and with ENETUNREACH in it.
        phase::DIALLED if state.proto == TCP => {
            if found_route(ctx, state.vip.is_v4()) {
                outcome::NO_LOCAL_PORT
            } else {
                outcome::UNREACHABLE
            }
        }
        _ => return,
    };
    // SAFETY: the helper takes the program's context.
    let netns_cookie = unsafe { bpf_get_netns_cookie(ctx.sock.cast()) };
    // A socket that closes is the close of its connection, for both ends see it within a round trip; a record that
    // waited for the last acknowledgement would need the state to outlive the socket.
    emit::connection(hook::SOCK_RELEASE, netns_cookie, state, result, 0);
}

/// True if the failed connect had found its route: IPv4 stores the destination once it has one, IPv6 stores the
/// destination before, but the route itself (`sk_dst_cache`) before it looks for a port.
#[inline(always)]
fn found_route(ctx: &SockContext, dialled_v4: bool) -> bool {
    // SAFETY: fields of the context.
    unsafe {
        // An IPv6 socket that dials an IPv4-mapped address connects as an IPv4 one does.
        if dialled_v4 || core::ptr::read_volatile(&raw const (*ctx.sock).family) == AF_INET {
            return core::ptr::read_volatile(&raw const (*ctx.sock).dst_ip4) != 0;
        }
    }
    let offset = globals::sk_dst_offset();
    if offset == 0 {
        return true;
    }
    // SAFETY: the context of this program type is the `struct sock` itself.
    unsafe { mptcp::word(ctx.sock.cast::<u8>().add(offset).cast()) != 0 }
}

/// Removes the reverse entries of a UDP socket; the agent's sweep takes those beyond the walk.
#[inline(always)]
fn cut_chain(cookie: u64) {
    let Some(head) = UDP_SOCKETS.get_ptr(&cookie) else {
        return;
    };
    // SAFETY: an element of the map.
    let (mut addr, mut port) = unsafe { ((*head).addr, (*head).port) };
    let mut step = 0;
    while step < CHAIN_WALK && port.0 != 0 {
        let key = ReverseKey::new(cookie, addr, port);
        let Some(entry) = UDP_REVERSE.get_ptr(&key) else {
            break;
        };
        // SAFETY: an element of the map.
        unsafe {
            addr = (*entry).next_addr;
            port = (*entry).next_port;
        }
        let _ = UDP_REVERSE.remove(&key);
        step += 1;
    }
    let _ = UDP_SOCKETS.remove(&cookie);
}
