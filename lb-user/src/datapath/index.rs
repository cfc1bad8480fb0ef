//! The packet observer's index of backends: (address, port, protocol) of every backend that is not vacant.
//!
//! Several backends may have one address (a pod behind two Services): it stays in the index until the last of them has
//! gone. Programs ask only whether an address is there; the id beside it is the one that came last.

use std::collections::HashMap as StdMap;

use aya::maps::{HashMap, MapData};
use lb_common::{backend::Backend, frontend::FrontendKey, maps as names};

use super::kernel::{MapsError, put, remove};

/// What a backend is found by.
pub(super) fn backend_key(backend: &Backend) -> FrontendKey {
    FrontendKey::new(backend.addr, backend.port, backend.proto)
}

/// The index map, and who is in it.
#[derive(Debug)]
pub(super) struct BackendIndex {
    map: HashMap<MapData, FrontendKey, u32>,
    users: Users,
}

impl BackendIndex {
    /// Brings the map to what these backends (none of them vacant) say: an earlier agent may have left another state, or none.
    pub(super) fn rebuild(
        map: HashMap<MapData, FrontendKey, u32>,
        backends: impl IntoIterator<Item = (u32, Backend)>,
    ) -> Result<Self, MapsError> {
        let mut this = Self {
            map,
            users: Users::default(),
        };
        for (id, backend) in backends {
            this.add(id, backend_key(&backend))?;
        }
        let held: Vec<FrontendKey> = this.map.keys().flatten().collect();
        for key in held.iter().filter(|key| !this.users.has(key)) {
            remove(names::BACKEND_INDEX, &mut this.map, key)?;
        }
        Ok(this)
    }

    /// Entries of the map, counted by walking it.
    pub(super) fn len(&self) -> usize {
        self.map.keys().flatten().count()
    }

    /// Enters a backend; again is no harm.
    pub(super) fn add(&mut self, id: u32, key: FrontendKey) -> Result<(), MapsError> {
        if self.users.by_id.get(&id) == Some(&key) {
            return Ok(());
        }
        put(names::BACKEND_INDEX, &mut self.map, &key, &id)?;
        self.remove(id)?;
        self.users.join(id, key);
        Ok(())
    }

    /// Takes a backend out; again is no harm.
    pub(super) fn remove(&mut self, id: u32) -> Result<(), MapsError> {
        match self.users.leave(id) {
            Some(key) => remove(names::BACKEND_INDEX, &mut self.map, &key),
            None => Ok(()),
        }
    }
}

/// How many backends have each address.
#[derive(Debug, Default)]
struct Users {
    by_id: StdMap<u32, FrontendKey>,
    counts: StdMap<FrontendKey, u32>,
}

impl Users {
    fn has(&self, key: &FrontendKey) -> bool {
        self.counts.contains_key(key)
    }

    fn join(&mut self, id: u32, key: FrontendKey) {
        self.by_id.insert(id, key);
        *self.counts.entry(key).or_default() += 1;
    }

    /// The address that nobody has any more, if there is one.
    fn leave(&mut self, id: u32) -> Option<FrontendKey> {
        let key = self.by_id.remove(&id)?;
        let count = self.counts.get_mut(&key)?;
        *count -= 1;
        if *count > 0 {
            return None;
        }
        self.counts.remove(&key);
        Some(key)
    }
}

#[cfg(test)]
mod tests {
    use lb_common::{
        abi::TCP,
        addr::{Addr, Port},
    };

    use super::*;

    #[test]
    fn an_address_of_two_services_stays_until_both_have_left() {
        let key = FrontendKey::new(Addr::from_v4(7), Port::new(80), TCP);
        let mut users = Users::default();
        users.join(1, key);
        users.join(2, key);
        assert_eq!(users.leave(1), None);
        assert_eq!(users.leave(1), None, "leaving twice is leaving once");
        assert!(users.has(&key));
        assert_eq!(users.leave(2), Some(key));
        assert!(!users.has(&key));
    }
}
