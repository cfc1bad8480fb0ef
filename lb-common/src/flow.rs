//! Flows: connections whose packets are translated at TC, because no local socket began them.
//!
//! A flow is one record, a [`Flow`], in a slot of an array. Its tuples lead to it from a hash map: whoever sees a packet
//! orders its two ends, so that both directions meet the same entry. A tuple names the slot and the flow's serial number;
//! where the serial numbers differ, the slot has another flow by now and the tuple means nothing.
//!
//! Slots are given out by a hand that goes round the array: what it points at is taken if its flow has expired, or, where
//! the hand meets none of those, if it has ended or was never settled. So there is no clean-up that anybody could race with,
//! nothing to do while the agent is away, and no flow that both sides use is ever given up for another.
//!
//! The decisions are pure functions here; the kernel programs, the model that they are compared with and the agent share them.

use crate::{
    abi::{TCP, UDP, shared_layout},
    addr::{Addr, Port},
    event::{outcome, tcp_flag},
    hash,
};

/// Two ends of a packet in a fixed order, whichever of them sent it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TupleKey {
    /// The lesser end's address.
    pub low: Addr,
    /// The greater end's address.
    pub high: Addr,
    /// The lesser end's port, network order.
    pub low_port: Port,
    /// The greater end's port, network order.
    pub high_port: Port,
    /// [`TCP`] or [`UDP`].
    pub proto: u8,
    /// Always 0.
    pub pad: [u8; 3],
}
shared_layout!(TupleKey, size 40, align 4);

impl TupleKey {
    /// The key of the packets between two ends.
    ///
    /// The order is that of the words in memory, last word first: which end is the lesser means nothing.
    #[inline(always)]
    pub const fn between(a: Addr, a_port: Port, b: Addr, b_port: Port, proto: u8) -> Self {
        if less(&a, a_port, &b, b_port) {
            Self::ordered(a, a_port, b, b_port, proto)
        } else {
            Self::ordered(b, b_port, a, a_port, proto)
        }
    }

    #[inline(always)]
    const fn ordered(low: Addr, low_port: Port, high: Addr, high_port: Port, proto: u8) -> Self {
        Self {
            low,
            high,
            low_port,
            high_port,
            proto,
            pad: [0; 3],
        }
    }
}

#[inline(always)]
const fn less(a: &Addr, a_port: Port, b: &Addr, b_port: Port) -> bool {
    if a.words[3] != b.words[3] {
        return a.words[3] < b.words[3];
    }
    if a.words[2] != b.words[2] {
        return a.words[2] < b.words[2];
    }
    if a.words[1] != b.words[1] {
        return a.words[1] < b.words[1];
    }
    if a.words[0] != b.words[0] {
        return a.words[0] < b.words[0];
    }
    a_port.0 < b_port.0
}

/// Where a tuple leads.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TupleEntry {
    /// The flow's slot.
    pub slot: u32,
    /// The flow's serial number, and in the two low bits one of [`role`].
    pub stamp: u32,
}
shared_layout!(TupleEntry, size 8, align 4);

impl TupleEntry {
    /// An entry.
    #[inline(always)]
    pub const fn new(slot: u32, serial: u32, role: u32) -> Self {
        Self {
            slot,
            stamp: serial << 2 | role,
        }
    }

    /// The flow's serial number.
    #[inline(always)]
    pub const fn serial(self) -> u32 {
        self.stamp >> 2
    }

    /// One of [`role`].
    #[inline(always)]
    pub const fn role(self) -> u32 {
        self.stamp & 3
    }
}

/// Which ends of a flow a tuple joins.
pub mod role {
    /// Client and frontend: as the client sees it.
    pub const FRONT: u32 = 0;
    /// Client and backend: between the two translations.
    pub const MIDDLE: u32 = 1;
    /// The node's own source and the backend: as a backend beyond the uplink sees it.
    pub const BACK: u32 = 2;
}

