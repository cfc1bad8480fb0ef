//! Which addresses a Service asks for, and who gets an address that several ask for.
//!
//! Pure. One owner per (address, port, protocol): the older Service, then the one whose name comes first.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    net::IpAddr,
    num::NonZeroU16,
};

use crate::model::{Family, FrontendKind, ObjectName, Problem, Protocol, Service, ServiceType};

/// What a client dials.
pub(super) type Key = (IpAddr, NonZeroU16, Protocol);

/// One address, port and protocol that a Service asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Claim {
    pub(super) addr: IpAddr,
    pub(super) port: NonZeroU16,
    pub(super) protocol: Protocol,
    pub(super) kind: FrontendKind,
    /// Index into [`Service::ports`].
    pub(super) service_port: u16,
}

impl Claim {
    pub(super) fn key(&self) -> Key {
        (self.addr, self.port, self.protocol)
    }

    /// The field of the Service that asks for it.
    pub(super) fn field(&self) -> String {
        match self.kind {
            FrontendKind::ClusterIp => "spec.clusterIPs".to_owned(),
            FrontendKind::NodePort => format!("spec.ports[{}].nodePort", self.service_port),
            FrontendKind::ExternalIp => "spec.externalIPs".to_owned(),
            FrontendKind::LoadBalancer => "status.loadBalancer.ingress".to_owned(),
        }
    }
}

/// What claims depend on beside the Service itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Ground {
    /// Whether `spec.externalIPs` are served (C15).
    pub(super) external_ips: bool,
    /// The addresses that NodePorts are served on (C12), sorted.
    pub(super) node_port_addresses: Vec<IpAddr>,
    /// The node's own addresses, which no Service may take.
    pub(super) own: HashSet<IpAddr>,
}

/// All that a Service asks for and may have, each key once; what it may not have goes to `refuse`.
pub(super) fn claims(service: &Service, ground: &Ground, mut refuse: impl FnMut(Problem)) -> Vec<Claim> {
    let serves = |addr: IpAddr| service.cluster_ips.iter().any(|ip| Family::of(*ip) == Family::of(addr));
    let mut allowed = |addr: IpAddr, field: &str| {
        let message = if ground.own.contains(&addr) {
            format!("{addr} is an address of this node itself; wanted one that no node has")
        } else if !serves(addr) {
            format!("{addr} is of a family that the Service has no cluster IP of, and is not served")
        } else {
            return true;
        };
        refuse(Problem {
            origin: service.origin.to_string(),
            object: format!("Service {}", service.name),
            field: field.to_owned(),
            message,
        });
        false
    };

    let mut addresses: Vec<(IpAddr, FrontendKind)> = Vec::new();
    addresses.extend(service.cluster_ips.iter().map(|&addr| (addr, FrontendKind::ClusterIp)));
    if ground.external_ips {
        for &addr in &service.external_ips {
            if allowed(addr, "spec.externalIPs") {
                addresses.push((addr, FrontendKind::ExternalIp));
            }
        }
    }
    if service.service_type == ServiceType::LoadBalancer {
        for lb in service.load_balancer.iter().filter(|lb| lb.vip) {
            if allowed(lb.addr, "status.loadBalancer.ingress") {
                addresses.push((lb.addr, FrontendKind::LoadBalancer));
            }
        }
    }
    let node_ports = matches!(service.service_type, ServiceType::NodePort | ServiceType::LoadBalancer);

    let mut seen: BTreeSet<Key> = BTreeSet::new();
    let mut claims = Vec::with_capacity(addresses.len() * service.ports.len());
    for (i, port) in service.ports.iter().enumerate() {
        let on_service = addresses.iter().map(|&(addr, kind)| (addr, port.port, kind));
        let on_node = port
            .node_port
            .filter(|_| node_ports)
            .into_iter()
            .flat_map(|node_port| ground.node_port_addresses.iter().map(move |&addr| (addr, node_port)))
            .filter(|&(addr, _)| serves(addr))
            .map(|(addr, node_port)| (addr, node_port, FrontendKind::NodePort));
        for (addr, number, kind) in on_service.chain(on_node) {
            if seen.insert((addr, number, port.protocol)) {
                claims.push(Claim {
                    addr,
                    port: number,
                    protocol: port.protocol,
                    kind,
                    service_port: i as u16,
                });
            }
        }
    }
    claims
}

/// A Service among those that ask for one key; the least one owns it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Claimant {
    /// Seconds since the epoch; a Service that does not say when it was created counts as the youngest.
    created: i64,
    pub(super) name: ObjectName,
}

impl Claimant {
    pub(super) fn of(service: &Service) -> Self {
        Self {
            created: service.created.unwrap_or(i64::MAX),
            name: service.name.clone(),
        }
    }
}

/// Who owns which key.
///
/// Invariant: no list is empty, and each is sorted, so that its first entry is the owner.
#[derive(Debug, Default)]
pub(super) struct Owners {
    claimants: HashMap<Key, Vec<Claimant>>,
    /// The keys that more than one Service asks for.
    contested: BTreeSet<Key>,
}

impl Owners {
    /// The owner of a key.
    pub(super) fn owner(&self, key: &Key) -> Option<&ObjectName> {
        self.claimants.get(key)?.first().map(|claimant| &claimant.name)
    }

    /// Adds a Service's claim; tells the Service that loses the key by it, if one does.
    pub(super) fn add(&mut self, key: Key, service: &Service) -> Option<ObjectName> {
        let claimant = Claimant::of(service);
        let Some(others) = self.claimants.get_mut(&key) else {
            self.claimants.insert(key, vec![claimant]);
            return None;
        };
        let at = others.binary_search(&claimant).err()?;
        others.insert(at, claimant);
        if others.len() > 1 {
            self.contested.insert(key);
        }
        if at == 0 {
            others.get(1).map(|loser| loser.name.clone())
        } else {
            None
        }
    }

    /// Removes a Service's claim; tells the Service that takes over by it, if one does.
    pub(super) fn remove(&mut self, key: Key, service: &Service) -> Option<ObjectName> {
        let others = self.claimants.get_mut(&key)?;
        let at = others.binary_search(&Claimant::of(service)).ok()?;
        others.remove(at);
        if others.len() < 2 {
            self.contested.remove(&key);
        }
        if others.is_empty() {
            self.claimants.remove(&key);
            return None;
        }
        if at == 0 {
            others.first().map(|heir| heir.name.clone())
        } else {
            None
        }
    }

    /// Every key that more than one Service asks for: its owner, and those who wait for it.
    pub(super) fn contested(&self) -> impl Iterator<Item = (Key, &ObjectName, impl Iterator<Item = &ObjectName>)> {
        self.contested.iter().filter_map(|key| {
            let (owner, others) = self.claimants.get(key)?.split_first()?;
            Some((*key, &owner.name, others.iter().map(|claimant| &claimant.name)))
        })
    }
}
