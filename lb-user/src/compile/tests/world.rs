//! A small world of Services, and an agent in miniature that carries its changes into memory.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::{IpAddr, Ipv4Addr},
    num::NonZeroU16,
};

use lb_common::{
    affinity::Membership,
    backend::state,
    frontend::{FrontendKey, flag},
    set::{SetWord, elements_for},
};
use proptest::prelude::*;

use super::watch::Watch;
use crate::{
    compile::{Capacity, Compiled, Compiler, Full, GRACE_MS, Side},
    datapath::{fake::Memory, kernel::MapsError, maps::Maps},
    model::{
        BackendSet, DesiredService, Frontend, FrontendKind, Member, ObjectName, Outside, Protocol, Scope, SetName,
        WhenEmpty, WhenEmptyOutside,
    },
    plan::Plan,
};

/// Room enough for all of the small world, twice over.
pub(crate) const ROOMY: Capacity = Capacity {
    frontends: 64,
    services: 32,
    sets: 64,
    backends: 512,
    lists: 2048,
    tables: 16_384,
    memberships: 512,
    sources: 64,
};

/// What each Service that changes is compiled to; `None` is its absence.
pub(crate) type Changes = Vec<(ObjectName, Option<Compiled>)>;

/// What is wanted, by name.
pub(crate) type State = BTreeMap<ObjectName, DesiredService>;

const SERVICES: usize = 4;
const FRONTENDS: usize = 8;
const SETS: usize = 2;

/// A frontend of the world: its Service, its set, seconds of affinity, whether it is a cluster IP, what is outside.
type RawFrontend = Option<(usize, usize, Option<u32>, bool, RawOutside)>;
/// What is outside: the set, and bits for silence, masquerading and source ranges.
type RawOutside = Option<(usize, u8)>;
/// The members of a set: endpoint, port, weight; weight 4 stands for a draining one.
type RawSet = Vec<(u8, bool, u16)>;

/// A state in few numbers.
#[derive(Clone, Debug)]
pub(crate) struct Raw {
    frontends: Vec<RawFrontend>,
    sets: Vec<RawSet>,
    /// Of each Service, which of [`RANGES`] are admitted.
    sources: Vec<u8>,
}

/// Ranges of both families; the last one holds all IPv4 addresses in their mapped form, and must not admit them.
const RANGES: [&str; 5] = ["10.0.0.0/8", "10.1.0.0/16", "192.0.2.7/32", "fd00::/8", "::fffe:0:0/95"];

fn raw() -> impl Strategy<Value = Raw> {
    let affinity = prop_oneof![3 => Just(None), 1 => Just(Some(60u32)), 1 => Just(Some(10_800))];
    let outside = prop::option::of((0..SETS, 0u8..8));
    let frontend = prop::option::weighted(0.8, (0..SERVICES, 0..SETS, affinity, any::<bool>(), outside));
    let set = prop::collection::vec(
        (0u8..5, any::<bool>(), prop_oneof![4 => Just(1u16), 1 => 0..5u16]),
        0..5,
    );
    (
        prop::collection::vec(frontend, FRONTENDS),
        prop::collection::vec(set, SERVICES * SETS),
        prop::collection::vec(0u8..1 << RANGES.len(), SERVICES),
    )
        .prop_map(|(frontends, sets, sources)| Raw {
            frontends,
            sets,
            sources,
        })
}

/// A history: each state differs from the one before in some places.
pub(crate) fn history(most: usize) -> impl Strategy<Value = Vec<State>> {
    let change = (raw(), any::<u16>(), any::<u16>());
    (raw(), prop::collection::vec(change, 1..most)).prop_map(|(first, changes)| {
        let mut now = first;
        let mut states = vec![state_of(&now)];
        for (other, frontends, sets) in changes {
            for (i, frontend) in other.frontends.into_iter().enumerate() {
                if frontends >> i & 1 == 1 {
                    now.frontends[i] = frontend;
                }
            }
            for (i, set) in other.sets.into_iter().enumerate() {
                if sets >> i & 1 == 1 {
                    now.sets[i] = set;
                }
            }
            for (i, sources) in other.sources.into_iter().enumerate() {
                if frontends >> (FRONTENDS + i) & 1 == 1 {
                    now.sources[i] = sources;
                }
            }
            states.push(state_of(&now));
        }
        states
    })
}

