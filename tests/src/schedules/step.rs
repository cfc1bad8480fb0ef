//! The steps of a schedule: drawn from a seed, and what each does to the API server's objects.
//!
//! Pure but for [`Step::change`], which writes into the server's store. Invariant: the same seed draws the same steps, and the
//! same steps write the same objects.

use std::fmt;

use serde_json::{Value, json};

use crate::apiserver::{ApiServer, Fault, Resource};

/// The node that the agent is on.
pub(super) const NODE: &str = "node-1";
/// How many Services there are names for, and how many slices a Service may have.
const SERVICES: u64 = 6;
const SLICES: u64 = 3;

/// A fixed pseudo-random sequence.
#[derive(Clone, Debug)]
pub(super) struct Dice(u64);

impl Dice {
    pub(super) fn new(seed: u64) -> Self {
        // Neighbouring seeds are not to begin alike.
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678_9abc_def0)
    }

    pub(super) fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

/// An endpoint: which one, and its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Endpoint {
    host: u8,
    state: State,
}

/// What an endpoint's conditions say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Ready,
    Unready,
    Draining,
    Elsewhere,
}

/// One step. Services and slices are named by their numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// A Service is there, in this shape: new, or changed.
    Service { service: u64, shape: u64 },
    /// A Service goes; its slices stay, as they do for a moment in a cluster.
    DeleteService { service: u64 },
    /// A Service goes and comes back at once with the same address, in another shape.
    Recreate { service: u64, shape: u64 },
    /// A Service of another name takes the address of one that goes, with its endpoints.
    Heir { service: u64, shape: u64 },
    /// A slice is there with these endpoints: new, or changed.
    Slice {
        service: u64,
        slice: u64,
        endpoints: Vec<Endpoint>,
        weight: Option<u64>,
    },
    /// A slice goes.
    DeleteSlice { service: u64, slice: u64 },
    /// One endpoint's state changes in whatever slices it is.
    Condition { service: u64, endpoint: Endpoint },
    /// The endpoints of the first slice are spread over all.
    Split { service: u64, shrink_first: bool },
    /// All endpoints move into the first slice.
    Merge { service: u64, delete_first: bool },
    /// The first slice's endpoints are in the last one as well, with another state.
    Duplicate { service: u64, endpoint: Endpoint },
    /// A slice is another Service's from now on.
    Relabel { service: u64, slice: u64, to: Option<u64> },
    /// The node's address or zone changes.
    Node { address: u64, zone: u64 },
    /// The server goes wrong, and all connections are cut: nothing is to be learned from it any more.
    Outage(Fault),
    /// The server goes wrong, with connections as they are.
    Strike(Fault),
    /// All is well again.
    Heal,
    /// The right to read a kind is taken.
    Forbid(Resource),
    /// The right to read a kind is given back.
    Allow(Resource),
    /// All connections are cut.
    Disconnect,
    /// The history is forgotten, and a watch from before it learns of it in one of two ways.
    Compact { by_status: bool },
    /// Bookmarks are sent.
    Bookmark,
    /// The server comes back with an older version counter, as from a backup.
    Restore,
    /// The agent is killed and started on the same kernel state.
    Restart,
    /// The agent dies in the middle of its writes, after so many, and is started on what it left.
    Crash { writes: u64 },
    /// The node starts anew: the kernel holds nothing.
    Reboot,
    /// The agent takes in what has come so far.
    Pump,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// The steps of a seed: 5 to 15.
pub(super) fn steps(seed: u64) -> Vec<Step> {
    let mut dice = Dice::new(seed);
    let count = 5 + dice.roll(11);
    (0..count).map(|_| step(&mut dice)).collect()
}

