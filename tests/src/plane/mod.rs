//! The packet programs without traffic: loaded, attached to nothing, their maps written from [`Rules`], and run on packets
//! by `BPF_PROG_TEST_RUN`.
//!
//! What a Service becomes is not decided here (see [`crate::datapath`] for that): tests say what the maps hold. The
//! invariant: a test begins with empty maps and counters read from zero; loading takes seconds in a virtual machine, so the
//! loaded object is handed on from test to test, emptied.

mod mapped;
mod rules;
mod run;

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    os::fd::AsFd,
    thread,
};

use anyhow::{Context, Result};
use aya::{
    Ebpf,
    maps::{
        Array, HashMap, Map, MapData, RingBuf,
        lpm_trie::{Key, LpmTrie},
    },
    programs::{Program, SchedClassifier},
};
use lb_common::{
    affinity::{Affinity, AffinityKey, Membership},
    backend::{Backend, BackendCounters, ServiceCounters},
    counter,
    event::ConnRecord,
    flow::{FIRST_PORT, Flow, FragmentKey, FragmentPorts, Interface, LAST_PORT, Settings, TupleEntry, TupleKey},
    frontend::{Frontend, FrontendKey, SourceKey},
    maps::{self as names, feature},
    set::{ListEntry, SetWord},
};
use lb_user::{
    datapath::load::{self, Mode, Options, Sizes},
    lab::{Netns, link},
    observe::decode::{self, Record},
};

pub use mapped::Mapped;
pub use rules::{MAX_MEMBERS, Rules, Set, end, key};
pub use run::{Verdict, summed};

/// Slots of the flow table as it is loaded; tests make it smaller by [`Settings::flow_slots`].
pub const FLOW_SLOTS: u32 = 1_024;

/// Where a packet is seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Hook {
    /// It comes into the node.
    Ingress,
    /// It leaves the node.
    Egress,
}

impl Hook {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Ingress, Self::Egress];

    /// The program that runs there.
    pub fn program(self) -> &'static str {
        match self {
            Self::Ingress => "lb_ingress",
            Self::Egress => "lb_egress",
        }
    }

    /// Its number among the counters.
    pub fn number(self) -> u32 {
        match self {
            Self::Ingress => counter::hook::INGRESS,
            Self::Egress => counter::hook::EGRESS,
        }
    }
}

/// A device that packets are said to come from or leave by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Device {
    /// The first uplink.
    Uplink,
    /// Another uplink.
    Second,
    /// A guest's.
    Guest,
    /// Another guest's.
    OtherGuest,
    /// One that the programs were not told of.
    Unknown,
}

impl Device {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Uplink, Self::Second, Self::Guest, Self::OtherGuest, Self::Unknown];

    fn name(self) -> &'static str {
        match self {
            Self::Uplink => "uplink",
            Self::Second => "second",
            Self::Guest => "guest",
            Self::OtherGuest => "otherguest",
            Self::Unknown => "unknown",
        }
    }
}

/// An address of the node, which it sends from by this device.
///
/// # Panics
/// Never: the addresses are written here.
pub fn node_address(device: Device, v6: bool) -> IpAddr {
    let text = match (device, v6) {
        (Device::Uplink, false) => "192.0.2.1",
        (Device::Uplink, true) => "2001:db8::1",
        (Device::Second, false) => "192.0.2.129",
        (Device::Second, true) => "2001:db8:0:1::1",
        (Device::Guest, false) => "172.20.0.1",
        (Device::Guest, true) => "fd20::1",
        (Device::OtherGuest, false) => "172.21.0.1",
        (Device::OtherGuest, true) => "fd21::1",
        (Device::Unknown, false) => "192.0.2.193",
        (Device::Unknown, true) => "2001:db8:0:2::1",
    };
    text.parse().expect("an address")
}

/// An object that is loaded, its maps and the place that its programs believe to be in.
struct Loaded {
    object: Ebpf,
    /// A namespace of our own: a packet's device is looked up in the namespace of who runs the program.
    netns: Netns,
    /// Where the devices' peers are.
    _peers: Netns,
    devices: BTreeMap<Device, u32>,
    frontends: HashMap<MapData, FrontendKey, Frontend>,
    sets: Mapped<SetWord>,
    lists: Mapped<ListEntry>,
    tables: Mapped<u64>,
    backends: Mapped<Backend>,
    backend_stats: Mapped<BackendCounters>,
    service_stats: Mapped<ServiceCounters>,
    affinity: HashMap<MapData, AffinityKey, Affinity>,
    members: HashMap<MapData, Membership, u32>,
    sources: LpmTrie<MapData, SourceKey, u32>,
    interfaces: HashMap<MapData, u32, Interface>,
    settings: Mapped<Settings>,
    flows: Mapped<Flow>,
    tuples: HashMap<MapData, TupleKey, TupleEntry>,
    hand: Array<MapData, u64>,
    fragments: HashMap<MapData, FragmentKey, FragmentPorts>,
    counters: MapData,
    ring: RingBuf<MapData>,
}

