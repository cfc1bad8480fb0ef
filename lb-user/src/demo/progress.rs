//! One line of progress on a terminal; one line an act elsewhere.

use std::io::{self, IsTerminal, Write};

/// Where progress goes.
#[derive(Debug)]
pub(super) struct Progress {
    manner: Manner,
}

#[derive(Debug, PartialEq)]
enum Manner {
    Redrawn,
    Lines,
    Silent,
}

impl Progress {
    /// Progress on standard error, in the manner that suits it.
    pub(super) fn new() -> Self {
        let manner = if io::stderr().is_terminal() {
            Manner::Redrawn
        } else {
            Manner::Lines
        };
        Self { manner }
    }

    /// No progress at all.
    pub(super) fn silent() -> Self {
        Self { manner: Manner::Silent }
    }

    /// Says what begins.
    pub(super) fn say(&mut self, what: &str) {
        self.print(what, true);
    }

    /// Says how far it is; on a terminal alone.
    pub(super) fn count(&mut self, what: &str, made: u64, failed: u64) {
        if self.manner == Manner::Redrawn {
            self.print(&format!("{what}: {made} connections, {failed} failed"), false);
        }
    }

    fn print(&mut self, text: &str, begins: bool) {
        let mut err = io::stderr().lock();
        let _ = match self.manner {
            Manner::Redrawn => write!(err, "\r\x1b[K{text}").and_then(|()| err.flush()),
            Manner::Lines if begins => writeln!(err, "{text}"),
            Manner::Lines | Manner::Silent => Ok(()),
        };
    }
}

impl Drop for Progress {
    /// Takes the line away, so that whatever comes next has the terminal to itself.
    fn drop(&mut self) {
        if self.manner == Manner::Redrawn {
            // Progress that cannot be shown is no reason to stop.
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}
