//! Packets that come in: a client's towards a frontend, and a remote backend's towards the node's own source.

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use lb_common::{
    abi::TCP,
    counter::{action, hook},
    event::outcome,
    flow::{Flow, TupleKey, flag, is_syn, role},
    packet::{Packet, kind},
};

use super::{
    NEXT,
    begin::{self, Why},
    clock, done, errors, pass,
    rewrite::{End, rewrite},
    sight, table,
};
use crate::{lookup, maps::FLOWS};

/// The ingress program, for interfaces whose link header has `link` bytes.
#[inline(always)]
pub fn ingress(ctx: &TcContext, link: u32) -> i32 {
    let skb = ctx.skb.skb;
    let seen = sight::look(skb, link);
    if seen != kind::TRANSPORT as u32 {
        return errors::aside(skb, seen, hook::INGRESS);
    }
    let verdict = come_in(skb);
    if verdict < 0 {
        return NEXT;
    }
    begin::begin(skb, verdict as u32)
}

/// Translates a packet of a flow that is known: negative then, else why a flow is to begin.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn come_in(skb: *mut __sk_buff) -> i32 {
    let Some(packet) = sight::packet() else {
        return NEXT;
    };
    let key = TupleKey::between(packet.src, packet.src_port, packet.dst, packet.dst_port, packet.proto);
    let entry = table::entry(&key);
    if entry.stamp == 0 {
        return Why::Unknown as i32;
    }
    let Some(flow) = FLOWS.get_ptr_mut(entry.slot) else {
        return Why::Unknown as i32;
    };
    // SAFETY: a live array element; what others write meanwhile are single fields of their own.
    let flow = unsafe { &mut *flow };
    let seen = table::version_of(flow, entry);
    if seen == 0 {
        return Why::Unknown as i32;
    }
    let now = clock::tick();
    let expired = flow.is_expired(now);
    if entry.role() == role::BACK && !expired && flow.is_backend(&packet.src, packet.src_port) {
        return done(
            hook::INGRESS,
            rewrite(skb, packet, End::Destination, &flow.client, flow.client_port),
        );
    }
    if entry.role() == role::MIDDLE && (expired || flow.is_closed()) && is_syn(packet.tcp_flags) {
        // The client dials the backend itself, from the port of a flow that is over: its answers are not the frontend's.
        let _ = table::retire(hook::INGRESS, entry.slot, seen, flow.outcome_of_silence() as u32);
    }
    if entry.role() != role::FRONT || !flow.is_client(&packet.src, packet.src_port) {
        return pass(hook::INGRESS, action::MISS);
    }
    let why = if expired { Why::Unknown } else { distrust(packet, flow) };
    if expired || why != Why::Unknown {
        let result = if why == Why::Exhausted {
            outcome::NO_LOCAL_PORT
        } else {
            flow.outcome_of_silence()
        };
        let _ = table::retire(hook::INGRESS, entry.slot, seen, result as u32);
        return why as i32;
    }
    let event = flow.note_client(packet.tcp_flags);
    table::follow(hook::INGRESS, entry.slot, event);
    table::see(flow, now);
    done(
        hook::INGRESS,
        rewrite(skb, packet, End::Destination, &flow.backend, flow.backend_port),
    )
}

/// Why a client's packet may not go where its flow goes; [`Why::Unknown`] if it may.
#[inline(always)]
fn distrust(packet: &Packet, flow: &Flow) -> Why {
    if flow.flags & flag::EXHAUSTED != 0 {
        return Why::Exhausted;
    }
    if packet.proto != TCP {
        return if table::has_left(flow) || table::has_moved(flow) {
            Why::BackendLeft
        } else {
            Why::Unknown
        };
    }
    if !is_syn(packet.tcp_flags) {
        return Why::Unknown;
    }
    // A connection that is open, whose backend would be chosen again: whoever sends a SYN on it, the backend tells the client, and a
    // forged one ends nothing.
    let stays =
        flow.repeats(packet.sequence) || flow.is_open() && flow.generation == lookup::word(flow.set_id).generation();
    if stays && table::is_usable(flow) {
        Why::Unknown
    } else {
        Why::Reuse
    }
}
