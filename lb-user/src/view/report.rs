//! The picture of a node over time: `evenkeel report`, and the bars of `evenkeel top`.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::{DiagnosisView, IntervalView, NodeFactsView, Timestamp};

/// What a report is made of.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReportView {
    /// The node and its settings.
    pub node: NodeFactsView,
    /// Seconds between two points of the histories.
    pub step_seconds: f64,
    /// The Services with traffic, the worst verdict first.
    pub services: Vec<ServiceReportView>,
}

/// One backend set over time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceReportView {
    /// The verdict and its numbers.
    pub diagnosis: DiagnosisView,
    /// The endpoints that the points are about, in the points' order.
    pub backends: Vec<HistoryBackendView>,
    /// What was counted, oldest first.
    pub points: Vec<HistoryPointView>,
    /// Tuple reuses of the Service by interval, not cumulative.
    pub intervals: Vec<IntervalView>,
}

/// One endpoint of a history.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HistoryBackendView {
    /// The address.
    pub addr: IpAddr,
    /// The port.
    pub port: u16,
    /// When it became usable, if that was seen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub born: Option<Timestamp>,
    /// When it ceased to be eligible, if it has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gone: Option<Timestamp>,
}

/// One step of a history.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HistoryPointView {
    /// The step's end.
    pub time: Timestamp,
    /// New connections in the step, by endpoint.
    pub started: Vec<u64>,
    /// Connections open at its end, by endpoint.
    pub open: Vec<u64>,
    /// Dispersion of the new connections of the minute before; none where there were too few.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dispersion: Option<f64>,
}
