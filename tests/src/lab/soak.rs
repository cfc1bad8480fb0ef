//! K1 and K8 at the scale at which they were met: `cargo xtask soak`.
//!
//! A client outside with 28,000 source ports connects to an address that node 1 serves; half of the pods are on node 2. The
//! servers close first, so that a port is free again at once and tuples come back while the servers remember them. The
//! invariant: the run is bounded in time, and a connection that fails or stalls fails it.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::mpsc::{self, TryRecvError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, ensure};
use lb_user::lab::{
    Server,
    client::{Attempt, Client, Load},
    server::Manner,
};

use super::{
    Lab,
    node::Sizes,
    plan::{self, Family},
    pod::Pod,
    report::Outcome,
    service::Service,
};
use crate::{agent::Agent, command_line::say, interrupt};

/// The port of the servers that close first.
const GREETING: u16 = 8_090;
/// Connections a second of K1.
const RATE: f64 = 1_000.0;
/// How long the new pods' share is looked at.
const WINDOW: Duration = Duration::from_secs(5);
/// A new pod's share of the connections in that time, at least.
const LEAST_SHARE: f64 = 0.20;
/// The 99.9th percentile of connects, at most.
const P999: Duration = Duration::from_millis(50);
/// A connect that takes so long has lost a packet.
const STALL: Duration = Duration::from_millis(900);
/// Connections whose records are kept at once.
const CHUNK: u64 = 50_000;

/// What is to be done.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Connections beside the scan, in each family
    #[arg(long, value_name = "N", default_value_t = 1_000_000, value_parser = clap::value_parser!(u64).range(1_000..))]
    connections: u64,
    /// Seconds for which tuples are reused before pods are added: all ports come round in 28
    #[arg(long, value_name = "N", default_value_t = 40)]
    warm_up: u64,
    /// Seconds after which the scan's connections count as stalled, in each family
    #[arg(long, value_name = "N", default_value_t = 900)]
    bound: u64,
    /// Only this family: v4 or v6
    #[arg(long, value_name = "FAMILY", value_parser = parse_family)]
    family: Option<Family>,
}

fn parse_family(text: &str) -> Result<Family, String> {
    let found = Family::ALL.into_iter().find(|family| family.to_string() == text);
    found.ok_or_else(|| "the families are v4 and v6".to_owned())
}

/// Runs both rows.
///
/// # Errors
/// Where the lab cannot be built, or a signal ended the run.
pub fn run(options: &Options) -> Result<Vec<Outcome>> {
    let lab = Lab::with(Sizes {
        // So few that the hand goes round many times.
        flows: 65_536,
        ..Sizes::SMALL
    })?;
    lab.node(1).start()?;
    let pods = [lab.pod(1, 1), lab.pod(2, 1), lab.pod(1, 2), lab.pod(2, 2)];
    let mut outcomes = Vec::new();
    let families = Family::ALL
        .into_iter()
        .filter(|family| options.family.is_none_or(|only| only == *family));
    for family in families {
        let servers = pods
            .iter()
            .map(|pod| {
                let at = plan::at(pod.ip(family), GREETING);
                let node = lab.node(pod.node);
                Ok(node.inside(|| Server::start(&pod.netns, &[at], Manner::Greet))??)
            })
            .collect::<Result<Vec<_>>>()?;
        for (row, name, work) in [
            ("K1", "new_pods_get_their_share_of_reused_tuples", reuse as Work),
            ("K8", "a_scan_of_the_table_stalls_nobody", scan),
        ] {
            interrupt::check()?;
            say(&format!("{row} {family} …"));
            let began = Instant::now();
            let result = work(&lab, family, &pods, options);
            interrupt::check()?;
            let outcome = Outcome {
                row,
                name,
                family,
                result: result.map_err(|error| format!("{error:#}; node 1 counted {}", lab.node(1).deeds())),
            };
            outcome.tell(began);
            outcomes.push(outcome);
        }
        drop(servers);
    }
    Ok(outcomes)
}

type Work = fn(&Lab, Family, &[&Pod; 4], &Options) -> Result<String>;

fn serve<'l>(lab: &'l Lab, family: Family, pods: &[&Pod]) -> Result<Service<'l>> {
    let service = lab.service(family).load_balancer("VIP").to_port(GREETING);
    let endpoints: Vec<_> = pods.iter().map(|pod| pod.ready(family)).collect();
    service.apply(&endpoints)?;
    Ok(service)
}

fn reuse(lab: &Lab, family: Family, pods: &[&Pod; 4], options: &Options) -> Result<String> {
    let service = serve(lab, family, &pods[..2])?;
    let load = Load {
        rate: Some(RATE),
        ..Load::tcp(service.routed())
    };
    let client = Client::start(&lab.wires.client, &load)?;
    wait_made(&client, options.warm_up as f64 * RATE)?;
    let reused = lab.node(1).counted("reused")?;
    let all: Vec<_> = pods.iter().map(|pod| pod.ready(family)).collect();
    service.apply(&all)?;
    let added = Instant::now();
    wait_made(&client, WINDOW.as_secs_f64() * RATE + RATE / 4.0)?;
    let attempts = client.stop();
    let reused = lab.node(1).counted("reused")?.saturating_sub(reused);
    let times = judge(&attempts)?;
    let within: Vec<&Attempt> = attempts
        .iter()
        .filter(|attempt| attempt.started >= added && attempt.started < added + WINDOW)
        .collect();
    let mut shares: BTreeMap<SocketAddr, f64> = BTreeMap::new();
    for backend in within.iter().filter_map(|attempt| attempt.outcome.ok()) {
        *shares.entry(backend).or_default() += 1.0 / within.len() as f64;
    }
    let mut words = Vec::new();
    for pod in pods {
        let share = shares
            .get(&plan::at(pod.ip(family), GREETING))
            .copied()
            .unwrap_or_default();
        words.push(format!("{} {share:.3}", pod.name));
    }
    let words = words.join(", ");
    for pod in &pods[2..] {
        let share = shares.get(&plan::at(pod.ip(family), GREETING)).copied();
        ensure!(
            share.is_some_and(|share| share >= LEAST_SHARE),
            "of {} connections within 5 s: {words}",
            within.len()
        );
    }
    ensure!(
        times.p999 < P999,
        "the 99.9th percentile of connects is {:?}",
        times.p999
    );
    ensure!(reused > 0, "no tuple was used again after the pods were added");
    Ok(format!(
        "{} connections, then within 5 s: {words}; {reused} tuples used again since; {times}",
        attempts.len()
    ))
}

