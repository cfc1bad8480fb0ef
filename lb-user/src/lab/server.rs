//! Servers that say who they are.
//!
//! Every server answers with the address it listens on, so that a client knows which backend it met without looking at
//! packets. One thread serves all addresses of a [`Server`]; it stops, and its ports are free, when the value is dropped.

use std::{
    collections::HashMap,
    io::{self, ErrorKind, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::fd::{AsFd, AsRawFd},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use nix::sys::{
    epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
    eventfd::{EfdFlags, EventFd},
    resource::{Resource, getrlimit, setrlimit},
    signal::SigSet,
    socket::{Backlog, listen},
};

use super::{Doing, Netns, Result};

/// How a server treats those who come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    /// TCP: answer with the own name at once and close first, so that the client keeps no TIME_WAIT and its source port
    /// is free again. The client must not send anything.
    Greet,
    /// TCP: answer with the own name at once, then stay until the client closes; what the client sends comes back.
    Stay,
    /// UDP: answer every datagram with the own name.
    Datagram,
}

/// Servers on one or several addresses of one namespace.
#[derive(Debug)]
pub struct Server {
    served: Vec<(SocketAddr, Arc<AtomicU64>)>,
    stop: Arc<EventFd>,
    thread: Option<JoinHandle<()>>,
}

const STOP: u64 = u64::MAX;

impl Server {
    /// Starts serving on every given address; when it returns, connections are accepted.
    ///
    /// # Errors
    /// Where an address cannot be bound in the namespace.
    pub fn start(netns: &Netns, addresses: &[SocketAddr], manner: Manner) -> Result<Self> {
        raise_file_limit();
        let mut bound = Vec::new();
        for &address in addresses {
            let socket = netns
                .run(|| Socket::bind(address, manner))?
                .doing(|| format!("serve on {address}"))?;
            // Port 0 asks for any port: what counts is what the kernel gave.
            let address = socket.local_addr().doing(|| format!("read the address of {address}"))?;
            bound.push((address, socket, Arc::new(AtomicU64::new(0))));
        }
        let served = bound.iter().map(|(a, _, n)| (*a, Arc::clone(n))).collect();
        let setup = || -> io::Result<_> {
            let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
            let stop = Arc::new(EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?);
            epoll.add(&*stop, EpollEvent::new(EpollFlags::EPOLLIN, STOP))?;
            for (index, (_, socket, _)) in bound.iter().enumerate() {
                epoll.add(socket, EpollEvent::new(EpollFlags::EPOLLIN, index as u64))?;
            }
            Ok((epoll, stop))
        };
        let (epoll, stop) = setup().doing(|| "set a server's event queue up".to_owned())?;
        let kept_open = Arc::clone(&stop);
        let thread = thread::Builder::new()
            .name("lab-server".to_owned())
            .spawn(move || {
                SigSet::all().thread_block().ok();
                let _stop = kept_open;
                Serving {
                    epoll,
                    bound,
                    manner,
                    open: HashMap::new(),
                }
                .run();
            })
            .doing(|| "start a server's thread".to_owned())?;
        Ok(Self {
            served,
            stop,
            thread: Some(thread),
        })
    }

    /// The addresses that are served.
    pub fn addresses(&self) -> impl Iterator<Item = SocketAddr> {
        self.served.iter().map(|(address, _)| *address)
    }

    /// Connections accepted, or datagrams received, on one address so far.
    pub fn count(&self, address: SocketAddr) -> u64 {
        self.served
            .iter()
            .filter(|(served, _)| *served == address)
            .map(|(_, count)| count.load(Ordering::Relaxed))
            .sum()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The counter of an event descriptor cannot be full after one write.
        let _ = self.stop.write(1);
        if let Some(thread) = self.thread.take() {
            // A panic of the serving thread has been printed; the server is gone either way.
            let _ = thread.join();
        }
    }
}

/// Lets this process have as many descriptors as it may; tests hold thousands of connections.
pub(crate) fn raise_file_limit() {
    if let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE)
        && soft < hard
    {
        // Not getting more is no error by itself: what needs more will say so.
        let _ = setrlimit(Resource::RLIMIT_NOFILE, hard.min(65_536).max(soft), hard);
    }
}

