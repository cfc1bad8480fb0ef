use std::net::{IpAddr, SocketAddr};

use super::*;
use crate::packet::{Packet, error, flags, fragments, tcp, udp};

fn end(text: &str) -> SocketAddr {
    text.parse().expect("an address")
}

fn v4() -> Packet {
    tcp(end("198.51.100.7:40000"), end("203.0.113.1:80"), flags::SYN).tcp_options(&[2, 4, 5, 180])
}

fn v6() -> Packet {
    udp(end("[2001:db8::7]:40000"), end("[2001:db8:1::1]:53"), b"question")
}

#[test]
fn what_is_built_is_read() {
    let packet = v4().options(&[1, 1, 1, 0]).tos(0x2e).vlan(7).vlan(8);
    let bytes = packet.bytes();
    let layers = layers(&bytes, false).expect("whole");
    assert_eq!((layers.tags, layers.ip, layers.body), (2, 22, 46));
    assert_eq!((layers.src, layers.dst), (packet.src, packet.dst));
    assert_eq!(
        (layers.proto, layers.tos, layers.ttl, layers.end),
        (6, 0x2e, 64, bytes.len())
    );
    assert_eq!(layers.fragment, None);
    assert_eq!(check(&bytes, false), []);
}

#[test]
fn extension_headers_are_walked() {
    let packet = v6()
        .extension(wire::HOP_BY_HOP, &[5, 2, 0, 0])
        .extension(wire::ROUTING, &[0; 14])
        .extension(wire::DESTINATION, &[]);
    let bytes = packet.bytes();
    let layers = layers(&bytes, false).expect("whole");
    assert_eq!((layers.extensions, layers.proto), (3, wire::UDP));
    assert_eq!(layers.body, 14 + 40 + 8 + 16 + 8);
    assert_eq!(check(&bytes, false), []);
}

#[test]
fn every_wrong_checksum_is_found() {
    let wrong = |packet: &Packet| -> Vec<_> { check(&packet.bytes(), false).iter().map(|f| f.what).collect() };
    assert_eq!(wrong(&v4().wrong_header(1)), ["IPv4 header"]);
    assert_eq!(wrong(&v4().wrong_body(256)), ["TCP"]);
    assert_eq!(wrong(&v6().wrong_body(1)), ["UDP"]);
    let far: IpAddr = "192.0.2.9".parse().expect("an address");
    let about = v4().wrong_header(7).wrong_body(9);
    let message = error(far, about.src, (3, 4, 1_400), &about, 500);
    assert_eq!(wrong(&message), ["inner IPv4 header", "inner TCP"]);
    assert_eq!(
        wrong(&message.wrong_body(1)),
        ["ICMP", "inner IPv4 header", "inner TCP"]
    );
}

#[test]
fn udp_without_a_checksum_is_right_in_ipv4_alone() {
    let four = udp(end("198.51.100.7:40000"), end("203.0.113.1:53"), b"?").unsummed();
    assert_eq!(check(&four.bytes(), false), []);
    assert_eq!(check(&v6().unsummed().bytes(), false).len(), 1);
}

#[test]
fn fragments_make_up_the_whole() {
    for packet in [v4().payload(&[7; 50]), v6().payload(&[7; 50])] {
        let whole = packet.body_bytes();
        let parts = fragments(&packet, 77, 24);
        assert_eq!(parts.len(), whole.len().div_ceil(24));
        let mut joined: Vec<u8> = Vec::new();
        for (i, part) in parts.iter().enumerate() {
            let bytes = part.bytes();
            let layers = layers(&bytes, false).expect("whole");
            let place = layers.fragment.expect("a fragment");
            assert_eq!((place.id, usize::from(place.offset) * 8), (77, joined.len()));
            assert_eq!(place.more, i + 1 < parts.len());
            assert_eq!(check(&bytes, false), []);
            joined.extend(&bytes[layers.body..layers.end]);
        }
        assert_eq!(joined, whole);
    }
}

#[test]
fn a_packet_is_told_where_it_ends() {
    let whole = v6().extension(wire::HOP_BY_HOP, &[]).vlan(3);
    for length in 0..whole.bytes().len() {
        let read = layers(&whole.cut(length), false);
        // The body begins behind 14 bytes of Ethernet, 4 of the tag, 40 of IPv6 and 8 of options.
        assert_eq!(read.is_ok(), length >= 60, "{length}: {read:?}");
    }
}

#[test]
fn only_checksums_have_two_zeros() {
    let (one, other) = (v4(), v4().seq(2_000));
    assert!(same(&one.bytes(), &one.bytes(), false));
    assert!(!same(&one.bytes(), &other.bytes(), false));
    let mut zero = one.bytes();
    zero[14 + 10..14 + 12].copy_from_slice(&[0, 0]);
    let mut minus = zero.clone();
    minus[14 + 10..14 + 12].copy_from_slice(&[255, 255]);
    assert!(same(&zero, &minus, false));
    minus[14 + 4..14 + 6].copy_from_slice(&[255, 255]);
    assert!(!same(&zero, &minus, false));
}
