//! Running cases and saying how they went: a table for people, JSON for machines.
//!
//! One result a row and family: a row passes where all its cases do.

use std::{collections::BTreeMap, fmt::Write as _, time::Instant};

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use super::{Lab, cases, plan::Family};
use crate::{command_line::say, interrupt};

/// How one case went in one family.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The row.
    pub row: &'static str,
    /// The case.
    pub name: &'static str,
    /// The family.
    pub family: Family,
    /// A word on what was measured, or why it failed.
    pub result: Result<String, String>,
}

impl Outcome {
    /// Says in a line how it went.
    pub(super) fn tell(&self, began: Instant) {
        let word = if self.result.is_ok() { "pass" } else { "FAIL" };
        let (Ok(detail) | Err(detail)) = &self.result;
        say(&format!(
            "{word}  {:<4} {}  {} ({:.1} s): {detail}",
            self.row,
            self.family,
            self.name.replace('_', " "),
            began.elapsed().as_secs_f64()
        ));
    }
}

/// Runs the cases of these rows, or all, one after another.
///
/// # Errors
/// Where the lab cannot be built, a row has no case, or a signal ended the run.
pub fn run(rows: &[String]) -> Result<Vec<Outcome>> {
    let all = cases::all();
    for row in rows {
        ensure!(
            all.iter().any(|case| case.row.eq_ignore_ascii_case(row)),
            "no case has the row {row}; the rows are {}",
            rows_of(&all).join(", ")
        );
    }
    let selected = |case: &&cases::Case| rows.is_empty() || rows.iter().any(|row| case.row.eq_ignore_ascii_case(row));
    let lab = Lab::new()?;
    let mut outcomes = Vec::new();
    for case in all.iter().filter(selected) {
        for family in Family::ALL {
            interrupt::check()?;
            let began = Instant::now();
            let ran = case.run(&lab, family);
            // A wait that a signal ended is no result.
            interrupt::check()?;
            let result = ran.map_err(|error| {
                say(&lab.logs(6));
                format!("{error:#}")
            });
            let outcome = Outcome {
                row: case.row,
                name: case.name,
                family,
                result,
            };
            outcome.tell(began);
            outcomes.push(outcome);
        }
    }
    Ok(outcomes)
}

/// The rows that cases have, each once, in the order of their cases.
pub fn rows_of(cases: &[cases::Case]) -> Vec<&'static str> {
    let mut rows = Vec::new();
    for case in cases {
        if !rows.contains(&case.row) {
            rows.push(case.row);
        }
    }
    rows
}

/// The outcomes as JSON: an entry a row and family.
pub fn to_json(outcomes: &[Outcome]) -> Value {
    let entries = summed(outcomes).into_values().map(|entry| {
        json!({
            "row": entry.row,
            "family": entry.family.to_string(),
            "result": if entry.failed == 0 { "pass" } else { "fail" },
            "detail": entry.detail,
        })
    });
    Value::Array(entries.collect())
}

/// The outcomes as a table.
pub fn to_text(outcomes: &[Outcome]) -> String {
    let entries = summed(outcomes);
    let mut text = String::from("ROW   FAMILY  CASES  RESULT\n");
    for entry in entries.values() {
        let result = if entry.failed == 0 {
            "pass".to_owned()
        } else {
            format!("FAIL ({} of {})", entry.failed, entry.cases)
        };
        let _ = writeln!(
            text,
            "{:<5} {:<7} {:>5}  {result}",
            entry.row,
            entry.family.to_string(),
            entry.cases
        );
    }
    text
}

struct Entry {
    row: &'static str,
    family: Family,
    cases: usize,
    failed: usize,
    detail: String,
}

fn summed(outcomes: &[Outcome]) -> BTreeMap<(usize, Family), Entry> {
    let mut order = Vec::new();
    let mut entries: BTreeMap<(usize, Family), Entry> = BTreeMap::new();
    for outcome in outcomes {
        let place = order.iter().position(|row| *row == outcome.row).unwrap_or_else(|| {
            order.push(outcome.row);
            order.len() - 1
        });
        let entry = entries.entry((place, outcome.family)).or_insert(Entry {
            row: outcome.row,
            family: outcome.family,
            cases: 0,
            failed: 0,
            detail: String::new(),
        });
        entry.cases += 1;
        entry.failed += usize::from(outcome.result.is_err());
        let (Ok(word) | Err(word)) = &outcome.result;
        if !entry.detail.is_empty() {
            entry.detail.push_str("; ");
        }
        let _ = write!(entry.detail, "{}: {word}", outcome.name.replace('_', " "));
    }
    entries
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_fails_where_one_of_its_cases_does() {
        let outcome = |name, family, result: Result<&str, &str>| Outcome {
            row: "C9",
            name,
            family,
            result: result.map(str::to_owned).map_err(str::to_owned),
        };
        let outcomes = [
            outcome("a_b", Family::V4, Ok("fine")),
            outcome("c", Family::V4, Err("bad")),
            outcome("a_b", Family::V6, Ok("fine")),
        ];
        assert_eq!(
            to_json(&outcomes),
            json!([
                {"row": "C9", "family": "v4", "result": "fail", "detail": "a b: fine; c: bad"},
                {"row": "C9", "family": "v6", "result": "pass", "detail": "a b: fine"},
            ])
        );
    }
}
