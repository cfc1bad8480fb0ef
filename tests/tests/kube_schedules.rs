//! Seeded schedules of changes and faults end where a cold start ends. `EVENKEEL_SEED=N` runs the one of a seed.

use std::time::{Duration, Instant};

use lb_tests::{
    apiserver::Fault,
    schedules::{Manner, Summary, outages, run, seeds},
};
use lb_user::source::kube::{Defects, Timing};

fn tell(what: &str, summary: &Summary, since: Instant) {
    println!("{what}: {}, in {:.1} s", summary.line(), since.elapsed().as_secs_f64());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_schedules_end_where_a_cold_start_ends() {
    let since = Instant::now();
    let summary = run(seeds(1000), Manner::default()).await;
    tell("schedules", &summary, since);
    for slow in summary.slow.iter().take(5) {
        println!("slow: {slow}\n");
    }
    for divergence in summary.divergences.iter().take(3) {
        println!("{}\n", divergence.text);
    }
    assert!(summary.divergences.is_empty(), "{}", summary.line());
}

/// With the waits of the product, an outage of some seconds is over within a second of its end, whatever it was. (A server that
/// takes requests and never answers them is a matter of time limits, not of waits.)
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_products_own_waits_converge_within_a_second() {
    let since = Instant::now();
    let faults = Fault::ALL.into_iter().filter(|fault| *fault != Fault::Silent);
    let measured = outages(faults.collect(), Timing::default(), Duration::from_secs(4)).await;
    let mut worst = Duration::ZERO;
    for (fault, took) in measured {
        let took = took.unwrap_or_else(|text| panic!("{fault:?}: {text}"));
        println!("{fault:?}: {} ms", took.as_millis());
        assert!(took <= Duration::from_secs(1), "{fault:?} took {took:?}");
        worst = worst.max(took);
    }
    println!(
        "worst {} ms, in {:.1} s",
        worst.as_millis(),
        since.elapsed().as_secs_f64()
    );
}

/// The negative control: a source that keeps what a list after an outage no longer has.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn schedules_catch_removals_that_a_list_lost() {
    let since = Instant::now();
    let manner = Manner {
        defects: Defects { relist_keeps: true },
        never: Duration::from_secs(3),
        ..Manner::default()
    };
    let summary = run((0..120).collect(), manner).await;
    tell("schedules with the defect", &summary, since);
    let lost = summary
        .divergences
        .iter()
        .filter(|divergence| divergence.lost_removals > 0);
    assert!(lost.count() > 0, "{}", summary.line());
}
