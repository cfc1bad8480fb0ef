//! Clients that connect as fast as asked and keep a record of every attempt.
//!
//! Blocking sockets on a few threads: what is timed is `connect()` itself, as an application calls it. Nothing here
//! judges the records.

use std::{
    io::{self, Read},
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket},
    os::fd::AsRawFd,
    str,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    sys::{
        signal::SigSet,
        socket::{
            AddressFamily, SockFlag, SockType, SockaddrStorage, connect, setsockopt, socket, sockopt::SendTimeout,
        },
        time::{TimeVal, TimeValLike},
    },
};

use super::{Doing, Netns, Result};

/// How an attempt is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// TCP to a server that closes first ([`super::server::Manner::Greet`]).
    TcpServerCloses,
    /// TCP; this side closes first after the server has said its name.
    TcpClientCloses,
    /// UDP: a new connected socket for every request.
    UdpConnected,
    /// UDP: a new unconnected socket for every request.
    UdpUnconnected,
}

/// What a client is to do.
#[derive(Clone, Debug)]
pub struct Load {
    /// What it dials; an IPv4-mapped IPv6 address makes an IPv6 socket dial IPv4.
    pub target: SocketAddr,
    /// How.
    pub way: Way,
    /// After how many attempts it is finished; `None`: when it is told to.
    pub total: Option<u64>,
    /// Threads, and so attempts at the same time.
    pub concurrency: usize,
    /// Attempts per second over all threads; `None`: as fast as it goes.
    pub rate: Option<f64>,
    /// How long a connect, and then an answer, may take.
    pub timeout: Duration,
}

impl Load {
    /// TCP to a server that closes first: four threads, no pace, five seconds of patience.
    pub fn tcp(target: SocketAddr) -> Self {
        Self {
            target,
            way: Way::TcpServerCloses,
            total: None,
            concurrency: 4,
            rate: None,
            timeout: Duration::from_secs(5),
        }
    }
}

/// The record of one attempt.
#[derive(Clone, Debug)]
pub struct Attempt {
    /// When it began.
    pub started: Instant,
    /// How long `connect()` took (TCP and connected UDP), or the request with its answer (unconnected UDP).
    pub took: Duration,
    /// The backend that answered, or why none did.
    pub outcome: Result<SocketAddr, Failure>,
}

/// Where an attempt failed and with which error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// No socket could be made.
    #[error("no socket: {0}")]
    Socket(Errno),
    /// `connect()` failed; a timeout of ours reads ETIMEDOUT.
    #[error("connect: {0}")]
    Connect(Errno),
    /// The connection was made, but the answer did not come whole.
    #[error("answer: {0}")]
    Answer(Errno),
    /// The answer was no backend's name, or came from another address than the one asked.
    #[error("a foreign answer")]
    Foreign,
}

/// A client at work; dropping it stops it.
#[derive(Debug)]
pub struct Client {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<Vec<Attempt>>>,
}

#[derive(Debug)]
struct Shared {
    load: Load,
    began: Instant,
    /// Tickets handed out.
    tickets: AtomicU64,
    made: AtomicU64,
    failed: AtomicU64,
    stop: AtomicBool,
}

impl Client {
    /// Starts a client inside a namespace.
    ///
    /// # Errors
    /// Where a thread cannot be started or cannot enter the namespace.
    pub fn start(netns: &Netns, load: &Load) -> Result<Self> {
        super::server::raise_file_limit();
        let shared = Arc::new(Shared {
            load: load.clone(),
            began: Instant::now(),
            tickets: AtomicU64::new(0),
            made: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            stop: AtomicBool::new(false),
        });
        let mut client = Self {
            shared: Arc::clone(&shared),
            threads: Vec::new(),
        };
        for _ in 0..load.concurrency.max(1) {
            let shared = Arc::clone(&shared);
            let body = move || {
                SigSet::all().thread_block().ok();
                shared.work()
            };
            // A thread inherits its starter's namespace.
            let thread = netns
                .run(|| thread::Builder::new().name("lab-client".to_owned()).spawn(body))?
                .doing(|| "start a client's thread".to_owned())?;
            client.threads.push(thread);
        }
        Ok(client)
    }

