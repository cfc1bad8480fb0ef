//! `sendmsg4/6` and `recvmsg4/6`: unconnected UDP sockets, and the answers to connected ones.
//!
//! One unconnected socket may talk to several Services: which frontend an answer belongs to is kept by (socket, backend).
//! A socket on two frontends that share a backend sees the frontend last sent to; the packets are identical.
//! IPv4-mapped traffic is sent through `sendmsg4` and received through `recvmsg6`.

use crate::{
    connect::{fail, refuse, started},
    count::count,
    ctx::{self, Family, PASS},
    globals,
    lookup::{self, By},
    maps::{UDP_REVERSE, UDP_SOCKETS},
};
use aya_ebpf::programs::SockAddrContext;
use lb_common::{
    abi::UDP,
    addr::{Addr, Port},
    counter::action,
    maps::feature,
    socket::{ChainHead, Reverse, ReverseKey},
};

const ENOBUFS: i32 = 105;

#[inline(always)]
pub fn send(ctx: &SockAddrContext, family: Family, hook: u32) -> i32 {
    if ctx::protocol(ctx) != UDP as u32 {
        return PASS;
    }
    let (vip, vip_port) = ctx::address(ctx, family);
    let Some(frontend) = lookup::frontend(vip, vip_port, UDP) else {
        count(hook, action::MISS);
        // A connected socket hears its peer alone, whose answers stay translated. It comes here with its backend's
        // address: a send on a connected socket with an IPv4-mapped peer runs this hook as if it had named the peer.
        if globals::has(feature::STATE) && !ctx::is_connected(ctx) {
            forget(ctx::socket_cookie(ctx), vip, vip_port);
        }
        return PASS;
    };
    if lookup::opted_out() {
        count(hook, action::OPTED_OUT);
        return PASS;
    }
    // SAFETY: an element of the map; removed elements stay readable until the program ends.
    let frontend = unsafe { &*frontend };
    let cookie = ctx::socket_cookie(ctx);
    let Some(chosen) = lookup::choose_for_socket(ctx, frontend, cookie, By::Hash) else {
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
        match remember(cookie, vip, vip_port, addr, port, chosen.id) {
            // An answer from an address that was not asked is dropped by resolvers; an error is clearer.
            Kept::No => {
                count(hook, action::STATE_FULL);
                return fail(ENOBUFS);
            }
            // A packet of a known flow is no new flow.
            Kept::Known => {}
            Kept::New => started(frontend.service_id, &chosen),
        }
    }
    count(hook, action::TRANSLATED);
    ctx::set_address(ctx, family, &addr, port);
    PASS
}

#[inline(always)]
pub fn receive(ctx: &SockAddrContext, family: Family, hook: u32) -> i32 {
    if ctx::protocol(ctx) != UDP as u32 {
        return PASS;
    }
    let (addr, port) = ctx::address(ctx, family);
    let key = ReverseKey::new(ctx::socket_cookie(ctx), addr, port);
    let Some(reverse) = UDP_REVERSE.get_ptr(&key) else {
        count(hook, action::MISS);
        return PASS;
    };
    // SAFETY: an element of the map; removed elements stay readable until the program ends.
    let (vip, vip_port) = unsafe { ((*reverse).vip, (*reverse).vip_port) };
    if ctx::set_address(ctx, family, &vip, vip_port) {
        count(hook, action::TRANSLATED);
    }
    PASS
}

/// Whether a (socket, backend) pair is remembered.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kept {
    /// There is no room.
    No,
    /// It was remembered before.
    Known,
    /// It is remembered from now on.
    New,
}

impl Kept {
    #[inline(always)]
    pub fn is_kept(self) -> bool {
        self != Kept::No
    }
}

/// Remembers that answers of the backend belong to the frontend.
#[inline(always)]
pub fn remember(cookie: u64, vip: Addr, vip_port: Port, addr: Addr, port: Port, backend_id: u32) -> Kept {
    let key = ReverseKey::new(cookie, addr, port);
    if let Some(known) = UDP_REVERSE.get_ptr_mut(&key) {
        // SAFETY: an element of the map. Two threads that send on one socket may race here, and then one of the two
        // frontends they last sent to wins, word by word only if the two frontends differ.
        unsafe {
            if !(*known).vip.same(&vip) || (*known).vip_port.0 != vip_port.0 {
                (*known).vip = vip;
                (*known).vip_port = vip_port;
            }
        }
        return Kept::Known;
    }
    let head = match UDP_SOCKETS.get_ptr(&cookie) {
        // SAFETY: an element of the map.
        Some(head) => unsafe { *head },
        None => ChainHead::default(),
    };
    // The head first: an entry without a head would be taken for a leftover by the agent's sweep.
    let new_head = ChainHead {
        addr,
        port,
        pad: 0,
        length: head.length.wrapping_add(1),
    };
    if UDP_SOCKETS.insert(&cookie, &new_head, 0).is_err() {
        return Kept::No;
    }
    let reverse = Reverse {
        vip,
        next_addr: head.addr,
        vip_port,
        next_port: head.port,
        backend_id,
    };
    if UDP_REVERSE.insert(&key, &reverse, 0).is_err() {
        let _ = UDP_SOCKETS.insert(&cookie, &head, 0);
        return Kept::No;
    }
    Kept::New
}

/// The socket talks to this address itself: its answers are not to be translated.
#[inline(always)]
pub fn forget(cookie: u64, addr: Addr, port: Port) {
    let key = ReverseKey::new(cookie, addr, port);
    if let Some(known) = UDP_REVERSE.get_ptr_mut(&key) {
        // The entry stays, for it holds the chain together; it now translates to the address itself.
        // SAFETY: an element of the map.
        unsafe {
            (*known).vip = addr;
            (*known).vip_port = port;
        }
    }
}
