//! One cause for each story, and none for what only looks like one.

use proptest::prelude::*;

use super::{
    super::{
        reuse::{ClientTuple, ConnRecord, ReuseConfig, ReuseTracker, chance_of_same},
        simulated::{Dice, SECOND, World, fair},
        starvation::{MemberReading, Status},
        stickiness::{Client, Stickiness, chance_of_shares},
    },
    *,
};

/// The founding story as it was measured: 515/485/0 over 200 ports.
fn founding() -> Evidence {
    Evidence {
        in_proxy: Some(true),
        proxy_weight: Some(1),
        stickiness: Some(StickinessEvidence { pairs: 995, same: 501 }),
        reuse: Some(ReuseEvidence {
            connections: 1_000,
            reuses: 800,
            same: 800,
            moved: 0,
        }),
        fair_chance: chance_of_same([1, 1, 1]),
        observed_chance: chance_of_shares([515, 485, 0]),
        ipvs: Some(true),
        conn_reuse_mode: Some(0),
        ..Evidence::default()
    }
}

fn long_lived_drift() -> DriftJudgement {
    let mut world = World::new(5, 2);
    world.mean_life_ns = 1e18;
    for at in 0..300 {
        world.connect(at % 2, world.now_ns);
    }
    world.add(3, 1);
    world.run(120, 0.0, fair);
    world.drift.judgement(3).unwrap()
}

#[test]
fn names_are_those_of_the_documentation() {
    let names: Vec<_> = Cause::ALL.iter().map(|cause| cause.name()).collect();
    assert_eq!(
        names,
        [
            "not_programmed",
            "port_reuse",
            "long_lived",
            "affinity",
            "zero_weight",
            "topology",
            "unknown"
        ]
    );
}

#[test]
fn the_founding_story_is_port_reuse() {
    let found = cause(&founding());
    assert_eq!(found.cause, Cause::PortReuse);
    let Fact::Reuse {
        same,
        compared,
        fair_chance,
        observed_chance,
        probability,
    } = found.because[0]
    else {
        panic!("{found:?}");
    };
    assert_eq!((same, compared), (800, 800));
    assert!(fair_chance < 0.334 && observed_chance > 0.5 && probability < 1e-200);
    assert!(
        matches!(found.because[1], Fact::ReuseFrequency { enough: true, pinned, .. } if (pinned - 0.8).abs() < 1e-9)
    );
    assert_eq!(found.because[2], Fact::IpvsPinsReuse);
    assert!(found.because.contains(&Fact::InProxy));
}

#[test]
fn hard_facts_come_first() {
    let hard = |change: fn(&mut Evidence)| {
        let mut evidence = founding();
        change(&mut evidence);
        cause(&evidence)
    };
    let absent = hard(|e| e.in_proxy = Some(false));
    assert_eq!(
        (absent.cause, absent.because),
        (Cause::NotProgrammed, vec![Fact::NotInProxy])
    );
    let weightless = hard(|e| e.proxy_weight = Some(0));
    assert_eq!(weightless.cause, Cause::ZeroWeight);
    assert_eq!(weightless.because[0], Fact::ProxyWeight { weight: 0 });
    let elsewhere = hard(|e| (e.excluded_by_topology, e.in_proxy) = (true, Some(false)));
    assert_eq!(elsewhere.cause, Cause::Topology);
    assert_eq!(
        hard(|e| (e.excluded_by_topology, e.in_proxy) = (true, None)).cause,
        Cause::Topology
    );
    // The proxy has it all the same: the hints do not keep it from traffic.
    assert_eq!(hard(|e| e.excluded_by_topology = true).cause, Cause::PortReuse);
}