    /// Attempts that have ended so far.
    pub fn made(&self) -> u64 {
        self.shared.made.load(Ordering::Relaxed)
    }

    /// Attempts that have failed so far.
    pub fn failed(&self) -> u64 {
        self.shared.failed.load(Ordering::Relaxed)
    }

    /// True when all attempts that were asked for have ended.
    pub fn is_finished(&self) -> bool {
        self.threads.iter().all(JoinHandle::is_finished)
    }

    /// Lets attempts that are under way end, starts no more, and returns the records in the order of their beginning.
    pub fn stop(mut self) -> Vec<Attempt> {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.collect()
    }

    /// Waits until all attempts that were asked for have ended; endless for a load without a total.
    pub fn wait(mut self) -> Vec<Attempt> {
        self.collect()
    }

    fn collect(&mut self) -> Vec<Attempt> {
        let mut all = Vec::new();
        for thread in self.threads.drain(..) {
            match thread.join() {
                Ok(attempts) => all.extend(attempts),
                Err(panicked) => std::panic::resume_unwind(panicked),
            }
        }
        all.sort_by_key(|attempt| attempt.started);
        all
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // A panic has been printed; the records are not wanted any more.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn work(&self) -> Vec<Attempt> {
        let mut attempts = Vec::new();
        while !self.stop.load(Ordering::Relaxed) {
            let ticket = self.tickets.fetch_add(1, Ordering::Relaxed);
            if self.load.total.is_some_and(|total| ticket >= total) {
                break;
            }
            if !self.wait_for_turn(ticket) {
                break;
            }
            let attempt = try_once(&self.load);
            self.made.fetch_add(1, Ordering::Relaxed);
            if attempt.outcome.is_err() {
                self.failed.fetch_add(1, Ordering::Relaxed);
            }
            attempts.push(attempt);
        }
        attempts
    }

    /// Waits until a ticket is due; false if the client was stopped meanwhile.
    fn wait_for_turn(&self, ticket: u64) -> bool {
        let Some(rate) = self.load.rate else {
            return true;
        };
        let due = self.began + Duration::from_secs_f64(ticket as f64 / rate);
        loop {
            let left = due.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            if self.stop.load(Ordering::Relaxed) {
                return false;
            }
            // Short naps, so that a slow pace does not hold a stop up.
            thread::sleep(left.min(Duration::from_millis(20)));
        }
    }
}

/// Makes one attempt in the calling thread's namespace.
pub fn try_once(load: &Load) -> Attempt {
    let started = Instant::now();
    let (took, outcome) = match load.way {
        Way::TcpServerCloses => tcp(load, true),
        Way::TcpClientCloses => tcp(load, false),
        Way::UdpConnected => udp(load, true),
        Way::UdpUnconnected => udp(load, false),
    };
    let took = took.unwrap_or_else(|| started.elapsed());
    Attempt { started, took, outcome }
}

/// Connects a TCP socket in the calling thread's namespace; a timeout reads ETIMEDOUT.
pub fn connect_tcp(target: SocketAddr, timeout: Duration) -> Result<TcpStream, Failure> {
    let family = if target.is_ipv6() {
        AddressFamily::Inet6
    } else {
        AddressFamily::Inet
    };
    let fd = socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).map_err(Failure::Socket)?;
    // A send timeout bounds connect as well; then connect reads EINPROGRESS.
    let limit = TimeVal::microseconds(i64::try_from(timeout.as_micros()).unwrap_or(i64::MAX).max(1));
    setsockopt(&fd, SendTimeout, &limit).map_err(Failure::Socket)?;
    match connect(fd.as_raw_fd(), &SockaddrStorage::from(target)) {
        Ok(()) => Ok(TcpStream::from(fd)),
        Err(Errno::EINPROGRESS) => Err(Failure::Connect(Errno::ETIMEDOUT)),
        Err(errno) => Err(Failure::Connect(errno)),
    }
}

