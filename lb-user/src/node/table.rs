//! What the proxy in use has programmed for each frontend, so that "starved" and "never told of" are told apart.
//!
//! [`Table::read`] reads all at once, [`Table::find`] answers for one endpoint. The invariant: an endpoint is called absent
//! only where the whole of its Service's entry was read; in every other case the answer is [`Finding::Unknown`] with the reason.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use super::{
    Result, ipvs, legacy, nftables,
    proxy::{Kind, Proxy},
    rules::{self, Reach},
};
use crate::model::Protocol;

/// What the proxy has for one frontend.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Programmed {
    /// Where its connections can go.
    pub backends: HashMap<SocketAddr, ProxyBackend>,
    /// How it chooses, in the proxy's own word (`rr`, `random`).
    pub scheduler: Option<String>,
    /// How long a client stays with its backend, where it does.
    pub persistent: Option<Duration>,
    /// Whether there may be more backends than these.
    incomplete: bool,
}

/// What the proxy has for one backend of a frontend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProxyBackend {
    /// Its weight, where the proxy has weights; at 0 it gets no new connections.
    pub weight: Option<u32>,
    /// Open connections, where the proxy counts them.
    pub active: Option<u64>,
    /// Kept entries of connections that are not open, where the proxy counts them.
    pub inactive: Option<u64>,
}

/// The answer for one endpoint of one frontend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finding<'t> {
    /// The proxy sends connections to it, by its weight.
    Programmed {
        /// What the proxy has for the frontend.
        service: &'t Programmed,
        /// What it has for the endpoint.
        backend: &'t ProxyBackend,
    },
    /// The proxy does not know it.
    Absent {
        /// What the proxy has for the frontend; none where it does not know the frontend either.
        service: Option<&'t Programmed>,
    },
    /// It cannot be told.
    Unknown(&'t str),
}

/// What a proxy has programmed, at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    services: HashMap<(SocketAddr, Protocol), Programmed>,
    /// Why nothing is known of a frontend that is not in it.
    unknown: Option<String>,
    /// The number of the last change to the rules that it was read from.
    generation: Option<u32>,
}

impl Table {
    /// Reads what a proxy has programmed in this network namespace.
    ///
    /// Reading the rules of thousands of Services takes a good part of a second of a core: ask [`Table::is_current`] first.
    pub fn read(proxy: &Proxy) -> Self {
        let unknown = |reason: &str| Self {
            unknown: Some(reason.to_owned()),
            ..Self::default()
        };
        let outcome = match proxy.kind {
            Kind::KubeProxyIpvs | Kind::Ipvs => ipvs::list().map(|servers| match servers {
                Some(servers) => Self::of_ipvs(servers),
                None => unknown("IPVS is not loaded"),
            }),
            Kind::KubeProxyIptables | Kind::KubeProxyNftables => Self::read_rules(Some("random")),
            // Rules of others may dispatch in ways that are not read, which kube-proxy's do not.
            Kind::Rules => Self::read_rules(None).map(|table| Self {
                unknown: Some("no rule names the frontend in a way that is read".to_owned()),
                ..table
            }),
            Kind::Cilium => Ok(unknown("Cilium's maps are not read")),
            Kind::CalicoEbpf => Ok(unknown("Calico's maps are not read")),
            Kind::Evenkeel => Ok(unknown("Evenkeel's own tables are known to the agent itself")),
            Kind::Userspace => Ok(unknown(
                "a process that relays connections keeps its endpoints to itself",
            )),
            Kind::Unseen => Ok(unknown("no proxy was seen on this node")),
        };
        outcome.unwrap_or_else(|error| unknown(&error.reason()))
    }

    /// Whether nothing has changed since the table was read; false where only another look can tell.
    pub fn is_current(&self) -> bool {
        self.generation.is_some() && self.generation == nftables::generation().ok()
    }

    fn read_rules(scheduler: Option<&str>) -> Result<Self> {
        // Before the rules: a change that comes meanwhile is then read twice rather than missed.
        // The old iptables numbers no changes.
        let generation = nftables::generation().ok().filter(|_| !legacy::in_use());
        Ok(Self {
            generation,
            ..Self::of_rules(rules::read()?, scheduler)
        })
    }

    /// What the proxy has for a frontend, by its own address or as a port of all the node's addresses.
    pub fn service(&self, frontend: SocketAddr, protocol: Protocol) -> Option<&Programmed> {
        let everywhere = match frontend {
            SocketAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            SocketAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        };
        let at = |address| {
            self.services
                .get(&(SocketAddr::new(address, frontend.port()), protocol))
        };
        at(frontend.ip()).or_else(|| at(everywhere))
    }