fn step(dice: &mut Dice) -> Step {
    let service = dice.roll(SERVICES);
    let slice = dice.roll(SLICES);
    let shape = dice.roll(SHAPES);
    match dice.roll(40) {
        0..=2 => Step::Service { service, shape },
        3 | 4 => Step::DeleteService { service },
        5 | 6 => Step::Recreate { service, shape },
        7 => Step::Heir { service, shape },
        8..=11 => Step::Slice {
            service,
            slice,
            endpoints: (0..dice.roll(6)).map(|_| endpoint(dice)).collect(),
            weight: (dice.roll(4) == 0).then(|| dice.roll(4)),
        },
        12 | 13 => Step::DeleteSlice { service, slice },
        14 | 15 => Step::Condition {
            service,
            endpoint: endpoint(dice),
        },
        16 => Step::Split {
            service,
            shrink_first: dice.roll(2) == 0,
        },
        17 => Step::Merge {
            service,
            delete_first: dice.roll(2) == 0,
        },
        18 => Step::Duplicate {
            service,
            endpoint: endpoint(dice),
        },
        19 => Step::Relabel {
            service,
            slice,
            to: (dice.roll(4) > 0).then(|| dice.roll(SERVICES)),
        },
        20 => Step::Node {
            address: 1 + dice.roll(3),
            zone: dice.roll(2),
        },
        21..=24 => Step::Outage(fault(dice)),
        25 | 26 => Step::Strike(fault(dice)),
        27 | 28 => Step::Heal,
        29 => Step::Forbid(resource(dice)),
        30 => Step::Allow(resource(dice)),
        31 => Step::Disconnect,
        32 | 33 => Step::Compact {
            by_status: dice.roll(2) == 0,
        },
        34 => Step::Bookmark,
        35 => Step::Restore,
        36 => Step::Restart,
        37 => Step::Crash { writes: dice.roll(12) },
        38 if dice.roll(2) == 0 => Step::Reboot,
        _ => Step::Pump,
    }
}

fn endpoint(dice: &mut Dice) -> Endpoint {
    Endpoint {
        host: dice.roll(8) as u8,
        state: match dice.roll(6) {
            0 => State::Unready,
            1 => State::Draining,
            2 => State::Elsewhere,
            _ => State::Ready,
        },
    }
}

fn fault(dice: &mut Dice) -> Fault {
    Fault::ALL[dice.roll(Fault::ALL.len() as u64) as usize]
}

fn resource(dice: &mut Dice) -> Resource {
    Resource::FOLLOWED[dice.roll(4) as usize]
}

impl Step {
    /// Changes the server's objects, where that is what the step is about; `between` is called between two writes of which the
    /// second brings back what the first took away.
    pub(super) fn change(&self, server: &ApiServer, between: &mut dyn FnMut()) {
        match self {
            Self::Service { service, shape } => server.apply(service_object(*service, "svc", *shape)),
            Self::DeleteService { service } => server.delete(Resource::Services, "default", &service_name(*service)),
            Self::Recreate { service, shape } => {
                server.delete(Resource::Services, "default", &service_name(*service));
                between();
                server.apply(service_object(*service, "svc", *shape));
            }
            Self::Heir { service, shape } => {
                server.delete(Resource::Services, "default", &service_name(*service));
                between();
                server.apply(service_object(*service, "heir", *shape));
                for mut slice in slices(server, *service) {
                    slice["metadata"]["labels"] = json!({LABEL: format!("heir-{service}")});
                    server.apply(slice);
                }
            }
            Self::Slice {
                service,
                slice,
                endpoints,
                weight,
            } => server.apply(slice_object(*service, *slice, endpoints, *weight)),
            Self::DeleteSlice { service, slice } => {
                server.delete(Resource::Slices, "default", &slice_name(*service, *slice));
            }
            Self::Condition { service, endpoint } => {
                for mut slice in slices(server, *service) {
                    let changed = endpoint.object(*service);
                    for found in slice["endpoints"].as_array_mut().into_iter().flatten() {
                        if found["addresses"] == changed["addresses"] {
                            *found = changed.clone();
                        }
                    }
                    server.apply(slice);
                }
            }
            Self::Split { service, shrink_first } => split(server, *service, *shrink_first),
            Self::Merge { service, delete_first } => merge(server, *service, *delete_first),
            Self::Duplicate { service, endpoint } => {
                if let Some(mut first) = slices(server, *service).into_iter().next() {
                    first["metadata"]["name"] = json!(slice_name(*service, SLICES - 1));
                    if let Some(endpoints) = first["endpoints"].as_array_mut() {
                        endpoints.push(endpoint.object(*service));
                    }
                    server.apply(first);
                }
            }
            Self::Relabel { service, slice, to } => {
                let name = slice_name(*service, *slice);
                let named = slices(server, *service)
                    .into_iter()
                    .find(|found| found["metadata"]["name"] == name);
                if let Some(mut found) = named {
                    found["metadata"]["labels"] = match to {
                        Some(to) => json!({LABEL: service_name(*to)}),
                        None => json!({}),
                    };
                    server.apply(found);
                }
            }
            Self::Node { address, zone } => server.apply(node_object(NODE, *address, *zone)),
            _ => {}
        }
    }
}

