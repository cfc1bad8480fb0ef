//! The fold of all input into what the kernel shall hold.
//!
//! Here is decided who serves what (contract C1 to C18). Pure: no clock, no IO; the result depends on the objects alone,
//! never on the order in which they came. One object's change costs its own Service, not the cluster: slices are
//! indexed by Service, addresses by owner, and a [`DesiredService`] is computed only when it is asked for.

mod claims;
mod endpoints;
mod health;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    net::IpAddr,
    num::NonZeroU16,
    sync::Arc,
};

use self::{
    claims::{Claim, Ground, Key, Owners},
    endpoints::{Candidates, Place},
};
use crate::model::{
    BackendSet, Cidr, Content, DesiredService, Family, Frontend, FrontendKind, Kind, Node, NodeAddresses, Object,
    ObjectKey, ObjectName, Outside, Problem, Protocol, Scope, Service, ServiceType, SetName, Slice, Update, WhenEmpty,
    WhenEmptyOutside,
};

pub use self::health::HealthCheck;

/// On which of the node's addresses NodePorts are served (C12). Never on loopback or link-local ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodePortAddresses {
    /// On all addresses of the host.
    All,
    /// On the Node's first InternalIP of each family; without a Node object, on the host's first address of each family.
    Primary,
    /// On those addresses of the host that lie in one of the ranges.
    Ranges(Vec<Cidr>),
}

/// What the fold must know beside the objects.
#[derive(Clone, Debug)]
pub struct Config {
    /// This node's name.
    pub node_name: String,
    /// The proxy name that Services must ask for; `None` serves those that ask for none (C1).
    pub proxy_name: Option<String>,
    /// Whether `spec.externalIPs` are served (C15).
    pub external_ips: bool,
    /// Where NodePorts are served (C12).
    pub node_port_addresses: NodePortAddresses,
    /// The kinds that must have synced before anything may shrink (C24).
    pub awaited: Vec<Kind>,
}

/// The Services whose desired state may differ after an update.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changed {
    /// Their names.
    pub services: BTreeSet<ObjectName>,
}

impl Changed {
    /// True if no Service is touched.
    pub fn is_empty(&self) -> bool {
        self.services.is_empty()
    }

    /// Adds what another update touched.
    pub fn merge(&mut self, other: Self) {
        self.services.extend(other.services);
    }
}

/// The input as it stands, indexed for incremental work.
#[derive(Debug)]
pub struct Desired {
    config: Config,
    entries: HashMap<ObjectName, Entry>,
    /// Which Service each slice was last filed under.
    filed: HashMap<ObjectName, Arc<str>>,
    owners: Owners,
    /// The Services of ours that want a health-check node port.
    health_checked: BTreeSet<ObjectName>,
    node: Option<Arc<Node>>,
    host: NodeAddresses,
    place: Place,
    ground: Ground,
    synced: BTreeSet<Kind>,
    problems: BTreeMap<Arc<str>, Vec<Problem>>,
}

/// All that is known under one Service's name.
///
/// Invariant: an entry without Service and slices does not stay in the map; `claims` are those of `service`.
#[derive(Debug, Default)]
struct Entry {
    service: Option<Arc<Service>>,
    claims: Box<[Claim]>,
    /// Sorted by name.
    slices: Vec<Arc<Slice>>,
}

impl Desired {
    /// Starts with no objects.
    pub fn new(config: Config) -> Self {
        let place = Place {
            node: config.node_name.as_str().into(),
            zone: None,
        };
        let ground = Ground {
            external_ips: config.external_ips,
            ..Ground::default()
        };
        Self {
            config,
            entries: HashMap::new(),
            filed: HashMap::new(),
            owners: Owners::default(),
            health_checked: BTreeSet::new(),
            node: None,
            host: NodeAddresses::default(),
            place,
            ground,
            synced: BTreeSet::new(),
            problems: BTreeMap::new(),
        }
    }

