//! Loops that must never end.
//!
//! A supervised loop is started again whenever it ends, fails or panics, after a capped, jittered, exponential back-off;
//! only cancellation ends it for good. Its [`Liveness`] is always visible. What a loop does is not known here.

use std::{
    fmt::Display,
    hash::{BuildHasher, Hasher, RandomState},
    panic::AssertUnwindSafe,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use futures::FutureExt;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// How long to wait before the next try.
///
/// The n-th wait is drawn evenly from half of to the whole of `first × 2ⁿ`, capped at `most`: nodes that failed in the
/// same instant do not come back in the same instant.
#[derive(Clone, Debug)]
pub struct Backoff {
    first: Duration,
    most: Duration,
    failures: u32,
}

impl Backoff {
    /// Waits of about `first`, doubling up to `most`.
    pub fn new(first: Duration, most: Duration) -> Self {
        Self {
            first,
            most,
            failures: 0,
        }
    }

    /// The next wait; it grows with each call until [`Backoff::reset`].
    pub fn next_wait(&mut self) -> Duration {
        let factor = 1_u32.checked_shl(self.failures).unwrap_or(u32::MAX);
        self.failures = (self.failures + 1).min(31);
        let whole = self.first.saturating_mul(factor).min(self.most);
        whole.mul_f64(0.5 + 0.5 * dice())
    }

    /// After a success: the next wait is a short one again.
    pub fn reset(&mut self) {
        self.failures = 0;
    }
}

/// A number drawn evenly from 0 to 1, good enough to spread waits.
pub fn dice() -> f64 {
    // The standard library's hash keys are random per instance.
    RandomState::new().build_hasher().finish() as f64 / u64::MAX as f64
}

/// What is known of a supervised loop, for health checks and for people.
#[derive(Debug)]
pub struct Liveness {
    name: String,
    starts: AtomicU64,
    beats: AtomicU64,
    state: Mutex<State>,
}

#[derive(Clone, Debug, Default)]
struct State {
    running: bool,
    last_beat: Option<SystemTime>,
    last_end: Option<(SystemTime, String)>,
}

/// A copy of a loop's [`Liveness`] at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LivenessSnapshot {
    /// The loop's name.
    pub name: String,
    /// Whether it runs now; if not, it waits to be started again.
    pub running: bool,
    /// How often it was started.
    pub starts: u64,
    /// How often it said that it works.
    pub beats: u64,
    /// When it last said so.
    pub last_beat: Option<SystemTime>,
    /// When and why it last ended.
    pub last_end: Option<(SystemTime, String)>,
}

impl Liveness {
    fn new(name: &str) -> Arc<Self> {
        Arc::new(Self {
            name: name.to_owned(),
            starts: AtomicU64::new(0),
            beats: AtomicU64::new(0),
            state: Mutex::default(),
        })
    }

    /// Says that the loop works. A loop calls it at least once in each of its rounds, busy or idle.
    pub fn beat(&self) {
        self.beats.fetch_add(1, Ordering::Relaxed);
        self.with_state(|state| state.last_beat = Some(SystemTime::now()));
    }

    /// What is known now.
    pub fn snapshot(&self) -> LivenessSnapshot {
        let state = self.with_state(|state| state.clone());
        LivenessSnapshot {
            name: self.name.clone(),
            running: state.running,
            starts: self.starts.load(Ordering::Relaxed),
            beats: self.beats.load(Ordering::Relaxed),
            last_beat: state.last_beat,
            last_end: state.last_end,
        }
    }