    /// Why the table says nothing of a frontend that is not in it; none where it was read whole.
    pub fn unknown(&self) -> Option<&str> {
        self.unknown.as_deref()
    }

    /// Whether the proxy sends a frontend's connections to an endpoint.
    pub fn find(&self, frontend: SocketAddr, protocol: Protocol, endpoint: SocketAddr) -> Finding<'_> {
        let service = self.service(frontend, protocol);
        if let Some((service, backend)) = service.and_then(|s| Some((s, s.backends.get(&endpoint)?))) {
            return Finding::Programmed { service, backend };
        }
        match (service, &self.unknown) {
            (Some(service), _) if service.incomplete => {
                Finding::Unknown("the rules compute the endpoint for each connection")
            }
            (None, Some(reason)) => Finding::Unknown(reason),
            (service, _) => Finding::Absent { service },
        }
    }

    fn of_ipvs(servers: Vec<ipvs::VirtualServer>) -> Self {
        let services = servers.into_iter().map(|server| {
            let backends = server.servers.iter().map(|real| {
                let backend = ProxyBackend {
                    weight: Some(real.weight),
                    active: Some(real.active),
                    inactive: Some(real.inactive),
                };
                (real.address, backend)
            });
            let programmed = Programmed {
                backends: backends.collect(),
                scheduler: Some(server.scheduler.clone()),
                persistent: server.persistent,
                incomplete: false,
            };
            ((server.frontend, server.protocol), programmed)
        });
        Self {
            services: services.collect(),
            ..Self::default()
        }
    }

    fn of_rules(reach: Reach, scheduler: Option<&str>) -> Self {
        let services = reach.into_iter().map(|(frontend, reached)| {
            let backends = reached
                .endpoints
                .into_iter()
                .map(|endpoint| (endpoint, ProxyBackend::default()));
            let programmed = Programmed {
                backends: backends.collect(),
                scheduler: scheduler.map(str::to_owned),
                persistent: reached.persistent,
                incomplete: reached.computed,
            };
            (frontend, programmed)
        });
        Self {
            services: services.collect(),
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::{
        ipvs::{RealServer, VirtualServer},
        rules::Reached,
    };

    fn address(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    const WEB: &str = "10.96.0.10:80";

    #[test]
    fn ipvs_gives_weights_counts_and_scheduler() {
        let table = Table::of_ipvs(vec![VirtualServer {
            frontend: address(WEB),
            protocol: Protocol::Tcp,
            scheduler: "rr".to_owned(),
            persistent: Some(Duration::from_hours(3)),
            servers: vec![RealServer {
                address: address("10.244.1.1:8080"),
                weight: 0,
                active: 2,
                inactive: 120,
            }],
        }]);
        let Finding::Programmed { service, backend } =
            table.find(address(WEB), Protocol::Tcp, address("10.244.1.1:8080"))
        else {
            panic!("it is programmed");
        };
        assert_eq!(service.scheduler.as_deref(), Some("rr"));
        assert_eq!(service.persistent, Some(Duration::from_hours(3)));
        assert_eq!(
            (backend.weight, backend.active, backend.inactive),
            (Some(0), Some(2), Some(120))
        );
        let absent = table.find(address(WEB), Protocol::Tcp, address("10.244.1.2:8080"));
        assert!(matches!(absent, Finding::Absent { service: Some(_) }));
        let other = table.find(address(WEB), Protocol::Udp, address("10.244.1.1:8080"));
        assert_eq!(other, Finding::Absent { service: None });
    }

    #[test]
    fn an_incomplete_entry_calls_nobody_absent() {
        let reached = Reached {
            endpoints: [address("10.244.1.1:8080")].into(),
            computed: true,
            ..Reached::default()
        };
        let table = Table::of_rules(Reach::from([((address(WEB), Protocol::Tcp), reached)]), None);
        let find = |endpoint: &str| table.find(address(WEB), Protocol::Tcp, address(endpoint));
        assert!(matches!(find("10.244.1.1:8080"), Finding::Programmed { .. }));
        assert!(matches!(find("10.244.1.2:8080"), Finding::Unknown(_)));
    }

    #[test]
    fn a_proxy_whose_table_is_not_read_leaves_all_unknown() {
        for kind in [
            Kind::Cilium,
            Kind::CalicoEbpf,
            Kind::Evenkeel,
            Kind::Userspace,
            Kind::Unseen,
        ] {
            let table = Table::read(&Proxy::new(kind, "x", "y"));
            let found = table.find(address(WEB), Protocol::Tcp, address("10.244.1.1:8080"));
            assert!(matches!(found, Finding::Unknown(reason) if !reason.is_empty()));
            assert!(table.unknown().is_some());
        }
    }
}
