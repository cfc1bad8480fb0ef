//! A node in process: the source, the fold, the compiler and the reconciler of the product, on maps in memory.
//!
//! Nothing of the pipeline is replaced but the kernel's maps and the loop that carries updates from the source to the
//! reconciler, which is [`Node::pump`]. An agent that dies leaves the maps and nothing else.

use std::collections::BTreeSet;

use lb_common::{addr::Port, frontend::FrontendKey};
use lb_user::{
    compile::{Capacity, proto},
    datapath::fake::{Fault, Memory},
    desired::{Config, Desired, NodePortAddresses},
    model::{Kind, NodeAddresses, Object, Update},
    reconcile::Reconciler,
    source::{
        Running,
        kube::{Options, start},
    },
};
use tokio_util::sync::CancellationToken;

use super::{meaning::Meaning, step::NODE};
use crate::apiserver::ApiServer;

/// Room for everything, and for what waits for its grace.
const ROOM: Capacity = Capacity {
    frontends: 128,
    services: 64,
    sets: 512,
    backends: 2048,
    lists: 8192,
    tables: 65_536,
    memberships: 1024,
    sources: 256,
};

fn desired() -> Desired {
    Desired::new(Config {
        node_name: NODE.to_owned(),
        proxy_name: None,
        external_ips: true,
        node_port_addresses: NodePortAddresses::Primary,
        awaited: vec![Kind::Service, Kind::Slice, Kind::Node, Kind::Addresses],
    })
}

fn reconciler(memory: Memory) -> Reconciler<Memory> {
    let mut reconciler = Reconciler::new(desired(), memory).expect("memory is read");
    reconciler.take(Update::Addresses(host_addresses()));
    reconciler
}

fn host_addresses() -> NodeAddresses {
    NodeAddresses {
        addresses: (1..=3)
            .map(|last| std::net::Ipv4Addr::new(192, 168, 0, last).into())
            .collect(),
    }
}

/// Everything that an agent on this node would be told of the server's objects.
fn told(server: &ApiServer) -> Vec<Update> {
    // The source asks for this node's own Node alone.
    let other = |object: &Object| matches!(object, Object::Node(node) if *node.name != *NODE);
    let converted = server.converted().into_iter();
    let objects = converted
        .filter_map(|converted| converted.object)
        .filter(|object| !other(object));
    let mut updates: Vec<Update> = objects.map(Update::Apply).collect();
    updates.extend([Kind::Service, Kind::Slice, Kind::Node].map(Update::Synced));
    updates.push(Update::Addresses(host_addresses()));
    updates
}

/// What the maps mean after a cold start from the server's objects: no history, no network, nothing but the objects.
pub(super) fn cold_start(server: &ApiServer) -> Meaning {
    let mut cold = reconciler(Memory::new(ROOM));
    for update in told(server) {
        cold.take(update);
    }
    cold.flush();
    assert!(
        cold.is_synced() && cold.sync_state().errors.is_empty(),
        "a cold start has room"
    );
    Meaning::of(cold.kernel())
}

/// The frontends that the server's objects want now.
pub(super) fn wanted_frontends(server: &ApiServer) -> BTreeSet<FrontendKey> {
    let mut fold = desired();
    for update in told(server) {
        fold.apply(update);
    }
    let all = fold.services().flat_map(|service| service.frontends);
    all.map(|frontend| {
        FrontendKey::new(
            frontend.addr.into(),
            Port::new(frontend.port.get()),
            proto(frontend.protocol),
        )
    })
    .collect()
}

/// An agent and its kernel.
pub(super) struct Node {
    options: Options,
    cancel: CancellationToken,
    running: Running,
    pub(super) reconciler: Reconciler<Memory>,
    /// What the maps meant after so many writes.
    meant: Option<(usize, Meaning)>,
}

impl Node {
    pub(super) fn new(options: Options) -> Self {
        Self::on(options, Memory::new(ROOM))
    }

    fn on(options: Options, mut memory: Memory) -> Self {
        memory.fault = Fault::None;
        let cancel = CancellationToken::new();
        Self {
            running: start(options.clone(), &cancel),
            options,
            cancel,
            reconciler: reconciler(memory),
            meant: None,
        }
    }

    /// Takes in what has come, and writes it.
    pub(super) fn pump(&mut self) {
        while let Ok(update) = self.running.updates.try_recv() {
            self.reconciler.take(update);
        }
        self.reconciler.flush();
        self.reconciler.reclaim();
    }

    /// What the kernel's maps mean.
    pub(super) fn meaning(&mut self) -> &Meaning {
        let memory = self.reconciler.kernel();
        if self.meant.as_ref().is_none_or(|(writes, _)| *writes != memory.writes) {
            self.meant = None;
        }
        let (_, meaning) = self.meant.get_or_insert_with(|| (memory.writes, Meaning::of(memory)));
        meaning
    }

    /// The frontends in the kernel.
    pub(super) fn frontends(&self) -> BTreeSet<FrontendKey> {
        self.reconciler.kernel().frontends.keys().copied().collect()
    }

    /// Whether every kind is followed, and nothing is wrong.
    pub(super) fn follows(&self) -> bool {
        let status = self.running.status.snapshot();
        status.kinds.values().all(|kind| kind.connected && kind.error.is_none())
    }

    /// How often each kind failed.
    pub(super) fn failures(&self) -> Vec<u64> {
        let status = self.running.status.snapshot();
        status.kinds.values().map(|kind| kind.errors).collect()
    }

    /// What the source says of itself.
    pub(super) fn says(&self) -> String {
        format!("{:?}", self.running.status.snapshot())
    }

    /// Ends the agent; tells whether one of its loops had ended before.
    pub(super) async fn end(&mut self) -> bool {
        let ended = self
            .running
            .loops
            .iter()
            .any(|liveness| liveness.snapshot().starts != 1);
        self.cancel.cancel();
        for task in std::mem::take(&mut self.running.tasks) {
            task.await.expect("a loop ends in peace");
        }
        ended
    }

    /// Kills the agent and starts another on these maps.
    async fn begin_anew(&mut self, memory: Memory) {
        self.end().await;
        *self = Self::on(self.options.clone(), memory);
    }

    /// Kills the agent and starts another on what it left.
    pub(super) async fn restart(&mut self) {
        self.begin_anew(self.reconciler.kernel().clone()).await;
    }

    /// Lets the agent die after so many writes, and starts another on what it left.
    pub(super) async fn crash(&mut self, writes: u64) {
        self.reconciler.kernel_mut().fault = Fault::After(writes as usize);
        self.pump();
        self.restart().await;
    }

    /// Starts the node anew: the maps are empty.
    pub(super) async fn reboot(&mut self) {
        self.begin_anew(Memory::new(ROOM)).await;
    }
}
