//! Connections a second from outside the cluster: through Evenkeel, through nftables, and to a pod itself.
//!
//! Each arm is a node of the lab, all alike but for who translates there: node 1 runs the agent, node 2 has the rules that
//! kube-proxy would write, node 3 has neither, and the client dials its pods. The pods are on the node that the client
//! reaches and see its source (externalTrafficPolicy Local), so no arm masquerades. The arms take turns in blocks, forwards and
//! then backwards; what is compared is the blocks of one round. Measured with few other Services and with many.

use std::{
    net::{SocketAddr, SocketAddrV4},
    num::NonZeroU16,
    os::fd::{AsRawFd, OwnedFd},
    thread,
    time::Instant,
};

use anyhow::{Context, Result, anyhow};
use lb_user::{
    lab::{Netns, mounts::BpfFs, nft},
    model::Protocol,
};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, SockaddrIn, bind, listen, setsockopt, socket, sockopt::ReuseAddr,
};
use serde_json::json;

use super::{
    Bench,
    dial::{self, Acceptor, Manner, Times},
    population::Population,
    report::Metric,
    stats,
};
use crate::{
    lab::{
        Lab,
        node::Sizes,
        plan::{self, Family},
        pod::Pod,
        service::{PORT, Service},
    },
    objects,
};

/// The port of the pods' servers that accept and close.
const TARGET: u16 = 8_095;
/// Connections of one block.
const BLOCK: usize = 256;
/// Rounds of one block an arm.
const ROUNDS: usize = 80;
/// Endpoints of each of the other Services.
const ENDPOINTS: u32 = 10;
/// How many other Services there are.
const SERVICES: [u32; 2] = [100, 10_000];

struct Arm {
    name: &'static str,
    targets: Vec<SocketAddrV4>,
    rounds: Vec<Times>,
    /// Connections a second, by block.
    rates: Vec<f64>,
}

/// Measures with both populations.
pub(super) fn measure(bench: &mut Bench) -> Result<()> {
    // A mount namespace belongs to a thread, and so do the agents' lives.
    let measured = thread::scope(|scope| {
        let work = || -> Result<()> {
            let _mounts = BpfFs::enter_private()?;
            for services in SERVICES {
                measure_with(bench, services).with_context(|| format!("with {services} Services"))?;
            }
            Ok(())
        };
        scope.spawn(work).join()
    });
    measured.map_err(|_| anyhow!("the thread that measures panicked"))??;
    let ratio = |services| bench.report.value(&format!("outside_times_nftables@{services}"));
    let (few, many) = (ratio(SERVICES[0]), ratio(SERVICES[1]));
    let least = few.zip(many).map(|(few, many)| few.min(many));
    bench.report.at_least(
        "connections a second from outside, as a multiple of nftables'",
        least,
        1.3,
    );
    Ok(())
}

fn measure_with(bench: &mut Bench, services: u32) -> Result<()> {
    let lab = Lab::with(Sizes {
        frontends: lb_common::maps::MAX_FRONTENDS,
        backends: lb_common::maps::MAX_BACKENDS,
        flows: lb_common::maps::MAX_FLOWS,
    })?;
    let population = Population::new(services, ENDPOINTS, NonZeroU16::MIN);
    for (at, chunk) in (0..services).collect::<Vec<_>>().chunks(100).enumerate() {
        let objects: Vec<_> = chunk.iter().flat_map(|n| manifests(&population, *n)).collect();
        lab.manifests()
            .write(&format!("fillers-{at}.yaml"), &objects::documents(&objects))?;
    }
    bench.say(&format!("outside: an agent with {services} Services"));
    lab.node(1).start()?;
    let pods = |node| [lab.pod(node, 1), lab.pod(node, 2)];
    let mut servers = Vec::new();
    for node in 1..=plan::NODES {
        for pod in pods(node) {
            servers.push(lab.node(node).inside(|| serve(pod))??);
        }
    }
    let evenkeel = balanced(&lab, &pods(1))?;
    let ruled = lab.service(Family::V4).load_balancer("VIP");
    ruled.route_to(&[2])?;
    nft::load(&lab.node(2).netns, &rules(&ruled, &pods(2), services))?;
    let mut arms = [
        Arm::new(
            "direct",
            pods(3).map(|pod| v4(plan::at(pod.ip(Family::V4), TARGET))).to_vec(),
        ),
        Arm::new("evenkeel", vec![v4(evenkeel.routed())]),
        Arm::new("nftables", vec![v4(ruled.routed())]),
    ];
    let own = Netns::current()?;
    lab.wires.client.enter_current_thread()?;
    let measured = rounds(bench, &mut arms, services);
    own.enter_current_thread()?;
    measured?;
    // That the arm measured what it says: every connection of its blocks was this node's to translate.
    evenkeel.wait_connects(1, (BLOCK * (ROUNDS + 1)) as u64)?;
    report(bench, &mut arms, services);
    Ok(())
}

impl Arm {
    fn new(name: &'static str, targets: Vec<SocketAddrV4>) -> Self {
        Self {
            name,
            targets,
            rounds: Vec::new(),
            rates: Vec::new(),
        }
    }

