//! What the programs of this crate share: how they end, and what they say and write.

use std::{
    fs,
    io::{self, Write as _},
    path::Path,
    process::ExitCode,
};

use anyhow::{Context, Result};
use serde_json::Value;

/// A program's exit status; an error is told with the program's name, and is status 2.
pub fn end(program: &str, ended: Result<ExitCode>) -> ExitCode {
    ended.unwrap_or_else(|error| {
        let _ = writeln!(io::stderr(), "{program}: {error:#}");
        ExitCode::from(2)
    })
}

/// Writes a line to standard output.
pub fn say(line: &str) {
    // Nobody to read it is no reason to stop.
    let _ = writeln!(io::stdout(), "{line}");
}

/// Writes a value into a file, if one was asked for.
///
/// # Errors
/// Where it cannot be written.
pub fn write_json(file: Option<&Path>, value: &Value) -> Result<()> {
    let Some(file) = file else {
        return Ok(());
    };
    let text = serde_json::to_string_pretty(value)?;
    fs::write(file, text + "\n").with_context(|| format!("write {}", file.display()))
}
