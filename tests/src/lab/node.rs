//! A node of the lab: its namespace, its cgroup, its pins and its agent.
//!
//! The agent is a process of its own that sees its node's namespace alone, as on a machine of its own. The invariant:
//! dropping the node kills the agent and takes its pins and its cgroup with it.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{self, Command},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
};

use anyhow::{Context, Result};
use lb_user::lab::{ChildCgroup, Netns, child};

use crate::{
    agent::{Agent, METRICS, binary},
    runner::in_guest,
};

const BPFFS: &str = "/sys/fs/bpf";
/// Nodes so far: two may have one number, and no two have one folder of pins.
static NEXT: AtomicU32 = AtomicU32::new(0);

/// How large the agents' tables are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Frontends, and sockets of each kind.
    pub frontends: u32,
    /// Backends.
    pub backends: u32,
    /// Flows of packets.
    pub flows: u32,
}

impl Sizes {
    /// As small as the lab: three agents share a guest's memory.
    pub const SMALL: Self = Self {
        frontends: 4_096,
        backends: 4_096,
        flows: 16_384,
    };
}

/// One node.
#[derive(Debug)]
pub struct LabNode {
    // Dropped in this order: the agent, then the cgroup.
    agent: Mutex<Option<Agent>>,
    /// Its number, from 1.
    pub number: u8,
    /// Its network namespace.
    pub netns: Netns,
    cgroup: ChildCgroup,
    folder: PathBuf,
    pin_name: String,
    /// Further flags of its agent: where its Services come from, for one.
    flags: Vec<String>,
    sizes: Sizes,
    /// The program that its agent is, where it is not the build's own.
    program: Mutex<Option<PathBuf>>,
    /// How far its flow clock is ahead, in seconds.
    pub(super) ahead: AtomicU64,
}

impl LabNode {
    /// Makes the place; no agent runs yet.
    ///
    /// # Errors
    /// Where the cgroup or a folder cannot be made.
    pub fn new(number: u8, netns: Netns, folder: &Path, flags: &[String], sizes: Sizes) -> Result<Self> {
        let own = folder.join(format!("node{number}"));
        fs::create_dir_all(&own).with_context(|| format!("make {}", own.display()))?;
        Ok(Self {
            agent: Mutex::default(),
            number,
            netns,
            cgroup: ChildCgroup::new(&format!("lab.node{number}"))?,
            folder: own,
            pin_name: format!(
                "lab{}-{}-node{number}",
                process::id(),
                NEXT.fetch_add(1, Ordering::Relaxed)
            ),
            flags: flags.to_vec(),
            sizes,
            program: Mutex::default(),
            ahead: AtomicU64::new(0),
        })
    }

    /// The name by which EndpointSlices know the node.
    pub fn name(&self) -> String {
        name(self.number)
    }

    /// The node's cgroup, in which its pods are.
    pub fn cgroup(&self) -> &ChildCgroup {
        &self.cgroup
    }

    /// The control socket's path.
    pub fn socket(&self) -> PathBuf {
        self.folder.join("agent.sock")
    }

    /// The folder of the agent's pins.
    pub fn pins(&self) -> PathBuf {
        Path::new(BPFFS).join(&self.pin_name)
    }

