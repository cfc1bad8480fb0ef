//! Names and sizes of the maps, and names of the programs and globals; the kernel truncates names at 15 bytes.

/// (address, port, protocol) → [`crate::frontend::Frontend`].
pub const FRONTENDS: &str = "FRONTENDS";
/// Set id → [`crate::set::SetWord`]; mapped by the agent.
pub const SETS: &str = "SETS";
/// Lists of members ([`crate::set::ListEntry`]); mapped by the agent, window by window.
pub const LISTS: &str = "LISTS";
/// Maglev tables, four slots an element; mapped by the agent, window by window.
pub const TABLES: &str = "TABLES";
/// Backend id → [`crate::backend::Backend`].
pub const BACKENDS: &str = "BACKENDS";
/// [`crate::backend::EndpointKey`] of every backend → its id, for the observer.
pub const BACKEND_INDEX: &str = "BACKEND_INDEX";
/// Backend id → [`crate::backend::BackendCounters`].
pub const BACKEND_STATS: &str = "BACKEND_STATS";
/// Service id → [`crate::backend::ServiceCounters`].
pub const SERVICE_STATS: &str = "SERVICE_STATS";
/// [`crate::affinity::AffinityKey`] → [`crate::affinity::Affinity`].
pub const AFFINITY: &str = "AFFINITY";
/// [`crate::affinity::Membership`] → 1.
pub const MEMBERS: &str = "MEMBERS";
/// Socket cookie → [`crate::socket::SocketState`].
pub const SOCKETS: &str = "SOCKETS";
/// [`crate::socket::ReverseKey`] → [`crate::socket::Reverse`].
pub const UDP_REVERSE: &str = "UDP_REVERSE";
/// Socket cookie → [`crate::socket::ChainHead`].
pub const UDP_SOCKETS: &str = "UDP_SOCKETS";
/// Cgroup id → 1: clients that are not translated.
pub const OPTED_OUT: &str = "OPTED_OUT";
/// (address, port, protocol) of a client whose socket is followed → the socket's cookie, for packets that have lost their socket.
pub const DIALS: &str = "DIALS";
/// (address, port, protocol) of a client without a followed socket → [`crate::socket::Passage`].
pub const PASSAGES: &str = "PASSAGES";
/// [`crate::frontend::SourceKey`] with a prefix length → 1: who may use a Service's addresses of load balancers.
pub const SOURCES: &str = "SOURCES";
/// Interface index → [`crate::flow::Interface`]: where packets are translated.
pub const INTERFACES: &str = "INTERFACES";
/// One element, [`crate::flow::Settings`].
pub const SETTINGS: &str = "SETTINGS";
/// Slot → [`crate::flow::Flow`].
pub const FLOWS: &str = "FLOWS";
/// [`crate::flow::TupleKey`] → [`crate::flow::TupleEntry`].
pub const TUPLES: &str = "TUPLES";
/// One element: how many slots of [`FLOWS`] have been looked at for a new flow, ever.
pub const FLOW_HAND: &str = "FLOW_HAND";
/// [`crate::flow::FragmentKey`] → [`crate::flow::FragmentPorts`].
pub const FRAGMENTS: &str = "FRAGMENTS";
/// Per-CPU counters, see [`crate::counter`].
pub const COUNTERS: &str = "COUNTERS";
/// The ring buffer of [`crate::event`] records.
pub const EVENTS: &str = "EVENTS";

/// Maps whose layout follows [`crate::abi::ABI_VERSION`].
pub const STATE_MAPS: [&str; 16] = [
    FRONTENDS,
    SETS,
    LISTS,
    TABLES,
    BACKENDS,
    BACKEND_INDEX,
    BACKEND_STATS,
    SERVICE_STATS,
    AFFINITY,
    MEMBERS,
    OPTED_OUT,
    SOURCES,
    INTERFACES,
    SETTINGS,
    COUNTERS,
    EVENTS,
];

/// Maps whose layout follows [`crate::abi::SOCKET_VERSION`].
pub const SOCKET_MAPS: [&str; 3] = [SOCKETS, UDP_REVERSE, UDP_SOCKETS];

/// Maps whose layout follows [`crate::abi::FLOW_VERSION`].
pub const FLOW_MAPS: [&str; 3] = [FLOWS, TUPLES, FLOW_HAND];

/// Maps that are not pinned: each agent begins them anew, in the size that its options want.
pub const PASSING_MAPS: [&str; 3] = [DIALS, PASSAGES, FRAGMENTS];

/// Default number of frontends.
pub const MAX_FRONTENDS: u32 = 65_536;
/// Default number of sets.
pub const MAX_SETS: u32 = 65_536;
/// Default number of list entries: members of all sets, twice over while a set is being replaced.
pub const MAX_LIST_ENTRIES: u32 = 524_288;
/// Default number of table elements (32 MiB).
pub const MAX_TABLE_ELEMENTS: u32 = 4_194_304;
/// Default number of backends.
pub const MAX_BACKENDS: u32 = 131_072;
/// Default number of Services.
pub const MAX_SERVICES: u32 = 32_768;
/// Default number of remembered clients.
pub const MAX_AFFINITY: u32 = 65_536;
/// Default number of members of sets with affinity.
pub const MAX_MEMBERS: u32 = 65_536;
/// Default number of sockets with state, of each kind.
pub const MAX_SOCKETS: u32 = 131_072;
/// Default number of clients without a followed socket that are remembered.
pub const MAX_PASSAGES: u32 = 65_536;
/// Default number of flows (128 bytes each, and some 100 for each of their two or three tuples).
pub const MAX_FLOWS: u32 = 131_072;
/// Tuples of a flow: client and frontend, client and backend, backend and the node's own source.
pub const TUPLES_PER_FLOW: u32 = 3;
/// Number of datagrams in fragments that are remembered.
pub const MAX_FRAGMENTS: u32 = 4_096;
/// Number of source ranges, of all Services.
pub const MAX_SOURCES: u32 = 65_536;
/// Number of interfaces where packets are translated.
pub const MAX_INTERFACES: u32 = 1_024;
/// Number of opted-out cgroups.
pub const MAX_OPTED_OUT: u32 = 4_096;
/// Default size of the ring buffer in bytes.
pub const EVENT_BYTES: u32 = 4 << 20;

/// Global: bits of [`feature`].
pub const FEATURES: &str = "FEATURES";
/// Global: offset of `sk_err` in the running kernel's `struct sock`, in bytes; 0 where it is not known.
pub const SK_ERR_OFFSET: &str = "SK_ERR_OFFSET";

/// Global: the flag by which `bpf_l4_csum_replace` takes IPv6 addresses into account; 0 where the kernel does not know it.
pub const CSUM_IPV6_FLAG: &str = "CSUM_IPV6_FLAG";

/// Bits of the global [`FEATURES`]; code behind a bit that is off is dropped by the verifier at load time.
pub mod feature {
    /// Keep per-socket state, so that applications see the address they dialled. Only measurements turn it off.
    pub const STATE: u32 = 1 << 0;
    /// Some cgroups are opted out.
    pub const OPT_OUT: u32 = 1 << 1;
    /// Observe mode: sock_ops finds frontends by itself, since no connect hook ran.
    pub const OBSERVE: u32 = 1 << 2;
    /// Interfaces are observed: packets after translation tell the backend of a followed socket.
    pub const PACKETS: u32 = 1 << 3;
}
