//! The packet that a program looks at, and the tuple that it asks for, in memory of this processor.
//!
//! Programs of one processor do not interrupt each other: both hooks run with softirqs off. Kept there and not on the stack,
//! which is small, what was read of a packet is also a plain number to the verifier, whatever way led to it.

use aya_ebpf::bindings::__sk_buff;
use lb_common::{
    addr::{Addr, Port},
    flow::TupleKey,
    frontend::Frontend,
    packet::{self, Packet, fragment, kind},
};

use super::{fragments, skb};
use crate::maps::SIGHT;

/// What a program keeps while it runs.
#[repr(C)]
pub struct Sight {
    packet: Packet,
    /// The packet inside an ICMP error.
    inside: Packet,
    key: TupleKey,
    front: Frontend,
}

/// What [`look`] says of a later fragment whose first one was not seen; else it says one of [`kind`].
pub const ORPHAN: u32 = 0xff;

/// Reads the packet, whose link header has `link` bytes.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn look(skb: *mut __sk_buff, link: u32) -> u32 {
    let Some(sight) = SIGHT.get_ptr_mut(0) else {
        return kind::MALFORMED as u32;
    };
    // SAFETY: this processor's own element.
    let packet = unsafe { &mut (*sight).packet };
    packet::read(&skb::Bytes(skb), link as usize, skb::protocol(skb), packet);
    if packet.kind == kind::TRANSPORT && packet.fragment != fragment::WHOLE && !fragments::complete(packet) {
        return ORPHAN;
    }
    packet.kind as u32
}

/// What was read last.
#[inline(always)]
pub fn packet() -> Option<&'static Packet> {
    // SAFETY: this processor's own element; [`look`] alone writes its packet.
    SIGHT.get_ptr(0).map(|sight| unsafe { &(*sight).packet })
}

/// Reads the packet inside the ICMP error that was read last.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn look_inside(skb: *mut __sk_buff) -> u32 {
    let Some(sight) = SIGHT.get_ptr_mut(0) else {
        return kind::MALFORMED as u32;
    };
    // SAFETY: this processor's own element, of which two parts are used.
    let (outside, inside) = unsafe { (&(*sight).packet, &mut (*sight).inside) };
    packet::read_inside(&skb::Bytes(skb), outside, inside);
    inside.kind as u32
}

/// The packet inside the ICMP error that was read last.
#[inline(always)]
pub fn inside() -> Option<&'static Packet> {
    // SAFETY: this processor's own element; [`look_inside`] alone writes it.
    SIGHT.get_ptr(0).map(|sight| unsafe { &(*sight).inside })
}

/// Makes the key of the packets between two ends, for [`key`].
#[inline(never)]
pub fn aim(a: &Addr, a_port: u32, b: &Addr, b_port: u32, proto: u32) {
    if let Some(sight) = SIGHT.get_ptr_mut(0) {
        let key = TupleKey::between(*a, Port(a_port as u16), *b, Port(b_port as u16), proto as u8);
        // SAFETY: this processor's own element.
        unsafe { (*sight).key = key };
    }
}

/// The key that was made last.
#[inline(always)]
pub fn key() -> Option<&'static TupleKey> {
    // SAFETY: this processor's own element; [`aim`] alone writes its key.
    SIGHT.get_ptr(0).map(|sight| unsafe { &(*sight).key })
}

/// Keeps the frontend that the packet is for.
#[inline(always)]
pub fn keep_front(front: &Frontend) {
    if let Some(sight) = SIGHT.get_ptr_mut(0) {
        // SAFETY: this processor's own element.
        unsafe { (*sight).front = *front };
    }
}

/// The frontend that was kept last.
#[inline(always)]
pub fn front() -> Option<&'static Frontend> {
    // SAFETY: this processor's own element; [`keep_front`] alone writes it.
    SIGHT.get_ptr(0).map(|sight| unsafe { &(*sight).front })
}