fn scan(lab: &Lab, family: Family, pods: &[&Pod; 4], options: &Options) -> Result<String> {
    let service = serve(lab, family, pods)?;
    let began = Instant::now();
    let bound = Duration::from_secs(options.bound);
    let node = lab.node(1);
    let (stop, told) = mpsc::channel::<()>();
    let (scans, made, times) = thread::scope(|scope| -> Result<_> {
        let scanner = scope.spawn(move || -> Result<u64> {
            let mut scans = 0;
            while told.try_recv() == Err(TryRecvError::Empty) {
                node.ask(Agent::conns)?;
                scans += 1;
            }
            Ok(scans)
        });
        let connected = (|| -> Result<_> {
            let mut left = options.connections;
            let mut times = Times::default();
            while left > 0 {
                interrupt::check()?;
                ensure!(
                    began.elapsed() < bound,
                    "{left} of {} connections are left after {bound:?}",
                    options.connections
                );
                let count = left.min(CHUNK);
                let load = Load {
                    total: Some(count),
                    ..Load::tcp(service.routed())
                };
                let attempts = Client::start(&lab.wires.client, &load)?.wait();
                times.join(judge(&attempts)?);
                left -= count;
            }
            Ok((options.connections, times))
        })();
        drop(stop);
        let scans = scanner.join().map_err(|_| anyhow!("the scan panicked"))?;
        let (made, times) = connected?;
        Ok((scans.context("scan the flow table")?, made, times))
    })?;
    ensure!(scans > 0, "no scan ended while connections were made");
    let full = node.counted("flows_full")?;
    ensure!(full == 0, "{full} packets found no room for a flow");
    // A server's TIME_WAIT may refuse the first SYN of a masqueraded connection, whose repetition is a flow of its own.
    let counted = service.connects(1)?;
    ensure!(
        (made..made + made / 20).contains(&counted),
        "{made} connections were made, and {counted} are counted"
    );
    Ok(format!(
        "{made} connections beside {scans} scans in {:.0} s, {} repeated; {times}",
        began.elapsed().as_secs_f64(),
        counted - made
    ))
}

/// Waits until so many more attempts have ended, at the pace that the client keeps.
fn wait_made(client: &Client, more: f64) -> Result<()> {
    let wanted = client.made() + more as u64;
    let deadline = Instant::now() + Duration::from_secs_f64(more / RATE * 3.0 + 30.0);
    while client.made() < wanted {
        interrupt::check()?;
        ensure!(
            Instant::now() < deadline,
            "{} of {wanted} connections: the machine does not keep pace",
            client.made()
        );
        thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// How long connects took.
#[derive(Clone, Copy, Debug, Default)]
struct Times {
    p50: Duration,
    p999: Duration,
    longest: Duration,
}

impl Times {
    /// The worse of two.
    fn join(&mut self, other: Self) {
        self.p50 = self.p50.max(other.p50);
        self.p999 = self.p999.max(other.p999);
        self.longest = self.longest.max(other.longest);
    }
}

impl std::fmt::Display for Times {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "connect p50 {:.1?}, p99.9 {:.1?}, longest {:.1?}",
            self.p50, self.p999, self.longest
        )
    }
}

/// All attempts must have succeeded, and none have stalled.
fn judge(attempts: &[Attempt]) -> Result<Times> {
    let failed: Vec<_> = attempts.iter().filter_map(|attempt| attempt.outcome.err()).collect();
    ensure!(
        failed.is_empty(),
        "{} of {} connections failed, the first one: {}",
        failed.len(),
        attempts.len(),
        failed[0]
    );
    let mut times: Vec<Duration> = attempts.iter().map(|attempt| attempt.took).collect();
    times.sort();
    let at = |q: f64| {
        let index = ((times.len() as f64 * q) as usize).min(times.len().saturating_sub(1));
        times.get(index).copied().unwrap_or_default()
    };
    let found = Times {
        p50: at(0.5),
        p999: at(0.999),
        longest: at(1.0),
    };
    let mut stalled: BTreeMap<SocketAddr, usize> = BTreeMap::new();
    for attempt in attempts.iter().filter(|attempt| attempt.took >= STALL) {
        if let Ok(backend) = attempt.outcome {
            *stalled.entry(backend).or_default() += 1;
        }
    }
    ensure!(
        stalled.is_empty(),
        "of {} connects stalled, by backend: {stalled:?}, the longest for {:?}",
        times.len(),
        found.longest
    );
    Ok(found)
}
