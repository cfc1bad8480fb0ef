//! Properties of the fold: the result depends on the objects alone, and a step touches no more than it must.
//!
//! The contract's rows are checked from manifests in the test package (`contract_desired`).

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, Ipv6Addr},
};

use proptest::{collection::vec, option, prelude::*, sample::select, sample::subsequence};

use super::*;
use crate::model::{Affinity, Endpoint, Hints, LoadBalancerAddress, ServicePort, SlicePort, SourceRanges};

fn config() -> Config {
    Config {
        node_name: "node-1".to_owned(),
        proxy_name: None,
        external_ips: true,
        node_port_addresses: NodePortAddresses::All,
        awaited: vec![Kind::Service, Kind::Slice, Kind::Node, Kind::Addresses],
    }
}

fn port(number: u16) -> NonZeroU16 {
    NonZeroU16::new(number).expect("not zero")
}

/// Few addresses, so that Services clash.
fn address(family: Family, last: u8) -> IpAddr {
    match family {
        Family::V4 => Ipv4Addr::new(10, 96, 0, last).into(),
        Family::V6 => Ipv6Addr::new(0xfd00, 0x96, 0, 0, 0, 0, 0, u16::from(last)).into(),
    }
}

fn any_source_ranges() -> impl Strategy<Value = SourceRanges> {
    let of = |texts: [&str; 2]| {
        let ranges: Vec<Cidr> = texts.iter().map(|text| text.parse().expect("a range")).collect();
        option::of(subsequence(ranges, 0..=2)).prop_map(|ranges| ranges.map(Into::into))
    };
    (of(["10.0.0.0/8", "192.0.2.7/32"]), of(["fd00::/8", "2001:db8::/32"])).prop_map(|(v4, v6)| SourceRanges { v4, v6 })
}

fn any_service() -> impl Strategy<Value = Arc<Service>> {
    let identity = (
        0..5_u8,
        option::of(0..3_i64),
        option::weighted(0.1, Just("other")),
        prop::bool::weighted(0.1),
    );
    let kinds = [
        ServiceType::ClusterIp,
        ServiceType::NodePort,
        ServiceType::LoadBalancer,
        ServiceType::ExternalName,
    ];
    let spec = (
        select(kinds.to_vec()),
        subsequence(vec![Family::V4, Family::V6], 0..=2),
        1..4_u8,
        vec(1..8_u8, 0..2),
        option::of((1..8_u8, any::<bool>())),
        subsequence(
            vec![
                ("http", Protocol::Tcp, 80),
                ("", Protocol::Tcp, 81),
                ("dns", Protocol::Udp, 80),
            ],
            0..=3,
        ),
        any::<(bool, bool, bool)>(),
        (any::<bool>(), option::of(1..4_u16), any_source_ranges()),
    );
    (identity, spec).prop_map(|((name, created, proxy_name, headless_label), spec)| {
        let (service_type, families, cluster_ip, external, lb, ports, bits, outside) = spec;
        let (affinity, internal_local, node_ports) = bits;
        let (external_local, health_check, source_ranges) = outside;
        Arc::new(Service {
            name: ObjectName::new("default", &format!("svc-{name}")),
            origin: "test".into(),
            created,
            proxy_name: proxy_name.map(Into::into),
            headless_label,
            service_type,
            cluster_ips: families.iter().map(|&family| address(family, cluster_ip)).collect(),
            external_ips: external.iter().map(|&last| address(Family::V4, last)).collect(),
            load_balancer: lb
                .iter()
                .map(|&(last, vip)| LoadBalancerAddress {
                    addr: address(Family::V6, last),
                    vip,
                })
                .collect(),
            source_ranges,
            ports: ports
                .into_iter()
                .map(|(name, protocol, number)| ServicePort {
                    name: name.into(),
                    protocol,
                    port: port(number),
                    node_port: node_ports.then(|| port(30000 + number)),
                })
                .collect(),
            affinity: affinity.then_some(Affinity { seconds: 60 }),
            internal_local,
            external_local,
            health_check_node_port: health_check.map(|number| port(31_000 + number)),
        })
    })
}

