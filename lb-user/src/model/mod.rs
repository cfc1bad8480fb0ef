//! The flat records that sources produce and the desired state folds.
//!
//! Here live the types alone: no parsing of Kubernetes objects (that is `source::convert`), no decision about who
//! serves what (that is `desired`). Every value has been checked at the edge: an address is an address, a port is not zero.

mod cidr;
mod input;
mod update;

use std::{fmt, net::IpAddr, num::NonZeroU16, sync::Arc};

pub use self::{
    cidr::{Cidr, CidrError},
    input::{
        Affinity, Endpoint, Family, Hints, LoadBalancerAddress, Node, NodeAddresses, Pod, Service, ServicePort,
        ServiceType, Slice, SlicePort, SourceRanges, Workload,
    },
    update::{Content, Kind, Object, ObjectKey, Update},
};

/// Namespace and name of a Kubernetes object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectName {
    /// The namespace; `default` where the object names none.
    pub namespace: Arc<str>,
    /// The object's own name.
    pub name: Arc<str>,
}

impl ObjectName {
    /// Names an object.
    pub fn new(namespace: &str, name: &str) -> Self {
        Self {
            namespace: namespace.into(),
            name: name.into(),
        }
    }
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// The transport protocols that Evenkeel balances.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// TCP, and MPTCP at the socket hooks.
    Tcp,
    /// UDP.
    Udp,
}

/// Which port of a Service an address belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FrontendKind {
    /// `spec.clusterIPs`.
    ClusterIp,
    /// A node address and `nodePort`.
    NodePort,
    /// `spec.externalIPs`.
    ExternalIp,
    /// `status.loadBalancer.ingress` with `ipMode: VIP`.
    LoadBalancer,
}

/// What the socket hooks answer when a frontend has no usable backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WhenEmpty {
    /// ECONNREFUSED: no usable endpoint anywhere (C11).
    Refuse,
    /// EHOSTUNREACH: endpoints exist, but none that a Local policy may use (C9).
    Unreachable,
}

/// What a client outside the node is told when a frontend has no backend for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WhenEmptyOutside {
    /// RST or port unreachable: no usable endpoint anywhere (C11).
    Refuse,
    /// Nothing: endpoints exist, but none that a Local policy may use (C9).
    Silence,
}

/// An endpoint that may receive new flows, as a member of a backend set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Member {
    /// The endpoint's address.
    pub addr: IpAddr,
    /// The endpoint's port.
    pub port: NonZeroU16,
    /// Its share relative to the others: 1 unless an annotation says otherwise; 0 gets nothing new.
    pub weight: u16,
}

/// The view of a Service port's endpoints that a frontend uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// All usable endpoints (after topology).
    Cluster,
    /// Usable endpoints on this node alone.
    Local,
}

/// Identifies a backend set within its Service; stable over changes of its members.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SetName {
    /// The Service port's name (the empty name is a name).
    pub port_name: Arc<str>,
    /// The Service port's protocol.
    pub protocol: Protocol,
    /// True for the IPv6 set of the port.
    pub ipv6: bool,
    /// Cluster or Local view.
    pub scope: Scope,
}

/// The usable endpoints behind one Service port, family and scope.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackendSet {
    /// The set's identity within its Service.
    pub name: SetName,
    /// Usable members, sorted, without duplicates of (address, port).
    pub members: Vec<Member>,
    /// Endpoints that keep their flows but get no new ones (serving or terminating, not usable), sorted.
    pub draining: Vec<Member>,
}

/// One address, port and protocol that clients dial.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frontend {
    /// The address that is dialled.
    pub addr: IpAddr,
    /// The port that is dialled.
    pub port: NonZeroU16,
    /// The protocol.
    pub protocol: Protocol,
    /// Which of the Service's kinds of address this is.
    pub kind: FrontendKind,
    /// Index into [`DesiredService::sets`].
    pub set: usize,
    /// What to answer while the set is empty.
    pub when_empty: WhenEmpty,
    /// ClientIP affinity's timeout in seconds, where it is on (C18).
    pub affinity_seconds: Option<u32>,
    /// What clients outside the node meet here; `None` is nothing: their packets pass untouched.
    pub outside: Option<Outside>,
}

/// What clients outside the node meet at a frontend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Outside {
    /// Index into [`DesiredService::sets`].
    pub set: usize,
    /// What to answer while that set is empty.
    pub when_empty: WhenEmptyOutside,
    /// Whether flows to backends beyond the node leave with the node's own source (C17).
    pub masquerade: bool,
    /// Whether [`DesiredService::sources`] alone are admitted (C14).
    pub source_ranges: bool,
}

/// All that one Service wants in the kernel; the output of `desired`, the input of `compile`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DesiredService {
    /// The Service.
    pub name: ObjectName,
    /// Its frontends that it owns, sorted by (addr, port, protocol); those that an older Service holds are left out.
    pub frontends: Vec<Frontend>,
    /// The sets that the frontends name, sorted by name.
    pub sets: Vec<BackendSet>,
    /// Who is admitted from outside at frontends with source ranges, sorted, each once; none is nobody.
    pub sources: Vec<Cidr>,
}

/// Something in the input that was not taken, for people to read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Where it stands: a file (with line), or the API server.
    pub origin: String,
    /// The object, such as `Service default/web`.
    pub object: String,
    /// The field, such as `spec.clusterIPs[0]`.
    pub field: String,
    /// One sentence: what was found and what is allowed.
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}: {}", self.origin, self.object, self.field, self.message)
    }
}
