//! Schedules of changes and faults, drawn from a seed: an API server ([`crate::apiserver`]) whose objects change while it
//! goes wrong, and a node that follows it with the whole pipeline on maps in memory.
//!
//! What each schedule proves: while the server is away nothing is written; a frontend never goes that its Service did not
//! let go; and within a time after all is well the maps mean what they mean after a cold start from the server's objects
//! (the module `meaning` says what is left out: ids, places and publications), with nothing left to repair. What it cannot
//! prove is what the fakes cannot: a real server's timing, TLS, the kernel's maps.
//!
//! Invariant: a seed draws its steps alone. How they interleave with the network is not fixed, so a schedule that diverged
//! may need a few runs to do so again.

mod meaning;
mod node;
mod step;

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    sync::Arc,
    time::{Duration, Instant},
};

use lb_common::frontend::FrontendKey;
use lb_user::source::kube::{Defects, Options, Timing};
use tokio::{sync::Semaphore, task::JoinSet, time::sleep};

use self::{
    meaning::Meaning,
    node::{Node, cold_start, wanted_frontends},
    step::Step,
};
use crate::apiserver::{ApiServer, Fault, Resource};

/// How schedules are run.
#[derive(Clone, Debug)]
pub struct Manner {
    /// The source's time limits and waits.
    pub timing: Timing,
    /// What is wrong with the source on purpose.
    pub defects: Defects,
    /// How long the end may take, after all is well, before it counts as a divergence.
    pub never: Duration,
    /// How many schedules run at once.
    pub at_once: usize,
}

impl Default for Manner {
    /// Quick: a schedule meets many waits in little time.
    fn default() -> Self {
        Self {
            timing: Timing {
                connect: Duration::from_secs(2),
                answer: Duration::from_millis(800),
                silence: Duration::from_secs(5),
                watch: Duration::from_mins(1),
                first_wait: Duration::from_millis(5),
                unreachable_wait: Duration::from_millis(20),
                patient_wait: Duration::from_millis(20),
                patience: Duration::from_mins(1),
                overload_patience: Duration::from_mins(1),
                most_wait: Duration::from_millis(40),
                steady: Duration::from_millis(100),
                page: 3,
            },
            defects: Defects::default(),
            never: Duration::from_secs(20),
            at_once: 12,
        }
    }
}

/// How a schedule failed.
#[derive(Clone, Debug)]
pub struct Divergence {
    /// Its seed; `EVENKEEL_SEED` runs it again.
    pub seed: u64,
    /// Its steps, one a line, and what was found.
    pub text: String,
    /// Frontends and backends in the kernel that should have gone.
    pub lost_removals: usize,
}

/// What came of many schedules.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// How many ran.
    pub schedules: usize,
    /// How often a server came back, or all its faults were over, and the node was seen to follow.
    pub recoveries: usize,
    /// The longest that this took.
    pub worst: Duration,
    /// The seed of that.
    pub worst_seed: u64,
    /// What those that took long waited for, [`SLOW`] after all was well.
    pub slow: Vec<String>,
    /// Those that failed.
    pub divergences: Vec<Divergence>,
}

/// From when on a recovery counts as slow, and what it waits for is noted.
const SLOW: Duration = Duration::from_secs(1);

impl Summary {
    /// In one line.
    pub fn line(&self) -> String {
        format!(
            "{} schedules, {} recoveries, {} divergences, {} lost removals, worst convergence {} ms (seed {})",
            self.schedules,
            self.recoveries,
            self.divergences.len(),
            self.divergences
                .iter()
                .map(|divergence| divergence.lost_removals)
                .sum::<usize>(),
            self.worst.as_millis(),
            self.worst_seed
        )
    }
}

/// The seeds to run: `EVENKEEL_SEED` alone where it is set, as many as `EVENKEEL_SCHEDULES` says where that is.
///
/// # Panics
/// One of them is no number.
pub fn seeds(count: u64) -> Vec<u64> {
    let number = |name| {
        std::env::var(name)
            .ok()
            .map(|text| text.parse::<u64>().expect("a number"))
    };
    match number("EVENKEEL_SEED") {
        Some(seed) => vec![seed],
        None => (0..number("EVENKEEL_SCHEDULES").unwrap_or(count)).collect(),
    }
}

/// Runs the schedules of these seeds.
///
/// # Panics
/// A schedule panics: a fault of the harness.
pub async fn run(seeds: Vec<u64>, manner: Manner) -> Summary {
    if let [seed] = seeds[..] {
        println!("{}", written(seed, None));
    }
    let places = Arc::new(Semaphore::new(manner.at_once));
    let manner = Arc::new(manner);
    let mut running = JoinSet::new();
    for seed in seeds {
        let (places, manner) = (places.clone(), manner.clone());
        running.spawn(async move {
            let _place = places.acquire_owned().await.expect("it is never closed");
            Schedule::begin(seed, manner).await.run().await
        });
    }
    let mut summary = Summary::default();
    while let Some(done) = running.join_next().await {
        let done = done.expect("a schedule does not panic");
        summary.schedules += 1;
        match done {
            Ok(Recoveries { seed, took, slow }) => {
                summary.recoveries += took.len();
                summary.slow.extend(slow);
                for took in took {
                    if took > summary.worst {
                        (summary.worst, summary.worst_seed) = (took, seed);
                    }
                }
            }
            Err(divergence) => summary.divergences.push(divergence),
        }
    }
    summary
}

