//! The virtual servers of IPVS, as `/proc/net/ip_vs` lists them, and how long IPVS keeps its entries.
//!
//! The text is parsed by a pure function. Virtual servers by firewall mark have no address and are passed over.

use std::{
    fs, io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    os::fd::AsRawFd,
    time::Duration,
};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

use super::{BadLine, Error, Result};
use crate::model::Protocol;

/// Where the kernel lists the virtual servers; absent where IPVS is not loaded.
const TABLE: &str = "/proc/thread-self/net/ip_vs";

/// A virtual server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VirtualServer {
    /// What clients dial.
    pub frontend: SocketAddr,
    /// Its protocol.
    pub protocol: Protocol,
    /// The scheduler's name, such as `rr`.
    pub scheduler: String,
    /// How long a client stays with its real server, where it is persistent.
    pub persistent: Option<Duration>,
    /// Its real servers.
    pub servers: Vec<RealServer>,
}

/// A real server of a virtual server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RealServer {
    /// Its address.
    pub address: SocketAddr,
    /// Its weight; at 0 it gets no new connections.
    pub weight: u32,
    /// Entries of established connections.
    pub active: u64,
    /// Entries of all others, closed ones above all.
    pub inactive: u64,
}

/// How long IPVS keeps entries.
///
/// These three are what `ipvsadm --set` changes (`struct ip_vs_timeout_user` in linux/ip_vs.h). The time of an entry whose
/// connection is in TIME_WAIT is fixed at 120 s (`tcp_timeouts` in net/netfilter/ipvs/ip_vs_proto_tcp.c).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// Of an established TCP connection without traffic.
    pub tcp: Duration,
    /// Of a TCP connection after a FIN.
    pub tcp_fin: Duration,
    /// Of a UDP flow without traffic.
    pub udp: Duration,
}

/// Lists the virtual servers of this network namespace; none where IPVS is not loaded.
pub fn list() -> Result<Option<Vec<VirtualServer>>> {
    match fs::read_to_string(TABLE) {
        Ok(text) => Ok(Some(parse(&text).map_err(|bad| bad.of(TABLE))?)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Error::Read {
            path: TABLE.into(),
            source,
        }),
    }
}

/// Asks how long entries are kept; none where IPVS is not loaded.
pub fn timeouts() -> Result<Option<Timeouts>> {
    ask_timeouts().map_err(|source| Error::List {
        what: "the timeouts of IPVS".to_owned(),
        source,
    })
}

fn ask_timeouts() -> io::Result<Option<Timeouts>> {
    /// `IP_VS_SO_GET_TIMEOUT` in linux/ip_vs.h.
    const GET_TIMEOUT: libc::c_int = 64 + 1024 + 64 + 6;
    // Any IPv4 socket reaches the option; one for datagrams needs no capability for raw sockets.
    let socket = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
    let mut seconds = [0_i32; 3];
    let mut length = size_of_val(&seconds) as libc::socklen_t;
    // SAFETY: the option writes at most `length` bytes, and that is the array's size.
    let answer = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_IP,
            GET_TIMEOUT,
            seconds.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    if answer != 0 {
        let error = io::Error::last_os_error();
        return match error.raw_os_error() {
            Some(libc::ENOPROTOOPT) => Ok(None),
            _ => Err(error),
        };
    }
    let [tcp, tcp_fin, udp] = seconds.map(|s| Duration::from_secs(s.unsigned_abs().into()));
    Ok(Some(Timeouts { tcp, tcp_fin, udp }))
}

/// Reads the table's text.
fn parse(text: &str) -> std::result::Result<Vec<VirtualServer>, BadLine> {
    let mut table: Vec<VirtualServer> = Vec::new();
    // Real servers behind a virtual server that was passed over are passed over too.
    let mut wanted = false;
    for (number, line) in text.lines().enumerate() {
        let bad = |what| BadLine::new(number + 1, line, what);
        let mut words = line.split_whitespace();
        match words.next() {
            Some(name @ ("TCP" | "UDP")) => {
                table.push(virtual_server(name, words).ok_or_else(|| bad("a virtual server"))?);
                wanted = true;
            }
            Some("SCTP" | "FWM") => wanted = false,
            Some("->") if line.contains("RemoteAddress") => {}
            Some("->") => {
                let server = real_server(words).ok_or_else(|| bad("a real server"))?;
                match table.last_mut() {
                    Some(last) if wanted => last.servers.push(server),
                    _ => {}
                }
            }
            Some("IP" | "Prot") | None => {}
            Some(_) => return Err(bad("a line of IPVS's table")),
        }
    }
    Ok(table)
}

fn virtual_server<'t>(name: &str, mut words: impl Iterator<Item = &'t str>) -> Option<VirtualServer> {
    let frontend = address(words.next()?)?;
    let scheduler = words.next()?.to_owned();
    let mut persistent = None;
    while let Some(flag) = words.next() {
        if flag == "persistent" {
            persistent = Some(Duration::from_secs(words.next()?.parse().ok()?));
        }
    }
    Some(VirtualServer {
        frontend,
        protocol: if name == "TCP" { Protocol::Tcp } else { Protocol::Udp },
        scheduler,
        persistent,
        servers: Vec::new(),
    })
}

