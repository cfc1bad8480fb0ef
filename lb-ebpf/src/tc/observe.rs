//! Observing packets: those that begin and end connections with a frontend or a backend tell which backend somebody else's
//! translation chose, and what passes through without a socket here; every packet passes untouched.
//!
//! A SYN towards a backend belongs to a followed socket if the packet still has that socket, or if its source is in `DIALS`:
//! then the backend is noted in the socket's state, and all that follows is counted there. Any other SYN opens a passage,
//! whose packets are recorded one by one, and which is counted nowhere.

use super::{EGRESS, NEXT, skb};
use crate::{
    count::{add, count},
    ctx, emit, lookup,
    maps::{BACKEND_INDEX, BACKEND_STATS, DIALS, PASSAGES, SERVICE_STATS, SOCKETS},
};
use aya_ebpf::{helpers::bpf_get_socket_cookie, programs::TcContext};
use lb_common::{
    abi::TCP,
    addr::{Addr, Port},
    backend::EndpointKey,
    counter::{action, hook},
    event::{PacketRecord, kind, tcp_flag},
    frontend::FrontendKey,
    packet::{self, Packet},
    socket::{Passage, SocketState},
};

/// The ends and the flags of a TCP segment.
struct Segment {
    src: Addr,
    dst: Addr,
    src_port: Port,
    dst_port: Port,
    flags: u8,
}

/// The TCP segment that begins in this packet; `None` for anything else, later fragments included.
#[inline(always)]
fn segment(ctx: &TcContext) -> Option<Segment> {
    let mut packet = Packet::default();
    packet::read(
        &skb::Bytes(ctx.skb.skb),
        packet::ETHERNET,
        skb::protocol(ctx.skb.skb),
        &mut packet,
    );
    if packet.kind != packet::kind::TRANSPORT || packet.proto != TCP || packet.fragment == packet::fragment::LATER {
        return None;
    }
    Some(Segment {
        src: packet.src,
        dst: packet.dst,
        src_port: packet.src_port,
        dst_port: packet.dst_port,
        flags: packet.tcp_flags,
    })
}

#[inline(always)]
pub fn observe(ctx: &TcContext, direction: u8) -> i32 {
    let Some(segment) = segment(ctx) else {
        return NEXT;
    };
    if segment.flags & (tcp_flag::SYN | tcp_flag::FIN | tcp_flag::RST) == 0 {
        return NEXT;
    }
    let begins = segment.flags & (tcp_flag::SYN | tcp_flag::ACK | tcp_flag::RST) == tcp_flag::SYN;
    if begins {
        begin(ctx, direction, &segment);
    } else {
        go_on(ctx, direction, &segment);
    }
    NEXT
}

/// A SYN: whose is it, and to which backend does it go?
#[inline(always)]
fn begin(ctx: &TcContext, direction: u8, segment: &Segment) {
    let backend = lookup::endpoint(segment.dst, segment.dst_port);
    let frontend = lookup::frontend(segment.dst, segment.dst_port, TCP);
    if backend.is_none() && frontend.is_none() {
        count(hook::TC, action::MISS);
        return;
    }
    let client = FrontendKey::new(segment.src, segment.src_port, TCP);
    // SAFETY: the helper takes the program's context; without a socket it gives 0.
    let own = unsafe { bpf_get_socket_cookie(ctx.skb.skb.cast()) };
    if own != 0
        && let Some(state) = SOCKETS.get_ptr_mut(&own)
    {
        // SAFETY: an element of the map; its backend is written here alone, before the peer can answer.
        note(unsafe { &mut *state }, segment.dst, segment.dst_port);
        return;
    }
    if let Some(cookie) = DIALS.get_ptr(&client) {
        // SAFETY: an element of the map; removed elements stay readable until the program ends.
        let cookie = unsafe { *cookie };
        if let Some(state) = SOCKETS.get_ptr_mut(&cookie) {
            // SAFETY: as above.
            note(unsafe { &mut *state }, segment.dst, segment.dst_port);
        }
        return;
    }
    let known = PASSAGES.get_ptr_mut(&client);
    if known.is_none() && direction == EGRESS && own == 0 {
        // It came in under another source, or past the observed interfaces: nobody knows whose it is.
        count(hook::TC, action::MISS);
        return;
    }
    // Nothing is counted for Services and backends: what comes from outside may be meant for fewer backends than a local
    // client's connections are (externalTrafficPolicy), and evenness is judged over all of them.
    match known {
        // SAFETY: an element of the map; an LRU element may be reused while we look, and then a packet is recorded for nothing.
        Some(passage) => unsafe { (*passage).syn_ns = ctx::now() },
        None => {
            let _ = PASSAGES.insert(&client, &Passage { syn_ns: ctx::now() }, 0);
        }
    }
    record(ctx, direction, segment);
}

/// A SYN+ACK, FIN or RST: recorded if it belongs to a passage, in either direction.
#[inline(always)]
fn go_on(ctx: &TcContext, direction: u8, segment: &Segment) {
    let forth = FrontendKey::new(segment.src, segment.src_port, TCP);
    let back = FrontendKey::new(segment.dst, segment.dst_port, TCP);
    if PASSAGES.get_ptr(&forth).is_some() || PASSAGES.get_ptr(&back).is_some() {
        record(ctx, direction, segment);
    }
}

/// The backend of one Service at an address.
#[inline(always)]
fn backend_of(service_id: u32, addr: Addr, port: Port) -> Option<u32> {
    let id = BACKEND_INDEX.get_ptr(&EndpointKey::new(addr, port, TCP, service_id))?;
    // SAFETY: an element of the map; removed elements stay readable until the program ends.
    Some(unsafe { *id })
}

/// Notes in a socket's state which backend its SYN goes to, once.
#[inline(always)]
fn note(state: &mut SocketState, addr: Addr, port: Port) {
    if state.backend_id != 0 {
        return;
    }
    if let Some(id) = backend_of(state.service_id, addr, port) {
        state.backend_id = id;
        chosen(state.service_id, id);
    }
}

/// Counts that somebody's translation chose a backend.
#[inline(always)]
fn chosen(service_id: u32, backend_id: u32) {
    // SAFETY: live elements of their arrays.
    unsafe {
        if let Some(stats) = BACKEND_STATS.get_ptr_mut(backend_id) {
            add(&raw mut (*stats).inside.connects);
        }
        if let Some(stats) = SERVICE_STATS.get_ptr_mut(service_id) {
            add(&raw mut (*stats).attributed);
        }
    }
}

#[inline(always)]
fn record(ctx: &TcContext, direction: u8, segment: &Segment) {
    let ifindex = skb::ifindex(ctx.skb.skb);
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
}
