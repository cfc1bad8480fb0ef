//! What the maps say of Services, as tests write it down: frontends, sets, backends, source ranges, interfaces.
//!
//! Nothing is allocated or compiled here: tests give every id. [`Rules`] is read by the model and written to the kernel's
//! maps, so that both decide by the same words. The invariant: the place of a set's list and table follows from its id.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use lb_common::{
    addr::{Addr, Port},
    affinity::Membership,
    backend::{Backend, state},
    flow::{Interface, side},
    frontend::{Frontend, FrontendKey, SourceKey, flag},
    hash,
    maglev::{self, slots_for},
    select::Tables,
    set::{ListEntry, SLOTS_PER_ELEMENT, SetWord, elements_for},
};

/// The most members of a set here.
pub const MAX_MEMBERS: u32 = 10;
/// List entries that a set's id reserves: a header and members.
const LIST_STRIDE: u32 = MAX_MEMBERS + 1;
/// Elements that a set's id reserves: those of the second rung, enough for [`MAX_MEMBERS`].
const TABLE_STRIDE: u32 = elements_for(maglev::LADDER[1]);

/// A set of backends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Set {
    /// Ids and weights.
    pub members: Vec<(u32, u16)>,
    /// The publication.
    pub generation: u32,
    /// Whether memberships are kept, for affinity.
    pub sticky: bool,
    table: Vec<u16>,
}

/// What the maps say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rules {
    /// By id.
    pub backends: BTreeMap<u32, Backend>,
    /// By id.
    pub sets: BTreeMap<u32, Set>,
    /// Frontends.
    pub frontends: BTreeMap<FrontendKey, Frontend>,
    /// Service, address, length of the prefix.
    pub sources: BTreeSet<(u32, IpAddr, u8)>,
    /// By index.
    pub interfaces: BTreeMap<u32, Interface>,
}

/// A frontend's key.
pub fn key(end: SocketAddr, proto: u8) -> FrontendKey {
    FrontendKey::new(end.ip().into(), Port::new(end.port()), proto)
}

/// The ends of a key.
pub fn end(addr: Addr, port: Port) -> SocketAddr {
    SocketAddr::new(addr.into(), port.get())
}

impl Rules {
    /// Adds a backend, or gives its id to another.
    pub fn add_backend(&mut self, id: u32, service_id: u32, end: SocketAddr, proto: u8) {
        let backend = Backend {
            addr: end.ip().into(),
            port: Port::new(end.port()),
            proto,
            state: state::ACTIVE,
            service_id,
            pad: [0; 2],
        };
        self.backends.insert(id, backend);
    }

    /// Changes the state of a backend.
    ///
    /// # Panics
    /// When there is no such backend.
    pub fn set_state(&mut self, id: u32, to: u8) {
        self.backends.get_mut(&id).expect("a backend").state = to;
    }

    /// Takes a backend away.
    pub fn vacate(&mut self, id: u32) {
        self.backends.remove(&id);
    }

    /// Publishes a set.
    ///
    /// # Panics
    /// When it has more than [`MAX_MEMBERS`], or a member is no backend.
    pub fn publish(&mut self, id: u32, members: &[(u32, u16)]) {
        assert!(members.len() <= MAX_MEMBERS as usize, "{} members", members.len());
        let identities: Vec<maglev::Member> = members
            .iter()
            .map(|&(id, weight)| maglev::Member {
                identity: identity(&self.backends[&id]),
                weight,
            })
            .collect();
        let table = maglev::build(&identities, slots_for(members.len())).unwrap_or_default();
        let set = self.sets.entry(id).or_default();
        // A set without a slot is an empty set.
        set.members = if table.is_empty() { Vec::new() } else { members.to_vec() };
        set.generation += 1;
        set.table = table;
    }

