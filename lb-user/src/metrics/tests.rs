use std::{collections::BTreeSet, env, fs, path::PathBuf};

use super::{families::Kind, *};
use crate::{
    analysis::{
        cause::Cause,
        imbalance,
        reuse::{INTERVAL_BUCKETS, ReuseCounts},
    },
    source::kube::RequestCounts,
    view::{BackendCountsView, Mode, Timestamp},
};

struct Fixed(Snapshot);

impl MetricSource for Fixed {
    fn snapshot(&self) -> Snapshot {
        self.0.clone()
    }
}

/// An agent that has just started: everything at 0.
fn blank() -> Snapshot {
    Snapshot {
        time: Timestamp::from_unix_millis(1_790_000_000_000),
        started: Timestamp::from_unix_millis(1_789_990_000_000),
        version: "0.1.0",
        abi: 1,
        mode: Mode::Observe,
        connects: vec![ConnectSample {
            hook: "connect4",
            action: "translated",
            total: 0,
        }],
        services: vec![],
        reuse: ReuseCounts::default(),
        reuse_evicted: 0,
        forgotten: vec![("clients", 0)],
        network_programming: Buckets::new(families::PROGRAMMING_EDGES),
        sync: vec![SyncSample {
            kind: "full",
            durations: Buckets::new(families::SYNC_EDGES),
        }],
        sync_last: None,
        sync_last_queued: None,
        source_synced: vec![("Service", None)],
        flows: vec![],
        maps: vec![MapSample {
            map: "FRONTENDS",
            entries: 0,
            max_entries: 100,
        }],
        programs: vec![],
        events_lost: vec![("ring", 0)],
        repairs: 0,
        problems: 0,
        kube_proxy: None,
    }
}

/// An agent at work, with every metric present.
fn busy() -> Snapshot {
    let mut latency = Buckets::new(families::CONNECT_EDGES);
    for value in [0.000_1, 0.000_2, 0.3, 99.0, f64::NAN] {
        latency.observe(value);
    }
    let time = Timestamp::from_unix_millis(1_789_999_990_500);
    Snapshot {
        services: vec![ServiceSample {
            namespace: "shop".into(),
            name: "web".into(),
            connects: 1_000,
            outside: 250,
            attributed: 998,
            direct: 7,
            failed: [2, 1, 0, 0, 0, 0, 5],
            latency,
            active: 12,
            backends: BackendCountsView {
                active: 3,
                draining: 1,
                ejected: 0,
            },
            imbalance: Some(imbalance::by_weight([(1, 515), (1, 485), (1, 0)])),
            open_imbalance: Some(imbalance::by_weight([(1, 6), (1, 6)])),
            starved: [0, 1, 0, 0, 0, 0, 0],
            ports_used: 0.25,
            reuse: [600, 40, 3, 1],
            by_backend: vec![BackendSample {
                backend: "[fd00::7]:8080".into(),
                connects: 515,
                active: 6,
                judged: Some(imbalance::Share {
                    expected: 333.5,
                    observed: 515,
                }),
            }],
        }],
        reuse: ReuseCounts {
            connections: 1_000,
            same_backend: 600,
            moved: 40,
            stale_backend: 3,
            unknown_backend: 1,
            overlap: 2,
            intervals: [0, 0, 0, 0, 0, 0, 0, 13, 631, 0],
            interval_seconds: 57_000.5,
        },
        reuse_evicted: 4,
        sync_last: Some(time),
        sync_last_queued: Some(time),
        source_synced: vec![("Service", Some(time))],
        flows: vec![("syn_sent", 2), ("established", 40)],
        programs: vec![ProgramSample {
            program: "connect4".into(),
            runs: 1_000,
            run_nanoseconds: 500_000,
        }],
        kube_proxy: Some(kube_proxy()),
        ..blank()
    }
}

/// What a busy agent tells under kube-proxy's names.
fn kube_proxy() -> KubeProxySample {
    let mut requests = RequestCounts {
        by_status: [(200, 41), (410, 1)].into(),
        unanswered: 2,
        ..RequestCounts::default()
    };
    requests.durations.observe(0.004);
    let mut sync = Buckets::new(families::kube_proxy::SYNC_EDGES);
    sync.observe(0.000_4);
    let mut programming = Buckets::new(families::PROGRAMMING_EDGES);
    programming.observe(0.03);
    KubeProxySample {
        sync,
        programming,
        service_changes: (12, 0),
        endpoint_changes: (340, 2),
        healthz: [9, 1],
        livez: [8, 0],
        requests: Some(requests),
        resident_bytes: Some(20 << 20),
        cpu_seconds: Some(1.5),
    }
}

