//! Who calls whom, by what clients are known as.

use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, Ipv4Addr, UdpSocket},
    os::fd::AsRawFd,
};

use super::state::{Shared, lock};
use crate::{
    analysis::stickiness::Client,
    observe::{address, clients::Caller, wall},
    view::{CallView, GraphView, QueryError, ServiceFilter, Timestamp, WorkloadView},
};

impl Shared {
    /// The calls of the Services that pass a filter, those of one workload put together.
    pub(super) fn graph_view(&self, filter: &ServiceFilter) -> Result<GraphView, QueryError> {
        let host = Host::read().map_err(|error| QueryError::Failed(error.to_string()))?;
        let reconciler = lock(&self.reconciler);
        let observation = lock(&self.observation);
        let names: BTreeMap<u32, _> = Self::shown(&reconciler, filter)
            .map(|(name, service)| (service.service_id, name))
            .collect();
        let mut calls: BTreeMap<(WorkloadView, u32), (u64, u64, u64)> = BTreeMap::new();
        for (client, service, counts) in observation.calls().iter() {
            if !names.contains_key(&service) {
                continue;
            }
            let client = match observation.caller(client) {
                Some(Caller::Pod(pod)) => WorkloadView {
                    namespace: pod.name.namespace.to_string(),
                    kind: pod.workload.kind.to_string(),
                    name: pod.workload.name.to_string(),
                },
                Some(Caller::Node) => self.node_as_caller(),
                Some(Caller::Outside) => WorkloadView {
                    namespace: String::new(),
                    kind: "Outside".to_owned(),
                    name: "outside".to_owned(),
                },
                None if host.holds(client) => self.node_as_caller(),
                None => WorkloadView {
                    namespace: String::new(),
                    kind: "Address".to_owned(),
                    name: address(client.address).to_string(),
                },
            };
            let sum = calls.entry((client, service)).or_default();
            sum.0 += counts.connections;
            sum.1 += counts.failures;
            sum.2 = sum.2.max(counts.last_ns);
        }
        let mut calls: Vec<CallView> = calls
            .into_iter()
            .filter_map(|((client, service), (connections, failures, last_ns))| {
                let name = names.get(&service)?;
                Some(CallView {
                    client,
                    namespace: name.namespace.to_string(),
                    service: name.name.to_string(),
                    connections,
                    failures,
                    last_seen: wall(last_ns),
                })
            })
            .collect();
        calls.sort_by(|a, b| (&a.client, &a.namespace, &a.service).cmp(&(&b.client, &b.namespace, &b.service)));
        Ok(GraphView {
            since: Timestamp::from_system(self.started),
            calls,
            forgotten: observation.calls().forgotten(),
        })
    }

    fn node_as_caller(&self) -> WorkloadView {
        WorkloadView {
            namespace: String::new(),
            kind: "Node".to_owned(),
            name: self.config.node_name.clone(),
        }
    }
}

/// The node itself, as clients that are processes of it show.
struct Host {
    netns: u64,
    addresses: Box<[IpAddr]>,
}

impl Host {
    fn read() -> io::Result<Self> {
        Ok(Self {
            netns: netns_cookie()?,
            addresses: super::addresses::read()?.addresses,
        })
    }

    /// Whether a client is the node's: by its namespace, or by an address. One that failed before it had an address, in a
    /// namespace that is nobody's yet, is not.
    fn holds(&self, client: &Client) -> bool {
        let address = address(client.address);
        client.netns == self.netns || self.addresses.contains(&address) && !address.is_loopback()
    }
}

/// The cookie of this process's network namespace.
fn netns_cookie() -> io::Result<u64> {
    /// From Linux 5.14.
    const SO_NETNS_COOKIE: libc::c_int = 71;
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
    let mut cookie = 0_u64;
    let mut len = size_of::<u64>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes into the cookie, which may hold any bytes.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_NETNS_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut len,
        )
    };
    if result == 0 {
        Ok(cookie)
    } else {
        Err(io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_node_is_known_by_its_namespace_and_by_its_addresses() {
        let octets = |text: &str| {
            let address: Ipv4Addr = text.parse().expect("an address");
            address.to_ipv6_mapped().octets()
        };
        let host = Host {
            netns: netns_cookie().expect("the kernel tells"),
            addresses: ["127.0.0.1", "192.0.2.1"]
                .map(|text| text.parse().expect("an address"))
                .into(),
        };
        assert_ne!(host.netns, 0);
        let holds = |netns: u64, address: &str| {
            host.holds(&Client {
                netns,
                address: octets(address),
            })
        };
        for address in ["0.0.0.0", "127.0.0.1", "192.0.2.1", "10.0.0.1"] {
            assert!(holds(host.netns, address), "{address}");
        }
        assert!(holds(0, "192.0.2.1"));
        for address in ["0.0.0.0", "127.0.0.1", "10.0.0.1"] {
            assert!(!holds(host.netns + 1, address), "{address}");
        }
    }
}
