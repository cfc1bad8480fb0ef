//! Health-check node ports (C21) of a running agent, asked over real sockets as a load balancer asks.

use std::{
    collections::BTreeSet,
    fs,
    io::ErrorKind,
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener},
    process::ExitCode,
};

use anyhow::{Context, Result};
use lb_tests::{
    agent::{Agent, NODE_NAME, NODE_V4, NODE_V6, Node, must, trial, until},
    objects::{endpoint, service, slice, with},
    runner,
};
use lb_user::lab::server::Manner;
use serde_json::{Value, json};

/// The port that the Service wants checked.
const PORT: u16 = 31_000;
/// Another Service's.
const OTHER: u16 = 31_001;
/// The same endpoints, by two addresses of their own.
const ENDPOINTS: [&str; 2] = ["10.244.1.1", "fd00:244::1"];

fn main() -> ExitCode {
    runner::run(vec![
        trial("c21_health_checks_tell_of_ready_endpoints_here", tell),
        trial("c21_health_checks_come_and_go_with_the_service", come_and_go),
        trial("c21_health_checks_are_answered_where_node_ports_are", ranges),
        trial("c21_a_taken_port_is_reported_and_costs_nothing_else", taken),
        trial("c21_observe_mode_opens_no_port", observe),
    ])
}

/// A Service of a load balancer, with the external policy Local.
fn load_balancer(name: &str, last: u8, port: u16) -> Value {
    let addresses = [format!("10.96.0.{last}"), format!("fd00:96::{last}")];
    let spec = json!({
        "type": "LoadBalancer",
        "clusterIP": addresses[0],
        "clusterIPs": addresses,
        "ports": [{"port": 80, "targetPort": 8080, "protocol": "TCP"}],
        "externalTrafficPolicy": "Local",
        "healthCheckNodePort": port,
    });
    service(name, spec)
}

/// An endpoint on a node: ready, or terminating and still serving.
fn on(node: &str, address: &str, ready: bool) -> Value {
    with(&endpoint(address, ready, true, !ready), "/nodeName", json!(node))
}

/// Writes the endpoints of `web` in both families.
fn write_endpoints(node: &Node, of: impl Fn(&str) -> Value) -> Result<()> {
    let slices = [
        slice("web-v4", "web", &[of(ENDPOINTS[0])]),
        slice("web-v6", "web", &[of(ENDPOINTS[1])]),
    ];
    node.write("endpoints.yaml", &slices)
}

fn at(address: &str, port: u16) -> SocketAddr {
    SocketAddr::new(address.parse().expect("tests name addresses"), port)
}

/// Waits until a port says this, and checks the whole answer.
fn says(agent: &Agent, address: SocketAddr, name: &str, status: u16, endpoints: usize) -> Result<()> {
    until("the answer to a health check", || {
        let page = agent.get_from(address, "/healthz")?;
        must(page.status == status, || format!("{page:?}"))?;
        let body: Value = serde_json::from_str(&page.body)?;
        let wanted = json!({
            "service": {"namespace": "default", "name": name},
            "localEndpoints": endpoints,
            "serviceProxyHealthy": true,
        });
        must(body == wanted, || format!("{body}"))?;
        let head = page.head.to_ascii_lowercase();
        for line in [
            "content-type: application/json".to_owned(),
            "x-content-type-options: nosniff".to_owned(),
            format!("x-load-balancing-endpoint-weight: {endpoints}"),
        ] {
            must(head.lines().any(|held| held == line), || format!("no {line} in {head}"))?;
        }
        Ok(())
    })
}

/// Waits until nobody listens at an address.
fn is_closed(agent: &Agent, address: SocketAddr) -> Result<()> {
    until("the port to be closed", || match agent.get_from(address, "/") {
        Ok(page) => must(false, || format!("{page:?}")),
        Err(error) => {
            let refused = error.downcast_ref::<std::io::Error>();
            let refused = refused.is_some_and(|error| error.kind() == ErrorKind::ConnectionRefused);
            must(refused, || format!("{error:#}"))
        }
    })
}

fn tell(node: &Node) -> Result<()> {
    node.write("web.yaml", &[load_balancer("web", 10, PORT)])?;
    write_endpoints(node, |address| on(NODE_NAME, address, true))?;
    let agent = node.start(&[])?;
    for address in [NODE_V4, NODE_V6, "127.0.0.1"] {
        says(&agent, at(address, PORT), "web", 200, 2).with_context(|| address.to_owned())?;
    }
    // One in each family terminates; then all do; then there is one elsewhere.
    let node_port = at(NODE_V4, PORT);
    write_endpoints(node, |address| on(NODE_NAME, address, address == ENDPOINTS[0]))?;
    says(&agent, node_port, "web", 200, 1)?;
    write_endpoints(node, |address| on(NODE_NAME, address, false))?;
    says(&agent, node_port, "web", 503, 0)?;
    write_endpoints(node, |address| on("node-b", address, true))?;
    says(&agent, node_port, "web", 503, 0)?;
    write_endpoints(node, |address| on(NODE_NAME, address, true))?;
    says(&agent, node_port, "web", 200, 2)?;
    agent.stop()
}

