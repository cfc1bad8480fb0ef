//! What the node itself says: its settings, the proxy in use and what that proxy has programmed, connections that are open.
//!
//! Evidence for verdicts about other proxies, and the doctor's and the agent's look at other owners of Services. Effects are
//! at the edge of each file, the parsing of what was read is pure. No verdict lives here. The invariants: everything is
//! read-only, everything is read in the calling thread's network namespace, and what could not be read is said, never guessed.

pub mod inventory;
pub mod ipvs;
pub mod kube_proxy;
mod legacy;
pub mod links;
pub mod nftables;
pub mod owners;
pub mod proxy;
pub mod route;
mod rules;
pub mod settings;
mod sockets;
pub mod table;

use std::{error::Error as _, fs, io, path::PathBuf};

/// Why something of the node could not be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file could not be read.
    #[error("read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A file says what its format does not allow.
    #[error("{}, line {line}: {found:?} is not {wanted}", path.display())]
    Text {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// What stands there.
        found: String,
        /// What is allowed there.
        wanted: &'static str,
    },
    /// The kernel refused or broke off a look at its tables.
    #[error("list {what}")]
    List {
        /// What was asked for.
        what: String,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// A result of this room.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// The message with its causes, on one line.
    pub fn reason(&self) -> String {
        match self.source() {
            Some(source) => format!("{self}: {source}"),
            None => self.to_string(),
        }
    }
}

/// Reads a small file of /proc or /sys, without the white space around it.
fn line_of(path: &str) -> Result<String> {
    let text = fs::read_to_string(path).map_err(|source| Error::Read {
        path: path.into(),
        source,
    })?;
    Ok(text.trim().to_owned())
}

/// A line of a text that is not what it should be, before the file is known.
#[derive(Clone, Debug, PartialEq, Eq)]
struct BadLine {
    line: usize,
    found: String,
    wanted: &'static str,
}

impl BadLine {
    fn new(line: usize, found: &str, wanted: &'static str) -> Self {
        Self {
            line,
            // A line of another format may be long.
            found: found.chars().take(80).collect(),
            wanted,
        }
    }

    fn of(self, path: &str) -> Error {
        Error::Text {
            path: path.into(),
            line: self.line,
            found: self.found,
            wanted: self.wanted,
        }
    }
}
