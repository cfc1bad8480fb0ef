//! Tuples that are used again: always a new choice, in the same packet, whatever an earlier flow says.

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use anyhow::{Context, Result, ensure};

use super::Case;
use crate::{
    agent::Agent,
    lab::{
        Lab,
        plan::{self, Family},
        service::Service,
        state::Transport,
    },
    runner::{in_guest, scaled},
};

/// The cases.
pub const CASES: &[Case] = &[
    Case::new("K1", "new_pods_get_their_share_of_reused_tuples", shares),
    Case::new("K1", "a_tuple_is_chosen_anew_whenever_it_comes_back", intervals),
    Case::new("K3", "no_connect_waits_for_a_repeated_syn", latency),
    Case::new("K8", "a_scan_of_the_table_stalls_nobody", scan),
];

/// Long before a SYN would be repeated; a guest is slow, and its SYNs are repeated after a second like all.
fn no_stall() -> Duration {
    Duration::from_millis(if in_guest() { 950 } else { 500 })
}

/// Source addresses and ports of the client, each once.
fn sources(lab: &Lab, family: Family, count: usize) -> Vec<SocketAddr> {
    (0..count)
        .map(|_| plan::at(plan::client(family, 1), lab.next_port()))
        .collect()
}

/// Connects from each of these sources; the server closes first, so that the source is free again at once.
fn round(lab: &Lab, service: &Service<'_>, sources: &[SocketAddr]) -> Result<(BTreeMap<String, usize>, Vec<Duration>)> {
    let mut met = BTreeMap::new();
    let mut times = Vec::new();
    for from in sources {
        let talk = (lab.outside().from(*from).open(service.routed())).with_context(|| format!("from {from}"))?;
        *met.entry(talk.met.name.clone()).or_default() += 1;
        times.push(talk.took);
        talk.have_closed()?;
    }
    times.sort();
    Ok((met, times))
}

fn longest(times: &[Duration]) -> Duration {
    times.last().copied().unwrap_or_default()
}

fn shares(lab: &Lab, family: Family) -> Result<String> {
    let service = lab.service(family).load_balancer("VIP");
    let pods = [lab.pod(1, 1), lab.pod(1, 2), lab.pod(2, 1), lab.pod(2, 2)];
    let ready = |count: usize| -> Vec<_> { pods.iter().take(count).map(|pod| pod.ready(family)).collect() };
    let sources = sources(lab, family, scaled(200, 60));
    service.apply(&ready(2))?;
    round(lab, &service, &sources)?;
    round(lab, &service, &sources)?;
    let reused = lab.node(1).counted("reused")?;
    service.apply(&ready(4))?;
    let (met, times) = round(lab, &service, &sources)?;
    lab.node(1).wait_counted("reused", reused + sources.len() as u64)?;
    for pod in &pods[2..] {
        let share = met.get(&pod.name).copied().unwrap_or(0) as f64 / sources.len() as f64;
        // A quarter each; four standard deviations of so few tuples are far from nothing.
        let least = if in_guest() { 0.02 } else { 0.12 };
        ensure!(
            share >= least,
            "{} got {share:.3} of the reused tuples: {met:?}",
            pod.name
        );
    }
    ensure!(longest(&times) < no_stall(), "a connect took {:?}", longest(&times));
    service.wait_connects(1, 3 * sources.len() as u64)?;
    Ok(format!("{met:?} of {} reused tuples", sources.len()))
}

fn intervals(lab: &Lab, family: Family) -> Result<String> {
    let service = lab.service(family).load_balancer("VIP");
    let pods = [lab.pod(1, 1), lab.pod(2, 1)];
    service.apply(&[pods[0].ready(family)])?;
    let from = plan::at(plan::client(family, 1), lab.next_port());
    let dial = |wanted: &str| -> Result<Duration> {
        let talk = lab.outside().from(from).open(service.routed())?;
        ensure!(talk.met.name == wanted, "{:?}, and not {wanted}", talk.met);
        let flow = (lab.node(1).flow(Transport::Tcp, from, service.routed())?).context("the flow")?;
        ensure!(flow.is_answered() && !flow.is_closed(), "{flow:?}");
        let took = talk.took;
        talk.have_closed()?;
        Ok(took)
    };
    dial(&pods[0].name)?;
    let mut slowest = Duration::ZERO;
    let seconds = [1, 29, 31, 59, 61, 119, 121];
    for (n, seconds) in seconds.into_iter().enumerate() {
        let now = pods[(n + 1) % 2];
        service.apply(&[now.ready(family)])?;
        lab.node(1).let_pass(seconds)?;
        let took = dial(&now.name).with_context(|| format!("{seconds} s after the close"))?;
        ensure!(took < no_stall(), "{seconds} s after the close connect took {took:?}");
        slowest = slowest.max(took);
    }
    service.wait_connects(1, 1 + seconds.len() as u64)?;
    Ok(format!(
        "{seconds:?} s after the close, the slowest connect {slowest:.1?}"
    ))
}

fn latency(lab: &Lab, family: Family) -> Result<String> {
    let service = lab.service(family).load_balancer("VIP");
    service.apply(&[lab.pod(1, 1).ready(family), lab.pod(2, 1).ready(family)])?;
    let sources = sources(lab, family, 10);
    let mut times = Vec::new();
    for _ in 0..scaled(60, 8) {
        times.extend(round(lab, &service, &sources)?.1);
    }
    times.sort();
    ensure!(longest(&times) < no_stall(), "a connect took {:?}", longest(&times));
    let p999 = times[(times.len() * 999 / 1000).min(times.len() - 1)];
    let limit = Duration::from_millis(if in_guest() { 950 } else { 50 });
    ensure!(p999 < limit, "the 99.9th percentile of connects is {p999:?}");
    Ok(format!(
        "{} connects from {} tuples: p50 {:.1?}, p99.9 {p999:.1?}",
        times.len(),
        sources.len(),
        times[times.len() / 2]
    ))
}

fn scan(lab: &Lab, family: Family) -> Result<String> {
    let service = lab.service(family).load_balancer("VIP");
    service.apply(&[lab.pod(1, 1).ready(family), lab.pod(2, 1).ready(family)])?;
    let sources = sources(lab, family, scaled(40, 10));
    let node = lab.node(1);
    let (scans, times) = std::thread::scope(|scope| -> Result<_> {
        let (stop, told) = std::sync::mpsc::channel::<()>();
        let scanner = scope.spawn(move || -> Result<u32> {
            let mut scans = 0;
            while told.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
                let listed = node.ask(Agent::conns)?;
                ensure!(
                    listed.items.len() as u64 <= listed.total,
                    "{} of {}",
                    listed.items.len(),
                    listed.total
                );
                scans += 1;
            }
            Ok(scans)
        });
        let mut times = Vec::new();
        for _ in 0..scaled(10, 3) {
            times.extend(round(lab, &service, &sources)?.1);
        }
        drop(stop);
        let scans = scanner.join().map_err(|_| anyhow::anyhow!("the scan panicked"))??;
        times.sort();
        Ok((scans, times))
    })?;
    ensure!(longest(&times) < no_stall(), "a connect took {:?}", longest(&times));
    ensure!(scans > 0, "no scan ended while connections were made");
    Ok(format!(
        "{} connects beside {scans} scans, the slowest {:.1?}",
        times.len(),
        longest(&times)
    ))
}
