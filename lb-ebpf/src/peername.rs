//! `getpeername4/6`: the application sees the address that it dialled.

use crate::{
    count::count,
    ctx::{self, Family, PASS},
    maps::SOCKETS,
};
use aya_ebpf::programs::SockAddrContext;
use lb_common::counter::action;

#[inline(always)]
pub fn answer(ctx: &SockAddrContext, family: Family, hook: u32) -> i32 {
    let cookie = ctx::socket_cookie(ctx);
    let Some(state) = SOCKETS.get_ptr(&cookie) else {
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
