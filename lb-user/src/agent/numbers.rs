//! What is scraped, and what the health endpoints ask.

use std::{
    collections::{BTreeMap, HashMap},
    time::SystemTime,
};

use lb_common::{
    abi::ABI_VERSION,
    backend::ServiceCounters,
    counter::{self, action, hook},
    event::outcome,
};

use super::{
    answers::{count_backends, imbalance},
    facts::USUAL_PORTS,
    process,
    state::{Shared, lock},
};
use crate::{
    analysis::{
        cause::Cause,
        imbalance::{Imbalance, Share},
    },
    config::SourceSpec,
    http::{self, HealthReport, Probes},
    metrics::{
        BackendSample, Buckets, ConnectSample, FAILURE_REASONS, KubeProxySample, MapSample, MetricSource,
        ProgramSample, ServiceSample, Snapshot, SyncSample, families::CONNECT_EDGES, hooks, reuse_outcomes,
    },
    node::settings,
    observe::{Observation, audience, flows::Silent, monotonic_ns},
    reconcile::{Changes, Reconciler},
    view::{Mode, ServiceFilter, Timestamp},
};

/// The failures in the order of [`FAILURE_REASONS`]: the outcomes from the first failure on, then the rejected.
fn failed(counters: &ServiceCounters) -> [u64; FAILURE_REASONS.len()] {
    const { assert!(FAILURE_REASONS.len() == outcome::COUNT as usize) };
    let mut failed = [0; FAILURE_REASONS.len()];
    failed[..6].copy_from_slice(&counters.failed[1..7]);
    failed[6] = counters.rejected;
    failed
}

/// Records that found no room in the ring buffer.
fn lost_records(counters: &[u64]) -> u64 {
    (0..hook::COUNT)
        .filter_map(|hook| counters.get(counter::index(hook, action::RECORD_LOST) as usize))
        .sum()
}

/// Of every Service with a client, the used part of the port range of the one that comes nearest to its end.
fn ports_used(observation: &Observation) -> HashMap<u32, f64> {
    let range = settings::usable_ports().unwrap_or(USUAL_PORTS);
    let mut worst: HashMap<u32, f64> = HashMap::new();
    for used in observation.ports().uses(range) {
        let ratio = worst.entry(used.service).or_default();
        *ratio = ratio.max(used.ratio);
    }
    worst
}

/// The starved endpoints of a Service in the order of [`Cause::ALL`]; one that starves in several sets counts once.
fn starved(observation: &Observation, service_id: u32) -> [u64; Cause::ALL.len()] {
    let alarms = observation.watches(service_id).flat_map(|(_, watch)| watch.alarms());
    let causes: BTreeMap<u32, Cause> = alarms.map(|alarm| (alarm.backend, alarm.verdict.cause)).collect();
    Cause::ALL.map(|cause| causes.values().filter(|&&found| found == cause).count() as u64)
}

/// The evenness of a Service's open connections: that of its set with the most of them.
fn open_imbalance(observation: &Observation, service_id: u32) -> Option<Imbalance> {
    observation
        .watches(service_id)
        .map(|(_, watch)| watch.open())
        .filter(|found| found.n > 0)
        .max_by_key(|found| found.n)
}

/// What the backends of a Service are judged by, added up over its sets.
fn judged(observation: &Observation, service_id: u32) -> BTreeMap<u32, Share> {
    let mut sums: BTreeMap<u32, Share> = BTreeMap::new();
    for (_, watch) in observation.watches(service_id) {
        for (&id, share) in watch.window().totals() {
            let sum = sums.entry(id).or_insert(Share {
                expected: 0.0,
                observed: 0,
            });
            sum.expected += share.expected;
            sum.observed += share.observed;
        }
    }
    sums
}

impl Shared {
    /// Whether no change has been waiting for too long, and the node may take traffic.
    pub(super) fn healthy(reconciler: &Reconciler) -> Result<(), String> {
        let report = Self::report(reconciler);
        if !report.is_current(http::HEALTH_TIMEOUT) {
            return Err(format!(
                "a change has been waiting for more than {} s",
                http::HEALTH_TIMEOUT.as_secs()
            ));
        }
        if !report.node_eligible {
            return Err("the node is being deleted or drained by the autoscaler".to_owned());
        }
        Ok(())
    }

