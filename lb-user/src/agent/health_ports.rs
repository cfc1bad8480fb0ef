//! Health-check node ports (C21): one listener for each, in balance mode alone.
//!
//! Which ports, and what they say, is `desired`'s; here they are opened, answered and closed. Everybody who reaches the node
//! reaches them: an answer reads plain numbers, takes no lock that the reconciler holds, and a connection has one request,
//! little time and a place among few. A port that somebody else has is reported and tried again, and nothing else waits
//! for it.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    convert::Infallible,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::{Arc, Mutex},
    time::{Duration, Instant, SystemTime},
};

use http_body_util::Full;
use hyper::{
    Response, StatusCode,
    body::Bytes,
    header::{CONTENT_TYPE, HeaderValue, X_CONTENT_TYPE_OPTIONS},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use nix::sys::socket::{setsockopt, sockopt::Ipv6V6Only};
use serde::Serialize;
use tokio::{
    net::{TcpListener, TcpSocket, TcpStream},
    task::{AbortHandle, JoinHandle, JoinSet},
    time::{sleep, timeout},
};

use super::state::{Shared, lock};
use crate::{
    desired::HealthCheck,
    http::{HEALTH_TIMEOUT, HealthReport},
    model::{ObjectName, Problem},
    supervise::Liveness,
    view::Timestamp,
};

/// How often the ports are looked at when nothing is said to have changed, and how soon a taken one is tried again.
const ROUND: Duration = Duration::from_secs(1);
/// How long a connection may take, from its first packet to its last.
const LIFETIME: Duration = Duration::from_secs(5);
/// Connections of one port at once; whoever comes then takes the place of the one that has been there longest.
const CLIENTS: usize = 64;
/// Connections that wait to be taken up.
const BACKLOG: u32 = 128;
/// How long a listener that cannot accept waits: out of descriptors, most likely.
const PAUSE: Duration = Duration::from_millis(200);

/// What the answers go by, as of the last look.
#[derive(Clone, Copy, Debug)]
struct Facts {
    local_endpoints: usize,
    report: HealthReport,
    seen: Instant,
}

impl Facts {
    /// Whether the proxy keeps up, as `/healthz` has it but for the node: a load balancer still sends to a node that is about
    /// to leave, while that has endpoints. Facts that nobody has looked at for as long are as bad as a change that waits.
    fn healthy(&self) -> bool {
        let now = HealthReport {
            time: Timestamp::from_system(SystemTime::now()),
            ..self.report
        };
        self.seen.elapsed() <= HEALTH_TIMEOUT && now.is_current(HEALTH_TIMEOUT)
    }
}

/// The body of an answer, with the names that kube-proxy has.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Body<'a> {
    service: BodyName<'a>,
    local_endpoints: usize,
    service_proxy_healthy: bool,
}

#[derive(Serialize)]
struct BodyName<'a> {
    namespace: &'a str,
    name: &'a str,
}

fn answer(service: &ObjectName, facts: &Facts) -> Response<Full<Bytes>> {
    let healthy = facts.healthy();
    let body = Body {
        service: BodyName {
            namespace: &service.namespace,
            name: &service.name,
        },
        local_endpoints: facts.local_endpoints,
        service_proxy_healthy: healthy,
    };
    // Texts and numbers are always written.
    let text = serde_json::to_string(&body).unwrap_or_default() + "\n";
    let mut response = Response::new(Full::new(Bytes::from(text)));
    if !healthy || facts.local_endpoints == 0 {
        *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    }
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(
        "x-load-balancing-endpoint-weight",
        HeaderValue::from(facts.local_endpoints),
    );
    response
}

/// A port of a Service at one address; an unspecified address is all of the host's.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    address: SocketAddr,
    service: ObjectName,
}

/// An open port. Dropping it closes the port and its connections, in the runtime's own time.
#[derive(Debug)]
struct Port {
    facts: Arc<Mutex<Facts>>,
    task: JoinHandle<()>,
}

impl Drop for Port {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Port {
    fn open(place: &Place, facts: Facts) -> io::Result<Self> {
        let listener = listen(place.address)?;
        let facts = Arc::new(Mutex::new(facts));
        Ok(Self {
            task: tokio::spawn(serve(listener, place.service.clone(), facts.clone(), LIFETIME)),
            facts,
        })
    }

    /// Closes it; the port is free afterwards.
    async fn close(mut self) {
        self.task.abort();
        // It ends by being aborted; how else it ended does not matter any more.
        let _ = (&mut self.task).await;
    }
}

/// Listens; at the unspecified IPv6 address for both families, where the host has both.
fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let both = address.ip() == IpAddr::V6(Ipv6Addr::UNSPECIFIED);
    match bind(address, both) {
        Err(error)
            if both
                && matches!(
                    error.raw_os_error(),
                    Some(libc::EAFNOSUPPORT | libc::EADDRNOTAVAIL | libc::EPROTONOSUPPORT)
                ) =>
        {
            bind((Ipv4Addr::UNSPECIFIED, address.port()).into(), false)
        }
        result => result,
    }
}

