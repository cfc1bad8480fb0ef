//! A small world for random scripts: few clients, few Services, few ports, so that they meet again and again.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use lb_common::{
    abi::{TCP, UDP},
    frontend::flag,
};

use super::Duel;
use crate::plane::{Device, Rules, node_address};

/// The addresses of the world in one family.
#[derive(Clone, Debug)]
pub struct Town {
    /// Clients outside, each with two ports.
    pub clients: Vec<SocketAddr>,
    /// Guests, each with two ports; the last two are backends as well.
    pub guests: Vec<SocketAddr>,
    /// Frontends and their protocols.
    pub frontends: Vec<(SocketAddr, u8)>,
    /// A router somewhere.
    pub router: IpAddr,
    v6: bool,
}

/// Services of a town, by number.
pub(super) const SERVICES: u32 = 6;
/// Backends of a Service.
pub(super) const BACKENDS: u32 = 3;

impl Town {
    /// The world of a family.
    pub fn of(v6: bool) -> Self {
        let mut town = Self {
            clients: Vec::new(),
            guests: Vec::new(),
            frontends: Vec::new(),
            router: IpAddr::V4(Ipv4Addr::LOCALHOST),
            v6,
        };
        town.router = town.address(7, 1);
        for n in 1..=3 {
            for port in [40_000, 40_001] {
                town.clients.push(SocketAddr::new(town.address(1, n), port));
                // The guests share the addresses of the first Service's backends: one may meet itself.
                town.guests.push(SocketAddr::new(town.address(100, n), port));
            }
        }
        for service in 1..=SERVICES {
            for end in town.ends(service) {
                town.frontends.push((end, town.proto(service)));
            }
        }
        town
    }

    fn address(&self, group: u8, n: u8) -> IpAddr {
        if self.v6 {
            Ipv6Addr::new(0x2001, 0xdb8, 0xee, u16::from(group), 0, 0, 0, u16::from(n)).into()
        } else {
            Ipv4Addr::new(10, group, 0, n).into()
        }
    }

    /// TCP, or UDP of every third Service.
    pub fn proto(&self, service: u32) -> u8 {
        if service.is_multiple_of(3) { UDP } else { TCP }
    }

    /// The frontends of a Service: inside, on the node, outside.
    fn ends(&self, service: u32) -> [SocketAddr; 3] {
        let n = service as u8;
        [
            SocketAddr::new(self.address(96, n), 80),
            SocketAddr::new(node_address(Device::Uplink, self.v6), 30_000 + u16::from(n)),
            SocketAddr::new(self.address(97, n), 80),
        ]
    }

    /// The id of a Service: the families have Services of their own.
    pub fn service(&self, service: u32) -> u32 {
        service + if self.v6 { SERVICES } else { 0 }
    }

    /// The id of a Service's backend.
    pub fn backend(&self, service: u32, i: u32) -> u32 {
        self.service(service) * (BACKENDS + 1) + i % BACKENDS
    }

    /// Where a backend listens; `moved` is another address for the same id. All Services share the addresses, and two each a
    /// port, so that a client may meet one endpoint through two frontends.
    pub fn endpoint(&self, service: u32, i: u32, moved: bool) -> SocketAddr {
        let group = if moved { 101 } else { 100 };
        SocketAddr::new(
            self.address(group, (i % BACKENDS + 1) as u8),
            8_000 + (service / 2) as u16,
        )
    }

    /// Sets of a Service: inside and outside.
    pub fn sets(&self, service: u32) -> (u32, u32) {
        (self.service(service) * 2, self.service(service) * 2 + 1)
    }

    /// Writes the world as it is in the beginning.
    pub fn settle(&self, rules: &mut Rules) {
        for service in 1..=SERVICES {
            let (id, proto, sets) = (self.service(service), self.proto(service), self.sets(service));
            for i in 0..BACKENDS {
                rules.add_backend(self.backend(service, i), id, self.endpoint(service, i, false), proto);
            }
            let all: Vec<(u32, u16)> = (0..BACKENDS).map(|i| (self.backend(service, i), 1)).collect();
            rules.publish(sets.0, &all);
            rules.publish(sets.1, &all);
            let outside = flag::OUTSIDE
                | if service.is_multiple_of(2) {
                    flag::MASQUERADE_OUTSIDE
                } else {
                    0
                };
            for (end, flags) in self.ends(service).into_iter().zip([0, outside, outside]) {
                rules.frontend(end, proto, id, sets, flags);
            }
        }
    }

    /// Settles both families and tells the programs of the devices.
    pub fn found(duel: &mut Duel) -> anyhow::Result<[Self; 2]> {
        let towns = [Self::of(false), Self::of(true)];
        let indexes = Device::ALL.map(|device| (device, duel.plane.index(device)));
        duel.change(|rules| {
            for (device, index) in indexes {
                interface(rules, device, index);
            }
            for town in &towns {
                town.settle(rules);
            }
        })?;
        Ok(towns)
    }
}

/// Tells of a device, unless nobody is told of it.
pub(super) fn interface(rules: &mut Rules, device: Device, index: u32) {
    let addresses = [node_address(device, false), node_address(device, true)];
    match device {
        Device::Uplink | Device::Second => rules.uplink(index, &addresses),
        Device::Guest | Device::OtherGuest => rules.guest(index, &addresses),
        Device::Unknown => {}
    }
}
