//! Tuple reuse: `evenkeel reuse`.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::analysis::reuse::{EDGES_SECONDS, ReuseCounts};

/// Tuple reuse on this node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReuseView {
    /// The longest interval that counts as a reuse.
    pub horizon_seconds: f64,
    /// Connections whose records were judged.
    pub connections: u64,
    /// Reuses.
    pub total: u64,
    /// Reuses that met the same backend.
    pub same_backend: u64,
    /// Reuses that met another one.
    pub moved: u64,
    /// Reuses whose previous backend was no longer usable.
    pub stale_backend: u64,
    /// Reuses of which a backend was not seen, because somebody else translates (observe mode).
    #[serde(default)]
    pub unknown_backend: u64,
    /// Connections that overlapped another use of their tuple; not among the reuses.
    pub overlap: u64,
    /// Same backend among the reuses that could have met it (0 to 1).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub same_share: Option<f64>,
    /// What chance alone would give for it (0 to 1).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expected_same_share: Option<f64>,
    /// Reuses by interval, not cumulative.
    pub intervals: Vec<IntervalView>,
    /// Tuples remembered now.
    pub tuples: u64,
    /// Tuples forgotten for want of room, within the horizon.
    pub evicted: u64,
    /// Records that came too late to be judged.
    pub late: u64,
    /// By Service, most reuses first.
    pub services: Vec<ServiceReuseView>,
    /// By client, most reuses first; the first [`MAX_CLIENTS`] of them.
    #[serde(default)]
    pub clients: Vec<ClientReuseView>,
    /// Clients forgotten for want of room.
    #[serde(default)]
    pub clients_forgotten: u64,
    /// Connections straight to a backend's own address, which is in their tuple then; not among the others.
    #[serde(default)]
    pub backend_level_connections: u64,
    /// Reuses of such tuples: each met the same backend again, as it must.
    #[serde(default)]
    pub backend_level_total: u64,
}

/// Clients that an answer holds.
pub const MAX_CLIENTS: usize = 20;

/// One client's reuse towards one Service.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClientReuseView {
    /// The client's address.
    pub client: IpAddr,
    /// The workload that it is, such as `shop/nginx`, where that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workload: Option<String>,
    /// The Service's namespace.
    pub namespace: String,
    /// The Service's name.
    pub name: String,
    /// Connections whose records were judged.
    pub connections: u64,
    /// Reuses.
    pub total: u64,
    /// Reuses that met the same backend.
    pub same_backend: u64,
    /// Reuses that met another one.
    pub moved: u64,
    /// Reuses whose previous backend was no longer usable.
    pub stale_backend: u64,
    /// Reuses of which a backend was not seen.
    pub unknown_backend: u64,
}

/// One bucket of the intervals' histogram.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct IntervalView {
    /// The bucket's upper edge (included); none for the open one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub up_to_seconds: Option<f64>,
    /// Reuses in it.
    pub count: u64,
}

/// One Service's reuse.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceReuseView {
    /// The Service's namespace.
    pub namespace: String,
    /// The Service's name.
    pub name: String,
    /// Connections whose records were judged.
    pub connections: u64,
    /// Reuses.
    pub total: u64,
    /// Reuses that met the same backend.
    pub same_backend: u64,
    /// Reuses that met another one.
    pub moved: u64,
    /// Reuses whose previous backend was no longer usable.
    pub stale_backend: u64,
    /// Reuses of which a backend was not seen, because somebody else translates (observe mode).
    #[serde(default)]
    pub unknown_backend: u64,
    /// Connections that overlapped another use of their tuple.
    pub overlap: u64,
    /// Same backend among the reuses that could have met it (0 to 1).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub same_share: Option<f64>,
    /// What chance alone would give for it (0 to 1).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expected_same_share: Option<f64>,
}

impl ServiceReuseView {
    /// Writes down one Service's counts.
    pub fn new(namespace: &str, name: &str, counts: &ReuseCounts, expected_same_share: Option<f64>) -> Self {
        Self {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            connections: counts.connections,
            total: counts.total(),
            same_backend: counts.same_backend,
            moved: counts.moved,
            stale_backend: counts.stale_backend,
            unknown_backend: counts.unknown_backend,
            overlap: counts.overlap,
            same_share: counts.same_share(),
            expected_same_share,
        }
    }
}

impl IntervalView {
    /// Writes down a histogram.
    pub fn all(counts: &ReuseCounts) -> Vec<Self> {
        let edges = EDGES_SECONDS.into_iter().map(Some).chain([None]);
        edges
            .zip(counts.intervals)
            .map(|(up_to_seconds, count)| Self { up_to_seconds, count })
            .collect()
    }
}

impl ReuseView {
    /// Writes down counts over all Services; what the tracker itself tells (tuples, evicted, late) is left at 0.
    ///
    /// What chance would give is put together from the Services, each by its reuses that could have met the same backend.
    pub fn new(horizon_seconds: f64, counts: &ReuseCounts, mut services: Vec<ServiceReuseView>) -> Self {
        services.sort_by(|a, b| {
            b.total
                .cmp(&a.total)
                .then_with(|| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)))
        });
        let (expected, comparable) = services
            .iter()
            .filter_map(|service| Some((service.expected_same_share?, service.same_backend + service.moved)))
            .fold((0.0, 0), |(sum, n), (share, weight)| {
                (sum + share * weight as f64, n + weight)
            });
        Self {
            horizon_seconds,
            connections: counts.connections,
            total: counts.total(),
            same_backend: counts.same_backend,
            moved: counts.moved,
            stale_backend: counts.stale_backend,
            unknown_backend: counts.unknown_backend,
            overlap: counts.overlap,
            same_share: counts.same_share(),
            expected_same_share: (comparable > 0).then(|| expected / comparable as f64),
            intervals: IntervalView::all(counts),
            tuples: 0,
            evicted: 0,
            late: 0,
            services,
            clients: Vec::new(),
            clients_forgotten: 0,
            backend_level_connections: 0,
            backend_level_total: 0,
        }
    }
}
