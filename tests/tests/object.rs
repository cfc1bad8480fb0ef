//! The built kernel object against what the agent believes of it: layouts of every shared struct, maps, programs, and
//! no way to a panic.

use std::{collections::BTreeSet, mem::offset_of};

use anyhow::{Context, Result, ensure};
use lb_common::{
    addr::Addr,
    affinity::{Affinity, AffinityKey, Membership},
    backend::{Backend, BackendCounters, EndpointKey, ServiceCounters, Tally},
    event::ConnRecord,
    frontend::{Frontend, FrontendKey},
    maps,
    set::ListEntry,
    socket::{ChainHead, Passage, Reverse, ReverseKey, SocketState},
};
use lb_user::datapath::{
    btf,
    load::{FOLLOWING, OBJECT, PACKET, REWRITING},
};

/// A struct as this crate's compiler lays it out.
struct Layout {
    name: &'static str,
    size: usize,
    members: Vec<(&'static str, usize)>,
}

macro_rules! layouts {
    ($($type:ident { $($member:ident),+ $(,)? })+) => {
        vec![$(Layout {
            name: stringify!($type),
            size: size_of::<$type>(),
            members: vec![$((stringify!($member), offset_of!($type, $member))),+],
        }),+]
    };
}

/// All but [`lb_common::event::PacketRecord`]: BTF has the types that maps reach, and the ring buffer's is one only. Its
/// bytes are compared where packets are observed.
fn layouts() -> Vec<Layout> {
    layouts! {
        Addr { words }
        FrontendKey { addr, port, proto, pad }
        Frontend { service_id, set_id, flags, affinity_seconds }
        Backend { addr, port, proto, state, service_id, pad }
        BackendCounters { connects, established, failed, closed, direct }
        EndpointKey { addr, port, proto, pad, service_id }
        Tally { connects, established, failed, closed }
        Passage { syn_ns, service_id, backend_id, ending, pad }
        ServiceCounters { connects, rejected, established, closed, failed, attributed, direct }
        ListEntry { a, b, c }
        AffinityKey { client, set_id, origin }
        Affinity { backend_id, pad, last_ns }
        Membership { set_id, backend_id }
        SocketState {
            vip, client, start_ns, established_ns, service_id, backend_id, vip_port, client_port, proto, phase, marks,
        }
        ReverseKey { cookie, addr, port, pad }
        Reverse { vip, next_addr, vip_port, next_port, backend_id }
        ChainHead { addr, port, pad, length }
        ConnRecord {
            kind, errno, start_ns, established_ns, end_ns, netns_cookie, client, vip, service_id, backend_id,
            client_port, vip_port, proto, outcome, pad,
        }
    }
}

#[test]
fn shared_layouts_equal_those_of_the_built_object() -> Result<()> {
    let elf = Elf::read(OBJECT)?;
    let data = elf.section(".BTF").context("the object has no .BTF")?;
    let wanted = layouts();
    let found = btf::structs(data, |name| wanted.iter().any(|layout| layout.name == name))?;
    for layout in &wanted {
        let built = found
            .get(layout.name)
            .with_context(|| format!("the object knows no struct {}", layout.name))?;
        assert_eq!(built.size as usize, layout.size, "size of {}", layout.name);
        let members: Vec<(&str, usize)> = built
            .members
            .iter()
            .map(|member| (member.name.as_str(), member.offset as usize))
            .collect();
        assert_eq!(members, layout.members, "members of {}", layout.name);
    }
    Ok(())
}

#[test]
fn the_object_has_the_programs_and_maps_that_the_agent_names() -> Result<()> {
    let elf = Elf::read(OBJECT)?;
    let functions: BTreeSet<&str> = elf.symbols(FUNCTION)?.into_iter().collect();
    for program in REWRITING.iter().chain(&FOLLOWING).chain(&PACKET) {
        ensure!(functions.contains(program), "no program {program}");
    }
    let objects: BTreeSet<&str> = elf.symbols(DATA)?.into_iter().collect();
    let all = maps::STATE_MAPS.iter().chain(&maps::SOCKET_MAPS);
    for name in all.chain(&maps::PASSING_MAPS) {
        ensure!(objects.contains(name), "no map {name}");
    }
    for name in [maps::FEATURES, maps::SK_ERR_OFFSET] {
        ensure!(objects.contains(name), "no global {name}");
    }
    Ok(())
}

/// A panic path that is left in is a function beside the programs (the handler, `core::panicking`), which loops.
#[test]
fn the_object_has_no_way_to_a_panic() -> Result<()> {
    let elf = Elf::read(OBJECT)?;
    let known: BTreeSet<&str> = REWRITING
        .into_iter()
        .chain(FOLLOWING)
        .chain(PACKET)
        // What the compiler calls for copies; loops with bounds.
        .chain(["memcpy", "memmove", "memset"])
        .collect();
    let foreign: Vec<&str> = elf
        .symbols(FUNCTION)?
        .into_iter()
        // A function of our own crate that was not inlined is no panic path by itself.
        .filter(|name| !known.contains(name) && !name.contains("7lb_ebpf"))
        .collect();
    ensure!(foreign.is_empty(), "functions that nobody expects: {foreign:?}");
    let panics: Vec<&str> = [FUNCTION, DATA, UNTYPED]
        .into_iter()
        .map(|kind| elf.symbols(kind))
        .collect::<Result<Vec<_>>>()?
        .into_iter()
        .flatten()
        .filter(|name| name.contains("panic") || name.contains("unwind"))
        .collect();
    ensure!(panics.is_empty(), "{panics:?}");
    Ok(())
}

const UNTYPED: u8 = 0;
const DATA: u8 = 1;
const FUNCTION: u8 = 2;

/// Just enough of a 64-bit little-endian ELF file: its sections and its symbols.
struct Elf<'a> {
    file: &'a [u8],
    sections: Vec<Section<'a>>,
}

