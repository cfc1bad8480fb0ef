//! What a connect to a Service costs more than a direct one, and how evenly the ten backends of one Service are met.
//!
//! Blocks in turn, forwards and backwards; what is added is the median over rounds of the difference to the direct block of the
//! same round. Connections are made one after the other from one client. Evenness is Pearson's statistic D over the backends:
//! of independent choices its mean is 9, and 21.7 is passed once in a hundred times.

use std::{collections::BTreeMap, net::Ipv4Addr, net::SocketAddrV4};

use anyhow::{Result, ensure};

use super::{
    arm::Arm,
    proxy::Kind,
    town::{ENDPOINTS, TARGET},
};
use crate::bench::{
    Bench,
    dial::{self, Manner, Met},
    place::{Place, Topology, enter, serve_in},
    report::Metric,
    stats,
};

/// Connections of one block.
const BLOCK: usize = 200;
/// Rounds of one block an arm.
const ROUNDS: usize = 40;

/// What one arm's blocks took, and whom they met.
#[derive(Debug, Default)]
struct Blocks {
    p1: Vec<f64>,
    p50: Vec<f64>,
    met: BTreeMap<Ipv4Addr, u64>,
}

/// Measures every arm whose period is the default: the period does not matter to packets.
pub(super) fn measure(bench: &Bench, arms: &[Arm], metrics: &mut Vec<Metric>) -> Result<()> {
    let Some(first) = arms.first() else {
        return Ok(());
    };
    let town = first.town;
    enter(&bench.home)?;
    let direct = Place::new(Topology::Pod)?;
    let _backends = serve_in(&direct.server, TARGET, Manner::Tell)?;
    let endpoints = town.endpoints(0);
    let arms: Vec<&Arm> = arms
        .iter()
        .filter(|arm| !matches!(arm.kind, Kind::KubeProxy { at_once: true, .. }))
        .collect();
    let mut found: Vec<Blocks> = (0..=arms.len()).map(|_| Blocks::default()).collect();
    for round in 0..=ROUNDS {
        bench.check()?;
        let mut order: Vec<usize> = (0..=arms.len()).collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for at in order {
            let targets: Vec<SocketAddrV4> = match at.checked_sub(1) {
                None => {
                    enter(&bench.home)?;
                    direct.client.enter_current_thread()?;
                    endpoints
                        .iter()
                        .map(|ip| SocketAddrV4::new(*ip, TARGET.get()))
                        .collect()
                }
                Some(arm) => {
                    arms[arm].step_in()?;
                    vec![town.frontend(0)]
                }
            };
            let mut times = Vec::with_capacity(BLOCK);
            for target in targets.iter().cycle().take(BLOCK) {
                let (met, took) = dial::ask(*target)?;
                let Met::Backend(backend) = met else {
                    anyhow::bail!("a connection to {target} met {met:?}");
                };
                ensure!(endpoints.contains(&backend), "{target} led to {backend}");
                times.push(took);
                // The first round warms caches alone.
                if round > 0 {
                    *found[at].met.entry(backend).or_default() += 1;
                }
            }
            if round > 0 {
                found[at].p1.push(stats::quantile(&mut times, 0.01));
                found[at].p50.push(stats::median(&mut times));
            }
        }
    }
    bench.say("kube: connects are measured");
    let samples = BLOCK * ROUNDS;
    let (direct, others) = found.split_at_mut(1);
    metrics.push(
        Metric::new(
            "kube_connect_us_p50.direct",
            "us",
            stats::median(&mut direct[0].p50.clone()),
            samples,
        )
        .with("p1", stats::median(&mut direct[0].p1.clone())),
    );
    for (arm, blocks) in arms.iter().zip(others) {
        let kind = match arm.kind {
            Kind::Evenkeel => arm.kind.to_string(),
            Kind::KubeProxy { mode, .. } => mode.name().to_owned(),
        };
        metrics.push(
            Metric::new(
                format!("kube_connect_added_us_p50.{kind}"),
                "us",
                added(&blocks.p50, &direct[0].p50),
                samples,
            )
            .with("p1", added(&blocks.p1, &direct[0].p1))
            .with("services", town.count()),
        );
        let counts: Vec<u64> = blocks.met.values().copied().collect();
        metrics.push(
            Metric::new(
                format!("kube_spread_d.{kind}"),
                "1",
                unevenness(&counts, ENDPOINTS as usize),
                samples,
            )
            .with("backends", ENDPOINTS)
            .with("fewest", counts.iter().copied().min().unwrap_or(0))
            .with("most", counts.iter().copied().max().unwrap_or(0)),
        );
    }
    Ok(())
}

/// The median of the differences of the same rounds.
fn added(own: &[f64], direct: &[f64]) -> f64 {
    let mut differences: Vec<f64> = own.iter().zip(direct).map(|(own, direct)| own - direct).collect();
    stats::median(&mut differences)
}

/// Pearson's statistic of counts against equal parts; backends that were never met count as zero.
fn unevenness(counts: &[u64], backends: usize) -> f64 {
    let total: u64 = counts.iter().sum();
    if total == 0 {
        return 0.0;
    }
    let expected = total as f64 / backends as f64;
    let never = backends.saturating_sub(counts.len()) as f64 * expected;
    never
        + counts
            .iter()
            .map(|count| (*count as f64 - expected).powi(2) / expected)
            .sum::<f64>()
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "the values are exact")]
mod tests {
    use super::*;

    #[test]
    fn equal_counts_are_even_and_missing_backends_are_not() {
        assert_eq!(unevenness(&[5, 5, 5, 5], 4), 0.0);
        assert_eq!(unevenness(&[10, 10], 4), 10.0 + 10.0);
        assert_eq!(unevenness(&[], 4), 0.0);
        assert_eq!(unevenness(&[12, 8], 2), 0.8);
    }

    #[test]
    fn what_is_added_is_the_median_of_the_rounds() {
        assert_eq!(added(&[5.0, 9.0, 7.0], &[4.0, 4.0, 4.0]), 3.0);
    }
}
