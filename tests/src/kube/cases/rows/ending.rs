//! Flows and connections whose pods end, and agents that are restarted meanwhile (C19, C20).

use anyhow::{Context, Result, ensure};

use super::{AT_ONCE, BOTH, Case, Over, Scene, Stage, backends, routed};
use crate::{
    agent::until,
    kube::stage::{From, StagePod},
    lab::{
        dial::{Dialer, Failure},
        state::Transport,
    },
};

/// The cases.
pub const CASES: &[Case] = &[
    Case::row("C19", "a_flow_is_chosen_anew_when_its_pod_is_gone", chosen_anew),
    Case::row(
        "C19",
        "a_flow_that_began_before_the_first_endpoint_works",
        first_endpoint,
    ),
    Case::row("C19", "a_restart_purges_no_flow", restart),
    Case::row("C20", "connections_live_until_their_pod_is_gone", connections),
];

/// Two pods: the one of that name, and the other.
fn met_and_other<'p>(name: &str, pods: &'p [StagePod]) -> (&'p StagePod, &'p StagePod) {
    if pods[0].name == name {
        (&pods[0], &pods[1])
    } else {
        (&pods[1], &pods[0])
    }
}

fn chosen_anew(stage: &Stage<'_>) -> Result<String> {
    const N: u8 = 50;
    let node = stage.cluster.node(1);
    let service = stage.balancer(N, |_| {})?;
    for family in stage.families() {
        let pods = stage.pods(&[1, 2])?;
        stage.have(&service, &[&pods[0], &pods[1]])?;
        let counted = node.counted("reresolved")?;
        let socket = stage.cluster.outside().datagrams(routed(*family, N))?;
        let first = socket.ask("?")?;
        let (had, other) = met_and_other(&first.name, &pods);
        // While it terminates the flow stays, and new ones go elsewhere.
        stage.terminate(had)?;
        stage.have(&service, &[other])?;
        for _ in 0..3 {
            let met = socket.ask("?")?;
            ensure!(met == first, "a flow left a pod that only terminates: {met:?}");
        }
        for _ in 0..6 {
            let met = stage.cluster.outside().ask(routed(*family, N))?;
            ensure!(met.name == other.name, "a new flow went to a terminating pod: {met:?}");
        }
        ensure!(node.counted("reresolved")? == counted, "a flow was chosen anew");
        stage.end(had)?;
        stage.slices_say(&service, "the pod that is gone", |found| found.len() == 1)?;
        for _ in 0..3 {
            let met = socket.ask("?").context("after the pod was gone")?;
            ensure!(met.name == other.name, "{met:?}");
        }
        let found = node.counted("reresolved")? - counted;
        ensure!(found == 1, "one flow was chosen anew {found} times");
        stage.end(other)?;
        stage.have(&service, &[])?;
    }
    Ok("stayed while its pod terminated, went on with the other when it was gone".to_owned())
}

fn first_endpoint(stage: &Stage<'_>) -> Result<String> {
    const N: u8 = 51;
    let service = stage.balancer(N, |_| {})?;
    let client = stage.client(1)?;
    stage.have(&service, &[])?;
    let mut sockets = Vec::new();
    for family in stage.families() {
        // The socket of a pod is told so when it connects; the one outside learns by its datagram.
        let refused = stage.attempt(&From::Pod(&client), Over::Udp, service.cluster(*family)?, AT_ONCE)?;
        ensure!(refused == Err(Failure::Refused), "{refused:?}");
        let socket = stage.cluster.outside().datagrams(routed(*family, N))?;
        let refused = socket.ask("?");
        ensure!(refused == Err(Failure::Refused), "without an endpoint: {refused:?}");
        sockets.push(socket);
    }
    let mut object = stage.pod_object(2);
    object["metadata"]["annotations"] = serde_json::json!({crate::kube::kubelet::READY: "false"});
    let pod = stage.make_pod(&object)?;
    stage.slices_say(&service, "one that is not ready", |found| found.len() == 1)?;
    for socket in &sockets {
        let refused = socket.ask("?");
        ensure!(
            refused == Err(Failure::Refused),
            "with one that is not ready: {refused:?}"
        );
    }
    stage.set_ready(&pod, true)?;
    stage.have(&service, &[&pod])?;
    for socket in &sockets {
        let met = socket.ask("?").context("with the first endpoint")?;
        ensure!(met.name == pod.name, "{met:?}");
    }
    stage.wait_connects(1, &service, sockets.len() as u64)?;
    Ok("refused before and while not ready, served on the same sockets after".to_owned())
}

