//! `evenkeel cleanup`: removes what an agent left in the kernel.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use clap::Args;
use serde::Serialize;

use super::{
    Context, Failure, Found,
    output::{self, Format},
};
use crate::{
    config::parse_pin_name,
    datapath::{attach, pins::Pins},
    view::SCHEMA_VERSION,
};

/// Remove the pinned programs, links and maps that a stopped agent left in the kernel
#[derive(Debug, Args)]
#[command(
    after_help = "New connections go where they are sent from then on; open ones stay with their backend.\n\nExamples:\n  \
    evenkeel cleanup --dry-run\n  \
    evenkeel cleanup"
)]
pub(super) struct CleanupArgs {
    /// The BPF file system
    #[arg(long, env = "EVENKEEL_BPFFS", value_name = "PATH", default_value = "/sys/fs/bpf")]
    bpffs: PathBuf,
    /// The folder of the pins under the BPF file system
    #[arg(long, env = "EVENKEEL_PIN_NAME", value_name = "NAME", default_value = "evenkeel", value_parser = parse_pin_name)]
    pin_name: String,
    /// Only say what would be removed
    #[arg(long)]
    dry_run: bool,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct CleanupDocument {
    schema_version: u32,
    kind: &'static str,
    dry_run: bool,
    removed: Vec<String>,
}

pub(super) fn run(args: &CleanupArgs, context: &Context) -> Result<Found, Failure> {
    let pins = Pins::new(&args.bpffs, &args.pin_name);
    // Held until the end, so that no agent starts on half of its pins. What is not there needs no lock, nor does looking.
    let _lock = if !args.dry_run && pins.root().exists() {
        Some(pins.lock().map_err(|error| locked(pins.root(), error))?)
    } else {
        None
    };
    // Programs go before their maps. Filters are nobody's: they are looked for on every interface.
    let filters = attach::remove_filters(&pins, args.dry_run).map_err(anyhow::Error::from)?;
    let filters = filters
        .into_iter()
        .map(|(program, interface)| format!("filter {program} of {interface}"));
    let pinned = clean(pins.root(), args.dry_run)?;
    let removed: Vec<String> = filters
        .chain(pinned.iter().map(|path| path.display().to_string()))
        .collect();
    let text = match context.output.format {
        Format::Json | Format::Yaml => context.output.document(&CleanupDocument {
            schema_version: SCHEMA_VERSION,
            kind: "Cleanup",
            dry_run: args.dry_run,
            removed,
        })?,
        Format::Name => output::one_a_line(removed),
        Format::Table | Format::Wide if removed.is_empty() => "nothing to remove\n".to_owned(),
        Format::Table | Format::Wide => {
            let verb = if args.dry_run { "would remove" } else { "removed" };
            output::one_a_line(removed.iter().map(|what| format!("{verb} {what}")))
        }
    };
    output::write(&text)?;
    Ok(Found::Fine)
}

fn locked(folder: &Path, error: io::Error) -> anyhow::Error {
    if error.kind() == io::ErrorKind::WouldBlock {
        return anyhow::anyhow!(
            "an agent holds {}: stop it first, or it puts everything back",
            folder.display()
        );
    }
    anyhow::Error::from(error).context(folder.display().to_string())
}

/// Removes a folder of pins, and says what went: links first, so that no program runs without its maps' pins.
fn clean(folder: &Path, dry_run: bool) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut folders = Vec::new();
    collect(folder, &mut files, &mut folders).with_context(|| folder.display().to_string())?;
    files.sort_by_key(|path| (!is_link(path), path.clone()));
    if !dry_run {
        for path in &files {
            fs::remove_file(path).with_context(|| path.display().to_string())?;
        }
        // Deepest first: a folder must be empty to go.
        for path in folders.iter().rev() {
            fs::remove_dir(path).with_context(|| path.display().to_string())?;
        }
    }
    Ok(files)
}

fn is_link(path: &Path) -> bool {
    path.file_name()
        .and_then(|name| name.to_str())
        .is_some_and(|name| name.starts_with("link-"))
}

/// Lists what a folder holds, itself included; no link is followed. A folder that is not there holds nothing.
fn collect(folder: &Path, files: &mut Vec<PathBuf>, folders: &mut Vec<PathBuf>) -> io::Result<()> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    folders.push(folder.to_owned());
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            collect(&entry.path(), files, folders)?;
        } else {
            files.push(entry.path());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_under_the_folder_goes_links_first() {
        let root = tempfile::tempdir().expect("a folder");
        let pins = root.path().join("evenkeel");
        fs::create_dir_all(pins.join("1")).expect("folders");
        for file in ["1/FRONTENDS", "1/link-connect4", "1/zz", "lock"] {
            fs::write(pins.join(file), "").expect("a file");
        }
        fs::write(root.path().join("other"), "").expect("somebody else's pin");
        std::os::unix::fs::symlink(root.path(), pins.join("1/away")).expect("a symbolic link");

        let planned = clean(&pins, true).expect("a dry run");
        assert_eq!(planned.len(), 5);
        assert!(planned[0].ends_with("link-connect4"), "{planned:?}");
        assert!(pins.join("1/zz").exists());

        assert_eq!(clean(&pins, false).expect("the real run"), planned);
        assert!(!pins.exists());
        assert!(root.path().join("other").exists());
        assert!(clean(&pins, false).expect("nothing is left").is_empty());
    }
}