    /// What the agents of this node have said so far.
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.join("agent.log")).unwrap_or_default()
    }

    /// Runs a closure while this process is in the node's cgroup: sockets made meanwhile are those of its pods.
    ///
    /// # Errors
    /// Where the process cannot move.
    pub fn inside<T>(&self, work: impl FnOnce() -> T) -> Result<T> {
        struct Home<'c>(&'c ChildCgroup);
        impl Drop for Home<'_> {
            fn drop(&mut self) {
                if let Err(error) = self.0.leave() {
                    super::complain("this process could not leave a node's cgroup", &error);
                }
            }
        }
        self.cgroup.join()?;
        let _home = Home(&self.cgroup);
        Ok(work())
    }

    /// A command of the program under test in this node's namespace, asking this node's agent.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let program = self.program.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut command = Command::new(program.unwrap_or_else(binary));
        command.args(arguments);
        child::forget_configuration(&mut command);
        command.env("EVENKEEL_SOCKET", self.socket());
        self.netns.place(&mut command);
        command
    }

    /// From the next start on, has the agent be another program, or the build's own again.
    pub fn set_program(&self, program: Option<PathBuf>) {
        *self.program.lock().unwrap_or_else(PoisonError::into_inner) = program;
    }

    /// Starts the agent, ready or not; one that runs already is left alone.
    ///
    /// # Errors
    /// Where it cannot be started.
    pub fn launch(&self) -> Result<()> {
        self.launch_with(&[])
    }

    /// As [`Self::launch`], with further flags for this one agent.
    ///
    /// # Errors
    /// Where it cannot be started.
    pub fn launch_with(&self, flags: &[&str]) -> Result<()> {
        let mut agent = self.lock();
        if agent.is_some() {
            return Ok(());
        }
        let mut command = self.command(&["agent"]);
        command
            .args(["--cgroup", &self.cgroup.path().display().to_string()])
            .args(["--bpffs", BPFFS, "--pin-name", &self.pin_name])
            .args(["--node-name", &self.name()])
            .args(["--metrics-address", &METRICS.to_string()])
            .args(["--max-frontends", &self.sizes.frontends.to_string()])
            .args(["--max-backends", &self.sizes.backends.to_string()])
            .args(["--max-sockets", &self.sizes.frontends.to_string()])
            .args(["--max-flows", &self.sizes.flows.to_string()])
            .args(&self.flags)
            .args(flags);
        self.cgroup.place(&mut command)?;
        *agent = Some(Agent::start(
            &mut command,
            &self.folder.join("agent.log"),
            self.socket(),
            &self.netns,
        )?);
        Ok(())
    }

    /// Waits until the agent is ready.
    ///
    /// # Errors
    /// Where none runs, or it ends or does not become ready.
    pub fn wait_ready(&self) -> Result<()> {
        let mut agent = self.lock();
        let agent = agent.as_mut().context("no agent runs")?;
        // Three agents load their programs at once, and a guest verifies them at a fiftieth of the speed.
        let mut turns = if in_guest() { 5 } else { 1 };
        loop {
            turns -= 1;
            match agent.wait_ready() {
                Err(_) if turns > 0 && agent.is_running() => {}
                waited => return waited.with_context(|| format!("the agent of node {}", self.number)),
            }
        }
    }

    /// Starts the agent and waits until it is ready.
    ///
    /// # Errors
    /// Where it does not become ready.
    pub fn start(&self) -> Result<()> {
        self.launch()?;
        self.wait_ready()
    }

    /// Stops the agent by SIGTERM, if one runs; what it pinned stays.
    ///
    /// # Errors
    /// Where it does not end well.
    pub fn stop(&self) -> Result<()> {
        let agent = self.lock().take();
        agent.map_or(Ok(()), Agent::stop)
    }

    /// Kills the agent without warning, if one runs; what it pinned stays.
    ///
    /// # Errors
    /// The kernel's.
    pub fn kill(&self) -> Result<()> {
        let agent = self.lock().take();
        agent.map_or(Ok(()), Agent::kill)
    }

    /// Kills the agent, if one runs, and takes everything it left in the kernel: the node is as if it never ran.
    ///
    /// # Errors
    /// The kernel's.
    pub fn wipe(&self) -> Result<()> {
        self.kill()?;
        match fs::remove_dir_all(self.pins()) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("remove {}", self.pins().display()))
            }
            _ => Ok(()),
        }
    }

    /// Stops the agent and starts it with further flags.
    ///
    /// # Errors
    /// Where it does not end well or does not become ready.
    pub fn restart_with(&self, flags: &[&str]) -> Result<()> {
        self.stop()?;
        self.launch_with(flags)?;
        self.wait_ready()
    }

    /// Whether an agent was started and not stopped.
    pub fn runs(&self) -> bool {
        self.lock().is_some()
    }

    /// Asks the agent.
    ///
    /// # Errors
    /// Where none runs, or what it answers.
    pub fn ask<T>(&self, question: impl FnOnce(&Agent) -> Result<T>) -> Result<T> {
        let agent = self.lock();
        let asked = question(agent.as_ref().context("no agent runs")?);
        asked.with_context(|| format!("ask the agent of node {}", self.number))
    }

    fn lock(&self) -> MutexGuard<'_, Option<Agent>> {
        self.agent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for LabNode {
    fn drop(&mut self) {
        if let Err(error) = self.wipe() {
            super::complain("a node of the lab left something behind", &error);
        }
    }
}

/// The name by which EndpointSlices know node number `n`.
pub fn name(number: u8) -> String {
    format!("node-{number}")
}

/// What the agents of nodes have said, node by node: the last lines of each.
pub fn logs<'n>(nodes: impl IntoIterator<Item = &'n LabNode>, lines: usize) -> String {
    let mut all = String::new();
    for node in nodes {
        let log = node.log();
        let from = log.lines().count().saturating_sub(lines);
        all.extend(["--- ", &node.name(), ":\n"]);
        for line in log.lines().skip(from) {
            all.push_str(line);
            all.push('\n');
        }
    }
    all
}