fn any_endpoint(family: Family) -> impl Strategy<Value = Endpoint> {
    let place = (option::of(0..3_u8), option::of((0..3_u8, 0..3_u8)));
    (1..6_u8, any::<(bool, bool, bool)>(), place).prop_map(
        move |(last, (ready, serving, terminating), (node, hints))| {
            let addr = match family {
                Family::V4 => Ipv4Addr::new(10, 0, 0, last).into(),
                Family::V6 => Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, u16::from(last)).into(),
            };
            Endpoint {
                addr,
                ready,
                serving,
                terminating,
                node: node.map(|node| format!("node-{node}").into()),
                zone: None,
                hints: hints.map(|(zone, node)| {
                    Arc::new(Hints {
                        zones: [format!("zone-{zone}").into()].into(),
                        nodes: [format!("node-{node}").into()].into(),
                    })
                }),
            }
        },
    )
}

fn any_slice() -> impl Strategy<Value = Arc<Slice>> {
    let families = select(&[Family::V4, Family::V6][..]);
    families
        .prop_flat_map(|family| {
            let ports = vec![
                ("http", Protocol::Tcp, 8080),
                ("", Protocol::Tcp, 8081),
                ("dns", Protocol::Udp, 5353),
            ];
            let ports = subsequence(ports, 0..=3);
            (
                Just(family),
                0..6_u8,
                0..5_u8,
                0..3_u16,
                ports,
                vec(any_endpoint(family), 0..5),
            )
        })
        .prop_map(|(family, name, service, weight, ports, endpoints)| {
            Arc::new(Slice {
                name: ObjectName::new("default", &format!("slice-{name}")),
                service: format!("svc-{service}").into(),
                family,
                weight,
                changed_at: None,
                ports: ports
                    .into_iter()
                    .map(|(name, protocol, number)| SlicePort {
                        name: name.into(),
                        protocol,
                        port: port(number),
                    })
                    .collect(),
                endpoints: endpoints.into(),
            })
        })
}

fn any_node() -> impl Strategy<Value = Arc<Node>> {
    (1..3_u8, option::of(0..3_u8), subsequence(vec![4_u8, 5, 6, 7], 0..=2)).prop_map(|(name, zone, own)| {
        Arc::new(Node {
            name: format!("node-{name}").into(),
            zone: zone.map(|zone| format!("zone-{zone}").into()),
            internal_ips: own.into_iter().map(|last| address(Family::V4, last)).collect(),
            external_ips: Box::default(),
            leaving: false,
        })
    })
}

fn any_object() -> impl Strategy<Value = Object> {
    prop_oneof![
        4 => any_service().prop_map(Object::Service),
        5 => any_slice().prop_map(Object::Slice),
        1 => any_node().prop_map(Object::Node),
    ]
}

#[derive(Clone, Debug)]
enum Step {
    Apply(Object),
    Delete(Object),
    Replace(Kind, Vec<Object>),
    Addresses(Vec<u8>),
}

fn any_step() -> impl Strategy<Value = Step> {
    let kinds = select(&[Kind::Service, Kind::Slice, Kind::Node][..]);
    prop_oneof![
        10 => any_object().prop_map(Step::Apply),
        4 => any_object().prop_map(Step::Delete),
        1 => (kinds, vec(any_object(), 0..8)).prop_map(|(kind, objects)| Step::Replace(kind, objects)),
        1 => subsequence(vec![4_u8, 5, 6, 7], 0..=3).prop_map(Step::Addresses),
    ]
}

/// The objects as they stand, kept in the plainest way.
#[derive(Default)]
struct World {
    objects: BTreeMap<ObjectKey, Object>,
    addresses: NodeAddresses,
}

