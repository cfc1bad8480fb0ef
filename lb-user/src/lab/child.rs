//! Child processes whose output goes to a file and who never outlive their starter.

use std::{
    env,
    fs::File,
    io,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
};

use nix::{
    sys::{
        prctl,
        signal::{Signal, kill},
    },
    unistd::Pid,
};

use super::{Doing, Result};

/// Has a command of this program do what its flags say, whatever the caller's own agent is configured to be.
pub fn forget_configuration(command: &mut Command) {
    for (name, _) in env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("EVENKEEL_")) {
        command.env_remove(name);
    }
}

/// A running program; dropping it kills and reaps it.
#[derive(Debug)]
pub struct Child {
    process: std::process::Child,
    log: PathBuf,
}

impl Child {
    /// Starts a command, its standard output and error in the file `log` (appended to, so that a restart keeps both lives).
    ///
    /// The kernel kills the child when the *thread* that called this ends, whatever ended it: start children from a
    /// thread that lives as long as they should.
    pub fn start(command: &mut Command, log: &Path) -> Result<Self> {
        let program = command.get_program().display().to_string();
        let out = File::options()
            .append(true)
            .create(true)
            .open(log)
            .doing(|| format!("open {}", log.display()))?;
        let err = out.try_clone().doing(|| format!("open {} twice", log.display()))?;
        // In a process group of its own, so that Ctrl-C at the terminal reaches its starter alone, who decides.
        command.stdin(Stdio::null()).stdout(out).stderr(err).process_group(0);
        // SAFETY: between fork and exec the closure makes one system call and allocates nothing.
        unsafe { command.pre_exec(|| Ok(prctl::set_pdeathsig(Signal::SIGKILL)?)) };
        let process = command.spawn().doing(|| format!("start {program}"))?;
        Ok(Self {
            process,
            log: log.to_owned(),
        })
    }

    /// The child's process id.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// The file with its output.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        let pid = self.pid();
        self.process.try_wait().doing(|| format!("look at process {pid}"))
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let pid = self.pid();
        let raw = Pid::from_raw(
            i32::try_from(pid)
                .map_err(io::Error::other)
                .doing(|| format!("name process {pid}"))?,
        );
        kill(raw, signal).doing(|| format!("send {signal} to process {pid}"))
    }

    /// Kills it without warning (SIGKILL) and waits until it is gone.
    pub fn kill(&mut self) -> Result<()> {
        let pid = self.pid();
        // A child that has ended already is no error: `Child::kill` of the standard library says so too.
        self.process.kill().doing(|| format!("kill process {pid}"))?;
        self.process.wait().doing(|| format!("wait for process {pid}"))?;
        Ok(())
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if let Err(error) = self.kill() {
            tracing::warn!(%error, "a child process could not be ended");
        }
    }
}
