//! What pods of the lab serve: their name, and whom they see.
//!
//! A connection is greeted with one line, `NAME OWN-ADDRESS PEER-ADDRESS`, and what it sends comes back until it closes;
//! the line `reset` is answered with a reset, `close` with an end, so that the TIME_WAIT is the server's. A datagram is
//! answered with the same line and its own length, made longer where it asks for it (`reply N`). So a client knows which pod
//! it met and whether its source was kept. All servers of a process run on one thread; the invariant: a server's sockets are
//! closed when it is dropped.

use std::{
    io,
    net::SocketAddr,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use anyhow::{Context, Result};
use lb_user::lab::Netns;
use nix::{
    libc,
    sys::socket::{
        AddressFamily, Backlog, SockFlag, SockType, SockaddrStorage, bind, listen, setsockopt, socket,
        sockopt::{Linger, ReuseAddr},
    },
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream, UdpSocket},
    runtime::Handle,
    task::AbortHandle,
};

use super::plan::{Family, TARGET, TARGET_DF, TARGET_SECOND};

/// The servers of one pod; dropping it closes their sockets.
#[derive(Debug)]
pub struct Serving {
    tasks: Vec<AbortHandle>,
    accepted: Arc<AtomicU64>,
    received: Arc<AtomicU64>,
}

impl Serving {
    /// Serves on both families' addresses of a pod, all that the pods of the lab serve.
    ///
    /// The sockets belong to the cgroup that the process is in now.
    ///
    /// # Errors
    /// Where an address cannot be bound.
    pub fn start(runtime: &Handle, netns: &Netns, name: &str, addresses: &[std::net::IpAddr]) -> Result<Self> {
        let mut serving = Self {
            tasks: Vec::new(),
            accepted: Arc::default(),
            received: Arc::default(),
        };
        for address in addresses {
            let at = |port| SocketAddr::new(*address, port);
            let bound = netns.run(|| -> io::Result<_> {
                Ok((
                    [
                        bound(at(TARGET), SockType::Stream)?,
                        bound(at(TARGET_SECOND), SockType::Stream)?,
                    ],
                    bound(at(TARGET), SockType::Datagram)?,
                    bound(at(TARGET_DF), SockType::Datagram)?,
                ))
            })?;
            let (streams, datagram, unfragmented) = bound.with_context(|| format!("serve on {address}"))?;
            discover_path(&datagram, *address, false)?;
            discover_path(&unfragmented, *address, true)?;
            let _entered = runtime.enter();
            for stream in streams {
                let stream = TcpListener::from_std(stream.into())?;
                let task = runtime.spawn(welcome(stream, name.to_owned(), Arc::clone(&serving.accepted)));
                serving.tasks.push(task.abort_handle());
            }
            for socket in [datagram, unfragmented] {
                let socket = UdpSocket::from_std(socket.into())?;
                let task = runtime.spawn(answer(socket, name.to_owned(), Arc::clone(&serving.received)));
                serving.tasks.push(task.abort_handle());
            }
        }
        Ok(serving)
    }

    /// Connections accepted so far.
    pub fn accepted(&self) -> u64 {
        self.accepted.load(Ordering::Relaxed)
    }

    /// Datagrams received so far.
    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// Closes the sockets and returns when they are closed: established connections stay open.
    pub fn close(mut self) {
        self.abort();
    }

    fn abort(&mut self) {
        for task in self.tasks.drain(..) {
            task.abort();
            // The sockets go with the task, which the runtime drops on its own thread.
            while !task.is_finished() {
                std::thread::yield_now();
            }
        }
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.abort();
    }
}

/// A socket bound to an address in the calling thread's namespace; a stream's socket listens.
fn bound(address: SocketAddr, kind: SockType) -> io::Result<OwnedFd> {
    let family = if address.is_ipv6() {
        AddressFamily::Inet6
    } else {
        AddressFamily::Inet
    };
    let fd = socket(family, kind, SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK, None)?;
    if kind == SockType::Stream {
        setsockopt(&fd, ReuseAddr, &true)?;
    }
    bind(fd.as_raw_fd(), &SockaddrStorage::from(address))?;
    if kind == SockType::Stream {
        listen(&fd, Backlog::MAXCONN)?;
    }
    Ok(fd)
}

