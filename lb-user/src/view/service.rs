//! Services and backends: `evenkeel service list|get`, `evenkeel backend list`.

use std::{collections::BTreeMap, fmt, net::IpAddr};

use serde::{Deserialize, Serialize};

use crate::analysis::imbalance::Imbalance;

/// One Service.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceView {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its id in the kernel.
    pub id: u32,
    /// The addresses and ports that clients dial, sorted.
    pub frontends: Vec<FrontendView>,
    /// Its backends, by state.
    pub backends: BackendCountsView,
    /// New connections and flows, translated (balance) or seen (observe), wherever they came from.
    pub connects: u64,
    /// Of `connects`, those that came in as packets: from outside the node, or from a guest.
    #[serde(default)]
    pub outside: u64,
    /// Connections that failed to establish, by reason; a reason that never happened is left out.
    pub failed: BTreeMap<String, u64>,
    /// Connections established and not yet ended.
    pub active: u64,
    /// How even the new connections of the window are; none while nothing was counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub imbalance: Option<ImbalanceView>,
}

/// One address, port and protocol that clients dial.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FrontendView {
    /// `ClusterIP`, `NodePort`, `ExternalIP` or `LoadBalancer`.
    pub kind: String,
    /// The address.
    pub addr: IpAddr,
    /// The port.
    pub port: u16,
    /// `TCP` or `UDP`.
    pub protocol: String,
    /// The affinity's timeout, where affinity is on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub affinity_seconds: Option<u32>,
    /// What clients outside the node meet; none where their packets pass untouched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outside: Option<OutsideView>,
}

/// What clients outside the node meet at a frontend.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OutsideView {
    /// `cluster` for all endpoints, `local` for those on this node.
    pub scope: String,
    /// Whether endpoints on other nodes see this node's own source instead of the client's.
    pub masquerade: bool,
    /// Whether the Service's source ranges alone are admitted.
    pub source_ranges: bool,
}

/// Backends by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BackendCountsView {
    /// May get new flows.
    pub active: u64,
    /// Keep their flows only.
    pub draining: u64,
    /// Passed over by passive health.
    pub ejected: u64,
}

/// A backend's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BackendState {
    /// May get new flows.
    Active,
    /// Keeps its flows only.
    Draining,
    /// Passed over by passive health.
    Ejected,
}

impl BackendState {
    /// All states, in the order of tables and metrics.
    pub const ALL: [Self; 3] = [Self::Active, Self::Draining, Self::Ejected];

    /// The state's word.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Draining => "draining",
            Self::Ejected => "ejected",
        }
    }
}

impl fmt::Display for BackendState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Evenness, always with its sample size.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImbalanceView {
    /// Connections in the sample.
    pub n: u64,
    /// Eligible backends.
    pub backends: u64,
    /// The largest observed/expected.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_over_mean: Option<f64>,
    /// Coefficient of variation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cv: Option<f64>,
    /// X²/(k−1): 1 is chance, far above 1 is real.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dispersion: Option<f64>,
    /// How often chance alone is at least this uneven.
    pub p: f64,
    /// Too few connections to say anything.
    pub insufficient: bool,
    /// Beyond chance, and large enough to matter.
    pub alarm: bool,
}

impl From<Imbalance> for ImbalanceView {
    fn from(found: Imbalance) -> Self {
        Self {
            n: found.n,
            backends: found.backends as u64,
            max_over_mean: found.max_over_mean,
            cv: found.cv,
            dispersion: found.dispersion,
            p: found.p_upper,
            insufficient: found.insufficient,
            alarm: found.alarm,
        }
    }
}

/// One backend of one Service.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BackendView {
    /// The Service's namespace.
    pub namespace: String,
    /// The Service's name.
    pub service: String,
    /// The address.
    pub addr: IpAddr,
    /// The port.
    pub port: u16,
    /// `TCP` or `UDP`.
    pub protocol: String,
    /// Its id in the kernel.
    pub id: u32,
    /// Its state.
    pub state: BackendState,
    /// Its weight.
    pub weight: u32,
    /// Times it was chosen for a new connection or flow, wherever that came from.
    pub connects: u64,
    /// Of `connects`, those that came in as packets: from outside the node, or from a guest.
    #[serde(default)]
    pub outside: u64,
    /// Connections that failed to establish.
    pub failed: u64,
    /// Connections established and not yet ended.
    pub active: u64,
    /// New connections of the window that it got; the sample behind `share`.
    pub window_connects: u64,
    /// Its share of the window's new connections (0 to 1); none without connections.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share: Option<f64>,
    /// The share its weight entitles it to (0 to 1); none when it is not eligible.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fair_share: Option<f64>,
}
