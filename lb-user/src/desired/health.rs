//! Health-check node ports (C21): what a load balancer outside asks, to learn whether this node has endpoints of its own.
//!
//! Which ports, for which Services, and what they say. Pure: who listens there is the agent's business. A Service has such
//! a port while it is a load balancer's with the external policy Local; one owner for each port, the older Service.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    num::NonZeroU16,
};

use super::{Desired, Entry, NodePortAddresses, claims::Claimant, endpoints::Candidates};
use crate::model::{Family, ObjectName, Problem, Service, ServiceType};

/// One port to listen on, and what it says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HealthCheck {
    /// The port.
    pub port: NonZeroU16,
    /// The Service that it is about.
    pub service: ObjectName,
    /// Where the Service stands, for messages.
    pub origin: String,
    /// Distinct addresses of endpoints on this node that get new flows, over all ports and both families. Those that
    /// serve while they terminate are none.
    pub local_endpoints: usize,
}

/// The port that a Service wants checked.
pub(super) fn port_of(service: &Service) -> Option<NonZeroU16> {
    let checked = service.service_type == ServiceType::LoadBalancer && service.external_local;
    service.health_check_node_port.filter(|_| checked)
}

impl Desired {
    /// The ports to listen on, in order.
    pub fn health_checks(&self) -> Vec<HealthCheck> {
        let owners = self.health_check_claims().into_iter();
        owners
            .filter_map(|(port, claimants)| {
                let owner = claimants.first()?;
                let entry = self.entries.get(&owner.name)?;
                let service = entry.service.as_deref()?;
                Some(HealthCheck {
                    port,
                    service: owner.name.clone(),
                    origin: service.origin.to_string(),
                    local_endpoints: self.local_endpoints(entry, service),
                })
            })
            .collect()
    }

    /// The addresses to listen on: those of node ports, where ranges are configured; `None` is all that the host has.
    pub fn health_check_addresses(&self) -> Option<Vec<IpAddr>> {
        match self.config.node_port_addresses {
            NodePortAddresses::All | NodePortAddresses::Primary => None,
            NodePortAddresses::Ranges(_) => {
                // The Node's object may name addresses that the host itself has not.
                let mut own = self.ground.node_port_addresses.clone();
                own.retain(|addr| self.host.addresses.contains(addr));
                Some(own)
            }
        }
    }

    /// Services that cannot have their port, since an older one has it.
    pub(super) fn health_check_problems(&self) -> impl Iterator<Item = Problem> {
        let losers = self.health_check_claims().into_iter().flat_map(|(port, claimants)| {
            let mut claimants = claimants.into_iter().map(|claimant| claimant.name);
            let owner = claimants.next();
            claimants.filter_map(move |loser| Some((port, owner.clone()?, loser)))
        });
        losers.filter_map(|(port, owner, loser)| {
            Some(Problem {
                origin: self.input(&loser)?.origin.to_string(),
                object: format!("Service {loser}"),
                field: "spec.healthCheckNodePort".to_owned(),
                message: format!(
                    "port {port} is held by Service {owner}, which is older or first by name; this Service takes over when \
                     that one lets go"
                ),
            })
        })
    }

    /// Who wants each port, the owner first.
    fn health_check_claims(&self) -> BTreeMap<NonZeroU16, BTreeSet<Claimant>> {
        let mut claims: BTreeMap<NonZeroU16, BTreeSet<Claimant>> = BTreeMap::new();
        for name in &self.health_checked {
            let Some(service) = self.input(name) else { continue };
            if let Some(port) = port_of(service) {
                claims.entry(port).or_default().insert(Claimant::of(service));
            }
        }
        claims
    }

    fn local_endpoints(&self, entry: &Entry, service: &Service) -> usize {
        let mut addresses: BTreeSet<IpAddr> = BTreeSet::new();
        for port in &service.ports {
            for family in [Family::V4, Family::V6] {
                let candidates = Candidates::merge(&entry.slices, family, &port.name, port.protocol, &self.place);
                addresses.extend(candidates.local_ready());
            }
        }
        addresses.len()
    }
}
