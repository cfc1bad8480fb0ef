//! Why load is uneven: `evenkeel diagnose`, and the verdicts of `top` and `report`.

use std::{collections::BTreeMap, net::IpAddr};

use serde::{Deserialize, Serialize};

use super::{AudienceView, BackendState, ImbalanceView, Mode, ServiceReuseView, Timestamp};

/// What the node itself says: the proxy that translates here, and the settings that bear on evenness.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeFactsView {
    /// The node's name, where it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// The kernel's release.
    pub kernel: String,
    /// The agent's mode.
    pub mode: Mode,
    /// When this was said.
    pub time: Timestamp,
    /// Since when the agent has been counting.
    pub since: Timestamp,
    /// Who translates Services here, such as `kube-proxy (ipvs)`; none where nobody was found.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub proxy: Option<String>,
    /// By what it was recognised.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub proxy_trace: Option<String>,
    /// What could not be looked at, so that another proxy may hide there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unseen: Vec<String>,
    /// The settings.
    pub settings: Vec<SettingView>,
    /// Records lost between the kernel and the agent since the start: what is derived from them is undercounted.
    pub events_lost: u64,
}

/// One setting of the node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SettingView {
    /// Its name, such as `net.ipv4.vs.conn_reuse_mode`.
    pub name: String,
    /// Its value; none where the kernel has no such setting.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    /// What follows from it, where anything does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
}

/// The verdict in a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VerdictKind {
    /// At least one endpoint is starved.
    Starved,
    /// Shares differ beyond chance and by enough to matter, but nobody is starved.
    Uneven,
    /// Within what chance gives.
    Even,
    /// Too few connections to say anything.
    Insufficient,
    /// No connection was seen.
    NoTraffic,
}

impl VerdictKind {
    /// The word, as in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Starved => "starved",
            Self::Uneven => "uneven",
            Self::Even => "even",
            Self::Insufficient => "insufficient",
            Self::NoTraffic => "no_traffic",
        }
    }
}

/// The diagnosis of one backend set: a Service's port in one family.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DiagnosisView {
    /// The Service's namespace.
    pub namespace: String,
    /// The Service's name.
    pub service: String,
    /// The set, such as `http/TCP/IPv4/cluster`.
    pub set: String,
    /// Whose connections it is judged by: `node`, `outside`, `all` or `mixed`.
    #[serde(default)]
    pub audience: AudienceView,
    /// The verdict in a word.
    pub verdict: VerdictKind,
    /// The verdict in sentences, the most important first.
    pub sentences: Vec<String>,
    /// What to do, the most effective first.
    pub advice: Vec<String>,
    /// The starved endpoints.
    pub starved: Vec<StarvedView>,
    /// All endpoints of the Service in this set, those excluded here too.
    pub endpoints: Vec<EndpointView>,
    /// Evenness of the new connections of the last minute.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub new_connections: Option<ImbalanceView>,
    /// Evenness of the new connections since the agent started, over the endpoints that are eligible now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub new_since_start: Option<ImbalanceView>,
    /// Evenness of the connections that are open now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub open_connections: Option<ImbalanceView>,
    /// How many connections could be told by endpoint.
    pub attribution: AttributionView,
    /// Tuple reuse of the Service.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reuse: Option<ServiceReuseView>,
    /// How faithful clients are to an endpoint, whatever their port.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clients: Option<ClientsView>,
    /// Connections that failed to establish, by reason.
    pub failed: BTreeMap<String, u64>,
    /// Quantiles of the time to establish.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency: Option<LatencyView>,
    /// Where the ephemeral port range is used most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ports: Option<PortUseView>,
}

/// A starved endpoint: an alarm with everything that it rests on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StarvedView {
    /// The endpoint's address.
    pub addr: IpAddr,
    /// Its port.
    pub port: u16,
    /// `not_programmed`, `port_reuse`, `long_lived`, `affinity`, `zero_weight`, `topology` or `unknown`.
    pub cause: String,
    /// What the cause rests on, in sentences.
    pub because: Vec<String>,
    /// Which view found it: `new` connections or `open` ones.
    pub view: String,
    /// Connections that it should have got in the window, by weight.
    pub expected: f64,
    /// Connections that it got.
    pub seen: u64,
    /// How often chance alone would give so few or fewer.
    pub probability: f64,
    /// The window's length in seconds.
    pub window_seconds: f64,
    /// Since when it is starved.
    pub since: Timestamp,
    /// Seconds from the endpoint's birth to the alarm, where its birth was seen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds_to_verdict: Option<f64>,
}

/// One endpoint in a diagnosis.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EndpointView {
    /// The address.
    pub addr: IpAddr,
    /// The port.
    pub port: u16,
    /// The backend's id in the kernel; 0 for one that is not eligible on this node.
    pub id: u32,
    /// Its state; none for one that is not eligible on this node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<BackendState>,
    /// Its weight; 0 for one that is not eligible.
    pub weight: u32,
    /// `unknown`, `fair`, `starved` or `excluded`.
    pub status: String,
    /// Why it is excluded, such as `topology`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub excluded: Option<String>,
    /// Since when it has been usable, where its birth was seen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub born: Option<Timestamp>,
    /// New connections in the last minute.
    pub window_connects: u64,
    /// New connections that it should have got in the last minute.
    pub window_expected: f64,
    /// New connections since the agent started.
    pub connects: u64,
    /// Connections open now.
    pub open: u64,
    /// The proxy's weight for it, where the proxy tells.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub proxy_weight: Option<u32>,
    /// Whether the proxy has it in its tables, where the proxy tells.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub programmed: Option<bool>,
}

/// How many of a Service's connections could be told by endpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AttributionView {
    /// Connections to the Service's frontends.
    pub connects: u64,
    /// Of them those whose endpoint was seen.
    pub attributed: u64,
    /// Of them those whose endpoint was not seen: counted, never guessed.
    pub unknown: u64,
    /// Of `connects`, those that came in as packets: from outside the node, or from a guest.
    #[serde(default)]
    pub outside: u64,
    /// Connections dialled straight to endpoints (a userspace proxy's, a headless client's).
    pub direct: u64,
    /// Connections that were open before the agent started; nothing more is known of them.
    pub earlier: u64,
}

/// How faithful clients are to an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClientsView {
    /// Distinct clients seen (bounded by what is remembered).
    pub clients: u64,
    /// Consecutive connections of one client that could be compared.
    pub compared: u64,
    /// Of them those that met the same endpoint as the one before (0 to 1).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub same_share: Option<f64>,
    /// What the observed shares alone would give (0 to 1).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expected_same_share: Option<f64>,
}

/// Quantiles of a histogram of durations, in seconds; each is the upper edge of the bucket that it falls into.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LatencyView {
    /// Samples.
    pub n: u64,
    /// Half are at most this; none beyond the last edge.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p50_seconds: Option<f64>,
    /// 99 of 100 are at most this; none beyond the last edge.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p99_seconds: Option<f64>,
}

/// The client and destination that use the largest part of the ephemeral range.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PortUseView {
    /// The client's address.
    pub client: IpAddr,
    /// What it dials.
    pub destination: String,
    /// Ports held by open connections, or closed less than 60 s ago (an upper bound).
    pub used: u64,
    /// Ports of the range.
    pub range: u64,
    /// used/range (0 to 1).
    pub ratio: f64,
}
