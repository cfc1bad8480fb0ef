//! What load balancers outside are told of each node, over the health-check node port.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::Case;
use crate::{
    agent::until,
    lab::{
        Lab,
        dial::Failure,
        plan::{self, Family},
    },
};

/// The cases.
pub const CASES: &[Case] = &[Case::new(
    "C21",
    "each_node_tells_a_load_balancer_of_its_own_endpoints",
    tells,
)];

/// Waits until a node's health check says this.
fn wait_for(lab: &Lab, family: Family, node: u8, port: u16, wanted: (u16, u64)) -> Result<()> {
    let target = plan::at(plan::node(family, node), port);
    until("the answer to a health check", || {
        let page = lab.outside().get(target, "/")?;
        let body: Value = serde_json::from_str(&page.body).with_context(|| format!("{page:?}"))?;
        let found = (page.status, body["localEndpoints"].as_u64().unwrap_or(u64::MAX));
        ensure!(found == wanted, "{page:?} is not {wanted:?}");
        let weight = format!("x-load-balancing-endpoint-weight: {}", wanted.1);
        ensure!(page.head.to_lowercase().contains(&weight), "{page:?} has no {weight}");
        Ok(())
    })
    .with_context(|| format!("node {node}"))
}

fn tells(lab: &Lab, family: Family) -> Result<String> {
    let port = lab.next_health_port();
    let service = lab
        .service(family)
        .load_balancer("VIP")
        .with("externalTrafficPolicy", "Local")
        .with("healthCheckNodePort", port);
    service.apply(&[
        lab.pod(1, 1).ready(family),
        lab.pod(1, 2).ready(family),
        lab.pod(2, 1).ready(family),
    ])?;
    for (node, wanted) in [(1, (200, 2)), (2, (200, 1)), (3, (503, 0))] {
        wait_for(lab, family, node, port, wanted)?;
    }
    // Terminating ones still serve, and new load is to go elsewhere.
    service.apply(&[lab.pod(1, 1).draining(family), lab.pod(2, 1).ready(family)])?;
    wait_for(lab, family, 1, port, (503, 0))?;
    wait_for(lab, family, 2, port, (200, 1))?;
    service.route_to(&[1])?;
    let met = lab.outside().dial(service.routed()).context("the terminating pod")?;
    ensure!(met.name == "pod-1-1", "{met:?}");
    let service = service.with("externalTrafficPolicy", "Cluster");
    service.apply(&[lab.pod(1, 1).ready(family)])?;
    let target = plan::at(plan::node(family, 1), port);
    until("the port to close", || {
        let page = lab.outside().get(target, "/").map(|page| page.status);
        ensure!(page == Err(Failure::Refused), "{page:?}");
        Ok(())
    })?;
    Ok("200 where pods are ready, 503 elsewhere and where they only terminate, closed under Cluster".to_owned())
}
