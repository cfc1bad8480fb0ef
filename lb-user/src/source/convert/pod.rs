//! Pods: which workload they are, and their addresses.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use serde::Deserialize;

use super::{Edge, Names};
use crate::model::{ObjectName, Pod, Workload};

/// The labels that carry the hash at the end of a ReplicaSet's name, and the kind of the ReplicaSet's owner.
const HASH_LABELS: [(&str, &str); 2] = [
    ("pod-template-hash", "Deployment"),
    ("rollouts-pod-template-hash", "Rollout"),
];
/// How long after the moment in its Job's name a Pod of a CronJob may be made: late starts, and Pods made anew after failures.
const LATEST_POD: i64 = 30 * 24 * 3600;
/// How far the clocks of two control-plane hosts may be apart, in seconds.
const CLOCK_SKEW: i64 = 300;

/// The part of a Pod that is read at all: the whole is a hundred times as large, and a field that is of no use here cannot make
/// the Pod unreadable.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct PodObject {
    /// Its identity, labels and owners.
    #[serde(default)]
    pub(super) metadata: ObjectMeta,
    #[serde(default)]
    spec: Option<Spec>,
    #[serde(default)]
    status: Option<Status>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Spec {
    node_name: Option<String>,
    host_network: Option<bool>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Status {
    phase: Option<String>,
    #[serde(rename = "podIP")]
    pod_ip: Option<String>,
    #[serde(rename = "podIPs")]
    pod_ips: Option<Vec<Ip>>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct Ip {
    ip: Option<String>,
}

pub(super) fn convert(edge: &mut Edge<'_>, names: &mut Names, name: ObjectName, pod: &PodObject) -> Option<Pod> {
    let status = pod.status.as_ref()?;
    // Its addresses may be another Pod's by now.
    if matches!(status.phase.as_deref(), Some("Succeeded" | "Failed")) {
        return None;
    }
    let listed = status.pod_ips.as_deref().unwrap_or_default();
    let mut ips: Vec<_> = listed
        .iter()
        .enumerate()
        .filter_map(|(i, entry)| edge.address(format!("status.podIPs[{i}].ip"), entry.ip.as_deref()?))
        .collect();
    if listed.is_empty()
        && let Some(text) = status.pod_ip.as_deref().filter(|text| !text.is_empty())
    {
        ips.extend(edge.address("status.podIP", text));
    }
    if ips.is_empty() {
        return None;
    }
    let workload = workload(names, &name, &pod.metadata);
    let spec = pod.spec.as_ref();
    Some(Pod {
        node: spec
            .and_then(|spec| spec.node_name.as_deref())
            .filter(|node| !node.is_empty())
            .map(|node| names.share(node)),
        ips: ips.into(),
        workload,
        host_network: spec.and_then(|spec| spec.host_network).unwrap_or(false),
        name,
    })
}

/// What a Pod belongs to, by its controller and what the controller's name tells.
fn workload(names: &mut Names, name: &ObjectName, metadata: &ObjectMeta) -> Workload {
    let owners = metadata.owner_references.as_deref().unwrap_or_default();
    let Some(owner) = owners.iter().find(|owner| owner.controller == Some(true)) else {
        return Workload {
            kind: names.share("Pod"),
            name: name.name.clone(),
        };
    };
    let above = match owner.kind.as_str() {
        "ReplicaSet" => of_replica_set(owner, metadata),
        "Job" => of_job(owner, metadata).map(|name| ("CronJob", name)),
        _ => None,
    };
    let (kind, name) = above.unwrap_or((&owner.kind, &owner.name));
    Workload {
        kind: names.share(kind),
        name: names.share(name),
    }
}

/// The owner of a Pod's ReplicaSet. Without the label it was made by hand: only its maker knows what its name means.
fn of_replica_set<'a>(owner: &'a OwnerReference, metadata: &ObjectMeta) -> Option<(&'static str, &'a str)> {
    let labels = metadata.labels.as_ref()?;
    HASH_LABELS.iter().find_map(|&(label, kind)| {
        let hash = labels.get(label)?;
        let name = owner.name.strip_suffix(hash.as_str())?.strip_suffix('-')?;
        (!hash.is_empty() && !name.is_empty()).then_some((kind, name))
    })
}

/// The CronJob of a Pod's Job: the Job's name ends in the scheduled moment, in minutes since the epoch.
///
/// Other Jobs end in numbers too, such as a date; a moment shortly before the Pod's own birth is no coincidence.
fn of_job<'a>(owner: &'a OwnerReference, metadata: &ObjectMeta) -> Option<&'a str> {
    let born = metadata.creation_timestamp.as_ref()?.0.as_second();
    let (name, digits) = owner.name.rsplit_once('-')?;
    if name.is_empty() || digits.len() != 8 || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let scheduled = digits.parse::<i64>().ok()? * 60;
    (born - LATEST_POD..=born + CLOCK_SKEW)
        .contains(&scheduled)
        .then_some(name)
}
