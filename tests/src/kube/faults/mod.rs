//! Schedules of faults against the real control plane, from seeds: what goes wrong, and what changes meanwhile.
//!
//! After each schedule every agent's kernel must hold what a cold start would, the connections of a client that has nothing to do
//! with the changes must have lived, and the agents must have been up to date within a second of the end of what went wrong. A
//! schedule is replayed by its seed.

mod act;
mod field;
mod schedule;

use std::{fmt, time::Duration};

use anyhow::Result;
use serde_json::{Value, json};

use self::field::Field;
pub use self::schedule::{Change, Fault, Schedule};
use super::Cluster;
use crate::{command_line::say, interrupt};

/// How soon after the end of a fault all agents must be up to date.
pub const CONVERGENCE: Duration = Duration::from_secs(1);

/// How schedules went.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Schedules played.
    pub schedules: u64,
    /// Schedules after which a kernel held something else than a cold start would.
    pub divergences: u64,
    /// Of their differing lines, those that should have gone.
    pub lost_removals: u64,
    /// Connections that failed or ended though nothing of theirs changed.
    pub lost_connections: u64,
    /// Dials and answers of the client that has nothing to do with the changes.
    pub good_dials: u64,
    /// The longest time from the end of a fault until all agents were up to date.
    pub worst_convergence: Duration,
    /// The same where packets were swallowed: see [`Fault::allowance`].
    pub worst_after_cut_off: Duration,
    /// Faults after which that took longer than it may.
    pub late: u64,
    /// Faults of each kind.
    pub faults: std::collections::BTreeMap<&'static str, u64>,
    /// What was wrong, schedule by schedule.
    pub wrong: Vec<String>,
}

impl Tally {
    /// Whether all was as it must be.
    pub fn is_good(&self) -> bool {
        self.wrong.is_empty()
    }

    /// As JSON.
    pub fn to_json(&self) -> Value {
        json!({
            "schedules": self.schedules,
            "divergences": self.divergences,
            "lost_removals": self.lost_removals,
            "lost_connections": self.lost_connections,
            "good_dials": self.good_dials,
            "worst_convergence_ms": self.worst_convergence.as_millis() as u64,
            "worst_after_cut_off_ms": self.worst_after_cut_off.as_millis() as u64,
            "late": self.late,
            "faults": self.faults,
            "wrong": self.wrong,
        })
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "SCHEDULES  DIVERGENCES  LOST REMOVALS  LOST CONNECTIONS  GOOD DIALS  WORST CONVERGENCE"
        )?;
        writeln!(
            f,
            "{:>9}  {:>11}  {:>13}  {:>16}  {:>10}  {:>14} ms",
            self.schedules,
            self.divergences,
            self.lost_removals,
            self.lost_connections,
            self.good_dials,
            self.worst_convergence.as_millis()
        )?;
        writeln!(
            f,
            "(where packets were swallowed, which TCP sends again later: {} ms)",
            self.worst_after_cut_off.as_millis()
        )?;
        for (name, count) in &self.faults {
            writeln!(f, "  {count:>3} x {name}")?;
        }
        Ok(())
    }
}

/// Plays the schedules of these seeds.
///
/// # Errors
/// As [`play`].
pub fn run(cluster: &Cluster, seeds: impl IntoIterator<Item = u64>) -> Result<Tally> {
    play(cluster, seeds.into_iter().map(Schedule::of))
}

/// Plays schedules.
///
/// # Errors
/// Where the cluster cannot be driven, or a signal ended the run; what agents did wrong is in the tally.
pub fn play(cluster: &Cluster, schedules: impl IntoIterator<Item = Schedule>) -> Result<Tally> {
    let mut tally = Tally::default();
    cluster.start_agents()?;
    let mut field = Field::new(cluster)?;
    for schedule in schedules {
        interrupt::check()?;
        let seed = schedule.seed;
        let wrong_before = tally.wrong.len();
        act::play(&mut field, &schedule, &mut tally)?;
        tally.schedules += 1;
        let word = if tally.wrong.len() == wrong_before {
            "pass"
        } else {
            "FAIL"
        };
        say(&format!("{word}  schedule {seed}: {schedule}"));
        for wrong in &tally.wrong[wrong_before..] {
            say(wrong);
        }
    }
    Ok(tally)
}
