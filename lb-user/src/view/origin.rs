//! Where connections come from, as the kernel programs can tell it.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Where a connection or flow comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// A socket on this node.
    #[default]
    Node,
    /// Packets that came in: from outside the node, or from a guest with its own kernel.
    Outside,
}

impl Origin {
    /// The word.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Node => "node",
            Self::Outside => "outside",
        }
    }

    /// Which one two flags ask for; none of them (or both) asks for all.
    pub const fn asked(outside: bool, local: bool) -> Option<Self> {
        match (outside, local) {
            (true, false) => Some(Self::Outside),
            (false, true) => Some(Self::Node),
            _ => None,
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Whose connections a backend set is judged by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AudienceView {
    /// Those of sockets on this node.
    #[default]
    Node,
    /// Those that came in as packets.
    Outside,
    /// Both: they meet the same endpoints.
    All,
    /// Several sets share endpoints and clients, so that their connections cannot be told apart: nobody is judged.
    Mixed,
}

impl AudienceView {
    /// The word.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Node => "node",
            Self::Outside => "outside",
            Self::All => "all",
            Self::Mixed => "mixed",
        }
    }
}
