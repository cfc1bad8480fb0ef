//! What the packet programs cost a packet, by class, from `BPF_PROG_TEST_RUN`.
//!
//! A block of runs of one class takes turns with a block of an empty program, forwards and backwards; a class costs its own
//! figure less the empty program's. Packets that pass or are translated run many times in one call; so that each run finds
//! what the last one found, frontend and backend of such a flow are one address, which the programs write all the same. The
//! first packets of flows run once a call, since each changes the table; they are compared with single runs of the empty
//! program, and the clock and cold caches are in the numbers.

use std::{net::SocketAddr, os::fd::OwnedFd};

use anyhow::{Context, Result, ensure};
use lb_common::{
    abi::TCP,
    addr::Port,
    counter::action,
    event::tcp_flag::{ACK, SYN},
    flow::{TupleEntry, TupleKey, role},
    frontend::flag,
};

use super::{Bench, report::Metric, stats};
use crate::{
    bpf::{self, insn},
    packet,
    plane::{Device, Hook, Plane, Rules, node_address},
};

/// Runs in a block that repeats.
const REPEAT: u32 = 20_000;
/// Blocks of each class.
const BLOCKS: usize = 60;
/// Single runs of each class.
const SINGLES: usize = 4_000;

const SERVICE: u32 = 1;
const SET: u32 = 1;
const BACKENDS: u32 = 10;

/// A family's addresses.
struct Ends {
    name: &'static str,
    client: SocketAddr,
    vip: SocketAddr,
    other: SocketAddr,
    backends: fn(u32) -> SocketAddr,
}

fn families() -> Result<[Ends; 2]> {
    Ok([
        Ends {
            name: "v4",
            client: "203.0.113.5:40000".parse()?,
            vip: "198.51.100.1:80".parse()?,
            other: "198.51.100.9:80".parse()?,
            backends: |n| SocketAddr::new([10, 244, 0, n as u8].into(), 8080),
        },
        Ends {
            name: "v6",
            client: "[2001:db8:5::5]:40000".parse()?,
            vip: "[2001:db8:1::1]:80".parse()?,
            other: "[2001:db8:1::9]:80".parse()?,
            backends: |n| SocketAddr::new([0xfd24, 0, 0, 0, 0, 0, 0, n as u16].into(), 8080),
        },
    ])
}

/// `r0 = -1; exit`: the program that does nothing.
fn empty() -> Result<OwnedFd> {
    bpf::load_classifier(&[insn(0xb7, 0, 0, 0, -1), insn(0x95, 0, 0, 0, 0)]).context("load the empty program")
}

/// Measures every class.
pub(super) fn measure(bench: &mut Bench) -> Result<()> {
    let empty = empty()?;
    for ends in families()? {
        let plane = Plane::enter()?;
        repeated(bench, plane, &ends, &empty)?;
        let plane = Plane::enter()?;
        singles(bench, plane, &ends, &empty)?;
    }
    for family in ["v4", "v6"] {
        let of = |class| bench.report.value(&format!("packet_ns.{class}.{family}"));
        let (passes, forth, back) = (of("pass_through"), of("established"), of("reverse"));
        bench.report.at_most(&format!("packet_ns.pass_through.{family}"), passes, 60.0);
        bench.report.at_most(&format!("packet_ns.established.{family}"), forth, 150.0);
        bench.report.at_most(&format!("packet_ns.reverse.{family}"), back, 150.0);
    }
    Ok(())
}

