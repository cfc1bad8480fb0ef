//! The detectors of uneven load: how often they cry wolf over fair services, and how soon they find a starved endpoint.
//!
//! Nothing here touches the kernel: services are simulated in seconds, and read by the same code that the agent runs. Every
//! service-day is a service of its own: 2 to 100 backends, 1 to 1,000 new connections a second, connections that live 0.1
//! seconds to 10 minutes (all spread evenly over their logarithm), a fair random choice, and on average four scale events a
//! day, up or down by up to a quarter. Beside the measurement stands what exact arithmetic gives, for a thousand
//! service-days see few events that are this rare.

pub mod exact;
pub mod fair;
pub mod power;

use std::io::{self, Write as _};

use anyhow::{Context, Result};
use lb_user::analysis::{poisson, starvation::BIRTH_P};

use super::{Bench, report::Metric};
use fair::Alarms;

/// The rule that every bound here is held against: false alarms in 1,000 service-days.
const ALLOWED: f64 = 1.0;
/// Sizes and rates that the tables show.
pub const SIZES: [u32; 5] = [2, 3, 10, 30, 100];
/// New connections a second.
pub const RATES: [f64; 4] = [1.0, 10.0, 100.0, 1000.0];

/// Runs the simulation, prints its tables and holds its rates against what is allowed.
pub(super) fn measure(bench: &mut Bench) -> Result<()> {
    false_alarms(bench)?;
    arithmetic(bench);
    powers(bench)
}

fn false_alarms(bench: &mut Bench) -> Result<()> {
    let days = bench.service_days;
    let mut alarms = Alarms::default();
    for day in 0..days {
        bench.check()?;
        alarms.add(&fair::service_day(u64::from(day), fair::DAY_SECONDS)?);
        if (day + 1) % days.div_ceil(20).max(1) == 0 {
            // Nobody to read it is no reason to stop.
            let _ = writeln!(io::stderr(), "detector: {} of {days} service-days: {alarms:?}", day + 1);
        }
    }
    let samples = days as usize;
    let per_thousand = |count: u64| count as f64 / f64::from(days) * 1e3;
    let bound = |count: u64| poisson::upper_bound(count, 0.05) / f64::from(days) * 1e3;
    for (name, count) in [
        ("birth", alarms.birth),
        ("running", alarms.running),
        ("long_lived", alarms.drift),
        ("all", alarms.all()),
        ("running_without_budget", alarms.unbudgeted),
        ("naive_half_of_mean_in_a_minute", alarms.naive),
    ] {
        bench.report.add(
            Metric::new(
                format!("false_alarms@{name}"),
                "/1000 service-days",
                per_thousand(count),
                samples,
            )
            .with("alarms", count)
            .with("bound95", bound(count)),
        );
    }
    bench.report.add(
        Metric::new("births@fair", "1", alarms.births as f64, samples)
            .with("naive_share_of_minutes", alarms.naive_share()),
    );
    let births = alarms.births_expected / f64::from(days) * 1e3;
    let running = exact::running_per_day_on_average(exact::Rule::Budgeted) * 1e3;
    let written = exact::running_per_day_on_average(exact::Rule::Written) * 1e3;
    let births_written = alarms.births_expected_unbudgeted / f64::from(days) * 1e3;
    bench.report.add(
        Metric::new("exact_false_alarms@birth", "/1000 service-days", births, samples)
            .with("without_budget", births_written),
    );
    bench.report.add(
        Metric::new("exact_false_alarms@running", "/1000 service-days", running, 1).with("without_budget", written),
    );
    bench.report.at_most(
        "false alarms of both clocks in 1,000 service-days, exact",
        Some(births + running),
        ALLOWED,
    );
    bench.report.at_most(
        "false alarms of all rules in 1,000 service-days, as simulated",
        Some(per_thousand(alarms.all())),
        ALLOWED,
    );
    Ok(())
}

/// What exact arithmetic gives, by size and rate.
fn arithmetic(bench: &mut Bench) {
    let (mut worst, mut worst_written) = (0.0_f64, 0.0_f64);
    for k in SIZES {
        for each in [0.5, 2.0, 8.0, 16.0, 25.0, 35.0, 60.0] {
            let rate = each * f64::from(k);
            if !(1.0..=1000.0).contains(&rate) {
                continue;
            }
            let written = exact::running_per_day(k, rate, exact::Rule::Written) * 1e3;
            let budgeted = exact::running_per_day(k, rate, exact::Rule::Budgeted) * 1e3;
            worst = worst.max(budgeted);
            worst_written = worst_written.max(written);
            bench.report.add(
                Metric::new(
                    format!("exact_running@k={k},rate={rate}"),
                    "/1000 service-days",
                    budgeted,
                    1,
                )
                .with("without_budget", written),
            );
        }
        let birth = exact::birth(k, exact::Rule::Budgeted) * 1e3;
        let written = exact::birth(k, exact::Rule::Written) * 1e3;
        bench.report.add(
            Metric::new(format!("exact_birth@k={k}"), "/1000 births", birth, 1)
                .with("nominal", BIRTH_P / f64::from(k) * 1e3)
                .with("without_budget", written),
        );
    }
    bench
        .report
        .add(Metric::new("exact_running_worst", "/1000 service-days", worst, 1).with("without_budget", worst_written));
    bench.report.at_most(
        "false alarms of the running clock at its worst rate, exact",
        Some(worst),
        ALLOWED,
    );
}

fn powers(bench: &mut Bench) -> Result<()> {
    let (mut late_births, mut late_windows) = (0_u32, 0_u32);
    for k in SIZES {
        for rate in RATES {
            bench.check()?;
            let case = format!("k={k},rate={rate}");
            let birth = power::birth(k, rate, 40).with_context(|| format!("power of the birth clock at {case}"))?;
            let running = power::running(k, rate, 40).with_context(|| format!("power of windows at {case}"))?;
            late_births += birth.late;
            late_windows += running.late;
            bench.report.add(
                Metric::new(
                    format!("power_birth@{case}"),
                    "expected",
                    birth.expected,
                    birth.runs as usize,
                )
                .with("max", birth.most)
                .with("seconds", birth.seconds)
                .with("bound", power::birth_bound(k, rate)),
            );
            bench.report.add(
                Metric::new(
                    format!("power_running@{case}"),
                    "expected",
                    running.expected,
                    running.runs as usize,
                )
                .with("max", running.most)
                .with("seconds", running.seconds)
                .with("window", power::window(k, rate)),
            );
        }
    }
    bench.report.at_most(
        "zero shares found later than ln(1000 k) + 2 expected connections at birth",
        Some(f64::from(late_births)),
        0.0,
    );
    bench.report.at_most(
        "zero shares found later than one whole window while running",
        Some(f64::from(late_windows)),
        0.0,
    );
    Ok(())
}
