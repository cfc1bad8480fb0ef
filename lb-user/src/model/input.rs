//! What sources produce: Services, EndpointSlices, Nodes and Pods as flat records.
//!
//! A record holds what some rule needs and nothing else, and it is small: 10,000 Services with 10 endpoints each are
//! some 18 MB, indexes of the fold included. Addresses that must never be dialled (loopback, link-local, multicast, unspecified) are not in here.

use std::{net::IpAddr, num::NonZeroU16, sync::Arc, time::SystemTime};

use super::{Cidr, ObjectName, Protocol};

/// An address family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// The family of an address.
    pub fn of(addr: IpAddr) -> Self {
        if addr.is_ipv4() { Self::V4 } else { Self::V6 }
    }
}

/// `spec.type` of a Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ServiceType {
    /// `ClusterIP`, the default.
    ClusterIp,
    /// `NodePort`.
    NodePort,
    /// `LoadBalancer`.
    LoadBalancer,
    /// `ExternalName`: a DNS alias that no proxy serves.
    ExternalName,
}

/// ClientIP affinity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Affinity {
    /// Timeout in seconds, 1..=86400.
    pub seconds: u32,
}

/// One entry of `spec.ports`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePort {
    /// The port's name; empty where it has none.
    pub name: Arc<str>,
    /// The protocol.
    pub protocol: Protocol,
    /// The port that clients dial on the Service's addresses.
    pub port: NonZeroU16,
    /// The port that clients dial on node addresses, where the Service has one.
    pub node_port: Option<NonZeroU16>,
}

/// One entry of `status.loadBalancer.ingress` that is an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LoadBalancerAddress {
    /// The address.
    pub addr: IpAddr,
    /// True for `ipMode: VIP` (the default): the node handles it. False for `Proxy`: packets must reach the load balancer.
    pub vip: bool,
}

/// Who may use a load balancer's addresses, family by family (C14): `None` is everybody, no range is nobody.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SourceRanges {
    /// Ranges of IPv4 clients.
    pub v4: Option<Box<[Cidr]>>,
    /// Ranges of IPv6 clients.
    pub v6: Option<Box<[Cidr]>>,
}

impl SourceRanges {
    /// The ranges of one family; `None` is everybody.
    pub fn of(&self, family: Family) -> Option<&[Cidr]> {
        match family {
            Family::V4 => self.v4.as_deref(),
            Family::V6 => self.v6.as_deref(),
        }
    }
}

/// A Service, flat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// Namespace and name.
    pub name: ObjectName,
    /// Where the object stands, for messages: a file, or the API server.
    pub origin: Arc<str>,
    /// Seconds since the epoch of its creation, where the object says it.
    pub created: Option<i64>,
    /// Label `service.kubernetes.io/service-proxy-name`.
    pub proxy_name: Option<Arc<str>>,
    /// Whether the label `service.kubernetes.io/headless` is there.
    pub headless_label: bool,
    /// `spec.type`.
    pub service_type: ServiceType,
    /// At most one address of each family, in the object's order; empty for a headless Service.
    pub cluster_ips: Box<[IpAddr]>,
    /// `spec.externalIPs`.
    pub external_ips: Box<[IpAddr]>,
    /// Addresses of `status.loadBalancer.ingress`; entries with a host name alone are left out.
    pub load_balancer: Box<[LoadBalancerAddress]>,
    /// `spec.loadBalancerSourceRanges`: who may use the load balancer's addresses.
    pub source_ranges: SourceRanges,
    /// `spec.ports` that are TCP or UDP, with a port number.
    pub ports: Box<[ServicePort]>,
    /// ClientIP affinity, where it is on.
    pub affinity: Option<Affinity>,
    /// `internalTrafficPolicy: Local`.
    pub internal_local: bool,
    /// `externalTrafficPolicy: Local`.
    pub external_local: bool,
    /// `spec.healthCheckNodePort`.
    pub health_check_node_port: Option<NonZeroU16>,
}

/// One entry of an EndpointSlice's `ports` that has a number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlicePort {
    /// The port's name; empty where it has none.
    pub name: Arc<str>,
    /// The protocol.
    pub protocol: Protocol,
    /// The port that the endpoints listen on.
    pub port: NonZeroU16,
}

/// `hints` of an endpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Hints {
    /// `forZones`.
    pub zones: Box<[Arc<str>]>,
    /// `forNodes`.
    pub nodes: Box<[Arc<str>]>,
}

/// One endpoint of a slice, with the conditions' defaults applied (C5).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Its first address (C2).
    pub addr: IpAddr,
    /// Ready for new flows; true where the object says nothing.
    pub ready: bool,
    /// Able to serve, ready or not; true where the object says nothing.
    pub serving: bool,
    /// About to go; false where the object says nothing.
    pub terminating: bool,
    /// The node that it runs on.
    pub node: Option<Arc<str>>,
    /// The zone that it runs in.
    pub zone: Option<Arc<str>>,
    /// Topology hints, where it carries any; equal ones are shared.
    pub hints: Option<Arc<Hints>>,
}

/// An EndpointSlice, flat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Namespace and name of the slice itself.
    pub name: ObjectName,
    /// Name of the Service it belongs to, in the same namespace.
    pub service: Arc<str>,
    /// Its `addressType`.
    pub family: Family,
    /// Weight of each of its endpoints, 0..=100 (annotation `evenkeel.io/weight`).
    pub weight: u16,
    /// When what it says came about, where it says so (annotation `endpoints.kubernetes.io/last-change-trigger-time`).
    pub changed_at: Option<SystemTime>,
    /// Its ports.
    pub ports: Box<[SlicePort]>,
    /// Its endpoints.
    pub endpoints: Box<[Endpoint]>,
}

impl Slice {
    /// The Service it belongs to.
    pub fn service_name(&self) -> ObjectName {
        ObjectName {
            namespace: self.name.namespace.clone(),
            name: self.service.clone(),
        }
    }
}

/// A Node, flat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Its name.
    pub name: Arc<str>,
    /// Label `topology.kubernetes.io/zone`.
    pub zone: Option<Arc<str>>,
    /// `status.addresses` of type InternalIP, in the object's order: the first of each family is the primary one.
    pub internal_ips: Box<[IpAddr]>,
    /// `status.addresses` of type ExternalIP.
    pub external_ips: Box<[IpAddr]>,
    /// Being deleted, or tainted `ToBeDeletedByClusterAutoscaler` (C22).
    pub leaving: bool,
}

/// What a Pod belongs to: the object that people wrote, as far as the Pod itself tells.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Workload {
    /// Its kind, such as `Deployment` or `CronJob`; `Pod` for one that nobody owns.
    pub kind: Arc<str>,
    /// Its name, in the Pod's namespace.
    pub name: Arc<str>,
}

/// A Pod that runs, flat: whose connections come from which addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// Namespace and name.
    pub name: ObjectName,
    /// The node that it runs on.
    pub node: Option<Arc<str>>,
    /// Its addresses, one of each family at most in practice; never empty.
    pub ips: Box<[IpAddr]>,
    /// What it belongs to.
    pub workload: Workload,
    /// Whether it lives in the node's network namespace: its addresses are the node's then.
    pub host_network: bool,
}

/// The addresses of this host's own interfaces, as the kernel tells them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeAddresses {
    /// The addresses; loopback and link-local ones may be among them and are passed over.
    pub addresses: Box<[IpAddr]>,
}
