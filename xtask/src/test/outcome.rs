//! Reads what a test executable printed.
//!
//! Both harnesses in use, libtest and libtest-mimic, end with a `test result:` line and list failures by name. A test
//! that cannot run here passes and says `SKIP NAME: REASON` on a line of its own; it is counted as skipped. Lines that
//! begin with `STORY ` are what a suite has to tell a reader; they are kept for the summary. The invariant: an
//! executable that did not say its result, or ended badly in spite of it, has at least one failure.

/// Marks a line for the summary.
const STORY: &str = "STORY ";
/// How much of what a failed test said goes into the summary.
const SAID_LINES: usize = 12;

/// What came out of one suite at one place.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) passed: u32,
    pub(crate) failures: Vec<Failure>,
    pub(crate) skips: Vec<Skip>,
    /// What the suite tells a reader, line by line.
    pub(crate) story: Vec<String>,
}

/// A test that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    /// Its name, or a sentence in brackets if the suite itself failed.
    pub(crate) test: String,
    /// The first lines of what it said.
    pub(crate) said: Vec<String>,
}

impl Failure {
    /// A failure of a whole suite.
    pub(crate) fn of_suite(sentence: String) -> Self {
        Self {
            test: sentence,
            said: Vec::new(),
        }
    }
}

/// A test that did not run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Skip {
    pub(crate) test: String,
    pub(crate) reason: String,
}

/// How a suite's process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// With this exit status.
    Status(i32),
    /// By a signal.
    Signal,
    /// Killed after so many seconds.
    TimedOut(u64),
}

/// Reads an outcome from a suite's output and its end.
pub(crate) fn read(output: &str, end: End) -> Outcome {
    let mut outcome = Outcome::default();
    let mut result = false;
    for line in output.lines() {
        if let Some(skip) = skip(line) {
            if !outcome.skips.contains(&skip) {
                outcome.skips.push(skip);
            }
        } else if let Some(told) = line.strip_prefix(STORY) {
            outcome.story.push(told.trim_end().to_owned());
        } else if let Some(counts) = line.trim().strip_prefix("test result: ") {
            result = true;
            outcome.passed += count(counts, " passed");
            let ignored = count(counts, " ignored");
            if ignored > 0 {
                outcome.skips.extend((0..ignored).map(|_| Skip {
                    test: "an ignored test".to_owned(),
                    reason: "marked #[ignore]".to_owned(),
                }));
                // Not taken from the passed ones below.
                outcome.passed += ignored;
            }
            let failed = count(counts, " failed") as usize;
            let names = failed_names(output);
            outcome.failures = (0..failed)
                .map(|index| match names.get(index) {
                    Some(name) => Failure {
                        said: said(output, name),
                        test: name.clone(),
                    },
                    None => Failure::of_suite("a test without a name".to_owned()),
                })
                .collect();
        }
    }
    // A test that began to skip and then failed is a failure.
    outcome
        .skips
        .retain(|skip| outcome.failures.iter().all(|failure| failure.test != skip.test));
    outcome.passed = outcome.passed.saturating_sub(outcome.skips.len() as u32);
    let bad_end = match end {
        End::TimedOut(seconds) => Some(format!("(killed after {seconds} s)")),
        End::Signal => Some("(killed by a signal)".to_owned()),
        End::Status(code) if !result => Some(format!("(ended with status {code} and no test result)")),
        End::Status(code) if code != 0 && outcome.failures.is_empty() => Some(format!("(ended with status {code})")),
        End::Status(_) => None,
    };
    outcome.failures.extend(bad_end.map(Failure::of_suite));
    outcome
}

/// `SKIP NAME: REASON`, also behind libtest's `test NAME ... `, which it writes before a lone test's output.
fn skip(line: &str) -> Option<Skip> {
    let line = line.trim();
    let rest = line.strip_prefix("SKIP ").or_else(|| {
        line.strip_prefix("test ")?
            .split_once(" ... SKIP ")
            .map(|(_, rest)| rest)
    })?;
    let (test, reason) = rest.split_once(": ")?;
    Some(Skip {
        test: test.trim().to_owned(),
        reason: reason.trim().to_owned(),
    })
}

/// The number before a word, as in `3 passed; 1 failed;`.
fn count(counts: &str, word: &str) -> u32 {
    counts
        .split(';')
        .find_map(|part| part.trim_end().strip_suffix(word))
        .and_then(|part| part.rsplit(' ').next())
        .and_then(|number| number.parse().ok())
        .unwrap_or(0)
}

