//! Random scripts: what happens in a [`Town`], step by step, from a seed; and cutting a script down to what matters.

use std::{
    io::Write as _,
    net::SocketAddr,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use lb_common::{
    abi::UDP,
    backend::state,
    flow::{Flow, flag as flow_flag, state as flow_state},
    frontend::flag,
    hash,
};

use super::{
    Duel, Town, backend, client,
    fuzz::{self, mangle, splice},
    source,
    town::{self, SERVICES},
    vip,
};
use crate::{
    packet::{self, Packet, flags, tell, wire},
    plane::{Device, Hook},
};

/// Numbers by chance, the same ones for a seed.
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    /// Dice of a seed.
    pub fn new(seed: u64) -> Self {
        Self(hash::mix(seed))
    }

    /// The next number.
    pub fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        hash::mix(self.0)
    }

    /// A number below another; 0 below 0.
    pub fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.roll()) * n as u128) >> 64) as usize
    }

    /// One of several.
    pub fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len())]
    }

    /// True once in `n` times.
    pub fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// One step; the number decides all that the kind leaves open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// A client or guest sends to a frontend, or near it.
    Begin(u64),
    /// A packet of a flow that is there, at any place of its way.
    GoOn(u64),
    /// What came out last goes on to the other hook.
    Follow(u64),
    /// An ICMP error about a flow.
    Error(u64),
    /// Fragments of a datagram of a flow.
    Fragments(u64),
    /// The Services change.
    Change(u64),
    /// Time passes.
    Pass(u64),
    /// The node's settings change.
    Set(u64),
    /// One of the packets that the fuzzer begins with.
    Seed(u64),
}

/// A script.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Script {
    /// What happens, in order.
    pub ops: Vec<Op>,
    /// So many packets of four are mangled.
    pub mangled: usize,
}

impl Script {
    /// A script of a seed.
    pub fn of(seed: u64, length: usize, mangled: usize) -> Self {
        let mut dice = Dice::new(seed);
        let ops = (0..length)
            .map(|_| {
                let number = dice.roll();
                match dice.below(100) {
                    0..25 => Op::Begin(number),
                    25..55 => Op::GoOn(number),
                    55..73 => Op::Follow(number),
                    73..79 => Op::Error(number),
                    79..82 => Op::Fragments(number),
                    82..91 => Op::Change(number),
                    91..96 => Op::Pass(number),
                    96..98 => Op::Set(number),
                    _ => Op::Seed(number),
                }
            })
            .collect();
        Self { ops, mangled }
    }

    /// A script of a seed that is mostly broken packets.
    pub fn of_noise(seed: u64, length: usize) -> Self {
        let mut script = Self::of(seed, length, 3);
        let mut dice = Dice::new(!seed);
        for op in &mut script.ops {
            let rare = matches!(op, Op::Change(_) | Op::Pass(_) | Op::Set(_) | Op::Follow(_));
            if !rare || !dice.once_in(8) {
                let number = dice.roll();
                *op = match dice.below(4) {
                    0 => Op::Begin(number),
                    1 => Op::GoOn(number),
                    2 => Op::Error(number),
                    _ => Op::Seed(number),
                };
            }
        }
        script
    }

    /// Plays the script to its end, and compares everything then; returns what was counted.
    ///
    /// # Errors
    /// A [`super::Difference`], or what the kernel refused.
    pub fn play(&self) -> Result<Counts> {
        self.tell(None)
    }

    /// Plays the script and says each step.
    ///
    /// # Errors
    /// As [`Self::play`].
    pub fn tell(&self, mut say: Option<&mut dyn FnMut(String)>) -> Result<Counts> {
        let mut duel = Duel::enter()?;
        let towns = Town::found(&mut duel)?;
        // So few that they are wanted.
        duel.set(|settings| (settings.first_port, settings.last_port) = (20_000, 20_001));
        let mut play = Play {
            duel,
            seeds: fuzz::seeds(&towns),
            towns,
            last: None,
            mangled: self.mangled,
            said: say.is_some().then(String::new),
        };
        for (i, op) in self.ops.iter().enumerate() {
            let done = play.step(*op);
            if let (Some(say), Some(said)) = (&mut say, &mut play.said) {
                say(format!("{i:4}{said}"));
                said.clear();
            }
            done?;
            if i % 32 == 0 {
                play.duel.compare_counters()?;
            }
        }
        play.duel.compare_all()?;
        Ok(std::mem::take(&mut play.duel.model.counts))
    }
}