/// Classes that leave the packet and the table as they were.
fn repeated(bench: &mut Bench, mut plane: Plane, ends: &Ends, empty: &OwnedFd) -> Result<()> {
    let mut rules = Rules::default();
    rules.add_backend(1, SERVICE, ends.vip, TCP);
    rules.publish(SET, &[(1, 1)]);
    rules.frontend(ends.vip, TCP, SERVICE, (SET, SET), flag::OUTSIDE);
    rules.uplink(plane.index(Device::Uplink), &[node_address(Device::Uplink, ends.vip.is_ipv6())]);
    plane.write(&rules)?;
    plane.run(Hook::Ingress, Device::Uplink, &packet::tcp(ends.client, ends.vip, SYN).bytes())?;
    plane.run(Hook::Egress, Device::Uplink, &packet::tcp(ends.vip, ends.client, SYN | ACK).bytes())?;
    // Frontend and backend are one: the tuple leads where the direction that is measured looks.
    let ends_of = |end: SocketAddr| (end.ip().into(), Port::new(end.port()));
    let ((client, client_port), (vip, vip_port)) = (ends_of(ends.client), ends_of(ends.vip));
    let tuple = TupleKey::between(client, client_port, vip, vip_port, TCP);
    let known = plane.tuple(&tuple).context("the flow has begun")?;
    let forth = packet::tcp(ends.client, ends.vip, ACK).bytes();
    let back = packet::tcp(ends.vip, ends.client, ACK).bytes();
    let passes = packet::tcp(ends.client, ends.other, ACK).bytes();
    let leaves = packet::tcp(ends.other, ends.client, ACK).bytes();
    for (class, hook, packet) in [
        ("pass_through", Hook::Ingress, passes),
        ("pass_through_egress", Hook::Egress, leaves),
        ("established", Hook::Ingress, forth),
        ("reverse", Hook::Egress, back),
    ] {
        bench.check()?;
        let role = if hook == Hook::Ingress { role::FRONT } else { role::MIDDLE };
        plane.set_tuple(&tuple, TupleEntry::new(known.slot, known.serial(), role))?;
        let program = plane.program(hook.program())?.fd()?;
        let ifindex = plane.index(Device::Uplink);
        let ours = || bpf::time_on_device(program, &packet, ifindex, REPEAT).map(f64::from);
        let theirs = || bpf::time_on_device(empty, &packet, ifindex, REPEAT).map(f64::from);
        let (mut own, mut base) = (Vec::new(), Vec::new());
        for block in 0..BLOCKS {
            if block % 2 == 0 {
                own.push(ours()?);
                base.push(theirs()?);
            } else {
                base.push(theirs()?);
                own.push(ours()?);
            }
        }
        let translated = plane.moved()?.get(&(hook.number(), action::TRANSLATED)).copied().unwrap_or(0);
        let wanted = if class.starts_with("pass") { 0 } else { u64::from(REPEAT) * BLOCKS as u64 };
        ensure!(translated >= wanted && (wanted > 0 || translated <= 1), "{class}: {translated} packets were translated");
        add(bench, class, ends.name, own, base);
        plane.forget_counters()?;
    }
    Ok(())
}

/// Classes that begin a flow.
fn singles(bench: &mut Bench, mut plane: Plane, ends: &Ends, empty: &OwnedFd) -> Result<()> {
    let mut rules = Rules::default();
    let members: Vec<(u32, u16)> = (1..=BACKENDS).map(|id| (id, 1)).collect();
    for &(id, _) in &members {
        rules.add_backend(id, SERVICE, (ends.backends)(id), TCP);
    }
    rules.publish(SET, &members);
    rules.frontend(ends.vip, TCP, SERVICE, (SET, SET), flag::OUTSIDE);
    rules.uplink(plane.index(Device::Uplink), &[node_address(Device::Uplink, ends.vip.is_ipv6())]);
    plane.write(&rules)?;
    let ifindex = plane.index(Device::Uplink);
    for (class, tuples) in [("new", SINGLES), ("reused", 200)] {
        bench.check()?;
        let program = plane.program(Hook::Ingress.program())?.fd()?;
        let (mut own, mut base) = (Vec::new(), Vec::new());
        for n in 0..SINGLES {
            let port = 20_000 + (n % tuples) as u16;
            let client = SocketAddr::new(ends.client.ip(), port);
            let packet = packet::tcp(client, ends.vip, SYN).seq(n as u32 + 1).bytes();
            let mut ours = || bpf::time_on_device(program, &packet, ifindex, 1).map(|ns| own.push(f64::from(ns)));
            let mut theirs = || bpf::time_on_device(empty, &packet, ifindex, 1).map(|ns| base.push(f64::from(ns)));
            if n % 2 == 0 {
                ours()?;
                theirs()?;
            } else {
                theirs()?;
                ours()?;
            }
        }
        // The first round of the tuples that come again is new itself.
        let skip = if tuples < SINGLES { tuples } else { 0 };
        add(bench, class, ends.name, own.split_off(skip), base.split_off(skip));
    }
    Ok(())
}

/// What a class costs above the empty program: by the smallest of each, with the first percentile and the median beside.
fn add(bench: &mut Bench, class: &str, family: &str, mut own: Vec<f64>, mut base: Vec<f64>) {
    let value = stats::min(&own) - stats::min(&base);
    let p1 = stats::quantile(&mut own, 0.01) - stats::quantile(&mut base, 0.01);
    let p50 = stats::median(&mut own) - stats::median(&mut base);
    let empty = stats::median(&mut base);
    bench.say(&format!("packets: {class} {family}: {value:.0} ns above an empty program (p50 {p50:.0})"));
    bench.report.add(
        Metric::new(format!("packet_ns.{class}.{family}"), "ns", value, own.len())
            .with("p1", p1)
            .with("p50", p50)
            .with("empty_p50", empty),
    );
}
