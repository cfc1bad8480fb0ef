use std::fmt::Write as _;

use super::*;

fn at(text: &str) -> SocketAddr {
    text.parse().expect("an address and port")
}

fn even(n: u64) -> Evenness {
    Evenness {
        n,
        endpoints: 3,
        window_seconds: Some(60.0),
        dispersion: Some(0.914),
        probability: 0.4,
        insufficient: n < 15,
        alarm: false,
        farthest: None,
    }
}

fn findings(verdict: VerdictKind) -> Findings {
    Findings {
        service: "shop/web".into(),
        verdict,
        watched_seconds: 3_725.0,
        connects: 1_012,
        attributed: 1_000,
        new: Some(even(1_000)),
        open: None,
        starved: vec![],
        known: Known::default(),
        mixed: false,
        balanced_here: false,
    }
}

#[test]
fn where_sets_cannot_be_told_apart_it_says_so_instead_of_numbers() {
    let mixed = Findings {
        mixed: true,
        ..findings(VerdictKind::Insufficient)
    };
    let said = sentences(&mixed);
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(
        said[0].contains("cannot be told apart") && !said[0].contains("too few"),
        "{said:?}"
    );
}

fn uneven(n: u64, seen: u64) -> Evenness {
    Evenness {
        dispersion: Some(166.7),
        probability: 3.2e-41,
        alarm: true,
        farthest: Some(Farthest {
            endpoint: at("10.244.1.5:8080"),
            seen,
            expected: n as f64 / 3.0,
        }),
        ..even(n)
    }
}

fn starved_by(cause: Cause, facts: &[Fact]) -> Findings {
    Findings {
        new: Some(uneven(1_000, 515)),
        starved: vec![Starved {
            endpoint: at("10.244.1.7:8080"),
            connections: Connections::New,
            expected: 333.3,
            seen: 0,
            probability: 1.6e-145,
            window_seconds: 28.0,
            since_birth: true,
            standing_seconds: 26.0,
            cause,
            facts: facts.to_vec(),
            usable_seconds: Some(54.0),
            zones: (cause == Cause::Topology).then(|| Zones {
                hinted: vec!["b".into()],
                own: Some("a".into()),
            }),
        }],
        known: Known {
            proxy: Some("kube-proxy (ipvs)".into()),
            affinity_seconds: Some(10_800),
            reuse_horizon_seconds: Some(120.0),
            clients: Some(2),
            endpoints: 3,
            ports: Some(Ports {
                client: [10, 244, 1, 9].into(),
                destination: "10.96.7.7:80".into(),
                used: 196,
                range: 200,
            }),
        },
        ..findings(VerdictKind::Starved)
    }
}

const REUSE: Fact = Fact::Reuse {
    same: 640,
    compared: 640,
    fair_chance: 1.0 / 3.0,
    observed_chance: 0.5,
    probability: 2.2e-193,
};

/// As the founding story has them.
const PINNED: [Fact; 5] = [
    REUSE,
    Fact::ReuseFrequency {
        reuses: 960,
        connections: 1_000,
        pinned: 0.96,
        enough: true,
    },
    Fact::IpvsPinsReuse,
    Fact::InProxy,
    Fact::ProxyWeight { weight: 1 },
];

/// All that is said about some findings.
fn everything(findings: &Findings) -> String {
    let mut out = String::new();
    for text in sentences(findings) {
        // Writing into a String cannot fail.
        let _infallible = writeln!(out, "{text}");
    }
    for found in &findings.starved {
        for text in because(found, &findings.known) {
            let _infallible = writeln!(out, "  because: {text}");
        }
    }
    for text in advice(findings) {
        let _infallible = writeln!(out, "  advice: {text}");
    }
    out
}

fn causes() -> Vec<Findings> {
    let stickiness = |same, sticky| Fact::Stickiness {
        same,
        pairs: 998,
        fair_chance: 1.0 / 3.0,
        observed_chance: 0.5,
        sticky,
    };
    let loose = Fact::Reuse {
        same: 8,
        compared: 20,
        fair_chance: 0.5,
        observed_chance: 0.5,
        probability: 1.0,
    };
    let seldom = Fact::ReuseFrequency {
        reuses: 20,
        connections: 1_000,
        pinned: 0.0,
        enough: false,
    };
    vec![
        starved_by(Cause::NotProgrammed, &[Fact::NotInProxy]),
        starved_by(Cause::PortReuse, &PINNED),
        starved_by(
            Cause::LongLived,
            &[Fact::OpenFarBelowFair {
                open: 3,
                fair: 133.3,
                rate_at_most: 0.21,
                seconds_to_half: 303.0,
            }],
        ),
        starved_by(Cause::Affinity, &[Fact::AffinityConfigured, stickiness(998, true)]),
        starved_by(Cause::ZeroWeight, &[Fact::ProxyWeight { weight: 0 }, Fact::InProxy]),
        starved_by(Cause::Topology, &[Fact::ExcludedByTopology]),
        starved_by(
            Cause::Unknown,
            &[
                Fact::InProxy,
                stickiness(340, false),
                loose,
                seldom,
                Fact::IpvsReschedules { mode: 1 },
                Fact::HashesTuples,
            ],
        ),
    ]
}

#[test]
fn every_cause_is_said_in_sentences() {
    let all = causes();
    for findings in &all {
        let name = findings.starved[0].cause.name();
        insta::assert_snapshot!(format!("cause_{name}"), everything(findings));
    }
    let covered = |cause: &Cause| all.iter().any(|findings| findings.starved[0].cause == *cause);
    assert!(Cause::ALL.iter().all(covered));
}

