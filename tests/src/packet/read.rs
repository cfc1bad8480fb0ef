//! Reading packets back: where their headers lie, and whether every checksum in them is right.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::{Fragment, checksum, wire};

/// Where the layers of a packet lie, and what they say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layers {
    /// VLAN tags before the IP header.
    pub tags: usize,
    /// Where the IP header begins.
    pub ip: usize,
    /// Source address.
    pub src: IpAddr,
    /// Destination address.
    pub dst: IpAddr,
    /// Type of service, or traffic class.
    pub tos: u8,
    /// Time to live, or hop limit.
    pub ttl: u8,
    /// The protocol of the body.
    pub proto: u8,
    /// Extension headers of IPv6, fragment header included.
    pub extensions: usize,
    /// Its place, where it is a fragment (or has a fragment header).
    pub fragment: Option<Fragment>,
    /// Where the body begins: TCP, UDP, ICMP or what else there is.
    pub body: usize,
    /// Where the IP packet ends by its own length; perhaps beyond what is there.
    pub end: usize,
}

impl Layers {
    /// Whether the packet has no header of a transport: a later fragment.
    pub fn is_later_fragment(&self) -> bool {
        self.fragment.is_some_and(|fragment| fragment.offset != 0)
    }

    /// Whether it is part of a datagram.
    pub fn is_fragment(&self) -> bool {
        self.fragment
            .is_some_and(|fragment| fragment.offset != 0 || fragment.more)
    }
}

/// A packet inside an ICMP error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inner {
    /// Its layers, counted from the beginning of the whole packet.
    pub layers: Layers,
}

