//! One rule, as far as it says where traffic goes.
//!
//! The kernel keeps a rule as a small program over registers: loads, comparisons, then a verdict or a translation. The
//! program is followed with what is known of each register. iptables writes the same programs, with its own matches and
//! targets in between. The invariant: a condition that is not understood never makes a rule match more narrowly than it
//! does; a translation whose target is not in the rule is marked as [`Target::Computed`].

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use super::{DATA_VALUE, DATA_VERDICT, protocol, target};
use crate::{
    model::Protocol,
    netlink::{attribute, attributes, number, text},
};

/// Where a translation leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Dnat {
    /// The new address.
    pub address: IpAddr,
    /// The new port; none where the port stays.
    pub port: Option<u16>,
}

impl Dnat {
    /// The endpoint that traffic for a port reaches.
    pub fn endpoint(self, dialled: u16) -> SocketAddr {
        SocketAddr::new(self.address, self.port.unwrap_or(dialled))
    }
}

/// What a rule does with the traffic that it matches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// Goes on in another chain.
    Chain(String),
    /// Goes on in the chain that a map names; the map's name.
    Map(String),
    /// Is translated.
    Dnat(Dnat),
    /// Is translated to what is computed for each connection, so that the rule does not say where.
    Computed,
}

/// A rule, as far as it is read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rule {
    /// The chain it is in.
    pub chain: String,
    /// The destination it asks for, one address alone.
    pub address: Option<IpAddr>,
    /// The protocol it asks for.
    pub protocol: Option<Protocol>,
    /// The destination port it asks for, one alone.
    pub port: Option<u16>,
    /// How long a client is remembered, where the rule sends back those seen before.
    pub remembers: Option<Duration>,
    /// What it does.
    pub target: Option<Target>,
}

const LIST_ELEMENT: u16 = 1;
const EXPRESSION_NAME: u16 = 1;
const EXPRESSION_DATA: u16 = 2;
const IMMEDIATE_REGISTER: u16 = 1;
const IMMEDIATE_DATA: u16 = 2;
const META_REGISTER: u16 = 1;
const META_KEY: u16 = 2;
const META_L4PROTO: u32 = 16;
const PAYLOAD_REGISTER: u16 = 1;
const PAYLOAD_BASE: u16 = 2;
const PAYLOAD_OFFSET: u16 = 3;
const PAYLOAD_LENGTH: u16 = 4;
const NETWORK_HEADER: u32 = 1;
const TRANSPORT_HEADER: u32 = 2;
const CMP_REGISTER: u16 = 1;
const CMP_OPERATION: u16 = 2;
const CMP_DATA: u16 = 3;
const CMP_EQUAL: u32 = 0;
const LOOKUP_SET: u16 = 1;
const LOOKUP_TO: u16 = 3;
const NAT_TYPE: u16 = 1;
const NAT_ADDRESS: u16 = 3;
const NAT_PORT: u16 = 5;
const NAT_DESTINATION: u32 = 1;
const XT_NAME: u16 = 1;
const XT_REVISION: u16 = 2;
const XT_INFO: u16 = 3;
/// The family of tables for IPv4 alone.
const IPV4: u8 = 2;
/// The register of a verdict.
const VERDICT: u32 = 0;
/// Flags in a range for iptables' DNAT: an address is given, a port is given.
const RANGE_ADDRESSES: u32 = 1;
const RANGE_PORTS: u32 = 2;

/// What a register holds.
#[derive(Clone, Debug)]
enum Held {
    Destination,
    Protocol,
    Port,
    Bytes(Vec<u8>),
}

impl Rule {
    /// Follows a rule's expressions.
    pub(super) fn read(family: u8, chain: String, expressions: &[u8]) -> Self {
        let mut rule = Self {
            chain,
            ..Self::default()
        };
        let mut registers = HashMap::new();
        for (kind, element) in attributes(expressions) {
            if kind != LIST_ELEMENT {
                continue;
            }
            let data = attribute(element, EXPRESSION_DATA).unwrap_or_default();
            if let Some(name) = text(element, EXPRESSION_NAME) {
                rule.follow(family, &name, data, &mut registers);
            }
        }
        rule
    }

    fn follow(&mut self, family: u8, name: &str, data: &[u8], registers: &mut HashMap<u32, Held>) {
        match name {
            "immediate" => {
                let Some(to) = register(data, IMMEDIATE_REGISTER) else {
                    return;
                };
                let value = attribute(data, IMMEDIATE_DATA).unwrap_or_default();
                if to == VERDICT {
                    self.target = attribute(value, DATA_VERDICT).and_then(target).map(Target::Chain);
                } else {
                    hold(
                        registers,
                        to,
                        attribute(value, DATA_VALUE).map(|bytes| Held::Bytes(bytes.to_owned())),
                    );
                }
            }
            "meta" => {
                let known = number(data, META_KEY) == Some(META_L4PROTO);
                if let Some(to) = register(data, META_REGISTER) {
                    hold(registers, to, known.then_some(Held::Protocol));
                }
            }
            "payload" => {
                if let Some(to) = register(data, PAYLOAD_REGISTER) {
                    hold(registers, to, loaded(data));
                }
            }
            "cmp" => {
                let held = register(data, CMP_REGISTER).and_then(|from| registers.get(&from));
                let value = attribute(data, CMP_DATA).and_then(|data| attribute(data, DATA_VALUE));
                if let (Some(held), Some(value), Some(CMP_EQUAL)) = (held, value, number(data, CMP_OPERATION)) {
                    self.ask(held, value);
                }
            }
            "lookup" => {
                if register(data, LOOKUP_TO) == Some(VERDICT) {
                    self.target = text(data, LOOKUP_SET).map(Target::Map);
                } else if let Some(to) = register(data, LOOKUP_TO) {
                    hold(registers, to, None);
                }
            }
            "nat" if number(data, NAT_TYPE) == Some(NAT_DESTINATION) => {
                self.target = Some(translated(data, registers).map_or(Target::Computed, Target::Dnat));
            }
            "match" => {
                if let Some((name, info)) = text(data, XT_NAME).zip(attribute(data, XT_INFO)) {
                    self.ask_iptables(&name, info);
                }
            }
            "target" if text(data, XT_NAME).as_deref() == Some("DNAT") => {
                let dnat = number(data, XT_REVISION)
                    .zip(attribute(data, XT_INFO))
                    .and_then(|(revision, info)| iptables_dnat(family, revision, info));
                self.target = Some(dnat.map_or(Target::Computed, Target::Dnat));
            }
            // Whatever else writes a register (bitwise, numgen, jhash, ...) names it in its first or second attribute; what a
            // register was known to hold is no more.
            _ => {
                for kind in [1, 2] {
                    if let Some(to) = register(data, kind) {
                        registers.remove(&to);
                    }
                }
            }
        }
    }

