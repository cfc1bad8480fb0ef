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
    /// Whether a whole list of Services has come, and one of slices.
    listed: [bool; 2],
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
    /// How many objects a whole list has.
    list: Option<usize>,
    moment: Option<SystemTime>,
}

impl Note {
    /// Notes what will be counted of an update; none of one that changes neither Services nor slices itself.
    pub(super) fn of(update: &Update) -> Option<Self> {
        let (kind, list, moment) = match update {
            Update::Replace(Content::Services(all)) => (Kind::Service, Some(all.len()), None),
            Update::Replace(Content::Slices(all)) => (Kind::Slice, Some(all.len()), None),
            Update::Apply(Object::Service(_)) => (Kind::Service, None, None),
            Update::Apply(Object::Slice(slice)) => (Kind::Slice, None, slice.changed_at),
            Update::Delete(key) if matches!(key.kind, Kind::Service | Kind::Slice) => (key.kind, None, None),
            _ => return None,
        };
        Some(Self { kind, list, moment })
    }
}

impl Changes {
    /// Begins to count. Changes that happened before `since` are of no one's making here.
    pub(super) fn new(since: SystemTime) -> Self {
        Self {
            since,
            services: 0,
            slices: 0,
            listed: [false; 2],
            waiting: HashMap::new(),
            programming: Buckets::new(PROGRAMMING_EDGES),
        }
    }

    /// Counts an update that touched these Services.
    pub(super) fn add(&mut self, note: Note, changed: &Changed) {
        let (count, listed) = match note.kind {
            Kind::Service => (&mut self.services, &mut self.listed[0]),
            _ => (&mut self.slices, &mut self.listed[1]),
        };
        *count += match note.list {
            None => 1,
            // To an agent that knew nothing, each object is a change.
            Some(objects) if !*listed => objects as u64,
            Some(_) => changed.services.len() as u64,
        };
        *listed |= note.list.is_some();
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

    fn note(kind: Kind, list: Option<usize>, moment: Option<SystemTime>) -> Note {
        Note { kind, list, moment }
    }

    #[test]
    fn changes_wait_until_their_service_is_done() {
        let start = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000);
        let at = |seconds| Some(start + Duration::from_secs(seconds));
        let mut changes = Changes::new(start);
        changes.add(note(Kind::Service, Some(3), None), &changed(&["a", "b"]));
        changes.add(note(Kind::Slice, None, at(10)), &changed(&["a"]));
        // A change that touches nobody comes in and does not wait.
        changes.add(note(Kind::Slice, None, at(10)), &changed(&[]));
        // One from before the start is not this agent's to answer for.
        changes.add(note(Kind::Slice, None, Some(SystemTime::UNIX_EPOCH)), &changed(&["b"]));
        assert_eq!((changes.services(), changes.slices()), (3, 3));
        assert_eq!(changes.pending(), (2, 2));
        let now = start + Duration::from_secs(13);
        changes.done(&ObjectName::new("shop", "a"), now);
        assert_eq!(changes.pending(), (1, 1));
        changes.done(&ObjectName::new("shop", "b"), now);
        changes.done(&ObjectName::new("shop", "b"), now);
        assert_eq!(changes.pending(), (0, 0));
        assert_eq!((changes.programming().count(), changes.programming().sum()), (1, 3.0));
        // A later list is the changes that it brings.
        changes.add(note(Kind::Service, Some(3), None), &changed(&["b"]));
        changes.add(note(Kind::Slice, Some(9), None), &changed(&[]));
        changes.add(note(Kind::Slice, Some(9), None), &changed(&["a"]));
        assert_eq!((changes.services(), changes.slices()), (4, 13));
    }

    #[test]
    fn a_clock_that_goes_ahead_makes_no_negative_time_and_moments_are_bounded() {
        let start = SystemTime::UNIX_EPOCH;
        let mut changes = Changes::new(start);
        for _ in 0..1_000 {
            changes.add(
                note(Kind::Slice, None, Some(start + Duration::from_secs(9))),
                &changed(&["a"]),
            );
        }
        assert_eq!(changes.pending(), (0, 1_000));
        changes.done(&ObjectName::new("shop", "a"), start);
        assert_eq!((changes.programming().count(), changes.programming().sum()), (256, 0.0));
    }
}
