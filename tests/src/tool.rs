//! Programs of the system in a namespace.

use std::process::{Command, Output};

use anyhow::{Context, Result, ensure};
use lb_user::lab::Netns;

/// Runs a program to its end in a namespace.
///
/// # Errors
/// Where it cannot be started, and what it said where it failed.
pub fn run(netns: &Netns, program: &str, arguments: &[&str]) -> Result<Output> {
    let mut command = Command::new(program);
    netns.place(command.args(arguments));
    let output = command.output().with_context(|| format!("start {program}"))?;
    ensure!(
        output.status.success(),
        "{program} {arguments:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(output)
}
