//! A folder of ordinary manifests, watched.
//!
//! One supervised loop waits for the kernel's file events (with a slow rescan as a net), reads what changed and sends
//! the differences. It never ends: a folder that is gone or cannot be read is a sentence in the status and another try.

mod folder;
mod manifest;
#[cfg(test)]
mod tests;
mod tree;
mod watch;

use std::{
    io,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::{
    sync::mpsc,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;

use self::{
    folder::Folder,
    manifest::Syntax,
    watch::{FolderWatch, Pending},
};
use super::{CHANNEL, Running, Source, Status, convert::Names};
use crate::{
    model::{Kind, Object, Problem, Update},
    supervise::{Backoff, Liveness, supervise},
};

/// Reads one manifest's text, as the source does: what its objects are, and what was not taken. `file` is its name; the
/// ending `.json` means JSON, anything else YAML.
///
/// # Errors
/// The text as a whole cannot be understood.
pub fn read_manifest(file: &str, text: &[u8], names: &mut Names) -> Result<(Vec<Object>, Vec<Problem>), Problem> {
    let syntax = Syntax::of(file).unwrap_or(Syntax::Yaml);
    let manifest = manifest::parse(file, syntax, text, names)?;
    Ok((manifest.objects.into_values().collect(), manifest.problems))
}

/// The kinds that a folder holds.
const KINDS: [Kind; 4] = [Kind::Service, Kind::Slice, Kind::Node, Kind::Pod];
/// How long events are gathered before files are read: a change of many files is one change.
const GATHER: Duration = Duration::from_millis(10);
/// How often everything is looked at, whether or not an event came.
const RESCAN: Duration = Duration::from_secs(10);
/// The first and the longest wait before a folder that cannot be read is tried again.
const RETRY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));

/// Starts to watch a folder. Needs a tokio runtime.
pub fn start(path: PathBuf, cancel: &CancellationToken) -> Running {
    let status = Arc::new(Status::new(Source::Dir(path.clone()).to_string(), &KINDS));
    let (updates, receiver) = mpsc::channel(CHANNEL);
    // The folder's state outlives a panic of the loop: the last good content of broken files is in it.
    let feed = Arc::new(Feed {
        folder: Mutex::new(Folder::new(path.clone())),
        path,
        status: status.clone(),
        updates,
    });
    let (task, liveness) = supervise("source dir", cancel.clone(), move |liveness| {
        let feed = feed.clone();
        async move { feed.run(&liveness).await }
    });
    Running {
        updates: receiver,
        status,
        loops: vec![liveness],
        tasks: vec![task],
    }
}

struct Feed {
    path: PathBuf,
    folder: Mutex<Folder>,
    status: Arc<Status>,
    updates: mpsc::Sender<Update>,
}

/// Why the loop has to begin anew.
#[derive(Debug, thiserror::Error)]
enum FeedError {
    #[error("reading the folder panicked")]
    Panicked,
    #[error("nobody takes updates any more")]
    NobodyListens,
}

impl Feed {
    async fn run(self: Arc<Self>, liveness: &Liveness) -> Result<(), FeedError> {
        let mut backoff = Backoff::new(RETRY.0, RETRY.1);
        let mut published = false;
        let mut watch: Option<FolderWatch> = None;
        let mut pending = Pending::default();
        pending.everything = true;
        let mut rescan = Instant::now() + RESCAN;
        loop {
            liveness.beat();
            if pending.everything {
                // The watch comes before the look, so that no change falls between them.
                if watch.as_ref().is_none_or(|watch| !watch.is_current(&self.path)) {
                    watch = self.rewatch();
                }
                let being_written = pending.being_written();
                match self.with_folder(move |folder| folder.scan(&being_written)).await? {
                    Ok(updates) => {
                        backoff.reset();
                        pending.scanned();
                        self.send(published, updates).await?;
                        if !published {
                            let everything = self.with_folder(|folder| folder.publish()).await?;
                            self.send(true, everything).await?;
                            published = true;
                        }
                        self.say_folder(None).await?;
                        self.status.synced(&KINDS);
                        rescan = Instant::now() + RESCAN;
                    }
                    Err(error) => {
                        self.say_folder(Some(&error)).await?;
                        watch = None;
                        rescan = Instant::now() + backoff.next_wait();
                    }
                }
            } else {
                let ready = pending.take_ready();
                if !ready.is_empty() {
                    let updates = self.with_folder(move |folder| folder.look_at(&ready)).await?;
                    self.send(published, updates).await?;
                    self.status.heard(&KINDS);
                }
            }
            self.wait(&mut watch, &mut pending, rescan).await;
            if Instant::now() >= rescan {
                pending.everything = true;
            }
        }
    }

    /// Waits until there is something to look at.
    async fn wait(&self, watch: &mut Option<FolderWatch>, pending: &mut Pending, rescan: Instant) {
        let until = pending.due().map_or(rescan, |due| due.min(rescan));
        let Some(folder_watch) = watch else {
            return sleep_until(until).await;
        };
        let mut lost = false;
        tokio::select! {
            () = sleep_until(until) => return,
            signal = folder_watch.next() => lost |= pending.note(signal),
        }
        let gathered = Instant::now() + GATHER;
        loop {
            tokio::select! {
                biased;
                signal = folder_watch.next() => lost |= pending.note(signal),
                () = sleep_until(gathered) => break,
            }
        }
        if lost {
            *watch = None;
        }
    }

    fn rewatch(&self) -> Option<FolderWatch> {
        match FolderWatch::new(&self.path) {
            Ok(watch) => Some(watch),
            Err(error) => {
                // The scan that follows tells a missing folder apart; otherwise the rescan goes on as a net.
                tracing::debug!(folder = %self.path.display(), %error, "the folder cannot be watched");
                None
            }
        }
    }

    async fn with_folder<T: Send + 'static>(
        self: &Arc<Self>,
        act: impl FnOnce(&mut Folder) -> T + Send + 'static,
    ) -> Result<T, FeedError> {
        let feed = self.clone();
        tokio::task::spawn_blocking(move || act(&mut feed.folder.lock().unwrap_or_else(PoisonError::into_inner)))
            .await
            .map_err(|_| FeedError::Panicked)
    }

    /// Sends updates; before the first whole content, problems alone.
    async fn send(&self, published: bool, updates: Vec<Update>) -> Result<(), FeedError> {
        for update in updates {
            if published || matches!(update, Update::Problems { .. }) {
                self.updates.send(update).await.map_err(|_| FeedError::NobodyListens)?;
            }
        }
        Ok(())
    }

    /// Says what is wrong with the folder itself.
    async fn say_folder(&self, error: Option<&io::Error>) -> Result<(), FeedError> {
        let had_error = self.status.snapshot().kinds.values().any(|kind| kind.error.is_some());
        let mut problems = Vec::new();
        if let Some(error) = error {
            let sentence = format!("the folder cannot be read: {error}; what was known of it still holds");
            self.status.failed(&KINDS, &sentence);
            problems.push(Problem {
                origin: self.path.display().to_string(),
                object: "(folder)".to_owned(),
                field: "(content)".to_owned(),
                message: sentence,
            });
        } else if !had_error {
            return Ok(());
        }
        let subject = self.path.to_string_lossy().into();
        self.send(true, vec![Update::Problems { subject, problems }]).await
    }
}
