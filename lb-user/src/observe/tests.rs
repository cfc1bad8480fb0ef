use super::*;
use crate::model::{ObjectName, Update};
use lb_common::event::kind;

fn record(port: u16, backend_id: u32, start_ns: u64, end_ns: u64) -> ConnRecord {
    ConnRecord {
        kind: kind::CONNECTION,
        errno: 0,
        start_ns,
        established_ns: start_ns + 70_000,
        end_ns,
        netns_cookie: 1,
        client: Addr::from_v4(1),
        vip: Addr::from_v4(2),
        service_id: 1,
        backend_id,
        client_port: Port::new(port),
        vip_port: Port::new(80),
        proto: 6,
        outcome: outcome::ESTABLISHED,
        marks: 0,
    }
}

#[test]
fn reuse_is_told_by_backend_and_by_whether_the_earlier_one_is_still_usable() {
    let usable = UsableBackends::new(128);
    usable.set(1, true);
    usable.set(65, true);
    let mut seen = Observation::new(120_000_000_000, Arc::default());
    let second = 1_000_000_000;
    seen.connection(&record(4000, 1, second, 2 * second), &usable);
    seen.connection(&record(4000, 1, 3 * second, 4 * second), &usable);
    seen.connection(&record(4000, 65, 5 * second, 6 * second), &usable);
    usable.set(65, false);
    seen.connection(&record(4000, 1, 7 * second, 8 * second), &usable);
    seen.connection(&record(4001, 1, 7 * second, 8 * second), &usable);
    seen.advance(100 * second, &usable);
    let total = seen.reuse().total();
    assert_eq!((total.same_backend, total.moved, total.stale_backend), (1, 1, 1));
    let latencies = seen.latencies(1).expect("five samples");
    assert_eq!(latencies.count(), 5);
    assert_eq!(
        latencies.cumulative().next(),
        Some((CONNECT_EDGES[0], 5)),
        "70 µs lies below the first edge"
    );
    seen.keep_services(|_| false);
    assert!(seen.latencies(1).is_none());
}

#[test]
fn connections_that_pass_through_are_tuple_uses_as_well() {
    let (usable, directory) = (UsableBackends::new(128), Arc::new(Directory::default()));
    usable.set(9, true);
    let backend = FrontendKey::new(Addr::from_v4(7), Port::new(8080), 6);
    directory.put(backend, 3, 9);
    let mut seen = Observation::new(120_000_000_000, directory.clone());
    let send = |seen: &mut Observation, forth: bool, flags: u8, time_ns: u64| {
        let (client, server) = ((Addr::from_v4(1), Port::new(4000)), (backend.addr, backend.port));
        let ((src, src_port), (dst, dst_port)) = if forth { (client, server) } else { (server, client) };
        let record = PacketRecord {
            kind: kind::PACKET,
            ifindex: 2,
            time_ns,
            src,
            dst,
            src_port,
            dst_port,
            flags,
            proto: 6,
            direction: 0,
            pad: 0,
        };
        seen.packet(&record, &usable);
    };
    for second in 0..3 {
        let t = (second + 1) * 1_000_000_000;
        send(&mut seen, true, tcp_flag::SYN, t);
        send(&mut seen, false, tcp_flag::SYN | tcp_flag::ACK, t + 1);
        send(&mut seen, false, tcp_flag::FIN | tcp_flag::ACK, t + 2);
        send(&mut seen, true, tcp_flag::FIN | tcp_flag::ACK, t + 3);
    }
    seen.advance(100_000_000_000, &usable);
    let counts = seen.backend_reuse().service(3).expect("the backend's Service");
    assert_eq!((counts.connections, counts.same_backend), (3, 2));
    assert_eq!(seen.packets, 12);
    directory.remove(&backend, 4);
    assert!(
        directory.find(&backend).is_some(),
        "another Service's removal does not forget it"
    );
}

#[test]
fn flows_from_outside_are_tuple_uses_and_no_use_of_our_ports() {
    let usable = UsableBackends::new(128);
    let mut seen = Observation::new(120_000_000_000, Arc::default());
    usable.set(1, true);
    usable.set(2, true);
    let second = 1_000_000_000;
    for (turn, backend) in [(1, 1), (3, 2), (5, 2)] {
        let outside = ConnRecord {
            netns_cookie: 0,
            marks: mark::OUTSIDE,
            ..record(4000, backend, turn * second, (turn + 1) * second)
        };
        seen.connection(&outside, &usable);
    }
    seen.advance(100 * second, &usable);
    let total = seen.reuse().total();
    assert_eq!((total.connections, total.same_backend, total.moved), (3, 1, 1));
    assert_eq!(seen.latencies(1).expect("three samples").count(), 3);
    assert_eq!(
        seen.ports().uses(28_232).count(),
        0,
        "the client's port range is its own"
    );
    // The negative control: a socket here does use our range.
    seen.connection(&record(4000, 1, 7 * second, 8 * second), &usable);
    assert_eq!(seen.ports().uses(28_232).count(), 1);
}