/// A flow. The addresses and ports do not change while its version lasts.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flow {
    /// The client's address.
    pub client: Addr,
    /// The frontend's address.
    pub vip: Addr,
    /// The backend's address.
    pub backend: Addr,
    /// The node's own source towards the backend; zero while (or because) the client's is kept.
    pub source: Addr,
    /// When the flow began, nanoseconds of the flow clock.
    pub start_ns: u64,
    /// When it was answered (TCP: SYN+ACK), nanoseconds of the flow clock; 0 before.
    pub established_ns: u64,
    /// When a packet was last seen, nanoseconds of the flow clock, some [`SEEN_STEP_NS`] late.
    pub seen_ns: u64,
    /// Serial number and, in the two low bits, one of [`state`]: changed by compare-and-swap alone.
    pub version: u32,
    /// TCP: sequence number of the SYN, by which its repetition is known.
    pub isn: u32,
    /// The Service.
    pub service_id: u32,
    /// The set that the backend was chosen from.
    pub set_id: u32,
    /// The backend.
    pub backend_id: u32,
    /// The set's publication when the backend was chosen.
    pub generation: u32,
    /// The client's port, network order.
    pub client_port: Port,
    /// The frontend's port, network order.
    pub vip_port: Port,
    /// The backend's port, network order.
    pub backend_port: Port,
    /// The node's own port towards the backend, network order; 0 while there is none.
    pub source_port: Port,
    /// [`TCP`] or [`UDP`].
    pub proto: u8,
    /// Bits of [`flag`].
    pub flags: u8,
    /// What the client has sent: bits of [`sent`]; written by programs that see the client's packets.
    pub client_sent: u8,
    /// What the backend has sent: bits of [`sent`]; written by programs that see the backend's packets.
    pub backend_sent: u8,
    /// 1 while or after somebody gives the flow a source, changed by compare-and-swap.
    pub claim: u32,
}
shared_layout!(Flow, size 128, align 8);

/// Values of the low bits of [`Flow::version`].
pub mod state {
    /// The slot is free.
    pub const FREE: u32 = 0;
    /// Somebody is about to change the slot's flow.
    pub const BUSY: u32 = 1;
    /// A flow.
    pub const LIVE: u32 = 2;
    /// A flow whose end has been counted.
    pub const ENDED: u32 = 3;
}

/// Bits of [`Flow::flags`].
pub mod flag {
    /// Leaves this node's uplinks with the node's own source.
    pub const MASQUERADE: u8 = 1 << 0;
    /// Client and backend are one: its own source would be refused, so it meets the node's.
    pub const HAIRPIN: u8 = 1 << 1;
    /// The table did not see its beginning.
    pub const RESUMED: u8 = 1 << 2;
    /// No port was free for the node's own source: the next packet of the client is refused.
    pub const EXHAUSTED: u8 = 1 << 3;
}

/// Bits of [`Flow::client_sent`] and [`Flow::backend_sent`].
pub mod sent {
    /// Something.
    pub const ANY: u8 = 1 << 0;
    /// TCP: a FIN.
    pub const FIN: u8 = 1 << 1;
    /// TCP: an RST, and nothing since.
    pub const RST: u8 = 1 << 2;
    /// Of the client: something after the backend's first answer. Only then is it known that the client hears the backend.
    pub const AGAIN: u8 = 1 << 3;
}

/// Serial numbers take 30 bits.
pub const SERIAL_MASK: u32 = (1 << 30) - 1;

/// The serial number of a version.
#[inline(always)]
pub const fn serial_of(version: u32) -> u32 {
    version >> 2
}

/// The state of a version: one of [`state`].
#[inline(always)]
pub const fn state_of(version: u32) -> u32 {
    version & 3
}

/// A version of a serial number and a state.
#[inline(always)]
pub const fn version(serial: u32, state: u32) -> u32 {
    serial << 2 | state
}

/// How late [`Flow::seen_ns`] may be: it is written once in this time, not with every packet.
pub const SEEN_STEP_NS: u64 = 250_000_000;

const SECOND: u64 = 1_000_000_000;
/// A connection that is answered is kept this long without a packet, as kube-proxy has the kernel's table keep it.
pub const ESTABLISHED_NS: u64 = 86_400 * SECOND;
/// One that one side has closed.
pub const HALF_CLOSED_NS: u64 = 3_600 * SECOND;
/// One that has ended: as long as the longest TIME_WAIT, so that late packets find their way.
pub const CLOSED_NS: u64 = 60 * SECOND;
/// One that was never answered: as long as a SYN is commonly repeated.
pub const UNANSWERED_NS: u64 = 60 * SECOND;
/// A UDP flow whose client went on after an answer.
pub const DATAGRAM_NS: u64 = 180 * SECOND;
/// Any other: a question, or a question and its answer.
pub const DATAGRAM_ONCE_NS: u64 = 30 * SECOND;
/// What has ended, or was never settled, may give way to another after this time, where no slot is free.
pub const EVICTABLE_NS: u64 = SECOND;

/// Slots that are looked at for a new flow before it is refused.
pub const LOOKS: u32 = 32;
/// Of these, so many lie in a row, where the hand points; the others lie scattered, for flows that last may fill a long row.
pub const LOOKS_IN_A_ROW: u32 = 8;
/// Backends that are tried where the client talks to one already, from the same port, through another frontend.
pub const BACKEND_TRIES: u32 = 3;
/// Ports that are tried for the node's own source before a flow is refused.
pub const PORT_TRIES: u32 = 16;

/// What a packet meant for its flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Nothing new.
    Nothing,
    /// The backend answered for the first time.
    Established,
    /// It ended: one of [`outcome`].
    Ended(u8),
}

