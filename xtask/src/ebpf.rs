//! Builds the kernel object from `lb-ebpf`.
//!
//! Two compilers can do it: a distribution's rustc that ships a prebuilt `core` for the BPF target, and a rustup
//! nightly with `rust-src`. Both get the same linker and end in the same file. The invariant: the file's time changes
//! only with its content, so cargo does not rebuild the agent for nothing.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::command::{self, cargo, step};
use crate::layout::{Layout, find_program};

/// The BPF target: little-endian, which every machine is that the agent runs on.
pub(crate) const TARGET: &str = "bpfel-unknown-none";

/// The linker's version, part of its path in the cache.
pub(crate) const LINKER_VERSION: &str = "0.13.0";

/// The LLVM that Debian 12's compiler for the BPF target has.
pub(crate) const DEFAULT_LLVM: u32 = 22;

/// The rustc of the distribution.
const SYSTEM_RUSTC: &str = "/usr/bin/rustc";

/// Which compiler builds the kernel object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Route {
    /// `/usr/bin/rustc` with a prebuilt `core` for the BPF target.
    System,
    /// `cargo +nightly -Z build-std=core`.
    Nightly,
}

impl Route {
    /// Finds a compiler that can build for the BPF target; the system's comes first, since it needs no `build-std`.
    pub(crate) fn detect() -> Option<Self> {
        if has_prebuilt_core() {
            Some(Self::System)
        } else if nightly_has_source() {
            Some(Self::Nightly)
        } else {
            None
        }
    }

    /// The major version of the compiler's LLVM; the linker's must not be older, or it cannot read the bitcode.
    pub(crate) fn llvm_major(self) -> Option<u32> {
        let mut command = match self {
            Self::System => {
                let mut command = Command::new(SYSTEM_RUSTC);
                command.env_remove("LD_LIBRARY_PATH");
                command
            }
            Self::Nightly => nightly_rustc(),
        };
        let version = command::output(command.arg("-vV")).ok()?;
        version
            .lines()
            .find_map(|line| line.strip_prefix("LLVM version: "))?
            .split('.')
            .next()?
            .parse()
            .ok()
    }

    /// A cargo call that compiles `lb-ebpf` for the BPF target; `verb` is `build`, `rustc` or `clippy`.
    pub(crate) fn cargo(self, layout: &Layout, linker: &Path, verb: &str) -> Command {
        let mut command = cargo(&layout.root.join("lb-ebpf"));
        if self == Self::Nightly {
            command.arg("+nightly");
            // Set by the outer cargo's rustup shim, it would win over `+nightly` in nested calls.
            command.env_remove("RUSTUP_TOOLCHAIN");
        }
        command
            .arg(verb)
            .args(["--locked", "--release", "--target", TARGET])
            .arg("--manifest-path")
            .arg(layout.ebpf_manifest())
            .arg("--target-dir")
            .arg(layout.bpf_target());
        if self == Self::Nightly {
            command.args(["-Z", "build-std=core"]);
        } else {
            command.env("RUSTC", SYSTEM_RUSTC);
            // `asm!` and `core::intrinsics` for BPF are still behind feature gates.
            command.env("RUSTC_BOOTSTRAP", "1");
            // The outer toolchain's libraries are not this rustc's.
            command.env_remove("LD_LIBRARY_PATH");
        }
        // The encoded form wins over a user's RUSTFLAGS, which are meant for the host.
        let flags = [
            format!("-Clinker={}", linker.display()),
            "-Clink-arg=--btf".to_owned(),
            "-Cdebuginfo=2".to_owned(),
            // Atomics that give a result; every kernel that we load on knows them (5.12).
            "-Ctarget-cpu=v3".to_owned(),
        ];
        command
            .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"))
            .env_remove("RUSTC_WRAPPER");
        command
    }
}

/// An installed LLVM with its development files.
#[derive(Debug, Clone)]
pub(crate) struct Llvm {
    pub(crate) major: u32,
    pub(crate) prefix: PathBuf,
}

