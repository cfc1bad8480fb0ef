//! Which endpoints get new connections: conditions, the fallback to terminating ones, topology (C5, C7, C8).

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::{Case, Scene, Stage, endpoint, routed};
use crate::{
    kube::stage::{From, StagePod, StageService},
    lab::{dial::Failure, node},
};

/// The cases.
pub const CASES: &[Case] = &[
    Case::row("C5", "conditions_that_are_not_said_have_their_defaults", defaults),
    Case::row("C5", "readiness_of_pods_decides", readiness),
    Case::row(
        "C7",
        "both_sets_fall_back_to_terminating_endpoints_on_their_own",
        fallback,
    ),
    Case::row("C7", "topology_does_not_count_in_the_fallback", fallback_topology),
    Case::row("C8", "traffic_distribution_keeps_to_the_node_or_the_zone", distribution),
    Case::row("C8", "hints_count_only_where_all_have_them_and_one_is_for_here", hints),
];

fn defaults(stage: &Stage<'_>) -> Result<String> {
    let pod = stage.pod(2)?;
    let client = stage.client(1)?;
    let service = stage.named_service("hand", stage.by_hand(), &json!({}))?;
    let all = [
        (json!({}), true),
        (json!(null), true),
        (json!({"serving": false}), true),
        (json!({"terminating": true}), true),
        (json!({"ready": false}), false),
        (json!({"ready": false, "serving": true}), false),
        (json!({"ready": false, "terminating": true}), true),
        (json!({"ready": false, "serving": false, "terminating": true}), false),
    ];
    let count = all.len();
    for (conditions, usable) in all {
        for family in stage.families() {
            let endpoint = endpoint(&pod, *family, &conditions);
            stage.slice("a", &service.name, *family, &json!([endpoint]))?;
        }
        stage.cluster.settle()?;
        for family in stage.families() {
            let (from, target) = (From::Pod(&client), service.cluster(*family)?);
            let checked = if usable {
                stage.meet(&from, target, &[&pod])
            } else {
                stage.fail(&from, target, Failure::Refused)
            };
            checked.with_context(|| format!("conditions {conditions}"))?;
        }
    }
    Ok(format!("{count} sets of conditions, none of them whole"))
}

fn readiness(stage: &Stage<'_>) -> Result<String> {
    let pods = stage.pods(&[1, 2])?;
    let client = stage.client(3)?;
    let service = stage.service(|spec| *spec = stage.two_ports())?;
    let steps: [(&[bool; 2], &[usize]); 5] = [
        (&[true, true], &[0, 1]),
        (&[false, true], &[1]),
        (&[false, false], &[]),
        (&[true, false], &[0]),
        (&[true, true], &[0, 1]),
    ];
    for (probes, members) in steps {
        for (pod, probe) in pods.iter().zip(probes) {
            stage.set_ready(pod, *probe)?;
        }
        let who: Vec<_> = members.iter().map(|n| &pods[*n]).collect();
        stage.have(&service, &who)?;
        stage.holds(3, &service, &who)?;
        for family in stage.families() {
            let (from, target) = (From::Pod(&client), service.cluster(*family)?);
            if who.is_empty() {
                stage.fail(&from, target, Failure::Refused)?;
            } else {
                stage.meet(&from, target, &who)?;
            }
        }
    }
    Ok("five steps of two pods' probes, the third with none".to_owned())
}

/// Waits until the API server has these pods as serving while they terminate, and these as ready; then the agents.
fn draining(stage: &Stage<'_>, service: &StageService, draining: &[&StagePod], ready: &[&StagePod]) -> Result<()> {
    stage.wait_endpoints(service, ready)?;
    stage.slices_say(service, "terminating endpoints", |found| {
        draining.iter().all(|pod| {
            found.iter().any(|one| {
                let conditions = &one["conditions"];
                one["targetRef"]["name"] == *pod.name
                    && conditions["terminating"] == true
                    && conditions["serving"] == true
            })
        })
    })
}

