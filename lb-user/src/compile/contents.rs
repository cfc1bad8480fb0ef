//! What the kernel's maps hold, as plain data: read back at start and at each check.

use std::collections::{HashMap, HashSet};

use lb_common::{
    affinity::Membership,
    backend::Backend,
    frontend::{Frontend, FrontendKey},
    hash,
    set::SetWord,
};

use super::Source;

/// A published list, as it was read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct List {
    /// Offset of the Maglev table, in elements.
    pub table: u32,
    /// Size of the table, in slots.
    pub slots: u32,
    /// Backend id and weight of each member, in order.
    pub members: Box<[(u32, u16)]>,
    /// Hash of the table's slots, by [`table_hash`]; 0 where the table cannot be read.
    pub content: u64,
}

/// The contents of the state maps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    /// The frontend map.
    pub frontends: HashMap<FrontendKey, Frontend>,
    /// Every set whose word is not zero.
    pub sets: HashMap<u32, SetWord>,
    /// The lists that those words name.
    pub lists: HashMap<u32, List>,
    /// Every backend that is not vacant.
    pub backends: HashMap<u32, Backend>,
    /// The memberships of sets with affinity.
    pub memberships: HashSet<Membership>,
    /// The source ranges.
    pub sources: HashSet<Source>,
}

/// Hashes a table's slots, to tell whether the kernel still holds what was written: four slots at a time.
pub fn table_hash(slots: impl IntoIterator<Item = u16>) -> u64 {
    let mut slots = slots.into_iter();
    let mut sum = 1;
    while let Some(first) = slots.next() {
        let packed = slots
            .by_ref()
            .take(3)
            .fold(u64::from(first), |packed, slot| packed << 16 | u64::from(slot));
        sum = hash::combine(sum, packed);
    }
    sum
}
