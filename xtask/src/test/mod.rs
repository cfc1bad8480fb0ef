//! Runs the tests here and in virtual machines.
//!
//! `targets` builds and lists the suites, `outcome` reads what one printed, `summary` adds up. The suites are started
//! from here and not by `cargo test`, so that a hung one is killed, the others still run, and each one's time and
//! output are known. The invariant: every suite of the workspace, and its documentation's examples, has a row.

pub(crate) mod outcome;
mod summary;
pub(crate) mod targets;

use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use self::outcome::{End, Outcome, Skip};
use self::summary::{ExpectedSkips, Row, summarise};
use self::targets::{Built, Suite, guest_path};
use crate::command::{cargo, output, say};
use crate::layout::Layout;
use crate::setup::{self, Group, KernelLine};
use crate::vm::{self, Ending, Image, MARK};

/// A suite that takes longer hangs.
const SUITE_SECONDS: u64 = 600;

/// The longest time for one guest: its suites one after the other, under emulation.
const GUEST_TIME: Duration = Duration::from_mins(25);

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
    let mut rows = Vec::new();
    for place in places {
        match place {
            Place::Here => here(layout, &built, &selected, options.filter.as_deref(), &mut rows)?,
            Place::Guest(line) if lacking.is_empty() => {
                guest(layout, line, &built, &selected, &mut rows)?;
            }
            Place::Guest(line) => rows.push(skipped_guest(line, &lacking)),
        }
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
        setup::attempt(layout, &[Group::Sockets]);
    }
    if !guests {
        return Vec::new();
    }
    if !cfg!(target_arch = "x86_64") {
        return vec!["a machine with the guests' architecture, x86_64".to_owned()];
    }
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

fn skipped_guest(line: KernelLine, lacking: &[String]) -> Row {
    Row {
        place: line.to_string(),
        suite: "guest".to_owned(),
        outcome: Outcome {
            skips: vec![Skip {
                test: "all".to_owned(),
                reason: format!("missing here: {}", lacking.join(", ")),
            }],
            ..Outcome::default()
        },
        time: Duration::ZERO,
    }
}

/// Runs the suites of real sockets in one guest.
fn guest(
    layout: &Layout,
    line: KernelLine,
    built: &Built,
    selected: &[Selected<'_>],
    rows: &mut Vec<Row>,
) -> Result<()> {
    let selected: Vec<_> = selected.iter().filter(|selected| selected.suite.in_guests).collect();
    if selected.is_empty() {
        say(&format!("xtask: no suite to run on kernel {line}"));
        return Ok(());
    }
    let mut image = Image::new(built.guest_programs());
    for Selected { suite, filter } in &selected {
        let words = [guest_path(suite).display().to_string()];
        let words: Vec<_> = words.iter().map(String::as_str).chain(*filter).map(vm::quote).collect();
        image.run_suite(&suite.name, &words.join(" "), SUITE_SECONDS);
    }
    let guest = vm::prepare(layout, line, &image)?;
    say(&format!("xtask: booting kernel {} …", guest.release()));
    let start = Instant::now();
    let console = guest.console();
    let (mut output, mut done, mut begun) = (String::new(), 0, start);
    let ending = guest.boot(GUEST_TIME, &mut |text| match mark(text) {
        Some(Mark::Begin(name)) => {
            output.clear();
            begun = Instant::now();
            say(&format!("xtask: {line} {name} …"));
        }
        Some(Mark::End { name, code }) => {
            let time = begun.elapsed();
            // Shells give a signal as 128 and its number. SIGKILL at the deadline is the guest's `timeout`.
            let end = match code {
                137 if time.as_secs() >= SUITE_SECONDS => End::TimedOut(SUITE_SECONDS),
                129.. => End::Signal,
                code => End::Status(code),
            };
            let row = Row {
                place: line.to_string(),
                suite: name.to_owned(),
                outcome: outcome::read(&output, end),
                time,
            };
            tell(&row, &output, &console);
            rows.push(row);
            output.clear();
            done += 1;
        }
        None => {
            output.push_str(text);
            output.push('\n');
        }
    })?;
    say(&format!(
        "xtask: kernel {line}: guest {} after {} s",
        ending.said(),
        start.elapsed().as_secs()
    ));
    if done < selected.len() || !matches!(ending, Ending::Exit(_)) {
        println!(
            "---- kernel {line}: the end of the console (all in {}) ----\n{output}",
            console.display()
        );
        let unfinished = selected
            .get(done)
            .map_or("guest", |selected| selected.suite.name.as_str());
        rows.push(Row {
            place: line.to_string(),
            suite: unfinished.to_owned(),
            outcome: Outcome {
                failures: vec![format!("(guest {})", ending.said())],
                ..Outcome::default()
            },
            time: start.elapsed(),
        });
    }
    Ok(())
}

/// What the guest's script says between suites.
#[derive(Debug, PartialEq, Eq)]
enum Mark<'a> {
    Begin(&'a str),
    End { name: &'a str, code: i32 },
}

fn mark(line: &str) -> Option<Mark<'_>> {
    let words: Vec<_> = line.strip_prefix(MARK)?.split_whitespace().collect();
    match words.as_slice() {
        ["begin", name] => Some(Mark::Begin(name)),
        ["end", name, code] => Some(Mark::End {
            name,
            code: code.parse().ok()?,
        }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::{Mark, mark};

    #[test]
    fn marks_are_told_from_output() {
        assert_eq!(mark("EVENKEEL-VM: begin sock_x"), Some(Mark::Begin("sock_x")));
        assert_eq!(
            mark("EVENKEEL-VM: end sock_x 101"),
            Some(Mark::End {
                name: "sock_x",
                code: 101
            })
        );
        assert_eq!(mark("test a ... ok"), None);
        assert_eq!(mark("EVENKEEL-VM: exit 0"), None);
    }
}
