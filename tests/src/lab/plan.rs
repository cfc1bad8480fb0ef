//! Which address belongs to whom in the lab: pure arithmetic, one line a kind.
//!
//! Nobody's real addresses: documentation and private blocks, in both families alike. The invariant: no two of these
//! functions give one address.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

/// The port that pods serve on: TCP, and UDP that may be fragmented.
pub const TARGET: u16 = 8080;
/// A second TCP port that pods serve on.
pub const TARGET_SECOND: u16 = 8082;
/// The UDP port of pods whose answers must not be fragmented.
pub const TARGET_DF: u16 = 8081;
/// A port that no pod serves on.
pub const CLOSED: u16 = 9;
/// Nodes of the lab.
pub const NODES: u8 = 3;

/// An IP family; every case runs in both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// Both families.
    pub const ALL: [Self; 2] = [Self::V4, Self::V6];

    fn pick(self, v4: [u8; 4], v6: [u16; 8]) -> IpAddr {
        match self {
            Self::V4 => Ipv4Addr::from(v4).into(),
            Self::V6 => Ipv6Addr::from(v6).into(),
        }
    }

    /// The prefix length of one address.
    pub const fn host_len(self) -> u8 {
        match self {
            Self::V4 => 32,
            Self::V6 => 128,
        }
    }

    /// As EndpointSlices and Services write it.
    pub const fn kubernetes_name(self) -> &'static str {
        match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V4 => "v4",
            Self::V6 => "v6",
        })
    }
}

/// A block of addresses and its prefix length.
pub type Block = (IpAddr, u8);

/// Address number `n` of the outside client, from 1.
pub fn client(family: Family, n: u8) -> IpAddr {
    family.pick(
        [203, 0, 113, 10 + n],
        [0x2001, 0xdb8, 0xc, 0, 0, 0, 0, 0x10 + u16::from(n)],
    )
}

/// The router's address towards the outside client.
pub fn client_gateway(family: Family) -> IpAddr {
    family.pick([203, 0, 113, 1], [0x2001, 0xdb8, 0xc, 0, 0, 0, 0, 1])
}

/// The client beyond the narrow link.
pub fn far(family: Family) -> IpAddr {
    family.pick([192, 0, 2, 10], [0x2001, 0xdb8, 0xf, 0, 0, 0, 0, 0x10])
}

/// The gateway of the client beyond the narrow link.
pub fn far_gateway(family: Family) -> IpAddr {
    family.pick([192, 0, 2, 1], [0x2001, 0xdb8, 0xf, 0, 0, 0, 0, 1])
}

/// The block of the client beyond the narrow link.
pub fn far_block(family: Family) -> Block {
    match family {
        Family::V4 => (family.pick([192, 0, 2, 0], [0; 8]), 24),
        Family::V6 => (family.pick([0; 4], [0x2001, 0xdb8, 0xf, 0, 0, 0, 0, 0]), 64),
    }
}

/// The ends of a transfer link: number `link`, end 1 or 2.
pub fn transfer(family: Family, link: u8, end: u8) -> IpAddr {
    family.pick(
        [10, 1, link, end],
        [0xfd00, 1, 0, u16::from(link), 0, 0, 0, u16::from(end)],
    )
}

/// The address of the control plane's machine.
pub fn control(family: Family) -> IpAddr {
    family.pick([10, 2, 0, 2], [0xfd00, 2, 0, 0, 0, 0, 0, 2])
}

/// The router's address towards the control plane.
pub fn control_gateway(family: Family) -> IpAddr {
    family.pick([10, 2, 0, 1], [0xfd00, 2, 0, 0, 0, 0, 0, 1])
}

/// The node's address on its uplink: its node address.
pub fn node(family: Family, node: u8) -> IpAddr {
    family.pick([10, 0, node, 2], [0xfd00, 0, 0, u16::from(node), 0, 0, 0, 2])
}

/// The router's address towards a node.
pub fn node_gateway(family: Family, node: u8) -> IpAddr {
    family.pick([10, 0, node, 1], [0xfd00, 0, 0, u16::from(node), 0, 0, 0, 1])
}

/// The range of a node's pods.
pub fn pod_block(family: Family, node: u8) -> Block {
    match family {
        Family::V4 => (pod(family, node, 0), 24),
        Family::V6 => (pod(family, node, 0), 64),
    }
}

/// Pod `n` of a node.
pub fn pod(family: Family, node: u8, n: u8) -> IpAddr {
    family.pick(
        [10, 244, node, n],
        [0xfd00, 0x244, 0, u16::from(node), 0, 0, 0, u16::from(n)],
    )
}

/// The address that a node's pods have as their gateway, on each pod's link.
pub fn pod_gateway(family: Family, node: u8) -> IpAddr {
    pod(family, node, 254)
}

/// Cluster address `n`.
pub fn cluster_ip(family: Family, n: u8) -> IpAddr {
    family.pick([10, 96, 0, n], [0xfd00, 0x96, 0, 0, 0, 0, 0, u16::from(n)])
}

/// Address `n` that is routed to a node from outside: for external IPs and load balancers.
pub fn routed(family: Family, n: u8) -> IpAddr {
    family.pick([198, 51, 100, n], [0x2001, 0xdb8, 0xe, 0, 0, 0, 0, u16::from(n)])
}

/// The block of [`routed`].
pub fn routed_block(family: Family) -> Block {
    match family {
        Family::V4 => (routed(family, 0), 24),
        Family::V6 => (routed(family, 0), 64),
    }
}

/// With a port.
pub const fn at(address: IpAddr, port: u16) -> SocketAddr {
    SocketAddr::new(address, port)
}