impl World {
    /// Takes the step; gives it as the fold gets it.
    fn take(&mut self, step: Step) -> Update {
        match step {
            Step::Apply(object) => {
                self.objects.insert(object.key(), object.clone());
                Update::Apply(object)
            }
            Step::Delete(object) => {
                self.objects.remove(&object.key());
                Update::Delete(object.key())
            }
            Step::Replace(kind, objects) => {
                let objects: BTreeMap<ObjectKey, Object> = objects
                    .into_iter()
                    .map(|object| (object.key(), object))
                    .filter(|(key, _)| key.kind == kind)
                    .collect();
                self.objects.retain(|key, _| key.kind != kind);
                self.objects.extend(objects.clone());
                Update::Replace(content(kind, objects.into_values()))
            }
            Step::Addresses(own) => {
                self.addresses.addresses = own.into_iter().map(|last| address(Family::V4, last)).collect();
                Update::Addresses(self.addresses.clone())
            }
        }
    }
}

fn content(kind: Kind, objects: impl Iterator<Item = Object>) -> Content {
    let (mut services, mut slices, mut nodes) = (Vec::new(), Vec::new(), Vec::new());
    for object in objects {
        match object {
            Object::Service(service) => services.push(service),
            Object::Slice(slice) => slices.push(slice),
            Object::Node(node) => nodes.push(node),
            Object::Pod(_) => unreachable!("no strategy makes a Pod"),
        }
    }
    match kind {
        Kind::Service => Content::Services(services),
        Kind::Slice => Content::Slices(slices),
        _ => Content::Nodes(nodes),
    }
}

type Outcome = (BTreeMap<ObjectName, DesiredService>, Vec<Problem>, Vec<HealthCheck>);

fn outcome(desired: &Desired) -> Outcome {
    let services = desired
        .services()
        .map(|service| (service.name.clone(), service))
        .collect();
    (services, desired.problems(), desired.health_checks())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// However the objects came to be, and in whatever order, the fold says the same; and it names what it changes.
    #[test]
    fn the_result_depends_on_the_objects_alone(
        steps in vec(any_step(), 1..60),
        order in any::<prop::sample::Index>(),
    ) {
        let mut world = World::default();
        let mut desired = Desired::new(config());
        for step in steps {
            let (before, ..) = outcome(&desired);
            let changed = desired.apply(world.take(step.clone()));
            let (after, ..) = outcome(&desired);
            let names: BTreeSet<&ObjectName> = before.keys().chain(after.keys()).collect();
            for name in names {
                prop_assert!(
                    before.get(name) == after.get(name) || changed.services.contains(name),
                    "{step:?} changed {name} and did not say so"
                );
            }
        }

        let mut updates: Vec<Update> = world.objects.into_values().map(Update::Apply).collect();
        updates.push(Update::Addresses(world.addresses));
        let turn = order.index(updates.len());
        updates.rotate_left(turn);
        if turn % 2 == 1 {
            updates.reverse();
        }
        let mut fresh = Desired::new(config());
        for update in updates {
            fresh.apply(update);
        }
        prop_assert_eq!(outcome(&desired), outcome(&fresh));
    }

    /// What the kernel side relies on.
    #[test]
    fn what_is_wanted_is_well_formed(steps in vec(any_step(), 1..40)) {
        let mut world = World::default();
        let mut desired = Desired::new(config());
        for step in steps {
            desired.apply(world.take(step));
        }
        let mut owned = BTreeSet::new();
        for service in desired.services() {
            prop_assert!(service.sets.is_sorted_by(|a, b| a.name < b.name), "sets are sorted, each once");
            prop_assert!(service.frontends.is_sorted_by_key(|f| (f.addr, f.port, f.protocol)));
            for frontend in &service.frontends {
                prop_assert!(owned.insert((frontend.addr, frontend.port, frontend.protocol)), "two owners");
                let set = service.sets.get(frontend.set).expect("the set exists");
                prop_assert_eq!(set.name.ipv6, frontend.addr.is_ipv6());
                prop_assert_eq!(set.name.protocol, frontend.protocol);
                prop_assert_eq!(frontend.outside.is_some(), frontend.kind != FrontendKind::ClusterIp);
                let Some(outside) = frontend.outside else { continue };
                let set = service.sets.get(outside.set).expect("the set exists");
                prop_assert_eq!((set.name.ipv6, set.name.protocol), (frontend.addr.is_ipv6(), frontend.protocol));
                let local = desired.input(&service.name).expect("it is served").external_local;
                prop_assert_eq!(set.name.scope == Scope::Local, local);
                prop_assert_eq!(outside.masquerade, !local, "the source is preserved where endpoints are local (C17)");
                prop_assert!(outside.when_empty == WhenEmptyOutside::Refuse || local);
                prop_assert!(!outside.source_ranges || frontend.kind == FrontendKind::LoadBalancer);
            }
            let limited = |ipv6: bool| {
                let limited = |f: &Frontend| f.addr.is_ipv6() == ipv6 && f.outside.is_some_and(|o| o.source_ranges);
                service.frontends.iter().any(limited)
            };
            prop_assert!(service.sources.is_sorted_by(|a, b| a < b), "each range once");
            prop_assert!(service.sources.iter().all(|range| limited(range.is_ipv6())), "ranges that nobody asks for");
            for (i, set) in service.sets.iter().enumerate() {
                prop_assert!(service.frontends.iter().any(|frontend| {
                    frontend.set == i || frontend.outside.is_some_and(|outside| outside.set == i)
                }), "a set that nobody names");
                prop_assert!(set.members.is_sorted_by(|a, b| (a.addr, a.port) < (b.addr, b.port)));
                prop_assert!(set.draining.is_sorted_by(|a, b| (a.addr, a.port) < (b.addr, b.port)));
                for member in &set.members {
                    prop_assert_eq!(member.addr.is_ipv6(), set.name.ipv6);
                    prop_assert!(!set.draining.contains(member), "usable and draining at once");
                    let protocol = set.name.protocol;
                    prop_assert!(desired.holds_endpoint(&service.name, member.addr, member.port, protocol));
                }
            }
        }
    }
}

