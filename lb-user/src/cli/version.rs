//! `evenkeel version`.

use clap::Args;
use serde::Serialize;

use super::{
    Context, Failure, Found,
    output::{self, Format},
};
use crate::view::SCHEMA_VERSION;

/// Print the version, and that of the layout shared with the kernel programs
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  evenkeel version\n  evenkeel version -o json")]
pub(super) struct VersionArgs {}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct VersionDocument {
    schema_version: u32,
    kind: &'static str,
    version: &'static str,
    abi: u32,
    architecture: &'static str,
}

pub(super) fn run(_args: &VersionArgs, context: &Context) -> Result<Found, Failure> {
    let document = VersionDocument {
        schema_version: SCHEMA_VERSION,
        kind: "Version",
        version: env!("CARGO_PKG_VERSION"),
        abi: lb_common::abi::ABI_VERSION,
        architecture: std::env::consts::ARCH,
    };
    let text = match context.output.format {
        Format::Json | Format::Yaml => context.output.document(&document)?,
        Format::Table | Format::Wide | Format::Name => {
            format!(
                "evenkeel {} (abi {}, {})\n",
                document.version, document.abi, document.architecture
            )
        }
    };
    output::write(&text)?;
    Ok(Found::Fine)
}
