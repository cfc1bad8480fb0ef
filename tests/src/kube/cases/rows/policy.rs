//! Traffic policies: who is dropped, who is refused, who comes through (C9 to C11).

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::{AT_ONCE, BOTH, Case, Over, Scene, Stage, port_over, routed, told_sockets};
use crate::{
    kube::stage::From,
    lab::{
        dial::{Failure, patience},
        plan,
    },
};

/// The cases.
pub const CASES: &[Case] = &[
    Case::row(
        "C9",
        "an_external_local_policy_drops_without_a_local_endpoint",
        external,
    ),
    Case::row("C9", "an_internal_local_policy_tells_a_socket_at_once", internal),
    Case::row("C10", "clients_inside_use_all_endpoints_under_a_local_policy", inside),
    Case::row("C11", "a_service_without_endpoints_refuses_under_every_policy", refuses),
];

fn external(stage: &Stage<'_>) -> Result<String> {
    const N: u8 = 11;
    let pod = stage.pod(2)?;
    let service = stage.balancer(N, |spec| spec["externalTrafficPolicy"] = json!("Local"))?;
    stage.have(&service, &[&pod])?;
    let node = stage.cluster.node(1);
    let before = node.counted("policy_dropped")?;
    for family in stage.families() {
        stage.silent(&From::Outside, Over::Tcp, routed(*family, N))?;
        stage.silent(&From::Outside, Over::Udp, port_over(&service, *family, 1, Over::Udp)?)?;
    }
    let families = stage.families().len() as u64;
    node.wait_counted("policy_dropped", before + 2 * families)?;
    ensure!(
        stage.connects(1, &service)? == 0,
        "node 1 counts connections that it dropped"
    );
    stage.route(N, &[2])?;
    for family in stage.families() {
        for over in BOTH {
            for target in [routed(*family, N), port_over(&service, *family, 2, over)?] {
                let met = stage.attempt(&From::Outside, over, target, patience())?;
                let met = met.with_context(|| format!("{over:?} to {target}"))?;
                ensure!(met.peer.ip() == plan::client(*family, 1), "{met:?}");
            }
        }
    }
    stage.wait_connects(2, &service, 4 * families)?;
    // With an endpoint of its own, node 1 serves too.
    let own = stage.pod(1)?;
    stage.have(&service, &[&pod, &own])?;
    stage.route(N, &[1])?;
    for family in stage.families() {
        stage.meet(&From::Outside, routed(*family, N), &[&own])?;
    }
    Ok("silence from a node without an endpoint, the client's source at one with".to_owned())
}

fn internal(stage: &Stage<'_>) -> Result<String> {
    let pod = stage.pod(2)?;
    let spec = {
        let mut spec = stage.two_ports();
        spec["internalTrafficPolicy"] = json!("Local");
        spec["type"] = json!("NodePort");
        spec
    };
    let service = stage.named_service("local", spec, &json!({}))?;
    stage.have(&service, &[&pod])?;
    let (here, there) = (stage.client(1)?, stage.client(2)?);
    let before = told_sockets(stage.cluster.node(1), "unreachable")?;
    for family in stage.families() {
        let target = service.cluster(*family)?;
        stage.fail(&From::Pod(&here), target, Failure::Unreachable)?;
        stage.fail(&From::Node(1), target, Failure::Unreachable)?;
        stage.meet(&From::Pod(&there), target, &[&pod])?;
        stage.meet(&From::Node(2), target, &[&pod])?;
        // From outside the internal policy does not count.
        stage.meet(&From::Outside, port_over(&service, *family, 1, Over::Tcp)?, &[&pod])?;
    }
    let told = told_sockets(stage.cluster.node(1), "unreachable")? - before;
    let wanted = 4 * stage.families().len() as u64;
    ensure!(told == wanted, "{told} connects were told so, and not {wanted}");
    let own = stage.pod(1)?;
    stage.have(&service, &[&pod, &own])?;
    for family in stage.families() {
        stage.meet(&From::Pod(&here), service.cluster(*family)?, &[&own])?;
        stage.meet(&From::Pod(&there), service.cluster(*family)?, &[&pod])?;
    }
    Ok(format!(
        "{told} connects met EHOSTUNREACH at once, the endpoint's own node is served"
    ))
}

