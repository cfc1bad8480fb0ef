//! Building packets. What is not said has a plausible value.

use std::net::{IpAddr, SocketAddr};

use super::{checksum, flags, wire};

/// A VLAN tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tag {
    /// Its `EtherType`.
    pub ether_type: u16,
    /// Priority and VLAN.
    pub control: u16,
}

/// What stands before the IP header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Link {
    /// An Ethernet header and tags.
    Ethernet(Vec<Tag>),
    /// Nothing: a device without link headers.
    None,
}

/// An extension header of IPv6.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extension {
    /// Hop-by-hop, routing or destination options.
    pub kind: u8,
    /// Its bytes after the first two; padded to a multiple of eight bytes.
    pub body: Vec<u8>,
}

/// The place of a fragment in its datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fragment {
    /// The identification: 16 bits in IPv4.
    pub id: u32,
    /// The offset in units of eight bytes.
    pub offset: u16,
    /// Whether more fragments follow.
    pub more: bool,
}

/// A TCP segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tcp {
    /// Source port.
    pub src: u16,
    /// Destination port.
    pub dst: u16,
    /// Sequence number.
    pub seq: u32,
    /// Acknowledgement number.
    pub ack: u32,
    /// Bits of [`flags`].
    pub flags: u8,
    /// The window.
    pub window: u16,
    /// Options; padded to a multiple of four bytes.
    pub options: Vec<u8>,
    /// What it carries.
    pub payload: Vec<u8>,
}

/// A UDP datagram.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Udp {
    /// Source port.
    pub src: u16,
    /// Destination port.
    pub dst: u16,
    /// Whether it has a checksum; IPv4 allows none.
    pub checksum: bool,
    /// What it carries.
    pub payload: Vec<u8>,
}

/// A message of ICMP or ICMPv6.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Icmp {
    /// The type.
    pub kind: u8,
    /// The code.
    pub code: u8,
    /// The four bytes after the checksum.
    pub rest: u32,
    /// What follows: for an error, the packet that it is about, cut somewhere.
    pub payload: Vec<u8>,
}

/// What an IP packet carries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// TCP.
    Tcp(Tcp),
    /// UDP.
    Udp(Udp),
    /// ICMP or ICMPv6.
    Icmp(Icmp),
    /// Another protocol, or bytes as they are.
    Raw(u8, Vec<u8>),
}

/// A packet to be built.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet {
    /// What stands before the IP header.
    pub link: Link,
    /// Source address.
    pub src: IpAddr,
    /// Destination address.
    pub dst: IpAddr,
    /// Type of service, or traffic class.
    pub tos: u8,
    /// Time to live, or hop limit.
    pub ttl: u8,
    /// IPv4: identification of a packet that is no fragment.
    pub id: u16,
    /// IPv4: may not be fragmented.
    pub whole: bool,
    /// IPv4: options; padded to a multiple of four bytes.
    pub options: Vec<u8>,
    /// IPv6: extension headers before a fragment header.
    pub extensions: Vec<Extension>,
    /// Where it is a fragment: its place.
    pub fragment: Option<Fragment>,
    /// What it carries.
    pub body: Body,
    /// What is added to the right checksum of the IPv4 header; 0 is right.
    pub header_fault: u16,
    /// What is added to the right checksum of what it carries; 0 is right.
    pub body_fault: u16,
    /// Bytes behind the end of the IP packet, as padding to Ethernet's least length leaves them.
    pub trailer: Vec<u8>,
}

fn packet(src: IpAddr, dst: IpAddr, body: Body) -> Packet {
    Packet {
        link: Link::Ethernet(Vec::new()),
        src,
        dst,
        tos: 0,
        ttl: 64,
        id: 0x1234,
        whole: true,
        options: Vec::new(),
        extensions: Vec::new(),
        fragment: None,
        body,
        header_fault: 0,
        body_fault: 0,
        trailer: Vec::new(),
    }
}

/// A TCP segment without payload.
pub fn tcp(src: SocketAddr, dst: SocketAddr, flags: u8) -> Packet {
    let segment = Tcp {
        src: src.port(),
        dst: dst.port(),
        seq: 1_000,
        ack: if flags & flags::ACK == 0 { 0 } else { 7_000 },
        flags,
        window: 64_240,
        options: Vec::new(),
        payload: Vec::new(),
    };
    packet(src.ip(), dst.ip(), Body::Tcp(segment))
}

