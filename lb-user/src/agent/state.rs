//! What the agent's loops share.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant, SystemTime},
};

use aya::Ebpf;
use lb_common::backend::ServiceCounters;
use tokio::sync::Notify;

use super::{facts::Facts, uplinks::Uplinks};
use crate::{
    config::{Config, Interfaces},
    datapath::{
        attach::{self, AttachError, Attachments},
        census::{self, Census},
        kernel::MapsError,
        load,
        pins::Pins,
    },
    http,
    metrics::{Buckets, families},
    model::Problem,
    observe::{
        Directory, Observation, UsableBackends,
        flows::{FlowCounts, Silent},
        monotonic_ns,
    },
    reconcile::{Flushed, Reconciler},
    source,
    supervise::Liveness,
    view::Mode,
};

/// Shared state; every lock is held for one step, never across an await.
///
/// Order where several are held: `uplinks` first, then `programs`; or `uplinks`, `facts`, `reconciler`, `observation`;
/// `health_ports` and `rivals` come last.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) config: Config,
    pub(super) started: SystemTime,
    pub(super) began: Instant,
    pub(super) kernel_release: String,
    pub(super) reconciler: Mutex<Reconciler>,
    pub(super) observation: Mutex<Observation>,
    pub(super) usable: Arc<UsableBackends>,
    pub(super) programs: Mutex<Programs>,
    pub(super) uplinks: Mutex<Uplinks>,
    pub(super) census: Census,
    pub(super) source: Arc<source::Status>,
    pub(super) loops: Mutex<Vec<Arc<Liveness>>>,
    pub(super) readiness: Mutex<Readiness>,
    pub(super) timings: Mutex<Timings>,
    pub(super) directory: Arc<Directory>,
    /// What the node said last.
    pub(super) facts: Mutex<Option<Arc<Facts>>>,
    /// Connections that were open before the start, by frontend.
    pub(super) earlier: Mutex<HashMap<SocketAddr, u64>>,
    /// Something was written; whoever goes by it looks again.
    pub(super) flushed: Notify,
    /// Health-check node ports that cannot be opened.
    pub(super) health_ports: Mutex<Vec<Problem>>,
    /// Answers to probes.
    pub(super) probed: Probed,
    /// Requests to the API server; none are made with another source.
    pub(super) requests: Arc<source::kube::Requests>,
    /// Who else translates Services here, by the last look.
    pub(super) rivals: Mutex<Vec<Problem>>,
}

/// The loaded object and its attachments.
#[derive(Debug)]
pub(super) struct Programs {
    pub(super) object: Ebpf,
    pub(super) attachments: Attachments,
    /// Pins of other versions, whose programs serve until [`Self::take_over`]; while there are any, ours are not attached.
    pub(super) predecessors: Vec<Pins>,
}

