//! The kernel programs without an agent: loaded, attached to a child cgroup, and filled from [`DesiredService`]s.
//!
//! What a Service becomes is decided by `compile` and `plan`, as in the agent; nothing else of the agent runs. Loading
//! takes ten seconds in a virtual machine, so a loaded object is handed on from test to test, emptied. The invariant: a
//! test begins with empty maps, counters read from zero, and its own cgroup; whatever ends it, everything is removed.

use std::{cell::RefCell, collections::BTreeMap, net::SocketAddr, thread, time::Duration};

use anyhow::{Context, Result, ensure};
use aya::{
    Ebpf,
    maps::{MapData, RingBuf},
};
use lb_common::{
    backend::{BackendCounters, ServiceCounters},
    counter,
    event::{ConnRecord, PacketRecord},
    maps::{self as names, feature},
    set::SetWord,
    socket::SocketState,
};
use lb_user::{
    compile::{Compiled, Compiler, proto},
    datapath::{
        attach::Attachments,
        kernel::Kernel,
        load::{self, Mode, Options, Sizes},
    },
    lab::{self, ChildCgroup},
    model::{DesiredService, ObjectName},
    observe::decode::{self, Record},
    plan::Plan,
};

/// How long a test waits for what must come.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// How the object is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setup {
    /// Which programs.
    pub mode: Mode,
    /// Sockets with state, of each kind.
    pub sockets: u32,
    /// Whether backends are indexed for the packet programs.
    pub index_backends: bool,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            mode: Mode::Balance,
            sockets: 8_192,
            index_backends: false,
        }
    }
}

/// An object that is loaded, and attached to nothing.
struct Loaded {
    setup: Setup,
    object: Ebpf,
    kernel: Kernel,
    ring: RingBuf<MapData>,
}

thread_local! {
    /// What the last test left for the next one.
    static SPARE: RefCell<Option<Loaded>> = const { RefCell::new(None) };
}

impl Loaded {
    fn new(setup: Setup) -> Result<Self> {
        let options = Options {
            mode: setup.mode,
            sizes: Sizes {
                frontends: 256,
                sets: 256,
                lists: 4_096,
                tables: 65_536,
                backends: 1_024,
                services: 256,
                sockets: setup.sockets,
                flows: 64,
            },
            features: feature::STATE | feature::OPT_OUT,
            log_level: 0,
            follow_connections: true,
            packets: setup.index_backends,
            translate: false,
        };
        let mut object = load::load(&options, None)?;
        let (kernel, ring) = Kernel::take(&mut object, setup.index_backends)?;
        Ok(Self {
            setup,
            object,
            kernel,
            ring,
        })
    }

    /// Empties the maps for the next test; false if something stays that cannot be removed from outside.
    fn is_emptied(&mut self) -> bool {
        while self.ring.next().is_some() {}
        self.kernel.opt_in_all_but(&[]).is_ok()
            && [names::SOCKETS, names::UDP_REVERSE, names::UDP_SOCKETS, names::FRONTENDS]
                .iter()
                .all(|map| self.kernel.count_entries(map) == Some(0))
    }
}

/// The programs at work on one cgroup.
pub struct Datapath {
    /// `None` only while dropped.
    loaded: Option<Loaded>,
    attachments: Option<Attachments>,
    cgroup: Option<ChildCgroup>,
    compiler: Compiler,
    applied: BTreeMap<ObjectName, Compiled>,
    counters_before: Vec<u64>,
    records: Vec<Record>,
}

impl std::fmt::Debug for Datapath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Datapath")
            .field("applied", &self.applied)
            .finish_non_exhaustive()
    }
}

