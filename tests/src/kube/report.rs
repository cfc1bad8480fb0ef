//! Running cases and saying how they went: a table for people, JSON for machines.

use std::{fmt::Write as _, time::Instant};

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use super::{
    Cluster, Stack,
    cases::{self, Case},
};
use crate::{command_line::say, interrupt};

/// The row of the behaviours of Kubernetes' own tests.
pub const E2E: &str = "E2E";

/// How one case went in one stack.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The case.
    pub case: Case,
    /// The stack.
    pub stack: Stack,
    /// A word on what was measured, or why it failed.
    pub result: Result<String, String>,
    /// How long it took, in seconds.
    pub seconds: f64,
}

/// Runs the cases whose row or name is asked for, or all, one after another.
///
/// # Errors
/// Where nothing has such a name, or a signal ended the run.
pub fn run(cluster: &Cluster, names: &[String]) -> Result<Vec<Outcome>> {
    let mut outcomes = Vec::new();
    for case in select(names)? {
        for stack in case.stacks {
            interrupt::check()?;
            let began = Instant::now();
            let ran = case.run(cluster, *stack);
            // A wait that a signal ended is no result.
            interrupt::check()?;
            let outcome = Outcome {
                case,
                stack: *stack,
                result: ran.map_err(|error| {
                    say(&cluster.logs(6));
                    format!("{error:#}")
                }),
                seconds: began.elapsed().as_secs_f64(),
            };
            outcome.tell();
            outcomes.push(outcome);
        }
    }
    Ok(outcomes)
}

/// The cases whose row or name is asked for; all where nothing is.
///
/// # Errors
/// Where nothing has such a name.
pub fn select(names: &[String]) -> Result<Vec<Case>> {
    let all = cases::all();
    let is = |case: &Case, name: &str| case.row.eq_ignore_ascii_case(name) || case.name == name.replace(' ', "_");
    for name in names {
        ensure!(
            all.iter().any(|case| is(case, name)),
            "no case has the row or name {name}; the rows are {}",
            rows(&all).join(", ")
        );
    }
    let wanted = |case: &Case| names.is_empty() || names.iter().any(|name| is(case, name));
    Ok(all.into_iter().filter(wanted).collect())
}

fn rows(cases: &[Case]) -> Vec<&'static str> {
    let mut rows = Vec::new();
    for case in cases {
        if !rows.contains(&case.row) {
            rows.push(case.row);
        }
    }
    rows
}

impl Outcome {
    fn tell(&self) {
        let word = if self.result.is_ok() { "pass" } else { "FAIL" };
        let (Ok(detail) | Err(detail)) = &self.result;
        say(&format!(
            "{word}  {:<4} {:<4}  {} ({:.1} s): {detail}",
            self.case.row,
            self.stack.to_string(),
            self.case.name.replace('_', " "),
            self.seconds
        ));
    }
}

/// The contract's outcomes as JSON: an entry a row and stack, which passes where all its cases do.
pub fn rows_json(outcomes: &[Outcome]) -> Value {
    let all: Vec<Case> = outcomes.iter().map(|outcome| outcome.case).collect();
    let mut entries = Vec::new();
    for row in rows(&all).into_iter().filter(|row| *row != E2E) {
        for stack in Stack::ALL {
            let of_entry: Vec<_> = outcomes
                .iter()
                .filter(|outcome| outcome.case.row == row && outcome.stack == stack)
                .collect();
            if of_entry.is_empty() {
                continue;
            }
            let details: Vec<String> = of_entry
                .iter()
                .map(|outcome| {
                    let (Ok(word) | Err(word)) = &outcome.result;
                    format!("{}: {word}", outcome.case.name.replace('_', " "))
                })
                .collect();
            entries.push(json!({
                "row": row,
                "family": stack.to_string(),
                "result": word(of_entry.iter().all(|outcome| outcome.result.is_ok())),
                "detail": details.join("; "),
            }));
        }
    }
    Value::Array(entries)
}

/// The outcomes of the behaviours of Kubernetes' own tests as JSON.
pub fn e2e_json(outcomes: &[Outcome]) -> Value {
    let entries = outcomes
        .iter()
        .filter(|outcome| outcome.case.row == E2E)
        .map(|outcome| {
            let (Ok(detail) | Err(detail)) = &outcome.result;
            json!({
                "name": outcome.case.name.replace('_', " "),
                "result": word(outcome.result.is_ok()),
                "detail": detail,
            })
        });
    Value::Array(entries.collect())
}

fn word(good: bool) -> &'static str {
    if good { "pass" } else { "fail" }
}

/// The outcomes as a table.
pub fn to_text(outcomes: &[Outcome]) -> String {
    let mut text = String::from("ROW   CASE                                                  STACK  SECONDS  RESULT\n");
    for outcome in outcomes {
        let _ = writeln!(
            text,
            "{:<5} {:<53} {:<5} {:>8.1}  {}",
            outcome.case.row,
            outcome.case.name.replace('_', " "),
            outcome.stack.to_string(),
            outcome.seconds,
            if outcome.result.is_ok() { "pass" } else { "FAIL" }
        );
    }
    text
}
