//! The objects that every proxy of a size follows: Services, their EndpointSlices, the node, and one Service that changes.
//!
//! They carry the fields that kube-apiserver and its controllers write, so that each proxy reads documents of the usual size.
//! Pure. The invariant: no endpoint of the changing Service is ever used twice.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::num::NonZeroU16;

use serde_json::{Value, json};

use crate::bench::population::Population;

/// Endpoints of each Service that does not change.
pub(super) const ENDPOINTS: u32 = 10;
/// The node that the proxies believe to be on.
pub(super) const NODE: &str = "bench";
/// The port of all endpoints.
pub(super) const TARGET: NonZeroU16 = NonZeroU16::new(8080).expect("8080 is not 0");

/// `count` Services of ten endpoints each, and beside them the marked Service, of one endpoint.
#[derive(Clone, Copy, Debug)]
pub(super) struct Town {
    population: Population,
}

impl Town {
    pub(super) fn new(count: u32) -> Self {
        Self {
            population: Population::new(count, ENDPOINTS, TARGET),
        }
    }

    pub(super) fn count(&self) -> u32 {
        self.population.count
    }

    /// What clients of a Service dial; the marked Service comes after all others.
    pub(super) fn frontend(&self, service: u32) -> SocketAddrV4 {
        self.population.frontend(service)
    }

    /// What clients of the marked Service dial.
    pub(super) fn marked_frontend(&self) -> SocketAddrV4 {
        self.frontend(self.count())
    }

    /// The addresses of a Service's endpoints.
    pub(super) fn endpoints(&self, service: u32) -> Vec<Ipv4Addr> {
        (0..ENDPOINTS)
            .map(|n| *self.population.endpoint(service, n).ip())
            .collect()
    }

    /// The endpoint that the marked Service has after so many changes.
    pub(super) fn marked_endpoint(change: u32) -> Ipv4Addr {
        Ipv4Addr::from(u32::from_be_bytes([10, 250, 0, 1]) + change)
    }

    /// Everything, before the first change.
    pub(super) fn objects(&self) -> impl Iterator<Item = Value> + '_ {
        let node = std::iter::once(node(Ipv4Addr::new(10, 244, 0, 1)));
        node.chain(self.services()).chain(self.slices())
    }

    /// The Services, the marked one last.
    pub(super) fn services(&self) -> impl Iterator<Item = Value> + '_ {
        (0..=self.count()).map(|n| service(&self.name(n), *self.frontend(n).ip(), n))
    }

    /// The slices, the marked Service's last.
    pub(super) fn slices(&self) -> impl Iterator<Item = Value> + '_ {
        (0..self.count())
            .map(|n| self.slice(n, None))
            .chain([self.marked_slice(0)])
    }

    /// A Service's slice; with `stranger`, its first endpoint is another one.
    pub(super) fn slice(&self, service: u32, stranger: Option<u32>) -> Value {
        let mut endpoints = self.endpoints(service);
        if let (Some(n), Some(first)) = (stranger, endpoints.first_mut()) {
            *first = Ipv4Addr::from(u32::from_be_bytes([10, 240, 0, 1]) + n);
        }
        slice(&self.name(service), &endpoints)
    }

    /// The marked Service's slice after so many changes.
    pub(super) fn marked_slice(&self, change: u32) -> Value {
        slice(&self.name(self.count()), &[Self::marked_endpoint(change)])
    }

    fn name(&self, service: u32) -> String {
        if service == self.count() {
            return "marked".to_owned();
        }
        format!("filler-{service}")
    }
}

fn node(address: Ipv4Addr) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": NODE, "labels": {"kubernetes.io/hostname": NODE}, "uid": uid(9, address)},
        "spec": {"podCIDR": "10.244.0.0/16", "podCIDRs": ["10.244.0.0/16"]},
        "status": {"addresses": [{"type": "InternalIP", "address": address.to_string()}]},
    })
}

fn service(name: &str, address: Ipv4Addr, number: u32) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {
            "name": name, "namespace": "default", "uid": uid(1, address),
            "creationTimestamp": "2026-01-01T00:00:00Z", "labels": {"app": name, "number": number.to_string()},
        },
        "spec": {
            "type": "ClusterIP", "clusterIP": address.to_string(), "clusterIPs": [address.to_string()],
            "ipFamilies": ["IPv4"], "ipFamilyPolicy": "SingleStack", "internalTrafficPolicy": "Cluster",
            "sessionAffinity": "None",
            "ports": [{"name": "http", "protocol": "TCP", "port": 80, "targetPort": TARGET}],
        },
        "status": {"loadBalancer": {}},
    })
}

fn slice(service: &str, endpoints: &[Ipv4Addr]) -> Value {
    let endpoints: Vec<Value> = endpoints.iter().map(|address| endpoint(service, *address)).collect();
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {
            "name": format!("{service}-abcde"), "namespace": "default", "generateName": format!("{service}-"),
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {
                "kubernetes.io/service-name": service,
                "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
            },
        },
        "addressType": "IPv4",
        "ports": [{"name": "http", "protocol": "TCP", "port": TARGET}],
        "endpoints": endpoints,
    })
}

fn endpoint(service: &str, address: Ipv4Addr) -> Value {
    let pod = format!("{service}-5d4f8c7b9-{:08x}", u32::from(address));
    json!({
        "addresses": [address.to_string()],
        "conditions": {"ready": true, "serving": true, "terminating": false},
        "nodeName": "worker-1",
        "targetRef": {"kind": "Pod", "namespace": "default", "name": pod, "uid": uid(2, address)},
    })
}

/// An identity of the usual length.
fn uid(kind: u32, address: Ipv4Addr) -> String {
    format!("{kind:08x}-0000-4000-8000-0000{:08x}", u32::from(address))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn objects_are_a_node_and_two_for_each_service() {
        let town = Town::new(3);
        let names: Vec<String> = town
            .objects()
            .map(|object| format!("{}/{}", object["kind"], object["metadata"]["name"]).replace('"', ""))
            .collect();
        assert_eq!(names.len(), 1 + 4 + 4);
        assert_eq!((names[0].as_str(), names[4].as_str()), ("Node/bench", "Service/marked"));
        assert_eq!(names[8], "EndpointSlice/marked-abcde");
    }

    #[test]
    fn a_change_replaces_one_endpoint_by_one_that_nobody_has() {
        let town = Town::new(10_000);
        let addresses = |slice: Value| -> BTreeSet<String> {
            let endpoints = slice["endpoints"].as_array().cloned().unwrap_or_default();
            endpoints
                .iter()
                .map(|endpoint| endpoint["addresses"][0].to_string())
                .collect()
        };
        let (before, after) = (
            addresses(town.slice(9_999, None)),
            addresses(town.slice(9_999, Some(7))),
        );
        assert_eq!(
            (before.len(), after.len(), before.intersection(&after).count()),
            (10, 10, 9)
        );
        assert_eq!(
            addresses(town.marked_slice(256)),
            BTreeSet::from(["\"10.250.1.1\"".to_owned()])
        );
        // The fillers end below the strangers.
        assert!(town.endpoints(9_999)[9] < Ipv4Addr::new(10, 240, 0, 1));
    }
}
