//! Finds what a task needs from the machine, and installs it where that is possible.
//!
//! What is needed stands in [`needs`]; how the package manager is asked in [`apt`]. The invariants: asking is quick and
//! changes nothing; system packages are installed only as root with apt; anything else goes into the user's own cache.

mod apt;
mod control_plane;
mod kernels;
mod needs;
mod prometheus;

pub(crate) use control_plane::find as find_control_plane;
pub(crate) use kernels::{GuestKernel, KernelLine};
pub(crate) use needs::Group;
pub(crate) use prometheus::find as find_prometheus;

use std::process::Command;

use anyhow::{Result, bail};

use self::apt::Apt;
use self::needs::{Cure, Need, missing};
use crate::command::{cargo, logged, say, step};
use crate::ebpf;
use crate::layout::{Layout, find_program, is_root};

/// The version of `cargo-deny` in the cache; newer ones need a newer compiler than the workspace does.
const DENY_VERSION: &str = "0.19.0";

/// How often a download or an installation is tried.
const TRIES: u32 = 3;

/// `cargo xtask setup`: brings everything, or with `check` only says what is missing.
pub(crate) fn command(layout: &Layout, check: bool) -> Result<()> {
    if check {
        let missing = missing(layout, Group::ALL);
        report(&missing);
        if !missing.is_empty() {
            bail!("{} of the things that the tasks need are missing", missing.len());
        }
    } else {
        require(layout, Group::ALL)?;
    }
    println!("Everything is there: build, test, VMs and lint.");
    Ok(())
}

/// Installs what the groups need; an error names what could not be had.
pub(crate) fn require(layout: &Layout, groups: &[Group]) -> Result<()> {
    let left = bring(layout, groups);
    if left.is_empty() {
        return Ok(());
    }
    report(&left);
    bail!(
        "{} needed things are missing; install them as listed above and run the command again",
        left.len()
    )
}

/// Installs what the groups need and gives the names of what is still missing after that, with the reason.
pub(crate) fn attempt(layout: &Layout, groups: &[Group]) -> Vec<String> {
    let left = bring(layout, groups);
    report(&left);
    left.into_iter().map(|need| need.name).collect()
}

/// Where `cargo-deny` is, ours or the user's.
pub(crate) fn cargo_deny(layout: &Layout) -> Option<std::path::PathBuf> {
    let ours = deny_root(layout).join("bin/cargo-deny");
    if ours.is_file() {
        return Some(ours);
    }
    find_program("cargo-deny")
}

fn deny_root(layout: &Layout) -> std::path::PathBuf {
    layout.cache.join(format!("cargo-deny-{DENY_VERSION}"))
}

fn bring(layout: &Layout, groups: &[Group]) -> Vec<Need> {
    let wanted = missing(layout, groups);
    if wanted.is_empty() {
        return wanted;
    }
    let names: Vec<_> = wanted.iter().map(|need| need.name.as_str()).collect();
    say(&format!("xtask: missing here: {}", names.join(", ")));
    let mut apt = Apt::find(layout);
    if let Some(apt) = apt.as_mut().filter(|_| is_root()) {
        let packages: Vec<_> = wanted.iter().flat_map(|need| need.apt).copied().collect();
        warn(apt.install(&packages));
    }
    for need in &wanted {
        warn(match need.cure {
            Cure::Packages => Ok(()),
            Cure::BpfCompiler => install_nightly(layout),
            Cure::Linker => install_linker(layout),
            Cure::Deny => install_deny(layout),
            Cure::Component(name) => install_component(layout, name),
            Cure::Kernel(line) => match apt.as_mut() {
                Some(apt) => kernels::fetch(layout, apt, line),
                None => Ok(()),
            },
            Cure::ControlPlane => control_plane::build(layout),
            Cure::Prometheus => match apt.as_mut() {
                Some(apt) => prometheus::fetch(layout, apt),
                None => Ok(()),
            },
        });
    }
    missing(layout, groups)
}

/// A cure that fails is told at once; whether the task can go on is decided by what is missing afterwards.
fn warn(result: Result<()>) {
    if let Err(error) = result {
        say(&format!("xtask: {error:#}"));
    }
}

fn report(missing: &[Need]) {
    for group in Group::ALL {
        let mut of_group = missing.iter().filter(|need| need.group == *group).peekable();
        if of_group.peek().is_none() {
            continue;
        }
        say(&format!("\nMissing {}:", group.purpose()));
        for need in of_group {
            say(&format!("  {:<24} {}", need.name, need.how));
        }
    }
}

/// Where no package has a compiler for the BPF target, rustup's nightly with the sources of `core` does.
fn install_nightly(layout: &Layout) -> Result<()> {
    if ebpf::Route::detect().is_some() || find_program("rustup").is_none() {
        return Ok(());
    }
    step("installing rustup's nightly with rust-src", || {
        logged(
            TRIES,
            &layout.log("rustup-nightly"),
            Command::new("rustup").args([
                "toolchain",
                "install",
                "nightly",
                "--profile",
                "minimal",
                "--component",
                "rust-src",
            ]),
        )
    })
}

fn install_linker(layout: &Layout) -> Result<()> {
    let Some(route) = ebpf::Route::detect() else {
        return Ok(()); // Without a compiler the linker's LLVM version is not known.
    };
    let Some(llvm) = ebpf::Llvm::for_route(route) else {
        return Ok(()); // Reported as missing, with the package's name.
    };
    step("building bpf-linker (a minute or two)", || {
        logged(
            TRIES,
            &layout.log("bpf-linker"),
            cargo(&layout.root)
                .env("LLVM_PREFIX", &llvm.prefix)
                .args(["install", "bpf-linker", "--version", ebpf::LINKER_VERSION])
                .args(["--no-default-features", "--features"])
                .arg(format!("llvm-{}", llvm.major))
                .args(["--locked", "--root"])
                .arg(ebpf::linker_root(layout, llvm.major)),
        )
    })
}

fn install_deny(layout: &Layout) -> Result<()> {
    step("building cargo-deny (some minutes)", || {
        logged(
            TRIES,
            &layout.log("cargo-deny"),
            cargo(&layout.root)
                .args(["install", "cargo-deny", "--version", DENY_VERSION, "--locked", "--root"])
                .arg(deny_root(layout)),
        )
    })
}

fn install_component(layout: &Layout, name: &str) -> Result<()> {
    if find_program("rustup").is_none() {
        return Ok(());
    }
    step(&format!("installing rustup's {name}"), || {
        logged(
            TRIES,
            &layout.log("rustup-component"),
            Command::new("rustup").args(["component", "add", name]),
        )
    })
}