thread_local! {
    /// What the last test left for the next one.
    static SPARE: RefCell<Option<Loaded>> = const { RefCell::new(None) };
}

macro_rules! take {
    ($object:expr, $name:expr) => {
        $object
            .take_map($name)
            .with_context(|| format!("no map {}", $name))?
            .try_into()
            .with_context(|| format!("the map {}", $name))?
    };
}

impl Loaded {
    fn new() -> Result<Self> {
        let options = Options {
            mode: Mode::Balance,
            sizes: Sizes {
                frontends: 256,
                sets: 64,
                lists: 1_024,
                tables: 32_768,
                backends: 256,
                services: 64,
                sockets: 64,
                flows: FLOW_SLOTS,
            },
            features: feature::STATE,
            log_level: 0,
            follow_connections: false,
            packets: false,
            translate: true,
        };
        let mut object = load::load(&options, None)?;
        for name in load::TRANSLATING_RAW {
            load::load_program(&mut object, name)?;
        }
        let (netns, peers) = (Netns::new()?, Netns::new()?);
        let mut devices = BTreeMap::new();
        for device in Device::ALL {
            link::join((&netns, device.name()), (&peers, device.name()))?;
            devices.insert(device, link::index_of(&netns, device.name())?);
        }
        Ok(Self {
            frontends: take!(object, names::FRONTENDS),
            sets: Mapped::take(&mut object, names::SETS)?,
            lists: Mapped::take(&mut object, names::LISTS)?,
            tables: Mapped::take(&mut object, names::TABLES)?,
            backends: Mapped::take(&mut object, names::BACKENDS)?,
            backend_stats: Mapped::take(&mut object, names::BACKEND_STATS)?,
            service_stats: Mapped::take(&mut object, names::SERVICE_STATS)?,
            affinity: take!(object, names::AFFINITY),
            members: take!(object, names::MEMBERS),
            sources: take!(object, names::SOURCES),
            interfaces: take!(object, names::INTERFACES),
            settings: Mapped::take(&mut object, names::SETTINGS)?,
            flows: Mapped::take(&mut object, names::FLOWS)?,
            tuples: take!(object, names::TUPLES),
            hand: take!(object, names::FLOW_HAND),
            fragments: take!(object, names::FRAGMENTS),
            counters: match object.take_map(names::COUNTERS) {
                Some(Map::PerCpuArray(data)) => data,
                _ => anyhow::bail!("no map {}", names::COUNTERS),
            },
            ring: take!(object, names::EVENTS),
            object,
            netns,
            _peers: peers,
            devices,
        })
    }

    /// The programs know no flow any more.
    fn forget_flows(&mut self) -> Result<()> {
        for index in 0..self.flows.len() {
            self.flows.set(index, Flow::default());
        }
        self.hand.set(0, 0, 0)?;
        clear(&mut self.tuples)
    }

    fn empty(&mut self) -> Result<()> {
        while self.ring.next().is_some() {}
        self.forget_flows()?;
        clear(&mut self.affinity)?;
        clear(&mut self.fragments)?;
        Ok(())
    }
}

fn clear<K: aya::Pod, V: aya::Pod>(map: &mut HashMap<MapData, K, V>) -> Result<()> {
    let keys: Vec<K> = map.keys().collect::<Result<_, _>>()?;
    for key in keys {
        map.remove(&key)?;
    }
    Ok(())
}

/// The programs, with maps that say what the test wants.
pub struct Plane {
    /// `None` only while dropped.
    loaded: Option<Loaded>,
    home: Netns,
    written: Rules,
    counters_before: Vec<u64>,
    services_before: Vec<ServiceCounters>,
    backends_before: Vec<BackendCounters>,
}

impl std::fmt::Debug for Plane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Plane")
            .field("written", &self.written)
            .finish_non_exhaustive()
    }
}

impl Plane {
    /// Loads the programs, or takes those that the last test has left, and moves the thread to their devices.
    pub fn enter() -> Result<Self> {
        let home = Netns::current()?;
        let mut loaded = match SPARE.with(RefCell::take) {
            Some(loaded) => loaded,
            None => Loaded::new()?,
        };
        loaded.empty()?;
        loaded.netns.enter_current_thread()?;
        let mut plane = Self {
            loaded: Some(loaded),
            home,
            written: Rules::default(),
            counters_before: Vec::new(),
            services_before: Vec::new(),
            backends_before: Vec::new(),
        };
        plane.set_settings(Settings {
            clock_offset_ns: 0,
            flow_slots: FLOW_SLOTS,
            first_port: FIRST_PORT,
            last_port: LAST_PORT,
        });
        plane.forget_counters()?;
        Ok(plane)
    }

