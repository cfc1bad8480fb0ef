//! Changes of Services and EndpointSlices that came in, and those that wait to reach the kernel, as kube-proxy counts them.
//!
//! Kept only on request. Invariant: what waits is of Services that wait to be looked at, so it ends with them.

use std::{collections::HashMap, time::SystemTime};

use crate::{
    desired::Changed,
    metrics::{Buckets, families::PROGRAMMING_EDGES},
    model::{Content, Kind, Object, ObjectName, Update},
};

/// The most moments of change that are kept of one waiting Service.
const MOST_MOMENTS: usize = 256;

/// The counts.
#[derive(Clone, Debug)]
pub struct Changes {
    since: SystemTime,
    services: u64,
    slices: u64,
    waiting: HashMap<ObjectName, Waiting>,
    programming: Buckets,
}

/// What waits of one Service.
#[derive(Clone, Debug, Default)]
struct Waiting {
    services: u64,
    slices: u64,
    /// When the changes happened, as the slices say.
    moments: Vec<SystemTime>,
}

/// What an update says, before it is folded in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Note {
    kind: Kind,
    whole: bool,
    moment: Option<SystemTime>,
}

impl Note {
    /// Notes what will be counted of an update; none of one that changes neither Services nor slices itself.
    pub(super) fn of(update: &Update) -> Option<Self> {
        let (kind, whole, moment) = match update {
            Update::Replace(Content::Services(_)) => (Kind::Service, true, None),
            Update::Replace(Content::Slices(_)) => (Kind::Slice, true, None),
            Update::Apply(Object::Service(_)) => (Kind::Service, false, None),
            Update::Apply(Object::Slice(slice)) => (Kind::Slice, false, slice.changed_at),
            Update::Delete(key) if matches!(key.kind, Kind::Service | Kind::Slice) => (key.kind, false, None),
            _ => return None,
        };
        Some(Self { kind, whole, moment })
    }
}

impl Changes {
    /// Begins to count. Changes that happened before `since` are of no one's making here.
    pub(super) fn new(since: SystemTime) -> Self {
        Self {
            since,
            services: 0,
            slices: 0,
            waiting: HashMap::new(),
            programming: Buckets::new(PROGRAMMING_EDGES),
        }
    }

    /// Counts an update that touched these Services.
    pub(super) fn add(&mut self, note: Note, changed: &Changed) {
        let came = if note.whole { changed.services.len() as u64 } else { 1 };
        match note.kind {
            Kind::Service => self.services += came,
            _ => self.slices += came,
        }
        let moment = note.moment.filter(|&moment| moment > self.since);
        for name in &changed.services {
            let waiting = self.waiting.entry(name.clone()).or_default();
            match note.kind {
                Kind::Service => waiting.services += 1,
                _ => waiting.slices += 1,
            }
            if waiting.moments.len() < MOST_MOMENTS {
                waiting.moments.extend(moment);
            }
        }
    }

    /// A Service's changes are in the kernel now.
    pub(super) fn done(&mut self, name: &ObjectName, now: SystemTime) {
        for moment in self.waiting.remove(name).unwrap_or_default().moments {
            // A clock that goes ahead of this node's makes a change of no duration.
            let took = now.duration_since(moment).unwrap_or_default();
            self.programming.observe(took.as_secs_f64());
        }
    }

    /// Changes of Services that came in.
    pub fn services(&self) -> u64 {
        self.services
    }

    /// Changes of EndpointSlices that came in.
    pub fn slices(&self) -> u64 {
        self.slices
    }

    /// Changes that wait: of Services, of EndpointSlices.
    pub fn pending(&self) -> (u64, u64) {
        let waiting = self.waiting.values();
        waiting.fold((0, 0), |(services, slices), waiting| {
            (services + waiting.services, slices + waiting.slices)
        })
    }

    /// From the moments of change that slices are annotated with to their effect, in seconds.
    pub fn programming(&self) -> &Buckets {
        &self.programming
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn changed(names: &[&str]) -> Changed {
        Changed {
            services: names.iter().map(|name| ObjectName::new("shop", name)).collect(),
        }
    }

    fn note(kind: Kind, whole: bool, moment: Option<SystemTime>) -> Note {
        Note { kind, whole, moment }
    }

    #[test]
    fn changes_wait_until_their_service_is_done() {
        let start = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000);
        let at = |seconds| Some(start + Duration::from_secs(seconds));
        let mut changes = Changes::new(start);
        changes.add(note(Kind::Service, true, None), &changed(&["a", "b"]));
        changes.add(note(Kind::Slice, false, at(10)), &changed(&["a"]));
        // A change that touches nobody comes in and does not wait.
        changes.add(note(Kind::Slice, false, at(10)), &changed(&[]));
        // One from before the start is not this agent's to answer for.
        changes.add(note(Kind::Slice, false, Some(SystemTime::UNIX_EPOCH)), &changed(&["b"]));
        assert_eq!((changes.services(), changes.slices()), (2, 3));
        assert_eq!(changes.pending(), (2, 2));
        let now = start + Duration::from_secs(13);
        changes.done(&ObjectName::new("shop", "a"), now);
        assert_eq!(changes.pending(), (1, 1));
        changes.done(&ObjectName::new("shop", "b"), now);
        changes.done(&ObjectName::new("shop", "b"), now);
        assert_eq!(changes.pending(), (0, 0));
        assert_eq!((changes.programming().count(), changes.programming().sum()), (1, 3.0));
    }

    #[test]
    fn a_clock_that_goes_ahead_makes_no_negative_time_and_moments_are_bounded() {
        let start = SystemTime::UNIX_EPOCH;
        let mut changes = Changes::new(start);
        for _ in 0..1_000 {
            changes.add(
                note(Kind::Slice, false, Some(start + Duration::from_secs(9))),
                &changed(&["a"]),
            );
        }
        assert_eq!(changes.pending(), (0, 1_000));
        changes.done(&ObjectName::new("shop", "a"), start);
        assert_eq!((changes.programming().count(), changes.programming().sum()), (256, 0.0));
    }
}
