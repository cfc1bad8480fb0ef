//! The demo: the real agent under real connections on this machine, in places that vanish with it.
//!
//! A client with few source ports connects to a Service while its endpoints and the agent itself come and go; the same
//! client meets a reference afterwards. Here live the plot, the judgement and the pictures; the means are `lab`'s.
//!
//! The invariant: whatever ends the demo (success, failure, panic, Ctrl-C), nothing stays on the machine; a demo that was
//! killed leaves a cgroup and a folder, which the next one removes.

mod act;
mod agent;
mod outcome;
mod panel;
mod picture;
mod plot;
mod progress;
mod reference;
mod stage;
mod svg;

pub use outcome::{Act, Outcome, Reference, Reuse, ReuseBucket, Window};

use std::{
    fs,
    io::{self, IsTerminal, Write},
    panic,
    path::{Path, PathBuf},
    process::ExitCode,
    thread,
    time::Instant,
};

use anyhow::{Context, Result, bail};
use nix::unistd::geteuid;

use self::{agent::Agent, plot::Plot, progress::Progress, reference::Rules, stage::Stage};
use crate::{
    interrupt::Interrupts,
    lab::{ChildCgroup, mounts::BpfFs},
};

/// Fewest connections of the steady act.
const LEAST_CONNECTIONS: u64 = 300;

/// What the demo is asked for.
#[derive(Clone, Debug)]
pub struct Options {
    /// Write the outcome as JSON into this file.
    pub json: Option<PathBuf>,
    /// Write the picture as SVG into this file.
    pub svg: Option<PathBuf>,
    /// Write what the agent saw over time as a page into this file.
    pub report: Option<PathBuf>,
    /// Keep everything running after the last act until Ctrl-C, and leave the folder with manifests and logs.
    pub keep: bool,
    /// Connections of the steady act; at least 300.
    pub connections: u64,
    /// The program that is started as the agent and asked as its client; this program itself if `None`.
    pub program: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            json: None,
            svg: None,
            report: None,
            keep: false,
            connections: 6_000,
            program: None,
        }
    }
}

/// Runs the demo and shows its picture; the exit code is 1 if a promise was broken, 130 after Ctrl-C.
///
/// # Errors
/// Where this machine lacks what the demo needs, or the agent does not start: one sentence says what.
pub fn run(options: &Options) -> Result<ExitCode> {
    if options.connections < LEAST_CONNECTIONS {
        bail!(
            "--connections {} is too few: below {LEAST_CONNECTIONS} (a hundred a backend) shares say nothing",
            options.connections
        );
    }
    check_machine()?;
    let interrupts = Interrupts::catch()?;
    let played = on_own_thread(|| play(options, &interrupts));
    match played {
        // What failed after a signal failed because of it: half of the demo may have heard it too.
        Err(_) if interrupts.check().is_err() => {
            writeln!(io::stderr(), "Interrupted; everything was removed.")?;
            Ok(ExitCode::from(130))
        }
        other => other,
    }
}

/// Plays the acts that the reference takes part in against the reference alone.
///
/// # Errors
/// As [`run`].
pub fn run_reference(connections: u64) -> Result<Vec<Act>> {
    check_machine()?;
    let interrupts = Interrupts::catch()?;
    on_own_thread(|| play_reference(connections, &interrupts, &mut Progress::silent()))
}

/// Refuses, in one sentence, a machine that cannot show anything.
fn check_machine() -> Result<()> {
    if !geteuid().is_root() {
        bail!("the demo needs root (it makes network namespaces and a cgroup of its own): run it with sudo");
    }
    crate::lab::cgroup::hierarchy()?;
    Ok(())
}

/// Runs on a fresh thread, so that the mount namespace that it enters is not the caller's.
fn on_own_thread<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| scope.spawn(work).join()).unwrap_or_else(|panicked| panic::resume_unwind(panicked))
}

