//! Clients of the lab: one connection or one datagram at a time, from a place of their own.
//!
//! Blocking sockets with deadlines. An attempt ends with who answered, or with how it failed; what is right is the case's
//! business. Sockets are made in the client's namespace and in the cgroup that the process is in.

use std::{
    fmt,
    io::{self, Read, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpStream, UdpSocket},
    os::fd::AsRawFd,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use lb_user::lab::Netns;
use nix::{
    errno::Errno,
    sys::{
        socket::{
            AddressFamily, SockFlag, SockType, SockaddrStorage, bind, connect, setsockopt, socket,
            sockopt::{ReuseAddr, SendTimeout},
        },
        time::{TimeVal, TimeValLike},
    },
};

use super::serve::{Met, discover_path, reset_on_close};
use crate::{agent::Page, runner::in_guest};

/// How an attempt failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// Somebody said no: a reset, or an ICMP message that says that nobody listens.
    Refused,
    /// Nobody answered in time.
    Silent,
    /// An ICMP message said that the address cannot be reached.
    Unreachable,
    /// Any other error.
    Other(Errno),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused => f.write_str("refused"),
            Self::Silent => f.write_str("no answer"),
            Self::Unreachable => f.write_str("unreachable"),
            Self::Other(errno) => write!(f, "{errno}"),
        }
    }
}

impl std::error::Error for Failure {}

impl From<Errno> for Failure {
    fn from(errno: Errno) -> Self {
        match errno {
            Errno::ECONNREFUSED | Errno::ECONNRESET => Self::Refused,
            Errno::ETIMEDOUT | Errno::EINPROGRESS | Errno::EAGAIN => Self::Silent,
            Errno::EHOSTUNREACH | Errno::ENETUNREACH => Self::Unreachable,
            other => Self::Other(other),
        }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        match error.raw_os_error() {
            Some(code) => Self::from(Errno::from_raw(code)),
            // An end in the middle of an answer.
            None => Self::Refused,
        }
    }
}

/// How long an attempt may take that is to succeed.
pub fn patience() -> Duration {
    Duration::from_secs(if in_guest() { 20 } else { 5 })
}

/// How long nobody must answer for an address to count as silent.
pub fn silence() -> Duration {
    Duration::from_millis(if in_guest() { 4000 } else { 700 })
}

/// Somebody who dials.
#[derive(Clone, Copy, Debug)]
pub struct Dialer<'n> {
    netns: &'n Netns,
    source: Option<SocketAddr>,
    timeout: Option<Duration>,
}

impl<'n> Dialer<'n> {
    /// From a namespace, with the source that the kernel gives.
    pub const fn new(netns: &'n Netns) -> Self {
        Self {
            netns,
            source: None,
            timeout: None,
        }
    }

    /// From this address, and from this port unless it is 0.
    #[must_use]
    pub const fn from(mut self, source: SocketAddr) -> Self {
        self.source = Some(source);
        self
    }

