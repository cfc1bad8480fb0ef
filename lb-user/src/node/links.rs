//! The interfaces of this network namespace, and which of them lead out of the node.
//!
//! Reading is one dump each of links, addresses and routes. The choice is pure: it takes what was read and what is wished, and
//! says for each chosen interface why, and which addresses the node sends from there. The invariants: a port of a bridge or bond
//! is never chosen beside its master, and an address that is not usable yet is nobody's source.

mod held;

use std::{
    collections::BTreeSet,
    fmt, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use lb_common::{
    addr::Addr,
    flow::{Interface, side},
};

pub use self::held::{HOLD, Held};
use super::{Error, Result};
use crate::{
    config::{NamePattern, Uplinks},
    netlink::{Part, attribute, broken, dump, native, text, word32},
};

// Numbers of linux/rtnetlink.h, linux/if_link.h, linux/if_addr.h: part of the kernel's stable interface.
const NEWLINK: u16 = 16;
const GETLINK: u16 = 18;
const NEWADDR: u16 = 20;
const GETADDR: u16 = 22;
pub(super) const NEWROUTE: u16 = 24;
pub(super) const GETROUTE: u16 = 26;
const IFLA_IFNAME: u16 = 3;
const IFLA_MASTER: u16 = 10;
const IFLA_LINKINFO: u16 = 18;
const INFO_KIND: u16 = 1;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const IFA_FLAGS: u16 = 8;
pub(super) const RTA_OIF: u16 = 4;
const RTA_MULTIPATH: u16 = 9;
const RTA_TABLE: u16 = 15;
/// `struct ifinfomsg`.
const LINK_HEADER: usize = 16;
/// `struct ifaddrmsg`.
const ADDRESS_HEADER: usize = 8;
/// `struct rtmsg`.
pub(super) const ROUTE_HEADER: usize = 12;
/// `struct rtnexthop`.
const NEXT_HOP_HEADER: usize = 8;
const SCOPE_UNIVERSE: u8 = 0;
const TABLE_MAIN: u32 = 254;
const ROUTE_UNICAST: u8 = 1;

/// A network interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// Its index, which stays when it is renamed.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// What it is, as its driver calls itself: `vlan`, `bridge`; empty for most hardware.
    pub kind: String,
    /// The index of the interface that it is enslaved to.
    pub master: Option<u32>,
    /// The type of its link header: `ARPHRD_*`.
    pub hardware: u16,
    /// Whether it is set up, with or without a carrier.
    pub up: bool,
    /// Whether it is a loopback device.
    pub loopback: bool,
}

/// An address of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    /// The interface's index.
    pub index: u32,
    /// The address.
    pub address: IpAddr,
    /// Whether it means the same everywhere, and may be sent from: not link-local, not tentative, no duplicate.
    pub global: bool,
    /// Whether new connections should not begin from it: temporary or deprecated.
    pub passing: bool,
}

/// What the kernel says of the interfaces.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Network {
    /// The interfaces, in the kernel's order.
    pub links: Vec<Link>,
    /// Their addresses, in the kernel's order: of each interface and family the primary one first.
    pub addresses: Vec<Address>,
    /// Indices of interfaces with a default route in the main table.
    pub default_routes: BTreeSet<u32>,
}

impl Network {
    /// Reads everything.
    ///
    /// # Errors
    /// When the kernel does not tell.
    pub fn read() -> Result<Self> {
        Self::read_with(&read_default_routes()?)
    }

    /// Reads everything but the routes, of which a node may have very many.
    ///
    /// # Errors
    /// When the kernel does not tell.
    pub fn read_with(default_routes: &BTreeSet<u32>) -> Result<Self> {
        let links = listed("the interfaces", || {
            dump(
                Part::Route,
                GETLINK,
                &[0; LINK_HEADER],
                Vec::new,
                |links, kind, payload| {
                    if kind == NEWLINK {
                        links.push(link(payload)?);
                    }
                    Ok(())
                },
            )
        })?;
        let addresses = listed("the addresses of interfaces", || {
            dump(
                Part::Route,
                GETADDR,
                &[0; ADDRESS_HEADER],
                Vec::new,
                |all, kind, payload| {
                    if kind == NEWADDR {
                        all.extend(address(payload)?);
                    }
                    Ok(())
                },
            )
        })?;
        Ok(Self {
            links,
            addresses,
            default_routes: default_routes.clone(),
        })
    }