    /// Takes one step of input; tells which Services it may have touched.
    pub fn apply(&mut self, update: Update) -> Changed {
        let mut changed = Changed::default();
        match update {
            Update::Replace(Content::Services(services)) => self.replace_services(services, &mut changed),
            Update::Replace(Content::Slices(slices)) => self.replace_slices(slices, &mut changed),
            Update::Replace(Content::Nodes(nodes)) => {
                let own = nodes.into_iter().find(|node| *node.name == *self.config.node_name);
                self.set_node(own, &mut changed);
            }
            // Who a client is changes nothing in the kernel.
            Update::Replace(Content::Pods(_)) | Update::Apply(Object::Pod(_)) => {}
            Update::Apply(Object::Service(service)) => self.put_service(&service, &mut changed),
            Update::Apply(Object::Slice(slice)) => self.put_slice(slice, &mut changed),
            Update::Apply(Object::Node(node)) => {
                if *node.name == *self.config.node_name {
                    self.set_node(Some(node), &mut changed);
                }
            }
            Update::Delete(ObjectKey { kind, name }) => match kind {
                Kind::Service => self.drop_service(&name, &mut changed),
                Kind::Slice => self.drop_slice(&name, &mut changed),
                Kind::Node => {
                    if *name.name == *self.config.node_name {
                        self.set_node(None, &mut changed);
                    }
                }
                Kind::Pod | Kind::Addresses => {}
            },
            Update::Addresses(addresses) => {
                self.synced.insert(Kind::Addresses);
                if self.host != addresses {
                    self.host = addresses;
                    self.resettle(&mut changed);
                }
            }
            Update::Synced(kind) => {
                self.synced.insert(kind);
            }
            Update::Problems { subject, problems } => {
                if problems.is_empty() {
                    self.problems.remove(&subject);
                } else {
                    self.problems.insert(subject, problems);
                }
            }
        }
        changed
    }

    /// What one Service wants in the kernel; `None` if it is not there or not ours (C1).
    pub fn service(&self, name: &ObjectName) -> Option<DesiredService> {
        let entry = self.entries.get(name)?;
        let service = entry.service.as_deref().filter(|service| self.is_ours(service))?;

        let mut candidates: HashMap<(u16, Family), Candidates<'_>> = HashMap::new();
        let mut sets: BTreeMap<SetName, BackendSet> = BTreeMap::new();
        let mut frontends: Vec<(SetName, Option<SetName>, Frontend)> = Vec::new();
        let mut sources: BTreeSet<Cidr> = BTreeSet::new();
        for claim in entry
            .claims
            .iter()
            .filter(|claim| self.owners.owner(&claim.key()) == Some(name))
        {
            let Some(port) = service.ports.get(usize::from(claim.service_port)) else {
                continue;
            };
            let family = Family::of(claim.addr);
            let candidates = candidates
                .entry((claim.service_port, family))
                .or_insert_with(|| Candidates::merge(&entry.slices, family, &port.name, port.protocol, &self.place));
            let mut set_of = |scope| {
                let name = SetName {
                    port_name: port.name.clone(),
                    protocol: port.protocol,
                    ipv6: family == Family::V6,
                    scope,
                };
                sets.entry(name.clone()).or_insert_with(|| {
                    let view = match scope {
                        Scope::Cluster => candidates.cluster(&self.place),
                        Scope::Local => candidates.local(),
                    };
                    BackendSet {
                        name: name.clone(),
                        members: view.usable,
                        draining: view.draining,
                    }
                });
                name
            };
            // From inside the node, only the cluster IP is subject to a policy (C9, C10).
            let scope = if claim.kind == FrontendKind::ClusterIp && service.internal_local {
                Scope::Local
            } else {
                Scope::Cluster
            };
            let set = set_of(scope);
            let when_empty = match scope {
                Scope::Local if candidates.any_usable() => WhenEmpty::Unreachable,
                Scope::Local | Scope::Cluster => WhenEmpty::Refuse,
            };
            // From outside, everything else is, on its own (C7, C9); a cluster IP is not served there.
            let outside_scope = match claim.kind {
                FrontendKind::ClusterIp => None,
                _ if service.external_local => Some(Scope::Local),
                _ => Some(Scope::Cluster),
            };
            let ranges = match claim.kind {
                FrontendKind::LoadBalancer => service.source_ranges.of(family),
                _ => None,
            };
            sources.extend(ranges.into_iter().flatten());
            let outside = outside_scope.map(|scope| Outside {
                set: 0,
                when_empty: match scope {
                    Scope::Local if candidates.any_usable() => WhenEmptyOutside::Silence,
                    Scope::Local | Scope::Cluster => WhenEmptyOutside::Refuse,
                },
                masquerade: scope == Scope::Cluster,
                source_ranges: ranges.is_some(),
            });
            let frontend = Frontend {
                addr: claim.addr,
                port: claim.port,
                protocol: claim.protocol,
                kind: claim.kind,
                set: 0,
                when_empty,
                affinity_seconds: service.affinity.map(|affinity| affinity.seconds),
                outside,
            };
            frontends.push((set, outside_scope.map(set_of), frontend));
        }
        frontends.sort_by_key(|(_, _, frontend)| (frontend.addr, frontend.port, frontend.protocol));
        let numbers: HashMap<&SetName, usize> = sets.keys().zip(0..).collect();
        let number = |name: &SetName| numbers.get(name).copied().unwrap_or_default();
        let frontends = frontends
            .into_iter()
            .map(|(set, outside_set, frontend)| Frontend {
                set: number(&set),
                outside: frontend.outside.map(|outside| Outside {
                    set: outside_set.as_ref().map_or(0, number),
                    ..outside
                }),
                ..frontend
            })
            .collect();
        Some(DesiredService {
            name: name.clone(),
            frontends,
            sets: sets.into_values().collect(),
            sources: sources.into_iter().collect(),
        })
    }

