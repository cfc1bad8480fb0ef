//! Sockets as the tests need them: made before they are connected, and asked for their cookie.

use std::{
    io,
    net::SocketAddr,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
};

use nix::{
    errno::Errno,
    sys::socket::{
        AddressFamily, SockFlag, SockProtocol, SockType, SockaddrStorage, connect, getpeername, setsockopt, socket,
        sockopt::ReuseAddr,
    },
};

use crate::world::Dial;

/// Makes a socket of the way's family.
pub fn make(dial: Dial, kind: SockType, flags: SockFlag, protocol: Option<SockProtocol>) -> nix::Result<OwnedFd> {
    let family = if dial == Dial::V4 {
        AddressFamily::Inet
    } else {
        AddressFamily::Inet6
    };
    socket(family, kind, flags | SockFlag::SOCK_CLOEXEC, protocol)
}

/// Makes a TCP socket.
pub fn tcp(dial: Dial) -> nix::Result<OwnedFd> {
    make(dial, SockType::Stream, SockFlag::empty(), None)
}

/// Makes a UDP socket.
pub fn udp(dial: Dial) -> nix::Result<OwnedFd> {
    make(dial, SockType::Datagram, SockFlag::empty(), None)
}

/// Connects a socket.
pub fn dial(fd: impl AsFd, address: SocketAddr) -> Result<(), Errno> {
    connect(fd.as_fd().as_raw_fd(), &SockaddrStorage::from(address))
}

/// Undoes a socket's connect (`connect` with AF_UNSPEC).
pub fn disconnect(fd: impl AsFd) -> io::Result<()> {
    let address = libc::sockaddr {
        sa_family: libc::AF_UNSPEC as libc::sa_family_t,
        sa_data: [0; 14],
    };
    // SAFETY: the address is whole, and the kernel reads no more than its length.
    let result = unsafe {
        libc::connect(
            fd.as_fd().as_raw_fd(),
            &raw const address,
            size_of::<libc::sockaddr>() as libc::socklen_t,
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Binds a socket to a port of its own, shared with others that do the same.
pub fn bind_shared(fd: &OwnedFd, address: SocketAddr) -> nix::Result<()> {
    setsockopt(fd, ReuseAddr, &true)?;
    nix::sys::socket::bind(fd.as_raw_fd(), &SockaddrStorage::from(address))
}

/// The peer as the application sees it.
pub fn peer(fd: impl AsFd) -> Result<SocketAddr, Errno> {
    let address: SockaddrStorage = getpeername(fd.as_fd().as_raw_fd())?;
    to_std(&address).ok_or(Errno::EAFNOSUPPORT)
}

fn to_std(address: &SockaddrStorage) -> Option<SocketAddr> {
    if let Some(v4) = address.as_sockaddr_in() {
        return Some(SocketAddr::from((v4.ip(), v4.port())));
    }
    let v6 = address.as_sockaddr_in6()?;
    Some(SocketAddr::from((v6.ip(), v6.port())))
}

/// The socket's cookie, by which the programs know it.
pub fn cookie(fd: impl AsFd) -> io::Result<u64> {
    option::<u64>(fd.as_fd(), libc::SO_COOKIE)
}

/// The cookie of the socket's network namespace.
pub fn netns_cookie(fd: impl AsFd) -> io::Result<u64> {
    /// `SO_NETNS_COOKIE`, from 5.14.
    const SO_NETNS_COOKIE: libc::c_int = 71;
    option::<u64>(fd.as_fd(), SO_NETNS_COOKIE)
}

fn option<T: Copy + Default>(fd: BorrowedFd<'_>, name: libc::c_int) -> io::Result<T> {
    let mut value = T::default();
    let mut len = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes into the value, which is an integer.
    let result = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            name,
            (&raw mut value).cast(),
            &raw mut len,
        )
    };
    if result == 0 {
        Ok(value)
    } else {
        Err(io::Error::last_os_error())
    }
}
