//! Whatever comes in, nothing panics and nothing that must not be dialled comes out.

use std::time::{Duration, SystemTime};

use k8s_openapi::{
    api::{core::v1 as core, discovery::v1 as discovery},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use proptest::{collection::vec, option, prelude::*};

use super::*;
use crate::model::Family;

fn converted(convert: impl FnOnce(&mut Converter<'_>) -> Converted) -> Converted {
    let mut names = Names::default();
    let mut converter = Converter {
        origin: names.share("test"),
        names: &mut names,
    };
    convert(&mut converter)
}

fn metadata(name: &str) -> ObjectMeta {
    ObjectMeta {
        name: Some(name.to_owned()),
        labels: Some([(LABEL_SERVICE_NAME.to_owned(), "web".to_owned())].into()),
        ..ObjectMeta::default()
    }
}

#[test]
fn a_slice_says_when_its_change_happened_or_nothing() {
    let changed_at = |text: Option<&str>| {
        let slice = discovery::EndpointSlice {
            address_type: "IPv4".to_owned(),
            endpoints: vec![],
            metadata: ObjectMeta {
                annotations: text.map(|text| [(ANNOTATION_CHANGED.to_owned(), text.to_owned())].into()),
                ..metadata("web-1")
            },
            ports: None,
        };
        let converted = converted(|converter| converter.slice(&slice));
        assert!(converted.problems.is_empty(), "{:?}", converted.problems);
        match converted.object {
            Some(Object::Slice(slice)) => slice.changed_at,
            other => panic!("{other:?}"),
        }
    };
    let expected = SystemTime::UNIX_EPOCH + Duration::from_millis(1_700_000_000_250);
    for text in ["2023-11-14T22:13:20.25Z", "2023-11-14T23:13:20.250000000+01:00"] {
        assert_eq!(changed_at(Some(text)), Some(expected), "{text}");
    }
    for text in [None, Some(""), Some("yesterday"), Some("2023-11-14")] {
        assert_eq!(changed_at(text), None, "{text:?}");
    }
}

/// Addresses of every sort, as text, and texts that are none.
fn any_address() -> impl Strategy<Value = String> {
    prop_oneof![
        any::<[u8; 4]>().prop_map(|bytes| IpAddr::from(bytes).to_string()),
        any::<[u8; 16]>().prop_map(|bytes| IpAddr::from(bytes).to_string()),
        (0..255_u8).prop_map(|last| format!("127.0.0.{last}")),
        (0..255_u8).prop_map(|last| format!("169.254.0.{last}")),
        any::<u16>().prop_map(|last| format!("fe80::{last:x}")),
        any::<[u8; 4]>().prop_map(|bytes| format!("::ffff:{}", std::net::Ipv4Addr::from(bytes))),
        ".{0,20}",
    ]
}

fn assert_dialable(addr: IpAddr) {
    assert!(
        !addr.is_loopback() && !addr.is_unspecified() && !addr.is_multicast(),
        "{addr}"
    );
    match addr {
        IpAddr::V4(v4) => assert!(
            !v4.is_link_local() && !v4.is_broadcast() && v4.octets()[0] != 0,
            "{addr}"
        ),
        IpAddr::V6(v6) => assert!(!v6.is_unicast_link_local() && v6.to_ipv4_mapped().is_none(), "{addr}"),
    }
}

proptest! {
    #[test]
    fn hostile_slices_lose_their_bad_parts_alone(
        addresses in vec(vec(any_address(), 0..3), 0..40),
        ports in vec((option::of(any::<i32>()), option::of(".{0,70}"), option::of("TCP|UDP|SCTP|.{0,5}")), 0..5),
        family in "IPv4|IPv6|FQDN|.{0,4}",
        weight in option::of("[0-9]{0,4}|.{0,9}"),
        name in "[a-z]{1,5}|.{0,300}",
    ) {
        let endpoints: Vec<discovery::Endpoint> = addresses
            .iter()
            .map(|addresses| discovery::Endpoint { addresses: addresses.clone(), ..discovery::Endpoint::default() })
            .collect();
        let slice = discovery::EndpointSlice {
            address_type: family.clone(),
            endpoints,
            metadata: ObjectMeta {
                annotations: weight.map(|weight| [(ANNOTATION_WEIGHT.to_owned(), weight)].into()),
                ..metadata(&name)
            },
            ports: Some(
                ports
                    .into_iter()
                    .map(|(port, name, protocol)| discovery::EndpointPort { app_protocol: None, name, port, protocol })
                    .collect(),
            ),
        };
        let converted = converted(|converter| converter.slice(&slice));
        prop_assert!(converted.problems.len() <= MOST_PROBLEMS + 1);
        if let Some(Object::Slice(slice)) = converted.object {
            prop_assert!(slice.weight <= MAX_WEIGHT);
            for endpoint in &slice.endpoints {
                assert_dialable(endpoint.addr);
                prop_assert_eq!(endpoint.addr.is_ipv6(), family == "IPv6");
            }
        } else {
            prop_assert!(!converted.problems.is_empty() || family == "FQDN", "refused without a word");
        }
    }

    #[test]
    fn hostile_services_lose_their_bad_parts_alone(
        cluster_ips in vec(any_address(), 0..4),
        external_ips in vec(any_address(), 0..4),
        ingress in vec((option::of(any_address()), option::of("VIP|Proxy|.{0,4}")), 0..4),
        ranges in vec(".{0,20}|[0-9./]{0,12}", 0..4),
        ports in vec((any::<i32>(), option::of(any::<i32>()), option::of("TCP|UDP|.{0,5}")), 0..5),
        timeout in option::of(any::<i32>()),
    ) {
        let service = core::Service {
            metadata: metadata("web"),
            spec: Some(core::ServiceSpec {
                cluster_ips: Some(cluster_ips),
                external_ips: Some(external_ips),
                load_balancer_source_ranges: Some(ranges),
                ports: Some(
                    ports
                        .into_iter()
                        .map(|(port, node_port, protocol)| core::ServicePort {
                            port,
                            node_port,
                            protocol,
                            ..core::ServicePort::default()
                        })
                        .collect(),
                ),
                session_affinity: Some("ClientIP".to_owned()),
                session_affinity_config: Some(core::SessionAffinityConfig {
                    client_ip: Some(core::ClientIPConfig { timeout_seconds: timeout }),
                }),
                ..core::ServiceSpec::default()
            }),
            status: Some(core::ServiceStatus {
                load_balancer: Some(core::LoadBalancerStatus {
                    ingress: Some(
                        ingress
                            .into_iter()
                            .map(|(ip, ip_mode)| core::LoadBalancerIngress { ip, ip_mode, ..Default::default() })
                            .collect(),
                    ),
                }),
                ..core::ServiceStatus::default()
            }),
        };
        let converted = converted(|converter| converter.service(&service));
        if let Some(Object::Service(service)) = converted.object {
            let addresses = service.cluster_ips.iter().chain(&service.external_ips).copied();
            for addr in addresses.chain(service.load_balancer.iter().map(|lb| lb.addr)) {
                assert_dialable(addr);
            }
            let seconds = service.affinity.map(|affinity| affinity.seconds);
            prop_assert!(seconds.is_some_and(|seconds| (1..=86_400).contains(&seconds)));
        } else {
            prop_assert!(!converted.problems.is_empty(), "refused without a word");
        }
    }
}

#[test]
fn c14_source_ranges_admit_nobody_by_mistake() {
    let with = |ranges: Option<Vec<&str>>| {
        let service = core::Service {
            metadata: metadata("web"),
            spec: Some(core::ServiceSpec {
                load_balancer_source_ranges: ranges.map(|ranges| ranges.into_iter().map(str::to_owned).collect()),
                ..core::ServiceSpec::default()
            }),
            status: None,
        };
        match converted(|converter| converter.service(&service)).object {
            Some(Object::Service(service)) => [Family::V4, Family::V6].map(|family| {
                let ranges = service.source_ranges.of(family)?;
                Some(ranges.iter().map(ToString::to_string).collect::<Vec<_>>().join(" "))
            }),
            other => panic!("a Service is wanted, found {other:?}"),
        }
    };
    let said = |v4: Option<&str>, v6: Option<&str>| [v4.map(str::to_owned), v6.map(str::to_owned)];
    assert_eq!(with(None), said(None, None), "everybody");
    assert_eq!(with(Some(vec![])), said(None, None), "everybody");
    assert_eq!(
        with(Some(vec![" 10.1.2.3/8 ", "192.0.2.7/32"])),
        said(Some("10.0.0.0/8 192.0.2.7/32"), None),
        "a family without a range is not limited"
    );
    assert_eq!(with(Some(vec!["fd00::/8", "ten"])), said(Some(""), Some("fd00::/8")));
    assert_eq!(
        with(Some(vec!["10.0.0.0/8", "0.0.0.0/0", "fd00::/8"])),
        said(None, Some("fd00::/8")),
        "/0 is everybody of its family"
    );
    assert_eq!(
        with(Some(vec!["ten"])),
        said(Some(""), Some("")),
        "nobody, rather than everybody"
    );
    assert_eq!(with(Some(vec!["10.0.0.0/33"])), said(Some(""), None));
    assert_eq!(
        with(Some(vec!["10.0.0.0/8", "fd00::/129"])),
        said(Some("10.0.0.0/8"), Some(""))
    );
}

#[test]
fn a_node_is_read() {
    let node = core::Node {
        metadata: ObjectMeta {
            labels: Some([(LABEL_ZONE.to_owned(), "a".to_owned())].into()),
            ..metadata("node-1")
        },
        spec: Some(core::NodeSpec {
            taints: Some(vec![core::Taint {
                key: TAINT_AUTOSCALER.to_owned(),
                effect: "NoSchedule".to_owned(),
                ..core::Taint::default()
            }]),
            ..core::NodeSpec::default()
        }),
        status: None,
    };
    let Some(Object::Node(node)) = converted(|converter| converter.node(&node)).object else {
        panic!("a Node is wanted");
    };
    assert_eq!(node.zone.as_deref(), Some("a"));
    assert!(node.leaving, "C22: tainted by the autoscaler");
}

fn pod(object: serde_json::Value) -> Converted {
    let object: PodObject = serde_json::from_value(object).expect("a Pod");
    converted(|converter| converter.pod(&object))
}

/// A Pod of an owner, made at 2024-05-01T10:20:30Z (28,575,980 minutes since the epoch).
fn owned(kind: &str, name: &str, labels: &serde_json::Value) -> serde_json::Value {
    serde_json::json!({
        "metadata": {
            "name": "a-pod", "namespace": "shop", "labels": labels, "creationTimestamp": "2024-05-01T10:20:30Z",
            "ownerReferences": [
                {"apiVersion": "v1", "kind": "ConfigMap", "name": "by-the-way", "uid": "1"},
                {"apiVersion": "v1", "kind": kind, "name": name, "uid": "2", "controller": true},
            ],
        },
        "status": {"podIP": "10.0.0.1"},
    })
}

#[test]
fn a_pods_workload_is_what_people_wrote() {
    let hash = serde_json::json!({"pod-template-hash": "6d4cf56db6"});
    let rollout = serde_json::json!({"rollouts-pod-template-hash": "6d4cf56db6"});
    let (none, empty) = (serde_json::json!({}), serde_json::json!({"pod-template-hash": ""}));
    for (kind, name, labels, workload, why) in [
        (
            "ReplicaSet",
            "web-6d4cf56db6",
            &hash,
            "Deployment web",
            "the label tells the hash",
        ),
        (
            "ReplicaSet",
            "web-a-6d4cf56db6",
            &hash,
            "Deployment web-a",
            "names have dashes too",
        ),
        (
            "ReplicaSet",
            "web-6d4cf56db6",
            &rollout,
            "Rollout web",
            "so do rollouts",
        ),
        (
            "ReplicaSet",
            "web-front",
            &hash,
            "ReplicaSet web-front",
            "the hash is another one's",
        ),
        (
            "ReplicaSet",
            "web6d4cf56db6",
            &hash,
            "ReplicaSet web6d4cf56db6",
            "no dash before it",
        ),
        (
            "ReplicaSet",
            "-6d4cf56db6",
            &hash,
            "ReplicaSet -6d4cf56db6",
            "nothing before it",
        ),
        ("ReplicaSet", "web-", &empty, "ReplicaSet web-", "no hash at all"),
        (
            "ReplicaSet",
            "web-6d4cf56db6",
            &none,
            "ReplicaSet web-6d4cf56db6",
            "made by hand",
        ),
        ("Job", "sweep-28575980", &none, "CronJob sweep", "this very minute"),
        (
            "Job",
            "sweep-all-28575000",
            &none,
            "CronJob sweep-all",
            "started late, or again",
        ),
        (
            "Job",
            "sweep-28575990",
            &none,
            "Job sweep-28575990",
            "a moment yet to come",
        ),
        ("Job", "sweep-20240501", &none, "Job sweep-20240501", "a date"),
        ("Job", "sweep-2857598", &none, "Job sweep-2857598", "too short"),
        ("Job", "sweep-+2857598", &none, "Job sweep-+2857598", "a sign"),
        ("Job", "-28575980", &none, "Job -28575980", "nothing before it"),
        ("Job", "import", &none, "Job import", "a plain one"),
        ("StatefulSet", "db", &none, "StatefulSet db", "as it is"),
        ("DaemonSet", "dns", &none, "DaemonSet dns", "as it is"),
        ("Tenant", "minio", &none, "Tenant minio", "a kind of somebody's own"),
    ] {
        let Some(Object::Pod(pod)) = pod(owned(kind, name, labels)).object else {
            panic!("a Pod is wanted for {name}");
        };
        assert_eq!(
            format!("{} {}", pod.workload.kind, pod.workload.name),
            workload,
            "{why}"
        );
        assert_eq!(pod.name, ObjectName::new("shop", "a-pod"));
    }

    let mut unborn = owned("Job", "sweep-28575980", &none);
    unborn["metadata"]["creationTimestamp"] = serde_json::Value::Null;
    let mut unled = owned("StatefulSet", "db", &none);
    unled["metadata"]["ownerReferences"][1]["controller"] = serde_json::Value::Null;
    for (object, kind, name) in [(unborn, "Job", "sweep-28575980"), (unled, "Pod", "a-pod")] {
        let Some(Object::Pod(pod)) = pod(object).object else {
            panic!("a Pod is wanted for {name}");
        };
        assert_eq!((&*pod.workload.kind, &*pod.workload.name), (kind, name));
    }
}

#[test]
fn a_pod_without_an_address_of_its_own_is_no_client() {
    let with = |spec: serde_json::Value, status: serde_json::Value| {
        let converted = pod(serde_json::json!({"metadata": {"name": "a-pod"}, "spec": spec, "status": status}));
        assert!(
            converted.key.is_some(),
            "it is named, so that what was known of it goes"
        );
        let said = converted
            .problems
            .iter()
            .map(|problem| problem.field.clone())
            .collect::<Vec<_>>();
        let ips = converted.object.map(|object| match object {
            Object::Pod(pod) => (
                pod.ips.iter().map(ToString::to_string).collect::<Vec<_>>(),
                pod.host_network,
            ),
            other => panic!("a Pod is wanted, found {other:?}"),
        });
        (ips.map(|(ips, host)| (ips.join(" "), host)), said.join(" "))
    };
    let (null, both) = (
        serde_json::Value::Null,
        serde_json::json!({"podIP": "10.0.0.1", "podIPs": [{"ip": "10.0.0.1"}, {"ip": "fd00::1"}]}),
    );
    let known = |ips: &str, host: bool| Some((ips.to_owned(), host));
    assert_eq!(
        with(null.clone(), both.clone()),
        (known("10.0.0.1 fd00::1", false), String::new())
    );
    for phase in ["Pending", "Running", "Unknown"] {
        let status = serde_json::json!({"phase": phase, "podIP": "10.0.0.1"});
        assert_eq!(with(null.clone(), status).0, known("10.0.0.1", false), "{phase}");
    }
    for phase in ["Succeeded", "Failed"] {
        let mut ended = both.clone();
        ended["phase"] = phase.into();
        assert_eq!(with(null.clone(), ended), (None, String::new()), "{phase}");
    }
    for nothing in [
        null.clone(),
        serde_json::json!({}),
        serde_json::json!({"podIP": "", "podIPs": []}),
    ] {
        assert_eq!(with(null.clone(), nothing), (None, String::new()));
    }
    let bad = serde_json::json!({"podIPs": [{"ip": "127.0.0.1"}, {"ip": "10.0.0.1"}, {}]});
    assert_eq!(
        with(null.clone(), bad),
        (known("10.0.0.1", false), "status.podIPs[0].ip".to_owned())
    );
    assert_eq!(
        with(null, serde_json::json!({"podIP": "ten"})),
        (None, "status.podIP".to_owned())
    );
    let host = serde_json::json!({"hostNetwork": true, "nodeName": "node-1"});
    assert_eq!(with(host, both).0, known("10.0.0.1 fd00::1", true));
}

#[test]
fn long_texts_are_quoted_short() {
    assert_eq!(quote("a\"b"), r#""a\"b""#);
    let long = "ä".repeat(1000);
    assert!(quote(&long).len() < 200);
}
