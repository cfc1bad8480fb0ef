//! The order of writes, and what plans of several Services are together.
//!
//! That nothing dangles after any single write is watched in every history that `compile::tests` runs through; here are
//! the cases that a plan alone decides.

use lb_common::maps as names;

use super::*;
use crate::{
    compile::{
        Capacity, Compiler,
        tests::world::{Agent, ROOMY, State, service, state, world},
    },
    datapath::{fake::Memory, maps::Maps},
};

fn compile(compiler: &mut Compiler, wanted: &crate::model::DesiredService, plan: &mut Plan) -> Compiled {
    compiler.compile(wanted, None, &mut plan.tables).expect("room for all")
}

#[test]
fn backends_come_before_tables_before_frontends_and_go_after_them() {
    let mut agent = Agent::fresh(&state([service("a", 1, &[&[1, 2]])]));
    let (plan, _) = agent.compile(&state([service("b", 2, &[&[3, 4]])])).unwrap();
    let mut order = Vec::new();
    agent
        .memory
        .carry_out(&plan, &mut |_, store| order.push(store.map))
        .unwrap();
    order.dedup();
    let wanted = [
        names::BACKEND_STATS,
        names::SERVICE_STATS,
        names::BACKENDS,
        names::TABLES,
        names::LISTS,
        names::SETS,
        names::FRONTENDS,
        names::SETS,
        names::BACKENDS,
    ];
    assert_eq!(order, wanted);
}

/// A Service whose address of a load balancer admits these ranges.
fn limited(ranges: &[&str]) -> crate::model::DesiredService {
    let mut wanted = service("a", 1, &[&[1]]);
    wanted.frontends[0].kind = crate::model::FrontendKind::LoadBalancer;
    wanted.frontends[0].outside = Some(crate::model::Outside {
        set: 0,
        when_empty: crate::model::WhenEmptyOutside::Refuse,
        masquerade: true,
        source_ranges: true,
    });
    wanted.sources = ranges.iter().map(|range| range.parse().unwrap()).collect();
    wanted
}

#[test]
fn source_ranges_come_before_who_asks_for_them_and_go_after() {
    let order = |from: &State, to: &State| {
        let mut agent = Agent::fresh(from);
        let (plan, _) = agent.compile(to).unwrap();
        let mut order = Vec::new();
        let note = &mut |memory: &Memory, store: crate::datapath::fake::Store| {
            if [names::FRONTENDS, names::SOURCES].contains(&store.map) {
                order.push((store.map, memory.sources.len()));
            }
        };
        agent.memory.carry_out(&plan, note).unwrap();
        order
    };
    let (none, first) = (state([]), state([limited(&["10.0.0.0/8"])]));
    let other = state([limited(&["192.0.2.0/24", "fd00::/8"])]);
    let (ranges, frontends) = (names::SOURCES, names::FRONTENDS);
    assert_eq!(order(&none, &first), [(ranges, 1), (frontends, 1)]);
    assert_eq!(order(&first, &other), [(ranges, 2), (ranges, 3), (ranges, 2)]);
    assert_eq!(order(&other, &none), [(frontends, 2), (ranges, 1), (ranges, 0)]);
}

#[test]
fn carrying_out_twice_is_carrying_out_once() {
    let mut compiler = Compiler::new(ROOMY);
    let mut plan = Plan::default();
    let mut wanted = service("a", 1, &[&[1, 2], &[2]]);
    wanted.frontends[0].affinity_seconds = Some(60);
    let compiled = compile(&mut compiler, &wanted, &mut plan);
    plan.merge(Plan::between(None, Some(&compiled)));
    let mut memory = Memory::new(ROOMY);
    memory.apply(&plan).unwrap();
    let once = memory.dump().unwrap();
    memory.apply(&plan).unwrap();
    assert_eq!(memory.dump().unwrap(), once);
    assert_eq!(once.memberships.len(), 2);
}

#[test]
fn a_frontend_that_moves_between_services_is_never_away() {
    let (mut first, mut second) = (service("a", 1, &[&[1]]), service("b", 2, &[&[2]]));
    let mut external = first.frontends[0].clone();
    external.addr = "192.0.2.7".parse().unwrap();
    first.frontends.push(external.clone());
    let mut agent = Agent::fresh(&state([first.clone(), second.clone()]));
    first.frontends.pop();
    second.frontends.push(external);
    let (plan, _) = agent.compile(&state([first, second])).unwrap();
    let held = agent.memory.frontends.len();
    let watch = &mut |memory: &Memory, _| assert_eq!(memory.frontends.len(), held);
    agent.memory.carry_out(&plan, watch).unwrap();
}