impl Datapath {
    /// Loads and attaches the programs to a fresh cgroup, and moves this process into it.
    ///
    /// Sockets made before stay outside: start servers first, so that their traffic is not counted.
    pub fn start(setup: Setup) -> Result<Self> {
        let spare = SPARE.with(RefCell::take).filter(|spare| spare.setup == setup);
        let mut loaded = match spare {
            Some(loaded) => loaded,
            None => Loaded::new(setup)?,
        };
        let cgroup = ChildCgroup::new("test")?;
        let mut attachments = Attachments::new(cgroup.path(), None)?;
        attachments.attach_cgroup(&mut loaded.object, setup.mode, true)?;
        cgroup.join()?;
        let counters_before = loaded.kernel.counters()?;
        let compiler = Compiler::new(loaded.kernel.capacity());
        Ok(Self {
            loaded: Some(loaded),
            attachments: Some(attachments),
            cgroup: Some(cgroup),
            compiler,
            applied: BTreeMap::new(),
            counters_before,
            records: Vec::new(),
        })
    }

    /// Attaches the packet programs to an interface of this thread's network namespace.
    pub fn observe_interface(&mut self, interface: &str) -> Result<()> {
        // Both are there until the drop.
        if let (Some(loaded), Some(attachments)) = (&mut self.loaded, &mut self.attachments) {
            attachments.attach_interface(&mut loaded.object, interface)?;
        }
        Ok(())
    }

    fn loaded(&self) -> &Loaded {
        self.loaded.as_ref().expect("loaded until dropped")
    }

    fn loaded_mut(&mut self) -> &mut Loaded {
        self.loaded.as_mut().expect("loaded until dropped")
    }

    /// The cgroup that the programs are attached to.
    ///
    /// # Panics
    /// Never: the cgroup is there until the drop.
    pub fn cgroup(&self) -> &ChildCgroup {
        self.cgroup.as_ref().expect("there until dropped")
    }

    /// The maps.
    pub fn kernel(&self) -> &Kernel {
        &self.loaded().kernel
    }

    /// The maps, to be written beside plans.
    pub fn kernel_mut(&mut self) -> &mut Kernel {
        &mut self.loaded_mut().kernel
    }

    /// The loaded object.
    pub fn object(&self) -> &Ebpf {
        &self.loaded().object
    }

    /// Brings a Service into the kernel, or changes it.
    pub fn apply(&mut self, service: &DesiredService) -> Result<()> {
        let old = self.applied.get(&service.name);
        let mut tables = Vec::new();
        let new = self.compiler.compile(service, old, &mut tables)?;
        let mut plan = Plan::between(old, Some(&new));
        plan.tables = tables;
        self.loaded_mut().kernel.apply(&plan)?;
        if let Some(old) = self.applied.remove(&service.name) {
            self.compiler.retire(&old, Some(&new), 0);
        }
        self.applied.insert(service.name.clone(), new);
        Ok(())
    }

    /// Takes a Service out of the kernel.
    pub fn remove(&mut self, name: &ObjectName) -> Result<()> {
        let old = self
            .applied
            .remove(name)
            .with_context(|| format!("{name} is not applied"))?;
        let loaded = self.loaded_mut();
        loaded.kernel.apply(&Plan::between(Some(&old), None))?;
        self.compiler.retire(&old, None, 0);
        Ok(())
    }

    /// What a Service was compiled to.
    ///
    /// # Panics
    /// When it is not applied.
    pub fn compiled(&self, service: &DesiredService) -> &Compiled {
        &self.applied[&service.name]
    }

    /// The id of a Service's backend.
    pub fn backend_id(&self, service: &DesiredService, address: SocketAddr) -> Result<u32> {
        let proto = proto(service.frontends[0].protocol);
        self.compiled(service)
            .backend_id(proto, address.ip().into(), lb_common::addr::Port::new(address.port()))
            .with_context(|| format!("{address} is no backend of {}", service.name))
    }

    /// The word of a Service's first set.
    pub fn set_word(&self, service: &DesiredService) -> SetWord {
        self.compiled(service).sets[0].word
    }

    /// How often a hook has done something since the test began.
    pub fn count(&self, hook: u32, action: u32) -> Result<u64> {
        let index = counter::index(hook, action) as usize;
        Ok(self.kernel().counters()?[index] - self.counters_before[index])
    }

