//! Refusals: an answer is made of the packet itself, and goes back where it came from.
//!
//! TCP gets an RST (RFC 9293, 3.10.7), UDP an ICMP "port unreachable" (RFC 792, RFC 4443). A packet whose checksum waits for
//! the network card goes on waiting for it: the checksum field is left so that it comes out right whether or not the
//! sum of what it covers is added later.

use aya_ebpf::{
    bindings::{__sk_buff, bpf_adj_room_mode::BPF_ADJ_ROOM_MAC},
    helpers::{bpf_l4_csum_replace, bpf_redirect, bpf_skb_adjust_room, bpf_skb_change_tail},
};
use lb_common::{
    abi::TCP,
    addr::Addr,
    counter::{action, hook},
    event::tcp_flag,
    packet::{ETHERNET, Packet, Read, fragment},
};

use super::{
    rewrite::{fold16, fold32, sum},
    shoot, sight, skb,
};
use crate::count::count;

const V4_LEN: u32 = 20;
const V6_LEN: u32 = 40;
const TCP_LEN: u32 = 20;
const UDP_LEN: u32 = 8;
const ICMP_LEN: u32 = 8;
const TTL: u8 = 64;
const ICMP: u8 = 1;
const ICMPV6: u8 = 58;
/// Type and code of "port unreachable".
const PORT_UNREACHABLE_V4: [u8; 2] = [3, 3];
const PORT_UNREACHABLE_V6: [u8; 2] = [1, 4];

/// Refuses the packet, and counts it as `why`.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn refuse(skb: *mut __sk_buff, why: u32) -> i32 {
    if let Some(packet) = sight::packet()
        && answer(skb, packet)
    {
        count(hook::INGRESS, why);
        // SAFETY: the helper takes numbers alone.
        return unsafe { bpf_redirect(skb::ifindex(skb), 0) as i32 };
    }
    shoot(hook::INGRESS, action::UNANSWERED)
}

/// Makes an answer of the packet; false if there is none for it.
#[inline(always)]
fn answer(skb: *mut __sk_buff, packet: &Packet) -> bool {
    // Options and extension headers would have to be answered or cut out; nobody who dials a Service sends them.
    let plain = packet.transport - packet.network == if packet.is_v6 { V6_LEN } else { V4_LEN };
    if !plain || packet.fragment != fragment::WHOLE {
        return false;
    }
    // What claims to come from nobody, or from many, is answered by nobody (RFC 1122, 3.2.2; RFC 4443, 2.4).
    if !is_one(&packet.src) {
        return false;
    }
    // Nobody answers a reset.
    if packet.proto == TCP && packet.tcp_flags & tcp_flag::RST != 0 {
        return false;
    }
    let made = if packet.proto == TCP {
        reset(skb, packet)
    } else {
        unreachable(skb, packet)
    };
    made && turn(skb, packet)
}

/// Whether an address is a single host's.
#[inline(always)]
fn is_one(addr: &Addr) -> bool {
    let first = u32::from_be(if addr.is_v4() { addr.words[3] } else { addr.words[0] });
    if addr.is_v4() {
        // Neither 0.0.0.0/8 nor 127.0.0.0/8, nor multicast and what lies above it.
        first >> 24 != 0 && first >> 24 != 127 && first >> 28 < 0xe
    } else {
        // Neither multicast, nor the unspecified address, nor loopback.
        first >> 24 != 0xff && (addr.words[0] | addr.words[1] | addr.words[2]) != 0
    }
}

/// Exchanges the link addresses, where there are any.
#[inline(always)]
fn turn(skb: *mut __sk_buff, packet: &Packet) -> bool {
    if (packet.network as usize) < ETHERNET {
        return true;
    }
    let Some(m) = skb::Bytes(skb).read::<[u8; 12]>(0) else {
        return false;
    };
    skb::write(
        skb,
        0,
        &[m[6], m[7], m[8], m[9], m[10], m[11], m[0], m[1], m[2], m[3], m[4], m[5]],
    )
}

