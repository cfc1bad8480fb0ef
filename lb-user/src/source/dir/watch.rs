//! File events of one folder, and what is to be looked at because of them.
//!
//! A file that is being written is not looked at before its writer closes it: a half of a manifest may be valid, and
//! an emptied file says that its objects are gone.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Duration,
};

use notify::{
    Event, EventKind, RecursiveMode, Watcher,
    event::{AccessKind, AccessMode, CreateKind, ModifyKind},
};
use tokio::{sync::mpsc, time::Instant};

use super::manifest::Syntax;

/// How long after its last change a file counts as being written, if nobody says that it is closed.
const WRITTEN_AFTER: Duration = Duration::from_secs(1);

/// What an event means for us.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Signal {
    /// A manifest is there in full, or is gone.
    Settled(String),
    /// A manifest is being written.
    Changing(String),
    /// Something else happened: look at everything.
    Everything,
    /// The folder itself was removed or moved: the watch is on nothing any more, even if a new folder has the old number.
    Lost,
}

/// The kernel's watch on a folder.
pub(super) struct FolderWatch {
    signals: mpsc::UnboundedReceiver<Signal>,
    identity: Option<(u64, u64)>,
    _watcher: notify::RecommendedWatcher,
}

impl FolderWatch {
    /// Watches what the path names now.
    pub(super) fn new(path: &Path) -> notify::Result<Self> {
        let (sender, signals) = mpsc::unbounded_channel();
        let folder = path.to_owned();
        let mut watcher = notify::recommended_watcher(move |event: notify::Result<Event>| {
            for signal in signals_of(&folder, event) {
                // Nobody listens any more only when the watch itself is about to go.
                let _ = sender.send(signal);
            }
        })?;
        let identity = identity(path);
        watcher.watch(path, RecursiveMode::NonRecursive)?;
        Ok(Self {
            signals,
            identity,
            _watcher: watcher,
        })
    }

    /// Whether the path still names the folder that is watched.
    pub(super) fn is_current(&self, path: &Path) -> bool {
        self.identity.is_some() && self.identity == identity(path)
    }

    /// The next signal.
    pub(super) async fn next(&mut self) -> Signal {
        match self.signals.recv().await {
            Some(signal) => signal,
            // The watcher owns the sender and lives as long as we do; should it fail, the rescan goes on as a net.
            None => std::future::pending().await,
        }
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    fs::metadata(path).ok().map(|metadata| (metadata.dev(), metadata.ino()))
}

fn signals_of(folder: &Path, event: notify::Result<Event>) -> Vec<Signal> {
    let Ok(event) = event else {
        return vec![Signal::Everything];
    };
    if event.need_rescan() {
        return vec![Signal::Everything];
    }
    event
        .paths
        .iter()
        .filter_map(|path| signal_of(folder, path, event.kind))
        .collect()
}

fn signal_of(folder: &Path, path: &PathBuf, kind: EventKind) -> Option<Signal> {
    let changing = match kind {
        // Our own reading makes these.
        EventKind::Access(AccessKind::Close(AccessMode::Write)) => false,
        EventKind::Access(_) => return None,
        EventKind::Create(CreateKind::File) => {
            // A link is complete from the beginning, and nobody will close it.
            let metadata = path.symlink_metadata().ok();
            metadata.is_some_and(|metadata| metadata.is_file() && metadata.nlink() == 1)
        }
        EventKind::Modify(ModifyKind::Data(_)) => true,
        _ => false,
    };
    if path == folder {
        let lost = matches!(kind, EventKind::Remove(_) | EventKind::Modify(ModifyKind::Name(_)));
        return Some(if lost { Signal::Lost } else { Signal::Everything });
    }
    let name = path.file_name()?.to_str()?;
    if Syntax::of(name).is_some() {
        let name = name.to_owned();
        return Some(if changing {
            Signal::Changing(name)
        } else {
            Signal::Settled(name)
        });
    }
    // A ConfigMap changes by the rename of `..data`; other links may hang on a folder or link of any name.
    let plain_change = matches!(
        kind,
        EventKind::Modify(ModifyKind::Data(_) | ModifyKind::Metadata(_)) | EventKind::Access(_)
    );
    (!plain_change).then_some(Signal::Everything)
}

/// What is to be looked at.
#[derive(Debug, Default)]
pub(super) struct Pending {
    /// The whole folder.
    pub(super) everything: bool,
    settled: BTreeSet<String>,
    /// Files that are being written, and when to stop waiting for their writer.
    changing: HashMap<String, Instant>,
}

impl Pending {
    /// Takes a signal; tells whether the watch is lost.
    pub(super) fn note(&mut self, signal: Signal) -> bool {
        let lost = signal == Signal::Lost;
        match signal {
            Signal::Settled(name) => {
                self.changing.remove(&name);
                self.settled.insert(name);
            }
            Signal::Changing(name) => {
                self.settled.remove(&name);
                self.changing.insert(name, Instant::now() + WRITTEN_AFTER);
            }
            Signal::Everything | Signal::Lost => self.everything = true,
        }
        lost
    }

    /// When the next file counts as written, if one waits for that.
    pub(super) fn due(&self) -> Option<Instant> {
        self.changing.values().min().copied()
    }

    /// The files that may be looked at now; they are no longer pending.
    pub(super) fn take_ready(&mut self) -> BTreeSet<String> {
        let now = Instant::now();
        let mut ready = std::mem::take(&mut self.settled);
        self.changing.retain(|name, due| {
            let waits = *due > now;
            if !waits {
                ready.insert(name.clone());
            }
            waits
        });
        ready
    }

    /// The files that a look at everything must leave out.
    pub(super) fn being_written(&self) -> HashSet<String> {
        let now = Instant::now();
        let changing = self.changing.iter().filter(|(_, due)| **due > now);
        changing.map(|(name, _)| name.clone()).collect()
    }

    /// Everything has been looked at but what is being written.
    pub(super) fn scanned(&mut self) {
        self.everything = false;
        self.take_ready();
    }
}
