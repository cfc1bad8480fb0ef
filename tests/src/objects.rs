//! Services, slices and nodes as an API server would write them, for manifests in a folder.
//!
//! JSON is YAML, so a document here is a manifest. Nothing is checked: tests also need objects that are wrong.

use std::net::IpAddr;

use serde_json::{Value, json};

/// A Service in the namespace `default` with the given `spec`.
pub fn service(name: &str, spec: impl Into<Value>) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": "default"},
        "spec": spec.into(),
    })
}

/// The `spec` of a ClusterIP Service with one TCP port 80 that leads to port 8080.
pub fn cluster_ip(addresses: &[&str]) -> Value {
    json!({
        "type": "ClusterIP",
        "clusterIP": addresses.first().copied().unwrap_or_default(),
        "clusterIPs": addresses,
        "ports": [{"port": 80, "targetPort": 8080, "protocol": "TCP"}],
    })
}

/// A slice of a Service in the namespace `default` for the unnamed TCP port 8080; the family is that of the first address.
pub fn slice(name: &str, service: &str, endpoints: &[Value]) -> Value {
    let address: Option<IpAddr> = endpoints
        .first()
        .and_then(|endpoint| endpoint["addresses"][0].as_str())
        .and_then(|text| text.parse().ok());
    let family = if address.is_some_and(|address| address.is_ipv6()) {
        "IPv6"
    } else {
        "IPv4"
    };
    json!({
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": name, "namespace": "default",
            "labels": {"kubernetes.io/service-name": service},
        },
        "addressType": family,
        "ports": [{"name": "", "protocol": "TCP", "port": 8080}],
        "endpoints": endpoints,
    })
}

/// A ready endpoint without further conditions.
pub fn ready(address: &str) -> Value {
    json!({"addresses": [address], "conditions": {"ready": true}})
}

/// An endpoint with all three conditions.
pub fn endpoint(address: &str, ready: bool, serving: bool, terminating: bool) -> Value {
    json!({
        "addresses": [address],
        "conditions": {"ready": ready, "serving": serving, "terminating": terminating},
    })
}

/// Several objects in one manifest.
pub fn documents(objects: &[Value]) -> String {
    let texts: Vec<String> = objects.iter().map(|object| format!("---\n{object:#}\n")).collect();
    texts.concat()
}

/// A changed copy of an object.
#[must_use]
pub fn with(object: &Value, pointer: &str, value: Value) -> Value {
    let mut changed = object.clone();
    let (parent, key) = pointer.rsplit_once('/').unwrap_or(("", pointer));
    if let Some(parent) = changed.pointer_mut(parent) {
        match parent {
            Value::Array(items) => {
                if let Some(item) = key.parse::<usize>().ok().and_then(|index| items.get_mut(index)) {
                    *item = value;
                }
            }
            parent => parent[key] = value,
        }
    }
    changed
}
