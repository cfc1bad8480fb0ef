//! Records that the kernel programs write into the ring buffer. The first word of each is its [`kind`].

use crate::{
    abi::shared_layout,
    addr::{Addr, Port},
};

/// Values of a record's first word.
pub mod kind {
    /// A [`super::ConnRecord`].
    pub const CONNECTION: u32 = 1;
    /// A [`super::PacketRecord`].
    pub const PACKET: u32 = 2;
}

/// How a connection ended, or did not begin.
pub mod outcome {
    /// It was established, and has ended.
    pub const ESTABLISHED: u8 = 0;
    /// The peer refused it (RST to the SYN).
    pub const REFUSED: u8 = 1;
    /// No answer came until the kernel gave up.
    pub const TIMED_OUT: u8 = 2;
    /// No route, or an ICMP error said so.
    pub const UNREACHABLE: u8 = 3;
    /// No free source port towards the backend.
    pub const NO_LOCAL_PORT: u8 = 4;
    /// The application gave up before an answer came.
    pub const ABANDONED: u8 = 5;
    /// Another error; the record carries it.
    pub const OTHER: u8 = 6;
    /// Number of outcomes.
    pub const COUNT: u8 = 7;

    /// The names in metrics and on the command line, by value.
    pub const NAMES: [&str; COUNT as usize] = [
        "established",
        "refused",
        "timed_out",
        "unreachable",
        "no_local_port",
        "abandoned",
        "other",
    ];
}

/// One connection to a frontend, written once, at its end.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConnRecord {
    /// [`kind::CONNECTION`].
    pub kind: u32,
    /// Errno of a failed connection where the kernel told it (positive), else 0.
    pub errno: u32,
    /// When the socket was connected, nanoseconds of the monotonic clock.
    pub start_ns: u64,
    /// When it was established; 0 if never.
    pub established_ns: u64,
    /// When the application closed it, the peer reset it, or the attempt failed.
    pub end_ns: u64,
    /// Cookie of the network namespace of the socket.
    pub netns_cookie: u64,
    /// The socket's own address; zero if no SYN left.
    pub client: Addr,
    /// The frontend's address.
    pub vip: Addr,
    /// The Service.
    pub service_id: u32,
    /// The backend; 0 where it is not known.
    pub backend_id: u32,
    /// The socket's own port, network order.
    pub client_port: Port,
    /// The frontend's port, network order.
    pub vip_port: Port,
    /// [`crate::abi::TCP`] or [`crate::abi::UDP`].
    pub proto: u8,
    /// One of [`outcome`].
    pub outcome: u8,
    /// Bits of [`mark`].
    pub marks: u16,
}
shared_layout!(ConnRecord, size 88, align 8);

/// Bits of [`ConnRecord::marks`].
pub mod mark {
    /// The client's packets came in from outside the node, or from a guest: no socket of this node stands behind them.
    pub const OUTSIDE: u16 = 1 << 0;
}

/// A TCP packet that begins or ends a connection, seen on an observed interface.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PacketRecord {
    /// [`kind::PACKET`].
    pub kind: u32,
    /// The interface's index.
    pub ifindex: u32,
    /// Nanoseconds of the monotonic clock.
    pub time_ns: u64,
    /// Source address.
    pub src: Addr,
    /// Destination address.
    pub dst: Addr,
    /// Source port, network order.
    pub src_port: Port,
    /// Destination port, network order.
    pub dst_port: Port,
    /// The TCP flags byte (FIN 1, SYN 2, RST 4, ACK 16).
    pub flags: u8,
    /// [`crate::abi::TCP`].
    pub proto: u8,
    /// 0 ingress, 1 egress.
    pub direction: u8,
    /// Always 0.
    pub pad: u8,
}
shared_layout!(PacketRecord, size 56, align 8);

/// The flags of [`PacketRecord::flags`].
pub mod tcp_flag {
    /// No more data from the sender.
    pub const FIN: u8 = 1;
    /// Begins a connection.
    pub const SYN: u8 = 2;
    /// Ends a connection at once.
    pub const RST: u8 = 4;
    /// Acknowledges.
    pub const ACK: u8 = 16;
}

/// One in this many records of a CPU wakes the reader; it polls on a timer besides.
pub const RECORDS_PER_WAKEUP: u64 = 64;
