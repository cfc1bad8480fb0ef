//! A small agent's answers from memory, for the tests of views, of the control socket and of the command line.

use std::{collections::BTreeMap, net::IpAddr};

use lb_user::{
    analysis::{
        imbalance,
        reuse::{ReuseCounts, chance_of_same},
    },
    model::ObjectName,
    view::{
        Answers, BackendCountsView, BackendState, BackendView, CandidateView, CountsView, ExplainQuery, ExplainView,
        FrontendView, HealthView, KindView, MapDumpView, MapInfoView, MapRowView, MapUsageView, Mode, ProblemView,
        ProgramView, QueryError, ReuseView, ServiceFilter, ServiceReuseView, ServiceView, SourceView, StatusView,
        SyncView, TableSlotsView, TableView, Timestamp, Verdict,
    },
};

/// A node with two Services: `shop/web`, starved as in the founding story, and `default/dns`, idle.
#[derive(Clone, Copy, Debug)]
pub struct Fixture {
    /// What the agent says of its readiness.
    pub ready: bool,
}

const NOW_MILLIS: i64 = 1_790_000_000_000;
const BACKENDS: [(&str, u32, u64); 3] = [("10.244.1.5", 1, 515), ("10.244.1.6", 2, 485), ("fd00::7", 3, 0)];

fn ago(seconds: i64) -> Timestamp {
    Timestamp::from_unix_millis(NOW_MILLIS - seconds * 1_000)
}

fn ip(text: &str) -> IpAddr {
    text.parse().expect("the fixture's addresses are addresses")
}

fn frontend(kind: &str, addr: &str, port: u16, protocol: &str, affinity_seconds: Option<u32>) -> FrontendView {
    FrontendView {
        kind: kind.to_owned(),
        addr: ip(addr),
        port,
        protocol: protocol.to_owned(),
        affinity_seconds,
    }
}

fn all_services() -> Vec<ServiceView> {
    vec![
        ServiceView {
            namespace: "default".into(),
            name: "dns".into(),
            id: 1,
            frontends: vec![frontend("ClusterIP", "10.96.0.10", 53, "UDP", Some(10_800))],
            backends: BackendCountsView {
                active: 0,
                draining: 1,
                ejected: 0,
            },
            connects: 0,
            failed: BTreeMap::new(),
            active: 0,
            imbalance: None,
        },
        ServiceView {
            namespace: "shop".into(),
            name: "web".into(),
            id: 2,
            frontends: vec![
                frontend("ClusterIP", "10.96.7.7", 80, "TCP", None),
                frontend("NodePort", "192.0.2.4", 30080, "TCP", None),
                frontend("ClusterIP", "fd00:96::7", 80, "TCP", None),
            ],
            backends: BackendCountsView {
                active: 3,
                draining: 0,
                ejected: 0,
            },
            connects: 1_000,
            failed: BTreeMap::from([("refused".to_owned(), 2), ("timed_out".to_owned(), 1)]),
            active: 12,
            imbalance: Some(imbalance::by_weight(BACKENDS.map(|(_, _, count)| (1, count))).into()),
        },
    ]
}

impl Answers for Fixture {
    fn status(&self) -> Result<StatusView, QueryError> {
        Ok(StatusView {
            version: "0.1.0".into(),
            abi: 1,
            mode: Mode::Balance,
            node: Some("node-a".into()),
            kernel: "6.12.9".into(),
            time: ago(0),
            started: ago(3_725),
            uptime_seconds: 3_725.0,
            health: HealthView {
                live: true,
                ready: self.ready,
                healthy: true,
                reasons: if self.ready {
                    vec![]
                } else {
                    vec!["EndpointSlice has not synced yet".into()]
                },
            },
            source: SourceView {
                name: "dir:/etc/evenkeel/manifests".into(),
                synced: self.ready,
                kinds: vec![
                    KindView {
                        kind: "Service".into(),
                        objects: 2,
                        synced: Some(ago(4)),
                    },
                    KindView {
                        kind: "EndpointSlice".into(),
                        objects: 3,
                        synced: self.ready.then(|| ago(4)),
                    },
                ],
                last_error: None,
            },
            sync: SyncView {
                last_applied: Some(ago(3)),
                last_queued: Some(ago(4)),
                pending_since: None,
                last_duration_seconds: Some(0.000_8),
                failures: 0,
                last_error: None,
                repairs: 1,
            },
            programs: vec![
                ProgramView {
                    name: "ek_connect4".into(),
                    hook: "cgroup/connect4".into(),
                    target: "/sys/fs/cgroup".into(),
                    attached: true,
                    program_id: Some(41),
                    link_id: Some(7),
                    pin: Some("/sys/fs/bpf/evenkeel/1/links/connect4".into()),
                },
                ProgramView {
                    name: "ek_sock_ops".into(),
                    hook: "cgroup/sock_ops".into(),
                    target: "/sys/fs/cgroup".into(),
                    attached: false,
                    program_id: None,
                    link_id: None,
                    pin: None,
                },
            ],
            maps: vec![MapUsageView {
                name: "FRONTENDS".into(),
                entries: 4,
                max_entries: 65_536,
            }],
            counts: CountsView {
                services: 2,
                frontends: 4,
                sets: 3,
                backends: 4,
                connects: 1_000,
                failed: 3,
                active: 12,
                events_lost: 0,
            },
            problems: vec![ProblemView {
                origin: "manifests/web.yaml:12".into(),
                object: "Service shop/api".into(),
                field: "spec.clusterIPs[0]".into(),
                message: "`10.96.7.7` belongs to Service shop/web, which is older".into(),
            }],
        })
    }

