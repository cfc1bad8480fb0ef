//! `getpeername4/6`: the application sees the address that it dialled.

use crate::{
    count::count,
    ctx::{self, Family, PASS},
    maps::SOCKETS,
    mptcp::{self, IPPROTO_MPTCP},
};
use aya_ebpf::programs::SockAddrContext;
use lb_common::{counter::action, socket::SocketState};

#[inline(always)]
pub fn answer(ctx: &SockAddrContext, family: Family, hook: u32) -> i32 {
    let cookie = ctx::socket_cookie(ctx);
    let Some(state) = SOCKETS.get_ptr(&cookie).or_else(|| of_subflow(ctx)) else {
        count(hook, action::MISS);
        return PASS;
    };
    // SAFETY: an element of the map that only this socket's own calls change.
    let (vip, vip_port) = unsafe { ((*state).vip, (*state).vip_port) };
    if ctx::set_address(ctx, family, &vip, vip_port) {
        count(hook, action::TRANSLATED);
    }
    PASS
}

/// The state of an MPTCP socket, which its first subflow has.
#[inline(always)]
fn of_subflow(ctx: &SockAddrContext) -> Option<*const SocketState> {
    if ctx::protocol(ctx) != IPPROTO_MPTCP {
        return None;
    }
    // SAFETY: the kernel's own form of this context begins with the pointer to the socket.
    let socket = unsafe { mptcp::word(ctx.sock_addr.cast()) };
    SOCKETS.get_ptr(&mptcp::subflow_cookie(socket as *const _))
}
