//! kube-proxy's dashboard of the public kubernetes-mixin beside an agent that serves kube-proxy's names.
//!
//! The agent's source is the API server of the harness, so that requests are real; the job is named as that dashboard wants it.

use std::time::SystemTime;

use anyhow::{Context, Result};
use lb_tests::{
    agent::{NODE_NAME, Node, must, until},
    apiserver::{ApiServer, Fault, Resource},
    objects::{cluster_ip, ready, service, slice, with},
};
use lb_user::{lab::server::Manner, view::Timestamp};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use super::{has_number, server::Prometheus, values};

/// What the job must be called.
const JOB: &str = "kube-proxy";
/// The endpoints in turn: each change moves one.
const ENDPOINTS: [[&str; 2]; 2] = [["10.244.1.1", "10.244.1.2"], ["10.244.1.1", "10.244.1.3"]];

/// A panel: its title, and what it asks about `SERIES`' selector in place of `{}`.
struct Panel(&'static str, &'static [&'static str]);

/// What the dashboard shows, in our words: the same functions over the same series, a minute instead of five.
const PANELS: [Panel; 9] = [
    Panel("Up", &["sum(up{})"]),
    Panel(
        "Rules Sync Rate",
        &["sum(rate(kubeproxy_sync_proxy_rules_duration_seconds_count{}[1m]))"],
    ),
    Panel(
        "Rules Sync Latency 99th Quantile",
        &["histogram_quantile(0.99, rate(kubeproxy_sync_proxy_rules_duration_seconds_bucket{}[1m]))"],
    ),
    Panel(
        "Network Programming Rate",
        &["sum(rate(kubeproxy_network_programming_duration_seconds_count{}[1m]))"],
    ),
    Panel(
        "Network Programming Latency 99th Quantile",
        &[
            "histogram_quantile(0.99, sum by (instance, le) (rate(kubeproxy_network_programming_duration_seconds_bucket{}[1m])))",
        ],
    ),
    Panel(
        "Kube API Request Rate",
        &[
            "sum(rate(rest_client_requests_total{code=~\"2..\"}[1m]))",
            "sum(rate(rest_client_requests_total{code=~\"4..\"}[1m]))",
            "sum(rate(rest_client_requests_total{code=~\"5..\"}[1m]))",
        ],
    ),
    Panel(
        "Get Request Latency 99th Quantile",
        &[
            "histogram_quantile(0.99, sum by (verb, url, le) (rate(rest_client_request_duration_seconds_bucket{verb=\"GET\"}[1m])))",
        ],
    ),
    Panel("Memory", &["process_resident_memory_bytes{}"]),
    Panel("CPU usage", &["rate(process_cpu_seconds_total{}[1m])"]),
];

/// What the dashboard asks and has no true answer here: no goroutines, nothing but GET, no redirections.
const NEVER: [Panel; 3] = [
    Panel("Goroutines", &["go_goroutines{}"]),
    Panel(
        "Post Request Latency 99th Quantile",
        &[
            "histogram_quantile(0.99, sum by (verb, url, le) (rate(rest_client_request_duration_seconds_bucket{verb=\"POST\"}[1m])))",
        ],
    ),
    Panel(
        "Kube API Request Rate",
        &["sum(rate(rest_client_requests_total{code=~\"3..\"}[1m]))"],
    ),
];

/// The query with the dashboard's selector: no cluster label, the job, every instance.
fn filled(query: &str) -> String {
    let selector = format!("cluster=\"\", job=\"{JOB}\", instance=~\".*\"");
    query
        .replace("{}", &format!("{{{selector}}}"))
        .replace("{code", &format!("{{{selector}, code"))
        .replace("{verb", &format!("{{{selector}, verb"))
}

/// The slice of `web`, as the endpoint slice controller annotates it at a change.
fn annotated(endpoints: &[&str]) -> Value {
    let endpoints: Vec<Value> = endpoints.iter().map(|address| ready(address)).collect();
    let now = Timestamp::from_system(SystemTime::now()).to_string();
    let annotations = json!({"endpoints.kubernetes.io/last-change-trigger-time": now});
    with(
        &slice("web-v4", "web", &endpoints),
        "/metadata/annotations",
        annotations,
    )
}

/// Lets one request after another fail in another way, and waits until each was met.
fn fail(runtime: &Runtime, server: &ApiServer) -> Result<()> {
    for status in [404, 503] {
        let struck = server.struck();
        runtime.block_on(server.set_fault(Some(Fault::Status(status))));
        server.disconnect();
        until("a request to fail", || {
            must(server.struck() > struck, || "none has".to_owned())
        })?;
    }
    runtime.block_on(server.set_fault(None));
    Ok(())
}

pub(super) fn dashboard(node: &Node) -> Result<()> {
    let program = Prometheus::find()?;
    let runtime = Runtime::new()?;
    let server = node.netns().run(|| runtime.block_on(ApiServer::start()))?;
    server.apply(json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE_NAME}}));
    server.apply(service("web", cluster_ip(&["10.96.0.10"])));
    server.apply(annotated(&ENDPOINTS[0]));
    let _servers = node.serve(&["10.244.1.1", "10.244.1.2", "10.244.1.3"], Manner::Greet)?;
    let url = server.url();
    let agent = node.start(&["--source", "kube", "--kube-url", &url, "--kube-proxy-metrics"])?;
    agent.wait_backends(&ENDPOINTS[0])?;
    let prometheus = program.start_as(node, JOB)?;
    until("a first scrape", || {
        let found = prometheus.query(&filled("kubeproxy_network_programming_duration_seconds_count{}"))?;
        must(!found.is_empty(), || "none".to_owned())
    })?;
    // From here on everything moves under Prometheus' eyes.
    let moved = "kubeproxy_network_programming_duration_seconds_count";
    let before = agent.metrics()?.get(moved).copied().context(moved)?;
    server.apply(annotated(&ENDPOINTS[1]));
    agent.wait_backends(&ENDPOINTS[1])?;
    must(agent.metrics()?.get(moved) == Some(&(before + 1.0)), || {
        format!("{moved} did not grow by one")
    })?;
    fail(&runtime, &server)?;
    server.apply(annotated(&ENDPOINTS[0]));
    agent.wait_backends(&ENDPOINTS[0])?;
    for path in ["/healthz", "/livez"] {
        agent.get(path)?;
    }

    for Panel(title, queries) in PANELS {
        for query in queries {
            let query = filled(query);
            until(&format!("{title}: {query}"), || {
                let found = prometheus.query_range(&query)?;
                must(found.iter().any(has_number), || format!("no number: {found:?}"))
            })?;
        }
    }
    for Panel(title, queries) in NEVER {
        for query in queries {
            let found = prometheus.query_range(&filled(query))?;
            must(found.is_empty(), || format!("{title}: {found:?}"))?;
        }
    }
    for (query, wanted) in [
        ("sum(up{})", 1.0),
        ("kubeproxy_proxy_healthz_total{code=\"200\"}", 1.0),
        ("kubeproxy_proxy_livez_total{code=\"200\"}", 1.0),
        ("kubeproxy_sync_proxy_rules_service_changes_total{}", 1.0),
        ("kubeproxy_sync_proxy_rules_service_changes_pending{}", 0.0),
        ("kubeproxy_sync_proxy_rules_endpoint_changes_pending{}", 0.0),
        // Of each change since the start, however often the API server failed meanwhile.
        ("kubeproxy_network_programming_duration_seconds_count{}", before + 2.0),
    ] {
        let query = filled(query);
        until(&query, || {
            let found = values(&prometheus.query(&query)?)?;
            must(found == [wanted], || format!("{found:?}, and not {wanted}"))
        })?;
    }
    for query in [
        "time() - kubeproxy_sync_proxy_rules_last_timestamp_seconds{}",
        "time() - kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds{}",
    ] {
        let found = values(&prometheus.query(&filled(query))?)?;
        must(
            found.iter().all(|age| (-1.0..300.0).contains(age)) && found.len() == 1,
            || format!("{query}: {found:?}"),
        )?;
    }
    must(server.requests(Resource::Slices).watches > 0, || {
        "nobody watches".to_owned()
    })?;
    agent.stop()
}
