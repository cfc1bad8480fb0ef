//! Formatting, clippy, and what may be depended on.
//!
//! The invariant: every check runs, even after one failed, so that one run shows all there is to mend.

use anyhow::{Result, bail};

use crate::command::{self, cargo, say, step};
use crate::ebpf::{self, Route};
use crate::layout::Layout;
use crate::setup::{self, Group};

type Check = fn(&Layout) -> Result<()>;

/// `cargo xtask lint`.
pub(crate) fn command(layout: &Layout) -> Result<()> {
    setup::require(layout, &[Group::Build, Group::Lint])?;
    // The agent's build script wants the object, also under clippy.
    ebpf::build(layout)?;
    let checks: [(&str, Check); 5] = [
        ("formatting", formatting),
        ("clippy of the workspace", clippy),
        ("lints of the kernel programs", kernel_lints),
        ("dependencies of the workspace", |layout| {
            // An exception that nothing needs any more has to go.
            deny(layout, "Cargo.toml", "--deny")
        }),
        ("dependencies of the kernel programs", |layout| {
            // The exceptions are the workspace's; this tree needs few of them.
            deny(layout, "lb-ebpf/Cargo.toml", "--allow")
        }),
    ];
    let mut failed = Vec::new();
    for (name, check) in checks {
        if let Err(error) = step(&format!("lint: {name}"), || check(layout)) {
            say(&format!("xtask: {error:#}"));
            failed.push(name);
        }
    }
    if !failed.is_empty() {
        bail!("lint failed: {}", failed.join(", "));
    }
    say("xtask: lint passed (the advisory database is not consulted: it is no package, and lint must work without it)");
    Ok(())
}

fn formatting(layout: &Layout) -> Result<()> {
    command::run(cargo(&layout.root).args(["fmt", "--all", "--check"]))?;
    command::run(
        cargo(&layout.root)
            .args(["fmt", "--check", "--manifest-path"])
            .arg(layout.ebpf_manifest()),
    )
}

fn clippy(layout: &Layout) -> Result<()> {
    command::run(
        cargo(&layout.root)
            .args(["clippy", "--locked", "--workspace", "--all-targets"])
            .args(["--", "-D", "warnings"]),
    )
}

fn kernel_lints(layout: &Layout) -> Result<()> {
    let (route, linker) = ebpf::tools(layout)?;
    let verb = match route {
        Route::Nightly => "clippy",
        Route::System => {
            say(
                "xtask: the distribution's compiler has no clippy: the kernel programs are only compiled with -D warnings",
            );
            // `rustc` hands the flag to this one crate, so its dependencies are not built anew.
            "rustc"
        }
    };
    command::run(route.cargo(layout, &linker, verb).args(["--", "-D", "warnings"]))
}

fn deny(layout: &Layout, manifest: &str, stale: &str) -> Result<()> {
    let Some(program) = setup::cargo_deny(layout) else {
        bail!("no cargo-deny: `cargo xtask setup` says how to get it");
    };
    let mut deny = std::process::Command::new(program);
    deny.current_dir(&layout.root)
        .args(["--log-level", "warn", "--locked", "--manifest-path", manifest, "check"])
        .args([
            "--config",
            "deny.toml",
            "--hide-inclusion-graph",
            stale,
            "unmatched-skip",
        ])
        .args(["bans", "licenses", "sources"]);
    command::run(&mut deny)
}
