//! Reading packets: Ethernet with VLAN tags or no link header, IPv4 with options, IPv6 with extension headers, TCP, UDP, and
//! the packets that ICMP errors tell about.
//!
//! Generic over where the bytes lie ([`Read`]): the kernel programs read a socket buffer, tests and the fuzzer a slice. What
//! is found is never trusted further than it was read; a packet that is cut off, or longer in headers than is looked at, is
//! [`kind::MALFORMED`], not guessed. Checksums are not verified here: whoever receives the packet does.

use network_types::{
    eth::EtherType,
    icmp::{Icmpv4Type, Icmpv6Type},
    ip::{IpProto, Ipv4Hdr, Ipv6Hdr},
};

use crate::{
    abi::{TCP, UDP},
    addr::{Addr, Port},
};

/// Most VLAN tags that are looked behind: a provider's and a customer's.
pub const MAX_TAGS: u32 = 2;
/// Most IPv6 extension headers that are looked behind.
pub const MAX_EXTENSIONS: u32 = 6;
/// Bytes of an Ethernet header without tags.
pub const ETHERNET: usize = 14;
/// Bytes of a VLAN tag.
const TAG: usize = 4;
/// Bytes of the part of an ICMP error before the packet it tells about.
pub const ICMP: usize = 8;

// ICMP types that the header crate does not name (RFC 792, RFC 4443).
const V4_TIME_EXCEEDED: u8 = 11;
const V6_UNREACHABLE: u8 = 1;
const V6_TIME_EXCEEDED: u8 = 3;

/// Bytes as they lie on the wire.
///
/// # Safety
///
/// Every bit pattern is a value, there is no padding, and the alignment is 1.
pub unsafe trait Wire: Copy {}

// SAFETY: bytes.
unsafe impl<const N: usize> Wire for [u8; N] {}
// SAFETY: made of bytes and arrays of bytes alone.
unsafe impl Wire for Ipv4Hdr {}
// SAFETY: made of bytes and arrays of bytes alone.
unsafe impl Wire for Ipv6Hdr {}

/// Where a packet's bytes lie.
pub trait Read {
    /// The bytes at an offset from the packet's beginning; `None` if the packet ends before.
    fn read<T: Wire>(&self, offset: usize) -> Option<T>;
}

/// A packet in memory.
impl Read for &[u8] {
    fn read<T: Wire>(&self, offset: usize) -> Option<T> {
        let bytes = self.get(offset..)?.get(..size_of::<T>())?;
        // SAFETY: the slice has the size of `T`, of which every bit pattern is a value; read without alignment.
        Some(unsafe { bytes.as_ptr().cast::<T>().read_unaligned() })
    }
}

/// Values of [`Packet::kind`].
pub mod kind {
    /// Neither TCP nor UDP over IP, nor an ICMP error.
    pub const FOREIGN: u8 = 0;
    /// Headers that are cut off, contradict themselves, or are more than are looked behind.
    pub const MALFORMED: u8 = 1;
    /// TCP or UDP.
    pub const TRANSPORT: u8 = 2;
    /// An ICMP error: `transport` is where the ICMP header begins, and ports mean nothing.
    pub const ERROR: u8 = 3;
}

/// Values of [`Packet::fragment`].
pub mod fragment {
    /// The packet is whole.
    pub const WHOLE: u8 = 0;
    /// It is the first fragment, with the ports.
    pub const FIRST: u8 = 1;
    /// It is a later fragment: it has no ports.
    pub const LATER: u8 = 2;
}

/// What was read of a packet; what its kind does not have is 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Packet {
    /// Source address.
    pub src: Addr,
    /// Destination address.
    pub dst: Addr,
    /// Offset of the IP header, in bytes.
    pub network: u32,
    /// Offset of the TCP, UDP or ICMP header, in bytes.
    pub transport: u32,
    /// The identification of a fragment's datagram, as it lies on the wire.
    pub id: u32,
    /// TCP: the sequence number, as it lies on the wire.
    pub sequence: u32,
    /// Source port, network order.
    pub src_port: Port,
    /// Destination port, network order.
    pub dst_port: Port,
    /// IPv4: the header's checksum, as it lies on the wire.
    pub check: u16,
    /// One of [`kind`].
    pub kind: u8,
    /// [`TCP`] or [`UDP`].
    pub proto: u8,
    /// TCP: the flags byte.
    pub tcp_flags: u8,
    /// One of [`fragment`].
    pub fragment: u8,
    /// Whether it is IPv6.
    pub is_v6: bool,
}

