//! Broken packets: the seeds that the fuzzer begins with, how it breaks them, and the parser under fuzz.
//!
//! Everything follows from a seed, so that what was found is found again.

mod run;

use std::{
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use lb_common::packet::{self as native, fragment, kind};

use super::{Dice, Difference, Kind, Parsed, Place, Town, ethernet, inside};
use crate::packet::{self, Packet, flags, hex, tell, wire};

pub use run::main;

/// Where the seeds lie as files; whoever finds a packet that was misread adds it there.
pub fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus")
}

/// The seeds that are built, by name: one of every form that the parser knows.
pub fn built(towns: &[Town; 2]) -> Vec<(String, Vec<u8>)> {
    let mut seeds = Vec::new();
    for (town, family) in towns.iter().zip(["v4", "v6"]) {
        for (name, packet) in forms(town) {
            seeds.push((format!("{family}-{name}"), packet.bytes()));
        }
    }
    seeds
}

fn forms(town: &Town) -> Vec<(&'static str, Packet)> {
    let (client, web, dns) = (town.clients[0], town.frontends[1].0, town.frontends[7].0);
    let backend = town.endpoint(1, 0, false);
    let v6 = client.is_ipv6();
    let syn = packet::tcp(client, web, flags::SYN).tcp_options(&[2, 4, 5, 180, 4, 2, 1, 3, 3, 7]);
    let data = packet::tcp(client, web, flags::PSH | flags::ACK).payload(b"GET / HTTP/1.1");
    let question = packet::udp(client, dns, b"question");
    let answer = packet::tcp(backend, client, flags::SYN | flags::ACK);
    let headers = |packet: Packet| {
        if v6 {
            packet
                .extension(wire::HOP_BY_HOP, &[5, 2, 0, 0])
                .extension(wire::ROUTING, &[0; 14])
                .extension(wire::DESTINATION, &[1; 6])
        } else {
            packet.options(&[7, 7, 4, 0, 0, 0, 0, 1])
        }
    };
    let kinds: [(&str, (u8, u8, u32)); 4] = if v6 {
        [
            ("too-big", (2, 0, 1_400)),
            ("unreachable", (1, 4, 0)),
            ("exceeded", (3, 0, 0)),
            ("parameter", (4, 0, 6)),
        ]
    } else {
        [
            ("too-big", (3, 4, 1_400)),
            ("unreachable", (3, 3, 0)),
            ("exceeded", (11, 0, 0)),
            ("parameter", (12, 0, 9)),
        ]
    };
    let mut forms = vec![
        ("tcp-syn", syn.clone()),
        ("tcp-data", data.clone()),
        ("tcp-answer", answer),
        ("tcp-reset", packet::tcp(client, web, flags::RST)),
        ("tcp-vlan", data.clone().vlan(7)),
        ("tcp-two-vlans", data.clone().vlan(7).vlan(8)),
        ("tcp-headers", headers(data.clone())),
        ("udp", question.clone()),
        ("udp-unsummed", question.clone().unsummed()),
        ("udp-headers-vlan", headers(question.clone()).vlan(9)),
        ("udp-padded", packet::udp(client, dns, b"").trailer(&[0; 18])),
        ("fragment-first", packet::fragments(&data, 77, 24).swap_remove(0)),
        ("fragment-later", packet::fragments(&data, 77, 24).swap_remove(1)),
        (
            "fragment-headers",
            headers(packet::fragments(&question, 78, 8).swap_remove(0)),
        ),
        (
            "echo",
            packet::error(client.ip(), web.ip(), if v6 { (128, 0, 1) } else { (8, 0, 1) }, &syn, 0),
        ),
    ];
    for (name, kind) in kinds {
        forms.push((name, packet::error(town.router, client.ip(), kind, &data, 1_000)));
    }
    let cut = packet::error(town.router, web.ip(), kinds[0].1, &question, if v6 { 48 } else { 28 });
    forms.push(("error-cut", cut));
    forms.push((
        "error-headers",
        headers(packet::error(
            town.router,
            client.ip(),
            kinds[1].1,
            &headers(data),
            1_000,
        )),
    ));
    let mut other = syn;
    other.body = packet::Body::Raw(132, vec![0; 32]);
    forms.push(("sctp", other));
    forms
}

/// All seeds: those that are built, and what else lies in the folder, where there is one.
pub fn seeds(towns: &[Town; 2]) -> Vec<Vec<u8>> {
    let mut seeds: Vec<Vec<u8>> = built(towns).into_iter().map(|(_, bytes)| bytes).collect();
    let mut found: Vec<PathBuf> = fs::read_dir(folder())
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .collect();
    found.sort();
    for path in found {
        if let Ok(bytes) = fs::read(path)
            && bytes.len() >= wire::ETHERNET
            && !seeds.contains(&bytes)
        {
            seeds.push(bytes);
        }
    }
    seeds
}

/// Compares the files with what is built, or writes them where `bless` is set.
///
/// # Errors
/// Where a file is missing or another.
pub fn compare_files(bless: bool) -> Result<()> {
    let folder = folder();
    if bless {
        fs::create_dir_all(&folder).context("make the folder of seeds")?;
    }
    for (name, bytes) in built(&[Town::of(false), Town::of(true)]) {
        let path = folder.join(name + ".bin");
        if bless {
            fs::write(&path, &bytes).with_context(|| path.display().to_string())?;
        } else {
            let found =
                fs::read(&path).with_context(|| format!("{}: `cargo xtask bless` writes it", path.display()))?;
            ensure!(
                found == bytes,
                "{} is not what is built: {}",
                path.display(),
                tell(&found, false)
            );
        }
    }
    Ok(())
}

