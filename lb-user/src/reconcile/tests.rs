//! Reconciling with maps in memory: what is written when, what a refusal leaves behind, what is repaired.

use lb_common::{
    backend::{BackendCounters, Tally},
    frontend::Frontend,
    set::SetWord,
};

use super::*;
use crate::{
    compile::{
        Capacity,
        tests::world::{ROOMY, World, used, world},
    },
    datapath::fake::{Fault, Memory},
    desired::{Config, NodePortAddresses},
    model::{Content, Kind, Object},
    source::{convert::Names, dir::read_manifest},
};

/// A Service in few words.
#[derive(Clone, Copy, Default)]
struct Wanted<'a> {
    name: &'a str,
    ip: &'a str,
    external_ip: Option<&'a str>,
    sticky: bool,
    /// Last bytes of the endpoints' addresses.
    endpoints: &'a [u8],
}

const WEB: Wanted = Wanted {
    name: "web",
    ip: "10.96.0.1",
    external_ip: None,
    sticky: false,
    endpoints: &[1, 2, 3],
};
const DNS: Wanted = Wanted {
    name: "dns",
    ip: "10.96.0.2",
    external_ip: None,
    sticky: false,
    endpoints: &[3],
};

impl Wanted<'_> {
    fn manifest(&self) -> String {
        let Self { name, ip, .. } = self;
        let external = self
            .external_ip
            .map_or_else(String::new, |addr| format!(", externalIPs: ['{addr}']"));
        let affinity = if self.sticky { ", sessionAffinity: ClientIP" } else { "" };
        let endpoints: Vec<String> = self
            .endpoints
            .iter()
            .map(|e| format!("{{addresses: [10.1.0.{e}]}}"))
            .collect();
        format!(
            "{{apiVersion: v1, kind: Service, metadata: {{name: {name}}}, spec: {{clusterIP: {ip}, clusterIPs: [{ip}], \
             ports: [{{port: 80}}]{external}{affinity}}}}}\n---\n\
             {{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, metadata: {{name: {name}-1, labels: \
             {{kubernetes.io/service-name: {name}}}}}, addressType: IPv4, ports: [{{name: '', port: 8080}}], \
             endpoints: [{}]}}\n",
            endpoints.join(", ")
        )
    }
}

