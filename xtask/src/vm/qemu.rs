//! Boots a guest in QEMU, without acceleration, and follows its console.
//!
//! The invariant: the emulator is dead when [`Guest::boot`] returns, also by an error or after the deadline.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::MARK;
use crate::layout::find_program;
use crate::setup::GuestKernel;

/// A guest that can be booted.
#[derive(Debug)]
pub(crate) struct Guest {
    kernel: GuestKernel,
    folder: PathBuf,
    memory_mib: u64,
}

/// How a guest ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    /// The last command's exit status.
    Exit(i32),
    /// It went down without saying a status: a kernel panic, most likely.
    Died,
    /// It was killed after so long.
    TimedOut(Duration),
}

impl Ending {
    /// The words after "guest".
    pub(crate) fn said(self) -> String {
        match self {
            Self::Exit(code) => format!("ended with exit status {code}"),
            Self::Died => "went down without an exit status (a kernel panic?)".to_owned(),
            Self::TimedOut(after) => format!("was killed after {} s", after.as_secs()),
        }
    }
}

/// Kills the emulator on every way out.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended by itself, which is what both calls then report.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Guest {
    /// Writes the archive to the guest's folder.
    pub(crate) fn new(kernel: GuestKernel, folder: PathBuf, archive: &[u8]) -> Result<Self> {
        fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
        let file = folder.join("initramfs.cpio");
        fs::write(&file, archive).with_context(|| format!("write {}", file.display()))?;
        // While it is unpacked, the archive is in memory twice.
        let archive_mib = archive.len() as u64 / (1 << 20);
        Ok(Self {
            kernel,
            folder,
            memory_mib: (1024 + 3 * archive_mib).max(2048),
        })
    }

    /// The file with everything that the guest said.
    pub(crate) fn console(&self) -> PathBuf {
        self.folder.join("console.log")
    }

    /// The memory that it is given, in MiB.
    pub(crate) fn memory_mib(&self) -> u64 {
        self.memory_mib
    }

    /// The kernel's release.
    pub(crate) fn release(&self) -> &str {
        &self.kernel.release
    }

    /// Boots, gives each console line to `on_line`, and waits for the end or kills the guest at the deadline.
    pub(crate) fn boot(&self, timeout: Duration, on_line: &mut dyn FnMut(&str)) -> Result<Ending> {
        let console = self.console();
        let mut log = File::create(&console).with_context(|| format!("create {}", console.display()))?;
        let mut child = self
            .qemu(&self.folder.join("initramfs.cpio"))
            .spawn()
            .context("cannot start `qemu-system-x86_64`")?;
        let output = child.stdout.take().context("QEMU has no standard output")?;
        let _running = Running(child);
        let lines = lines_of(output);
        let deadline = Instant::now() + timeout;
        let mut status = None;
        loop {
            match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    writeln!(log, "{line}").with_context(|| format!("write {}", console.display()))?;
                    if let Some(code) = exit_status(&line) {
                        status = Some(code);
                    }
                    on_line(&line);
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Ok(status.map_or(Ending::Died, Ending::Exit));
                }
                Err(RecvTimeoutError::Timeout) => return Ok(Ending::TimedOut(timeout)),
            }
        }
    }

    fn qemu(&self, initramfs: &Path) -> Command {
        let mut qemu = match find_program("setpriv") {
            // Where xtask itself is killed, the guest goes with it.
            Some(setpriv) => {
                let mut qemu = Command::new(setpriv);
                qemu.args(["--pdeathsig", "KILL", "qemu-system-x86_64"]);
                qemu
            }
            None => Command::new("qemu-system-x86_64"),
        };
        // Emulation only: it works on every machine, nested or not, and takes no device of the host.
        qemu.args(["-accel", "tcg", "-cpu", "max", "-smp", "2", "-m"])
            .arg(self.memory_mib.to_string())
            .args(["-nic", "none", "-no-reboot", "-nodefaults", "-display", "none"])
            .args(["-serial", "stdio", "-kernel"])
            .arg(&self.kernel.image)
            .arg("-initrd")
            .arg(initramfs)
            .args(["-append", "console=ttyS0 quiet loglevel=3 panic=-1 oops=panic"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit());
        qemu
    }
}

/// Reads console lines in a thread of its own, so that a silent guest can be waited for with a deadline.
fn lines_of(output: impl std::io::Read + Send + 'static) -> mpsc::Receiver<String> {
    let (send, lines) = mpsc::channel();
    thread::spawn(move || {
        let mut output = BufReader::new(output);
        let mut line = Vec::new();
        while output.read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
            let text: String = String::from_utf8_lossy(&line)
                .chars()
                .filter(|c| *c == '\t' || !c.is_control())
                .collect();
            if send.send(text).is_err() {
                break;
            }
            line.clear();
        }
    });
    lines
}

fn exit_status(line: &str) -> Option<i32> {
    line.strip_prefix(MARK)?
        .trim()
        .strip_prefix("exit ")?
        .trim()
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::exit_status;

    #[test]
    fn only_the_mark_gives_a_status() {
        assert_eq!(exit_status("EVENKEEL-VM: exit 3"), Some(3));
        assert_eq!(exit_status("EVENKEEL-VM: end sock_x 0 4"), None);
        assert_eq!(exit_status("echo EVENKEEL-VM: exit 3"), None);
    }
}
