//! The map of source ranges: a trie of prefixes, which no other map here is.
//!
//! What an entry means is `compile`'s to say; here it is written and read back.

use std::collections::{BTreeSet, HashSet};

use aya::maps::{LpmTrie, Map, MapData, MapError, lpm_trie::Key};
use lb_common::{frontend::SourceKey, maps as names};

use super::kernel::{MapsError, read_error, removed};
use crate::compile::Source;

/// The map of source ranges.
#[derive(Debug)]
pub(super) struct Sources(LpmTrie<MapData, SourceKey, u32>);

impl TryFrom<Map> for Sources {
    type Error = MapError;

    fn try_from(map: Map) -> Result<Self, MapError> {
        // The sizes of key and value are compared in there.
        LpmTrie::try_from(map).map(Self)
    }
}

fn key(source: &Source) -> Key<SourceKey> {
    Key::new(source.bits, source.key)
}

impl Sources {
    /// Writes entries; again is no harm.
    pub(super) fn put(&mut self, sources: &BTreeSet<Source>) -> Result<(), MapsError> {
        sources.iter().try_for_each(|source| {
            self.0.insert(&key(source), 1, 0).map_err(|source| MapsError::Map {
                operation: "update",
                map: names::SOURCES,
                source,
            })
        })
    }

    /// Removes entries; again is no harm.
    pub(super) fn remove(&mut self, sources: &BTreeSet<Source>) -> Result<(), MapsError> {
        let mut all = sources.iter();
        all.try_for_each(|source| removed(names::SOURCES, self.0.remove(&key(source))))
    }

    /// Reads all entries back.
    pub(super) fn read(&self) -> Result<HashSet<Source>, MapsError> {
        let all = self.0.keys().map(|key| {
            let key = key.map_err(read_error(names::SOURCES))?;
            Ok(Source {
                key: key.data(),
                bits: key.prefix_len(),
            })
        });
        all.collect()
    }

    /// Entries, counted by walking them.
    pub(super) fn len(&self) -> usize {
        self.0.keys().flatten().count()
    }
}
