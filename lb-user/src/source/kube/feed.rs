//! One kind's list and watch, for ever.
//!
//! Invariant: nothing is dropped because something went wrong. What was sent stands until a *whole* list, or an event
//! that names the object, says otherwise. After a cut the watch resumes where it was; after anything that casts doubt
//! on what has been seen (an expired version, an answer that makes no sense) everything is listed anew. Every try is
//! preceded by a wait, by what went wrong before it ([`super::waits`]).

use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{
    sync::mpsc,
    time::{sleep, timeout},
};

use super::{
    Options,
    dial::Dialer,
    page::{self, WatchEvent},
    waits::{Trouble, Waits},
    wire::{self, Connection, WireError},
};
use crate::{
    model::{Content, Kind, Object, ObjectKey, Problem, Update},
    source::{
        Status,
        convert::{Converted, Converter, Names, object_label},
    },
    supervise::{Liveness, dice},
};

/// How often an idle loop says that it lives.
const BEAT: Duration = Duration::from_secs(5);
/// How many watches in a row may bring nothing before everything is listed anew: the version may lie in a future that
/// a restored server does not have, or something in between may answer watches with nothing.
const MOST_FRUITLESS: u32 = 3;

/// Why the loop has to begin anew.
#[derive(Debug, thiserror::Error)]
pub(super) enum FeedError {
    #[error("nobody takes updates any more")]
    NobodyListens,
}

/// Why a try ended.
#[derive(Debug, thiserror::Error)]
enum TryError {
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error(transparent)]
    Feed(#[from] FeedError),
}

/// One kind's list and watch.
pub(super) struct Feed {
    kind: Kind,
    options: Arc<Options>,
    dialer: Dialer,
    status: Arc<Status>,
    updates: mpsc::Sender<Update>,
    names: Names,
    /// Objects that something is wrong with now.
    troubled: BTreeSet<Arc<str>>,
}

/// Where a feed stands between two tries.
#[derive(Default)]
struct Position {
    /// The way to the server, and when it was set up.
    connection: Option<(Connection, Instant)>,
    /// The version up to which everything was seen; `None` asks for a list.
    version: Option<String>,
    /// Watches in a row that the server answered, and that ended soon and without an event.
    fruitless: u32,
    /// When the last watch was opened.
    opened: Option<Instant>,
    /// Whether the whole content was taken before.
    listed: bool,
}

impl Feed {
    pub(super) fn new(
        kind: Kind,
        options: Arc<Options>,
        dialer: Dialer,
        status: Arc<Status>,
        updates: mpsc::Sender<Update>,
    ) -> Self {
        Self {
            kind,
            options,
            dialer,
            status,
            updates,
            names: Names::default(),
            troubled: BTreeSet::new(),
        }
    }

    /// Lists and watches until nobody listens any more.
    pub(super) async fn run(&mut self, liveness: &Liveness) -> Result<(), FeedError> {
        let timing = self.options.timing.clone();
        let mut waits = Waits::new(&timing);
        let mut position = Position::default();
        let began = Instant::now();
        loop {
            liveness.beat();
            let outcome = self.attempt(&mut position, liveness).await;
            if position.opened.take().is_some_and(|at| at.elapsed() >= timing.steady) {
                waits.reset();
                position.fruitless = 0;
            }
            let error = match outcome {
                Ok(()) if position.fruitless < MOST_FRUITLESS => None,
                Ok(()) => Some(WireError::Answer("watches end as soon as they begin".to_owned())),
                Err(TryError::Wire(error)) => Some(error),
                Err(TryError::Feed(error)) => return Err(error),
            };
            if let Some(error) = &error {
                // A refusal may last for ever (a right that was never granted): it is told once, not at every try.
                if self.status.failed(&[self.kind], &error.to_string()) {
                    tracing::warn!(kind = self.kind.as_str(), %error, "the API server cannot be followed just now");
                }
                if error.needs_list() || position.fruitless >= MOST_FRUITLESS {
                    position.version = None;
                    position.fruitless = 0;
                }
                if let Some(lasts) = error.setup_lasts() {
                    position.connection.take_if(|(_, set_up)| set_up.elapsed() >= lasts);
                }
            }
            // The server closes each watch after a while. The wait keeps one that closes at once from being asked in a
            // circle.
            let trouble = error.as_ref().map_or(Trouble::Unserved, WireError::trouble);
            idle(waits.next(trouble, began.elapsed(), dice()), liveness).await;
        }
    }

