//! The founding story, told on this kernel: a third backend joins while a client with few source ports goes on.
//!
//! The same client, the same ports and the same servers meet three proxies: IPVS that trusts its kept entries
//! (`conn_reuse_mode=0`), IPVS that does not (`=1`), and the real agent. Then the agent looks on beside the first of
//! them. Lines that begin with `STORY` make the table; `cargo xtask test` repeats them in its summary.

mod agent;
mod facts;
mod ipvs;
mod observer;
mod stage;
mod table;

use std::{
    collections::BTreeMap,
    io::{self, Write},
    net::SocketAddr,
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use lb_user::{
    lab::{
        self, ChildCgroup,
        client::{Attempt, Client, Load},
        mounts::BpfFs,
    },
    view::ReuseView,
};
use libtest_mimic::{Arguments, Failed, Trial};

use self::{
    agent::{Agent, Mode},
    ipvs::Ipvs,
    stage::Stage,
    table::Row,
};

/// Connections of each phase: some twenty for each source port that the kernel hands out in turn.
const PHASE: u64 = 1_000;
/// Connections a second of every arm: some for each source port, and few enough that an agent without optimisation, in two emulated
/// guests on two processors, keeps up with them.
const RATE: f64 = 250.0;
/// The most that a starved backend may get: a port that no connection had before is no reuse.
const STARVED: u64 = PHASE / 100;
/// How long a phase may take under emulation.
const PATIENCE: Duration = Duration::from_mins(2);

fn main() -> Result<ExitCode> {
    let arguments = Arguments::from_args();
    let bpf = if arguments.list {
        None
    } else {
        Some(BpfFs::enter_private()?)
    };
    let trial = |name: &'static str, test: fn(&BpfFs) -> Result<()>| {
        let bpf = bpf.clone();
        Trial::test(name, move || run(name, bpf.as_ref(), test))
    };
    let trials = vec![
        trial("the_node_says_what_ipvs_has", facts::the_node_says_what_ipvs_has),
        trial(
            "ipvs_starves_the_third_backend_and_evenkeel_does_not",
            ipvs_starves_the_third_backend_and_evenkeel_does_not,
        ),
        trial(
            "the_observer_names_the_starved_endpoint_and_the_cause",
            observer::names_the_starved_endpoint_and_the_cause,
        ),
        trial("the_observer_names_a_weight_of_zero", observer::names_a_weight_of_zero),
        trial("observe_mode_rewrites_nothing", observer::rewrites_nothing),
        trial("observe_mode_leaves_ipvs_as_it_was", observer::leaves_ipvs_as_it_was),
    ];
    // A process is in one cgroup at a time, and the tests put themselves into theirs.
    let one_by_one = Arguments {
        test_threads: Some(1),
        ..arguments
    };
    Ok(libtest_mimic::run(&one_by_one, trials).exit_code())
}

/// Runs a test where this kernel can tell the story at all, and skips it otherwise.
fn run(name: &str, bpf: Option<&BpfFs>, test: fn(&BpfFs) -> Result<()>) -> Result<(), Failed> {
    let told = || -> Result<()> {
        if let Some(reason) = lb_tests::ipvs::missing()? {
            writeln!(io::stdout(), "SKIP {name}: {reason}")?;
            return Ok(());
        }
        test(bpf.context("the private BPF file system")?)
    };
    told().map_err(|error| Failed::from(format!("{error:#}")))
}

fn ipvs_starves_the_third_backend_and_evenkeel_does_not(bpf: &BpfFs) -> Result<()> {
    let kept = through_ipvs(0)?;
    let fresh = through_ipvs(1)?;
    let (ours, reuse) = through_evenkeel(bpf)?;
    let rows: Vec<_> = [&kept, &fresh].into_iter().flatten().chain(&ours).cloned().collect();
    table::print(&rows)?;
    print_shares(&reuse)?;

    // The starvation is the premise: without it the rest proves nothing.
    let [_, after] = &kept;
    ensure!(
        after.of_third() <= STARVED,
        "conn_reuse_mode=0 did not starve the third backend: {after:?}"
    );
    let [_, after] = &fresh;
    ensure!(
        (0.9..=1.1).contains(&after.third_of_fair()),
        "conn_reuse_mode=1 did not give the third backend its share: {after:?}"
    );
    let [_, after] = &ours;
    ensure!(
        (0.9..=1.1).contains(&after.third_of_fair()),
        "Evenkeel did not give the third backend its share: {after:?}"
    );
    for row in &rows {
        ensure!(row.failed == 0, "failed connections: {row:?}");
    }
    for part in &reuse {
        part.check()?;
    }
    Ok(())
}