/// How often each hook has done what.
pub type Counts = std::collections::BTreeMap<(u32, u32), u64>;

struct Play {
    duel: Duel,
    towns: [Town; 2],
    /// The packet that came out last, and where.
    last: Option<(Hook, Vec<u8>)>,
    mangled: usize,
    /// The packets that the fuzzer begins with.
    seeds: Vec<Vec<u8>>,
    /// What the step did, where somebody wants to know.
    said: Option<String>,
}

impl Play {
    fn step(&mut self, op: Op) -> Result<()> {
        match op {
            Op::Begin(n) => self.begin(&mut Dice::new(n)),
            Op::GoOn(n) => self.go_on(&mut Dice::new(n)),
            Op::Follow(n) => self.follow(&mut Dice::new(n)),
            Op::Error(n) => self.error(&mut Dice::new(n)),
            Op::Fragments(n) => self.fragments(&mut Dice::new(n)),
            Op::Change(n) => self.change(&mut Dice::new(n)),
            Op::Pass(n) => {
                self.pass(&mut Dice::new(n));
                Ok(())
            }
            Op::Set(n) => {
                self.set(&mut Dice::new(n));
                Ok(())
            }
            Op::Seed(n) => self.seed(&mut Dice::new(n)),
        }
    }

    fn say(&mut self, what: impl FnOnce() -> String) {
        if let Some(said) = &mut self.said {
            said.push(' ');
            said.push_str(&what());
        }
    }

    /// One of the fuzzer's packets, at some hook.
    fn seed(&mut self, dice: &mut Dice) -> Result<()> {
        let mut bytes = dice.pick(&self.seeds).clone();
        if dice.once_in(4) {
            let other = dice.pick(&self.seeds);
            splice(dice, &mut bytes, other);
        }
        let (hook, device) = (*dice.pick(&Hook::ALL), *dice.pick(&Device::ALL));
        self.run(dice, hook, device, bytes)
    }