    /// Gives up after this time instead of [`patience`].
    #[must_use]
    pub const fn within(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    fn limit(&self) -> Duration {
        self.timeout.unwrap_or_else(patience)
    }

    /// Opens a connection and reads who is there; the connection stays.
    ///
    /// # Errors
    /// How it failed.
    pub fn open(&self, target: SocketAddr) -> Result<Talk, Failure> {
        let began = Instant::now();
        let stream = self
            .netns
            .run(|| self.connect(target))
            .map_err(|_| Failure::Other(Errno::EPERM))??;
        let took = began.elapsed();
        let mut talk = Talk {
            stream,
            met: Met {
                name: String::new(),
                own: target,
                peer: target,
                len: None,
                too_long: false,
            },
            took,
        };
        let line = talk.read_line(self.limit())?;
        talk.met = Met::parse(&line).ok_or(Failure::Other(Errno::EPROTO))?;
        Ok(talk)
    }

    /// Opens a connection, reads who is there and closes.
    ///
    /// # Errors
    /// How it failed.
    pub fn dial(&self, target: SocketAddr) -> Result<Met, Failure> {
        Ok(self.open(target)?.met)
    }

    /// Opens so many connections, one after another, and closes each once it is known who is there.
    ///
    /// # Errors
    /// The first failure.
    pub fn dial_many(&self, target: SocketAddr, count: usize) -> Result<Vec<Met>> {
        (0..count)
            .map(|n| {
                self.dial(target)
                    .with_context(|| format!("connection {} of {count} to {target}", n + 1))
            })
            .collect()
    }

    /// Fetches a page over HTTP.
    ///
    /// # Errors
    /// How it failed.
    pub fn get(&self, target: SocketAddr, path: &str) -> Result<Page, Failure> {
        let mut stream = self
            .netns
            .run(|| self.connect(target))
            .map_err(|_| Failure::Other(Errno::EPERM))??;
        stream.set_read_timeout(Some(self.limit()))?;
        write!(stream, "GET {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let page = answer.split_once("\r\n\r\n").and_then(|(head, body)| {
            Some(Page {
                status: head.split(' ').nth(1)?.parse().ok()?,
                head: head.to_owned(),
                body: body.to_owned(),
            })
        });
        page.ok_or(Failure::Other(Errno::EPROTO))
    }

    fn connect(&self, target: SocketAddr) -> Result<TcpStream, Failure> {
        let family = if target.is_ipv6() {
            AddressFamily::Inet6
        } else {
            AddressFamily::Inet
        };
        let fd = socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
        // A send timeout bounds connect as well; then connect reads EINPROGRESS.
        let limit = i64::try_from(self.limit().as_micros()).unwrap_or(i64::MAX).max(1);
        setsockopt(&fd, SendTimeout, &TimeVal::microseconds(limit))?;
        if let Some(source) = self.source {
            setsockopt(&fd, ReuseAddr, &true)?;
            bind(fd.as_raw_fd(), &SockaddrStorage::from(source))?;
        }
        connect(fd.as_raw_fd(), &SockaddrStorage::from(target))?;
        Ok(TcpStream::from(fd))
    }

    /// Makes a datagram socket that talks to one address.
    ///
    /// # Errors
    /// The kernel's.
    pub fn datagrams(&self, target: SocketAddr) -> Result<Datagrams, Failure> {
        let datagrams = self.unconnected(target)?;
        // The socket stays in its namespace, whoever connects it.
        datagrams.socket.connect(target)?;
        Ok(Datagrams {
            target: None,
            ..datagrams
        })
    }

    /// Makes a datagram socket that is not connected and sends to one address, as one does that talks to many.
    ///
    /// # Errors
    /// The kernel's.
    pub fn unconnected(&self, target: SocketAddr) -> Result<Datagrams, Failure> {
        let any: IpAddr = if target.is_ipv6() {
            Ipv6Addr::UNSPECIFIED.into()
        } else {
            Ipv4Addr::UNSPECIFIED.into()
        };
        let source = self.source.unwrap_or(SocketAddr::new(any, 0));
        let socket = self
            .netns
            .run(|| UdpSocket::bind(source))
            .map_err(|_| Failure::Other(Errno::EPERM))??;
        discover_path(&socket, target.ip(), false)?;
        Ok(Datagrams {
            socket,
            target: Some(target),
            limit: self.limit(),
        })
    }

    /// Sends one datagram and returns who answered; no answer is asked for twice.
    ///
    /// # Errors
    /// How it failed.
    pub fn ask(&self, target: SocketAddr) -> Result<Met, Failure> {
        self.datagrams(target)?.ask("?")
    }

