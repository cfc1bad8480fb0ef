//! Those who follow events: each has a bounded queue of its own; whoever is slow loses events, is told how many, and slows
//! nobody down.

use std::time::SystemTime;

use tokio::sync::mpsc::{self, error::TrySendError};

use crate::{
    model::ObjectName,
    view::{EventReader, EventView, ServiceFilter, Timestamp},
};

/// Events that wait for one reader.
const QUEUE: usize = 4_096;
/// Readers at once.
const MAX_FOLLOWERS: usize = 8;

#[derive(Debug)]
struct Follower {
    filter: ServiceFilter,
    sender: mpsc::Sender<EventView>,
    lost: u64,
}

/// All readers of events.
#[derive(Debug, Default)]
pub struct Followers {
    all: Vec<Follower>,
}

impl Followers {
    /// Adds a reader; none if there are too many.
    pub fn add(&mut self, filter: ServiceFilter) -> Option<EventReader> {
        self.all.retain(|follower| !follower.sender.is_closed());
        if self.all.len() >= MAX_FOLLOWERS {
            return None;
        }
        let (sender, reader) = mpsc::channel(QUEUE);
        self.all.push(Follower {
            filter,
            sender,
            lost: 0,
        });
        Some(reader)
    }

    /// Whether anybody reads events of a Service: then it is worth making them.
    pub fn want(&self, service: &ObjectName) -> bool {
        self.all.iter().any(|follower| follower.filter.admits(service))
    }

    /// Whether anybody reads at all.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Hands an event of a Service to those who want it.
    pub fn tell(&mut self, service: &ObjectName, event: &EventView) {
        self.all
            .retain_mut(|follower| !follower.filter.admits(service) || follower.tell(event));
    }
}

impl Follower {
    /// False when the reader went away.
    fn tell(&mut self, event: &EventView) -> bool {
        if self.lost > 0 {
            let lost = EventView::Lost {
                time: Timestamp::from_system(SystemTime::now()),
                events: self.lost,
            };
            match self.sender.try_send(lost) {
                Ok(()) => self.lost = 0,
                Err(TrySendError::Full(_)) => {
                    self.lost += 1;
                    return true;
                }
                Err(TrySendError::Closed(_)) => return false,
            }
        }
        match self.sender.try_send(event.clone()) {
            Ok(()) => true,
            Err(TrySendError::Full(_)) => {
                self.lost += 1;
                true
            }
            Err(TrySendError::Closed(_)) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(n: u64) -> EventView {
        EventView::Lost {
            time: Timestamp::from_unix_millis(0),
            events: n,
        }
    }

    #[test]
    fn a_slow_reader_is_told_what_it_lost_and_a_gone_one_is_forgotten() {
        let web = ObjectName::new("shop", "web");
        let mut followers = Followers::default();
        assert!(!followers.want(&web));
        let mut reader = followers.add(ServiceFilter::default()).expect("the first");
        assert!(followers.want(&web));
        for n in 0..QUEUE as u64 + 7 {
            followers.tell(&web, &event(n));
        }
        assert_eq!(reader.try_recv(), Ok(event(0)));
        assert_eq!(reader.try_recv(), Ok(event(1)));
        followers.tell(&web, &event(99));
        let rest: Vec<_> = std::iter::from_fn(|| reader.try_recv().ok()).collect();
        let [.., EventView::Lost { events: 7, .. }, last] = rest.as_slice() else {
            panic!("{:?}", rest.iter().rev().take(2).collect::<Vec<_>>());
        };
        assert_eq!(*last, event(99));
        drop(reader);
        followers.tell(&web, &event(1));
        assert!(followers.is_empty());
    }

    #[test]
    fn filters_and_the_number_of_readers_hold() {
        let mut followers = Followers::default();
        let only = ServiceFilter {
            namespace: Some("shop".into()),
            name: None,
        };
        let mut reader = followers.add(only.clone()).expect("the first");
        followers.tell(&ObjectName::new("other", "web"), &event(1));
        followers.tell(&ObjectName::new("shop", "web"), &event(2));
        assert_eq!(reader.try_recv(), Ok(event(2)));
        let readers: Vec<_> = (1..MAX_FOLLOWERS)
            .map(|_| followers.add(only.clone()).expect("room"))
            .collect();
        assert!(followers.add(only.clone()).is_none());
        drop(readers);
        assert!(followers.add(only).is_some());
    }
}
