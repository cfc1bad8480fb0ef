//! A private mount namespace with a BPF file system in it.
//!
//! Pins made below [`BpfFs::path`] are seen by this process's threads and children alone, and go when the last of them
//! ends. Nothing here unmounts: a mount that could be forgotten does not exist.

use std::{
    fs,
    path::{Path, PathBuf},
};

use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
};

use super::{Doing, Result};

/// A BPF file system that nobody else sees.
#[derive(Clone, Debug)]
pub struct BpfFs {
    path: PathBuf,
}

impl BpfFs {
    /// Gives the calling thread a mount namespace of its own and mounts a BPF file system there.
    ///
    /// Threads and processes that the calling thread starts afterwards share it; threads that exist already do not. A
    /// test binary calls this first thing in `main`; the demo, on the thread that starts all others.
    ///
    /// # Errors
    /// Where the process may not mount (CAP_SYS_ADMIN) or the kernel has no BPF file system.
    pub fn enter_private() -> Result<Self> {
        unshare(CloneFlags::CLONE_NEWNS).doing(|| "make a private mount namespace".to_owned())?;
        // Without this, mounts made here would spread to the machine's own namespace through shared propagation.
        mount(
            None::<&str>,
            "/",
            None::<&str>,
            MsFlags::MS_REC | MsFlags::MS_PRIVATE,
            None::<&str>,
        )
        .doing(|| "make the mounts private".to_owned())?;
        // A mount of its own over the usual place: no folder has to be made, and the machine's own pins are out of reach.
        let path = PathBuf::from("/sys/fs/bpf");
        mount(
            Some("bpf"),
            &path,
            Some("bpf"),
            MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC,
            Some("mode=700"),
        )
        .doing(|| format!("mount a BPF file system on {}", path.display()))?;
        Ok(Self { path })
    }

    /// Where it is mounted, as threads and children of the entering thread see it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A folder for one user of the file system; made if it does not exist.
    pub fn folder(&self, name: &str) -> Result<PathBuf> {
        let folder = self.path.join(name);
        fs::create_dir_all(&folder).doing(|| format!("make {}", folder.display()))?;
        Ok(folder)
    }
}
