//! What a connect costs more than a direct one: the hooks alone, with per-socket state, with observation, nftables, and nftables
//! with the observer beside it.
//!
//! The arms take turns in blocks, forwards and then backwards (ABBA), so that drift of the machine meets all of them
//! alike. What is added is the difference to the direct blocks of the same round, and of these differences the median.
//! Every arm dials one Service of 1,000 (the direct one dials that Service's endpoints). Both ends' sockets are in the
//! arm's cgroup. Run statistics are off. All of it is measured twice: with client and server on the node, and (`@veth`)
//! with the server behind a pair of Ethernet devices, where rules see each packet half as often.

use std::net::SocketAddrV4;
use std::num::NonZeroU16;

use anyhow::Result;
use lb_user::lab::{ChildCgroup, Netns, nft};
use nix::sys::{
    resource::{UsageWho, getrusage},
    time::TimeVal,
};

use super::{
    Bench,
    dial::{self, Acceptor, Times},
    place::{Datapath, Place, Programs, Topology, enter},
    population::Population,
    report::Metric,
    stats,
};

const SERVICES: u32 = 1_000;
const ENDPOINTS: u32 = 10;
/// Connections of one block.
const BLOCK: usize = 256;
/// Rounds of one block an arm: 20,480 connections an arm.
const ROUNDS: usize = 80;

/// The arms in whose namespace rules translate.
const RULED: [&str; 2] = ["nftables", "observed"];

struct Arm<'p> {
    name: &'static str,
    cgroup: ChildCgroup,
    place: &'p Place,
    _server: Acceptor,
    targets: Vec<SocketAddrV4>,
    rounds: Vec<Times>,
    /// CPU seconds of this process, client and server and reader, in each round.
    cpu: Vec<f64>,
    datapath: Option<Datapath>,
}

impl<'p> Arm<'p> {
    fn new(bench: &Bench, place: &'p Place, name: &'static str, port: u16, programs: Option<Programs>) -> Result<Self> {
        let port = NonZeroU16::new(port).expect("ports of arms are not 0");
        let cgroup = bench.home.below(name)?;
        let population = Population::new(SERVICES, ENDPOINTS, port);
        let datapath = match programs {
            Some(programs) => {
                let mut datapath = Datapath::new(cgroup.path(), programs, &place.client)?;
                datapath.fill(&population)?;
                Some(datapath)
            }
            None => None,
        };
        // The server's sockets belong to the cgroup too.
        enter(&cgroup)?;
        let server = place.serve(port)?;
        let targets = match name {
            "direct" => (0..ENDPOINTS).map(|n| population.endpoint(0, n)).collect(),
            _ => vec![population.frontend(0)],
        };
        if RULED.contains(&name) {
            nft::load(&place.client, &nft::render_all(&population.rules()))?;
        }
        Ok(Self {
            name,
            cgroup,
            place,
            _server: server,
            targets,
            rounds: Vec::new(),
            cpu: Vec::new(),
            datapath,
        })
    }

    fn run(&mut self, bench: &Bench, count: usize) -> Result<Times> {
        bench.check()?;
        enter(&self.cgroup)?;
        self.place.client.enter_current_thread()?;
        let mut times = Times::default();
        let mut targets = self.targets.iter().copied().cycle();
        dial::block(&mut targets, count, &mut times)?;
        Ok(times)
    }
}

/// Measures all arms.
pub(super) fn measure(bench: &mut Bench) -> Result<()> {
    measure_at(bench, Topology::Node, "")?;
    measure_at(bench, Topology::Pod, "@veth")
}

fn measure_at(bench: &mut Bench, topology: Topology, suffix: &str) -> Result<()> {
    let (plain, ruled, watched) = (Place::new(topology)?, Place::new(topology)?, Place::new(topology)?);
    let mut arms = vec![
        Arm::new(bench, &plain, "direct", 8001, None)?,
        Arm::new(bench, &plain, "hook", 8002, Some(Programs::Hook))?,
        Arm::new(bench, &plain, "state", 8003, Some(Programs::State))?,
        Arm::new(bench, &plain, "evenkeel", 8004, Some(Programs::All))?,
        Arm::new(bench, &ruled, "nftables", 8005, None)?,
        Arm::new(bench, &watched, "observed", 8006, Some(Programs::Observe))?,
    ];
    let own = Netns::current()?;
    let measured = rounds(bench, &mut arms);
    own.enter_current_thread()?;
    enter(&bench.home)?;
    measured?;
    report(bench, &mut arms, suffix);
    Ok(())
}

