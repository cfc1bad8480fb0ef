//! Address ranges in prefix notation.

use std::{fmt, net::IpAddr, str::FromStr};

/// A range of addresses of one family: a network address and a prefix length.
///
/// The bits below the prefix are zero: [`Cidr::new`] clears them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cidr {
    network: IpAddr,
    prefix: u8,
}

/// Why a text is no address range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CidrError {
    /// No slash between address and prefix length.
    #[error("has no prefix length; wanted ADDRESS/LENGTH, such as 10.0.0.0/8")]
    NoPrefix,
    /// The part before the slash is no address.
    #[error("has no valid address before the slash")]
    Address,
    /// The part after the slash is no length that the family has.
    #[error("has a prefix length that is no number from 0 to {max}")]
    Prefix {
        /// 32 or 128.
        max: u8,
    },
}

impl Cidr {
    /// The range of `prefix` leading bits that holds `addr`; `None` if the family has fewer bits.
    pub fn new(addr: IpAddr, prefix: u8) -> Option<Self> {
        if prefix > Self::bits(addr) {
            return None;
        }
        let network = match addr {
            IpAddr::V4(v4) => {
                let mask = u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0);
                IpAddr::V4((u32::from(v4) & mask).into())
            }
            IpAddr::V6(v6) => {
                let mask = u128::MAX.checked_shl(128 - u32::from(prefix)).unwrap_or(0);
                IpAddr::V6((u128::from(v6) & mask).into())
            }
        };
        Some(Self { network, prefix })
    }

    /// Whether `addr` lies in the range; an address of the other family never does.
    pub fn contains(&self, addr: IpAddr) -> bool {
        addr.is_ipv4() == self.network.is_ipv4() && Self::new(addr, self.prefix).is_some_and(|range| range == *self)
    }

    /// True for a range of IPv6 addresses.
    pub fn is_ipv6(&self) -> bool {
        self.network.is_ipv6()
    }

    /// Its first address.
    pub fn network(&self) -> IpAddr {
        self.network
    }

    /// Its prefix length, in bits.
    pub fn prefix(&self) -> u8 {
        self.prefix
    }

    /// Whether it holds every address of its family.
    pub fn is_everything(&self) -> bool {
        self.prefix == 0
    }

    fn bits(addr: IpAddr) -> u8 {
        if addr.is_ipv4() { 32 } else { 128 }
    }
}

impl FromStr for Cidr {
    type Err = CidrError;

    fn from_str(text: &str) -> Result<Self, CidrError> {
        let (addr, prefix) = text.split_once('/').ok_or(CidrError::NoPrefix)?;
        let addr: IpAddr = addr.parse().map_err(|_| CidrError::Address)?;
        let max = Self::bits(addr);
        if prefix.is_empty() || !prefix.bytes().all(|b| b.is_ascii_digit()) {
            return Err(CidrError::Prefix { max });
        }
        let prefix = prefix.parse().map_err(|_| CidrError::Prefix { max })?;
        Self::new(addr, prefix).ok_or(CidrError::Prefix { max })
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.network, self.prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holds(range: &str, addr: &str) -> bool {
        let range: Cidr = range.parse().expect("a range");
        range.contains(addr.parse().expect("an address"))
    }

    #[test]
    fn holds_its_own_addresses_and_no_others() {
        assert!(holds("10.0.0.0/8", "10.255.0.1"));
        assert!(!holds("10.0.0.0/8", "11.0.0.1"));
        assert!(holds("10.0.0.77/8", "10.0.0.1"));
        assert!(holds("0.0.0.0/0", "203.0.113.9"));
        assert!(!holds("0.0.0.0/0", "fd00::1"));
        assert!(holds("::/0", "fd00::1"));
        assert!(holds("fd00:1::/32", "fd00:1:2::3"));
        assert!(!holds("fd00:1::/32", "fd00:2::3"));
        assert!(holds("192.0.2.1/32", "192.0.2.1"));
        assert!(!holds("192.0.2.1/32", "192.0.2.0"));
    }

    #[test]
    fn refuses_what_is_no_range() {
        for (text, error) in [
            ("10.0.0.0", CidrError::NoPrefix),
            ("ten/8", CidrError::Address),
            ("10.0.0.0/33", CidrError::Prefix { max: 32 }),
            ("10.0.0.0/+8", CidrError::Prefix { max: 32 }),
            ("10.0.0.0/", CidrError::Prefix { max: 32 }),
            ("fd00::/129", CidrError::Prefix { max: 128 }),
            ("fd00::/999", CidrError::Prefix { max: 128 }),
        ] {
            assert_eq!(text.parse::<Cidr>(), Err(error), "{text}");
        }
    }
}