fn come_and_go(node: &Node) -> Result<()> {
    let web = load_balancer("web", 10, PORT);
    node.write("web.yaml", std::slice::from_ref(&web))?;
    write_endpoints(node, |address| on(NODE_NAME, address, true))?;
    let agent = node.start(&[])?;
    let node_port = at(NODE_V4, PORT);
    let steps = [
        ("another policy", "/spec/externalTrafficPolicy", json!("Cluster")),
        ("another type", "/spec/type", json!("NodePort")),
        (
            "another proxy",
            "/metadata/labels",
            json!({"service.kubernetes.io/service-proxy-name": "other"}),
        ),
        ("another port", "/spec/healthCheckNodePort", json!(OTHER)),
    ];
    for (what, pointer, value) in steps {
        says(&agent, node_port, "web", 200, 2).with_context(|| format!("before {what}"))?;
        node.write("web.yaml", &[with(&web, pointer, value)])?;
        is_closed(&agent, node_port).with_context(|| what.to_owned())?;
        if what == "another port" {
            says(&agent, at(NODE_V4, OTHER), "web", 200, 2)?;
        }
        node.write("web.yaml", std::slice::from_ref(&web))?;
    }
    says(&agent, node_port, "web", 200, 2)?;
    node.write("web.yaml", &[])?;
    is_closed(&agent, node_port).context("no Service")?;
    agent.stop()
}

fn ranges(node: &Node) -> Result<()> {
    node.write("web.yaml", &[load_balancer("web", 10, PORT)])?;
    write_endpoints(node, |address| on(NODE_NAME, address, true))?;
    let agent = node.start(&["--nodeport-addresses", "192.0.2.0/24"])?;
    says(&agent, at(NODE_V4, PORT), "web", 200, 2)?;
    for address in [NODE_V6, "127.0.0.1"] {
        is_closed(&agent, at(address, PORT)).with_context(|| address.to_owned())?;
    }
    agent.stop()
}

fn taken(node: &Node) -> Result<()> {
    let _servers = node.serve(&ENDPOINTS, Manner::Greet)?;
    let any = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), PORT);
    let somebody = node.netns().run(|| TcpListener::bind(any))??;
    node.write(
        "web.yaml",
        &[load_balancer("web", 10, PORT), load_balancer("api", 11, OTHER)],
    )?;
    write_endpoints(node, |address| on(NODE_NAME, address, true))?;
    let agent = node.start(&[])?;
    let told = || -> Result<Vec<String>> {
        let problems = agent.status()?.problems;
        Ok(problems
            .into_iter()
            .filter(|problem| problem.field == "spec.healthCheckNodePort")
            .map(|problem| format!("{}: {}", problem.object, problem.message))
            .collect())
    };
    until("the problem to be told", || {
        let told = told()?;
        let whole = told.len() == 1 && told[0].contains("Service default/web") && told[0].contains(&PORT.to_string());
        must(whole, || format!("{told:?}"))
    })?;
    says(&agent, at(NODE_V4, OTHER), "api", 503, 0)?;
    node.dial("10.96.0.10:80")?;

    drop(somebody);
    says(&agent, at(NODE_V4, PORT), "web", 200, 2)?;
    until("the problem to be over", || {
        let told = told()?;
        must(told.is_empty(), || format!("{told:?}"))
    })?;
    agent.stop()
}

/// The TCP ports that anybody listens on in an agent's namespace.
fn listening(agent: &Agent) -> Result<BTreeSet<u16>> {
    const LISTEN: &str = "0A";
    let mut ports = BTreeSet::new();
    for family in ["tcp", "tcp6"] {
        let table = fs::read_to_string(format!("/proc/{}/net/{family}", agent.pid()))?;
        for line in table.lines().skip(1) {
            let words: Vec<&str> = line.split_whitespace().collect();
            let (Some(local), Some(&LISTEN)) = (words.get(1), words.get(3)) else {
                continue;
            };
            let port = local.rsplit(':').next().context("an address has a port")?;
            ports.insert(u16::from_str_radix(port, 16)?);
        }
    }
    Ok(ports)
}

fn observe(node: &Node) -> Result<()> {
    node.write("web.yaml", &[load_balancer("web", 10, PORT)])?;
    write_endpoints(node, |address| on(NODE_NAME, address, true))?;
    let agent = node.start(&["--mode", "observe"])?;
    // It knows the Service, and has had its chance: what is ready has gone through its first synchronisation.
    until("the Service to be known", || agent.service("web"))?;
    let ports = listening(&agent)?;
    agent.stop()?;
    must(!ports.contains(&PORT), || format!("an observer listens on {ports:?}"))?;

    let agent = node.start(&[])?;
    until("the port to be open in balance mode", || {
        let ports = listening(&agent)?;
        must(ports.contains(&PORT), || format!("{ports:?}"))
    })?;
    agent.stop()
}
