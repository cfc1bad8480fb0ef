//! Where a flow goes, and why: `evenkeel explain`.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
};

use serde::{Deserialize, Serialize};

/// What happens to a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Verdict {
    /// It goes to one of the candidates.
    Translated,
    /// No frontend matches, or the client is opted out: it goes where it was sent.
    Passed,
    /// ECONNREFUSED at once: no usable backend.
    Refused,
    /// EHOSTUNREACH at once: no usable backend under a Local policy.
    Unreachable,
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
