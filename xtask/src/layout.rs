//! Where things lie: the repository's root, its build products and the cache.
//!
//! No file is made here. The invariant: everything that takes minutes to get (linker, kernels, `cargo-deny`) lives in
//! the cache, outside `target/`, under a name that carries its version, so that a new version never meets an old file.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// The paths that the tasks share.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    /// The repository's root, absolute.
    pub(crate) root: PathBuf,
    /// Cargo's target directory of the workspace.
    pub(crate) target: PathBuf,
    /// What is kept between clones: `$EVENKEEL_CACHE`, else `$XDG_CACHE_HOME/evenkeel`, else `~/.cache/evenkeel`.
    pub(crate) cache: PathBuf,
}

impl Layout {
    /// Finds the paths from this crate's place and the environment.
    pub(crate) fn find() -> Result<Self> {
        // `cargo run` sets the variable; a copied xtask binary falls back to where it was compiled.
        let manifest =
            env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
        let root = manifest
            .parent()
            .context("xtask does not lie in a repository")?
            .to_path_buf();
        let target =
            env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), |dir| root.join(PathBuf::from(dir)));
        Ok(Self {
            root,
            target,
            cache: cache_dir()?,
        })
    }

    /// The manifest of the kernel programs' crate, which is no member of the workspace.
    pub(crate) fn ebpf_manifest(&self) -> PathBuf {
        self.root.join("lb-ebpf/Cargo.toml")
    }

    /// The kernel object that `lb-user/build.rs` embeds. Always below the root's `target`, where the build script
    /// looks, even if `CARGO_TARGET_DIR` points elsewhere.
    pub(crate) fn kernel_object(&self) -> PathBuf {
        self.bpf_target().join("evenkeel.bpf.o")
    }

    /// Cargo's target directory of the kernel programs.
    pub(crate) fn bpf_target(&self) -> PathBuf {
        self.root.join("target/bpf")
    }

    /// Where the logs of long, silent commands go.
    pub(crate) fn log(&self, name: &str) -> PathBuf {
        self.cache.join("log").join(format!("{name}.log"))
    }
}

fn cache_dir() -> Result<PathBuf> {
    if let Some(dir) = env::var_os("EVENKEEL_CACHE") {
        return Ok(dir.into());
    }
    if let Some(dir) = env::var_os("XDG_CACHE_HOME") {
        return Ok(Path::new(&dir).join("evenkeel"));
    }
    let home = env::var_os("HOME").context("no cache directory: set EVENKEEL_CACHE or HOME")?;
    Ok(Path::new(&home).join(".cache/evenkeel"))
}

/// Finds a program by name on `PATH` and in the system folders that an ordinary user's `PATH` often lacks.
pub(crate) fn find_program(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin", "/usr/local/sbin"].map(PathBuf::from))
        .map(|dir| dir.join(name))
        .find(|file| is_executable(file))
}

fn is_executable(file: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    file.metadata()
        .is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

/// Whether this process runs as root.
pub(crate) fn is_root() -> bool {
    use std::os::unix::fs::MetadataExt;
    // The owner of one's own /proc entry is the effective user.
    Path::new("/proc/self").metadata().is_ok_and(|meta| meta.uid() == 0)
}
