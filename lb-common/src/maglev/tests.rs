use super::*;
use proptest::prelude::*;

fn equal(n: usize) -> Vec<Member> {
    (0..n as u64)
        .map(|i| Member {
            identity: hash::mix(i + 1),
            weight: 1,
        })
        .collect()
}

fn counts(table: &[u16], members: usize) -> Vec<u32> {
    let mut counts = vec![0; members];
    for slot in table {
        counts[usize::from(*slot)] += 1;
    }
    counts
}

#[test]
fn every_rung_is_prime() {
    for rung in LADDER {
        assert!((2..rung).take_while(|d| d * d <= rung).all(|d| rung % d != 0), "{rung}");
    }
}

#[test]
fn the_rung_gives_a_hundred_slots_each_while_it_can() {
    assert_eq!(slots_for(0), 251);
    assert_eq!(slots_for(2), 251);
    assert_eq!(slots_for(3), 1021);
    assert_eq!(slots_for(10), 1021);
    assert_eq!(slots_for(11), 4093);
    assert_eq!(slots_for(655), 65_521);
    assert_eq!(slots_for(5000), 65_521);
}

#[test]
fn nobody_to_serve_is_no_table() {
    assert_eq!(build(&[], 251), None);
    let idle = [Member { identity: 1, weight: 0 }];
    assert_eq!(build(&idle, 251), None);
}

#[test]
fn one_more_member_moves_little_within_a_rung_and_most_across() {
    let moved = |from: usize, to: usize| {
        let (a, b) = (equal(from), equal(to));
        let (slots_a, slots_b) = (slots_for(from), slots_for(to));
        let (a, b) = (build(&a, slots_a).unwrap(), build(&b, slots_b).unwrap());
        let moved = (0..100_000u64)
            .filter(|key| {
                let bits = (hash::mix(*key) >> 32) as u32;
                a[hash::scale(bits, slots_a) as usize] != b[hash::scale(bits, slots_b) as usize]
            })
            .count();
        moved as f64 / 100_000.0
    };
    // 5 → 6 must move one key in six; the table moves little more.
    let within = moved(5, 6);
    assert!((0.16..0.25).contains(&within), "{within}");
    // 10 → 11 crosses from 1021 to 4093 slots, which reshuffles: the known price of a rung.
    let across = moved(10, 11);
    assert!((0.8..0.97).contains(&across), "{across}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn shares_follow_weights_to_one_slot(weights in prop::collection::vec(0u16..=100, 1..60), seed: u64) {
        let members: Vec<Member> = weights.iter().enumerate()
            .map(|(i, weight)| Member { identity: hash::mix(seed ^ i as u64), weight: *weight }).collect();
        let slots = slots_for(members.len());
        let total: u64 = weights.iter().map(|w| u64::from(*w)).sum();
        match build(&members, slots) {
            None => prop_assert_eq!(total, 0),
            Some(table) => {
                prop_assert_eq!(table.len(), slots as usize);
                for (count, weight) in counts(&table, members.len()).into_iter().zip(&weights) {
                    let exact = f64::from(slots) * f64::from(*weight) / total as f64;
                    prop_assert!((f64::from(count) - exact).abs() < 1.0, "{} for {}", count, exact);
                }
            }
        }
    }

    #[test]
    fn order_does_not_matter(n in 1usize..40, seed: u64) {
        let members = equal(n);
        let mut shuffled: Vec<(usize, Member)> = members.iter().copied().enumerate().collect();
        shuffled.sort_by_key(|(i, _)| hash::mix(seed ^ *i as u64));
        let slots = slots_for(n);
        let straight = build(&members, slots).unwrap();
        let other: Vec<Member> = shuffled.iter().map(|(_, m)| *m).collect();
        let other = build(&other, slots).unwrap();
        for (a, b) in straight.iter().zip(&other) {
            prop_assert_eq!(usize::from(*a), shuffled[usize::from(*b)].0);
        }
    }
}