fn restart(stage: &Stage<'_>) -> Result<String> {
    const N: u8 = 52;
    let pods = stage.pods(&[1, 2])?;
    let client = stage.client(1)?;
    let service = stage.balancer(N, |_| {})?;
    stage.have(&service, &[&pods[0], &pods[1]])?;
    let node = stage.cluster.node(1);
    let mut outside = Vec::new();
    let mut inside = Vec::new();
    for family in stage.families() {
        let target = routed(*family, N);
        for _ in 0..4 {
            let socket = stage.cluster.outside().datagrams(target)?;
            let met = socket.ask("?")?;
            let flow = node.flow(Transport::Udp, socket.own()?, target)?;
            outside.push((
                socket,
                met,
                target,
                flow.context("the flow of a datagram that was answered")?,
            ));
            let socket = node.inside(|| {
                Dialer::new(&client.place.netns)
                    .datagrams(service.cluster(*family)?)
                    .map_err(anyhow::Error::from)
            })??;
            let met = socket.ask("?")?;
            inside.push((socket, met));
        }
    }
    let all_same = |when: &str| -> Result<()> {
        for (socket, before, target, flow) in &outside {
            let met = socket.ask("?").with_context(|| when.to_owned())?;
            ensure!(met == *before, "{when}: {met:?}, and {before:?} before");
            let now = node.flow(Transport::Udp, socket.own()?, *target)?;
            ensure!(
                now.is_some_and(|now| now.start_ns == flow.start_ns),
                "{when}: another flow, {now:?}"
            );
        }
        for (socket, before) in &inside {
            let met = socket.ask("?").with_context(|| when.to_owned())?;
            ensure!(met == *before, "{when}: {met:?}, and {before:?} before");
        }
        Ok(())
    };
    node.stop()?;
    all_same("while no agent runs")?;
    node.start()?;
    stage.cluster.settle()?;
    all_same("after a restart")?;
    node.kill()?;
    node.start()?;
    stage.cluster.settle()?;
    all_same("after the agent was killed")?;
    let count = outside.len() + inside.len();
    Ok(format!(
        "{count} flows as they were, by source and pod, over a restart and a kill"
    ))
}

fn connections(stage: &Stage<'_>) -> Result<String> {
    const N: u8 = 53;
    let pods = stage.pods(&[1, 2])?;
    let client = stage.client(1)?;
    let service = stage.balancer(N, |_| {})?;
    stage.have(&service, &[&pods[0], &pods[1]])?;
    let mut talks = Vec::new();
    for family in stage.families() {
        for (from, target) in [
            (From::Outside, routed(*family, N)),
            (From::Pod(&client), service.cluster(*family)?),
        ] {
            // One connection to each pod.
            for pod in &pods {
                let talk = until("a connection to each pod", || {
                    let talk = stage.through(&from, |dialer| dialer.open(target))??;
                    ensure!(talk.met.name == pod.name, "{:?}", talk.met);
                    Ok(talk)
                })?;
                talks.push((talk, pod));
            }
        }
    }
    let new_ones_meet = |who: &[&StagePod]| -> Result<()> {
        for family in stage.families() {
            stage.meet(&From::Outside, routed(*family, N), who)?;
            stage.meet(&From::Pod(&client), service.cluster(*family)?, who)?;
        }
        Ok(())
    };
    let (leaving, staying) = (&pods[0], &pods[1]);
    stage.terminate(leaving)?;
    stage.have(&service, &[staying])?;
    for (talk, pod) in &mut talks {
        talk.transfer(50_000, || Ok(()))
            .with_context(|| format!("{} while one terminates", pod.name))?;
    }
    new_ones_meet(&[staying])?;
    // Not even serving any more, and still there.
    stage.set_ready(leaving, false)?;
    stage.slices_say(&service, "one that no longer serves", |found| {
        found.iter().any(|one| one["conditions"]["serving"] == false)
    })?;
    for (talk, pod) in &mut talks {
        talk.transfer(50_000, || Ok(()))
            .with_context(|| format!("{} while one serves no longer", pod.name))?;
    }
    new_ones_meet(&[staying])?;
    stage.end(leaving)?;
    stage.slices_say(&service, "the pod that is gone", |found| found.len() == 1)?;
    let (mut ended, mut lived) = (0, 0);
    for (talk, pod) in &mut talks {
        let said = talk.say("are you there?");
        if pod.name == leaving.name {
            ensure!(said.is_err(), "a connection outlived its pod");
            ended += 1;
        } else {
            said.with_context(|| format!("the connection to {}", pod.name))?;
            lived += 1;
        }
    }
    let left = backends(stage, 1, &service)?;
    for family in stage.families() {
        let gone = leaving.place.ip(*family);
        ensure!(!left.contains_key(&gone), "{gone} is held still: {left:?}");
    }
    new_ones_meet(&[staying])?;
    ensure!(
        ended == lived && BOTH.len() * stage.families().len() == ended,
        "{ended} ended, {lived} live"
    );
    Ok(format!(
        "{ended} lived until their pod was gone and ended with it, {lived} others live on"
    ))
}
