//! `evenkeel demo`: hands its flags to the demonstration.

use std::path::PathBuf;

use clap::Args;

use super::{Failure, Found};
use crate::demo::{self, Options};

/// Show Evenkeel at work in private namespaces, with real connections (as root)
#[derive(Debug, Args)]
#[command(
    after_help = "It takes about 30 s and leaves nothing behind.\n\nExamples:\n  sudo evenkeel demo\n  \
    sudo evenkeel demo --json demo.json --svg demo.svg\n  \
    sudo evenkeel demo --keep"
)]
pub(super) struct DemoArgs {
    /// Write the outcome as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the picture as SVG
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Write what the agent itself saw, over time, as a page
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Leave everything running after the last act, until Ctrl-C
    #[arg(long)]
    keep: bool,
    /// Connections of the steady act
    #[arg(long, value_name = "N", default_value_t = 6_000, value_parser = clap::value_parser!(u64).range(100..=1_000_000))]
    connections: u64,
}

pub(super) fn run(args: &DemoArgs) -> Result<Found, Failure> {
    let options = Options {
        json: args.json.clone(),
        svg: args.svg.clone(),
        report: args.report.clone(),
        keep: args.keep,
        connections: args.connections,
        program: None,
    };
    Ok(Found::Code(demo::run(&options)?))
}
