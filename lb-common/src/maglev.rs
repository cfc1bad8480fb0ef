//! Building Maglev tables (Eisenbud et al.: "Maglev: a fast and reliable software network load balancer", NSDI 2016,
//! section 3.4), with weights.
//!
//! The same members give the same table on every node and after every restart: nothing depends on their order, on
//! time or on a random seed. Each member gets its exact share of the slots, rounded to one.

use alloc::{vec, vec::Vec};

use crate::hash;

/// Sizes of tables, in slots; all prime. Only crossing a rung moves most keys; within a rung a change moves few.
pub const LADDER: [u32; 5] = [251, 1021, 4093, 16_381, 65_521];

/// Slots a member should have at least, so that shares are fair within one in a hundred.
pub const SLOTS_PER_MEMBER: u32 = 100;

/// The most members that a table can tell apart.
pub const MAX_MEMBERS: usize = LADDER[LADDER.len() - 1] as usize;

/// The table size for `members` members: the smallest rung with [`SLOTS_PER_MEMBER`] slots each, else the largest.
pub fn slots_for(members: usize) -> u32 {
    let wanted = (members as u64).saturating_mul(u64::from(SLOTS_PER_MEMBER));
    LADDER
        .into_iter()
        .find(|rung| u64::from(*rung) >= wanted)
        .unwrap_or(LADDER[LADDER.len() - 1])
}

/// One member as the table sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Member {
    /// Hash of what makes the endpoint the same on every node (its address).
    pub identity: u64,
    /// Its weight; 0 gets no slot.
    pub weight: u16,
}

/// Fills a table of `slots` slots with indexes into `members`; `None` if no member has a weight, or there are more
/// than [`MAX_MEMBERS`].
///
/// `slots` must be a prime of [`LADDER`].
pub fn build(members: &[Member], slots: u32) -> Option<Vec<u16>> {
    if members.len() > MAX_MEMBERS || slots < 2 {
        return None;
    }
    let mut order: Vec<u16> = (0..members.len())
        .filter(|i| members[*i].weight > 0)
        .map(|i| i as u16)
        .collect();
    order.sort_by_key(|i| (members[usize::from(*i)], *i));
    let heaviest = u64::from(order.iter().map(|i| members[usize::from(*i)].weight).max()?);
    let mut turns: Vec<Turn> = order
        .iter()
        .zip(quotas(&order, members, slots))
        .map(|(index, quota)| {
            let member = members[usize::from(*index)];
            let h = hash::mix(member.identity);
            Turn {
                index: *index,
                weight: u64::from(member.weight),
                credit: 0,
                quota,
                next: hash::scale((h >> 32) as u32, slots),
                skip: 1 + hash::scale(h as u32, slots - 1),
            }
        })
        .collect();

    let mut table = vec![FREE; slots as usize];
    let mut left = slots;
    while left > 0 {
        for turn in &mut turns {
            turn.credit += turn.weight;
            while turn.credit >= heaviest && turn.quota > 0 {
                turn.credit -= heaviest;
                // The size is prime, so the walk visits every slot, and a quota left means a slot is free.
                while table[turn.next as usize] != FREE {
                    turn.next = step(turn.next, turn.skip, slots);
                }
                table[turn.next as usize] = turn.index;
                turn.quota -= 1;
                left -= 1;
            }
            turn.credit = turn.credit.min(heaviest);
        }
    }
    Some(table)
}

/// A slot that nobody has taken; never an index, for there are fewer members than that.
const FREE: u16 = u16::MAX;

struct Turn {
    index: u16,
    weight: u64,
    credit: u64,
    quota: u32,
    next: u32,
    skip: u32,
}

/// Both are below `slots`, so one subtraction stands for a division, which would be most of a table's cost.
fn step(at: u32, skip: u32, slots: u32) -> u32 {
    let next = at + skip;
    if next >= slots { next - slots } else { next }
}

/// Shares of the slots by weight, by largest remainder; ties go to the earlier in `order`.
fn quotas(order: &[u16], members: &[Member], slots: u32) -> Vec<u32> {
    let total: u64 = order.iter().map(|i| u64::from(members[usize::from(*i)].weight)).sum();
    let mut shares: Vec<u32> = Vec::with_capacity(order.len());
    let mut remainders: Vec<(u64, usize)> = Vec::with_capacity(order.len());
    for (place, index) in order.iter().enumerate() {
        let wanted = u64::from(slots) * u64::from(members[usize::from(*index)].weight);
        shares.push((wanted / total) as u32);
        remainders.push((wanted % total, place));
    }
    let short = slots - shares.iter().sum::<u32>();
    remainders.sort_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(&b.1)));
    for (_, place) in remainders.into_iter().take(short as usize) {
        shares[place] += 1;
    }
    shares
}

#[cfg(test)]
mod tests;