    fn loaded(&self) -> &Loaded {
        self.loaded.as_ref().expect("loaded until dropped")
    }

    fn loaded_mut(&mut self) -> &mut Loaded {
        self.loaded.as_mut().expect("loaded until dropped")
    }

    /// The index of a device.
    pub fn index(&self, device: Device) -> u32 {
        self.loaded().devices[&device]
    }

    /// A program that is loaded.
    pub fn program(&self, name: &str) -> Result<&SchedClassifier> {
        match self.loaded().object.program(name) {
            Some(Program::SchedClassifier(program)) => Ok(program),
            _ => anyhow::bail!("no program {name}"),
        }
    }

    /// Writes what has changed since the last call.
    pub fn write(&mut self, rules: &Rules) -> Result<()> {
        let old = std::mem::replace(&mut self.written, rules.clone());
        let loaded = self.loaded_mut();
        // Nobody looks meanwhile, so that the order is free.
        for id in ids(&old.backends, &rules.backends) {
            loaded
                .backends
                .set(id, rules.backends.get(&id).copied().unwrap_or_default());
        }
        for id in ids(&old.sets, &rules.sets) {
            if rules.sets.contains_key(&id) {
                let (offset, entries) = rules.entries(id);
                for (i, entry) in entries.into_iter().enumerate() {
                    loaded.lists.set(offset + i as u32, entry);
                }
                let (offset, elements) = rules.elements(id);
                for (i, element) in elements.into_iter().enumerate() {
                    loaded.tables.set(offset + i as u32, element);
                }
            }
            loaded.sets.set(id, rules.word(id));
        }
        for key in ids(&old.frontends, &rules.frontends) {
            match rules.frontends.get(&key) {
                Some(frontend) => loaded.frontends.insert(key, frontend, 0)?,
                None => loaded.frontends.remove(&key)?,
            }
        }
        for index in ids(&old.interfaces, &rules.interfaces) {
            match rules.interfaces.get(&index) {
                Some(interface) => loaded.interfaces.insert(index, interface, 0)?,
                None => loaded.interfaces.remove(&index)?,
            }
        }
        let (before, now) = (old.memberships(), rules.memberships());
        for gone in before.difference(&now) {
            loaded.members.remove(gone)?;
        }
        for new in now.difference(&before) {
            loaded.members.insert(new, 1, 0)?;
        }
        let before: BTreeSet<_> = old.ranges().collect();
        let now: BTreeSet<_> = rules.ranges().collect();
        for (bits, key) in before.difference(&now) {
            loaded.sources.remove(&Key::new(*bits, *key))?;
        }
        for (bits, key) in now.difference(&before) {
            loaded.sources.insert(&Key::new(*bits, *key), 1, 0)?;
        }
        Ok(())
    }

    /// What the programs must know of the node.
    pub fn settings(&self) -> Settings {
        self.loaded().settings.get(0)
    }

    /// Changes it.
    pub fn set_settings(&mut self, settings: Settings) {
        self.loaded_mut().settings.set(0, settings);
    }

    /// A slot of the flow table.
    pub fn flow(&self, slot: u32) -> Flow {
        self.loaded().flows.get(slot)
    }

    /// Writes a slot of the flow table.
    pub fn set_flow(&mut self, slot: u32, flow: Flow) {
        self.loaded_mut().flows.set(slot, flow);
    }

    /// Where a tuple leads.
    pub fn tuple(&self, key: &TupleKey) -> Option<TupleEntry> {
        self.loaded().tuples.get(key, 0).ok()
    }

    /// All tuples.
    pub fn tuples(&self) -> Result<std::collections::HashMap<TupleKey, TupleEntry>> {
        Ok(self.loaded().tuples.iter().collect::<Result<_, _>>()?)
    }

    /// Writes a tuple.
    pub fn set_tuple(&mut self, key: &TupleKey, entry: TupleEntry) -> Result<()> {
        Ok(self.loaded_mut().tuples.insert(key, entry, 0)?)
    }

    /// Lets the programs forget all flows.
    pub fn forget_flows(&mut self) -> Result<()> {
        self.loaded_mut().forget_flows()
    }

    /// Removes a tuple.
    pub fn remove_tuple(&mut self, key: &TupleKey) -> Result<()> {
        Ok(self.loaded_mut().tuples.remove(key)?)
    }

    /// Slots that have been looked at, ever.
    pub fn hand(&self) -> Result<u64> {
        Ok(self.loaded().hand.get(&0, 0)?)
    }

    /// The remembered clients.
    pub fn affinities(&self) -> Result<std::collections::HashMap<AffinityKey, Affinity>> {
        Ok(self.loaded().affinity.iter().collect::<Result<_, _>>()?)
    }

