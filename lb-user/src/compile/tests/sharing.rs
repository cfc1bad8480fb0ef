//! One table for one set of endpoints, whoever uses it; and how much a large world takes.

use std::collections::BTreeSet;

use lb_common::maps as names;

use super::world::{Agent, ROOMY, service, state, used};
use crate::compile::{Capacity, Compiler};

fn tables_of(agent: &Agent) -> BTreeSet<u32> {
    agent
        .applied
        .values()
        .flat_map(|service| &service.sets)
        .map(|set| set.table.offset)
        .collect()
}

#[test]
fn services_and_ports_share_one_table() {
    let mut agent = Agent::new(ROOMY);
    agent
        .change(&state([
            service("a", 1, &[&[1, 2, 3], &[3, 2, 1]]),
            service("b", 2, &[&[2, 1, 3]]),
        ]))
        .unwrap();
    assert_eq!(tables_of(&agent).len(), 1);
    agent.check();
    // One leaves; the table stays for the others, and is freed with the last.
    agent.change(&state([service("b", 2, &[&[2, 1, 3]])])).unwrap();
    agent.check();
    agent.empty();
}

#[test]
fn a_weight_makes_another_table() {
    let mut heavy = service("b", 2, &[&[1, 2]]);
    heavy.sets[0].members[0].weight = 3;
    let agent = Agent::fresh(&state([service("a", 1, &[&[1, 2]]), heavy]));
    assert_eq!(tables_of(&agent).len(), 2);
}

/// K33: a change of one endpoint behind 400 ports builds one table.
#[test]
fn k33_four_hundred_ports_share_one_table() {
    let capacity = Capacity {
        frontends: 1000,
        services: 16,
        sets: 1000,
        backends: 100_000,
        lists: 200_000,
        tables: 20_000,
        memberships: 0,
        sources: 0,
    };
    let (before, after): (Vec<u32>, Vec<u32>) = ((0..100).collect(), (1..101).collect());
    let (before, after) = (vec![&before[..]; 400], vec![&after[..]; 400]);
    let mut compiler = Compiler::new(capacity);
    let mut tables = Vec::new();
    let old = compiler.compile(&service("a", 1, &before), None, &mut tables).unwrap();
    assert_eq!(tables.len(), 1);
    tables.clear();
    let new = compiler
        .compile(&service("a", 1, &after), Some(&old), &mut tables)
        .unwrap();
    assert_eq!(tables.len(), 1);
    let plan = crate::plan::Plan::between(Some(&old), Some(&new));
    assert_eq!((plan.lists.len(), plan.flip_sets.len()), (400, 400));
    assert_eq!((plan.put_backends.len(), plan.drop_backends.len()), (400, 400));
    assert!(plan.put_frontends.is_empty() && plan.drop_frontends.is_empty());
}

#[test]
fn two_thousand_services_of_ten_endpoints_take_what_they_need() {
    let capacity = Capacity {
        frontends: names::MAX_FRONTENDS,
        services: names::MAX_SERVICES,
        sets: names::MAX_SETS,
        backends: names::MAX_BACKENDS,
        lists: names::MAX_LIST_ENTRIES,
        tables: names::MAX_TABLE_ELEMENTS,
        memberships: names::MAX_MEMBERS,
        sources: names::MAX_SOURCES,
    };
    let mut compiler = Compiler::new(capacity);
    let mut tables = Vec::new();
    let mut compiled = Vec::new();
    for i in 0..2_000 {
        let endpoints: Vec<u32> = (i * 10..i * 10 + 10).collect();
        compiled.push(
            compiler
                .compile(&service(&format!("s{i}"), i, &[&endpoints]), None, &mut tables)
                .unwrap(),
        );
    }
    // Ten endpoints want 1,000 slots: the rung of 1,021, four to an element.
    let wanted = [
        (names::FRONTENDS, 2_000),
        (names::SETS, 2_000),
        (names::BACKENDS, 20_000),
        (names::LISTS, 22_000),
        (names::TABLES, 2_000 * 256),
        (names::MEMBERS, 0),
        (names::SOURCES, 0),
    ];
    assert_eq!(used(&compiler), wanted);
    assert_eq!(tables.len(), 2_000);
    // One endpoint more touches its own Service: one table, one list, one word, one backend.
    tables.clear();
    let endpoints: Vec<u32> = (0..11).collect();
    let new = compiler
        .compile(&service("s0", 0, &[&endpoints]), Some(&compiled[0]), &mut tables)
        .unwrap();
    let plan = crate::plan::Plan::between(Some(&compiled[0]), Some(&new));
    assert_eq!((tables.len(), plan.size().puts, plan.size().drops), (1, 3, 0));
}
