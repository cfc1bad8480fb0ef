//! Per-socket state: what the application dialled, so that it sees that address and not the backend's.
//!
//! These layouts have their own version ([`crate::abi::SOCKET_VERSION`]) and are append-only: sockets outlive agents.

use crate::{
    abi::shared_layout,
    addr::{Addr, Port},
};

/// State of a socket that dialled a frontend; the map is keyed by socket cookie.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketState {
    /// The frontend's address.
    pub vip: Addr,
    /// The socket's own address, known when the SYN leaves; zero before.
    pub client: Addr,
    /// When the socket was connected, nanoseconds of the monotonic clock.
    pub start_ns: u64,
    /// When the connection was established; 0 before.
    pub established_ns: u64,
    /// The Service.
    pub service_id: u32,
    /// The backend; 0 where it is not known (observe mode).
    pub backend_id: u32,
    /// The frontend's port, network order.
    pub vip_port: Port,
    /// The socket's own port, network order; 0 before the SYN.
    pub client_port: Port,
    /// [`crate::abi::TCP`] or [`crate::abi::UDP`].
    pub proto: u8,
    /// One of [`phase`].
    pub phase: u8,
    /// Bits of [`mark`].
    pub marks: u16,
}
shared_layout!(SocketState, size 64, align 8);

/// Bits of [`SocketState::marks`].
pub mod mark {
    /// The application dialled the backend's own address: `vip` is the backend's.
    pub const DIRECT: u16 = 1 << 0;
}

/// What is known of a client that no local socket stands for, by its own address and port (observed interfaces).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Passage {
    /// When its last SYN was seen, nanoseconds of the monotonic clock.
    pub syn_ns: u64,
}
shared_layout!(Passage, size 8, align 8);

/// Values of [`SocketState::phase`].
pub mod phase {
    /// `connect` was called; no SYN has been seen.
    pub const DIALLED: u8 = 0;
    /// The SYN is on its way.
    pub const SYN_SENT: u8 = 1;
    /// Established, or a connected UDP socket.
    pub const OPEN: u8 = 2;
    /// The connection's record has been written; only the address is still needed.
    pub const RECORDED: u8 = 3;
    /// Not followed by socket callbacks (MPTCP: they see the subflows' sockets).
    pub const UNTRACKED: u8 = 4;
}

/// Key of the reverse map of UDP sockets: which frontend a backend's answer belongs to.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ReverseKey {
    /// Socket cookie.
    pub cookie: u64,
    /// The backend's address.
    pub addr: Addr,
    /// The backend's port, network order.
    pub port: Port,
    /// Always 0.
    pub pad: [u16; 3],
}
shared_layout!(ReverseKey, size 32, align 8);

impl ReverseKey {
    /// Makes a key.
    #[inline(always)]
    pub const fn new(cookie: u64, addr: Addr, port: Port) -> Self {
        Self {
            cookie,
            addr,
            port,
            pad: [0; 3],
        }
    }
}

/// Value of the reverse map. The entries of one socket form a chain, so that its release can remove them.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reverse {
    /// The frontend's address last sent to.
    pub vip: Addr,
    /// The next entry of the socket's chain: its backend's address.
    pub next_addr: Addr,
    /// The frontend's port, network order.
    pub vip_port: Port,
    /// The next entry's port, network order; 0 ends the chain.
    pub next_port: Port,
    /// The backend.
    pub backend_id: u32,
}
shared_layout!(Reverse, size 40, align 4);

/// Value of the map of UDP sockets, keyed by cookie: the head of the socket's chain.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChainHead {
    /// The first entry's backend address.
    pub addr: Addr,
    /// The first entry's port, network order; 0 is an empty chain.
    pub port: Port,
    /// Always 0.
    pub pad: u16,
    /// Entries in the chain.
    pub length: u32,
}
shared_layout!(ChainHead, size 24, align 4);

/// Entries of a chain that a socket's release removes by itself; the agent's sweep removes the rest.
pub const CHAIN_WALK: u32 = 32;
