//! Evenkeel beside the real kube-proxy: how soon a change is served, how long a start takes, memory, CPU, connects, evenness.
//!
//! Every arm is one proxy in a namespace and a cgroup of its own, with the same Services and backends, and the harness's API
//! server on the loopback device there. The arms of a size live side by side and take turns, forwards and then backwards
//! (ABBA). The clock of a change starts when its event is given to the watch's connection (before it is written, and so a
//! little early) and stops when a connection to the Service has ended at the new endpoint. The dialler dials without a
//! pause for 20 ms, and then pauses for 0.5 % of the time that has passed: one dial and this pause are the resolution.

mod arm;
mod connect;
mod proxy;
mod real;
mod start;
mod storm;
mod town;
mod verdict;

use std::{
    fmt::Write as _,
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;
use lb_user::lab::{Netns, mounts::BpfFs};

use self::{arm::Arm, proxy::Kind, town::Town};
use super::{
    Bench,
    place::{enter, unpin},
    report::Metric,
    stats,
};
use crate::kube_proxy::Mode;

/// Changes of one arm without another one's between them.
const BLOCK: usize = 5;
/// Changes of an arm, if it is fast.
const CHANGES: usize = 100;
/// Changes of an arm that has used up its time, if it is not hopeless.
const FEW_CHANGES: usize = 30;
/// How long the changes of one arm may take, and at most if they are still too few.
const ENOUGH: Duration = Duration::from_secs(15);
const TOO_LONG: Duration = Duration::from_secs(50);
/// How long one change may take.
const PATIENCE: Duration = Duration::from_secs(45);

/// What is measured.
#[derive(Clone, Debug)]
pub(super) struct Options {
    /// Numbers of Services.
    pub(super) services: Vec<u32>,
    /// Numbers of Services in the real API server.
    pub(super) real_services: Vec<u32>,
    /// kube-proxy's modes.
    pub(super) modes: Vec<Mode>,
}

impl Options {
    /// The proxies that are compared: Evenkeel first.
    fn kinds(&self) -> Vec<Kind> {
        let of_mode = |mode: &Mode| [false, true].map(|at_once| Kind::KubeProxy { mode: *mode, at_once });
        std::iter::once(Kind::Evenkeel)
            .chain(self.modes.iter().flat_map(of_mode))
            .collect()
    }
}

/// Measures everything.
pub(super) fn measure(bench: &mut Bench, options: &Options) -> Result<()> {
    // A mount namespace belongs to a thread, and so do the proxies' lives.
    let home = &*bench;
    let mut metrics = Vec::new();
    let measured = thread::scope(|scope| scope.spawn(|| run(home, options, &mut metrics)).join())
        .map_err(|_| anyhow::anyhow!("the thread that watches the proxies panicked"))?;
    // What was measured before something failed is worth its minutes.
    for metric in metrics {
        bench.report.add(metric);
    }
    verdict::judge(bench, options);
    measured
}

fn run(bench: &Bench, options: &Options, metrics: &mut Vec<Metric>) -> Result<()> {
    // Threads and processes of this one start with its CPUs, and a proxy may use them all.
    unpin()?;
    let bpf = BpfFs::enter_private()?;
    for count in &options.services {
        measure_size(bench, &bpf, options, *count, metrics)?;
    }
    for count in &options.real_services {
        real::measure(bench, &bpf, options, *count, metrics)?;
    }
    Ok(())
}

/// All that is measured with so many Services.
fn measure_size(bench: &Bench, bpf: &BpfFs, options: &Options, count: u32, metrics: &mut Vec<Metric>) -> Result<()> {
    let town = Town::new(count);
    let mut arms = Vec::new();
    for (number, kind) in options.kinds().into_iter().enumerate() {
        arms.push(Arm::new(bench, bpf, kind, town, number)?);
    }
    bench.say(&format!("kube: {count} Services are in {} API servers", arms.len()));
    let own = Netns::current()?;
    let measured = measure_arms(bench, &mut arms, metrics);
    // Before the arms' cgroups are removed.
    own.enter_current_thread()?;
    enter(&bench.home)?;
    measured
}

fn measure_arms(bench: &Bench, arms: &mut Vec<Arm>, metrics: &mut Vec<Metric>) -> Result<()> {
    let count = arms.first().map_or(0, |arm| arm.town.count());
    start::measure(bench, arms, metrics)?;
    enter(&bench.home)?;
    arms.retain(Arm::runs);
    changes(bench, arms, metrics)?;
    if count == 1_000 {
        connect::measure(bench, arms, metrics)?;
    }
    if count >= 1_000 {
        start::memory(bench, arms, metrics)?;
        storm::measure(bench, arms, metrics)?;
    }
    Ok(())
}

/// What an arm's changes took, in milliseconds.
#[derive(Debug, Default)]
struct Changes {
    all: Vec<f64>,
    /// Of each block the first: the arm had rested before.
    first: Vec<f64>,
    /// Those that were not served in time.
    late: usize,
    spent: Duration,
}

impl Changes {
    fn are_enough(&self) -> bool {
        let count = self.all.len() + self.late;
        count >= CHANGES || (self.spent >= ENOUGH && count >= FEW_CHANGES) || self.spent >= TOO_LONG
    }
}

/// One change after the other, in blocks.
fn changes(bench: &Bench, arms: &mut [Arm], metrics: &mut Vec<Metric>) -> Result<()> {
    let mut found: Vec<Changes> = arms.iter().map(|_| Changes::default()).collect();
    for round in 0.. {
        let mut order: Vec<usize> = (0..arms.len()).filter(|at| !found[*at].are_enough()).collect();
        if order.is_empty() {
            break;
        }
        if round % 2 == 1 {
            order.reverse();
        }
        for at in order {
            arms[at].step_in()?;
            let began = Instant::now();
            for n in 0..BLOCK {
                bench.check()?;
                match arms[at].change(PATIENCE)? {
                    Some(took) => {
                        let took = took.as_secs_f64() * 1e3;
                        found[at].all.push(took);
                        if n == 0 {
                            found[at].first.push(took);
                        }
                    }
                    None => found[at].late += 1,
                }
            }
            found[at].spent += began.elapsed();
        }
        if round % 4 == 0 {
            let mut line = format!("kube: {} Services, changes so far:", arms[0].town.count());
            for (arm, changes) in arms.iter().zip(&mut found) {
                let _ = write!(
                    line,
                    " {} p50 {:.1} ms of {},",
                    arm.kind,
                    stats::median(&mut changes.all),
                    changes.all.len()
                );
            }
            bench.say(line.trim_end_matches(','));
        }
    }
    for (arm, mut changes) in arms.iter().zip(found) {
        metrics.push(
            spread_of(
                format!("kube_change_ms_p99.{}@{}", arm.kind, arm.town.count()),
                &mut changes.all,
            )
            .with("first_of_block_p50", stats::median(&mut changes.first))
            .with("not_in_time", changes.late),
        );
    }
    Ok(())
}

/// A metric of the p99 of milliseconds, with the other statistics beside it.
fn spread_of(name: String, samples: &mut [f64]) -> Metric {
    Metric::new(name, "ms", stats::quantile(samples, 0.99), samples.len())
        .with("min", stats::min(samples))
        .with("p1", stats::quantile(samples, 0.01))
        .with("p50", stats::median(samples))
}