impl Flow {
    /// The flow's serial number.
    #[inline(always)]
    pub const fn serial(&self) -> u32 {
        serial_of(self.version)
    }

    /// One of [`state`].
    #[inline(always)]
    pub const fn state(&self) -> u32 {
        state_of(self.version)
    }

    /// Whether this end is the client's.
    #[inline(always)]
    pub const fn is_client(&self, addr: &Addr, port: Port) -> bool {
        self.client_port.0 == port.0 && self.client.same(addr)
    }

    /// Whether this end is the backend's.
    #[inline(always)]
    pub const fn is_backend(&self, addr: &Addr, port: Port) -> bool {
        self.backend_port.0 == port.0 && self.backend.same(addr)
    }

    /// Whether this end is the frontend's.
    #[inline(always)]
    pub const fn is_vip(&self, addr: &Addr, port: Port) -> bool {
        self.vip_port.0 == port.0 && self.vip.same(addr)
    }

    /// Whether the backend has answered.
    #[inline(always)]
    pub const fn is_answered(&self) -> bool {
        self.backend_sent & sent::ANY != 0
    }

    /// Whether the client has gone on after the backend's first answer. A handshake that stops there, or a question that was
    /// answered, proves nothing: anybody can send one in another's name.
    #[inline(always)]
    pub const fn is_settled(&self) -> bool {
        self.client_sent & sent::AGAIN != 0
    }

    /// Whether no more data is to come: reset, or closed by both.
    #[inline(always)]
    pub const fn is_closed(&self) -> bool {
        (self.client_sent | self.backend_sent) & sent::RST != 0 || self.client_sent & self.backend_sent & sent::FIN != 0
    }

    /// How long the flow is kept without a packet.
    #[inline(always)]
    pub const fn idle_limit_ns(&self) -> u64 {
        if self.proto == UDP {
            if self.is_settled() {
                DATAGRAM_NS
            } else {
                DATAGRAM_ONCE_NS
            }
        } else if self.is_closed() {
            CLOSED_NS
        } else if !self.is_settled() {
            UNANSWERED_NS
        } else if (self.client_sent | self.backend_sent) & sent::FIN != 0 {
            HALF_CLOSED_NS
        } else {
            ESTABLISHED_NS
        }
    }

    /// Whether its slot and its source port may be given to another.
    #[inline(always)]
    pub const fn is_expired(&self, now_ns: u64) -> bool {
        self.idle_ns(now_ns) > self.idle_limit_ns()
    }

    /// Whether its slot and its source port may be given to another where no other is free: it has ended, or was never settled.
    #[inline(always)]
    pub const fn is_evictable(&self, now_ns: u64) -> bool {
        (self.is_closed() || !self.is_settled()) && self.idle_ns(now_ns) > EVICTABLE_NS
    }

    /// How long no packet was seen. A clock that has gone back since gives 0.
    #[inline(always)]
    pub const fn idle_ns(&self, now_ns: u64) -> u64 {
        now_ns.saturating_sub(self.seen_ns)
    }

    /// Whether the connection is open, as far as anybody can tell: a SYN on it is a mistake or a forgery, and its backend will say so.
    #[inline(always)]
    pub const fn is_open(&self) -> bool {
        self.is_settled() && (self.client_sent | self.backend_sent) & (sent::FIN | sent::RST) == 0
    }

    /// Whether a SYN is the repetition of the one that began this flow, and may go where that went: nothing has answered yet,
    /// or the answer was lost. Any other SYN is a new connection.
    #[inline(always)]
    pub const fn repeats(&self, isn: u32) -> bool {
        self.flags & flag::RESUMED == 0
            && self.isn == isn
            && (self.client_sent | self.backend_sent) & (sent::FIN | sent::RST) == 0
    }

    /// Notes a packet of the client.
    #[inline(always)]
    pub const fn note_client(&mut self, tcp_flags: u8) -> Event {
        let before = self.client_sent;
        let mut after = sent_after(before, self.proto, tcp_flags);
        if self.is_answered() && !(self.proto == TCP && is_syn(tcp_flags)) {
            after |= sent::AGAIN;
        }
        if after == before {
            return Event::Nothing;
        }
        let was_closed = self.is_closed();
        self.client_sent = after;
        if was_closed || !self.is_closed() {
            return Event::Nothing;
        }
        Event::Ended(if self.is_answered() {
            outcome::ESTABLISHED
        } else {
            outcome::ABANDONED
        })
    }

