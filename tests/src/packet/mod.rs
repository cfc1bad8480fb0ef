//! Packets as tests speak of them: built header by header, read back with every checksum checked, and told in one line.
//!
//! All of it is written apart from the product's parser, from the RFCs alone, so that a test does not believe what it
//! checks. The invariant: a built packet is whole and right, unless its test has asked for something wrong.

mod build;
pub mod checksum;
mod read;
mod tell;

pub use build::{Body, Extension, Fragment, Icmp, Link, Packet, Tag, Tcp, Udp, error, fragments, tcp, udp};
pub use read::{Fault, Inner, Layers, Unread, check, inner, layers, ports, same};
pub use tell::{hex, tell};

/// Lengths of headers and numbers of protocols.
pub mod wire {
    /// Bytes of an Ethernet header.
    pub const ETHERNET: usize = 14;
    /// Bytes of a VLAN tag.
    pub const TAG: usize = 4;
    /// `EtherType` of IPv4.
    pub const IPV4: u16 = 0x0800;
    /// `EtherType` of IPv6.
    pub const IPV6: u16 = 0x86dd;
    /// `EtherType` of a customer's VLAN tag.
    pub const VLAN: u16 = 0x8100;
    /// `EtherType` of a service provider's VLAN tag.
    pub const QINQ: u16 = 0x88a8;
    /// Hop-by-hop options.
    pub const HOP_BY_HOP: u8 = 0;
    /// ICMP.
    pub const ICMP: u8 = 1;
    /// TCP.
    pub const TCP: u8 = 6;
    /// UDP.
    pub const UDP: u8 = 17;
    /// Routing header.
    pub const ROUTING: u8 = 43;
    /// Fragment header.
    pub const FRAGMENT: u8 = 44;
    /// ICMPv6.
    pub const ICMPV6: u8 = 58;
    /// No next header.
    pub const NONE: u8 = 59;
    /// Destination options.
    pub const DESTINATION: u8 = 60;
}

/// Flags of TCP.
pub mod flags {
    /// No more data.
    pub const FIN: u8 = 1;
    /// Synchronise.
    pub const SYN: u8 = 2;
    /// Reset.
    pub const RST: u8 = 4;
    /// Push.
    pub const PSH: u8 = 8;
    /// Acknowledge.
    pub const ACK: u8 = 16;
}