    /// Everything that is wanted, in no order.
    pub fn services(&self) -> impl Iterator<Item = DesiredService> {
        self.entries.keys().filter_map(|name| self.service(name))
    }

    /// The names of the Services that are served, in no order.
    pub fn names(&self) -> impl Iterator<Item = &ObjectName> {
        self.entries
            .iter()
            .filter(|(_, entry)| entry.service.as_deref().is_some_and(|service| self.is_ours(service)))
            .map(|(name, _)| name)
    }

    /// The Service as it came in, served or not.
    pub fn input(&self, name: &ObjectName) -> Option<&Arc<Service>> {
        self.entries.get(name)?.service.as_ref()
    }

    /// The slices of a Service as they came in, sorted by name.
    pub fn slices(&self, name: &ObjectName) -> &[Arc<Slice>] {
        self.entries.get(name).map_or(&[], |entry| &entry.slices)
    }

    /// Whether any slice of the Service still names this endpoint, whatever its conditions.
    ///
    /// An endpoint that is in no set's `members` or `draining` may still be here (unready and not serving, or of another
    /// node or zone); it is *gone* only when this says no.
    pub fn holds_endpoint(&self, name: &ObjectName, addr: IpAddr, port: NonZeroU16, protocol: Protocol) -> bool {
        self.slices(name).iter().any(|slice| {
            slice.ports.iter().any(|p| p.port == port && p.protocol == protocol)
                && slice.endpoints.iter().any(|endpoint| endpoint.addr == addr)
        })
    }

    /// This node's own object, where it is known.
    pub fn node(&self) -> Option<&Arc<Node>> {
        self.node.as_ref()
    }

    /// Whether every awaited kind has synced (C24).
    pub fn synced(&self) -> bool {
        self.config.awaited.iter().all(|kind| self.synced.contains(kind))
    }

    /// Whether one kind has synced.
    pub fn synced_kind(&self, kind: Kind) -> bool {
        self.synced.contains(&kind)
    }

