//! A real Prometheus beside a real agent with real traffic: every rule is evaluated, every panel of the dashboard is asked.
//!
//! Both run in the namespace of the test's own node; Prometheus is the one that setup has unpacked.

mod kube_proxy;
mod server;

use std::{collections::BTreeSet, net::TcpStream, process::ExitCode};

use anyhow::{Context, Result, ensure};
use lb_tests::{
    agent::{
        Agent, Node, must, trial, until,
        web::{BACKENDS, BACKENDS6, VIP, serve_all, write_web},
    },
    objects::{cluster_ip, ready, service, slice},
    prometheus::queries,
    runner,
};
use lb_user::lab::{Server, client::read_name, server::Manner};
use serde_json::Value;

use self::server::Prometheus;

/// Connections that are kept open, over two backends.
const OPEN: usize = 14;
/// Connections to `web` before the first scrape, and after it.
const EARLY: usize = 6;
const LATE: usize = 400;
/// Panels that show nothing here: nobody starves, and run statistics may be off.
const MAY_BE_EMPTY: [&str; 2] = ["Who starves", "Time a run of a program"];

/// The endpoints besides those of `web`, before the change.
const OTHERS: [&str; 3] = ["10.244.2.1", "10.244.2.2", "10.244.3.1"];

fn main() -> ExitCode {
    runner::run(vec![
        trial("prometheus_answers_every_panel", every_panel),
        trial("a_starved_endpoint_reaches_prometheus", starved_endpoint),
        trial("kube_proxys_dashboard_goes_on", kube_proxy::dashboard),
    ])
}

/// Starts an agent whose Services all have traffic, so that each has series before Prometheus looks first.
fn start(node: &Node) -> Result<Agent> {
    write_web(node, &BACKENDS)?;
    let long = service("long", cluster_ip(&["10.96.0.20"]));
    let endpoints = slice("long-v4", "long", &[ready("10.244.2.1"), ready("10.244.2.2")]);
    node.write("long.yaml", &[long, endpoints])?;
    // Nobody listens behind this one.
    node.add_addresses(&["10.244.3.1", "10.244.3.2"])?;
    let refusing = service("refusing", cluster_ip(&["10.96.0.60"]));
    node.write("refusing.yaml", &[refusing])?;
    write_nobody(node, &["10.244.3.1"])?;
    let agent = node.start(&["--backend-metrics"])?;
    agent.wait_backends(&[&BACKENDS[..], &BACKENDS6[..], &OTHERS].concat())?;
    Ok(agent)
}

/// Writes endpoints of `refusing`: addresses of the namespace on which nobody listens.
fn write_nobody(node: &Node, addresses: &[&str]) -> Result<()> {
    let endpoints: Vec<Value> = addresses.iter().map(|address| ready(address)).collect();
    node.write("refusing-v4.yaml", &[slice("r-v4", "refusing", &endpoints)])
}

fn refused(node: &Node) -> Result<()> {
    must(node.dial("10.96.0.60:80").is_err(), || {
        "a connection to nobody".to_owned()
    })
}

fn every_panel(node: &Node) -> Result<()> {
    let prometheus = Prometheus::find()?;
    let _servers = serve_all(node, Manner::Greet)?;
    let _staying = node.serve(&["10.244.2.1", "10.244.2.2"], Manner::Stay)?;
    let agent = start(node)?;
    node.netns().set_local_ports(40_000, 40_059)?;
    node.dial_many(VIP, EARLY)?;
    refused(node)?;
    let mut open: Vec<TcpStream> = vec![node.open("10.96.0.20:80")?];

    let prometheus = prometheus.start(node)?;
    let all_series = ["web", "long", "refusing"].map(str::to_owned).into();
    until("a scrape of every Service", || {
        let found = labels(&prometheus.query("evenkeel_service_connects_total")?, "service")?;
        must(found == all_series, || format!("{found:?} were scraped"))
    })?;
    until("a scrape of what the backends are judged by", || {
        let found = prometheus.query("evenkeel_backend_judged_connects_total{service=\"web\"}")?;
        must(!found.is_empty(), || "none".to_owned())
    })?;
    // From here on every counter grows under Prometheus' eyes: a change is applied, too.
    write_nobody(node, &["10.244.3.1", "10.244.3.2"])?;
    agent.wait_backends(&[&BACKENDS[..], &BACKENDS6[..], &OTHERS, &["10.244.3.2"]].concat())?;
    for _ in 1..OPEN {
        open.push(node.open("10.96.0.20:80")?);
    }
    for stream in &mut open {
        read_name(stream)?;
    }
    node.dial_many(VIP, LATE)?;
    refused(node)?;

    for (expression, wanted) in [
        (
            "sum(evenkeel_service_connects_total{service=\"web\"})",
            (EARLY + LATE) as f64,
        ),
        (
            "namespace_service:evenkeel_service_connections_active:sum{service=\"long\"}",
            OPEN as f64,
        ),
        (
            "sum(evenkeel_service_open_imbalance_samples{service=\"long\"})",
            OPEN as f64,
        ),
        ("sum(evenkeel_service_connects_failed_total{reason=\"refused\"})", 2.0),
        ("sum(namespace_service_cause:evenkeel_starved_endpoints:max)", 0.0),
    ] {
        until(expression, || {
            let found = values(&prometheus.query(expression)?)?;
            must(found == [wanted], || format!("{found:?}, and not {wanted}"))
        })?;
    }
    panels(&prometheus)?;
    until("every rule to have been evaluated", || rules_are_well(&prometheus))?;
    must(prometheus.query("ALERTS{alertstate=\"firing\"}")?.is_empty(), || {
        "an alert fires beside a well agent".to_owned()
    })?;
    drop(open);
    agent.stop()
}