impl Llvm {
    /// The oldest installed LLVM that both reads the route's bitcode and has a feature of the linker.
    pub(crate) fn for_route(route: Route) -> Option<Self> {
        let oldest = route.llvm_major()?;
        (21..=23)
            .filter(|major| *major >= oldest)
            .map(|major| Self {
                major,
                prefix: PathBuf::from(format!("/usr/lib/llvm-{major}")),
            })
            .find(|llvm| llvm.prefix.join("bin/llvm-config").is_file())
    }
}

/// The BPF linker: one on the cache's shelf that reads the route's bitcode, else one on `PATH`.
pub(crate) fn find_linker(layout: &Layout, route: Option<Route>) -> Option<PathBuf> {
    let oldest = route.and_then(Route::llvm_major).unwrap_or(DEFAULT_LLVM);
    (oldest..=23)
        .map(|major| linker_root(layout, major).join("bin/bpf-linker"))
        .find(|file| file.is_file())
        .or_else(|| find_program("bpf-linker"))
}

/// Where `cargo install` puts our linker.
pub(crate) fn linker_root(layout: &Layout, llvm_major: u32) -> PathBuf {
    let name = format!("bpf-linker-{LINKER_VERSION}");
    layout.cache.join(if llvm_major == DEFAULT_LLVM {
        name
    } else {
        format!("{name}-llvm{llvm_major}")
    })
}

/// Builds the kernel object and gives its path.
pub(crate) fn build(layout: &Layout) -> Result<PathBuf> {
    let manifest = layout.ebpf_manifest();
    if !manifest.is_file() {
        bail!("there is no {}: the clone is incomplete", manifest.display());
    }
    let (route, linker) = tools(layout)?;
    step("building the kernel object", || {
        command::run(&mut route.cargo(layout, &linker, "build"))
    })?;
    let built = layout.bpf_target().join(TARGET).join("release/lb-ebpf");
    let object = layout.kernel_object();
    copy_if_changed(&built, &object)?;
    Ok(object)
}

/// The compiler and linker, or a sentence on how to get them.
pub(crate) fn tools(layout: &Layout) -> Result<(Route, PathBuf)> {
    let route = Route::detect().context("no compiler for the BPF target: `cargo xtask setup` says what to install")?;
    let linker = find_linker(layout, Some(route)).context("no bpf-linker: `cargo xtask setup` says how to get it")?;
    Ok((route, linker))
}

fn copy_if_changed(from: &Path, to: &Path) -> Result<()> {
    let new = fs::read(from).with_context(|| format!("read {}", from.display()))?;
    if fs::read(to).is_ok_and(|old| old == new) {
        return Ok(());
    }
    // Written beside and renamed: a build script never reads half an object.
    let beside = to.with_extension("o.new");
    fs::write(&beside, new).with_context(|| format!("write {}", beside.display()))?;
    fs::rename(&beside, to).with_context(|| format!("rename to {}", to.display()))
}

fn has_prebuilt_core() -> bool {
    if !Path::new(SYSTEM_RUSTC).is_file() {
        return false;
    }
    let mut command = Command::new(SYSTEM_RUSTC);
    command
        .args(["--print", "target-libdir", "--target", TARGET])
        .env_remove("LD_LIBRARY_PATH");
    let Ok(libdir) = command::output(&mut command) else {
        return false;
    };
    fs::read_dir(libdir.trim()).is_ok_and(|entries| {
        entries.flatten().any(|entry| {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            name.starts_with("libcore-") && name.ends_with(".rlib")
        })
    })
}

fn nightly_has_source() -> bool {
    if find_program("rustup").is_none() {
        return false;
    }
    let mut command = nightly_rustc();
    command.args(["--print", "sysroot"]);
    command::output(&mut command).is_ok_and(|sysroot| {
        Path::new(sysroot.trim())
            .join("lib/rustlib/src/rust/library/core/Cargo.toml")
            .is_file()
    })
}

fn nightly_rustc() -> Command {
    let mut command = Command::new("rustup");
    command
        .args(["run", "nightly", "rustc"])
        .env_remove("RUSTUP_TOOLCHAIN")
        // Asking must not start a download.
        .env("RUSTUP_AUTO_INSTALL", "0");
    command
}
