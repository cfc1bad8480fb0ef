//! Maps that are too small: what does not fit takes nothing, and what was there stands.

use proptest::prelude::*;

use super::world::{Agent, ROOMY, history, service, state, world};
use crate::compile::{Capacity, Compiler};

type Shrink = fn(&mut Capacity);

fn tight() -> impl Strategy<Value = Capacity> {
    (
        2u32..9,
        2u32..5,
        2u32..7,
        4u32..20,
        8u32..40,
        70u32..900,
        0u32..8,
        0u32..6,
    )
        .prop_map(
            |(frontends, services, sets, backends, lists, tables, memberships, sources)| Capacity {
                frontends,
                services,
                sets,
                backends,
                lists,
                tables,
                memberships,
                sources,
            },
        )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn what_does_not_fit_takes_nothing(states in history(6), capacity in tight()) {
        let mut agent = Agent::new(capacity);
        for state in &states {
            // One Service after the other, as a full map refuses each alone.
            let names: Vec<_> = agent.wanted.keys().chain(state.keys()).cloned().collect();
            for name in names {
                let mut next = agent.wanted.clone();
                // Addresses that another Service still has are not this one's to want.
                let taken = |f: &crate::model::Frontend| agent.wanted.iter()
                    .any(|(other, s)| *other != name && s.frontends.iter().any(|g| (g.addr, g.port) == (f.addr, f.port)));
                match state.get(&name) {
                    Some(wanted) if !wanted.frontends.iter().any(taken) => next.insert(name.clone(), wanted.clone()),
                    _ => next.remove(&name),
                };
                let usage = agent.compiler.usage();
                let maps = world(&agent.memory);
                if agent.change(&next).is_err() {
                    prop_assert_eq!(agent.compiler.usage(), usage, "a refusal takes nothing");
                    prop_assert_eq!(world(&agent.memory), maps, "the old state stands");
                }
                agent.settle();
            }
            agent.check();
        }
        agent.empty();
    }
}

/// Each map says by name what it has too little of, and how to get more.
#[test]
fn every_map_can_be_full() {
    let wanted = {
        let mut wanted = service("a", 1, &[&[1, 2, 3]]);
        wanted.frontends[0].affinity_seconds = Some(60);
        wanted.sources = vec!["10.0.0.0/8".parse().unwrap(), "fd00::/8".parse().unwrap()];
        wanted
    };
    let cases: [(&str, Shrink); 8] = [
        ("frontends", |c| c.frontends = 0),
        ("Services", |c| c.services = 1),
        ("backend sets", |c| c.sets = 1),
        ("backends", |c| c.backends = 3),
        ("list entries", |c| c.lists = 3),
        ("table elements", |c| c.tables = 255),
        ("members of sets with ClientIP affinity", |c| c.memberships = 2),
        ("source ranges", |c| c.sources = 1),
    ];
    for (what, shrink) in cases {
        let mut capacity = ROOMY;
        shrink(&mut capacity);
        let mut compiler = Compiler::new(capacity);
        let usage = compiler.usage();
        let mut tables = Vec::new();
        let full = compiler.compile(&wanted, None, &mut tables).unwrap_err();
        assert_eq!(full.what, what);
        assert_eq!(compiler.usage(), usage, "{what}");
        assert!(tables.is_empty(), "{what}");
    }
}

/// A claim on what was found is given back too, or the next try would take new ids for what is in the kernel already.
#[test]
fn a_refusal_gives_claims_back() {
    let agent = Agent::fresh(&state([service("a", 1, &[&[1, 2]])]));
    let contents = crate::datapath::maps::Maps::dump(&agent.memory).unwrap();
    let mut compiler = Compiler::restore(ROOMY, &contents);
    let too_large: Vec<u32> = (0..600).collect();
    let mut tables = Vec::new();
    for _ in 0..3 {
        assert!(
            compiler
                .compile(&service("a", 1, &[&too_large]), None, &mut tables)
                .is_err()
        );
    }
    let again = compiler
        .compile(&service("a", 1, &[&[1, 2]]), None, &mut tables)
        .unwrap();
    assert_eq!(again, *agent.applied.values().next().unwrap());
    assert!(tables.is_empty());
}
