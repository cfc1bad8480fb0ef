//! What people ask: the control socket's answers, put together from desired state, kernel maps and observations.

use std::{collections::BTreeMap, net::IpAddr, time::SystemTime};

use lb_common::{
    abi::ABI_VERSION,
    backend::{Backend, ServiceCounters, state},
    counter::{self, action, hook},
    event::outcome,
    frontend::FrontendKey,
};

use super::state::{Shared, lock};
use crate::{
    analysis::{
        imbalance::Imbalance,
        reuse::{ReuseCounts, chance_of_same},
        stickiness::Client,
    },
    compile::{Compiled, proto},
    model::{DesiredService, FrontendKind, Kind, ObjectName, Protocol, Scope, SetName},
    observe::{Observation, address, audience, monotonic_ns},
    reconcile::Reconciler,
    view::{
        Answers, BackendCountsView, BackendState, BackendView, ClientReuseView, ConnFilter, ConnListView, CountsView,
        DiagnosisView, EventReader, ExplainQuery, ExplainView, FrontendView, GraphView, HealthView, KindView,
        MAX_CLIENTS, MapDumpView, MapInfoView, MapUsageView, NodeFactsView, OutsideView, ProblemView, ProgramView,
        QueryError, ReportView, ReuseView, ServiceFilter, ServiceReuseView, ServiceView, SourceView, StatusView,
        SyncView, TableSlotsView, TableView, Timestamp,
    },
};

/// The name of a kind of frontend, as Kubernetes writes it.
pub(super) fn kind_name(kind: FrontendKind) -> &'static str {
    match kind {
        FrontendKind::ClusterIp => "ClusterIP",
        FrontendKind::NodePort => "NodePort",
        FrontendKind::ExternalIp => "ExternalIP",
        FrontendKind::LoadBalancer => "LoadBalancer",
    }
}

/// `TCP` or `UDP`.
pub(super) fn protocol_name(protocol: Protocol) -> &'static str {
    match protocol {
        Protocol::Tcp => "TCP",
        Protocol::Udp => "UDP",
    }
}

/// A set's name for people, such as `http/TCP/IPv4/cluster`.
pub(super) fn set_name(name: &SetName) -> String {
    let port = if name.port_name.is_empty() {
        "-"
    } else {
        &*name.port_name
    };
    let family = if name.ipv6 { "IPv6" } else { "IPv4" };
    let scope = match name.scope {
        Scope::Cluster => "cluster",
        Scope::Local => "local",
    };
    format!("{port}/{}/{family}/{scope}", protocol_name(name.protocol))
}

fn failed(error: impl std::fmt::Display) -> QueryError {
    QueryError::Failed(error.to_string())
}

/// A Service's counters of failed connections, by reason; those that never happened are left out.
pub(super) fn failures(counters: &ServiceCounters) -> BTreeMap<String, u64> {
    let mut failures: BTreeMap<String, u64> = outcome::NAMES
        .iter()
        .zip(counters.failed)
        .skip(1)
        .filter(|(_, count)| *count > 0)
        .map(|(name, count)| ((*name).to_owned(), count))
        .collect();
    if counters.rejected > 0 {
        failures.insert("no_backend".to_owned(), counters.rejected);
    }
    failures
}

/// Backends of a compiled Service, by state.
pub(super) fn count_backends(service: &Compiled) -> BackendCountsView {
    let count = |wanted| service.backends.iter().filter(|(_, b)| b.state == wanted).count() as u64;
    BackendCountsView {
        active: count(state::ACTIVE),
        draining: count(state::DRAINING),
        ejected: count(state::EJECTED),
    }
}

/// The evenness of a Service: that of its set with the most connections in the window.
pub(super) fn imbalance(observation: &Observation, service_id: u32) -> Option<Imbalance> {
    observation
        .watches(service_id)
        .map(|(_, watch)| watch.imbalance())
        .filter(|found| found.n > 0)
        .max_by_key(|found| found.n)
}