/// Outages of one fault each, side by side: objects go, come and change while the server is away for so long. Tells how long
/// each node took to follow again, or what was wrong.
///
/// # Panics
/// An outage panics: a fault of the harness.
pub async fn outages(faults: Vec<Fault>, timing: Timing, lasts: Duration) -> Vec<(Fault, Result<Duration, String>)> {
    let manner = Arc::new(Manner {
        timing,
        ..Manner::default()
    });
    let mut running = JoinSet::new();
    for (seed, fault) in (0..).zip(faults) {
        let manner = manner.clone();
        running.spawn(async move {
            let mut schedule = Schedule::begin(seed, manner).await;
            let outcome = schedule.outage(fault, lasts).await;
            schedule.node.end().await;
            (fault, outcome.map_err(|(text, _)| text))
        });
    }
    let mut measured = Vec::new();
    while let Some(done) = running.join_next().await {
        measured.push(done.expect("an outage does not panic"));
    }
    measured
}

/// A schedule under way.
struct Schedule {
    seed: u64,
    manner: Arc<Manner>,
    server: ApiServer,
    node: Node,
    fault: Option<Fault>,
    forbidden: BTreeSet<Resource>,
    /// What the kernel means while nothing can be learned from the server.
    away: Option<Meaning>,
    /// Frontends that may be in the kernel no more: those that no cold start had at some time.
    let_go: BTreeSet<FrontendKey>,
    /// All frontends that a cold start ever had.
    wanted: BTreeSet<FrontendKey>,
    recoveries: Recoveries,
}

/// How long a schedule's recoveries took.
#[derive(Debug, Default)]
struct Recoveries {
    seed: u64,
    took: Vec<Duration>,
    slow: Vec<String>,
}

/// A seed's steps, one a line, with a mark at one of them.
fn written(seed: u64, mark: Option<usize>) -> String {
    let mut text = format!("seed {seed}\n");
    for (number, step) in step::steps(seed).iter().enumerate() {
        let mark = if mark == Some(number) { " <- here" } else { "" };
        let _ = writeln!(text, "  {:2}. {step}{mark}", number + 1);
    }
    text
}

/// What was found wrong: a text, and what should have gone.
type Wrong = (String, usize);

impl Schedule {
    async fn begin(seed: u64, manner: Arc<Manner>) -> Self {
        let server = ApiServer::start().await;
        step::first_objects(&server, seed);
        let options = Options {
            node_name: step::NODE.to_owned(),
            url: Some(server.url()),
            timing: manner.timing.clone(),
            defects: manner.defects,
            ..Options::default()
        };
        Self {
            seed,
            manner,
            node: Node::new(options),
            server,
            fault: None,
            forbidden: BTreeSet::new(),
            away: None,
            let_go: BTreeSet::new(),
            wanted: BTreeSet::new(),
            recoveries: Recoveries {
                seed,
                ..Recoveries::default()
            },
        }
    }

    async fn run(mut self) -> Result<Recoveries, Divergence> {
        let steps = step::steps(self.seed);
        let mut done = 0_usize;
        let mut outcome = self.settle("the start").await;
        for step in &steps {
            if outcome.is_err() {
                break;
            }
            done += 1;
            outcome = self.step(step).await;
        }
        if outcome.is_ok() {
            outcome = self.heal().await;
        }
        if outcome.is_ok() {
            outcome = self.check();
        }
        if self.node.end().await {
            outcome = outcome.and(Err(("a loop of the source ended".to_owned(), 0)));
        }
        match outcome {
            Ok(()) => Ok(self.recoveries),
            Err((found, lost_removals)) => {
                let mut text = written(self.seed, done.checked_sub(1));
                text.push_str(&found);
                Err(Divergence {
                    seed: self.seed,
                    text,
                    lost_removals,
                })
            }
        }
    }

    async fn outage(&mut self, fault: Fault, lasts: Duration) -> Result<Duration, Wrong> {
        self.settle("the start").await?;
        self.step(&Step::Outage(fault)).await?;
        for service in 0..3 {
            self.step(&Step::DeleteService { service }).await?;
            self.step(&Step::Service {
                service: service + 3,
                shape: 0,
            })
            .await?;
        }
        sleep(lasts).await;
        self.heal().await?;
        self.recoveries
            .took
            .pop()
            .ok_or_else(|| ("nothing was measured".to_owned(), 0))
    }

