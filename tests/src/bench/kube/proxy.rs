//! A proxy under test: the agent, or kube-proxy in one of its modes, as a process in a namespace and a cgroup.
//!
//! What one reads of a process (CPU time, its children's included) lives here too. The invariant: a proxy ends with its value.

use std::{fmt, fs, path::Path, process::Command, time::Duration};

use anyhow::{Context, Result, bail};
use lb_user::lab::{Child, ChildCgroup, Netns, child, mounts::BpfFs};
use nix::{
    errno::Errno,
    sys::signal::{Signal, killpg},
    unistd::Pid,
};

pub(super) use crate::kube_proxy::process::Api;
use crate::{
    bench::memory,
    kube_proxy::{
        Mode,
        process::{self, AT_ONCE, Settings},
    },
};

/// Which proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// The agent in balance mode.
    Evenkeel,
    /// kube-proxy in a mode; its `minSyncPeriod` is its own default (one second), or as good as none.
    KubeProxy { mode: Mode, at_once: bool },
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Evenkeel => f.write_str("evenkeel"),
            Self::KubeProxy { mode, at_once } => {
                write!(f, "{}/{}", mode.name(), if *at_once { AT_ONCE } else { "1s" })
            }
        }
    }
}

/// Where a proxy lives.
#[derive(Clone, Copy, Debug)]
pub(super) struct Home<'a> {
    pub(super) netns: &'a Netns,
    pub(super) cgroup: &'a ChildCgroup,
    pub(super) bpf: &'a BpfFs,
    /// A folder of its own, for its log and socket.
    pub(super) folder: &'a Path,
    /// The name of its node.
    pub(super) node: &'a str,
}

/// A running proxy.
#[derive(Debug)]
pub(super) struct Proxy {
    process: Child,
    kind: Kind,
}

impl Proxy {
    /// Starts the process and returns at once. The kernel ends it when the calling thread ends.
    pub(super) fn start(kind: Kind, home: Home<'_>, api: Api<'_>) -> Result<Self> {
        let mut command = match kind {
            Kind::Evenkeel => agent(home, api)?,
            Kind::KubeProxy { mode, at_once } => process::command(Settings {
                mode,
                at_once,
                node: home.node,
                api,
                folder: home.folder,
            })?,
        };
        home.netns.place(&mut command);
        home.cgroup.place(&mut command)?;
        let process = Child::start(&mut command, &home.folder.join("log"))?;
        Ok(Self { process, kind })
    }

    pub(super) fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Fails if the process has ended.
    pub(super) fn check(&mut self) -> Result<()> {
        if let Some(status) = self.process.ended()? {
            let said = fs::read_to_string(self.process.log()).unwrap_or_default();
            let from = said.lines().count().saturating_sub(20);
            let last: Vec<&str> = said.lines().skip(from).collect();
            bail!("the proxy ended ({status}):\n{}", last.join("\n"));
        }
        Ok(())
    }

    /// Ends the process and empties the kernel of what it wrote: its namespace's rules, or all pins of the thread's BPF file system.
    pub(super) fn end(mut self, netns: &Netns, bpf: &BpfFs) -> Result<()> {
        // Its children too: an `iptables-restore` of kube-proxy's may have minutes of work before it.
        let group = Pid::from_raw(i32::try_from(self.pid())?);
        match killpg(group, Signal::SIGKILL) {
            Ok(()) | Err(Errno::ESRCH) => {}
            Err(error) => return Err(error).context("end the proxy and its children"),
        }
        self.process.kill()?;
        match self.kind {
            Kind::Evenkeel => {
                for entry in fs::read_dir(bpf.path())? {
                    let path = entry?.path();
                    // The kernel keeps files of its own there.
                    if !path.is_dir() {
                        continue;
                    }
                    fs::remove_dir_all(&path).with_context(|| format!("remove {}", path.display()))?;
                }
            }
            Kind::KubeProxy { mode, .. } => process::wipe(mode, netns)?,
        }
        Ok(())
    }
}

/// CPU time of a process so far, that of its ended children included.
pub(super) fn cpu(pid: u32) -> Result<Duration> {
    let path = format!("/proc/{pid}/stat");
    let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    cpu_of(&text).with_context(|| format!("{path} says {text:?}"))
}

fn agent(home: Home<'_>, api: Api<'_>) -> Result<Command> {
    let mut command = Command::new(memory::program()?);
    command.args(["agent", "--mode", "balance", "--uplink", "none"]);
    command.args(["--node-name", home.node, "--source", "kube"]);
    match api {
        Api::Url(url) => command.args(["--kube-url", url]),
        Api::Kubeconfig(path) => command.arg("--kubeconfig").arg(path),
    };
    command.arg("--cgroup").arg(home.cgroup.path());
    // An empty folder: no pins of an earlier start.
    let pins = tempfile::Builder::new()
        .prefix("start-")
        .tempdir_in(home.bpf.path())?
        .keep();
    command.arg("--bpffs").arg(pins);
    command.arg("--socket").arg(home.folder.join("agent.sock"));
    child::forget_configuration(&mut command);
    Ok(command)
}

/// User and system time of a process and of its children that have ended, from a line of `/proc/PID/stat`.
fn cpu_of(stat: &str) -> Option<Duration> {
    /// Of one second; fixed for user space on every architecture.
    const TICKS: u64 = 100;
    // The name may hold anything; what comes behind it starts with the state.
    let (_, rest) = stat.rsplit_once(')')?;
    let ticks = rest.split_whitespace().skip(11).take(4).map(str::parse::<u64>);
    let ticks = ticks.collect::<Result<Vec<_>, _>>().ok()?;
    (ticks.len() == 4).then(|| Duration::from_millis(ticks.iter().sum::<u64>() * 1000 / TICKS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_includes_ended_children() {
        let stat = "77 (a) b) S 1 77 77 0 -1 4194560 900 800 0 0 150 50 30 20 20 0 9 0 100 1 1";
        assert_eq!(cpu_of(stat), Some(Duration::from_millis(2_500)));
        assert_eq!(cpu_of("77 (a) S 1 77"), None);
        assert_eq!(cpu_of("nonsense"), None);
    }

    #[test]
    fn names_tell_the_period() {
        let kind = |at_once| Kind::KubeProxy {
            mode: Mode::Nftables,
            at_once,
        };
        assert_eq!(
            [kind(true).to_string(), kind(false).to_string()],
            ["nftables/1ms", "nftables/1s"]
        );
        assert_eq!(Kind::Evenkeel.to_string(), "evenkeel");
    }
}
