//! The answers that refuse a packet, made anew with [`crate::packet`]'s builder.

use std::net::{IpAddr, SocketAddr};

use super::parse::{Parsed, Place};
use crate::packet::{self, Link, Packet, flags, wire};

/// The answer to a packet; `None` where there is none.
pub(super) fn to(bytes: &[u8], parsed: &Parsed) -> Option<Vec<u8>> {
    let header = if parsed.src.is_ipv6() { 40 } else { 20 };
    if parsed.body - parsed.ip != header || parsed.place != Place::Whole || parsed.flags & flags::RST != 0 {
        return None;
    }
    let is_one = match parsed.src {
        IpAddr::V4(v4) => !matches!(v4.octets()[0], 0 | 127 | 224..),
        IpAddr::V6(v6) => v6.segments()[0] >> 8 != 0xff && v6.segments()[..6] != [0; 6],
    };
    if !is_one {
        return None;
    }
    let client = SocketAddr::new(parsed.src, parsed.src_port);
    let vip = SocketAddr::new(parsed.dst, parsed.dst_port);
    let answer = if parsed.proto == wire::TCP {
        reset(bytes, parsed, client, vip)
    } else {
        // The kernel makes room between link and network header for a plain protocol alone.
        if parsed.ip != wire::ETHERNET {
            return None;
        }
        unreachable(bytes, parsed, client, vip)
    };
    let mut answer_bytes = bytes[..parsed.ip].to_vec();
    let (to, from) = answer_bytes[..12].split_at_mut(6);
    to.swap_with_slice(from);
    answer_bytes.extend(answer);
    Some(answer_bytes)
}

/// A packet without a link header, as such an answer begins.
fn begin(packet: Packet) -> Packet {
    Packet {
        link: Link::None,
        ..packet.id(0).tos(0).ttl(64)
    }
}

fn reset(bytes: &[u8], parsed: &Parsed, client: SocketAddr, vip: SocketAddr) -> Vec<u8> {
    let ack: [u8; 4] = bytes[parsed.body + 8..parsed.body + 12].try_into().expect("four bytes");
    let answer = if parsed.flags & flags::ACK == 0 {
        packet::tcp(vip, client, flags::RST | flags::ACK)
            .seq(0)
            .ack(parsed.seq.wrapping_add(1))
    } else {
        packet::tcp(vip, client, flags::RST).seq(u32::from_be_bytes(ack)).ack(0)
    };
    begin(answer.window(0)).bytes()
}

fn unreachable(bytes: &[u8], parsed: &Parsed, client: SocketAddr, vip: SocketAddr) -> Vec<u8> {
    let kind = if parsed.src.is_ipv6() { (1, 4, 0) } else { (3, 3, 0) };
    let about = packet::udp(client, vip, b"");
    let message = packet::error(vip.ip(), client.ip(), kind, &about, 0);
    begin(message.payload(&bytes[parsed.ip..parsed.body + 8])).bytes()
}
