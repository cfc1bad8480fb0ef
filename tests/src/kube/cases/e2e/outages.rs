//! Agents and API servers that end and come again, under clients that dial all the time.

use std::{fs, net::SocketAddr};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::{Case, Stage, asks, connects, in_families, node_ports, served};
use crate::{
    agent::until,
    kube::{
        process::{MISSED, REACHED},
        stage::{From, StagePod},
    },
    lab::hammer::Hammer,
};

/// The cases.
pub(super) const CASES: &[Case] = &[
    Case::e2e("proxy_restart", |stage| proxy(stage, false)),
    Case::e2e("proxy_restart_after_a_kill", |stage| proxy(stage, true)),
    Case::e2e("api_server_restart", api_server),
];

/// How many more dials say that a client gets on.
const SOME: u64 = 20;

/// Clients that dial without end: a pod by cluster addresses, somebody outside by node ports.
struct Clients<'s> {
    stage: &'s Stage<'s>,
    pod: StagePod,
    outside: Vec<Hammer>,
}

impl<'s> Clients<'s> {
    fn start(stage: &'s Stage<'s>, inside: &[SocketAddr], outside: &[SocketAddr]) -> Result<Self> {
        let mut object = stage.pod_object(1);
        object["metadata"]["labels"] = json!({"role": "client"});
        let words: Vec<String> = inside
            .iter()
            .flat_map(|target| ["--reach".to_owned(), target.to_string()])
            .collect();
        object["spec"]["containers"][0]["args"] = json!(words);
        let pod = stage.make_pod(&object)?;
        let outside = outside
            .iter()
            .map(|target| Hammer::start(&stage.cluster.wires.client, *target))
            .collect::<Result<_>>()?;
        Ok(Self { stage, pod, outside })
    }

    /// How often the pod has dialled well, and how it failed.
    fn inside(&self) -> Result<(u64, Vec<String>)> {
        let said = fs::read_to_string(&self.pod.place.log)?;
        let well = said.lines().filter(|line| line.starts_with(REACHED)).count() as u64;
        let failed = said.lines().filter(|line| line.starts_with(MISSED));
        Ok((well, failed.map(str::to_owned).collect()))
    }

    /// Waits until each client has dialled some more, and none has failed.
    fn get_on(&self) -> Result<()> {
        let wanted = self.inside()?.0 + SOME;
        until("a pod that dials", || {
            let (well, failed) = self.inside()?;
            ensure!(failed.is_empty() && well >= wanted, "{well} of {wanted}, {failed:?}");
            Ok(())
        })?;
        self.outside.iter().try_for_each(|hammer| hammer.wait_for(SOME))
    }

    /// Ends them; gives how often they dialled, and never in vain.
    fn finish(self) -> Result<u64> {
        let (mut all, failed) = self.inside()?;
        ensure!(
            failed.is_empty(),
            "the pod's dials failed {} times: {}",
            failed.len(),
            failed[0]
        );
        self.stage.end(&self.pod)?;
        for hammer in self.outside {
            all += hammer.finish().context("from outside")?;
        }
        Ok(all)
    }
}

fn proxy(stage: &Stage<'_>, killed: bool) -> Result<String> {
    let service = stage.service(node_ports)?;
    let (one, two) = (stage.pod(1)?, stage.pod(2)?);
    stage.have(&service, &[&one, &two])?;
    let (mut cluster, mut nodes) = (Vec::new(), Vec::new());
    for family in stage.families() {
        cluster.push(service.cluster(*family)?);
        nodes.push(service.node_port(*family, 1)?);
    }
    let clients = Clients::start(stage, &cluster, &nodes)?;
    let check = |pods: &[&StagePod]| -> Result<()> {
        for target in &cluster {
            served(stage, &From::Pod(&clients.pod), *target, pods)?;
        }
        for target in &nodes {
            served(stage, &From::Outside, *target, pods)?;
        }
        Ok(())
    };
    check(&[&one, &two])?;
    clients.get_on().context("before")?;
    let node = stage.cluster.node(1);
    if killed {
        node.kill()?;
    } else {
        node.stop()?;
    }
    check(&[&one, &two]).context("while no agent runs")?;
    clients.get_on().context("while no agent runs")?;
    // What happens meanwhile is there when it is back.
    let three = stage.pod(3)?;
    stage.wait_endpoints(&service, &[&one, &two, &three])?;
    node.start()?;
    stage.cluster.settle()?;
    check(&[&one, &two, &three]).context("after the restart")?;
    clients.get_on().context("after the restart")?;
    let all = clients.finish()?;
    Ok(in_families(
        stage,
        &format!("{all} dials before, during and after, none failed"),
    ))
}

fn api_server(stage: &Stage<'_>) -> Result<String> {
    let before = stage.service(node_ports)?;
    let (one, two) = (stage.pod(1)?, stage.pod(2)?);
    let client = stage.client(3)?;
    stage.have(&before, &[&one, &two])?;
    let (mut cluster, mut nodes) = (Vec::new(), Vec::new());
    for family in stage.families() {
        cluster.push(before.cluster(*family)?);
        nodes.push(before.node_port(*family, 2)?);
    }
    let clients = Clients::start(stage, &cluster, &nodes)?;
    clients.get_on().context("before")?;
    stage.cluster.plane().kill_server()?;
    let meanwhile = || -> Result<()> {
        clients.get_on()?;
        for target in &cluster {
            connects(stage, &From::Pod(&client), *target, &[&one, &two])?;
            asks(stage, &From::Node(1), *target, &[&one, &two])?;
        }
        Ok(())
    };
    let gone = meanwhile().context("while there is no API server");
    stage.cluster.plane().start_server()?;
    gone?;
    let mut spec = stage.service_spec();
    node_ports(&mut spec);
    let after = stage.named_service("after", spec, &json!({}))?;
    let three = stage.pod(3)?;
    stage.have(&after, &[&one, &two, &three])?;
    stage.have(&before, &[&one, &two, &three])?;
    for service in [&before, &after] {
        for family in stage.families() {
            for (from, target) in [
                (From::Pod(&client), service.cluster(*family)?),
                (From::Node(2), service.cluster(*family)?),
                (From::Outside, service.node_port(*family, 1)?),
            ] {
                served(stage, &from, target, &[&one, &two, &three])?;
            }
        }
    }
    clients.get_on().context("after")?;
    let all = clients.finish()?;
    Ok(in_families(
        stage,
        &format!("{all} dials before, during and after, none failed; a Service made after it serves"),
    ))
}
