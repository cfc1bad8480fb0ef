//! The command line of the cluster: `evenkeel-kube up|status|exec|down|run`.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::Result;
use clap::{Parser, Subcommand};
use lb_user::lab::mounts::BpfFs;
use serde_json::json;

use super::{
    Cluster,
    faults::{self, Schedule},
    process, report, standing,
};
use crate::{
    command_line::{self, say, write_json},
    interrupt,
};

/// Schedules of faults in a whole run.
const SCHEDULES: u64 = 50;

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
    /// Build a cluster, run the cases and schedules of faults in it and remove it; exit 1 if anything fails
    Run {
        /// Write the outcomes to this file, as JSON
        #[arg(long, value_name = "FILE")]
        json: Option<PathBuf>,
        /// How many schedules of faults, where no names are given; one in which name lookup fails for three minutes comes beside them
        #[arg(long, default_value_t = SCHEDULES)]
        schedules: u64,
        /// Only the cases of these rows or names
        #[arg(value_name = "NAME")]
        names: Vec<String>,
    },
    /// Play schedules of faults in a cluster of one's own; exit 1 if something went wrong
    Faults {
        /// How many schedules
        #[arg(long, default_value_t = SCHEDULES)]
        count: u64,
        /// Play the schedule of this seed alone
        #[arg(long)]
        seed: Option<u64>,
        /// Play the one alone in which name lookup fails for three minutes
        #[arg(long, conflicts_with_all = ["count", "seed"])]
        lost_names: bool,
        /// Write the outcome to this file, as JSON
        #[arg(long, value_name = "FILE")]
        json: Option<PathBuf>,
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
    command_line::end("evenkeel-kube", run(Args::parse().verb))
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
        Verb::Faults {
            count,
            seed,
            lost_names,
            json,
        } => {
            let schedules = match seed {
                Some(seed) => vec![Schedule::of(seed)],
                None if lost_names => vec![Schedule::of_lost_names()],
                None => (1..=count).map(Schedule::of).collect(),
            };
            return play_faults(schedules, json.as_deref());
        }
        Verb::Run { json, schedules, names } => return run_all(json.as_deref(), schedules, &names),
    }
    Ok(ExitCode::SUCCESS)
}

fn play_faults(schedules: Vec<Schedule>, json: Option<&Path>) -> Result<ExitCode> {
    interrupt::catch()?;
    let _mounts = BpfFs::enter_private()?;
    let cluster = Cluster::new(&say)?;
    let tally = faults::play(&cluster, schedules)?;
    write_json(json, &tally.to_json())?;
    say(&format!("\n{tally}"));
    Ok(ExitCode::from(u8::from(!tally.is_good())))
}

fn run_all(json: Option<&Path>, schedules: u64, names: &[String]) -> Result<ExitCode> {
    interrupt::catch()?;
    report::select(names)?;
    let _mounts = BpfFs::enter_private()?;
    let cluster = Cluster::new(&say)?;
    let outcomes = report::run(&cluster, names)?;
    let mut all = json!({"rows": report::rows_json(&outcomes), "e2e": report::e2e_json(&outcomes)});
    let mut failed = outcomes.iter().any(|outcome| outcome.result.is_err());
    let mut text = report::to_text(&outcomes);
    if names.is_empty() && schedules > 0 {
        let of_seeds = (1..=schedules).map(Schedule::of);
        let tally = faults::play(&cluster, of_seeds.chain([Schedule::of_lost_names()]))?;
        all["faults"] = tally.to_json();
        failed |= !tally.is_good();
        text = format!("{text}\n{tally}");
    }
    write_json(json, &all)?;
    say(&format!("\n{text}"));
    Ok(ExitCode::from(u8::from(failed)))
}
