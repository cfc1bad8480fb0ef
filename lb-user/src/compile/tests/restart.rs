//! Going on with what the maps hold.

use lb_common::{backend::Backend, frontend::FrontendKey, set::SetWord};
use proptest::prelude::*;

use super::watch::Watch;
use super::world::{Agent, ROOMY, history, service, state, world};
use crate::{
    compile::{Compiler, Contents, GRACE_MS},
    datapath::{fake::Fault, maps::Maps},
    model::DesiredService,
    plan::Plan,
};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_restart_without_a_change_writes_nothing(states in history(5)) {
        let mut agent = Agent::new(ROOMY);
        for state in &states {
            agent.change(state).expect("room for all");
        }
        let (last, before) = (agent.wanted.clone(), agent.applied.clone());
        let plan = agent.restart(&last).expect("room for all");
        prop_assert_eq!(plan, Plan::default());
        // Digests, ids, words: all is as it was.
        prop_assert_eq!(&agent.applied, &before);
        agent.check();
        agent.empty();
    }

    #[test]
    fn a_restart_with_a_change_writes_the_difference(states in history(5)) {
        let mut agent = Agent::new(ROOMY);
        let (last, before) = states.split_last().expect("one at least");
        for state in before {
            agent.change(state).expect("room for all");
        }
        let (old, old_applied) = (agent.wanted.clone(), agent.applied.clone());
        agent.now += GRACE_MS;
        let plan = agent.restart(last).expect("room for all");
        for (name, service) in last {
            if old.get(name) == Some(service) && keeps_its_ids(service) {
                let (was, is) = (&old_applied[name], &agent.applied[name]);
                prop_assert_eq!(was, is);
                prop_assert!(is.frontends.iter().all(|(key, _)| !plan.put_frontends.contains_key(key)));
                prop_assert!(is.sets.iter().all(|set| !plan.flip_sets.contains_key(&set.set_id)));
                prop_assert!(is.backends.iter().all(|(id, _)| !plan.put_backends.contains_key(id)));
            }
        }
        agent.check();
        agent.empty();
    }

    #[test]
    fn a_death_after_any_write_is_made_good(states in history(4), cut in 0usize..400) {
        let mut agent = Agent::new(ROOMY);
        let (last, before) = states.split_last().expect("one at least");
        for state in before {
            agent.change(state).expect("room for all");
        }
        let (plan, changes) = agent.compile(last).expect("room for all");
        agent.allow_changes(last, &changes);
        agent.memory.fault = Fault::After(cut);
        let _ = agent.carry_out(&plan);
        agent.memory.fault = Fault::None;
        agent.now += GRACE_MS;
        agent.restart(last).expect("room for all");
        agent.check();
        agent.empty();
    }
}

/// Only a Service with a cluster IP is known again whoever else is there: every Service that is served has one.
fn keeps_its_ids(service: &DesiredService) -> bool {
    service
        .frontends
        .iter()
        .any(|f| f.kind == crate::model::FrontendKind::ClusterIp)
}

/// A Service with a node port beside its cluster IP, whose clients outside have a set of their own.
fn with_local_set(local: &[u32]) -> DesiredService {
    let mut wanted = service("a", 1, &[&[1, 2, 3], local]);
    let mut node_port = wanted.frontends[0].clone();
    node_port.kind = crate::model::FrontendKind::NodePort;
    node_port.addr = "192.0.2.1".parse().unwrap();
    node_port.affinity_seconds = Some(60);
    node_port.outside = Some(crate::model::Outside {
        set: 1,
        when_empty: crate::model::WhenEmptyOutside::Silence,
        masquerade: false,
        source_ranges: false,
    });
    // The second set is outside's alone.
    wanted.frontends.truncate(1);
    wanted.frontends.push(node_port);
    wanted.sets[1].name = super::world::set_name("p000");
    wanted.sets[1].name.scope = crate::model::Scope::Local;
    for member in &mut wanted.sets[1].members {
        member.port = super::world::port(8000);
    }
    wanted
}