    fn services(&self, filter: &ServiceFilter) -> Result<Vec<ServiceView>, QueryError> {
        let mut services = all_services();
        services.retain(|service| filter.admits(&ObjectName::new(&service.namespace, &service.name)));
        Ok(services)
    }

    fn service(&self, name: &ObjectName) -> Result<ServiceView, QueryError> {
        all_services()
            .into_iter()
            .find(|service| *service.namespace == *name.namespace && *service.name == *name.name)
            .ok_or_else(|| QueryError::NotFound(format!("Service {name}")))
    }

    fn backends(&self, filter: &ServiceFilter) -> Result<Vec<BackendView>, QueryError> {
        let web = BACKENDS.map(|(addr, id, count)| BackendView {
            namespace: "shop".into(),
            service: "web".into(),
            addr: ip(addr),
            port: 8080,
            protocol: "TCP".into(),
            id,
            state: BackendState::Active,
            weight: 1,
            connects: count,
            failed: if id == 1 { 3 } else { 0 },
            active: if id == 3 { 0 } else { 6 },
            window_connects: count,
            share: Some(count as f64 / 1_000.0),
            fair_share: Some(1.0 / 3.0),
        });
        let dns = BackendView {
            namespace: "default".into(),
            service: "dns".into(),
            addr: ip("10.244.2.2"),
            port: 5353,
            protocol: "UDP".into(),
            id: 4,
            state: BackendState::Draining,
            weight: 1,
            connects: 0,
            failed: 0,
            active: 0,
            window_connects: 0,
            share: None,
            fair_share: None,
        };
        let mut backends: Vec<BackendView> = [dns].into_iter().chain(web).collect();
        backends.retain(|backend| filter.admits(&ObjectName::new(&backend.namespace, &backend.service)));
        Ok(backends)
    }

    fn reuse(&self, filter: &ServiceFilter) -> Result<ReuseView, QueryError> {
        let counts = ReuseCounts {
            connections: 1_000,
            same_backend: 640,
            moved: 0,
            stale_backend: 0,
            unknown_backend: 0,
            overlap: 2,
            intervals: [0, 0, 0, 0, 0, 0, 0, 10, 630, 0],
            interval_seconds: 57_000.0,
        };
        let chance = chance_of_same([1, 1, 1]);
        let mut services = vec![ServiceReuseView::new("shop", "web", &counts, chance)];
        services.retain(|service| filter.admits(&ObjectName::new(&service.namespace, &service.name)));
        let mut view = ReuseView::new(120.0, &counts, services);
        view.tuples = 200;
        Ok(view)
    }

    fn table(&self, name: &ObjectName) -> Result<Vec<TableView>, QueryError> {
        self.service(name)?;
        Ok(vec![TableView {
            namespace: name.namespace.to_string(),
            service: name.name.to_string(),
            set: "http/TCP/IPv4/cluster".into(),
            set_id: 2,
            size: 251,
            generation: 4,
            digest: "5d1c0a77e1f2b384".into(),
            backends: [("10.244.1.5", 1, 126), ("10.244.1.6", 2, 125)]
                .map(|(addr, id, slots)| TableSlotsView {
                    addr: ip(addr),
                    port: 8080,
                    id,
                    weight: 1,
                    slots,
                    share: f64::from(slots) / 251.0,
                    fair_share: 0.5,
                })
                .into(),
        }])
    }

    fn explain(&self, flow: &ExplainQuery) -> Result<ExplainView, QueryError> {
        Ok(ExplainView {
            source: flow.source.to_string(),
            vip: flow.vip,
            protocol: "TCP".into(),
            verdict: Verdict::Translated,
            service: Some("shop/web".into()),
            frontend_kind: Some("ClusterIP".into()),
            candidates: [("10.244.1.5", 1), ("10.244.1.6", 2)]
                .map(|(addr, id)| CandidateView {
                    addr: ip(addr),
                    port: 8080,
                    id,
                    chance: 0.5,
                })
                .into(),
            steps: vec![
                "The frontend is a ClusterIP of Service shop/web.".into(),
                "A TCP connection draws two slots and takes the one with fewer connections.".into(),
            ],
        })
    }

    fn maps(&self) -> Result<Vec<MapInfoView>, QueryError> {
        Ok(vec![MapInfoView {
            name: "FRONTENDS".into(),
            map_type: "hash".into(),
            id: 9,
            key_size: 20,
            value_size: 16,
            entries: Some(4),
            max_entries: 65_536,
            memory_bytes: Some(4_194_304),
            pin: Some("/sys/fs/bpf/evenkeel/1/FRONTENDS".into()),
        }])
    }

    fn map_dump(&self, name: &str) -> Result<MapDumpView, QueryError> {
        if !name.eq_ignore_ascii_case("FRONTENDS") {
            return Err(QueryError::NotFound(format!("map {name}; there are: FRONTENDS")));
        }
        Ok(MapDumpView {
            name: "FRONTENDS".into(),
            truncated: false,
            rows: vec![MapRowView {
                key: "10.96.0.10:53/UDP".into(),
                value: "service=1 set=1 kind=ClusterIP affinity=10800s".into(),
            }],
        })
    }
}