fn scrape(snapshot: Snapshot) -> String {
    let exporter = Exporter::new(Arc::new(Fixed(snapshot)), DEFAULT_SERVICE_CAP).expect("the families are sound");
    String::from_utf8(exporter.encode().expect("the snapshot can be written")).expect("text")
}

#[test]
fn names_types_and_help_follow_the_rules() {
    let mut seen = BTreeSet::new();
    for family in families::ALL {
        let name = family.name;
        assert!(seen.insert(name), "{name} is there twice");
        let bare = name
            .strip_prefix("evenkeel_")
            .unwrap_or_else(|| panic!("{name}: prefix"));
        assert!(
            bare.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'),
            "{name}: letters"
        );
        assert_eq!(
            name.ends_with("_total"),
            family.kind == Kind::Counter,
            "{name}: _total is for counters"
        );
        for unit in [
            "ms",
            "us",
            "ns",
            "milliseconds",
            "microseconds",
            "minutes",
            "percent",
            "kilobytes",
            "age",
        ] {
            assert!(
                bare.split('_').all(|word| word != unit),
                "{name}: base units, and timestamps instead of ages"
            );
        }
        if let Kind::Histogram(edges) = family.kind {
            assert!(name.ends_with("_seconds"), "{name}: unit");
            assert!(edges.windows(2).all(|pair| pair[0] < pair[1]), "{name}: edges rise");
        }
        assert!(
            family.help.ends_with('.') && !family.help.contains('\n'),
            "{name}: help"
        );
        for label in family.labels {
            let forbidden = [
                "client", "address", "ip", "port", "tuple", "pod", "le", "instance", "job",
            ];
            assert!(!forbidden.contains(label), "{name}: label {label}");
        }
    }
}

#[test]
fn kube_proxys_names_are_kept_and_shown_on_request_alone() {
    let (without, with) = (scrape(blank()), scrape(busy()));
    for family in families::kube_proxy::ALL {
        let line = format!("# TYPE {} {}\n", family.name, family.kind.name());
        assert!(!without.contains(&line) && with.contains(&line), "{}", family.name);
        let of_another = ["kubeproxy_", "rest_client_", "process_"];
        assert!(
            of_another.iter().any(|prefix| family.name.starts_with(prefix)),
            "{}",
            family.name
        );
        assert!(
            families::ALL.iter().all(|own| own.name != family.name),
            "{}",
            family.name
        );
        assert!(family.help.ends_with('.'), "{}", family.name);
    }
    for line in [
        "rest_client_requests_total{code=\"410\",method=\"GET\"} 1",
        "rest_client_requests_total{code=\"<error>\",method=\"GET\"} 2",
        "kubeproxy_proxy_healthz_total{code=\"503\"} 1",
        "kubeproxy_sync_proxy_rules_endpoint_changes_pending 2",
    ] {
        assert!(with.lines().any(|found| found == line), "{line}");
    }
    // With another source than the API server there are no requests, and nothing is made up.
    let mut other = busy();
    other.kube_proxy = Some(KubeProxySample {
        requests: None,
        ..kube_proxy()
    });
    assert!(!scrape(other).contains("rest_client_"));
    assert_eq!(families::kube_proxy::SYNC_EDGES.len(), 15);
}

#[test]
fn ratios_stay_between_zero_and_one() {
    let mut over = blank();
    over.maps[0].entries = 1_000;
    for snapshot in [over, busy()] {
        for line in scrape(snapshot).lines().filter(|line| line.contains("_ratio{")) {
            let value: f64 = line
                .rsplit(' ')
                .next()
                .and_then(|text| text.parse().ok())
                .expect("a sample");
            assert!((0.0..=1.0).contains(&value), "{line}");
        }
    }
}