    /// Asks with so many sockets, one after another; returns who answered.
    ///
    /// All sockets are there before the first one asks, and so no two have one port: chance gives a socket the port of one that
    /// was closed, and its datagram is then one more of the old flow and no new flow.
    ///
    /// # Errors
    /// The first failure.
    pub fn ask_many(&self, target: SocketAddr, count: usize) -> Result<Vec<Met>> {
        let sockets = (0..count)
            .map(|_| self.datagrams(target))
            .collect::<Result<Vec<_>, _>>()
            .with_context(|| format!("{count} sockets to {target}"))?;
        sockets
            .iter()
            .enumerate()
            .map(|(n, socket)| {
                socket
                    .ask("?")
                    .with_context(|| format!("datagram {} of {count} to {target}", n + 1))
            })
            .collect()
    }

    /// Looks for `window` whether nobody answers, over TCP; an error says who did.
    ///
    /// # Errors
    /// What came instead of silence.
    pub fn expect_silence(&self, target: SocketAddr) -> Result<()> {
        match self.within(silence()).dial(target) {
            Err(Failure::Silent) => Ok(()),
            other => bail!("a connection to {target} should meet silence, and met {other:?}"),
        }
    }
}

/// An open connection.
#[derive(Debug)]
pub struct Talk {
    stream: TcpStream,
    /// Who is there.
    pub met: Met,
    /// How long connect took.
    pub took: Duration,
}

impl Talk {
    /// The client's own end.
    ///
    /// # Errors
    /// The kernel's.
    pub fn own(&self) -> io::Result<SocketAddr> {
        self.stream.local_addr()
    }

    /// Says a line and reads it back.
    ///
    /// # Errors
    /// Where it does not come back in time.
    pub fn say(&mut self, text: &str) -> Result<(), Failure> {
        self.stream.set_write_timeout(Some(patience()))?;
        self.stream.write_all(text.as_bytes())?;
        self.stream.write_all(b"\n")?;
        let back = self.read_line(patience())?;
        if back == text {
            Ok(())
        } else {
            Err(Failure::Other(Errno::EPROTO))
        }
    }