    /// Lists if need be, then watches until the watch ends.
    async fn attempt(&mut self, position: &mut Position, liveness: &Liveness) -> Result<(), TryError> {
        let connection = if let Some((connection, _)) = &position.connection {
            connection.clone()
        } else {
            let connection = wire::connection(&self.options, &self.dialer).await?;
            position.connection.insert((connection, Instant::now())).0.clone()
        };
        let version = if let Some(version) = &position.version {
            version.clone()
        } else {
            let version = self.list(&connection, position.listed, liveness).await?;
            position.listed = true;
            position.version.insert(version).clone()
        };
        let opened = wire::watch(&connection, self.kind, &self.options, &version).await;
        // A server that is overloaded, or not there, says nothing about the version; listing would only burden it more.
        position.fruitless += match &opened {
            Ok(_)
            | Err(
                WireError::Silence(_)
                | WireError::Refused {
                    code: 400 | 500 | 504, ..
                },
            ) => 1,
            Err(_) => 0,
        };
        let mut events = opened?;
        position.opened = Some(Instant::now());
        self.status.heard(&[self.kind]);
        let silence = self.options.timing.silence;
        let mut heard = Instant::now();
        loop {
            // A beat falls due more often than the server speaks.
            let Ok(next) = timeout(BEAT.min(silence), events.next(silence)).await else {
                liveness.beat();
                if heard.elapsed() >= silence {
                    return Err(WireError::Silence(silence).into());
                }
                continue;
            };
            let Some(line) = next? else {
                return Ok(());
            };
            liveness.beat();
            heard = Instant::now();
            position.version = Some(self.take_event(&line).await?);
            position.fruitless = 0;
            self.status.heard(&[self.kind]);
        }
    }

    /// Lists everything, page by page; tells the list's version.
    async fn list(&mut self, connection: &Connection, again: bool, liveness: &Liveness) -> Result<String, TryError> {
        let mut objects: Vec<Object> = Vec::new();
        let mut problems: Vec<(Arc<str>, Vec<Problem>)> = Vec::new();
        let mut next = None;
        let version = loop {
            let text = wire::page(connection, self.kind, &self.options, next).await?;
            liveness.beat();
            let mut converter = converter(&mut self.names);
            let head = page::read_page(&text, self.kind, &mut converter, &mut |converted| {
                objects.extend(converted.object);
                if !converted.problems.is_empty() {
                    problems.push((subject(self.kind, converted.key.as_ref()), converted.problems));
                }
            })
            .map_err(WireError::Answer)?;
            match head.next {
                Some(token) => next = Some(token),
                None => break head.version,
            }
        };
        if again && self.options.defects.relist_keeps {
            for object in objects {
                self.send(Update::Apply(object)).await?;
            }
        } else {
            self.send(Update::Replace(content(self.kind, objects))).await?;
        }
        let healed = std::mem::take(&mut self.troubled);
        for subject in healed {
            if problems.iter().all(|(troubled, _)| *troubled != subject) {
                let problems = Vec::new();
                self.send(Update::Problems { subject, problems }).await?;
            }
        }
        for (subject, problems) in problems {
            self.say(subject, problems).await?;
        }
        self.send(Update::Synced(self.kind)).await?;
        self.status.synced(&[self.kind]);
        Ok(version)
    }

    /// Takes one event in; tells its version.
    async fn take_event(&mut self, line: &[u8]) -> Result<String, TryError> {
        let event = page::read_event(line, self.kind, &mut converter(&mut self.names)).map_err(WireError::Answer)?;
        match event {
            WatchEvent::Bookmark(version) => Ok(version),
            WatchEvent::Error { code, message } => Err(WireError::WatchEnded { code, message }.into()),
            WatchEvent::Deleted(key, version) => {
                self.say(subject(self.kind, Some(&key)), Vec::new()).await?;
                self.send(Update::Delete(key)).await?;
                Ok(version)
            }
            WatchEvent::Applied(converted, version) => {
                let Converted { key, object, problems } = converted;
                self.say(subject(self.kind, key.as_ref()), problems).await?;
                match (object, key) {
                    (Some(object), _) => self.send(Update::Apply(object)).await?,
                    // Refused, or no concern of ours any more: a slice that lost its label, for example.
                    (None, Some(key)) => self.send(Update::Delete(key)).await?,
                    (None, None) => {}
                }
                Ok(version)
            }
        }
    }

    async fn say(&mut self, subject: Arc<str>, problems: Vec<Problem>) -> Result<(), FeedError> {
        let worth_saying = if problems.is_empty() {
            self.troubled.remove(&subject)
        } else {
            self.troubled.insert(subject.clone());
            true
        };
        if worth_saying {
            self.send(Update::Problems { subject, problems }).await?;
        }
        Ok(())
    }

    async fn send(&self, update: Update) -> Result<(), FeedError> {
        self.updates.send(update).await.map_err(|_| FeedError::NobodyListens)
    }
}

async fn idle(mut wait: Duration, liveness: &Liveness) {
    while !wait.is_zero() {
        let part = wait.min(BEAT);
        sleep(part).await;
        liveness.beat();
        wait -= part;
    }
}

fn converter(names: &mut Names) -> Converter<'_> {
    Converter {
        origin: names.share("API server"),
        names,
    }
}

fn subject(kind: Kind, key: Option<&ObjectKey>) -> Arc<str> {
    let label = key.map_or_else(
        || object_label(kind, "", ""),
        |key| object_label(kind, &key.name.namespace, &key.name.name),
    );
    label.into()
}

fn content(kind: Kind, objects: Vec<Object>) -> Content {
    let (mut services, mut slices, mut nodes, mut pods) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for object in objects {
        match object {
            Object::Service(service) => services.push(service),
            Object::Slice(slice) => slices.push(slice),
            Object::Node(node) => nodes.push(node),
            Object::Pod(pod) => pods.push(pod),
        }
    }
    match kind {
        Kind::Slice => Content::Slices(slices),
        Kind::Node => Content::Nodes(nodes),
        Kind::Pod => Content::Pods(pods),
        Kind::Service | Kind::Addresses => Content::Services(services),
    }
}