    /// Notes a packet of the backend, or of its host.
    #[inline(always)]
    pub const fn note_backend(&mut self, tcp_flags: u8, now_ns: u64) -> Event {
        let before = self.backend_sent;
        let was_answered = self.is_answered();
        let is_resumed = self.flags & flag::RESUMED != 0;
        // What answers a SYN otherwise is a backend that remembers another connection on these ports.
        if self.proto == TCP && !was_answered && !is_resumed && !is_answer(tcp_flags) {
            return Event::Nothing;
        }
        let after = sent_after(before, self.proto, tcp_flags);
        if after == before {
            return Event::Nothing;
        }
        let was_closed = self.is_closed();
        self.backend_sent = after;
        if was_closed {
            return Event::Nothing;
        }
        if !was_answered && !is_resumed {
            if self.proto == TCP && tcp_flags & tcp_flag::RST != 0 {
                return Event::Ended(outcome::REFUSED);
            }
            if self.is_closed() {
                // Both sides close without a word: no handshake looks like that.
                return Event::Ended(outcome::OTHER);
            }
            self.established_ns = now_ns;
            return Event::Established;
        }
        if !self.is_closed() {
            return Event::Nothing;
        }
        Event::Ended(outcome::ESTABLISHED)
    }

    /// How a flow ended that nobody ended: it fell silent.
    #[inline(always)]
    pub const fn outcome_of_silence(&self) -> u8 {
        if self.is_answered() {
            outcome::ESTABLISHED
        } else {
            outcome::TIMED_OUT
        }
    }
}

/// What an end has sent after a packet: whoever sends on after an RST has not sent it, somebody else has.
#[inline(always)]
const fn sent_after(before: u8, proto: u8, tcp_flags: u8) -> u8 {
    let mut after = before | sent::ANY;
    if proto != TCP {
        return after;
    }
    if tcp_flags & tcp_flag::FIN != 0 {
        after |= sent::FIN;
    }
    if tcp_flags & tcp_flag::RST != 0 {
        after | sent::RST
    } else {
        after & !sent::RST
    }
}

/// Whether a TCP packet answers a SYN: SYN and ACK, or RST.
#[inline(always)]
const fn is_answer(tcp_flags: u8) -> bool {
    let both = tcp_flag::SYN | tcp_flag::ACK;
    tcp_flags & both == both || tcp_flags & tcp_flag::RST != 0
}

/// The slot that is looked at for a new flow: `turn` is how often slots were looked at before, ever.
#[inline(always)]
pub const fn slot_at(turn: u64, look: u32, slots: u32) -> u32 {
    let at = if look < LOOKS_IN_A_ROW { turn } else { hash::mix(turn) };
    (at % slots as u64) as u32
}

/// Whether a TCP packet begins a connection: SYN, and neither ACK nor RST.
#[inline(always)]
pub const fn is_syn(tcp_flags: u8) -> bool {
    tcp_flags & (tcp_flag::SYN | tcp_flag::ACK | tcp_flag::RST) == tcp_flag::SYN
}

/// What the packet programs must know of the node.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// What is added to the monotonic clock to give the flow clock, in nanoseconds: 0 but in tests, which let time pass by it.
    pub clock_offset_ns: u64,
    /// Slots of the flow table, as it is in the kernel.
    pub flow_slots: u32,
    /// The first port of the node's own sources, host order.
    pub first_port: u16,
    /// The last port of the node's own sources, host order.
    pub last_port: u16,
}
shared_layout!(Settings, size 16, align 8);

/// The default range of the node's own sources: below the node ports and the ephemeral ports.
pub const FIRST_PORT: u16 = 10_000;
/// The end of the default range.
pub const LAST_PORT: u16 = 29_999;

/// An interface where packets are translated.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Interface {
    /// The IPv4 address that the node sends from there, IPv4-mapped; zero if there is none.
    pub v4: Addr,
    /// The IPv6 address that the node sends from there; zero if there is none.
    pub v6: Addr,
    /// One of [`side`].
    pub side: u32,
    /// Always 0.
    pub pad: u32,
}
shared_layout!(Interface, size 40, align 4);

/// Values of [`Interface::side`].
pub mod side {
    /// The world outside the node lies behind it.
    pub const UPLINK: u32 = 0;
    /// A guest with its own kernel lies behind it: a client of this node, whose sockets nobody sees.
    pub const GUEST: u32 = 1;
}

/// Which datagram a fragment belongs to.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct FragmentKey {
    /// Source address.
    pub src: Addr,
    /// Destination address.
    pub dst: Addr,
    /// The identification, as it lies in the packet (16 bits in IPv4, 32 in IPv6).
    pub id: u32,
    /// [`TCP`] or [`UDP`].
    pub proto: u8,
    /// Always 0.
    pub pad: [u8; 3],
}
shared_layout!(FragmentKey, size 40, align 4);

/// The ports that the first fragment had.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FragmentPorts {
    /// Source port, network order.
    pub src_port: Port,
    /// Destination port, network order.
    pub dst_port: Port,
}
shared_layout!(FragmentPorts, size 4, align 2);

#[cfg(test)]
mod tests;
