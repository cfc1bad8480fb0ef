//! Runs the tests here and in virtual machines.
//!
//! `targets` builds and lists the suites, `guests` runs them in virtual machines, `outcome` reads what one printed,
//! `summary` adds up. The suites are started from here and not by `cargo test`, so that a hung one is killed, the others
//! still run, and each one's time and output are known. The invariant: every suite of the workspace, and its
//! documentation's examples, has a row.

mod guests;
pub(crate) mod outcome;
mod summary;
pub(crate) mod targets;

use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use self::outcome::{End, Failure, Outcome};
use self::summary::{ExpectedSkips, Row, summarise};
use self::targets::{Built, Suite};
use crate::command::{cargo, output, say};
use crate::layout::Layout;
use crate::setup::{self, Group, KernelLine};

/// A suite that takes longer hangs.
const SUITE_SECONDS: u64 = 600;
/// The suite that has to find a defect in an agent that was built with it.
const CONTROL_PLANE_SUITE: &str = "kube_lab";

/// Arguments of `cargo xtask test`.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct Options {
    /// Leave the virtual machines out.
    #[arg(long, conflicts_with = "kernel")]
    no_vm: bool,
    /// Test on this kernel only: 6.1, 6.12 or host; may be given several times.
    #[arg(long, value_parser = place)]
    kernel: Vec<Place>,
    /// Run only what has this in its name.
    filter: Option<String>,
}

/// Where tests run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Here,
    Guest(KernelLine),
}

fn place(text: &str) -> Result<Place, String> {
    if text == "host" {
        return Ok(Place::Here);
    }
    crate::kernel_line(text)
        .map(Place::Guest)
        .map_err(|sentence| format!("{sentence}, or host for this machine's own"))
}

impl Options {
    fn places(&self) -> Vec<Place> {
        if self.no_vm {
            vec![Place::Here]
        } else if self.kernel.is_empty() {
            let guests = KernelLine::ALL.iter().copied().map(Place::Guest);
            [Place::Here].into_iter().chain(guests).collect()
        } else {
            self.kernel.clone()
        }
    }
}

/// `cargo xtask test`.
pub(crate) fn command(layout: &Layout, options: &Options) -> Result<ExitCode> {
    let expected = ExpectedSkips::load(layout)?;
    let strict = std::env::var("CI").is_ok_and(|value| value == "true");
    let places = options.places();
    setup::require(layout, &[Group::Build])?;
    let lacking = lacking(layout, &places);
    let built = targets::build(layout)?;
    let selected = select(&built, options.filter.as_deref());
    if options.filter.is_none()
        && let Some(empty) = empty_target(&built, &selected)
    {
        bail!("the test target {empty} has no test: does tests/Cargo.toml lack its `harness = false`?");
    }
    let mut rows = Vec::new();
    let mut lines = Vec::new();
    for place in places {
        match place {
            Place::Here => here(layout, &built, &selected, options.filter.as_deref(), &mut rows)?,
            Place::Guest(line) => lines.push(line),
        }
    }
    if lacking.is_empty() {
        rows.extend(guests::run(layout, &lines, &built, &selected)?);
    } else {
        rows.extend(lines.into_iter().map(|line| guests::skipped(line, &lacking)));
    }
    let summary = summarise(&rows, &expected, strict);
    println!("{}", summary.text);
    let good = summary.failed == 0 && !(strict && summary.unexpected_skips > 0);
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What is missing for virtual machines, after trying to get it; tests here skip for themselves what they cannot do.
fn lacking(layout: &Layout, places: &[Place]) -> Vec<String> {
    let guests = places.iter().any(|place| matches!(place, Place::Guest(_)));
    if places.contains(&Place::Here) {
        setup::attempt(layout, &[Group::Sockets, Group::Prometheus, Group::ControlPlane]);
    }
    if !guests {
        return Vec::new();
    }
    if !cfg!(target_arch = "x86_64") {
        return vec!["a machine with the guests' architecture, x86_64".to_owned()];
    }
    // One suite of theirs runs kube-proxy, and skips where that is not there.
    setup::attempt(layout, &[Group::ControlPlane, Group::KubeProxy]);
    setup::attempt(layout, &[Group::Vm])
}

/// A suite and the arguments with which it runs.
struct Selected<'a> {
    suite: &'a Suite,
    filter: Option<&'a str>,
}

/// The suites that the filter names run whole, of the others those tests that it names.
fn select<'a>(built: &'a Built, filter: Option<&'a str>) -> Vec<Selected<'a>> {
    let mut selected = Vec::new();
    for suite in &built.suites {
        let filter = filter.filter(|filter| !suite.name.contains(filter));
        let list = output(
            Command::new(&suite.executable)
                .args(filter)
                .arg("--list")
                .current_dir(&suite.folder),
        );
        // A suite whose list cannot be had runs, and shows what is wrong with it.
        if list.is_ok_and(|list| !list.lines().any(|line| line.ends_with(": test"))) {
            continue;
        }
        selected.push(Selected { suite, filter });
    }
    selected
}

