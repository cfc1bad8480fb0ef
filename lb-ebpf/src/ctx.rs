//! Reading and writing `struct bpf_sock_addr`, word by word: the verifier refuses an address computed from a context,
//! and narrow loads of some fields on some kernels.

use aya_ebpf::{
    bindings::bpf_sock_addr,
    helpers::{bpf_get_netns_cookie, bpf_get_socket_cookie, bpf_ktime_get_ns},
    programs::SockAddrContext,
};
use lb_common::addr::{Addr, Port};

/// Which of the two address layouts a hook has.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Family {
    V4,
    V6,
}

const TCP_ESTABLISHED: u32 = 1;

/// Verdict of a hook: go on.
pub const PASS: i32 = 1;
/// Verdict of a hook: fail with what `bpf_set_retval` said.
pub const FAIL: i32 = 0;

macro_rules! read {
    ($ctx:expr, $($field:tt)+) => {
        // SAFETY: the hook's context is valid while the program runs; the field is read as the kernel lays it out.
        unsafe { core::ptr::read_volatile(&raw const (*$ctx.sock_addr).$($field)+) }
    };
}

macro_rules! write {
    ($ctx:expr, $value:expr, $($field:tt)+) => {
        // SAFETY: as for reading; the hooks that come here may write the field.
        unsafe { core::ptr::write_volatile(&raw mut (*$ctx.sock_addr).$($field)+, $value) }
    };
}

/// The address and port in the context: the destination (connect, sendmsg), the source (recvmsg), the peer.
#[inline(always)]
pub fn address(ctx: &SockAddrContext, family: Family) -> (Addr, Port) {
    let addr = match family {
        Family::V4 => Addr::from_v4(read!(ctx, user_ip4)),
        Family::V6 => Addr {
            words: [
                read!(ctx, user_ip6[0]),
                read!(ctx, user_ip6[1]),
                read!(ctx, user_ip6[2]),
                read!(ctx, user_ip6[3]),
            ],
        },
    };
    // The low half is the port in network order.
    (addr, Port(read!(ctx, user_port) as u16))
}

/// Puts another address and port in place. False, with nothing written, if the family cannot hold it.
#[inline(always)]
pub fn set_address(ctx: &SockAddrContext, family: Family, addr: &Addr, port: Port) -> bool {
    match family {
        Family::V4 => {
            if !addr.is_v4() {
                return false;
            }
            write!(ctx, addr.words[3], user_ip4);
        }
        Family::V6 => {
            write!(ctx, addr.words[0], user_ip6[0]);
            write!(ctx, addr.words[1], user_ip6[1]);
            write!(ctx, addr.words[2], user_ip6[2]);
            write!(ctx, addr.words[3], user_ip6[3]);
        }
    }
    write!(ctx, u32::from(port.0), user_port);
    true
}

/// The socket's protocol number.
#[inline(always)]
pub fn protocol(ctx: &SockAddrContext) -> u32 {
    read!(ctx, protocol)
}

/// The socket's cookie: unique while the machine is up.
#[inline(always)]
pub fn socket_cookie(ctx: &SockAddrContext) -> u64 {
    // SAFETY: the helper takes the program's context.
    unsafe { bpf_get_socket_cookie(ctx.sock_addr.cast()) }
}

/// The cookie of the socket's network namespace.
#[inline(always)]
pub fn netns_cookie(ctx: &SockAddrContext) -> u64 {
    // SAFETY: the helper takes the program's context.
    unsafe { bpf_get_netns_cookie(ctx.sock_addr.cast()) }
}

/// Nanoseconds of the monotonic clock.
#[inline(always)]
pub fn now() -> u64 {
    // SAFETY: the helper takes nothing.
    unsafe { bpf_ktime_get_ns() }
}

/// The socket's state as the kernel has it (`sk_state`); 0 without a socket.
#[inline(always)]
fn socket_state(ctx: &SockAddrContext) -> u32 {
    // SAFETY: the union's only other member is the same eight bytes.
    let sk = unsafe { (*ctx.sock_addr.cast::<bpf_sock_addr>()).__bindgen_anon_1.sk };
    if sk.is_null() {
        return 0;
    }
    // SAFETY: a socket of the context, checked for null above.
    unsafe { core::ptr::read_volatile(&raw const (*sk).state) }
}

/// True for a connected UDP socket: the kernel calls it established.
#[inline(always)]
pub fn is_connected(ctx: &SockAddrContext) -> bool {
    socket_state(ctx) == TCP_ESTABLISHED
}

/// True if the socket has remembered a destination address: whether a connect got past its route lookup.
#[inline(always)]
pub fn has_destination(ctx: &SockAddrContext) -> bool {
    // SAFETY: the union's only other member is the same eight bytes.
    let sk = unsafe { (*ctx.sock_addr.cast::<bpf_sock_addr>()).__bindgen_anon_1.sk };
    if sk.is_null() {
        return false;
    }
    // SAFETY: a socket of the context, checked for null above.
    unsafe { core::ptr::read_volatile(&raw const (*sk).dst_ip4) != 0 }
}