fn rounds(bench: &Bench, arms: &mut [Arm<'_>]) -> Result<()> {
    for arm in arms.iter_mut() {
        // Warms caches, branch predictors and the namespace's neighbour entries.
        arm.run(bench, BLOCK)?;
    }
    for round in 0..ROUNDS {
        let order: Vec<usize> = if round % 2 == 0 {
            (0..arms.len()).collect()
        } else {
            (0..arms.len()).rev().collect()
        };
        for at in order {
            let before = cpu_seconds()?;
            let times = arms[at].run(bench, BLOCK)?;
            arms[at].cpu.push(cpu_seconds()? - before);
            arms[at].rounds.push(times);
        }
        if round % 20 == 19 {
            bench.say(&format!("connect: {} of {ROUNDS} rounds", round + 1));
        }
    }
    Ok(())
}

/// CPU seconds that this process has used.
fn cpu_seconds() -> Result<f64> {
    let used = getrusage(UsageWho::RUSAGE_SELF)?;
    let seconds = |time: TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
    Ok(seconds(used.user_time()) + seconds(used.system_time()))
}

/// One statistic of each round.
fn by_round(arm: &mut Arm<'_>, pick: impl Fn(&mut Times) -> f64) -> Vec<f64> {
    arm.rounds.iter_mut().map(pick).collect()
}

fn report(bench: &mut Bench, arms: &mut [Arm<'_>], suffix: &str) {
    type Pick = fn(&mut Times) -> f64;
    let picks: [Pick; 4] = [
        |times| stats::quantile(&mut times.connect, 0.01),
        |times| stats::min(&times.connect),
        |times| stats::median(&mut times.connect),
        |times| stats::quantile(&mut times.close, 0.01),
    ];
    // CPU seconds for 100,000 connections: of the differences to the arm without the observer, round by round, the median.
    let of = |name: &str| arms.iter().find(|arm| arm.name == name).map(|arm| arm.cpu.clone());
    if let (Some(bare), Some(observed)) = (of("nftables"), of("observed")) {
        let scale = 100_000.0 / BLOCK as f64;
        let mut differences: Vec<f64> = observed.iter().zip(&bare).map(|(own, bare)| own - bare).collect();
        let (bare, more) = (
            stats::median(&mut bare.clone()) * scale,
            stats::median(&mut differences) * scale,
        );
        bench.report.add(
            Metric::new(format!("cpu_s_per_100k.nftables{suffix}"), "s", bare, ROUNDS)
                .with("observed_adds", more)
                .with("ratio", more / bare),
        );
        if suffix.is_empty() {
            bench.report.at_most(
                "CPU seconds that observing adds to connections through nftables, as a part",
                Some(more / bare),
                0.05,
            );
        }
    }
    let mut observed = arms.iter().filter(|arm| arm.name == "observed");
    if let Some((records, wakeups)) = observed.find_map(|arm| Some(arm.datapath.as_ref()?.heard())) {
        // The first wake-up may come for less than a full portion, as counters go on from where the warming left them.
        let each = records as f64 / wakeups.saturating_sub(1).max(1) as f64;
        bench.report.add(
            Metric::new(format!("records_per_wakeup{suffix}"), "1", each, records as usize).with("wakeups", wakeups),
        );
        if suffix.is_empty() {
            bench
                .report
                .at_least("records for each wake-up of the reader", Some(each), 64.0);
        }
    }
    let (direct, others) = arms.split_at_mut(1);
    let base: Vec<Vec<f64>> = picks.iter().map(|pick| by_round(&mut direct[0], pick)).collect();
    let samples = ROUNDS * BLOCK;
    bench.report.add(
        Metric::new(
            format!("connect_us_p1.direct{suffix}"),
            "us",
            stats::median(&mut base[0].clone()),
            samples,
        )
        .with("min", stats::median(&mut base[1].clone()))
        .with("p50", stats::median(&mut base[2].clone()))
        .with("close_p1", stats::median(&mut base[3].clone())),
    );
    for arm in others {
        let added: Vec<f64> = picks
            .iter()
            .zip(&base)
            .map(|(pick, base)| {
                let own = by_round(arm, pick);
                let mut differences: Vec<f64> = own.iter().zip(base).map(|(own, base)| own - base).collect();
                stats::median(&mut differences)
            })
            .collect();
        bench.report.add(
            Metric::new(
                format!("connect_added_us_p1.{}{suffix}", arm.name),
                "us",
                added[0],
                samples,
            )
            .with("min", added[1])
            .with("p50", added[2])
            .with("close_p1", added[3])
            .with("services", SERVICES),
        );
    }
    // The targets are for this topology; the other one's figures stand beside.
    if !suffix.is_empty() {
        return;
    }
    let nftables = bench.report.value("connect_added_us_p1.nftables");
    let observed = bench.report.value("connect_added_us_p1.observed");
    let observing = observed.zip(nftables).map(|(observed, nftables)| observed - nftables);
    bench.report.at_most(
        "us that observing adds to a connect through nftables (p1)",
        observing,
        1.5,
    );
    for (arm, bound) in [("hook", 0.06), ("state", 0.15), ("evenkeel", 0.22)] {
        let own = bench.report.value(&format!("connect_added_us_p1.{arm}"));
        let share = own.zip(nftables).map(|(own, nftables)| own / nftables);
        bench
            .report
            .at_most(&format!("connect_added.{arm} as a part of nftables'"), share, bound);
    }
}