fn fallback(stage: &Stage<'_>) -> Result<String> {
    const N: u8 = 10;
    let pods = stage.pods(&[1, 2])?;
    let (first, second) = (&pods[0], &pods[1]);
    let unready = stage.pod(1)?;
    stage.set_ready(&unready, false)?;
    let client = stage.client(3)?;
    let service = stage.balancer(N, |spec| spec["externalTrafficPolicy"] = json!("Local"))?;
    stage.have(&service, &[first, second])?;
    // Whom the cluster address meets, and whom outside clients meet by nodes 1 and 2.
    let check = |what: &str, cluster: &[&StagePod], by_first: &[&StagePod], by_second: &[&StagePod]| -> Result<()> {
        for family in stage.families() {
            let inside = stage.meet(&From::Pod(&client), service.cluster(*family)?, cluster);
            inside.context(what.to_owned())?;
            for (node, pods) in [(1, by_first), (2, by_second)] {
                let target = service.node_port(*family, node)?;
                stage.meet(&From::Outside, target, pods).context(what.to_owned())?;
            }
            stage.meet(&From::Outside, routed(*family, N), by_first)?;
        }
        Ok(())
    };
    check("all ready", &[first, second], &[first], &[second])?;
    stage.terminate(first)?;
    draining(stage, &service, &[first], &[second])?;
    // The cluster's set has a ready one, node 1 has none.
    check("one terminating", &[second], &[first], &[second])?;
    stage.terminate(second)?;
    draining(stage, &service, &[first, second], &[])?;
    check("both terminating", &[first, second], &[first], &[second])?;
    let third = stage.pod(1)?;
    draining(stage, &service, &[first, second], &[&third])?;
    check("a ready one beside", &[&third], &[&third], &[second])?;
    // One that terminates and serves no longer is no fallback.
    stage.end(&third)?;
    stage.set_ready(first, false)?;
    stage.slices_say(&service, "one that no longer serves", |found| {
        found.len() == 3
            && found
                .iter()
                .any(|one| one["targetRef"]["name"] == *first.name && one["conditions"]["serving"] == false)
    })?;
    let before = stage.cluster.node(1).counted("policy_dropped")?;
    for family in stage.families() {
        stage.meet(&From::Pod(&client), service.cluster(*family)?, &[second])?;
        stage.silent(&From::Outside, super::Over::Tcp, routed(*family, N))?;
    }
    let families = stage.families().len() as u64;
    stage
        .cluster
        .node(1)
        .wait_counted("policy_dropped", before + families)?;
    Ok("each set on its own over five states of three pods, the one that is not ready never met".to_owned())
}

fn fallback_topology(stage: &Stage<'_>) -> Result<String> {
    let pods = stage.pods(&[1, 3])?;
    let all: Vec<_> = pods.iter().collect();
    let clients = [stage.client(1)?, stage.client(3)?];
    let service = stage.named_service("hand", stage.by_hand(), &json!({}))?;
    let say = |conditions: &Value| -> Result<()> {
        for family in stage.families() {
            let endpoints: Vec<Value> = pods
                .iter()
                .map(|pod| {
                    let mut endpoint = endpoint(pod, *family, conditions);
                    endpoint["hints"] = json!({
                        "forNodes": [{"name": node::name(pod.place.node)}],
                        "forZones": [{"name": crate::kube::kubelet::zone(pod.place.node)}],
                    });
                    endpoint
                })
                .collect();
            stage.slice("a", &service.name, *family, &json!(endpoints))?;
        }
        stage.cluster.settle()
    };
    for _ in 0..2 {
        say(&json!({"ready": true}))?;
        for family in stage.families() {
            for (client, pod) in clients.iter().zip(&pods) {
                stage.meet(&From::Pod(client), service.cluster(*family)?, &[pod])?;
            }
        }
        say(&json!({"ready": false, "serving": true, "terminating": true}))?;
        for family in stage.families() {
            for client in &clients {
                stage.meet(&From::Pod(client), service.cluster(*family)?, &all)?;
            }
        }
    }
    Ok("each node's own while ready, all while they terminate".to_owned())
}

