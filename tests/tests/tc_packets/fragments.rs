//! Fragments: the first has the ports, the later ones follow it, and what is put together again is right as a whole.

use anyhow::Result;
use lb_common::{
    abi::{TCP, UDP},
    counter::action::{FRAGMENT_UNKNOWN, MALFORMED, MISS, NEW_FLOW, TRANSLATED},
};
use lb_tests::{
    packet::{self, Packet, flags, fragments},
    plane::Device,
    runner::Body,
    world::Dial,
};

use crate::scene::{Scene, hello};

pub(crate) const CASES: &[(&str, Body)] = &[
    ("a_datagram_in_fragments_is_translated_both_ways", both_ways),
    ("a_segment_in_fragments_is_translated", segments),
    ("a_later_fragment_without_its_first_passes_and_is_counted", unknown),
    ("fragments_of_two_datagrams_are_told_apart", apart),
    ("a_packet_with_a_fragment_header_alone_is_whole", atomic),
    ("a_first_fragment_without_a_whole_header_is_left_alone", tiny),
    ("fragments_of_strangers_pass_untouched", strangers),
];

/// What fragments become when they are put together.
fn together(parts: &[Vec<u8>]) -> Vec<u8> {
    let mut body = Vec::new();
    for part in parts {
        let layers = packet::layers(part, false).expect("whole");
        let place = layers.fragment.expect("a fragment");
        assert_eq!(usize::from(place.offset) * 8, body.len());
        body.extend(&part[layers.body..layers.end]);
    }
    body
}

fn long(n: u16) -> Vec<u8> {
    (0..3_000u16).map(|i| (i ^ n) as u8).collect()
}

fn both_ways(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let dns = s.serve(2, UDP, 1)?;
    let (client, vip, backend) = (s.client(1), dns.external, dns.backends[0].1);
    let there = packet::udp(client, vip, &long(1)).divisible();
    let wanted = there.clone().to(backend);
    let mut seen = Vec::new();
    for (i, (part, wanted)) in fragments(&there, 77, 1_000)
        .iter()
        .zip(fragments(&wanted, 77, 1_000))
        .enumerate()
    {
        let step = s.comes(Device::Uplink, part);
        seen.push(step.out.clone());
        step.becomes(&wanted, if i == 0 { &[NEW_FLOW, TRANSLATED] } else { &[TRANSLATED] });
    }
    assert_eq!(seen.len(), 4);
    assert_eq!(together(&seen), wanted.body_bytes());
    let back = packet::udp(backend, client, &long(2)).divisible();
    let wanted = back.clone().from(vip);
    let mut seen = Vec::new();
    for (part, wanted) in fragments(&back, 78, 1_480).iter().zip(fragments(&wanted, 78, 1_480)) {
        let step = s.leaves(Device::Uplink, part);
        seen.push(step.out.clone());
        step.becomes(&wanted, &[TRANSLATED]);
    }
    assert_eq!(together(&seen), wanted.body_bytes());
    // With the node's own source as well.
    let forward = packet::udp(client, backend, &long(3)).divisible();
    let mut parts = Vec::new();
    for part in fragments(&forward, 79, 1_480) {
        parts.push(s.leaves(Device::Uplink, &part).passed(&[TRANSLATED]));
    }
    let port = packet::ports(&parts[0]).expect("ports").0;
    let wanted = forward.from((s.node(Device::Uplink), port).into());
    assert_eq!(together(&parts), wanted.body_bytes());
    assert!(
        parts
            .iter()
            .all(|part| packet::layers(part, false).expect("whole").src == wanted.src)
    );
    Ok(())
}

