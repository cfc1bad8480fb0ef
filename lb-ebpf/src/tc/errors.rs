//! ICMP errors about translated packets: whoever sent the packet must recognise it.
//!
//! An error carries the beginning of a packet as it was where the error arose. That is put back to what its sender knows, and
//! the error goes to that sender: path MTU discovery works through a flow in both directions.

use aya_ebpf::{bindings::__sk_buff, helpers::bpf_l4_csum_replace};
use lb_common::{
    addr::{Addr, Port},
    counter::{action, hook},
    flow::{Flow, TupleEntry, role},
    packet::{Packet, kind},
};

use super::{
    NEXT, pass,
    rewrite::{V4_CHECK, V6_SRC, fold32, sum, taken, v4_bytes, v4_check},
    sight::{self, ORPHAN},
    skb, table,
};
use crate::maps::FLOWS;

/// Offset of the checksum in an ICMP header.
const CHECK: u32 = 2;

/// What is neither TCP nor UDP: counted, and translated if it is an error about a flow.
#[inline(always)]
pub fn aside(skb: *mut __sk_buff, seen: u32, hook: u32) -> i32 {
    // Not one within the other: their stacks together would be too much for kernel 6.1.
    if seen == kind::ERROR as u32 && sight::look_inside(skb) == kind::TRANSPORT as u32 {
        return error(skb, hook);
    }
    pass(
        hook,
        if seen == kind::MALFORMED as u32 {
            action::MALFORMED
        } else if seen == ORPHAN {
            action::FRAGMENT_UNKNOWN
        } else {
            action::MISS
        },
    )
}

/// Translates an ICMP error, of which the packet inside was read.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn error(skb: *mut __sk_buff, at: u32) -> i32 {
    let (Some(outside), Some(inside)) = (sight::packet(), sight::inside()) else {
        return NEXT;
    };
    // An error goes to who sent the packet: another one is nobody's business, or a forgery.
    if !outside.dst.same(&inside.src) {
        return pass(at, action::MISS);
    }
    let (src_port, dst_port) = (inside.src_port.0 as u32, inside.dst_port.0 as u32);
    sight::aim(&inside.src, src_port, &inside.dst, dst_port, inside.proto as u32);
    let Some(key) = sight::key() else { return NEXT };
    let entry = table::entry(key);
    let Some(flow) = FLOWS.get_ptr(entry.slot) else {
        return pass(at, action::MISS);
    };
    // SAFETY: a live array element.
    let flow = unsafe { &*flow };
    if entry.stamp == 0 || !table::is_of(flow, entry) {
        return pass(at, action::MISS);
    }
    let changed = if is_of_client(flow, entry, inside) {
        let back = Back {
            src: flow.client,
            src_port: flow.client_port,
            dst: flow.vip,
            dst_port: flow.vip_port,
        };
        put_back(skb, outside, inside, &back, Some(&flow.vip), at)
    } else {
        let (dst, dst_port) = if flow.source_port.0 == 0 {
            (flow.client, flow.client_port)
        } else {
            (flow.source, flow.source_port)
        };
        let back = Back {
            src: flow.backend,
            src_port: flow.backend_port,
            dst,
            dst_port,
        };
        let from = if flow.source_port.0 == 0 {
            None
        } else {
            Some(&flow.source)
        };
        put_back(skb, outside, inside, &back, from, at)
    };
    pass(
        at,
        match changed {
            Changed::Nothing => action::MISS,
            Changed::Something => action::ICMP_TRANSLATED,
            Changed::Failed => action::INCONSISTENT,
        },
    )
}

/// Whether the packet inside was the client's, however far it was translated; else it was the backend's.
#[inline(always)]
fn is_of_client(flow: &Flow, entry: TupleEntry, inside: &Packet) -> bool {
    if entry.role() == role::BACK {
        return flow.is_backend(&inside.dst, inside.dst_port);
    }
    flow.is_client(&inside.src, inside.src_port) && !flow.is_client(&inside.dst, inside.dst_port)
}

/// The ends of a packet as its sender knows them.
struct Back {
    src: Addr,
    src_port: Port,
    dst: Addr,
    dst_port: Port,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Changed {
    Nothing,
    Something,
    Failed,
}

/// Writes the ends of the packet inside, and those of the error: at ingress its destination, at egress its source, which
/// becomes `from`.
#[inline(always)]
fn put_back(
    skb: *mut __sk_buff,
    outside: &Packet,
    inside: &Packet,
    back: &Back,
    from: Option<&Addr>,
    at: u32,
) -> Changed {
    // What the ICMP checksum must hear of.
    let mut diff: u64 = 0;
    let mut changed = !inside.src.same(&back.src) || !inside.dst.same(&back.dst);
    if changed && !write_addresses(skb, inside, &back.src, &back.dst, &mut diff) {
        return Changed::Failed;
    }
    if inside.src_port.0 != back.src_port.0 || inside.dst_port.0 != back.dst_port.0 {
        changed = true;
        diff += !inside.src_port.0 as u64 + back.src_port.0 as u64;
        diff += !inside.dst_port.0 as u64 + back.dst_port.0 as u64;
        let (s, d) = (back.src_port.0.to_ne_bytes(), back.dst_port.0.to_ne_bytes());
        if !skb::write(skb, inside.transport, &[s[0], s[1], d[0], d[1]]) {
            return Changed::Failed;
        }
    }
    let (mut src, mut dst) = (outside.src, outside.dst);
    if at == hook::INGRESS {
        dst = back.src;
    } else if let Some(from) = from {
        // Whoever sent it: what leaves here in its name would be dropped on the way, by a router that it is the address of, by
        // strict reverse-path filters, by a cloud that checks sources. Its receiver talks to this address.
        src = *from;
    }
    if !src.same(&outside.src) || !dst.same(&outside.dst) {
        changed = true;
        if !write_addresses(skb, outside, &src, &dst, &mut diff) {
            return Changed::Failed;
        }
    }
    if !changed {
        return Changed::Nothing;
    }
    if diff == 0 {
        return Changed::Something;
    }
    // ICMP's checksum is always whole: no card computes it. So nothing is said of a pseudo header, though ICMPv6's has one.
    let sum = fold32(diff) as u64;
    // SAFETY: the helper takes the program's context, and checks the offset.
    if unsafe { bpf_l4_csum_replace(skb.cast(), outside.transport + CHECK, 0, sum, 0) } != 0 {
        return Changed::Failed;
    }
    Changed::Something
}

/// Writes both addresses of a packet, and adds to `diff` what a checksum over it must hear of: a change within an IPv4 header
/// is made good by that header's own checksum. Addresses of the other family cannot be: the flow's tuples are of the packet's.
#[inline(always)]
fn write_addresses(skb: *mut __sk_buff, packet: &Packet, src: &Addr, dst: &Addr, diff: &mut u64) -> bool {
    if packet.is_v6 {
        *diff += taken(&packet.src) + sum(src) + taken(&packet.dst) + sum(dst);
        skb::write(skb, packet.network + V6_SRC, &src.octets())
            && skb::write(skb, packet.network + V6_SRC + 16, &dst.octets())
    } else {
        let check = v4_check(packet.check, packet.src.words[3], src.words[3]);
        let check = v4_check(check, packet.dst.words[3], dst.words[3]);
        let bytes = v4_bytes(check, src.words[3], dst.words[3]);
        skb::write(skb, packet.network + V4_CHECK, &bytes)
    }
}
