//! Pods of the lab: namespaces with a link to their node, in which servers say who they are and whom they see.

use std::net::{IpAddr, SocketAddr};

use anyhow::Result;
use lb_user::lab::Netns;
use serde_json::{Value, json};
use tokio::runtime::Handle;

use super::{
    dial::Dialer,
    node::{self, LabNode},
    plan::{self, Family},
    serve::Serving,
    topology::{self, Wires},
};

/// How a pod is joined to its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Joint {
    /// By a link of its own.
    Link,
    /// Beyond a hop with a narrow link.
    Deep,
    /// It is in the node's own namespace and has the node's addresses.
    Host,
}

/// A pod.
#[derive(Debug)]
pub struct Pod {
    /// What its servers are: closed first.
    pub serving: Option<Serving>,
    /// Its name, which its servers say.
    pub name: String,
    /// Its node's number.
    pub node: u8,
    /// Its network namespace.
    pub netns: Netns,
    addresses: [IpAddr; 2],
    _hop: Option<Netns>,
}

impl Pod {
    /// Makes pod number `n` of a node, serving.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new(wires: &Wires, runtime: &Handle, node: &LabNode, n: u8, joint: Joint) -> Result<Self> {
        let number = node.number;
        let device = format!("pod{n}");
        let mut hop = None;
        let netns = match joint {
            Joint::Host => node.netns.clone(),
            Joint::Link => {
                let netns = topology::place(false)?;
                wires.join_pod(&netns, number, n, &device)?;
                netns
            }
            Joint::Deep => {
                let netns = topology::place(false)?;
                hop = Some(wires.join_deep_pod(&netns, number, n, &device)?);
                netns
            }
        };
        let addresses = Family::ALL.map(|family| match joint {
            Joint::Host => plan::node(family, number),
            Joint::Link | Joint::Deep => plan::pod(family, number, n),
        });
        let name = match joint {
            Joint::Host => format!("host-{number}"),
            Joint::Link | Joint::Deep => format!("pod-{number}-{n}"),
        };
        let serving = node.inside(|| Serving::start(runtime, &netns, &name, &addresses))??;
        Ok(Self {
            serving: Some(serving),
            name,
            node: number,
            netns,
            addresses,
            _hop: hop,
        })
    }

    /// Its address.
    pub fn ip(&self, family: Family) -> IpAddr {
        match family {
            Family::V4 => self.addresses[0],
            Family::V6 => self.addresses[1],
        }
    }

    /// Where it serves.
    pub fn target(&self, family: Family) -> SocketAddr {
        plan::at(self.ip(family), plan::TARGET)
    }

    /// Somebody in the pod who dials; run it [`LabNode::inside`] its node.
    pub fn dialer(&self) -> Dialer<'_> {
        Dialer::new(&self.netns)
    }

    /// The pod as a ready endpoint.
    pub fn ready(&self, family: Family) -> Value {
        self.endpoint(family, true, true, false)
    }

    /// The pod as an endpoint that is terminating and still serves.
    pub fn draining(&self, family: Family) -> Value {
        self.endpoint(family, false, true, true)
    }

    /// The pod as an endpoint that is terminating and serves no longer.
    pub fn ending(&self, family: Family) -> Value {
        self.endpoint(family, false, false, true)
    }

    /// Connections that its servers have accepted.
    pub fn accepted(&self) -> u64 {
        self.serving.as_ref().map_or(0, Serving::accepted)
    }

    /// The pod as an endpoint that is not ready.
    pub fn unready(&self, family: Family) -> Value {
        self.endpoint(family, false, false, false)
    }

    fn endpoint(&self, family: Family, ready: bool, serving: bool, terminating: bool) -> Value {
        json!({
            "addresses": [self.ip(family)],
            "nodeName": node::name(self.node),
            "conditions": {"ready": ready, "serving": serving, "terminating": terminating},
            "targetRef": {"kind": "Pod", "name": self.name, "namespace": "default", "uid": format!("uid-{}", self.name)},
        })
    }
}
