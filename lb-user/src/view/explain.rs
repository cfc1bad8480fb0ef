//! Where a flow goes, and why: `evenkeel explain`.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
};

use serde::{Deserialize, Serialize};

use super::ConnState;

/// Where a packet or a connection is taken to begin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Whence {
    /// A socket on this node: the socket hooks decide.
    #[default]
    Node,
    /// Packets that come in by an uplink.
    Outside,
    /// Packets of a guest with its own kernel.
    Guest,
}

impl fmt::Display for Whence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Node => "node",
            Self::Outside => "outside",
            Self::Guest => "guest",
        })
    }
}

/// What happens to a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Verdict {
    /// It goes to one of the candidates.
    Translated,
    /// No frontend matches, or the client is opted out: it goes where it was sent.
    Passed,
    /// ECONNREFUSED at once, and to packets RST or "port unreachable": no usable backend.
    Refused,
    /// EHOSTUNREACH at once: no usable backend under a Local policy.
    Unreachable,
    /// Packets are dropped without an answer; the last step says why.
    Dropped,
    /// The agent observes: somebody else decides.
    Observed,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Translated => "translated",
            Self::Passed => "passed",
            Self::Refused => "refused",
            Self::Unreachable => "unreachable",
            Self::Dropped => "dropped",
            Self::Observed => "observed",
        })
    }
}

/// The answer for one flow.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExplainView {
    /// The client's address, with its port where one was given.
    pub source: String,
    /// The address and port dialled.
    pub vip: SocketAddr,
    /// `TCP` or `UDP`.
    pub protocol: String,
    /// Where it is taken to begin.
    #[serde(default)]
    pub from: Whence,
    /// True where nobody said so, and it was told by the address.
    #[serde(default)]
    pub assumed: bool,
    /// What happens.
    pub verdict: Verdict,
    /// The Service whose frontend matches, as `NAMESPACE/NAME`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service: Option<String>,
    /// The frontend's kind.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub frontend_kind: Option<String>,
    /// Where it can go; the chances sum to 1. One candidate with chance 1 is a certain answer.
    pub candidates: Vec<CandidateView>,
    /// The node's own address that the backend sees in place of the client's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_address: Option<IpAddr>,
    /// The flow that the table has of this tuple.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flow: Option<FlowView>,
    /// Where a SYN on the tuple of that flow would go now: to its backend while the connection is open, else it is chosen anew.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub next: Vec<CandidateView>,
    /// Why, one sentence a step, in the order in which the kernel program decides.
    pub steps: Vec<String>,
}

/// A backend that a flow can reach.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CandidateView {
    /// The address.
    pub addr: IpAddr,
    /// The port.
    pub port: u16,
    /// Its id in the kernel.
    pub id: u32,
    /// The probability that the flow goes there (0 to 1).
    pub chance: f64,
}

/// A flow of the table, then and now.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FlowView {
    /// Its backend.
    pub backend: SocketAddr,
    /// The backend's id in the kernel.
    pub backend_id: u32,
    /// What became of the backend: `active`, `draining`, `ejected`, or `gone`.
    pub backend_state: String,
    /// The flow's state.
    pub state: ConnState,
    /// Since when it is there, in seconds.
    pub age_seconds: f64,
    /// Since when no packet was seen, in seconds.
    pub idle_seconds: f64,
    /// The node's own source towards the backend, where it does not see the client's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<SocketAddr>,
    /// True if the table did not see its beginning.
    pub resumed: bool,
    /// The set's publication when the backend was chosen.
    pub generation: u32,
    /// The set's publication now; none where the set is gone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub generation_now: Option<u32>,
}
