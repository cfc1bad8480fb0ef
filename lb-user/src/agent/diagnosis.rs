//! Why load is uneven: what was counted, what the node says and what the cluster wants, put together into verdicts.

use std::{
    collections::{BTreeMap, HashSet},
    net::SocketAddr,
};

use lb_common::{
    backend::{Backend, ServiceCounters, state},
    frontend::{self, Frontend, FrontendKey},
};

use super::{
    answers::{failures, set_name},
    facts::Facts,
    state::{Shared, lock},
};
use crate::{
    analysis::{
        cause::{self, Evidence, StickinessEvidence, Verdict},
        imbalance::{Imbalance, Share},
        reuse::{ReuseCounts, chance_of_same},
        starvation::Status,
        stickiness::StickinessCounts,
    },
    compile::{Compiled, CompiledSet},
    metrics::Buckets,
    model::{Endpoint, Family, ObjectName, Scope, SetName},
    node::{proxy, table::Finding},
    observe::{
        Observation, SetKey, address, monotonic_ns,
        sets::{Alarm, Basis, Kind, Watch},
        wall,
    },
    reconcile::Reconciler,
    view::{
        AttributionView, AudienceView, BackendState, ClientsView, DiagnosisView, EndpointView, ImbalanceView,
        LatencyView, Mode, NodeFactsView, PortUseView, QueryError, ServiceFilter, ServiceReuseView, SettingView,
        StarvedView, Timestamp, VerdictKind,
        wording::{self, Findings},
    },
};

/// One set of one Service, with everything that a judgement of it may need.
pub(super) struct Case<'a> {
    pub(super) name: &'a ObjectName,
    pub(super) service: &'a Compiled,
    pub(super) set: &'a CompiledSet,
    pub(super) watch: &'a Watch,
}

impl<'a> Case<'a> {
    fn backend(&self, id: u32) -> Option<&'a Backend> {
        self.service
            .backends
            .iter()
            .find(|(known, _)| *known == id)
            .map(|(_, backend)| backend)
    }

    fn address(&self, id: u32) -> Option<SocketAddr> {
        self.backend(id)
            .map(|backend| SocketAddr::new(backend.addr.into(), backend.port.get()))
    }

    /// The frontends that lead to the set, for whichever clients.
    fn leading(&self) -> impl Iterator<Item = &'a (FrontendKey, Frontend)> {
        let set_id = self.set.set_id;
        let outside = move |frontend: &Frontend| {
            frontend.outside_set_id == set_id && frontend.flags & frontend::flag::OUTSIDE != 0
        };
        (self.service.frontends.iter()).filter(move |(_, frontend)| frontend.set_id == set_id || outside(frontend))
    }

    /// The addresses of the frontends that lead to the set.
    fn frontends(&self) -> impl Iterator<Item = SocketAddr> {
        self.leading()
            .map(|(key, _)| SocketAddr::new(key.addr.into(), key.port.get()))
    }

    /// The timeout of the affinity that any of its frontends has.
    fn affinity_seconds(&self) -> Option<u32> {
        (self.leading().map(|(_, frontend)| frontend.affinity_seconds))
            .filter(|seconds| *seconds > 0)
            .max()
    }

    /// What the proxy has for an endpoint: (whether it has it, its weight), each where it tells.
    fn programmed(&self, facts: &Facts, endpoint: SocketAddr) -> (Option<bool>, Option<u32>) {
        let protocol = self.set.name.protocol;
        let mut found = (None, None);
        for frontend in self.frontends() {
            match facts.table.find(frontend, protocol, endpoint) {
                Finding::Programmed { backend, .. } => return (Some(true), backend.weight),
                Finding::Absent { .. } => found.0 = Some(false),
                Finding::Unknown(_) => {}
            }
        }
        found
    }
}

