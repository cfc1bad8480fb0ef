//! `evenkeel demo`: hands its arguments to the demonstration.

use std::ffi::OsString;

use clap::Args;

use super::{Failure, Found};

/// Show Evenkeel at work in private namespaces, with real connections (as root)
#[derive(Debug, Args)]
#[command(disable_help_flag = true)]
#[command(after_help = "Examples:\n  sudo evenkeel demo\n  sudo evenkeel demo --json demo.json")]
pub(super) struct DemoArgs {
    /// Flags of the demonstration; `--help` shows them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "FLAGS")]
    args: Vec<OsString>,
}

pub(super) fn run(args: &DemoArgs) -> Result<Found, Failure> {
    crate::demo::run(&args.args)?;
    Ok(Found::Fine)
}
