//! Changes one after another: their order and number leave no trace.

use proptest::prelude::*;

use super::world::{Agent, ROOMY, history, service, state};
use crate::compile::{Compiler, GRACE_MS};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn changes_lead_where_a_fresh_start_leads(states in history(6), grace in any::<bool>()) {
        let mut agent = Agent::new(ROOMY);
        for state in &states {
            if grace {
                agent.settle();
            }
            agent.change(state).expect("room for all");
            prop_assert_eq!(agent.change(state), Ok(0), "the same state again writes nothing");
            if grace {
                agent.check();
            }
        }
        agent.check();
        agent.empty();
    }
}

#[test]
fn ids_and_room_wait_out_their_grace_and_open_connections() {
    let mut agent = Agent::new(ROOMY);
    agent.change(&state([service("a", 1, &[&[1]])])).unwrap();
    let first = agent.applied.values().next().unwrap().clone();
    agent.change(&state([])).unwrap();
    let next = |agent: &mut Agent, name: &str| {
        agent.change(&state([service(name, 2, &[&[1]])])).unwrap();
        let new = agent.applied.values().next().unwrap().clone();
        agent.change(&state([])).unwrap();
        new
    };

    agent.now += GRACE_MS - 1;
    agent.compiler.reclaim(agent.now, |_| true, |_| true);
    let early = next(&mut agent, "b");
    assert_ne!(early.service_id, first.service_id);
    assert_ne!(early.backends[0].0, first.backends[0].0);
    assert_ne!(early.sets[0].set_id, first.sets[0].set_id);
    assert_ne!(early.sets[0].word.offset(), first.sets[0].word.offset());
    assert_ne!(early.sets[0].table.offset, first.sets[0].table.offset);

    // Connections are still open at the first backend, and at the first Service.
    let (backend, service) = (first.backends[0].0, first.service_id);
    agent.now += GRACE_MS;
    agent
        .compiler
        .reclaim(agent.now, |id| id != backend, |id| id != service);
    let later = next(&mut agent, "c");
    assert_ne!(later.backends[0].0, backend);
    assert_ne!(later.service_id, service);

    agent.now += GRACE_MS;
    agent.compiler.reclaim(agent.now, |_| true, |_| true);
    let taken: Vec<u32> = (0..4)
        .map(|i| next(&mut agent, &format!("d{i}")).backends[0].0)
        .collect();
    assert!(taken.contains(&backend), "{taken:?}: what is idle is used again");
}

#[test]
fn no_generation_makes_the_zero_word() {
    let mut compiler = Compiler::new(ROOMY);
    compiler.generation = 0x00ff_fffd;
    let mut tables = Vec::new();
    for i in 0..6 {
        let empty = service(&format!("s{i}"), i, &[&[]]);
        let compiled = compiler.compile(&empty, None, &mut tables).unwrap();
        assert_ne!(compiled.sets[0].word.0, 0, "after {i} publications");
        assert_eq!(compiled.sets[0].word.count(), 0);
    }
    assert!(tables.is_empty());
}

/// Every agent gives the same ids to the same world: nothing hangs on the order of a hash map.
#[test]
fn compiling_is_deterministic() {
    let world = state([
        service("a", 1, &[&[3, 1, 2], &[1]]),
        service("b", 2, &[&[9, 8, 7, 6, 5]]),
    ]);
    let (first, second) = (Agent::fresh(&world), Agent::fresh(&world));
    assert_eq!(first.applied, second.applied);
}
