//! Links, addresses and routes inside our own namespaces.
//!
//! Both ends of a pair are born inside their namespaces, so no device of ours ever shows up among the machine's own.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::fd::{AsFd, AsRawFd},
};

use nix::net::if_::if_nametoindex;
use rtnetlink::{
    Handle, LinkMessageBuilder, LinkUnspec, LinkVeth, RouteMessageBuilder,
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
    let index = index_of(netns, device)?;
    let route = match gateway {
        IpAddr::V4(v4) => RouteMessageBuilder::<Ipv4Addr>::new()
            .gateway(v4)
            .output_interface(index)
            .build(),
        IpAddr::V6(v6) => RouteMessageBuilder::<Ipv6Addr>::new()
            .gateway(v6)
            .output_interface(index)
            .build(),
    };
    with_netlink(netns, async |handle| handle.route().add(route).execute().await)?
        .doing(|| format!("route everything on {device} through {gateway}"))
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
