//! A node that runs somebody else's proxy: rules translate there, servers stand behind a link, the agent may look on.
//!
//! The node is an agent's [`Node`]; its own processes are the clients. Rules are written as kube-proxy's nftables mode lays
//! them out and under its table's name. The invariant: what the scene made goes with it and with the node.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream},
    os::fd::AsRawFd,
    time::Duration,
};

use anyhow::{Context, Result};
use lb_user::{
    lab::{
        Netns, Server,
        client::{Client, Load},
        link, nft,
        server::Manner,
    },
    model::Protocol,
};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrStorage, bind, connect, socket};

use crate::agent::{Node, must, until};

/// The node's device towards the servers.
pub const UPLINK: &str = "uplink";
/// The port that the servers listen on.
pub const TARGET: u16 = 8080;
/// The port of Services.
pub const PORT: u16 = 80;
/// The name of kube-proxy's tables.
pub const TABLE: &str = "kube-proxy";

/// The node's own address number `n` on the link, from 1.
pub const fn own(n: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 244, 0, n)
}

/// The address of Service number `n`.
pub const fn vip(n: u8) -> SocketAddr {
    SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 96, 0, n)), PORT)
}

/// Endpoint number `n` of Service number `service`.
pub const fn endpoint(service: u8, n: u8) -> SocketAddr {
    SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 244, service, n)), TARGET)
}

/// The first `count` endpoints of a Service.
pub fn endpoints(service: u8, count: u8) -> Vec<SocketAddr> {
    (1..=count).map(|n| endpoint(service, n)).collect()
}

/// A Service in the rules; its name is what kube-proxy derives chains from.
pub fn in_rules(name: &str, frontend: SocketAddr, endpoints: &[SocketAddr]) -> nft::Service {
    nft::Service {
        name: format!("ULMVA6XW-default/{name}/tcp/"),
        frontend,
        protocol: Protocol::Tcp,
        endpoints: endpoints.to_vec(),
    }
}

/// The node with its link and the servers behind it.
#[derive(Debug)]
pub struct Beside<'n> {
    node: &'n Node,
    /// The servers' namespace.
    pub pods: Netns,
}

impl<'n> Beside<'n> {
    /// Makes the link, with so many addresses of the node's own on it, and waits until packets come through.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new(node: &'n Node, own_addresses: u8) -> Result<Self> {
        let pods = Netns::new()?;
        link::join((node.netns(), UPLINK), (&pods, "down"))?;
        for n in 1..=own_addresses {
            link::add_address(node.netns(), UPLINK, own(n).into(), 16)?;
        }
        let (own6, gateway6) = (six(0, 1), six(0xff, 0xfe));
        link::add_address(node.netns(), UPLINK, own6, 64)?;
        let gateway = IpAddr::from([10, 244, 255, 254]);
        link::add_address(&pods, "down", gateway, 16)?;
        link::add_address(&pods, "down", gateway6, 64)?;
        for gateway in [gateway, gateway6] {
            link::add_default_route(node.netns(), UPLINK, gateway)?;
        }
        // What nobody translates ends there.
        pods.write_sysctl("ipv4/ip_forward", "0")?;
        let scene = Self { node, pods };
        for gateway in [gateway, gateway6] {
            until("the link", || scene.refuses(SocketAddr::new(gateway, 9)))?;
        }
        Ok(scene)
    }

    fn refuses(&self, closed: SocketAddr) -> Result<()> {
        let met = (self.node.netns()).run(|| TcpStream::connect_timeout(&closed, Duration::from_millis(200)))?;
        let refused = met
            .as_ref()
            .is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionRefused);
        must(refused, || format!("{met:?}"))
    }

    /// Gives the servers' namespace an address.
    ///
    /// # Errors
    /// The kernel's.
    pub fn add_pod(&self, address: IpAddr) -> Result<()> {
        let prefix = if address.is_ipv6() { 64 } else { 16 };
        Ok(link::add_address(&self.pods, "down", address, prefix)?)
    }

    /// Starts servers on addresses of their own.
    ///
    /// # Errors
    /// The kernel's.
    pub fn serve(&self, addresses: &[SocketAddr], manner: Manner) -> Result<Server> {
        for address in addresses {
            self.add_pod(address.ip())?;
        }
        Ok(Server::start(&self.pods, addresses, manner)?)
    }

    /// Writes the rules of all these Services in place of what was there.
    ///
    /// # Errors
    /// What `nft` says.
    pub fn translate(&self, services: &[nft::Service]) -> Result<()> {
        self.load(&nft::render_all(services))
    }

    /// Gives a Service other endpoints in the rules.
    ///
    /// # Errors
    /// What `nft` says.
    pub fn change(&self, old: &nft::Service, new: &nft::Service) -> Result<()> {
        self.load(&nft::render_change(old, new))
    }

    /// Runs a transaction of rules under kube-proxy's name.
    ///
    /// # Errors
    /// What `nft` says.
    pub fn load(&self, transaction: &str) -> Result<()> {
        let text = transaction.replace(nft::TABLE, TABLE);
        nft::load(self.node.netns(), &text).context("load the rules")
    }

    /// Connects to a Service again and again, at a pace; the servers must close first.
    ///
    /// # Errors
    /// Where a thread cannot be started.
    pub fn load_on(&self, target: SocketAddr, rate: f64) -> Result<Client> {
        let load = Load {
            rate: Some(rate),
            concurrency: 2,
            ..Load::tcp(target)
        };
        Ok(Client::start(self.node.netns(), &load)?)
    }
}

/// Address `n` of group `group` of the IPv6 link.
pub fn six(group: u16, n: u16) -> IpAddr {
    Ipv6Addr::new(0xfd00, 0x244, 0, 0, 0, 0, group, n).into()
}

/// Connects from one of several addresses, inside the calling thread's namespace.
///
/// # Errors
/// The kernel's.
pub fn connect_from(source: IpAddr, target: SocketAddr) -> Result<TcpStream> {
    let fd = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    bind(fd.as_raw_fd(), &SockaddrStorage::from(SocketAddr::new(source, 0)))?;
    connect(fd.as_raw_fd(), &SockaddrStorage::from(target)).with_context(|| format!("{source} to {target}"))?;
    let stream = TcpStream::from(fd);
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    Ok(stream)
}