/// How much of the transport header must be there.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Depth {
    /// All that is looked at in a packet.
    Whole,
    /// The ports: an ICMP error gives eight bytes of the packet that it tells about.
    Ports,
}

/// Reads a packet whose link header has `link` bytes (0 or [`ETHERNET`]) and says `protocol` (network order).
///
/// What is found is written to where it is to be, piece by piece: a kernel program has no room for copies.
#[inline(always)]
pub fn read<R: Read>(bytes: &R, link: usize, protocol: u16, packet: &mut Packet) {
    *packet = Packet::default();
    let mut protocol = protocol;
    let mut offset = link;
    let mut tags = 0;
    while tags < MAX_TAGS && is_tag(protocol) {
        // A tag is two bytes of control and two of the next protocol. Its own protocol lies before it.
        let Some(next) = bytes.read::<[u8; 2]>(offset + 2) else {
            packet.kind = kind::MALFORMED;
            return;
        };
        protocol = u16::from_ne_bytes(next);
        offset += TAG;
        tags += 1;
    }
    if protocol == EtherType::Ipv4 as u16 {
        packet.kind = v4(bytes, offset, Depth::Whole, packet);
    } else if protocol == EtherType::Ipv6 as u16 {
        packet.kind = v6(bytes, offset, Depth::Whole, packet);
    }
}

/// Reads the packet that an ICMP error tells about: the beginning of one that was sent. Only whole ones and first fragments
/// have ports; others, and what is neither TCP nor UDP, are [`kind::FOREIGN`].
#[inline(always)]
pub fn read_inside<R: Read>(bytes: &R, error: &Packet, inside: &mut Packet) {
    *inside = Packet::default();
    let offset = error.transport as usize + ICMP;
    let kind = if error.is_v6 {
        v6(bytes, offset, Depth::Ports, inside)
    } else {
        v4(bytes, offset, Depth::Ports, inside)
    };
    inside.kind = if kind == kind::TRANSPORT && inside.fragment == fragment::LATER {
        kind::FOREIGN
    } else {
        kind
    };
}

#[inline(always)]
const fn is_tag(protocol: u16) -> bool {
    protocol == EtherType::Ieee8021q as u16 || protocol == EtherType::Ieee8021ad as u16
}

#[inline(always)]
fn v4<R: Read>(bytes: &R, offset: usize, depth: Depth, packet: &mut Packet) -> u8 {
    let Some(ip) = bytes.read::<Ipv4Hdr>(offset) else {
        return kind::MALFORMED;
    };
    let length = (ip.vihl & 0x0f) as usize * 4;
    if ip.vihl >> 4 != 4 || length < Ipv4Hdr::LEN {
        return kind::MALFORMED;
    }
    let fragments = u16::from_be_bytes(ip.frags);
    packet.fragment = if fragments & 0x1fff != 0 {
        fragment::LATER
    } else if fragments & 0x2000 != 0 {
        fragment::FIRST
    } else {
        fragment::WHOLE
    };
    packet.src = Addr::from_v4(u32::from_ne_bytes(ip.src_addr));
    packet.dst = Addr::from_v4(u32::from_ne_bytes(ip.dst_addr));
    packet.network = offset as u32;
    packet.transport = (offset + length) as u32;
    packet.id = u16::from_ne_bytes(ip.id) as u32;
    packet.check = u16::from_ne_bytes(ip.check);
    packet.proto = ip.proto;
    transport(bytes, IpProto::Icmp as u8, depth, packet)
}

