//! Child cgroups of our own in the cgroup v2 hierarchy.
//!
//! Programs of a test or a demo attach to such a cgroup and to nothing else: never to the root, which every process of
//! the machine is below. Names carry the pid of their maker, so that what a killed maker left can be told apart.

use std::{
    fs, io,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{self, Command},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use nix::errno::Errno;
use procfs::process::Process;

use super::{Doing, Error, Result};

const PREFIX: &str = "evenkeel-";
/// How long a removal waits for processes that are ending.
const REMOVAL_PATIENCE: Duration = Duration::from_secs(2);
static NEXT: AtomicU32 = AtomicU32::new(0);

/// A child cgroup that exists as long as this value.
#[derive(Debug)]
pub struct ChildCgroup {
    path: PathBuf,
    /// Where this process was before it joined, if it has joined.
    home: Mutex<Option<PathBuf>>,
}

impl ChildCgroup {
    /// Makes a child cgroup directly below the hierarchy's top, and removes those of makers that no longer live.
    ///
    /// `purpose` becomes part of the name: letters, digits and dots.
    pub fn new(purpose: &str) -> Result<Self> {
        let mount = hierarchy()?;
        remove_stale(&mount);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Self::at(mount.join(format!("{PREFIX}{purpose}-{}-{number}", process::id())))
    }

    /// Makes a cgroup below this one: a pod within the node, say. Drop it before its parent.
    pub fn below(&self, name: &str) -> Result<Self> {
        Self::at(self.path.join(name))
    }

    fn at(path: PathBuf) -> Result<Self> {
        fs::create_dir(&path).doing(|| format!("make the cgroup {}", path.display()))?;
        Ok(Self {
            path,
            home: Mutex::default(),
        })
    }

    /// The cgroup's folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Moves this process, all its threads included, into the cgroup; [`Self::leave`] takes it back.
    ///
    /// Sockets belong to the cgroup that their maker was in when it made them.
    pub fn join(&self) -> Result<()> {
        let here = own_cgroup(&hierarchy()?)?;
        write_pid(&self.path, process::id())?;
        let mut home = self.home.lock().unwrap_or_else(PoisonError::into_inner);
        // Joining twice must not make the cgroup its own way back.
        if home.is_none() && here != self.path {
            *home = Some(here);
        }
        Ok(())
    }

    /// Puts this process back where it was before [`Self::join`]; nothing happens if it has not joined.
    pub fn leave(&self) -> Result<()> {
        let home = self.home.lock().unwrap_or_else(PoisonError::into_inner).take();
        match home {
            Some(home) => write_pid(&home, process::id()),
            None => Ok(()),
        }
    }

    /// Makes a command start inside the cgroup.
    ///
    /// # Errors
    /// Where the cgroup's list of processes cannot be opened.
    pub fn place<'c>(&self, command: &'c mut Command) -> Result<&'c mut Command> {
        let path = self.path.join("cgroup.procs");
        let procs = fs::OpenOptions::new()
            .write(true)
            .open(&path)
            .doing(|| format!("open {}", path.display()))?;
        // SAFETY: between fork and exec the closure makes one system call and allocates nothing; the descriptor is owned by
        // the closure. "0" names the writer itself.
        Ok(unsafe { command.pre_exec(move || Ok(nix::unistd::write(&procs, b"0").map(drop)?)) })
    }
}

impl Drop for ChildCgroup {
    fn drop(&mut self) {
        if let Err(error) = self.leave() {
            tracing::warn!(%error, "this process could not go back to its cgroup");
        }
        if let Err(error) = remove_tree(&self.path, REMOVAL_PATIENCE) {
            tracing::warn!(%error, "a child cgroup was left behind; the next run removes it");
        }
    }
}

/// Finds where the cgroup v2 hierarchy is mounted, whatever the layout.
pub fn hierarchy() -> Result<PathBuf> {
    let mounts = Process::myself()
        .and_then(|me| me.mountinfo())
        .map_err(io::Error::other)
        .doing(|| "read /proc/self/mountinfo".to_owned())?;
    mounts
        .0
        .into_iter()
        .find(|mount| mount.fs_type == "cgroup2")
        .map(|mount| mount.mount_point)
        .ok_or(Error::NoCgroup2)
}

/// The cgroup v2 folder that this process is in.
fn own_cgroup(mount: &Path) -> Result<PathBuf> {
    let text = fs::read_to_string("/proc/self/cgroup").doing(|| "read /proc/self/cgroup".to_owned())?;
    let below = text
        .lines()
        .find_map(|line| line.strip_prefix("0::/"))
        .ok_or(Error::NoCgroup2)?;
    Ok(if below.is_empty() {
        mount.to_owned()
    } else {
        mount.join(below)
    })
}

fn write_pid(cgroup: &Path, pid: u32) -> Result<()> {
    let procs = cgroup.join("cgroup.procs");
    fs::write(&procs, pid.to_string()).doing(|| format!("move process {pid} into {}", cgroup.display()))
}

/// Removes cgroups of ours whose maker has ended; one that is busy stays for the next time.
fn remove_stale(mount: &Path) {
    let Ok(entries) = fs::read_dir(mount) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some(maker) = name.to_str().and_then(maker_of) else {
            continue;
        };
        let alive = Path::new("/proc").join(maker.to_string()).exists();
        if !alive && let Err(error) = remove_tree(&entry.path(), Duration::ZERO) {
            tracing::debug!(%error, "a stale cgroup is still busy");
        }
    }
}

/// The pid in a name such as `evenkeel-demo-1234-0`.
fn maker_of(name: &str) -> Option<u32> {
    let mut parts = name.strip_prefix(PREFIX)?.rsplit('-');
    let _number: u32 = parts.next()?.parse().ok()?;
    parts.next()?.parse().ok()
}

/// Removes a cgroup and those below it, waiting a while for processes that are ending.
fn remove_tree(path: &Path, patience: Duration) -> Result<()> {
    for entry in fs::read_dir(path).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_tree(&entry.path(), patience)?;
        }
    }
    let deadline = Instant::now() + patience;
    loop {
        match fs::remove_dir(path) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            // Busy until the last process is reaped by its parent.
            Err(error) if error.raw_os_error() == Some(Errno::EBUSY as i32) && Instant::now() < deadline => {
                thread::sleep(Duration::from_millis(5));
            }
            Err(error) => {
                return Err(error).doing(|| format!("remove the cgroup {}", path.display()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_maker_is_read_from_the_name() {
        assert_eq!(maker_of("evenkeel-demo-1234-0"), Some(1234));
        assert_eq!(maker_of("evenkeel-two-words-77-3"), Some(77));
        assert_eq!(maker_of("evenkeel-demo"), None);
        assert_eq!(maker_of("evenkeel-demo-x-0"), None);
        assert_eq!(maker_of("system.slice"), None);
    }
}
