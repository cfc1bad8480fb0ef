//! The maps; what each holds is said beside its name in [`lb_common::maps`].

use aya_ebpf::{
    bindings::{BPF_F_MMAPABLE, BPF_F_NO_PREALLOC},
    btf_maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray, RingBuf},
    macros::btf_map,
};
use lb_common::{
    affinity::{Affinity, AffinityKey, Membership},
    backend::{Backend, BackendCounters, EndpointKey, ServiceCounters},
    counter,
    event::ConnRecord,
    flow::{Flow, FragmentKey, FragmentPorts, Interface, Settings, TupleEntry, TupleKey},
    frontend::{Frontend, FrontendKey, SourceKey},
    maps::*,
    set::{ListEntry, SetWord},
    socket::{ChainHead, Passage, Reverse, ReverseKey, SocketState},
};

use crate::tc::Sight;

const MMAPABLE: usize = BPF_F_MMAPABLE as usize;
const ON_DEMAND: usize = BPF_F_NO_PREALLOC as usize;

#[btf_map]
pub static FRONTENDS: HashMap<FrontendKey, Frontend, { MAX_FRONTENDS as usize }, ON_DEMAND> = HashMap::new();

#[btf_map]
pub static SETS: Array<SetWord, { MAX_SETS as usize }, MMAPABLE> = Array::new();

#[btf_map]
pub static LISTS: Array<ListEntry, { MAX_LIST_ENTRIES as usize }, MMAPABLE> = Array::new();

#[btf_map]
pub static TABLES: Array<u64, { MAX_TABLE_ELEMENTS as usize }, MMAPABLE> = Array::new();

#[btf_map]
pub static BACKENDS: Array<Backend, { MAX_BACKENDS as usize }, MMAPABLE> = Array::new();

#[btf_map]
pub static BACKEND_INDEX: HashMap<EndpointKey, u32, { 2 * MAX_BACKENDS as usize }, ON_DEMAND> = HashMap::new();

#[btf_map]
pub static BACKEND_STATS: Array<BackendCounters, { MAX_BACKENDS as usize }, MMAPABLE> = Array::new();

#[btf_map]
pub static SERVICE_STATS: Array<ServiceCounters, { MAX_SERVICES as usize }, MMAPABLE> = Array::new();

#[btf_map]
pub static AFFINITY: LruHashMap<AffinityKey, Affinity, { MAX_AFFINITY as usize }> = LruHashMap::new();

#[btf_map]
pub static MEMBERS: HashMap<Membership, u32, { MAX_MEMBERS as usize }, ON_DEMAND> = HashMap::new();

#[btf_map]
pub static SOCKETS: HashMap<u64, SocketState, { MAX_SOCKETS as usize }> = HashMap::new();

#[btf_map]
pub static UDP_REVERSE: HashMap<ReverseKey, Reverse, { MAX_SOCKETS as usize }, ON_DEMAND> = HashMap::new();

#[btf_map]
pub static UDP_SOCKETS: HashMap<u64, ChainHead, { MAX_SOCKETS as usize }, ON_DEMAND> = HashMap::new();

#[btf_map]
pub static OPTED_OUT: HashMap<u64, u32, { MAX_OPTED_OUT as usize }, ON_DEMAND> = HashMap::new();

#[btf_map]
pub static DIALS: LruHashMap<FrontendKey, u64, { MAX_SOCKETS as usize }> = LruHashMap::new();

#[btf_map]
pub static PASSAGES: LruHashMap<FrontendKey, Passage, { MAX_PASSAGES as usize }> = LruHashMap::new();

#[btf_map]
pub static SOURCES: LpmTrie<SourceKey, u32, { MAX_SOURCES as usize }> = LpmTrie::new();

#[btf_map]
pub static INTERFACES: HashMap<u32, Interface, { MAX_INTERFACES as usize }, ON_DEMAND> = HashMap::new();

#[btf_map]
pub static SETTINGS: Array<Settings, 1, MMAPABLE> = Array::new();

#[btf_map]
pub static FLOWS: Array<Flow, { MAX_FLOWS as usize }, MMAPABLE> = Array::new();

#[btf_map]
pub static TUPLES: HashMap<TupleKey, TupleEntry, { (TUPLES_PER_FLOW * MAX_FLOWS) as usize }, ON_DEMAND> =
    HashMap::new();

#[btf_map]
pub static FLOW_HAND: Array<u64, 1> = Array::new();

#[btf_map]
pub static FRAGMENTS: LruHashMap<FragmentKey, FragmentPorts, { MAX_FRAGMENTS as usize }> = LruHashMap::new();

#[btf_map]
pub static SIGHT: PerCpuArray<Sight, 1> = PerCpuArray::new();

#[btf_map]
pub static COUNTERS: PerCpuArray<u64, { counter::COUNTERS as usize }> = PerCpuArray::new();

#[btf_map]
pub static EVENTS: RingBuf<ConnRecord, { EVENT_BYTES as usize }> = RingBuf::new();
