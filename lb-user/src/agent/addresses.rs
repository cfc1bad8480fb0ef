//! The host's own addresses, for NodePorts and for what a Service may not claim.

use std::{collections::BTreeSet, io, net::IpAddr, time::Duration};

use nix::{ifaddrs::getifaddrs, net::if_::InterfaceFlags};
use tokio::{sync::mpsc, time::sleep};

use crate::{
    model::{NodeAddresses, Update},
    supervise::Liveness,
};

/// How often the addresses are looked at.
const PERIOD: Duration = Duration::from_secs(2);

/// The addresses of this network namespace's interfaces that are up, in the interfaces' order.
///
/// # Errors
/// When the kernel does not tell.
pub(super) fn read() -> io::Result<NodeAddresses> {
    let mut seen = BTreeSet::new();
    let mut addresses = Vec::new();
    for interface in getifaddrs()? {
        if !interface.flags.contains(InterfaceFlags::IFF_UP) {
            continue;
        }
        let Some(storage) = interface.address else { continue };
        let addr: Option<IpAddr> = storage
            .as_sockaddr_in()
            .map(|v4| IpAddr::V4(v4.ip()))
            .or_else(|| storage.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())));
        if let Some(addr) = addr
            && seen.insert(addr)
        {
            addresses.push(addr);
        }
    }
    Ok(NodeAddresses {
        addresses: addresses.into(),
    })
}

/// Tells the addresses whenever they change; `fixed` ones, where given, once.
pub(super) async fn follow(
    fixed: Vec<IpAddr>,
    updates: mpsc::Sender<Update>,
    liveness: &Liveness,
) -> Result<(), String> {
    let mut last: Option<NodeAddresses> = None;
    loop {
        liveness.beat();
        let now = if fixed.is_empty() {
            read().map_err(|error| format!("read the host's addresses: {error}"))?
        } else {
            NodeAddresses {
                addresses: fixed.clone().into(),
            }
        };
        if last.as_ref() != Some(&now) {
            last = Some(now.clone());
            if updates.send(Update::Addresses(now)).await.is_err() {
                return Err("nobody takes updates any more".to_owned());
            }
        }
        sleep(PERIOD).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_among_the_addresses_once() {
        let found = read().expect("the kernel tells");
        let loopback = found
            .addresses
            .iter()
            .filter(|addr| addr.is_loopback() && addr.is_ipv4())
            .count();
        assert!(loopback <= 1, "{found:?}");
    }
}
