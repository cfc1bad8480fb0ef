//! Changing packets: bytes are replaced, and the checksums over them are made good by the difference (RFC 1624), so that a
//! wrong one stays as wrong as it was.

use std::net::{IpAddr, SocketAddr};

use super::parse::{Parsed, Place};
use crate::packet::{checksum, wire};

/// One end of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// Where it comes from.
    Source,
    /// Where it goes.
    Destination,
}

fn octets(addr: IpAddr) -> Vec<u8> {
    match addr {
        IpAddr::V4(addr) => addr.octets().to_vec(),
        IpAddr::V6(addr) => addr.octets().to_vec(),
    }
}

/// A checksum after the bytes that it covers have changed.
fn adjusted(check: u16, old: &[u8], new: &[u8]) -> u16 {
    let minus: u32 = old
        .chunks(2)
        .map(|pair| u32::from(!(u16::from(pair[0]) << 8 | u16::from(pair[1]))))
        .sum();
    checksum::fold(u32::from(!check) + minus + checksum::sum(new))
}

/// Makes the checksum at a place good for a change.
fn adjust(bytes: &mut [u8], at: usize, old: &[u8], new: &[u8], udp: bool) {
    let check = u16::from_be_bytes([bytes[at], bytes[at + 1]]);
    if udp && check == 0 {
        return;
    }
    let mut check = adjusted(check, old, new);
    if udp && check == 0 {
        check = u16::MAX;
    }
    bytes[at..at + 2].copy_from_slice(&check.to_be_bytes());
}

/// Where an address lies in the IP header at `ip`.
fn address_at(ip: usize, v6: bool, end: End) -> (usize, usize) {
    match (v6, end) {
        (false, End::Source) => (ip + 12, 4),
        (false, End::Destination) => (ip + 16, 4),
        (true, End::Source) => (ip + 8, 16),
        (true, End::Destination) => (ip + 24, 16),
    }
}

/// Replaces an address and keeps the IPv4 header right; returns what changed: old and new.
fn replace(bytes: &mut [u8], ip: usize, end: End, addr: IpAddr) -> (Vec<u8>, Vec<u8>) {
    let (at, length) = address_at(ip, addr.is_ipv6(), end);
    let (old, new) = (bytes[at..at + length].to_vec(), octets(addr));
    if old == new {
        return (old, new);
    }
    bytes[at..at + length].copy_from_slice(&new);
    if addr.is_ipv4() {
        adjust(bytes, ip + 10, &old, &new, false);
    }
    (old, new)
}

/// Puts another end to a packet.
pub(super) fn rewrite(bytes: &mut [u8], packet: &Parsed, end: End, to: SocketAddr) {
    let (old, new) = replace(bytes, packet.ip, end, to.ip());
    if packet.place == Place::Later {
        return;
    }
    let udp = packet.proto == wire::UDP;
    let check = packet.body + if udp { 6 } else { 16 };
    adjust(bytes, check, &old, &new, udp);
    let at = packet.body + if end == End::Source { 0 } else { 2 };
    let (old, new) = (bytes[at..at + 2].to_vec(), to.port().to_be_bytes());
    bytes[at..at + 2].copy_from_slice(&new);
    adjust(bytes, check, &old, &new, udp);
}

/// Puts other ends to the packet inside an error, and to the error itself; true if anything has changed.
pub(super) fn rewrite_error(
    bytes: &mut [u8],
    error: &Parsed,
    inside: &Parsed,
    (src, dst): (SocketAddr, SocketAddr),
    (from, to): (IpAddr, IpAddr),
) -> bool {
    let before = bytes.to_vec();
    for (end, addr) in [(End::Source, src.ip()), (End::Destination, dst.ip())] {
        replace(bytes, inside.ip, end, addr);
    }
    bytes[inside.body..inside.body + 2].copy_from_slice(&src.port().to_be_bytes());
    bytes[inside.body + 2..inside.body + 4].copy_from_slice(&dst.port().to_be_bytes());
    for (end, addr) in [(End::Source, from), (End::Destination, to)] {
        replace(bytes, error.ip, end, addr);
    }
    if before == bytes {
        return false;
    }
    // The message's checksum covers all of it, and in IPv6 the addresses besides. Whoever put back what was there before, say
    // a checksum of the header inside that is minus zero, has changed nothing.
    let covered = if error.src.is_ipv6() {
        error.ip + 8..error.body
    } else {
        error.body..error.body
    };
    let check = error.body + 2;
    let (mut old, mut new) = (before[covered.clone()].to_vec(), bytes[covered].to_vec());
    old.extend(&before[error.body + 4..even(error.body, before.len())]);
    new.extend(&bytes[error.body + 4..even(error.body, before.len())]);
    if old != new {
        adjust(bytes, check, &old, &new, false);
    }
    true
}

/// The end of the last whole pair of bytes from a beginning on: nothing changes in a last odd one.
fn even(from: usize, end: usize) -> usize {
    end - (end - from) % 2
}
