//! What is remembered of tuples, bounded: beyond the capacity the one that was heard of longest ago is forgotten.

use std::collections::{HashMap, VecDeque};

use super::{Digest, LastUse};

/// Tuples and their latest use.
#[derive(Debug, Default)]
pub(super) struct Memory {
    tuples: HashMap<Digest, LastUse>,
    /// (touched, tuple), oldest first; entries whose time no longer matches the tuple's are stale.
    pub(super) order: VecDeque<(u64, Digest)>,
    newest_ns: u64,
    evicted: u64,
}

impl Memory {
    pub(super) fn len(&self) -> usize {
        self.tuples.len()
    }

    /// Tuples forgotten for want of room while their last use was still within the horizon.
    pub(super) fn evicted(&self) -> u64 {
        self.evicted
    }

    /// What is known of a tuple, nothing where it is new; to be followed by [`Self::touch`].
    pub(super) fn entry(&mut self, tuple: Digest) -> &mut LastUse {
        self.tuples.entry(tuple).or_default()
    }

    /// Moves a tuple to the young end of the order, and evicts the oldest beyond the capacity.
    ///
    /// Nothing is dropped by age alone: a connection that lasted an hour is still compared with what preceded it.
    pub(super) fn touch(&mut self, tuple: Digest, at_ns: u64, capacity: usize, horizon_ns: u64) {
        self.newest_ns = self.newest_ns.max(at_ns);
        if let Some(entry) = self.tuples.get_mut(&tuple)
            && at_ns > entry.touched_ns
        {
            entry.touched_ns = at_ns;
            self.order.push_back((at_ns, tuple));
        }
        while self.tuples.len() > capacity
            && let Some((touched_ns, tuple)) = self.order.pop_front()
        {
            if self
                .tuples
                .get(&tuple)
                .is_some_and(|entry| entry.touched_ns == touched_ns)
            {
                self.tuples.remove(&tuple);
                self.evicted += u64::from(touched_ns.saturating_add(horizon_ns) >= self.newest_ns);
            }
        }
        // A tuple that is used often leaves stale entries behind; sweep before they outnumber the live ones.
        if self.order.len() > 2 * capacity.max(8) {
            let tuples = &self.tuples;
            self.order
                .retain(|(touched_ns, tuple)| tuples.get(tuple).is_some_and(|entry| entry.touched_ns == *touched_ns));
        }
    }
}
