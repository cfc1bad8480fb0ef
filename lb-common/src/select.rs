//! The decision: which member of a set a key goes to.
//!
//! Pure over [`Tables`], which the kernel programs implement on maps, and userspace on a copy of them. Nothing here
//! loops without a constant bound or can panic, so that the verifier accepts it.

use crate::{
    addr::{Addr, Port},
    hash,
    set::{ListEntry, SLOTS_PER_ELEMENT, SetWord, slot_of},
};

/// How many slots of a key's walk are looked at before an ejected backend is taken all the same.
pub const WALK: u32 = 8;

/// Read access to the lists, tables and backends.
pub trait Tables {
    /// Whatever gives access to a backend's address; a pointer in the kernel.
    type Backend: Copy;

    /// The entry of the list array at `index`.
    fn list(&self, index: u32) -> Option<ListEntry>;
    /// The element of the table array at `index` (four slots).
    fn element(&self, index: u32) -> Option<u64>;
    /// The backend of an id that is in use, and whether it may get new flows.
    fn backend(&self, id: u32) -> Option<(Self::Backend, bool)>;
}

/// The member that was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pick<B> {
    /// Index of the member's entry in the list array.
    pub list_index: u32,
    /// The member's entry as it was read.
    pub entry: ListEntry,
    /// The backend.
    pub backend: B,
}

/// The hash of a socket's key: its cookie and the set.
#[inline(always)]
pub const fn socket_hash(cookie: u64, set_id: u32) -> u64 {
    hash::combine(hash::mix(cookie), set_id as u64)
}

/// The hash of a packet's tuple: who sends to which frontend. It knows no ids, so that every node chooses alike.
#[inline(always)]
pub const fn packet_hash(src: Addr, src_port: Port, dst: Addr, dst_port: Port, proto: u8) -> u64 {
    let ports = (src_port.0 as u64) << 32 | (dst_port.0 as u64) << 16 | proto as u64;
    let mut hash = hash::mix(ports);
    hash = hash::combine(hash, double(src.words[0], src.words[1]));
    hash = hash::combine(hash, double(src.words[2], src.words[3]));
    hash = hash::combine(hash, double(dst.words[0], dst.words[1]));
    hash::combine(hash, double(dst.words[2], dst.words[3]))
}

#[inline(always)]
const fn double(high: u32, low: u32) -> u64 {
    (high as u64) << 32 | low as u64
}

/// The member of the slot that `hash` falls on; the walk goes on to the slots behind it, which Maglev fills in mixed
/// order, while it meets backends that may not get new flows. Where all of the walk is ejected the first stands: a fault
/// that ejects everybody is the node's own, and then any backend is better than none.
#[inline(always)]
pub fn pick<T: Tables>(tables: &T, word: SetWord, header: ListEntry, hash: u64) -> Option<Pick<T::Backend>> {
    walk(tables, word, header, hash).map(|(pick, _)| pick)
}

/// [`pick`], with whether the backend may get new flows.
#[inline(always)]
fn walk<T: Tables>(tables: &T, word: SetWord, header: ListEntry, hash: u64) -> Option<(Pick<T::Backend>, bool)> {
    let start = hash::scale((hash >> 32) as u32, header.b);
    let mut first = None;
    let mut step = 0;
    while step < WALK {
        let slot = start.wrapping_add(step);
        let slot = if slot >= header.b {
            slot.wrapping_sub(header.b)
        } else {
            slot
        };
        if let Some((pick, usable)) = look(tables, word, header, slot) {
            if usable {
                return Some((pick, true));
            }
            if first.is_none() {
                first = Some((pick, false));
            }
        }
        step += 1;
    }
    first
}

#[inline(always)]
fn look<T: Tables>(tables: &T, word: SetWord, header: ListEntry, slot: u32) -> Option<(Pick<T::Backend>, bool)> {
    let element = tables.element(header.a.wrapping_add(slot / SLOTS_PER_ELEMENT))?;
    let member = slot_of(element, slot);
    if member >= word.count() {
        return None;
    }
    let list_index = word.offset().wrapping_add(1).wrapping_add(member as u32);
    let entry = tables.list(list_index)?;
    let (backend, usable) = tables.backend(entry.a)?;
    let pick = Pick {
        list_index,
        entry,
        backend,
    };
    Some((pick, usable))
}

/// The better of two members by connections started in this publication, relative to weight: bounds the unevenness
/// of independent keys (Mitzenmacher: "The power of two choices in randomized load balancing", 2001).
#[inline(always)]
pub fn pick_balanced<T: Tables>(tables: &T, word: SetWord, header: ListEntry, hash: u64) -> Option<Pick<T::Backend>> {
    let (one, one_usable) = walk(tables, word, header, hash)?;
    let Some((two, two_usable)) = walk(tables, word, header, hash::mix(hash)) else {
        return Some(one);
    };
    // An ejected backend has started few connections: its lightness must not win against a usable one.
    let second = if one_usable == two_usable {
        lighter(two.entry, one.entry)
    } else {
        two_usable
    };
    Some(if second { two } else { one })
}

/// True if `a` has started fewer connections than `b`, each relative to its weight.
#[inline(always)]
pub const fn lighter(a: ListEntry, b: ListEntry) -> bool {
    a.c.wrapping_mul(b.b as u64) < b.c.wrapping_mul(a.b as u64)
}

#[cfg(test)]
mod tests;
