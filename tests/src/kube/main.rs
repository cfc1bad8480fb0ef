//! The command line of the cluster: `evenkeel-kube up|status|exec|down|run`.

use std::{fs, io::Write as _, path::PathBuf, process::ExitCode};

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use lb_user::lab::mounts::BpfFs;
use serde_json::json;

use super::{Cluster, process, report, standing};
use crate::interrupt;

/// A real control plane with three lab nodes
#[derive(Debug, Parser)]
#[command(name = "evenkeel-kube", version)]
struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Start a control plane, nodes and agents, and leave them standing
    Up,
    /// Say what stands, and how it is
    Status,
    /// Run a command in a place of the standing cluster
    Exec {
        /// The place, as `up` names it
        place: String,
        /// The command and its arguments
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
    /// Remove the standing cluster
    Down,
    /// Build a cluster, run the cases in it and remove it; exit 1 if one fails
    Run {
        /// Write the outcomes to this file, as JSON
        #[arg(long, value_name = "FILE")]
        json: Option<PathBuf>,
        /// Only the cases of these rows or names
        #[arg(value_name = "NAME")]
        names: Vec<String>,
    },
    /// Hold the cluster that `up` builds
    #[command(name = standing::HOLD, hide = true)]
    Hold,
    /// Serve as a Pod
    #[command(name = process::POD, hide = true)]
    Pod(process::PodArgs),
}

/// Does what the command line says.
pub fn main() -> ExitCode {
    match run(Args::parse().verb) {
        Ok(code) => code,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "evenkeel-kube: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run(verb: Verb) -> Result<ExitCode> {
    match verb {
        Verb::Up => {
            interrupt::catch()?;
            standing::up()?;
        }
        Verb::Status => standing::status()?,
        Verb::Exec { place, command } => standing::STANDING.exec(&place, &command)?,
        Verb::Down => standing::STANDING.down()?,
        Verb::Hold => standing::hold()?,
        Verb::Pod(args) => process::run(&args)?,
        Verb::Run { json, names } => return run_cases(json, &names),
    }
    Ok(ExitCode::SUCCESS)
}

fn run_cases(json: Option<PathBuf>, names: &[String]) -> Result<ExitCode> {
    interrupt::catch()?;
    report::select(names)?;
    let _mounts = BpfFs::enter_private()?;
    let cluster = Cluster::new(&report::say)?;
    let outcomes = report::run(&cluster, names)?;
    if let Some(file) = json {
        let all = json!({"rows": report::rows_json(&outcomes), "e2e": report::e2e_json(&outcomes)});
        let text = serde_json::to_string_pretty(&all)?;
        fs::write(&file, text + "\n").with_context(|| format!("write {}", file.display()))?;
    }
    report::say(&format!("\n{}", report::to_text(&outcomes)));
    let failed = outcomes.iter().any(|outcome| outcome.result.is_err());
    Ok(ExitCode::from(u8::from(failed)))
}
