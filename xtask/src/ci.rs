//! What continuous integration runs; `.ci/run` does the same.

use std::process::ExitCode;

use anyhow::Result;

use crate::layout::Layout;
use crate::{lint, test};

/// `cargo xtask ci`: lint, then all tests.
pub(crate) fn command(layout: &Layout) -> Result<ExitCode> {
    lint::command(layout)?;
    test::command(layout, &test::Options::default())
}
