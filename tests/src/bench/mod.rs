//! The bench: what Evenkeel costs on this kernel, and how well it balances, beside nftables rules as kube-proxy writes them.
//!
//! Here live the measurements, one a module, each of which says in its head what it measures and how. Everything happens
//! in network namespaces, child cgroups and a BPF file system of the bench's own, and is gone when it ends.

mod connect;
pub mod detector;
mod dial;
mod kube;
mod memory;
mod outside;
mod packets;
mod place;
mod population;
mod program;
mod records;
mod report;
mod selection;
mod stats;
mod sync;

use std::{
    fs,
    io::{self, Write as _},
    path::PathBuf,
    process::ExitCode,
    thread,
    time::Instant,
};

use anyhow::{Context, Result, bail};
use clap::Parser;
use lb_user::lab::ChildCgroup;

use self::report::Report;
use crate::{
    command_line, interrupt,
    kube_proxy::{Mode, process},
    runner::in_guest,
};

/// Measure what Evenkeel costs and how well it balances
#[derive(Debug, Parser)]
#[command(name = "evenkeel-bench", version)]
struct Args {
    /// Write what was measured to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Measure these parts alone: connect, program, packets, outside, records, sync, selection, memory, detector
    #[arg(long, value_name = "PART,..", value_delimiter = ',')]
    only: Vec<String>,
    /// Days of fair services that the detectors are tried on
    #[arg(long, value_name = "N", default_value_t = 2000, value_parser = clap::value_parser!(u32).range(1..))]
    service_days: u32,
    /// Measure the real kube-proxy beside Evenkeel; without `--only`, that alone
    #[arg(long)]
    kube: bool,
    /// With --kube: so many Services of ten endpoints each
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_values_t = [100, 1_000, 5_000, 10_000], value_parser = clap::value_parser!(u32).range(1..=20_000))]
    kube_services: Vec<u32>,
    /// With --kube: so many Services in the real API server; 0 leaves it out
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_values_t = [100, 1_000], value_parser = clap::value_parser!(u32).range(0..=20_000))]
    kube_api_services: Vec<u32>,
    /// With --kube: kube-proxy in these modes: nftables, iptables, ipvs
    #[arg(long, value_name = "MODE,..", value_delimiter = ',', default_values = ["nftables", "iptables"], value_parser = mode)]
    kube_modes: Vec<Mode>,
}

/// A mode of kube-proxy.
fn mode(text: &str) -> Result<Mode, String> {
    let mode = Mode::ALL.into_iter().find(|mode| mode.name() == text);
    mode.ok_or_else(|| "known are nftables, iptables and ipvs".to_owned())
}

/// A part of the bench.
type Part = (&'static str, fn(&mut Bench) -> Result<()>);

const PARTS: [Part; 9] = [
    ("connect", connect::measure),
    ("program", program::measure),
    ("packets", packets::measure),
    ("outside", outside::measure),
    ("records", records::measure),
    ("sync", sync::measure),
    ("selection", selection::measure),
    ("memory", memory::measure),
    ("detector", detector::measure),
];

/// What all parts share.
struct Bench {
    /// Where this process is between measurements; the arms' cgroups are below it.
    home: ChildCgroup,
    report: Report,
    /// Days of fair services that the detectors are tried on.
    service_days: u32,
    began: Instant,
}

impl Bench {
    /// A line of progress.
    fn say(&self, what: &str) {
        // Nobody to read it is no reason to stop.
        let _ = writeln!(io::stdout(), "[{:6.1} s] {what}", self.began.elapsed().as_secs_f64());
    }

    /// Fails once the bench is to stop.
    #[expect(
        clippy::unused_self,
        reason = "what may be measured, and for how long, is the bench's to say"
    )]
    fn check(&self) -> Result<()> {
        interrupt::check()
    }
}

/// Measures, prints, and says by its exit code whether every target was met.
pub fn main() -> ExitCode {
    let missed = run(&Args::parse());
    command_line::end(
        "evenkeel-bench",
        missed.map(|missed| ExitCode::from(u8::from(missed > 0))),
    )
}

/// Refuses modes of kube-proxy that cannot run here, before anything is measured.
fn can_run(modes: &[Mode]) -> Result<()> {
    for mode in modes {
        if let Some(reason) = process::missing(*mode)? {
            let elsewhere = if *mode == Mode::Ipvs && !in_guest() {
                "; `cargo xtask bench --kernel 6.12 --kube --kube-modes ipvs --kube-services 100 --kube-api-services 0` measures it in a \
                 virtual machine"
            } else {
                ""
            };
            bail!(
                "kube-proxy cannot run in its mode {} here: {reason}{elsewhere}",
                mode.name()
            );
        }
    }
    Ok(())
}

fn run(args: &Args) -> Result<usize> {
    interrupt::catch()?;
    if args.kube {
        can_run(&args.kube_modes)?;
    }
    let home = ChildCgroup::new("bench")?;
    home.join()?;
    let (cpu, _) = place::cpus();
    place::pin(cpu)?;
    let mut bench = Bench {
        home,
        report: Report::default(),
        service_days: args.service_days,
        began: Instant::now(),
    };
    // Other work on the machine makes everything slower, and not everything alike: the reader must know.
    let load = fs::read_to_string("/proc/loadavg").ok();
    let load: Option<f64> = load.and_then(|text| text.split_whitespace().next()?.parse().ok());
    if let Some(load) = load {
        bench.report.add(
            report::Metric::new("machine_load", "1", load, 1).with("cpus", thread::available_parallelism()?.get()),
        );
        if load > 1.0 {
            bench.say(&format!(
                "this machine is busy (load {load:.1}): what is measured now is slower than it could be"
            ));
        }
    }
    for (name, measure) in PARTS {
        if (args.only.is_empty() && !args.kube) || args.only.iter().any(|only| only == name) {
            bench.say(name);
            measure(&mut bench).with_context(|| format!("measure {name}"))?;
        }
    }
    let mut measured = Ok(());
    if args.kube {
        let options = kube::Options {
            services: args.kube_services.clone(),
            real_services: args
                .kube_api_services
                .iter()
                .copied()
                .filter(|count| *count > 0)
                .collect(),
            modes: args.kube_modes.clone(),
        };
        measured = kube::measure(&mut bench, &options).context("measure Evenkeel beside kube-proxy");
    }
    command_line::write_json(args.json.as_deref(), &bench.report.to_json())?;
    writeln!(io::stdout(), "\n{}", bench.report.to_text())?;
    measured?;
    Ok(bench.report.missed())
}
