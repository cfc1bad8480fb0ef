//! Strings and hints that many records share.

use std::{collections::HashSet, sync::Arc};

use crate::model::Hints;

/// Hands out one allocation for each distinct text: node names, zones, namespaces and port names repeat a lot.
#[derive(Debug, Default)]
pub struct Names {
    known: HashSet<Arc<str>>,
    /// The size at which strings that nobody else holds any more are let go.
    sweep_at: usize,
    hints: HashSet<Arc<Hints>>,
}

/// How many distinct hints are worth keeping; a cluster has one or two for each zone or node.
const MOST_HINTS: usize = 4096;

impl Names {
    /// The shared string of this text.
    pub fn share(&mut self, text: &str) -> Arc<str> {
        if let Some(known) = self.known.get(text) {
            return known.clone();
        }
        if self.known.len() >= self.sweep_at.max(1024) {
            self.known.retain(|name| Arc::strong_count(name) > 1);
            self.sweep_at = self.known.len() * 2;
        }
        let name: Arc<str> = text.into();
        self.known.insert(name.clone());
        name
    }

    /// The shared record of these hints.
    pub(super) fn share_hints(&mut self, hints: Hints) -> Arc<Hints> {
        if let Some(known) = self.hints.get(&hints) {
            return known.clone();
        }
        if self.hints.len() >= MOST_HINTS {
            self.hints.retain(|hints| Arc::strong_count(hints) > 1);
        }
        let hints = Arc::new(hints);
        if self.hints.len() < MOST_HINTS {
            self.hints.insert(hints.clone());
        }
        hints
    }

    /// How many distinct strings are held.
    pub fn len(&self) -> usize {
        self.known.len()
    }

    /// True if no string is held.
    pub fn is_empty(&self) -> bool {
        self.known.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_texts_share_and_unused_ones_are_let_go() {
        let mut names = Names::default();
        let a = names.share("zone-a");
        assert!(Arc::ptr_eq(&a, &names.share("zone-a")));
        for i in 0..10_000 {
            names.share(&format!("name-{i}"));
        }
        assert!(
            names.len() <= 2048,
            "{} strings are held though one is used",
            names.len()
        );
        assert!(Arc::ptr_eq(&a, &names.share("zone-a")));
    }
}
