//! Every metric's name, type, labels, help and buckets: the one list that the exporter, the lint, the golden file and the
//! documentation read.

use std::fmt::Write as _;

use lb_common::counter::{action, hook};

use super::hooks;
use crate::view::Mode;

/// What kind of number a metric is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// Only grows, until whoever counts (the kernel, or the agent) starts anew.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Counts by bucket.
    Histogram(&'static [f64]),
}

impl Kind {
    /// The word for it in the text format.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram(_) => "histogram",
        }
    }
}

/// One metric.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Family {
    /// Its full name.
    pub name: &'static str,
    /// Its kind.
    pub kind: Kind,
    /// Its labels' names, in order.
    pub labels: &'static [&'static str],
    /// What it says, one sentence.
    pub help: &'static str,
    /// When it has no series; empty when it always has.
    pub absent: &'static str,
}

macro_rules! families {
    ($($id:ident $kind:expr, $name:literal, [$($label:literal),*], $help:literal, $absent:literal;)*) => {
        $(
            #[doc = $help]
            pub const $id: Family = Family {
                name: $name,
                kind: $kind,
                labels: &[$($label),*],
                help: $help,
                absent: $absent,
            };
        )*
        /// All metrics of this list, in the documentation's order.
        pub const ALL: &[Family] = &[$($id),*];
    };
}

pub mod kube_proxy;

/// Edges of a connection's latency: from what a local connect takes to what SYN retries take.
pub const CONNECT_EDGES: &[f64] = &[
    0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
];
/// Edges of the reuse intervals.
pub const REUSE_EDGES: &[f64] = &crate::analysis::reuse::EDGES_SECONDS;
/// Edges of an application's duration: doubled from a tenth of a millisecond.
pub const SYNC_EDGES: &[f64] = &[
    0.000_1, 0.000_2, 0.000_4, 0.000_8, 0.001_6, 0.003_2, 0.006_4, 0.012_8, 0.025_6, 0.051_2, 0.102_4, 0.204_8,
    0.409_6, 0.819_2, 1.638_4, 3.276_8, 6.553_6,
];
/// kube-proxy's edges, so that its dashboards and objectives carry over.
pub const PROGRAMMING_EDGES: &[f64] = &PROGRAMMING;

const PROGRAMMING: [f64; 80] = {
    // 0.25 and 0.5; each second to 59; each 5 s from 60 to 115; each 30 s from 120 to 300.
    let mut edges = [0.0; 80];
    edges[0] = 0.25;
    edges[1] = 0.5;
    let mut i = 2;
    while i < 80 {
        edges[i] = if i < 61 {
            (i - 1) as f64
        } else if i < 73 {
            60.0 + 5.0 * (i - 61) as f64
        } else {
            120.0 + 30.0 * (i - 73) as f64
        };
        i += 1;
    }
    edges
};

