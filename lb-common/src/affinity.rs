//! ClientIP affinity: client → backend memory with a timeout.

use crate::{abi::shared_layout, addr::Addr};

/// Key of the affinity map: who asks, and for which set.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct AffinityKey {
    /// The client: see [`AffinityKey::inside`] and [`AffinityKey::outside`].
    pub client: Addr,
    /// The set.
    pub set_id: u32,
    /// 0: `client` is a network namespace's cookie; 1: a source address.
    pub origin: u32,
}
shared_layout!(AffinityKey, size 24, align 4);

impl AffinityKey {
    /// A client on this node, known by its network namespace's cookie: at the connect hooks the source address is not
    /// chosen yet, and a pod is one namespace.
    #[inline(always)]
    pub const fn inside(netns_cookie: u64, set_id: u32) -> Self {
        Self {
            client: Addr {
                words: [netns_cookie as u32, (netns_cookie >> 32) as u32, 0, 0],
            },
            set_id,
            origin: 0,
        }
    }

    /// A client outside the node, or a guest, known by its source address.
    #[inline(always)]
    pub const fn outside(source: Addr, set_id: u32) -> Self {
        Self {
            client: source,
            set_id,
            origin: 1,
        }
    }
}

/// Value of the affinity map.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Affinity {
    /// The backend that the client met last.
    pub backend_id: u32,
    /// Always 0.
    pub pad: u32,
    /// When it was last chosen, nanoseconds of the monotonic clock.
    pub last_ns: u64,
}
shared_layout!(Affinity, size 16, align 8);

impl Affinity {
    /// True while the memory holds: chosen less than `timeout_seconds` ago.
    #[inline(always)]
    pub const fn holds(&self, now_ns: u64, timeout_seconds: u32) -> bool {
        now_ns.wrapping_sub(self.last_ns) < timeout_seconds as u64 * 1_000_000_000
    }
}

/// Key of the membership map: present while `backend_id` is a usable member of `set_id`. Kept for sets with affinity
/// alone; it is how a remembered backend is known to be usable still (C18).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Membership {
    /// The set.
    pub set_id: u32,
    /// The backend.
    pub backend_id: u32,
}
shared_layout!(Membership, size 8, align 4);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn affinity_ends_at_its_timeout() {
        let seen = Affinity {
            backend_id: 3,
            pad: 0,
            last_ns: 5_000_000_000,
        };
        assert!(seen.holds(5_000_000_000, 1));
        assert!(seen.holds(5_999_999_999, 1));
        assert!(!seen.holds(6_000_000_000, 1));
        assert!(seen.holds(5_000_000_000 + 86_399_999_999_999, 86_400));
    }
}
