//! Where schedules are played: Pods, the Services that change, and a client that has nothing to do with them.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::schedule::{Change, PODS, SERVICES};
use crate::{
    agent::until,
    kube::{
        Cluster, Stack, Stage,
        process::Dialled,
        stage::{StagePod, StageService},
    },
    lab::{
        dial::Talk,
        plan::{Family, TARGET},
    },
    model::Dice,
};

/// An endpoint: a Pod and its conditions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Endpoint {
    pod: usize,
    ready: bool,
    serving: bool,
    terminating: bool,
}

/// A Service that changes, as the API server has it.
#[derive(Clone, Debug, Default)]
struct Changing {
    /// Its slices' endpoints, by the slice's number; none while the Service does not exist.
    slices: Option<BTreeMap<usize, Vec<Endpoint>>>,
}

/// The field.
#[derive(Debug)]
pub(super) struct Field<'c> {
    // Dropped first: it talks to what the stage has made.
    outside: Option<Talk>,
    /// The Pods and Services.
    pub(super) stage: Stage<'c>,
    pods: Vec<StagePod>,
    client: StagePod,
    constant: StageService,
    changing: Vec<Changing>,
    /// What the client had met when it was last asked.
    seen: Dialled,
}

impl<'c> Field<'c> {
    /// Makes it.
    ///
    /// # Errors
    /// Where a Pod does not come to run.
    pub(super) fn new(cluster: &'c Cluster) -> Result<Self> {
        let stage = cluster.stage("faults", Stack::Dual);
        let mut pods = Vec::new();
        for number in 0..PODS {
            let mut object = stage.pod_object([1, 2, 3, 2][number % 4]);
            object["metadata"]["labels"] = json!({"app": format!("{}-changing", stage.name)});
            pods.push(stage.make_pod(&object)?);
        }
        let constant_pods = stage.pods(&[1, 1])?;
        let constant = stage.service(|spec| spec["type"] = json!("NodePort"))?;
        stage.wait_endpoints(&constant, &constant_pods.iter().collect::<Vec<_>>())?;
        // The controllers' own kind of slices changes too, with the Pods' readiness.
        let mut spec = stage.service_spec();
        spec["selector"] = json!({"app": format!("{}-changing", stage.name)});
        let selected = stage.named_service("selected", spec, &json!({}))?;
        stage.wait_endpoints(&selected, &pods.iter().collect::<Vec<_>>())?;
        cluster.settle()?;
        let mut object = stage.pod_object(1);
        object["metadata"]["labels"] = json!({"role": "client"});
        let mut arguments = Vec::new();
        for family in Family::ALL {
            let at = constant.cluster(family)?.to_string();
            arguments.extend(["--dial".to_owned(), at.clone(), "--hold".to_owned(), at]);
        }
        object["spec"]["containers"][0]["args"] = json!(arguments);
        let client = stage.make_pod(&object)?;
        let outside = cluster.outside().open(constant.node_port(Family::V4, 1)?)?;
        Ok(Self {
            outside: Some(outside),
            stage,
            pods,
            client,
            constant,
            changing: vec![Changing::default(); SERVICES],
            seen: Dialled::default(),
        })
    }

    /// The client's failures since this was last asked, and how much went well in all. The held connection from outside counts too.
    ///
    /// # Errors
    /// Where the client's log cannot be read.
    pub(super) fn losses(&mut self) -> Result<(Vec<String>, u64)> {
        let before = self.seen.good;
        // So that what went wrong at the end is written: every connection has answered once more, or failed.
        let now = until("the client to go on", || {
            let now = Dialled::read(&self.client.place.log)?;
            anyhow::ensure!(
                now.good >= before + 80 || now.bad.len() > self.seen.bad.len(),
                "{now:?}"
            );
            Ok(now)
        })?;
        let mut bad = now.bad[self.seen.bad.len()..].to_vec();
        if let Some(talk) = &mut self.outside
            && let Err(failure) = talk.say("still there")
        {
            bad.push(format!("the connection from outside: {failure}"));
            let at = self.constant.node_port(Family::V4, 1)?;
            self.outside = Some(self.stage.cluster.outside().open(at).context("dial anew")?);
        }
        self.seen = now;
        Ok((bad, self.seen.good - before))
    }

