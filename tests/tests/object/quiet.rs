//! The programs of observe mode cannot write to traffic: no store to their context, no helper that changes a packet, a socket or
//! a verdict, and the one return value that leaves everything to others.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use aya_obj::generated::bpf_func_id as id;
use lb_user::datapath::load::{FOLLOWING, OBJECT, PACKET, REWRITING};

use super::{
    elf::{Elf, FUNCTION},
    flow::{Finding, Flow, Report},
};

/// Helpers that change nothing but Evenkeel's own maps and ring buffer: number, name, whether the context may be given to it.
///
/// `sock_ops_cb_flags_set` chooses which callbacks a socket makes to such programs; the connection does not see it.
const HARMLESS: [(u32, &str, bool); 12] = [
    (1, "map_lookup_elem", false),
    (2, "map_update_elem", false),
    (3, "map_delete_elem", false),
    (5, "ktime_get_ns", false),
    (26, "skb_load_bytes", true),
    (46, "get_socket_cookie", true),
    (59, "sock_ops_cb_flags_set", true),
    (113, "probe_read_kernel", false),
    (122, "get_netns_cookie", true),
    (131, "ringbuf_reserve", false),
    (132, "ringbuf_submit", false),
    (137, "skc_to_tcp_sock", true),
];
/// `probe_read_kernel` reads from where its third argument points.
const READS_FROM: (u32, usize) = (113, 3);
/// `TC_ACT_UNSPEC`, which is `TCX_NEXT`: the next program decides.
const NEXT: i32 = -1;
/// Of a program at a socket's end: let it end.
const ALLOW: i32 = 1;

fn harm(report: &Report) -> Vec<String> {
    let harmless: BTreeMap<u32, bool> = HARMLESS.map(|(id, _, context)| (id, context)).into();
    let mut found: Vec<String> = (report.findings.iter())
        .filter(|finding| {
            !matches!(finding, Finding::Passed { helper, argument, .. } if (*helper, *argument) == READS_FROM)
        })
        .map(|finding| format!("{finding:?}"))
        .collect();
    for (helper, with_context) in &report.helpers {
        match harmless.get(helper) {
            None => found.push(format!("helper {helper} is not known to be harmless")),
            Some(false) if *with_context => found.push(format!("helper {helper} is given the context")),
            Some(_) => {}
        }
    }
    found
}

#[test]
fn what_observe_mode_loads_stores_nothing_to_its_context() -> Result<()> {
    let mut flow = Flow::new(OBJECT)?;
    for name in FOLLOWING.into_iter().chain(PACKET) {
        let packet = PACKET.contains(&name);
        let report = flow.program(name, packet).with_context(|| name.to_owned())?;
        let harm = harm(&report);
        ensure!(harm.is_empty(), "{name}: {harm:#?}");
        ensure!(
            report.helpers.values().any(|with_context| *with_context),
            "{name} does nothing with its context: the analysis lost it"
        );
        let wanted = match name {
            "sock_ops" => 0,
            "sock_release" => ALLOW,
            _ => NEXT,
        };
        ensure!(
            report.returns.as_deref() == Some(&[wanted]),
            "{name} returns {:?} and not {wanted}",
            report.returns
        );
    }
    Ok(())
}

/// The negative control: what rewrites is found to.
#[test]
fn what_balance_mode_loads_besides_is_found_to_store_to_its_context() -> Result<()> {
    let mut flow = Flow::new(OBJECT)?;
    for name in REWRITING {
        let report = flow.program(name, false).with_context(|| name.to_owned())?;
        let stores = (report.findings.iter()).filter(|finding| matches!(finding, Finding::Store { .. }));
        ensure!(stores.count() > 0, "{name} stores nothing: {:?}", report.findings);
    }
    Ok(())
}

/// What a program of observe mode would do if it began with these instructions.
fn begun_with(name: &str, instructions: &[[u8; 8]]) -> Result<Report> {
    let elf = Elf::read(OBJECT)?;
    let symbols = elf.symbols()?;
    let program = (symbols.iter())
        .find(|symbol| symbol.kind == FUNCTION && symbol.name == name)
        .with_context(|| format!("no program {name}"))?;
    let mut file = OBJECT.to_vec();
    let bytes = instructions.concat();
    let at = elf.place(program)?;
    file.get_mut(at..at + bytes.len())
        .context("the program is shorter")?
        .copy_from_slice(&bytes);
    Flow::new(&file)?.program(name, PACKET.contains(&name))
}

/// The same for each program that is found to be quiet: had it a store, a helper that harms, or another verdict, that would show.
#[test]
fn what_a_quiet_program_must_not_do_would_be_found() -> Result<()> {
    let stores = [
        // *(u32 *)(r1 + 8) = 0
        vec![[0x62, 0x01, 8, 0, 0, 0, 0, 0]],
        // r2 = r1; *(u64 *)(r10 - 8) = r2; r3 = *(u64 *)(r10 - 8); lock *(u32 *)(r3 + 0) += r2
        vec![
            [0xbf, 0x12, 0, 0, 0, 0, 0, 0],
            [0x7b, 0x2a, 0xf8, 0xff, 0, 0, 0, 0],
            [0x79, 0xa3, 0xf8, 0xff, 0, 0, 0, 0],
            [0xc3, 0x23, 0, 0, 0, 0, 0, 0],
        ],
    ];
    // r0 = *(u32 *)(r1 + 76), the packet's data; *(u8 *)(r0 + 0) = 0
    let to_packet = vec![[0x61, 0x10, 76, 0, 0, 0, 0, 0], [0x72, 0x00, 0, 0, 0, 0, 0, 0]];
    // skb_store_bytes
    let harmful = [[0x85, 0, 0, 0, 9, 0, 0, 0]];
    // r0 = 7; exit
    let verdict = [[0xb7, 0, 0, 0, 7, 0, 0, 0], [0x95, 0, 0, 0, 0, 0, 0, 0]];
    for name in FOLLOWING.into_iter().chain(PACKET) {
        let packet = Some(&to_packet).filter(|_| PACKET.contains(&name));
        for instructions in stores.iter().chain(packet) {
            let report = begun_with(name, instructions)?;
            let found = (report.findings.iter()).any(|finding| matches!(finding, Finding::Store { .. }));
            ensure!(found, "{name}: {instructions:x?} is not found: {:?}", report.findings);
        }
        let report = begun_with(name, &harmful)?;
        ensure!(!harm(&report).is_empty(), "{name}: {:?}", report.helpers);
        let report = begun_with(name, &verdict)?;
        ensure!(report.returns.as_deref() == Some(&[7]), "{name}: {:?}", report.returns);
    }
    Ok(())
}

/// No name stands twice, and none of the numbers is another helper's.
#[test]
fn the_harmless_helpers_are_those_of_the_kernel() {
    let numbers = HARMLESS.map(|(number, ..)| number);
    let named = [
        id::BPF_FUNC_map_lookup_elem,
        id::BPF_FUNC_map_update_elem,
        id::BPF_FUNC_map_delete_elem,
        id::BPF_FUNC_ktime_get_ns,
        id::BPF_FUNC_skb_load_bytes,
        id::BPF_FUNC_get_socket_cookie,
        id::BPF_FUNC_sock_ops_cb_flags_set,
        id::BPF_FUNC_probe_read_kernel,
        id::BPF_FUNC_get_netns_cookie,
        id::BPF_FUNC_ringbuf_reserve,
        id::BPF_FUNC_ringbuf_submit,
        id::BPF_FUNC_skc_to_tcp_sock,
    ]
    .map(|id| id as u32);
    assert_eq!(numbers, named);
}