    pub(super) fn report(reconciler: &Reconciler) -> HealthReport {
        let sync = reconciler.sync_state();
        HealthReport {
            time: Timestamp::from_system(SystemTime::now()),
            last_updated: sync.last_applied.map(Timestamp::from_system),
            pending_since: sync.pending_since.map(Timestamp::from_system),
            node_eligible: reconciler.desired().node().is_none_or(|node| !node.leaving),
        }
    }

    fn service_samples(&self, reconciler: &Reconciler, silent: &Silent) -> Vec<ServiceSample> {
        let observation = lock(&self.observation);
        let everything = ServiceFilter::default();
        let all = Self::all_service_counters(reconciler, silent).unwrap_or_default();
        let mut samples = Vec::new();
        let ports_used = ports_used(&observation);
        for (name, service) in Self::shown(reconciler, &everything) {
            let counters = all.get(service.service_id as usize).copied().unwrap_or_default();
            let by_backend = if self.config.backend_metrics {
                let judged = judged(&observation, service.service_id);
                service
                    .backends
                    .iter()
                    .filter_map(|(id, backend)| {
                        let mut counters = reconciler.kernel().backend_counter(*id).ok()?;
                        silent.settle_backend(*id, &mut counters);
                        let total = audience::total(&counters);
                        Some(BackendSample {
                            backend: std::net::SocketAddr::new(backend.addr.into(), backend.port.get()).to_string(),
                            connects: total.connects,
                            active: audience::open(&total),
                            judged: judged.get(id).copied(),
                        })
                    })
                    .collect()
            } else {
                Vec::new()
            };
            samples.push(ServiceSample {
                namespace: name.namespace.to_string(),
                name: name.name.to_string(),
                connects: counters.connects,
                outside: counters.outside,
                attributed: match self.config.mode {
                    Mode::Balance => counters.connects,
                    Mode::Observe => counters.attributed,
                },
                direct: counters.direct,
                failed: failed(&counters),
                latency: observation
                    .latencies(service.service_id)
                    .cloned()
                    .unwrap_or_else(|| Buckets::new(CONNECT_EDGES)),
                active: counters.established.saturating_sub(counters.closed),
                backends: count_backends(service),
                imbalance: imbalance(&observation, service.service_id),
                open_imbalance: open_imbalance(&observation, service.service_id),
                starved: starved(&observation, service.service_id),
                ports_used: ports_used.get(&service.service_id).copied().unwrap_or(0.0),
                reuse: (observation.reuse().service(service.service_id)).map_or([0; _], reuse_outcomes),
                by_backend,
            });
        }
        samples
    }

    /// Records lost between the kernel and the agent, from whatever cause.
    pub(super) fn events_lost(reconciler: &Reconciler, observation: &Observation) -> u64 {
        let in_kernel = reconciler
            .kernel()
            .counters()
            .map_or(0, |counters| lost_records(&counters));
        in_kernel + observation.reuse().late() + observation.malformed
    }

    /// What is told under kube-proxy's names.
    fn kube_proxy_sample(&self, changes: &Changes) -> KubeProxySample {
        let (services, slices) = changes.pending();
        let (healthz, livez) = self.probed.counts();
        KubeProxySample {
            sync: lock(&self.timings).all.clone(),
            programming: changes.programming().clone(),
            service_changes: (changes.services(), services),
            endpoint_changes: (changes.slices(), slices),
            healthz,
            livez,
            requests: (self.config.source == SourceSpec::Kube).then(|| self.requests.counts()),
            resident_bytes: process::resident_bytes(),
            cpu_seconds: process::cpu_seconds(),
        }
    }

