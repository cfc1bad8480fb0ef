//! The command line: one verb a file, each a thin client that asks, prints and says by its exit code how things are.
//!
//! Exit codes: 0 fine, 1 found a problem, 2 usage, 3 the agent is unreachable. Verbs hold no knowledge of the kernel; the
//! agent answers over the control socket, and `doctor`, `cleanup`, `completion` and `version` need no agent.

mod agent;
mod backend;
mod cleanup;
mod completion;
mod conn;
mod demo;
mod diagnose;
mod doctor;
mod explain;
mod graph;
mod grid;
mod map;
mod observe;
mod output;
mod report;
mod reuse;
mod service;
mod status;
mod table;
#[cfg(test)]
mod tests;
mod top;
mod version;

use std::{io::Write, path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};
use output::{Chosen, ColorChoice, Output};

use crate::{
    control::{self, AskError},
    view::{Answer, Query, QueryError},
};

/// Even load for Kubernetes Services by eBPF, and proof of where it is uneven.
#[derive(Debug, Parser)]
#[command(
    name = "evenkeel",
    version,
    max_term_width = 100,
    propagate_version = false,
    disable_help_subcommand = true
)]
#[command(after_help = "Exit codes: 0 fine, 1 found a problem, 2 usage, 3 the agent is unreachable.")]
struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    verb: Verb,
}

/// Flags of every verb.
#[derive(Debug, clap::Args)]
struct Global {
    /// How to print: a table, a wide table, JSON, YAML, or names alone
    #[arg(short, long, global = true, value_enum, default_value_t = Chosen::Table, help_heading = "Options of every command")]
    output: Chosen,
    /// Leave out the tables' first line
    #[arg(long, global = true, help_heading = "Options of every command")]
    no_headers: bool,
    /// When to colour; NO_COLOR turns `auto` off
    #[arg(long, global = true, value_enum, default_value_t = ColorChoice::Auto, value_name = "WHEN", help_heading = "Options of every command")]
    color: ColorChoice,
    /// The agent's control socket
    #[arg(long, global = true, env = "EVENKEEL_SOCKET", value_name = "PATH", default_value = control::DEFAULT_SOCKET, help_heading = "Options of every command")]
    socket: PathBuf,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Agent(Box<agent::AgentArgs>),
    Status(status::StatusArgs),
    Doctor(doctor::DoctorArgs),
    Service(service::ServiceArgs),
    Backend(backend::BackendArgs),
    Conn(conn::ConnArgs),
    Reuse(reuse::ReuseArgs),
    Diagnose(diagnose::DiagnoseArgs),
    Observe(Box<observe::ObserveArgs>),
    Graph(graph::GraphArgs),
    Top(top::TopArgs),
    Report(report::ReportArgs),
    Table(table::TableArgs),
    Explain(explain::ExplainArgs),
    Map(map::MapArgs),
    Cleanup(cleanup::CleanupArgs),
    Completion(completion::CompletionArgs),
    Version(version::VersionArgs),
    Demo(demo::DemoArgs),
}

/// What a verb found.
#[derive(Clone, Copy, Debug)]
enum Found {
    /// All is well.
    Fine,
    /// Something is not as it should be; the output says what.
    Problem,
    /// The verb knows more than fine or not: 130 says that the demo was interrupted.
    Code(ExitCode),
}

/// Why a verb could not do its work.
#[derive(Debug, thiserror::Error)]
enum Failure {
    /// The command line asks for what cannot be.
    #[error("{0}")]
    Usage(String),
    /// The agent did not answer.
    #[error(transparent)]
    Ask(#[from] AskError),
    /// Anything else.
    #[error("{0:#}")]
    Other(#[from] anyhow::Error),
}

impl Failure {
    fn code(&self) -> u8 {
        match self {
            Self::Usage(_) | Self::Ask(AskError::Refused(QueryError::Invalid(_))) => 2,
            Self::Ask(AskError::Unreachable { .. } | AskError::Lost { .. }) => 3,
            Self::Ask(_) | Self::Other(_) => 1,
        }
    }
}

/// What a verb works with.
#[derive(Debug)]
struct Context {
    output: Output,
    socket: PathBuf,
}

impl Context {
    fn ask(&self, query: &Query) -> Result<Answer, Failure> {
        Ok(control::ask(&self.socket, query)?)
    }

    /// Asks and prints.
    fn show(&self, query: &Query) -> Result<Answer, Failure> {
        let answer = self.ask(query)?;
        self.output.print(&answer)?;
        Ok(answer)
    }
}

/// Runs the command line of this process.
pub fn run() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let _closed_pipe = error.print();
            return ExitCode::from(u8::from(error.use_stderr()) * 2);
        }
    };
    match perform(cli) {
        Ok(Found::Fine) => ExitCode::SUCCESS,
        Ok(Found::Problem) => ExitCode::from(1),
        Ok(Found::Code(code)) => code,
        Err(failure) => {
            let _closed_pipe = writeln!(std::io::stderr(), "evenkeel: {failure}");
            ExitCode::from(failure.code())
        }
    }
}

fn perform(cli: Cli) -> Result<Found, Failure> {
    let (format, picture) = cli.global.output.split();
    if let Some(picture) = picture.filter(|_| !matches!(cli.verb, Verb::Graph(_))) {
        return Err(picture.refused());
    }
    let context = Context {
        output: Output::new(format, !cli.global.no_headers, cli.global.color),
        socket: cli.global.socket,
    };
    match cli.verb {
        Verb::Agent(args) => agent::run(*args, context.socket),
        Verb::Status(args) => status::run(&args, &context),
        Verb::Doctor(args) => doctor::run(&args, &context),
        Verb::Service(args) => service::run(&args, &context),
        Verb::Backend(args) => backend::run(&args, &context),
        Verb::Conn(args) => conn::run(&args, &context),
        Verb::Reuse(args) => reuse::run(&args, &context),
        Verb::Diagnose(args) => diagnose::run(&args, &context),
        Verb::Observe(args) => observe::run(*args, &context),
        Verb::Graph(args) => graph::run(&args, picture, &context),
        Verb::Top(args) => top::run(&args, &context),
        Verb::Report(args) => report::run(&args, &context),
        Verb::Table(args) => table::run(&args, &context),
        Verb::Explain(args) => explain::run(&args, &context),
        Verb::Map(args) => map::run(&args, &context),
        Verb::Cleanup(args) => cleanup::run(&args, &context),
        Verb::Completion(args) => completion::run(&args),
        Verb::Version(args) => version::run(&args, &context),
        Verb::Demo(args) => demo::run(&args),
    }
}