#[derive(Debug)]
enum Socket {
    Tcp(TcpListener),
    Udp(UdpSocket),
}

impl Socket {
    fn bind(address: SocketAddr, manner: Manner) -> io::Result<Self> {
        if manner == Manner::Datagram {
            let socket = UdpSocket::bind(address)?;
            socket.set_nonblocking(true)?;
            return Ok(Self::Udp(socket));
        }
        let socket = TcpListener::bind(address)?;
        socket.set_nonblocking(true)?;
        // The standard library's queue is too short for a burst; a second listen only changes its length.
        listen(&socket, Backlog::MAXCONN)?;
        Ok(Self::Tcp(socket))
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        match self {
            Self::Tcp(socket) => socket.local_addr(),
            Self::Udp(socket) => socket.local_addr(),
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        match self {
            Self::Tcp(socket) => socket.as_fd(),
            Self::Udp(socket) => socket.as_fd(),
        }
    }
}

/// The serving thread's state.
struct Serving {
    epoll: Epoll,
    bound: Vec<(SocketAddr, Socket, Arc<AtomicU64>)>,
    manner: Manner,
    /// Connections that stay, by the event token: descriptor plus number of listeners.
    open: HashMap<u64, TcpStream>,
}

impl Serving {
    fn run(mut self) {
        let mut events = [EpollEvent::empty(); 64];
        loop {
            let ready = match self.epoll.wait(&mut events, EpollTimeout::NONE) {
                Ok(ready) => ready,
                Err(nix::errno::Errno::EINTR) => continue,
                Err(error) => {
                    tracing::warn!(%error, "a server's event queue failed");
                    return;
                }
            };
            for event in events.iter().take(ready) {
                match event.data() {
                    STOP => return,
                    token if token < self.bound.len() as u64 => self.welcome(token as usize),
                    token => self.echo(token),
                }
            }
        }
    }

    /// Takes all that waits at one address.
    fn welcome(&mut self, index: usize) {
        let mut staying = Vec::new();
        let Some((address, socket, count)) = self.bound.get(index) else {
            return;
        };
        let name = format!("{address}\n");
        match socket {
            Socket::Tcp(listener) => {
                // Any error ends the round: nothing waits, or the peer is gone, and the next event tries again.
                while let Ok((mut stream, _)) = listener.accept() {
                    count.fetch_add(1, Ordering::Relaxed);
                    // A peer that has gone in the meantime misses its answer and sees so itself.
                    let greeted = stream.write_all(name.as_bytes());
                    if self.manner == Manner::Stay && greeted.is_ok() {
                        staying.push(stream);
                    }
                }
            }
            Socket::Udp(socket) => {
                let mut request = [0; 2048];
                loop {
                    match socket.recv_from(&mut request) {
                        Ok((_, from)) => {
                            count.fetch_add(1, Ordering::Relaxed);
                            let _ = socket.send_to(name.as_bytes(), from);
                        }
                        // An ICMP error for an earlier answer comes out here, once.
                        Err(error) if error.kind() == ErrorKind::ConnectionRefused => {}
                        Err(_) => break,
                    }
                }
            }
        }
        for stream in staying {
            let token = self.bound.len() as u64 + stream.as_raw_fd() as u64;
            // A client that never reads must not hold the others up for long.
            let usable = stream.set_write_timeout(Some(Duration::from_secs(1))).is_ok()
                && stream.set_read_timeout(Some(Duration::from_secs(1))).is_ok()
                && self
                    .epoll
                    .add(&stream, EpollEvent::new(EpollFlags::EPOLLIN, token))
                    .is_ok();
            if usable {
                self.open.insert(token, stream);
            }
        }
    }

    /// Sends back what came; closes when the client has closed.
    fn echo(&mut self, token: u64) {
        let Some(stream) = self.open.get_mut(&token) else {
            return;
        };
        let mut buffer = [0; 4096];
        let alive = match stream.read(&mut buffer) {
            Ok(0) => false,
            Ok(n) => stream.write_all(&buffer[..n]).is_ok(),
            Err(error) => matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock),
        };
        if !alive {
            // Closing the descriptor takes it out of the event queue.
            self.open.remove(&token);
        }
    }
}