    /// All that is not taken now, and why: by the sources, then addresses that a Service may not have.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems: Vec<Problem> = self.problems.values().flatten().cloned().collect();
        let mut refused = Vec::new();
        for entry in self.entries.values() {
            let Some(service) = entry.service.as_deref().filter(|service| self.is_ours(service)) else {
                continue;
            };
            if !service.external_ips.is_empty() || !service.load_balancer.is_empty() {
                claims::claims(service, &self.ground, |problem| refused.push(problem));
            }
        }
        for ((addr, port, protocol), owner, others) in self.owners.contested() {
            for name in others {
                let Some(entry) = self.entries.get(name) else {
                    continue;
                };
                let Some(claim) = entry.claims.iter().find(|claim| claim.key() == (addr, port, protocol)) else {
                    continue;
                };
                let protocol = match protocol {
                    Protocol::Tcp => "TCP",
                    Protocol::Udp => "UDP",
                };
                refused.push(Problem {
                    origin: entry.service.as_ref().map(|s| s.origin.to_string()).unwrap_or_default(),
                    object: format!("Service {name}"),
                    field: claim.field(),
                    message: format!(
                        "{addr} port {port} {protocol} is held by Service {owner}, which is older or first by name; this \
                         Service takes over when that one lets go"
                    ),
                });
            }
        }
        refused.extend(self.health_check_problems());
        refused.sort_by(|a, b| (&a.object, &a.field, &a.message).cmp(&(&b.object, &b.field, &b.message)));
        problems.extend(refused);
        problems
    }

    fn is_ours(&self, service: &Service) -> bool {
        service.proxy_name.as_deref() == self.config.proxy_name.as_deref()
            && !service.headless_label
            && service.service_type != ServiceType::ExternalName
            && !service.cluster_ips.is_empty()
    }

    fn replace_services(&mut self, services: Vec<Arc<Service>>, changed: &mut Changed) {
        let kept: HashSet<&ObjectName> = services.iter().map(|service| &service.name).collect();
        let gone: Vec<ObjectName> = self
            .entries
            .iter()
            .filter(|(name, entry)| entry.service.is_some() && !kept.contains(name))
            .map(|(name, _)| name.clone())
            .collect();
        for name in gone {
            self.drop_service(&name, changed);
        }
        for service in services {
            self.put_service(&service, changed);
        }
    }

    fn replace_slices(&mut self, slices: Vec<Arc<Slice>>, changed: &mut Changed) {
        let kept: HashSet<&ObjectName> = slices.iter().map(|slice| &slice.name).collect();
        let gone: Vec<ObjectName> = self.filed.keys().filter(|name| !kept.contains(name)).cloned().collect();
        for name in gone {
            self.drop_slice(&name, changed);
        }
        for slice in slices {
            self.put_slice(slice, changed);
        }
    }

    fn put_service(&mut self, service: &Arc<Service>, changed: &mut Changed) {
        let entry = self.entries.entry(service.name.clone()).or_default();
        if entry.service.as_ref() == Some(service) {
            return;
        }
        self.exchange_service(&service.name, Some(service), changed);
    }

    fn drop_service(&mut self, name: &ObjectName, changed: &mut Changed) {
        self.exchange_service(name, None, changed);
        if self.entries.get(name).is_some_and(|entry| entry.slices.is_empty()) {
            self.entries.remove(name);
        }
    }

    /// Puts another record, or none, under a Service's name, and settles who owns the addresses of both.
    fn exchange_service(&mut self, name: &ObjectName, new: Option<&Arc<Service>>, changed: &mut Changed) {
        let new_claims = match new {
            Some(service) if self.is_ours(service) => claims::claims(service, &self.ground, |_| ()).into(),
            _ => Box::default(),
        };
        let Some(entry) = self.entries.get_mut(name) else {
            return;
        };
        if entry.service.as_ref() == new && entry.claims == new_claims {
            return;
        }
        let old = std::mem::replace(&mut entry.service, new.cloned());
        let old_claims = std::mem::replace(&mut entry.claims, new_claims);
        let is_ours = |service: Option<&Arc<Service>>| service.is_some_and(|service| self.is_ours(service));
        if is_ours(old.as_ref()) || is_ours(new) {
            changed.services.insert(name.clone());
        }
        if new.is_some_and(|new| self.is_ours(new) && health::port_of(new).is_some()) {
            self.health_checked.insert(name.clone());
        } else {
            self.health_checked.remove(name);
        }

        // A key that the Service keeps, at the same age, stays where it is: nobody else is touched.
        let same_age = matches!((&old, new), (Some(old), Some(new)) if old.created == new.created);
        let kept: HashSet<Key> = if same_age {
            let new_claims = self.entries.get(name).map_or(&[][..], |entry| &entry.claims);
            let new_keys: HashSet<Key> = new_claims.iter().map(Claim::key).collect();
            old_claims
                .iter()
                .map(Claim::key)
                .filter(|key| new_keys.contains(key))
                .collect()
        } else {
            HashSet::new()
        };
        if let Some(old) = &old {
            for claim in old_claims.iter().filter(|claim| !kept.contains(&claim.key())) {
                changed.services.extend(self.owners.remove(claim.key(), old));
            }
        }
        if let (Some(new), Some(entry)) = (new, self.entries.get(name)) {
            for claim in entry.claims.iter().filter(|claim| !kept.contains(&claim.key())) {
                changed.services.extend(self.owners.add(claim.key(), new));
            }
        }
    }

    fn put_slice(&mut self, slice: Arc<Slice>, changed: &mut Changed) {
        let service = slice.service_name();
        let filed = self.filed.insert(slice.name.clone(), slice.service.clone());
        if let Some(before) = filed.filter(|before| *before != slice.service) {
            let before = ObjectName {
                namespace: slice.name.namespace.clone(),
                name: before,
            };
            self.unfile(&before, &slice.name, changed);
        }
        let entry = self.entries.entry(service.clone()).or_default();
        match entry.slices.binary_search_by(|other| other.name.cmp(&slice.name)) {
            Ok(at) if entry.slices[at] == slice => return,
            Ok(at) => entry.slices[at] = slice,
            Err(at) => entry.slices.insert(at, slice),
        }
        self.touch(service, changed);
    }

    fn drop_slice(&mut self, name: &ObjectName, changed: &mut Changed) {
        if let Some(service) = self.filed.remove(name) {
            let service = ObjectName {
                namespace: name.namespace.clone(),
                name: service,
            };
            self.unfile(&service, name, changed);
        }
    }

    fn unfile(&mut self, service: &ObjectName, slice: &ObjectName, changed: &mut Changed) {
        let Some(entry) = self.entries.get_mut(service) else {
            return;
        };
        entry.slices.retain(|other| other.name != *slice);
        if entry.slices.is_empty() && entry.service.is_none() {
            self.entries.remove(service);
        } else {
            self.touch(service.clone(), changed);
        }
    }

    fn touch(&self, name: ObjectName, changed: &mut Changed) {
        if self.input(&name).is_some_and(|service| self.is_ours(service)) {
            changed.services.insert(name);
        }
    }

    fn set_node(&mut self, node: Option<Arc<Node>>, changed: &mut Changed) {
        if self.node == node {
            return;
        }
        self.node = node;
        let zone = self.node.as_ref().and_then(|node| node.zone.clone());
        if self.place.zone != zone {
            self.place.zone = zone;
            let names: Vec<ObjectName> = self.names().cloned().collect();
            changed.services.extend(names);
        }
        self.resettle(changed);
    }

    /// Settles all claims anew after the node's addresses changed.
    fn resettle(&mut self, changed: &mut Changed) {
        let ground = Ground {
            external_ips: self.config.external_ips,
            node_port_addresses: self.node_port_addresses(),
            own: self.own_addresses().into_iter().collect(),
        };
        if ground == self.ground {
            return;
        }
        self.ground = ground;
        let touched: Vec<(ObjectName, Arc<Service>)> = self
            .entries
            .iter()
            .filter_map(|(name, entry)| Some((name, entry.service.as_ref()?)))
            .filter(|(_, service)| service.service_type != ServiceType::ClusterIp || !service.external_ips.is_empty())
            .map(|(name, service)| (name.clone(), service.clone()))
            .collect();
        for (name, service) in touched {
            self.exchange_service(&name, Some(&service), changed);
        }
    }

    fn own_addresses(&self) -> Vec<IpAddr> {
        let node = self.node.as_deref();
        let of_node = node.map_or(&[][..], |node| &node.internal_ips).iter();
        let of_node = of_node.chain(node.map_or(&[][..], |node| &node.external_ips));
        self.host.addresses.iter().chain(of_node).copied().collect()
    }

    fn node_port_addresses(&self) -> Vec<IpAddr> {
        let reachable = |addr: &IpAddr| match addr {
            IpAddr::V4(v4) => !v4.is_loopback() && !v4.is_link_local() && !v4.is_unspecified() && !v4.is_multicast(),
            IpAddr::V6(v6) => {
                !v6.is_loopback() && !v6.is_unicast_link_local() && !v6.is_unspecified() && !v6.is_multicast()
            }
        };
        let internal = self.node.as_deref().map_or(&[][..], |node| &node.internal_ips);
        let mut chosen: Vec<IpAddr> = match &self.config.node_port_addresses {
            NodePortAddresses::All => self.own_addresses(),
            NodePortAddresses::Primary => {
                let known = internal.iter().chain(&self.host.addresses).copied().filter(reachable);
                let (v4, v6): (Vec<IpAddr>, Vec<IpAddr>) = known.partition(IpAddr::is_ipv4);
                v4.first().into_iter().chain(v6.first()).copied().collect()
            }
            NodePortAddresses::Ranges(ranges) => {
                let own = self.own_addresses().into_iter();
                own.filter(|addr| ranges.iter().any(|range| range.contains(*addr)))
                    .collect()
            }
        };
        chosen.retain(reachable);
        chosen.sort_unstable();
        chosen.dedup();
        chosen
    }
}