/// The sum over the addresses, protocol and length that a transport checksum covers besides.
#[inline(always)]
fn pseudo(src: &Addr, dst: &Addr, is_v6: bool, proto: u8, length: u32) -> u64 {
    let addresses = if is_v6 {
        sum(src) + sum(dst)
    } else {
        src.words[3] as u64 + dst.words[3] as u64
    };
    addresses + (proto as u16).to_be() as u64 + (length as u16).to_be() as u64
}

/// Writes an IP header from the packet's destination to its source.
#[inline(always)]
fn answer_header(skb: *mut __sk_buff, packet: &Packet, proto: u8, length: u32) -> bool {
    let [high, low] = (length as u16).to_be_bytes();
    if packet.is_v6 {
        skb::write(skb, packet.network, &[0x60, 0, 0, 0, high, low, proto, TTL])
            && skb::write(skb, packet.network + 8, &packet.dst.octets())
            && skb::write(skb, packet.network + 24, &packet.src.octets())
    } else {
        let [high, low] = (length as u16 + V4_LEN as u16).to_be_bytes();
        let s = packet.dst.words[3].to_ne_bytes();
        let d = packet.src.words[3].to_ne_bytes();
        // Not to be fragmented, and so without an identification.
        let words = u16::from_ne_bytes([0x45, 0]) as u64
            + u16::from_ne_bytes([high, low]) as u64
            + u16::from_ne_bytes([0x40, 0]) as u64
            + u16::from_ne_bytes([TTL, proto]) as u64
            + packet.dst.words[3] as u64
            + packet.src.words[3] as u64;
        let c = (!fold16(words)).to_ne_bytes();
        skb::write(
            skb,
            packet.network,
            &[
                0x45, 0, high, low, 0, 0, 0x40, 0, TTL, proto, c[0], c[1], s[0], s[1], s[2], s[3], d[0], d[1], d[2],
                d[3],
            ],
        )
    }
}

/// Makes an RST of a TCP packet.
#[inline(always)]
fn reset(skb: *mut __sk_buff, packet: &Packet) -> bool {
    let Some(was) = skb::Bytes(skb).read::<[u8; 20]>(packet.transport as usize) else {
        return false;
    };
    // SAFETY: the helper takes the program's context.
    if unsafe { bpf_skb_change_tail(skb, packet.transport + TCP_LEN, 0) } != 0 {
        return false;
    }
    let sequence = u32::from_be_bytes([was[4], was[5], was[6], was[7]]);
    let (seq, ack, flags) = if packet.tcp_flags & tcp_flag::ACK != 0 {
        ([was[8], was[9], was[10], was[11]], [0; 4], tcp_flag::RST)
    } else {
        (
            [0; 4],
            sequence.wrapping_add(1).to_be_bytes(),
            tcp_flag::RST | tcp_flag::ACK,
        )
    };
    let covered = pseudo(&packet.dst, &packet.src, packet.is_v6, TCP, TCP_LEN);
    // As it is while the network card is to add the rest.
    let c = fold16(covered).to_ne_bytes();
    let header = [
        was[2], was[3], was[0], was[1], seq[0], seq[1], seq[2], seq[3], ack[0], ack[1], ack[2], ack[3], 0x50, flags, 0,
        0, c[0], c[1], 0, 0,
    ];
    if !skb::write(skb, packet.transport, &header) || !answer_header(skb, packet, TCP, TCP_LEN) {
        return false;
    }
    let own = u16::from_ne_bytes([was[2], was[3]]) as u64
        + u16::from_ne_bytes([was[0], was[1]]) as u64
        + u16::from_ne_bytes([seq[0], seq[1]]) as u64
        + u16::from_ne_bytes([seq[2], seq[3]]) as u64
        + u16::from_ne_bytes([ack[0], ack[1]]) as u64
        + u16::from_ne_bytes([ack[2], ack[3]]) as u64
        + u16::from_ne_bytes([0x50, flags]) as u64;
    // Where no card adds anything, the field stands for minus what it holds; the helper does nothing where one does.
    let rest = fold32(own + 2 * fold32(covered) as u64) as u64;
    // SAFETY: the helper takes the program's context, and checks the offset.
    unsafe { bpf_l4_csum_replace(skb.cast(), packet.transport + 16, 0, rest, 0) == 0 }
}

