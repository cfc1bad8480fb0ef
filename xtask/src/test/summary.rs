//! Adds up what came out, tells it, and says whether it is good enough.
//!
//! The invariant: the last line printed is `N passed, N failed, N skipped`, alone.

use std::fmt::Write as _;
use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::outcome::Outcome;
use crate::layout::Layout;

/// One row of the table.
#[derive(Debug)]
pub(crate) struct Row {
    /// `here`, or a guest's kernel.
    pub(crate) place: String,
    pub(crate) suite: String,
    pub(crate) outcome: Outcome,
    pub(crate) time: Duration,
}

/// Skips that are known and accepted.
#[derive(Debug, Default)]
pub(crate) struct ExpectedSkips(Vec<(String, Option<String>)>);

impl ExpectedSkips {
    /// Reads `tests/expected-skips.txt`; without the file no skip is expected.
    pub(crate) fn load(layout: &Layout) -> Result<Self> {
        let file = layout.root.join("tests/expected-skips.txt");
        if !file.exists() {
            return Ok(Self::default());
        }
        let text = fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
        Self::parse(&text).with_context(|| format!("read {}", file.display()))
    }

    fn parse(text: &str) -> Result<Self> {
        let mut skips = Vec::new();
        for (index, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default();
            let words: Vec<_> = line.split_whitespace().collect();
            match words.as_slice() {
                [] => {}
                [test] => skips.push(((*test).to_owned(), None)),
                [test, "on", place] => skips.push(((*test).to_owned(), Some((*place).to_owned()))),
                _ => bail!("line {}: `TEST` or `TEST on PLACE` is wanted", index + 1),
            }
        }
        Ok(Self(skips))
    }

    fn has(&self, place: &str, suite: &str, test: &str) -> bool {
        let long = format!("{suite}::{test}");
        self.0
            .iter()
            .any(|(name, on)| (name == test || *name == long) && on.as_deref().is_none_or(|on| on == place))
    }
}

/// The whole picture.
#[derive(Debug)]
pub(crate) struct Summary {
    pub(crate) text: String,
    pub(crate) failed: usize,
    pub(crate) unexpected_skips: usize,
}

/// Makes the summary of all rows. With `strict`, it says that unexpected skips fail the run.
pub(crate) fn summarise(rows: &[Row], expected: &ExpectedSkips, strict: bool) -> Summary {
    let mut text = String::new();
    for row in rows.iter().filter(|row| !row.outcome.story.is_empty()) {
        let _ = writeln!(text, "\n{} on {}:", row.suite, place_in_words(&row.place));
        for line in &row.outcome.story {
            let _ = writeln!(text, "  {line}");
        }
    }
    let width = rows.iter().map(|row| row.suite.len()).max().unwrap_or(0).max(5);
    let _ = writeln!(text, "\nplace  {:width$}  passed  failed  skipped  seconds", "suite");
    for row in rows {
        let _ = writeln!(
            text,
            "{:5}  {:width$}  {:6}  {:6}  {:7}  {:7.1}",
            row.place,
            row.suite,
            row.outcome.passed,
            row.outcome.failures.len(),
            row.outcome.skips.len(),
            row.time.as_secs_f64()
        );
    }
    let (mut passed, mut failed, mut skipped, mut unexpected) = (0, 0, 0, 0);
    for row in rows {
        passed += row.outcome.passed;
        failed += row.outcome.failures.len();
        for skip in &row.outcome.skips {
            let known = expected.has(&row.place, &row.suite, &skip.test);
            skipped += 1;
            unexpected += usize::from(!known);
            let _ = writeln!(
                text,
                "skipped{}: {} {}::{}: {}",
                if known { "" } else { " unexpectedly" },
                row.place,
                row.suite,
                skip.test,
                skip.reason
            );
        }
    }
    for row in rows {
        for failure in &row.outcome.failures {
            let _ = writeln!(text, "failed: {} {}::{}", row.place, row.suite, failure.test);
            for line in &failure.said {
                let _ = writeln!(text, "    {line}");
            }
        }
    }
    if strict && unexpected > 0 {
        let _ = writeln!(
            text,
            "unexpected skips: {unexpected}, not named in tests/expected-skips.txt; with CI=true that fails the run"
        );
    }
    let _ = write!(text, "\n{passed} passed, {failed} failed, {skipped} skipped");
    Summary {
        text,
        failed,
        unexpected_skips: unexpected,
    }
}

fn place_in_words(place: &str) -> String {
    if place == "here" {
        "this machine".to_owned()
    } else {
        format!("kernel {place}")
    }
}

#[cfg(test)]
mod tests {
    use super::{ExpectedSkips, Row, summarise};
    use crate::test::outcome::{Failure, Outcome, Skip};
    use std::time::Duration;

    fn row(place: &str, skips: &[&str]) -> Row {
        Row {
            place: place.to_owned(),
            suite: "sock_x".to_owned(),
            outcome: Outcome {
                passed: 2,
                failures: vec![],
                skips: skips
                    .iter()
                    .map(|test| Skip {
                        test: (*test).to_owned(),
                        reason: "why".to_owned(),
                    })
                    .collect(),
                story: vec![],
            },
            time: Duration::from_secs(1),
        }
    }

    #[test]
    fn the_last_line_is_plain() {
        let summary = summarise(&[row("here", &["a"]), row("6.1", &[])], &ExpectedSkips::default(), true);
        assert_eq!(summary.text.lines().last(), Some("4 passed, 0 failed, 1 skipped"));
        assert_eq!(summary.unexpected_skips, 1);
    }

    #[test]
    fn a_failure_says_why() {
        let mut bad = row("6.1", &[]);
        bad.outcome.failures = vec![Failure {
            test: "t::v4".to_owned(),
            said: vec!["3 and not 4".to_owned()],
        }];
        let summary = summarise(&[bad], &ExpectedSkips::default(), true);
        assert_eq!(summary.failed, 1);
        assert!(
            summary.text.contains("failed: 6.1 sock_x::t::v4\n    3 and not 4\n"),
            "{}",
            summary.text
        );
    }

    #[test]
    fn what_suites_tell_comes_first_and_with_its_kernel() {
        let mut told = row("6.1", &[]);
        told.outcome.story = vec!["IPVS 515/485/0".to_owned()];
        let summary = summarise(&[row("here", &[]), told], &ExpectedSkips::default(), false);
        assert!(
            summary
                .text
                .starts_with("\nsock_x on kernel 6.1:\n  IPVS 515/485/0\n\nplace"),
            "{}",
            summary.text
        );
    }

    #[test]
    fn skips_are_expected_by_name_and_place() {
        let expected = ExpectedSkips::parse("# known\nsock_x::a on 6.1 # no TCX\nb\n").expect("good lines");
        assert_eq!(
            summarise(&[row("6.1", &["a", "b"])], &expected, false).unexpected_skips,
            0
        );
        assert_eq!(
            summarise(&[row("here", &["a", "b"])], &expected, false).unexpected_skips,
            1
        );
        assert!(ExpectedSkips::parse("a on\n").is_err());
    }
}
