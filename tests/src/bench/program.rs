//! What the programs cost by themselves, from the kernel's run statistics, with 100 and with 10,000 Services.
//!
//! Blocks of connections take turns between the two sizes, forwards and backwards. A block's cost is the growth of a
//! program's run time over the growth of its run count; of the blocks the smallest counts, since whatever else happens on
//! the machine only adds. Dialling one fixed Service tells the cost of the code; dialling all in turn, that of cold memory
//! too. The clock reads of the statistics themselves are in the numbers.

use std::num::NonZeroU16;

use anyhow::{Context, Result};
use lb_user::{
    datapath::syscall,
    lab::{ChildCgroup, Netns},
};

use super::{
    Bench,
    dial::{self, Acceptor, Times},
    place::{Datapath, Place, Programs, Topology, enter},
    population::Population,
    report::Metric,
    stats,
};

const ENDPOINTS: u32 = 10;
const BLOCK: usize = 256;
/// Blocks of each size that dial one Service: the smallest of many is what a busy machine cannot touch.
const FIXED_BLOCKS: usize = 64;
/// Blocks of each size that dial all Services in turn.
const ALL_BLOCKS: usize = 24;
const FOLLOWED: [&str; 3] = ["connect4", "sock_ops", "sock_release"];

struct Arm {
    population: Population,
    cgroup: ChildCgroup,
    _server: Acceptor,
    datapath: Datapath,
    /// Nanoseconds a run, by block, for each of [`FOLLOWED`].
    fixed: [Vec<f64>; 3],
    all: [Vec<f64>; 3],
    next: u32,
}

impl Arm {
    fn new(bench: &Bench, place: &Place, services: u32, port: u16) -> Result<Self> {
        let port = NonZeroU16::new(port).context("ports of arms are not 0")?;
        let cgroup = bench.home.below(&format!("services-{services}"))?;
        let population = Population::new(services, ENDPOINTS, port);
        let mut datapath = Datapath::new(cgroup.path(), Programs::All, &place.client)?;
        datapath.fill(&population)?;
        enter(&cgroup)?;
        Ok(Self {
            population,
            cgroup,
            _server: place.serve(port)?,
            datapath,
            fixed: Default::default(),
            all: Default::default(),
            next: 0,
        })
    }

    fn run(&mut self, bench: &Bench, all: bool) -> Result<()> {
        bench.check()?;
        enter(&self.cgroup)?;
        let before = self.read()?;
        let population = self.population;
        let first = self.next;
        let turn = |n| if all { (first + n) % population.count } else { 0 };
        let mut targets = (0..).map(|n| population.frontend(turn(n)));
        dial::block(&mut targets, BLOCK, &mut Times::default())?;
        self.next = (first + BLOCK as u32) % population.count;
        let after = self.read()?;
        let into = if all { &mut self.all } else { &mut self.fixed };
        for ((blocks, before), after) in into.iter_mut().zip(before).zip(after) {
            blocks.push((after.0 - before.0) / (after.1 - before.1).max(1.0));
        }
        Ok(())
    }

    /// (nanoseconds, runs) of each program so far.
    fn read(&self) -> Result<[(f64, f64); 3]> {
        let mut read = [(0.0, 0.0); 3];
        for (name, into) in FOLLOWED.iter().zip(&mut read) {
            let program = self
                .datapath
                .object
                .program(name)
                .with_context(|| format!("the object has no {name}"))?;
            let info = program.info()?;
            *into = (info.run_time().as_nanos() as f64, info.run_count() as f64);
        }
        Ok(read)
    }
}

/// Measures both sizes.
pub(super) fn measure(bench: &mut Bench) -> Result<()> {
    let place = Place::new(Topology::Pod)?;
    let mut arms = [
        Arm::new(bench, &place, 100, 8011)?,
        Arm::new(bench, &place, 10_000, 8012)?,
    ];
    let own = Netns::current()?;
    place.client.enter_current_thread()?;
    let measured = blocks(bench, &mut arms);
    own.enter_current_thread()?;
    enter(&bench.home)?;
    measured?;
    for arm in &arms {
        for (way, blocks) in [("", &arm.fixed), (".all", &arm.all)] {
            for (name, blocks) in FOLLOWED.iter().zip(blocks) {
                let metric = Metric::new(
                    format!("program_ns.{name}{way}@{}", arm.population.count),
                    "ns",
                    stats::min(blocks),
                    blocks.len(),
                );
                bench.report.add(metric.with("p50", stats::median(&mut blocks.clone())));
            }
        }
    }
    let of = |name| bench.report.value(&format!("program_ns.connect4@{name}"));
    let change = of("100").zip(of("10000")).map(|(few, many)| (many / few - 1.0).abs());
    bench
        .report
        .at_most("program_ns.connect4 from 100 to 10,000 Services: change", change, 0.10);
    Ok(())
}

fn blocks(bench: &Bench, arms: &mut [Arm; 2]) -> Result<()> {
    // Held while the statistics are to run.
    let _stats = syscall::enable_stats().context("turn run statistics on")?;
    for (all, blocks) in [(false, FIXED_BLOCKS), (true, ALL_BLOCKS)] {
        for block in 0..blocks {
            let (first, second) = if block % 2 == 0 { (0, 1) } else { (1, 0) };
            arms[first].run(bench, all)?;
            arms[second].run(bench, all)?;
        }
    }
    Ok(())
}
