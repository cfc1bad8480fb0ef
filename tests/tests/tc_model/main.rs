//! The packet programs against the plain model of them: random scripts of packets, changes and time, and packets that are mangled
//! in every way that chance finds.
//!
//! A failure prints the seed, and the shortest script that still fails: `EVENKEEL_SEED=N` plays that seed alone.

mod race;

use std::process::ExitCode;

use anyhow::{Result, ensure};
use lb_common::counter::{action, hook};
use lb_tests::{
    model::{Counts, Script, fuzz, play},
    runner::{self, scaled, test},
};

fn main() -> ExitCode {
    runner::run(vec![
        test("scripts_agree", || {
            let counted = scripts(scaled(150, 6), |seed| Script::of(seed, 400, 0))?;
            if asked().is_none() && !runner::in_guest() {
                everything_happened(&counted)?;
            }
            Ok(())
        }),
        test("scripts_of_mangled_packets_agree", || {
            scripts(scaled(60, 4), |seed| Script::of(seed, 400, 2)).map(drop)
        }),
        test("fuzz::the_programs", || {
            scripts(scaled(20, 2), |seed| Script::of_noise(seed, 2_000)).map(drop)
        }),
        test("several_processors_end_each_flow_once", race::slots),
        test("fuzz::the_parser", || parser(scaled(300_000, 20_000))),
        test("fuzz::the_seeds_are_those_that_are_built", seeds),
    ])
}

/// The seed that is asked for, if one is.
fn asked() -> Option<u64> {
    std::env::var("EVENKEEL_SEED").ok()?.parse().ok()
}

/// Plays scripts of so many seeds.
fn scripts(count: usize, of: impl Fn(u64) -> Script) -> Result<Counts> {
    let seeds = match asked() {
        Some(seed) => seed..seed + 1,
        None => 1..1 + count as u64,
    };
    let mut counted = Counts::new();
    for seed in seeds {
        for (what, count) in play(seed, &of(seed))? {
            *counted.entry(what).or_default() += count;
        }
    }
    Ok(counted)
}

fn parser(count: usize) -> Result<()> {
    let kinds = fuzz::parser(asked().unwrap_or(1), count as u64)?;
    ensure!(
        kinds.iter().all(|of_kind| *of_kind > count as u64 / 100),
        "the fuzzer meets every kind: {kinds:?}"
    );
    Ok(())
}

fn seeds() -> Result<()> {
    // In a guest there are no files.
    if runner::in_guest() {
        return Ok(());
    }
    fuzz::compare_files(std::env::var_os("EVENKEEL_BLESS").is_some())
}

/// Scripts that never come to something would agree on it for nothing.
fn everything_happened(counted: &Counts) -> Result<()> {
    use lb_common::counter::action::{
        COLLISION, EVICTED, FLOWS_FULL, FRAGMENT_UNKNOWN, ICMP_TRANSLATED, MISS, NEW_FLOW, NO_SOURCE, POLICY_DROPPED,
        PORTS_EXHAUSTED, RECLAIMED, RECORDED, REFUSED, RERESOLVED, RESUMED, REUSED, SOURCE_DENIED, TRANSLATED,
        UNANSWERED,
    };
    let ingress = [
        MISS,
        TRANSLATED,
        REFUSED,
        RECORDED,
        NEW_FLOW,
        REUSED,
        RESUMED,
        RERESOLVED,
        POLICY_DROPPED,
        SOURCE_DENIED,
        FLOWS_FULL,
        FRAGMENT_UNKNOWN,
        ICMP_TRANSLATED,
        RECLAIMED,
        EVICTED,
        UNANSWERED,
        COLLISION,
    ];
    let egress = [
        MISS,
        TRANSLATED,
        RECORDED,
        PORTS_EXHAUSTED,
        NO_SOURCE,
        FRAGMENT_UNKNOWN,
        ICMP_TRANSLATED,
    ];
    let wanted = ingress
        .map(|action| (hook::INGRESS, action))
        .into_iter()
        .chain(egress.map(|action| (hook::EGRESS, action)));
    for (hook, action) in wanted {
        let count = counted.get(&(hook, action)).copied().unwrap_or(0);
        ensure!(
            count > 0,
            "{}/{} never happened in all scripts",
            hook::NAMES[hook as usize],
            action::NAMES[action as usize]
        );
    }
    Ok(())
}