families! {
    CONNECTS Kind::Counter, "evenkeel_connects_total", ["action", "hook"],
        "What the kernel programs did, by hook: with connections and datagrams of sockets, and with packets at ingress and egress.", "";
    SERVICE_CONNECTS Kind::Counter, "evenkeel_service_connects_total", ["namespace", "service"],
        "New connections and flows, translated (balance) or seen (observe), wherever they came from.",
        "until the Service has traffic on this node";
    SERVICE_OUTSIDE Kind::Counter, "evenkeel_service_outside_connects_total", ["namespace", "service"],
        "Of the new connections and flows, those that came in as packets: from outside the node, or from a guest.",
        "until the Service has traffic on this node";
    SERVICE_ATTRIBUTED Kind::Counter, "evenkeel_service_connects_attributed_total", ["namespace", "service"],
        "Of the new connections, those whose backend is known: all in balance mode, those seen after translation in observe mode.",
        "until the Service has traffic on this node";
    SERVICE_DIRECT Kind::Counter, "evenkeel_service_direct_connects_total", ["namespace", "service"],
        "Connections that dialled the own address of one of the Service's endpoints: userspace proxies, headless clients, probes.",
        "until the Service has traffic on this node";
    SERVICE_FAILED Kind::Counter, "evenkeel_service_connects_failed_total", ["namespace", "service", "reason"],
        "Connections that failed to establish, by reason.",
        "until the Service has traffic on this node";
    CONNECT_DURATION Kind::Histogram(CONNECT_EDGES), "evenkeel_connect_duration_seconds", ["namespace", "service"],
        "Time from connect(), or of a client outside from its SYN, to the established TCP connection.",
        "until the Service has traffic on this node";
    SERVICE_ACTIVE Kind::Gauge, "evenkeel_service_connections_active", ["namespace", "service"],
        "TCP connections established and not yet ended.",
        "until the Service has traffic on this node";
    SERVICE_BACKENDS Kind::Gauge, "evenkeel_service_backends", ["namespace", "service", "state"],
        "Backends by state.",
        "until the Service has traffic on this node";
    IMBALANCE_MAX Kind::Gauge, "evenkeel_service_imbalance_max_to_mean", ["namespace", "service"],
        "Largest ratio of a backend's new connections in the window to those that its weight entitles it to.",
        "below the minimum sample (5 expected connections a backend), and for ~other";
    IMBALANCE_CV Kind::Gauge, "evenkeel_service_imbalance_cv", ["namespace", "service"],
        "Coefficient of variation of the backends' new connections in the window, by weight.",
        "below the minimum sample (5 expected connections a backend), and for ~other";
    IMBALANCE_DISPERSION Kind::Gauge, "evenkeel_service_imbalance_dispersion", ["namespace", "service"],
        "Chi-square of the window's new connections over its degrees of freedom: 1 is chance, far above 1 is real unevenness.",
        "below the minimum sample (5 expected connections a backend), with one backend, and for ~other";
    IMBALANCE_SAMPLES Kind::Gauge, "evenkeel_service_imbalance_samples", ["namespace", "service"],
        "New connections in the window behind the other imbalance metrics.",
        "below the minimum sample (5 expected connections a backend), and for ~other";
    IMBALANCE_BEYOND_CHANCE Kind::Gauge, "evenkeel_service_imbalance_beyond_chance", ["namespace", "service"],
        "1 while chance gives such a window less than once in a million and a share is off by more than 25 %, else 0.",
        "below the minimum sample (5 expected connections a backend), and for ~other";
    OPEN_IMBALANCE_MAX Kind::Gauge, "evenkeel_service_open_imbalance_max_to_mean", ["namespace", "service"],
        "Largest ratio of a backend's open connections to those that its weight entitles it to.",
        "below the minimum sample (5 expected connections a backend), and for ~other";
    OPEN_IMBALANCE_DISPERSION Kind::Gauge, "evenkeel_service_open_imbalance_dispersion", ["namespace", "service"],
        "Chi-square of the open connections over its degrees of freedom: 1 is chance, far above 1 is real unevenness.",
        "below the minimum sample (5 expected connections a backend), with one backend, and for ~other";
    OPEN_IMBALANCE_SAMPLES Kind::Gauge, "evenkeel_service_open_imbalance_samples", ["namespace", "service"],
        "Open connections behind the other metrics of open imbalance.",
        "below the minimum sample (5 expected connections a backend), and for ~other";
    STARVED Kind::Gauge, "evenkeel_starved_endpoints", ["namespace", "service", "cause"],
        "Endpoints that get (or hold) far too few connections, beyond chance, by cause.",
        "until the Service has traffic on this node";
    PORTS_USED Kind::Gauge, "evenkeel_ephemeral_ports_used_ratio", ["namespace", "service"],
        "Used part of the ephemeral port range, of the client and destination that come nearest to its end; an upper bound, 0 to 1.",
        "until the Service has traffic on this node";
    SERVICE_REUSE Kind::Counter, "evenkeel_service_tuple_reuse_total", ["namespace", "service", "outcome"],
        "Connections to the Service on a client tuple whose previous use ended within the horizon, by what became of the backend.",
        "until the Service has traffic on this node";
    BACKEND_CONNECTS Kind::Counter, "evenkeel_backend_connects_total", ["namespace", "service", "backend"],
        "Times a backend was chosen for a new connection or flow.",
        "unless the agent runs with --backend-metrics, and for ~other";
    BACKEND_ACTIVE Kind::Gauge, "evenkeel_backend_connections_active", ["namespace", "service", "backend"],
        "TCP connections to a backend established and not yet ended.",
        "unless the agent runs with --backend-metrics, and for ~other";
    BACKEND_JUDGED Kind::Counter, "evenkeel_backend_judged_connects_total", ["namespace", "service", "backend"],
        "New connections of an eligible backend by which evenness is judged; direct ones where a userspace proxy hides the choice.",
        "unless the agent runs with --backend-metrics, until the second reading of the Service, and for ~other";
    BACKEND_EXPECTED Kind::Counter, "evenkeel_backend_expected_connects_total", ["namespace", "service", "backend"],
        "What the backend's weight entitled it to of the judged connections of its set; adds up over nodes as the judged ones do.",
        "unless the agent runs with --backend-metrics, until the second reading of the Service, and for ~other";
    TUPLE_REUSE Kind::Counter, "evenkeel_tuple_reuse_total", ["outcome"],
        "Connections on a client tuple whose previous use ended within the horizon, by what became of the backend.", "";
    TUPLE_INTERVAL Kind::Histogram(REUSE_EDGES), "evenkeel_tuple_reuse_interval_seconds", [],
        "Time from the previous close on a client tuple to the connection that reuses it.", "";
    TUPLE_OVERLAP Kind::Counter, "evenkeel_tuple_overlap_total", [],
        "Connections that began while another use of their client tuple was open.", "";
    TUPLE_EVICTED Kind::Counter, "evenkeel_tuple_evicted_total", [],
        "Client tuples forgotten for want of room within the horizon: reuse is undercounted by at most as many.", "";
    FORGOTTEN Kind::Counter, "evenkeel_forgotten_total", ["kind"],
        "Things that the observer let go for want of room: what is derived from them is undercounted by at most as many.", "";
    PROGRAMMING_DURATION Kind::Histogram(PROGRAMMING_EDGES), "evenkeel_network_programming_duration_seconds", [],
        "Time from a change's arrival at the agent to its effect in this node's kernel.", "";
    SYNC_DURATION Kind::Histogram(SYNC_EDGES), "evenkeel_sync_duration_seconds", ["kind"],
        "Time that applying changes to the kernel took.", "";
    SYNC_LAST Kind::Gauge, "evenkeel_sync_last_timestamp_seconds", [],
        "When changes were last applied to the kernel.", "until the first application";
    SYNC_QUEUED Kind::Gauge, "evenkeel_sync_last_queued_timestamp_seconds", [],
        "When a change last came in.", "until the first change";
    SOURCE_SYNCED Kind::Gauge, "evenkeel_source_synced_timestamp_seconds", ["kind"],
        "When the source last confirmed its objects of a kind.", "until the kind was read once";
    FLOWS Kind::Gauge, "evenkeel_flows", ["state"],
        "Flows from outside in the flow table, by state; those that have expired are left out.",
        "in observe mode";
    MAP_ENTRIES Kind::Gauge, "evenkeel_bpf_map_entries", ["map"],
        "Entries in use in a kernel map; of FLOWS and TUPLES those of live flows, as what has expired makes way.", "";
    MAP_MAX Kind::Gauge, "evenkeel_bpf_map_max_entries", ["map"],
        "Entries that fit into a kernel map.", "";
    MAP_PRESSURE Kind::Gauge, "evenkeel_bpf_map_pressure_ratio", ["map"],
        "Entries in use over entries that fit, 0 to 1.", "";
    PROGRAM_RUNS Kind::Counter, "evenkeel_bpf_program_runs_total", ["program"],
        "Runs of a kernel program.", "unless run statistics are on in the kernel; the agent never turns them on";
    PROGRAM_SECONDS Kind::Counter, "evenkeel_bpf_program_run_seconds_total", ["program"],
        "Time spent in a kernel program.", "unless run statistics are on in the kernel; the agent never turns them on";
    EVENTS_LOST Kind::Counter, "evenkeel_events_lost_total", ["source"],
        "Records lost between the kernel and the agent: what is derived from them is undercounted.", "";
    REPAIRS Kind::Counter, "evenkeel_repairs_total", [],
        "Links and map entries found lost, foreign or wrong in the kernel, and put right.", "";
    PROBLEMS Kind::Gauge, "evenkeel_problems", [],
        "Fields and objects of the input that were not taken; `evenkeel status` lists them.", "";
    MODE Kind::Gauge, "evenkeel_mode", ["mode"],
        "1 for the mode that the agent runs in, 0 for the other.", "";
    START Kind::Gauge, "evenkeel_start_timestamp_seconds", [],
        "When the agent started.", "";
    BUILD_INFO Kind::Gauge, "evenkeel_build_info", ["version", "abi"],
        "Always 1; the labels say which agent runs.", "";
}