/// Says whether a socket's datagrams must arrive whole, or may be cut into fragments by anybody.
///
/// # Errors
/// The kernel's.
pub fn discover_path(socket: &impl AsRawFd, own: std::net::IpAddr, whole: bool) -> io::Result<()> {
    let (level, option) = if own.is_ipv6() {
        (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER)
    } else {
        (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER)
    };
    let value: libc::c_int = if whole {
        libc::IP_PMTUDISC_DO
    } else {
        libc::IP_PMTUDISC_DONT
    };
    // SAFETY: the value outlives the call, and its size is given.
    let set = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            (&raw const value).cast(),
            size_of_val(&value) as libc::socklen_t,
        )
    };
    if set < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

async fn welcome(listener: TcpListener, name: String, accepted: Arc<AtomicU64>) {
    loop {
        // Out of descriptors, or the peer is gone: the next one may fare better.
        let Ok((stream, peer)) = listener.accept().await else {
            tokio::task::yield_now().await;
            continue;
        };
        accepted.fetch_add(1, Ordering::Relaxed);
        let name = name.clone();
        tokio::spawn(async move {
            // A peer that is gone sees so itself.
            let _ = converse(stream, peer, &name).await;
        });
    }
}

async fn converse(mut stream: TcpStream, peer: SocketAddr, name: &str) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let own = stream.local_addr()?;
    stream.write_all(format!("{name} {own} {peer}\n").as_bytes()).await?;
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let len = stream.read(&mut buffer).await?;
        let said = &buffer[..len];
        if said.is_empty() {
            return Ok(());
        }
        if said == b"reset\n" {
            reset_on_close(&stream)?;
            return Ok(());
        }
        if said == b"close\n" {
            return Ok(());
        }
        stream.write_all(said).await?;
    }
}

/// Has a connection end by a reset once it is closed.
pub(super) fn reset_on_close(stream: &impl AsFd) -> nix::Result<()> {
    setsockopt(
        stream,
        Linger,
        &libc::linger {
            l_onoff: 1,
            l_linger: 0,
        },
    )
}

async fn answer(socket: UdpSocket, name: String, received: Arc<AtomicU64>) {
    let Ok(own) = socket.local_addr() else {
        return;
    };
    let mut request = vec![0; 64 * 1024];
    loop {
        // An ICMP error for an earlier answer comes out here, once.
        let Ok((len, peer)) = socket.recv_from(&mut request).await else {
            continue;
        };
        received.fetch_add(1, Ordering::Relaxed);
        let mut text = format!("{name} {own} {peer} {len}\n").into_bytes();
        let wanted = std::str::from_utf8(&request[..len.min(32)])
            .ok()
            .and_then(|said| said.strip_prefix("reply "))
            .and_then(|said| said.split_whitespace().next()?.parse().ok())
            .unwrap_or(0);
        let short = text.clone();
        if text.len() < wanted {
            text.resize(wanted, b'.');
        }
        let sent = socket.send_to(&text, peer).await;
        // Longer than the path: then the peer is told so, in short.
        if sent.is_err_and(|error| error.raw_os_error() == Some(libc::EMSGSIZE)) {
            let mut short = short;
            short.pop();
            short.extend_from_slice(b" toolong\n");
            let _ = socket.send_to(&short, peer).await;
        }
    }
}

/// Who answered, and whom it saw.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Met {
    /// The pod's name.
    pub name: String,
    /// The pod's own address.
    pub own: SocketAddr,
    /// The address that the pod saw the client at.
    pub peer: SocketAddr,
    /// UDP: how long the request was.
    pub len: Option<usize>,
    /// UDP: the answer that was asked for is longer than the path to the client.
    pub too_long: bool,
}

impl Met {
    /// Reads a line that a server of the lab wrote.
    pub fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_whitespace();
        Some(Self {
            name: words.next()?.to_owned(),
            own: words.next()?.parse().ok()?,
            peer: words.next()?.parse().ok()?,
            len: words.next().and_then(|word| word.parse().ok()),
            too_long: words.next() == Some("toolong"),
        })
    }

    /// The family in which they met.
    pub fn family(&self) -> Family {
        if self.own.is_ipv4() { Family::V4 } else { Family::V6 }
    }
}

#[cfg(test)]
mod tests {
    use super::Met;

    #[test]
    fn a_servers_line_is_read_whole() {
        let met = Met::parse("pod-1-1 10.244.1.1:8080 203.0.113.11:4000 17 toolong").expect("a line");
        assert_eq!(met.name, "pod-1-1");
        assert_eq!(met.peer, "203.0.113.11:4000".parse().expect("an address"));
        assert_eq!((met.len, met.too_long), (Some(17), true));
        let met = Met::parse("pod-1-1 [fd00::1]:8080 [fd00::2]:4000\n").expect("a line");
        assert_eq!((met.len, met.too_long), (None, false));
        assert_eq!(Met::parse("10.244.1.1:8080"), None);
    }
}