/// A set that nobody but clients outside meets is found again by the frontend that names it, and remembers them.
#[test]
fn the_outside_set_keeps_its_id() {
    let mut agent = Agent::fresh(&state([with_local_set(&[1])]));
    let before = agent.applied.values().next().unwrap().clone();
    assert_eq!(before.sets.len(), 2);
    assert_eq!(before.frontends[1].1.outside_set_id, before.sets[1].set_id);
    assert!(
        before.sets[1].affinity,
        "an affinity from outside needs its memberships"
    );
    assert_eq!(before.backends.len(), 3);
    assert_eq!(agent.restart(&state([with_local_set(&[1])])).unwrap(), Plan::default());
    assert_eq!(agent.applied.values().next(), Some(&before));
    agent.check();

    // Changed meanwhile: only its own word, list and memberships are written.
    let plan = agent.restart(&state([with_local_set(&[1, 2])])).unwrap();
    let after = agent.applied.values().next().unwrap();
    let ids = |service: &crate::compile::Compiled| service.sets.iter().map(|s| s.set_id).collect::<Vec<_>>();
    assert_eq!(ids(after), ids(&before));
    assert_eq!(
        (plan.flip_sets.len(), plan.put_frontends.len(), plan.drop_sets.len()),
        (1, 0, 0)
    );
    agent.check();
    agent.empty();
}

/// What the kernel holds for both sides stands, where the Service no longer fits.
#[test]
fn both_sides_stand_as_they_were_found() {
    let agent = Agent::fresh(&state([with_local_set(&[1])]));
    let contents = agent.memory.dump().unwrap();
    let mut compiler = Compiler::restore(ROOMY, &contents);
    let mut grown = with_local_set(&[1]);
    grown.sets[0].members.extend((0..600).map(|i| crate::model::Member {
        addr: super::world::endpoint_addr(100 + i),
        port: super::world::port(8000),
        weight: 1,
    }));
    assert!(compiler.compile(&grown, None, &mut Vec::new()).is_err());
    let found = compiler
        .as_found(&grown, &contents, &std::collections::HashSet::new())
        .unwrap();
    assert_eq!(Some(&found), agent.applied.values().next());
}

/// Tables of one member all look alike. The set that changed must not take the table that the other one still uses.
#[test]
fn sets_that_shared_a_table_part_at_a_restart() {
    let mut agent = Agent::new(ROOMY);
    agent
        .change(&state([service("a", 1, &[&[1]]), service("b", 2, &[&[1]])]))
        .unwrap();
    agent
        .restart(&state([service("a", 1, &[&[3]]), service("b", 2, &[&[1]])]))
        .unwrap();
    agent.check();
    let tables: Vec<u32> = agent
        .applied
        .values()
        .map(|service| service.sets[0].table.offset)
        .collect();
    assert_ne!(tables[0], tables[1], "two owners of one table");
    // Once one of them goes, the other's table must not be given away.
    agent.change(&state([service("a", 1, &[&[3]])])).unwrap();
    agent.settle();
    agent
        .change(&state([service("a", 1, &[&[3]]), service("c", 3, &[&[5, 6]])]))
        .unwrap();
    agent.check();
}

/// Tables of one member all look alike: a set that changes leaves the table that it shared to the one that stays.
#[test]
fn a_set_that_changed_leaves_its_table_to_the_one_that_stayed() {
    let mut agent = Agent::new(ROOMY);
    agent
        .change(&state([service("a", 1, &[&[1]]), service("b", 2, &[&[1]])]))
        .unwrap();
    let before = agent.applied.clone();
    let plan = agent
        .restart(&state([service("a", 1, &[&[3]]), service("b", 2, &[&[1]])]))
        .unwrap();
    let stayed = before.keys().find(|name| &*name.name == "b").expect("it is there");
    assert_eq!(agent.applied[stayed], before[stayed]);
    let set = before[stayed].sets[0].set_id;
    assert!(!plan.flip_sets.contains_key(&set), "{plan:?}");
    agent.check();
}

/// A frontend that moved to another Service while the agent was away does not take the set along that others name.
#[test]
fn a_frontend_that_moved_takes_no_set_along() {
    let mut first = service("z", 1, &[&[1, 2]]);
    let mut external = first.frontends[0].clone();
    external.kind = crate::model::FrontendKind::ExternalIp;
    external.addr = "192.0.2.7".parse().unwrap();
    first.frontends.push(external.clone());
    let mut agent = Agent::new(ROOMY);
    agent.change(&state([first.clone()])).unwrap();
    let before = agent.applied.values().next().unwrap().clone();

    // "a" is compiled before "z", and wants the external address for endpoints of its own.
    first.frontends.pop();
    let mut second = service("a", 2, &[&[8, 9]]);
    second.frontends.push(external);
    agent.restart(&state([first.clone(), second])).unwrap();
    agent.check();
    let after = &agent.applied[&first.name];
    assert_eq!(after.service_id, before.service_id);
    assert_eq!(after.backends, before.backends);
    assert_eq!(after.sets, before.sets);
}

