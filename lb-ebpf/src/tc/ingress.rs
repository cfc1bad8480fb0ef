//! Packets that come in: a client's towards a frontend, and a remote backend's towards the node's own source.

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use lb_common::{
    abi::{TCP, UDP},
    counter::{action, hook},
    event::outcome,
    flow::{Flow, TupleEntry, TupleKey, flag, is_syn},
    packet::{self, Packet, fragment, kind},
};

use super::{
    NEXT,
    begin::{self, Why},
    clock, errors, fragments, refuse,
    rewrite::{End, rewrite},
    skb,
    table::{self, BACK, FRONT},
};
use crate::{count::count, maps::FLOWS};

/// The ingress program, for interfaces whose link header has `link` bytes.
#[inline(always)]
pub fn ingress(ctx: &TcContext, link: usize) -> i32 {
    let skb = ctx.skb.skb;
    let mut packet = packet::read(&skb::Bytes(skb), link, skb::protocol(skb));
    if packet.kind != kind::TRANSPORT {
        return errors::aside(skb, &packet, hook::INGRESS);
    }
    if packet.fragment != fragment::WHOLE && !fragments::complete(&mut packet) {
        count(hook::INGRESS, action::FRAGMENT_UNKNOWN);
        return NEXT;
    }
    let key = TupleKey::between(packet.src, packet.src_port, packet.dst, packet.dst_port, packet.proto);
    let entry = table::entry(&key);
    if entry.stamp != 0
        && let Some(flow) = FLOWS.get_ptr_mut(entry.slot)
    {
        // SAFETY: a live array element; what others write meanwhile are single fields of their own.
        let flow = unsafe { &mut *flow };
        if table::is_of(flow, entry) {
            if entry.role() == FRONT && flow.is_client(&packet.src, packet.src_port) {
                return forward(skb, &packet, entry, flow);
            }
            if entry.role() == BACK && flow.is_backend(&packet.src, packet.src_port) {
                return done(rewrite(skb, &packet, End::Destination, &flow.client, flow.client_port));
            }
            count(hook::INGRESS, action::MISS);
            return NEXT;
        }
    }
    begin::begin(skb, &packet, Why::Unknown as u32)
}

/// A client's packet of a flow that is known.
#[inline(always)]
fn forward(skb: *mut __sk_buff, packet: &Packet, entry: TupleEntry, flow: &mut Flow) -> i32 {
    if packet.proto == TCP {
        if is_syn(packet.tcp_flags) && packet.fragment != fragment::LATER {
            let isn = begin::sequence(skb, packet);
            if !flow.repeats(isn) || !table::is_usable(flow) {
                let _ = table::retire(hook::INGRESS, entry.slot, flow.version, flow.outcome_of_silence() as u32);
                return begin::begin(skb, packet, Why::Reuse as u32);
            }
        }
    } else if packet.proto == UDP && table::has_left(flow) {
        let _ = table::retire(hook::INGRESS, entry.slot, flow.version, outcome::ESTABLISHED as u32);
        return begin::begin(skb, packet, Why::BackendLeft as u32);
    }
    if flow.flags & flag::EXHAUSTED != 0 {
        let _ = table::retire(hook::INGRESS, entry.slot, flow.version, outcome::OTHER as u32);
        return refuse::refuse(skb, packet);
    }
    let event = flow.note_client(packet.tcp_flags);
    table::follow(hook::INGRESS, flow, event);
    table::see(flow, clock::tick());
    done(rewrite(skb, packet, End::Destination, &flow.backend, flow.backend_port))
}

/// Counts a packet that was, or could not be, rewritten.
#[inline(always)]
pub fn done(rewritten: bool) -> i32 {
    count(
        hook::INGRESS,
        if rewritten {
            action::TRANSLATED
        } else {
            action::INCONSISTENT
        },
    );
    NEXT
}
