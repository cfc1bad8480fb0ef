//! How evenly connections are spread, in the kernel, by real connects.
//!
//! Every run dials a Service of its own, whose counts start at zero, from one thread a CPU. What each backend got is read
//! from the kernel's counters. Medians of 30 runs.

use std::num::NonZeroU16;
use std::thread;

use anyhow::{Context, Result, ensure};
use lb_user::{analysis::imbalance, compile::Compiled, plan::Plan};

use super::{
    Bench,
    dial::{self, Times},
    place::{Datapath, Place, Programs, Topology, cpus, enter, pin},
    population::Population,
    report::Metric,
    stats,
};

const CONNECTIONS: [u32; 2] = [1_000, 10_000];
const BACKENDS: [u32; 3] = [3, 10, 100];
const RUNS: u32 = 30;

/// Measures every number of connections over every number of backends.
pub(super) fn measure(bench: &mut Bench) -> Result<()> {
    let place = Place::new(Topology::Pod)?;
    for backends in BACKENDS {
        let cgroup = bench.home.below(&format!("backends-{backends}"))?;
        let port = NonZeroU16::new(8021).context("the port is not 0")?;
        let population = Population::new(RUNS * CONNECTIONS.len() as u32, backends, port);
        let mut datapath = Datapath::new(cgroup.path(), Programs::All, &place.client)?;
        let services = fill(&mut datapath, &population)?;
        enter(&cgroup)?;
        let server = place.serve(port)?;
        let mut services = services.iter().enumerate();
        for connections in CONNECTIONS {
            let (mut unevenness, mut dispersions) = (Vec::new(), Vec::new());
            for (n, service) in services.by_ref().take(RUNS as usize) {
                bench.check()?;
                dial_from_all(&place, &population, n as u32, connections)?;
                let mut counts = Vec::new();
                for (id, _) in &service.backends {
                    counts.push((1, datapath.kernel.backend_counter(*id)?.inside.connects));
                }
                let judged = imbalance::by_weight(counts);
                ensure!(
                    judged.n == u64::from(connections),
                    "{} of {connections} connections were counted",
                    judged.n
                );
                unevenness.push(judged.max_over_mean.context("there are connections")?);
                dispersions.push(judged.dispersion.context("there are backends")?);
            }
            let case = format!("{connections}x{backends}");
            let p95 = stats::quantile(&mut unevenness, 0.95);
            let value = stats::median(&mut unevenness);
            bench.say(&format!("selection: {case}: {value:.4}"));
            bench
                .report
                .add(Metric::new(format!("max_over_mean@{case}"), "1", value, RUNS as usize).with("p95", p95));
            let value = stats::median(&mut dispersions);
            bench
                .report
                .add(Metric::new(format!("dispersion@{case}"), "1", value, RUNS as usize));
        }
        enter(&bench.home)?;
        drop(server);
    }
    let found = bench.report.value("max_over_mean@1000x10");
    bench.report.at_most("max_over_mean@1000x10", found, 1.02);
    Ok(())
}

/// Writes the Services and keeps what they were compiled to.
fn fill(datapath: &mut Datapath, population: &Population) -> Result<Vec<Compiled>> {
    let mut plan = Plan::default();
    let mut services = Vec::new();
    for n in 0..population.count {
        let compiled = datapath
            .compiler
            .compile(&population.desired(n), None, &mut plan.tables)?;
        plan.merge(Plan::between(None, Some(&compiled)));
        services.push(compiled);
    }
    datapath.kernel.apply(&plan)?;
    Ok(services)
}

/// Dials one Service from two threads, on two CPUs where there are as many: their choices meet.
fn dial_from_all(place: &Place, population: &Population, service: u32, connections: u32) -> Result<()> {
    let (first, last) = cpus();
    let half = connections / 2;
    let work = |cpu: usize, count: u32| -> Result<()> {
        pin(cpu)?;
        place.client.enter_current_thread()?;
        let mut targets = std::iter::repeat(population.frontend(service));
        dial::block(&mut targets, count as usize, &mut Times::default())
    };
    thread::scope(|scope| {
        let other = scope.spawn(|| work(last, half));
        let own = scope.spawn(|| work(first, connections - half));
        for thread in [other, own] {
            thread
                .join()
                .map_err(|_| anyhow::anyhow!("a client's thread panicked"))??;
        }
        Ok(())
    })
}