fn state_of(raw: &Raw) -> State {
    let mut state = State::new();
    for service in 0..SERVICES {
        let mut sets = Vec::new();
        let mut numbers = BTreeMap::new();
        let of_service = || {
            (0..FRONTENDS)
                .filter_map(|i| raw.frontends[i].map(|f| (i, f)))
                .filter(|(_, f)| f.0 == service)
        };
        let used: BTreeSet<usize> = of_service()
            .flat_map(|(_, f)| [Some(f.1), f.4.map(|(set, _)| set)])
            .flatten()
            .collect();
        for set in used {
            numbers.insert(set, sets.len());
            sets.push(set_of(["x", "y"][set], &raw.sets[service * SETS + set]));
        }
        let frontends: Vec<Frontend> = of_service()
            .map(|(i, (_, set, affinity_seconds, cluster_ip, outside))| Frontend {
                addr: Ipv4Addr::new(10, 96, 0, i as u8).into(),
                port: port(80),
                protocol: Protocol::Tcp,
                kind: if cluster_ip {
                    FrontendKind::ClusterIp
                } else {
                    FrontendKind::ExternalIp
                },
                set: numbers[&set],
                when_empty: WhenEmpty::Refuse,
                affinity_seconds,
                outside: outside.map(|(set, bits)| Outside {
                    set: numbers[&set],
                    when_empty: if bits & 1 == 1 {
                        WhenEmptyOutside::Silence
                    } else {
                        WhenEmptyOutside::Refuse
                    },
                    masquerade: bits & 2 == 2,
                    source_ranges: bits & 4 == 4,
                }),
            })
            .collect();
        if !frontends.is_empty() {
            let name = ObjectName::new("default", &format!("s{service}"));
            let limited = frontends.iter().any(|f| f.outside.is_some_and(|o| o.source_ranges));
            let admitted = (0..RANGES.len()).filter(|i| limited && raw.sources[service] >> i & 1 == 1);
            let sources = admitted.map(|i| RANGES[i].parse().expect("a range")).collect();
            let service = DesiredService {
                name: name.clone(),
                frontends,
                sets,
                sources,
            };
            state.insert(name, service);
        }
    }
    state
}

fn set_of(port_name: &str, raw: &RawSet) -> BackendSet {
    let mut members: BTreeMap<(IpAddr, NonZeroU16), u16> = BTreeMap::new();
    for (endpoint, second_port, weight) in raw {
        members.insert(
            (
                endpoint_addr(u32::from(*endpoint)),
                port(8080 + u16::from(*second_port)),
            ),
            *weight,
        );
    }
    let all = members
        .into_iter()
        .map(|((addr, port), weight)| Member { addr, port, weight });
    let (members, draining) = all.partition(|member| member.weight < 4);
    BackendSet {
        name: set_name(port_name),
        members,
        draining,
    }
}

pub(crate) fn port(port: u16) -> NonZeroU16 {
    NonZeroU16::new(port).expect("not zero")
}

pub(crate) fn endpoint_addr(i: u32) -> IpAddr {
    Ipv4Addr::from(0x0a01_0000 + i).into()
}

pub(crate) fn set_name(port_name: &str) -> SetName {
    SetName {
        port_name: port_name.into(),
        protocol: Protocol::Tcp,
        ipv6: false,
        scope: Scope::Cluster,
    }
}

/// A Service with one cluster IP, and as many ports as there are sets; each set is a list of endpoints.
pub(crate) fn service(name: &str, cluster_ip: u32, sets: &[&[u32]]) -> DesiredService {
    let sets: Vec<BackendSet> = (0..)
        .zip(sets)
        .map(|(i, endpoints)| BackendSet {
            name: set_name(&format!("p{i:03}")),
            members: endpoints
                .iter()
                .map(|endpoint| Member {
                    addr: endpoint_addr(*endpoint),
                    port: port(8000 + i),
                    weight: 1,
                })
                .collect(),
            draining: Vec::new(),
        })
        .collect();
    DesiredService {
        name: ObjectName::new("default", name),
        frontends: (0..sets.len())
            .map(|set| Frontend {
                addr: Ipv4Addr::from(0x0a60_0000 + cluster_ip).into(),
                port: port(80 + set as u16),
                protocol: Protocol::Tcp,
                kind: FrontendKind::ClusterIp,
                set,
                when_empty: WhenEmpty::Refuse,
                affinity_seconds: None,
                outside: None,
            })
            .collect(),
        sets,
        sources: Vec::new(),
    }
}

pub(crate) fn state(services: impl IntoIterator<Item = DesiredService>) -> State {
    services
        .into_iter()
        .map(|service| (service.name.clone(), service))
        .collect()
}

/// Members by address, port and weight, sorted.
pub(super) type Members = Vec<(IpAddr, u16, u16)>;

