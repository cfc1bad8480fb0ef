//! Where the story is told: a node with the client and the proxy, and three servers behind a link.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use anyhow::Result;
use lb_user::lab::{Netns, Server, link, server::Manner};

/// The Service's address.
pub(crate) const WEB: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 96, 0, 10)), 80);
/// The servers' port.
pub(crate) const TARGET: u16 = 8080;
const FIRST_SOURCE_PORT: u16 = 40_000;
const SOURCE_PORTS: u16 = 200;

/// The `n`th backend, counted from 1.
pub(crate) fn backend(n: u8) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::new(10, 244, 1, n), TARGET))
}

/// The first `n` backends.
pub(crate) fn backends(n: u8) -> Vec<SocketAddr> {
    (1..=n).map(backend).collect()
}

/// Fresh namespaces, so that no entry, port or rule of an earlier arm is in them, and servers that run from the start.
#[derive(Debug)]
pub(crate) struct Stage {
    /// The client and the proxy are here.
    pub(crate) node: Netns,
    _servers: Server,
}

impl Stage {
    pub(crate) fn new() -> Result<Self> {
        let (node, pods) = (Netns::new()?, Netns::new()?);
        link::join((&node, "node0"), (&pods, "pods0"))?;
        let gateway = IpAddr::from([10, 244, 255, 254]);
        link::add_address(&node, "node0", IpAddr::from([10, 244, 0, 1]), 16)?;
        link::add_address(&pods, "pods0", gateway, 16)?;
        for backend in backends(3) {
            link::add_address(&pods, "pods0", backend.ip(), 16)?;
        }
        // IPVS takes a packet from its way out: it needs one first.
        link::add_default_route(&node, "node0", gateway)?;
        // What nobody rewrites ends there.
        pods.write_sysctl("ipv4/ip_forward", "0")?;
        node.set_local_ports(FIRST_SOURCE_PORT, FIRST_SOURCE_PORT + SOURCE_PORTS - 1)?;
        Ok(Self {
            node,
            // They close first, so that the client's ports are free again at once.
            _servers: Server::start(&pods, &backends(3), Manner::Greet)?,
        })
    }
}
