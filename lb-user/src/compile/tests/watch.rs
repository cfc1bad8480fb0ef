//! What must hold after every single write, whatever is being changed.

use std::collections::HashMap;

use lb_common::{
    backend::state,
    frontend::{FrontendKey, flag},
    maps as names,
    set::{SetWord, elements_for},
};

use super::world::{Admitted, Members, admitted, members_of};
use crate::{
    compile::{GRACE_MS, Side},
    datapath::{
        fake::{Memory, Store},
        maps::Maps,
    },
};

/// Watches every write: at no moment may anything that is published dangle, or be overwritten.
#[derive(Clone, Debug, Default)]
pub(crate) struct Watch {
    words: HashMap<u32, SetWord>,
    /// What was published until lately: map, first, count, when.
    leaving: Vec<(&'static str, u32, u32, u64)>,
    /// Members that a frontend may show to a side on the way, where it stays with its set.
    pub(super) allowed: HashMap<(FrontendKey, Side), Vec<Members>>,
    /// Who a frontend with source ranges admits before and after, and whom at most, where it stays with its Service.
    pub(super) admitted: HashMap<FrontendKey, [Admitted; 3]>,
    /// Milliseconds, as in the agent.
    pub(super) now: u64,
    /// True after the maps were damaged on purpose: then much dangles until it is repaired.
    blind: bool,
}

impl Watch {
    /// Sees nothing.
    pub(crate) fn blind() -> Self {
        Self {
            blind: true,
            ..Self::default()
        }
    }

    fn ranges(memory: &Memory, word: SetWord) -> [(&'static str, u32, u32); 2] {
        let header = memory.lists[word.offset() as usize];
        [
            (names::LISTS, word.offset(), u32::from(word.count()) + 1),
            (names::TABLES, header.a, elements_for(header.b)),
        ]
    }

    pub(super) fn see(&mut self, memory: &Memory, store: Store) {
        if self.blind {
            return;
        }
        let meets = |first: u32, count: u32| store.first < first + count && first < store.first + store.count;
        match store.map {
            names::LISTS | names::TABLES => {
                for word in self.words.values().filter(|word| word.count() > 0) {
                    for (map, first, count) in Self::ranges(memory, *word) {
                        assert!(
                            map != store.map || !meets(first, count),
                            "{store:?} overwrites what {word:?} names"
                        );
                    }
                }
                for (map, first, count, since) in &self.leaving {
                    let overwritten = *map == store.map && meets(*first, *count) && self.now - since < GRACE_MS;
                    assert!(
                        !overwritten,
                        "{store:?} overwrites what was named {} ms ago",
                        self.now - since
                    );
                }
                return;
            }
            names::SETS => {
                let word = SetWord(memory.sets[store.first as usize]);
                let before = self.words.insert(store.first, word).unwrap_or_default();
                if before.count() > 0 && before != word {
                    for (map, first, count) in Self::ranges(memory, before) {
                        self.leaving.push((map, first, count, self.now));
                    }
                }
                if word.count() > 0 {
                    let header = memory.lists[word.offset() as usize];
                    let slots = memory.table(header.a, header.b).expect("a table within the array");
                    assert!(!slots.is_empty(), "{word:?} has no table");
                    assert!(
                        slots.iter().all(|slot| *slot < word.count()),
                        "a slot of {word:?} names no member"
                    );
                }
            }
            names::BACKEND_STATS | names::SERVICE_STATS | names::MEMBERS => return,
            _ => {}
        }
        self.look(memory);
    }

    pub(super) fn look(&self, memory: &Memory) {
        for (key, frontend) in &memory.frontends {
            for side in Side::BOTH {
                if let Some(set_id) = side.set_id(frontend) {
                    self.look_at_set(memory, (*key, side), frontend.service_id, set_id);
                }
            }
            if frontend.flags & flag::SOURCE_RANGES == 0 {
                continue;
            }
            let Some([old, new, most]) = self.admitted.get(key) else {
                continue;
            };
            let now = admitted(memory, frontend.service_id);
            assert!(
                now.is_superset(old) || now.is_superset(new),
                "{key:?} admits {now:?}, and neither all of {old:?} nor of {new:?}"
            );
            assert!(now.is_subset(most), "{key:?} admits {now:?}, more than {most:?}");
        }
    }

    fn look_at_set(&self, memory: &Memory, by: (FrontendKey, Side), service_id: u32, set_id: u32) {
        let word = SetWord(memory.sets[set_id as usize]);
        assert_ne!(word, SetWord::default(), "the set of {by:?} was never published");
        let first = word.offset() as usize + 1;
        for entry in &memory.lists[first..][..usize::from(word.count())] {
            let backend = memory.backends[entry.a as usize];
            assert_ne!(backend.state, state::VACANT, "{by:?} leads to a vacant backend");
            assert_eq!(
                backend.service_id, service_id,
                "{by:?} leads to another Service's backend"
            );
        }
        if let Some(allowed) = self.allowed.get(&by) {
            let members = members_of(memory, set_id);
            assert!(
                allowed.contains(&members),
                "{by:?} shows {members:?}, allowed are {allowed:?}"
            );
        }
    }
}
