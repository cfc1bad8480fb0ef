//! A small agent's answers from memory, for the tests of views, of the control socket and of the command line.

use std::{collections::BTreeMap, net::IpAddr};

use lb_user::{
    analysis::{
        imbalance,
        reuse::{ReuseCounts, chance_of_same},
    },
    model::ObjectName,
    view::{
        Answers, AttributionView, AudienceView, BackendCountsView, BackendState, BackendView, CallView, CandidateView,
        ClientReuseView, ClientsView, ConnFilter, ConnListView, ConnState, ConnView, CountsView, DiagnosisView,
        EndpointView, EventReader, EventView, ExplainQuery, ExplainView, FlowView, FrontendView, GraphView, HealthView,
        HistoryBackendView, HistoryPointView, InterfaceSide, InterfaceView, IntervalView, KindView, LatencyView,
        MapDumpView, MapInfoView, MapRowView, MapUsageView, Mode, NodeFactsView, Origin, OutsideView, PortUseView,
        ProblemView, ProgramView, QueryError, ReportView, ReuseView, ServiceFilter, ServiceReportView,
        ServiceReuseView, ServiceView, SettingView, SourceView, StarvedView, StatusView, SyncView, TableSlotsView,
        TableView, Timestamp, Verdict, VerdictKind, Whence, WorkloadView,
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
        outside: (kind == "NodePort").then(|| OutsideView {
            scope: "cluster".into(),
            masquerade: true,
            source_ranges: false,
        }),
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
            outside: 0,
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
            outside: 120,
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
                name: "kube".into(),
                synced: self.ready,
                kinds: vec![
                    KindView {
                        kind: "Service".into(),
                        objects: 2,
                        synced: Some(ago(4)),
                        error: None,
                    },
                    KindView {
                        kind: "EndpointSlice".into(),
                        objects: 3,
                        synced: self.ready.then(|| ago(4)),
                        error: None,
                    },
                    KindView {
                        kind: "Pod".into(),
                        objects: 0,
                        synced: None,
                        error: Some("the API server refused with 403: pods is forbidden".into()),
                    },
                ],
                last_error: Some("the API server refused with 403: pods is forbidden".into()),
            },
            interfaces: vec![
                InterfaceView {
                    name: "eth0".into(),
                    index: Some(2),
                    side: InterfaceSide::Uplink,
                    addresses: vec![
                        "192.0.2.10".parse().expect("an address"),
                        "2001:db8::10".parse().expect("an address"),
                    ],
                    reason: Some("carries the node's address 192.0.2.10".into()),
                    problem: None,
                },
                InterfaceView {
                    name: "tap7".into(),
                    index: Some(9),
                    side: InterfaceSide::Guest,
                    addresses: vec![],
                    reason: Some("named by a flag".into()),
                    problem: (!self.ready)
                        .then(|| "cannot attach lb_egress to interface tap7: Invalid argument".into()),
                },
            ],
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
            outside: if id == 1 { 120 } else { 0 },
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
            outside: 0,
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

    fn conns(&self, filter: &ServiceFilter, which: &ConnFilter) -> Result<ConnListView, QueryError> {
        let mut items = conns();
        items.retain(|item| {
            filter.admits(&ObjectName::new(&item.namespace, &item.service))
                && which.admits(item.origin, item.client.ip().into())
        });
        let total = items.len() as u64;
        items.sort_by(|a, b| a.age_seconds.total_cmp(&b.age_seconds));
        items.truncate(which.limit as usize);
        items.sort_by_key(|item| (item.service.clone(), item.client));
        Ok(ConnListView { items, total })
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
        if filter.admits(&ObjectName::new("shop", "web")) {
            view.clients = vec![ClientReuseView {
                client: ip("10.244.1.9"),
                workload: Some("shop/nginx".into()),
                namespace: "shop".into(),
                name: "web".into(),
                connections: 1_000,
                total: 640,
                same_backend: 640,
                moved: 0,
                stale_backend: 0,
                unknown_backend: 0,
            }];
        }
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
        if flow.from == Some(Whence::Outside) {
            return Ok(explained_flow(flow));
        }
        Ok(ExplainView {
            source: flow.source.to_string(),
            vip: flow.vip,
            protocol: "TCP".into(),
            from: Whence::Node,
            assumed: true,
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
            source_address: None,
            flow: None,
            next: Vec::new(),
            steps: vec![
                "The frontend is a ClusterIP of Service shop/web.".into(),
                "A TCP connection draws two slots and takes the one with fewer connections.".into(),
            ],
        })
    }

    fn diagnose(&self, filter: &ServiceFilter) -> Result<(NodeFactsView, Vec<DiagnosisView>), QueryError> {
        let mut items = vec![starved(), idle()];
        items.retain(|item| filter.admits(&ObjectName::new(&item.namespace, &item.service)));
        Ok((node_facts(), items))
    }

    fn report(&self, filter: &ServiceFilter) -> Result<ReportView, QueryError> {
        let (node, mut items) = self.diagnose(filter)?;
        items.retain(|item| item.verdict != VerdictKind::NoTraffic);
        let counts = founding_counts();
        Ok(ReportView {
            node,
            step_seconds: 1.0,
            services: items
                .into_iter()
                .map(|diagnosis| ServiceReportView {
                    diagnosis,
                    backends: BACKENDS
                        .map(|(addr, id, _)| HistoryBackendView {
                            addr: ip(addr),
                            port: 8080,
                            born: (id == 3).then(|| ago(30)),
                            gone: None,
                        })
                        .into(),
                    points: (0..60)
                        .map(|second: i64| HistoryPointView {
                            time: ago(59 - second),
                            started: vec![8 + (second as u64 * 7) % 3, 8 + (second as u64 * 5) % 3, 0],
                            open: vec![2, 3, 0],
                            dispersion: (second >= 5).then_some(if second < 30 { 0.4 } else { second as f64 * 2.0 }),
                        })
                        .collect(),
                    intervals: IntervalView::all(&counts),
                })
                .collect(),
        })
    }

    fn graph(&self, filter: &ServiceFilter) -> Result<GraphView, QueryError> {
        let call = |namespace: &str, kind: &str, name: &str, service: (&str, &str), connections, failures| CallView {
            client: WorkloadView {
                namespace: namespace.into(),
                kind: kind.into(),
                name: name.into(),
            },
            namespace: service.0.into(),
            service: service.1.into(),
            connections,
            failures,
            last_seen: ago(2),
        };
        let mut calls = vec![
            call("", "Address", "192.0.2.77", ("shop", "web"), 3, 0),
            call("", "Node", "node-a", ("default", "dns"), 41, 0),
            call("shop", "Deployment", "nginx", ("default", "dns"), 12, 0),
            call("shop", "Deployment", "nginx", ("shop", "web"), 1_000, 3),
        ];
        calls.retain(|call| filter.admits(&ObjectName::new(&call.namespace, &call.service)));
        Ok(GraphView {
            since: ago(3_725),
            calls,
            forgotten: 0,
        })
    }

    fn follow(&self, filter: &ServiceFilter) -> Result<EventReader, QueryError> {
        let (sender, reader) = tokio::sync::mpsc::channel(16);
        if filter.admits(&ObjectName::new("shop", "web")) {
            for event in events() {
                // The channel is larger than the list.
                let _fits = sender.try_send(event);
            }
        }
        Ok(reader)
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

/// A flow from outside, whose endpoint has begun to drain since.
fn explained_flow(flow: &ExplainQuery) -> ExplainView {
    let candidate = |addr: &str, id: u32| CandidateView {
        addr: ip(addr),
        port: 8080,
        id,
        chance: 1.0,
    };
    ExplainView {
        source: format!("{}:{}", flow.source, flow.source_port.unwrap_or_default()),
        vip: flow.vip,
        protocol: "TCP".into(),
        from: Whence::Outside,
        assumed: false,
        verdict: Verdict::Translated,
        service: Some("shop/web".into()),
        frontend_kind: Some("NodePort".into()),
        candidates: vec![candidate("10.244.2.6", 2)],
        source_address: Some(ip("192.0.2.4")),
        flow: Some(FlowView {
            backend: "10.244.2.6:8080".parse().expect("an address and port"),
            backend_id: 2,
            backend_state: "draining".into(),
            state: ConnState::Established,
            age_seconds: 12.0,
            idle_seconds: 0.5,
            source: Some("192.0.2.4:10017".parse().expect("an address and port")),
            resumed: false,
            generation: 4,
            generation_now: Some(6),
        }),
        next: vec![candidate("10.244.1.5", 1)],
        steps: vec![
            "the flow table has this tuple: established, begun 12 s ago".into(),
            "its packets go on to 10.244.2.6:8080".into(),
        ],
    }
}

/// One in every state that matters, of both families, from both sides.
fn conns() -> Vec<ConnView> {
    let at = |text: &str| text.parse().expect("an address and port");
    let of_web = |client: &str, frontend: &str, backend: &str, state: ConnState, age_seconds: f64| ConnView {
        origin: Origin::Outside,
        namespace: "shop".into(),
        service: "web".into(),
        protocol: "TCP".into(),
        client: at(client),
        workload: None,
        frontend: at(frontend),
        backend: Some(at(backend)),
        source: None,
        state,
        age_seconds,
        idle_seconds: Some(0.5),
        backend_id: 1,
        generation: Some(4),
        resumed: false,
    };
    let (port, first) = ("192.0.2.4:30080", "10.244.1.5:8080");
    vec![
        ConnView {
            origin: Origin::Node,
            workload: Some("shop/nginx".into()),
            idle_seconds: None,
            generation: None,
            ..of_web("10.244.1.9:40001", "10.96.7.7:80", first, ConnState::Established, 61.0)
        },
        ConnView {
            source: Some(at("192.0.2.4:10017")),
            ..of_web(
                "198.51.100.7:51000",
                port,
                "10.244.2.6:8080",
                ConnState::Established,
                12.0,
            )
        },
        of_web("198.51.100.7:51001", port, first, ConnState::SynSent, 4.0),
        ConnView {
            backend_id: 3,
            ..of_web(
                "[2001:db8::7]:51002",
                "[2001:db8:1::4]:30080",
                "[fd00::7]:8080",
                ConnState::HalfClosed,
                900.0,
            )
        },
        ConnView {
            service: "dns".into(),
            namespace: "default".into(),
            protocol: "UDP".into(),
            frontend: at("192.0.2.4:30053"),
            backend: Some(at("10.244.2.2:5353")),
            backend_id: 4,
            ..of_web("198.51.100.9:5000", port, first, ConnState::Answered, 2.0)
        },
        ConnView {
            // Its Service is gone.
            namespace: String::new(),
            service: String::new(),
            ..of_web("198.51.100.8:51003", port, first, ConnState::Closed, 100_000.0)
        },
    ]
}

fn founding_counts() -> ReuseCounts {
    ReuseCounts {
        connections: 1_000,
        same_backend: 640,
        moved: 0,
        stale_backend: 0,
        unknown_backend: 0,
        overlap: 2,
        intervals: [0, 0, 0, 0, 0, 0, 0, 10, 630, 0],
        interval_seconds: 57_000.0,
    }
}

fn node_facts() -> NodeFactsView {
    let setting = |name: &str, value: &str, advice: Option<&str>| SettingView {
        name: name.into(),
        value: Some(value.into()),
        advice: advice.map(str::to_owned),
    };
    NodeFactsView {
        node: Some("node-a".into()),
        kernel: "6.12.9".into(),
        mode: Mode::Observe,
        time: ago(0),
        since: ago(3_725),
        proxy: Some("kube-proxy (ipvs)".into()),
        proxy_trace: Some("the interface kube-ipvs0".into()),
        unseen: Vec::new(),
        settings: vec![
            setting(
                "net.ipv4.vs.conn_reuse_mode",
                "0",
                Some("set it to 1: a new connection is then a new choice"),
            ),
            setting("net.ipv4.ip_local_port_range", "32768 60999", None),
        ],
        events_lost: 0,
    }
}

fn endpoint_view(addr: &str, id: u32, count: u64) -> EndpointView {
    EndpointView {
        addr: ip(addr),
        port: 8080,
        id,
        state: Some(BackendState::Active),
        weight: 1,
        status: if count == 0 { "starved" } else { "fair" }.into(),
        excluded: None,
        born: (count == 0).then(|| ago(30)),
        window_connects: count,
        window_expected: 333.3,
        connects: count * 4,
        open: count / 100,
        proxy_weight: Some(1),
        programmed: Some(true),
    }
}

fn starved() -> DiagnosisView {
    let evenness = imbalance::by_weight(BACKENDS.map(|(_, _, count)| (1, count)));
    DiagnosisView {
        namespace: "shop".into(),
        service: "web".into(),
        set: "http/TCP/IPv4/cluster".into(),
        audience: AudienceView::Node,
        verdict: VerdictKind::Starved,
        sentences: vec![
            "[fd00::7]:8080 is starved: 0 of 333 expected new connections in 28 s (chance: 1e-145).".into(),
            "Cause port_reuse: 640 of 640 comparable reuses met the same endpoint; chance gives 33.3 %.".into(),
        ],
        advice: vec!["Set net.ipv4.vs.conn_reuse_mode to 1.".into()],
        starved: vec![StarvedView {
            addr: ip("fd00::7"),
            port: 8080,
            cause: "port_reuse".into(),
            because: vec!["640 of 640 comparable reuses met the same endpoint; chance gives 33.3 %".into()],
            view: "new".into(),
            expected: 333.3,
            seen: 0,
            probability: 1.6e-145,
            window_seconds: 28.0,
            since: ago(26),
            seconds_to_verdict: Some(4.1),
        }],
        endpoints: BACKENDS.map(|(addr, id, count)| endpoint_view(addr, id, count)).into(),
        new_connections: Some(evenness.into()),
        new_since_start: Some(evenness.into()),
        open_connections: None,
        attribution: AttributionView {
            connects: 1_012,
            attributed: 1_000,
            unknown: 12,
            outside: 120,
            direct: 0,
            earlier: 2,
        },
        reuse: Some(ServiceReuseView::new(
            "shop",
            "web",
            &founding_counts(),
            chance_of_same([1, 1, 1]),
        )),
        clients: Some(ClientsView {
            clients: 1,
            compared: 999,
            same_share: Some(0.497),
            expected_same_share: Some(0.5),
        }),
        failed: BTreeMap::from([("refused".to_owned(), 2), ("timed_out".to_owned(), 1)]),
        latency: Some(LatencyView {
            n: 1_000,
            p50_seconds: Some(0.000_5),
            p99_seconds: Some(0.005),
        }),
        ports: Some(PortUseView {
            client: ip("10.244.1.9"),
            destination: "10.96.7.7:80".into(),
            used: 196,
            range: 200,
            ratio: 0.98,
        }),
    }
}

fn idle() -> DiagnosisView {
    DiagnosisView {
        namespace: "default".into(),
        service: "dns".into(),
        set: "dns/UDP/IPv4/cluster".into(),
        audience: AudienceView::Node,
        verdict: VerdictKind::NoTraffic,
        sentences: vec!["No connection was seen since the agent started.".into()],
        advice: vec![],
        starved: vec![],
        endpoints: vec![],
        new_connections: None,
        new_since_start: None,
        open_connections: None,
        attribution: AttributionView::default(),
        reuse: None,
        clients: None,
        failed: BTreeMap::new(),
        latency: None,
        ports: None,
    }
}

fn events() -> Vec<EventView> {
    let at = |port| std::net::SocketAddr::new(ip("10.244.1.9"), port);
    vec![
        EventView::Connection {
            time: ago(3),
            namespace: "shop".into(),
            service: "web".into(),
            client: at(40_001),
            origin: Origin::Node,
            workload: Some("shop/nginx".into()),
            frontend: "10.96.7.7:80".parse().expect("an address and port"),
            protocol: "TCP".into(),
            backend: Some("10.244.1.5:8080".parse().expect("an address and port")),
            outcome: "established".into(),
            errno: None,
            connect_seconds: Some(0.000_072),
            duration_seconds: 0.013,
        },
        EventView::Reuse {
            time: ago(2),
            namespace: "shop".into(),
            service: "web".into(),
            client: at(40_001),
            origin: Origin::Node,
            interval_seconds: 61.5,
            outcome: "same_backend".into(),
        },
        EventView::Connection {
            time: ago(1),
            namespace: "shop".into(),
            service: "web".into(),
            client: std::net::SocketAddr::new(ip("198.51.100.7"), 40_002),
            origin: Origin::Outside,
            workload: None,
            frontend: "192.0.2.4:30080".parse().expect("an address and port"),
            protocol: "TCP".into(),
            backend: None,
            outcome: "refused".into(),
            errno: Some(111),
            connect_seconds: None,
            duration_seconds: 0.000_4,
        },
        EventView::Alarm {
            time: ago(0),
            namespace: "shop".into(),
            service: "web".into(),
            addr: ip("fd00::7"),
            port: 8080,
            raised: true,
            cause: "port_reuse".into(),
            expected: 333.3,
            seen: 0,
            probability: 1.6e-145,
            window_seconds: 28.0,
        },
    ]
}
