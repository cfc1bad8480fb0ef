//! What the lab proves, row by row of the contract and of the field cases, each in both families.
//!
//! A case asserts what clients meet *and* what the agents counted. It leaves the lab as it found it: agents running, its
//! Services removed. Rows are named as the contract and the field cases name them; `LAB` is the lab itself.

pub mod wires;

use anyhow::Result;

use super::{Lab, plan::Family};

/// The body of a case; what it returns is a word on what was measured.
pub type Body = fn(&Lab, Family) -> Result<String>;

/// One case.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// The row of the contract or of the field cases.
    pub row: &'static str,
    /// What is shown, in words joined by `_`.
    pub name: &'static str,
    /// Whether the nodes' agents run.
    pub agents: bool,
    /// What is done.
    pub body: Body,
}

impl Case {
    const fn new(row: &'static str, name: &'static str, body: Body) -> Self {
        Self {
            row,
            name,
            agents: true,
            body,
        }
    }

    const fn without_agents(row: &'static str, name: &'static str, body: Body) -> Self {
        Self {
            row,
            name,
            agents: false,
            body,
        }
    }

    /// The name of the test in a family.
    pub fn title(&self, family: Family) -> String {
        format!("{}_{}::{family}", self.row.to_lowercase(), self.name)
    }

    /// Runs the case in a family, with the agents as it wants them.
    ///
    /// # Errors
    /// What is not as it must be.
    pub fn run(&self, lab: &Lab, family: Family) -> Result<String> {
        if self.agents {
            lab.start_agents()?;
        } else {
            lab.wipe_agents()?;
        }
        (self.body)(lab, family)
    }
}

/// All cases; those without agents come first.
pub fn all() -> Vec<Case> {
    [wires::CASES].concat()
}