/// Whether hints name other zones than this node's.
fn hinted_elsewhere(endpoint: &Endpoint, zone: Option<&str>, node: &str) -> bool {
    let Some(hints) = &endpoint.hints else { return false };
    let other_zone = !hints.zones.is_empty() && zone.is_some_and(|zone| hints.zones.iter().all(|hint| **hint != *zone));
    let other_node = !hints.nodes.is_empty() && hints.nodes.iter().all(|hint| **hint != *node);
    other_zone || (hints.zones.is_empty() && other_node)
}

/// The endpoints of a set's port, as the slices have them.
fn endpoints<'r>(
    reconciler: &'r Reconciler,
    name: &ObjectName,
    set: &'r SetName,
) -> impl Iterator<Item = (SocketAddr, &'r Endpoint)> {
    let family = if set.ipv6 { Family::V6 } else { Family::V4 };
    (reconciler.desired().slices(name).iter())
        .filter(move |slice| slice.family == family)
        .flat_map(move |slice| {
            let ports =
                (slice.ports.iter()).filter(move |port| port.name == set.port_name && port.protocol == set.protocol);
            ports.flat_map(move |port| {
                (slice.endpoints.iter())
                    .map(move |endpoint| (SocketAddr::new(endpoint.addr, port.port.get()), endpoint))
            })
        })
}

/// What the node says, and the diagnoses with the sets that they are about.
type Diagnosed = (NodeFactsView, Vec<(DiagnosisView, SetKey)>);

impl Shared {
    /// The evidence for an endpoint's starvation.
    fn evidence(
        &self,
        case: &Case<'_>,
        reconciler: &Reconciler,
        observation: &Observation,
        facts: &Facts,
        alarm: &Alarm,
    ) -> Evidence {
        let nothing = ReuseCounts::default();
        let service_id = case.service.service_id;
        let recent = case
            .watch
            .recent(observation.reuse().service(service_id).unwrap_or(&nothing));
        let sticky: StickinessCounts = observation.stickiness().service(service_id);
        let endpoint = case.address(alarm.backend);
        let (in_proxy, proxy_weight) = endpoint.map_or((None, None), |endpoint| case.programmed(facts, endpoint));
        let zone = reconciler.desired().node().and_then(|node| node.zone.clone());
        let excluded_by_topology = endpoint.is_some_and(|endpoint| {
            endpoints(reconciler, case.name, &case.set.name).any(|(address, known)| {
                address == endpoint && hinted_elsewhere(known, zone.as_deref(), &self.config.node_name)
            })
        });
        let ipvs = matches!(facts.proxy.kind, proxy::Kind::KubeProxyIpvs | proxy::Kind::Ipvs);
        let protocol = case.set.name.protocol;
        let programmed = case
            .frontends()
            .find_map(|frontend| facts.table.service(frontend, protocol));
        let scheduler = programmed.and_then(|programmed| programmed.scheduler.clone());
        Evidence {
            in_proxy: if self.config.mode == Mode::Balance {
                Some(true)
            } else {
                in_proxy
            },
            proxy_weight,
            excluded_by_topology,
            affinity_configured: case.affinity_seconds().is_some()
                || programmed.is_some_and(|programmed| programmed.persistent.is_some()),
            stickiness: Some(StickinessEvidence {
                pairs: sticky.pairs,
                same: sticky.same,
            }),
            reuse: Some(recent.reuse),
            fair_chance: recent.fair_chance,
            observed_chance: recent.observed_chance,
            ipvs: (facts.proxy.kind != proxy::Kind::Unseen).then_some(ipvs),
            conn_reuse_mode: facts.conn_reuse_mode.filter(|_| ipvs),
            // sh, mh and maglev choose by a hash of the client or the tuple.
            hashes_tuples: scheduler.is_some_and(|name| ["mh", "sh"].contains(&name.as_str())),
            drift: case.watch.drift(alarm.backend),
        }
    }

    /// Names the cause.
    pub(super) fn verdict(
        &self,
        case: &Case<'_>,
        reconciler: &Reconciler,
        observation: &Observation,
        facts: &Facts,
        alarm: &Alarm,
    ) -> Verdict {
        cause::cause(&self.evidence(case, reconciler, observation, facts, alarm))
    }

