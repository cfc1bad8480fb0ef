//! The TC programs. Today they observe: packets that begin or end a TCP connection with a frontend or a backend are
//! recorded, and every packet passes untouched. Rewriting has its place beside [`parse`]: forward, reverse, ICMP.

mod parse;

use crate::{
    count::count,
    ctx, emit,
    maps::{BACKEND_INDEX, FRONTENDS, SOCKETS},
};
use aya_ebpf::{helpers::bpf_get_socket_cookie, programs::TcContext};
use lb_common::{
    abi::TCP,
    addr::{Addr, Port},
    counter::{action, hook},
    event::{PacketRecord, kind, tcp_flag},
    frontend::FrontendKey,
};

/// Direction: into the node.
pub const INGRESS: u8 = 0;
/// Direction: out of the node.
pub const EGRESS: u8 = 1;

/// `TC_ACT_UNSPEC`, and `TCX_NEXT`: the next program decides.
const NEXT: i32 = -1;

#[inline(always)]
pub fn observe(ctx: &TcContext, direction: u8) -> i32 {
    let Some(segment) = parse::segment(ctx) else {
        return NEXT;
    };
    if segment.flags & (tcp_flag::SYN | tcp_flag::FIN | tcp_flag::RST) == 0 {
        return NEXT;
    }
    if !is_ours(segment.dst, segment.dst_port) && !is_ours(segment.src, segment.src_port) {
        count(hook::TC, action::MISS);
        return NEXT;
    }
    if direction == EGRESS && segment.flags & tcp_flag::SYN != 0 && is_followed(ctx) {
        return NEXT;
    }
    // SAFETY: a field of the context.
    let ifindex = unsafe { core::ptr::read_volatile(&raw const (*ctx.skb.skb).ifindex) };
    let time_ns = ctx::now();
    emit::record::<PacketRecord>(hook::TC, |record| {
        // SAFETY: the ring buffer's reservation of the record's size, aligned to eight bytes.
        unsafe {
            (*record).kind = kind::PACKET;
            (*record).ifindex = ifindex;
            (*record).time_ns = time_ns;
            (*record).src = segment.src;
            (*record).dst = segment.dst;
            (*record).src_port = segment.src_port;
            (*record).dst_port = segment.dst_port;
            (*record).flags = segment.flags;
            (*record).proto = TCP;
            (*record).direction = direction;
            (*record).pad = 0;
        }
    });
    NEXT
}

/// True if the packet's own socket is followed by the socket hooks: its connection is recorded there.
#[inline(always)]
fn is_followed(ctx: &TcContext) -> bool {
    // SAFETY: the helper takes the program's context; without a socket it gives 0.
    let cookie = unsafe { bpf_get_socket_cookie(ctx.skb.skb.cast()) };
    cookie != 0 && SOCKETS.get_ptr(&cookie).is_some()
}

/// True if the address is a frontend's or a backend's.
#[inline(always)]
fn is_ours(addr: Addr, port: Port) -> bool {
    let key = FrontendKey::new(addr, port, TCP);
    FRONTENDS.get_ptr(&key).is_some() || BACKEND_INDEX.get_ptr(&key).is_some()
}