/// Somebody else spreads the connections to `web`, and passes one endpoint by.
fn starved_endpoint(node: &Node) -> Result<()> {
    let prometheus = Prometheus::find()?;
    node.add_addresses(&["10.96.0.10"])?;
    let _proxy = Server::start(node.netns(), &[VIP.parse()?], Manner::Greet)?;
    let _servers = serve_all(node, Manner::Greet)?;
    write_web(node, &BACKENDS)?;
    let agent = node.start(&["--mode", "observe", "--backend-metrics"])?;
    // Like a proxy in user space: a connection to an endpoint for each that comes in.
    let relay = |rounds: usize| -> Result<()> {
        for backend in BACKENDS[..2].iter().cycle().take(2 * rounds) {
            node.dial(VIP)?;
            node.dial(&format!("{backend}:8080"))?;
        }
        Ok(())
    };
    relay(15)?;
    let prometheus = prometheus.start(node)?;
    until("the starved endpoint in Prometheus", || {
        relay(15)?;
        let found = prometheus.query("evenkeel_starved_endpoints{service=\"web\"} > 0")?;
        must(values(&found)? == [1.0], || format!("{found:?}"))
    })?;
    let all = queries()?;
    let shown = all.iter().filter(|query| query.panel == "Who starves");
    for query in shown {
        let expression = query
            .expression
            .replace("$namespace", "default")
            .replace("$service", ".*");
        let found = prometheus.query(&expression)?;
        must(
            values(&found)? == [1.0] && labels(&found, "service")?.contains("web"),
            || format!("{expression}: {found:?}"),
        )?;
    }
    until("the alert to wait for its time", || {
        let found = prometheus.query("ALERTS{alertname=\"EvenkeelEndpointStarved\", service=\"web\"}")?;
        let states = labels(&found, "alertstate")?;
        must(states == ["pending".to_owned()].into(), || format!("{states:?}"))
    })?;
    // What the proxy's own connections tell is what is judged.
    let judged = format!(
        "evenkeel_backend_judged_connects_total{{backend=\"{}:8080\"}}",
        BACKENDS[2]
    );
    must(values(&prometheus.query(&judged)?)? == [0.0], || {
        format!("{judged} is not 0")
    })?;
    let entitled = judged.replace("judged", "expected");
    must(values(&prometheus.query(&entitled)?)?.iter().all(|&n| n > 10.0), || {
        format!("{entitled} is hardly any")
    })?;
    agent.stop()
}

/// Asks what each panel asks, as Grafana would fill in its variables.
fn panels(prometheus: &Prometheus) -> Result<()> {
    let mut titles = BTreeSet::new();
    for query in queries()? {
        let expression = query
            .expression
            .replace("$__rate_interval", "1m")
            .replace("$namespace", "default")
            .replace("$service", ".*");
        ensure!(!expression.contains('$'), "{}: an unknown variable", query.panel);
        let asked = format!("{}: {expression}", query.panel);
        // Each is accepted at once; what it tells may need a further scrape.
        prometheus.query(&expression).context(asked.clone())?;
        prometheus.query_range(&expression).context(asked.clone())?;
        if !MAY_BE_EMPTY.contains(&query.panel.as_str()) {
            until(&asked, || {
                let found = if query.instant {
                    prometheus.query(&expression)?
                } else {
                    prometheus.query_range(&expression)?
                };
                must(found.iter().any(has_number), || format!("no number: {found:?}"))
            })?;
        }
        titles.insert(query.panel);
    }
    for title in MAY_BE_EMPTY {
        ensure!(titles.contains(title), "there is no panel {title}");
    }
    Ok(())
}

fn rules_are_well(prometheus: &Prometheus) -> Result<()> {
    let groups = prometheus.get("/api/v1/rules")?;
    let rules: Vec<&Value> = groups["groups"]
        .as_array()
        .context("no groups")?
        .iter()
        .filter_map(|group| group["rules"].as_array())
        .flatten()
        .collect();
    let wanted = lb_tests::prometheus::rules()?.len();
    must(rules.len() == wanted, || format!("{} of {wanted} rules", rules.len()))?;
    for rule in rules {
        must(rule["health"] == "ok", || format!("{rule}"))?;
    }
    Ok(())
}

/// Whether a series of a vector or of a matrix has any value that is a number.
fn has_number(series: &Value) -> bool {
    let matrix = series["values"].as_array().into_iter().flatten();
    matrix
        .chain([&series["value"]])
        .filter_map(|sample| sample[1].as_str())
        .any(|text| text.parse().is_ok_and(f64::is_finite))
}

fn labels(found: &[Value], label: &str) -> Result<BTreeSet<String>> {
    found
        .iter()
        .map(|series| Ok(series["metric"][label].as_str().context("no such label")?.to_owned()))
        .collect()
}

fn values(found: &[Value]) -> Result<Vec<f64>> {
    found
        .iter()
        .map(|series| Ok(series["value"][1].as_str().context("no value")?.parse()?))
        .collect()
}
