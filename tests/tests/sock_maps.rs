//! The kernel's maps against the fake: the same plans leave the same contents, and a full map refuses in the same way.
//!
//! This anchors what other tests learn from [`Memory`]. The histories come from the one hash function, so that a failure
//! names a seed and can be run again.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    num::NonZeroU16,
    process::ExitCode,
};

use anyhow::{Context, Result, ensure};
use aya::Ebpf;
use lb_common::{hash, maps as names, maps::feature};
use lb_tests::runner::{self, test};
use lb_user::{
    compile::{Compiled, Compiler, GRACE_MS},
    datapath::{
        fake::Memory,
        kernel::Kernel,
        load::{self, Mode, Options, Sizes},
        maps::Maps,
    },
    model::{
        BackendSet, Cidr, DesiredService, Frontend, FrontendKind, Member, ObjectName, Outside, Protocol, Scope,
        SetName, WhenEmpty, WhenEmptyOutside,
    },
    plan::Plan,
};

/// Changes of one history. Enough that ids and room are used again.
const STEPS: u64 = 40;

fn main() -> ExitCode {
    let mut tests: Vec<_> = (1..=3u64)
        .map(|seed| {
            test(format!("random_histories_leave_the_same_contents::{seed}"), move || {
                same_contents(seed)
            })
        })
        .collect();
    tests.push(test("a_full_map_refuses_alike", a_full_map_refuses_alike));
    runner::run(tests)
}

/// Maps of the kernel, without any program attached. The object has to live as long as they are used.
fn kernel(frontends: u32) -> Result<(Ebpf, Kernel)> {
    let sizes = Sizes {
        frontends,
        sets: 64,
        lists: 2048,
        tables: 16_384,
        backends: 512,
        services: 64,
        sockets: 64,
        flows: 64,
    };
    let options = Options {
        mode: Mode::Observe,
        sizes,
        features: feature::STATE,
        log_level: 0,
        follow_connections: false,
        packets: false,
        translate: false,
    };
    let mut object = load::load(&options, None)?;
    let (kernel, _) = Kernel::take(&mut object, true)?;
    Ok((object, kernel))
}

/// Numbers from a seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u32) -> u32 {
        self.0 = hash::mix(self.0);
        hash::scale(self.0 as u32, n)
    }
}

fn port(port: u16) -> NonZeroU16 {
    NonZeroU16::new(port).expect("not zero")
}

/// A Service of random shape, or none.
fn service(dice: &mut Dice, number: u8) -> Option<DesiredService> {
    if dice.below(5) == 0 {
        return None;
    }
    let mut wanted = DesiredService {
        name: ObjectName::new("default", &format!("s{number}")),
        frontends: Vec::new(),
        sets: Vec::new(),
        sources: Vec::new(),
    };
    let ranges: [Cidr; 4] =
        ["10.0.0.0/8", "192.0.2.7/32", "fd00::/8", "::fffe:0:0/95"].map(|text| text.parse().expect("a range"));
    wanted.sources.extend(ranges.into_iter().filter(|_| dice.below(2) == 0));
    for set in 0..=dice.below(3) as u16 {
        let (ipv6, protocol) = (
            dice.below(2) == 1,
            [Protocol::Tcp, Protocol::Udp][dice.below(2) as usize],
        );
        let mut members = BTreeMap::new();
        for _ in 0..dice.below(6) {
            let last = dice.below(8) as u8;
            let addr: IpAddr = if ipv6 {
                Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, u16::from(last)).into()
            } else {
                Ipv4Addr::new(10, 1, 0, last).into()
            };
            members.insert(addr, [1, 1, 1, 0, 7][dice.below(5) as usize]);
        }
        let members = members.into_iter().map(|(addr, weight)| Member {
            addr,
            port: port(8080),
            weight,
        });
        let (members, draining) = members.partition(|member| dice.below(6) > 0 || member.weight > 1);
        wanted.sets.push(BackendSet {
            name: SetName {
                port_name: format!("p{set}").into(),
                protocol,
                ipv6,
                scope: [Scope::Cluster, Scope::Local][dice.below(2) as usize],
            },
            members,
            draining,
        });
        wanted.frontends.push(Frontend {
            addr: Ipv4Addr::new(10, 96, 0, number).into(),
            port: port(80 + set),
            protocol,
            kind: FrontendKind::ClusterIp,
            set: usize::from(set),
            when_empty: [WhenEmpty::Refuse, WhenEmpty::Unreachable][dice.below(2) as usize],
            affinity_seconds: [None, Some(60)][dice.below(2) as usize],
            outside: (dice.below(2) == 0).then(|| Outside {
                set: usize::from(set),
                when_empty: WhenEmptyOutside::Refuse,
                masquerade: true,
                source_ranges: true,
            }),
        });
    }
    Some(wanted)
}

