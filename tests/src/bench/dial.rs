//! The client: a socket, one blocking `connect`, its time; nothing else is inside the clock.
//!
//! Client and server are one thread. It connects a handful of sockets, then accepts them, then closes both ends by reset,
//! the client first: no wake-up of another thread is in the measured time, and no connection lingers to slow later ones.

use std::{
    net::SocketAddrV4,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    time::Instant,
};

use anyhow::{Context, Result};
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrIn, accept, connect, setsockopt, socket, sockopt::Linger,
};

/// Connections that are open at the same time.
const BATCH: usize = 64;

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
pub(super) fn block(
    targets: &mut impl Iterator<Item = SocketAddrV4>,
    listener: &OwnedFd,
    count: usize,
    times: &mut Times,
) -> Result<()> {
    let mut left = count;
    let mut clients = Vec::with_capacity(BATCH);
    let mut servers = Vec::with_capacity(BATCH);
    while left > 0 {
        let batch = left.min(BATCH);
        for target in targets.by_ref().take(batch) {
            let client = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
            // Closing resets: a port that waits for a minute would make later connections slower.
            let linger = nix::libc::linger { l_onoff: 1, l_linger: 0 };
            setsockopt(&client, Linger, &linger)?;
            let address = SockaddrIn::from(target);
            let fd = client.as_raw_fd();
            let began = Instant::now();
            let connected = connect(fd, &address);
            let took = began.elapsed();
            connected.with_context(|| format!("connect to {target}"))?;
            times.connect.push(took.as_nanos() as f64 / 1e3);
            clients.push(client);
        }
        for _ in &clients {
            let server = accept(listener.as_raw_fd()).context("accept")?;
            // SAFETY: the kernel has just given us this descriptor, and nobody else knows it.
            servers.push(unsafe { OwnedFd::from_raw_fd(server) });
        }
        for client in clients.drain(..) {
            let began = Instant::now();
            drop(client);
            times.close.push(began.elapsed().as_nanos() as f64 / 1e3);
        }
        servers.clear();
        left -= batch;
    }
    Ok(())
}