fn objects(wanted: &[Wanted<'_>]) -> Vec<Object> {
    let text: Vec<String> = wanted.iter().map(Wanted::manifest).collect();
    let (objects, problems) =
        read_manifest("test.yaml", text.join("---\n").as_bytes(), &mut Names::default()).expect("good YAML");
    assert!(problems.is_empty(), "{problems:?}");
    objects
}

/// Everything that is wanted, whole.
fn want(reconciler: &mut Reconciler<Memory>, wanted: &[Wanted<'_>]) {
    let (mut services, mut slices) = (Vec::new(), Vec::new());
    for object in objects(wanted) {
        match object {
            Object::Service(service) => services.push(service),
            Object::Slice(slice) => slices.push(slice),
            Object::Node(_) | Object::Pod(_) => {}
        }
    }
    reconciler.take(Update::Replace(Content::Slices(slices)));
    reconciler.take(Update::Replace(Content::Services(services)));
}

fn sync(reconciler: &mut Reconciler<Memory>) {
    reconciler.take(Update::Synced(Kind::Service));
    reconciler.take(Update::Synced(Kind::Slice));
}

fn start(memory: Memory) -> Reconciler<Memory> {
    let config = Config {
        node_name: "node-1".to_owned(),
        proxy_name: None,
        external_ips: true,
        node_port_addresses: NodePortAddresses::Primary,
        awaited: vec![Kind::Service, Kind::Slice],
    };
    Reconciler::new(Desired::new(config), memory).expect("memory is read")
}

/// An agent that has written all of this.
fn running(wanted: &[Wanted<'_>]) -> Reconciler<Memory> {
    let mut reconciler = start(Memory::new(ROOMY));
    want(&mut reconciler, wanted);
    sync(&mut reconciler);
    reconciler.flush();
    assert_settled(&mut reconciler);
    reconciler
}

fn assert_settled(reconciler: &mut Reconciler<Memory>) {
    assert!(reconciler.is_synced());
    assert_eq!(reconciler.sync_state().errors, BTreeMap::new());
    assert!(!reconciler.has_work());
    assert_eq!(
        reconciler.check().expect("memory is read"),
        0,
        "the maps are as they were applied"
    );
}

fn meaning(wanted: &[Wanted<'_>]) -> World {
    world(running(wanted).kernel())
}

#[test]
fn ids_with_open_connections_are_not_given_to_others_after_a_restart() {
    let before = running(&[WEB]);
    let web = before.applied().values().next().expect("one Service").clone();
    let gone = web.backend_id(
        6,
        "10.1.0.3".parse::<std::net::IpAddr>().unwrap().into(),
        lb_common::addr::Port::new(8080),
    );
    let gone = gone.expect("an endpoint");
    let mut before = before;
    let open = BackendCounters {
        outside: Tally {
            established: 1,
            ..Tally::default()
        },
        ..BackendCounters::default()
    };
    before.kernel_mut().backend_counters.insert(gone, open);
    let two = Wanted {
        endpoints: &[1, 2],
        ..WEB
    };
    want(&mut before, &[two]);
    before.flush();

    let mut after = start(before.kernel().clone());
    let more = Wanted {
        endpoints: &[1, 2, 4, 5],
        ..WEB
    };
    want(&mut after, &[more]);
    sync(&mut after);
    after.flush();
    assert_settled(&mut after);
    let ids = |service: &Compiled| service.backends.iter().map(|(id, _)| *id).collect::<Vec<_>>();
    let web = after.applied().values().next().expect("one Service").clone();
    assert!(
        !ids(&web).contains(&gone),
        "{gone} has an open connection of its old owner"
    );
    assert_eq!(after.kernel().backend_counter(gone).expect("memory is read"), open);

    // Once the connection has ended, the id is like any other.
    after
        .kernel_mut()
        .backend_counters
        .get_mut(&gone)
        .expect("it was there")
        .outside
        .closed = 1;
    after.compiler.reclaim(u64::MAX, |_| true, |_| true);
    want(
        &mut after,
        &[Wanted {
            endpoints: &[1, 2, 4, 5, 6],
            ..WEB
        }],
    );
    after.flush();
    let web = after.applied().values().next().expect("one Service").clone();
    assert!(ids(&web).contains(&gone));
}

#[test]
fn c24_nothing_is_written_before_every_kind_has_synced() {
    let before = running(&[WEB, DNS]);
    let mut after = start(before.kernel().clone());
    let writes = after.kernel().writes;
    // A partial list first, which would remove everything else.
    want(&mut after, &[DNS]);
    assert_eq!(after.flush(), Flushed::default());
    after.take(Update::Synced(Kind::Service));
    assert_eq!(after.flush(), Flushed::default());
    assert_eq!(after.check().expect("memory is read"), 0, "and nothing is repaired");
    assert!(!after.has_work() && !after.is_synced());
    assert_eq!(after.kernel().writes, writes);
    assert_eq!(after.sync_state().last_applied, None);

    want(&mut after, &[WEB, DNS]);
    after.take(Update::Synced(Kind::Slice));
    assert!(after.has_work());
    let flushed = after.flush();
    assert_eq!((flushed.services, flushed.puts, flushed.drops), (2, 0, 0));
    assert_eq!(after.kernel().writes, writes, "what stands is not written again");
    assert_eq!(after.applied(), before.applied());
    assert_settled(&mut after);
}

#[test]
fn a_change_while_the_agent_was_away_is_the_difference() {
    let mut after = start(running(&[WEB, DNS]).kernel().clone());
    want(
        &mut after,
        &[Wanted {
            endpoints: &[3, 4],
            ..DNS
        }],
    );
    sync(&mut after);
    after.flush();
    assert_settled(&mut after);
    assert_eq!(
        world(after.kernel()),
        meaning(&[Wanted {
            endpoints: &[3, 4],
            ..DNS
        }])
    );
    assert_eq!(after.flush(), Flushed::default());
}

#[test]
fn one_change_writes_its_own_service() {
    let mut reconciler = running(&[WEB, DNS]);
    let dns = reconciler.applied()[&ObjectName::new("default", "dns")].clone();
    want(
        &mut reconciler,
        &[
            Wanted {
                endpoints: &[1, 2],
                ..WEB
            },
            DNS,
        ],
    );
    let writes = reconciler.kernel().writes;
    let flushed = reconciler.flush();
    // One table, one list, one word; one backend goes.
    assert_eq!((flushed.services, flushed.puts, flushed.drops), (1, 3, 1));
    assert_eq!(reconciler.kernel().writes - writes, 4);
    assert_eq!(reconciler.applied()[&ObjectName::new("default", "dns")], dns);
    assert_eq!(reconciler.take_latencies().len(), 3, "two at the start, and this one");
    assert_settled(&mut reconciler);
}

#[test]
fn changes_are_counted_until_they_are_written() {
    let mut reconciler = start(Memory::new(ROOMY));
    assert!(reconciler.changes().is_none(), "nobody has asked");
    reconciler.count_changes();
    want(&mut reconciler, &[WEB, DNS]);
    let counts = |reconciler: &Reconciler<Memory>| {
        let changes = reconciler.changes().expect("asked for");
        let (services, slices) = changes.pending();
        (
            changes.services(),
            services,
            changes.slices(),
            slices,
            changes.programming().count(),
        )
    };
    // Slices of Services that are not known yet touch nobody.
    assert_eq!(counts(&reconciler), (2, 2, 2, 0, 0));
    sync(&mut reconciler);
    reconciler.flush();
    assert_eq!(counts(&reconciler), (2, 0, 2, 0, 0));
    let fewer = Wanted {
        endpoints: &[1, 2],
        ..WEB
    };
    for object in objects(&[fewer]) {
        if let Object::Slice(mut slice) = object {
            Arc::make_mut(&mut slice).changed_at = Some(SystemTime::now() + Duration::from_mins(1));
            reconciler.take(Update::Apply(Object::Slice(slice)));
        }
    }
    assert_eq!(counts(&reconciler), (2, 0, 3, 1, 0));
    reconciler.flush();
    assert_eq!(counts(&reconciler), (2, 0, 3, 0, 1));
    assert_settled(&mut reconciler);
}

#[test]
fn a_refusal_at_any_write_is_made_good() {
    let sticky = Wanted {
        sticky: true,
        endpoints: &[2, 3, 4],
        ..WEB
    };
    let new = Wanted {
        name: "new",
        ip: "10.96.0.3",
        ..DNS
    };
    let wanted = meaning(&[sticky, new]);
    let mut n = 0;
    loop {
        for fault in [Fault::Once(n), Fault::After(n)] {
            let mut reconciler = running(&[WEB, DNS]);
            reconciler.kernel_mut().fault = fault;
            want(&mut reconciler, &[sticky, new]);
            reconciler.flush();
            if matches!(fault, Fault::After(_)) && reconciler.sync_state().failures == 0 {
                assert!(n > 15, "refusals reach every write: {n}");
                return;
            }
            if matches!(fault, Fault::After(_)) {
                assert!(
                    !reconciler.sync_state().errors.is_empty() && reconciler.has_work(),
                    "write {n}"
                );
                assert!(reconciler.sync_state().pending_since.is_some());
            }
            reconciler.kernel_mut().fault = Fault::None;
            reconciler.flush();
            // What a refusal left half written is the check's to repair, if the way back was refused too.
            reconciler.check().expect("memory is read");
            assert_settled(&mut reconciler);
            assert_eq!(world(reconciler.kernel()), wanted, "write {n}, {fault:?}");
        }
        n += 1;
    }
}

#[test]
fn a_refusal_at_any_write_of_the_first_synchronisation_is_tried_again() {
    let wanted = [Wanted { sticky: true, ..WEB }, DNS];
    let meaning = meaning(&wanted);
    for n in 0.. {
        let mut reconciler = start(running(&[Wanted { endpoints: &[9], ..WEB }]).kernel().clone());
        want(&mut reconciler, &wanted);
        sync(&mut reconciler);
        reconciler.kernel_mut().fault = Fault::Once(n);
        reconciler.flush();
        if reconciler.sync_state().failures == 0 {
            assert!(n > 15, "refusals reach every write: {n}");
            return;
        }
        assert!(!reconciler.is_synced() && reconciler.has_work(), "write {n}");
        assert_eq!(
            reconciler.sync_state().last_applied,
            None,
            "a failure is no application"
        );
        reconciler.flush();
        assert_settled(&mut reconciler);
        assert_eq!(world(reconciler.kernel()), meaning, "write {n}");
    }
}

#[test]
fn what_does_not_fit_leaves_the_others_alone() {
    let mut reconciler = running(&[WEB, DNS]);
    let web = ObjectName::new("default", "web");
    let before = reconciler.applied()[&web].clone();
    // The kernel has less room than it says.
    reconciler.kernel_mut().max_memberships = 2;
    let sticky = Wanted {
        sticky: true,
        endpoints: &[1, 2, 4],
        ..WEB
    };
    let (dns, new) = (
        Wanted { endpoints: &[7], ..DNS },
        Wanted {
            name: "new",
            ip: "10.96.0.3",
            ..DNS
        },
    );
    want(&mut reconciler, &[sticky, dns, new]);
    assert_eq!(reconciler.flush().services, 2);
    let error = &reconciler.sync_state().errors[&web];
    assert!(error.contains("MEMBERS"), "{error}");
    assert_eq!(reconciler.applied()[&web], before);
    assert_eq!(
        reconciler.check().expect("memory is read"),
        0,
        "the old state stands whole"
    );
    assert_eq!(world(reconciler.kernel()), meaning(&[WEB, dns, new]));
    // Tried again, and again refused: nothing more is taken each time.
    let usage = used(&reconciler.compiler);
    for _ in 0..3 {
        assert!(reconciler.has_work());
        reconciler.flush();
        reconciler.compiler.reclaim(u64::MAX, |_| true, |_| true);
    }
    assert!(
        used(&reconciler.compiler)
            .iter()
            .zip(usage)
            .all(|(now, before)| now.1 <= before.1)
    );

    reconciler.kernel_mut().max_memberships = 3;
    assert_eq!(reconciler.flush().services, 1);
    assert_settled(&mut reconciler);
    assert_eq!(world(reconciler.kernel()), meaning(&[sticky, dns, new]));
}

#[test]
fn what_does_not_fit_at_the_start_keeps_its_old_state() {
    let mut reconciler = start(running(&[WEB, DNS]).kernel().clone());
    let many: Vec<u8> = (0..250).collect();
    let small = Capacity { backends: 200, ..ROOMY };
    reconciler.compiler = Compiler::restore(small, &reconciler.kernel.dump().expect("memory is read"));
    want(
        &mut reconciler,
        &[
            Wanted {
                endpoints: &many,
                ..WEB
            },
            Wanted { endpoints: &[5], ..DNS },
        ],
    );
    sync(&mut reconciler);
    reconciler.flush();
    let web = ObjectName::new("default", "web");
    assert!(
        reconciler.sync_state().errors[&web].contains("backends"),
        "{:?}",
        reconciler.sync_state().errors
    );
    // It waits for room, not for time: one Service too many does not make the node unhealthy.
    assert!(reconciler.sync_state().crowded_out.contains(&web));
    assert_eq!(reconciler.sync_state().pending_since, None);
    let half = [WEB, Wanted { endpoints: &[5], ..DNS }];
    assert_eq!(world(reconciler.kernel()), meaning(&half));
    assert_eq!(
        reconciler.check().expect("memory is read"),
        0,
        "and no check takes it for foreign"
    );
    assert!(reconciler.has_work(), "it is tried again");

    want(&mut reconciler, &half);
    reconciler.flush();
    assert_settled(&mut reconciler);
    want(&mut reconciler, &[]);
    reconciler.flush();
    assert_eq!(reconciler.kernel().dump().expect("memory is read"), Contents::default());
    reconciler.compiler.reclaim(u64::MAX, |_| true, |_| true);
    assert!(used(&reconciler.compiler).iter().all(|(_, used)| *used == 0));
}

/// An external IP moves from one Service to another in one step, and one of the two is refused.
#[test]
fn a_frontend_that_moves_is_where_it_belongs_whoever_is_refused() {
    const VIP: Option<&str> = Some("192.0.2.7");
    for (first, second) in [("a", "b"), ("b", "a")] {
        let loser = Wanted {
            name: first,
            external_ip: VIP,
            ..WEB
        };
        let gainer = Wanted { name: second, ..DNS };
        let (lost, gained) = (
            Wanted {
                external_ip: None,
                ..loser
            },
            Wanted {
                external_ip: VIP,
                ..gainer
            },
        );
        let sticky = |wanted| Wanted { sticky: true, ..wanted };

        // The loser cannot change otherwise: its old state stands, without what is the other's now.
        let mut reconciler = running(&[loser, gainer]);
        reconciler.kernel_mut().max_memberships = 1;
        want(&mut reconciler, &[sticky(lost), gained]);
        assert_eq!(reconciler.flush().services, 1, "{first} → {second}");
        assert_eq!(world(reconciler.kernel()), meaning(&[lost, gained]));
        assert_eq!(reconciler.check().expect("memory is read"), 0);
        reconciler.kernel_mut().max_memberships = 100;
        reconciler.flush();
        assert_settled(&mut reconciler);
        assert_eq!(world(reconciler.kernel()), meaning(&[sticky(lost), gained]));

        // The gainer cannot have it: the loser lets it go, as it is told.
        let gained = Wanted {
            endpoints: &[5, 6],
            ..gained
        };
        let mut reconciler = running(&[loser, gainer]);
        reconciler.kernel_mut().max_memberships = 1;
        want(&mut reconciler, &[lost, sticky(gained)]);
        assert_eq!(reconciler.flush().services, 1, "{first} → {second}");
        assert_eq!(world(reconciler.kernel()), meaning(&[lost, gainer]));
        assert_eq!(reconciler.check().expect("memory is read"), 0);
        reconciler.kernel_mut().max_memberships = 100;
        reconciler.flush();
        assert_settled(&mut reconciler);
        assert_eq!(world(reconciler.kernel()), meaning(&[lost, sticky(gained)]));

        want(&mut reconciler, &[]);
        reconciler.flush();
        reconciler.compiler.reclaim(u64::MAX, |_| true, |_| true);
        assert!(
            used(&reconciler.compiler).iter().all(|(_, used)| *used == 0),
            "{:?}",
            used(&reconciler.compiler)
        );
    }
}

type Damage<'a> = &'a dyn Fn(&mut Memory);

#[test]
fn a_check_repairs_every_kind_of_damage() {
    let mut reconciler = running(&[Wanted { sticky: true, ..WEB }, DNS]);
    let whole = reconciler.kernel().clone();
    let service = reconciler.applied()[&ObjectName::new("default", "web")].clone();
    let set = service.sets[0].clone();
    let (key, backend) = (service.frontends[0].0, service.backends[0].0);
    let damages: [(&str, Damage<'_>); 15] = [
        ("frontend lost", &|m| m.frontends.retain(|k, _| *k != key)),
        ("frontend changed", &|m| {
            m.frontends.get_mut(&key).expect("there").set_id += 1;
        }),
        ("frontend foreign", &|m| {
            m.frontends.extend([(FrontendKey::default(), Frontend::default())]);
        }),
        ("set lost", &|m| m.sets[set.set_id as usize] = 0),
        ("set changed", &|m| m.sets[set.set_id as usize] ^= 1 << 50),
        ("set beyond the lists", &|m| m.sets[set.set_id as usize] = u64::MAX),
        ("set foreign", &|m| m.sets[60] = SetWord::new(9, 2, 3).0),
        ("list changed", &|m| m.lists[set.word.offset() as usize + 1].a += 1),
        ("header changed", &|m| m.lists[set.word.offset() as usize].a = u32::MAX),
        ("table changed", &|m| m.tables[set.table.offset as usize] ^= 1),
        ("all tables lost", &|m| m.tables.fill(0)),
        ("backend lost", &|m| m.backends[backend as usize].state = state::VACANT),
        ("backend changed", &|m| m.backends[backend as usize].service_id += 1),
        ("backend foreign", &|m| m.backends[400].state = state::ACTIVE),
        ("memberships lost", &|m| m.memberships.clear()),
    ];
    for (what, damage) in damages {
        let repairs = reconciler.sync_state().repairs;
        damage(reconciler.kernel_mut());
        let found = reconciler.check().expect("memory is read");
        assert!(found > 0, "{what} is not found");
        assert_eq!(reconciler.sync_state().repairs, repairs + found as u64, "{what}");
        let contents = reconciler.kernel().dump().expect("memory is read");
        assert_eq!(
            contents,
            whole.dump().expect("memory is read"),
            "{what} is not repaired"
        );
        assert_eq!(reconciler.check().expect("memory is read"), 0, "{what}");
    }
    // All at once: somebody emptied everything.
    *reconciler.kernel_mut() = Memory::new(ROOMY);
    assert!(reconciler.check().expect("memory is read") > 0);
    assert_eq!(world(reconciler.kernel()), world(&whole));
}

#[test]
fn a_repair_that_fails_is_tried_again() {
    let mut reconciler = running(&[WEB]);
    let whole = world(reconciler.kernel());
    reconciler.kernel_mut().frontends.clear();
    reconciler.kernel_mut().fault = Fault::Once(0);
    assert!(reconciler.check().is_err());
    assert_eq!(reconciler.sync_state().repairs, 0, "what failed is no repair");
    assert!(reconciler.check().expect("memory takes it") > 0);
    assert_eq!(world(reconciler.kernel()), whole);
}

/// Counters go on through repairs and returns to an old state: only ids in use for the first time begin at zero.
#[test]
fn counters_of_ids_in_use_go_on() {
    let mut reconciler = running(&[WEB]);
    let service = reconciler.applied()[&ObjectName::new("default", "web")].clone();
    let (id, backend) = (service.service_id, service.backends[0].0);
    reconciler
        .kernel_mut()
        .backend_counters
        .entry(backend)
        .or_default()
        .inside
        .established = 7;
    reconciler.kernel_mut().service_counters.entry(id).or_default().connects = 7;
    reconciler.kernel_mut().backends[backend as usize].state = state::VACANT;
    assert!(reconciler.check().expect("memory is read") > 0);
    // A change that goes wrong after the backend was already removed.
    want(&mut reconciler, &[Wanted { endpoints: &[8], ..WEB }]);
    for n in 0..12 {
        reconciler.kernel_mut().fault = Fault::Once(n);
        reconciler.flush();
        reconciler.kernel_mut().fault = Fault::None;
        if reconciler.sync_state().errors.is_empty() {
            break;
        }
        assert_eq!(
            reconciler.kernel().backend_counters[&backend].inside.established,
            7,
            "write {n}"
        );
    }
    assert_eq!(reconciler.kernel().service_counters[&id].connects, 7);
    assert_settled(&mut reconciler);
}

#[test]
fn services_of_the_agents_own_stand_beside_the_others() {
    let own = crate::compile::tests::world::service("probe", 77, &[&[]]);
    let mut reconciler = start(Memory::new(ROOMY));
    reconciler.add_own(own.clone());
    assert_eq!(reconciler.flush(), Flushed::default(), "it waits as the others do");
    want(&mut reconciler, &[WEB]);
    sync(&mut reconciler);
    reconciler.flush();
    assert_settled(&mut reconciler);
    assert!(reconciler.is_own(&own.name) && !reconciler.is_own(&ObjectName::new("default", "web")));
    want(&mut reconciler, &[]);
    reconciler.flush();
    assert_settled(&mut reconciler);
    let left: Vec<&ObjectName> = reconciler.applied().keys().collect();
    assert_eq!(left, [&own.name]);
    let id = reconciler.applied()[&own.name].service_id;
    assert_eq!(reconciler.service_of(id), Some(&own.name));
}
