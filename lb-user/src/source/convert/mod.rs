//! From Kubernetes objects to flat records: the edge where everything is checked.
//!
//! Pure: no IO, no clock. Whatever cannot be taken becomes a [`Problem`] that names the object and the field, says what
//! was found and what is allowed. A part that cannot be taken (an address, a port, an endpoint) loses only itself; a
//! value that would change the meaning of the whole (a bad annotation, an unknown policy) loses its object, and
//! never another one.

mod names;
mod node;
mod pod;
mod service;
mod slice;
#[cfg(test)]
mod tests;

use std::{fmt::Display, net::IpAddr, num::NonZeroU16, sync::Arc};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

pub use self::{names::Names, pod::PodObject};
use crate::model::{Kind, Object, ObjectKey, ObjectName, Problem, Protocol};

/// The label that names the proxy a Service is meant for (C1).
const LABEL_PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";
/// The label that tells proxies to leave a Service alone (C1).
const LABEL_HEADLESS: &str = "service.kubernetes.io/headless";
/// The label by which an EndpointSlice names its Service (C4).
const LABEL_SERVICE_NAME: &str = "kubernetes.io/service-name";
/// The label of a Node's zone.
const LABEL_ZONE: &str = "topology.kubernetes.io/zone";
/// The taint that the cluster autoscaler sets on a Node it is about to remove (C22).
const TAINT_AUTOSCALER: &str = "ToBeDeletedByClusterAutoscaler";
/// The annotation that weighs all endpoints of an EndpointSlice.
pub const ANNOTATION_WEIGHT: &str = "evenkeel.io/weight";
/// The annotation with the time of the change that an EndpointSlice was written for.
const ANNOTATION_CHANGED: &str = "endpoints.kubernetes.io/last-change-trigger-time";
/// The greatest weight that [`ANNOTATION_WEIGHT`] may give.
pub const MAX_WEIGHT: u16 = 100;

/// What became of one Kubernetes object.
#[derive(Clone, Debug)]
pub struct Converted {
    /// Its identity, where it has a usable name.
    pub key: Option<ObjectKey>,
    /// The flat record; `None` if the object was refused, or is none that concerns a proxy.
    pub object: Option<Object>,
    /// All that was not taken.
    pub problems: Vec<Problem>,
}

/// Converts objects of one origin, sharing equal strings among them.
#[derive(Debug)]
pub struct Converter<'a> {
    /// Where the objects stand, for messages.
    pub origin: Arc<str>,
    /// The shared strings.
    pub names: &'a mut Names,
}

impl Converter<'_> {
    /// Converts a Service.
    pub fn service(&mut self, service: &k8s_openapi::api::core::v1::Service) -> Converted {
        self.object(Kind::Service, &service.metadata, |edge, names, name, origin| {
            service::convert(edge, names, name, origin, service).map(|s| Object::Service(Arc::new(s)))
        })
    }

    /// Converts an EndpointSlice; one without the label of a Service, or with addresses that are no IP addresses, is no
    /// concern of ours.
    pub fn slice(&mut self, slice: &k8s_openapi::api::discovery::v1::EndpointSlice) -> Converted {
        self.object(Kind::Slice, &slice.metadata, |edge, names, name, _| {
            slice::convert(edge, names, name, slice).map(|s| Object::Slice(Arc::new(s)))
        })
    }

    /// Converts a Node.
    pub fn node(&mut self, node: &k8s_openapi::api::core::v1::Node) -> Converted {
        self.object(Kind::Node, &node.metadata, |edge, names, name, _| {
            Some(Object::Node(Arc::new(node::convert(edge, names, name, node))))
        })
    }

    /// Converts a Pod; one that has ended, or has no address yet, is nobody's client.
    pub fn pod(&mut self, pod: &PodObject) -> Converted {
        self.object(Kind::Pod, &pod.metadata, |edge, names, name, _| {
            pod::convert(edge, names, name, pod).map(|pod| Object::Pod(Arc::new(pod)))
        })
    }

    fn object(
        &mut self,
        kind: Kind,
        metadata: &ObjectMeta,
        convert: impl FnOnce(&mut Edge, &mut Names, ObjectName, &Arc<str>) -> Option<Object>,
    ) -> Converted {
        let namespace = match kind {
            Kind::Node => "",
            _ => metadata
                .namespace
                .as_deref()
                .filter(|n| !n.is_empty())
                .unwrap_or("default"),
        };
        let raw_name = metadata.name.as_deref().unwrap_or_default();
        let mut edge = Edge {
            origin: &self.origin,
            object: object_label(kind, namespace, raw_name),
            problems: Vec::new(),
            unsaid: 0,
        };
        let named = edge.check_name("metadata.name", raw_name)
            && (namespace.is_empty() || edge.check_name("metadata.namespace", namespace));
        if !named {
            return Converted {
                key: None,
                object: None,
                problems: edge.finish(),
            };
        }
        let name = ObjectName {
            namespace: self.names.share(namespace),
            name: self.names.share(raw_name),
        };
        let key = ObjectKey {
            kind,
            name: name.clone(),
        };
        let object = convert(&mut edge, self.names, name, &self.origin);
        Converted {
            key: Some(key),
            object,
            problems: edge.finish(),
        }
    }
}

/// How messages name an object: `Service default/web`, `Node worker-1`.
pub fn object_label(kind: Kind, namespace: &str, name: &str) -> String {
    let name = if name.is_empty() { "(no name)" } else { name };
    if namespace.is_empty() {
        format!("{} {name}", kind.as_str())
    } else {
        format!("{} {namespace}/{name}", kind.as_str())
    }
}