    /// Adds a frontend: `flags` are bits of [`flag`].
    pub fn frontend(&mut self, end: SocketAddr, proto: u8, service_id: u32, (inside, outside): (u32, u32), flags: u32) {
        let frontend = Frontend {
            service_id,
            set_id: inside,
            flags,
            affinity_seconds: 0,
            outside_set_id: outside,
            pad: 0,
        };
        self.frontends.insert(key(end, proto), frontend);
    }

    /// Turns affinity of a frontend on.
    ///
    /// # Panics
    /// When there is no such frontend.
    pub fn stick(&mut self, end: SocketAddr, proto: u8, seconds: u32) {
        let frontend = self.frontends.get_mut(&key(end, proto)).expect("a frontend");
        frontend.affinity_seconds = seconds;
        for id in [frontend.set_id, frontend.outside_set_id] {
            self.sets.entry(id).or_default().sticky = true;
        }
    }

    /// Admits a range of sources to a Service.
    pub fn admit(&mut self, service_id: u32, addr: IpAddr, prefix: u8) {
        self.sources.insert((service_id, addr, prefix));
    }

    /// Adds an interface.
    pub fn uplink(&mut self, index: u32, addresses: &[IpAddr]) {
        self.interface(index, addresses, side::UPLINK);
    }

    /// Adds an interface of a guest.
    pub fn guest(&mut self, index: u32, addresses: &[IpAddr]) {
        self.interface(index, addresses, side::GUEST);
    }

    fn interface(&mut self, index: u32, addresses: &[IpAddr], side: u32) {
        let of = |v6: bool| {
            addresses
                .iter()
                .find(|a| a.is_ipv6() == v6)
                .map_or(Addr::ZERO, |a| (*a).into())
        };
        let interface = Interface {
            v4: of(false),
            v6: of(true),
            side,
            pad: 0,
        };
        self.interfaces.insert(index, interface);
    }

    /// The word of a set.
    pub fn word(&self, id: u32) -> SetWord {
        match self.sets.get(&id) {
            Some(set) => SetWord::new(id * LIST_STRIDE, set.members.len() as u16, set.generation),
            None => SetWord(0),
        }
    }

    /// The list of a set, header first, and where it begins.
    pub fn entries(&self, id: u32) -> (u32, Vec<ListEntry>) {
        let set = &self.sets[&id];
        let header = ListEntry {
            a: id * TABLE_STRIDE,
            b: set.table.len() as u32,
            c: 0,
        };
        let members = set.members.iter().map(|&(backend, weight)| ListEntry {
            a: backend,
            b: u32::from(weight),
            c: 0,
        });
        (id * LIST_STRIDE, [header].into_iter().chain(members).collect())
    }

    /// The elements of a set's table, and where they begin.
    pub fn elements(&self, id: u32) -> (u32, Vec<u64>) {
        let packed = self.sets[&id].table.chunks(SLOTS_PER_ELEMENT as usize);
        let elements = packed
            .map(|slots| {
                slots
                    .iter()
                    .rev()
                    .fold(0, |element, slot| element << 16 | u64::from(*slot))
            })
            .collect();
        (id * TABLE_STRIDE, elements)
    }

    /// The memberships of sets with affinity: members that may get new flows.
    pub fn memberships(&self) -> BTreeSet<Membership> {
        let mut memberships = BTreeSet::new();
        for (&set_id, set) in self.sets.iter().filter(|(_, set)| set.sticky) {
            for &(backend_id, _) in set.members.iter().filter(|(_, weight)| *weight > 0) {
                memberships.insert(Membership { set_id, backend_id });
            }
        }
        memberships
    }

