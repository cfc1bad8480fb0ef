//! How the agent is: `evenkeel status`.

use std::{fmt, net::IpAddr};

use serde::{Deserialize, Serialize};

use super::Timestamp;
use crate::model::Problem;

/// Whether the agent writes to traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// It translates frontends to backends.
    Balance,
    /// It only watches.
    Observe,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Balance => "balance",
            Self::Observe => "observe",
        })
    }
}

/// The agent's state at one moment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StatusView {
    /// The agent's version.
    pub version: String,
    /// The version of the layout that it shares with its kernel programs.
    pub abi: u32,
    /// Whether it writes to traffic.
    pub mode: Mode,
    /// The node's name; none outside a cluster.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// The kernel's release.
    pub kernel: String,
    /// When the answer was made.
    pub time: Timestamp,
    /// When the agent started.
    pub started: Timestamp,
    /// How long ago that was.
    pub uptime_seconds: f64,
    /// Health in short.
    pub health: HealthView,
    /// Where the wanted state comes from.
    pub source: SourceView,
    /// How far it has come into the kernel.
    pub sync: SyncView,
    /// What is attached.
    pub programs: Vec<ProgramView>,
    /// Where packets are translated.
    #[serde(default)]
    pub interfaces: Vec<InterfaceView>,
    /// How full the maps are.
    pub maps: Vec<MapUsageView>,
    /// How much of everything there is.
    pub counts: CountsView,
    /// What in the input was not taken.
    pub problems: Vec<ProblemView>,
}

/// The three answers of the health endpoints.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HealthView {
    /// All loops are alive.
    pub live: bool,
    /// The self-probe passes.
    pub ready: bool,
    /// No change has been waiting for too long, and the node may take traffic.
    pub healthy: bool,
    /// Why not, one sentence each; empty when all is well.
    pub reasons: Vec<String>,
}

/// Where Services and EndpointSlices come from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SourceView {
    /// The source as on the command line: `dir:PATH` or `kube`.
    pub name: String,
    /// Whether every kind has been read once.
    pub synced: bool,
    /// By kind of object.
    pub kinds: Vec<KindView>,
    /// The last thing that went wrong, if it still matters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
}

/// One kind of object in the source.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct KindView {
    /// `Service`, `EndpointSlice`, `Node`, `Pod`.
    pub kind: String,
    /// Objects known.
    pub objects: u64,
    /// When the source last confirmed them; none before the first time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub synced: Option<Timestamp>,
    /// What is wrong with it now; what was read before still holds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// How far the wanted state has come into the kernel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SyncView {
    /// When a change last reached the kernel.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_applied: Option<Timestamp>,
    /// When a change last came in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_queued: Option<Timestamp>,
    /// Since when the oldest unapplied change waits; none when all is applied.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pending_since: Option<Timestamp>,
    /// How long the last application took.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_duration_seconds: Option<f64>,
    /// Applications that failed, and were tried again.
    pub failures: u64,
    /// What the last failure was, while it lasts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    /// Things found lost, foreign or wrong in the kernel, and put right.
    pub repairs: u64,
}

/// One kernel program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProgramView {
    /// The program's name.
    pub name: String,
    /// The kernel's name of the hook, such as `cgroup/connect4` or `tcx/ingress`.
    pub hook: String,
    /// What it is attached to: a cgroup's path, an interface's name.
    pub target: String,
    /// Whether the link is there and holds the program.
    pub attached: bool,
    /// The program's id in the kernel.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub program_id: Option<u32>,
    /// The link's id in the kernel.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub link_id: Option<u32>,
    /// Where the link is pinned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pin: Option<String>,
}

/// An interface where packets are translated, or should be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct InterfaceView {
    /// Its name.
    pub name: String,
    /// Its index; none while there is no such interface.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub index: Option<u32>,
    /// What lies behind it.
    pub side: InterfaceSide,
    /// The addresses that the node sends from there, one a family at most.
    pub addresses: Vec<IpAddr>,
    /// Why it was chosen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Why packets are not translated there, while they are not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// What lies behind an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum InterfaceSide {
    /// The world outside the node.
    Uplink,
    /// A guest with its own kernel.
    Guest,
}

impl fmt::Display for InterfaceSide {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Uplink => "uplink",
            Self::Guest => "guest",
        })
    }
}

/// How full a map is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MapUsageView {
    /// The map's name.
    pub name: String,
    /// Entries in use.
    pub entries: u64,
    /// Entries that fit.
    pub max_entries: u64,
}

/// How much of everything there is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CountsView {
    /// Services with a frontend here.
    pub services: u64,
    /// Frontends.
    pub frontends: u64,
    /// Backend sets.
    pub sets: u64,
    /// Backends, of any state.
    pub backends: u64,
    /// New connections and flows, translated (balance) or seen (observe).
    pub connects: u64,
    /// Connections that failed to establish.
    pub failed: u64,
    /// Connections established and not yet ended.
    pub active: u64,
    /// Records lost between the kernel and the agent.
    pub events_lost: u64,
}

/// Something in the input that was not taken.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProblemView {
    /// Where it stands: a file (with line), or the API server.
    pub origin: String,
    /// The object.
    pub object: String,
    /// The field.
    pub field: String,
    /// What was found and what is allowed.
    pub message: String,
}

impl From<&Problem> for ProblemView {
    fn from(problem: &Problem) -> Self {
        Self {
            origin: problem.origin.clone(),
            object: problem.object.clone(),
            field: problem.field.clone(),
            message: problem.message.clone(),
        }
    }
}
