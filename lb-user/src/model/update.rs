//! What a source tells the fold.
//!
//! A source first sends one [`Update::Replace`] and one [`Update::Synced`] for each kind, then differences; after an
//! outage it may send a `Replace` again at any time. Every update is idempotent.

use std::sync::Arc;

use super::{Node, NodeAddresses, ObjectName, Pod, Problem, Service, Slice};

/// The kinds of input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Services.
    Service,
    /// EndpointSlices.
    Slice,
    /// Nodes: this node's own object at least.
    Node,
    /// Pods, which tell who a client is; desired state does not depend on them.
    Pod,
    /// The host's own interface addresses.
    Addresses,
}

impl Kind {
    /// The kind's name, as Kubernetes writes it where it is an object's.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Service => "Service",
            Self::Slice => "EndpointSlice",
            Self::Node => "Node",
            Self::Pod => "Pod",
            Self::Addresses => "NodeAddresses",
        }
    }
}

/// Identifies an object across kinds. A Node's namespace is empty.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectKey {
    /// The kind.
    pub kind: Kind,
    /// Namespace and name.
    pub name: ObjectName,
}

/// One object of input, shared between the source that made it and the fold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Object {
    /// A Service.
    Service(Arc<Service>),
    /// An EndpointSlice.
    Slice(Arc<Slice>),
    /// A Node.
    Node(Arc<Node>),
    /// A Pod.
    Pod(Arc<Pod>),
}

impl Object {
    /// The object's identity.
    pub fn key(&self) -> ObjectKey {
        match self {
            Self::Service(service) => ObjectKey {
                kind: Kind::Service,
                name: service.name.clone(),
            },
            Self::Slice(slice) => ObjectKey {
                kind: Kind::Slice,
                name: slice.name.clone(),
            },
            Self::Node(node) => ObjectKey {
                kind: Kind::Node,
                name: ObjectName {
                    namespace: "".into(),
                    name: node.name.clone(),
                },
            },
            Self::Pod(pod) => ObjectKey {
                kind: Kind::Pod,
                name: pod.name.clone(),
            },
        }
    }
}

/// All objects of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// All Services.
    Services(Vec<Arc<Service>>),
    /// All EndpointSlices.
    Slices(Vec<Arc<Slice>>),
    /// All Nodes that the source watches.
    Nodes(Vec<Arc<Node>>),
    /// All Pods that the source watches.
    Pods(Vec<Arc<Pod>>),
}

/// One step of input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Update {
    /// The whole content of one kind: what is not in it is gone.
    Replace(Content),
    /// An object is new or has changed.
    Apply(Object),
    /// An object is gone, or can no longer be taken.
    Delete(ObjectKey),
    /// The host's own addresses, all of them; this syncs [`Kind::Addresses`].
    Addresses(NodeAddresses),
    /// The kind's first whole content has been sent.
    Synced(Kind),
    /// All that is wrong now with one subject; it replaces what was said about the subject before.
    Problems {
        /// A file, or an object such as `Service default/web`.
        subject: Arc<str>,
        /// Nothing here means that nothing is wrong any more.
        problems: Vec<Problem>,
    },
}