/// A UDP datagram.
pub fn udp(src: SocketAddr, dst: SocketAddr, payload: &[u8]) -> Packet {
    let datagram = Udp {
        src: src.port(),
        dst: dst.port(),
        checksum: true,
        payload: payload.to_vec(),
    };
    packet(src.ip(), dst.ip(), Body::Udp(datagram))
}

/// An ICMP or ICMPv6 message about a packet, of which it holds the first `length` bytes.
pub fn error(src: IpAddr, dst: IpAddr, (kind, code, rest): (u8, u8, u32), about: &Packet, length: usize) -> Packet {
    let mut payload = about.ip_bytes();
    payload.truncate(length);
    packet(
        src,
        dst,
        Body::Icmp(Icmp {
            kind,
            code,
            rest,
            payload,
        }),
    )
}

impl Packet {
    /// Another packet between other ends: addresses, and ports where it has some.
    #[must_use]
    pub fn between(self, src: SocketAddr, dst: SocketAddr) -> Self {
        self.from(src).to(dst)
    }

    /// From another source.
    #[must_use]
    pub fn from(mut self, end: SocketAddr) -> Self {
        self.src = end.ip();
        match &mut self.body {
            Body::Tcp(tcp) => tcp.src = end.port(),
            Body::Udp(udp) => udp.src = end.port(),
            Body::Icmp(_) | Body::Raw(..) => {}
        }
        self
    }

    /// To another destination.
    #[must_use]
    pub fn to(mut self, end: SocketAddr) -> Self {
        self.dst = end.ip();
        match &mut self.body {
            Body::Tcp(tcp) => tcp.dst = end.port(),
            Body::Udp(udp) => udp.dst = end.port(),
            Body::Icmp(_) | Body::Raw(..) => {}
        }
        self
    }

    /// With other addresses alone, as a later fragment or an ICMP message has them.
    #[must_use]
    pub fn addresses(mut self, src: IpAddr, dst: IpAddr) -> Self {
        self.src = src;
        self.dst = dst;
        self
    }

    /// In one more VLAN, outside those that it has.
    #[must_use]
    pub fn vlan(mut self, control: u16) -> Self {
        if let Link::Ethernet(tags) = &mut self.link {
            let ether_type = if tags.is_empty() { wire::VLAN } else { wire::QINQ };
            tags.insert(0, Tag { ether_type, control });
        }
        self
    }

    /// Without a link header.
    #[must_use]
    pub fn bare(mut self) -> Self {
        self.link = Link::None;
        self
    }

    /// With a type of service or traffic class.
    #[must_use]
    pub fn tos(mut self, tos: u8) -> Self {
        self.tos = tos;
        self
    }

    /// With a time to live or hop limit.
    #[must_use]
    pub fn ttl(mut self, ttl: u8) -> Self {
        self.ttl = ttl;
        self
    }

    /// With an identification (IPv4).
    #[must_use]
    pub fn id(mut self, id: u16) -> Self {
        self.id = id;
        self
    }

    /// May be fragmented on its way (IPv4).
    #[must_use]
    pub fn divisible(mut self) -> Self {
        self.whole = false;
        self
    }

    /// With options of IPv4.
    #[must_use]
    pub fn options(mut self, options: &[u8]) -> Self {
        self.options = options.to_vec();
        self
    }

    /// With one more extension header of IPv6.
    #[must_use]
    pub fn extension(mut self, kind: u8, body: &[u8]) -> Self {
        self.extensions.push(Extension {
            kind,
            body: body.to_vec(),
        });
        self
    }

    /// As a fragment; its body is what this fragment holds.
    #[must_use]
    pub fn fragment(mut self, id: u32, offset: u16, more: bool) -> Self {
        self.fragment = Some(Fragment { id, offset, more });
        self
    }

    /// TCP: with a sequence number.
    #[must_use]
    pub fn seq(mut self, seq: u32) -> Self {
        if let Body::Tcp(tcp) = &mut self.body {
            tcp.seq = seq;
        }
        self
    }

