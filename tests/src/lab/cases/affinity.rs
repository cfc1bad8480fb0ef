//! ClientIP affinity of clients outside the node.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::Case;
use crate::{
    lab::{
        Lab,
        plan::{self, Family},
        service::Service,
    },
    runner::scaled,
};

/// The cases.
pub const CASES: &[Case] = &[
    Case::new("C18", "a_client_outside_stays_with_its_pod_until_the_timeout", sticks),
    Case::new("K26", "affinity_ends_with_the_pod_that_it_is_to", ends),
];

fn sticky(lab: &Lab, family: Family, seconds: u32) -> Service<'_> {
    lab.service(family)
        .load_balancer("VIP")
        .with("sessionAffinity", "ClientIP")
        .with(
            "sessionAffinityConfig",
            json!({"clientIP": {"timeoutSeconds": seconds}}),
        )
}

fn sticks(lab: &Lab, family: Family) -> Result<String> {
    let service = sticky(lab, family, 100);
    let endpoints: Vec<_> = [(1, 1), (1, 2), (2, 1), (2, 2)]
        .map(|(node, n)| lab.pod(node, n).ready(family))
        .into();
    service.apply(&endpoints)?;
    let client = lab.outside();
    let one_of = |count| -> Result<String> {
        let names: BTreeSet<_> = client
            .dial_many(service.routed(), count)?
            .into_iter()
            .map(|met| met.name)
            .collect();
        ensure!(names.len() == 1, "one client met {names:?}");
        names.into_iter().next().context("connections met somebody")
    };
    let first = one_of(scaled(20, 10))?;
    // Each connection begins the time anew.
    for _ in 0..3 {
        lab.node(1).age_affinity(60)?;
        let now = one_of(1)?;
        ensure!(now == first, "after less than the timeout {now}, and {first} before");
    }
    let mut met = BTreeSet::new();
    for _ in 0..scaled(16, 12) {
        lab.node(1).age_affinity(101)?;
        met.insert(one_of(2)?);
    }
    ensure!(met.len() > 1, "after each timeout the choice was {met:?}");
    // Switched off, the same connections spread.
    let free = service
        .with("sessionAffinity", "None")
        .with("sessionAffinityConfig", json!(null));
    free.apply(&endpoints)?;
    let names: BTreeSet<_> = client
        .dial_many(free.routed(), scaled(20, 12))?
        .into_iter()
        .map(|met| met.name)
        .collect();
    ensure!(names.len() > 1, "without affinity one client met {names:?} alone");
    Ok(format!("{first} while it lasted, {} pods over its ends", met.len()))
}

fn ends(lab: &Lab, family: Family) -> Result<String> {
    let service = sticky(lab, family, 10_800);
    let (a, b) = (lab.pod(1, 1), lab.pod(2, 1));
    service.apply(&[a.ready(family), b.ready(family)])?;
    let client = lab.outside().from(plan::at(plan::client(family, 3), 0));
    let first = client.dial(service.routed())?.name;
    let (kept, other) = if first == a.name { (a, b) } else { (b, a) };
    service.apply(&[kept.unready(family), other.ready(family)])?;
    for met in client.dial_many(service.routed(), 6)? {
        ensure!(met.name == other.name, "a pod that is not ready was met: {met:?}");
    }
    // What it has now is what it keeps.
    service.apply(&[kept.ready(family), other.ready(family)])?;
    for met in client.dial_many(service.routed(), 6)? {
        ensure!(
            met.name == other.name,
            "the affinity that was begun does not hold: {met:?}"
        );
    }
    service.apply(&[kept.ready(family), other.draining(family)])?;
    for met in client.dial_many(service.routed(), 6)? {
        ensure!(met.name == kept.name, "a terminating pod was met: {met:?}");
    }
    service.wait_connects(1, 19)?;
    Ok("moved when its pod was not ready, stayed when that came back, moved when the next terminated".to_owned())
}
