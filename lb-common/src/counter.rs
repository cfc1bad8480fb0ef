//! Per-CPU counters: one per (hook, action), and the fate of records.

/// The hooks that count.
pub mod hook {
    /// Number of hooks.
    pub const COUNT: u32 = 13;
    /// cgroup/connect4.
    pub const CONNECT4: u32 = 0;
    /// cgroup/connect6.
    pub const CONNECT6: u32 = 1;
    /// cgroup/sendmsg4.
    pub const SENDMSG4: u32 = 2;
    /// cgroup/sendmsg6.
    pub const SENDMSG6: u32 = 3;
    /// cgroup/recvmsg4.
    pub const RECVMSG4: u32 = 4;
    /// cgroup/recvmsg6.
    pub const RECVMSG6: u32 = 5;
    /// cgroup/getpeername4.
    pub const GETPEERNAME4: u32 = 6;
    /// cgroup/getpeername6.
    pub const GETPEERNAME6: u32 = 7;
    /// sock_ops.
    pub const SOCK_OPS: u32 = 8;
    /// cgroup/sock_release.
    pub const SOCK_RELEASE: u32 = 9;
    /// TC ingress and egress, observing.
    pub const TC: u32 = 10;
    /// TC ingress of uplinks and guests, translating.
    pub const INGRESS: u32 = 11;
    /// TC egress of uplinks and guests, translating.
    pub const EGRESS: u32 = 12;

    /// The names in metrics and on the command line, by value.
    pub const NAMES: [&str; COUNT as usize] = [
        "connect4",
        "connect6",
        "sendmsg4",
        "sendmsg6",
        "recvmsg4",
        "recvmsg6",
        "getpeername4",
        "getpeername6",
        "sock_ops",
        "sock_release",
        "tc",
        "ingress",
        "egress",
    ];
}

/// What a hook did.
pub mod action {
    /// Number of actions.
    pub const COUNT: u32 = 25;
    /// No frontend matched: passed untouched.
    pub const MISS: u32 = 0;
    /// Translated to a backend (connect, sendmsg), or back to the frontend (recvmsg, getpeername).
    pub const TRANSLATED: u32 = 1;
    /// ECONNREFUSED: no usable backend.
    pub const REFUSED: u32 = 2;
    /// EHOSTUNREACH: no usable backend under a Local policy.
    pub const UNREACHABLE: u32 = 3;
    /// The client's cgroup is opted out: passed untouched.
    pub const OPTED_OUT: u32 = 4;
    /// Per-socket state had no room: a TCP connection goes on without it, a UDP one gets ENOBUFS.
    pub const STATE_FULL: u32 = 5;
    /// The maps contradict each other: passed untouched. Never seen on a sound node.
    pub const INCONSISTENT: u32 = 6;
    /// A record was written to the ring buffer.
    pub const RECORDED: u32 = 7;
    /// A record was lost: the ring buffer was full.
    pub const RECORD_LOST: u32 = 8;
    /// A flow was begun: a SYN, or the first datagram of a tuple.
    pub const NEW_FLOW: u32 = 9;
    /// A SYN met an earlier flow of its tuple, which was ended and chosen anew in the same packet.
    pub const REUSED: u32 = 10;
    /// A packet in the middle of a connection that the table does not know: chosen again by its tuple.
    pub const RESUMED: u32 = 11;
    /// A UDP flow's backend was gone, and another was chosen.
    pub const RERESOLVED: u32 = 12;
    /// No usable backend under externalTrafficPolicy Local, or a guest's internalTrafficPolicy Local: dropped (C9).
    pub const POLICY_DROPPED: u32 = 13;
    /// The source lies outside the Service's source ranges: dropped (C14).
    pub const SOURCE_DENIED: u32 = 14;
    /// No slot for a new flow: dropped.
    pub const FLOWS_FULL: u32 = 15;
    /// No port was free for the node's own source: refused.
    pub const PORTS_EXHAUSTED: u32 = 16;
    /// The interface has no address to send from: dropped.
    pub const NO_SOURCE: u32 = 17;
    /// A later fragment whose first one was not seen: passed untouched.
    pub const FRAGMENT_UNKNOWN: u32 = 18;
    /// An ICMP error about a flow was translated.
    pub const ICMP_TRANSLATED: u32 = 19;
    /// Headers that are cut off, or longer than is read: passed untouched.
    pub const MALFORMED: u32 = 20;
    /// An expired flow gave its slot to a new one.
    pub const RECLAIMED: u32 = 21;
    /// An unanswered flow gave its slot to a new one before it expired, for none was free.
    pub const EVICTED: u32 = 22;
    /// A refusal could not be sent: the packet was dropped.
    pub const UNANSWERED: u32 = 23;
    /// The client talks to the backend from the same port through another frontend already: refused.
    pub const COLLISION: u32 = 24;

    /// The names in metrics and on the command line, by value.
    pub const NAMES: [&str; COUNT as usize] = [
        "miss",
        "translated",
        "refused",
        "unreachable",
        "opted_out",
        "state_full",
        "inconsistent",
        "recorded",
        "record_lost",
        "new_flow",
        "reused",
        "resumed",
        "reresolved",
        "policy_dropped",
        "source_denied",
        "flows_full",
        "ports_exhausted",
        "no_source",
        "fragment_unknown",
        "icmp_translated",
        "malformed",
        "reclaimed",
        "evicted",
        "unanswered",
        "collision",
    ];
}

/// Number of counters.
pub const COUNTERS: u32 = hook::COUNT * action::COUNT;

/// Index of a counter.
#[inline(always)]
pub const fn index(hook: u32, action: u32) -> u32 {
    hook * action::COUNT + action
}
