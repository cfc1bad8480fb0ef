//! Runs the suites of real sockets in virtual machines.
//!
//! A guest runs its suites one after the other and says where each begins and ends. Under emulation a guest keeps hardly
//! more than one processor busy, so the guests run at once where processors and memory allow. The invariant: every
//! suite of every guest has a row, also one that the guest never came to.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};

use super::outcome::{self, End, Failure, Outcome, Skip};
use super::summary::Row;
use super::targets::{Built, guest_path};
use super::{Selected, tell};
use crate::command::say;
use crate::layout::Layout;
use crate::setup::{self, KernelLine};
use crate::vm::{self, Ending, Guest, Image, MARK};

/// The suite that runs the real kube-proxy.
const KUBE_PROXY_SUITE: &str = "sock_kube_proxy";

/// A suite that takes longer in a guest hangs.
const SUITE_SECONDS: u64 = 1_200;

/// The longest time for one guest: its suites one after the other, under emulation.
const GUEST_TIME: Duration = Duration::from_mins(45);

/// What the emulator needs besides the guest's own memory, in MiB.
const EMULATOR_MIB: u64 = 768;

/// The row of a guest that cannot be had here.
pub(super) fn skipped(line: KernelLine, lacking: &[String]) -> Row {
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

/// Runs the suites on the kernels given.
pub(super) fn run(layout: &Layout, lines: &[KernelLine], built: &Built, selected: &[Selected<'_>]) -> Result<Vec<Row>> {
    let selected: Vec<_> = selected.iter().filter(|selected| selected.suite.in_guests).collect();
    if selected.is_empty() {
        for line in lines {
            say(&format!("xtask: no suite to run on kernel {line}"));
        }
        return Ok(Vec::new());
    }
    let mut image = Image::new(built.guest_programs());
    if selected.iter().any(|selected| selected.suite.name == KUBE_PROXY_SUITE)
        && let Some(control_plane) = setup::find_control_plane(layout)
    {
        image.add_kube_proxy(&control_plane)?;
    }
    for Selected { suite, filter } in &selected {
        let words = [guest_path(suite).display().to_string()];
        let words: Vec<_> = words.iter().map(String::as_str).chain(*filter).map(vm::quote).collect();
        image.run_suite(&suite.name, &words.join(" "), SUITE_SECONDS);
    }
    let guests: Vec<_> = lines
        .iter()
        .map(|line| Ok((*line, vm::prepare(layout, *line, &image)?)))
        .collect::<Result<_>>()?;
    let run = |(line, guest): &(KernelLine, Guest)| one(*line, guest, &selected);
    let rows: Vec<Result<Vec<Row>>> = if fit_at_once(&guests) {
        thread::scope(|scope| {
            let running: Vec<_> = guests.iter().map(|guest| scope.spawn(|| run(guest))).collect();
            running
                .into_iter()
                .map(|thread| {
                    thread
                        .join()
                        .unwrap_or_else(|_| Err(anyhow!("a guest's watcher panicked")))
                })
                .collect()
        })
    } else {
        guests.iter().map(run).collect()
    };
    Ok(rows
        .into_iter()
        .collect::<Result<Vec<_>>>()?
        .into_iter()
        .flatten()
        .collect())
}

/// Whether each guest would have a processor and its memory if all ran together.
fn fit_at_once(guests: &[(KernelLine, Guest)]) -> bool {
    let processors = thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let need: u64 = guests.iter().map(|(_, guest)| guest.memory_mib() + EMULATOR_MIB).sum();
    let memory = fs::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| available_mib(&text));
    processors >= guests.len() && memory.is_some_and(|available| available >= need)
}

/// `MemAvailable` of `/proc/meminfo`, in MiB.
fn available_mib(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib / 1024)
}

/// Boots one guest and reads its suites' outcomes from the console.
fn one(line: KernelLine, guest: &Guest, selected: &[&Selected<'_>]) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
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
                failures: vec![Failure::of_suite(format!("(guest {})", ending.said()))],
                ..Outcome::default()
            },
            time: start.elapsed(),
        });
    }
    Ok(rows)
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
    use super::{Mark, available_mib, mark};

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

    #[test]
    fn available_memory_is_read_in_mib() {
        let meminfo = "MemTotal:       24689480 kB\nMemFree:  100 kB\nMemAvailable:   22020096 kB\n";
        assert_eq!(available_mib(meminfo), Some(21_504));
        assert_eq!(available_mib("MemTotal: 1 kB\n"), None);
    }
}
