//! Traffic policies: who is dropped, who is refused, who comes through.

use anyhow::{Context, Result, ensure};

use super::{Case, refused_quickly};
use crate::{
    lab::{
        Lab,
        dial::{Dialer, Failure, silence},
        plan::{self, Family},
    },
    runner::scaled,
};

/// The cases.
pub const CASES: &[Case] = &[
    Case::new(
        "C9",
        "an_external_local_policy_drops_without_a_local_endpoint",
        external_local,
    ),
    Case::new(
        "C9",
        "an_internal_local_policy_drops_a_guest_and_tells_a_socket",
        internal_local,
    ),
    Case::new("C10", "clients_inside_use_all_endpoints_under_a_local_policy", inside),
    Case::new("C11", "a_service_without_endpoints_refuses_under_every_policy", refuses),
];

fn external_local(lab: &Lab, family: Family) -> Result<String> {
    let service = lab
        .service(family)
        .load_balancer("VIP")
        .with("externalTrafficPolicy", "Local");
    service.apply(&[lab.pod(2, 1).ready(family), lab.pod(2, 2).ready(family)])?;
    let dropped = lab.node(1).counted("policy_dropped")?;
    let client = lab.outside();
    for target in [service.routed(), service.node_port(1)] {
        client.expect_silence(target)?;
        let asked = client.within(silence()).ask(target);
        ensure!(asked == Err(Failure::Silent), "a datagram to {target}: {asked:?}");
    }
    lab.node(1).wait_counted("policy_dropped", dropped + 4)?;
    let each = scaled(10, 5);
    service.route_to(&[2])?;
    for target in [service.routed(), service.node_port(2)] {
        for met in client.dial_many(target, each)? {
            ensure!(met.peer.ip() == plan::client(family, 1), "{met:?}");
        }
        client.ask(target)?;
    }
    service.wait_connects(2, 2 * (each as u64 + 1))?;
    ensure!(service.connects(1)? == 0, "node 1 counts connections that it dropped");
    Ok("silence from a node without an endpoint, the client's source at one with".to_owned())
}

fn internal_local(lab: &Lab, family: Family) -> Result<String> {
    let service = lab.service(family).with("internalTrafficPolicy", "Local");
    service.apply(&[lab.pod(2, 1).ready(family)])?;
    let dropped = lab.node(1).counted("policy_dropped")?;
    Dialer::new(&lab.guest).expect_silence(service.cluster())?;
    lab.node(1).wait_counted("policy_dropped", dropped + 1)?;
    let told = lab.node(1).inside(|| lab.pod(1, 1).dialer().dial(service.cluster()))?;
    ensure!(told == Err(Failure::Unreachable), "a socket on node 1: {told:?}");
    let met = lab
        .node(2)
        .inside(|| lab.pod(2, 2).dialer().dial(service.cluster()))??;
    ensure!(met.name == "pod-2-1", "{met:?}");
    // From outside the node the internal policy does not count.
    lab.outside().dial(service.node_port(1)).context("from outside")?;
    Ok("a guest meets silence, a socket EHOSTUNREACH, the endpoint's node is served".to_owned())
}

fn inside(lab: &Lab, family: Family) -> Result<String> {
    let service = lab
        .service(family)
        .load_balancer("VIP")
        .with("externalTrafficPolicy", "Local");
    service.apply(&[lab.pod(2, 1).ready(family)])?;
    for target in [service.routed(), service.node_port(1), service.cluster()] {
        let (socket, datagram) = lab.node(1).inside(|| {
            let dialer = lab.pod(1, 1).dialer();
            (dialer.dial(target), dialer.ask(target))
        })?;
        for met in [socket, datagram] {
            let met = met.with_context(|| format!("a pod to {target}"))?;
            ensure!(met.peer.ip() == plan::pod(family, 1, 1), "{met:?}");
        }
        let guest = Dialer::new(&lab.guest);
        for met in [guest.dial(target), guest.ask(target)] {
            let met = met.with_context(|| format!("a guest to {target}"))?;
            ensure!(met.peer.ip() == lab.guest_ip(family), "{met:?}");
        }
    }
    lab.outside().expect_silence(service.routed())?;
    service.wait_connects(1, 12)?;
    Ok("pods and guests reach an endpoint elsewhere, with their own source".to_owned())
}

fn refuses(lab: &Lab, family: Family) -> Result<String> {
    let refused = lab.node(1).counted("refused")?;
    let mut slowest = std::time::Duration::ZERO;
    let mut count = 0;
    for policy in ["Cluster", "Local"] {
        let service = lab
            .service(family)
            .load_balancer("VIP")
            .with("externalTrafficPolicy", policy)
            .with("internalTrafficPolicy", policy);
        for endpoints in [vec![], vec![lab.pod(1, 1).unready(family)]] {
            service.apply(&endpoints)?;
            for target in [service.routed(), service.node_port(1)] {
                slowest = slowest.max(refused_quickly(&lab.outside(), target)?);
            }
            slowest = slowest.max(refused_quickly(&Dialer::new(&lab.guest), service.cluster())?);
            count += 6;
        }
        ensure!(service.connects(1)? == 0, "refusals are no connections");
    }
    lab.node(1).wait_counted("refused", refused + count)?;
    Ok(format!(
        "{count} refusals, TCP and UDP, the slowest after {slowest:.1?}"
    ))
}
