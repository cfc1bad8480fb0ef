//! How a source is doing, for health checks, metrics and people.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
    time::SystemTime,
};

use crate::model::Kind;

/// The state of one kind's feed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KindStatus {
    /// Whether changes arrive now.
    pub connected: bool,
    /// When the whole content was last taken.
    pub synced: Option<SystemTime>,
    /// When the feed last said anything: a change, or that there is none.
    pub heard: Option<SystemTime>,
    /// What is wrong now, in one sentence.
    pub error: Option<String>,
    /// How often something went wrong since the start.
    pub errors: u64,
}

impl KindStatus {
    /// When what is known of the kind was last known to be true; `None` before it was read whole. While a server is away this
    /// stands still, and its age is the age of the state.
    pub fn confirmed(&self) -> Option<SystemTime> {
        self.synced.and(self.heard)
    }
}

/// The live state of a source.
#[derive(Debug)]
pub struct Status {
    source: String,
    kinds: Mutex<BTreeMap<Kind, KindStatus>>,
}

/// A copy of a source's [`Status`] at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatusSnapshot {
    /// The source, as `--source` names it.
    pub source: String,
    /// Each kind's feed.
    pub kinds: BTreeMap<Kind, KindStatus>,
}

impl Status {
    pub(super) fn new(source: String, kinds: &[Kind]) -> Self {
        Self {
            source,
            kinds: Mutex::new(kinds.iter().map(|&kind| (kind, KindStatus::default())).collect()),
        }
    }

    /// What is known now.
    pub fn snapshot(&self) -> StatusSnapshot {
        StatusSnapshot {
            source: self.source.clone(),
            kinds: self.kinds.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        }
    }

    fn update(&self, kinds: &[Kind], mut act: impl FnMut(&mut KindStatus)) {
        let mut known = self.kinds.lock().unwrap_or_else(PoisonError::into_inner);
        for kind in kinds {
            act(known.entry(*kind).or_default());
        }
    }

    /// The whole content has been taken.
    pub(super) fn synced(&self, kinds: &[Kind]) {
        let now = SystemTime::now();
        self.update(kinds, |status| {
            status.connected = true;
            status.synced = Some(now);
            status.heard = Some(now);
            status.error = None;
        });
    }

    /// The feed said something.
    pub(super) fn heard(&self, kinds: &[Kind]) {
        let now = SystemTime::now();
        self.update(kinds, |status| {
            status.connected = true;
            status.heard = Some(now);
            status.error = None;
        });
    }

    /// Something went wrong; what was taken before stands. True if it is not what was wrong already.
    pub(super) fn failed(&self, kinds: &[Kind], error: &str) -> bool {
        let mut news = false;
        self.update(kinds, |status| {
            status.connected = false;
            status.errors += 1;
            if status.error.as_deref() != Some(error) {
                status.error = Some(error.to_owned());
                news = true;
            }
        });
        news
    }
}
