use std::collections::HashSet;

use lb_common::{
    maglev::{self, Member},
    set::SetWord,
};

use super::{super::candidate, fresh::Fresh, *};
use crate::{
    compile::{Compiled, Table},
    model::{Protocol, Scope, SetName},
};

/// A set of so many backends, of which some are ejected, with its Maglev table.
fn made(count: u32, ejected: &[u32]) -> (Compiled, Vec<u16>) {
    let members: Vec<Member> = (1..=count)
        .map(|id| Member {
            identity: u64::from(id) * 7,
            weight: 1,
        })
        .collect();
    let size = maglev::slots_for(members.len());
    let slots = maglev::build(&members, size).expect("a table");
    let backends = (1..=count).map(|id| {
        let backend = Backend {
            addr: Addr::from_v4(id),
            // By which the test knows it again.
            port: Port::new(id as u16),
            proto: TCP,
            state: if ejected.contains(&id) {
                state::EJECTED
            } else {
                state::ACTIVE
            },
            ..Backend::default()
        };
        (id, backend)
    });
    let mut table = Table::default();
    table.slots = size;
    let set = CompiledSet {
        name: SetName {
            port_name: "".into(),
            protocol: Protocol::Tcp,
            ipv6: false,
            scope: Scope::Cluster,
        },
        set_id: 3,
        word: SetWord::new(500, count as u16, 9),
        table,
        members: (1..=count).map(|id| (id, 1)).collect(),
        affinity: false,
    };
    let service = Compiled {
        service_id: 1,
        frontends: Box::default(),
        sets: vec![set].into(),
        backends: backends.collect(),
        sources: Box::default(),
    };
    (service, slots)
}

fn tables(made: &(Compiled, Vec<u16>)) -> Published<'_> {
    Published {
        service: &made.0,
        set: &made.0.sets[0],
        slots: &made.1,
        started: &[],
    }
}

fn met(choice: Choice) -> (u32, u32) {
    match choice {
        Choice::Backend { id, tries, .. } => (id, tries),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_tuple_falls_on_the_member_of_its_slot() {
    let made = made(5, &[]);
    let tables = tables(&made);
    for key in 0..1_000_u64 {
        let hash = hash::mix(key);
        let slot = hash::scale((hash >> 32) as u32, tables.set.table.slots) as usize;
        let wanted = tables.set.members[usize::from(made.1[slot])].0;
        assert_eq!(
            met(choose(&tables, hash, None, |_| Ok(false)).expect("no map is read")),
            (wanted, 1)
        );
    }
}

#[test]
fn an_ejected_backend_is_passed_over_and_a_taken_one_tried_three_times() {
    let made = made(10, &[2]);
    let tables = tables(&made);
    let chosen = |hash: u64, taken: &HashSet<u32>| {
        choose(&tables, hash, None, |backend| {
            Ok(taken.contains(&u32::from(backend.port.get())))
        })
        .expect("no map is read")
    };
    let mut tries = HashSet::new();
    for key in 0..1_000_u64 {
        let hash = hash::mix(key);
        let (first, _) = met(chosen(hash, &HashSet::new()));
        assert_ne!(first, 2, "it is ejected");
        let taken = HashSet::from([first]);
        match chosen(hash, &taken) {
            Choice::Backend { id, tries: at, .. } => {
                assert!(id != first && id != 2 && (2..=BACKEND_TRIES).contains(&at));
                tries.insert(at);
            }
            // All three hashes fell on the same one.
            Choice::Collision => {
                tries.insert(0);
            }
            Choice::Nobody => panic!("somebody is usable"),
        }
        assert_eq!(chosen(hash, &(1..=10).collect()), Choice::Collision);
    }
    assert_eq!(tries, HashSet::from([0, 2, 3]), "all ways are met");
}

#[test]
fn whom_affinity_remembers_comes_before_the_hash() {
    let made = made(4, &[]);
    let tables = tables(&made);
    let remembered = made.0.backends[2];
    for key in 0..100_u64 {
        let found = choose(&tables, hash::mix(key), Some(remembered), |_| Ok(false)).expect("no map is read");
        assert_eq!(met(found), (3, 1));
    }
    let taken = choose(&tables, 1, Some(remembered), |_| Ok(true)).expect("no map is read");
    assert_eq!(taken, Choice::Collision);
    // The program asks its memory once: where that one is taken, the hash finds others.
    let (mut elsewhere, mut collided) = (0, 0);
    for key in 0..100_u64 {
        let is_taken = |backend: &Backend| Ok(backend.addr == remembered.1.addr && backend.port == remembered.1.port);
        match choose(&tables, hash::mix(key), Some(remembered), is_taken).expect("no map is read") {
            Choice::Backend { id, tries, .. } => {
                assert!(id != remembered.0 && (2..=BACKEND_TRIES).contains(&tries));
                elsewhere += 1;
            }
            Choice::Collision => collided += 1,
            Choice::Nobody => panic!("somebody is usable"),
        }
    }
    assert!(elsewhere > collided, "{elsewhere} and {collided}");
}

#[test]
fn an_empty_set_has_nobody() {
    let mut made = made(2, &[]);
    made.0.backends = Box::default();
    assert_eq!(
        choose(&tables(&made), 7, None, |_| Ok(false)).expect("no map is read"),
        Choice::Nobody
    );
}

#[test]
fn a_new_connection_is_told_in_half_a_sentence() {
    let backend = Backend {
        addr: Addr::from_v4(u32::from_be_bytes([10, 244, 1, 5]).to_be()),
        port: Port::new(8_080),
        ..Backend::default()
    };
    let fresh = |verdict: Verdict, candidates: Vec<CandidateView>| Fresh {
        verdict,
        candidates,
        source_address: None,
        steps: vec!["why".to_owned()],
    };
    let placed = fresh(Verdict::Translated, vec![candidate(1, &backend, 1.0)]);
    assert_eq!(fresh_end(&placed), ": it would go to 10.244.1.5:8080");
    assert_eq!(
        fresh_end(&fresh(Verdict::Dropped, vec![])),
        ": it would be dropped (why)"
    );
}