    /// The sets of the Services that pass a filter, those without traffic and those that repeat another's members left out.
    fn cases<'a>(reconciler: &'a Reconciler, observation: &'a Observation, filter: &'a ServiceFilter) -> Vec<Case<'a>> {
        let mut cases = Vec::new();
        for (name, service) in Self::shown(reconciler, filter) {
            let mut seen: HashSet<(Basis, Vec<u32>)> = HashSet::new();
            for set in &service.sets {
                let Some(watch) = observation.watch((service.service_id, set.set_id)) else {
                    continue;
                };
                let mut members: Vec<u32> = set.members.iter().map(|(id, _)| *id).collect();
                members.sort_unstable();
                if watch.has_traffic() && seen.insert((watch.basis(), members)) {
                    cases.push(Case {
                        name,
                        service,
                        set,
                        watch,
                    });
                }
            }
        }
        cases
    }

    /// The node and its settings.
    pub(super) fn node_facts(&self, facts: &Facts, events_lost: u64) -> NodeFactsView {
        let seen = !matches!(facts.proxy.kind, proxy::Kind::Unseen | proxy::Kind::Evenkeel);
        NodeFactsView {
            node: Some(self.config.node_name.clone()),
            kernel: self.kernel_release.clone(),
            mode: self.config.mode,
            time: Timestamp::from_system(std::time::SystemTime::now()),
            since: Timestamp::from_system(self.started),
            proxy: seen.then(|| facts.proxy.name.clone()),
            proxy_trace: seen.then(|| facts.proxy.trace.clone()),
            unseen: facts.proxy.unseen.clone(),
            settings: facts
                .settings
                .iter()
                .map(|setting| SettingView {
                    name: setting.name.to_owned(),
                    value: setting.value.clone(),
                    advice: setting.advice.clone(),
                })
                .collect(),
            events_lost,
        }
    }

    /// The diagnoses, the worst first.
    pub(super) fn diagnoses(&self, filter: &ServiceFilter) -> Result<Diagnosed, QueryError> {
        let facts = self.fresh_facts();
        let flows = self.silent();
        let reconciler = lock(&self.reconciler);
        let observation = lock(&self.observation);
        let all = Self::all_service_counters(&reconciler, &flows.silent)
            .map_err(|error| QueryError::Failed(error.to_string()))?;
        let counters = |id: u32| all.get(id as usize).copied().unwrap_or_default();
        let node = self.node_facts(&facts, Self::events_lost(&reconciler, &observation));
        let mut views = Vec::new();
        let cases = Self::cases(&reconciler, &observation, filter);
        for case in &cases {
            let key = (case.service.service_id, case.set.set_id);
            let counters = counters(key.0);
            views.push((
                self.diagnose_case(case, &reconciler, &observation, &facts, &counters),
                key,
            ));
        }
        if filter.name.is_some() && views.is_empty() {
            // Asked by name: to say that nothing was seen is an answer.
            for (name, service) in Self::shown(&reconciler, filter) {
                let watch = Watch::default();
                if let Some(set) = service.sets.first() {
                    let case = Case {
                        name,
                        service,
                        set,
                        watch: &watch,
                    };
                    let counters = counters(service.service_id);
                    let key = (service.service_id, set.set_id);
                    views.push((
                        self.diagnose_case(&case, &reconciler, &observation, &facts, &counters),
                        key,
                    ));
                }
            }
            if views.is_empty() {
                let namespace = filter.namespace.as_deref().unwrap_or("default");
                let name = filter.name.as_deref().unwrap_or_default();
                return Err(QueryError::NotFound(format!("Service {namespace}/{name}")));
            }
        }
        views.sort_by(|(a, _), (b, _)| {
            (a.verdict, &a.namespace, &a.service, &a.set).cmp(&(b.verdict, &b.namespace, &b.service, &b.set))
        });
        Ok((node, views))
    }

    fn diagnose_case(
        &self,
        case: &Case<'_>,
        reconciler: &Reconciler,
        observation: &Observation,
        facts: &Facts,
        counters: &ServiceCounters,
    ) -> DiagnosisView {
        let now_ns = monotonic_ns();
        let watch = case.watch;
        let service_id = case.service.service_id;
        let new = Some(watch.imbalance()).filter(|found| found.n > 0);
        let since_start = Some(watch.since_start()).filter(|found| found.n > 0);
        let open = Some(watch.open()).filter(|found| found.n > 0);
        let alarms: Vec<&Alarm> = watch.alarms().collect();
        let verdict = verdict_kind(watch, &alarms, new.as_ref(), since_start.as_ref());
        let attribution = self.attribution(case, counters);
        let counts = observation.reuse().service(service_id);
        let weights = case.set.members.iter().map(|(_, weight)| u32::from(*weight));
        let reuse = counts.map(|counts| {
            ServiceReuseView::new(
                &case.name.namespace,
                &case.name.name,
                counts,
                chance_of_same(weights.clone()),
            )
        });
        let ports = observation
            .ports()
            .worst_of(service_id, facts.ports)
            .map(|used| PortUseView {
                client: address(used.client.address),
                destination: SocketAddr::new(address(used.destination.address), used.destination.port).to_string(),
                used: used.open + used.waiting,
                range: u64::from(used.range),
                ratio: used.ratio,
            });
        let sticky = observation.stickiness().service(service_id);
        let clients = (sticky.clients > 0).then(|| ClientsView {
            clients: sticky.clients as u64,
            compared: sticky.pairs,
            same_share: sticky.share(),
            expected_same_share: sticky.chance,
        });
        let known = wording::Known {
            proxy: Some(facts.proxy.name.clone()),
            affinity_seconds: case.affinity_seconds(),
            reuse_horizon_seconds: Some(self.config.reuse_horizon.as_secs_f64()),
            clients: clients.map(|clients| clients.clients),
            endpoints: case.set.members.len() as u64,
            ports: ports.as_ref().map(|ports| wording::Ports {
                client: ports.client,
                destination: ports.destination.clone(),
                used: ports.used,
                range: ports.range,
            }),
        };
        let mut starved = Vec::new();
        let mut words = Vec::new();
        for alarm in &alarms {
            let Some(endpoint) = case.address(alarm.backend) else {
                continue;
            };
            let verdict = self.verdict(case, reconciler, observation, facts, alarm);
            let usable_seconds = alarm.born_ns.map(|born| now_ns.saturating_sub(born) as f64 / 1e9);
            let told = wording::Starved {
                endpoint,
                connections: match alarm.kind {
                    Kind::New => wording::Connections::New,
                    Kind::Open => wording::Connections::Open,
                },
                expected: alarm.expected,
                seen: alarm.seen,
                probability: alarm.probability,
                window_seconds: alarm.window_seconds,
                since_birth: alarm.since_birth,
                standing_seconds: now_ns.saturating_sub(alarm.raised_ns) as f64 / 1e9,
                cause: verdict.cause,
                facts: verdict.because,
                usable_seconds,
                zones: zones(case, reconciler, endpoint),
            };
            starved.push(StarvedView {
                addr: endpoint.ip(),
                port: endpoint.port(),
                cause: verdict.cause.name().to_owned(),
                because: wording::because(&told, &known),
                view: alarm.kind.name().to_owned(),
                expected: alarm.expected,
                seen: alarm.seen,
                probability: alarm.probability,
                window_seconds: alarm.window_seconds,
                since: wall(alarm.since_ns),
                seconds_to_verdict: alarm
                    .born_ns
                    .map(|born| alarm.raised_ns.saturating_sub(born) as f64 / 1e9),
            });
            words.push(told);
        }
        let shares = watch.window().shares();
        let opened: BTreeMap<u32, Share> = open_shares(case, watch);
        let findings = Findings {
            service: case.name.to_string(),
            verdict,
            watched_seconds: self.began.elapsed().as_secs_f64(),
            connects: attribution.connects.max(attribution.direct),
            attributed: if attribution.attributed == 0 {
                attribution.direct
            } else {
                attribution.attributed
            },
            new: new.map(|found| evenness(case, &found, Some(60.0), &shares)),
            open: open.map(|found| evenness(case, &found, None, &opened)),
            starved: words,
            known,
            mixed: watch.basis().is_mixed(),
            balanced_here: self.config.mode == Mode::Balance,
        };
        DiagnosisView {
            namespace: case.name.namespace.to_string(),
            service: case.name.name.to_string(),
            set: set_name(&case.set.name),
            audience: audience_view(watch.basis()),
            verdict,
            sentences: wording::sentences(&findings),
            advice: wording::advice(&findings),
            starved,
            endpoints: self.endpoint_views(case, reconciler, facts, &alarms),
            new_connections: new.map(ImbalanceView::from),
            new_since_start: since_start.map(ImbalanceView::from),
            open_connections: open.map(ImbalanceView::from),
            attribution,
            reuse,
            clients,
            failed: failures(counters),
            latency: observation.latencies(service_id).and_then(latency),
            ports,
        }
    }

    fn attribution(&self, case: &Case<'_>, counters: &ServiceCounters) -> AttributionView {
        let attributed = if self.config.mode == Mode::Balance {
            counters.connects
        } else {
            counters.attributed
        };
        let frontends =
            (case.service.frontends.iter()).map(|(key, _)| SocketAddr::new(key.addr.into(), key.port.get()));
        AttributionView {
            connects: counters.connects,
            attributed,
            unknown: counters.connects.saturating_sub(attributed),
            outside: counters.outside,
            direct: counters.direct,
            earlier: self.earlier(frontends),
        }
    }

    fn endpoint_views(
        &self,
        case: &Case<'_>,
        reconciler: &Reconciler,
        facts: &Facts,
        alarms: &[&Alarm],
    ) -> Vec<EndpointView> {
        let watch = case.watch;
        let shares = watch.window().shares();
        let mut views: BTreeMap<SocketAddr, EndpointView> = BTreeMap::new();
        for (id, weight) in &case.set.members {
            let (Some(backend), Some(address)) = (case.backend(*id), case.address(*id)) else {
                continue;
            };
            let share = shares.get(id);
            let (connects, open) = watch.counts(*id);
            let (programmed, proxy_weight) = if self.config.mode == Mode::Balance {
                (Some(true), Some(u32::from(*weight)))
            } else {
                case.programmed(facts, address)
            };
            let judged = watch.judgement(*id).map(|judgement| judgement.status);
            let status = if alarms.iter().any(|alarm| alarm.backend == *id) {
                "starved"
            } else if judged == Some(Status::Fair) {
                "fair"
            } else {
                "unknown"
            };
            let view = EndpointView {
                addr: address.ip(),
                port: address.port(),
                id: *id,
                state: Some(match backend.state {
                    state::DRAINING => BackendState::Draining,
                    state::EJECTED => BackendState::Ejected,
                    _ => BackendState::Active,
                }),
                weight: u32::from(*weight),
                status: status.to_owned(),
                excluded: None,
                born: watch.born_ns(*id).map(wall),
                window_connects: share.map_or(0, |share| share.observed),
                window_expected: share.map_or(0.0, |share| share.expected),
                connects,
                open,
                proxy_weight,
                programmed,
            };
            views.insert(address, view);
        }
        let zone = reconciler.desired().node().and_then(|node| node.zone.clone());
        for (address, endpoint) in endpoints(reconciler, case.name, &case.set.name) {
            if views.contains_key(&address) {
                continue;
            }
            let elsewhere = hinted_elsewhere(endpoint, zone.as_deref(), &self.config.node_name);
            let why = match (endpoint.terminating, endpoint.ready) {
                (true, _) => "terminating",
                (false, false) => "not_ready",
                (false, true) if elsewhere => "topology",
                (false, true) if case.set.name.scope == Scope::Local => "not_local",
                (false, true) => "refused",
            };
            let (programmed, proxy_weight) = case.programmed(facts, address);
            let view = EndpointView {
                addr: address.ip(),
                port: address.port(),
                id: 0,
                state: None,
                weight: 0,
                status: "excluded".to_owned(),
                excluded: Some(why.to_owned()),
                born: None,
                window_connects: 0,
                window_expected: 0.0,
                connects: 0,
                open: 0,
                proxy_weight,
                programmed,
            };
            views.insert(address, view);
        }
        views.into_values().collect()
    }
}

