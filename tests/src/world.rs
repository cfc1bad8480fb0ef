//! The places of the real-socket tests: a client's namespace, a servers' namespace, their addresses, and the three ways
//! in which an application dials.
//!
//! No knowledge of the programs lives here. The invariant: while a [`World`] lives, the thread that made it is in the
//! client's namespace; afterwards it is back, and nothing is left.

use std::{
    fmt,
    io::ErrorKind,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream},
    num::NonZeroU16,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use lb_common::counter::hook;
use lb_user::{
    lab::{self, Netns, Server, link, server::Manner},
    model::{
        BackendSet, DesiredService, Frontend, FrontendKind, Member, ObjectName, Protocol, Scope, SetName, WhenEmpty,
    },
};

/// How an application dials: with which socket and which form of address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dial {
    /// An IPv4 socket.
    V4,
    /// An IPv6 socket and an IPv6 address.
    V6,
    /// An IPv6 socket and an IPv4-mapped address, as Java has it.
    Mapped,
}

impl Dial {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::V4, Self::V6, Self::Mapped];

    /// The address of a frontend as the Service has it.
    pub fn vip(self, n: u8) -> IpAddr {
        match self {
            Self::V4 | Self::Mapped => Ipv4Addr::new(10, 96, 0, n).into(),
            Self::V6 => Ipv6Addr::new(0xfd96, 0, 0, 0, 0, 0, 0, u16::from(n)).into(),
        }
    }

    /// The address of the servers' namespace with a number: backends count from [`FIRST_BACKEND`].
    pub fn far(self, n: u8) -> IpAddr {
        match self {
            Self::V4 | Self::Mapped => Ipv4Addr::new(10, 0, 0, n).into(),
            Self::V6 => Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, u16::from(n)).into(),
        }
    }

    /// The address of the client's namespace.
    pub fn near(self) -> IpAddr {
        self.far(1)
    }

    /// Backend number `i`, from 0.
    pub fn backend(self, i: usize) -> SocketAddr {
        SocketAddr::new(self.far(FIRST_BACKEND + i as u8), PORT)
    }

    /// The first `count` backends.
    pub fn backends(self, count: usize) -> Vec<SocketAddr> {
        (0..count).map(|i| self.backend(i)).collect()
    }

    /// An address as the application gives it to its socket and gets it back.
    pub fn as_dialled(self, address: SocketAddr) -> SocketAddr {
        match (self, address.ip()) {
            (Self::Mapped, IpAddr::V4(v4)) => SocketAddr::new(v4.to_ipv6_mapped().into(), address.port()),
            _ => address,
        }
    }

    /// What a socket that may talk to anybody binds to.
    pub fn any(self) -> SocketAddr {
        match self {
            Self::V4 => (Ipv4Addr::UNSPECIFIED, 0).into(),
            Self::V6 | Self::Mapped => (Ipv6Addr::UNSPECIFIED, 0).into(),
        }
    }

    /// The hook that a connect runs through.
    pub fn connect_hook(self) -> u32 {
        match self {
            Self::V4 => hook::CONNECT4,
            Self::V6 | Self::Mapped => hook::CONNECT6,
        }
    }

    /// The hook that a send of an unconnected socket runs through: IPv4-mapped traffic takes the IPv4 one.
    pub fn send_hook(self) -> u32 {
        match self {
            Self::V4 | Self::Mapped => hook::SENDMSG4,
            Self::V6 => hook::SENDMSG6,
        }
    }

    /// The hook that a receive runs through: IPv4-mapped traffic takes the IPv6 one.
    pub fn receive_hook(self) -> u32 {
        match self {
            Self::V4 => hook::RECVMSG4,
            Self::V6 | Self::Mapped => hook::RECVMSG6,
        }
    }

    /// The hook of `getpeername`.
    pub fn peer_hook(self) -> u32 {
        match self {
            Self::V4 => hook::GETPEERNAME4,
            Self::V6 | Self::Mapped => hook::GETPEERNAME6,
        }
    }
}

impl fmt::Display for Dial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V4 => "v4",
            Self::V6 => "v6",
            Self::Mapped => "mapped",
        })
    }
}