    /// The source ranges as keys: bits that count, and the key.
    pub fn ranges(&self) -> impl Iterator<Item = (u32, SourceKey)> + '_ {
        self.sources.iter().map(|&(service_id, addr, prefix)| {
            let before = if addr.is_ipv4() { 96 } else { 0 };
            let key = SourceKey {
                service_id,
                addr: addr.into(),
            };
            (32 + before + u32::from(prefix), key)
        })
    }

    /// Whether a source may use a Service's addresses.
    pub fn admits(&self, service_id: u32, source: IpAddr) -> bool {
        let in_range = |range: IpAddr, prefix: u8| match (range, source) {
            (IpAddr::V4(range), IpAddr::V4(source)) => {
                (u32::from(range) ^ u32::from(source)).leading_zeros() >= u32::from(prefix)
            }
            (IpAddr::V6(range), IpAddr::V6(source)) => {
                (u128::from(range) ^ u128::from(source)).leading_zeros() >= u32::from(prefix)
            }
            _ => false,
        };
        self.sources
            .iter()
            .any(|&(service, range, prefix)| service == service_id && in_range(range, prefix))
    }

    /// What a frontend's flags say.
    pub fn has(frontend: &Frontend, bit: u32) -> bool {
        debug_assert!(bit & (flag::KIND_MASK << flag::KIND_SHIFT) == 0, "a kind is no bit");
        frontend.flags & bit != 0
    }
}

/// What makes a backend the same in every set: its address and port.
fn identity(backend: &Backend) -> u64 {
    let words = backend.addr.words;
    let first = hash::combine(hash::mix(u64::from(words[0])), u64::from(words[1]));
    let second = hash::combine(hash::combine(first, u64::from(words[2])), u64::from(words[3]));
    hash::combine(second, u64::from(backend.port.get()))
}

impl Tables for Rules {
    type Backend = u32;

    fn list(&self, index: u32) -> Option<ListEntry> {
        let id = index / LIST_STRIDE;
        self.sets.get(&id)?;
        let (offset, entries) = self.entries(id);
        entries.get((index - offset) as usize).copied()
    }

    fn element(&self, index: u32) -> Option<u64> {
        let id = index / TABLE_STRIDE;
        let at = (index - id * TABLE_STRIDE) * SLOTS_PER_ELEMENT;
        let table = &self.sets.get(&id)?.table;
        let slots = (0..SLOTS_PER_ELEMENT).rev().map(|i| table.get((at + i) as usize));
        Some(slots.fold(0, |element, slot| element << 16 | u64::from(slot.copied().unwrap_or(0))))
    }

    fn backend(&self, id: u32) -> Option<(u32, bool)> {
        let backend = self.backends.get(&id)?;
        Some((id, backend.state == state::ACTIVE))
    }
}

#[cfg(test)]
mod tests {
    use lb_common::{abi::TCP, select};

    use super::*;

    fn two() -> Rules {
        let mut rules = Rules::default();
        for id in 1..=2 {
            rules.add_backend(id, 1, format!("10.0.0.{id}:80").parse().expect("an address"), TCP);
        }
        rules.publish(3, &[(1, 1), (2, 1)]);
        rules
    }

    #[test]
    fn every_member_is_chosen() {
        let rules = two();
        let header = rules.list(rules.word(3).offset()).expect("a header");
        let mut met = BTreeSet::new();
        for i in 0..100 {
            let pick = select::pick(&rules, rules.word(3), header, hash::mix(i)).expect("a member");
            met.insert(pick.entry.a);
        }
        assert_eq!(met, BTreeSet::from([1, 2]));
    }

    #[test]
    fn tables_are_packed_as_they_are_read() {
        let rules = two();
        let (offset, elements) = rules.elements(3);
        for (i, element) in elements.iter().enumerate() {
            assert_eq!(rules.element(offset + i as u32), Some(*element));
        }
    }

    #[test]
    fn ranges_admit_their_own_family() {
        let mut rules = Rules::default();
        rules.admit(1, "198.51.100.0".parse().expect("an address"), 24);
        rules.admit(1, "::".parse().expect("an address"), 0);
        let admits = |text: &str| rules.admits(1, text.parse().expect("an address"));
        assert!(admits("198.51.100.255") && admits("2001:db8::1"));
        assert!(!admits("198.51.101.1"));
        assert!(!rules.admits(2, "198.51.100.1".parse().expect("an address")));
    }
}
