//! Starts without an API server, and an API server that goes and comes (C24).

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use lb_user::view::MapDumpView;

use super::{Case, Over, Scene, Stage, routed};
use crate::{
    agent::until,
    kube::{
        Cluster,
        stage::{From, StagePod, StageService},
    },
    lab::{complain, dial::patience, node::LabNode},
};

/// The cases.
pub const CASES: &[Case] = &[Case::row(
    "C24",
    "until_all_has_synced_the_kernels_state_stands",
    stands,
)];

/// An API server that is away; it runs again when the value goes.
struct Away<'c>(&'c Cluster, bool);

impl<'c> Away<'c> {
    fn kill(cluster: &'c Cluster) -> Result<Self> {
        cluster.plane().kill_server()?;
        Ok(Self(cluster, true))
    }

    fn end(mut self) -> Result<()> {
        self.1 = false;
        self.0.plane().start_server()
    }
}

impl Drop for Away<'_> {
    fn drop(&mut self) {
        if self.1
            && let Err(error) = self.0.plane().start_server()
        {
            complain("the API server could not be started again", &format!("{error:#}"));
        }
    }
}

type Dumps = BTreeMap<&'static str, MapDumpView>;

fn dumps(node: &LabNode) -> Result<Dumps> {
    until("the agent's maps", || node.ask(crate::agent::Agent::dump_state))
}

fn stands(stage: &Stage<'_>) -> Result<String> {
    const N: u8 = 80;
    let cluster = stage.cluster;
    let node = cluster.node(1);
    let pods = stage.pods(&[1, 2, 3])?;
    let client = stage.client(1)?;
    let service = stage.balancer(N, |_| {})?;
    let gone = stage.named_service("gone", stage.two_ports(), &serde_json::json!({}))?;
    let all: Vec<_> = pods.iter().collect();
    stage.wait_endpoints(&gone, &all)?;
    stage.have(&service, &all)?;
    let serves = |service: &StageService, who: &[&StagePod]| -> Result<()> {
        for family in stage.families() {
            stage.meet(&From::Pod(&client), service.cluster(*family)?, who)?;
            stage.meet(&From::Outside, routed(*family, N), who)?;
            stage.attempt(&From::Outside, Over::Udp, routed(*family, N), patience())??;
        }
        Ok(())
    };
    let (full, elsewhere) = (dumps(node)?, dumps(cluster.node(2))?);
    let mut talks = Vec::new();
    for family in stage.families() {
        talks.push(cluster.outside().open(routed(*family, N))?);
    }
    // While no agent runs here, an endpoint and a Service go; then the API server goes too.
    node.kill()?;
    stage.set_ready(&pods[2], false)?;
    cluster.api().delete(&gone.path(), None)?;
    stage.have(&service, &[&pods[0], &pods[1]])?;
    let followed = dumps(cluster.node(2))?;
    ensure!(followed != elsewhere, "node 2 has not followed");
    let away = Away::kill(cluster)?;
    serves(&service, &all).context("without an agent and an API server")?;
    // The agent starts with nobody to ask: nothing changes, and what went is served on.
    node.launch()?;
    for what in ["at a start", "after traffic"] {
        ensure!(dumps(node)? == full, "the kernel changed without an API server, {what}");
        serves(&service, &all).with_context(|| format!("without an API server, {what}"))?;
        for family in stage.families() {
            stage.meet(&From::Pod(&client), gone.cluster(*family)?, &all)?;
        }
    }
    let status = node.ask(crate::agent::Agent::status)?;
    ensure!(
        !status.source.synced,
        "an agent that has read nothing says that it has synced: {status:?}"
    );
    ensure!(
        dumps(cluster.node(2))? == followed,
        "an agent that lost the API server changed its kernel"
    );
    // With the API server back, what went meanwhile goes.
    away.end()?;
    node.wait_ready()?;
    cluster.settle()?;
    serves(&service, &[&pods[0], &pods[1]]).context("when the API server is back")?;
    stage.holds(1, &service, &[&pods[0], &pods[1]])?;
    ensure!(
        !super::knows(stage, 1, &gone)?,
        "a Service that went meanwhile is served"
    );
    for family in stage.families() {
        stage.unserved(&From::Pod(&client), gone.cluster(*family)?)?;
    }
    for talk in &mut talks {
        talk.say("still here").context("a connection over all of it")?;
    }
    let warm = cluster.contents(1)?;
    let cold = cluster.cold_contents(1)?;
    if let Some(difference) = warm.difference(&cold) {
        anyhow::bail!("the kernel is not what a cold start makes it:\n{difference}");
    }
    Ok("an endpoint and a Service that went without an agent stood until the API server was back".to_owned())
}