    fn ask(&mut self, held: &Held, value: &[u8]) {
        match held {
            Held::Destination => self.address = address(value),
            Held::Protocol => self.protocol = value.first().copied().and_then(protocol),
            Held::Port => self.port = value.try_into().ok().map(u16::from_be_bytes),
            Held::Bytes(_) => {}
        }
    }

    /// Reads iptables' own matches: `tcp` and `udp` begin with source and destination ranges of ports, in the machine's order;
    /// `recent` begins with its seconds.
    pub(in crate::node) fn ask_iptables(&mut self, name: &str, info: &[u8]) -> Option<()> {
        let word = |at: usize| Some(u16::from_ne_bytes(info.get(at..at + 2)?.try_into().ok()?));
        match name {
            "tcp" | "udp" => {
                let inverted = *info.get(if name == "tcp" { 11 } else { 8 })?;
                let (first, last) = (word(4)?, word(6)?);
                if first == last && inverted & 2 == 0 {
                    self.port = Some(first);
                }
            }
            "recent" => {
                let seconds = u32::from_ne_bytes(info.get(..4)?.try_into().ok()?);
                self.remembers = (seconds > 0).then(|| Duration::from_secs(seconds.into()));
            }
            _ => {}
        }
        Some(())
    }
}

/// Reads an address of either family.
pub(in crate::node) fn address(bytes: &[u8]) -> Option<IpAddr> {
    if let Ok(v4) = <[u8; 4]>::try_from(bytes) {
        return Some(v4.into());
    }
    <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from)
}

/// A register's number; the four wide registers are the same as every fourth narrow one, from 8 on.
fn register(data: &[u8], kind: u16) -> Option<u32> {
    Some(match number(data, kind)? {
        wide @ 1..=4 => 8 + 4 * (wide - 1),
        other => other,
    })
}

fn hold(registers: &mut HashMap<u32, Held>, to: u32, held: Option<Held>) {
    match held {
        Some(held) => registers.insert(to, held),
        None => registers.remove(&to),
    };
}

/// What a load from the packet brings: the headers' fields that a Service is known by.
fn loaded(data: &[u8]) -> Option<Held> {
    let at = |kind| number(data, kind);
    match (at(PAYLOAD_BASE)?, at(PAYLOAD_OFFSET)?, at(PAYLOAD_LENGTH)?) {
        (NETWORK_HEADER, 16, 4) | (NETWORK_HEADER, 24, 16) => Some(Held::Destination),
        (NETWORK_HEADER, 9, 1) => Some(Held::Protocol),
        (TRANSPORT_HEADER, 2, 2) => Some(Held::Port),
        _ => None,
    }
}

/// The target of nftables' own translation, whose address and port lie in registers.
fn translated(data: &[u8], registers: &HashMap<u32, Held>) -> Option<Dnat> {
    let bytes = |kind| match registers.get(&register(data, kind)?)? {
        Held::Bytes(bytes) => Some(bytes.as_slice()),
        _ => None,
    };
    let port = match attribute(data, NAT_PORT) {
        Some(_) => Some(u16::from_be_bytes(bytes(NAT_PORT)?.get(..2)?.try_into().ok()?)),
        None => None,
    };
    Some(Dnat {
        address: address(bytes(NAT_ADDRESS)?)?,
        port,
    })
}

/// The target of iptables' translation.
///
/// Revisions 1 and 2 hold flags, the first and last address in 16 bytes each, the first and last port; revision 0, for IPv4
/// alone, holds a count and then flags, addresses of 4 bytes and ports.
pub(in crate::node) fn iptables_dnat(family: u8, revision: u32, info: &[u8]) -> Option<Dnat> {
    let old = revision == 0;
    let range = if old { info.get(4..)? } else { info };
    let width = if old { 4 } else { 16 };
    let flags = u32::from_ne_bytes(range.get(..4)?.try_into().ok()?);
    let first = range.get(4..4 + width)?;
    let last = range.get(4 + width..4 + 2 * width)?;
    let ports = range.get(4 + 2 * width..8 + 2 * width)?;
    if flags & RANGE_ADDRESSES == 0 || first != last || (flags & RANGE_PORTS != 0 && ports[..2] != ports[2..]) {
        return None;
    }
    // An IPv4 address lies in the first four of the sixteen bytes.
    let narrow = old || family == IPV4;
    Some(Dnat {
        address: address(if narrow { &first[..4] } else { first })?,
        port: (flags & RANGE_PORTS != 0).then(|| u16::from_be_bytes([ports[0], ports[1]])),
    })
}
