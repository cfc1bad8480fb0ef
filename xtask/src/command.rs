//! Running other programs: what is shown, and what is said when one fails.
//!
//! The invariant: a failure is one sentence that names the command, how it ended and where to read more.

use std::env;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};

/// How often a long step says that it is still alive.
const HEARTBEAT: Duration = Duration::from_secs(15);

/// Writes one progress line to standard error, so that standard output stays for results.
pub(crate) fn say(line: &str) {
    // A closed standard error is no reason to stop a build.
    let _ = writeln!(io::stderr().lock(), "{line}");
}

/// Runs `work`, announcing it first, then every [`HEARTBEAT`], and naming the time if it took over two seconds.
pub(crate) fn step<T>(what: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    say(&format!("xtask: {what} …"));
    let start = Instant::now();
    let (done, wait) = mpsc::channel::<()>();
    let ticker = {
        let what = what.to_owned();
        thread::spawn(move || {
            while wait.recv_timeout(HEARTBEAT) == Err(mpsc::RecvTimeoutError::Timeout) {
                say(&format!("xtask: {what} … {} s so far", start.elapsed().as_secs()));
            }
        })
    };
    let result = work();
    drop(done);
    // The ticker only prints; there is nothing to learn from how it ended.
    let _ = ticker.join();
    if result.is_ok() && start.elapsed() > Duration::from_secs(2) {
        say(&format!("xtask: {what}: done in {} s", start.elapsed().as_secs()));
    }
    result
}

/// A call of the workspace's own cargo.
///
/// Plain `cargo` from `PATH`, so that rustup's `+toolchain` works; rustup passes the toolchain on by environment.
pub(crate) fn cargo(root: &Path) -> Command {
    let mut command = Command::new("cargo");
    command.current_dir(root);
    // What `cargo run` set for xtask itself must not reach another crate's build.
    for (key, _) in env::vars_os() {
        if key
            .to_str()
            .is_some_and(|key| key.starts_with("CARGO_PKG_") || key.starts_with("CARGO_MANIFEST_"))
        {
            command.env_remove(key);
        }
    }
    command
}

/// Runs a command whose own output the user sees.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = status(command)?;
    if status.success() {
        return Ok(());
    }
    bail!("`{}` {}; its own output above says why", shown(command), ended(status))
}

/// Runs a command whose own output the user sees, and gives how it ended.
pub(crate) fn status(command: &mut Command) -> Result<ExitStatus> {
    command.status().with_context(|| cannot_start(command))
}

/// Runs a command and gives its standard output as text.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| cannot_start(command))?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        let last = stderr
            .lines()
            .rev()
            .find(|line| !line.trim().is_empty())
            .unwrap_or("it printed nothing; run it by hand to see more");
        bail!("`{}` {}: {last}", shown(command), ended(output.status));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Whether a command runs and succeeds, quietly.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// Runs a command with its output in a log file, trying it `tries` times (networks fail now and then).
pub(crate) fn logged(tries: u32, log: &Path, command: &mut Command) -> Result<()> {
    if let Some(dir) = log.parent() {
        fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
    }
    let mut last = anyhow!("`{}` was not tried", shown(command));
    for attempt in 1..=tries {
        let file = File::create(log).with_context(|| format!("create {}", log.display()))?;
        let status = command
            .stdin(Stdio::null())
            .stdout(file.try_clone().context("share the log file")?)
            .stderr(file)
            .status()
            .with_context(|| cannot_start(command))?;
        if status.success() {
            return Ok(());
        }
        let text = fs::read_to_string(log).unwrap_or_default();
        let tail = text.lines().rev().find(|line| !line.trim().is_empty());
        last = anyhow!(
            "`{}` {}, last saying \"{}\"; the whole log is {}",
            shown(command),
            ended(status),
            tail.unwrap_or("").trim(),
            log.display()
        );
        if attempt < tries {
            say(&format!("xtask: {last:#}; trying again"));
            thread::sleep(Duration::from_secs(u64::from(attempt) * 3));
        }
    }
    Err(last)
}

/// A command as one would type it.
pub(crate) fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

fn ended(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("ended with exit status {code}"),
        (None, Some(signal)) => format!("was killed by signal {signal}"),
        (None, None) => "ended without a status".to_owned(),
    }
}

fn cannot_start(command: &Command) -> String {
    format!("cannot start `{}`", shown(command))
}
