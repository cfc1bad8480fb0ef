//! Network namespaces without names.
//!
//! A namespace is held by file descriptors alone: when the last one closes and the last socket in it is gone, the kernel
//! removes it with all its links, addresses and rules. Nothing appears under `/run/netns`.

use std::{
    fs::{self, File},
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::process::CommandExt,
    },
    panic,
    process::Command,
    sync::Arc,
    thread,
};

use nix::sched::{CloneFlags, setns, unshare};

use super::{Doing, Result, link};

/// A network namespace of our own; clones share it.
#[derive(Clone, Debug)]
pub struct Netns {
    fd: Arc<OwnedFd>,
}

impl Netns {
    /// Makes a new network namespace, its loopback device up.
    ///
    /// # Errors
    /// Where the process may not make namespaces (CAP_SYS_ADMIN).
    pub fn new() -> Result<Self> {
        // The namespace belongs to a thread that ends here, so the caller's own namespace never changes.
        let made = on_new_thread(|| -> io::Result<File> {
            unshare(CloneFlags::CLONE_NEWNET)?;
            File::open("/proc/thread-self/ns/net")
        });
        let netns = Self {
            fd: Arc::new(made.doing(|| "make a network namespace".to_owned())?.into()),
        };
        link::set_up(&netns, "lo")?;
        Ok(netns)
    }

    /// Holds the network namespace that the calling thread is in.
    pub fn current() -> Result<Self> {
        let file =
            File::open("/proc/thread-self/ns/net").doing(|| "open this thread's network namespace".to_owned())?;
        Ok(Self {
            fd: Arc::new(file.into()),
        })
    }

    /// Runs a closure on a fresh thread inside the namespace and returns what it returned; a panic passes through.
    ///
    /// Sockets that the closure makes stay in the namespace wherever they are used afterwards.
    ///
    /// # Errors
    /// Where the thread could not enter the namespace.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        on_new_thread(|| {
            self.enter_current_thread()?;
            Ok(work())
        })
    }

    /// Moves the calling thread, and threads and processes that it starts from now on, into the namespace.
    ///
    /// # Errors
    /// Where the process may not (CAP_SYS_ADMIN).
    pub fn enter_current_thread(&self) -> Result<()> {
        setns(self.fd.as_fd(), CloneFlags::CLONE_NEWNET).doing(|| "enter a network namespace".to_owned())
    }

    /// Makes a command start inside the namespace.
    pub fn place<'c>(&self, command: &'c mut Command) -> &'c mut Command {
        let fd = Arc::clone(&self.fd);
        // SAFETY: between fork and exec the closure makes one system call and allocates nothing; the descriptor is kept
        // open by the closure itself.
        unsafe { command.pre_exec(move || Ok(setns(fd.as_fd(), CloneFlags::CLONE_NEWNET)?)) }
    }

    /// Sets the range of source ports that sockets of this namespace are given, both ends included.
    pub fn set_local_ports(&self, first: u16, last: u16) -> Result<()> {
        self.write_sysctl("ipv4/ip_local_port_range", &format!("{first} {last}"))
    }

    /// Writes one of the namespace's own settings, named below `/proc/sys/net`.
    ///
    /// # Errors
    /// Where the setting does not exist in a network namespace, or refuses the value.
    pub fn write_sysctl(&self, name: &str, value: &str) -> Result<()> {
        let path = format!("/proc/sys/net/{name}");
        self.run(|| fs::write(&path, value))?
            .doing(|| format!("write {value:?} to {path}"))
    }
}

impl AsFd for Netns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Runs a closure on a thread of its own and hands on its result or its panic.
fn on_new_thread<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| scope.spawn(work).join()).unwrap_or_else(|panicked| panic::resume_unwind(panicked))
}
