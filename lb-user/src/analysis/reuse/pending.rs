//! Puts records in the order of their ends, within the disorder window.

use std::{
    cmp::{Ordering, Reverse},
    collections::BinaryHeap,
};

use super::ConnRecord;

/// A record ordered by (end, start); the rest breaks ties so that the order does not hang on arrival.
#[derive(Debug)]
struct ByEnd(ConnRecord);

impl ByEnd {
    fn key(&self) -> (u64, u64, u32, &super::ClientTuple, u32) {
        (
            self.0.end_ns,
            self.0.start_ns,
            self.0.service,
            &self.0.tuple,
            self.0.backend,
        )
    }
}

impl PartialEq for ByEnd {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for ByEnd {}

impl PartialOrd for ByEnd {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for ByEnd {
    fn cmp(&self, other: &Self) -> Ordering {
        self.key().cmp(&other.key())
    }
}

/// Records held back until no earlier one can come.
#[derive(Debug)]
pub(super) struct Pending {
    disorder_ns: u64,
    capacity: usize,
    /// Ends up to here are settled.
    watermark_ns: u64,
    heap: BinaryHeap<Reverse<ByEnd>>,
}

impl Pending {
    pub(super) fn new(disorder_ns: u64, capacity: usize) -> Self {
        Self {
            disorder_ns,
            capacity,
            watermark_ns: 0,
            heap: BinaryHeap::new(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.heap.len()
    }

    pub(super) fn push(&mut self, record: ConnRecord) {
        self.advance(record.end_ns);
        self.heap.push(Reverse(ByEnd(record)));
    }

    pub(super) fn advance(&mut self, now_ns: u64) {
        self.watermark_ns = self.watermark_ns.max(now_ns.saturating_sub(self.disorder_ns));
    }

    /// The next record whose place is certain, or that is pushed out for want of room.
    pub(super) fn pop_settled(&mut self) -> Option<ConnRecord> {
        let Reverse(ByEnd(next)) = self.heap.peek()?;
        if next.end_ns <= self.watermark_ns || self.heap.len() > self.capacity {
            return self.heap.pop().map(|Reverse(ByEnd(record))| record);
        }
        None
    }
}