/// The number of the first backend's address.
pub const FIRST_BACKEND: u8 = 10;
/// The port that backends listen on.
pub const PORT: u16 = 8080;
/// The port of frontends.
pub const VIP_PORT: u16 = 80;

/// Two namespaces joined by a link; the calling thread is in the client's.
#[derive(Debug)]
pub struct World {
    home: Netns,
    /// The clients' namespace, with one address a family.
    pub near: Netns,
    /// The servers' namespace, with an address a family for every backend.
    pub far: Netns,
}

impl World {
    /// Makes the namespaces with room for so many backends, and moves the calling thread into the client's.
    pub fn enter(backends: usize) -> Result<Self> {
        let world = Self {
            home: Netns::current()?,
            near: Netns::new()?,
            far: Netns::new()?,
        };
        link::join((&world.near, "up"), (&world.far, "down"))?;
        for (dial, prefix) in [(Dial::V4, 24), (Dial::V6, 64)] {
            link::add_address(&world.near, "up", dial.near(), prefix)?;
            link::add_address(&world.far, "down", dial.far(2), prefix)?;
            for i in 0..backends {
                link::add_address(&world.far, "down", dial.backend(i).ip(), prefix)?;
            }
            link::add_default_route(&world.near, "up", dial.far(2))?;
        }
        world.near.enter_current_thread()?;
        for dial in [Dial::V4, Dial::V6] {
            wait_for_link(dial)?;
        }
        Ok(world)
    }

    /// Gives the servers' namespace one more address.
    pub fn add_far_address(&self, address: IpAddr) -> Result<()> {
        let prefix = if address.is_ipv6() { 128 } else { 32 };
        link::add_address(&self.far, "down", address, prefix).context("an address for the servers")
    }

    /// Starts servers in the servers' namespace.
    pub fn serve(&self, addresses: &[SocketAddr], manner: Manner) -> Result<Server> {
        Server::start(&self.far, addresses, manner).context("start the servers")
    }
}

/// Waits until packets come through: the kernel brings a carrier up in its own time, and drops what is sent before.
fn wait_for_link(dial: Dial) -> Result<()> {
    let closed = SocketAddr::new(dial.far(2), 9);
    let answered = || match TcpStream::connect_timeout(&closed, Duration::from_millis(200)) {
        Ok(_) => true,
        Err(error) => error.kind() == ErrorKind::ConnectionRefused,
    };
    ensure!(
        lab::holds_within(Duration::from_secs(10), answered),
        "the link does not come up"
    );
    Ok(())
}

impl Drop for World {
    fn drop(&mut self) {
        self.home
            .enter_current_thread()
            .expect("a thread can go back where it came from");
    }
}

/// A Service with one frontend and equal backends.
pub fn service(name: &str, frontend: SocketAddr, protocol: Protocol, backends: &[SocketAddr]) -> DesiredService {
    let members: Vec<(SocketAddr, u16)> = backends.iter().map(|&address| (address, 1)).collect();
    weighted(name, frontend, protocol, &members)
}

/// A Service with one frontend and weighted backends.
pub fn weighted(
    name: &str,
    frontend: SocketAddr,
    protocol: Protocol,
    backends: &[(SocketAddr, u16)],
) -> DesiredService {
    let mut members: Vec<Member> = backends
        .iter()
        .map(|&(address, weight)| Member {
            addr: address.ip(),
            port: port(address),
            weight,
        })
        .collect();
    members.sort_unstable();
    DesiredService {
        name: ObjectName::new("test", name),
        frontends: vec![Frontend {
            addr: frontend.ip(),
            port: port(frontend),
            protocol,
            kind: FrontendKind::ClusterIp,
            set: 0,
            when_empty: WhenEmpty::Refuse,
            affinity_seconds: None,
            outside: None,
        }],
        sets: vec![BackendSet {
            name: SetName {
                port_name: "".into(),
                protocol,
                ipv6: frontend.is_ipv6(),
                scope: Scope::Cluster,
            },
            members,
            draining: Vec::new(),
        }],
        sources: Vec::new(),
    }
}

fn port(address: SocketAddr) -> NonZeroU16 {
    NonZeroU16::new(address.port()).expect("tests name a port")
}
