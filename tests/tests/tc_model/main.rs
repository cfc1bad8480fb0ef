//! The packet programs against the plain model of them: random scripts of packets, changes and time, and packets that are mangled
//! in every way that chance finds.
//!
//! A failure prints the seed, and the shortest script that still fails: `EVENKEEL_SEED=N` plays that seed alone.

use std::{fmt::Write as _, process::ExitCode};

use anyhow::{Result, bail};
use lb_tests::{
    model::{Script, minimise},
    runner::{self, scaled, test},
};

fn main() -> ExitCode {
    runner::run(vec![
        test("scripts_agree", || scripts(1, scaled(150, 8), 300, 0)),
        test("scripts_of_mangled_packets_agree", || {
            scripts(1_001, scaled(150, 8), 300, 2)
        }),
    ])
}

/// The seed that is asked for, if one is.
fn asked() -> Option<u64> {
    std::env::var("EVENKEEL_SEED").ok()?.parse().ok()
}

fn scripts(first: u64, count: usize, length: usize, mangled: usize) -> Result<()> {
    let seeds = match asked() {
        Some(seed) => seed..seed + 1,
        None => first..first + count as u64,
    };
    for seed in seeds {
        let script = Script::of(seed, length, mangled);
        if script.play(|_| ()).is_err() {
            let least = minimise(&script, |script| script.play(|_| ()).is_err());
            let mut told = String::new();
            let result = least.play(|said| {
                let _ = writeln!(told, "{said}");
            });
            let why = result.map_or_else(|error| format!("{error:#}"), |()| "it depends on time".to_owned());
            bail!("seed {seed}, {} of {length} steps:\n{told}{why}", least.ops.len());
        }
    }
    Ok(())
}