/// Writes a metric's line of a table.
fn row(out: &mut String, family: &Family) {
    let labels: Vec<String> = family.labels.iter().map(|label| format!("`{label}`")).collect();
    // Writing into a String cannot fail.
    let _infallible = writeln!(
        out,
        "| `{}` | {} | {} | {} | {} |",
        family.name,
        family.kind.name(),
        labels.join(", "),
        family.help,
        family.absent
    );
}

/// Writes `docs/metrics.md`.
pub fn document() -> String {
    let mut out = String::from(
        "# Metrics\n\n\
         Written from the list in `lb-user/src/metrics/families.rs`; do not edit by hand.\n\n\
         The agent serves them at `/metrics` (`--metrics-address`), as `text/plain; version=0.0.4`. Series are by Service with traffic\n\
         from or through this node; a Service's series go 60 s after it. Beyond 1,000 Services the further ones share the series of\n\
         `namespace=\"~other\", service=\"~other\"`. No label ever holds a client's address, port or tuple. One node sees its own traffic only: add\n\
         up over nodes with `sum by (namespace, service)`. Rules that do so, alerts and a dashboard are in `deploy/`; evenness over the\n\
         cluster needs agents with `--backend-metrics`, since ratios and dispersions of nodes cannot be averaged.\n\n\
         | metric | type | labels | what it says | no series |\n|---|---|---|---|---|\n",
    );
    for family in ALL {
        row(&mut out, family);
    }
    out.push_str(
        "\n## kube-proxy's names\n\n\
         With `--kube-proxy-metrics`, in balance mode, these are served besides, by kube-proxy's names and edges, so that dashboards and alerts\n\
         for kube-proxy go on (docs/kube-proxy.md). They have no labels `ip_family` and `host`. There is no `go_goroutines`: the agent has none.\n\n\
         | metric | type | labels | what it says | no series |\n|---|---|---|---|---|\n",
    );
    for family in kube_proxy::ALL {
        row(&mut out, family);
    }
    out.push_str(
        "\n## Actions of packets\n\n\
         Values of `action` in `evenkeel_connects_total` at the hooks `ingress` and `egress`, where every packet of an uplink or of a guest's\n\
         interface counts. A hook has series only for what it can do; there are none of them in observe mode.\n\n\
         | action | hooks | what it says |\n|---|---|---|\n",
    );
    for (action, says) in hooks::PACKETS {
        let at = [hook::INGRESS, hook::EGRESS]
            .into_iter()
            .filter(|hook| hooks::actions(*hook, Mode::Balance).contains(&action))
            .map(|hook| format!("`{}`", hook::NAMES[hook as usize]))
            .collect::<Vec<_>>()
            .join(", ");
        let _infallible = writeln!(out, "| `{}` | {at} | {says} |", action::NAMES[action as usize]);
    }
    out.push_str("\n## Buckets\n\nUpper edges in seconds, `+Inf` besides.\n\n");
    for family in ALL.iter().chain(kube_proxy::ALL) {
        if let Kind::Histogram(edges) = family.kind {
            let edges = edges.iter().map(f64::to_string).collect::<Vec<_>>().join(", ");
            let _infallible = writeln!(out, "- `{}`: {edges}", family.name);
        }
    }
    out
}
