//! Who the members of a set are to a table: their identity, their order, their digest.
//!
//! Nothing here depends on ids, time or the order of input, so that every node builds the same table.

use std::collections::HashMap;

use lb_common::{
    addr::{Addr, Port},
    backend::Backend,
    hash, maglev,
};

use super::{Compiled, CompiledSet, order, proto, table_hash};
use crate::model;

/// A member in its place in the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Placed {
    pub(super) identity: u64,
    pub(super) weight: u16,
    pub(super) backend_id: u32,
}

/// Builds the table of a compiled set again, from its Service's backends; `None` if they do not belong together.
pub fn slots_of(service: &Compiled, set: &CompiledSet) -> Option<Vec<u16>> {
    let members: Vec<maglev::Member> = placed(&set.members, &service.backends)?
        .iter()
        .map(|member| maglev::Member {
            identity: member.identity,
            weight: member.weight,
        })
        .collect();
    let slots = maglev::build(&members, set.table.slots)?;
    (table_hash(slots.iter().copied()) == set.table.content).then_some(slots)
}

/// The members of a list (backend id and weight), as the table sees them; `None` if a backend is missing.
pub(super) fn placed(list: &[(u32, u16)], backends: &[(u32, Backend)]) -> Option<Vec<Placed>> {
    let backends: HashMap<u32, &Backend> = backends.iter().map(|(id, b)| (*id, b)).collect();
    let mut seen: HashMap<Addr, u32> = HashMap::with_capacity(list.len());
    for (id, _) in list {
        *seen.entry(backends.get(id)?.addr).or_default() += 1;
    }
    list.iter()
        .map(|(id, weight)| {
            let backend = backends.get(id)?;
            Some(Placed {
                identity: identity(backend.addr, backend.port, seen[&backend.addr] > 1),
                weight: *weight,
                backend_id: *id,
            })
        })
        .collect()
}

/// What makes an endpoint the same on every node: its address, and its port where the address occurs twice.
fn identity(addr: Addr, port: Port, with_port: bool) -> u64 {
    let words = addr.words.map(|w| u64::from(u32::from_be(w)));
    let port = if with_port { u64::from(port.get()) } else { 0 };
    [words[0] << 32 | words[1], words[2] << 32 | words[3], port]
        .into_iter()
        .fold(0, hash::combine)
}

/// The members in the order of the list: by identity, which is the same on every node. The identity of an endpoint is
/// its address, so that ports of one Service share a table; where an address occurs twice its port tells them apart.
pub(super) fn list_order(set: &model::BackendSet, backends: &[(u32, Backend)]) -> Vec<Placed> {
    let proto = proto(set.name.protocol);
    let mut seen: HashMap<Addr, u32> = HashMap::with_capacity(set.members.len());
    for member in &set.members {
        *seen.entry(member.addr.into()).or_default() += 1;
    }
    let mut placed: Vec<Placed> = set
        .members
        .iter()
        .filter_map(|member| {
            let (addr, port) = (Addr::from(member.addr), Port::new(member.port.get()));
            let found = backends
                .binary_search_by_key(&(proto, addr, port), |(_, b)| order(b))
                .ok()?;
            let identity = identity(addr, port, seen[&addr] > 1);
            Some(Placed {
                identity,
                weight: member.weight,
                backend_id: backends[found].0,
            })
        })
        .collect();
    placed.sort_unstable();
    placed
}

/// 128 bits that stand for the members' identities and weights, in order.
pub(super) fn digest(members: &[Placed]) -> u128 {
    let fold = |seed: u64| {
        members.iter().fold(seed, |h, m| {
            hash::combine(hash::combine(h, m.identity), u64::from(m.weight))
        })
    };
    u128::from(fold(0x0065_7665_6e6b)) << 64 | u128::from(fold(0x6b65_656c))
}