fn same_contents(seed: u64) -> Result<()> {
    let (_object, mut kernel) = kernel(64)?;
    let mut memory = Memory::new(kernel.capacity());
    ensure!(kernel.dump()? == memory.dump()?, "new maps differ");
    let mut dice = Dice(seed);
    let mut compiler = Compiler::new(kernel.capacity());
    let mut applied: BTreeMap<ObjectName, Compiled> = BTreeMap::new();
    let mut wanted: BTreeMap<ObjectName, DesiredService> = BTreeMap::new();
    for step in 0..STEPS {
        let now = step * GRACE_MS;
        compiler.reclaim(now, |_| true, |_| true);
        let mut plan = Plan::default();
        let mut changes = Vec::new();
        for number in 0..4 {
            if dice.below(2) == 0 {
                continue;
            }
            let name = ObjectName::new("default", &format!("s{number}"));
            let old = applied.get(&name);
            let new = if let Some(service) = service(&mut dice, number) {
                let new = compiler.compile(&service, old, &mut plan.tables)?;
                wanted.insert(name.clone(), service);
                Some(new)
            } else {
                wanted.remove(&name);
                None
            };
            plan.merge(Plan::between(old, new.as_ref()));
            changes.push((name, new));
        }
        kernel.apply(&plan)?;
        memory.apply(&plan)?;
        for (name, new) in changes {
            if let Some(old) = applied.remove(&name) {
                compiler.retire(&old, new.as_ref(), now);
            }
            applied.extend(new.map(|new| (name, new)));
        }
        compare(&kernel, &memory, applied.values()).with_context(|| format!("seed {seed}, step {step}"))?;

        if step % 10 == 9 {
            // An agent that starts anew reads the same from both, and finds nothing to do.
            compiler = Compiler::restore(kernel.capacity(), &kernel.dump()?);
            let mut tables = Vec::new();
            for (name, service) in &wanted {
                let again = compiler.compile(service, None, &mut tables)?;
                ensure!(
                    applied.get(name) == Some(&again),
                    "seed {seed}, step {step}: {name} was compiled anew"
                );
            }
            ensure!(tables.is_empty(), "seed {seed}, step {step}: tables were built anew");
            compiler.forget_restored(now);
        }
    }
    Ok(())
}

fn compare<'a>(kernel: &Kernel, memory: &Memory, applied: impl Iterator<Item = &'a Compiled>) -> Result<()> {
    let (real, fake) = (kernel.dump()?, memory.dump()?);
    ensure!(real == fake, "contents differ:\nkernel {real:?}\nmemory {fake:?}");
    let mut addresses = BTreeSet::new();
    for service in applied {
        // One entry for the Service's own, and one for anybody's.
        for id in [0, service.service_id] {
            addresses.extend(service.backends.iter().map(|(_, b)| (id, b.proto, b.addr, b.port)));
        }
        for set in &service.sets {
            let (offset, slots) = (set.table.offset, set.table.slots);
            ensure!(
                kernel.table(offset, slots)? == memory.table(offset, slots)?,
                "the table at {offset} differs"
            );
        }
    }
    let held = kernel.count_entries(names::SOURCES);
    ensure!(
        held == Some(fake.sources.len() as u64),
        "{held:?} source ranges, of {}",
        fake.sources.len()
    );
    // The observer's index has every address once, and once more for each Service that has it.
    let indexed = kernel.count_entries(names::BACKEND_INDEX);
    ensure!(
        indexed == Some(addresses.len() as u64),
        "{indexed:?} addresses are indexed, of {}",
        addresses.len()
    );
    Ok(())
}

fn a_full_map_refuses_alike() -> Result<()> {
    let (_object, mut kernel) = kernel(4)?;
    let mut memory = Memory::new(kernel.capacity());
    // The compiler is made to believe in more room than there is.
    let mut compiler = Compiler::new(lb_user::compile::Capacity {
        frontends: 64,
        ..kernel.capacity()
    });
    let mut plan = Plan::default();
    let mut of = |number: u8, count: u16| {
        let set = BackendSet {
            name: SetName {
                port_name: "p".into(),
                protocol: Protocol::Tcp,
                ipv6: false,
                scope: Scope::Cluster,
            },
            members: Vec::new(),
            draining: Vec::new(),
        };
        let frontend = |i| Frontend {
            addr: Ipv4Addr::new(10, 96, 0, number).into(),
            port: port(80 + i),
            protocol: Protocol::Tcp,
            kind: FrontendKind::ClusterIp,
            set: 0,
            when_empty: WhenEmpty::Refuse,
            affinity_seconds: None,
            outside: None,
        };
        let wanted = DesiredService {
            name: ObjectName::new("default", &format!("s{number}")),
            frontends: (0..count).map(frontend).collect(),
            sets: vec![set],
            sources: Vec::new(),
        };
        compiler.compile(&wanted, None, &mut plan.tables)
    };
    let (four, five) = (of(1, 4)?, of(2, 5)?);
    let fits = Plan::between(None, Some(&four));
    kernel.apply(&fits)?;
    memory.apply(&fits)?;
    compare(&kernel, &memory, [&four].into_iter())?;

    // Exchanging everything fits but for one; what was written before stays written, in both.
    let mut exchange = Plan::between(Some(&four), None);
    exchange.merge(Plan::between(None, Some(&five)));
    let (real, fake) = (kernel.apply(&exchange), memory.apply(&exchange));
    for (result, whose) in [(real, "the kernel"), (fake, "the fake")] {
        let error = result
            .err()
            .with_context(|| format!("{whose} takes five frontends of four"))?;
        ensure!(error.is_full(), "{whose} says something else: {error}");
    }
    compare(&kernel, &memory, [].into_iter())?;
    ensure!(kernel.dump()?.frontends.len() == 4);
    Ok(())
}
