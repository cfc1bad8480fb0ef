//! A storm: 100 EndpointSlices a second change for 20 s, each of another Service, and the marked Service changes now and then.
//!
//! What the marked changes take says whether the proxy keeps up; one more after the storm says whether it has. CPU is that
//! of the process and of its children that had ended when the storm did (`nft` and `iptables` of kube-proxy's).

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;

use super::{
    arm::Arm,
    proxy::{self, Kind},
};
use crate::{
    bench::{Bench, report::Metric, stats},
    interrupt,
    kube_proxy::Mode,
};

/// How long a storm is.
const STORM: Duration = Duration::from_secs(20);
/// The time between two changes: 100 a second.
const STEP: Duration = Duration::from_millis(10);
/// The time between two marked changes, if they are served sooner.
const MARKED: Duration = Duration::from_millis(200);
/// How long a marked change may take.
const LIMIT: Duration = Duration::from_secs(30);

/// A storm for each arm in turn; of the iptables mode only with its default period, for the sake of time.
pub(super) fn measure(bench: &Bench, arms: &mut [Arm], metrics: &mut Vec<Metric>) -> Result<()> {
    for arm in arms {
        let shortened = Kind::KubeProxy {
            mode: Mode::Iptables,
            at_once: true,
        };
        if arm.kind == shortened {
            continue;
        }
        bench.check()?;
        let (kind, count) = (arm.kind, arm.town.count());
        arm.step_in()?;
        let (api, town, pid) = (arm.api(), arm.town, arm.proxy()?.pid());
        let began = Instant::now();
        let storm = move || -> Result<(u32, Duration)> {
            let before = proxy::cpu(pid)?;
            let mut changes: u32 = 0;
            while began.elapsed() < STORM && interrupt::check().is_ok() {
                // Far apart, so that no change meets the memory of the one before it.
                let service = changes.wrapping_mul(7_919) % town.count();
                api.change(town.slice(service, Some(changes)));
                changes += 1;
                thread::sleep((began + STEP * changes).saturating_duration_since(Instant::now()));
            }
            Ok((changes, proxy::cpu(pid)?.saturating_sub(before)))
        };
        let mut took = Vec::new();
        let mut late = 0;
        let stormed = thread::scope(|scope| -> Result<(u32, Duration)> {
            let storm = scope.spawn(storm);
            while !storm.is_finished() {
                let next = Instant::now() + MARKED;
                match arm.change(LIMIT)? {
                    Some(time) => took.push(time.as_secs_f64() * 1e3),
                    None => late += 1,
                }
                thread::sleep(next.saturating_duration_since(Instant::now()));
            }
            storm.join().map_err(|_| anyhow::anyhow!("the storm panicked"))?
        });
        let (changes, cpu) = stormed?;
        let after = arm.change(LIMIT)?;
        let ms = cpu.as_secs_f64() * 1e3 / STORM.as_secs_f64();
        bench.say(&format!(
            "kube: {count} Services, a storm on {kind}: a marked change takes {:.1} ms (p50), CPU {ms:.0} ms/s",
            stats::median(&mut took)
        ));
        metrics.push(
            Metric::new(format!("kube_storm_cpu_ms_per_s.{kind}@{count}"), "ms/s", ms, 1)
                .with("changes_per_s", f64::from(changes) / STORM.as_secs_f64()),
        );
        let mut metric =
            super::spread_of(format!("kube_storm_change_ms_p99.{kind}@{count}"), &mut took).with("not_in_time", late);
        if let Some(after) = after {
            metric = metric.with("one_after_the_storm", after.as_secs_f64() * 1e3);
        }
        metrics.push(metric);
    }
    Ok(())
}