/// What is there before the first step: a node, a Pod, and some Services with slices.
pub(super) fn first_objects(server: &ApiServer, seed: u64) {
    let mut dice = Dice::new(!seed);
    server.apply(node_object(NODE, 1, 0));
    server.apply(node_object("node-2", 9, 1));
    server.apply(json!({
        "kind": "Pod", "apiVersion": "v1", "metadata": {"name": "client"},
        "spec": {"nodeName": NODE, "containers": [{"name": "app", "image": "app:1"}]},
        "status": {"phase": "Running", "podIP": "10.9.0.1", "podIPs": [{"ip": "10.9.0.1"}]},
    }));
    for service in 0..SERVICES - 2 {
        server.apply(service_object(service, "svc", dice.roll(SHAPES)));
        for slice in 0..dice.roll(SLICES) {
            let endpoints: Vec<Endpoint> = (0..=dice.roll(4)).map(|_| endpoint(&mut dice)).collect();
            server.apply(slice_object(service, slice, &endpoints, None));
        }
    }
}

const LABEL: &str = "kubernetes.io/service-name";

fn service_name(service: u64) -> String {
    format!("svc-{service}")
}

fn slice_name(service: u64, slice: u64) -> String {
    format!("svc-{service}-{slice}")
}

fn node_object(name: &str, address: u64, zone: u64) -> Value {
    json!({
        "kind": "Node", "apiVersion": "v1",
        "metadata": {"name": name, "labels": {"topology.kubernetes.io/zone": format!("zone-{zone}")}},
        "status": {"addresses": [{"type": "InternalIP", "address": format!("192.168.0.{address}")}]},
    })
}

/// How many shapes a Service may have.
const SHAPES: u64 = 7;

fn service_object(service: u64, prefix: &str, shape: u64) -> Value {
    let v4 = format!("10.96.0.{}", 1 + service);
    let http = json!({"name": "http", "port": 80, "protocol": "TCP"});
    let dns = json!({"name": "dns", "port": 53, "protocol": "UDP"});
    let node_port = json!({"name": "http", "port": 80, "protocol": "TCP", "nodePort": 30_000 + service});
    let mut spec = json!({"type": "ClusterIP", "clusterIP": v4, "clusterIPs": [v4], "ports": [http.clone()]});
    match shape {
        0 => {}
        1 => spec["ports"] = json!([http, dns]),
        2 => {
            spec["type"] = json!("NodePort");
            spec["ports"] = json!([node_port]);
        }
        3 => {
            spec["type"] = json!("LoadBalancer");
            spec["externalTrafficPolicy"] = json!("Local");
            spec["healthCheckNodePort"] = json!(31_000 + service);
            spec["loadBalancerSourceRanges"] = json!(["192.0.2.0/24", format!("198.51.{service}.0/24")]);
            spec["ports"] = json!([node_port]);
        }
        4 => {
            spec["sessionAffinity"] = json!("ClientIP");
            spec["sessionAffinityConfig"] = json!({"clientIP": {"timeoutSeconds": 60 + service}});
        }
        // Two Services may want this one: the older has it.
        5 => spec["externalIPs"] = json!([format!("203.0.113.{}", 1 + service % 2)]),
        _ => {
            spec["internalTrafficPolicy"] = json!("Local");
            spec["clusterIPs"] = json!([v4, format!("fd96::{}", 1 + service)]);
            spec["ipFamilies"] = json!(["IPv4", "IPv6"]);
        }
    }
    let mut object = json!({
        "kind": "Service", "apiVersion": "v1",
        "metadata": {
            "name": format!("{prefix}-{service}"),
            "creationTimestamp": format!("2024-05-01T10:20:{:02}Z", (service * 7 + shape) % 60),
        },
        "spec": spec,
    });
    if shape == 3 {
        object["status"] = json!({"loadBalancer": {"ingress": [{"ip": format!("203.0.113.{}", 100 + service)}]}});
    }
    object
}

