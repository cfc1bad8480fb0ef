//! A small laboratory on this machine: network namespaces, child cgroups, a BPF file system, servers and clients.
//!
//! Here lives what the demo, the real-socket tests and the bench share: the means to put real processes and real sockets
//! into places that exist for this process alone. No knowledge of the datapath lives here, and no judgement of results.
//!
//! The invariant: everything here dies with its owner. Namespaces and mounts have no names and vanish with the process;
//! cgroups, folders and child processes are removed on drop, and what a killed process left is removed by the next one.

pub mod cgroup;
pub mod child;
pub mod client;
pub mod link;
pub mod manifest;
pub mod mounts;
pub mod netns;
pub mod nft;
pub mod server;

pub use cgroup::ChildCgroup;
pub use child::Child;
pub use netns::Netns;
pub use server::Server;

use std::{
    io,
    process::ExitStatus,
    thread,
    time::{Duration, Instant},
};

/// Why something in the laboratory did not work, by cause.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call or a file operation failed.
    #[error("{doing}: {source}")]
    Io {
        /// Operation and object.
        doing: String,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// The kernel refused a change of links, addresses or routes.
    #[error("{doing}: {source}")]
    Netlink {
        /// Operation and object.
        doing: String,
        /// What netlink said.
        #[source]
        source: Box<rtnetlink::Error>,
    },
    /// A program that the laboratory needs ended with an error.
    #[error("{program} failed ({status}): {stderr}")]
    Command {
        /// The program.
        program: String,
        /// How it ended.
        status: ExitStatus,
        /// The last of what it said.
        stderr: String,
    },
    /// The mount table has no cgroup v2 hierarchy.
    #[error("no cgroup v2 hierarchy is mounted (no cgroup2 line in /proc/self/mountinfo)")]
    NoCgroup2,
}

/// What the laboratory's functions return.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Asks again and again until a condition holds; false if it does not within `patience`.
pub fn holds_within(patience: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + patience;
    loop {
        if condition() {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// Names the operation that an error interrupted.
pub(crate) trait Doing<T> {
    /// Wraps an error with the operation and its object.
    fn doing(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T> Doing<T> for io::Result<T> {
    fn doing(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|source| Error::Io { doing: what(), source })
    }
}

impl<T> Doing<T> for nix::Result<T> {
    fn doing(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(io::Error::from).doing(what)
    }
}

impl<T> Doing<T> for std::result::Result<T, rtnetlink::Error> {
    fn doing(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|source| Error::Netlink {
            doing: what(),
            source: Box::new(source),
        })
    }
}