/// Whose connections a basis counts. What dials endpoints directly is a process of this node.
fn audience_view(basis: Basis) -> AudienceView {
    match basis {
        Basis::Direct => AudienceView::Node,
        Basis::Frontends(audience) => match (audience.mixed, audience.inside, audience.outside) {
            (true, ..) => AudienceView::Mixed,
            (false, true, true) => AudienceView::All,
            (false, false, true) => AudienceView::Outside,
            (false, ..) => AudienceView::Node,
        },
    }
}

/// The verdict in a word.
fn verdict_kind(
    watch: &Watch,
    alarms: &[&Alarm],
    new: Option<&Imbalance>,
    since_start: Option<&Imbalance>,
) -> VerdictKind {
    if !alarms.is_empty() {
        return VerdictKind::Starved;
    }
    let Some(new) = new else {
        return if watch.has_traffic() {
            VerdictKind::Insufficient
        } else {
            VerdictKind::NoTraffic
        };
    };
    if new.alarm {
        VerdictKind::Uneven
    } else if new.insufficient {
        // A trickle says nothing in a minute, but much in an hour.
        match since_start {
            _ if !watch.is_told() => VerdictKind::Insufficient,
            Some(long) if long.alarm => VerdictKind::Uneven,
            Some(long) if !long.insufficient => VerdictKind::Even,
            _ => VerdictKind::Insufficient,
        }
    } else {
        VerdictKind::Even
    }
}

