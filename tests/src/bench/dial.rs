//! The client and the server of the measurements.
//!
//! A server may also tell each client which of its addresses was met, before it closes: [`ask`] hears that.
//!
//! The client makes a socket, calls a blocking `connect`, waits for the server to close, and closes: only `connect` and,
//! apart from it, `close` are inside the clock. The server accepts and closes at once, on a CPU of its own where there is
//! one. So the server closes first, as a server does, and no port of the client waits for a minute.

use std::{
    net::{Ipv4Addr, SocketAddrV4},
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    sync::Arc,
    thread::{self, JoinHandle},
    time::Instant,
};

use anyhow::{Context, Result};
use nix::{
    errno::Errno,
    sys::{
        signal::SigSet,
        socket::{
            AddressFamily, Shutdown, SockFlag, SockType, SockaddrIn, accept, connect, getsockname, setsockopt,
            shutdown, socket, sockopt,
        },
        time::TimeVal,
    },
    unistd::{read, write},
};

use super::place::{cpus, pin};

/// What a block of connections took, in microseconds.
#[derive(Debug, Default)]
pub(super) struct Times {
    pub(super) connect: Vec<f64>,
    pub(super) close: Vec<f64>,
}

/// Makes `count` connections to the targets in turn, in the calling thread's namespace and the process's cgroup.
///
/// # Errors
/// Where one fails: none may.
pub(super) fn block(targets: &mut dyn Iterator<Item = SocketAddrV4>, count: usize, times: &mut Times) -> Result<()> {
    for target in targets.take(count) {
        let client = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
        let address = SockaddrIn::from(target);
        let fd = client.as_raw_fd();
        let began = Instant::now();
        let connected = connect(fd, &address);
        let took = began.elapsed();
        connected.with_context(|| format!("connect to {target}"))?;
        times.connect.push(took.as_nanos() as f64 / 1e3);
        let got = read(&client, &mut [0; 8]).with_context(|| format!("wait for {target} to close"))?;
        anyhow::ensure!(got == 0, "{target} says something: it is not the bench's server");
        let began = Instant::now();
        drop(client);
        times.close.push(began.elapsed().as_nanos() as f64 / 1e3);
    }
    Ok(())
}

/// What became of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Met {
    /// The server's address that it ended at.
    Backend(Ipv4Addr),
    /// None was met: refused, unreachable, or silent for [`PATIENCE`].
    Nobody(Errno),
}

/// How long one connection of [`ask`] may take.
const PATIENCE: TimeVal = TimeVal::new(0, 200_000);

/// Connects from the calling thread's namespace and the process's cgroup, and hears who answers; with the microseconds of `connect`.
///
/// # Errors
/// Where the kernel makes no socket.
pub(super) fn ask(target: SocketAddrV4) -> Result<(Met, f64)> {
    let client = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    setsockopt(&client, sockopt::SendTimeout, &PATIENCE)?;
    setsockopt(&client, sockopt::ReceiveTimeout, &PATIENCE)?;
    let address = SockaddrIn::from(target);
    let began = Instant::now();
    let connected = connect(client.as_raw_fd(), &address);
    let took = began.elapsed().as_nanos() as f64 / 1e3;
    let mut told = [0; 8];
    let heard = connected.and_then(|()| read(&client, &mut told));
    let met = match heard {
        Ok(4) => Met::Backend(Ipv4Addr::new(told[0], told[1], told[2], told[3])),
        Ok(_) => Met::Nobody(Errno::EPROTO),
        Err(error) => Met::Nobody(error),
    };
    if matches!(met, Met::Backend(_)) {
        // The server closes first, so that no port of the client waits.
        let _ = read(&client, &mut told);
    }
    Ok((met, took))
}

/// What an [`Acceptor`] does with a connection before it closes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Manner {
    /// Nothing.
    Close,
    /// It tells the address that was met, in four bytes.
    Tell,
}

/// Accepts and closes, until it is dropped.
#[derive(Debug)]
pub(super) struct Acceptor {
    listener: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Acceptor {
    pub(super) fn start(listener: OwnedFd, manner: Manner) -> Result<Self> {
        let listener = Arc::new(listener);
        let own = Arc::clone(&listener);
        let (_, cpu) = cpus();
        let thread = thread::Builder::new().name("bench-server".to_owned()).spawn(move || {
            SigSet::all().thread_block().ok();
            // Where there is one CPU alone, both ends share it; one that tells stands beside programs that need every CPU.
            if manner == Manner::Close {
                pin(cpu).ok();
            }
            loop {
                match accept(own.as_raw_fd()) {
                    Ok(fd) => {
                        // SAFETY: the kernel has just given us this descriptor, and nobody else knows it.
                        let stream = unsafe { OwnedFd::from_raw_fd(fd) };
                        if manner == Manner::Tell
                            && let Ok(own) = getsockname::<SockaddrIn>(stream.as_raw_fd())
                        {
                            // A client that is gone need not hear it.
                            let _ = write(&stream, &own.ip().octets());
                        }
                    }
                    Err(Errno::EINTR | Errno::ECONNABORTED) => {}
                    // The listener was shut down.
                    Err(_) => break,
                }
            }
        })?;
        Ok(Self {
            listener,
            thread: Some(thread),
        })
    }
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        // It wakes the thread out of `accept`.
        let _ = shutdown(self.listener.as_raw_fd(), Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            // A panic has been printed.
            let _ = thread.join();
        }
    }
}
