//! What is in a packet, read by slices from the front: the second opinion on [`lb_common::packet`].

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::packet::wire;

/// What a packet is to the translator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Nothing that is looked at.
    Foreign,
    /// Cut off, contradictory, or with more headers than are looked behind.
    Malformed,
    /// TCP or UDP.
    Transport,
    /// An ICMP error.
    Error,
}

/// Its place in a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// It is the datagram.
    Whole,
    /// The first fragment.
    First,
    /// Any other.
    Later,
}

/// A packet as it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parsed {
    /// What it is; all else means something for TCP, UDP and errors alone.
    pub kind: Kind,
    /// Source address.
    pub src: IpAddr,
    /// Destination address.
    pub dst: IpAddr,
    /// Source port.
    pub src_port: u16,
    /// Destination port.
    pub dst_port: u16,
    /// TCP, UDP or the ICMP of the family.
    pub proto: u8,
    /// Where the IP header begins.
    pub ip: usize,
    /// Where the TCP, UDP or ICMP header begins.
    pub body: usize,
    /// Its place.
    pub place: Place,
    /// The identification of a fragment's datagram.
    pub id: u32,
    /// TCP's flags.
    pub flags: u8,
    /// TCP's sequence number.
    pub seq: u32,
}

const NOTHING: Parsed = Parsed {
    kind: Kind::Foreign,
    src: IpAddr::V4(Ipv4Addr::UNSPECIFIED),
    dst: IpAddr::V4(Ipv4Addr::UNSPECIFIED),
    src_port: 0,
    dst_port: 0,
    proto: 0,
    ip: 0,
    body: 0,
    place: Place::Whole,
    id: 0,
    flags: 0,
    seq: 0,
};

const MALFORMED: Parsed = Parsed {
    kind: Kind::Malformed,
    ..NOTHING
};

fn be16(bytes: &[u8]) -> u16 {
    u16::from_be_bytes([bytes[0], bytes[1]])
}

fn be32(bytes: &[u8]) -> u32 {
    u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

/// Reads a packet that begins with an Ethernet header.
pub fn ethernet(bytes: &[u8]) -> Parsed {
    let Some((header, mut rest)) = bytes.split_at_checked(wire::ETHERNET) else {
        return MALFORMED;
    };
    let mut ether_type = be16(&header[12..]);
    for _ in 0..2 {
        if ether_type != wire::VLAN && ether_type != wire::QINQ {
            break;
        }
        let Some((tag, behind)) = rest.split_at_checked(wire::TAG) else {
            return MALFORMED;
        };
        ether_type = be16(&tag[2..]);
        rest = behind;
    }
    let at = bytes.len() - rest.len();
    match ether_type {
        wire::IPV4 => v4(bytes, at, false),
        wire::IPV6 => v6(bytes, at, false),
        _ => NOTHING,
    }
}

/// Reads the packet inside an ICMP error.
pub fn inside(bytes: &[u8], error: &Parsed) -> Parsed {
    let at = error.body + 8;
    let found = if error.src.is_ipv6() {
        v6(bytes, at, true)
    } else {
        v4(bytes, at, true)
    };
    match (found.kind, found.place) {
        (Kind::Transport, Place::Later) => NOTHING,
        _ => found,
    }
}

fn v4(bytes: &[u8], at: usize, inside: bool) -> Parsed {
    let Some(header) = bytes.get(at..at + 20) else {
        return MALFORMED;
    };
    let length = usize::from(header[0] & 15) * 4;
    if header[0] >> 4 != 4 || length < 20 {
        return MALFORMED;
    }
    let place = be16(&header[6..]);
    let place = match (place & 0x1fff, place & 0x2000) {
        (0, 0) => Place::Whole,
        (0, _) => Place::First,
        _ => Place::Later,
    };
    let address = |i: usize| Ipv4Addr::new(header[i], header[i + 1], header[i + 2], header[i + 3]).into();
    let packet = Parsed {
        src: address(12),
        dst: address(16),
        proto: header[9],
        ip: at,
        body: at + length,
        place,
        id: u32::from(be16(&header[4..])),
        ..NOTHING
    };
    body(bytes, packet, inside)
}

fn v6(bytes: &[u8], at: usize, inside: bool) -> Parsed {
    let Some(header) = bytes.get(at..at + 40) else {
        return MALFORMED;
    };
    if header[0] >> 4 != 6 {
        return MALFORMED;
    }
    let address = |i: usize| {
        let octets: [u8; 16] = header[i..i + 16].try_into().expect("sixteen bytes");
        Ipv6Addr::from(octets).into()
    };
    let mut packet = Parsed {
        src: address(8),
        dst: address(24),
        proto: header[6],
        ip: at,
        body: at + 40,
        ..NOTHING
    };
    // IPv4-mapped addresses mean IPv4 to sockets, and nothing on the wire.
    let mapped = |addr: IpAddr| matches!(addr, IpAddr::V6(v6) if v6.to_ipv4_mapped().is_some());
    if mapped(packet.src) || mapped(packet.dst) {
        return NOTHING;
    }
    for extensions in 0.. {
        let is_fragment = packet.proto == wire::FRAGMENT;
        if !is_fragment && !matches!(packet.proto, wire::HOP_BY_HOP | wire::ROUTING | wire::DESTINATION) {
            break;
        }
        if extensions == 6 {
            return MALFORMED;
        }
        // No extension header is shorter than this.
        let Some(start) = bytes.get(packet.body..packet.body + 8) else {
            return MALFORMED;
        };
        packet.proto = start[0];
        if is_fragment {
            packet.id = be32(&start[4..]);
            packet.place = match (be16(&start[2..]) >> 3, start[3] & 1) {
                (0, 0) => Place::Whole,
                (0, _) => Place::First,
                _ => Place::Later,
            };
            packet.body += 8;
            if packet.place == Place::Later {
                break;
            }
        } else {
            packet.body += (usize::from(start[1]) + 1) * 8;
        }
    }
    body(bytes, packet, inside)
}

/// Reads what the IP header announces. Inside an error there are eight bytes of it for sure, and eight are enough.
fn body(bytes: &[u8], mut packet: Parsed, inside: bool) -> Parsed {
    let found = bytes.get(packet.body..).unwrap_or_default();
    match packet.proto {
        wire::TCP | wire::UDP => {
            packet.kind = Kind::Transport;
            if packet.place == Place::Later {
                return packet;
            }
            let is_tcp = packet.proto == wire::TCP;
            if found.len() < if is_tcp && !inside { 20 } else { 8 } {
                return MALFORMED;
            }
            packet.src_port = be16(found);
            packet.dst_port = be16(&found[2..]);
            if is_tcp && !inside {
                packet.seq = be32(&found[4..]);
                packet.flags = found[13];
            }
            packet
        }
        wire::ICMP | wire::ICMPV6 if (packet.proto == wire::ICMPV6) == packet.src.is_ipv6() => {
            // An error in fragments is put together where it is received; one inside another is none.
            if inside || packet.place != Place::Whole {
                return NOTHING;
            }
            let Some(kind) = found.first() else { return MALFORMED };
            let is_error = if packet.src.is_ipv6() {
                matches!(kind, 1..=4)
            } else {
                matches!(kind, 3 | 11 | 12)
            };
            if !is_error {
                return NOTHING;
            }
            packet.kind = Kind::Error;
            packet
        }
        _ => NOTHING,
    }
}
