//! `evenkeel completion`: completion scripts for shells.

use clap::{Args, CommandFactory};
use clap_complete::Shell;

use super::{Cli, Failure, Found, output};

/// Print a completion script for a shell
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    source <(evenkeel completion bash)\n  \
    evenkeel completion fish > ~/.config/fish/completions/evenkeel.fish")]
pub(super) struct CompletionArgs {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

pub(super) fn run(args: &CompletionArgs) -> Result<Found, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "evenkeel", &mut script);
    output::write(&String::from_utf8_lossy(&script))?;
    Ok(Found::Fine)
}