    /// What is remembered of a client of a set.
    pub fn affinity(&self, (client, set_id): (IpAddr, u32)) -> Result<Option<Affinity>> {
        match self
            .loaded()
            .affinity
            .get(&AffinityKey::outside(client.into(), set_id), 0)
        {
            Ok(memory) => Ok(Some(memory)),
            Err(aya::maps::MapError::KeyNotFound) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Lets the remembered clients grow older. Their memory is dated by the monotonic clock, which nobody can move.
    pub fn age_affinities(&mut self, nanoseconds: u64) -> Result<()> {
        for (key, mut memory) in self.affinities()? {
            memory.last_ns = memory.last_ns.wrapping_sub(nanoseconds);
            self.loaded_mut().affinity.insert(key, memory, 0)?;
        }
        Ok(())
    }

    /// The remembered datagrams.
    pub fn fragments(&self) -> Result<std::collections::HashMap<FragmentKey, FragmentPorts>> {
        Ok(self.loaded().fragments.iter().collect::<Result<_, _>>()?)
    }

    /// Counts what the programs do from here on; counters of Services and backends go on.
    pub fn forget_counters_of_programs(&mut self) -> Result<()> {
        self.counters_before = summed(self.loaded().counters.fd().as_fd())?;
        Ok(())
    }

    /// Counts everything from here on.
    pub fn forget_counters(&mut self) -> Result<()> {
        self.forget_counters_of_programs()?;
        let loaded = self.loaded();
        let services = (0..loaded.service_stats.len()).map(|id| loaded.service_stats.get(id));
        let backends = (0..loaded.backend_stats.len()).map(|id| loaded.backend_stats.get(id));
        (self.services_before, self.backends_before) = (services.collect(), backends.collect());
        Ok(())
    }

    /// The counters that have moved, by hook and action, and how far.
    pub fn moved(&self) -> Result<BTreeMap<(u32, u32), u64>> {
        let now = summed(self.loaded().counters.fd().as_fd())?;
        let moved = now.iter().zip(&self.counters_before).enumerate();
        Ok(moved
            .filter(|(_, (now, before))| now != before)
            .map(|(i, (now, before))| {
                let i = i as u32;
                ((i / counter::action::COUNT, i % counter::action::COUNT), now - before)
            })
            .collect())
    }

    /// How far a Service's counters have moved.
    pub fn service(&self, id: u32) -> ServiceCounters {
        let (now, before) = (self.loaded().service_stats.get(id), self.services_before[id as usize]);
        let mut failed = now.failed;
        for (now, before) in failed.iter_mut().zip(before.failed) {
            *now -= before;
        }
        ServiceCounters {
            connects: now.connects - before.connects,
            rejected: now.rejected - before.rejected,
            established: now.established - before.established,
            closed: now.closed - before.closed,
            failed,
            attributed: now.attributed - before.attributed,
            direct: now.direct - before.direct,
            outside: now.outside - before.outside,
        }
    }

    /// How far a backend's counters have moved.
    pub fn backend(&self, id: u32) -> BackendCounters {
        let (now, before) = (self.loaded().backend_stats.get(id), self.backends_before[id as usize]);
        let tally = |now: lb_common::backend::Tally, before: lb_common::backend::Tally| lb_common::backend::Tally {
            connects: now.connects - before.connects,
            established: now.established - before.established,
            failed: now.failed - before.failed,
            closed: now.closed - before.closed,
        };
        BackendCounters {
            inside: tally(now.inside, before.inside),
            direct: tally(now.direct, before.direct),
            outside: tally(now.outside, before.outside),
        }
    }

    /// The records of ended connections since the last call.
    pub fn records(&mut self) -> Result<Vec<ConnRecord>> {
        let mut records = Vec::new();
        while let Some(bytes) = self.loaded_mut().ring.next() {
            match decode::record(&bytes)? {
                Record::Connection(record) => records.push(record),
                Record::Packet(packet) => anyhow::bail!("nobody observes packets: {packet:?}"),
            }
        }
        Ok(records)
    }
}

fn ids<K: Ord + Copy, V: PartialEq>(old: &BTreeMap<K, V>, new: &BTreeMap<K, V>) -> Vec<K> {
    let keys: BTreeSet<K> = old.keys().chain(new.keys()).copied().collect();
    keys.into_iter().filter(|key| old.get(key) != new.get(key)).collect()
}

impl Drop for Plane {
    fn drop(&mut self) {
        self.home
            .enter_current_thread()
            .expect("a thread can go back where it came from");
        // After a failure nobody knows what is in the maps; they go with the object.
        if thread::panicking() || self.write(&Rules::default()).is_err() {
            return;
        }
        SPARE.with(|spare| spare.replace(self.loaded.take()));
    }
}
