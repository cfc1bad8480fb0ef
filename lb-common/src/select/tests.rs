use super::*;
use crate::maglev;
use alloc::{collections::BTreeMap, vec, vec::Vec};
use proptest::prelude::*;

/// The kernel's maps as plain memory, with one set published at offset 0.
pub(crate) struct Memory {
    pub(crate) lists: Vec<ListEntry>,
    elements: Vec<u64>,
    ejected: Vec<u32>,
    word: SetWord,
}

impl Memory {
    fn new(weights: &[u16]) -> Self {
        let members: Vec<maglev::Member> = weights
            .iter()
            .enumerate()
            .map(|(i, weight)| maglev::Member {
                identity: hash::mix(i as u64),
                weight: *weight,
            })
            .collect();
        let slots = maglev::slots_for(weights.len());
        let table = maglev::build(&members, slots).expect("the tests give weights");
        let mut lists = vec![ListEntry { a: 0, b: slots, c: 0 }];
        lists.extend(weights.iter().enumerate().map(|(i, weight)| ListEntry {
            a: i as u32 + 1,
            b: u32::from(*weight),
            c: 0,
        }));
        let elements = table
            .chunks(SLOTS_PER_ELEMENT as usize)
            .map(|chunk| chunk.iter().rev().fold(0u64, |e, s| e << 16 | u64::from(*s)))
            .collect();
        Self {
            lists,
            elements,
            ejected: vec![],
            word: SetWord::new(0, weights.len() as u16, 1),
        }
    }

    fn connect(&mut self, cookie: u64) -> u32 {
        let pick = pick_balanced(self, self.word, self.lists[0], socket_hash(cookie, 7)).expect("a member");
        self.lists[pick.list_index as usize].c += 1;
        pick.backend
    }
}

impl Tables for Memory {
    type Backend = u32;

    fn list(&self, index: u32) -> Option<ListEntry> {
        self.lists.get(index as usize).copied()
    }

    fn element(&self, index: u32) -> Option<u64> {
        self.elements.get(index as usize).copied()
    }

    fn backend(&self, id: u32) -> Option<(u32, bool)> {
        Some((id, !self.ejected.contains(&id)))
    }
}

fn max_over_mean(weights: &[u16], connections: u64, seed: u64) -> f64 {
    let mut memory = Memory::new(weights);
    let mut counts = BTreeMap::new();
    for i in 0..connections {
        *counts.entry(memory.connect(seed + i)).or_insert(0u64) += 1;
    }
    let total: u64 = weights.iter().map(|w| u64::from(*w)).sum();
    counts
        .into_iter()
        .map(|(id, n)| {
            let fair = connections as f64 * f64::from(weights[id as usize - 1]) / total as f64;
            n as f64 / fair
        })
        .fold(0.0, f64::max)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[test]
fn connections_are_even_far_beyond_chance() {
    let runs = |n: usize, c: u64| median((0..30).map(|r| max_over_mean(&vec![1; n], c, r << 32)).collect());
    let (a, b, c) = (runs(10, 1_000), runs(10, 10_000), runs(3, 6_000));
    assert!(a <= 1.02, "1,000 over 10: {a}");
    assert!(b <= 1.01, "10,000 over 10: {b}");
    assert!(c <= 1.01, "6,000 over 3: {c}");
}

#[test]
fn weights_are_kept_within_the_same_bound() {
    let worst = median((0..30).map(|r| max_over_mean(&[1, 3, 2, 4], 10_000, r << 32)).collect());
    assert!(worst <= 1.02, "{worst}");
}

#[test]
fn plain_hashing_is_as_uneven_as_chance() {
    // The negative control of the two tests above: the same keys without the second choice.
    let memory = Memory::new(&[1; 10]);
    let mut counts = [0u32; 10];
    for cookie in 0..1_000 {
        let pick = pick(&memory, memory.word, memory.lists[0], socket_hash(cookie, 7)).unwrap();
        counts[pick.backend as usize - 1] += 1;
    }
    assert!(counts.iter().max().unwrap() > &105, "{counts:?}");
}

#[test]
fn sockets_spread_as_chance_and_no_worse() {
    // UDP sockets are placed by their cookie alone; cookies come in runs. X²/(k−1) is 1 on average for chance.
    let memory = Memory::new(&[1; 6]);
    let runs = 200;
    let dispersion = |run: u64| {
        let mut counts = [0f64; 6];
        for cookie in run * 3_000..(run + 1) * 3_000 {
            let pick = pick(&memory, memory.word, memory.lists[0], socket_hash(cookie, 3)).unwrap();
            counts[pick.backend as usize - 1] += 1.0;
        }
        counts.iter().map(|o| (o - 500.0) * (o - 500.0) / 500.0).sum::<f64>() / 5.0
    };
    let mean = (0..runs).map(dispersion).sum::<f64>() / runs as f64;
    // The mean of 200 has a standard deviation of sqrt(2 / 5 / 200) = 0.045.
    assert!((0.8..1.2).contains(&mean), "{mean}");
}

#[test]
fn healthy_keys_stay_when_a_backend_is_ejected() {
    let mut memory = Memory::new(&[1; 10]);
    let choose = |m: &Memory, key| pick(m, m.word, m.lists[0], hash::mix(key)).unwrap().backend;
    let before: Vec<u32> = (0..5_000).map(|key| choose(&memory, key)).collect();
    memory.ejected = vec![4];
    let mut taken_over = [0u32; 11];
    for (key, old) in before.iter().enumerate() {
        let new = choose(&memory, key as u64);
        if *old == 4 {
            taken_over[new as usize] += 1;
        } else {
            assert_eq!(new, *old, "key {key} moved although its backend is healthy");
        }
    }
    assert_eq!(taken_over[4], 0);
    assert!(taken_over.iter().filter(|n| **n > 0).count() >= 8, "{taken_over:?}");
}

#[test]
fn an_ejected_backend_does_not_win_by_its_lightness() {
    // It gets no connections, so it is the lightest of all: where one walk ends at it, the other choice must stand.
    let mut memory = Memory::new(&[1, 1, 5]);
    memory.ejected = vec![3];
    let to_ejected = (0..20_000).filter(|cookie| memory.connect(*cookie) == 3).count();
    // Both walks end at it for one key in some thirty: (5/7)^8 squared is 0.005.
    assert!(to_ejected < 200, "{to_ejected}");
}

#[test]
fn with_everybody_ejected_somebody_still_serves() {
    let mut memory = Memory::new(&[1; 3]);
    memory.ejected = vec![1, 2, 3];
    assert!(pick(&memory, memory.word, memory.lists[0], 42).is_some());
}

proptest! {
    #[test]
    fn garbage_in_maps_is_a_miss_not_a_fault(word: u64, a: u32, b: u32, hash: u64, elements in prop::collection::vec(any::<u64>(), 0..8)) {
        let memory = Memory { lists: vec![ListEntry { a, b, c: 0 }; 3], elements, ejected: vec![], word: SetWord(word) };
        let _ = pick_balanced(&memory, SetWord(word), ListEntry { a, b, c: 0 }, hash);
    }

    #[test]
    fn a_key_stays_with_its_backend(weights in prop::collection::vec(1u16..5, 1..20), hash: u64) {
        let memory = Memory::new(&weights);
        let one = pick(&memory, memory.word, memory.lists[0], hash).unwrap();
        let two = pick(&memory, memory.word, memory.lists[0], hash).unwrap();
        prop_assert_eq!(one, two);
    }
}