    /// Run statistics, where somebody has turned them on; the agent never does.
    fn program_samples(&self) -> Vec<ProgramSample> {
        let on = std::fs::read_to_string("/proc/sys/kernel/bpf_stats_enabled").is_ok_and(|text| text.trim() != "0");
        if !on {
            return Vec::new();
        }
        let programs = lock(&self.programs);
        programs
            .object
            .programs()
            .filter_map(|(name, program)| {
                let info = program.info().ok()?;
                Some(ProgramSample {
                    program: name.to_owned(),
                    runs: info.run_count(),
                    run_nanoseconds: info.run_time().as_nanos() as u64,
                })
            })
            .collect()
    }
}

impl MetricSource for Shared {
    fn snapshot(&self) -> Snapshot {
        let census = self.census.count(monotonic_ns());
        let reconciler = lock(&self.reconciler);
        let counters = reconciler
            .kernel()
            .counters()
            .unwrap_or_else(|_| vec![0; counter::COUNTERS as usize]);
        let mut connects = Vec::new();
        let lost = lost_records(&counters);
        for h in 0..hook::COUNT {
            for &a in hooks::actions(h, self.config.mode) {
                connects.push(ConnectSample {
                    hook: hook::NAMES[h as usize],
                    action: action::NAMES[a as usize],
                    total: counters[counter::index(h, a) as usize],
                });
            }
        }
        let services = self.service_samples(&reconciler, &census.flows.silent);
        let maps = reconciler
            .usage()
            .into_iter()
            .chain(census.usage)
            .map(|(map, entries, max_entries)| MapSample {
                map,
                entries,
                max_entries,
            })
            .collect();
        let sync = reconciler.sync_state().clone();
        let kube_proxy = reconciler.changes().map(|changes| self.kube_proxy_sample(changes));
        let desired = reconciler.desired().problems().len();
        let problems = (desired + lock(&self.health_ports).len() + self.own_problems(&reconciler).len()) as u64;
        drop(reconciler);
        let (reuse, evicted, forgotten, late, malformed) = {
            let observation = lock(&self.observation);
            let tracker = observation.reuse();
            (
                tracker.total().clone(),
                tracker.evicted() + observation.passages().1,
                vec![
                    ("calls", observation.calls().forgotten()),
                    ("clients", observation.stickiness().evicted()),
                    ("ports", observation.ports().evicted() + observation.ports().refused()),
                ],
                tracker.late(),
                observation.malformed,
            )
        };
        let (full, change, programming) = {
            let timings = lock(&self.timings);
            (
                timings.full.clone(),
                timings.change.clone(),
                timings.programming.clone(),
            )
        };
        let source = self.source.snapshot();
        Snapshot {
            time: Timestamp::from_system(SystemTime::now()),
            started: Timestamp::from_system(self.started),
            version: env!("CARGO_PKG_VERSION"),
            abi: ABI_VERSION,
            mode: self.config.mode,
            connects,
            services,
            reuse,
            reuse_evicted: evicted,
            forgotten,
            network_programming: programming,
            sync: vec![
                SyncSample {
                    kind: "full",
                    durations: full,
                },
                SyncSample {
                    kind: "change",
                    durations: change,
                },
            ],
            sync_last: sync.last_applied.map(Timestamp::from_system),
            sync_last_queued: sync.last_queued.map(Timestamp::from_system),
            source_synced: source
                .kinds
                .iter()
                .map(|(kind, status)| (kind.as_str(), status.confirmed().map(Timestamp::from_system)))
                .collect(),
            flows: match self.config.mode {
                Mode::Balance => census.flows.by_state().collect(),
                Mode::Observe => Vec::new(),
            },
            maps,
            programs: self.program_samples(),
            events_lost: vec![("ring_buffer", lost), ("late", late), ("malformed", malformed)],
            repairs: sync.repairs,
            problems,
            kube_proxy,
        }
    }
}

impl Probes for Shared {
    fn health(&self) -> HealthReport {
        Self::report(&lock(&self.reconciler))
    }

    fn live(&self) -> Result<(), String> {
        Self::live(self)
    }

    fn answered(&self, probe: http::Probe, fine: bool) {
        self.probed.count(probe, fine);
    }

    fn ready(&self) -> Result<(), String> {
        lock(&self.readiness).ready.clone()
    }
}
