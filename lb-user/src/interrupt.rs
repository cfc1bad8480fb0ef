//! Ctrl-C and its like, as a question that a long job asks often.
//!
//! A signal only sets a flag; what it interrupts unwinds in the ordinary way and removes what it made.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

static CAUGHT: AtomicBool = AtomicBool::new(false);

const SIGNALS: [Signal; 3] = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP];

/// The program was asked to stop.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("interrupted")]
pub(crate) struct Interrupted;

/// Catches the signals that end a program, until it is dropped.
#[derive(Debug)]
pub(crate) struct Interrupts {
    caught: &'static AtomicBool,
    before: Vec<(Signal, SigAction)>,
}

extern "C" fn note(_signal: libc::c_int) {
    CAUGHT.store(true, Ordering::Relaxed);
}

impl Interrupts {
    /// Starts catching.
    pub(crate) fn catch() -> nix::Result<Self> {
        CAUGHT.store(false, Ordering::Relaxed);
        let action = SigAction::new(SigHandler::Handler(note), SaFlags::SA_RESTART, SigSet::empty());
        let mut before = Vec::new();
        for signal in SIGNALS {
            // SAFETY: the handler stores to an atomic and does nothing else.
            before.push((signal, unsafe { sigaction(signal, &action) }?));
        }
        Ok(Self {
            caught: &CAUGHT,
            before,
        })
    }

    /// Fails once a signal has come.
    pub(crate) fn check(&self) -> Result<(), Interrupted> {
        if self.caught.load(Ordering::Relaxed) {
            Err(Interrupted)
        } else {
            Ok(())
        }
    }

    /// Lets time pass, as a script or a poll does; fails once a signal has come.
    pub(crate) fn pass(&self, time: Duration) -> Result<(), Interrupted> {
        let until = Instant::now() + time;
        loop {
            self.check()?;
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            thread::sleep(left.min(Duration::from_millis(20)));
        }
    }

    /// Waits until a signal comes.
    pub(crate) fn wait(&self) {
        while self.check().is_ok() {
            thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Interrupts {
    fn drop(&mut self) {
        for (signal, action) in &self.before {
            // SAFETY: this puts back what was in force before.
            let _ = unsafe { sigaction(*signal, action) };
        }
    }
}
