//! The fuzzer as a program of its own, for as many packets as are wanted.

use std::{
    io::{self, Write},
    process::ExitCode,
    time::Instant,
};

use anyhow::{Context, Result};
use clap::Parser;
use lb_common::counter::{action, hook};

use super::parser;
use crate::model::{Counts, Script, duel::ONCE, play};

/// Steps of one script: its table and its Services begin anew with each.
const STEPS: usize = 10_000;
/// Packets after which it is said how far things are.
const REPORT: u64 = 1_000_000;

/// Compare the parser and the packet programs with a plain model, on broken packets.
#[derive(Debug, Parser)]
#[command(name = "evenkeel-fuzz", max_term_width = 100)]
struct Arguments {
    /// Packets for each of the two.
    #[arg(long, default_value_t = 10_000_000)]
    count: u64,
    /// What all packets follow from; a failure names the seed that plays it alone.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Runs the fuzzer by the command line.
pub fn main() -> ExitCode {
    match fuzz(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr(), "evenkeel-fuzz: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn fuzz(arguments: &Arguments) -> Result<()> {
    let start = Instant::now();
    let mut read = [0u64; 4];
    let mut done = 0;
    let mut seed = arguments.seed;
    while done < arguments.count {
        let count = REPORT.min(arguments.count - done);
        let kinds = parser(seed, count).with_context(|| format!("the parser, seed {seed}"))?;
        for (sum, of_kind) in read.iter_mut().zip(kinds) {
            *sum += of_kind;
        }
        done += count;
        seed += 1;
    }
    let [foreign, malformed, transport, errors] = read;
    say(&format!(
        "parser: {done} packets agree ({transport} TCP or UDP, {errors} ICMP errors, {foreign} foreign, {malformed} \
         malformed) in {:.0} s",
        start.elapsed().as_secs_f64()
    ))?;
    let start = Instant::now();
    let mut counts = Counts::new();
    let mut seed = arguments.seed;
    let mut done = 0;
    let mut said = 0;
    while done < arguments.count {
        for (what, count) in play(seed, &Script::of_noise(seed, STEPS))? {
            *counts.entry(what).or_default() += count;
        }
        done = packets(&counts);
        seed += 1;
        if done / REPORT > said {
            said = done / REPORT;
            say(&format!(
                "programs: {done} packets in {:.0} s",
                start.elapsed().as_secs_f64()
            ))?;
        }
    }
    say(&format!(
        "programs: {done} packets agree, each counted once, in {:.0} s",
        start.elapsed().as_secs_f64()
    ))?;
    for ((hook, action), count) in &counts {
        let (hook, action) = (hook::NAMES[*hook as usize], action::NAMES[*action as usize]);
        say(&format!("  {hook:8} {action:18} {count}"))?;
    }
    Ok(())
}

/// Packets that were counted, each once.
fn packets(counts: &Counts) -> u64 {
    counts
        .iter()
        .filter(|((_, action), _)| ONCE.contains(action))
        .map(|(_, count)| count)
        .sum()
}

fn say(text: &str) -> io::Result<()> {
    writeln!(io::stdout().lock(), "{text}")
}