/// Reads the name that a server says, without waiting for it to close.
pub fn read_name(stream: &mut impl Read) -> Result<SocketAddr, Failure> {
    let mut text = [0; 64];
    let mut len = 0;
    while len < text.len() && !text[..len].contains(&b'\n') {
        match stream.read(&mut text[len..]) {
            // The server went away in the middle of its answer.
            Ok(0) => return Err(Failure::Answer(Errno::ECONNRESET)),
            Ok(n) => len += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(Failure::Answer(errno_of(&error))),
        }
    }
    parse_name(&text[..len])
}

fn tcp(load: &Load, server_closes: bool) -> (Option<Duration>, Result<SocketAddr, Failure>) {
    let began = Instant::now();
    let connected = connect_tcp(load.target, load.timeout);
    let took = Some(began.elapsed());
    let talk = |mut stream: TcpStream| {
        stream
            .set_read_timeout(Some(load.timeout))
            .map_err(|e| Failure::Answer(errno_of(&e)))?;
        let backend = read_name(&mut stream)?;
        if server_closes {
            // Its FIN must be here before ours goes out, or the TIME_WAIT would be on this side.
            match stream.read(&mut [0; 16]) {
                Ok(0) => {}
                Ok(_) => return Err(Failure::Foreign),
                Err(error) => return Err(Failure::Answer(errno_of(&error))),
            }
        }
        Ok(backend)
    };
    (took, connected.and_then(talk))
}

fn udp(load: &Load, connected: bool) -> (Option<Duration>, Result<SocketAddr, Failure>) {
    let any = if load.target.is_ipv6() {
        SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0))
    } else {
        SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0))
    };
    let mut took = None;
    let mut talk = || {
        let socket = UdpSocket::bind(any).map_err(|e| Failure::Socket(errno_of(&e)))?;
        socket
            .set_read_timeout(Some(load.timeout))
            .map_err(|e| Failure::Socket(errno_of(&e)))?;
        let mut answer = [0; 64];
        let len = if connected {
            let began = Instant::now();
            socket
                .connect(load.target)
                .map_err(|e| Failure::Connect(errno_of(&e)))?;
            took = Some(began.elapsed());
            socket.send(b"?").map_err(|e| Failure::Connect(errno_of(&e)))?;
            socket.recv(&mut answer).map_err(|e| Failure::Answer(errno_of(&e)))?
        } else {
            socket
                .send_to(b"?", load.target)
                .map_err(|e| Failure::Connect(errno_of(&e)))?;
            let (len, from) = socket
                .recv_from(&mut answer)
                .map_err(|e| Failure::Answer(errno_of(&e)))?;
            // The application asked the Service and must hear from the Service.
            if from != load.target {
                return Err(Failure::Foreign);
            }
            len
        };
        parse_name(&answer[..len])
    };
    let outcome = talk();
    (took, outcome)
}

fn parse_name(text: &[u8]) -> Result<SocketAddr, Failure> {
    str::from_utf8(text)
        .ok()
        .and_then(|text| text.trim_end().parse().ok())
        .ok_or(Failure::Foreign)
}

fn errno_of(error: &io::Error) -> Errno {
    match error.raw_os_error() {
        // A receive timeout reads EAGAIN.
        Some(code) if code == Errno::EAGAIN as i32 => Errno::ETIMEDOUT,
        Some(code) => Errno::from_raw(code),
        None => Errno::EIO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_read_whole_or_not_at_all() {
        let name = "10.244.1.1:8080".parse::<SocketAddr>().expect("an address");
        assert_eq!(read_name(&mut &b"10.244.1.1:8080\n"[..]), Ok(name));
        assert_eq!(
            read_name(&mut &b"10.244.1.1:80"[..]),
            Err(Failure::Answer(Errno::ECONNRESET))
        );
        assert_eq!(read_name(&mut &b"hello\n"[..]), Err(Failure::Foreign));
        assert_eq!(read_name(&mut &[b'x'; 100][..]), Err(Failure::Foreign));
    }
}