impl Shared {
    /// The Services that are shown, sorted by name.
    pub(super) fn shown<'a>(
        reconciler: &'a Reconciler,
        filter: &'a ServiceFilter,
    ) -> impl Iterator<Item = (&'a ObjectName, &'a Compiled)> {
        let mut all: Vec<(&ObjectName, &Compiled)> = reconciler
            .applied()
            .iter()
            .filter(|(name, _)| filter.admits(name) && !reconciler.is_own(name))
            .collect();
        all.sort_by_key(|(name, _)| *name);
        all.into_iter()
    }

    /// The clients with the most reuses.
    fn client_reuse(
        reconciler: &Reconciler,
        observation: &Observation,
        filter: &ServiceFilter,
    ) -> Vec<ClientReuseView> {
        let names: BTreeMap<u32, &ObjectName> = Self::shown(reconciler, filter)
            .map(|(name, service)| (service.service_id, name))
            .collect();
        let mut clients: Vec<_> = (observation.reuse().clients())
            .filter_map(|(client, counts)| Some((*names.get(&client.service)?, client, counts)))
            .filter(|(_, _, counts)| counts.total() > 0)
            .collect();
        clients.sort_by_key(|(_, client, counts)| (u64::MAX - counts.total(), **client));
        clients.truncate(MAX_CLIENTS);
        clients
            .into_iter()
            .map(|(name, client, counts)| {
                let key = Client {
                    netns: client.netns,
                    address: client.address,
                };
                ClientReuseView {
                    client: address(client.address),
                    workload: observation.caller(&key).and_then(|caller| caller.workload()),
                    namespace: name.namespace.to_string(),
                    name: name.name.to_string(),
                    connections: counts.connections,
                    total: counts.total(),
                    same_backend: counts.same_backend,
                    moved: counts.moved,
                    stale_backend: counts.stale_backend,
                    unknown_backend: counts.unknown_backend,
                }
            })
            .collect()
    }

    fn service_view(
        reconciler: &Reconciler,
        observation: &Observation,
        name: &ObjectName,
        compiled: &Compiled,
        counters: ServiceCounters,
    ) -> ServiceView {
        let desired = reconciler.desired_service(name);
        ServiceView {
            namespace: name.namespace.to_string(),
            name: name.name.to_string(),
            id: compiled.service_id,
            frontends: (desired.iter())
                .flat_map(|desired| {
                    desired
                        .frontends
                        .iter()
                        .map(|frontend| frontend_view(desired, frontend))
                })
                .collect(),
            backends: count_backends(compiled),
            connects: counters.connects,
            outside: counters.outside,
            failed: failures(&counters),
            active: counters.established.saturating_sub(counters.closed),
            imbalance: imbalance(observation, compiled.service_id).map(Into::into),
        }
    }

    fn programs(&self) -> Vec<ProgramView> {
        let programs = lock(&self.programs);
        let cgroup = self.config.cgroup.display().to_string();
        programs
            .attachments
            .names()
            .map(|name| {
                let (program, target, hook) = match programs.attachments.interface_of(name) {
                    Some((program, interface)) => {
                        let side = program.split_once('_').map_or(program, |(_, side)| side);
                        (program.to_owned(), interface.to_owned(), format!("tc/{side}"))
                    }
                    None => (name.to_owned(), cgroup.clone(), format!("cgroup/{name}")),
                };
                let id = programs
                    .object
                    .program(&program)
                    .and_then(|p| p.info().ok())
                    .map(|info| info.id());
                ProgramView {
                    name: program,
                    hook,
                    target,
                    attached: programs.attachments.is_attached(name),
                    program_id: id,
                    link_id: None,
                    pin: programs.attachments.pin(name).map(|pin| pin.display().to_string()),
                }
            })
            .collect()
    }

    /// Health in short, with every reason against it.
    fn health_view(&self, reconciler: &Reconciler) -> HealthView {
        let readiness = lock(&self.readiness).clone();
        let live = self.live();
        let healthy = Self::healthy(reconciler);
        let mut reasons: Vec<String> = [&live, &readiness.ready, &healthy]
            .into_iter()
            .filter_map(|result| result.clone().err())
            .collect();
        reasons.extend(readiness.unprobed);
        HealthView {
            live: live.is_ok(),
            ready: readiness.ready.is_ok(),
            healthy: healthy.is_ok(),
            reasons,
        }
    }

    fn source_view(&self, reconciler: &Reconciler) -> SourceView {
        let source = self.source.snapshot();
        let desired = reconciler.desired();
        let objects = |kind: Kind| match kind {
            Kind::Service => desired.names().count() as u64,
            Kind::Slice => desired.names().map(|name| desired.slices(name).len() as u64).sum(),
            Kind::Node => u64::from(desired.node().is_some()),
            Kind::Pod => self.directory.pods() as u64,
            Kind::Addresses => 0,
        };
        SourceView {
            name: source.source.clone(),
            synced: desired.synced(),
            kinds: source
                .kinds
                .iter()
                .map(|(kind, status)| KindView {
                    kind: kind.as_str().to_owned(),
                    objects: objects(*kind),
                    synced: status.confirmed().map(Timestamp::from_system),
                    error: status.error.clone(),
                })
                .collect(),
            last_error: source.kinds.values().find_map(|status| status.error.clone()),
        }
    }
}

