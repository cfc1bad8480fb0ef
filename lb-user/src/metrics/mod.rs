//! What Prometheus scrapes.
//!
//! The agent hands over one plain [`Snapshot`] a scrape, most of it read from kernel maps; [`Exporter`] turns it into the text
//! format. Nothing is counted here and there is no global registry: a number has one home, and a restart of the agent loses
//! none that the kernel keeps. Names, types and help live in [`families`] alone, and `docs/metrics.md` is written from them.

mod collect;
pub mod families;
pub mod hooks;
mod roster;
mod snapshot;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use prometheus::{Encoder, Registry, TextEncoder};
pub use snapshot::{
    BackendSample, Buckets, ConnectSample, FAILURE_REASONS, KubeProxySample, MapSample, PROBE_CODES, ProgramSample,
    REUSE_OUTCOMES, ServiceSample, Snapshot, SyncSample, reuse_outcomes,
};

/// The content type of what [`Exporter::encode`] writes.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4";

/// How many Services get series of their own; the others share those named `~other`.
pub const DEFAULT_SERVICE_CAP: usize = 1_000;

/// Whoever knows the numbers.
pub trait MetricSource: Send + Sync {
    /// The numbers of now; may read kernel maps, so it is called where blocking is allowed.
    fn snapshot(&self) -> Snapshot;
}

/// Writes the numbers of a source in Prometheus' text format.
#[derive(Debug)]
pub struct Exporter {
    registry: Registry,
}

/// Why the numbers cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("metrics: {0}")]
pub struct ExportError(#[from] prometheus::Error);

impl Exporter {
    /// Exports a source's numbers, with series of their own for at most `service_cap` Services.
    pub fn new(source: Arc<dyn MetricSource>, service_cap: usize) -> Result<Self, ExportError> {
        let registry = Registry::new();
        registry.register(Box::new(collect::SnapshotCollector::new(source, service_cap)?))?;
        Ok(Self { registry })
    }

    /// Takes a snapshot and writes it.
    pub fn encode(&self) -> Result<Vec<u8>, ExportError> {
        let mut text = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut text)?;
        Ok(text)
    }
}
