//! What a node must have before an agent runs on it, and what would fight the agent.
//!
//! Each check looks at the running kernel alone: it changes nothing, attaches nothing and needs no agent. Reading and judging are apart,
//! so that the judgements are tested without the machine. The look for other owners of Services is the agent's too.

mod bpf;
pub mod owners;
pub mod packets;
mod system;

use std::{net::IpAddr, path::PathBuf};

use serde::Serialize;

use crate::{
    config::{NamePattern, PortRange, Uplinks},
    view::Mode,
};

/// How a check came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// As it should be.
    Ok,
    /// Works, with a limit that one should know.
    Warn,
    /// The agent cannot do its work.
    Fail,
}

/// One line of the doctor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// The check's stable name.
    pub id: String,
    /// How it came out.
    pub state: State,
    /// What is there.
    pub found: String,
    /// What should be there.
    pub wanted: String,
    /// What to do; empty when all is well.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub hint: String,
}

impl Check {
    fn new(id: &str, state: State, found: impl Into<String>, wanted: &str, hint: &str) -> Self {
        Self {
            id: id.to_owned(),
            state,
            found: found.into(),
            wanted: wanted.to_owned(),
            hint: if state == State::Ok {
                String::new()
            } else {
                hint.to_owned()
            },
        }
    }
}

/// What the agent would be started with.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The mode.
    pub mode: Mode,
    /// The BPF file system.
    pub bpffs: PathBuf,
    /// The cgroup; none for the default.
    pub cgroup: Option<PathBuf>,
    /// Interfaces that lead out of the node.
    pub uplinks: Uplinks,
    /// Interfaces with guests behind them.
    pub guests: Vec<NamePattern>,
    /// The node's addresses, where they are given.
    pub node_addresses: Vec<IpAddr>,
    /// The node's own source ports.
    pub snat_ports: PortRange,
}

/// Makes all checks, in the order in which one would repair what fails.
pub fn examine(plan: &Plan) -> Vec<Check> {
    let mut checks = system::examine(plan);
    checks.extend(bpf::examine());
    checks.extend(packets::examine(plan));
    checks.extend(owners::examine(plan));
    checks.extend(system::neighbours());
    checks
}
