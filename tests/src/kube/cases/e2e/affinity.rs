//! ClientIP affinity: inside the cluster by the cluster address, from outside by a node port.

use std::{cell::Cell, collections::BTreeSet};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::{Case, Stage, in_families, node_ports};
use crate::{
    kube::stage::{From, StagePod, StageService},
    lab::plan::{self, Family},
};

/// The cases.
pub(super) const CASES: &[Case] = &[
    Case::e2e("affinity_for_cluster_ip", |stage| holds(stage, Kind::ClusterIp)),
    Case::e2e("affinity_for_node_port", |stage| holds(stage, Kind::NodePort)),
    Case::e2e("switching_affinity_for_cluster_ip", |stage| {
        switches(stage, Kind::ClusterIp)
    }),
    Case::e2e("switching_affinity_for_node_port", |stage| {
        switches(stage, Kind::NodePort)
    }),
    Case::e2e("affinity_timeout_for_cluster_ip", |stage| {
        times_out(stage, Kind::ClusterIp)
    }),
    Case::e2e("affinity_timeout_for_node_port", |stage| {
        times_out(stage, Kind::NodePort)
    }),
];

/// Connections of one client that all meet one of three pods by chance: once in 10^14.
const MANY: usize = 30;

/// By which address a Service is dialled, and so by whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    ClusterIp,
    NodePort,
}

/// A Service of three pods, and somebody who dials it.
struct Dialled<'s> {
    stage: &'s Stage<'s>,
    kind: Kind,
    service: StageService,
    client: StagePod,
    pods: Vec<StagePod>,
    /// The next source port of a datagram.
    port: Cell<u16>,
}

impl<'s> Dialled<'s> {
    fn new(stage: &'s Stage<'s>, kind: Kind, affinity: &Value) -> Result<Self> {
        let pods = stage.pods(&[1, 2, 3])?;
        let client = stage.client(1)?;
        let service = stage.service(|spec| {
            node_ports(spec);
            if let (Some(spec), Some(affinity)) = (spec.as_object_mut(), affinity.as_object()) {
                spec.extend(affinity.clone());
            }
        })?;
        let dialled = Self {
            stage,
            kind,
            service,
            client,
            pods,
            port: Cell::new(22_000),
        };
        dialled.settle()?;
        Ok(dialled)
    }

    fn settle(&self) -> Result<()> {
        let all: Vec<&StagePod> = self.pods.iter().collect();
        self.stage.have(&self.service, &all)
    }

    fn change(&mut self, affinity: &Value) -> Result<()> {
        self.stage.change(&mut self.service, affinity)?;
        self.stage.cluster.settle()
    }

    /// The node whose kernel remembers: where the client is, or where it comes in.
    fn node(&self) -> u8 {
        match self.kind {
            Kind::ClusterIp => self.client.place.node,
            Kind::NodePort => 2,
        }
    }

    /// Whom connections and datagrams meet, one of each at a time. A Service's ports have affinities of their own.
    ///
    /// No datagram has a source port that another had: it would belong to that flow, and stay with its pod.
    fn meets(&self, family: Family, count: usize) -> Result<[BTreeSet<String>; 2]> {
        let (from, source, target) = match self.kind {
            Kind::ClusterIp => (
                From::Pod(&self.client),
                self.client.place.ip(family),
                self.service.cluster(family)?,
            ),
            Kind::NodePort => (
                From::Outside,
                plan::client(family, 1),
                self.service.node_port(family, self.node())?,
            ),
        };
        self.stage.through(&from, |dialer| {
            let mut names = [BTreeSet::new(), BTreeSet::new()];
            for _ in 0..count {
                names[0].insert(dialer.dial(target).context("a connection")?.name);
                let own = plan::at(source, self.port.replace(self.port.get() + 1));
                names[1].insert(dialer.from(own).ask(target).context("a datagram")?.name);
            }
            Ok(names)
        })?
    }

