//! The TCP sockets of this network namespace, as `/proc/net/tcp` and `/proc/net/tcp6` list them.
//!
//! The text is read line by line, so that a listing of many sockets is never held whole, and a look for listeners ends where
//! the kernel has listed them: it lists those first. The files, not the socket diagnosis over netlink: asking that one would
//! load a kernel module where it is one.

use std::{
    fs::File,
    io::{self, BufRead, BufReader},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    ops::ControlFlow,
};

use super::{BadLine, Error, Result};

const FILES: [&str; 2] = ["/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6"];

/// The number of an established connection's state (include/net/tcp_states.h).
pub(super) const ESTABLISHED: u8 = 1;
/// The number of a listener's state.
pub(super) const LISTEN: u8 = 10;

/// A TCP socket. Addresses of IPv4 that are written in IPv6 are IPv4 here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Socket {
    pub(super) local: SocketAddr,
    pub(super) remote: SocketAddr,
    pub(super) state: u8,
    pub(super) inode: u64,
}

/// Shows every TCP socket of both families; `look` breaks off the rest of a family.
pub(super) fn each(mut look: impl FnMut(&Socket) -> ControlFlow<()>) -> Result<()> {
    for path in FILES {
        let read = |source| Error::Read {
            path: path.into(),
            source,
        };
        let file = match File::open(path) {
            Ok(file) => file,
            // A kernel without IPv6.
            Err(error) if error.kind() == io::ErrorKind::NotFound && path != FILES[0] => continue,
            Err(error) => return Err(read(error)),
        };
        for (number, line) in BufReader::new(file).lines().enumerate().skip(1) {
            let line = line.map_err(read)?;
            let socket = parse(&line).ok_or_else(|| BadLine::new(number + 1, &line, "a TCP socket").of(path))?;
            if look(&socket).is_break() {
                break;
            }
        }
    }
    Ok(())
}

/// Reads one line behind the heading.
fn parse(line: &str) -> Option<Socket> {
    let mut words = line.split_whitespace();
    let _slot = words.next()?.strip_suffix(':')?;
    let local = address(words.next()?)?;
    let remote = address(words.next()?)?;
    let state = u8::from_str_radix(words.next()?, 16).ok()?;
    // Queues, timer, retransmissions, owner and timeout stand in between.
    let inode = words.nth(5)?.parse().ok()?;
    Some(Socket {
        local,
        remote,
        state,
        inode,
    })
}

/// Reads `0100007F:1F90`: an address as hexadecimal words of the machine's order, whose bytes are those of the wire.
fn address(text: &str) -> Option<SocketAddr> {
    let (address, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let word = |at: usize| Some(u32::from_str_radix(address.get(at..at + 8)?, 16).ok()?.to_ne_bytes());
    let address = match address.len() {
        8 => IpAddr::V4(Ipv4Addr::from(word(0)?)),
        32 => {
            let mut bytes = [0; 16];
            for (n, part) in bytes.chunks_exact_mut(4).enumerate() {
                part.copy_from_slice(&word(n * 8)?);
            }
            IpAddr::V6(Ipv6Addr::from(bytes)).to_canonical()
        }
        _ => return None,
    };
    Some(SocketAddr::new(address, port))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use proptest::prelude::*;

    use super::*;

    /// An address as the kernel prints it on this machine.
    fn printed(address: SocketAddr) -> String {
        let word = |bytes: &[u8]| format!("{:08X}", u32::from_ne_bytes(bytes.try_into().expect("four bytes")));
        let words: String = match address.ip() {
            IpAddr::V4(v4) => word(&v4.octets()),
            IpAddr::V6(v6) => v6.octets().chunks(4).map(word).collect(),
        };
        format!("{words}:{:04X}", address.port())
    }

    fn line(local: &str, remote: &str, state: &str, inode: u64) -> String {
        let address = |text: &str| printed(text.parse().expect("an address"));
        format!(
            "   0: {} {} {state} 00000000:00000000 00:00000000 00000000     0        0 {inode} 1 0000000000000000 100 0 0 10 0",
            address(local),
            address(remote)
        )
    }

    #[test]
    fn sockets_of_both_families_are_read() {
        let listener = parse(&line("127.0.0.1:8080", "0.0.0.0:0", "0A", 4711)).expect("a socket");
        assert_eq!((listener.state, listener.inode), (LISTEN, 4711));
        assert_eq!(listener.local.to_string(), "127.0.0.1:8080");
        let open = parse(&line("[fd00::1]:40000", "[fd00::a]:443", "01", 1)).expect("a socket");
        assert_eq!(open.state, ESTABLISHED);
        assert_eq!(open.remote.to_string(), "[fd00::a]:443");
        let mapped = parse(&line("[::ffff:10.0.0.1]:40000", "[::ffff:10.96.0.10]:80", "01", 1)).expect("a socket");
        assert_eq!(mapped.remote.to_string(), "10.96.0.10:80");
    }

    #[test]
    fn other_lines_are_none() {
        let whole = line("127.0.0.1:80", "127.0.0.1:4000", "01", 7);
        assert_eq!(parse(whole.split(" 7 ").next().expect("a part")), None);
        for text in ["", "0:", "0: 0100007F 0100007F:0050 01", "0: 01:0050 0100007F:0050 01"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    #[test]
    fn a_listener_of_this_machine_is_seen_before_any_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
        let local = listener.local_addr().expect("its address");
        let _client = std::net::TcpStream::connect(local).expect("a connection");
        let (mut seen, mut open) = (false, 0);
        each(|socket| {
            seen |= socket.local == local && socket.state == LISTEN;
            open += usize::from(socket.remote == local && socket.state == ESTABLISHED);
            ControlFlow::Continue(())
        })
        .expect("readable");
        assert_eq!((seen, open), (true, 1));
        let mut early = false;
        each(|socket| {
            early |= socket.local == local;
            if socket.state == LISTEN {
                ControlFlow::Continue(())
            } else {
                ControlFlow::Break(())
            }
        })
        .expect("readable");
        assert!(early, "listeners stand first");
    }

    proptest! {
        #[test]
        fn any_line_is_a_socket_or_none(text in "\\PC*") {
            let _outcome = parse(&text);
        }

        #[test]
        fn what_is_printed_is_read(bytes in any::<[u8; 16]>(), port in any::<u16>()) {
            let address_of = SocketAddr::new(Ipv6Addr::from(bytes).into(), port);
            let read = address(&printed(address_of)).expect("an address");
            prop_assert_eq!(read, SocketAddr::new(address_of.ip().to_canonical(), port));
        }
    }
}
