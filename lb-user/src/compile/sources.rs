//! Source ranges as the map holds them: prefixes over a Service's id and an address in its mapped form.
//!
//! Both families lie in one trie of 128-bit addresses, the IPv4 ones as `::ffff:a.b.c.d`. Invariant: a range of IPv6
//! addresses never admits an IPv4 client, whatever its length.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv6Addr},
};

use lb_common::frontend::SourceKey;

use super::{Compiled, Compiler, Full};
use crate::model::Cidr;

/// Bits of the Service's id before the address.
const SERVICE_BITS: u32 = 32;
/// Bits of the prefix that all mapped IPv4 addresses share.
const MAPPED_BITS: u32 = 96;
/// That prefix, `::ffff:0:0`.
const MAPPED: u128 = 0xffff << 32;

/// One entry of the map of source ranges: who is admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Source {
    /// The Service, and the first address of the range.
    pub key: SourceKey,
    /// How many leading bits of the key count, those of the Service's id among them.
    pub bits: u32,
}

impl Source {
    fn new(service_id: u32, first: u128, bits: u32) -> Self {
        Self {
            key: SourceKey {
                service_id,
                addr: IpAddr::V6(Ipv6Addr::from(first)).into(),
            },
            bits: SERVICE_BITS + bits,
        }
    }

    /// Whether a client of a Service is admitted by this entry.
    pub fn admits(&self, service_id: u32, client: IpAddr) -> bool {
        let client = mapped(client);
        let first = mapped(IpAddr::from(self.key.addr));
        let bits = self.bits.saturating_sub(SERVICE_BITS);
        self.key.service_id == service_id && (client ^ first).checked_shr(128 - bits).unwrap_or(0) == 0
    }
}

fn mapped(addr: IpAddr) -> u128 {
    match addr {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().into(),
        IpAddr::V6(v6) => v6.into(),
    }
}

/// The entries of a Service's ranges, sorted, each once.
pub(super) fn compile(ranges: &[Cidr], service_id: u32) -> Box<[Source]> {
    let mut all = BTreeSet::new();
    for range in ranges {
        let (first, bits) = (mapped(range.network()), u32::from(range.prefix()));
        if !range.is_ipv6() {
            all.insert(Source::new(service_id, first, MAPPED_BITS + bits));
            continue;
        }
        let holds_mapped = |bits: u32| (first ^ MAPPED).checked_shr(128 - bits).unwrap_or(0) == 0;
        if bits > MAPPED_BITS && holds_mapped(MAPPED_BITS) {
            // No packet has such a source.
            continue;
        }
        if !holds_mapped(bits) {
            all.insert(Source::new(service_id, first, bits));
            continue;
        }
        // All of the range but the IPv4 addresses in it: at each further bit, the half that they are not in.
        for bit in bits..MAPPED_BITS {
            let other_half = (MAPPED >> (127 - bit) ^ 1) << (127 - bit);
            all.insert(Source::new(service_id, other_half, bit + 1));
        }
    }
    all.into_iter().collect()
}

impl Compiler {
    /// Counts source ranges after a change; nothing is counted if they do not fit beside the old ones, which go last.
    pub(super) fn count_sources(&mut self, old: Option<&Compiled>, new: Option<&Compiled>) -> Result<(), Full> {
        let of = |service: Option<&'_ Compiled>| service.map_or(0, |service| service.sources.len() as u32);
        let known = old.map_or(&[][..], |old| &old.sources);
        let added = new.map_or(0, |new| {
            let fresh = new.sources.iter().filter(|source| known.binary_search(source).is_err());
            fresh.count() as u32
        });
        if added > 0 && self.sources + added > self.capacity.sources {
            return Err(Full {
                what: "source ranges",
                capacity: self.capacity.sources,
                flag: "fewer Services can have loadBalancerSourceRanges",
            });
        }
        self.sources = self.sources + of(new) - of(old);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use proptest::{collection::vec, prelude::*};

    use super::*;

    /// Addresses that share prefixes of every length, and some that are mapped IPv4 ones.
    fn any_address() -> impl Strategy<Value = IpAddr> {
        let v4 = prop_oneof![any::<u32>(), (0..32_u32).prop_map(|bit| 0x0a00_0000 ^ 1 << bit)];
        let near = (0..128_u32).prop_map(|bit| MAPPED ^ 1 << bit);
        let v6 = prop_oneof![any::<u128>(), near, (0..128_u32).prop_map(|bit| 0xfd << 120 ^ 1 << bit)];
        prop_oneof![
            v4.prop_map(|bits| Ipv4Addr::from(bits).into()),
            v6.prop_map(|bits| Ipv6Addr::from(bits).into()),
        ]
    }

    fn any_range() -> impl Strategy<Value = Cidr> {
        (any_address(), 0..=128_u8).prop_map(|(addr, prefix)| {
            let prefix = if addr.is_ipv4() { prefix / 4 } else { prefix };
            Cidr::new(addr, prefix).expect("a length that the family has")
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        #[test]
        fn c14_entries_admit_whom_the_ranges_hold(ranges in vec(any_range(), 0..4), clients in vec(any_address(), 1..20)) {
            let entries = compile(&ranges, 7);
            prop_assert!(entries.is_sorted_by(|a, b| a < b), "sorted, each once");
            prop_assert!(entries.iter().all(|e| (SERVICE_BITS..=SourceKey::BITS).contains(&e.bits)));
            for client in clients {
                // An IPv6 packet with a mapped source is dropped by the kernel, whoever it is meant for.
                if matches!(client, IpAddr::V6(v6) if v6.to_ipv4_mapped().is_some()) {
                    continue;
                }
                let held = ranges.iter().any(|range| range.contains(client));
                let admitted = entries.iter().any(|entry| entry.admits(7, client));
                prop_assert_eq!(admitted, held, "{} in {:?}", client, ranges);
                prop_assert!(!entries.iter().any(|entry| entry.admits(8, client)), "another Service's");
            }
        }
    }

    fn entries(range: &str) -> Vec<(u32, String)> {
        compile(&[range.parse().unwrap()], 7)
            .iter()
            .map(|source| (source.bits, IpAddr::from(source.key.addr).to_string()))
            .collect()
    }

    #[test]
    fn ranges_are_prefixes_of_service_and_mapped_address() {
        assert_eq!(entries("10.0.0.0/8"), [(32 + 96 + 8, "10.0.0.0".to_owned())]);
        assert_eq!(entries("192.0.2.7/32"), [(160, "192.0.2.7".to_owned())]);
        assert_eq!(entries("fd00::/8"), [(32 + 8, "fd00::".to_owned())]);
    }

    #[test]
    fn an_ipv6_range_around_the_mapped_addresses_leaves_them_out() {
        assert_eq!(entries("::fffe:0:0/95"), [(32 + 96, "::fffe:0:0".to_owned())]);
        assert_eq!(entries("::ffff:10.0.0.0/104"), []);
        assert_eq!(entries("::/0").len(), 96);
    }
}