impl Programs {
    /// Attaches the programs of the mode.
    pub(super) fn attach(&mut self, mode: load::Mode, wanted: &Interfaces) -> Result<(), AttachError> {
        for (link, done) in self.attachments.attach_cgroup(&mut self.object, mode, true)? {
            tracing::debug!(%link, ?done, "link");
        }
        for interface in interface_names(wanted) {
            match self.attachments.attach_interface(&mut self.object, &interface) {
                Ok(_) => {}
                // Of all that there were one may have gone meanwhile; one that was named must be there.
                Err(AttachError::Interface { .. }) if *wanted == Interfaces::All => {}
                // Nor does one of all that refuses keep the agent from its work.
                Err(error) if *wanted == Interfaces::All => {
                    tracing::warn!(%interface, %error, "not observed; it is tried again");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Takes over from the programs of another version, once our maps hold what theirs hold.
    ///
    /// Each of their links gets our program in one step, so that no connection meets two programs or none: both sides
    /// share the state of sockets, and the second one would forget what the first has just noted. Then their maps go.
    pub(super) fn take_over(&mut self, mode: load::Mode, wanted: &Interfaces) -> Result<(), AttachError> {
        if self.predecessors.is_empty() {
            return Ok(());
        }
        for predecessor in &self.predecessors {
            self.attachments.adopt(predecessor)?;
        }
        self.attach(mode, wanted)?;
        while let Some(predecessor) = self.predecessors.last() {
            predecessor.remove_folder().map_err(|source| AttachError::Predecessor {
                folder: predecessor.folder(),
                source,
            })?;
            tracing::info!(folder = %predecessor.folder().display(), "replaced the programs and maps of another version");
            self.predecessors.pop();
        }
        Ok(())
    }
}

/// The names of the interfaces that a configuration means now.
fn interface_names(wanted: &Interfaces) -> Vec<String> {
    match wanted {
        Interfaces::None => Vec::new(),
        Interfaces::Named(names) => names.clone(),
        Interfaces::All => match attach::interfaces() {
            Ok(all) => all.into_iter().map(|(name, _)| name).collect(),
            Err(error) => {
                tracing::error!(%error, "the interfaces could not be listed; it is tried again");
                Vec::new()
            }
        },
    }
}

/// What the self-probe found last.
#[derive(Clone, Debug)]
pub(super) struct Readiness {
    pub(super) ready: Result<(), String>,
    /// Why the probe cannot be made at all, though nothing is known to be wrong.
    pub(super) unprobed: Option<String>,
}

/// How long things took, since the start.
#[derive(Debug)]
pub(super) struct Timings {
    pub(super) full: Buckets,
    pub(super) change: Buckets,
    pub(super) programming: Buckets,
    /// Full ones and changes together, in kube-proxy's buckets.
    pub(super) all: Buckets,
}

impl Default for Timings {
    fn default() -> Self {
        Self {
            full: Buckets::new(families::SYNC_EDGES),
            change: Buckets::new(families::SYNC_EDGES),
            programming: Buckets::new(families::PROGRAMMING_EDGES),
            all: Buckets::new(families::kube_proxy::SYNC_EDGES),
        }
    }
}

/// How often probes were answered, well and not.
#[derive(Debug, Default)]
pub(super) struct Probed {
    healthz: [AtomicU64; 2],
    livez: [AtomicU64; 2],
}

impl Probed {
    /// Counts an answer.
    pub(super) fn count(&self, probe: http::Probe, fine: bool) {
        let counts = match probe {
            http::Probe::Healthz => &self.healthz,
            http::Probe::Livez => &self.livez,
        };
        counts[usize::from(!fine)].fetch_add(1, Relaxed);
    }

    /// Answers to `/healthz` and to `/livez`: well, and not.
    pub(super) fn counts(&self) -> ([u64; 2], [u64; 2]) {
        let read = |counts: &[AtomicU64; 2]| [counts[0].load(Relaxed), counts[1].load(Relaxed)];
        (read(&self.healthz), read(&self.livez))
    }
}

/// Locks; a panic elsewhere leaves whole values behind, so its poison is passed over.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// The mode as the datapath knows it.
    pub(super) fn datapath_mode(&self) -> load::Mode {
        match self.config.mode {
            Mode::Balance => load::Mode::Balance,
            Mode::Observe => load::Mode::Observe,
        }
    }

    /// Whether packets of guests are translated here.
    pub(super) fn has_guests(&self) -> bool {
        !self.config.guests.is_empty()
    }

    /// Brings the packet programs to interfaces that have come, and forgets those that have gone.
    pub(super) fn follow_interfaces(&self) -> Result<(), AttachError> {
        if self.config.interfaces != Interfaces::All {
            return Ok(());
        }
        let mut programs = lock(&self.programs);
        let programs = &mut *programs;
        if !programs.predecessors.is_empty() {
            return Ok(());
        }
        // Listed under the lock: by an older list, what was attached meanwhile would be taken for gone.
        let there = attach::interfaces()?;
        programs.attachments.keep_interfaces(&there);
        for (name, index) in &there {
            if programs.attachments.observes(*index) {
                continue;
            }
            match programs.attachments.attach_interface(&mut programs.object, name) {
                Ok(_) => tracing::debug!(interface = %name, "observed"),
                Err(AttachError::Interface { .. }) => {
                    tracing::debug!(interface = %name, "went before it could be observed");
                }
                // One that refuses must not keep the others from being observed, nor the links from being repaired.
                Err(error) => tracing::warn!(interface = %name, %error, "not observed; it is tried again"),
            }
        }
        Ok(())
    }

    /// Writes what has changed, and notes how long it took.
    pub(super) fn flush(&self) -> Flushed {
        let mut reconciler = lock(&self.reconciler);
        let first = !reconciler.is_synced();
        if !reconciler.has_work() {
            return Flushed::default();
        }
        let begun = Instant::now();
        let flushed = reconciler.flush();
        self.flushed.notify_one();
        let took = begun.elapsed();
        let latencies = reconciler.take_latencies();
        let synced = reconciler.is_synced();
        drop(reconciler);
        if first && synced {
            if self.config.mode == Mode::Observe {
                self.take_inventory();
            }
            self.take_over();
        }
        let mut timings = lock(&self.timings);
        let sync = if first { &mut timings.full } else { &mut timings.change };
        sync.observe(took.as_secs_f64());
        timings.all.observe(took.as_secs_f64());
        for latency in latencies {
            timings.programming.observe(latency.as_secs_f64());
        }
        if flushed.services > 0 {
            tracing::info!(
                services = flushed.services,
                puts = flushed.puts,
                drops = flushed.drops,
                took_us = took.as_micros() as u64,
                "{}",
                if first {
                    "first synchronisation"
                } else {
                    "changes applied"
                }
            );
        }
        flushed
    }

    /// What of the flags does not hold, and who else is at work. An earlier agent's table of flows is kept, and with it its size.
    pub(super) fn own_problems(&self, reconciler: &Reconciler) -> Vec<Problem> {
        let mut problems = lock(&self.rivals).clone();
        let (there, wanted) = (reconciler.kernel().flows().slots(), self.config.limits.flows.get());
        if !self.config.translates() || there == wanted {
            return problems;
        }
        problems.push(Problem {
            origin: "evenkeel agent".to_owned(),
            object: "the flow table".to_owned(),
            field: "--max-flows".to_owned(),
            message: format!(
                "an earlier agent's flow table is kept, which has {there} slots, not {wanted}; `evenkeel cleanup` before a start \
                 makes a new one, and ends the connections in it"
            ),
        });
        problems
    }

    /// Connections that the counters have open though they fell silent. Asked for before the reconciler is locked: it may mean a
    /// pass over the flow table.
    pub(super) fn silent(&self) -> Arc<FlowCounts> {
        self.census.flow_counts(monotonic_ns(), census::RECENT_NS)
    }

    /// The counters of all Services, by id, with the silent settled: one reading instead of one a Service.
    pub(super) fn all_service_counters(
        reconciler: &Reconciler,
        silent: &Silent,
    ) -> Result<Vec<ServiceCounters>, MapsError> {
        let end = reconciler
            .applied()
            .values()
            .map(|service| service.service_id + 1)
            .max()
            .unwrap_or(0);
        let mut all = Vec::with_capacity(end as usize);
        reconciler.kernel().service_counters(end, |id, mut counters| {
            silent.settle_service(id, &mut counters);
            all.push(counters);
        })?;
        Ok(all)
    }

    /// Takes over from another version's programs, if there are any; the repair loop tries again what fails here.
    fn take_over(&self) {
        let taken = lock(&self.programs).take_over(self.datapath_mode(), &self.config.interfaces);
        if let Err(error) = taken {
            tracing::error!(%error, "another version's programs could not be replaced; it is tried again");
            return;
        }
        if let Err(error) = self.follow_uplinks() {
            tracing::error!(%error, "the interfaces could not be looked at; it is tried again");
        }
    }

    /// Checks the links and attaches what is lost; before the take-over there is nothing of ours to check.
    pub(super) fn repair_links(&self) -> Result<Vec<String>, AttachError> {
        self.follow_interfaces()?;
        if let Err(error) = self.follow_uplinks() {
            tracing::error!(%error, "the interfaces could not be looked at; it is tried again");
        }
        let synced = lock(&self.reconciler).is_synced();
        let mut programs = lock(&self.programs);
        let programs = &mut *programs;
        if !programs.predecessors.is_empty() {
            if synced {
                programs.take_over(self.datapath_mode(), &self.config.interfaces)?;
            }
            return Ok(Vec::new());
        }
        programs
            .attachments
            .repair(&mut programs.object, self.datapath_mode(), true)
    }

    /// Every loop must say something in this time.
    const SILENCE: Duration = Duration::from_mins(2);

    /// Whether every supervised loop is alive; else one sentence.
    pub(super) fn live(&self) -> Result<(), String> {
        let now = SystemTime::now();
        for liveness in lock(&self.loops).iter() {
            let seen = liveness.snapshot();
            let last = seen.last_beat.unwrap_or(self.started);
            let silent = now.duration_since(last).unwrap_or_default();
            if silent > Self::SILENCE {
                return Err(format!(
                    "loop `{}` has been silent for {} s",
                    seen.name,
                    silent.as_secs()
                ));
            }
        }
        Ok(())
    }
}