#[test]
fn every_verdict_is_said_in_sentences() {
    let none = Findings {
        connects: 0,
        attributed: 0,
        new: None,
        ..findings(VerdictKind::NoTraffic)
    };
    let few = Findings {
        connects: 12,
        attributed: 12,
        new: Some(even(12)),
        ..findings(VerdictKind::Insufficient)
    };
    let drift = Findings {
        open: Some(Evenness {
            window_seconds: None,
            ..uneven(400, 300)
        }),
        ..findings(VerdictKind::Uneven)
    };
    for (name, findings) in [
        ("no_traffic", none),
        ("insufficient", few),
        ("even", findings(VerdictKind::Even)),
        (
            "uneven_new",
            Findings {
                new: Some(uneven(1_000, 600)),
                ..findings(VerdictKind::Uneven)
            },
        ),
        ("uneven_open", drift),
    ] {
        insta::assert_snapshot!(format!("verdict_{name}"), everything(&findings));
    }
}

#[test]
fn facts_that_were_not_measured_are_not_said() {
    let mut said = String::new();
    for mut findings in causes() {
        findings.known = Known::default();
        let found = &mut findings.starved[0];
        (found.usable_seconds, found.zones) = (None, None);
        found.facts.truncate(1);
        if found.cause == Cause::Unknown {
            found.facts.clear();
        }
        let name = found.cause.name();
        let _infallible = write!(said, "{name}:\n{}", everything(&findings));
    }
    insta::assert_snapshot!("bare_causes", said);
}

#[test]
fn a_setting_that_is_right_already_is_not_advised() {
    let right = advice(&starved_by(
        Cause::PortReuse,
        &[REUSE, Fact::IpvsReschedules { mode: 1 }],
    ));
    assert!(right.iter().all(|text| !text.contains("conn_reuse_mode")), "{right:?}");
    let mut here = starved_by(Cause::PortReuse, &PINNED);
    assert!(advice(&here)[0].contains("conn_reuse_mode to 1"));
    here.balanced_here = true;
    assert!(advice(&here).iter().all(|text| !text.contains("let Evenkeel")));
}

#[test]
fn what_could_not_be_told_by_endpoint_is_said_and_nothing_else_claimed() {
    let blind = Findings {
        attributed: 0,
        new: None,
        ..findings(VerdictKind::Insufficient)
    };
    assert_eq!(
        sentences(&blind),
        [
            "None of the 1,012 connections in 62 min 5 s could be told by endpoint, so nothing is known of their evenness."
        ]
    );
}

#[test]
fn small_samples_are_called_small() {
    let small = Fact::Reuse {
        same: 21,
        compared: 21,
        fair_chance: 0.5,
        observed_chance: 0.5,
        probability: 4.8e-7,
    };
    let pinned = starved_by(Cause::PortReuse, &[small]);
    assert!(because(&pinned.starved[0], &pinned.known)[0].ends_with("That is a small sample."));
    let few = sentences(&Findings {
        new: Some(even(12)),
        ..findings(VerdictKind::Insufficient)
    });
    assert!(
        few[0].contains("too few to judge") && few[0].contains("noise"),
        "{few:?}"
    );
}

#[test]
fn many_starved_endpoints_are_counted_and_a_cause_is_said_once() {
    let mut findings = starved_by(Cause::PortReuse, &PINNED);
    let one = findings.starved[0].clone();
    findings.starved = (0..9)
        .map(|last| Starved {
            endpoint: at(&format!("10.244.1.{last}:8080")),
            connections: if last == 0 { Connections::Open } else { Connections::New },
            since_birth: last == 1,
            standing_seconds: 0.0,
            ..one.clone()
        })
        .collect();
    findings.starved[8].cause = Cause::ZeroWeight;
    findings.starved[8].facts = vec![Fact::ProxyWeight { weight: 0 }];
    let said = [sentences(&findings), advice(&findings)].concat();
    insta::assert_snapshot!("many_starved", said.join("\n"));
}

#[test]
fn the_farthest_is_the_one_that_chance_explains_least() {
    let shares = [
        (at("10.0.0.1:80"), 90, 100.0),
        (at("10.0.0.2:80"), 160, 100.0),
        (at("10.0.0.3:80"), 0, 0.0),
        (at("10.0.0.4:80"), 3, 1.0),
    ];
    let found = Farthest::among(shares).map(|found| found.endpoint);
    assert_eq!(found, Some(at("10.0.0.2:80")));
    assert_eq!(Farthest::among([]), None);
}

#[test]
fn unevenness_too_small_to_matter_is_said_as_that() {
    let found = Evenness {
        probability: 1e-9,
        ..even(1_000_000)
    };
    let said = sentences(&Findings {
        new: Some(found),
        ..findings(VerdictKind::Even)
    });
    assert!(
        said[0].contains("by chance: 1 in 10^9") && said[0].contains("too little to matter"),
        "{said:?}"
    );
}

proptest::proptest! {
    /// Whatever numbers come, sentences are sentences.
    #[test]
    fn no_number_breaks_a_sentence(
        expected in proptest::num::f64::ANY,
        probability in proptest::num::f64::ANY,
        window in proptest::num::f64::ANY,
        seen: u64,
        n: u64,
    ) {
        let mut findings = starved_by(Cause::PortReuse, &PINNED);
        findings.starved[0] = Starved { expected, probability, window_seconds: window, seen, ..findings.starved[0].clone() };
        findings.new = Some(Evenness { probability, dispersion: Some(expected), ..uneven(n, seen) });
        for text in sentences(&findings).into_iter().chain(advice(&findings)) {
            proptest::prop_assert!(text.ends_with('.') && !text.contains("  "), "{}", text);
        }
    }
}
