//! What the lab proves, row by row of the contract and of the field cases, each in both families.
//!
//! A case asserts what clients meet *and* what the agents counted. It leaves the lab as it found it: agents running, its
//! Services removed. Rows are named as the contract and the field cases name them; `LAB` is the lab itself.

pub mod affinity;
pub mod datagrams;
pub mod ending;
pub mod explain;
pub mod frontends;
pub mod health;
pub mod observer;
pub mod path;
pub mod policy;
pub mod restart;
pub mod reuse;
pub mod sources;
pub mod views;
pub mod wires;

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};

use super::{
    Lab,
    dial::{Dialer, Failure, silence},
    plan::Family,
};
use crate::runner::in_guest;

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
    [
        wires::CASES,
        frontends::CASES,
        policy::CASES,
        sources::CASES,
        affinity::CASES,
        health::CASES,
        datagrams::CASES,
        ending::CASES,
        path::CASES,
        views::CASES,
        reuse::CASES,
        restart::CASES,
        explain::CASES,
        observer::CASES,
    ]
    .concat()
}

/// Nobody must serve an address: silence, or a word that it cannot be reached.
fn unserved(dialer: &Dialer<'_>, target: SocketAddr) -> Result<()> {
    let met = dialer.within(silence()).dial(target);
    ensure!(
        matches!(met, Err(Failure::Silent | Failure::Unreachable)),
        "{target} should lead nowhere, and met {met:?}"
    );
    Ok(())
}

/// A connection and a datagram must be refused, and at once; returns how long the slower one took.
fn refused_quickly(dialer: &Dialer<'_>, target: SocketAddr) -> Result<Duration> {
    // Long before a SYN would be repeated.
    let limit = Duration::from_millis(if in_guest() { 5_000 } else { 900 });
    let began = Instant::now();
    let dialled = dialer.within(limit).dial(target);
    let stream = began.elapsed();
    ensure!(
        dialled == Err(Failure::Refused),
        "a connection to {target}: {dialled:?}"
    );
    let began = Instant::now();
    let asked = dialer.within(limit).ask(target);
    let datagram = began.elapsed();
    ensure!(asked == Err(Failure::Refused), "a datagram to {target}: {asked:?}");
    Ok(stream.max(datagram))
}
