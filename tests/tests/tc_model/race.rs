//! Programs on several processors at once, on the same few tuples and slots: whatever they take from each other, each flow ends
//! once, and nothing is left half done.

use std::{
    net::{Ipv4Addr, SocketAddr},
    os::fd::AsFd,
    sync::atomic::{AtomicU64, Ordering},
    thread,
};

use anyhow::{Result, ensure};
use lb_common::{
    abi::TCP,
    counter::{action, hook},
    flow::{flag, role, state},
    frontend,
};
use lb_tests::{
    bpf,
    model::{Dice, ONCE},
    packet::{self, flags},
    plane::{Device, Plane, Rules, end, node_address},
    runner::{in_guest, scaled},
};

/// Slots of the table: far fewer than tuples.
const SLOTS: u32 = 12;
/// Ports of the node's own: fewer than flows.
const PORTS: (u16, u16) = (20_000, 20_005);
const SERVICE: u32 = 1;
const BACKENDS: u32 = 2;
const CLIENTS: u16 = 24;

fn client(n: u16) -> SocketAddr {
    SocketAddr::new(Ipv4Addr::new(198, 51, 100, (n % 3) as u8 + 1).into(), 40_000 + n)
}

fn vip() -> SocketAddr {
    SocketAddr::new(Ipv4Addr::new(203, 0, 113, 1).into(), 80)
}

fn backend(id: u32) -> SocketAddr {
    SocketAddr::new(Ipv4Addr::new(10, 0, 0, id as u8).into(), 8_080)
}

fn rules(plane: &Plane) -> Rules {
    let mut rules = Rules::default();
    rules.uplink(plane.index(Device::Uplink), &[node_address(Device::Uplink, false)]);
    let members: Vec<(u32, u16)> = (1..=BACKENDS).map(|id| (id, 1)).collect();
    for id in 1..=BACKENDS {
        rules.add_backend(id, SERVICE, backend(id), TCP);
    }
    rules.publish(1, &members);
    let flags = frontend::flag::OUTSIDE | frontend::flag::MASQUERADE_OUTSIDE;
    rules.frontend(vip(), TCP, SERVICE, (1, 1), flags);
    rules
}

/// One packet by chance: of any client, either way, masqueraded or not.
fn some_packet(dice: &mut Dice) -> (bool, Vec<u8>) {
    let client = client(dice.below(usize::from(CLIENTS)) as u16);
    let backend = backend(1 + dice.below(BACKENDS as usize) as u32);
    let node = SocketAddr::new(
        node_address(Device::Uplink, false),
        PORTS.0 + dice.below(usize::from(PORTS.1 - PORTS.0) + 1) as u16,
    );
    let (fin, rst, ack, syn) = (flags::FIN, flags::RST, flags::ACK, flags::SYN);
    let seq = *dice.pick(&[1, 2, 3]);
    let set = *dice.pick(&[syn, syn, ack, ack, fin | ack, rst]);
    match dice.below(8) {
        0..4 => (true, packet::tcp(client, vip(), set).seq(seq).bytes()),
        4 | 5 => {
            let set = *dice.pick(&[syn | ack, syn | ack, ack, fin | ack, rst | ack]);
            (false, packet::tcp(backend, client, set).bytes())
        }
        6 => (false, packet::tcp(client, backend, set).seq(seq).bytes()),
        _ => (true, packet::tcp(backend, node, syn | ack).bytes()),
    }
}