    /// All counters that moved since the test began, by the names of hook and action.
    pub fn moved(&self) -> Result<BTreeMap<(&'static str, &'static str), u64>> {
        let now = self.kernel().counters()?;
        let mut moved = BTreeMap::new();
        for (hook, hook_name) in counter::hook::NAMES.iter().enumerate() {
            for (action, action_name) in counter::action::NAMES.iter().enumerate() {
                let index = counter::index(hook as u32, action as u32) as usize;
                if now[index] != self.counters_before[index] {
                    moved.insert((*hook_name, *action_name), now[index] - self.counters_before[index]);
                }
            }
        }
        Ok(moved)
    }

    /// The counters of a Service.
    pub fn service_counters(&self, service: &DesiredService) -> Result<ServiceCounters> {
        Ok(self.kernel().service_counter(self.compiled(service).service_id)?)
    }

    /// The counters of a Service's backend.
    pub fn backend_counters(&self, service: &DesiredService, address: SocketAddr) -> Result<BackendCounters> {
        Ok(self.kernel().backend_counter(self.backend_id(service, address)?)?)
    }

    /// The state of a socket.
    pub fn socket(&self, cookie: u64) -> Option<SocketState> {
        self.kernel()
            .sockets()
            .find(|(key, _)| *key == cookie)
            .map(|(_, state)| state)
    }

    /// Entries of a hash map.
    ///
    /// # Panics
    /// When there is no hash map of this name.
    pub fn entries(&self, map: &str) -> u64 {
        self.kernel().count_entries(map).expect("a hash map's name")
    }

    fn drain(&mut self) -> Result<()> {
        let loaded = self.loaded.as_mut().expect("loaded until dropped");
        while let Some(bytes) = loaded.ring.next() {
            self.records.push(decode::record(&bytes)?);
        }
        Ok(())
    }

    /// Records of connections so far, in the order of their writing.
    pub fn connections(&mut self) -> Result<Vec<ConnRecord>> {
        self.drain()?;
        Ok(self
            .records
            .iter()
            .filter_map(|record| match record {
                Record::Connection(connection) => Some(*connection),
                Record::Packet(_) => None,
            })
            .collect())
    }

    /// Waits for `count` records of connections, and for a moment that no further one comes.
    pub fn wait_connections(&mut self, count: usize) -> Result<Vec<ConnRecord>> {
        let mut error = None;
        lab::holds_within(PATIENCE, || match self.connections() {
            Ok(records) => records.len() >= count,
            Err(e) => {
                error = Some(e);
                true
            }
        });
        if let Some(error) = error {
            return Err(error);
        }
        let records = self.connections()?;
        ensure!(records.len() == count, "{count} records are wanted: {records:#?}");
        Ok(records)
    }

    /// Records of packets so far, in the order of their writing.
    pub fn packets(&mut self) -> Result<Vec<PacketRecord>> {
        self.drain()?;
        Ok(self
            .records
            .iter()
            .filter_map(|record| match record {
                Record::Packet(packet) => Some(*packet),
                Record::Connection(_) => None,
            })
            .collect())
    }

    /// Records that lie in the ring buffer are thrown away.
    pub fn forget_records(&mut self) -> Result<()> {
        self.drain()?;
        self.records.clear();
        Ok(())
    }
}

impl Drop for Datapath {
    fn drop(&mut self) {
        if let Some(mut attachments) = self.attachments.take() {
            // Links go with their descriptors; filters of TC on old kernels have to be removed by name.
            let _ = attachments.detach_all();
        }
        drop(self.cgroup.take());
        let Some(mut loaded) = self.loaded.take() else { return };
        // After a failure nobody knows what is in the maps; they go with the object.
        if thread::panicking() {
            return;
        }
        for old in std::mem::take(&mut self.applied).into_values() {
            if loaded.kernel.apply(&Plan::between(Some(&old), None)).is_err() {
                return;
            }
        }
        if loaded.is_emptied() {
            SPARE.with(|spare| spare.replace(Some(loaded)));
        }
    }
}

/// Waits until a condition holds.
pub fn wait_until(what: &str, condition: impl FnMut() -> bool) -> Result<()> {
    ensure!(
        lab::holds_within(PATIENCE, condition),
        "not within {PATIENCE:?}: {what}"
    );
    Ok(())
}
