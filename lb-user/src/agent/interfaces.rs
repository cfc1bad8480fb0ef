//! Interfaces come and go: a pod's is observed from its birth on, and packets of a new uplink are translated from its first on.
//!
//! The kernel tells of each change over netlink; a timer looks besides, for what a full buffer has swallowed.

use std::{io, os::fd::OwnedFd, sync::Arc, time::Duration};

use nix::sys::socket::{AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, socket};
use tokio::{
    io::{Interest, unix::AsyncFd},
    time::{sleep, timeout},
};

use super::state::Shared;
use crate::supervise::Liveness;

/// How often the interfaces are looked at when the kernel tells nothing.
const PERIOD: Duration = Duration::from_secs(2);

/// What is told: links, addresses, and routes, which make an uplink.
const GROUPS: u32 = (libc::RTMGRP_LINK
    | libc::RTMGRP_IPV4_IFADDR
    | libc::RTMGRP_IPV6_IFADDR
    | libc::RTMGRP_IPV4_ROUTE
    | libc::RTMGRP_IPV6_ROUTE) as u32;
/// Changes come in bursts, such as one a route: the first is looked at at once, and those that follow together.
const PAUSE: Duration = Duration::from_millis(20);

/// Tells that a link, an address or a route has changed.
struct Changes(AsyncFd<OwnedFd>);

impl Changes {
    fn open() -> io::Result<Self> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let fd = socket(AddressFamily::Netlink, SockType::Raw, flags, SockProtocol::NetlinkRoute)?;
        bind(std::os::fd::AsRawFd::as_raw_fd(&fd), &NetlinkAddr::new(0, GROUPS))?;
        // SAFETY: the descriptor is owned by what is registered, and closed with it.
        let fd = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }?;
        Ok(Self(fd))
    }

    /// Waits for a change, or for the timer.
    async fn wait(&self) -> io::Result<()> {
        let Ok(ready) = timeout(PERIOD, self.0.readable()).await else {
            return Ok(());
        };
        let mut ready = ready?;
        // What has changed is looked up whole: the messages themselves, and whether some were lost, do not matter.
        let mut bytes = [0; 8_192];
        loop {
            let read = recv(
                std::os::fd::AsRawFd::as_raw_fd(self.0.get_ref()),
                &mut bytes,
                MsgFlags::MSG_DONTWAIT,
            );
            match read {
                Ok(_) | Err(nix::Error::ENOBUFS | nix::Error::EINTR) => {}
                Err(nix::Error::EAGAIN) => break,
                Err(error) => return Err(error.into()),
            }
        }
        ready.clear_ready();
        Ok(())
    }
}

/// Keeps the packet programs on the interfaces that there are.
pub(super) async fn follow(shared: &Arc<Shared>, liveness: &Liveness) -> Result<(), String> {
    let changes = Changes::open().map_err(|error| format!("follow the interfaces: {error}"))?;
    loop {
        liveness.beat();
        let state = shared.clone();
        tokio::task::spawn_blocking(move || {
            state.follow_interfaces().map_err(|error| error.to_string())?;
            state.follow_uplinks()
        })
        .await
        .map_err(|error| error.to_string())??;
        sleep(PAUSE).await;
        changes
            .wait()
            .await
            .map_err(|error| format!("follow the interfaces: {error}"))?;
    }
}