/// What clients on the node meet: each frontend with its set, and nothing of what is outside.
fn inside(desired: &Desired) -> BTreeMap<ObjectName, Vec<(Frontend, BackendSet)>> {
    let of = |service: &DesiredService| {
        let frontends = service.frontends.iter().map(|frontend| {
            let set = service.sets[frontend.set].clone();
            let frontend = Frontend {
                set: 0,
                outside: None,
                ..frontend.clone()
            };
            (frontend, set)
        });
        frontends.collect()
    };
    desired
        .services()
        .map(|service| (service.name.clone(), of(&service)))
        .collect()
}

proptest! {
    /// C10: the external policy, source ranges and health checks are for those outside.
    #[test]
    fn c10_nothing_changes_inside_by_what_is_said_of_outside(objects in vec(any_object(), 1..20)) {
        let (mut desired, mut plain) = (Desired::new(config()), Desired::new(config()));
        for object in objects {
            desired.apply(Update::Apply(object.clone()));
            plain.apply(Update::Apply(match object {
                Object::Service(service) => Object::Service(Arc::new(Service {
                    external_local: false,
                    source_ranges: SourceRanges::default(),
                    health_check_node_port: None,
                    ..(*service).clone()
                })),
                other => other,
            }));
        }
        prop_assert_eq!(inside(&desired), inside(&plain));
    }

    /// C21: who has a port is a load balancer's Service of ours with the external policy Local, and each port is one's.
    #[test]
    fn c21_health_checks_are_for_local_load_balancers(objects in vec(any_object(), 1..30)) {
        let mut desired = Desired::new(config());
        for object in objects {
            desired.apply(Update::Apply(object));
        }
        let checks = desired.health_checks();
        prop_assert!(checks.is_sorted_by(|a, b| a.port < b.port), "each port once");
        for check in &checks {
            let service = desired.input(&check.service).expect("it is there");
            prop_assert!(desired.names().any(|name| *name == check.service), "it is ours");
            prop_assert_eq!(service.service_type, ServiceType::LoadBalancer);
            prop_assert!(service.external_local);
            prop_assert_eq!(service.health_check_node_port, Some(check.port));
        }
        // Whoever wants a port and has none is told so.
        let wanting = desired.names().filter(|name| {
            let service = desired.input(name).expect("it is there");
            service.service_type == ServiceType::LoadBalancer
                && service.external_local
                && service.health_check_node_port.is_some()
        });
        let problems = desired.problems();
        for name in wanting {
            let told = problems.iter().any(|problem| {
                problem.field == "spec.healthCheckNodePort" && problem.object == format!("Service {name}")
            });
            prop_assert_eq!(told, checks.iter().all(|check| check.service != *name));
        }
    }
}

