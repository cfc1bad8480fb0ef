//! What applications and servers see of each other: addresses, ports and bytes of a connection, or of a datagram.
//!
//! One thread plays both sides, so that whoever is met is known. Source ports, which the kernel gives, are compared with what
//! the other side sees and then left out.

use std::{
    io::{Read, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    time::Duration,
};

use anyhow::{Context, Result};
use lb_user::lab::Netns;

const PATIENCE: Duration = Duration::from_secs(10);
const REQUEST: &[u8] = b"what do you see?";
const ANSWER: &[u8] = b"an address and a port";

/// Servers that are listened to, each with the frontend that leads to it.
pub(crate) struct Ears {
    ears: Vec<Ear>,
}

struct Ear {
    frontend: SocketAddr,
    tcp: TcpListener,
    udp: UdpSocket,
}

/// One exchange as both sides saw it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Exchange {
    how: &'static str,
    frontend: SocketAddr,
    /// What `getsockname` gives the client.
    own: IpAddr,
    /// What `getpeername` gives the client, or where the answer came from.
    peer: SocketAddr,
    /// The server's own address of it.
    served_at: SocketAddr,
    /// Whom the server sees.
    seen: IpAddr,
    /// Whether it sees the client's own port.
    port_kept: bool,
    request: Vec<u8>,
    answer: Vec<u8>,
}

impl Ears {
    /// Listens inside the servers' namespace on what each frontend leads to.
    pub(crate) fn open(pods: &Netns, leads: Vec<(SocketAddr, SocketAddr)>) -> Result<Self> {
        let ears = leads
            .into_iter()
            .map(|(frontend, pod)| {
                let (tcp, udp) = pods.run(|| (TcpListener::bind(pod), UdpSocket::bind(pod)))?;
                let udp = udp?;
                udp.set_read_timeout(Some(PATIENCE))?;
                Ok(Ear {
                    frontend,
                    tcp: tcp?,
                    udp,
                })
            })
            .collect::<Result<_>>()?;
        Ok(Self { ears })
    }

    /// Talks to every frontend in every way.
    pub(crate) fn talk(&self, node: &Netns) -> Result<Vec<Exchange>> {
        let mut all = Vec::new();
        for ear in &self.ears {
            all.push(ear.connection(node).context("a connection")?);
            for connected in [true, false] {
                all.push(ear.datagram(node, connected).context("a datagram")?);
            }
        }
        Ok(all)
    }
}

impl Ear {
    fn connection(&self, node: &Netns) -> Result<Exchange> {
        let mut client = node.run(|| TcpStream::connect_timeout(&self.frontend, PATIENCE))??;
        let (mut server, seen) = self.tcp.accept()?;
        for stream in [&client, &server] {
            stream.set_read_timeout(Some(PATIENCE))?;
        }
        client.write_all(REQUEST)?;
        let mut request = vec![0; REQUEST.len()];
        server.read_exact(&mut request)?;
        server.write_all(ANSWER)?;
        let mut answer = vec![0; ANSWER.len()];
        client.read_exact(&mut answer)?;
        let own = client.local_addr()?;
        Ok(Exchange {
            how: "connection",
            frontend: self.frontend,
            own: own.ip(),
            peer: client.peer_addr()?,
            served_at: server.local_addr()?,
            seen: seen.ip(),
            port_kept: seen.port() == own.port(),
            request,
            answer,
        })
    }

    fn datagram(&self, node: &Netns, connected: bool) -> Result<Exchange> {
        let any: IpAddr = if self.frontend.is_ipv6() {
            Ipv6Addr::UNSPECIFIED.into()
        } else {
            Ipv4Addr::UNSPECIFIED.into()
        };
        let client = node.run(|| UdpSocket::bind((any, 0)))??;
        client.set_read_timeout(Some(PATIENCE))?;
        if connected {
            client.connect(self.frontend)?;
            client.send(REQUEST)?;
        } else {
            client.send_to(REQUEST, self.frontend)?;
        }
        let mut buffer = [0; 256];
        let (length, seen) = self.udp.recv_from(&mut buffer)?;
        let request = buffer[..length].to_vec();
        self.udp.send_to(ANSWER, seen)?;
        let (length, from) = client.recv_from(&mut buffer)?;
        let own = client.local_addr()?;
        Ok(Exchange {
            how: if connected { "connected datagram" } else { "datagram" },
            frontend: self.frontend,
            own: own.ip(),
            peer: if connected { client.peer_addr()? } else { from },
            served_at: self.udp.local_addr()?,
            seen: seen.ip(),
            port_kept: seen.port() == own.port(),
            request,
            answer: buffer[..length].to_vec(),
        })
    }
}