/// Why a packet could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unread {
    /// It ends within a header.
    #[error("cut off in its {0}")]
    Cut(&'static str),
    /// It is no IP packet.
    #[error("of type {0:#06x}")]
    NotIp(u16),
    /// A header says what cannot be.
    #[error("with a broken {0}")]
    Broken(&'static str),
}

/// A checksum that is not right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Whose.
    pub what: &'static str,
    /// What stands there.
    pub found: u16,
    /// What should stand there.
    pub right: u16,
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

/// Reads a packet that begins with an Ethernet header, or (`bare`) with its IP header.
pub fn layers(bytes: &[u8], bare: bool) -> Result<Layers, Unread> {
    if bare {
        return ip(bytes, 0, 0);
    }
    let mut at = wire::ETHERNET - 2;
    let mut tags = 0;
    loop {
        let ether_type = u16_at(bytes, at).ok_or(Unread::Cut("link header"))?;
        at += 2;
        match ether_type {
            wire::VLAN | wire::QINQ => {
                at += 2;
                tags += 1;
            }
            wire::IPV4 | wire::IPV6 => {
                let found = ip(bytes, at, tags)?;
                return if found.src.is_ipv6() == (ether_type == wire::IPV6) {
                    Ok(found)
                } else {
                    Err(Unread::Broken("IP version"))
                };
            }
            other => return Err(Unread::NotIp(other)),
        }
    }
}

/// Reads a packet from its IP header on.
fn ip(bytes: &[u8], at: usize, tags: usize) -> Result<Layers, Unread> {
    match bytes.get(at).ok_or(Unread::Cut("IP header"))? >> 4 {
        4 => ip4(bytes, at, tags),
        6 => ip6(bytes, at, tags),
        _ => Err(Unread::Broken("IP version")),
    }
}

fn ip4(bytes: &[u8], at: usize, tags: usize) -> Result<Layers, Unread> {
    let header = bytes.get(at..at + 20).ok_or(Unread::Cut("IPv4 header"))?;
    let length = usize::from(header[0] & 15) * 4;
    if length < 20 {
        return Err(Unread::Broken("IPv4 header length"));
    }
    if bytes.len() < at + length {
        return Err(Unread::Cut("IPv4 options"));
    }
    let place = u16::from_be_bytes([header[6], header[7]]);
    let fragment = Fragment {
        id: u32::from(u16::from_be_bytes([header[4], header[5]])),
        offset: place & 0x1fff,
        more: place & 0x2000 != 0,
    };
    let address = |at: usize| {
        IpAddr::from(Ipv4Addr::new(
            header[at],
            header[at + 1],
            header[at + 2],
            header[at + 3],
        ))
    };
    Ok(Layers {
        tags,
        ip: at,
        src: address(12),
        dst: address(16),
        tos: header[1],
        ttl: header[8],
        proto: header[9],
        extensions: 0,
        fragment: (fragment.offset != 0 || fragment.more).then_some(fragment),
        body: at + length,
        end: at + usize::from(u16::from_be_bytes([header[2], header[3]])),
    })
}

fn ip6(bytes: &[u8], at: usize, tags: usize) -> Result<Layers, Unread> {
    let header = bytes.get(at..at + 40).ok_or(Unread::Cut("IPv6 header"))?;
    let address = |at: usize| {
        let octets: [u8; 16] = header[at..at + 16].try_into().expect("sixteen bytes");
        IpAddr::from(Ipv6Addr::from(octets))
    };
    let mut layers = Layers {
        tags,
        ip: at,
        src: address(8),
        dst: address(24),
        tos: header[0] << 4 | header[1] >> 4,
        ttl: header[7],
        proto: header[6],
        extensions: 0,
        fragment: None,
        body: at + 40,
        end: at + 40 + usize::from(u16::from_be_bytes([header[4], header[5]])),
    };
    loop {
        let kind = layers.proto;
        if !matches!(
            kind,
            wire::HOP_BY_HOP | wire::ROUTING | wire::DESTINATION | wire::FRAGMENT
        ) {
            return Ok(layers);
        }
        let cut = Unread::Cut("extension header");
        let [next, length] = bytes.get(layers.body..layers.body + 2).ok_or(cut)? else {
            return Err(cut);
        };
        layers.extensions += 1;
        layers.proto = *next;
        if kind == wire::FRAGMENT {
            let place = u16_at(bytes, layers.body + 2).ok_or(cut)?;
            let id = bytes.get(layers.body + 4..layers.body + 8).ok_or(cut)?;
            layers.fragment = Some(Fragment {
                id: u32::from_be_bytes(id.try_into().expect("four bytes")),
                offset: place >> 3,
                more: place & 1 != 0,
            });
            layers.body += 8;
            if place >> 3 != 0 {
                // What follows is the middle of something.
                return Ok(layers);
            }
        } else {
            layers.body += (usize::from(*length) + 1) * 8;
        }
    }
}

/// The packet inside an ICMP error; `None` where this is none, or holds none.
pub fn inner(bytes: &[u8], outer: &Layers) -> Option<Inner> {
    let kind = *bytes.get(outer.body)?;
    let is_error = match outer.proto {
        wire::ICMP if outer.src.is_ipv4() => matches!(kind, 3 | 4 | 5 | 11 | 12),
        wire::ICMPV6 if outer.src.is_ipv6() => kind < 128,
        _ => false,
    };
    if !is_error || outer.is_later_fragment() {
        return None;
    }
    let layers = ip(bytes, outer.body + 8, 0).ok()?;
    (layers.src.is_ipv6() == outer.src.is_ipv6()).then_some(Inner { layers })
}

/// The ports of a TCP or UDP packet behind a link header: source, then destination.
pub fn ports(bytes: &[u8]) -> Option<(u16, u16)> {
    let layers = layers(bytes, false).ok()?;
    let has_ports = matches!(layers.proto, wire::TCP | wire::UDP) && !layers.is_later_fragment();
    if !has_ports {
        return None;
    }
    Some((u16_at(bytes, layers.body)?, u16_at(bytes, layers.body + 2)?))
}

/// All wrong checksums of a packet; an unread one has none.
pub fn check(bytes: &[u8], bare: bool) -> Vec<Fault> {
    let mut faults = Vec::new();
    if let Ok(outer) = layers(bytes, bare) {
        faults_of(bytes, &outer, false, &mut faults);
        if let Some(inner) = inner(bytes, &outer) {
            faults_of(bytes, &inner.layers, true, &mut faults);
        }
    }
    faults
}

fn faults_of(bytes: &[u8], layers: &Layers, inner: bool, faults: &mut Vec<Fault>) {
    let name = |outer: &'static str, embedded: &'static str| if inner { embedded } else { outer };
    let mut judge = |what, found: u16, right: u16| {
        // Both zeros of one's complement are right, but in UDP, whose zero is none.
        if found != right && !(found == u16::MAX && right == 0) {
            faults.push(Fault { what, found, right });
        }
    };
    if layers.src.is_ipv4() {
        let header = &bytes[layers.ip..layers.body];
        let found = u16::from_be_bytes([header[10], header[11]]);
        let right = without(header, 10, 0);
        judge(name("IPv4 header", "inner IPv4 header"), found, right);
    }
    let whole = layers.body <= layers.end && layers.end <= bytes.len();
    if layers.is_fragment() || !whole {
        return;
    }
    let body = &bytes[layers.body..layers.end];
    let sum = checksum::pseudo(layers.src, layers.dst, layers.proto, body.len());
    let (what, at, start) = match layers.proto {
        wire::TCP => (name("TCP", "inner TCP"), 16, sum),
        wire::UDP => (name("UDP", "inner UDP"), 6, sum),
        wire::ICMP => (name("ICMP", "inner ICMP"), 2, 0),
        wire::ICMPV6 => (name("ICMPv6", "inner ICMPv6"), 2, sum),
        _ => return,
    };
    let Some(found) = u16_at(body, at) else { return };
    let right = without(body, at, start);
    if layers.proto == wire::UDP {
        // The datagram says its own length, and is no longer than its packet.
        if found == 0 && layers.src.is_ipv4() {
            return;
        }
        judge(what, found, if right == 0 { u16::MAX } else { right });
    } else {
        judge(what, found, right);
    }
}

/// The checksum of bytes as if the one that stands at `at` were zero.
fn without(bytes: &[u8], at: usize, start: u32) -> u16 {
    let mut copy = bytes.to_vec();
    copy[at..at + 2].fill(0);
    checksum::fold(start + checksum::sum(&copy))
}

/// Whether two packets are the same, byte for byte, but for the two zeros that a checksum of TCP, ICMP or IPv4 may have.
pub fn same(one: &[u8], other: &[u8], bare: bool) -> bool {
    if one == other {
        return true;
    }
    if one.len() != other.len() {
        return false;
    }
    let Ok(outer) = layers(other, bare) else { return false };
    let mut places = checksums(&outer);
    if let Some(inner) = inner(other, &outer) {
        places.extend(checksums(&inner.layers));
    }
    let mut copy = one.to_vec();
    for at in places {
        let (Some(a), Some(b)) = (u16_at(one, at), u16_at(other, at)) else {
            continue;
        };
        if (a == 0 || a == u16::MAX) && (b == 0 || b == u16::MAX) {
            copy[at..at + 2].copy_from_slice(&other[at..at + 2]);
        }
    }
    copy == other
}

/// Where the checksums of a packet lie, but those of UDP.
fn checksums(layers: &Layers) -> Vec<usize> {
    let mut places = Vec::new();
    if layers.src.is_ipv4() {
        places.push(layers.ip + 10);
    }
    if !layers.is_later_fragment() {
        match layers.proto {
            wire::TCP => places.push(layers.body + 16),
            wire::ICMP | wire::ICMPV6 => places.push(layers.body + 2),
            _ => {}
        }
    }
    places
}

#[cfg(test)]
mod tests;
