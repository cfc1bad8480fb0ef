//! Addresses and ports as the maps hold them.

use crate::abi::shared_layout;

/// An IP address of 16 bytes in network order; IPv4 stands IPv4-mapped (`::ffff:a.b.c.d`).
///
/// Each word holds four bytes as they lie on the wire, which is what the kernel's `user_ip4` and `user_ip6` give.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Addr {
    /// The four words, each in network order.
    pub words: [u32; 4],
}
shared_layout!(Addr, size 16, align 4);

/// The third word of every IPv4-mapped address, in network order.
pub const MAPPED_PREFIX: u32 = 0xffff_u32.to_be();

impl Addr {
    /// The all-zero address: "none" in values that may have none.
    pub const ZERO: Self = Self { words: [0; 4] };

    /// The IPv4-mapped form of an IPv4 address given in network order.
    #[inline(always)]
    pub const fn from_v4(ip4: u32) -> Self {
        Self {
            words: [0, 0, MAPPED_PREFIX, ip4],
        }
    }

    /// From the bytes of an IPv6 address, as they lie on the wire.
    #[inline(always)]
    pub const fn from_octets(o: [u8; 16]) -> Self {
        Self {
            words: [
                u32::from_ne_bytes([o[0], o[1], o[2], o[3]]),
                u32::from_ne_bytes([o[4], o[5], o[6], o[7]]),
                u32::from_ne_bytes([o[8], o[9], o[10], o[11]]),
                u32::from_ne_bytes([o[12], o[13], o[14], o[15]]),
            ],
        }
    }

    /// Its bytes, as they lie on the wire of IPv6.
    #[inline(always)]
    pub const fn octets(&self) -> [u8; 16] {
        let [a, b, c, d] = [
            self.words[0].to_ne_bytes(),
            self.words[1].to_ne_bytes(),
            self.words[2].to_ne_bytes(),
            self.words[3].to_ne_bytes(),
        ];
        [
            a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3], c[0], c[1], c[2], c[3], d[0], d[1], d[2], d[3],
        ]
    }

    /// True for an IPv4-mapped address.
    #[inline(always)]
    pub const fn is_v4(&self) -> bool {
        self.words[0] == 0 && self.words[1] == 0 && self.words[2] == MAPPED_PREFIX
    }

    /// Compares word by word: a derived `==` becomes a byte loop that the verifier dislikes.
    #[inline(always)]
    pub const fn same(&self, other: &Self) -> bool {
        self.words[0] == other.words[0]
            && self.words[1] == other.words[1]
            && self.words[2] == other.words[2]
            && self.words[3] == other.words[3]
    }
}

impl PartialEq for Addr {
    #[inline(always)]
    fn eq(&self, other: &Self) -> bool {
        self.same(other)
    }
}

impl Eq for Addr {}

impl core::hash::Hash for Addr {
    fn hash<H: core::hash::Hasher>(&self, state: &mut H) {
        self.words.hash(state);
    }
}

impl Ord for Addr {
    /// Orders by the bytes on the wire, so that the order is the same on every machine.
    fn cmp(&self, other: &Self) -> core::cmp::Ordering {
        self.words.map(u32::from_be).cmp(&other.words.map(u32::from_be))
    }
}

impl PartialOrd for Addr {
    fn partial_cmp(&self, other: &Self) -> Option<core::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl From<core::net::IpAddr> for Addr {
    fn from(ip: core::net::IpAddr) -> Self {
        match ip {
            core::net::IpAddr::V4(v4) => Self::from_v4(u32::from_ne_bytes(v4.octets())),
            core::net::IpAddr::V6(v6) => Self::from_octets(v6.octets()),
        }
    }
}

impl From<Addr> for core::net::IpAddr {
    fn from(addr: Addr) -> Self {
        if addr.is_v4() {
            let [a, b, c, d] = addr.words[3].to_ne_bytes();
            core::net::Ipv4Addr::new(a, b, c, d).into()
        } else {
            core::net::Ipv6Addr::from(addr.octets()).into()
        }
    }
}

/// A port in network order.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Port(pub u16);
shared_layout!(Port, size 2, align 2);

impl Port {
    /// From host order.
    #[inline(always)]
    pub const fn new(port: u16) -> Self {
        Self(port.to_be())
    }

    /// In host order.
    #[inline(always)]
    pub const fn get(self) -> u16 {
        u16::from_be(self.0)
    }
}

impl Ord for Port {
    fn cmp(&self, other: &Self) -> core::cmp::Ordering {
        self.get().cmp(&other.get())
    }
}

impl PartialOrd for Port {
    fn partial_cmp(&self, other: &Self) -> Option<core::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::net::IpAddr;

    #[test]
    fn addresses_survive_the_round_trip() {
        for text in ["10.96.0.10", "0.0.0.0", "255.255.255.255", "fd00:10:96::a", "::1", "::"] {
            let ip: IpAddr = text.parse().unwrap();
            assert_eq!(IpAddr::from(Addr::from(ip)), ip, "{text}");
        }
    }

    #[test]
    fn a_mapped_address_is_the_ipv4_address() {
        let mapped: IpAddr = "::ffff:10.96.0.10".parse().unwrap();
        let plain: IpAddr = "10.96.0.10".parse().unwrap();
        assert_eq!(Addr::from(mapped), Addr::from(plain));
        assert!(Addr::from(plain).is_v4());
        assert!(!Addr::from("::1".parse::<IpAddr>().unwrap()).is_v4());
    }

    #[test]
    fn order_is_by_wire_bytes() {
        let a = Addr::from("10.0.0.1".parse::<IpAddr>().unwrap());
        let b = Addr::from("10.0.1.0".parse::<IpAddr>().unwrap());
        assert!(a < b);
        assert!(Port::new(255) < Port::new(256));
        assert_eq!(Port::new(80).0.to_ne_bytes(), [0, 80]);
    }
}
