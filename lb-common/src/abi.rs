//! Versions of the shared layouts, and the macro that pins a layout down at compile time.

/// Version of every layout that lies in a pinned map, except per-socket state. It is part of the pin path
/// (`<bpffs>/<name>/<ABI_VERSION>/`), so that an agent never opens a map of another layout.
pub const ABI_VERSION: u32 = 3;

/// Version of the per-socket layouts ([`crate::socket`]). They are append-only and carried across [`ABI_VERSION`]s,
/// so that live sockets keep their addresses through an upgrade.
pub const SOCKET_VERSION: u32 = 1;

/// Version of the layouts of flows ([`crate::flow`]), carried across [`ABI_VERSION`]s like those of sockets.
pub const FLOW_VERSION: u32 = 1;

/// Protocol number of TCP in keys and values (also used for MPTCP).
pub const TCP: u8 = 6;
/// Protocol number of UDP in keys and values.
pub const UDP: u8 = 17;

/// Asserts size and alignment of a shared type, and lets userspace read it from and write it to maps.
macro_rules! shared_layout {
    ($type:ty, size $size:literal, align $align:literal) => {
        const _: () = assert!(core::mem::size_of::<$type>() == $size);
        const _: () = assert!(core::mem::align_of::<$type>() == $align);
        // SAFETY: the type is `repr(C)`, `Copy`, made of integers alone, and its padding is explicit: every bit
        // pattern is a value, and no byte of a value is uninitialised.
        #[cfg(feature = "user")]
        unsafe impl aya::Pod for $type {}
    };
}
pub(crate) use shared_layout;
