//! Ctrl-C and its like: a flag that measurements and waits ask for, so that everything is removed in the ordinary way.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Result, bail};
use nix::{
    libc,
    sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction},
};

static CAUGHT: AtomicBool = AtomicBool::new(false);

extern "C" fn note(_signal: libc::c_int) {
    CAUGHT.store(true, Ordering::Relaxed);
}

/// Catches the signals that end a program from now on.
///
/// # Errors
/// The kernel's.
pub fn catch() -> Result<()> {
    let action = SigAction::new(SigHandler::Handler(note), SaFlags::SA_RESTART, SigSet::empty());
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        // SAFETY: the handler stores to an atomic and does nothing else.
        unsafe { sigaction(signal, &action) }?;
    }
    Ok(())
}

/// Fails once a signal has come.
///
/// # Errors
/// That a signal has come.
pub fn check() -> Result<()> {
    if CAUGHT.load(Ordering::Relaxed) {
        bail!("interrupted");
    }
    Ok(())
}