/// What clients of one frontend meet, without any id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Meaning {
    flags: u32,
    affinity_seconds: u32,
    inside: View,
    outside: Option<View>,
    /// Who is admitted, where source ranges count.
    admitted: Admitted,
}

/// Leading bits and first address of each range.
pub(super) type Admitted = BTreeSet<(u32, IpAddr)>;

/// What clients of one side meet.
#[derive(Clone, Debug, PartialEq, Eq)]
struct View {
    members: Members,
    /// Address and port of each slot of the table.
    slots: Vec<(IpAddr, u16)>,
    /// The members that a client's memory may name.
    remembered: Members,
}

/// The meaning of everything, and the other backends: address, port, state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct World {
    frontends: BTreeMap<FrontendKey, Meaning>,
    backends: BTreeMap<(IpAddr, u16, u8), usize>,
    memberships: usize,
    sources: usize,
}

pub(super) fn members_of(memory: &Memory, set_id: u32) -> Members {
    let word = SetWord(memory.sets[set_id as usize]);
    let first = word.offset() as usize + 1;
    let entries = if word.count() == 0 {
        &[][..]
    } else {
        &memory.lists[first..first + usize::from(word.count())]
    };
    let mut members: Members = entries
        .iter()
        .map(|entry| {
            let backend = memory.backends[entry.a as usize];
            (backend.addr.into(), backend.port.get(), entry.b as u16)
        })
        .collect();
    members.sort_unstable();
    members
}

fn view(memory: &Memory, set_id: u32) -> View {
    let word = SetWord(memory.sets[set_id as usize]);
    let mut slots = Vec::new();
    if word.count() > 0 {
        let header = memory.lists[word.offset() as usize];
        for slot in memory.table(header.a, header.b).expect("a table within the array") {
            let entry = memory.lists[word.offset() as usize + 1 + usize::from(slot)];
            let backend = memory.backends[entry.a as usize];
            slots.push((backend.addr.into(), backend.port.get()));
        }
    }
    let mut remembered: Members = memory
        .memberships
        .iter()
        .filter(|m| m.set_id == set_id)
        .map(|m| memory.backends[m.backend_id as usize])
        .map(|backend| (backend.addr.into(), backend.port.get(), 0))
        .collect();
    remembered.sort_unstable();
    View {
        members: members_of(memory, set_id),
        slots,
        remembered,
    }
}

/// Who is admitted at a Service; everything else in the map of source ranges is another's.
pub(super) fn admitted(memory: &Memory, service_id: u32) -> Admitted {
    let of_service = memory
        .sources
        .iter()
        .filter(|source| source.key.service_id == service_id);
    of_service.map(|source| (source.bits, source.key.addr.into())).collect()
}

/// Reads what the maps mean.
pub(crate) fn world(memory: &Memory) -> World {
    let mut world = World {
        memberships: memory.memberships.len(),
        sources: memory.sources.len(),
        ..World::default()
    };
    for (key, frontend) in &memory.frontends {
        let meaning = Meaning {
            flags: frontend.flags,
            affinity_seconds: frontend.affinity_seconds,
            inside: view(memory, frontend.set_id),
            outside: Side::Outside.set_id(frontend).map(|set_id| view(memory, set_id)),
            admitted: if frontend.flags & flag::SOURCE_RANGES == 0 {
                Admitted::new()
            } else {
                admitted(memory, frontend.service_id)
            },
        };
        world.frontends.insert(*key, meaning);
    }
    for backend in memory.backends.iter().filter(|backend| backend.state != state::VACANT) {
        *world
            .backends
            .entry((backend.addr.into(), backend.port.get(), backend.state))
            .or_default() += 1;
    }
    world
}

/// How much is in use, by map.
pub(crate) fn used(compiler: &Compiler) -> Vec<(&'static str, u32)> {
    compiler.usage().into_iter().map(|(map, used, _)| (map, used)).collect()
}

/// An agent in miniature.
#[derive(Debug)]
pub(crate) struct Agent {
    pub(crate) memory: Memory,
    pub(crate) compiler: Compiler,
    pub(crate) wanted: State,
    pub(crate) applied: BTreeMap<ObjectName, Compiled>,
    pub(crate) watch: Watch,
    pub(crate) now: u64,
}

impl Agent {
    pub(crate) fn new(capacity: Capacity) -> Self {
        Self {
            memory: Memory::new(capacity),
            compiler: Compiler::new(capacity),
            wanted: State::new(),
            applied: BTreeMap::new(),
            watch: Watch::default(),
            now: 0,
        }
    }

    /// The maps as a fresh agent would fill them.
    pub(crate) fn fresh(state: &State) -> Self {
        let mut agent = Self::new(ROOMY);
        agent.change(state).expect("room for all");
        agent.settle();
        agent
    }

