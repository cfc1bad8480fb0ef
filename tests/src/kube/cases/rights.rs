//! What the agent's account may do: every right that `deploy/` grants is needed, and no other is asked for.

use std::{collections::BTreeSet, fs};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::{Case, Stage};
use crate::{
    agent::{Agent, until},
    kube::{Cluster, account},
};

/// The cases.
pub const CASES: &[Case] = &[
    Case::once("RBAC", "each_right_taken_away_is_told", each_right_is_needed),
    Case::once("RBAC", "nothing_is_granted_that_is_not_used", nothing_else_is_granted),
];

/// A right: a verb, and a resource with its group.
type Right = (String, String);

fn rights(role: &Value) -> BTreeSet<Right> {
    let words = |value: &Value| -> Vec<String> {
        let all = value.as_array().cloned().unwrap_or_default();
        all.iter().filter_map(|word| Some(word.as_str()?.to_owned())).collect()
    };
    let mut rights = BTreeSet::new();
    for rule in role["rules"].as_array().into_iter().flatten() {
        for group in words(&rule["apiGroups"]) {
            for resource in words(&rule["resources"]) {
                for verb in words(&rule["verbs"]) {
                    rights.insert((verb, format!("{resource}.{group}")));
                }
            }
        }
    }
    rights
}

/// The granted role.
fn role() -> Result<Value> {
    let objects = account::objects()?;
    let role = objects.into_iter().find(|object| object["kind"] == "ClusterRole");
    role.context("the deployment has a role")
}

fn rules(rights: &BTreeSet<Right>) -> Value {
    let rule = |(verb, resource): &Right| {
        let (resource, group) = resource.split_once('.').unwrap_or((resource, ""));
        json!({"apiGroups": [group], "resources": [resource], "verbs": [verb]})
    };
    rights.iter().map(rule).collect()
}

/// Gives the role its rights back, whatever happens.
struct Restore<'c>(&'c Cluster);

impl Drop for Restore<'_> {
    fn drop(&mut self) {
        if let Err(error) = account::grant(self.0.api()) {
            crate::lab::complain("the agents' rights could not be given back", &format!("{error:#}"));
        }
    }
}

fn each_right_is_needed(stage: &Stage<'_>) -> Result<String> {
    let cluster = stage.cluster;
    let all = rights(&role()?);
    let _restore = Restore(cluster);
    for right in &all {
        let mut left = all.clone();
        left.remove(right);
        cluster.api().patch(account::ROLE, &json!({"rules": rules(&left)}))?;
        let (verb, resource) = right;
        let kind = match resource.as_str() {
            "services." => "Service",
            "endpointslices.discovery.k8s.io" => "EndpointSlice",
            "nodes." => "Node",
            "pods." => "Pod",
            other => anyhow::bail!("nobody knows what {other} is for"),
        };
        cluster
            .beside(2, |cold| {
                cold.launch()?;
                until("an agent to say what it may not do", || {
                    let status = cold.ask(Agent::status)?;
                    let found = status.source.kinds.iter().find(|found| found.kind == kind);
                    let error = found.and_then(|found| found.error.as_deref()).unwrap_or_default();
                    ensure!(error.contains("403"), "{kind}: {error:?}");
                    // The API server's own words: what, and by whom.
                    ensure!(error.contains(&format!("cannot {verb} resource")), "{error}");
                    let others = status.source.kinds.iter().filter(|other| other.kind != kind);
                    let wrong: Vec<_> = others.filter(|other| other.error.is_some()).collect();
                    ensure!(wrong.is_empty(), "{wrong:?} have nothing to do with it");
                    Ok(())
                })
            })
            .with_context(|| format!("without the right to {verb} {resource}"))?;
    }
    Ok(format!("{} rights, each missed", all.len()))
}

fn nothing_else_is_granted(stage: &Stage<'_>) -> Result<String> {
    let cluster = stage.cluster;
    let granted = rights(&role()?);
    // A start asks for all that an agent ever does.
    cluster.cold_contents(3)?;
    let log = cluster.plane().audit_log();
    let found = until("the API server's log of what was asked", || {
        let text = fs::read_to_string(&log).with_context(|| format!("read {}", log.display()))?;
        let mut used = BTreeSet::new();
        let mut paths = BTreeSet::new();
        for line in text.lines() {
            // The last line may be half written.
            let Ok(event) = serde_json::from_str::<Value>(line) else {
                continue;
            };
            let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let object = &event["objectRef"];
            if object.is_object() {
                let resource = format!("{}.{}", word(&object["resource"]), word(&object["apiGroup"]));
                used.insert((word(&event["verb"]), resource));
            } else {
                paths.insert(word(&event["requestURI"]));
            }
        }
        ensure!(paths.is_empty(), "asked besides objects: {paths:?}");
        ensure!(used == granted, "granted {granted:?}, used {used:?}");
        Ok(used)
    })?;
    Ok(format!("{} rights granted, and the same ones used", found.len()))
}