    fn run(&mut self, bench: &Bench) -> Result<(Times, f64)> {
        bench.check()?;
        let mut times = Times::default();
        let mut targets = self.targets.iter().copied().cycle();
        let began = Instant::now();
        dial::block(&mut targets, BLOCK, &mut times).with_context(|| self.name.to_owned())?;
        Ok((times, BLOCK as f64 / began.elapsed().as_secs_f64()))
    }
}

fn rounds(bench: &Bench, arms: &mut [Arm], services: u32) -> Result<()> {
    for arm in arms.iter_mut() {
        arm.run(bench)?;
    }
    for round in 0..ROUNDS {
        let mut order: Vec<usize> = (0..arms.len()).collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for at in order {
            let arm = arms.get_mut(at).context("an arm")?;
            let (times, rate) = arm.run(bench)?;
            arm.rounds.push(times);
            arm.rates.push(rate);
        }
        if round % 20 == 19 {
            bench.say(&format!(
                "outside: {} of {ROUNDS} rounds with {services} Services",
                round + 1
            ));
        }
    }
    Ok(())
}

fn report(bench: &mut Bench, arms: &mut [Arm], services: u32) {
    for arm in arms.iter_mut() {
        let of = |arm: &mut Arm, pick: fn(&mut Times) -> f64| {
            let mut picked: Vec<f64> = arm.rounds.iter_mut().map(pick).collect();
            stats::median(&mut picked)
        };
        let p1 = of(arm, |times| stats::quantile(&mut times.connect, 0.01));
        let p50 = of(arm, |times| stats::median(&mut times.connect));
        let min = of(arm, |times| stats::min(&times.connect));
        bench.report.add(
            Metric::new(
                format!("outside_connects_per_s.{}@{services}", arm.name),
                "1/s",
                stats::median(&mut arm.rates.clone()),
                BLOCK * ROUNDS,
            )
            .with("connect_us_p1", p1)
            .with("connect_us_p50", p50)
            .with("connect_us_min", min),
        );
    }
    let rates = |name: &str| arms.iter().find(|arm| arm.name == name).map(|arm| arm.rates.clone());
    let (Some(own), Some(nftables), Some(direct)) = (rates("evenkeel"), rates("nftables"), rates("direct")) else {
        return;
    };
    let quotient = |above: &[f64], below: &[f64]| {
        let mut quotients: Vec<f64> = above.iter().zip(below).map(|(above, below)| above / below).collect();
        stats::median(&mut quotients)
    };
    bench.report.add(
        Metric::new(
            format!("outside_times_nftables@{services}"),
            "1",
            quotient(&own, &nftables),
            ROUNDS,
        )
        .with("of_direct", quotient(&own, &direct))
        .with("nftables_of_direct", quotient(&nftables, &direct)),
    );
}

/// The Service of Evenkeel's arm.
fn balanced<'l>(lab: &'l Lab, pods: &[&Pod]) -> Result<Service<'l>> {
    let service = lab
        .service(Family::V4)
        .load_balancer("VIP")
        .with("externalTrafficPolicy", "Local")
        .to_port(TARGET);
    let endpoints: Vec<_> = pods.iter().map(|pod| pod.ready(Family::V4)).collect();
    service.apply(&endpoints)?;
    Ok(service)
}

/// The rules of nftables' arm: the same Service, and as many others.
fn rules(service: &Service<'_>, pods: &[&Pod], others: u32) -> String {
    let own = nft::Service {
        name: format!("default/{}/tcp/tcp", service.name),
        frontend: service.routed(),
        protocol: Protocol::Tcp,
        endpoints: pods.iter().map(|pod| plan::at(pod.ip(Family::V4), TARGET)).collect(),
    };
    let mut all = vec![own];
    all.extend(nft::fillers(others, ENDPOINTS));
    nft::render_all(&all)
}

/// A Service that nobody dials, and its endpoints.
fn manifests(population: &Population, n: u32) -> [serde_json::Value; 2] {
    let name = format!("filler-{n}");
    let frontend = population.frontend(n).ip().to_string();
    let mut spec = objects::cluster_ip(&[frontend.as_str()]);
    spec["ports"][0]["port"] = PORT.into();
    let endpoints: Vec<_> = (0..ENDPOINTS)
        .map(|endpoint| {
            let address = population.endpoint(n, endpoint).ip().to_string();
            let mut endpoint = objects::ready(&address);
            endpoint["nodeName"] = json!("elsewhere");
            endpoint
        })
        .collect();
    [
        objects::service(&name, spec),
        objects::slice(&format!("{name}-v4"), &name, &endpoints),
    ]
}

fn serve(pod: &Pod) -> Result<Acceptor> {
    let at = v4(plan::at(pod.ip(Family::V4), TARGET));
    let listener = pod.netns.run(|| -> nix::Result<OwnedFd> {
        let listener = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
        setsockopt(&listener, ReuseAddr, &true)?;
        bind(listener.as_raw_fd(), &SockaddrIn::from(at))?;
        listen(&listener, Backlog::new(2048)?)?;
        Ok(listener)
    })?;
    Acceptor::start(listener.with_context(|| format!("listen on {at}"))?, Manner::Close)
}

fn v4(address: SocketAddr) -> SocketAddrV4 {
    let SocketAddr::V4(address) = address else {
        panic!("the bench asks for IPv4 addresses alone, and got {address}");
    };
    address
}
