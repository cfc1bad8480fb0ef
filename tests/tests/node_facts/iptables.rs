//! Rules as iptables writes them into nftables, put into the kernel without iptables.
//!
//! The tool need not be installed: its rules are nftables' expressions with iptables' own targets in them, and this file
//! sends just those of a Service to the kernel. What the kernel gives back is what the reader has to understand.

use std::{net::SocketAddr, os::fd::AsRawFd};

use anyhow::{Context, Result, ensure};
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send, socket,
};

const SUBSYSTEM: u16 = 10 << 8;
const BATCH_BEGIN: u16 = 16;
const BATCH_END: u16 = 17;
const NEWRULE: u16 = SUBSYSTEM + 6;
const REQUEST: u16 = 1;
const ACK: u16 = 4;
const CREATE_APPEND: u16 = 0xc00;
const IPV4: u8 = 2;

/// Appends a rule to a chain of the table `nat`.
pub(crate) fn append(chain: &str, expressions: &[Vec<u8>]) -> Result<()> {
    let body = [text(1, "nat"), text(2, chain), value(4 | NESTED, &expressions.concat())].concat();
    // A batch's begin and end name the subsystem in their resource.
    let mark = |kind| message(kind, REQUEST, &[0, 0, 0, 10]);
    let rule = message(
        NEWRULE,
        REQUEST | ACK | CREATE_APPEND,
        &[&[IPV4, 0, 0, 0], &body[..]].concat(),
    );
    let batch = [mark(BATCH_BEGIN), rule, mark(BATCH_END)].concat();

    let socket = socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::NetlinkNetFilter,
    )?;
    bind(socket.as_raw_fd(), &NetlinkAddr::new(0, 0))?;
    send(socket.as_raw_fd(), &batch, MsgFlags::empty())?;
    let mut answer = [0; 1024];
    let length = recv(socket.as_raw_fd(), &mut answer, MsgFlags::empty())?;
    let code = answer[..length].get(16..20).context("an acknowledgement")?;
    let code = i32::from_ne_bytes(code.try_into()?);
    ensure!(
        code == 0,
        "a rule in {chain}: {}",
        std::io::Error::from_raw_os_error(-code)
    );
    Ok(())
}

/// `-d ADDRESS -p tcp --dport PORT`
pub(crate) fn to_frontend(frontend: SocketAddr) -> Result<Vec<u8>> {
    let SocketAddr::V4(v4) = frontend else {
        anyhow::bail!("of IPv4")
    };
    Ok([
        tcp(),
        load(1, 16, 4),
        compare(&v4.ip().octets()),
        load(2, 2, 2),
        compare(&frontend.port().to_be_bytes()),
    ]
    .concat())
}

/// `-p tcp`
pub(crate) fn tcp() -> Vec<u8> {
    [expression("meta", &[number(1, 1), number(2, 16)]), compare(&[6])].concat()
}

/// `-j CHAIN`
pub(crate) fn jump(chain: &str) -> Vec<u8> {
    let verdict = value(
        2 | NESTED,
        &[number(1, (-3_i32).cast_unsigned()), text(2, chain)].concat(),
    );
    expression("immediate", &[number(1, 0), value(2 | NESTED, &verdict)])
}

/// `-j DNAT --to-destination ENDPOINT`, whose data is the kernel's `struct nf_nat_range2`.
pub(crate) fn dnat(endpoint: SocketAddr) -> Result<Vec<u8>> {
    let SocketAddr::V4(v4) = endpoint else {
        anyhow::bail!("of IPv4")
    };
    let address = [&v4.ip().octets()[..], &[0; 12]].concat();
    let port = endpoint.port().to_be_bytes();
    // An address and a port are given; the last port is a base that is not used. The whole is padded to eight bytes.
    let range = [&3_u32.to_ne_bytes()[..], &address, &address, &port, &port, &[0; 4]].concat();
    Ok(expression("target", &[text(1, "DNAT"), number(2, 2), value(3, &range)]))
}

/// `-m recent --rcheck --seconds SECONDS --name NAME`, whose data is the kernel's `struct xt_recent_mtinfo_v1`.
pub(crate) fn seen_within(seconds: u32, name: &str) -> Vec<u8> {
    let mut info = [&seconds.to_ne_bytes()[..], &0_u32.to_ne_bytes(), &[1, 0]].concat();
    info.extend(name.bytes());
    info.resize(10 + 200, 0);
    info.push(0);
    // The mask begins at a multiple of four.
    info.resize(212, 0);
    info.extend([0xff; 16]);
    info.resize(232, 0);
    expression("match", &[text(1, "recent"), number(2, 1), value(3, &info)])
}

/// Marks an attribute that holds attributes.
const NESTED: u16 = 0x8000;

fn expression(name: &str, attributes: &[Vec<u8>]) -> Vec<u8> {
    value(
        1 | NESTED,
        &[text(1, name), value(2 | NESTED, &attributes.concat())].concat(),
    )
}

fn load(base: u32, offset: u32, length: u32) -> Vec<u8> {
    expression(
        "payload",
        &[number(1, 1), number(2, base), number(3, offset), number(4, length)],
    )
}

fn compare(bytes: &[u8]) -> Vec<u8> {
    expression(
        "cmp",
        &[number(1, 1), number(2, 0), value(3 | NESTED, &value(1, bytes))],
    )
}

fn text(kind: u16, text: &str) -> Vec<u8> {
    value(kind, &[text.as_bytes(), &[0]].concat())
}

fn number(kind: u16, number: u32) -> Vec<u8> {
    value(kind, &number.to_be_bytes())
}

fn value(kind: u16, bytes: &[u8]) -> Vec<u8> {
    let length = (bytes.len() + 4) as u16;
    let mut out = [&length.to_ne_bytes()[..], &kind.to_ne_bytes(), bytes].concat();
    out.resize(out.len().next_multiple_of(4), 0);
    out
}

fn message(kind: u16, flags: u16, payload: &[u8]) -> Vec<u8> {
    let length = (16 + payload.len()) as u32;
    let mut out = [
        &length.to_ne_bytes()[..],
        &kind.to_ne_bytes(),
        &flags.to_ne_bytes(),
        &[0; 8],
        payload,
    ]
    .concat();
    out.resize(out.len().next_multiple_of(4), 0);
    out
}