    /// Has the server reset the connection, and returns when the reset is here.
    ///
    /// # Errors
    /// Where something else comes.
    pub fn have_reset(mut self) -> Result<()> {
        self.stream.write_all(b"reset\n")?;
        self.stream.set_read_timeout(Some(patience()))?;
        match self.stream.read(&mut [0; 16]) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(()),
            other => bail!("instead of a reset came {other:?}"),
        }
    }

    /// Resets the connection from this side.
    ///
    /// # Errors
    /// The kernel's.
    pub fn reset(self) -> Result<(), Failure> {
        Ok(reset_on_close(&self.stream)?)
    }

    /// Has the server close first, and closes too: no TIME_WAIT is here, and the source port may be used again at once.
    ///
    /// # Errors
    /// Where the server does not close in time.
    pub fn have_closed(mut self) -> Result<(), Failure> {
        self.stream.write_all(b"close\n")?;
        self.read_end()
    }

    /// Closes this side first and waits until the other has closed too: the TIME_WAIT is here.
    ///
    /// # Errors
    /// Where the other does not close in time.
    pub fn close(mut self) -> Result<(), Failure> {
        self.stream.shutdown(Shutdown::Write)?;
        self.read_end()
    }

    fn read_end(&mut self) -> Result<(), Failure> {
        self.stream.set_read_timeout(Some(patience()))?;
        match self.stream.read(&mut [0; 16]) {
            Ok(0) => Ok(()),
            Ok(_) => Err(Failure::Other(Errno::EPROTO)),
            Err(error) => Err(error.into()),
        }
    }

    /// Sends so many bytes while reading them back, and compares; `paused` runs once in the middle.
    ///
    /// # Errors
    /// Where bytes are lost, changed or late.
    pub fn transfer(&mut self, len: usize, paused: impl FnOnce() -> Result<()>) -> Result<()> {
        let mut writer = self.stream.try_clone()?;
        writer.set_write_timeout(Some(patience() * 4))?;
        self.stream.set_read_timeout(Some(patience() * 4))?;
        let pattern = |at: usize| (at % 251) as u8;
        let half = len / 2;
        let sending = thread::spawn(move || -> io::Result<()> {
            let whole: Vec<u8> = (0..len).map(pattern).collect();
            writer.write_all(&whole)
        });
        let mut buffer = vec![0; 32 * 1024];
        let mut paused = Some(paused);
        let mut at = 0;
        while at < len {
            if at >= half
                && let Some(paused) = paused.take()
            {
                paused().context("in the middle of a transfer")?;
            }
            let wanted = buffer.len().min(len - at);
            let got = self
                .stream
                .read(&mut buffer[..wanted])
                .with_context(|| format!("after {at} of {len} bytes"))?;
            if got == 0 {
                bail!("the connection ended after {at} of {len} bytes");
            }
            for (offset, byte) in buffer[..got].iter().enumerate() {
                if *byte != pattern(at + offset) {
                    bail!("byte {} is wrong", at + offset);
                }
            }
            at += got;
        }
        match sending.join() {
            Ok(sent) => Ok(sent?),
            Err(_) => bail!("the sender panicked"),
        }
    }

    fn read_line(&mut self, limit: Duration) -> Result<String, Failure> {
        self.stream.set_read_timeout(Some(limit))?;
        let mut line = Vec::new();
        let mut byte = [0];
        loop {
            // A byte at a time, so that nothing after the line is taken.
            match self.stream.read(&mut byte) {
                Ok(0) => return Err(Failure::Refused),
                Ok(_) if byte[0] == b'\n' => break,
                Ok(_) if line.len() > 256 => return Err(Failure::Other(Errno::EPROTO)),
                Ok(_) => line.push(byte[0]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        String::from_utf8(line).map_err(|_| Failure::Other(Errno::EPROTO))
    }
}

/// A datagram socket that talks to one address.
#[derive(Debug)]
pub struct Datagrams {
    socket: UdpSocket,
    /// Where each datagram goes, where the socket is not connected; answers must come from there.
    target: Option<SocketAddr>,
    limit: Duration,
}

impl Datagrams {
    /// The client's own end.
    ///
    /// # Errors
    /// The kernel's.
    pub fn own(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Has datagrams go whole or not at all.
    ///
    /// # Errors
    /// The kernel's.
    pub fn keep_whole(&self) -> Result<(), Failure> {
        Ok(discover_path(&self.socket, self.socket.peer_addr()?.ip(), true)?)
    }

    /// Sends a text and reads who answers.
    ///
    /// # Errors
    /// How it failed.
    pub fn ask(&self, text: &str) -> Result<Met, Failure> {
        self.exchange(text.as_bytes()).map(|(met, _)| met)
    }

    /// Sends a datagram of `len` bytes that asks for an answer of `answer` bytes; returns who answered and how long it was.
    ///
    /// # Errors
    /// How it failed.
    pub fn exchange_long(&self, len: usize, answer: usize) -> Result<(Met, usize), Failure> {
        let mut request = format!("reply {answer}\n").into_bytes();
        if request.len() < len {
            request.resize(len, b' ');
        }
        self.exchange(&request)
    }

    fn exchange(&self, request: &[u8]) -> Result<(Met, usize), Failure> {
        self.socket.set_read_timeout(Some(self.limit))?;
        let mut answer = vec![0; 64 * 1024];
        let len = if let Some(target) = self.target {
            self.socket.send_to(request, target)?;
            let (len, source) = self.socket.recv_from(&mut answer)?;
            if source != target {
                return Err(Failure::Other(Errno::EXDEV));
            }
            len
        } else {
            self.socket.send(request)?;
            self.socket.recv(&mut answer)?
        };
        let line = answer[..len].split(|byte| *byte == b'\n').next().unwrap_or_default();
        let met = std::str::from_utf8(line)
            .ok()
            .and_then(Met::parse)
            .ok_or(Failure::Other(Errno::EPROTO))?;
        Ok((met, len))
    }
}
