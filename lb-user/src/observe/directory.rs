//! What addresses and ids stand for, shared between the reconciler, which writes, and those who judge records.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    sync::{
        PoisonError, RwLock,
        atomic::{AtomicU64, Ordering},
    },
};

use lb_common::frontend::FrontendKey;

use super::clients::{Caller, Clients};
use crate::model::{ObjectName, Update};

/// Which backend ids may get new connections; written by the reconciler, read while records are judged.
#[derive(Debug)]
pub struct UsableBackends {
    words: Box<[AtomicU64]>,
}

impl UsableBackends {
    /// Room for ids `0..capacity`.
    pub fn new(capacity: u32) -> Self {
        Self {
            words: (0..capacity.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Says whether a backend may get new connections.
    pub fn set(&self, id: u32, usable: bool) {
        if let Some(word) = self.words.get(id as usize / 64) {
            let bit = 1u64 << (id % 64);
            if usable {
                word.fetch_or(bit, Ordering::Relaxed);
            } else {
                word.fetch_and(!bit, Ordering::Relaxed);
            }
        }
    }

    /// Whether a backend may get new connections.
    pub fn get(&self, id: u32) -> bool {
        self.words
            .get(id as usize / 64)
            .is_some_and(|word| word.load(Ordering::Relaxed) & (1 << (id % 64)) != 0)
    }
}

/// Whose address is whose, and what ids stand for; written by the reconciler, read while records are judged.
#[derive(Debug, Default)]
pub struct Directory {
    known: RwLock<Known>,
    clients: RwLock<Clients>,
}

#[derive(Debug, Default)]
struct Known {
    /// (Service id, backend id; 0 for a frontend).
    addresses: HashMap<FrontendKey, (u32, u32)>,
    backends: HashMap<u32, SocketAddr>,
    services: HashMap<u32, ObjectName>,
}

impl Directory {
    /// An empty directory of a node.
    pub fn of_node(node: &str) -> Self {
        Self {
            known: RwLock::default(),
            clients: RwLock::new(Clients::of_node(node)),
        }
    }

    /// Takes what an update says about the node's Pods.
    pub fn take(&self, update: &Update) {
        // Each Pod is taken whole: a panic elsewhere leaves nothing half done.
        self.clients
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .apply(update);
    }

    /// Who has an address, as the Pods say.
    pub fn caller(&self, address: IpAddr) -> Option<Caller> {
        self.clients
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .find(address)
    }

    /// How many Pods of the node are known.
    pub fn pods(&self) -> usize {
        self.clients.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Files an address.
    pub fn put(&self, key: FrontendKey, service_id: u32, backend_id: u32) {
        let mut known = self.write();
        known.addresses.insert(key, (service_id, backend_id));
        if backend_id != 0 {
            known
                .backends
                .insert(backend_id, SocketAddr::new(key.addr.into(), key.port.get()));
        }
    }

    /// Forgets an address, if it still is this Service's.
    pub fn remove(&self, key: &FrontendKey, service_id: u32) {
        let mut known = self.write();
        if known.addresses.get(key).is_some_and(|(owner, _)| *owner == service_id) {
            known.addresses.remove(key);
        }
    }

    /// Files a Service's name; its backends' addresses are forgotten with it.
    pub fn name(&self, service_id: u32, name: &ObjectName) {
        self.write().services.insert(service_id, name.clone());
    }

    /// Forgets a Service, and backends that are no more. Records of them may still come: they are told without their names.
    pub fn forget(&self, service_id: u32, backends: impl Iterator<Item = u32>) {
        let mut known = self.write();
        known.services.remove(&service_id);
        for id in backends {
            known.backends.remove(&id);
        }
    }

    /// The address of a backend.
    pub fn backend(&self, id: u32) -> Option<SocketAddr> {
        self.read().backends.get(&id).copied()
    }

    /// The name of a Service.
    pub fn service(&self, id: u32) -> Option<ObjectName> {
        self.read().services.get(&id).cloned()
    }

    pub(super) fn find(&self, key: &FrontendKey) -> Option<(u32, u32)> {
        self.read().addresses.get(key).copied()
    }

    fn read(&self) -> std::sync::RwLockReadGuard<'_, Known> {
        self.known.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> std::sync::RwLockWriteGuard<'_, Known> {
        // Each entry is written whole: a panic elsewhere leaves nothing half done.
        self.known.write().unwrap_or_else(PoisonError::into_inner)
    }
}
