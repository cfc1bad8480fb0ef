//! Full starts, from the process's start to the last Service's answer, and what a proxy takes at rest afterwards.
//!
//! The kernel is empty before each start: a namespace without rules, or without maps. Memory is the process's Pss; beside it
//! stand the agent's maps (`memlock` of its descriptors), and the growth of the kernel's unreclaimable slab over the start, in
//! which a proxy's rules are (and whatever else the machine did meanwhile). CPU at rest is read over half a minute in which nothing changes.

use std::{
    fs, thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};

use super::{
    arm::Arm,
    proxy::{self, Kind},
};
use crate::bench::{Bench, memory, report::Metric, stats};

/// How long a start may take.
const LIMIT: Duration = Duration::from_secs(150);
/// Starts of a proxy.
const STARTS: usize = 3;
/// How long nothing changes.
const IDLE: Duration = Duration::from_secs(30);

/// Starts every arm, and some of them again; those that do not serve in time do not run afterwards.
pub(super) fn measure(bench: &Bench, arms: &mut [Arm], metrics: &mut Vec<Metric>) -> Result<()> {
    let mut found: Vec<(String, Found)> = Vec::new();
    for arm in arms.iter_mut() {
        let (name, count) = (name_of(arm.kind), arm.town.count());
        let known = found.iter().position(|(known, _)| *known == name);
        let at = known.unwrap_or(found.len());
        if known.is_none() {
            found.push((name, Found::default()));
        }
        let times = &mut found[at].1;
        // The period between synchronisations does not matter to a start: both arms of a mode count.
        let wanted = match arm.kind {
            Kind::KubeProxy { at_once: false, .. } => 1,
            _ => STARTS - times.seconds.len().min(STARTS - 1),
        };
        for _ in 0..wanted {
            // One that has not finished does not better the second time.
            if times.unfinished > 0 {
                break;
            }
            bench.check()?;
            let before = slab()?;
            let start = arm.start(LIMIT)?;
            let Some(served) = start.served else {
                bench.say(&format!(
                    "kube: {count} Services, {} does not serve within {} s",
                    arm.kind,
                    LIMIT.as_secs()
                ));
                times.unfinished += 1;
                break;
            };
            bench.say(&format!(
                "kube: {count} Services, {} serves after {:.2} s",
                arm.kind,
                served.as_secs_f64()
            ));
            times.seconds.push(served.as_secs_f64());
            times.asked.extend(start.asked.map(|asked| asked.as_secs_f64()));
            times.slab.push((slab()? - before) / 1024.0);
        }
        if times.unfinished > 0 {
            arm.stop()?;
        }
    }
    let count = arms.first().map_or(0, |arm| arm.town.count());
    for (name, mut times) in found {
        let starts = times.seconds.len();
        let mut metric = Metric::new(
            format!("kube_start_s.{name}@{count}"),
            "s",
            stats::median(&mut times.seconds),
            starts,
        );
        if starts == 0 {
            metric = metric.with("not_finished_within_s", LIMIT.as_secs());
        }
        metrics.push(
            metric
                .with("min", stats::min(&times.seconds))
                .with("max", stats::quantile(&mut times.seconds, 1.0))
                .with("lists_slices_after", stats::median(&mut times.asked))
                .with("kernel_slab_mb", stats::median(&mut times.slab)),
        );
    }
    Ok(())
}

#[derive(Debug, Default)]
struct Found {
    seconds: Vec<f64>,
    asked: Vec<f64>,
    slab: Vec<f64>,
    unfinished: usize,
}

/// A proxy's name without its period.
fn name_of(kind: Kind) -> String {
    match kind {
        Kind::Evenkeel => kind.to_string(),
        Kind::KubeProxy { mode, .. } => mode.name().to_owned(),
    }
}

/// Memory and CPU of all arms at rest.
pub(super) fn memory(bench: &Bench, arms: &[Arm], metrics: &mut Vec<Metric>) -> Result<()> {
    let before: Vec<Duration> = arms
        .iter()
        .map(|arm| proxy::cpu(arm.proxy()?.pid()))
        .collect::<Result<_>>()?;
    bench.say(&format!("kube: {} s in which nothing changes", IDLE.as_secs()));
    let until = Instant::now() + IDLE;
    while Instant::now() < until {
        bench.check()?;
        thread::sleep(Duration::from_millis(100));
    }
    for (arm, before) in arms.iter().zip(before) {
        let (kind, count) = (arm.kind, arm.town.count());
        let proxy = arm.proxy()?;
        let cpu = proxy::cpu(proxy.pid())?.saturating_sub(before);
        metrics.push(Metric::new(
            format!("kube_idle_cpu_ms_per_s.{kind}@{count}"),
            "ms/s",
            cpu.as_secs_f64() * 1e3 / IDLE.as_secs_f64(),
            1,
        ));
        let mib = |kib: u64| kib as f64 / 1024.0;
        let pss = memory::rollup(proxy.pid())?;
        let maps = memory::map_memory(proxy.pid())?;
        let mut metric = Metric::new(format!("kube_pss_mb.{kind}@{count}"), "MiB", mib(pss.pss), 1)
            .with("anonymous", mib(pss.anonymous))
            .with("file", mib(pss.file));
        if !maps.is_empty() {
            metric = metric
                .with("shared_maps", mib(pss.shmem))
                .with("kernel_maps_mb", maps.values().sum::<u64>() as f64 / f64::from(1 << 20));
        }
        metrics.push(metric);
    }
    Ok(())
}

/// The kernel's memory in slabs that cannot be reclaimed, and in pages of `vmalloc`, in KiB.
fn slab() -> Result<f64> {
    let text = fs::read_to_string("/proc/meminfo").context("read /proc/meminfo")?;
    slab_of(&text).context("/proc/meminfo does not count slabs")
}

fn slab_of(meminfo: &str) -> Option<f64> {
    let field = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<f64>().ok()
    };
    Some(field("SUnreclaim:")? + field("VmallocUsed:")?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_memory_is_slab_and_vmalloc() {
        let text = "MemTotal:  100 kB\nSUnreclaim:      2048 kB\nVmallocUsed:   1024 kB\n";
        assert_eq!(slab_of(text), Some(3_072.0));
        assert_eq!(slab_of("MemTotal: 1 kB\n"), None);
    }
}
