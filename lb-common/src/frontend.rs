//! Frontends: what clients dial.

use crate::{
    abi::shared_layout,
    addr::{Addr, Port},
};

/// Key of the frontend map: (address, port, protocol).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FrontendKey {
    /// The dialled address.
    pub addr: Addr,
    /// The dialled port, network order.
    pub port: Port,
    /// [`crate::abi::TCP`] or [`crate::abi::UDP`].
    pub proto: u8,
    /// Always 0.
    pub pad: u8,
}
shared_layout!(FrontendKey, size 20, align 4);

impl FrontendKey {
    /// Makes a key.
    #[inline(always)]
    pub const fn new(addr: Addr, port: Port, proto: u8) -> Self {
        Self {
            addr,
            port,
            proto,
            pad: 0,
        }
    }
}

/// Value of the frontend map.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Frontend {
    /// Index into the service counters.
    pub service_id: u32,
    /// Index into the sets.
    pub set_id: u32,
    /// Bits of [`flag`].
    pub flags: u32,
    /// ClientIP affinity's timeout in seconds; 0 is no affinity.
    pub affinity_seconds: u32,
    /// Index into the sets for clients outside the node; equal to `set_id` where both see the same endpoints.
    pub outside_set_id: u32,
    /// Always 0.
    pub pad: u32,
}
shared_layout!(Frontend, size 24, align 4);

/// Bits of [`Frontend::flags`].
pub mod flag {
    /// An empty set answers EHOSTUNREACH instead of ECONNREFUSED; to a guest's packets it answers nothing.
    pub const UNREACHABLE_WHEN_EMPTY: u32 = 1 << 0;
    /// Served to clients outside the node too: node ports, external IPs, addresses of load balancers.
    pub const OUTSIDE: u32 = 1 << 1;
    /// An empty outside set answers nothing (C9), instead of refusing (C11).
    pub const SILENT_WHEN_EMPTY_OUTSIDE: u32 = 1 << 2;
    /// A flow from outside to a backend beyond this node's uplinks leaves with the node's own source (policy Cluster, C17).
    pub const MASQUERADE_OUTSIDE: u32 = 1 << 3;
    /// From outside, only sources in [`crate::maps::SOURCES`] are admitted (C14).
    pub const SOURCE_RANGES: u32 = 1 << 4;
    /// Two bits at this shift say the kind: 0 ClusterIP, 1 NodePort, 2 ExternalIP, 3 LoadBalancer.
    pub const KIND_SHIFT: u32 = 8;
    /// Mask of the kind before the shift.
    pub const KIND_MASK: u32 = 0b11;
}

/// Key of the source ranges, behind a prefix length in bits: 32 for the Service, and those of the range as it stands in an
/// [`Addr`] (an IPv4 range of /24 has 32 + 96 + 24).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SourceKey {
    /// The Service.
    pub service_id: u32,
    /// The client, or the range's first address.
    pub addr: Addr,
}
shared_layout!(SourceKey, size 20, align 4);

impl SourceKey {
    /// Bits of a whole key: one client of one Service.
    pub const BITS: u32 = 160;
}