#[test]
fn never_port_reuse_where_clients_explain_it() {
    let mut evidence = founding();
    evidence.drift = Some(long_lived_drift());
    let found = cause(&evidence);
    assert_eq!(found.cause, Cause::LongLived);
    assert!(matches!(found.because[0], Fact::OpenFarBelowFair { open: 0, .. }));
    let mut evidence = founding();
    evidence.affinity_configured = true;
    evidence.stickiness = Some(StickinessEvidence { pairs: 995, same: 990 });
    assert_eq!(cause(&evidence).cause, Cause::Affinity);
    // The proxy's own, which nobody asked for.
    evidence.affinity_configured = false;
    assert_eq!(cause(&evidence).cause, Cause::Affinity);
}

#[test]
fn affinity_that_is_configured_needs_no_measurement_but_can_be_contradicted() {
    let mut evidence = founding();
    evidence.affinity_configured = true;
    evidence.stickiness = None;
    let found = cause(&evidence);
    assert_eq!(
        (found.cause, found.because[0]),
        (Cause::Affinity, Fact::AffinityConfigured)
    );
    evidence.stickiness = Some(StickinessEvidence { pairs: 995, same: 501 });
    assert_eq!(cause(&evidence).cause, Cause::PortReuse);
    // A lone client: the observed chance is 1.
    evidence.stickiness = Some(StickinessEvidence { pairs: 995, same: 995 });
    evidence.observed_chance = Some(1.0);
    assert_eq!(cause(&evidence).cause, Cause::Affinity);
}

#[test]
fn chance_of_two_left_of_three_is_not_pinning() {
    // Something unknown starves one of three: reuse meets the same of two in half of the cases.
    let mut evidence = founding();
    evidence.conn_reuse_mode = Some(1);
    evidence.reuse = Some(ReuseEvidence {
        connections: 1_000,
        reuses: 990,
        same: 495,
        moved: 495,
    });
    let found = cause(&evidence);
    assert_eq!(found.cause, Cause::Unknown);
    assert!(found.because.contains(&Fact::IpvsReschedules { mode: 1 }));
    assert!(found.because.iter().any(|fact| matches!(fact, Fact::Reuse { .. })));
}

#[test]
fn one_old_one_new_needs_the_setting() {
    let mut evidence = founding();
    evidence.fair_chance = chance_of_same([1, 1]);
    evidence.observed_chance = chance_of_shares([1_000, 0]);
    // All connections meet the only one that gets any: that is no affinity, and of itself no reuse.
    evidence.stickiness = Some(StickinessEvidence { pairs: 995, same: 995 });
    assert_eq!(cause(&evidence).cause, Cause::PortReuse);
    evidence.conn_reuse_mode = None;
    assert_eq!(cause(&evidence).cause, Cause::Unknown);
    evidence.ipvs = Some(false);
    evidence.conn_reuse_mode = Some(0);
    assert_eq!(cause(&evidence).cause, Cause::Unknown);
}

#[test]
fn rare_few_or_hashed_reuse_explains_nothing() {
    let with = |reuse| {
        cause(&Evidence {
            reuse: Some(reuse),
            ..founding()
        })
        .cause
    };
    let seldom = ReuseEvidence {
        connections: 10_000,
        reuses: 7_000,
        same: 7_000,
        moved: 0,
    };
    assert_eq!(with(seldom), Cause::Unknown);
    let few = ReuseEvidence {
        connections: 20,
        reuses: 19,
        same: 19,
        moved: 0,
    };
    assert_eq!(with(few), Cause::Unknown);
    let hashed = Evidence {
        hashes_tuples: true,
        ..founding()
    };
    assert_eq!(cause(&hashed).cause, Cause::Unknown);
}

#[test]
fn nothing_known_is_unknown() {
    let found = cause(&Evidence::default());
    assert_eq!((found.cause, found.because), (Cause::Unknown, vec![]));
}

