//! `cargo xtask story`: the founding story in a virtual machine, with Evenkeel looking on.
//!
//! The story itself is a test of `founding_story`; here it is run alone, and what it says is written to files. The invariant:
//! the task succeeds only if the test does.

use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::command::say;
use crate::layout::Layout;
use crate::setup::{self, Group, KernelLine};
use crate::test::targets;
use crate::vm::{self, Ending, Image, MARK};

/// The test that tells the story.
const TEST: &str = "the_observer_names_the_starved_endpoint_and_the_cause";
/// The suite that it is in.
const SUITE: &str = "founding_story";

/// Arguments of `cargo xtask story`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// The kernel: 6.1 or 6.12.
    #[arg(long, value_parser = crate::kernel_line)]
    kernel: KernelLine,
    /// Write the outcome of both modes there: [{"mode", "new_endpoint_share", "verdict": {...}}, ...].
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the starving run over time there, for `evenkeel report --from FILE --html PAGE`.
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Kill the guest after so many seconds.
    #[arg(long, default_value_t = 900, value_name = "SECONDS")]
    timeout: u64,
}

/// What the guest's console said.
#[derive(Debug, Default)]
struct Told {
    runs: Vec<Value>,
    text: Vec<String>,
    report: Option<String>,
}

impl Told {
    fn take(&mut self, line: &str) -> Result<()> {
        // The runner's own words may stand before it on the line.
        let after = |mark: &str| line.split_once(mark).map(|(_, rest)| rest.trim_end());
        if let Some(json) = after("STORY-JSON ") {
            self.runs.push(serde_json::from_str(json).context("the story's JSON")?);
        } else if let Some(text) = after("STORY-TEXT 0") {
            self.text.push(text.strip_prefix(' ').unwrap_or(text).to_owned());
        } else if let Some(report) = after("STORY-REPORT 0 ") {
            self.report = Some(report.to_owned());
        }
        Ok(())
    }
}

/// Runs the story.
pub(crate) fn command(layout: &Layout, options: &Options) -> Result<ExitCode> {
    setup::require(layout, &[Group::Build, Group::Vm])?;
    let built = targets::build(layout)?;
    let suite = built
        .suites
        .iter()
        .find(|suite| suite.name == SUITE)
        .context("the suite founding_story")?;
    let mut image = Image::new(built.guest_programs());
    image.run(&format!(
        "EVENKEEL_STORY=1 {} {TEST}",
        targets::guest_path(suite).display()
    ));
    let guest = vm::prepare(layout, options.kernel, &image)?;
    say(&format!(
        "xtask: telling the story on kernel {}; it takes some minutes",
        options.kernel
    ));
    let mut told = Told::default();
    let mut broken = None;
    let ending = guest.boot(Duration::from_secs(options.timeout), &mut |line| {
        if line.starts_with(MARK) {
            return;
        }
        if let Err(error) = told.take(line) {
            broken.get_or_insert(error);
        }
    })?;
    if let Some(error) = broken {
        return Err(error);
    }
    let Ending::Exit(0) = ending else {
        bail!(
            "the story failed: guest {}; its console is in {}",
            ending.said(),
            guest.console().display()
        );
    };
    if told.runs.len() != 2 {
        bail!(
            "the story told {} of 2 runs; its console is in {}",
            told.runs.len(),
            guest.console().display()
        );
    }
    let mut out = io::stdout().lock();
    writeln!(out, "$ evenkeel diagnose default/web")?;
    for line in &told.text {
        writeln!(out, "{line}")?;
    }
    let runs = serde_json::to_string_pretty(&told.runs)? + "\n";
    writeln!(out, "{runs}")?;
    if let Some(path) = &options.json {
        fs::write(path, &runs).with_context(|| path.display().to_string())?;
    }
    if let Some(path) = &options.report {
        let report = told.report.context("the story's report")?;
        fs::write(path, report + "\n").with_context(|| path.display().to_string())?;
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::Told;

    #[test]
    fn the_marked_lines_are_taken_and_no_others() {
        let mut told = Told::default();
        for line in [
            "test a ... STORY-JSON {\"mode\":0}",
            "STORY-JSON {\"mode\":1}",
            "STORY-TEXT 0 shop/web: starved",
            "STORY-TEXT 0",
            "STORY-TEXT 1 shop/web: even",
            "STORY-REPORT 0 {}",
            "STORY IPVS 515/485/0",
            "other",
        ] {
            told.take(line).expect("good");
        }
        assert_eq!(told.runs.len(), 2);
        assert_eq!(told.text, ["shop/web: starved", ""]);
        assert_eq!(told.report.as_deref(), Some("{}"));
        assert!(told.take("STORY-JSON {").is_err());
    }
}