/// Where node ports are served in ranges alone, health checks are answered there alone, and never at an address that the
/// host has not.
#[test]
fn c21_health_checks_are_answered_where_node_ports_are() {
    let addresses = |config| {
        let mut desired = Desired::new(config);
        desired.apply(Update::Apply(Object::Node(Arc::new(Node {
            name: "node-1".into(),
            zone: None,
            internal_ips: [address(Family::V4, 4)].into(),
            external_ips: ["10.96.9.9".parse().unwrap()].into(),
            leaving: false,
        }))));
        desired.apply(Update::Addresses(NodeAddresses {
            addresses: [address(Family::V4, 4), address(Family::V6, 5)].into(),
        }));
        desired.health_check_addresses()
    };
    assert_eq!(addresses(config()), None);
    let ranges = NodePortAddresses::Ranges(vec!["10.96.0.0/12".parse().unwrap()]);
    let in_ranges = Config {
        node_port_addresses: ranges,
        ..config()
    };
    assert_eq!(addresses(in_ranges), Some(vec![address(Family::V4, 4)]));
}

#[test]
fn one_slice_touches_its_own_service_alone_and_the_same_again_touches_nothing() {
    let mut desired = Desired::new(config());
    let service = |i: u32| {
        Arc::new(Service {
            name: ObjectName::new("default", &format!("svc-{i}")),
            origin: "test".into(),
            created: None,
            proxy_name: None,
            headless_label: false,
            service_type: ServiceType::ClusterIp,
            cluster_ips: [IpAddr::V4((0x0a60_0000 + i).into())].into(),
            external_ips: Box::default(),
            load_balancer: Box::default(),
            source_ranges: SourceRanges::default(),
            ports: [ServicePort {
                name: "http".into(),
                protocol: Protocol::Tcp,
                port: port(80),
                node_port: None,
            }]
            .into(),
            affinity: None,
            internal_local: false,
            external_local: false,
            health_check_node_port: None,
        })
    };
    let slice = |i: u32, ready: bool| {
        Arc::new(Slice {
            name: ObjectName::new("default", &format!("svc-{i}-a")),
            service: format!("svc-{i}").into(),
            family: Family::V4,
            weight: 1,
            changed_at: None,
            ports: [SlicePort {
                name: "http".into(),
                protocol: Protocol::Tcp,
                port: port(8080),
            }]
            .into(),
            endpoints: [Endpoint {
                addr: IpAddr::V4((0x0a00_0000 + i).into()),
                ready,
                serving: true,
                terminating: false,
                node: None,
                zone: None,
                hints: None,
            }]
            .into(),
        })
    };
    let all: Vec<Arc<Slice>> = (0..1000).map(|i| slice(i, true)).collect();
    assert!(
        desired.apply(Update::Replace(Content::Slices(all.clone()))).is_empty(),
        "no Service is there yet"
    );
    let changed = desired.apply(Update::Replace(Content::Services((0..1000).map(service).collect())));
    assert_eq!(changed.services.len(), 1000);
    assert!(
        desired.apply(Update::Replace(Content::Slices(all))).is_empty(),
        "a list that says nothing new"
    );
    let changed = desired.apply(Update::Apply(Object::Slice(slice(7, false))));
    assert_eq!(
        changed.services.into_iter().collect::<Vec<_>>(),
        [ObjectName::new("default", "svc-7")]
    );
    assert!(desired.apply(Update::Apply(Object::Slice(slice(7, false)))).is_empty());
}

#[test]
fn c24_synced_means_every_awaited_kind() {
    let mut desired = Desired::new(config());
    for kind in [Kind::Service, Kind::Slice, Kind::Node] {
        assert!(!desired.synced());
        desired.apply(Update::Synced(kind));
        assert!(desired.synced_kind(kind));
    }
    assert!(!desired.synced(), "the host's own addresses are not known yet");
    desired.apply(Update::Addresses(NodeAddresses::default()));
    assert!(desired.synced());
}