/// Plays both phases through IPVS.
fn through_ipvs(reuse_mode: u8) -> Result<[Row; 2]> {
    let stage = Stage::new()?;
    let ipvs = Ipvs::new(&stage.node, stage::WEB, reuse_mode)?;
    for backend in stage::backends(2) {
        ipvs.add(backend)?;
    }
    let client = Client::start(&stage.node, &load())?;
    reach(&client, PHASE)?;
    ipvs.add(stage::backend(3))?;
    let added = Instant::now();
    reach(&client, client.made() + PHASE)?;
    Ok(table::rows(
        &format!("IPVS conn_reuse_mode={reuse_mode}"),
        &client.stop(),
        added,
    ))
}

/// How often reuse met the same backend while the number of backends was constant.
#[derive(Clone, Copy, Debug)]
struct SameShare {
    backends: u32,
    reuses: u64,
    same: u64,
    comparable: u64,
}

impl SameShare {
    /// What was counted between two answers.
    fn between(backends: u32, before: &ReuseView, after: &ReuseView) -> Self {
        let comparable = |view: &ReuseView| view.same_backend + view.moved;
        Self {
            backends,
            reuses: after.total - before.total,
            same: after.same_backend - before.same_backend,
            comparable: comparable(after) - comparable(before),
        }
    }

    fn share(self) -> f64 {
        self.same as f64 / self.comparable as f64
    }

    fn chance(self) -> f64 {
        1.0 / f64::from(self.backends)
    }

    /// Reuse was counted, and met the same backend no more often than chance has it.
    fn check(self) -> Result<()> {
        // Every port but the first time: of 200 at most.
        ensure!(self.reuses > PHASE / 2, "too little reuse was counted: {self:?}");
        let chance = self.chance();
        // Five standard deviations: one run in a million is told wrong.
        let most = chance + 5.0 * (chance * (1.0 - chance) / self.comparable as f64).sqrt();
        // Somewhat below chance is how Linux hands out ports: it walks through them for each backend by itself, so of two
        // visits to a port a little often one is another backend's.
        let least = chance / 2.0;
        ensure!(
            (least..=most).contains(&self.share()),
            "reuse met the same backend in {:.3} of {} cases where chance gives {chance:.3} (allowed {least:.3} to {most:.3})",
            self.share(),
            self.comparable
        );
        Ok(())
    }
}

fn print_shares(parts: &[SameShare]) -> Result<()> {
    let mut out = io::stdout().lock();
    for part in parts {
        writeln!(
            out,
            "STORY Evenkeel counted {} reuses of a source port with {} backends: {:.1} % of {} met the same backend again, chance \
             gives {:.1} %",
            part.reuses,
            part.backends,
            100.0 * part.share(),
            part.comparable,
            100.0 * part.chance()
        )?;
    }
    Ok(())
}

/// Plays both phases through the agent, and reads what it counted in each.
fn through_evenkeel(bpf: &BpfFs) -> Result<([Row; 2], [SameShare; 2])> {
    let stage = Stage::new()?;
    let group = ChildCgroup::new("story")?;
    group.join()?;
    let agent = Agent::start(Mode::Balance, &stage.node, &group, bpf, &stage::backends(2))?;
    let start = agent.reuse()?;

    let client = Client::start(&stage.node, &load())?;
    agent.wait_judged(PHASE)?;
    let before = agent.reuse()?;
    let written = agent.set_endpoints(&stage::backends(3))?;
    agent.wait_active(&stage::backends(3))?;
    let reported = Instant::now();
    let from = agent.reuse()?;
    reach(&client, client.made() + PHASE)?;
    let attempts = client.stop();
    agent.wait_counted(attempts.len() as u64)?;
    let end = agent.reuse()?;

    // A report comes a poll later than the truth: the first connection to the new backend counts as well.
    let third = stage::backend(3);
    let added = attempts
        .iter()
        .find(|a| a.started >= written && a.outcome == Ok(third))
        .map_or(reported, |a| a.started.min(reported));
    let rows = table::rows("Evenkeel", &attempts, added);
    let rows = table::with_reuse(rows, before.total - start.total, end.total - before.total);
    let reuse = [
        SameShare::between(2, &start, &before),
        SameShare::between(3, &from, &end),
    ];
    Ok((rows, reuse))
}

/// What the clients of all arms do.
fn load() -> Load {
    Load {
        rate: Some(RATE),
        ..Load::tcp(stage::WEB)
    }
}

/// Waits until a client has made so many attempts.
fn reach(client: &Client, attempts: u64) -> Result<()> {
    ensure!(
        lab::holds_within(PATIENCE, || client.made() >= attempts),
        "only {} of {attempts} attempts in {} s",
        client.made(),
        PATIENCE.as_secs()
    );
    Ok(())
}

fn per_backend(attempts: &[Attempt]) -> BTreeMap<SocketAddr, u64> {
    let mut counts = BTreeMap::new();
    for backend in attempts.iter().filter_map(|a| a.outcome.ok()) {
        *counts.entry(backend).or_default() += 1;
    }
    counts
}
