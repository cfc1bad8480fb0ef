//! The kernel programs of Evenkeel: entry points, the licence and the panic handler, on one screen.
//!
//! Modules in reading order: [`maps`] and [`globals`] (state), [`ctx`] (reading and writing socket contexts),
//! [`lookup`] (frontend → backend), [`connect`], [`datagram`], [`peername`] (the address hooks), [`sock_ops`] and
//! [`release`] (the life of a connection), [`mptcp`] (its two sockets), [`tc`] (packets), [`emit`] and [`count`] (what userspace hears).
//!
//! Observe mode loads `sock_ops`, `sock_release`, `tc_ingress` and `tc_egress` alone; none of them stores to its context.

#![no_std]
#![no_main]
#![feature(core_intrinsics)]
#![expect(
    internal_features,
    reason = "atomic_xadd is the only way to a `lock` addition with its result unused"
)]

mod connect;
mod count;
mod ctx;
mod datagram;
mod emit;
mod globals;
mod lookup;
mod maps;
mod mptcp;
mod peername;
mod release;
mod sock_ops;
mod tc;

use aya_ebpf::{
    macros::{cgroup_sock, cgroup_sock_addr, classifier, sock_ops},
    programs::{SockAddrContext, SockContext, SockOpsContext, TcContext},
};
use ctx::Family;
use lb_common::{counter::hook, packet};

#[cgroup_sock_addr(connect4)]
fn connect4(ctx: SockAddrContext) -> i32 {
    connect::connect(&ctx, Family::V4, hook::CONNECT4)
}

#[cgroup_sock_addr(connect6)]
fn connect6(ctx: SockAddrContext) -> i32 {
    connect::connect(&ctx, Family::V6, hook::CONNECT6)
}

#[cgroup_sock_addr(sendmsg4)]
fn sendmsg4(ctx: SockAddrContext) -> i32 {
    datagram::send(&ctx, Family::V4, hook::SENDMSG4)
}

#[cgroup_sock_addr(sendmsg6)]
fn sendmsg6(ctx: SockAddrContext) -> i32 {
    datagram::send(&ctx, Family::V6, hook::SENDMSG6)
}

#[cgroup_sock_addr(recvmsg4)]
fn recvmsg4(ctx: SockAddrContext) -> i32 {
    datagram::receive(&ctx, Family::V4, hook::RECVMSG4)
}

#[cgroup_sock_addr(recvmsg6)]
fn recvmsg6(ctx: SockAddrContext) -> i32 {
    datagram::receive(&ctx, Family::V6, hook::RECVMSG6)
}

#[cgroup_sock_addr(getpeername4)]
fn getpeername4(ctx: SockAddrContext) -> i32 {
    peername::answer(&ctx, Family::V4, hook::GETPEERNAME4)
}

#[cgroup_sock_addr(getpeername6)]
fn getpeername6(ctx: SockAddrContext) -> i32 {
    peername::answer(&ctx, Family::V6, hook::GETPEERNAME6)
}

#[sock_ops]
fn sock_ops(ctx: SockOpsContext) -> u32 {
    sock_ops::follow(&ctx)
}

#[cgroup_sock(sock_release)]
fn sock_release(ctx: SockContext) -> i32 {
    release::release(&ctx)
}

#[classifier]
fn tc_ingress(ctx: TcContext) -> i32 {
    tc::observe(&ctx, tc::INGRESS)
}

#[classifier]
fn tc_egress(ctx: TcContext) -> i32 {
    tc::observe(&ctx, tc::EGRESS)
}

#[classifier]
fn lb_ingress(ctx: TcContext) -> i32 {
    tc::ingress(&ctx, packet::ETHERNET as u32)
}

#[classifier]
fn lb_egress(ctx: TcContext) -> i32 {
    tc::egress(&ctx, packet::ETHERNET as u32)
}

#[classifier]
fn raw_ingress(ctx: TcContext) -> i32 {
    tc::ingress(&ctx, 0)
}

#[classifier]
fn raw_egress(ctx: TcContext) -> i32 {
    tc::egress(&ctx, 0)
}

/// The kernel grants some of the helpers used here to GPL-compatible programs only.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";

/// Never reached: a test scans the object for panic paths.
#[cfg(not(test))]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