fn frontend_view(desired: &DesiredService, frontend: &crate::model::Frontend) -> FrontendView {
    let outside = frontend.outside.map(|outside| OutsideView {
        scope: match desired.sets.get(outside.set).map(|set| set.name.scope) {
            Some(Scope::Local) => "local",
            Some(Scope::Cluster) | None => "cluster",
        }
        .to_owned(),
        masquerade: outside.masquerade,
        source_ranges: outside.source_ranges,
    });
    FrontendView {
        outside,
        kind: kind_name(frontend.kind).to_owned(),
        addr: frontend.addr,
        port: frontend.port.get(),
        protocol: protocol_name(frontend.protocol).to_owned(),
        affinity_seconds: frontend.affinity_seconds,
    }
}

/// Where the program keeps a Service that people ask for.
fn find<'a>(reconciler: &'a Reconciler, name: &ObjectName) -> Result<&'a Compiled, QueryError> {
    if !reconciler.is_synced() {
        return Err(QueryError::NotReady("the first synchronisation is not done".to_owned()));
    }
    reconciler
        .applied()
        .get(name)
        .filter(|_| !reconciler.is_own(name))
        .ok_or_else(|| QueryError::NotFound(format!("Service {name}")))
}

/// The weight of a backend: the largest it has in a set.
fn weight_of(service: &Compiled, id: u32) -> u32 {
    service
        .sets
        .iter()
        .flat_map(|set| &set.members)
        .filter(|(member, _)| *member == id)
        .map(|(_, weight)| u32::from(*weight))
        .max()
        .unwrap_or(0)
}

