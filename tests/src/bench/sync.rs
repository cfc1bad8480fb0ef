//! How fast desired state reaches the kernel, beside `nft -f` of rules of the same size.
//!
//! Evenkeel: from the flat records that a source hands over (Services with two endpoints each) through fold, compile and
//! plan into empty maps; loading the programs, which happens once a node, is not in it. nftables: one transaction, rendered
//! beforehand, into an empty namespace. Then single changes: one endpoint of one Service among 10,000 with ten endpoints
//! each, from its record to the kernel. Then the publication of one of the largest tables.

use std::{num::NonZeroU16, time::Instant};

use anyhow::{Context, Result, ensure};
use lb_common::maglev;
use lb_user::{
    datapath::{
        kernel::Kernel,
        load::{self, Mode, Options, Sizes},
    },
    desired::{self, Desired, NodePortAddresses},
    lab::{Netns, nft},
    model::{Content, Kind, Object, Update},
    plan::Plan,
    reconcile::Reconciler,
};

use super::{Bench, population::Population, report::Metric, stats};

const SIZES: [u32; 4] = [1_000, 2_000, 5_000, 10_000];
const ENDPOINTS: u32 = 2;
const PORT: NonZeroU16 = NonZeroU16::new(8080).expect("8080 is not 0");
/// Synchronisations of each size.
const RUNS: usize = 5;
/// Single changes.
const CHANGES: u32 = 2_000;
/// Publications of the largest table.
const PUBLICATIONS: u32 = 50;

/// Measures synchronisation, single changes and one table.
pub(super) fn measure(bench: &mut Bench) -> Result<()> {
    for count in SIZES {
        let population = Population::new(count, ENDPOINTS, PORT);
        let mut took = Vec::new();
        for _ in 0..RUNS {
            bench.check()?;
            took.push(synchronise(population)?.1);
        }
        bench.say(&format!("sync: {count} Services, {:.0} ms", stats::median(&mut took)));
        let value = stats::median(&mut took);
        bench
            .report
            .add(Metric::new(format!("sync_ms.evenkeel@{count}"), "ms", value, RUNS).with("min", stats::min(&took)));
    }
    changes(bench)?;
    publication(bench)?;
    for count in SIZES {
        reference(bench, count)?;
    }
    let of = |who| bench.report.value(&format!("sync_ms.{who}@10000"));
    let times = of("nftables").zip(of("evenkeel")).map(|(nftables, own)| nftables / own);
    bench
        .report
        .at_least("sync@10000: times faster than nftables", times, 100.0);
    Ok(())
}

/// Brings a population into empty maps; the time is in milliseconds.
fn synchronise(population: Population) -> Result<(Reconciler, f64)> {
    let (services, slices) = (population.services(), population.slices());
    let mut reconciler = Reconciler::new(Desired::new(config()), empty()?.0)?;
    let updates = [
        Update::Replace(Content::Services(services)),
        Update::Replace(Content::Slices(slices)),
        Update::Synced(Kind::Service),
        Update::Synced(Kind::Slice),
    ];
    let began = Instant::now();
    for update in updates {
        reconciler.take(update);
    }
    let flushed = reconciler.flush();
    let took = began.elapsed().as_secs_f64() * 1e3;
    ensure!(
        flushed.services == population.count as usize && reconciler.sync_state().errors.is_empty(),
        "{} of {} Services were written: {:?}",
        flushed.services,
        population.count,
        reconciler.sync_state().errors.first_key_value()
    );
    Ok((reconciler, took))
}

fn config() -> desired::Config {
    desired::Config {
        node_name: "bench".to_owned(),
        proxy_name: None,
        external_ips: true,
        node_port_addresses: NodePortAddresses::Primary,
        awaited: vec![Kind::Service, Kind::Slice],
    }
}

/// Empty maps of the default sizes. The object must outlive what uses them no longer than that.
fn empty() -> Result<(Kernel, aya::Ebpf)> {
    let options = Options {
        mode: Mode::Observe,
        sizes: Sizes::default(),
        features: 0,
        log_level: 0,
        follow_connections: false,
        packets: false,
        translate: false,
    };
    let mut object = load::load(&options, None)?;
    let (kernel, _events) = Kernel::take(&mut object, false)?;
    Ok((kernel, object))
}

