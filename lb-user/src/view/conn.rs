//! Connections that are open or just closed: `evenkeel conn list`.
//!
//! Two sources: the flow table, which has those that came in as packets, and the state of this node's own sockets. How a
//! record of the kernel reads for people is decided here; who reads the maps is the agent.

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    fmt,
    net::{IpAddr, SocketAddr},
};

use lb_common::{
    abi::UDP,
    addr::{Addr, Port},
    flow::{self, Flow},
    socket::{SocketState, phase},
};
use serde::{Deserialize, Serialize};

use super::Origin;

/// Connections that are listed unless told otherwise.
pub const DEFAULT_CONNS: u32 = 1_000;
/// The most connections of one list.
pub const MAX_CONNS: u32 = 100_000;

/// The state of a connection or flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ConnState {
    /// A socket called `connect`, and no SYN has left yet.
    Dialled,
    /// TCP: a SYN, without an answer so far.
    SynSent,
    /// TCP: established.
    Established,
    /// TCP: one side has sent its FIN.
    HalfClosed,
    /// TCP: reset, or closed by both; kept for late packets.
    Closed,
    /// UDP: the endpoint has not answered.
    Unanswered,
    /// UDP: the endpoint has answered.
    Answered,
    /// UDP: a connected socket.
    Connected,
    /// A socket whose callbacks tell nothing of it (MPTCP).
    Untracked,
}

impl ConnState {
    /// The states that flows have, in the order of metrics.
    pub const OF_FLOWS: [Self; 6] = [
        Self::SynSent,
        Self::Established,
        Self::HalfClosed,
        Self::Closed,
        Self::Unanswered,
        Self::Answered,
    ];

    /// The word.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Dialled => "dialled",
            Self::SynSent => "syn_sent",
            Self::Established => "established",
            Self::HalfClosed => "half_closed",
            Self::Closed => "closed",
            Self::Unanswered => "unanswered",
            Self::Answered => "answered",
            Self::Connected => "connected",
            Self::Untracked => "untracked",
        }
    }

    /// The state of a flow.
    pub const fn of_flow(flow: &Flow) -> Self {
        if flow.proto == UDP {
            return if flow.is_answered() {
                Self::Answered
            } else {
                Self::Unanswered
            };
        }
        if flow.is_closed() {
            Self::Closed
        } else if !flow.is_answered() {
            Self::SynSent
        } else if (flow.client_sent | flow.backend_sent) & flow::sent::FIN != 0 {
            Self::HalfClosed
        } else {
            Self::Established
        }
    }

    /// The state of a socket.
    pub const fn of_socket(socket: &SocketState) -> Self {
        match socket.phase {
            phase::DIALLED => Self::Dialled,
            phase::SYN_SENT => Self::SynSent,
            phase::OPEN if socket.proto == UDP => Self::Connected,
            phase::OPEN => Self::Established,
            phase::RECORDED => Self::Closed,
            _ => Self::Untracked,
        }
    }
}

impl fmt::Display for ConnState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Whether a slot of the flow table has a flow that still counts for something.
pub const fn is_live(flow: &Flow, now_ns: u64) -> bool {
    matches!(flow.state(), flow::state::LIVE | flow::state::ENDED) && !flow.is_expired(now_ns)
}

/// One connection or flow.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ConnView {
    /// Where it comes from: `node` or `outside`.
    pub origin: Origin,
    /// The Service's namespace.
    pub namespace: String,
    /// The Service's name; empty where the Service is gone.
    pub service: String,
    /// `TCP` or `UDP`.
    pub protocol: String,
    /// The client's address and port; zero of a socket whose SYN has not left.
    pub client: SocketAddr,
    /// The workload that the client is, where it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workload: Option<String>,
    /// What it dialled.
    pub frontend: SocketAddr,
    /// The endpoint; none where it is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backend: Option<SocketAddr>,
    /// The node's own source towards the endpoint, where it does not see the client's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<SocketAddr>,
    /// Its state.
    pub state: ConnState,
    /// Since when it is there, in seconds.
    pub age_seconds: f64,
    /// Since when no packet was seen, in seconds (up to a quarter of a second late); sockets are not watched so closely.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle_seconds: Option<f64>,
    /// The backend's id in the kernel; 0 where it is not known.
    pub backend_id: u32,
    /// The set's publication when the endpoint was chosen; flows alone tell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub generation: Option<u32>,
    /// True for a TCP flow of which the table did not see the beginning: it was chosen again by its tuple.
    #[serde(default)]
    pub resumed: bool,
}

/// What a list shows, of how many there were.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ConnListView {
    /// The connections, sorted by Service, client and frontend; the youngest, where there are more than the limit.
    pub items: Vec<ConnView>,
    /// How many there were.
    pub total: u64,
}

/// Which connections are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ConnFilter {
    /// Only those from there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub origin: Option<Origin>,
    /// Only those of this client.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client: Option<IpAddr>,
    /// The most that are listed.
    pub limit: u32,
}