    fn link(&self, index: u32) -> Option<&Link> {
        self.links.iter().find(|link| link.index == index)
    }

    /// The addresses of an interface that may be sent from, those that stay first.
    fn sources(&self, index: u32) -> impl Iterator<Item = IpAddr> + '_ {
        let of = move |passing: bool| {
            let mine = self.addresses.iter().filter(move |a| a.index == index && a.global);
            mine.filter(move |a| a.passing == passing).map(|a| a.address)
        };
        of(false).chain(of(true))
    }
}

/// Reads which interfaces have a default route, of either family, in the main table.
///
/// # Errors
/// When the kernel does not tell.
pub fn read_default_routes() -> Result<BTreeSet<u32>> {
    listed("the routes", || {
        dump(
            Part::Route,
            GETROUTE,
            &[0; ROUTE_HEADER],
            BTreeSet::new,
            |all, kind, payload| {
                if kind == NEWROUTE {
                    all.extend(default_route(payload)?);
                }
                Ok(())
            },
        )
    })
}

fn listed<T>(what: &str, list: impl FnOnce() -> io::Result<T>) -> Result<T> {
    list().map_err(|source| Error::List {
        what: what.to_owned(),
        source,
    })
}

fn link(payload: &[u8]) -> io::Result<Link> {
    let list = payload.get(LINK_HEADER..).ok_or_else(broken)?;
    let flags = word32(payload, 8).ok_or_else(broken)?;
    let has = |flag: libc::c_int| flags & flag as u32 != 0;
    Ok(Link {
        index: word32(payload, 4).ok_or_else(broken)?,
        name: text(list, IFLA_IFNAME).ok_or_else(broken)?,
        kind: attribute(list, IFLA_LINKINFO)
            .and_then(|info| text(info, INFO_KIND))
            .unwrap_or_default(),
        master: native(list, IFLA_MASTER),
        hardware: u16::from_ne_bytes([payload[2], payload[3]]),
        up: has(libc::IFF_UP),
        loopback: has(libc::IFF_LOOPBACK),
    })
}

fn address(payload: &[u8]) -> io::Result<Option<Address>> {
    let list = payload.get(ADDRESS_HEADER..).ok_or_else(broken)?;
    // On a link between two ends the other end's is the address, and one's own is the local one.
    let Some(address) = attribute(list, IFA_LOCAL)
        .or_else(|| attribute(list, IFA_ADDRESS))
        .and_then(ip)
    else {
        return Ok(None);
    };
    let flags = native(list, IFA_FLAGS).unwrap_or_else(|| u32::from(payload[2]));
    let has = |flag: u32| flags & flag != 0;
    let meaningful = !(address.is_loopback() || address.is_unspecified() || is_link_local(address));
    Ok(Some(Address {
        index: word32(payload, 4).ok_or_else(broken)?,
        address,
        // An optimistic address may be used while it is still being checked.
        global: payload[3] == SCOPE_UNIVERSE
            && meaningful
            && !has(libc::IFA_F_DADFAILED)
            && (!has(libc::IFA_F_TENTATIVE) || has(libc::IFA_F_OPTIMISTIC)),
        // In IPv4 the bit of temporary addresses says that the address is not its net's first.
        passing: has(libc::IFA_F_DEPRECATED) || address.is_ipv6() && has(libc::IFA_F_TEMPORARY),
    }))
}

fn ip(bytes: &[u8]) -> Option<IpAddr> {
    if let Ok(v4) = <[u8; 4]>::try_from(bytes) {
        return Some(Ipv4Addr::from(v4).into());
    }
    Some(Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?).into())
}

fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    }
}

