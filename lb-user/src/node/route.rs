//! Which interface leads to an address, as the kernel would route a packet of the node now.
//!
//! One question, one answer. Rules that look at marks or at sources are not asked for what another packet would meet.

use std::{io, net::IpAddr};

use super::{
    Error, Result,
    links::{GETROUTE, NEWROUTE, ROUTE_HEADER, RTA_OIF},
};
use crate::netlink::{Part, ask, broken, native, push};

// Numbers of linux/rtnetlink.h.
const RTA_DST: u16 = 1;
const ROUTE_LOCAL: u8 = 2;

/// The way to an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// It is this node's own.
    Local,
    /// By the interface of this index.
    By(u32),
    /// There is none.
    None,
}

/// The way to an address, in the calling thread's network namespace.
///
/// # Errors
/// When the kernel does not tell.
pub fn towards(address: IpAddr) -> Result<Way> {
    let found = ask(
        Part::Route,
        GETROUTE,
        &request(address.to_canonical()),
        |kind, payload| (kind == NEWROUTE).then(|| way(payload).ok()).flatten(),
    );
    match found {
        Ok(way) => Ok(way),
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENETUNREACH | libc::EHOSTUNREACH)) => Ok(Way::None),
        Err(source) => Err(Error::List {
            what: format!("the route to {address}"),
            source,
        }),
    }
}

fn request(address: IpAddr) -> Vec<u8> {
    let (family, octets) = match address {
        IpAddr::V4(v4) => (libc::AF_INET, v4.octets().to_vec()),
        IpAddr::V6(v6) => (libc::AF_INET6, v6.octets().to_vec()),
    };
    let mut message = vec![0; ROUTE_HEADER];
    message[0] = family as u8;
    message[1] = octets.len() as u8 * 8;
    push(&mut message, RTA_DST, &octets);
    message
}

fn way(payload: &[u8]) -> io::Result<Way> {
    let list = payload.get(ROUTE_HEADER..).ok_or_else(broken)?;
    Ok(match (payload[7], native(list, RTA_OIF)) {
        (ROUTE_LOCAL, _) => Way::Local,
        (_, Some(index)) => Way::By(index),
        (_, None) => Way::None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_names_one_address() {
        let v4 = request("192.0.2.1".parse().expect("an address"));
        assert_eq!((v4.len(), v4[0], v4[1]), (ROUTE_HEADER + 8, libc::AF_INET as u8, 32));
        assert_eq!(v4[ROUTE_HEADER..], [[8, 0, 1, 0], [192, 0, 2, 1]].concat());
        let v6 = request("2001:db8::1".parse().expect("an address"));
        assert_eq!((v6.len(), v6[0], v6[1]), (ROUTE_HEADER + 20, libc::AF_INET6 as u8, 128));
    }

    #[test]
    fn an_answer_names_an_interface_or_the_node_itself() {
        let answer = |kind: u8, index: Option<u32>| {
            let mut message = vec![0; ROUTE_HEADER];
            message[7] = kind;
            if let Some(index) = index {
                push(&mut message, RTA_OIF, &index.to_ne_bytes());
            }
            way(&message).expect("a whole answer")
        };
        assert_eq!(answer(1, Some(7)), Way::By(7));
        assert_eq!(answer(ROUTE_LOCAL, Some(1)), Way::Local);
        assert_eq!(answer(7, None), Way::None, "a blackhole");
        assert!(way(&[0; 5]).is_err());
    }

    #[test]
    fn the_loopback_address_is_the_nodes_own() {
        assert_eq!(
            towards("127.0.0.1".parse().expect("an address")).expect("the kernel tells"),
            Way::Local
        );
    }
}