fn real_server<'t>(mut words: impl Iterator<Item = &'t str>) -> Option<RealServer> {
    let address = address(words.next()?)?;
    let _forwarding = words.next()?;
    Some(RealServer {
        address,
        weight: words.next()?.parse().ok()?,
        active: words.next()?.parse().ok()?,
        inactive: words.next()?.parse().ok()?,
    })
}

/// Reads `0A60000A:0050` or `[fd00:...:0001]:0050`; port and IPv4 address are hexadecimal numbers.
fn address(text: &str) -> Option<SocketAddr> {
    let (address, port) = text.rsplit_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let address = match address.strip_prefix('[') {
        Some(v6) => IpAddr::V6(v6.strip_suffix(']')?.parse().ok()?),
        None => IpAddr::V4(Ipv4Addr::from_bits(u32::from_str_radix(address, 16).ok()?)),
    };
    Some(SocketAddr::new(address, port))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HEAD: &str = "IP Virtual Server version 1.2.1 (size=4096)\n\
                        Prot LocalAddress:Port Scheduler Flags\n  \
                        -> RemoteAddress:Port Forward Weight ActiveConn InActConn\n";

    fn parsed(lines: &str) -> Vec<VirtualServer> {
        parse(&format!("{HEAD}{lines}")).expect("a table")
    }

    fn socket_address(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn an_empty_table_has_no_servers() {
        assert!(parsed("").is_empty());
        assert!(parse("").expect("nothing is a table too").is_empty());
    }

    #[test]
    fn both_families_are_read_with_weights_and_counts() {
        let table = parsed(concat!(
            "TCP  0A60000A:0050 rr  \n",
            "  -> 0AF40101:1F90      Masq    1      3          120       \n",
            "  -> 0AF40102:1F90      Masq    0      0          7         \n",
            "TCP  [fd00:0000:0000:0000:0000:0000:0000:000a]:01BB wlc \n",
            "  -> [fd00:0000:0000:0000:0000:0000:0001:0001]:20FB      Masq    100    1          2         \n",
        ));
        assert_eq!(table.len(), 2);
        assert_eq!(table[0].frontend, socket_address("10.96.0.10:80"));
        assert_eq!((table[0].scheduler.as_str(), table[0].persistent), ("rr", None));
        assert_eq!(
            table[0].servers,
            [
                RealServer {
                    address: socket_address("10.244.1.1:8080"),
                    weight: 1,
                    active: 3,
                    inactive: 120
                },
                RealServer {
                    address: socket_address("10.244.1.2:8080"),
                    weight: 0,
                    active: 0,
                    inactive: 7
                },
            ]
        );
        assert_eq!(table[1].frontend, socket_address("[fd00::a]:443"));
        assert_eq!(table[1].servers[0].address, socket_address("[fd00::1:1]:8443"));
        assert_eq!(table[1].servers[0].weight, 100);
    }

    #[test]
    fn flags_stand_behind_the_scheduler() {
        let table = parsed("UDP  0A60000A:0035 rr ops persistent 10800 FFFFFFFF\n");
        assert_eq!(table[0].protocol, Protocol::Udp);
        assert_eq!(table[0].persistent, Some(Duration::from_hours(3)));
    }

    #[test]
    fn servers_by_firewall_mark_are_passed_over_with_theirs() {
        let table = parsed(concat!(
            "TCP  0A60000A:0050 rr  \n",
            "FWM  00000001 rr persistent 360 FFFFFFFF\n",
            "  -> 0AF40101:1F90      Masq    1      0          0         \n",
            "SCTP  0A60000B:0050 rr  \n",
            "  -> 0AF40101:1F90      Masq    1      0          0         \n",
        ));
        assert_eq!(table.len(), 1);
        assert!(table[0].servers.is_empty());
    }

    #[test]
    fn other_texts_are_errors_that_name_the_line() {
        let error = parse(&format!("{HEAD}TCP  0A60000A:0050\n")).expect_err("no scheduler");
        assert_eq!((error.line, error.wanted), (4, "a virtual server"));
        for line in [
            "TCP  0A60000A rr",
            "TCP  [fd00::1:0050 rr",
            "UDP  0A60000A:0035 rr persistent",
            "  -> 0AF40101:1F90 Masq 1 0",
            "  -> 0AF40101:1F90 Masq -1 0 0",
            "what is this",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_a_table_or_an_error(text in any::<String>()) {
            let _outcome = parse(&text);
        }

        #[test]
        fn any_words_are_a_table_or_an_error(words in proptest::collection::vec(
            prop_oneof![Just("TCP"), Just("FWM"), Just("->"), Just("\n"), Just("0A60000A:0050"), Just("[fd00::1]:1"), Just("rr"),
                Just("persistent"), Just("1"), Just("-1"), Just("[]:")], 0..40)) {
            let _outcome = parse(&words.join(" "));
        }
    }
}