#[test]
fn all_who_are_outside_are_one_caller_and_pods_stay_themselves() {
    let (usable, directory) = (UsableBackends::new(128), Arc::new(Directory::of_node("node-1")));
    directory.take(&pod("guest", 1));
    let mut seen = Observation::new(120_000_000_000, directory);
    for last in [1_u32, 2, 3, 3] {
        let outside = ConnRecord {
            netns_cookie: 0,
            marks: mark::OUTSIDE,
            client: Addr::from_v4(last.to_be()),
            ..record(4000, 0, 1_000, 2_000)
        };
        seen.connection(&outside, &usable);
    }
    let told: Vec<_> = (seen.calls().iter())
        .map(|(client, _, counts)| (seen.caller(client), counts.connections))
        .collect();
    assert_eq!(told.len(), 2, "{told:?}");
    assert!(
        matches!(&told[0], (Some(Caller::Pod(pod)), 1) if &*pod.name.name == "guest"),
        "{told:?}"
    );
    assert_eq!(told[1], (Some(Caller::Outside), 3));
}

#[test]
fn events_say_where_a_connection_came_from() {
    let (usable, directory) = (UsableBackends::new(128), Arc::new(Directory::default()));
    directory.name(1, &ObjectName::new("shop", "web"));
    let mut seen = Observation::new(120_000_000_000, directory);
    let mut events = seen.followers.add(crate::view::ServiceFilter::default()).expect("room");
    let second = 1_000_000_000;
    for (marks, netns_cookie) in [(0, 7), (mark::OUTSIDE, 0)] {
        for turn in [1, 3] {
            let record = ConnRecord {
                marks,
                netns_cookie,
                ..record(4000, 1, turn * second, (turn + 1) * second)
            };
            seen.connection(&record, &usable);
        }
    }
    seen.advance(100 * second, &usable);
    let (mut connections, mut reuses) = (Vec::new(), Vec::new());
    while let Ok(event) = events.try_recv() {
        match event {
            EventView::Connection { origin, .. } => connections.push(origin),
            EventView::Reuse { origin, .. } => reuses.push(origin),
            _ => {}
        }
    }
    assert_eq!(
        connections,
        [Origin::Node, Origin::Node, Origin::Outside, Origin::Outside]
    );
    reuses.sort();
    assert_eq!(reuses, [Origin::Node, Origin::Outside]);
}

/// A Pod of the workload of its name, at 0.0.0.`last`.
fn pod(name: &str, last: u8) -> Update {
    Update::Apply(crate::model::Object::Pod(Arc::new(crate::model::Pod {
        name: ObjectName::new("shop", name),
        node: None,
        ips: [IpAddr::from([0, 0, 0, last])].into(),
        workload: crate::model::Workload {
            kind: "Deployment".into(),
            name: name.into(),
        },
        host_network: false,
    })))
}

#[test]
fn a_namespace_stays_its_pods_when_the_address_is_anothers() {
    let (usable, directory) = (UsableBackends::new(128), Arc::new(Directory::of_node("node-1")));
    let mut seen = Observation::new(120_000_000_000, directory.clone());
    let told = |seen: &Observation| -> Vec<(u64, Option<String>)> {
        let mut told: Vec<_> = (seen.calls().iter())
            .map(|(client, _, _)| (client.netns, seen.caller(client).and_then(|caller| caller.workload())))
            .collect();
        told.sort();
        told
    };
    let connect = |seen: &mut Observation, netns_cookie: u64, client: u32| {
        let record = ConnRecord {
            netns_cookie,
            client: if client == 0 {
                Addr::default()
            } else {
                Addr::from_v4(client.to_be())
            },
            ..record(0, 0, 1_000, 2_000)
        };
        seen.connection(&record, &usable);
    };
    connect(&mut seen, 7, 1);
    assert_eq!(told(&seen), [(7, None)], "no Pod has been told");
    directory.take(&pod("old", 1));
    assert_eq!(told(&seen), [(7, Some("shop/old".to_owned()))], "by its address");
    connect(&mut seen, 7, 1);
    // The old Pod goes, a new one gets its address; the old one's calls stay its own.
    directory.take(&Update::Replace(crate::model::Content::Pods(Vec::new())));
    directory.take(&pod("new", 1));
    connect(&mut seen, 8, 1);
    let both = [(7, Some("shop/old".to_owned())), (8, Some("shop/new".to_owned()))];
    assert_eq!(told(&seen), both);
    // A connection that failed before it had an address is its namespace's.
    connect(&mut seen, 8, 0);
    assert_eq!(told(&seen).last(), Some(&(8, Some("shop/new".to_owned()))));
    assert_eq!(seen.calls().len(), 3);
    connect(&mut seen, 9, 0);
    assert_eq!(told(&seen).last(), Some(&(9, None)), "of this one nothing is known");
}

#[test]
fn namespaces_without_remembered_calls_make_room() {
    let (usable, directory) = (UsableBackends::new(128), Arc::new(Directory::of_node("node-1")));
    directory.take(&pod("web", 1));
    let mut seen = Observation::new(120_000_000_000, directory);
    for netns_cookie in 1..=3 * MAX_HOMES as u64 {
        let record = ConnRecord {
            netns_cookie,
            client: Addr::from_v4(1_u32.to_be()),
            ..record(0, 0, 1_000, 2_000)
        };
        seen.connection(&record, &usable);
        assert!(seen.homes.len() <= MAX_HOMES);
    }
    assert!(seen.homes.len() >= calls::DEFAULT_CAPACITY);
    assert!(
        seen.calls
            .iter()
            .all(|(client, _, _)| seen.homes.contains_key(&client.netns))
    );
}

#[test]
fn usable_backends_beyond_the_room_are_not_usable() {
    let usable = UsableBackends::new(64);
    usable.set(64, true);
    assert!(!usable.get(64));
    usable.set(63, true);
    assert!(usable.get(63));
    usable.set(63, false);
    assert!(!usable.get(63));
}