impl Default for ConnFilter {
    fn default() -> Self {
        Self {
            origin: None,
            client: None,
            limit: DEFAULT_CONNS,
        }
    }
}

impl ConnFilter {
    /// Whether a connection from there, of this client, is asked for.
    pub fn admits(&self, origin: Origin, client: Addr) -> bool {
        self.origin.is_none_or(|wanted| wanted == origin)
            && self
                .client
                .is_none_or(|wanted| wanted.to_canonical() == IpAddr::from(client))
    }
}

/// An address and port of the kernel's, as people write them.
pub fn socket_address(addr: Addr, port: Port) -> SocketAddr {
    SocketAddr::new(addr.into(), port.get())
}

const fn protocol(proto: u8) -> &'static str {
    if proto == UDP { "UDP" } else { "TCP" }
}

fn seconds(from_ns: u64, now_ns: u64) -> f64 {
    now_ns.saturating_sub(from_ns) as f64 / 1e9
}

impl ConnView {
    /// A flow of the table; `now_ns` is the flow clock's. Who its Service and its client are is told by others.
    pub fn of_flow(flow: &Flow, now_ns: u64) -> Self {
        Self {
            origin: Origin::Outside,
            namespace: String::new(),
            service: String::new(),
            protocol: protocol(flow.proto).to_owned(),
            client: socket_address(flow.client, flow.client_port),
            workload: None,
            frontend: socket_address(flow.vip, flow.vip_port),
            backend: Some(socket_address(flow.backend, flow.backend_port)),
            source: (flow.source_port.0 != 0).then(|| socket_address(flow.source, flow.source_port)),
            state: ConnState::of_flow(flow),
            age_seconds: seconds(flow.start_ns, now_ns),
            idle_seconds: Some(flow.idle_ns(now_ns) as f64 / 1e9),
            backend_id: flow.backend_id,
            generation: Some(flow.generation),
            resumed: flow.flags & flow::flag::RESUMED != 0,
        }
    }

    /// A socket of this node; `now_ns` is the monotonic clock's, `backend` its endpoint where that is known.
    pub fn of_socket(socket: &SocketState, backend: Option<SocketAddr>, now_ns: u64) -> Self {
        Self {
            origin: Origin::Node,
            namespace: String::new(),
            service: String::new(),
            protocol: protocol(socket.proto).to_owned(),
            client: socket_address(socket.client, socket.client_port),
            workload: None,
            frontend: socket_address(socket.vip, socket.vip_port),
            backend,
            source: None,
            state: ConnState::of_socket(socket),
            age_seconds: seconds(socket.start_ns, now_ns),
            idle_seconds: None,
            backend_id: socket.backend_id,
            generation: None,
            resumed: false,
        }
    }
}

/// The youngest of many, without keeping them all.
#[derive(Debug)]
pub struct Youngest<T> {
    limit: usize,
    total: u64,
    /// The oldest of those kept is on top.
    kept: BinaryHeap<Reverse<Aged<T>>>,
}

#[derive(Debug)]
struct Aged<T> {
    start_ns: u64,
    turn: u64,
    what: T,
}

impl<T> PartialEq for Aged<T> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl<T> Eq for Aged<T> {}

impl<T> PartialOrd for Aged<T> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> Ord for Aged<T> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.start_ns, self.turn).cmp(&(other.start_ns, other.turn))
    }
}

impl<T> Youngest<T> {
    /// Will keep at most `limit`.
    pub fn new(limit: usize) -> Self {
        Self {
            limit,
            total: 0,
            kept: BinaryHeap::new(),
        }
    }

    /// Takes one that began at `start_ns`; `make` is called only if it is kept for now.
    pub fn push(&mut self, start_ns: u64, make: impl FnOnce() -> T) {
        self.total += 1;
        if self.kept.len() >= self.limit {
            match self.kept.peek() {
                Some(Reverse(oldest)) if oldest.start_ns < start_ns => self.kept.pop(),
                _ => return,
            };
        }
        self.kept.push(Reverse(Aged {
            start_ns,
            turn: self.total,
            what: make(),
        }));
    }

    /// Those that were kept, in no order, and how many there were in all.
    pub fn finish(self) -> (Vec<T>, u64) {
        let kept = self.kept.into_iter().map(|Reverse(aged)| aged.what).collect();
        (kept, self.total)
    }
}

#[cfg(test)]
mod tests {
    use lb_common::abi::TCP;

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn flow() -> Flow {
        Flow {
            client: Addr::from_v4(u32::from_be_bytes([198, 51, 100, 7]).to_be()),
            vip: Addr::from_v4(u32::from_be_bytes([192, 0, 2, 4]).to_be()),
            backend: Addr::from_v4(u32::from_be_bytes([10, 244, 1, 5]).to_be()),
            client_port: Port::new(40_000),
            vip_port: Port::new(30_080),
            backend_port: Port::new(8_080),
            start_ns: 10 * SECOND,
            seen_ns: 12 * SECOND,
            backend_id: 5,
            generation: 9,
            proto: TCP,
            client_sent: flow::sent::ANY,
            version: flow::version(1, flow::state::LIVE),
            ..Flow::default()
        }
    }

