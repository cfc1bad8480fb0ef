//! What the agent serves over TCP: `/metrics`, `/healthz`, `/livez`, `/readyz`. GET only, read-only, nothing else.
//!
//! Judging is pure and here ([`HealthReport`]); what is judged comes from the agent through [`Probes`]. Idle is healthy: only a
//! change that waits too long is not (C22). Liveness does not depend on the API server.

use std::{future::IntoFuture as _, io, net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    Router,
    extract::State,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use serde::Serialize;
use tokio::{net::TcpListener, sync::Semaphore, task::spawn_blocking, time::sleep};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::{
    metrics::{CONTENT_TYPE, Exporter},
    view::Timestamp,
};

/// How long a change may wait before the agent counts as unhealthy: twice kube-proxy's default sync period of 30 s, as there.
pub const HEALTH_TIMEOUT: Duration = Duration::from_mins(1);

/// How long requests may take after the agent was told to stop.
const GRACE: Duration = Duration::from_secs(2);
/// Scrapes served at once: each reads all counters, and a flood of them must not become a load of its own.
const SCRAPES: usize = 2;

/// How far the agent is, for the health endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HealthReport {
    /// Now.
    pub time: Timestamp,
    /// When changes were last applied; none before the first time.
    pub last_updated: Option<Timestamp>,
    /// Since when the oldest unapplied change waits; none when all is applied.
    pub pending_since: Option<Timestamp>,
    /// Whether the node may take traffic: false while it is being deleted, or is tainted for deletion by the autoscaler.
    pub node_eligible: bool,
}

impl HealthReport {
    /// Whether no change has been waiting for longer than `timeout`.
    pub fn is_current(&self, timeout: Duration) -> bool {
        self.pending_since.is_none_or(|since| self.time.since(since) <= timeout)
    }
}

/// What the agent knows of itself. Nothing here may block.
pub trait Probes: Send + Sync {
    /// How far it is.
    fn health(&self) -> HealthReport;
    /// Whether every supervised loop is alive; else one sentence.
    fn live(&self) -> Result<(), String>;
    /// Whether the self-probe passes; else one sentence.
    fn ready(&self) -> Result<(), String>;
    /// Takes note that a probe was answered, well or not.
    fn answered(&self, probe: Probe, fine: bool);
}

/// The probes whose answers are counted, as kube-proxy counts its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probe {
    /// `/healthz`.
    Healthz,
    /// `/livez`.
    Livez,
}

/// What the handlers need.
#[derive(Clone)]
struct Shared {
    exporter: Arc<Exporter>,
    probes: Arc<dyn Probes>,
    timeout: Duration,
    turns: Arc<Semaphore>,
}

/// The body of `/healthz`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct HealthBody {
    last_updated: Option<Timestamp>,
    current_time: Timestamp,
    node_eligible: bool,
}

/// The routes; a change that waits for longer than `timeout` is unhealthy.
pub fn router(exporter: Arc<Exporter>, probes: Arc<dyn Probes>, timeout: Duration) -> Router {
    Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(healthz))
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .with_state(Shared {
            exporter,
            probes,
            timeout,
            turns: Arc::new(Semaphore::new(SCRAPES)),
        })
}

/// Why nothing can be served.
#[derive(Debug, thiserror::Error)]
#[error("--metrics-address {address}: {source}")]
pub struct ListenError {
    address: SocketAddr,
    source: io::Error,
}

/// Listens for scrapes and probes.
pub async fn listen(address: SocketAddr) -> Result<TcpListener, ListenError> {
    TcpListener::bind(address)
        .await
        .map_err(|source| ListenError { address, source })
}

/// Serves until `stop` is cancelled; requests under way then have [`GRACE`] to end.
pub async fn serve(listener: TcpListener, router: Router, stop: CancellationToken) -> io::Result<()> {
    let served = axum::serve(listener, router)
        .with_graceful_shutdown(stop.clone().cancelled_owned())
        .into_future();
    tokio::select! {
        ended = served => ended,
        // A client that never finishes its request must not keep the agent from stopping.
        () = async { stop.cancelled().await; sleep(GRACE).await } => Ok(()),
    }
}

async fn metrics(State(shared): State<Shared>) -> Response {
    // The semaphore is never closed; were it, the scrape would go on without its turn.
    let _turn = shared.turns.acquire_owned().await.ok();
    // The snapshot reads kernel maps.
    let encoded = spawn_blocking(move || shared.exporter.encode()).await;
    match encoded {
        Ok(Ok(text)) => ([(header::CONTENT_TYPE, HeaderValue::from_static(CONTENT_TYPE))], text).into_response(),
        Ok(Err(error)) => failed(&error),
        Err(error) => failed(&error),
    }
}

fn failed(error: &dyn std::error::Error) -> Response {
    warn!(%error, "a scrape failed");
    (
        StatusCode::INTERNAL_SERVER_ERROR,
        "the metrics could not be read; the agent's log says why\n",
    )
        .into_response()
}

async fn healthz(State(shared): State<Shared>) -> Response {
    let report = shared.probes.health();
    let fine = report.node_eligible && report.is_current(shared.timeout);
    shared.probes.answered(Probe::Healthz, fine);
    health(&report, fine)
}

async fn livez(State(shared): State<Shared>) -> Response {
    if let Err(reason) = shared.probes.live() {
        shared.probes.answered(Probe::Livez, false);
        return (StatusCode::SERVICE_UNAVAILABLE, reason + "\n").into_response();
    }
    let report = shared.probes.health();
    let fine = report.is_current(shared.timeout);
    shared.probes.answered(Probe::Livez, fine);
    health(&report, fine)
}

fn health(report: &HealthReport, fine: bool) -> Response {
    let status = if fine {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    let body = HealthBody {
        last_updated: report.last_updated,
        current_time: report.time,
        node_eligible: report.node_eligible,
    };
    match serde_json::to_string(&body) {
        Ok(text) => {
            let json = HeaderValue::from_static("application/json");
            (status, [(header::CONTENT_TYPE, json)], text + "\n").into_response()
        }
        Err(error) => failed(&error),
    }
}

async fn readyz(State(shared): State<Shared>) -> Response {
    match shared.probes.ready() {
        Ok(()) => "ok\n".into_response(),
        Err(reason) => (StatusCode::SERVICE_UNAVAILABLE, reason + "\n").into_response(),
    }
}

#[cfg(test)]
mod tests;
