//! Backend sets: a published list of members, and the Maglev table over them.
//!
//! A set is one 64-bit word, written in a single store: it says where the set's list begins, how long it is, and which
//! publication this is. The list begins with a header that says where the Maglev table lies; sets whose members are
//! the same endpoints on different ports share one table. Lists and tables are written beside the old ones, then the
//! word is flipped; what the old word named is freed after a grace.

use crate::abi::shared_layout;

/// The one word of a set. The zero word is a set that was never published, or is empty.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetWord(pub u64);
shared_layout!(SetWord, size 8, align 8);

/// Bits of a list offset: lists hold at most 2^24 entries in all.
pub const OFFSET_BITS: u32 = 24;
/// Bits of a member count.
pub const COUNT_BITS: u32 = 16;
/// Bits of the generation, which wraps.
pub const GENERATION_BITS: u32 = 24;

impl SetWord {
    /// Packs a word; `offset` and `generation` are cut to their bits.
    #[inline(always)]
    pub const fn new(offset: u32, count: u16, generation: u32) -> Self {
        Self(
            (offset as u64 & ((1 << OFFSET_BITS) - 1))
                | (count as u64) << OFFSET_BITS
                | (generation as u64 & ((1 << GENERATION_BITS) - 1)) << (OFFSET_BITS + COUNT_BITS),
        )
    }

    /// Index of the list's header in the list array.
    #[inline(always)]
    pub const fn offset(self) -> u32 {
        (self.0 & ((1 << OFFSET_BITS) - 1)) as u32
    }

    /// Number of members, which follow the header.
    #[inline(always)]
    pub const fn count(self) -> u16 {
        (self.0 >> OFFSET_BITS) as u16
    }

    /// Number of the publication, modulo 2^24.
    #[inline(always)]
    pub const fn generation(self) -> u32 {
        (self.0 >> (OFFSET_BITS + COUNT_BITS)) as u32
    }
}

/// One entry of the list array: a header, or a member.
///
/// As header: `a` is the offset of the Maglev table in the table array (in elements of four slots), `b` its size in
/// slots, `c` is 0. As member: `a` is the backend id, `b` the weight, `c` counts the connections started on this
/// member in this publication, added to by all CPUs.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ListEntry {
    /// Table offset, or backend id.
    pub a: u32,
    /// Table size in slots, or weight.
    pub b: u32,
    /// 0, or connections started.
    pub c: u64,
}
shared_layout!(ListEntry, size 16, align 8);

/// Slots that one element of the table array holds.
pub const SLOTS_PER_ELEMENT: u32 = 4;

/// Elements that a table of `slots` slots takes.
#[inline(always)]
pub const fn elements_for(slots: u32) -> u32 {
    slots.div_ceil(SLOTS_PER_ELEMENT)
}

/// Reads the slot at `index` of its element.
#[inline(always)]
pub const fn slot_of(element: u64, index: u32) -> u16 {
    (element >> (16 * (index % SLOTS_PER_ELEMENT))) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_word_gives_back_what_it_was_made_of(
            offset in 0u32..1 << OFFSET_BITS, count: u16, generation in 0u32..1 << GENERATION_BITS,
        ) {
            let word = SetWord::new(offset, count, generation);
            prop_assert_eq!((word.offset(), word.count(), word.generation()), (offset, count, generation));
        }

        #[test]
        fn slots_are_packed_low_first(slots: [u16; 4]) {
            let element = slots.iter().rev().fold(0u64, |e, s| e << 16 | u64::from(*s));
            for (i, slot) in slots.iter().enumerate() {
                prop_assert_eq!(slot_of(element, i as u32), *slot);
            }
        }
    }
}