fn inside(stage: &Stage<'_>) -> Result<String> {
    const N: u8 = 12;
    let pod = stage.pod(2)?;
    let client = stage.client(1)?;
    let external: Vec<_> = stage
        .families()
        .iter()
        .map(|family| plan::routed(*family, N + 1))
        .collect();
    stage.route(N + 1, &[1])?;
    let service = stage.balancer(N, |spec| {
        spec["externalTrafficPolicy"] = json!("Local");
        spec["externalIPs"] = json!(external);
    })?;
    stage.have(&service, &[&pod])?;
    for family in stage.families() {
        for over in BOTH {
            let targets = [
                routed(*family, N),
                routed(*family, N + 1),
                port_over(&service, *family, 1, over)?,
                service.cluster(*family)?,
            ];
            for target in targets {
                for (from, source) in [
                    (From::Pod(&client), client.place.ip(*family)),
                    (From::Node(1), plan::node(*family, 1)),
                ] {
                    let met = stage.attempt(&from, over, target, patience())?;
                    let met = met.with_context(|| format!("from {from}, {over:?} to {target}"))?;
                    ensure!(met.name == pod.name && met.peer.ip() == source, "{met:?} from {from}");
                }
            }
        }
        stage.silent(&From::Outside, Over::Tcp, routed(*family, N))?;
        stage.silent(&From::Outside, Over::Tcp, routed(*family, N + 1))?;
    }
    let wanted = 16 * stage.families().len() as u64;
    stage.wait_connects(1, &service, wanted)?;
    Ok(format!(
        "{wanted} connections of a pod and a node, with their own sources; silence outside"
    ))
}

fn refuses(stage: &Stage<'_>) -> Result<String> {
    const N: u8 = 14;
    let client = stage.client(1)?;
    let node = stage.cluster.node(1);
    let (refused, told) = (node.counted("refused")?, told_sockets(node, "refused")?);
    let mut slowest = Duration::ZERO;
    let mut service = stage.balancer(N, |_| {})?;
    let mut packets = 0;
    let mut sockets = 0;
    for policy in ["Cluster", "Local"] {
        stage.change(
            &mut service,
            &json!({"externalTrafficPolicy": policy, "internalTrafficPolicy": policy}),
        )?;
        // First without any pod, then with one that is not ready.
        if policy == "Local" {
            let mut object = stage.pod_object(1);
            object["metadata"]["annotations"] = json!({crate::kube::kubelet::READY: "false"});
            stage.make_pod(&object)?;
            stage.slices_say(&service, "one that is not ready", |found| found.len() == 1)?;
        }
        stage.have(&service, &[])?;
        for family in stage.families() {
            for over in BOTH {
                for target in [routed(*family, N), port_over(&service, *family, 1, over)?] {
                    let began = Instant::now();
                    let met = stage.attempt(&From::Outside, over, target, AT_ONCE)?;
                    slowest = slowest.max(began.elapsed());
                    ensure!(
                        met == Err(Failure::Refused),
                        "{policy}: {over:?} to {target} meets {met:?}"
                    );
                    packets += 1;
                }
            }
            stage.fail(&From::Pod(&client), service.cluster(*family)?, Failure::Refused)?;
            stage.fail(&From::Pod(&client), routed(*family, N), Failure::Refused)?;
            sockets += 4;
        }
    }
    ensure!(stage.connects(1, &service)? == 0, "refusals are no connections");
    node.wait_counted("refused", refused + packets)?;
    let told = told_sockets(node, "refused")? - told;
    ensure!(told == sockets, "{told} connects were refused, and not {sockets}");
    Ok(format!(
        "{packets} packets and {sockets} connects, the slowest packet after {slowest:.1?}"
    ))
}
