//! The demonstration: `evenkeel demo`.

use std::ffi::OsString;

/// Runs the demonstration with its own arguments.
pub fn run(_args: &[OsString]) -> anyhow::Result<()> {
    anyhow::bail!("this build has no datapath to demonstrate")
}