#[test]
fn series_are_created_at_zero() {
    let text = scrape(blank());
    for family in families::ALL {
        let present = text.contains(&format!("# TYPE {} ", family.name));
        assert_eq!(present, family.absent.is_empty(), "{}", family.name);
    }
    for outcome in ["same_backend", "moved", "stale_backend", "unknown_backend"] {
        assert!(text.contains(&format!("evenkeel_tuple_reuse_total{{outcome=\"{outcome}\"}} 0\n")));
    }
}

#[test]
fn a_busy_agent_shows_every_family() {
    let text = scrape(busy());
    for family in families::ALL {
        assert!(
            text.contains(&format!("# HELP {} {}\n", family.name, family.help)),
            "{}",
            family.name
        );
        assert!(
            text.contains(&format!("# TYPE {} {}\n", family.name, family.kind.name())),
            "{}",
            family.name
        );
    }
    insta::assert_snapshot!("busy", text);
}

#[test]
fn below_the_minimum_sample_imbalance_is_absent() {
    let mut snapshot = busy();
    snapshot.services[0].imbalance = Some(imbalance::by_weight([(1, 3), (1, 1), (1, 0)]));
    snapshot.services[0].open_imbalance = Some(imbalance::by_weight([(1, 3), (1, 1)]));
    assert!(!scrape(snapshot).contains("imbalance"));
}

#[test]
fn new_and_open_connections_are_judged_apart() {
    let text = scrape(busy());
    let labels = "{namespace=\"shop\",service=\"web\"}";
    assert!(text.contains(&format!("evenkeel_service_imbalance_samples{labels} 1000\n")));
    assert!(text.contains(&format!("evenkeel_service_open_imbalance_samples{labels} 12\n")));
    assert!(text.contains(&format!("evenkeel_service_open_imbalance_max_to_mean{labels} 1\n")));
    assert!(text.contains(&format!("evenkeel_service_imbalance_beyond_chance{labels} 1\n")));
}

#[test]
fn every_cause_has_a_series() {
    let text = scrape(busy());
    for cause in Cause::ALL {
        let count = u8::from(cause == Cause::PortReuse);
        let name = cause.name();
        let line =
            format!("evenkeel_starved_endpoints{{namespace=\"shop\",service=\"web\",cause=\"{name}\"}} {count}\n");
        assert!(text.contains(&line), "{line}");
    }
}

#[test]
fn label_values_are_escaped() {
    let mut snapshot = busy();
    snapshot.services[0].name = "a\"b\\c\nd".into();
    assert!(scrape(snapshot).contains(r#"service="a\"b\\c\nd""#));
}

#[test]
fn the_reuse_histogram_has_the_edges_that_matter() {
    for edge in [1.0, 30.0, 60.0, 120.0] {
        assert!(families::REUSE_EDGES.contains(&edge), "{edge}");
    }
    assert_eq!(families::REUSE_EDGES.len() + 1, INTERVAL_BUCKETS);
}

#[test]
fn the_programming_histogram_has_kube_proxys_edges() {
    let edges = families::PROGRAMMING_EDGES;
    assert_eq!(edges[..4], [0.25, 0.5, 1.0, 2.0]);
    assert_eq!(edges[59..64], [58.0, 59.0, 60.0, 65.0, 70.0]);
    assert_eq!(edges[72..], [115.0, 120.0, 150.0, 180.0, 210.0, 240.0, 270.0, 300.0]);
}

#[test]
fn the_content_type_is_exactly_the_text_format() {
    assert_eq!(CONTENT_TYPE, TextEncoder::new().format_type());
}

#[test]
fn the_list_of_families_is_golden() {
    let lines: Vec<String> = families::ALL
        .iter()
        .chain(families::kube_proxy::ALL)
        .map(|family| {
            let labels = family.labels.join(",");
            format!("{} {} {{{labels}}} {}", family.name, family.kind.name(), family.help)
        })
        .collect();
    insta::assert_snapshot!("families", lines.join("\n"));
}

/// With EVENKEEL_BLESS=1 this writes the document instead of comparing it.
#[test]
fn the_documentation_is_up_to_date() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs/metrics.md");
    let wanted = families::document();
    if env::var_os("EVENKEEL_BLESS").is_some() {
        fs::create_dir_all(path.parent().expect("the path has a folder")).expect("the folder can be made");
        fs::write(&path, &wanted).expect("the document can be written");
    }
    let found = fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(
        found, wanted,
        "docs/metrics.md is stale: run this test with EVENKEEL_BLESS=1"
    );
}