fn open_shares(case: &Case<'_>, watch: &Watch) -> BTreeMap<u32, Share> {
    let counts = watch.open_counts();
    let members = || case.set.members.iter().filter(|(_, weight)| *weight > 0);
    let weights: f64 = members().map(|(_, weight)| f64::from(*weight)).sum();
    let open: u64 = members().filter_map(|(id, _)| counts.get(id)).sum();
    members()
        .map(|(id, weight)| {
            let share = Share {
                expected: open as f64 * f64::from(*weight) / weights,
                observed: counts.get(id).copied().unwrap_or(0),
            };
            (*id, share)
        })
        .collect()
}

fn evenness(
    case: &Case<'_>,
    found: &Imbalance,
    window_seconds: Option<f64>,
    shares: &BTreeMap<u32, Share>,
) -> wording::Evenness {
    let farthest = wording::Farthest::among(
        (shares.iter()).filter_map(|(id, share)| Some((case.address(*id)?, share.observed, share.expected))),
    );
    wording::Evenness::new(&ImbalanceView::from(*found), window_seconds, farthest)
}

/// The zones of an endpoint's hints and of this node; none for an endpoint without hints.
fn zones(case: &Case<'_>, reconciler: &Reconciler, address: SocketAddr) -> Option<wording::Zones> {
    let hints = endpoints(reconciler, case.name, &case.set.name)
        .find(|(found, _)| *found == address)
        .and_then(|(_, endpoint)| endpoint.hints.clone())?;
    let node = reconciler.desired().node();
    Some(wording::Zones {
        hinted: hints.zones.iter().map(ToString::to_string).collect(),
        own: node.and_then(|node| node.zone.as_ref()).map(ToString::to_string),
    })
}

/// Quantiles of a histogram: the upper edge of the bucket in which each lies.
fn latency(buckets: &Buckets) -> Option<LatencyView> {
    let n = buckets.count();
    if n == 0 {
        return None;
    }
    let quantile = |share: f64| {
        let rank = (n as f64 * share).ceil() as u64;
        buckets
            .cumulative()
            .find(|(_, count)| *count >= rank)
            .map(|(edge, _)| edge)
    };
    Some(LatencyView {
        n,
        p50_seconds: quantile(0.5),
        p99_seconds: quantile(0.99),
    })
}