    /// TCP: with an acknowledgement number.
    #[must_use]
    pub fn ack(mut self, ack: u32) -> Self {
        if let Body::Tcp(tcp) = &mut self.body {
            tcp.ack = ack;
        }
        self
    }

    /// TCP: with a window.
    #[must_use]
    pub fn window(mut self, window: u16) -> Self {
        if let Body::Tcp(tcp) = &mut self.body {
            tcp.window = window;
        }
        self
    }

    /// TCP: with options.
    #[must_use]
    pub fn tcp_options(mut self, options: &[u8]) -> Self {
        if let Body::Tcp(tcp) = &mut self.body {
            tcp.options = options.to_vec();
        }
        self
    }

    /// With a payload.
    #[must_use]
    pub fn payload(mut self, bytes: &[u8]) -> Self {
        match &mut self.body {
            Body::Tcp(Tcp { payload, .. }) | Body::Udp(Udp { payload, .. }) | Body::Icmp(Icmp { payload, .. }) => {
                *payload = bytes.to_vec();
            }
            Body::Raw(_, raw) => *raw = bytes.to_vec(),
        }
        self
    }

    /// UDP: without a checksum.
    #[must_use]
    pub fn unsummed(mut self) -> Self {
        if let Body::Udp(udp) = &mut self.body {
            udp.checksum = false;
        }
        self
    }

    /// With a wrong checksum in the IPv4 header: the right one and so much.
    #[must_use]
    pub fn wrong_header(mut self, by: u16) -> Self {
        self.header_fault = by;
        self
    }

    /// With a wrong checksum of TCP, UDP or ICMP: the right one and so much.
    #[must_use]
    pub fn wrong_body(mut self, by: u16) -> Self {
        self.body_fault = by;
        self
    }

    /// With bytes behind the end of the IP packet.
    #[must_use]
    pub fn trailer(mut self, bytes: &[u8]) -> Self {
        self.trailer = bytes.to_vec();
        self
    }

    /// The number of the protocol that it carries.
    pub fn proto(&self) -> u8 {
        match &self.body {
            Body::Tcp(_) => wire::TCP,
            Body::Udp(_) => wire::UDP,
            Body::Icmp(_) if self.src.is_ipv6() => wire::ICMPV6,
            Body::Icmp(_) => wire::ICMP,
            Body::Raw(proto, _) => *proto,
        }
    }