/// Collects what is wrong with one object while it is converted.
struct Edge<'a> {
    origin: &'a str,
    object: String,
    problems: Vec<Problem>,
    /// Problems beyond [`MOST_PROBLEMS`].
    unsaid: usize,
}

/// How many problems of one object are told one by one; an object with a thousand bad endpoints is one mistake.
const MOST_PROBLEMS: usize = 16;

impl Edge<'_> {
    fn finish(mut self) -> Vec<Problem> {
        if self.unsaid > 0 {
            self.problems.push(Problem {
                origin: self.origin.to_owned(),
                object: self.object,
                field: "(others)".to_owned(),
                message: format!("{} more problems of this object are not shown", self.unsaid),
            });
        }
        self.problems
    }

    fn report(&mut self, field: impl Into<String>, message: impl Into<String>) {
        if self.problems.len() >= MOST_PROBLEMS {
            self.unsaid += 1;
            return;
        }
        self.problems.push(Problem {
            origin: self.origin.to_owned(),
            object: self.object.clone(),
            field: field.into(),
            message: message.into(),
        });
    }

    /// Whether `name` is one that the API server would take (a DNS subdomain): names go into paths, labels and logs.
    fn check_name(&mut self, field: &str, name: &str) -> bool {
        let fine = !name.is_empty()
            && name.len() <= 253
            && name
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'.');
        if !fine {
            self.report(
                field,
                format!(
                    "found {}; wanted 1 to 253 characters out of a-z, 0-9, '-' and '.'",
                    quote(name)
                ),
            );
        }
        fine
    }

    /// The address written in `text`, unless it is none or is one that nobody may be sent to.
    fn address(&mut self, field: impl Into<String>, text: &str) -> Option<IpAddr> {
        let Ok(addr) = text.parse::<IpAddr>() else {
            self.report(field, format!("found {}; wanted an IPv4 or IPv6 address", quote(text)));
            return None;
        };
        if let Some(reason) = refusal(addr) {
            self.report(
                field,
                format!("{addr} is {reason}; wanted a unicast address that other hosts can reach"),
            );
            return None;
        }
        Some(addr)
    }

    /// The port number, unless it lies outside 1..=65535. Zero and nothing are no error: such a port is ignored (C3).
    fn port(&mut self, field: impl Into<String>, port: Option<i32>) -> Option<NonZeroU16> {
        let number = port.filter(|&number| number != 0)?;
        let port = u16::try_from(number).ok().and_then(NonZeroU16::new);
        if port.is_none() {
            self.report(field, format!("found {number}; wanted a port number from 1 to 65535"));
        }
        port
    }

    /// The protocol, unless it is one that Evenkeel does not balance.
    fn protocol(&mut self, field: impl Into<String>, protocol: Option<&str>) -> Option<Protocol> {
        match protocol {
            None | Some("" | "TCP") => Some(Protocol::Tcp),
            Some("UDP") => Some(Protocol::Udp),
            Some("SCTP") => {
                self.report(field, "SCTP is not balanced by Evenkeel; this port is left alone");
                None
            }
            Some(other) => {
                self.report(field, format!("found {}; wanted TCP or UDP", quote(other)));
                None
            }
        }
    }

    /// Whether a port's name is short enough to be one.
    fn port_name(&mut self, field: impl Into<String>, name: &str) -> bool {
        let fine = name.len() <= 63;
        if !fine {
            self.report(field, format!("has {} characters; wanted at most 63", name.len()));
        }
        fine
    }

    /// One of the allowed words, or the default where the object says nothing.
    fn choice<T: Copy>(&mut self, field: &str, found: Option<&str>, default: T, allowed: &[(&str, T)]) -> Option<T> {
        let Some(found) = found.filter(|f| !f.is_empty()) else {
            return Some(default);
        };
        let choice = allowed.iter().find(|(word, _)| *word == found).map(|&(_, value)| value);
        if choice.is_none() {
            let words: Vec<&str> = allowed.iter().map(|&(word, _)| word).collect();
            self.report(field, format!("found {}; wanted {}", quote(found), words.join(" or ")));
        }
        choice
    }
}

/// Why nobody may be sent to an address, if so.
fn refusal(addr: IpAddr) -> Option<&'static str> {
    match addr {
        IpAddr::V4(v4) => {
            if v4.is_unspecified() {
                Some("unspecified")
            } else if v4.octets()[0] == 0 {
                Some("of the network 0.0.0.0/8, which means this host")
            } else if v4.is_loopback() {
                Some("a loopback address")
            } else if v4.is_link_local() {
                Some("link-local")
            } else if v4.is_multicast() {
                Some("multicast")
            } else if v4.is_broadcast() {
                Some("the broadcast address")
            } else {
                None
            }
        }
        IpAddr::V6(v6) => {
            if v6.is_unspecified() {
                Some("unspecified")
            } else if v6.is_loopback() {
                Some("a loopback address")
            } else if v6.to_ipv4_mapped().is_some() {
                Some("an IPv4 address in IPv6 notation, which hides its true nature")
            } else if v6.is_unicast_link_local() {
                Some("link-local")
            } else if v6.is_multicast() {
                Some("multicast")
            } else {
                None
            }
        }
    }
}

/// A found text in quotes, cut short: input may be of any length.
pub(crate) fn quote(text: impl Display) -> String {
    const LONGEST: usize = 80;
    let text = text.to_string();
    match text.char_indices().nth(LONGEST) {
        None => format!("{text:?}"),
        Some((end, _)) => format!("{:?}…", &text[..end]),
    }
}