fn bind(address: SocketAddr, both_families: bool) -> io::Result<TcpListener> {
    let socket = if address.is_ipv6() {
        let socket = TcpSocket::new_v6()?;
        setsockopt(&socket, Ipv6V6Only, &!both_families)?;
        socket
    } else {
        TcpSocket::new_v4()?
    };
    // Connections of an agent before this one may still be closing.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Answers whoever connects; each has so long for all of it.
async fn serve(listener: TcpListener, service: ObjectName, facts: Arc<Mutex<Facts>>, lifetime: Duration) {
    let mut clients = JoinSet::new();
    let mut places: VecDeque<AbortHandle> = VecDeque::new();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let (service, facts) = (service.clone(), facts.clone());
                places.retain(|place| !place.is_finished());
                // An honest client says what it wants at once: whoever is still there when so many have come after him does not.
                if places.len() >= CLIENTS
                    && let Some(oldest) = places.pop_front()
                {
                    oldest.abort();
                }
                places.push_back(clients.spawn(async move {
                    // Whoever takes longer, or goes away, gets no answer.
                    let _ = timeout(lifetime, serve_one(stream, &service, &facts)).await;
                }));
            }
            Err(error) => {
                tracing::warn!(%error, service = %service, "a health check's port cannot accept");
                sleep(PAUSE).await;
            }
        }
        while clients.try_join_next().is_some() {}
    }
}

async fn serve_one(stream: TcpStream, service: &ObjectName, facts: &Mutex<Facts>) -> Result<(), hyper::Error> {
    let respond = service_fn(async |_| Ok::<_, Infallible>(answer(service, &lock(facts))));
    let mut one_request = http1::Builder::new();
    one_request.keep_alive(false);
    one_request.serve_connection(TokioIo::new(stream), respond).await
}

/// What is wanted now; `None` before the first synchronisation: until then nobody can say who is here.
struct Wanted {
    checks: Vec<HealthCheck>,
    addresses: Vec<IpAddr>,
    report: HealthReport,
}

fn wanted(shared: &Shared) -> Option<Wanted> {
    let reconciler = lock(&shared.reconciler);
    if !reconciler.is_synced() {
        return None;
    }
    let desired = reconciler.desired();
    Some(Wanted {
        checks: desired.health_checks(),
        addresses: desired
            .health_check_addresses()
            .unwrap_or_else(|| vec![Ipv6Addr::UNSPECIFIED.into()]),
        report: Shared::report(&reconciler),
    })
}

/// Opens what is wanted and not open, closes what is open and not wanted; returns what stands in the way.
async fn settle(open: &mut BTreeMap<Place, Port>, wanted: &Wanted) -> Vec<Problem> {
    let mut places: BTreeMap<Place, &HealthCheck> = BTreeMap::new();
    for check in &wanted.checks {
        for address in &wanted.addresses {
            let place = Place {
                address: SocketAddr::new(*address, check.port.get()),
                service: check.service.clone(),
            };
            places.insert(place, check);
        }
    }
    // What goes comes first: another Service may want its port.
    let gone: BTreeSet<Place> = open
        .iter()
        .filter(|(place, port)| !places.contains_key(place) || port.task.is_finished())
        .map(|(place, _)| place.clone())
        .collect();
    for place in gone {
        if let Some(port) = open.remove(&place) {
            port.close().await;
            tracing::info!(service = %place.service, address = %place.address, "health checks are not answered any more");
        }
    }
    let mut problems = Vec::new();
    for (place, check) in places {
        let facts = Facts {
            local_endpoints: check.local_endpoints,
            report: wanted.report,
            seen: Instant::now(),
        };
        if let Some(port) = open.get(&place) {
            *lock(&port.facts) = facts;
            continue;
        }
        match Port::open(&place, facts) {
            Ok(port) => {
                tracing::info!(service = %place.service, address = %place.address, "health checks are answered");
                open.insert(place, port);
            }
            Err(error) => problems.push(Problem {
                origin: check.origin.clone(),
                object: format!("Service {}", check.service),
                field: "spec.healthCheckNodePort".to_owned(),
                message: format!(
                    "nobody answers health checks at {}, which cannot be listened on ({error}); it is tried again",
                    place.address
                ),
            }),
        }
    }
    problems
}

/// Keeps the ports open that there should be.
pub(super) async fn follow(shared: &Arc<Shared>, liveness: &Liveness) -> Result<(), String> {
    let mut open = BTreeMap::new();
    loop {
        liveness.beat();
        let state = shared.clone();
        let wanted = tokio::task::spawn_blocking(move || wanted(&state))
            .await
            .map_err(|error| error.to_string())?;
        if let Some(wanted) = wanted {
            let problems = settle(&mut open, &wanted).await;
            let mut known = lock(&shared.health_ports);
            for problem in problems.iter().filter(|problem| !known.contains(problem)) {
                tracing::warn!("{problem}");
            }
            *known = problems;
        }
        // Woken by a flush, or by the time.
        let _ = timeout(ROUND, shared.flushed.notified()).await;
    }
}

#[cfg(test)]
mod tests;