/// The interfaces of a route, if it is a default one of the main table.
fn default_route(payload: &[u8]) -> io::Result<Vec<u32>> {
    let list = payload.get(ROUTE_HEADER..).ok_or_else(broken)?;
    let (family, prefix, kind) = (payload[0], payload[1], payload[7]);
    let known = i32::from(family) == libc::AF_INET || i32::from(family) == libc::AF_INET6;
    let table = native(list, RTA_TABLE).unwrap_or_else(|| u32::from(payload[4]));
    if !known || prefix != 0 || kind != ROUTE_UNICAST || table != TABLE_MAIN {
        return Ok(Vec::new());
    }
    let mut indices: Vec<u32> = native(list, RTA_OIF).into_iter().collect();
    let mut hops = attribute(list, RTA_MULTIPATH).unwrap_or_default();
    while !hops.is_empty() {
        let length = usize::from(u16::from_ne_bytes([hops[0], *hops.get(1).ok_or_else(broken)?]));
        let hop = hops
            .get(..length)
            .filter(|hop| hop.len() >= NEXT_HOP_HEADER)
            .ok_or_else(broken)?;
        indices.push(word32(hop, 4).ok_or_else(broken)?);
        hops = hops.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(indices)
}

/// What is wanted of the interfaces.
#[derive(Clone, Copy, Debug)]
pub struct Wish<'a> {
    /// Which interfaces are uplinks.
    pub uplinks: &'a Uplinks,
    /// Which interfaces have guests behind them.
    pub guests: &'a [NamePattern],
    /// The node's addresses, the primary one of each family first; empty where they are not known.
    pub node: &'a [IpAddr],
}

/// Why an interface was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// It is named as an uplink.
    Named,
    /// It is named as a guest's.
    Guest,
    /// It carries an address of the node.
    NodeAddress(IpAddr),
    /// A default route leads through it.
    DefaultRoute,
    /// It is a network card with an address that means the same everywhere.
    Address,
    /// It is a tunnel.
    Tunnel,
    /// It was chosen until a moment ago.
    Held,
    /// An earlier agent has chosen it, and what this one would choose is not known yet.
    Earlier,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Named | Self::Guest => f.write_str("named by a flag"),
            Self::NodeAddress(address) => write!(f, "carries the node's address {address}"),
            Self::DefaultRoute => f.write_str("has a default route"),
            Self::Address => f.write_str("a network card with an address"),
            Self::Tunnel => f.write_str("a tunnel"),
            Self::Held => f.write_str("was an uplink until a moment ago"),
            Self::Earlier => f.write_str("as before, until the node's addresses are known"),
        }
    }
}

/// An interface where packets are to be translated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// Its index.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// The type of its link header: `ARPHRD_*`.
    pub hardware: u16,
    /// What the programs are told of it.
    pub interface: Interface,
    /// Why it was chosen.
    pub reason: Reason,
}

/// What was chosen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Choice {
    /// The interfaces, in the kernel's order.
    pub chosen: Vec<Chosen>,
    /// Uplinks that are named, and not there.
    pub missing: Vec<String>,
}

impl Choice {
    /// Leaves what an earlier agent has described as it is, as far as that is still there; uplinks that it alone has chosen stay
    /// where the choice is automatic.
    ///
    /// While the node's own addresses are not known, less would be chosen than is wanted, and other sources.
    pub fn keep_earlier(&mut self, network: &Network, wish: &Wish<'_>, described: &[(u32, Interface)]) {
        let kept = |earlier: Addr, now: Addr| {
            let carried = |earlier: IpAddr| network.addresses.iter().any(|address| address.address == earlier);
            let stays = earlier != Addr::ZERO && (now == Addr::ZERO || carried(IpAddr::from(earlier)));
            if stays { earlier } else { now }
        };
        for (index, earlier) in described {
            if let Some(chosen) = self.chosen.iter_mut().find(|chosen| chosen.index == *index) {
                chosen.interface.v4 = kept(earlier.v4, chosen.interface.v4);
                chosen.interface.v6 = kept(earlier.v6, chosen.interface.v6);
            } else if let Some(link) = network.link(*index)
                && earlier.side == side::UPLINK
                && *wish.uplinks == Uplinks::Auto
                && !is_port(network, link)
            {
                self.chosen.push(Chosen {
                    index: link.index,
                    name: link.name.clone(),
                    hardware: link.hardware,
                    interface: *earlier,
                    reason: Reason::Earlier,
                });
            }
        }
    }
}