    /// Compiles all that changed, and returns one plan and what is then applied.
    pub(crate) fn compile(&mut self, state: &State) -> Result<(Plan, Changes), Full> {
        let all: BTreeSet<&ObjectName> = self.wanted.keys().chain(state.keys()).collect();
        let mut plan = Plan::default();
        let mut changes = Vec::new();
        for name in all {
            if self.wanted.get(name) == state.get(name) {
                continue;
            }
            let old = self.applied.get(name);
            let new = match state.get(name) {
                Some(wanted) => Some(self.compiler.compile(wanted, old, &mut plan.tables)?),
                None => None,
            };
            plan.merge(Plan::between(old, new.as_ref()));
            changes.push((name.clone(), new));
        }
        Ok((plan, changes))
    }

    /// Goes over to another state, under watch. Returns how much was written.
    pub(crate) fn change(&mut self, state: &State) -> Result<usize, Full> {
        let (plan, changes) = self.compile(state)?;
        self.allow_changes(state, &changes);
        let before = self.memory.writes;
        self.carry_out(&plan).expect("the fake takes everything");
        for (name, new) in changes {
            if let Some(old) = self.applied.remove(&name) {
                self.compiler.retire(&old, new.as_ref(), self.now);
            }
            if let Some(new) = new {
                self.applied.insert(name, new);
            }
        }
        self.wanted.clone_from(state);
        Ok(self.memory.writes - before)
    }

    /// Notes what may be shown while these changes are carried out.
    pub(crate) fn allow_changes(&mut self, state: &State, changes: &Changes) {
        let applied = self.applied.clone();
        let stays = |name: &ObjectName| changes.iter().all(|(changed, _)| changed != name);
        let stay = applied
            .iter()
            .filter(|(name, _)| stays(name))
            .map(|(_, service)| service);
        self.allow(state, stay.chain(changes.iter().filter_map(|(_, new)| new.as_ref())));
    }

    pub(crate) fn carry_out(&mut self, plan: &Plan) -> Result<(), MapsError> {
        self.watch.now = self.now;
        let watch = &mut self.watch;
        self.memory
            .carry_out(plan, &mut |memory, store| watch.see(memory, store))
    }