    /// The one pod that connections meet, and the one that datagrams do.
    fn one(&self, family: Family, count: usize) -> Result<[String; 2]> {
        let names = self.meets(family, count)?;
        ensure!(
            names.iter().all(|names| names.len() == 1),
            "with affinity one client met {names:?}, {family}"
        );
        Ok(names.map(|names| names.into_iter().next().unwrap_or_default()))
    }

    /// All three pods must be met, over either protocol.
    fn all(&self, family: Family) -> Result<()> {
        let free = self.meets(family, MANY)?;
        ensure!(
            free.iter().all(|names| names.len() == self.pods.len()),
            "without affinity {family} met {free:?} alone"
        );
        Ok(())
    }
}

fn with(seconds: u32) -> Value {
    json!({"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": seconds}}})
}

fn without() -> Value {
    json!({"sessionAffinity": "None", "sessionAffinityConfig": null})
}

fn holds(stage: &Stage<'_>, kind: Kind) -> Result<String> {
    let dialled = Dialled::new(stage, kind, &json!({"sessionAffinity": "ClientIP"}))?;
    let granted = &dialled.service.object["spec"]["sessionAffinityConfig"]["clientIP"]["timeoutSeconds"];
    ensure!(*granted == 10_800, "the API server's timeout is {granted}");
    for family in stage.families() {
        let first = dialled.one(*family, MANY)?;
        // It ends with its pod, and the next choice holds as well.
        let (gone, others): (Vec<&StagePod>, Vec<&StagePod>) =
            dialled.pods.iter().partition(|pod| first.contains(&pod.name));
        for pod in &gone {
            stage.set_ready(pod, false)?;
        }
        stage.have(&dialled.service, &others)?;
        let next = dialled.one(*family, MANY / 2)?;
        ensure!(
            next.iter().all(|name| !first.contains(name)),
            "{first:?} are not ready, and one of {next:?} is met"
        );
        for pod in &gone {
            stage.set_ready(pod, true)?;
        }
        dialled.settle()?;
        let after = dialled.one(*family, MANY / 2)?;
        ensure!(after == next, "{next:?} are kept, and {after:?} were met");
    }
    Ok(in_families(
        stage,
        "one pod while it was ready, then one other, which stayed",
    ))
}

fn switches(stage: &Stage<'_>, kind: Kind) -> Result<String> {
    let mut dialled = Dialled::new(stage, kind, &without())?;
    for _ in 0..2 {
        for family in stage.families() {
            dialled.all(*family)?;
        }
        dialled.change(&with(10_800))?;
        for family in stage.families() {
            dialled.one(*family, MANY)?;
        }
        dialled.change(&without())?;
    }
    for family in stage.families() {
        dialled.all(*family).context("switched off")?;
    }
    Ok(in_families(stage, "off, on, off, on and off"))
}

fn times_out(stage: &Stage<'_>, kind: Kind) -> Result<String> {
    let mut dialled = Dialled::new(stage, kind, &with(100))?;
    let node = stage.cluster.node(dialled.node());
    for family in stage.families() {
        let first = dialled.one(*family, 10)?;
        // Each connection begins the time anew.
        for _ in 0..3 {
            node.age_affinity(60)?;
            let now = dialled.one(*family, 1)?;
            ensure!(
                now == first,
                "after less than the timeout {now:?}, and {first:?} before"
            );
        }
        let mut met = [BTreeSet::new(), BTreeSet::new()];
        for _ in 0..MANY {
            node.age_affinity(101)?;
            for (met, now) in met.iter_mut().zip(dialled.one(*family, 1)?) {
                met.insert(now);
            }
        }
        ensure!(
            met.iter().all(|met| met.len() > 1),
            "after each timeout the choice was {met:?}"
        );
    }
    // A longer one counts for the memories that are there.
    dialled.change(&with(1_000))?;
    for family in stage.families() {
        let first = dialled.one(*family, 2)?;
        for _ in 0..8 {
            node.age_affinity(900)?;
            let now = dialled.one(*family, 1)?;
            ensure!(now == first, "{now:?} after 900 of 1,000 s, and {first:?} before");
        }
    }
    Ok(in_families(
        stage,
        "kept at 60 of 100 s, chosen anew at 101; kept at 900 of 1,000",
    ))
}