impl Endpoint {
    fn object(self, service: u64) -> Value {
        let (ready, serving, terminating) = match self.state {
            State::Ready | State::Elsewhere => (true, true, false),
            State::Unready => (false, false, false),
            State::Draining => (false, true, true),
        };
        let node = if self.state == State::Elsewhere { "node-2" } else { NODE };
        json!({
            "addresses": [format!("10.1.{service}.{}", 1 + self.host)],
            "conditions": {"ready": ready, "serving": serving, "terminating": terminating},
            "nodeName": node,
        })
    }
}

fn slice_object(service: u64, slice: u64, endpoints: &[Endpoint], weight: Option<u64>) -> Value {
    let endpoints: Vec<Value> = endpoints.iter().map(|endpoint| endpoint.object(service)).collect();
    let annotations = weight.map_or_else(|| json!({}), |weight| json!({"evenkeel.io/weight": weight.to_string()}));
    json!({
        "kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1", "addressType": "IPv4",
        "metadata": {
            "name": slice_name(service, slice), "labels": {LABEL: service_name(service)}, "annotations": annotations,
        },
        "ports": [
            {"name": "http", "port": 8080, "protocol": "TCP"},
            {"name": "dns", "port": 5353, "protocol": "UDP"},
        ],
        "endpoints": endpoints,
    })
}

/// The slices that bear a Service's number, in the order of their names.
fn slices(server: &ApiServer, service: u64) -> Vec<Value> {
    let names: Vec<String> = (0..SLICES).map(|slice| slice_name(service, slice)).collect();
    let of_service = |slice: &Value| names.iter().any(|name| slice["metadata"]["name"] == **name);
    server
        .objects(Resource::Slices)
        .into_iter()
        .filter(of_service)
        .collect()
}

fn split(server: &ApiServer, service: u64, shrink_first: bool) {
    let Some(mut first) = slices(server, service).into_iter().next() else {
        return;
    };
    let all = first["endpoints"].as_array().cloned().unwrap_or_default();
    let (stay, go) = all.split_at(all.len() / 2);
    let mut second = first.clone();
    first["endpoints"] = json!(stay);
    second["endpoints"] = json!(go);
    second["metadata"]["name"] = json!(slice_name(service, 1));
    let order = if shrink_first { [first, second] } else { [second, first] };
    for slice in order {
        server.apply(slice);
    }
}

fn merge(server: &ApiServer, service: u64, delete_first: bool) {
    let all = slices(server, service);
    let Some(mut first) = all.first().cloned() else {
        return;
    };
    let endpoints = all
        .iter()
        .flat_map(|slice| slice["endpoints"].as_array().cloned().unwrap_or_default());
    first["endpoints"] = endpoints.collect();
    let delete = || {
        for slice in &all[1..] {
            let name = slice["metadata"]["name"].as_str().unwrap_or_default();
            server.delete(Resource::Slices, "default", name);
        }
    };
    if delete_first {
        delete();
        server.apply(first);
    } else {
        server.apply(first);
        delete();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_always_draws_the_same_steps_and_another_draws_others() {
        for seed in 0..200 {
            let drawn = steps(seed);
            assert_eq!(drawn, steps(seed));
            assert_ne!(drawn, steps(seed + 1));
            assert!((5..=15).contains(&drawn.len()));
        }
    }

    #[test]
    fn a_thousand_schedules_meet_every_kind_of_step_and_every_fault() {
        let all: Vec<Step> = (0..1000).flat_map(steps).collect();
        let kinds: std::collections::HashSet<_> = all.iter().map(std::mem::discriminant).collect();
        assert_eq!(kinds.len(), 25);
        for fault in Fault::ALL {
            assert!(
                all.contains(&Step::Outage(fault)) && all.contains(&Step::Strike(fault)),
                "{fault:?}"
            );
        }
    }
}
