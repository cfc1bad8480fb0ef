//! Frontends as the map holds them, and who uses a set: each frontend for the clients of two sides.

use lb_common::{
    abi::{TCP, UDP},
    addr::Port,
    frontend::{Frontend, FrontendKey, flag},
};

use super::CompiledSet;
use crate::model::{self, FrontendKind, Protocol, WhenEmpty, WhenEmptyOutside};

/// The protocol's number in keys and values.
pub fn proto(protocol: Protocol) -> u8 {
    match protocol {
        Protocol::Tcp => TCP,
        Protocol::Udp => UDP,
    }
}

/// What clients of a frontend dial.
pub(super) fn key(frontend: &model::Frontend) -> FrontendKey {
    FrontendKey::new(
        frontend.addr.into(),
        Port::new(frontend.port.get()),
        proto(frontend.protocol),
    )
}

/// What the map holds for a frontend.
pub(super) fn value(frontend: &model::Frontend, service_id: u32, sets: &[CompiledSet]) -> Frontend {
    let kind = match frontend.kind {
        FrontendKind::ClusterIp => 0,
        FrontendKind::NodePort => 1,
        FrontendKind::ExternalIp => 2,
        FrontendKind::LoadBalancer => 3,
    };
    let mut flags = kind << flag::KIND_SHIFT;
    let mut raise = |bit, when| flags |= if when { bit } else { 0 };
    raise(
        flag::UNREACHABLE_WHEN_EMPTY,
        frontend.when_empty == WhenEmpty::Unreachable,
    );
    if let Some(outside) = frontend.outside {
        raise(flag::OUTSIDE, true);
        raise(
            flag::SILENT_WHEN_EMPTY_OUTSIDE,
            outside.when_empty == WhenEmptyOutside::Silence,
        );
        raise(flag::MASQUERADE_OUTSIDE, outside.masquerade);
        raise(flag::SOURCE_RANGES, outside.source_ranges);
    }
    let set_id = sets[frontend.set].set_id;
    Frontend {
        service_id,
        set_id,
        flags,
        affinity_seconds: frontend.affinity_seconds.unwrap_or(0),
        outside_set_id: frontend.outside.map_or(set_id, |outside| sets[outside.set].set_id),
        pad: 0,
    }
}

/// Who uses a set: a frontend, for the clients of one side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Use {
    pub(super) key: FrontendKey,
    pub(super) side: Side,
}

/// On which side of the node's border a client is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Side {
    Inside,
    Outside,
}

impl Side {
    pub(super) const BOTH: [Self; 2] = [Self::Inside, Self::Outside];

    /// The set that a frontend has for clients of this side.
    pub(super) fn set_id(self, frontend: &Frontend) -> Option<u32> {
        match self {
            Self::Inside => Some(frontend.set_id),
            Self::Outside => (frontend.flags & flag::OUTSIDE != 0).then_some(frontend.outside_set_id),
        }
    }
}

/// The ids of the sets that a frontend names, one for each use.
pub(super) fn set_ids(frontend: &Frontend) -> impl Iterator<Item = u32> {
    let frontend = *frontend;
    Side::BOTH.into_iter().filter_map(move |side| side.set_id(&frontend))
}

/// The uses that a wanted frontend makes of its Service's sets, by their index.
pub(super) fn uses(frontend: &model::Frontend, key: FrontendKey) -> impl Iterator<Item = (usize, Use)> {
    let of = move |set, side| (set, Use { key, side });
    let outside = frontend.outside.map(|outside| of(outside.set, Side::Outside));
    [of(frontend.set, Side::Inside)].into_iter().chain(outside)
}
