//! What the client met, before and after the third backend joined.

use std::{
    io::{self, Write},
    net::SocketAddr,
    time::Instant,
};

use anyhow::Result;
use lb_user::lab::client::Attempt;

use super::stage;

/// One proxy in one phase.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    proxy: String,
    phase: &'static str,
    backends: u8,
    pub(crate) failed: u64,
    /// Answers of each of the three, in their order.
    answers: [u64; 3],
    /// Reuses of a source port, where somebody counted them.
    reuses: Option<u64>,
}

impl Row {
    fn new(proxy: &str, phase: &'static str, backends: u8, attempts: &[Attempt]) -> Self {
        let count = |wanted: SocketAddr| attempts.iter().filter(|a| a.outcome == Ok(wanted)).count() as u64;
        Self {
            proxy: proxy.to_owned(),
            phase,
            backends,
            failed: attempts.iter().filter(|a| a.outcome.is_err()).count() as u64,
            answers: [1, 2, 3].map(|n| count(stage::backend(n))),
            reuses: None,
        }
    }

    pub(crate) fn connections(&self) -> u64 {
        self.failed + self.answers.iter().sum::<u64>()
    }

    /// Connections that the third backend got.
    pub(crate) fn of_third(&self) -> u64 {
        self.answers[2]
    }

    /// Its share of all answers.
    pub(crate) fn share_of_third(&self) -> f64 {
        self.of_third() as f64 / self.answers.iter().sum::<u64>().max(1) as f64
    }

    /// Its share, as a part of the fair one.
    pub(crate) fn third_of_fair(&self) -> f64 {
        let fair = self.answers.iter().sum::<u64>() as f64 / f64::from(self.backends);
        self.of_third() as f64 / fair
    }
}

/// Splits a client's records at the moment when the third backend was in force.
pub(crate) fn rows(proxy: &str, attempts: &[Attempt], added: Instant) -> [Row; 2] {
    if let [first, .., last] = attempts {
        let seconds = last.started.duration_since(first.started).as_secs_f64();
        println!("{proxy}: {:.0} connections a second", attempts.len() as f64 / seconds);
    }
    let split = attempts.partition_point(|a| a.started < added);
    let (before, after) = attempts.split_at(split);
    [
        Row::new(proxy, "two backends", 2, before),
        Row::new(proxy, "a third joined", 3, after),
    ]
}

/// Adds what the agent counted in either phase.
pub(crate) fn with_reuse([before, after]: [Row; 2], reuses_before: u64, reuses_after: u64) -> [Row; 2] {
    [
        Row {
            reuses: Some(reuses_before),
            ..before
        },
        Row {
            reuses: Some(reuses_after),
            ..after
        },
    ]
}

/// Prints rows for the summary of the test run.
pub(crate) fn print(rows: &[Row]) -> Result<()> {
    let mut out = io::stdout().lock();
    // libtest-mimic leaves the cursor behind the running test's name.
    writeln!(
        out,
        "\nSTORY {:26} {:15} {:>11} {:>7} {:>13} {:>11} {:>7}",
        "PROXY", "PHASE", "CONNECTIONS", "FAILED", "PER BACKEND", "THIRD/FAIR", "REUSES"
    )?;
    for row in rows {
        let [first, second, third] = row.answers;
        let (answers, of_fair) = if row.backends == 3 {
            (
                format!("{first}/{second}/{third}"),
                format!("{:.0} %", 100.0 * row.third_of_fair()),
            )
        } else {
            (format!("{first}/{second}"), "-".to_owned())
        };
        writeln!(
            out,
            "STORY {:26} {:15} {:>11} {:>7} {answers:>13} {of_fair:>11} {:>7}",
            row.proxy,
            row.phase,
            row.connections(),
            row.failed,
            row.reuses.map_or_else(|| "-".to_owned(), |reuses| reuses.to_string())
        )?;
    }
    Ok(())
}
