//! Where Services, EndpointSlices, Nodes and Pods come from.
//!
//! A source is a set of supervised loops that send [`Update`]s: a folder of manifests ([`dir`]) or the API server
//! ([`kube`]). Whatever happens outside, a source drops nothing of what it has sent: outages, partial lists and broken
//! files leave the last known state standing, and its age is visible in the [`Status`]. What the objects mean for the
//! datapath is not decided here.

pub mod convert;
pub mod dir;
pub mod kube;
mod status;

use std::{path::PathBuf, str::FromStr, sync::Arc};

use tokio::{sync::mpsc, task::JoinHandle};
use tokio_util::sync::CancellationToken;

pub use self::status::{KindStatus, Status, StatusSnapshot};
use crate::{model::Update, supervise::Liveness};

/// How many updates may wait for the fold; a source that is faster waits for it.
const CHANNEL: usize = 1024;

/// Where to take the objects from, as `--source` says it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// `dir:PATH`: the manifests in a folder.
    Dir(PathBuf),
    /// `kube`: the API server.
    Kube,
}

/// A text that names no source.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("found {0:?}; wanted dir:PATH or kube")]
pub struct UnknownSource(String);

impl FromStr for Source {
    type Err = UnknownSource;

    fn from_str(text: &str) -> Result<Self, UnknownSource> {
        match text.split_once(':') {
            Some(("dir", path)) if !path.is_empty() => Ok(Self::Dir(path.into())),
            None if text == "kube" => Ok(Self::Kube),
            _ => Err(UnknownSource(text.to_owned())),
        }
    }
}

impl std::fmt::Display for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Dir(path) => write!(f, "dir:{}", path.display()),
            Self::Kube => f.write_str("kube"),
        }
    }
}

/// A source at work.
#[derive(Debug)]
pub struct Running {
    /// What it says, in order. It ends only after cancellation.
    pub updates: mpsc::Receiver<Update>,
    /// How it is doing.
    pub status: Arc<Status>,
    /// Its loops.
    pub loops: Vec<Arc<Liveness>>,
    /// The loops' tasks; each ends with cancellation alone.
    pub tasks: Vec<JoinHandle<()>>,
}

/// Starts a source; `options` matter to [`Source::Kube`] alone. Needs a tokio runtime.
pub fn start(source: &Source, options: kube::Options, cancel: &CancellationToken) -> Running {
    match source {
        Source::Dir(path) => dir::start(path.clone(), cancel),
        Source::Kube => kube::start(options, cancel),
    }
}
