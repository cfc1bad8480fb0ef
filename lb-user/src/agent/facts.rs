//! What the node itself says, kept for a while: its proxy, that one's tables, its settings.

use std::{
    collections::{HashMap, HashSet},
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use super::state::{Shared, lock};
use crate::{
    model::Protocol,
    node::{
        inventory,
        proxy::{Kind, Proxy},
        settings::{self, Setting, Sysctls},
        table::Table,
    },
    observe::monotonic_ns,
    reconcile::Reconciler,
    view::Mode,
};

/// How old the settings and the proxy's tables may be when somebody needs them.
const FRESH: Duration = Duration::from_secs(5);
/// For how long the proxy is believed to be the same: to look for it costs a third of a second on a node with many Services.
const SAME_PROXY: Duration = Duration::from_mins(1);
/// Ports of the range that Linux has by default (32768 to 60999), where the node's own cannot be read.
pub(super) const USUAL_PORTS: u32 = 28_232;

/// What the node says.
#[derive(Debug)]
pub(super) struct Facts {
    read: Instant,
    /// The same on the clock of the observation: before anything was read.
    read_ns: u64,
    /// When the proxy was looked for.
    looked: Instant,
    /// Who translates Services.
    pub(super) proxy: Arc<Proxy>,
    /// What that one has programmed.
    pub(super) table: Arc<Table>,
    /// The settings, with advice.
    pub(super) settings: Vec<Setting>,
    /// `net.ipv4.vs.conn_reuse_mode`.
    pub(super) conn_reuse_mode: Option<u8>,
    /// Source ports that the automatic choice has.
    pub(super) ports: u32,
}

impl Facts {
    /// Reads anew what may have changed since `before`.
    fn read(shared: &Shared, frontends: &HashSet<SocketAddr>, before: Option<&Self>) -> Self {
        let read_ns = monotonic_ns();
        let known = before.filter(|before| before.looked.elapsed() < SAME_PROXY && before.proxy.kind != Kind::Unseen);
        let (looked, proxy) = match known {
            Some(known) => (known.looked, known.proxy.clone()),
            None if shared.config.mode == Mode::Balance => (Instant::now(), Arc::new(Proxy::evenkeel())),
            None => (Instant::now(), Arc::new(Proxy::find(&shared.config.bpffs, frontends))),
        };
        let table = match known {
            Some(known) if known.table.is_current() => known.table.clone(),
            _ => Arc::new(Table::read(&proxy)),
        };
        let sysctls = Sysctls::read();
        Self {
            read: Instant::now(),
            read_ns,
            looked,
            table,
            settings: settings::judge(&sysctls, proxy.kind),
            conn_reuse_mode: (sysctls.conn_reuse_mode.as_deref()).and_then(|mode| mode.trim().parse().ok()),
            ports: sysctls.usable_ports().unwrap_or(USUAL_PORTS),
            proxy,
        }
    }
}

/// The TCP frontends that are served.
fn frontends(reconciler: &Reconciler) -> HashSet<SocketAddr> {
    reconciler
        .applied()
        .iter()
        .filter(|(name, _)| !reconciler.is_own(name))
        .flat_map(|(_, service)| service.frontends.iter())
        .filter(|(key, _)| key.proto == crate::compile::proto(Protocol::Tcp))
        .map(|(key, _)| SocketAddr::new(key.addr.into(), key.port.get()))
        .collect()
}

impl Shared {
    /// What the node says now, or said a few seconds ago, but never before the youngest alarm: a table that is older than an
    /// endpoint would say that the proxy does not have it. Reads files and asks the kernel: call it where blocking is allowed,
    /// and without any lock.
    pub(super) fn fresh_facts(&self) -> Arc<Facts> {
        let raised_ns = lock(&self.observation).last_raised_ns();
        let mut held = lock(&self.facts);
        if let Some(facts) = held.as_ref()
            && facts.read.elapsed() < FRESH
            && facts.read_ns > raised_ns
        {
            return facts.clone();
        }
        let frontends = frontends(&lock(&self.reconciler));
        let facts = Arc::new(Facts::read(self, &frontends, held.as_deref()));
        *held = Some(facts.clone());
        facts
    }

    /// Counts the connections of this network namespace that were open before anything was attached: nothing else will ever be
    /// known of them.
    pub(super) fn take_inventory(&self) {
        let frontends = frontends(&lock(&self.reconciler));
        match inventory::open_connections(&frontends) {
            Ok(found) => *lock(&self.earlier) = found,
            Err(error) => tracing::warn!(%error, "connections that were open before could not be counted"),
        }
    }

    /// Connections that were open to these frontends before the agent started.
    pub(super) fn earlier(&self, frontends: impl Iterator<Item = SocketAddr>) -> u64 {
        let earlier: &HashMap<SocketAddr, u64> = &lock(&self.earlier);
        frontends.filter_map(|frontend| earlier.get(&frontend)).sum()
    }
}
