//! The built kernel object against what the agent believes of it: layouts of every shared struct, maps, programs, and
//! no way to a panic, and no way to write to traffic in observe mode.

mod elf;
mod flow;
mod quiet;

use std::{collections::BTreeSet, mem::offset_of};

use anyhow::{Context, Result, ensure};
use lb_common::{
    addr::Addr,
    affinity::{Affinity, AffinityKey, Membership},
    backend::{Backend, BackendCounters, EndpointKey, ServiceCounters, Tally},
    event::ConnRecord,
    flow::{Flow, FragmentKey, FragmentPorts, Interface, Settings, TupleEntry, TupleKey},
    frontend::{Frontend, FrontendKey, SourceKey},
    maps,
    set::ListEntry,
    socket::{ChainHead, Passage, Reverse, ReverseKey, SocketState},
};
use lb_user::datapath::{
    btf,
    load::{FOLLOWING, OBJECT, PACKET, REWRITING},
};

use self::elf::{DATA, Elf, FUNCTION, UNTYPED};

/// Programs that translate packets.
const TRANSLATING: [&str; 4] = ["lb_ingress", "lb_egress", "raw_ingress", "raw_egress"];
/// Their functions that the verifier checks one by one, whoever calls them.
const GLOBAL: [&str; 16] = [
    "look",
    "look_inside",
    "come_in",
    "go_out",
    "admit",
    "begin",
    "choose",
    "holder",
    "make",
    "take",
    "retire",
    "refuse",
    "error",
    "assign",
    "established",
    "ended",
];

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
        Frontend { service_id, set_id, flags, affinity_seconds, outside_set_id, pad }
        SourceKey { service_id, addr }
        Backend { addr, port, proto, state, service_id, pad }
        BackendCounters { inside, direct, outside }
        EndpointKey { addr, port, proto, pad, service_id }
        Tally { connects, established, failed, closed }
        Passage { syn_ns }
        ServiceCounters { connects, rejected, established, closed, failed, attributed, direct, outside }
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
        TupleKey { low, high, low_port, high_port, proto, pad }
        TupleEntry { slot, stamp }
        Flow {
            client, vip, backend, source, start_ns, established_ns, seen_ns, version, isn, service_id, set_id, backend_id,
            generation, client_port, vip_port, backend_port, source_port, proto, flags, client_sent, backend_sent, claim,
        }
        Settings { clock_offset_ns, flow_slots, first_port, last_port }
        Interface { v4, v6, side, pad }
        FragmentKey { src, dst, id, proto, pad }
        FragmentPorts { src_port, dst_port }
        ConnRecord {
            kind, errno, start_ns, established_ns, end_ns, netns_cookie, client, vip, service_id, backend_id,
            client_port, vip_port, proto, outcome, marks,
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
    let functions: BTreeSet<&str> = elf.names(FUNCTION)?.into_iter().collect();
    for program in REWRITING.iter().chain(&FOLLOWING).chain(&PACKET) {
        ensure!(functions.contains(program), "no program {program}");
    }
    let objects: BTreeSet<&str> = elf.names(DATA)?.into_iter().collect();
    let all = maps::STATE_MAPS
        .iter()
        .chain(&maps::SOCKET_MAPS)
        .chain(&maps::FLOW_MAPS);
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
        .chain(TRANSLATING)
        .chain(GLOBAL)
        .collect();
    let foreign: Vec<&str> = elf
        .names(FUNCTION)?
        .into_iter()
        // A function of our own crate that was not inlined is no panic path by itself.
        .filter(|name| !known.contains(name) && !name.contains("7lb_ebpf"))
        .collect();
    ensure!(foreign.is_empty(), "functions that nobody expects: {foreign:?}");
    let panics: Vec<&str> = [FUNCTION, DATA, UNTYPED]
        .into_iter()
        .map(|kind| elf.names(kind))
        .collect::<Result<Vec<_>>>()?
        .into_iter()
        .flatten()
        .filter(|name| name.contains("panic") || name.contains("unwind"))
        .collect();
    ensure!(panics.is_empty(), "{panics:?}");
    Ok(())
}
