//! The nftables of this network namespace, asked of the kernel: chains, rules, and maps from a key to a chain.
//!
//! No rule is understood whole: a rule is read as far as "traffic to this address, protocol and port goes there", and what
//! cannot be read so is marked as such. A handful of attributes is less than what a library for nftables would bring.

mod rule;

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

pub use rule::{Dnat, Rule, Target};
pub(super) use rule::{address, iptables_dnat};

use crate::{
    model::Protocol,
    netlink::{Part, ask, attribute, attributes, broken, dump, number, push_text, text},
};

/// A chain, and the table it is in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// The address family's number in netfilter: 1 both, 2 IPv4, 10 IPv6.
    pub family: u8,
    /// The table's name.
    pub table: String,
    /// The chain's name.
    pub name: String,
    /// Whether it is hooked in where addresses are translated.
    pub translates: bool,
    /// Whether what is routed through this node ends here, unless a rule accepts it: hooked in there, with the policy to drop.
    pub drops_forwarded: bool,
}

/// One entry of a verdict map: traffic to a frontend goes to a chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapped {
    /// What clients dial; the unspecified address stands for every address of the node.
    pub frontend: SocketAddr,
    /// Its protocol.
    pub protocol: Protocol,
    /// Where its traffic goes; none where it is dropped or refused at once.
    pub chain: Option<String>,
}

/// A set, and how long its entries live where they expire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Set {
    /// The set's name.
    pub name: String,
    /// How long an entry lives.
    pub timeout: Option<Duration>,
}

// Numbers of linux/netfilter/nf_tables.h; all of them are part of the kernel's stable interface.
const SUBSYSTEM: u16 = 10 << 8;
const NEWCHAIN: u16 = SUBSYSTEM + 3;
const GETCHAIN: u16 = SUBSYSTEM + 4;
const NEWRULE: u16 = SUBSYSTEM + 6;
const GETRULE: u16 = SUBSYSTEM + 7;
const NEWSET: u16 = SUBSYSTEM + 9;
const GETSET: u16 = SUBSYSTEM + 10;
const NEWSETELEM: u16 = SUBSYSTEM + 12;
const GETSETELEM: u16 = SUBSYSTEM + 13;
const NEWGEN: u16 = SUBSYSTEM + 15;
const GETGEN: u16 = SUBSYSTEM + 16;
const GENERATION: u16 = 1;
const CHAIN_TABLE: u16 = 1;
const CHAIN_NAME: u16 = 3;
const CHAIN_HOOK: u16 = 4;
const HOOK_NUMBER: u16 = 1;
const CHAIN_POLICY: u16 = 5;
const CHAIN_TYPE: u16 = 7;
const HOOK_FORWARD: u32 = 2;
const POLICY_DROP: u32 = 0;
/// The families of IP packets: both, IPv4, IPv6. The others number their hooks in their own ways.
const IP_FAMILIES: [u8; 3] = [1, 2, IPV6];
const RULE_TABLE: u16 = 1;
const RULE_CHAIN: u16 = 2;
const RULE_EXPRESSIONS: u16 = 4;
const SET_TABLE: u16 = 1;
const SET_NAME: u16 = 2;
const SET_TIMEOUT: u16 = 11;
const ELEMENTS_TABLE: u16 = 1;
const ELEMENTS_SET: u16 = 2;
const ELEMENTS: u16 = 3;
const ELEMENT_KEY: u16 = 1;
const ELEMENT_DATA: u16 = 2;
const DATA_VALUE: u16 = 1;
const DATA_VERDICT: u16 = 2;
const VERDICT_CODE: u16 = 1;
const VERDICT_CHAIN: u16 = 2;
const JUMP: i32 = -3;
const GOTO: i32 = -4;
/// The family of tables for IPv6 alone.
const IPV6: u8 = 10;
/// Bytes of the netfilter header before a message's attributes: family, version, resource.
const FAMILY_HEADER: usize = 4;

/// The number of the last change to any rule, set or chain of this network namespace; packets change nothing of it.
pub fn generation() -> io::Result<u32> {
    ask(Part::Netfilter, GETGEN, &[0; FAMILY_HEADER], |kind, payload| {
        let list = payload.get(FAMILY_HEADER..)?;
        (kind == NEWGEN).then(|| number(list, GENERATION))?
    })
}

/// Lists the chains of all families.
pub fn chains() -> io::Result<Vec<Chain>> {
    dump(
        Part::Netfilter,
        GETCHAIN,
        &[0; FAMILY_HEADER],
        Vec::new,
        |chains, kind, payload| {
            if kind == NEWCHAIN {
                chains.extend(chain(payload)?);
            }
            Ok(())
        },
    )
}

