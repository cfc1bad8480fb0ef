//! Reading TCP segments out of packets: Ethernet with VLAN tags, IPv4 with options, IPv6 with extension headers.
//!
//! Headers are read through the helper, so that they may lie anywhere in the packet's memory.

use aya_ebpf::programs::TcContext;
use lb_common::{
    abi::TCP,
    addr::{Addr, Port},
};
use network_types::{
    eth::{EthHdr, EtherType},
    ip::{Ipv4Hdr, Ipv6Hdr},
    tcp::TcpHdr,
};

/// Most VLAN tags, and most IPv6 extension headers, that are skipped.
const MAX_TAGS: u32 = 2;
const MAX_EXTENSIONS: u32 = 6;

const TAG_LEN: usize = 4;
const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const DESTINATION: u8 = 60;

/// The ends and the flags of a TCP segment.
pub struct Segment {
    pub src: Addr,
    pub dst: Addr,
    pub src_port: Port,
    pub dst_port: Port,
    pub flags: u8,
}

/// The TCP segment that begins in this packet; `None` for anything else, later fragments included.
#[inline(always)]
pub fn segment(ctx: &TcContext) -> Option<Segment> {
    let eth: EthHdr = ctx.load(0).ok()?;
    let mut ether_type = eth.ether_type;
    let mut offset = EthHdr::LEN;
    let mut tags = 0;
    while tags < MAX_TAGS && (ether_type == EtherType::Ieee8021q as u16 || ether_type == EtherType::Ieee8021ad as u16) {
        // A tag is two bytes of control and two of the next type.
        ether_type = ctx.load(offset + 2).ok()?;
        offset += TAG_LEN;
        tags += 1;
    }
    if ether_type == EtherType::Ipv4 as u16 {
        v4(ctx, offset)
    } else if ether_type == EtherType::Ipv6 as u16 {
        v6(ctx, offset)
    } else {
        None
    }
}

#[inline(always)]
fn v4(ctx: &TcContext, offset: usize) -> Option<Segment> {
    let ip: Ipv4Hdr = ctx.load(offset).ok()?;
    if ip.proto != TCP || ip.frag_offset() != 0 {
        return None;
    }
    let length = (ip.vihl & 0x0f) as usize * 4;
    if length < Ipv4Hdr::LEN {
        return None;
    }
    let src = Addr::from_v4(u32::from_ne_bytes(ip.src_addr));
    let dst = Addr::from_v4(u32::from_ne_bytes(ip.dst_addr));
    tcp(ctx, offset + length, src, dst)
}

#[inline(always)]
fn v6(ctx: &TcContext, offset: usize) -> Option<Segment> {
    let ip: Ipv6Hdr = ctx.load(offset).ok()?;
    let src = words(ip.src_addr);
    let dst = words(ip.dst_addr);
    let mut next = ip.next_hdr;
    let mut offset = offset + Ipv6Hdr::LEN;
    let mut extensions = 0;
    while extensions < MAX_EXTENSIONS {
        match next {
            TCP => return tcp(ctx, offset, src, dst),
            HOP_BY_HOP | ROUTING | DESTINATION => {
                let [following, length]: [u8; 2] = ctx.load(offset).ok()?;
                next = following;
                offset += (length as usize + 1) * 8;
            }
            FRAGMENT => {
                let [following, _, high, low]: [u8; 4] = ctx.load(offset).ok()?;
                // The offset is the upper 13 bits: only the first fragment holds the TCP header.
                if high != 0 || low & 0xf8 != 0 {
                    return None;
                }
                next = following;
                offset += 8;
            }
            _ => return None,
        }
        extensions += 1;
    }
    None
}

#[inline(always)]
fn tcp(ctx: &TcContext, offset: usize, src: Addr, dst: Addr) -> Option<Segment> {
    let tcp: [u8; TcpHdr::LEN] = ctx.load(offset).ok()?;
    Some(Segment {
        src,
        dst,
        src_port: Port(u16::from_ne_bytes([tcp[0], tcp[1]])),
        dst_port: Port(u16::from_ne_bytes([tcp[2], tcp[3]])),
        flags: tcp[13],
    })
}

#[inline(always)]
fn words(octets: [u8; 16]) -> Addr {
    let o = octets;
    Addr {
        words: [
            u32::from_ne_bytes([o[0], o[1], o[2], o[3]]),
            u32::from_ne_bytes([o[4], o[5], o[6], o[7]]),
            u32::from_ne_bytes([o[8], o[9], o[10], o[11]]),
            u32::from_ne_bytes([o[12], o[13], o[14], o[15]]),
        ],
    }
}