    async fn step(&mut self, step: &Step) -> Result<(), Wrong> {
        match *step {
            Step::Outage(fault) => {
                self.note_away()?;
                self.set_fault(Some(fault)).await;
                self.server.disconnect();
                if fault.spares_lists() {
                    return Ok(());
                }
                // What was under way at the cut is over, and is on its way to the reconciler, when each kind has failed once more.
                let failed = self.node.failures();
                let again = |node: &Node| node.failures().iter().zip(&failed).all(|(now, then)| now > then);
                self.until("the outage is noticed", again).await?;
                self.node.pump();
                self.away = Some(self.node.meaning().clone());
            }
            Step::Strike(fault) => {
                self.note_away()?;
                self.set_fault(Some(fault)).await;
            }
            Step::Heal => self.heal().await?,
            Step::Forbid(resource) => {
                self.server.forbid(resource, true);
                self.forbidden.insert(resource);
            }
            Step::Allow(resource) => {
                self.server.forbid(resource, false);
                self.forbidden.remove(&resource);
            }
            Step::Disconnect => self.server.disconnect(),
            Step::Compact { by_status } => {
                self.server.say_expired_by_status(by_status);
                self.server.compact();
            }
            Step::Bookmark => self.server.bookmark(),
            Step::Restore => self.server.restore_older_versions(),
            Step::Restart => self.node.restart().await,
            Step::Crash { writes } => self.node.crash(writes).await,
            Step::Reboot => {
                self.node.reboot().await;
                self.away = self.away.take().map(|_| Meaning::default());
            }
            Step::Pump => {}
            ref change => {
                let mut noted = Vec::new();
                change.change(&self.server, &mut || noted.push(wanted_frontends(&self.server)));
                noted.push(wanted_frontends(&self.server));
                for now in noted {
                    self.note_wanted(now);
                }
            }
        }
        // The network gets its turn.
        tokio::task::yield_now().await;
        self.pump()
    }

    async fn set_fault(&mut self, fault: Option<Fault>) {
        self.fault = fault;
        self.server.set_fault(fault).await;
    }

    /// The server's objects have changed: what is wanted no more may go.
    fn note_wanted(&mut self, now: BTreeSet<FrontendKey>) {
        self.let_go.extend(self.wanted.difference(&now));
        self.wanted.extend(now);
    }

    /// Takes in what has come; nothing may go that was not let go.
    fn pump(&mut self) -> Result<(), Wrong> {
        let before = self.node.frontends();
        self.node.pump();
        let now = self.node.frontends();
        // Kinds arrive apart: what follows from an old Node and a new Service was never wanted, and may go again.
        let kept = |key: &&FrontendKey| self.wanted.contains(key) && !self.let_go.contains(key);
        match before.difference(&now).find(kept) {
            Some(key) => Err((format!("the frontend {key:?} went, and was always wanted"), 0)),
            None => Ok(()),
        }
    }

    /// Nothing was written while the server was away, and that is over now.
    fn note_away(&mut self) -> Result<(), Wrong> {
        let Some(meant) = self.away.take() else {
            return Ok(());
        };
        self.node.pump();
        let means = self.node.meaning();
        if *means == meant {
            return Ok(());
        }
        let text = format!(
            "while the server was away the kernel changed\n{}",
            means.differences(&meant)
        );
        Err((text, 0))
    }

    async fn heal(&mut self) -> Result<(), Wrong> {
        self.note_away()?;
        for resource in std::mem::take(&mut self.forbidden) {
            self.server.forbid(resource, false);
        }
        self.set_fault(None).await;
        self.settle("the end of all faults").await
    }

    /// Waits until the node follows and its kernel means what a cold start's does.
    async fn settle(&mut self, what: &str) -> Result<(), Wrong> {
        self.note_wanted(wanted_frontends(&self.server));
        let wanted = cold_start(&self.server);
        let since = Instant::now();
        let mut slow = false;
        loop {
            self.pump()?;
            if self.node.follows() && *self.node.meaning() == wanted {
                self.recoveries.took.push(since.elapsed());
                return Ok(());
            }
            if since.elapsed() > SLOW && !slow {
                slow = true;
                self.recoveries.slow.push(format!(
                    "seed {}: after {what}\n{}\nsource: {}",
                    self.seed,
                    self.node.meaning().clone().differences(&wanted),
                    self.node.says()
                ));
            }
            if since.elapsed() > self.manner.never {
                let means = self.node.meaning().clone();
                let text = format!(
                    "diverged after {what}\n{}\nsource: {}\nerrors: {:?}",
                    means.differences(&wanted),
                    self.node.says(),
                    self.node.reconciler.sync_state().errors
                );
                return Err((text, means.beyond(&wanted)));
            }
            sleep(Duration::from_millis(4)).await;
        }
    }

    async fn until(&mut self, what: &str, condition: impl Fn(&Node) -> bool) -> Result<(), Wrong> {
        let since = Instant::now();
        while !condition(&self.node) {
            self.pump()?;
            if since.elapsed() > self.manner.never {
                return Err((format!("never happened: {what}\nsource: {}", self.node.says()), 0));
            }
            sleep(Duration::from_millis(2)).await;
        }
        Ok(())
    }

    /// Nothing is left to repair, and nothing failed.
    fn check(&mut self) -> Result<(), Wrong> {
        let wrong = self.node.reconciler.check().expect("memory is read");
        let errors = &self.node.reconciler.sync_state().errors;
        if wrong > 0 || !errors.is_empty() {
            return Err((format!("{wrong} entries to repair, errors {errors:?}"), 0));
        }
        Ok(())
    }
}