/// What goes makes room for what comes: a full map can still be exchanged for another of its size.
#[test]
fn a_full_map_of_frontends_can_be_exchanged() {
    let capacity = Capacity {
        frontends: 3,
        memberships: 3,
        ..ROOMY
    };
    let with_affinity = |name: &str, ip: u32, endpoint: u32| {
        let mut wanted = service(name, ip, &[&[endpoint], &[endpoint], &[endpoint]]);
        wanted.frontends.iter_mut().for_each(|f| f.affinity_seconds = Some(60));
        wanted
    };
    let mut agent = Agent::new(capacity);
    agent.change(&state([with_affinity("a", 1, 1)])).unwrap();
    agent.restart(&state([with_affinity("b", 2, 2)])).unwrap();
    assert_eq!(world(&agent.memory), world(&Agent::fresh(&agent.wanted.clone()).memory));
    assert_eq!(agent.memory.memberships.len(), 3);
}

#[test]
fn affinity_is_switched_by_memberships_alone() {
    let plain = service("a", 1, &[&[1, 2]]);
    let mut sticky = plain.clone();
    sticky.frontends[0].affinity_seconds = Some(10_800);
    let mut agent = Agent::fresh(&state([plain.clone()]));
    let (on, _) = agent.compile(&state([sticky.clone()])).unwrap();
    assert_eq!((on.put_memberships.len(), on.put_frontends.len()), (2, 1));
    assert_eq!(on.size(), Size { puts: 3, drops: 0 });
    let mut agent = Agent::fresh(&state([sticky]));
    let (off, _) = agent.compile(&state([plain])).unwrap();
    assert_eq!(off.drop_memberships.len(), 2);
    assert_eq!(off.size(), Size { puts: 1, drops: 2 });
}

/// An address of two Services is two backends: one goes, the other stays.
#[test]
fn one_endpoint_of_two_services_is_two_backends() {
    let mut agent = Agent::fresh(&state([service("a", 1, &[&[1]]), service("b", 2, &[&[1]])]));
    let (plan, _) = agent.compile(&state([service("b", 2, &[&[1]])])).unwrap();
    assert_eq!((plan.drop_backends.len(), plan.put_backends.len()), (1, 0));
    agent.change(&state([service("b", 2, &[&[1]])])).unwrap();
    agent.check();
}

type Damage<'a> = &'a dyn Fn(&mut Memory);

/// What differs from what was applied is named once, whatever it is.
#[test]
fn every_kind_of_damage_is_found() {
    let mut wanted = service("a", 1, &[&[1, 2], &[3]]);
    wanted.frontends[0].affinity_seconds = Some(60);
    wanted.sources = vec!["10.0.0.0/8".parse().unwrap()];
    let agent = Agent::fresh(&state([wanted]));
    let service = agent.applied.values().next().unwrap();
    let set = &service.sets[0];
    let key = service.frontends[0].0;
    let backend = service.backends[0].0;
    let source = service.sources[0];
    let damages: [(&str, Damage<'_>); 15] = [
        ("frontend lost", &|m| m.frontends.retain(|k, _| *k != key)),
        ("frontend changed", &|m| {
            m.frontends.get_mut(&key).unwrap().affinity_seconds = 1;
        }),
        ("frontend foreign", &|m| {
            m.frontends.extend([(FrontendKey::default(), Frontend::default())]);
        }),
        ("set lost", &|m| m.sets[set.set_id as usize] = 0),
        ("set changed", &|m| m.sets[set.set_id as usize] ^= 1 << 50),
        ("set foreign", &|m| m.sets[60] = SetWord::new(9, 2, 3).0),
        ("list changed", &|m| m.lists[set.word.offset() as usize + 1].a += 1),
        ("table changed", &|m| m.tables[set.table.offset as usize] ^= 1),
        ("backend lost", &|m| {
            m.backends[backend as usize].state = lb_common::backend::state::VACANT;
        }),
        ("backend changed", &|m| m.backends[backend as usize].service_id += 1),
        ("backend foreign", &|m| {
            m.backends[400].state = lb_common::backend::state::ACTIVE;
        }),
        ("membership lost", &|m| m.memberships.clear()),
        ("outside set changed", &|m| {
            m.frontends.get_mut(&key).unwrap().outside_set_id += 1;
        }),
        ("source range lost", &|m| m.sources.clear()),
        ("source range foreign", &|m| {
            m.sources.insert(Source { bits: 32, ..source });
        }),
    ];
    for (what, damage) in damages {
        let mut memory = agent.memory.clone();
        damage(&mut memory);
        let contents = memory.dump().unwrap();
        let mut broken = Vec::new();
        let plan = Plan::against(&contents, agent.applied.values(), &mut broken);
        assert!(!plan.is_empty() || !broken.is_empty(), "{what} is not found");
        memory.apply(&plan).unwrap();
        if what == "table changed" {
            assert_eq!(broken, [set], "{what}");
        } else {
            assert_eq!(
                memory.dump().unwrap(),
                agent.memory.dump().unwrap(),
                "{what} is not repaired"
            );
        }
    }
}