    fn with_state<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        // Each field is written whole, so a panic elsewhere cannot leave the state half written.
        act(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The first wait after a loop ended.
const FIRST_WAIT: Duration = Duration::from_millis(100);
/// The longest wait after a loop ended.
const MOST_WAIT: Duration = Duration::from_secs(10);
/// A loop that ran for this long is taken to have worked: its next wait is a short one.
const WORKED: Duration = Duration::from_secs(30);

/// Runs `make`'s future again and again until `cancel`; the handle ends with cancellation alone.
pub fn supervise<Make, Run, Error>(name: &str, cancel: CancellationToken, make: Make) -> (JoinHandle<()>, Arc<Liveness>)
where
    Make: FnMut(Arc<Liveness>) -> Run + Send + 'static,
    Run: Future<Output = Result<(), Error>> + Send,
    Error: Display + Send,
{
    let backoff = Backoff::new(FIRST_WAIT, MOST_WAIT);
    supervise_with(name, cancel, backoff, make)
}

/// Like [`supervise`], with another back-off.
pub fn supervise_with<Make, Run, Error>(
    name: &str,
    cancel: CancellationToken,
    mut backoff: Backoff,
    mut make: Make,
) -> (JoinHandle<()>, Arc<Liveness>)
where
    Make: FnMut(Arc<Liveness>) -> Run + Send + 'static,
    Run: Future<Output = Result<(), Error>> + Send,
    Error: Display + Send,
{
    let liveness = Liveness::new(name);
    let seen = liveness.clone();
    let handle = tokio::spawn(async move {
        loop {
            liveness.starts.fetch_add(1, Ordering::Relaxed);
            liveness.with_state(|state| state.running = true);
            let started = Instant::now();
            // The closure itself may panic as well; whatever it leaves behind is only ever used by its next run, which
            // begins anew.
            let run = async { make(liveness.clone()).await };
            let end = tokio::select! {
                biased;
                () = cancel.cancelled() => None,
                end = AssertUnwindSafe(run).catch_unwind() => Some(end),
            };
            let Some(end) = end else {
                liveness.with_state(|state| state.running = false);
                return;
            };
            let reason = match end {
                Ok(Ok(())) => "it ended though nobody asked it to".to_owned(),
                Ok(Err(error)) => error.to_string(),
                Err(panic) => format!("it panicked: {}", panic_message(panic.as_ref())),
            };
            if started.elapsed() >= WORKED {
                backoff.reset();
            }
            let wait = backoff.next_wait();
            tracing::warn!(
                loop_name = %liveness.name,
                %reason,
                wait_ms = wait.as_millis() as u64,
                "a loop ended and will be started again"
            );
            liveness.with_state(|state| {
                state.running = false;
                state.last_end = Some((SystemTime::now(), reason));
            });
            tokio::select! {
                biased;
                () = cancel.cancelled() => return,
                () = tokio::time::sleep(wait) => {}
            }
        }
    });
    (handle, seen)
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("(no message)")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fast() -> Backoff {
        Backoff::new(Duration::from_millis(1), Duration::from_millis(2))
    }

    async fn until(what: &str, mut condition: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(10);
        while !condition() {
            assert!(Instant::now() < deadline, "never happened: {what}");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    #[tokio::test]
    async fn a_loop_that_ends_fails_or_panics_is_started_again() {
        let cancel = CancellationToken::new();
        let mut run = 0;
        let (handle, liveness) = supervise_with("test", cancel.clone(), fast(), move |liveness| {
            run += 1;
            let run = run;
            async move {
                match run {
                    1 => Ok(()),
                    2 => Err("name lookup failed".to_owned()),
                    3 => panic!("on purpose"),
                    _ => {
                        liveness.beat();
                        std::future::pending().await
                    }
                }
            }
        });
        until("the fourth start works", || liveness.snapshot().beats == 1).await;
        let seen = liveness.snapshot();
        assert!(seen.running);
        assert_eq!(seen.starts, 4);
        assert!(seen.last_end.expect("it ended before").1.contains("on purpose"));

        cancel.cancel();
        handle.await.expect("the supervisor itself does not panic");
        assert!(!liveness.snapshot().running);
    }

    #[tokio::test]
    async fn a_panic_before_the_first_await_is_caught_as_well() {
        let cancel = CancellationToken::new();
        let mut first = true;
        let (handle, liveness) = supervise_with("test", cancel.clone(), fast(), move |liveness| {
            assert!(!std::mem::take(&mut first), "in the closure");
            async move {
                liveness.beat();
                std::future::pending::<Result<(), String>>().await
            }
        });
        until("the second start works", || liveness.snapshot().beats == 1).await;
        cancel.cancel();
        handle.await.expect("the supervisor itself does not panic");
    }

    #[test]
    fn waits_grow_to_the_cap_and_start_anew_after_a_success() {
        let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(10));
        let mut most = Duration::from_millis(100);
        for _ in 0..50 {
            let wait = backoff.next_wait();
            assert!(wait >= most / 2 && wait <= most, "{wait:?} is not within {most:?}");
            most = (most * 2).min(Duration::from_secs(10));
        }
        backoff.reset();
        assert!(backoff.next_wait() <= Duration::from_millis(100));
    }
}