/// A test target of its own that lists no test: whoever wrote it meant some. (Unit tests of a library or binary may be none.)
fn empty_target<'a>(built: &'a Built, selected: &[Selected<'_>]) -> Option<&'a str> {
    let targets = built.suites.iter().map(|suite| suite.name.as_str());
    targets
        .filter(|name| !name.contains(' '))
        .find(|name| selected.iter().all(|selected| selected.suite.name != *name))
}

fn here(
    layout: &Layout,
    built: &Built,
    selected: &[Selected<'_>],
    filter: Option<&str>,
    rows: &mut Vec<Row>,
) -> Result<()> {
    let logs = layout.root.join("target/test-logs");
    fs::create_dir_all(&logs).with_context(|| format!("create {}", logs.display()))?;
    for Selected { suite, filter } in selected {
        let mut command = Command::new(&suite.executable);
        command
            .args(*filter)
            .current_dir(&suite.folder)
            .env("CARGO_MANIFEST_DIR", &suite.folder)
            .env("EVENKEEL_BIN", &built.agent);
        if let Some(folder) = setup::find_prometheus(layout) {
            command.env("EVENKEEL_PROMETHEUS", folder);
        }
        if let Some(folder) = setup::find_control_plane(layout) {
            command.env("EVENKEEL_CONTROL_PLANE", folder);
            if suite.name == CONTROL_PLANE_SUITE {
                match targets::build_defect(layout) {
                    Ok(agent) => {
                        command.env("EVENKEEL_DEFECT_BIN", agent);
                    }
                    Err(error) => rows.push(Row {
                        place: "here".to_owned(),
                        suite: suite.name.clone(),
                        outcome: Outcome {
                            failures: vec![Failure::of_suite(format!("(no agent with a defect: {error:#})"))],
                            ..Outcome::default()
                        },
                        time: Duration::ZERO,
                    }),
                }
            }
        }
        rows.push(run_here(&suite.name, command, &logs)?);
    }
    let mut examples = cargo(&layout.root);
    examples
        .args(["test", "--locked", "--workspace", "--doc", "--"])
        .args(filter);
    let row = run_here("documentation examples", examples, &logs)?;
    if row.outcome != Outcome::default() {
        rows.push(row);
    }
    Ok(())
}

fn run_here(name: &str, mut command: Command, logs: &Path) -> Result<Row> {
    say(&format!("xtask: {name} …"));
    let log = logs.join(format!("{}.log", name.replace([' ', '(', ')', '/'], "_")));
    let file = File::create(&log).with_context(|| format!("create {}", log.display()))?;
    let start = Instant::now();
    let child = command
        .stdin(Stdio::null())
        .stdout(file.try_clone().context("share the log file")?)
        .stderr(file)
        .spawn()
        .with_context(|| format!("cannot start the suite {name}"))?;
    let end = wait(child, Duration::from_secs(SUITE_SECONDS))?;
    let text = fs::read(&log).with_context(|| format!("read {}", log.display()))?;
    let text = String::from_utf8_lossy(&text);
    let row = Row {
        place: "here".to_owned(),
        suite: name.to_owned(),
        outcome: outcome::read(&text, end),
        time: start.elapsed(),
    };
    tell(&row, &text, &log);
    Ok(row)
}

/// Waits for a child, and kills it at the deadline.
fn wait(mut child: Child, timeout: Duration) -> Result<End> {
    let deadline = Instant::now() + timeout;
    loop {
        if let Some(status) = child.try_wait().context("wait for a suite")? {
            return Ok(status.code().map_or_else(
                || {
                    debug_assert!(status.signal().is_some(), "no code means a signal");
                    End::Signal
                },
                End::Status,
            ));
        }
        if Instant::now() > deadline {
            child.kill().context("kill a suite")?;
            child.wait().context("wait for a killed suite")?;
            return Ok(End::TimedOut(timeout.as_secs()));
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// One line for a good suite; all that it printed for a bad one.
fn tell(row: &Row, text: &str, log: &Path) {
    let Outcome {
        passed,
        failures,
        skips,
        ..
    } = &row.outcome;
    if !failures.is_empty() {
        println!(
            "---- {} {}: all it printed (also in {}) ----\n{text}",
            row.place,
            row.suite,
            log.display()
        );
    }
    say(&format!(
        "xtask: {} {}: {passed} passed, {} failed, {} skipped in {:.1} s",
        row.place,
        row.suite,
        failures.len(),
        skips.len(),
        row.time.as_secs_f64()
    ));
}
