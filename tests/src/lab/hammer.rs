//! Somebody who dials again and again while something else happens.

use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
};

use anyhow::{Result, ensure};
use lb_user::lab::Netns;
use nix::sys::signal::SigSet;

use super::dial::{Dialer, Failure};
use crate::agent::until;

/// Somebody who dials again and again until told to stop.
#[derive(Debug)]
pub struct Hammer {
    shared: Arc<Hammered>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Hammered {
    stop: AtomicBool,
    made: AtomicU64,
    failures: Mutex<Vec<Failure>>,
}

impl Hammer {
    /// Starts to dial, one connection after another, each said something to.
    ///
    /// # Errors
    /// Where a thread cannot be started.
    pub fn start(netns: &Netns, target: SocketAddr) -> Result<Self> {
        let shared = Arc::<Hammered>::default();
        let (netns, told) = (netns.clone(), Arc::clone(&shared));
        let thread = thread::Builder::new().name("lab-hammer".to_owned()).spawn(move || {
            SigSet::all().thread_block().ok();
            while !told.stop.load(Ordering::Relaxed) {
                let met = Dialer::new(&netns).open(target).and_then(|mut talk| talk.say("well?"));
                if let Err(failure) = met {
                    told.failures
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .push(failure);
                }
                told.made.fetch_add(1, Ordering::Relaxed);
            }
        })?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    /// Waits until so many more attempts have ended.
    ///
    /// # Errors
    /// Where it does not come to that.
    pub fn wait_for(&self, more: u64) -> Result<()> {
        let wanted = self.shared.made.load(Ordering::Relaxed) + more;
        until("more connections", || {
            let made = self.shared.made.load(Ordering::Relaxed);
            ensure!(made >= wanted, "{made} of {wanted}");
            Ok(())
        })
    }

    /// Stops; returns how many attempts were made, all of which must have succeeded.
    ///
    /// # Errors
    /// How attempts failed.
    pub fn finish(mut self) -> Result<u64> {
        self.stop();
        let failures = self.shared.failures.lock().unwrap_or_else(PoisonError::into_inner);
        let made = self.shared.made.load(Ordering::Relaxed);
        ensure!(
            failures.is_empty(),
            "{} of {made} connections failed, the first one: {}",
            failures.len(),
            failures[0]
        );
        Ok(made)
    }

    fn stop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic has been printed.
            let _ = thread.join();
        }
    }
}

impl Drop for Hammer {
    fn drop(&mut self) {
        self.stop();
    }
}
