//! Who calls whom: `evenkeel graph`.

use serde::{Deserialize, Serialize};

use super::Timestamp;

/// The calls that this node has seen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GraphView {
    /// Since when.
    pub since: Timestamp,
    /// The calls, sorted by caller and Service.
    pub calls: Vec<CallView>,
    /// Calls forgotten for want of room.
    pub forgotten: u64,
}

/// One workload's calls of one Service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CallView {
    /// The caller.
    pub client: WorkloadView,
    /// The Service's namespace.
    pub namespace: String,
    /// The Service's name.
    pub service: String,
    /// Connections that ended, and attempts that failed.
    pub connections: u64,
    /// Attempts that failed.
    pub failures: u64,
    /// When the last of them ended.
    pub last_seen: Timestamp,
}

/// A workload: what a pod belongs to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WorkloadView {
    /// Its namespace; empty for what is no pod.
    pub namespace: String,
    /// `Deployment`, `StatefulSet`, `DaemonSet`, `Job`, `Pod`, ... ; `Node` for the node's own processes, `Outside` for all clients
    /// outside the node together, `Address` for a client of which nothing more is known.
    pub kind: String,
    /// Its name; for an `Address` the address itself, for `Outside` the word `outside`.
    pub name: String,
}