struct Section<'a> {
    name: &'a str,
    data: &'a [u8],
}

impl<'a> Elf<'a> {
    fn read(file: &'a [u8]) -> Result<Self> {
        ensure!(
            file.starts_with(b"\x7fELF\x02\x01"),
            "the object is no 64-bit little-endian ELF file"
        );
        let headers = number::<8>(file, 0x28)? as usize;
        let (size, count) = (number::<2>(file, 0x3a)? as usize, number::<2>(file, 0x3c)? as usize);
        let names_index = number::<2>(file, 0x3e)? as usize;
        let bounds = |index: usize| -> Result<(usize, usize)> {
            let at = headers + index * size;
            Ok((
                number::<8>(file, at + 0x18)? as usize,
                number::<8>(file, at + 0x20)? as usize,
            ))
        };
        let slice = |index| -> Result<&'a [u8]> {
            let (at, len) = bounds(index)?;
            // A section without content has an offset all the same.
            Ok(file.get(at..at + len).unwrap_or_default())
        };
        let names = slice(names_index)?;
        let mut sections = Vec::new();
        for index in 0..count {
            sections.push(Section {
                name: text(names, number::<4>(file, headers + index * size)? as usize)?,
                data: slice(index)?,
            });
        }
        Ok(Self { file, sections })
    }

    fn section(&self, name: &str) -> Option<&'a [u8]> {
        self.sections
            .iter()
            .find(|section| section.name == name)
            .map(|section| section.data)
    }

    /// Names of the symbols of a type.
    fn symbols(&self, kind: u8) -> Result<Vec<&'a str>> {
        ensure!(!self.file.is_empty(), "an empty file has no symbols");
        let table = self.section(".symtab").context("no symbols")?;
        let names = self.section(".strtab").context("no names")?;
        let mut found = Vec::new();
        for symbol in table.chunks_exact(24) {
            if symbol[4] & 0xf == kind {
                found.push(text(names, number::<4>(symbol, 0)? as usize)?);
            }
        }
        Ok(found)
    }
}

/// The little-endian number of `N` bytes at an offset.
fn number<const N: usize>(bytes: &[u8], at: usize) -> Result<u64> {
    let bytes = bytes.get(at..at + N).context("the file is cut off")?;
    Ok(bytes.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
}

/// The text that begins at an offset and ends with a zero byte.
fn text(bytes: &[u8], at: usize) -> Result<&str> {
    let rest = bytes.get(at..).context("a name lies beyond the names")?;
    let end = rest.iter().position(|byte| *byte == 0).context("a name does not end")?;
    Ok(std::str::from_utf8(&rest[..end])?)
}