/// Breaks a packet somehow; a link header's length is left of it.
pub fn mangle(dice: &mut Dice, bytes: &mut Vec<u8>) {
    for _ in 0..=dice.below(3) {
        if bytes.len() <= wire::ETHERNET {
            return;
        }
        let at = dice.below(bytes.len());
        match dice.below(8) {
            0 => bytes[at] ^= 1 << dice.below(8),
            1 => bytes[at] = *dice.pick(&[0, 1, 4, 5, 6, 0x40, 0x45, 0x60, 0x7f, 0x80, 0xff]),
            2 => bytes.truncate(at.max(wire::ETHERNET)),
            3 => {
                let more = dice.below(40);
                bytes.resize(bytes.len() + more, dice.roll() as u8);
            }
            4 => {
                // One part of it over another.
                let from = dice.below(bytes.len());
                let length = (1 + dice.below(24)).min(bytes.len() - from.max(at));
                bytes.copy_within(from..from + length, at);
            }
            5 => {
                // A field of its headers gets a value at an edge.
                let field = *dice.pick(&[
                    12usize, 13, 14, 15, 16, 17, 18, 20, 21, 23, 24, 34, 38, 46, 47, 54, 55, 58,
                ]);
                if let Some(byte) = bytes.get_mut(field) {
                    let edge = [
                        0u8, 1, 2, 6, 8, 17, 44, 58, 60, 0x1f, 0x20, 0x45, 0x4f, 0x60, 0x81, 0xdd, 0xff,
                    ];
                    *byte = *dice.pick(&edge);
                }
            }
            6 => {
                let length = dice.below(9);
                let new: Vec<u8> = (0..length).map(|_| dice.roll() as u8).collect();
                bytes.splice(at..at, new);
            }
            _ => {
                let end = (at + dice.below(9)).min(bytes.len());
                bytes.drain(at.max(wire::ETHERNET).min(end)..end);
            }
        }
    }
}

/// Puts the end of another packet behind the beginning of this one.
pub fn splice(dice: &mut Dice, bytes: &mut Vec<u8>, other: &[u8]) {
    let at = dice.below(bytes.len().min(other.len()));
    bytes.truncate(at.max(wire::ETHERNET));
    bytes.extend(other.get(bytes.len()..).unwrap_or_default());
}

/// Compares the parser with the model's on so many broken packets of a seed; returns how many were of each kind of
/// [`lb_common::packet::kind`].
///
/// # Errors
/// A [`Difference`].
pub fn parser(seed: u64, count: u64) -> Result<[u64; 4]> {
    let seeds = seeds(&[Town::of(false), Town::of(true)]);
    let mut dice = Dice::new(seed);
    let mut kinds = [0; 4];
    for _ in 0..count {
        let mut bytes = dice.pick(&seeds).clone();
        if dice.once_in(6) {
            let other = dice.pick(&seeds);
            splice(&mut dice, &mut bytes, other);
        }
        mangle(&mut dice, &mut bytes);
        let read = compare_parsers(&bytes)
            .map_err(|why| Difference(format!("{why}\n{}{}", tell(&bytes, false), hex(&bytes))))?;
        kinds[usize::from(read)] += 1;
    }
    Ok(kinds)
}

/// Reads a packet by both parsers; returns its kind.
fn compare_parsers(bytes: &[u8]) -> Result<u8, String> {
    let protocol = u16::from_ne_bytes([bytes[12], bytes[13]]);
    let mut found = native::Packet::default();
    native::read(&bytes, native::ETHERNET, protocol, &mut found);
    let wanted = ethernet(bytes);
    compare_parsed(&found, &wanted)?;
    if found.kind == kind::ERROR {
        let mut found_inside = native::Packet::default();
        native::read_inside(&bytes, &found, &mut found_inside);
        compare_parsed(&found_inside, &inside(bytes, &wanted))?;
    }
    Ok(found.kind)
}

fn compare_parsed(found: &native::Packet, wanted: &Parsed) -> Result<(), String> {
    let kind_of = match found.kind {
        kind::FOREIGN => Kind::Foreign,
        kind::MALFORMED => Kind::Malformed,
        kind::TRANSPORT => Kind::Transport,
        kind::ERROR => Kind::Error,
        other => return Err(format!("no such kind: {other}")),
    };
    let place = match found.fragment {
        fragment::WHOLE => Place::Whole,
        fragment::FIRST => Place::First,
        fragment::LATER => Place::Later,
        other => return Err(format!("no such place: {other}")),
    };
    let as_wanted = kind_of == wanted.kind
        && (matches!(kind_of, Kind::Foreign | Kind::Malformed)
            || (IpAddr::from(found.src), IpAddr::from(found.dst)) == (wanted.src, wanted.dst)
                && found.is_v6 == wanted.src.is_ipv6()
                && found.proto == wanted.proto
                && (found.network as usize, found.transport as usize) == (wanted.ip, wanted.body)
                && place == wanted.place
                && (kind_of == Kind::Error
                    || (found.src_port.get(), found.dst_port.get()) == (wanted.src_port, wanted.dst_port)
                        && found.tcp_flags == wanted.flags
                        && u32::from_be(found.sequence) == wanted.seq));
    if as_wanted {
        Ok(())
    } else {
        Err(format!("  model {wanted:?}\n parser {found:?}"))
    }
}