/// Lists the rules of one table, in each chain's order.
pub fn rules(family: u8, table: &str) -> io::Result<Vec<Rule>> {
    let mut body = vec![family, 0, 0, 0];
    push_text(&mut body, RULE_TABLE, table);
    dump(Part::Netfilter, GETRULE, &body, Vec::new, |rules, kind, payload| {
        if kind == NEWRULE {
            let list = payload.get(FAMILY_HEADER..).ok_or_else(broken)?;
            // Kernels before the filter was known to them send all tables' rules.
            if text(list, RULE_TABLE).as_deref() == Some(table) {
                let chain = text(list, RULE_CHAIN).ok_or_else(broken)?;
                let expressions = attribute(list, RULE_EXPRESSIONS).unwrap_or_default();
                rules.push(Rule::read(family, chain, expressions));
            }
        }
        Ok(())
    })
}

/// Lists the sets and maps of one table.
pub fn sets(family: u8, table: &str) -> io::Result<Vec<Set>> {
    let mut body = vec![family, 0, 0, 0];
    push_text(&mut body, SET_TABLE, table);
    dump(Part::Netfilter, GETSET, &body, Vec::new, |sets, kind, payload| {
        if kind == NEWSET {
            sets.extend(set(payload)?);
        }
        Ok(())
    })
}

/// Lists a verdict map's entries whose key is an address, a protocol and a port, or the latter two; others are left out.
pub fn verdicts(family: u8, table: &str, map: &str) -> io::Result<Vec<Mapped>> {
    let mut body = vec![family, 0, 0, 0];
    push_text(&mut body, ELEMENTS_TABLE, table);
    push_text(&mut body, ELEMENTS_SET, map);
    dump(
        Part::Netfilter,
        GETSETELEM,
        &body,
        Vec::new,
        |entries, kind, payload| {
            if kind == NEWSETELEM {
                let list = payload.get(FAMILY_HEADER..).ok_or_else(broken)?;
                let elements = attribute(list, ELEMENTS).unwrap_or_default();
                entries.extend(attributes(elements).filter_map(|(_, element)| mapped(family, element)));
            }
            Ok(())
        },
    )
}

fn chain(payload: &[u8]) -> io::Result<Option<Chain>> {
    let family = *payload.first().ok_or_else(broken)?;
    let list = payload.get(FAMILY_HEADER..).ok_or_else(broken)?;
    Ok(text(list, CHAIN_TABLE)
        .zip(text(list, CHAIN_NAME))
        .map(|(table, name)| Chain {
            family,
            table,
            name,
            translates: text(list, CHAIN_TYPE).as_deref() == Some("nat"),
            drops_forwarded: IP_FAMILIES.contains(&family)
                && attribute(list, CHAIN_HOOK).and_then(|hook| number(hook, HOOK_NUMBER)) == Some(HOOK_FORWARD)
                && number(list, CHAIN_POLICY) == Some(POLICY_DROP),
        }))
}

fn set(payload: &[u8]) -> io::Result<Option<Set>> {
    let list = payload.get(FAMILY_HEADER..).ok_or_else(broken)?;
    let timeout = attribute(list, SET_TIMEOUT)
        .and_then(|value| value.try_into().ok())
        .map(u64::from_be_bytes)
        .filter(|&milliseconds| milliseconds > 0)
        .map(Duration::from_millis);
    Ok(text(list, SET_NAME).map(|name| Set { name, timeout }))
}

/// Reads an element; a concatenated key has each of its parts padded to four bytes.
fn mapped(family: u8, element: &[u8]) -> Option<Mapped> {
    let key = attribute(attribute(element, ELEMENT_KEY)?, DATA_VALUE)?;
    let (address, rest) = key.split_at_checked(key.len().checked_sub(8)?)?;
    let &[number, 0, 0, 0, high, low, 0, 0] = rest else {
        return None;
    };
    let address = if address.is_empty() {
        any_address(family)
    } else {
        self::address(address)?
    };
    let verdict = attribute(attribute(element, ELEMENT_DATA)?, DATA_VERDICT)?;
    Some(Mapped {
        frontend: SocketAddr::new(address, u16::from_be_bytes([high, low])),
        protocol: protocol(number)?,
        chain: target(verdict),
    })
}

/// The address that stands for all of a family's.
pub(super) fn any_address(family: u8) -> IpAddr {
    if family == IPV6 {
        Ipv6Addr::UNSPECIFIED.into()
    } else {
        Ipv4Addr::UNSPECIFIED.into()
    }
}

/// The chain that a verdict leads to.
fn target(verdict: &[u8]) -> Option<String> {
    match number(verdict, VERDICT_CODE)?.cast_signed() {
        JUMP | GOTO => text(verdict, VERDICT_CHAIN),
        _ => None,
    }
}

pub(super) fn protocol(number: u8) -> Option<Protocol> {
    match i32::from(number) {
        libc::IPPROTO_TCP => Some(Protocol::Tcp),
        libc::IPPROTO_UDP => Some(Protocol::Udp),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