impl Answers for Shared {
    fn status(&self) -> Result<StatusView, QueryError> {
        let interfaces = lock(&self.uplinks).views();
        let programs = self.programs();
        let census = self.census.count(monotonic_ns());
        let reconciler = lock(&self.reconciler);
        let all = Self::all_service_counters(&reconciler, &census.flows.silent).map_err(failed)?;
        let counters = reconciler.kernel().counters().map_err(failed)?;
        let sum = |wanted: u32| -> u64 {
            (0..hook::COUNT)
                .map(|h| counters[counter::index(h, wanted) as usize])
                .sum()
        };
        let mut counts = CountsView {
            events_lost: sum(action::RECORD_LOST),
            ..CountsView::default()
        };
        let everything = ServiceFilter::default();
        for (_, service) in Self::shown(&reconciler, &everything) {
            let c = all.get(service.service_id as usize).copied().unwrap_or_default();
            counts.services += 1;
            counts.frontends += service.frontends.len() as u64;
            counts.sets += service.sets.len() as u64;
            counts.backends += service.backends.len() as u64;
            counts.connects += c.connects;
            counts.failed += c.failed.iter().sum::<u64>() + c.rejected;
            counts.active += c.established.saturating_sub(c.closed);
        }
        let sync = reconciler.sync_state();
        let now = SystemTime::now();
        Ok(StatusView {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            abi: ABI_VERSION,
            mode: self.config.mode,
            node: Some(self.config.node_name.clone()),
            kernel: self.kernel_release.clone(),
            time: Timestamp::from_system(now),
            started: Timestamp::from_system(self.started),
            uptime_seconds: self.began.elapsed().as_secs_f64(),
            health: self.health_view(&reconciler),
            source: self.source_view(&reconciler),
            sync: SyncView {
                last_applied: sync.last_applied.map(Timestamp::from_system),
                last_queued: sync.last_queued.map(Timestamp::from_system),
                pending_since: sync.pending_since.map(Timestamp::from_system),
                last_duration_seconds: sync.last_duration.map(|d| d.as_secs_f64()),
                failures: sync.failures,
                last_error: sync
                    .errors
                    .iter()
                    .next()
                    .map(|(name, error)| format!("Service {name}: {error}")),
                repairs: sync.repairs,
            },
            programs,
            interfaces,
            maps: reconciler
                .usage()
                .into_iter()
                .chain(census.usage)
                .map(|(map, entries, max_entries)| MapUsageView {
                    name: map.to_owned(),
                    entries,
                    max_entries,
                })
                .collect(),
            counts,
            problems: {
                let desired = reconciler.desired().problems();
                let ports = lock(&self.health_ports);
                let own = self.own_problems(&reconciler);
                desired
                    .iter()
                    .chain(&*ports)
                    .chain(&own)
                    .map(ProblemView::from)
                    .collect()
            },
        })
    }

    fn services(&self, filter: &ServiceFilter) -> Result<Vec<ServiceView>, QueryError> {
        let flows = self.silent();
        let reconciler = lock(&self.reconciler);
        let observation = lock(&self.observation);
        let all = Self::all_service_counters(&reconciler, &flows.silent).map_err(failed)?;
        Ok(Self::shown(&reconciler, filter)
            .map(|(name, compiled)| {
                let counters = all.get(compiled.service_id as usize).copied().unwrap_or_default();
                Self::service_view(&reconciler, &observation, name, compiled, counters)
            })
            .collect())
    }

    fn service(&self, name: &ObjectName) -> Result<ServiceView, QueryError> {
        let flows = self.silent();
        let reconciler = lock(&self.reconciler);
        let observation = lock(&self.observation);
        let compiled = find(&reconciler, name)?;
        let mut counters = reconciler
            .kernel()
            .service_counter(compiled.service_id)
            .map_err(failed)?;
        flows.silent.settle_service(compiled.service_id, &mut counters);
        Ok(Self::service_view(&reconciler, &observation, name, compiled, counters))
    }

    fn backends(&self, filter: &ServiceFilter) -> Result<Vec<BackendView>, QueryError> {
        let flows = self.silent();
        let reconciler = lock(&self.reconciler);
        let observation = lock(&self.observation);
        let mut views = Vec::new();
        let ids = Self::shown(&reconciler, filter).flat_map(|(_, service)| service.backends.iter().map(|(id, _)| *id));
        let all = reconciler.kernel().backend_counters_of(ids).map_err(failed)?;
        for (name, service) in Self::shown(&reconciler, filter) {
            let mut shares: BTreeMap<u32, (u64, f64)> = BTreeMap::new();
            let mut judged = 0;
            for (_, window) in observation.windows(service.service_id) {
                for (id, share) in window.shares() {
                    let entry = shares.entry(id).or_default();
                    entry.0 += share.observed;
                    entry.1 += share.expected;
                    judged += share.observed;
                }
            }
            let mut of_service = Vec::new();
            for (id, backend) in &service.backends {
                let mut counters = all.get(id).copied().unwrap_or_default();
                flows.silent.settle_backend(*id, &mut counters);
                let total = audience::total(&counters);
                let weight = weight_of(service, *id);
                let (window_connects, expected) = shares.get(id).copied().unwrap_or_default();
                of_service.push(BackendView {
                    namespace: name.namespace.to_string(),
                    service: name.name.to_string(),
                    addr: IpAddr::from(backend.addr),
                    port: backend.port.get(),
                    protocol: proto_name(backend).to_owned(),
                    id: *id,
                    state: match backend.state {
                        state::DRAINING => BackendState::Draining,
                        state::EJECTED => BackendState::Ejected,
                        _ => BackendState::Active,
                    },
                    weight,
                    connects: total.connects,
                    outside: counters.outside.connects,
                    failed: total.failed,
                    active: audience::open(&total),
                    window_connects,
                    share: (judged > 0).then(|| window_connects as f64 / judged as f64),
                    fair_share: if judged > 0 {
                        (weight > 0).then(|| expected / judged as f64)
                    } else {
                        fair_share(service, *id)
                    },
                });
            }
            of_service.sort_by_key(|b| (b.addr, b.port, b.protocol.clone()));
            views.extend(of_service);
        }
        Ok(views)
    }

