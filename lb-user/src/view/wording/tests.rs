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
        balanced_here: false,
    }
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

fn starved_by(evidence: Evidence) -> Findings {
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
            evidence,
        }],
        ..findings(VerdictKind::Starved)
    }
}

fn port_reuse(mode: Option<u32>) -> Evidence {
    Evidence::PortReuse {
        compared: 640,
        same: 640,
        chance: Some(1.0 / 3.0),
        reused: Some(Reused {
            connections: 1_000,
            reuses: 640,
            horizon_seconds: 120.0,
        }),
        conn_reuse_mode: mode,
        ports: Some(Ports {
            client: [10, 244, 1, 9].into(),
            destination: "10.96.7.7:80".into(),
            used: 196,
            range: 200,
        }),
    }
}

/// All that is said about some findings.
fn everything(findings: &Findings) -> String {
    let mut out = String::new();
    for text in sentences(findings) {
        // Writing into a String cannot fail.
        let _infallible = writeln!(out, "{text}");
    }
    for found in &findings.starved {
        for text in because(&found.evidence) {
            let _infallible = writeln!(out, "  because: {text}");
        }
    }
    for text in advice(findings) {
        let _infallible = writeln!(out, "  advice: {text}");
    }
    out
}

fn causes() -> Vec<Evidence> {
    vec![
        Evidence::NotProgrammed {
            proxy: Some("kube-proxy (ipvs)".into()),
            usable_seconds: Some(40.0),
        },
        port_reuse(Some(0)),
        Evidence::LongLived {
            open: 400,
            older: Some(388),
            new: 12,
            window_seconds: 60.0,
        },
        Evidence::Affinity {
            timeout_seconds: Some(10_800),
            clients: 2,
            endpoints: 3,
            compared: 998,
            same_share: Some(1.0),
            chance: Some(0.34),
        },
        Evidence::ZeroWeight {
            place: Some("the IPVS table".into()),
        },
        Evidence::Topology {
            for_zones: vec!["b".into()],
            zone: Some("a".into()),
        },
        Evidence::Unknown {
            ruled_out: vec!["port_reuse".into(), "affinity".into()],
        },
    ]
}

#[test]
fn every_cause_is_said_in_sentences() {
    for evidence in causes() {
        let name = evidence.name();
        insta::assert_snapshot!(format!("cause_{name}"), everything(&starved_by(evidence)));
    }
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
    let bare = [
        Evidence::NotProgrammed {
            proxy: None,
            usable_seconds: None,
        },
        Evidence::PortReuse {
            compared: 0,
            same: 0,
            chance: None,
            reused: None,
            conn_reuse_mode: None,
            ports: None,
        },
        Evidence::LongLived {
            open: 1,
            older: None,
            new: 1,
            window_seconds: 60.0,
        },
        Evidence::Affinity {
            timeout_seconds: None,
            clients: 0,
            endpoints: 3,
            compared: 0,
            same_share: None,
            chance: None,
        },
        Evidence::ZeroWeight { place: None },
        Evidence::Topology {
            for_zones: vec![],
            zone: None,
        },
        Evidence::Unknown { ruled_out: vec![] },
    ];
    let mut said = String::new();
    for evidence in bare {
        let name = evidence.name();
        let _infallible = write!(said, "{name}:\n{}", everything(&starved_by(evidence)));
    }
    insta::assert_snapshot!("bare_causes", said);
}

#[test]
fn a_setting_that_is_right_already_is_not_advised() {
    let right = advice(&starved_by(port_reuse(Some(1))));
    assert!(right.iter().all(|text| !text.contains("conn_reuse_mode")), "{right:?}");
    let mut here = starved_by(port_reuse(Some(0)));
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
    let small = Evidence::PortReuse {
        compared: 12,
        same: 12,
        chance: Some(0.5),
        reused: None,
        conn_reuse_mode: None,
        ports: None,
    };
    assert!(because(&small)[0].ends_with("That is a small sample."));
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
    let mut findings = starved_by(port_reuse(Some(0)));
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
    findings.starved[8].evidence = Evidence::ZeroWeight { place: None };
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
        let mut findings = starved_by(port_reuse(Some(0)));
        findings.starved[0] = Starved { expected, probability, window_seconds: window, seen, ..findings.starved[0].clone() };
        findings.new = Some(Evenness { probability, dispersion: Some(expected), ..uneven(n, seen) });
        for text in sentences(&findings).into_iter().chain(advice(&findings)) {
            proptest::prop_assert!(text.ends_with('.') && !text.contains("  "), "{}", text);
        }
    }
}
