//! Runs commands and tests inside a virtual machine with an older kernel.
//!
//! `image` decides what the guest holds and what it does, `archive` and `modules` make files of it, `qemu` runs it. The
//! guest has no network and no disk; everything is said on its console. The invariant: a guest is dead when these
//! functions return, and its console is kept in `target/vm/KERNEL/console.log`.

mod archive;
mod image;
mod modules;
mod qemu;

pub(crate) use image::{Image, Program, quote};
pub(crate) use qemu::{Ending, Guest};

use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::command::{say, step};
use crate::layout::Layout;
use crate::setup::{self, Group, GuestKernel, KernelLine};
use crate::test::targets;

/// Marks the guest's own words on the console.
pub(crate) const MARK: &str = "EVENKEEL-VM:";

/// Arguments of `cargo xtask vm`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// The kernel: 6.1 or 6.12.
    #[arg(long, value_parser = crate::kernel_line)]
    kernel: KernelLine,
    /// Kill the guest after so many seconds.
    #[arg(long, default_value_t = 600, value_name = "SECONDS")]
    timeout: u64,
    /// The command and its arguments.
    #[arg(last = true, required = true, value_name = "CMD")]
    command: Vec<OsString>,
}

/// `cargo xtask vm`: the exit status is the command's.
pub(crate) fn command(layout: &Layout, options: &Options) -> Result<ExitCode> {
    setup::require(layout, &[Group::Build, Group::Vm])?;
    let built = targets::build(layout)?;
    let mut image = Image::new(built.guest_programs());
    image.run(&shell_words(&options.command)?);
    let guest = prepare(layout, options.kernel, &image)?;
    let mut over = false;
    let ending = guest.boot(Duration::from_secs(options.timeout), &mut |line| {
        over |= line.starts_with(MARK);
        if !over {
            // A closed standard output must not keep the guest from being reaped.
            let _ = writeln!(io::stdout().lock(), "{line}");
        }
    })?;
    say(&format!(
        "xtask: guest {}; console in {}",
        ending.said(),
        guest.console().display()
    ));
    Ok(match ending {
        Ending::Exit(code) => ExitCode::from(u8::try_from(code).unwrap_or(1)),
        Ending::Died | Ending::TimedOut(_) => ExitCode::FAILURE,
    })
}

/// Writes the guest's archive for a kernel that is in the cache.
pub(crate) fn prepare(layout: &Layout, line: KernelLine, image: &Image) -> Result<Guest> {
    let kernel = GuestKernel::find(layout, line)
        .with_context(|| format!("no kernel {line} in the cache: `cargo xtask setup` brings it"))?;
    let folder = layout.root.join("target/vm").join(line.name());
    step(&format!("packing the guest for kernel {}", kernel.release), || {
        let archive = image.pack(&kernel)?;
        Guest::new(kernel, folder, &archive)
    })
}

/// Joins words so that the guest's shell takes them apart in the same way.
pub(crate) fn shell_words(words: &[OsString]) -> Result<String> {
    let quoted: Result<Vec<_>> = words
        .iter()
        .map(|word| {
            let word = word.to_str().context("the command is not UTF-8")?;
            Ok(quote(word))
        })
        .collect();
    Ok(quoted?.join(" "))
}
