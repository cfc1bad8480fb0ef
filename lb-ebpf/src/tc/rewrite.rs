//! Changing an end of a packet: address, port, and the checksums over them, by the difference alone (RFC 1624).
//!
//! The transport checksum goes through the helper, which knows whether it is whole or waits for the network card.

use aya_ebpf::{
    bindings::{__sk_buff, BPF_F_MARK_MANGLED_0, BPF_F_PSEUDO_HDR},
    helpers::bpf_l4_csum_replace,
};
use lb_common::{
    abi::UDP,
    addr::{Addr, Port},
    packet::{Packet, fragment},
};

use super::skb;
use crate::globals;

/// Which end.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum End {
    Source,
    Destination,
}

/// Offset of the checksum in an IPv4 header; both addresses lie behind it.
pub const V4_CHECK: u32 = 10;
/// Offset of the source in an IPv6 header.
pub const V6_SRC: u32 = 8;
const TCP_CHECK: u32 = 16;
const UDP_CHECK: u32 = 6;

/// The sum of 16-bit words of an address, as checksums add them, not folded.
#[inline(always)]
pub fn sum(addr: &Addr) -> u64 {
    addr.words[0] as u64 + addr.words[1] as u64 + addr.words[2] as u64 + addr.words[3] as u64
}

/// The sum that taking an address away adds.
#[inline(always)]
pub fn taken(addr: &Addr) -> u64 {
    !addr.words[0] as u64 + !addr.words[1] as u64 + !addr.words[2] as u64 + !addr.words[3] as u64
}

/// Folds a sum to 32 bits.
#[inline(always)]
pub fn fold32(sum: u64) -> u32 {
    let sum = (sum & 0xffff_ffff) + (sum >> 32);
    ((sum & 0xffff_ffff) + (sum >> 32)) as u32
}

/// Folds a sum to 16 bits.
#[inline(always)]
pub fn fold16(sum: u64) -> u16 {
    let sum = fold32(sum);
    let sum = (sum & 0xffff) + (sum >> 16);
    ((sum & 0xffff) + (sum >> 16)) as u16
}

/// An IPv4 header's checksum after one of its addresses changed.
#[inline(always)]
pub fn v4_check(check: u16, old: u32, new: u32) -> u16 {
    !fold16(!check as u64 + !old as u64 + new as u64)
}

/// An IPv4 header's checksum and both addresses, as they lie in it.
#[inline(always)]
pub fn v4_bytes(check: u16, src: u32, dst: u32) -> [u8; 10] {
    let (c, s, d) = (check.to_ne_bytes(), src.to_ne_bytes(), dst.to_ne_bytes());
    [c[0], c[1], s[0], s[1], s[2], s[3], d[0], d[1], d[2], d[3]]
}

/// Puts another address and port at an end of a packet; false if the packet cannot be written, or holds the other family.
#[inline(always)]
pub fn rewrite(skb: *mut __sk_buff, packet: &Packet, end: End, addr: &Addr, port: Port) -> bool {
    let (old_addr, old_port) = match end {
        End::Source => (&packet.src, packet.src_port),
        End::Destination => (&packet.dst, packet.dst_port),
    };
    if addr.is_v4() == packet.is_v6 {
        return false;
    }
    let has_ports = packet.fragment != fragment::LATER;
    let (check, mangled) = if packet.proto == UDP {
        (packet.transport + UDP_CHECK, BPF_F_MARK_MANGLED_0 as u64)
    } else {
        (packet.transport + TCP_CHECK, 0)
    };
    let diff;
    if packet.is_v6 {
        let at = match end {
            End::Source => V6_SRC,
            End::Destination => V6_SRC + 16,
        };
        if !has_ports {
            return skb::write_alone(skb, packet.network + at, &addr.octets());
        }
        if !skb::write(skb, packet.network + at, &addr.octets()) {
            return false;
        }
        diff = fold32(taken(old_addr) + sum(addr)) as u64;
    } else {
        let (old, new) = (old_addr.words[3], addr.words[3]);
        let ip_check = v4_check(packet.check, old, new);
        let bytes = match end {
            End::Source => v4_bytes(ip_check, new, packet.dst.words[3]),
            End::Destination => v4_bytes(ip_check, packet.src.words[3], new),
        };
        if !skb::write(skb, packet.network + V4_CHECK, &bytes) {
            return false;
        }
        diff = fold32(!old as u64 + new as u64) as u64;
    }
    if !has_ports {
        return true;
    }
    let flags = BPF_F_PSEUDO_HDR as u64 | mangled | if packet.is_v6 { globals::csum_ipv6_flag() } else { 0 };
    // SAFETY: the helper takes the program's context, and checks the offset.
    if unsafe { bpf_l4_csum_replace(skb.cast(), check, 0, diff, flags) } != 0 {
        return false;
    }
    if old_port.0 == port.0 {
        return true;
    }
    let at = match end {
        End::Source => 0,
        End::Destination => 2,
    };
    // SAFETY: as above; two bytes change.
    let checked = unsafe { bpf_l4_csum_replace(skb.cast(), check, old_port.0 as u64, port.0 as u64, mangled | 2) };
    checked == 0 && skb::write(skb, packet.transport + at, &port.0.to_ne_bytes())
}