/// Many processors, few slots.
pub(crate) fn slots() -> Result<()> {
    let mut plane = Plane::enter()?;
    let rules = rules(&plane);
    plane.write(&rules)?;
    let mut settings = plane.settings();
    settings.flow_slots = SLOTS;
    (settings.first_port, settings.last_port) = PORTS;
    plane.set_settings(settings);
    plane.forget_counters()?;
    let index = plane.index(Device::Uplink);
    let packets = [AtomicU64::new(0), AtomicU64::new(0)];
    let each = scaled(60_000, 2_000);
    let mut recorded = 0;
    thread::scope(|scope| -> Result<()> {
        let ingress = plane.program("lb_ingress")?.fd()?.as_fd().try_clone_to_owned()?;
        let egress = plane.program("lb_egress")?.fd()?.as_fd().try_clone_to_owned()?;
        let packets = &packets;
        let runners: Vec<_> = (0..3)
            .map(|seed| {
                let (ingress, egress) = (ingress.try_clone(), egress.try_clone());
                // A thread is born in its maker's network namespace, where the devices are.
                scope.spawn(move || -> Result<()> {
                    let (ingress, egress) = (ingress?, egress?);
                    let mut dice = Dice::new(seed);
                    for _ in 0..each {
                        let (comes, bytes) = some_packet(&mut dice);
                        let program = if comes { &ingress } else { &egress };
                        bpf::run_on_device(program, &bytes, index)?;
                        packets[usize::from(!comes)].fetch_add(1, Ordering::Relaxed);
                    }
                    Ok(())
                })
            })
            .collect();
        // Meanwhile time passes, in leaps that let flows expire, and the records are read.
        for leap in 1u64.. {
            if runners.iter().all(thread::ScopedJoinHandle::is_finished) {
                break;
            }
            settings.clock_offset_ns += if leap.is_multiple_of(8) {
                61_000_000_000
            } else {
                700_000_000
            };
            plane.set_settings(settings);
            recorded += plane.records()?.len() as u64;
            thread::yield_now();
        }
        for runner in runners {
            runner.join().expect("a runner does not panic")?;
        }
        Ok(())
    })?;
    recorded += plane.records()?.len() as u64;
    check(
        &plane,
        [&packets[0], &packets[1]].map(|count| count.load(Ordering::Relaxed)),
        recorded,
    )
}

fn check(plane: &Plane, packets: [u64; 2], recorded: u64) -> Result<()> {
    let moved = plane.moved()?;
    let count = |hook: u32, action: u32| moved.get(&(hook, action)).copied().unwrap_or(0);
    for (hook, packets) in [hook::INGRESS, hook::EGRESS].into_iter().zip(packets) {
        let counted: u64 = ONCE.iter().map(|action| count(hook, *action)).sum();
        ensure!(
            counted == packets,
            "hook {hook}: {packets} packets, {counted} are counted: {moved:?}"
        );
        ensure!(count(hook, action::INCONSISTENT) == 0, "{moved:?}");
    }
    let both = |action: u32| count(hook::INGRESS, action) + count(hook::EGRESS, action);
    ensure!(
        both(action::RECORD_LOST) == 0 && both(action::RECORDED) == recorded,
        "{recorded} records: {moved:?}"
    );
    // Slots were taken from each other in every way; a guest has no time for that many packets.
    if !in_guest() {
        for wanted in [
            action::NEW_FLOW,
            action::REUSED,
            action::RECLAIMED,
            action::EVICTED,
            action::FLOWS_FULL,
        ] {
            ensure!(both(wanted) > 0, "{}: {moved:?}", action::NAMES[wanted as usize]);
        }
    }
    let mut open = 0;
    for slot in 0..SLOTS {
        let flow = plane.flow(slot);
        ensure!(flow.state() != state::BUSY, "slot {slot} is owned by nobody: {flow:?}");
        if flow.state() == state::LIVE && flow.flags & flag::RESUMED == 0 {
            open += 1;
        }
    }
    let service = plane.service(SERVICE);
    let ended = service.closed + service.failed.iter().sum::<u64>();
    ensure!(
        service.connects == ended + open,
        "{} began, {ended} have ended, {open} go on: {service:?}",
        service.connects
    );
    ensure!(service.connects == both(action::NEW_FLOW), "{service:?}, {moved:?}");
    // A tuple that leads to a flow that is there is one of its own.
    for (key, entry) in plane.tuples()? {
        let flow = plane.flow(entry.slot);
        if flow.serial() != entry.serial() || flow.state() < state::LIVE {
            continue;
        }
        let other = match entry.role() {
            role::FRONT => end(flow.vip, flow.vip_port),
            role::MIDDLE => end(flow.client, flow.client_port),
            _ => end(flow.source, flow.source_port),
        };
        let ends = [end(key.low, key.low_port), end(key.high, key.high_port)];
        ensure!(ends.contains(&other), "{key:?} leads to {flow:?}");
    }
    Ok(())
}