/// What is foreign or half lost in the maps takes up no id or room for ever.
#[test]
fn what_nobody_can_claim_is_freed() {
    let wanted = state([service("a", 1, &[&[1, 2], &[2]])]);
    let mut agent = Agent::fresh(&wanted);
    let usage = agent.compiler.usage();
    agent.watch = Watch::blind();
    let lost = agent.applied.values().next().unwrap().sets[0].set_id;
    agent.memory.sets[lost as usize] = 0;
    // A set without a list, an id of nobody, and two backends of one Service with one address.
    agent.memory.sets[40] = SetWord::new(ROOMY.lists - 1, 7, 9).0;
    agent.memory.sets[0] = SetWord::new(0, 0, 9).0;
    let twin = *agent.memory.backends.iter().find(|b| b.service_id == 1).unwrap();
    agent.memory.backends[77] = twin;
    agent.memory.backends[0] = twin;
    let foreign = lb_common::frontend::Frontend {
        service_id: 4_000_000,
        set_id: 4_000_000,
        ..Default::default()
    };
    agent.memory.frontends.insert(FrontendKey::default(), foreign);
    // Ranges of a Service that is not there any more, whose id must not admit them at the next one.
    for service_id in [9, 4_000_000] {
        let key = lb_common::frontend::SourceKey {
            service_id,
            addr: twin.addr,
        };
        agent.memory.sources.insert(crate::compile::Source { key, bits: 160 });
    }

    agent.restart(&wanted).unwrap();
    agent.settle();
    assert_eq!(world(&agent.memory), world(&Agent::fresh(&wanted).memory));
    assert_eq!(agent.compiler.usage(), usage);
}

#[test]
fn foreign_ids_are_never_taken_on() {
    let wanted = service("a", 1, &[&[1]]);
    let mut contents = Contents::default();
    for id in [0, ROOMY.services, u32::MAX] {
        let frontend = lb_common::frontend::Frontend {
            service_id: id,
            set_id: id,
            ..Default::default()
        };
        contents
            .frontends
            .insert(super::super::key(&wanted.frontends[0]), frontend);
        contents.backends.insert(
            id,
            Backend {
                addr: wanted.sets[0].members[0].addr.into(),
                service_id: id,
                state: 1,
                ..Backend::default()
            },
        );
        contents.sets.insert(id, SetWord::new(0, 0, 1));
        let mut compiler = Compiler::restore(ROOMY, &contents);
        let compiled = compiler.compile(&wanted, None, &mut Vec::new()).unwrap();
        assert!((1..ROOMY.services).contains(&compiled.service_id), "{id}");
        assert!((1..ROOMY.sets).contains(&compiled.sets[0].set_id), "{id}");
        assert!((1..ROOMY.backends).contains(&compiled.backends[0].0), "{id}");
    }
}

/// A Service that no longer fits when the agent comes back keeps what the kernel holds of it.
#[test]
fn what_does_not_fit_at_a_restart_stands_as_it_was_found() {
    let before = state([service("a", 1, &[&[1, 2], &[2]]), service("b", 2, &[&[1, 2]])]);
    let mut agent = Agent::fresh(&before);
    let contents = agent.memory.dump().unwrap();
    let mut compiler = Compiler::restore(ROOMY, &contents);
    let too_large: Vec<u32> = (0..600).collect();
    let grown = service("a", 1, &[&too_large, &[2]]);
    let other = service("b", 2, &[&[1, 2]]);
    let mut tables = Vec::new();
    assert!(compiler.compile(&grown, None, &mut tables).is_err());
    let b = compiler.compile(&other, None, &mut tables).unwrap();
    let a = compiler
        .as_found(&grown, &contents, &b.frontends.iter().map(|(key, _)| *key).collect())
        .unwrap();
    assert_eq!((&a, &b), (&agent.applied[&grown.name], &agent.applied[&other.name]));
    assert!(tables.is_empty());
    let mut broken = Vec::new();
    assert_eq!(
        Plan::against(&contents, [&a, &b].into_iter(), &mut broken),
        Plan::default()
    );
    assert!(broken.is_empty());
    compiler.forget_restored(0);
    compiler.reclaim(u64::MAX, |_| true, |_| true);
    assert_eq!(compiler.usage(), agent.compiler.usage());

    // From there on it is a Service like any other.
    agent.compiler = compiler;
    agent.applied.insert(grown.name.clone(), a);
    agent
        .change(&state([service("a", 1, &[&[1, 2, 3], &[2]]), other]))
        .unwrap();
    agent.check();
    agent.empty();
}