#[test]
fn the_bound_lies_above_the_binomial_tail() {
    for (n, chance) in [(20_u64, 0.5_f64), (50, 0.3), (100, 0.01)] {
        for hits in 0..=n {
            let mut tail = 0.0;
            for i in hits..=n {
                let ln_choose: f64 = (0..i).map(|j| ((n - j) as f64 / (i - j) as f64).ln()).sum();
                tail += (ln_choose + i as f64 * chance.ln() + (n - i) as f64 * (1.0 - chance).ln()).exp();
            }
            assert!(
                chance_of_so_many(hits, n, chance) >= tail * (1.0 - 1e-9),
                "{hits} of {n} at {chance}"
            );
        }
    }
    assert!(chance_of_so_many(MIN_COMPARED, MIN_COMPARED, 0.5) < PINNED_P);
}

/// A proxy and its clients, from the first packet to the verdict.
struct Story {
    world: World,
    reuse: ReuseTracker,
    stickiness: Stickiness,
    dice: Dice,
    /// What the proxy keeps by (client, port), or by client.
    kept: std::collections::HashMap<(u64, u16), u32>,
    port: u16,
}

impl Story {
    fn new() -> Self {
        Self {
            world: World::new(1, 2),
            reuse: ReuseTracker::new(ReuseConfig::default()),
            stickiness: Stickiness::new(1_000),
            dice: Dice(1),
            kept: std::collections::HashMap::new(),
            port: 0,
        }
    }

    /// Runs for some seconds; `key` says by what the proxy keeps clients.
    fn run(&mut self, seconds: u32, rate: u64, clients: u64, ports: u16, key: impl Fn(u64, u16) -> Option<(u64, u16)>) {
        for _ in 0..seconds {
            for i in 0..rate {
                let start_ns = self.world.now_ns + i * SECOND / rate;
                let who = self.dice.below(clients);
                self.port = (self.port + 1) % ports;
                let eligible: Vec<MemberReading> =
                    self.world.members.iter().filter(|m| m.weight > 0).copied().collect();
                let fresh = eligible[self.dice.below(eligible.len() as u64) as usize].backend;
                let backend = key(who, self.port).map_or(fresh, |key| *self.kept.entry(key).or_insert(fresh));
                let at = self.world.members.iter().position(|m| m.backend == backend).unwrap();
                self.world.connect(at, start_ns);
                let address = [0; 16];
                self.stickiness
                    .push(1, Client { netns: who, address }, self.port, backend, start_ns);
                let tuple = ClientTuple {
                    netns: who,
                    client: address,
                    vip: address,
                    client_port: self.port,
                    vip_port: 80,
                    protocol: 6,
                };
                let record = ConnRecord {
                    start_ns,
                    end_ns: start_ns + SECOND / 1_000,
                    tuple,
                    service: 1,
                    backend,
                };
                self.reuse.push(record, |_, _| true);
            }
            self.world.run(1, 0.0, fair);
        }
    }

    fn evidence(&self) -> Evidence {
        let counts = self.reuse.total();
        let sticky = self.stickiness.service(1);
        Evidence {
            in_proxy: Some(true),
            proxy_weight: Some(1),
            reuse: Some(ReuseEvidence {
                connections: counts.connections,
                reuses: counts.total(),
                same: counts.same_backend,
                moved: counts.moved,
            }),
            stickiness: Some(StickinessEvidence {
                pairs: sticky.pairs,
                same: sticky.same,
            }),
            fair_chance: chance_of_same(self.world.members.iter().map(|m| m.weight)),
            observed_chance: sticky.chance,
            drift: self.world.drift.judgement(3),
            ..Evidence::default()
        }
    }

    fn status(&self) -> Status {
        self.world.detector.judgement(3).unwrap().status
    }
}

#[test]
fn pinned_ports_starve_the_third_and_are_named() {
    let mut story = Story::new();
    let by_port = |who, port| Some((who, port));
    story.run(5, 300, 1, 200, by_port);
    story.world.add(3, 1);
    let born_ns = story.world.now_ns;
    story.run(10, 300, 1, 200, by_port);
    assert_eq!(story.status(), Status::Starved);
    assert!(story.world.changes[0].at_ns - born_ns <= 4 * SECOND);
    assert_eq!(cause(&story.evidence()).cause, Cause::PortReuse);
}

