//! Per-CPU counters: one per (hook, action), and the fate of records.

/// The hooks that count.
pub mod hook {
    /// Number of hooks.
    pub const COUNT: u32 = 11;
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
    /// TC ingress and egress.
    pub const TC: u32 = 10;

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
    ];
}

/// What a hook did.
pub mod action {
    /// Number of actions.
    pub const COUNT: u32 = 9;
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
    ];
}

/// Number of counters.
pub const COUNTERS: u32 = hook::COUNT * action::COUNT;

/// Index of a counter.
#[inline(always)]
pub const fn index(hook: u32, action: u32) -> u32 {
    hook * action::COUNT + action
}
