//! Builds the agent, and starts what was built: `build`, `demo`, `lab`, `kube`, `soak`, `fuzz`.
//!
//! What the demo and the labs do stands in their own crates. The invariant: the kernel object is built first, so that
//! the agent always carries the object of the same tree.

use std::env;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::command::{self, cargo, step};
use crate::ebpf;
use crate::layout::{Layout, is_root};
use crate::setup::{self, Group};

/// `cargo xtask build`.
pub(crate) fn command(layout: &Layout, release: bool) -> Result<()> {
    setup::require(layout, &[Group::Build])?;
    build(layout, &["lb-user"], release)?;
    let profile = profile(release);
    println!("Built {}", layout.target.join(profile).join("evenkeel").display());
    Ok(())
}

/// `cargo xtask demo`: replaces this process by the demo, so that signals and the exit status are its own.
pub(crate) fn demo(layout: &Layout, arguments: &[OsString]) -> Result<()> {
    need_root(
        "demo",
        "cargo xtask build --release` and then `sudo target/release/evenkeel demo",
    )?;
    setup::require(layout, &[Group::Build, Group::Sockets])?;
    build(layout, &["lb-user"], true)?;
    let mut demo = Command::new(layout.target.join("release/evenkeel"));
    demo.arg("demo");
    become_program(demo, arguments)
}

/// `cargo xtask fuzz`: replaces this process by the fuzzer.
pub(crate) fn fuzz(layout: &Layout, arguments: &[OsString]) -> Result<()> {
    need_root(
        "fuzz",
        "cargo build --release -p lb-tests --bins` and then `sudo target/release/evenkeel-fuzz",
    )?;
    setup::require(layout, &[Group::Build, Group::Sockets])?;
    build(layout, &["lb-tests"], true)?;
    become_program(Command::new(layout.target.join("release/evenkeel-fuzz")), arguments)
}

/// `cargo xtask lab`: replaces this process by the lab's own program.
pub(crate) fn lab(layout: &Layout, arguments: &[OsString]) -> Result<()> {
    need_root(
        "lab",
        "cargo build -p lb-user -p lb-tests --bins` and then `sudo target/debug/evenkeel-lab",
    )?;
    setup::require(layout, &[Group::Build, Group::Sockets])?;
    build(layout, &["lb-user", "lb-tests"], false)?;
    let mut lab = Command::new(layout.target.join("debug/evenkeel-lab"));
    lab.env("EVENKEEL_BIN", layout.target.join("debug/evenkeel"));
    // `exec` finds the program under test by its name.
    lab.env("PATH", path_with(&layout.target.join("debug")));
    become_program(lab, arguments)
}

/// `cargo xtask kube`: replaces this process by the program of the lab with a real control plane.
pub(crate) fn kube(layout: &Layout, arguments: &[OsString]) -> Result<()> {
    need_root(
        "kube",
        "cargo build -p lb-user -p lb-tests --bins` and then `sudo target/debug/evenkeel-kube",
    )?;
    setup::require(layout, &[Group::Build, Group::Sockets, Group::ControlPlane])?;
    build(layout, &["lb-user", "lb-tests"], false)?;
    let mut kube = Command::new(layout.target.join("debug/evenkeel-kube"));
    kube.env("EVENKEEL_BIN", layout.target.join("debug/evenkeel"));
    kube.env("PATH", path_with(&layout.target.join("debug")));
    if let Some(folder) = setup::find_control_plane(layout) {
        kube.env("EVENKEEL_CONTROL_PLANE", folder);
    }
    become_program(kube, arguments)
}

/// `cargo xtask soak`: replaces this process by the soak, which measures and so runs optimised.
pub(crate) fn soak(layout: &Layout, arguments: &[OsString]) -> Result<()> {
    need_root(
        "soak",
        "cargo build --release -p lb-user -p lb-tests --bins` and then `sudo target/release/evenkeel-lab soak",
    )?;
    setup::require(layout, &[Group::Build, Group::Sockets])?;
    build(layout, &["lb-user", "lb-tests"], true)?;
    let mut soak = Command::new(layout.target.join("release/evenkeel-lab"));
    soak.env("EVENKEEL_BIN", layout.target.join("release/evenkeel"));
    soak.arg("soak");
    become_program(soak, arguments)
}

/// Builds the kernel object and then the binaries of the packages.
pub(crate) fn build(layout: &Layout, packages: &[&str], release: bool) -> Result<()> {
    ebpf::build(layout)?;
    step(&format!("building {}", packages.join(" and ")), || {
        let mut build = cargo(&layout.root);
        build.args(["build", "--locked", "--bins"]);
        for package in packages {
            build.args(["--package", package]);
        }
        if release {
            build.arg("--release");
        }
        command::run(&mut build)
    })
}

fn path_with(first: &Path) -> OsString {
    let mut path = OsString::from(first);
    if let Some(others) = env::var_os("PATH") {
        path.push(":");
        path.push(others);
    }
    path
}

fn profile(release: bool) -> &'static str {
    if release { "release" } else { "debug" }
}

/// Refuses with what to do instead, where the caller is not root.
pub(crate) fn need_root(task: &str, instead: &str) -> Result<()> {
    if is_root() {
        return Ok(());
    }
    bail!(
        "`cargo xtask {task}` makes its own network namespaces and cgroups and loads eBPF programs, which needs root: \
         as another user run `{instead}`"
    )
}

/// Replaces this process; returns only if that fails.
pub(crate) fn become_program(mut program: Command, arguments: &[OsString]) -> Result<()> {
    program.args(arguments);
    let error = program.exec();
    Err(error).with_context(|| format!("cannot start `{}`", command::shown(&program)))
}
