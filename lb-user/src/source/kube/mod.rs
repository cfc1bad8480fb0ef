//! The API server, by list and watch.
//!
//! One supervised loop a kind. The requests go through kube's client (credentials, TLS, in-cluster configuration); the
//! loop around them is our own, because this is where outages are lived through: its sleeps, its time limits, when
//! it may resume and when it must list anew are all in one place ([`feed`]). Every object becomes a flat record as soon as
//! it is parsed; no Kubernetes object outlives the event that brought it.

mod dial;
mod feed;
mod page;
mod requests;
mod token;
mod waits;
mod wire;

use std::{path::PathBuf, sync::Arc, time::Duration};

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

pub use self::requests::{RequestCounts, Requests};
use self::{dial::Dialer, feed::Feed};
use super::{CHANNEL, Running, Source, Status};
use crate::{model::Kind, supervise::supervise};

/// The kinds that are watched: all Services, all EndpointSlices, this node's own Node, and the Pods on it.
const KINDS: [Kind; 4] = [Kind::Service, Kind::Slice, Kind::Node, Kind::Pod];

/// How to reach the API server, and what to ask it.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The name of this node's Node object.
    pub node_name: String,
    /// The server's address where no kubeconfig and no service account is to be used (`--kube-url`).
    pub url: Option<String>,
    /// The kubeconfig to use; without it, what the environment says, then the service account.
    pub kubeconfig: Option<PathBuf>,
    /// Time limits and waits.
    pub timing: Timing,
    /// Where requests are counted.
    pub requests: Arc<Requests>,
    /// What is wrong on purpose.
    #[doc(hidden)]
    pub defects: Defects,
}

/// Defects for the tests of the tests: what finds faults has to find these. No flag and no file reaches them; an agent has
/// them only where it was built with the feature of the same name.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct Defects {
    /// What a list no longer has is kept, unless it is the first list (`defect-relist-keeps`).
    pub relist_keeps: bool,
}

/// Whether this build has that defect.
const BUILT_TO_KEEP: bool = cfg!(feature = "defect-relist-keeps");

impl Default for Defects {
    fn default() -> Self {
        Self {
            relist_keeps: BUILT_TO_KEEP,
        }
    }
}

/// Time limits and waits of the list and watch loops. The module `waits` says how the waits belong together.
#[derive(Clone, Debug)]
pub struct Timing {
    /// How long a connection may take, with name lookup and without TLS. Within it, what hangs is tried anew.
    pub connect: Duration,
    /// How long the server may be silent before it answers, and between two parts of a list.
    pub answer: Duration,
    /// How long a watch may be silent; a server with bookmarks says something once a minute.
    pub silence: Duration,
    /// How long the server is asked to keep a watch open.
    pub watch: Duration,
    /// The first wait after something went wrong; waits double from failure to failure.
    pub first_wait: Duration,
    /// The longest wait while the server cannot be reached.
    pub unreachable_wait: Duration,
    /// The longest wait at first where the server is reached and does not serve.
    pub patient_wait: Duration,
    /// How long that holds; then the waits grow with the time that has gone by.
    pub patience: Duration,
    /// How long that holds where the server has too much to do.
    pub overload_patience: Duration,
    /// The longest wait of all, and the longest that the server may ask for.
    pub most_wait: Duration,
    /// How long a watch must live before the next wait is a short one again.
    pub steady: Duration,
    /// How many objects to ask for in one page of a list.
    pub page: u32,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(10),
            answer: Duration::from_secs(30),
            silence: Duration::from_secs(75),
            watch: Duration::from_secs(280),
            first_wait: Duration::from_millis(200),
            unreachable_wait: Duration::from_millis(500),
            patient_wait: Duration::from_millis(700),
            patience: Duration::from_mins(1),
            overload_patience: Duration::from_secs(15),
            most_wait: Duration::from_secs(20),
            steady: Duration::from_secs(5),
            page: 250,
        }
    }
}

/// Starts to list and watch. Needs a tokio runtime.
pub fn start(options: Options, cancel: &CancellationToken) -> Running {
    let status = Arc::new(Status::new(Source::Kube.to_string(), &KINDS));
    let (updates, receiver) = mpsc::channel(CHANNEL);
    // What a name means is known to all; connections are each kind's own, so that one that hangs holds up one kind.
    let dialer = Dialer::new(options.timing.connect);
    let options = Arc::new(options);
    let mut loops = Vec::new();
    let mut tasks = Vec::new();
    for kind in KINDS {
        let feed = Feed::new(kind, options.clone(), dialer.clone(), status.clone(), updates.clone());
        let feed = Arc::new(tokio::sync::Mutex::new(feed));
        let name = format!("source kube {}", kind.as_str());
        let (task, liveness) = supervise(&name, cancel.clone(), move |liveness| {
            let feed = feed.clone();
            // The lock is free: a run that ended has let it go, and there is one run at a time.
            async move { feed.lock().await.run(&liveness).await }
        });
        loops.push(liveness);
        tasks.push(task);
    }
    Running {
        updates: receiver,
        status,
        loops,
        tasks,
    }
}