    fn conns(&self, filter: &ServiceFilter, which: &ConnFilter) -> Result<ConnListView, QueryError> {
        self.conns_view(filter, which)
    }

    fn reuse(&self, filter: &ServiceFilter) -> Result<ReuseView, QueryError> {
        let reconciler = lock(&self.reconciler);
        let observation = lock(&self.observation);
        let tracker = observation.reuse();
        let mut total = ReuseCounts::default();
        let mut services = Vec::new();
        for (name, service) in Self::shown(&reconciler, filter) {
            let Some(counts) = tracker.service(service.service_id) else {
                continue;
            };
            add(&mut total, counts);
            let set = service.sets.iter().max_by_key(|set| set.members.len());
            let chance = set.and_then(|set| chance_of_same(set.members.iter().map(|(_, w)| u32::from(*w))));
            services.push(ServiceReuseView::new(&name.namespace, &name.name, counts, chance));
        }
        let mut view = ReuseView::new(self.config.reuse_horizon.as_secs_f64(), &total, services);
        view.tuples = tracker.tuples() as u64;
        view.evicted = tracker.evicted();
        view.late = tracker.late();
        view.clients = Self::client_reuse(&reconciler, &observation, filter);
        view.clients_forgotten = tracker.clients_forgotten();
        // One id at a time, for the Services that are shown.
        for (_, service) in Self::shown(&reconciler, filter) {
            if let Some(counts) = observation.backend_reuse().service(service.service_id) {
                view.backend_level_connections += counts.connections;
                view.backend_level_total += counts.total();
            }
        }
        Ok(view)
    }

    fn table(&self, name: &ObjectName) -> Result<Vec<TableView>, QueryError> {
        let reconciler = lock(&self.reconciler);
        let service = find(&reconciler, name)?;
        let backends: BTreeMap<u32, &Backend> = service.backends.iter().map(|(id, b)| (*id, b)).collect();
        service
            .sets
            .iter()
            .map(|set| {
                let slots = if set.word.count() == 0 {
                    Vec::new()
                } else {
                    reconciler
                        .kernel()
                        .table(set.table.offset, set.table.slots)
                        .map_err(failed)?
                };
                let weights: f64 = set.members.iter().map(|(_, weight)| f64::from(*weight)).sum();
                let mut counts = vec![0u32; set.members.len()];
                for slot in &slots {
                    if let Some(count) = counts.get_mut(usize::from(*slot)) {
                        *count += 1;
                    }
                }
                Ok(TableView {
                    namespace: name.namespace.to_string(),
                    service: name.name.to_string(),
                    set: set_name(&set.name),
                    set_id: set.set_id,
                    size: slots.len() as u32,
                    generation: set.word.generation(),
                    digest: format!("{:016x}", crate::compile::table_hash(slots.iter().copied())),
                    backends: set
                        .members
                        .iter()
                        .zip(counts)
                        .filter_map(|((id, weight), count)| {
                            let backend = backends.get(id)?;
                            Some(TableSlotsView {
                                addr: backend.addr.into(),
                                port: backend.port.get(),
                                id: *id,
                                weight: u32::from(*weight),
                                slots: count,
                                share: f64::from(count) / (slots.len() as f64).max(1.0),
                                fair_share: if weights > 0.0 {
                                    f64::from(*weight) / weights
                                } else {
                                    0.0
                                },
                            })
                        })
                        .collect(),
                })
            })
            .collect()
    }