    /// Changes something in the API server.
    ///
    /// # Errors
    /// Why the server refuses.
    pub(super) fn change(&mut self, change: Change) -> Result<()> {
        match change {
            Change::Create(service) => {
                if self.changing[service].slices.is_none() {
                    self.create(service, service as u64)?;
                }
            }
            Change::Delete(service) => self.delete(service)?,
            Change::Recreate(service) => {
                self.delete(service)?;
                self.create(service, service as u64 + 17)?;
            }
            Change::Endpoints(service, number) => {
                if let Some(slices) = &mut self.changing[service].slices {
                    *slices = BTreeMap::from([(0, endpoints(&mut Dice::new(number)))]);
                    self.write(service)?;
                }
            }
            Change::Split(service) => {
                if let Some(slices) = &mut self.changing[service].slices {
                    let mut all: Vec<Endpoint> = slices.values().flatten().copied().collect();
                    let rest = all.split_off(all.len() / 2);
                    *slices = BTreeMap::from([(0, all), (1, rest)]);
                    self.write(service)?;
                }
            }
            Change::Merge(service) => {
                if let Some(slices) = &mut self.changing[service].slices {
                    *slices = BTreeMap::from([(0, slices.values().flatten().copied().collect())]);
                    self.write(service)?;
                }
            }
            Change::Duplicate(service) => {
                if let Some(slices) = &mut self.changing[service].slices {
                    let first: Vec<Endpoint> = slices.values().flatten().take(1).copied().collect();
                    slices.entry(1).or_default().extend(first);
                    self.write(service)?;
                }
            }
            Change::Relabel(from, to) => {
                // The object stays with whom it was made for: what is written next gives the label back.
                if from != to && self.changing[from].slices.is_some() {
                    let object = self.slice(from, 0, Family::V4, Some(to));
                    self.stage.put(&object)?;
                }
            }
            Change::Ready(pod, ready) => self.stage.set_ready(&self.pods[pod], ready)?,
        }
        Ok(())
    }

    fn create(&mut self, service: usize, number: u64) -> Result<()> {
        let families: Vec<&str> = Family::ALL.map(Family::kubernetes_name).into();
        let name = self.name(service);
        // Always the same addresses, which nobody else asks for.
        let ips = [
            format!("10.96.200.{}", service + 1),
            format!("fd00:96::{:x}", 0xc801 + service),
        ];
        self.stage.put(&json!({
            "apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": "default"},
            "spec": {
                "clusterIP": ips[0], "clusterIPs": ips, "ipFamilyPolicy": "RequireDualStack", "ipFamilies": families,
                "ports": [{"name": "tcp", "protocol": "TCP", "port": 80, "targetPort": TARGET}],
            },
        }))?;
        let first = endpoints(&mut Dice::new(number));
        self.changing[service].slices = Some(BTreeMap::from([(0, first)]));
        self.write(service)
    }

    fn delete(&mut self, service: usize) -> Result<()> {
        if self.changing[service].slices.take().is_some() {
            let api = self.stage.cluster.api();
            api.delete(
                &format!("/api/v1/namespaces/default/services/{}", self.name(service)),
                None,
            )?;
            for slice in 0..2 {
                for family in Family::ALL {
                    api.delete(&self.slice_path(service, slice, family), None)?;
                }
            }
        }
        Ok(())
    }

    fn write(&self, service: usize) -> Result<()> {
        let Some(slices) = &self.changing[service].slices else {
            return Ok(());
        };
        for slice in 0..2 {
            for family in Family::ALL {
                if slices.contains_key(&slice) {
                    self.stage.put(&self.slice(service, slice, family, None))?;
                } else {
                    self.stage
                        .cluster
                        .api()
                        .delete(&self.slice_path(service, slice, family), None)?;
                }
            }
        }
        Ok(())
    }

    fn name(&self, service: usize) -> String {
        format!("{}-changing-{service}", self.stage.name)
    }

    fn slice_path(&self, service: usize, slice: usize, family: Family) -> String {
        format!(
            "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/{}-{service}-{slice}-{family}",
            self.stage.name
        )
    }

    fn slice(&self, service: usize, slice: usize, family: Family, label: Option<usize>) -> Value {
        let slices = self.changing[service].slices.as_ref();
        let of_slice = slices
            .and_then(|slices| slices.get(&slice))
            .cloned()
            .unwrap_or_default();
        let endpoints: Vec<Value> = of_slice
            .iter()
            .map(|endpoint| {
                json!({
                    "addresses": [self.pods[endpoint.pod].place.ip(family)],
                    "conditions": {
                        "ready": endpoint.ready, "serving": endpoint.serving, "terminating": endpoint.terminating,
                    },
                    "nodeName": crate::lab::node::name(self.pods[endpoint.pod].place.node),
                })
            })
            .collect();
        let owner = self.name(label.unwrap_or(service));
        self.stage
            .slice_object(&format!("{service}-{slice}"), &owner, family, &json!(endpoints))
    }
}

fn endpoints(dice: &mut Dice) -> Vec<Endpoint> {
    let mut all = Vec::new();
    for pod in 0..PODS {
        if dice.once_in(3) {
            continue;
        }
        let (ready, serving, terminating) = *dice.pick(&[
            (true, true, false),
            (true, true, false),
            (false, true, true),
            (false, false, false),
        ]);
        all.push(Endpoint {
            pod,
            ready,
            serving,
            terminating,
        });
    }
    all
}
