//! Links, addresses and routes inside our own namespaces.
//!
//! Both ends of a pair are born inside their namespaces, so no device of ours ever shows up among the machine's own.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket},
    os::fd::{AsFd, AsRawFd},
};

use nix::net::if_::if_nametoindex;
use rtnetlink::{
    Handle, LinkMessageBuilder, LinkUnspec, LinkVeth, RouteMessageBuilder, RouteNextHopBuilder,
    packet_route::{
        address::AddressHeaderFlags,
        link::{InfoData, InfoKind, InfoVeth},
        route::{RouteScope, RouteType},
    },
};

use super::{Doing, Netns, Result};

/// Joins two namespaces by a pair of Ethernet devices and brings both ends up.
pub fn join(left: (&Netns, &str), right: (&Netns, &str)) -> Result<()> {
    let peer = LinkMessageBuilder::<LinkUnspec>::new()
        .name(right.1)
        .setns_by_fd(right.0.as_fd().as_raw_fd())
        .build();
    let pair = LinkMessageBuilder::<LinkVeth>::new_with_info_kind(InfoKind::Veth)
        .name(left.1)
        .set_info_data(InfoData::Veth(InfoVeth::Peer(peer)))
        .build();
    with_netlink(left.0, async |handle| handle.link().add(pair).execute().await)?
        .doing(|| format!("make the pair {} and {}", left.1, right.1))?;
    set_up(left.0, left.1)?;
    set_up(right.0, right.1)
}

/// Brings a device up.
pub fn set_up(netns: &Netns, device: &str) -> Result<()> {
    let index = index_of(netns, device)?;
    let change = LinkUnspec::new_with_index(index).up().build();
    with_netlink(netns, async |handle| handle.link().set(change).execute().await)?
        .doing(|| format!("bring {device} up"))
}

/// Gives a device an address; IPv6 addresses are usable at once (no duplicate detection).
pub fn add_address(netns: &Netns, device: &str, address: IpAddr, prefix_len: u8) -> Result<()> {
    let index = index_of(netns, device)?;
    with_netlink(netns, async |handle| {
        let mut request = handle.address().add(index, address, prefix_len);
        if address.is_ipv6() {
            request.message_mut().header.flags |= AddressHeaderFlags::Nodad;
        }
        request.execute().await
    })?
    .doing(|| format!("give {device} the address {address}/{prefix_len}"))
}

/// Sends everything that has no better route through a gateway on a device's link.
pub fn add_default_route(netns: &Netns, device: &str, gateway: IpAddr) -> Result<()> {
    let everything = match gateway {
        IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    };
    set_route(netns, (everything, 0), &[Hop::through(device, gateway)])
}

/// Where a route leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hop<'n> {
    /// The device.
    pub device: &'n str,
    /// The gateway on the device's link; `None`: the destination itself is on the link.
    pub gateway: Option<IpAddr>,
}

impl<'n> Hop<'n> {
    /// A gateway on a device's link.
    pub const fn through(device: &'n str, gateway: IpAddr) -> Self {
        Self {
            device,
            gateway: Some(gateway),
        }
    }

    /// The device's link itself.
    pub const fn on_link(device: &'n str) -> Self {
        Self { device, gateway: None }
    }
}

