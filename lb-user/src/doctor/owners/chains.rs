//! The nftables chains of this network namespace, asked of the kernel by netlink.
//!
//! One dump request, a handful of attributes: that is less than what a library for nftables would bring. Everything read is
//! bounds-checked; a message that makes no sense ends the look with an error.

use std::{io, os::fd::AsRawFd};

use nix::sys::{
    socket::{
        AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send, setsockopt, socket,
        sockopt::ReceiveTimeout,
    },
    time::TimeVal,
};

/// A chain, and the table it is in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Chain {
    pub(super) table: String,
    pub(super) name: String,
}

const NFNL_SUBSYS_NFTABLES: u16 = 10;
const NFT_MSG_NEWCHAIN: u16 = 3;
const NFT_MSG_GETCHAIN: u16 = 4;
const NFTA_CHAIN_TABLE: u16 = 1;
const NFTA_CHAIN_NAME: u16 = 3;
const NLM_F_REQUEST: u16 = 0x1;
const NLM_F_DUMP: u16 = 0x300;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
/// Bytes of a netlink message's header, and of the netfilter header that follows it.
const HEADER: usize = 16;
const FAMILY_HEADER: usize = 4;
/// More chains than any proxy makes; beyond it the look ends with what it has.
const MAX_CHAINS: usize = 1_000_000;

/// Lists the chains of all families.
pub(super) fn list() -> io::Result<Vec<Chain>> {
    let socket = socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::NetlinkNetFilter,
    )?;
    bind(socket.as_raw_fd(), &NetlinkAddr::new(0, 0))?;
    // The kernel answers at once, or not at all where nftables is not built in.
    setsockopt(&socket, ReceiveTimeout, &TimeVal::new(2, 0))?;
    send(socket.as_raw_fd(), &request(), MsgFlags::empty())?;

    let mut chains = Vec::new();
    let mut buffer = vec![0_u8; 64 * 1024];
    while chains.len() < MAX_CHAINS {
        let length = recv(socket.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
        let batch = buffer.get(..length).unwrap_or_default();
        if take(batch, &mut chains)? {
            break;
        }
    }
    Ok(chains)
}

fn request() -> Vec<u8> {
    let mut message = Vec::with_capacity(HEADER + FAMILY_HEADER);
    message.extend(((HEADER + FAMILY_HEADER) as u32).to_ne_bytes());
    message.extend((NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_GETCHAIN).to_ne_bytes());
    message.extend((NLM_F_REQUEST | NLM_F_DUMP).to_ne_bytes());
    // Sequence number and port: one request is under way, and the kernel fills in the port.
    message.extend([0; 8]);
    // Family: all; version: 0; resource: 0.
    message.extend([0; FAMILY_HEADER]);
    message
}

/// Reads a batch of messages; true at the end of the dump.
fn take(mut batch: &[u8], chains: &mut Vec<Chain>) -> io::Result<bool> {
    let broken = || io::Error::new(io::ErrorKind::InvalidData, "a netlink message that makes no sense");
    while !batch.is_empty() {
        let length = word32(batch, 0).ok_or_else(broken)? as usize;
        let kind = word16(batch, 4).ok_or_else(broken)?;
        let message = batch
            .get(..length)
            .filter(|message| message.len() >= HEADER)
            .ok_or_else(broken)?;
        let payload = &message[HEADER..];
        match kind {
            NLMSG_DONE => return Ok(true),
            NLMSG_ERROR => {
                let code = word32(payload, 0).ok_or_else(broken)?.cast_signed();
                return Err(io::Error::from_raw_os_error(code.saturating_neg()));
            }
            kind if kind == NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_NEWCHAIN => {
                let attributes = payload.get(FAMILY_HEADER..).ok_or_else(broken)?;
                let table = attribute(attributes, NFTA_CHAIN_TABLE);
                let name = attribute(attributes, NFTA_CHAIN_NAME);
                if let (Some(table), Some(name)) = (table, name) {
                    chains.push(Chain { table, name });
                }
            }
            _ => {}
        }
        batch = batch.get(align(length)..).unwrap_or_default();
    }
    Ok(false)
}

/// The text of one attribute of a list.
fn attribute(mut list: &[u8], wanted: u16) -> Option<String> {
    loop {
        let length = usize::from(word16(list, 0)?);
        let kind = word16(list, 2)?;
        let value = list.get(4..length)?;
        if kind == wanted {
            let text = value.split(|&byte| byte == 0).next()?;
            return Some(String::from_utf8_lossy(text).into_owned());
        }
        list = list.get(align(length)..)?;
    }
}

/// Messages and attributes begin at multiples of four bytes.
const fn align(length: usize) -> usize {
    (length + 3) & !3
}

fn word16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn word32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn attribute_bytes(kind: u16, text: &str) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(((text.len() + 5) as u16).to_ne_bytes());
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(text.bytes().chain([0]));
        bytes.resize(align(bytes.len()), 0);
        bytes
    }

    fn message(kind: u16, payload: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(((HEADER + payload.len()) as u32).to_ne_bytes());
        bytes.extend(kind.to_ne_bytes());
        bytes.extend([0; 10]);
        bytes.extend(payload);
        bytes
    }

    #[test]
    fn chains_are_read_to_the_end_of_the_dump() {
        let chain = [
            &[2, 0, 0, 0][..],
            &attribute_bytes(NFTA_CHAIN_TABLE, "nat"),
            &attribute_bytes(2, "handle"),
            &attribute_bytes(NFTA_CHAIN_NAME, "KUBE-SERVICES"),
        ]
        .concat();
        let batch = [
            message(NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_NEWCHAIN, &chain),
            message(NLMSG_DONE, &[0; 4]),
        ]
        .concat();
        let mut chains = Vec::new();
        assert!(take(&batch, &mut chains).expect("a sound batch"));
        assert_eq!(
            chains,
            [Chain {
                table: "nat".into(),
                name: "KUBE-SERVICES".into()
            }]
        );
    }

    #[test]
    fn an_error_message_is_the_kernels_error() {
        let error = take(&message(NLMSG_ERROR, &(-libc::EPERM).to_ne_bytes()), &mut Vec::new());
        assert_eq!(error.expect_err("it is an error").raw_os_error(), Some(libc::EPERM));
    }

    proptest! {
        #[test]
        fn any_bytes_end_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _outcome = take(&bytes, &mut Vec::new());
            let _outcome = attribute(&bytes, NFTA_CHAIN_NAME);
        }

        #[test]
        fn any_attributes_end_without_a_panic(bytes in proptest::collection::vec(0_u8..24, 0..200)) {
            let _outcome = attribute(&bytes, NFTA_CHAIN_NAME);
            let _outcome = take(&message(NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_NEWCHAIN, &bytes), &mut Vec::new());
        }
    }
}