    /// Notes what each frontend may show until `state`, which these are compiled from, is reached: the old, then the new.
    fn allow<'a>(&mut self, state: &State, compiled: impl Iterator<Item = &'a Compiled>) {
        let ids = compiled.flat_map(|service| service.frontends.iter().map(|(key, _)| (*key, service.service_id)));
        let ids: HashMap<FrontendKey, u32> = ids.collect();
        let set_of = |frontend: &Frontend, side| match side {
            Side::Inside => Some(frontend.set),
            Side::Outside => Some(frontend.outside?.set),
        };
        let place = |state: &State| -> HashMap<(FrontendKey, Side), (ObjectName, SetName)> {
            let mut all = HashMap::new();
            for service in state.values() {
                for frontend in &service.frontends {
                    for side in Side::BOTH {
                        if let Some(set) = set_of(frontend, side) {
                            let place = (service.name.clone(), service.sets[set].name.clone());
                            all.insert((super::super::key(frontend), side), place);
                        }
                    }
                }
            }
            all
        };
        let (old, new) = (place(&self.wanted), place(state));
        self.watch.allowed.clear();
        self.watch.admitted.clear();
        for service in state.values() {
            for frontend in &service.frontends {
                let key = super::super::key(frontend);
                let held = self.memory.frontends.get(&key);
                for side in Side::BOTH {
                    let Some(set) = set_of(frontend, side) else { continue };
                    let by = (key, side);
                    if old.get(&by).is_some_and(|old| *old != new[&by]) {
                        continue;
                    }
                    let set = &service.sets[set];
                    let mut members: Members = set.members.iter().map(|m| (m.addr, m.port.get(), m.weight)).collect();
                    if members.iter().all(|(_, _, weight)| *weight == 0) {
                        members.clear();
                    }
                    members.sort_unstable();
                    let held = held
                        .and_then(|held| side.set_id(held))
                        .map(|set_id| members_of(&self.memory, set_id));
                    let allowed = [Some(members), held].into_iter().flatten().collect();
                    self.watch.allowed.insert(by, allowed);
                }
                // At a restart another Service may go on under the id that this one had.
                let id = ids[&key];
                if held.is_some_and(|held| held.service_id != id) {
                    continue;
                }
                let after: Admitted = super::super::sources::compile(&service.sources, id)
                    .iter()
                    .map(|source| (source.bits, source.key.addr.into()))
                    .collect();
                let found = admitted(&self.memory, id);
                let asks = held.is_some_and(|held| held.flags & flag::SOURCE_RANGES != 0);
                let before = if asks { found.clone() } else { after.clone() };
                // One that asks for source ranges from now on meets the Service's old ones until they go.
                let most = found.union(&after).copied().collect();
                self.watch.admitted.insert(key, [before, after, most]);
            }
        }
    }

    /// Dies, and comes back to `state`: the first full comparison. Returns the plan that was carried out.
    pub(crate) fn restart(&mut self, state: &State) -> Result<Plan, Full> {
        let contents = self.memory.dump().expect("memory is read");
        let mut compiler = Compiler::restore(ROOMY, &contents);
        let mut applied = BTreeMap::new();
        let mut tables = Vec::new();
        for (name, wanted) in state {
            applied.insert(name.clone(), compiler.compile(wanted, None, &mut tables)?);
        }
        let mut broken = Vec::new();
        let mut plan = Plan::against(&contents, applied.values(), &mut broken);
        plan.tables = tables;
        for set in broken {
            let held = self
                .memory
                .table(set.table.offset, set.table.slots)
                .expect("within the array");
            if crate::compile::table_hash(held) == set.table.content {
                continue;
            }
            if plan.tables.iter().all(|table| table.offset != set.table.offset) {
                let owner = applied
                    .values()
                    .find(|service| service.sets.iter().any(|s| s.set_id == set.set_id));
                let slots = super::super::slots_of(owner.expect("it has one"), set).expect("they belong together");
                plan.tables.push(crate::compile::TableWrite {
                    offset: set.table.offset,
                    slots,
                });
            }
        }
        self.allow(state, applied.values());
        self.compiler = compiler;
        self.applied = applied;
        self.wanted.clone_from(state);
        self.carry_out(&plan).expect("the fake takes everything");
        self.compiler.forget_restored(self.now);
        Ok(plan)
    }

    /// Lets the grace pass.
    pub(crate) fn settle(&mut self) {
        self.now += GRACE_MS;
        self.compiler.reclaim(self.now, |_| true, |_| true);
    }

    /// Checks what must hold after every step: the maps mean what a fresh agent would make of the state, nothing more
    /// is in use, nothing in use overlaps, and a comparison finds nothing to do.
    pub(crate) fn check(&mut self) {
        self.settle();
        let fresh = Self::fresh(&self.wanted);
        assert_eq!(world(&self.memory), world(&fresh.memory));
        assert_eq!(used(&self.compiler), used(&fresh.compiler), "ids or room leak");
        self.check_ranges();
        let contents = self.memory.dump().expect("memory is read");
        let mut broken = Vec::new();
        let plan = Plan::against(&contents, self.applied.values(), &mut broken);
        assert_eq!((plan, broken), (Plan::default(), Vec::new()));
        self.watch.look(&self.memory);
    }

    fn check_ranges(&self) {
        let sets = || {
            self.applied
                .values()
                .flat_map(|service| &service.sets)
                .filter(|set| set.word.count() > 0)
        };
        let mut lists: Vec<(u32, u32)> = sets()
            .map(|s| (s.word.offset(), u32::from(s.word.count()) + 1))
            .collect();
        lists.sort_unstable();
        assert!(
            lists.windows(2).all(|two| two[0].0 + two[0].1 <= two[1].0),
            "lists overlap"
        );
        let tables: BTreeSet<(u32, u32)> = sets().map(|s| (s.table.offset, elements_for(s.table.slots))).collect();
        let tables: Vec<_> = tables.into_iter().collect();
        assert!(
            tables.windows(2).all(|two| two[0].0 + two[0].1 <= two[1].0),
            "tables overlap"
        );
        let ids: Vec<u32> = self
            .applied
            .values()
            .flat_map(|s| s.backends.iter().map(|(id, _)| *id))
            .collect();
        assert_eq!(
            ids.iter().collect::<BTreeSet<_>>().len(),
            ids.len(),
            "a backend id is used twice"
        );
    }

    /// Removes everything; nothing may stay.
    pub(crate) fn empty(&mut self) {
        self.change(&State::new()).expect("less always fits");
        self.settle();
        let contents = self.memory.dump().expect("memory is read");
        assert_eq!(contents, crate::compile::Contents::default());
        assert!(
            self.compiler.usage().iter().all(|(_, used, _)| *used == 0),
            "{:?}",
            self.compiler.usage()
        );
        assert_eq!(self.memory.memberships, std::collections::HashSet::<Membership>::new());
    }
}