/// Routes a block of addresses, in place of the route to it that there was; several hops share its flows.
///
/// # Errors
/// Where there is no hop, a hop is of the other family, or the kernel refuses.
pub fn set_route(netns: &Netns, (block, prefix_len): (IpAddr, u8), hops: &[Hop<'_>]) -> Result<()> {
    let mut builder = RouteMessageBuilder::<IpAddr>::new()
        .destination_prefix(block, prefix_len)
        .map_err(io::Error::other)
        .doing(|| format!("name the block {block}/{prefix_len}"))?;
    match hops {
        [hop] => {
            builder = builder.output_interface(index_of(netns, hop.device)?);
            match hop.gateway {
                Some(gateway) => {
                    builder = builder
                        .gateway(gateway)
                        .map_err(io::Error::other)
                        .doing(|| format!("name the gateway {gateway}"))?;
                }
                None if block.is_ipv4() => builder = builder.scope(RouteScope::Link),
                None => {}
            }
        }
        several => {
            let mut next = Vec::new();
            for hop in several {
                let mut one = if block.is_ipv4() {
                    RouteNextHopBuilder::new_ipv4()
                } else {
                    RouteNextHopBuilder::new_ipv6()
                }
                .interface(index_of(netns, hop.device)?);
                if let Some(gateway) = hop.gateway {
                    one = one
                        .via(gateway)
                        .map_err(io::Error::other)
                        .doing(|| format!("name the gateway {gateway}"))?;
                }
                next.push(one.build());
            }
            builder = builder.multipath(next);
        }
    }
    let route = builder.build();
    with_netlink(netns, async |handle| {
        handle.route().add(route).replace().execute().await
    })?
    .doing(|| format!("route {block}/{prefix_len}"))
}

/// Sets the longest packet that a device carries, without its link header.
pub fn set_mtu(netns: &Netns, device: &str, mtu: u32) -> Result<()> {
    let change = LinkUnspec::new_with_index(index_of(netns, device)?).mtu(mtu).build();
    with_netlink(netns, async |handle| handle.link().set(change).execute().await)?
        .doing(|| format!("set the MTU of {device} to {mtu}"))
}

/// Says whether a device may leave transport checksums to the hardware, and with them the cutting into segments.
///
/// Between virtual devices "the hardware" is nobody: packets travel with a partial checksum.
pub fn set_checksum_offload(netns: &Netns, device: &str, on: bool) -> Result<()> {
    let set = || -> io::Result<()> {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
        for command in [ETHTOOL_STXCSUM, ETHTOOL_STSO, ETHTOOL_SGSO] {
            // Without checksums the kernel takes the others back by itself, and refuses to switch them on.
            ethtool(&socket, device, command, on)?;
        }
        Ok(())
    };
    netns
        .run(set)?
        .doing(|| format!("switch the checksum offload of {device}"))
}

const ETHTOOL_STXCSUM: u32 = 0x17;
const ETHTOOL_STSO: u32 = 0x1f;
const ETHTOOL_SGSO: u32 = 0x24;

/// `struct ethtool_value` of the kernel.
#[repr(C)]
struct EthtoolValue {
    command: u32,
    data: u32,
}

fn ethtool(socket: &UdpSocket, device: &str, command: u32, on: bool) -> io::Result<()> {
    let mut value = EthtoolValue {
        command,
        data: u32::from(on),
    };
    let mut request = libc::ifreq {
        ifr_name: [0; libc::IFNAMSIZ],
        ifr_ifru: libc::__c_anonymous_ifr_ifru {
            ifru_data: (&raw mut value).cast(),
        },
    };
    if device.len() >= libc::IFNAMSIZ {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (place, byte) in request.ifr_name.iter_mut().zip(device.bytes()) {
        *place = libc::c_char::from_ne_bytes([byte]);
    }
    // SAFETY: the request holds a terminated name and points to a value that outlives the call.
    let answer = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL as _, &raw mut request) };
    if answer < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Makes every address of a block the namespace's own, so that one listener answers for all of them.
pub fn own_block(netns: &Netns, first: Ipv4Addr, prefix_len: u8) -> Result<()> {
    /// The table of a host's own addresses.
    const LOCAL_TABLE: u32 = 255;
    let route = RouteMessageBuilder::<Ipv4Addr>::new()
        .destination_prefix(first, prefix_len)
        .output_interface(index_of(netns, "lo")?)
        .table_id(LOCAL_TABLE)
        .scope(RouteScope::Host)
        .kind(RouteType::Local)
        .build();
    with_netlink(netns, async |handle| handle.route().add(route).execute().await)?
        .doing(|| format!("own {first}/{prefix_len}"))
}

/// Looks a device's index up by its name.
pub fn index_of(netns: &Netns, device: &str) -> Result<u32> {
    netns
        .run(|| if_nametoindex(device))?
        .doing(|| format!("look up the device {device}"))
}

/// Runs one conversation over a netlink socket of the namespace.
fn with_netlink<T: Send>(
    netns: &Netns,
    talk: impl AsyncFnOnce(Handle) -> Result<T, rtnetlink::Error> + Send,
) -> Result<Result<T, rtnetlink::Error>> {
    netns.run(|| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .build()
            .doing(|| "start a runtime for netlink".to_owned())?;
        runtime.block_on(async {
            let (connection, handle, _) = rtnetlink::new_connection().doing(|| "open a netlink socket".to_owned())?;
            tokio::spawn(connection);
            Ok(talk(handle).await)
        })
    })?
}