/// The indented names below the last `failures:`; the one before it, with the captured output, is no list.
fn failed_names(output: &str) -> Vec<String> {
    let Some((_, list)) = output.rsplit_once("\nfailures:") else {
        return Vec::new();
    };
    list.lines()
        .skip(1)
        .take_while(|line| line.starts_with("    "))
        .map(|line| line.trim().to_owned())
        .collect()
}

/// The first lines below a failed test's heading, `---- NAME ----` or `---- NAME stdout ----`; a backtrace is none of them.
fn said(output: &str, name: &str) -> Vec<String> {
    let heading = |line: &str| {
        let name = line.strip_prefix("---- ")?.strip_suffix(" ----")?;
        Some(name.strip_suffix(" stdout").unwrap_or(name).to_owned())
    };
    output
        .lines()
        .skip_while(|line| heading(line).as_deref() != Some(name))
        .skip(1)
        .take_while(|line| heading(line).is_none() && *line != "failures:" && *line != "Stack backtrace:")
        .filter(|line| !line.trim().is_empty())
        .take(SAID_LINES)
        .map(|line| line.trim_end().to_owned())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{End, Outcome, Skip, read};

    fn skipped(test: &str, reason: &str) -> Skip {
        Skip {
            test: test.to_owned(),
            reason: reason.to_owned(),
        }
    }

    fn named(outcome: &Outcome) -> Vec<&str> {
        outcome.failures.iter().map(|failure| &*failure.test).collect()
    }

    #[test]
    fn skips_are_taken_from_the_passed() {
        let output = "running 3 tests\nSKIP tcx: needs 6.6\ntest tcx ... ok\ntest a ... SKIP a: no root\nok\ntest b ... ok\n\n\
                      test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s\n";
        assert_eq!(
            read(output, End::Status(0)),
            Outcome {
                passed: 1,
                failures: vec![],
                skips: vec![skipped("tcx", "needs 6.6"), skipped("a", "no root")],
                story: vec![],
            }
        );
    }

    #[test]
    fn what_a_suite_tells_is_kept_line_by_line() {
        let output = "test a ... \nSTORY PROXY  SHARES\nother\nSTORY IPVS   515/485/0\nok\n\
                      test result: ok. 1 passed; 0 failed; 0 ignored\n";
        let outcome = read(output, End::Status(0));
        assert_eq!(outcome.story, ["PROXY  SHARES", "IPVS   515/485/0"]);
        assert_eq!(outcome.passed, 1);
    }

    #[test]
    fn failures_are_named() {
        let output = "SKIP a: for a start\ntest a ... FAILED\ntest b ... ok\n\nfailures:\n\n---- a stdout ----\nboom\n\nfailures:\n    a\n\n\
                      test result: FAILED. 1 passed; 1 failed; 2 ignored; 0 measured; 0 filtered out\n";
        let outcome = read(output, End::Status(101));
        assert_eq!(outcome.passed, 1);
        assert_eq!(named(&outcome), ["a"]);
        assert_eq!(outcome.failures[0].said, ["boom"]);
        assert_eq!(outcome.skips.len(), 2);
    }

    #[test]
    fn each_failure_keeps_the_first_lines_of_what_it_said() {
        let long = "a line\n".repeat(40);
        let output = format!(
            "failures:\n\n---- a::v4 ----\none\n\nCaused by:\n    two\n\nStack backtrace:\n   0: main\n\n---- a ----\n{long}\nfailures:\n    a::v4\n    a\n\n\
             test result: FAILED. 0 passed; 2 failed; 0 ignored\n"
        );
        let outcome = read(&output, End::Status(101));
        assert_eq!(named(&outcome), ["a::v4", "a"]);
        assert_eq!(outcome.failures[0].said, ["one", "Caused by:", "    two"]);
        assert_eq!(outcome.failures[1].said.len(), 12);
    }

    #[test]
    fn an_end_without_a_result_is_a_failure() {
        assert_eq!(read("running 3 tests\n", End::Status(0)).failures.len(), 1);
        assert_eq!(read("", End::Signal).failures.len(), 1);
        let good = "test result: ok. 3 passed; 0 failed; 0 ignored\n";
        assert_eq!(read(good, End::Status(0)).failures.len(), 0);
        assert_eq!(read(good, End::Status(1)).failures.len(), 1);
        assert_eq!(named(&read(good, End::TimedOut(9))), ["(killed after 9 s)"]);
    }

    #[test]
    fn several_results_add_up() {
        let two = "test result: ok. 3 passed; 0 failed; 0 ignored\ntest result: ok. 2 passed; 0 failed; 0 ignored\n";
        assert_eq!(read(two, End::Status(0)).passed, 5);
    }
}