fn segments(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 1)?;
    let (client, vip) = (s.client(1), web.external);
    let backend = s.open(client, vip);
    let there = packet::tcp(client, vip, flags::ACK).payload(&long(1)).divisible();
    let wanted = there.clone().to(backend);
    let mut seen = Vec::new();
    for (part, wanted) in fragments(&there, 77, 1_000).iter().zip(fragments(&wanted, 77, 1_000)) {
        let step = s.comes(Device::Uplink, part);
        seen.push(step.out.clone());
        step.becomes(&wanted, &[TRANSLATED]);
    }
    assert_eq!(together(&seen), wanted.body_bytes());
    Ok(())
}

fn unknown(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let dns = s.serve(2, UDP, 1)?;
    let (client, vip) = (s.client(1), dns.external);
    let parts = fragments(&packet::udp(client, vip, &long(1)), 5, 1_000);
    // The last comes first.
    s.comes(Device::Uplink, &parts[3]).untouched(&[FRAGMENT_UNKNOWN]);
    s.leaves(Device::Uplink, &parts[3]).untouched(&[FRAGMENT_UNKNOWN]);
    let backend = dns.backends[0].1;
    let wanted = fragments(&packet::udp(client, backend, &long(1)), 5, 1_000);
    s.comes(Device::Uplink, &parts[0]).passed(&[NEW_FLOW, TRANSLATED]);
    let late = wanted[3].clone();
    s.comes(Device::Uplink, &parts[3]).becomes(&late, &[TRANSLATED]);
    Ok(())
}

fn apart(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let dns = s.serve(2, UDP, 1)?;
    let web = s.serve(1, TCP, 1)?;
    let client = s.client(1);
    let (vip, backend) = (dns.external, dns.backends[0].1);
    // Another identification, another sender, another protocol: nobody's first fragment was seen.
    let parts = fragments(&packet::udp(client, vip, &long(1)), 5, 1_000);
    s.comes(Device::Uplink, &parts[0]).passed(&[NEW_FLOW, TRANSLATED]);
    let rest = parts[1].clone();
    for other in [
        fragments(&packet::udp(client, vip, &long(1)), 6, 1_000)[1].clone(),
        rest.clone().addresses(s.client(2).ip(), vip.ip()),
        rest.clone().addresses(client.ip(), web.external.ip()),
        fragments(&packet::tcp(client, vip, flags::ACK).payload(&long(1)), 5, 1_000)[1].clone(),
    ] {
        s.comes(Device::Uplink, &other).untouched(&[FRAGMENT_UNKNOWN]);
    }
    s.comes(Device::Uplink, &rest)
        .becomes(&rest.clone().addresses(client.ip(), backend.ip()), &[TRANSLATED]);
    Ok(())
}

fn atomic(dial: Dial) -> Result<()> {
    if dial != Dial::V6 {
        return Ok(());
    }
    let mut s = Scene::new(dial)?;
    for (id, proto) in [(1, TCP), (2, UDP)] {
        let web = s.serve(id, proto, 1)?;
        let first = hello(s.client(id), web.external, proto).fragment(9, 0, false);
        s.comes(Device::Uplink, &first)
            .becomes(&first.clone().to(web.backends[0].1), &[NEW_FLOW, TRANSLATED]);
    }
    assert!(s.plane.fragments()?.is_empty(), "nothing more is to come");
    Ok(())
}

fn tiny(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 1)?;
    let parts = fragments(&hello(s.client(1), web.external, TCP), 5, 8);
    s.comes(Device::Uplink, &parts[0]).untouched(&[MALFORMED]);
    s.comes(Device::Uplink, &parts[1]).untouched(&[FRAGMENT_UNKNOWN]);
    assert!(s.plane.tuples()?.is_empty());
    Ok(())
}

fn strangers(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    s.serve(2, UDP, 1)?;
    let parts: Vec<Packet> = fragments(&packet::udp(s.client(1), s.client(2), &long(1)), 5, 1_000);
    for part in &parts {
        s.comes(Device::Uplink, part).untouched(&[MISS]);
        s.leaves(Device::Uplink, part).untouched(&[MISS]);
    }
    Ok(())
}
