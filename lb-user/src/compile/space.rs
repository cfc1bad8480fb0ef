//! Allocating ids and ranges: what is freed waits until nothing in the kernel can still be using it.

use std::collections::{BTreeMap, HashSet, VecDeque};

use thiserror::Error;

/// How long a freed id or range is kept from reuse, in milliseconds.
///
/// A program that has read a set's old word goes on to read the list and table that it names. Programs do not sleep
/// and run for microseconds; a virtual CPU that is descheduled in the middle may be held up for tens of milliseconds.
/// A second is far beyond that, and costs little memory: 500 changes a second of 10 backends hold 1 MB.
pub const GRACE_MS: u64 = 1_000;

/// Nothing is left.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("all {capacity} {what} are in use; {flag}")]
pub struct Full {
    /// What ran out.
    pub what: &'static str,
    /// How many there are.
    pub capacity: u32,
    /// How to get more.
    pub flag: &'static str,
}

/// Numbers `1..capacity`; 0 is none.
#[derive(Debug)]
pub struct Ids {
    what: &'static str,
    flag: &'static str,
    capacity: u32,
    next: u32,
    free: Vec<u32>,
    waiting: VecDeque<(u64, u32)>,
}

impl Ids {
    /// Ids for a map of `capacity` entries.
    pub fn new(what: &'static str, flag: &'static str, capacity: u32) -> Self {
        Self {
            what,
            flag,
            capacity,
            next: 1,
            free: Vec::new(),
            waiting: VecDeque::new(),
        }
    }

    /// Marks the ids that a kernel map holds already; only before the first allocation.
    pub fn adopt(&mut self, used: impl IntoIterator<Item = u32>) {
        let mut used: Vec<u32> = used.into_iter().filter(|id| *id > 0 && *id < self.capacity).collect();
        used.sort_unstable();
        used.dedup();
        let mut expected = 1;
        for id in used {
            self.free.extend(expected..id);
            expected = id + 1;
        }
        self.next = expected;
        // The smallest is handed out first, so that the arrays stay dense.
        self.free.reverse();
    }

    /// Lets free ids wait until nothing refers to them any more; only before the first allocation.
    pub fn withhold(&mut self, busy: &HashSet<u32>, now_ms: u64) {
        let mut busy: Vec<u32> = busy
            .iter()
            .copied()
            .filter(|id| *id > 0 && *id < self.capacity)
            .collect();
        busy.sort_unstable();
        if let Some(&last) = busy.last()
            && last >= self.next
        {
            self.free.splice(0..0, (self.next..=last).rev());
            self.next = last + 1;
        }
        let waiting = &mut self.waiting;
        self.free.retain(|id| {
            let held = busy.binary_search(id).is_ok();
            if held {
                waiting.push_back((now_ms, *id));
            }
            !held
        });
    }

    /// Takes an id.
    ///
    /// # Errors
    /// When all are in use.
    pub fn take(&mut self) -> Result<u32, Full> {
        if let Some(id) = self.free.pop() {
            return Ok(id);
        }
        if self.next < self.capacity {
            self.next += 1;
            return Ok(self.next - 1);
        }
        Err(Full {
            what: self.what,
            capacity: self.capacity - 1,
            flag: self.flag,
        })
    }

    /// Gives back an id that was never seen by the kernel.
    pub fn untake(&mut self, id: u32) {
        self.free.push(id);
    }

    /// Frees an id that the kernel may still be using.
    pub fn release(&mut self, id: u32, now_ms: u64) {
        self.waiting.push_back((now_ms, id));
    }

    /// Makes ids available whose grace has passed and to which nothing refers, by `idle`.
    pub fn reclaim(&mut self, now_ms: u64, mut idle: impl FnMut(u32) -> bool) {
        for _ in 0..self.waiting.len() {
            match self.waiting.front().copied() {
                Some((freed, id)) if now_ms.saturating_sub(freed) >= GRACE_MS => {
                    self.waiting.pop_front();
                    if idle(id) {
                        self.free.push(id);
                    } else {
                        self.waiting.push_back((now_ms, id));
                    }
                }
                _ => break,
            }
        }
    }

    /// One past the largest id ever taken.
    pub fn end(&self) -> u32 {
        self.next
    }

    /// Ids that are in use or wait for their grace.
    pub fn used(&self) -> u32 {
        self.next - 1 - self.free.len() as u32
    }

    /// How many ids there are.
    pub fn capacity(&self) -> u32 {
        self.capacity - 1
    }
}

/// Ranges of a flat array, first fit.
#[derive(Debug)]
pub struct Space {
    what: &'static str,
    flag: &'static str,
    capacity: u32,
    /// Offset → length of each free range; neighbours are merged.
    free: BTreeMap<u32, u32>,
    waiting: VecDeque<(u64, u32, u32)>,
}

impl Space {
    /// The whole of an array of `capacity` entries.
    pub fn new(what: &'static str, flag: &'static str, capacity: u32) -> Self {
        Self {
            what,
            flag,
            capacity,
            free: BTreeMap::from([(0, capacity)]),
            waiting: VecDeque::new(),
        }
    }

    /// Takes `len` entries.
    ///
    /// # Errors
    /// When no free range is long enough.
    pub fn take(&mut self, len: u32) -> Result<u32, Full> {
        let Some((offset, room)) = self.free.iter().map(|(o, l)| (*o, *l)).find(|(_, l)| *l >= len) else {
            return Err(Full {
                what: self.what,
                capacity: self.capacity,
                flag: self.flag,
            });
        };
        self.free.remove(&offset);
        if room > len {
            self.free.insert(offset + len, room - len);
        }
        Ok(offset)
    }