/// Puts an ICMP error before a UDP packet, of which the header stays.
#[inline(always)]
fn unreachable(skb: *mut __sk_buff, packet: &Packet) -> bool {
    // SAFETY: the helper takes the program's context.
    if unsafe { bpf_skb_change_tail(skb, packet.transport + UDP_LEN, 0) } != 0 {
        return false;
    }
    let Some(inside) = sum_inside(skb, packet) else {
        return false;
    };
    let head = ICMP_LEN + if packet.is_v6 { V6_LEN } else { V4_LEN };
    // SAFETY: as above.
    if unsafe { bpf_skb_adjust_room(skb, head as i32, BPF_ADJ_ROOM_MAC, 0) } != 0 {
        return false;
    }
    let kept = packet.transport - packet.network + UDP_LEN;
    let length = ICMP_LEN + kept;
    let (proto, [kind, code]) = if packet.is_v6 {
        (ICMPV6, PORT_UNREACHABLE_V6)
    } else {
        (ICMP, PORT_UNREACHABLE_V4)
    };
    let mut all = inside + u16::from_ne_bytes([kind, code]) as u64;
    if packet.is_v6 {
        all += pseudo(&packet.dst, &packet.src, true, proto, length);
    }
    let c = (!fold16(all)).to_ne_bytes();
    answer_header(skb, packet, proto, length)
        && skb::write(
            skb,
            packet.network + head - ICMP_LEN,
            &[kind, code, c[0], c[1], 0, 0, 0, 0],
        )
}

/// The sum over the IP header and the UDP header as they will be on the wire.
#[inline(always)]
fn sum_inside(skb: *mut __sk_buff, packet: &Packet) -> Option<u64> {
    let bytes = skb::Bytes(skb);
    let mut sum = 0;
    let mut at = packet.network as usize;
    let end = packet.transport as usize;
    let mut words = 0;
    while words < V6_LEN / 4 {
        if at >= end {
            break;
        }
        sum += u32::from_ne_bytes(bytes.read::<[u8; 4]>(at)?) as u64;
        at += 4;
        words += 1;
    }
    let udp = bytes.read::<[u8; 8]>(end)?;
    let field = u16::from_ne_bytes([udp[6], udp[7]]);
    if waits_for_card(skb, packet.transport + 6, field)? {
        // The card makes the UDP header sum to minus what the field holds now.
        sum += !field as u64;
    } else {
        sum += u32::from_ne_bytes([udp[0], udp[1], udp[2], udp[3]]) as u64;
        sum += u32::from_ne_bytes([udp[4], udp[5], udp[6], udp[7]]) as u64;
    }
    Some(sum)
}

/// Whether a checksum is still to be computed by the card: the helper changes only one that is whole. The field stays as it was.
#[inline(always)]
fn waits_for_card(skb: *mut __sk_buff, at: u32, field: u16) -> Option<bool> {
    // SAFETY: the helper takes the program's context, and checks the offset.
    if unsafe { bpf_l4_csum_replace(skb.cast(), at, 0, 1, 0) } != 0 {
        return None;
    }
    let now = u16::from_ne_bytes(skb::Bytes(skb).read::<[u8; 2]>(at as usize)?);
    if now == field {
        return Some(true);
    }
    if skb::write(skb, at, &field.to_ne_bytes()) {
        Some(false)
    } else {
        None
    }
}
