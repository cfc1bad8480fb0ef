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
}
shared_layout!(Frontend, size 16, align 4);

/// Bits of [`Frontend::flags`].
pub mod flag {
    /// An empty set answers EHOSTUNREACH instead of ECONNREFUSED.
    pub const UNREACHABLE_WHEN_EMPTY: u32 = 1 << 0;
    /// Two bits at this shift say the kind: 0 ClusterIP, 1 NodePort, 2 ExternalIP, 3 LoadBalancer.
    pub const KIND_SHIFT: u32 = 8;
    /// Mask of the kind before the shift.
    pub const KIND_MASK: u32 = 0b11;
}