    fn explain(&self, flow: &ExplainQuery) -> Result<ExplainView, QueryError> {
        super::explain::explain(self, flow)
    }

    fn maps(&self) -> Result<Vec<MapInfoView>, QueryError> {
        let census = self.census.count(monotonic_ns());
        let reconciler = lock(&self.reconciler);
        let used: BTreeMap<&str, u64> = reconciler
            .usage()
            .into_iter()
            .chain(census.usage)
            .map(|(map, used, _)| (map, used))
            .collect();
        let programs = lock(&self.programs);
        Ok(reconciler
            .kernel()
            .facts()
            .iter()
            .map(|(name, facts)| MapInfoView {
                name: (*name).to_owned(),
                map_type: facts.kind.to_owned(),
                id: facts.id,
                key_size: facts.key_size,
                value_size: facts.value_size,
                entries: used
                    .get(name)
                    .copied()
                    .or_else(|| reconciler.kernel().count_entries(name)),
                max_entries: u64::from(facts.max_entries),
                memory_bytes: facts.memory,
                pin: programs.attachments.map_pin(name).map(|pin| pin.display().to_string()),
            })
            .collect())
    }

    fn diagnose(&self, filter: &ServiceFilter) -> Result<(NodeFactsView, Vec<DiagnosisView>), QueryError> {
        let (node, items) = self.diagnoses(filter)?;
        Ok((node, items.into_iter().map(|(view, _)| view).collect()))
    }

    fn report(&self, filter: &ServiceFilter) -> Result<ReportView, QueryError> {
        self.report_view(filter)
    }

    fn graph(&self, filter: &ServiceFilter) -> Result<GraphView, QueryError> {
        self.graph_view(filter)
    }

    fn follow(&self, filter: &ServiceFilter) -> Result<EventReader, QueryError> {
        let mut observation = lock(&self.observation);
        (observation.followers.add(filter.clone()))
            .ok_or_else(|| QueryError::Failed("too many readers follow the events already".to_owned()))
    }

    fn map_dump(&self, name: &str) -> Result<MapDumpView, QueryError> {
        if let Some(name) = super::dump::packets::known(name)
            && let Some(flows) = self.census.packet_maps()
        {
            return super::dump::packets::dump(flows, name);
        }
        let interfaces = self.interface_names();
        super::dump::dump(&lock(&self.reconciler), &interfaces, name)
    }
}

fn proto_name(backend: &Backend) -> &'static str {
    if backend.proto == lb_common::abi::UDP {
        "UDP"
    } else {
        "TCP"
    }
}

fn fair_share(service: &Compiled, id: u32) -> Option<f64> {
    let set = service
        .sets
        .iter()
        .find(|set| set.members.iter().any(|(member, _)| *member == id))?;
    let total: f64 = set.members.iter().map(|(_, weight)| f64::from(*weight)).sum();
    let own = set.members.iter().find(|(member, _)| *member == id)?.1;
    (own > 0).then(|| f64::from(own) / total)
}

fn add(total: &mut ReuseCounts, counts: &ReuseCounts) {
    total.connections += counts.connections;
    total.same_backend += counts.same_backend;
    total.moved += counts.moved;
    total.stale_backend += counts.stale_backend;
    total.unknown_backend += counts.unknown_backend;
    total.overlap += counts.overlap;
    for (sum, count) in total.intervals.iter_mut().zip(counts.intervals) {
        *sum += count;
    }
    total.interval_seconds += counts.interval_seconds;
}

/// The frontend key of an address that people name.
pub(super) fn key_of(addr: IpAddr, port: u16, protocol: Protocol) -> FrontendKey {
    FrontendKey::new(addr.into(), lb_common::addr::Port::new(port), proto(protocol))
}

/// The desired frontend behind a key.
pub(super) fn frontend_of(desired: &DesiredService, key: &FrontendKey) -> Option<crate::model::Frontend> {
    desired
        .frontends
        .iter()
        .find(|f| key_of(f.addr, f.port.get(), f.protocol) == *key)
        .cloned()
}
