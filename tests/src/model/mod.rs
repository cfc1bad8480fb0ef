//! The packet path once more, as plainly as it can be said: hash maps, standard addresses, packets changed byte by byte.
//!
//! The kernel programs are compared with it packet by packet. It shares with them what is decided by pure functions
//! ([`lb_common::select`], [`lb_common::flow`]) and nothing else: not the parser, not the rewriting, not the table. What chance
//! or the clock decides is not foretold but judged: a port of the node's own is taken from what the program did, if it was one
//! that it could take.

mod answer;
mod begin;
mod duel;
pub mod fuzz;
mod parse;
mod path;
mod rewrite;
mod script;
mod table;
mod town;

use std::{
    collections::{BTreeMap, HashMap},
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use lb_common::{
    abi::{TCP, UDP},
    backend::{ServiceCounters, Tally},
    event::ConnRecord,
    flow::{Flow, Settings},
};

use crate::plane::{Hook, Rules, Verdict};

pub use duel::{Difference, Duel, ONCE};
pub use parse::{Kind, Parsed, Place, ethernet, inside};
pub use script::{Counts, Dice, Op, Script, play};
pub use town::Town;

/// Two ends and a protocol, the lesser end first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Pair {
    /// The lesser end.
    pub low: SocketAddr,
    /// The greater end.
    pub high: SocketAddr,
    /// TCP or UDP.
    pub proto: u8,
}

impl Pair {
    /// The pair of two ends, whichever is which.
    pub fn of(one: SocketAddr, other: SocketAddr, proto: u8) -> Self {
        Self {
            low: one.min(other),
            high: one.max(other),
            proto,
        }
    }
}

/// Which ends of a flow a pair is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Client and frontend.
    Front,
    /// Client and backend.
    Middle,
    /// The node's own source and backend.
    Back,
}

/// Where a pair leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lead {
    /// The slot.
    pub slot: u32,
    /// The flow's serial number.
    pub serial: u32,
    /// The role.
    pub role: Role,
}

/// What a packet becomes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The verdict.
    pub verdict: Verdict,
    /// The packet afterwards.
    pub packet: Vec<u8>,
}

/// The packet path.
#[derive(Clone, Debug, Default)]
pub struct Model {
    /// What the maps say of Services; copies of the path share it.
    pub rules: Arc<Rules>,
    /// What is said of the node.
    pub settings: Settings,
    /// The flow table's slots.
    pub flows: Vec<Flow>,
    /// Pairs and where they lead.
    pub pairs: HashMap<Pair, Lead>,
    /// Slots that were looked at, ever.
    pub hand: u64,
    /// Client and set: the backend, and when it was chosen by the monotonic clock.
    pub affinity: HashMap<(IpAddr, u32), (u32, u64)>,
    /// The memories that the last packet renewed.
    pub remembered: Vec<(IpAddr, u32)>,
    /// Datagrams of which the first fragment was seen: its ports.
    pub fragments: HashMap<(IpAddr, IpAddr, u32, u8), (u16, u16)>,
    /// Hook and action: how often.
    pub counts: BTreeMap<(u32, u32), u64>,
    /// By Service.
    pub services: BTreeMap<u32, ServiceCounters>,
    /// By backend: connections from outside.
    pub backends: BTreeMap<u32, Tally>,
    /// Records since they were last taken.
    pub records: Vec<ConnRecord>,
    /// Slots whose flow was looked at or changed by the last packet, and what they had before.
    pub touched: BTreeMap<u32, Flow>,
    /// What the program cannot have done.
    complaint: Option<String>,
}

/// A packet at a hook.
#[derive(Clone, Copy)]
struct Step<'a> {
    hook: Hook,
    /// The index of its device.
    device: u32,
    bytes: &'a [u8],
    parsed: Parsed,
    /// The flow clock.
    now: u64,
    /// The port that the program has given a slot's flow, should it have had to choose one; 0 is none.
    port_of: &'a dyn Fn(u32) -> u16,
}

impl Step<'_> {
    fn src(&self) -> SocketAddr {
        SocketAddr::new(self.parsed.src, self.parsed.src_port)
    }

    fn dst(&self) -> SocketAddr {
        SocketAddr::new(self.parsed.dst, self.parsed.dst_port)
    }

    fn pair(&self) -> Pair {
        Pair::of(self.src(), self.dst(), self.parsed.proto)
    }

    /// The packet goes on as it is.
    fn untouched(&self) -> Outcome {
        Outcome {
            verdict: Verdict::Next,
            packet: self.bytes.to_vec(),
        }
    }

    /// The packet ends here.
    fn dropped(&self) -> Outcome {
        Outcome {
            verdict: Verdict::Drop,
            packet: self.bytes.to_vec(),
        }
    }

    /// The packet goes on with another end.
    fn with(&self, end: rewrite::End, to: SocketAddr) -> Outcome {
        let mut outcome = self.untouched();
        rewrite::rewrite(&mut outcome.packet, &self.parsed, end, to);
        outcome
    }
}

impl Model {
    /// A path that knows nothing yet, with so many slots.
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            flows: vec![Flow::default(); settings.flow_slots as usize],
            ..Self::default()
        }
    }

    /// A packet at a hook of a device, at a time of the monotonic clock. `port_of` tells which port of the node's own the
    /// program has given the flow of a slot.
    ///
    /// # Errors
    /// Where the program took a port that it could not take, or none though it could.
    pub fn run(
        &mut self,
        hook: Hook,
        device: u32,
        bytes: &[u8],
        monotonic: u64,
        port_of: &dyn Fn(u32) -> u16,
    ) -> Result<Outcome, String> {
        self.touched.clear();
        self.remembered.clear();
        let parsed = ethernet(bytes);
        let step = Step {
            hook,
            device,
            bytes,
            parsed,
            now: monotonic.wrapping_add(self.settings.clock_offset_ns),
            port_of,
        };
        let outcome = self.path(step);
        match self.complaint.take() {
            Some(complaint) => Err(complaint),
            None => Ok(outcome),
        }
    }

    /// Notes that the packet has to do with a slot.
    fn touch(&mut self, slot: u32) {
        self.touched.entry(slot).or_insert(self.flows[slot as usize]);
    }

    fn count(&mut self, hook: Hook, action: u32) {
        *self.counts.entry((hook.number(), action)).or_default() += 1;
    }
}

/// The client's end of a flow.
fn client(flow: &Flow) -> SocketAddr {
    crate::plane::end(flow.client, flow.client_port)
}

/// The frontend's end of a flow.
fn vip(flow: &Flow) -> SocketAddr {
    crate::plane::end(flow.vip, flow.vip_port)
}

/// The backend's end of a flow.
fn backend(flow: &Flow) -> SocketAddr {
    crate::plane::end(flow.backend, flow.backend_port)
}

/// The node's own source of a flow, if it has one.
fn source(flow: &Flow) -> Option<SocketAddr> {
    (flow.source_port.get() != 0).then(|| crate::plane::end(flow.source, flow.source_port))
}

const _: () = assert!(TCP == crate::packet::wire::TCP && UDP == crate::packet::wire::UDP);