fn distribution(stage: &Stage<'_>) -> Result<String> {
    let pods = stage.pods(&[1, 2, 3])?;
    let all: Vec<_> = pods.iter().collect();
    let mut service = stage.service(|_| {})?;
    let clients = [stage.client(1)?, stage.client(2)?, stage.client(3)?];
    stage.have(&service, &all)?;
    let mut check = |value: Value, kind: Option<&str>, of: &dyn Fn(usize) -> Vec<usize>| -> Result<()> {
        stage.change(&mut service, &json!({"trafficDistribution": value}))?;
        stage.slices_say(&service, "hints", |found| {
            found.len() == 3
                && found.iter().all(|one| match kind {
                    Some(kind) => one["hints"][kind].is_array(),
                    None => one["hints"].is_null(),
                })
        })?;
        for family in stage.families() {
            for (n, client) in clients.iter().enumerate() {
                let wanted: Vec<_> = of(n).into_iter().map(|n| &pods[n]).collect();
                let met = stage.meet(&From::Pod(client), service.cluster(*family)?, &wanted);
                met.with_context(|| format!("{value}"))?;
            }
        }
        for n in 0..clients.len() {
            let wanted: Vec<_> = of(n).into_iter().map(|n| &pods[n]).collect();
            stage
                .holds(n as u8 + 1, &service, &wanted)
                .with_context(|| format!("{value}"))?;
        }
        Ok(())
    };
    check(json!("PreferSameNode"), Some("forNodes"), &|n| vec![n])?;
    check(json!("PreferSameZone"), Some("forZones"), &|n| {
        if n == 2 { vec![2] } else { vec![0, 1] }
    })?;
    check(Value::Null, None, &|_| vec![0, 1, 2])?;
    // A node whose own pod is not ready has its zone's, and a zone without any has all.
    check(json!("PreferSameNode"), Some("forNodes"), &|n| vec![n])?;
    stage.set_ready(&pods[1], false)?;
    stage.have(&service, &[&pods[0], &pods[2]])?;
    for family in stage.families() {
        stage.meet(&From::Pod(&clients[0]), service.cluster(*family)?, &[&pods[0]])?;
        stage.meet(&From::Pod(&clients[1]), service.cluster(*family)?, &[&pods[0]])?;
        stage.meet(&From::Pod(&clients[2]), service.cluster(*family)?, &[&pods[2]])?;
    }
    Ok("the node's own, the zone's, all again; the zone's where the node has none".to_owned())
}

fn hints(stage: &Stage<'_>) -> Result<String> {
    let pods = stage.pods(&[1, 2, 3])?;
    let client = stage.client(1)?;
    let service = stage.named_service("hand", stage.by_hand(), &json!({}))?;
    let named = |names: &[&str]| json!(names.iter().map(|name| json!({"name": name})).collect::<Vec<_>>());
    let nodes = |names: &[&str]| json!({"forNodes": named(names)});
    let zones = |names: &[&str]| json!({"forZones": named(names)});
    let both = |nodes: &[&str], zones: &[&str]| json!({"forNodes": named(nodes), "forZones": named(zones)});
    let steps: [(&str, [Value; 3], &[usize]); 7] = [
        (
            "one for this node",
            [nodes(&["node-1"]), nodes(&["node-2"]), nodes(&["node-3"])],
            &[0],
        ),
        (
            "two for this node",
            [nodes(&["node-2"]), nodes(&["node-1"]), nodes(&["node-3", "node-1"])],
            &[1, 2],
        ),
        (
            "one without",
            [nodes(&["node-1"]), nodes(&["node-2"]), Value::Null],
            &[0, 1, 2],
        ),
        (
            "none for here",
            [nodes(&["node-2"]), nodes(&["node-2"]), nodes(&["node-3"])],
            &[0, 1, 2],
        ),
        (
            "one for this zone",
            [zones(&["zone-b"]), zones(&["zone-a"]), zones(&["zone-b"])],
            &[1],
        ),
        (
            "zones where nodes do not serve",
            [
                both(&["node-2"], &["zone-a"]),
                both(&["node-2"], &["zone-b"]),
                both(&["node-3"], &["zone-a"]),
            ],
            &[0, 2],
        ),
        (
            "a zone missing",
            [zones(&["zone-a"]), zones(&["zone-b"]), Value::Null],
            &[0, 1, 2],
        ),
    ];
    let count = steps.len();
    for (what, hints, wanted) in steps {
        for family in stage.families() {
            let endpoints: Vec<Value> = pods
                .iter()
                .zip(&hints)
                .map(|(pod, hints)| {
                    let mut endpoint = super::ready(pod, *family);
                    endpoint["hints"] = hints.clone();
                    endpoint
                })
                .collect();
            stage.slice("a", &service.name, *family, &json!(endpoints))?;
        }
        stage.cluster.settle()?;
        let wanted: Vec<_> = wanted.iter().map(|n| &pods[*n]).collect();
        for family in stage.families() {
            let met = stage.meet(&From::Pod(&client), service.cluster(*family)?, &wanted);
            met.context(what.to_owned())?;
        }
        stage.holds(1, &service, &wanted).context(what.to_owned())?;
    }
    Ok(format!("{count} sets of hints"))
}