    fn run(&mut self, dice: &mut Dice, hook: Hook, device: Device, mut bytes: Vec<u8>) -> Result<()> {
        if dice.below(4) < self.mangled {
            mangle(dice, &mut bytes);
        }
        self.say(|| format!("{hook:?} {device:?} {}", tell(&bytes, false)));
        match self.duel.step(hook, device, &bytes) {
            Ok((verdict, out)) => {
                self.say(|| format!("-> {verdict:?} {}", tell(&out, false)));
                self.last = Some((hook, out));
                Ok(())
            }
            // The kernel itself takes no such packet: it is too short.
            Err(error) if is_refused(&error) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn begin(&mut self, dice: &mut Dice) -> Result<()> {
        let town = dice.pick(&self.towns).clone();
        let (mut end, proto) = *dice.pick(&town.frontends);
        if dice.once_in(12) {
            end.set_port(end.port() + 1);
        }
        let (device, from) = match dice.below(10) {
            0..6 => (Device::Uplink, *dice.pick(&town.clients)),
            6 => (Device::Second, *dice.pick(&town.clients)),
            7 => (Device::Guest, *dice.pick(&town.guests)),
            8 => (Device::OtherGuest, *dice.pick(&town.guests)),
            _ => (*dice.pick(&Device::ALL), *dice.pick(&town.clients)),
        };
        let packet = if proto == UDP {
            datagram(dice, from, end)
        } else {
            let set = if dice.once_in(4) { any_flags(dice) } else { flags::SYN };
            segment(dice, from, end, set)
        };
        let hook = if dice.once_in(20) { Hook::Egress } else { Hook::Ingress };
        let packet = dress(dice, packet);
        self.run(dice, hook, device, packet.bytes())
    }

    /// Some flow that is in the table.
    fn flow(&self, dice: &mut Dice) -> Option<Flow> {
        let there: Vec<&Flow> = self
            .duel
            .model
            .flows
            .iter()
            .filter(|flow| flow.state() >= flow_state::LIVE)
            .collect();
        (!there.is_empty()).then(|| **dice.pick(&there))
    }

    /// The ends of some packet of a flow, and where it is seen.
    fn place(dice: &mut Dice, flow: &Flow) -> (Hook, SocketAddr, SocketAddr) {
        let (client, vip, backend) = (client(flow), vip(flow), backend(flow));
        if source(flow).is_none() && flow.flags & flow_flag::MASQUERADE != 0 && dice.once_in(3) {
            return (Hook::Egress, client, backend);
        }
        match (dice.below(8), source(flow)) {
            (0..3, _) => (Hook::Ingress, client, vip),
            (3..5, _) => (Hook::Egress, backend, client),
            (5, Some(source)) => (Hook::Ingress, backend, source),
            (5 | 6, _) => (Hook::Egress, client, backend),
            // Where nobody expects it.
            _ => {
                let hook = *dice.pick(&Hook::ALL);
                let ends = [client, vip, backend, source(flow).unwrap_or(backend)];
                let of_family = |end: &&SocketAddr| end.is_ipv6() == client.is_ipv6();
                let ends: Vec<SocketAddr> = ends.iter().filter(of_family).copied().collect();
                (hook, *dice.pick(&ends), *dice.pick(&ends))
            }
        }
    }

    fn go_on(&mut self, dice: &mut Dice) -> Result<()> {
        let Some(flow) = self.flow(dice) else {
            return Ok(());
        };
        let (hook, from, to) = Self::place(dice, &flow);
        let packet = if flow.proto == UDP {
            datagram(dice, from, to)
        } else {
            let set = any_flags(dice);
            let packet = segment(dice, from, to, set);
            if dice.once_in(2) {
                packet.seq(u32::from_be(flow.isn))
            } else {
                packet
            }
        };
        let device = some_device(dice);
        let packet = dress(dice, packet);
        self.run(dice, hook, device, packet.bytes())
    }

    fn follow(&mut self, dice: &mut Dice) -> Result<()> {
        let Some((hook, bytes)) = self.last.take() else {
            return Ok(());
        };
        let hook = match hook {
            _ if dice.once_in(6) => hook,
            Hook::Ingress => Hook::Egress,
            Hook::Egress => Hook::Ingress,
        };
        let device = some_device(dice);
        self.run(dice, hook, device, bytes)
    }

    fn error(&mut self, dice: &mut Dice) -> Result<()> {
        let Some(flow) = self.flow(dice) else {
            return Ok(());
        };
        let (_, from, to) = Self::place(dice, &flow);
        let about = if flow.proto == UDP {
            datagram(dice, from, to)
        } else {
            segment(dice, from, to, flags::ACK)
        };
        let about = dress(dice, about);
        let town = &self.towns[usize::from(from.is_ipv6())];
        let teller = *dice.pick(&[town.router, to.ip(), from.ip(), backend(&flow).ip(), vip(&flow).ip()]);
        let kind = if from.is_ipv6() {
            *dice.pick(&[(2, 0, 1_400), (1, 4, 0), (3, 0, 0), (4, 0, 6), (128, 0, 1), (137, 0, 0)])
        } else {
            *dice.pick(&[(3, 4, 1_400), (3, 3, 0), (11, 0, 0), (12, 0, 9), (8, 0, 1), (5, 0, 0)])
        };
        let length = *dice.pick(&[8, 27, 28, 40, 48, 60, 68, 1_000]);
        let message = packet::error(teller, from.ip(), kind, &about, length);
        let (hook, device) = (*dice.pick(&Hook::ALL), *dice.pick(&Device::ALL));
        let message = dress(dice, message);
        self.run(dice, hook, device, message.bytes())
    }

    fn fragments(&mut self, dice: &mut Dice) -> Result<()> {
        let Some(flow) = self.flow(dice) else {
            return Ok(());
        };
        let (hook, from, to) = Self::place(dice, &flow);
        let mut whole = if flow.proto == UDP {
            datagram(dice, from, to)
        } else {
            segment(dice, from, to, flags::ACK)
        };
        whole = whole.payload(&[9; 90]);
        let mut parts = packet::fragments(&whole, dice.below(4) as u32, 8 * (1 + dice.below(5)));
        if dice.once_in(3) {
            parts.rotate_left(1);
        }
        let device = *dice.pick(&Device::ALL);
        for part in parts {
            self.run(dice, hook, device, part.bytes())?;
        }
        Ok(())
    }

    fn change(&mut self, dice: &mut Dice) -> Result<()> {
        let town = dice.pick(&self.towns).clone();
        let service = 1 + dice.below(SERVICES as usize) as u32;
        let i = dice.below(3) as u32;
        let id = town.backend(service, i);
        let index = self.duel.plane.index(Device::Uplink);
        let (kind, moved, half) = (dice.below(12), dice.once_in(2), dice.once_in(2));
        let mut members: Vec<(u32, u16)> = Vec::new();
        let nobody = dice.once_in(4);
        for i in 0..3 {
            if !nobody && !dice.once_in(3) {
                members.push((town.backend(service, i), 1 + dice.below(2) as u16));
            }
        }
        let state = *dice.pick(&[state::ACTIVE, state::DRAINING, state::EJECTED]);
        let (end, proto) = *dice.pick(&town.frontends);
        let bit = *dice.pick(&[
            flag::OUTSIDE,
            flag::MASQUERADE_OUTSIDE,
            flag::SILENT_WHEN_EMPTY_OUTSIDE,
            flag::UNREACHABLE_WHEN_EMPTY,
            flag::SOURCE_RANGES,
        ]);
        let range = (dice.pick(&town.clients).ip(), *dice.pick(&[0u8, 8, 30, 32]));
        let seconds = *dice.pick(&[0, 1, 10_800]);
        let mut said = String::new();
        self.duel.change(|rules| {
            let sets = town.sets(service);
            let set = if half { sets.0 } else { sets.1 };
            let key = crate::plane::key(end, proto);
            said = match kind {
                0..3 => {
                    // A set names only backends that there are.
                    let there: Vec<_> = members
                        .into_iter()
                        .filter(|m| rules.backends.contains_key(&m.0))
                        .collect();
                    rules.publish(set, &there);
                    format!("set {set} is {there:?}")
                }
                3 | 4 if rules.backends.contains_key(&id) => {
                    rules.set_state(id, state);
                    format!("backend {id} is {state}")
                }
                5 => {
                    // What names it goes first.
                    for set in [sets.0, sets.1] {
                        let rest = rules.sets[&set].members.clone();
                        let rest: Vec<_> = rest.into_iter().filter(|member| member.0 != id).collect();
                        rules.publish(set, &rest);
                    }
                    rules.vacate(id);
                    format!("backend {id} leaves")
                }
                6 => {
                    let at = town.endpoint(service, i, moved);
                    rules.add_backend(id, town.service(service), at, town.proto(service));
                    format!("backend {id} is at {at}")
                }
                7 | 8 => match rules.frontends.get_mut(&key) {
                    Some(front) => {
                        front.flags ^= bit;
                        format!("{end} has flags {:#x}", front.flags)
                    }
                    None => format!("{end} is not there"),
                },
                9 => {
                    if rules.frontends.remove(&key).is_none() {
                        town.settle(rules);
                    }
                    format!("{end} goes, or all is as in the beginning")
                }
                10 => {
                    if rules.frontends.contains_key(&key) {
                        rules.stick(end, proto, seconds);
                    }
                    rules.admit(town.service(service), range.0, range.1);
                    format!("{end} remembers for {seconds} s, {range:?} is admitted to Service {service}")
                }
                _ => {
                    if rules.interfaces.remove(&index).is_none() {
                        town::interface(rules, Device::Uplink, index);
                    }
                    "the uplink goes or comes".to_owned()
                }
            };
        })?;
        self.say(|| said);
        Ok(())
    }

    fn pass(&mut self, dice: &mut Dice) {
        // A little more than the round number: sums of these are never a limit to the millisecond, where the clock's last tick, by
        // which the programs go, decides.
        let milliseconds = 37
            + *dice.pick(&[
                500, 1_500, 1_500, 5_000, 29_000, 31_000, 59_000, 61_000, 121_000, 181_000, 3_601_000, 86_401_000,
            ]);
        self.duel
            .set(|settings| settings.clock_offset_ns += milliseconds * 1_000_000);
        self.say(|| format!("{milliseconds} ms pass"));
    }

    fn set(&mut self, dice: &mut Dice) {
        let (first, last) = *dice.pick(&[
            (20_000, 20_000),
            (20_000, 20_000),
            (20_000, 20_001),
            (20_000, 20_015),
            (10_000, 29_999),
            (2, 1),
        ]);
        let slots = *dice.pick(&[0, 1, 3, 8, 8, 40, 40, 40, 40]);
        self.duel.set(|settings| {
            (settings.first_port, settings.last_port) = (first, last);
            settings.flow_slots = slots;
        });
        self.say(|| format!("ports {first}..={last}, {slots} slots"));
    }
}

/// Whether the kernel itself refused to run a packet: it is too short.
fn is_refused(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<std::io::Error>();
    io.and_then(std::io::Error::raw_os_error) == Some(libc::EINVAL)
}

/// Mostly the uplink.
fn some_device(dice: &mut Dice) -> Device {
    if dice.once_in(2) {
        *dice.pick(&Device::ALL)
    } else {
        Device::Uplink
    }
}

fn any_flags(dice: &mut Dice) -> u8 {
    let (fin, syn, rst, ack) = (flags::FIN, flags::SYN, flags::RST, flags::ACK);
    match dice.below(10) {
        0 => syn,
        1 => syn | ack,
        2 => fin | ack,
        3 => rst | ack,
        4 => rst,
        5 => dice.roll() as u8,
        _ => ack,
    }
}

fn segment(dice: &mut Dice, from: SocketAddr, to: SocketAddr, set: u8) -> Packet {
    let seq = *dice.pick(&[0, 1_000, 2_000, u32::MAX]);
    let length = *dice.pick(&[0, 0, 1, 100]);
    packet::tcp(from, to, set)
        .seq(seq)
        .payload(&vec![dice.roll() as u8; length])
}

fn datagram(dice: &mut Dice, from: SocketAddr, to: SocketAddr) -> Packet {
    let length = *dice.pick(&[0, 1, 8, 100]);
    let packet = packet::udp(from, to, &vec![dice.roll() as u8; length]);
    if dice.once_in(5) { packet.unsummed() } else { packet }
}

/// Gives a packet some of the forms that packets have.
fn dress(dice: &mut Dice, mut packet: Packet) -> Packet {
    if dice.once_in(8) {
        packet = packet.vlan(5);
    }
    if dice.once_in(8) {
        packet = if packet.src.is_ipv6() {
            packet.extension(
                *dice.pick(&[wire::HOP_BY_HOP, wire::ROUTING, wire::DESTINATION]),
                &[1; 6],
            )
        } else {
            packet.options(&[1, 1, 1, 0])
        };
    }
    if dice.once_in(12) {
        packet = packet.wrong_body(dice.roll() as u16);
    }
    if dice.once_in(16) {
        packet = packet.trailer(&[0; 7]);
    }
    packet
}

/// How long the shortest script is looked for. In a guest each try takes seconds.
const PATIENCE: Duration = Duration::from_mins(1);

/// Plays the script of a seed; where it fails, the error tells the shortest script that still does.
///
/// # Errors
/// Where programs and model differ.
pub fn play(seed: u64, script: &Script) -> Result<Counts> {
    let first = match script.play() {
        Ok(counts) => return Ok(counts),
        Err(error) => error,
    };
    _ = writeln!(
        std::io::stderr(),
        "seed {seed}: {first:#}\nlooking for the shortest script that fails"
    );
    if script.play().is_ok() {
        bail!("seed {seed}, and not when it is played again: {first:#}");
    }
    let least = minimise(script, |script| script.play().is_err());
    let mut told = String::new();
    let mut say = |said: String| {
        told.push_str(&said);
        told.push('\n');
    };
    let again = least.tell(Some(&mut say)).err();
    // What depends on time may not fail once more.
    let why = again.unwrap_or(first);
    bail!(
        "seed {seed}, {} of {} steps:\n{told}{why:#}",
        least.ops.len(),
        script.ops.len()
    )
}

/// The fewest steps of a script that still fail, found by leaving out ever smaller parts of it while there is patience.
fn minimise(script: &Script, fails: impl Fn(&Script) -> bool) -> Script {
    let end = Instant::now() + PATIENCE;
    let mut least = script.clone();
    let mut part = least.ops.len().div_ceil(2);
    loop {
        let mut at = 0;
        let mut shorter = false;
        while at < least.ops.len() {
            if Instant::now() > end {
                return least;
            }
            let mut without = least.clone();
            without.ops.drain(at..(at + part).min(without.ops.len()));
            if fails(&without) {
                least = without;
                shorter = true;
            } else {
                at += part;
            }
        }
        if part > 1 {
            part = part.div_ceil(2);
        } else if !shorter {
            return least;
        }
    }
}
