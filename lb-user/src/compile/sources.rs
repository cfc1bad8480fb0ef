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