fn play(options: &Options, interrupts: &Interrupts) -> Result<ExitCode> {
    let began = Instant::now();
    let mut progress = Progress::new();
    let mut folder = stage::Folder::new()?;
    let bpf = BpfFs::enter_private().context("the demo's private BPF file system")?;
    // Dropped last: by then the agent is gone and this process alone is in it.
    let group = ChildCgroup::new("demo")?;
    group.join()?;

    let mut stage = Stage::new()?;
    progress.say("starting the agent");
    let program = match &options.program {
        Some(program) => program.clone(),
        None => std::env::current_exe().context("find this program's own file")?,
    };
    let mut agent = Agent::start(&program, &folder, &bpf, &group, &stage, interrupts)?;
    let acts = Plot {
        stage: &mut stage,
        interrupts,
        progress: &mut progress,
        connections: options.connections,
    }
    .play_agent(&mut agent)?;
    let reuse = agent.reuse_total();
    let report = options
        .report
        .as_ref()
        .map(|path| Ok::<_, anyhow::Error>((path, agent.report()?)));
    let report = report.transpose()?;

    // The reference's client must not pass through the programs that are attached to the agent's cgroup.
    let apart = ChildCgroup::new("reference")?;
    apart.join()?;
    let before = agent.web_connects()?;
    let played = play_reference(options.connections, interrupts, &mut progress);
    group.join()?;
    if agent.web_connects()? != before {
        bail!("connections of the reference passed through Evenkeel: the comparison would be worth nothing");
    }
    let reference = match played {
        Ok(acts) => Reference::played(acts),
        Err(error) if interrupts.check().is_err() => return Err(error),
        // Without nft, or in a kernel without its expressions, the demo still shows what it is about.
        Err(error) => Reference::missing(format!("{error:#}")),
    };
    drop(progress);

    let outcome = Outcome {
        kernel: kernel_release()?,
        seconds: began.elapsed().as_secs_f64(),
        source_ports: stage::SOURCE_PORTS,
        acts,
        reuse,
        reference,
    };
    let broken = outcome.broken_promises();
    if let Some(path) = &options.json {
        let text = serde_json::to_string_pretty(&outcome).context("write the outcome as JSON")?;
        write_file(path, &(text + "\n"))?;
    }
    if let Some(path) = &options.svg {
        write_file(path, &svg::draw(&outcome))?;
    }
    if let Some((path, report)) = report {
        write_file(path, &crate::report::page(&report))?;
    }
    let stdout = io::stdout();
    let colour = stdout.is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    stdout
        .lock()
        .write_all(picture::draw(&outcome, &broken, colour).as_bytes())
        .context("print the picture")?;
    if options.keep {
        folder.keep()?;
        linger(&folder, &agent, &stage, interrupts)?;
    }
    Ok(if broken.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn play_reference(connections: u64, interrupts: &Interrupts, progress: &mut Progress) -> Result<Vec<Act>> {
    // Fresh namespaces: no connection, port or rule of the first arm is in them.
    let mut stage = Stage::new()?;
    let mut rules = Rules::new(&stage.client)?;
    Plot {
        stage: &mut stage,
        interrupts,
        progress,
        connections,
    }
    .play_reference(&mut rules)
}

/// Keeps all of it alive, a slow client included, until Ctrl-C.
fn linger(folder: &stage::Folder, agent: &Agent, stage: &Stage, interrupts: &Interrupts) -> Result<()> {
    let client = stage.trickle()?;
    let mut out = io::stdout().lock();
    writeln!(out, "\nKept running, with 50 connections a second, until Ctrl-C:")?;
    for command in agent.commands() {
        writeln!(out, "  {command}")?;
    }
    writeln!(
        out,
        "Change the manifests in {} and watch.\nThe agent's log is {}.",
        folder.manifests().display(),
        folder.log().display()
    )?;
    drop(out);
    interrupts.wait();
    drop(client);
    writeln!(io::stdout(), "\nStopped. {} is left for you.", folder.path().display())?;
    Ok(())
}

fn write_file(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("write {}", path.display()))
}

fn kernel_release() -> Result<String> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").context("read the kernel's release")?;
    Ok(release.trim().to_owned())
}