/// One endpoint's change among 10,000 Services with ten endpoints each.
fn changes(bench: &mut Bench) -> Result<()> {
    let population = Population::new(10_000, 10, PORT);
    let (mut reconciler, first) = synchronise(population)?;
    bench
        .report
        .add(Metric::new("sync_ms.evenkeel@10000x10", "ms", first, 1));
    let mut took = Vec::new();
    for change in 0..CHANGES {
        bench.check()?;
        // Far apart, so that no change meets the memory of the one before it.
        let service = change.wrapping_mul(7_919) % population.count;
        let update = Update::Apply(Object::Slice(population.changed_slice(service, change).into()));
        let began = Instant::now();
        reconciler.take(update);
        let flushed = reconciler.flush();
        took.push(began.elapsed().as_secs_f64() * 1e3);
        ensure!(
            flushed.services == 1,
            "change {change} wrote {} Services",
            flushed.services
        );
        // Beside the clock, as the agent does it after each flush.
        reconciler.reclaim();
    }
    bench.report.add(
        Metric::new(
            "one_change_ms@10000x10",
            "ms",
            stats::quantile(&mut took, 0.99),
            took.len(),
        )
        .with("statistic", "p99")
        .with("p50", stats::median(&mut took))
        .with("max", stats::quantile(&mut took, 1.0)),
    );
    bench.say("sync: single changes");
    Ok(())
}

/// A table of the largest size: written beside the old one, its list too, and the set's word flipped.
fn publication(bench: &mut Bench) -> Result<()> {
    /// The fewest members that ask for the largest table.
    const MEMBERS: u32 = 164;
    let slots = maglev::slots_for(MEMBERS as usize);
    let (mut kernel, _object) = empty()?;
    let mut compiler = lb_user::compile::Compiler::new(kernel.capacity());
    let mut compiled = None;
    let mut took = Vec::new();
    for run in 0..=PUBLICATIONS {
        bench.check()?;
        // Each time one member is another, so that everything is written anew.
        let population = Population::new(run + 1, MEMBERS, PORT);
        let mut desired = population.desired(0);
        desired.sets[0].members[0] = population.desired(run).sets[0].members[0];
        desired.sets[0].members.sort();
        let mut tables = Vec::new();
        let next = compiler.compile(&desired, compiled.as_ref(), &mut tables)?;
        let mut plan = Plan::between(compiled.as_ref(), Some(&next));
        plan.tables = tables;
        let table = plan.tables.first().context("a changed set has a new table")?;
        ensure!(
            table.slots.len() == slots as usize,
            "the table has {} slots",
            table.slots.len()
        );
        let began = Instant::now();
        kernel.apply(&plan)?;
        // The first meets memory that nobody has touched.
        if run > 0 {
            took.push(began.elapsed().as_secs_f64() * 1e6);
        }
        if let Some(old) = &compiled {
            compiler.retire(old, Some(&next), u64::from(run) * 3_600_000);
        }
        compiler.reclaim(u64::from(run + 1) * 3_600_000, |_| true, |_| true);
        compiled = Some(next);
    }
    let value = stats::median(&mut took);
    bench
        .report
        .add(Metric::new(format!("table_publish_us@{slots}"), "us", value, took.len()).with("min", stats::min(&took)));
    Ok(())
}

/// The same Services as rules.
fn reference(bench: &mut Bench, count: u32) -> Result<()> {
    // The largest takes half a minute.
    let runs = if count < 5_000 { 3 } else { 1 };
    let rules = nft::render_all(&Population::new(count, ENDPOINTS, PORT).rules());
    let mut took = Vec::new();
    for _ in 0..runs {
        bench.check()?;
        let netns = Netns::new()?;
        let began = Instant::now();
        nft::load(&netns, &rules)?;
        took.push(began.elapsed().as_secs_f64() * 1e3);
    }
    bench.say(&format!(
        "sync: nftables with {count} Services, {:.0} ms",
        stats::median(&mut took)
    ));
    let value = stats::median(&mut took);
    bench
        .report
        .add(Metric::new(format!("sync_ms.nftables@{count}"), "ms", value, runs).with("min", stats::min(&took)));
    Ok(())
}
