//! Which endpoints of a Service port may get new flows (C3 to C8).
//!
//! Pure. The Cluster and the Local view are computed independently of each other; topology touches the Cluster view
//! alone, and never a fallback to terminating endpoints.

use std::{collections::BTreeMap, net::IpAddr, num::NonZeroU16, sync::Arc};

use crate::model::{Endpoint, Family, Member, Protocol, Slice};

/// Where this node is: what "local", "same node" and "same zone" mean.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Place {
    /// This node's name.
    pub(super) node: Arc<str>,
    /// This node's zone, where it is known.
    pub(super) zone: Option<Arc<str>>,
}

/// The endpoints of one Service port and family, seen from one scope.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct View {
    /// Those that may get new flows, sorted.
    pub(super) usable: Vec<Member>,
    /// Those that keep their flows alone, sorted.
    pub(super) draining: Vec<Member>,
}

/// The merged endpoints of one Service port and family.
pub(super) struct Candidates<'a>(BTreeMap<(IpAddr, NonZeroU16), Candidate<'a>>);

struct Candidate<'a> {
    endpoint: &'a Endpoint,
    weight: u16,
    local: bool,
}

impl Candidate<'_> {
    /// Of two records for one address and port the greater one counts: the ready one (C6), else the one that could serve
    /// as a fallback; the node's own, if only one of them says so.
    fn rank(&self) -> (bool, bool, bool, bool) {
        let e = self.endpoint;
        (e.ready, e.serving && e.terminating, e.serving, self.local)
    }

    fn member(&self, port: NonZeroU16) -> Member {
        Member {
            addr: self.endpoint.addr,
            port,
            weight: self.weight,
        }
    }
}

impl<'a> Candidates<'a> {
    /// Merges what all slices of a Service say about one port (C3, C4, C6).
    ///
    /// `slices` come sorted by name, so that equal records are always resolved the same way.
    pub(super) fn merge(
        slices: &'a [Arc<Slice>],
        family: Family,
        port_name: &str,
        protocol: Protocol,
        place: &Place,
    ) -> Self {
        let mut merged: BTreeMap<(IpAddr, NonZeroU16), Candidate<'a>> = BTreeMap::new();
        for slice in slices.iter().filter(|slice| slice.family == family) {
            let ports = slice
                .ports
                .iter()
                .filter(|p| *p.name == *port_name && p.protocol == protocol);
            for port in ports {
                for endpoint in &slice.endpoints {
                    let candidate = Candidate {
                        endpoint,
                        weight: slice.weight,
                        local: endpoint.node.as_ref() == Some(&place.node),
                    };
                    let known = merged.get(&(endpoint.addr, port.port));
                    if known.is_none_or(|known| known.rank() < candidate.rank()) {
                        merged.insert((endpoint.addr, port.port), candidate);
                    }
                }
            }
        }
        Self(merged)
    }

    /// The view of the whole cluster: ready ones by topology, else those that serve while they terminate.
    pub(super) fn cluster(&self, place: &Place) -> View {
        let topology = self.topology(place);
        self.view(
            |_| true,
            |candidate| match topology {
                Topology::None => true,
                Topology::Node => hinted_to_node(candidate, place),
                Topology::Zone => hinted_to_zone(candidate, place),
            },
        )
    }

    /// The view of this node's own endpoints.
    pub(super) fn local(&self) -> View {
        self.view(|candidate| candidate.local, |_| true)
    }

    /// The addresses of this node's own endpoints that are ready, and meant to get new flows at all.
    pub(super) fn local_ready(&self) -> impl Iterator<Item = IpAddr> {
        let all = self.0.values();
        all.filter(|c| c.local && c.endpoint.ready && c.weight > 0)
            .map(|c| c.endpoint.addr)
    }

    /// Whether anything could get a new flow under policy Cluster.
    pub(super) fn any_usable(&self) -> bool {
        self.0.values().any(|c| {
            let e = c.endpoint;
            e.ready || (e.serving && e.terminating)
        })
    }

    fn view(&self, sees: impl Fn(&Candidate<'a>) -> bool, near: impl Fn(&Candidate<'a>) -> bool) -> View {
        let ready = |c: &Candidate<'a>| c.endpoint.ready && near(c);
        let fallback = |c: &Candidate<'a>| c.endpoint.serving && c.endpoint.terminating;
        let seen = || self.0.iter().filter(|(_, candidate)| sees(candidate));
        let any_ready = seen().any(|(_, candidate)| ready(candidate));
        let mut view = View::default();
        for (&(_, port), candidate) in seen() {
            let usable = if any_ready {
                ready(candidate)
            } else {
                fallback(candidate)
            };
            if usable {
                view.usable.push(candidate.member(port));
            } else if candidate.endpoint.serving || candidate.endpoint.terminating {
                view.draining.push(candidate.member(port));
            }
        }
        view
    }

    /// Which hints count (C8): only if every ready endpoint carries them, and one of them is for here.
    fn topology(&self, place: &Place) -> Topology {
        let ready = || self.0.values().filter(|c| c.endpoint.ready);
        let all_hinted_to_nodes = ready().all(|c| c.endpoint.hints.as_ref().is_some_and(|h| !h.nodes.is_empty()));
        if all_hinted_to_nodes && ready().any(|c| hinted_to_node(c, place)) {
            return Topology::Node;
        }
        let all_hinted_to_zones = ready().all(|c| c.endpoint.hints.as_ref().is_some_and(|h| !h.zones.is_empty()));
        if all_hinted_to_zones && ready().any(|c| hinted_to_zone(c, place)) {
            return Topology::Zone;
        }
        Topology::None
    }
}

#[derive(Clone, Copy)]
enum Topology {
    None,
    Node,
    Zone,
}

fn hinted_to_node(candidate: &Candidate<'_>, place: &Place) -> bool {
    let hints = candidate.endpoint.hints.as_ref();
    hints.is_some_and(|hints| hints.nodes.contains(&place.node))
}

fn hinted_to_zone(candidate: &Candidate<'_>, place: &Place) -> bool {
    let hints = candidate.endpoint.hints.as_ref();
    let zone = place.zone.as_ref();
    hints.is_some_and(|hints| zone.is_some_and(|zone| hints.zones.contains(zone)))
}