#[test]
fn ports_that_are_chosen_anew_alarm_nobody() {
    let mut story = Story::new();
    story.run(5, 300, 1, 200, |_, _| None);
    story.world.add(3, 1);
    story.run(600, 100, 1, 200, |_, _| None);
    assert_eq!(story.status(), Status::Fair);
    story.world.assert_silent();
}

#[test]
fn clients_that_are_kept_starve_the_third_and_are_named() {
    let mut story = Story::new();
    let by_client = |who, _| Some((who, 0));
    story.run(20, 100, 40, 2_000, by_client);
    story.world.add(3, 1);
    story.run(30, 100, 40, 2_000, by_client);
    assert_eq!(story.status(), Status::Starved);
    let found = cause(&story.evidence());
    assert_eq!(found.cause, Cause::Affinity);
    assert!(matches!(found.because[0], Fact::Stickiness { sticky: true, .. }));
    // With few ports, each client's reused ones meet the same backend as well; it still is affinity.
    let mut story = Story::new();
    story.run(60, 200, 4, 50, by_client);
    story.world.add(3, 1);
    story.run(60, 200, 4, 50, by_client);
    assert_eq!(story.status(), Status::Starved);
    let evidence = story.evidence();
    assert!(
        evidence
            .reuse
            .is_some_and(|reuse| reuse.reuses * 10 > reuse.connections * 9)
    );
    assert_ne!(cause(&evidence).cause, Cause::PortReuse);
}

#[test]
fn an_endpoint_without_weight_in_the_proxy_is_named() {
    let mut story = Story::new();
    story.run(5, 100, 5, 5_000, |_, _| None);
    // The API has it as usable; the proxy drains it.
    story.world.add(3, 1);
    for _ in 0..10 {
        story.world.run(1, 100.0, super::super::simulated::first_two);
    }
    assert_eq!(story.status(), Status::Starved);
    let evidence = Evidence {
        proxy_weight: Some(0),
        ..story.evidence()
    };
    assert_eq!(cause(&evidence).cause, Cause::ZeroWeight);
}

proptest! {
    #[test]
    fn any_evidence_gives_one_cause_and_sane_numbers(
        flags in any::<[bool; 4]>(),
        in_proxy in proptest::option::of(any::<bool>()),
        weight in proptest::option::of(0_u32..3),
        (connections, reuses, same, moved) in any::<(u64, u64, u64, u64)>(),
        (pairs, sticky) in any::<(u64, u64)>(),
        chances in proptest::option::of((-0.5_f64..1.5, 0.0_f64..=1.0)),
        mode in proptest::option::of(0_u8..4),
    ) {
        let evidence = Evidence {
            in_proxy,
            proxy_weight: weight,
            excluded_by_topology: flags[0],
            affinity_configured: flags[1],
            hashes_tuples: flags[2],
            ipvs: Some(flags[3]),
            conn_reuse_mode: mode,
            reuse: Some(ReuseEvidence { connections, reuses, same, moved }),
            stickiness: Some(StickinessEvidence { pairs, same: sticky }),
            fair_chance: chances.map(|(fair, _)| fair),
            observed_chance: chances.map(|(_, observed)| observed),
            drift: None,
        };
        let found = cause(&evidence);
        prop_assert!(Cause::ALL.contains(&found.cause));
        for fact in &found.because {
            if let Fact::Reuse { probability, .. } = fact {
                prop_assert!((0.0..=1.0).contains(probability));
            }
            if let Fact::ReuseFrequency { pinned, .. } = fact {
                prop_assert!(*pinned >= 0.0);
            }
        }
        if found.cause == Cause::PortReuse {
            prop_assert!(!flags[2] && in_proxy != Some(false) && weight != Some(0));
        }
    }
}
