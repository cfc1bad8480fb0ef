//! Backends: where connections go.

use crate::{
    abi::shared_layout,
    addr::{Addr, Port},
};

/// A backend: one Service's endpoint address and port. The map is an array indexed by backend id; id 0 is none.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Backend {
    /// Address of the endpoint.
    pub addr: Addr,
    /// Port of the endpoint, network order.
    pub port: Port,
    /// [`crate::abi::TCP`] or [`crate::abi::UDP`].
    pub proto: u8,
    /// One of [`state`].
    pub state: u8,
    /// The Service that the backend belongs to.
    pub service_id: u32,
    /// Always 0.
    pub pad: [u32; 2],
}
shared_layout!(Backend, size 32, align 4);

/// Values of [`Backend::state`].
pub mod state {
    /// The id is not in use.
    pub const VACANT: u8 = 0;
    /// May get new flows.
    pub const ACTIVE: u8 = 1;
    /// Keeps its flows, gets no new ones.
    pub const DRAINING: u8 = 2;
    /// Passed over by passive health.
    pub const EJECTED: u8 = 3;
}

/// Key of the index of backends: (address, port, protocol) of an endpoint, in one Service.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EndpointKey {
    /// Address of the endpoint.
    pub addr: Addr,
    /// Port of the endpoint, network order.
    pub port: Port,
    /// [`crate::abi::TCP`] or [`crate::abi::UDP`].
    pub proto: u8,
    /// Always 0.
    pub pad: u8,
    /// The Service whose backend is meant; 0 for whichever has one there.
    pub service_id: u32,
}
shared_layout!(EndpointKey, size 24, align 4);

impl EndpointKey {
    /// The key of an endpoint in one Service, or (0) in any.
    #[inline(always)]
    pub const fn new(addr: Addr, port: Port, proto: u8, service_id: u32) -> Self {
        Self {
            addr,
            port,
            proto,
            pad: 0,
            service_id,
        }
    }
}

/// What became of the connections of one kind.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Connections begun.
    pub connects: u64,
    /// Connections established.
    pub established: u64,
    /// Connections that failed to establish.
    pub failed: u64,
    /// Established connections that have ended; open ones are `established - closed`.
    pub closed: u64,
}
shared_layout!(Tally, size 32, align 8);

/// Counters of one backend, indexed by backend id, added to by all CPUs. They only grow while the id is in use.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BackendCounters {
    /// Of the node's own sockets that dialled a frontend. Begun is what chose this backend (balance), or was seen to have been
    /// led to it (observe); a datagram's flow counts as one.
    pub inside: Tally,
    /// Of clients that dialled the backend's own address: a userspace proxy, a headless Service's clients, probes.
    pub direct: Tally,
    /// Of clients whose packets came in from outside the node, or from a guest. They may be meant for fewer backends
    /// (externalTrafficPolicy), so that they are not among the others.
    pub outside: Tally,
}
shared_layout!(BackendCounters, size 96, align 8);

/// Counters of one Service, indexed by service id, added to by all CPUs.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServiceCounters {
    /// New connections and flows, translated (balance) or seen (observe).
    pub connects: u64,
    /// Refused or unreachable for want of a usable backend.
    pub rejected: u64,
    /// Connections established.
    pub established: u64,
    /// Established connections that have ended.
    pub closed: u64,
    /// Connections that failed, by [`crate::event::outcome`] (index = outcome).
    pub failed: [u64; 8],
    /// Of `connects`, those whose backend is known: all in balance mode, those seen after translation in observe mode.
    pub attributed: u64,
    /// Connections that dialled a backend's own address (observe mode alone); not among `connects`.
    pub direct: u64,
    /// Of `connects`, those that came in as packets: from outside the node, or from a guest.
    pub outside: u64,
}
shared_layout!(ServiceCounters, size 120, align 8);