    /// Marks a range as in use; false if part of it is not free.
    pub fn adopt(&mut self, offset: u32, len: u32) -> bool {
        let Some((start, room)) = self.free.range(..=offset).next_back().map(|(o, l)| (*o, *l)) else {
            return false;
        };
        let (end, room_end) = (u64::from(offset) + u64::from(len), u64::from(start) + u64::from(room));
        if len == 0 || end > room_end {
            return false;
        }
        self.free.remove(&start);
        if offset > start {
            self.free.insert(start, offset - start);
        }
        if room_end > end {
            self.free.insert(end as u32, (room_end - end) as u32);
        }
        true
    }

    /// Gives back a range that was never seen by the kernel.
    pub fn untake(&mut self, offset: u32, len: u32) {
        let (mut offset, mut len) = (offset, len);
        if let Some((before, room)) = self.free.range(..offset).next_back().map(|(o, l)| (*o, *l))
            && before + room == offset
        {
            self.free.remove(&before);
            offset = before;
            len += room;
        }
        if let Some(room) = self.free.remove(&(offset + len)) {
            len += room;
        }
        self.free.insert(offset, len);
    }

    /// Frees a range that the kernel may still be reading.
    pub fn release(&mut self, offset: u32, len: u32, now_ms: u64) {
        self.waiting.push_back((now_ms, offset, len));
    }

    /// Makes ranges available whose grace has passed.
    pub fn reclaim(&mut self, now_ms: u64) {
        while let Some((freed, offset, len)) = self.waiting.front().copied() {
            if now_ms.saturating_sub(freed) < GRACE_MS {
                break;
            }
            self.waiting.pop_front();
            self.untake(offset, len);
        }
    }

    /// Entries that are in use or wait for their grace.
    pub fn used(&self) -> u32 {
        self.capacity - self.free.values().sum::<u32>()
    }

    /// Entries of the array.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ids_start_at_one_and_wait_out_their_grace() {
        let mut ids = Ids::new("things", "--max-things", 4);
        assert_eq!((ids.take(), ids.take(), ids.take()), (Ok(1), Ok(2), Ok(3)));
        assert_eq!(
            ids.take().unwrap_err().to_string(),
            "all 3 things are in use; --max-things"
        );
        ids.release(2, 1_000);
        ids.reclaim(1_999, |_| true);
        assert!(ids.take().is_err());
        ids.reclaim(2_000, |_| false);
        assert!(ids.take().is_err(), "a busy id is not reused");
        ids.reclaim(3_000, |_| true);
        assert_eq!(ids.take(), Ok(2));
    }

    #[test]
    fn adopted_ids_are_never_handed_out() {
        let mut ids = Ids::new("things", "", 8);
        ids.adopt([5, 2, 2, 900]);
        let taken: Vec<u32> = std::iter::from_fn(|| ids.take().ok()).collect();
        assert_eq!(taken, [1, 3, 4, 6, 7]);
    }

    #[test]
    fn withheld_ids_wait_until_they_are_idle() {
        let mut ids = Ids::new("things", "", 8);
        ids.adopt([3]);
        // One that is in use is nobody's to withhold, and those beyond the map are none.
        ids.withhold(&HashSet::from([0, 2, 3, 6, 900]), 0);
        let taken: Vec<u32> = std::iter::from_fn(|| ids.take().ok()).collect();
        assert_eq!(taken, [1, 4, 5, 7]);
        assert_eq!(ids.used(), 7);
        ids.reclaim(GRACE_MS, |id| id == 6);
        assert_eq!(ids.take(), Ok(6));
        assert!(ids.take().is_err());
    }

    proptest! {
        #[test]
        fn ranges_never_overlap_and_all_come_back(sizes in prop::collection::vec(1u32..40, 1..60), order: u64) {
            let mut space = Space::new("entries", "", 600);
            let mut held: Vec<(u32, u32)> = Vec::new();
            for (i, len) in sizes.iter().enumerate() {
                if let Ok(offset) = space.take(*len) {
                    for (o, l) in &held {
                        prop_assert!(offset + len <= *o || o + l <= offset);
                    }
                    held.push((offset, *len));
                } else if !held.is_empty() {
                    let (o, l) = held.swap_remove((order as usize).wrapping_add(i) % held.len());
                    space.release(o, l, 0);
                    space.reclaim(GRACE_MS);
                }
            }
            let used: u32 = held.iter().map(|(_, l)| l).sum();
            prop_assert_eq!(space.used(), used);
            for (o, l) in held {
                space.untake(o, l);
            }
            prop_assert_eq!(space.take(600), Ok(0));
        }

        #[test]
        fn adopting_is_taking_at_a_place(ranges in prop::collection::vec((0u32..100, 0u32..30), 0..12)) {
            let mut space = Space::new("entries", "", 110);
            let mut used = [false; 110];
            for (offset, len) in ranges {
                let wanted = offset as usize..(offset + len) as usize;
                let fits = len > 0 && wanted.end <= 110 && !used[wanted.clone()].iter().any(|u| *u);
                prop_assert_eq!(space.adopt(offset, len), fits);
                if fits {
                    used[wanted].fill(true);
                }
            }
            prop_assert_eq!(space.used(), used.iter().filter(|u| **u).count() as u32);
        }
    }
}