    #[test]
    fn a_flow_reads_as_people_write_addresses() {
        let view = ConnView::of_flow(&flow(), 15 * SECOND);
        assert_eq!(view.client.to_string(), "198.51.100.7:40000");
        assert_eq!(view.frontend.to_string(), "192.0.2.4:30080");
        assert_eq!(
            view.backend.map(|backend| backend.to_string()).as_deref(),
            Some("10.244.1.5:8080")
        );
        assert_eq!((view.source, view.state), (None, ConnState::SynSent));
        assert_eq!((view.age_seconds, view.idle_seconds), (5.0, Some(3.0)));
        let masqueraded = Flow {
            source: Addr::from_v4(u32::from_be_bytes([192, 0, 2, 9]).to_be()),
            source_port: Port::new(10_001),
            ..flow()
        };
        let view = ConnView::of_flow(&masqueraded, 15 * SECOND);
        assert_eq!(
            view.source.map(|source| source.to_string()).as_deref(),
            Some("192.0.2.9:10001")
        );
    }

    #[test]
    fn states_follow_what_both_sides_have_sent() {
        use flow::sent::{ANY, FIN, RST};
        let state = |proto: u8, client_sent: u8, backend_sent: u8| {
            ConnState::of_flow(&Flow {
                proto,
                client_sent,
                backend_sent,
                ..flow()
            })
        };
        for (found, wanted) in [
            (state(TCP, ANY, 0), ConnState::SynSent),
            (state(TCP, ANY, ANY), ConnState::Established),
            (state(TCP, ANY | FIN, ANY), ConnState::HalfClosed),
            (state(TCP, ANY, ANY | FIN), ConnState::HalfClosed),
            (state(TCP, ANY | FIN, ANY | FIN), ConnState::Closed),
            (state(TCP, ANY, ANY | RST), ConnState::Closed),
            (state(TCP, ANY | RST, 0), ConnState::Closed),
            (state(UDP, ANY, 0), ConnState::Unanswered),
            (state(UDP, ANY, ANY), ConnState::Answered),
        ] {
            assert_eq!(found, wanted);
            assert!(ConnState::OF_FLOWS.contains(&found));
        }
        let socket = |phase: u8, proto: u8| {
            ConnState::of_socket(&SocketState {
                phase,
                proto,
                ..SocketState::default()
            })
        };
        assert_eq!(
            [
                socket(phase::DIALLED, TCP),
                socket(phase::SYN_SENT, TCP),
                socket(phase::OPEN, TCP),
                socket(phase::OPEN, UDP),
                socket(phase::RECORDED, TCP),
                socket(phase::UNTRACKED, TCP)
            ],
            [
                ConnState::Dialled,
                ConnState::SynSent,
                ConnState::Established,
                ConnState::Connected,
                ConnState::Closed,
                ConnState::Untracked
            ]
        );
    }

    #[test]
    fn what_has_expired_or_is_free_is_no_flow() {
        let end = 12 * SECOND + flow::UNANSWERED_NS;
        assert!(is_live(&flow(), end));
        assert!(!is_live(&flow(), end + 1));
        for (state, live) in [
            (flow::state::FREE, false),
            (flow::state::BUSY, false),
            (flow::state::LIVE, true),
            (flow::state::ENDED, true),
        ] {
            let flow = Flow {
                version: flow::version(1, state),
                ..flow()
            };
            assert_eq!(is_live(&flow, 13 * SECOND), live, "{state}");
        }
    }

    #[test]
    fn the_youngest_are_kept_and_all_are_counted() {
        let mut youngest = Youngest::new(3);
        for start in [5, 1, 4, 2, 3, 9, 4] {
            youngest.push(start, || start);
        }
        let (mut kept, total) = youngest.finish();
        kept.sort_unstable();
        assert_eq!((kept, total), (vec![4, 5, 9], 7));
        let mut nothing = Youngest::new(0);
        nothing.push(1, || 1);
        assert_eq!(nothing.finish(), (vec![], 1));
    }

    #[test]
    fn a_filter_tells_origin_and_client() {
        let all = ConnFilter::default();
        assert!(all.admits(Origin::Node, flow().client) && all.admits(Origin::Outside, flow().client));
        let outside = ConnFilter {
            origin: Some(Origin::Outside),
            ..all
        };
        assert!(!outside.admits(Origin::Node, flow().client));
        let of = |client: &str| ConnFilter {
            client: Some(client.parse().expect("an address")),
            ..all
        };
        assert!(of("198.51.100.7").admits(Origin::Node, flow().client));
        assert!(of("::ffff:198.51.100.7").admits(Origin::Node, flow().client));
        assert!(!of("198.51.100.8").admits(Origin::Node, flow().client));
    }
}
