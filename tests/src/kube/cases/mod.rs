//! What the cluster proves: the contract row by row in each stack, and the behaviours of Kubernetes' own tests by name.
//!
//! A case leaves the cluster as it found it: agents running with their ordinary flags, its objects removed.

use anyhow::Result;

use super::{Cluster, Stack, Stage};

pub mod e2e;
pub mod rights;
pub mod rows;

/// The body of a case; what it returns is a word on what was measured.
pub type Body = fn(&Stage<'_>) -> Result<String>;

/// One case.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// The row of the contract, or `E2E`.
    pub row: &'static str,
    /// What is shown, in words joined by `_`.
    pub name: &'static str,
    /// In which stacks it is shown.
    pub stacks: &'static [Stack],
    /// What is done.
    pub body: Body,
}

impl Case {
    /// A row of the contract, in every stack.
    const fn row(row: &'static str, name: &'static str, body: Body) -> Self {
        Self {
            row,
            name,
            stacks: &Stack::ALL,
            body,
        }
    }

    /// A row of the contract that has nothing to do with addresses.
    const fn once(row: &'static str, name: &'static str, body: Body) -> Self {
        Self {
            row,
            name,
            stacks: &[Stack::Dual],
            body,
        }
    }

    /// A behaviour of Kubernetes' own tests, in both families at once.
    const fn e2e(name: &'static str, body: Body) -> Self {
        Self {
            row: "E2E",
            name,
            stacks: &[Stack::Dual],
            body,
        }
    }

    /// The name of the test in a stack.
    pub fn title(&self, stack: Stack) -> String {
        format!("{}_{}::{stack}", self.row.to_lowercase(), self.name)
    }

    /// Runs the case.
    ///
    /// # Errors
    /// What is not as it must be.
    pub fn run(&self, cluster: &Cluster, stack: Stack) -> Result<String> {
        cluster.start_agents()?;
        let stage = cluster.stage(self.row, stack);
        (self.body)(&stage)
    }
}

/// All cases.
pub fn all() -> Vec<Case> {
    [rows::all(), e2e::all(), rights::CASES.to_vec()].concat()
}