    /// The whole packet.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        if let Link::Ethernet(tags) = &self.link {
            // Locally administered addresses, as nobody's card has them.
            out.extend([2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2]);
            for tag in tags {
                out.extend(tag.ether_type.to_be_bytes());
                out.extend(tag.control.to_be_bytes());
            }
            let ether_type = if self.src.is_ipv6() { wire::IPV6 } else { wire::IPV4 };
            out.extend(ether_type.to_be_bytes());
        }
        out.extend(self.ip_bytes());
        out.extend(&self.trailer);
        out
    }

    /// The first bytes of the packet.
    pub fn cut(&self, length: usize) -> Vec<u8> {
        let mut bytes = self.bytes();
        bytes.truncate(length);
        bytes
    }

    /// The packet from its IP header on.
    pub fn ip_bytes(&self) -> Vec<u8> {
        self.around(&self.body_bytes())
    }

    /// The IP packet around a body of bytes.
    fn around(&self, body: &[u8]) -> Vec<u8> {
        match (self.src, self.dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                let mut header = vec![0, self.tos, 0, 0];
                let (id, place) = match self.fragment {
                    Some(f) => (f.id as u16, f.offset | u16::from(f.more) << 13),
                    None => (self.id, u16::from(self.whole) << 14),
                };
                header.extend(id.to_be_bytes());
                header.extend(place.to_be_bytes());
                header.extend([self.ttl, self.proto(), 0, 0]);
                header.extend(src.octets());
                header.extend(dst.octets());
                header.extend(&self.options);
                header.resize(header.len().next_multiple_of(4), 0);
                header[0] = 0x40 | (header.len() / 4) as u8;
                let total = (header.len() + body.len()) as u16;
                header[2..4].copy_from_slice(&total.to_be_bytes());
                let sum = checksum::of(&header).wrapping_add(self.header_fault);
                header[10..12].copy_from_slice(&sum.to_be_bytes());
                header.extend(body);
                header
            }
            (IpAddr::V6(src), IpAddr::V6(dst)) => {
                let mut rest = Vec::new();
                let mut first = self.proto();
                // From the last header to the first, for each names the next.
                if let Some(fragment) = self.fragment {
                    let place = fragment.offset << 3 | u16::from(fragment.more);
                    rest.extend([first, 0]);
                    rest.extend(place.to_be_bytes());
                    rest.extend(fragment.id.to_be_bytes());
                    first = wire::FRAGMENT;
                }
                for extension in self.extensions.iter().rev() {
                    let mut bytes = vec![first, 0];
                    bytes.extend(&extension.body);
                    bytes.resize(bytes.len().next_multiple_of(8), 0);
                    bytes[1] = (bytes.len() / 8 - 1) as u8;
                    bytes.extend(rest);
                    rest = bytes;
                    first = extension.kind;
                }
                rest.extend(body);
                let mut header = vec![0x60 | self.tos >> 4, self.tos << 4, 0, 0];
                header.extend((rest.len() as u16).to_be_bytes());
                header.extend([first, self.ttl]);
                header.extend(src.octets());
                header.extend(dst.octets());
                header.extend(rest);
                header
            }
            (src, dst) => panic!("{src} and {dst} are not of one family"),
        }
    }

    /// The transport header and what follows, checksum included.
    pub fn body_bytes(&self) -> Vec<u8> {
        let (mut bytes, at) = match &self.body {
            Body::Tcp(tcp) => (tcp.bytes(), 16),
            Body::Udp(udp) => (udp.bytes(), 6),
            Body::Icmp(icmp) => (icmp.bytes(), 2),
            Body::Raw(_, bytes) => return bytes.clone(),
        };
        let sum = match &self.body {
            Body::Icmp(_) if self.src.is_ipv4() => checksum::of(&bytes),
            Body::Udp(udp) if !udp.checksum => return bytes,
            _ => checksum::transport(self.src, self.dst, self.proto(), &bytes),
        };
        // In UDP no checksum is zero: zero is the absence of one.
        let sum = if sum == 0 && matches!(self.body, Body::Udp(_)) {
            u16::MAX
        } else {
            sum
        };
        bytes[at..at + 2].copy_from_slice(&sum.wrapping_add(self.body_fault).to_be_bytes());
        bytes
    }
}

impl Tcp {
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(self.src.to_be_bytes());
        bytes.extend(self.dst.to_be_bytes());
        bytes.extend(self.seq.to_be_bytes());
        bytes.extend(self.ack.to_be_bytes());
        bytes.extend([0, self.flags]);
        bytes.extend(self.window.to_be_bytes());
        bytes.extend([0; 4]);
        bytes.extend(&self.options);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes[12] = (bytes.len() / 4) as u8 * 16;
        bytes.extend(&self.payload);
        bytes
    }
}

impl Udp {
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(self.src.to_be_bytes());
        bytes.extend(self.dst.to_be_bytes());
        bytes.extend((8 + self.payload.len() as u16).to_be_bytes());
        bytes.extend([0; 2]);
        bytes.extend(&self.payload);
        bytes
    }
}

impl Icmp {
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![self.kind, self.code, 0, 0];
        bytes.extend(self.rest.to_be_bytes());
        bytes.extend(&self.payload);
        bytes
    }
}

/// Cuts a packet into fragments, each with so many bytes of its body at most; the checksum is that of the whole.
///
/// # Panics
/// When `length` is no multiple of eight.
pub fn fragments(packet: &Packet, id: u32, length: usize) -> Vec<Packet> {
    assert!(
        length.is_multiple_of(8) && length > 0,
        "fragments are multiples of eight"
    );
    let body = packet.body_bytes();
    let count = body.len().div_ceil(length);
    (0..count)
        .map(|i| {
            let part = &body[i * length..body.len().min((i + 1) * length)];
            let mut fragment = packet.clone().fragment(id, (i * length / 8) as u16, i + 1 < count);
            fragment.body = Body::Raw(packet.proto(), part.to_vec());
            fragment
        })
        .collect()
}
