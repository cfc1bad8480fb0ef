//! The command line of the lab: `evenkeel-lab up|exec|down|run|soak`.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::Result;
use clap::{Parser, Subcommand};
use lb_user::lab::mounts::BpfFs;

use super::{report, soak, standing};
use crate::{command_line, interrupt};

/// A cluster of three nodes in network namespaces
#[derive(Debug, Parser)]
#[command(name = "evenkeel-lab", version)]
struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Build the lab, start its agents and leave it standing
    Up,
    /// Run a command in a place of the standing lab
    Exec {
        /// The place, as `up` names it
        place: String,
        /// The command and its arguments
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
    /// Remove the standing lab
    Down,
    /// Build a lab, run the cases in it and remove it; exit 1 if one fails
    Run {
        /// Write an entry for each row and family to this file, as JSON
        #[arg(long, value_name = "FILE")]
        json: Option<PathBuf>,
        /// Only the cases of these rows
        #[arg(value_name = "ROW")]
        rows: Vec<String>,
    },
    /// Reuse tuples at scale, and scan the flow table under load
    Soak {
        #[command(flatten)]
        options: soak::Options,
        /// Write an entry for each row and family to this file, as JSON
        #[arg(long, value_name = "FILE")]
        json: Option<PathBuf>,
    },
    /// Hold the lab that `up` builds
    #[command(name = standing::HOLD, hide = true)]
    Hold,
}

/// Does what the command line says.
pub fn main() -> ExitCode {
    command_line::end("evenkeel-lab", run(Args::parse().verb))
}

fn run(verb: Verb) -> Result<ExitCode> {
    match verb {
        Verb::Up => {
            interrupt::catch()?;
            standing::up()?;
        }
        Verb::Exec { place, command } => standing::STANDING.exec(&place, &command)?,
        Verb::Down => standing::STANDING.down()?,
        Verb::Hold => standing::hold()?,
        Verb::Run { json, rows } => return conclude(json.as_deref(), || report::run(&rows)),
        Verb::Soak { options, json } => return conclude(json.as_deref(), || soak::run(&options)),
    }
    Ok(ExitCode::SUCCESS)
}

/// Lets outcomes come about, and tells them.
fn conclude(json: Option<&Path>, work: impl FnOnce() -> Result<Vec<report::Outcome>>) -> Result<ExitCode> {
    interrupt::catch()?;
    let _mounts = BpfFs::enter_private()?;
    let outcomes = work()?;
    command_line::write_json(json, &report::to_json(&outcomes))?;
    command_line::say(&format!("\n{}", report::to_text(&outcomes)));
    let failed = outcomes.iter().any(|outcome| outcome.result.is_err());
    Ok(ExitCode::from(u8::from(failed)))
}