#[inline(always)]
fn v6<R: Read>(bytes: &R, offset: usize, depth: Depth, packet: &mut Packet) -> u8 {
    let Some(ip) = bytes.read::<Ipv6Hdr>(offset) else {
        return kind::MALFORMED;
    };
    if ip.vcf[0] >> 4 != 6 {
        return kind::MALFORMED;
    }
    packet.src = Addr::from_octets(ip.src_addr);
    packet.dst = Addr::from_octets(ip.dst_addr);
    // The maps hold IPv4 addresses in the mapped form, which no packet has: it would be taken for one of the other family.
    if packet.src.is_v4() || packet.dst.is_v4() {
        return kind::FOREIGN;
    }
    packet.network = offset as u32;
    packet.proto = ip.next_hdr;
    packet.is_v6 = true;
    packet.transport = (offset + Ipv6Hdr::LEN) as u32;
    let mut extensions = 0;
    while is_extension(packet.proto) {
        if extensions == MAX_EXTENSIONS {
            return kind::MALFORMED;
        }
        extensions += 1;
        // All of them have at least eight bytes, and begin with what comes next and their length.
        let Some([next, length, high, low, a, b, c, d]) = bytes.read::<[u8; 8]>(packet.transport as usize) else {
            return kind::MALFORMED;
        };
        if packet.proto != IpProto::Ipv6Frag as u8 {
            packet.proto = next;
            packet.transport += (length as u32 + 1) * 8;
            continue;
        }
        packet.proto = next;
        packet.transport += 8;
        packet.id = u32::from_ne_bytes([a, b, c, d]);
        // The offset is the upper 13 bits; the last one says that more fragments follow. A fragment with neither is whole.
        if high != 0 || low & 0xf8 != 0 {
            packet.fragment = fragment::LATER;
            break;
        }
        packet.fragment = if low & 1 != 0 { fragment::FIRST } else { fragment::WHOLE };
    }
    transport(bytes, IpProto::Ipv6Icmp as u8, depth, packet)
}

#[inline(always)]
const fn is_extension(proto: u8) -> bool {
    proto == IpProto::HopOpt as u8
        || proto == IpProto::Ipv6Route as u8
        || proto == IpProto::Ipv6Opts as u8
        || proto == IpProto::Ipv6Frag as u8
}

#[inline(always)]
fn transport<R: Read>(bytes: &R, icmp: u8, depth: Depth, packet: &mut Packet) -> u8 {
    let at = packet.transport as usize;
    if packet.proto != TCP && packet.proto != UDP {
        // An error in fragments is nobody's business: it is put together where it is received.
        if packet.proto != icmp || depth == Depth::Ports || packet.fragment != fragment::WHOLE {
            return kind::FOREIGN;
        }
        return match bytes.read::<[u8; 1]>(at) {
            Some([kind]) if is_error(kind, packet.is_v6) => kind::ERROR,
            Some(_) => kind::FOREIGN,
            None => kind::MALFORMED,
        };
    }
    if packet.fragment == fragment::LATER {
        return kind::TRANSPORT;
    }
    if packet.proto == TCP && depth == Depth::Whole {
        let Some(tcp) = bytes.read::<[u8; 20]>(at) else {
            return kind::MALFORMED;
        };
        packet.src_port = Port(u16::from_ne_bytes([tcp[0], tcp[1]]));
        packet.dst_port = Port(u16::from_ne_bytes([tcp[2], tcp[3]]));
        packet.sequence = u32::from_ne_bytes([tcp[4], tcp[5], tcp[6], tcp[7]]);
        packet.tcp_flags = tcp[13];
        return kind::TRANSPORT;
    }
    let Some(head) = bytes.read::<[u8; 8]>(at) else {
        return kind::MALFORMED;
    };
    packet.src_port = Port(u16::from_ne_bytes([head[0], head[1]]));
    packet.dst_port = Port(u16::from_ne_bytes([head[2], head[3]]));
    kind::TRANSPORT
}

/// Whether an ICMP type is an error, which has a packet inside.
#[inline(always)]
const fn is_error(kind: u8, is_v6: bool) -> bool {
    if is_v6 {
        kind == V6_UNREACHABLE
            || kind == Icmpv6Type::PacketTooBig as u8
            || kind == V6_TIME_EXCEEDED
            || kind == Icmpv6Type::ParameterProblem as u8
    } else {
        kind == Icmpv4Type::DestinationUnreachable as u8
            || kind == V4_TIME_EXCEEDED
            || kind == Icmpv4Type::ParameterProblem as u8
    }
}
