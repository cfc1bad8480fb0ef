//! The observer's index of backends: (address, port, protocol, Service) of every backend that is not vacant → its id.
//!
//! Beside each entry of a Service stands one of no Service (0), by which programs ask whether an address is anybody's. Several
//! backends may have one address (a pod behind two Services): that entry names the one that came last and is still there.

use std::collections::{BTreeSet, HashMap as StdMap};

use aya::maps::{HashMap, MapData};
use lb_common::{
    backend::{Backend, EndpointKey},
    maps as names,
};

use super::kernel::{MapsError, put, remove};

/// What a backend is found by.
pub(super) fn backend_key(backend: &Backend) -> EndpointKey {
    EndpointKey::new(backend.addr, backend.port, backend.proto, backend.service_id)
}

/// The entry that says whether anybody has this address.
fn anybody(key: &EndpointKey) -> EndpointKey {
    EndpointKey { service_id: 0, ..*key }
}

/// The index map, and who is in it.
#[derive(Debug)]
pub(super) struct BackendIndex {
    map: HashMap<MapData, EndpointKey, u32>,
    users: Users,
}

impl BackendIndex {
    /// Brings the map to what these backends (none of them vacant) say: an earlier agent may have left another state, or none.
    pub(super) fn rebuild(
        map: HashMap<MapData, EndpointKey, u32>,
        backends: impl IntoIterator<Item = (u32, Backend)>,
    ) -> Result<Self, MapsError> {
        let mut this = Self {
            map,
            users: Users::default(),
        };
        for (id, backend) in backends {
            this.add(id, backend_key(&backend))?;
        }
        let held: Vec<EndpointKey> = this.map.keys().flatten().collect();
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
    pub(super) fn add(&mut self, id: u32, key: EndpointKey) -> Result<(), MapsError> {
        if self.users.by_id.get(&id) == Some(&key) {
            return Ok(());
        }
        put(names::BACKEND_INDEX, &mut self.map, &key, &id)?;
        put(names::BACKEND_INDEX, &mut self.map, &anybody(&key), &id)?;
        self.remove(id)?;
        self.users.join(id, key);
        Ok(())
    }

    /// Takes a backend out; again is no harm.
    pub(super) fn remove(&mut self, id: u32) -> Result<(), MapsError> {
        let Some((key, left)) = self.users.leave(id) else {
            return Ok(());
        };
        for (key, successor) in left.changes(key) {
            match successor {
                Some(other) => put(names::BACKEND_INDEX, &mut self.map, &key, &other)?,
                None => remove(names::BACKEND_INDEX, &mut self.map, &key)?,
            }
        }
        Ok(())
    }
}

/// Who still has an address after one has left it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Left {
    /// Another backend of the same Service (while one id replaces another).
    in_service: Option<u32>,
    /// Another backend of any Service.
    anywhere: Option<u32>,
}

impl Left {
    /// What each of the two entries becomes.
    fn changes(self, key: EndpointKey) -> [(EndpointKey, Option<u32>); 2] {
        [(key, self.in_service), (anybody(&key), self.anywhere)]
    }
}

/// Which backends have each address.
#[derive(Debug, Default)]
struct Users {
    by_id: StdMap<u32, EndpointKey>,
    /// By the entries of the map, those of no Service among them.
    ids: StdMap<EndpointKey, BTreeSet<u32>>,
}

impl Users {
    fn has(&self, key: &EndpointKey) -> bool {
        self.ids.contains_key(key)
    }

    fn join(&mut self, id: u32, key: EndpointKey) {
        self.by_id.insert(id, key);
        for key in [key, anybody(&key)] {
            self.ids.entry(key).or_default().insert(id);
        }
    }

    /// The entry of the one that leaves, and who is left; none if it was not there.
    fn leave(&mut self, id: u32) -> Option<(EndpointKey, Left)> {
        let key = self.by_id.remove(&id)?;
        let mut other = |key: EndpointKey| {
            let ids = self.ids.get_mut(&key)?;
            ids.remove(&id);
            let other = ids.last().copied();
            if other.is_none() {
                self.ids.remove(&key);
            }
            other
        };
        let left = Left {
            in_service: other(key),
            anywhere: other(anybody(&key)),
        };
        Some((key, left))
    }
}

#[cfg(test)]
mod tests {
    use lb_common::{
        abi::TCP,
        addr::{Addr, Port},
    };

    use super::*;

    fn key(service: u32) -> EndpointKey {
        EndpointKey::new(Addr::from_v4(7), Port::new(80), TCP, service)
    }

    #[test]
    fn an_address_of_two_services_stays_until_both_have_left() {
        let mut users = Users::default();
        users.join(1, key(4));
        users.join(2, key(5));
        let left = Left {
            in_service: None,
            anywhere: Some(2),
        };
        assert_eq!(users.leave(1), Some((key(4), left)));
        assert_eq!(users.leave(1), None, "leaving twice is leaving once");
        assert!(users.has(&key(5)) && users.has(&key(0)) && !users.has(&key(4)));
        let nobody = Left {
            in_service: None,
            anywhere: None,
        };
        assert_eq!(users.leave(2), Some((key(5), nobody)));
        assert!(!users.has(&key(0)));
    }

    #[test]
    fn a_new_id_of_the_same_endpoint_takes_over() {
        let mut users = Users::default();
        users.join(1, key(4));
        users.join(9, key(4));
        let (_, left) = users.leave(1).expect("it was there");
        assert_eq!(left.changes(key(4)), [(key(4), Some(9)), (key(0), Some(9))]);
    }
}