/// Masters that pass on what their ports carry.
const MASTERS: [&str; 4] = ["bridge", "bond", "team", "openvswitch"];
/// Interfaces that carry packets inside of others.
const TUNNELS: [&str; 10] = [
    "vxlan",
    "geneve",
    "ipip",
    "sit",
    "gre",
    "gretap",
    "ip6gre",
    "ip6gretap",
    "ip6tnl",
    "wireguard",
];

/// Chooses the interfaces where packets are translated.
///
/// An uplink's name wins over a guest's pattern, which wins over the automatic choice.
pub fn choose(network: &Network, wish: &Wish<'_>) -> Choice {
    let mut choice = Choice::default();
    for link in &network.links {
        if let Some((side, reason)) = judge(network, wish, link) {
            choice.chosen.push(Chosen {
                index: link.index,
                name: link.name.clone(),
                hardware: link.hardware,
                interface: interface(network, wish, link.index, side),
                reason,
            });
        }
    }
    if let Uplinks::Named(names) = wish.uplinks {
        let there = |name: &String| network.links.iter().any(|link| link.name == *name);
        choice.missing = names.iter().filter(|name| !there(name)).cloned().collect();
    }
    choice
}

/// What the programs are told of an interface.
fn interface(network: &Network, wish: &Wish<'_>, index: u32, side: u32) -> Interface {
    Interface {
        v4: source(network, wish, index, IpAddr::is_ipv4),
        v6: source(network, wish, index, IpAddr::is_ipv6),
        side,
        pad: 0,
    }
}

fn judge(network: &Network, wish: &Wish<'_>, link: &Link) -> Option<(u32, Reason)> {
    if let Uplinks::Named(names) = wish.uplinks
        && names.contains(&link.name)
    {
        return Some((side::UPLINK, Reason::Named));
    }
    if link.loopback {
        return None;
    }
    if wish.guests.iter().any(|pattern| pattern.matches(&link.name)) {
        return Some((side::GUEST, Reason::Guest));
    }
    let automatic = *wish.uplinks == Uplinks::Auto && link.up && !is_port(network, link);
    if !automatic {
        return None;
    }
    let mut carried = network.addresses.iter().filter(|address| address.index == link.index);
    let reason = if let Some(of_node) = carried.clone().find(|address| wish.node.contains(&address.address)) {
        Reason::NodeAddress(of_node.address)
    } else if network.default_routes.contains(&link.index) {
        Reason::DefaultRoute
    } else if TUNNELS.contains(&&*link.kind) {
        Reason::Tunnel
    } else if is_card(link) && carried.any(|address| address.global) {
        Reason::Address
    } else {
        return None;
    };
    Some((side::UPLINK, reason))
}

/// Whether an interface is hardware that speaks Ethernet: drivers of virtual ones call themselves something.
fn is_card(link: &Link) -> bool {
    link.kind.is_empty() && link.hardware == libc::ARPHRD_ETHER
}

/// Whether an interface hands what it carries to a master, whose packets those are then. The members of a VRF do not.
fn is_port(network: &Network, link: &Link) -> bool {
    let master = link.master.and_then(|index| network.link(index));
    master.is_some_and(|master| MASTERS.contains(&&*master.kind))
}

/// The address of a family that the node sends from on an interface: the node's own if it is there, else what is there, else the
/// node's primary one; the zero address where it has none.
fn source(network: &Network, wish: &Wish<'_>, index: u32, family: fn(&IpAddr) -> bool) -> Addr {
    let here: Vec<IpAddr> = network.sources(index).filter(family).collect();
    let mut of_node = wish.node.iter().copied().filter(family);
    let found = of_node
        .clone()
        .find(|address| here.contains(address))
        .or_else(|| here.first().copied())
        .or_else(|| of_node.next())
        .or_else(|| {
            let routed = network.default_routes.iter();
            routed.flat_map(|index| network.sources(*index)).find(family)
        });
    found.map_or(Addr::default(), Addr::from)
}

#[cfg(test)]
mod tests;
