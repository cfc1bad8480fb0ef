//! Slices and what they say together: merging, moving, the same endpoint twice (C4, C6).

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::{Case, Scene, Stage, endpoint, ready};
use crate::{
    agent::Agent,
    kube::stage::{From, StageService},
    lab::plan::Family,
};

/// The cases.
pub const CASES: &[Case] = &[
    Case::row("C4", "slices_merge_and_an_endpoint_moves_between_them", moves),
    Case::row("C4", "slices_that_controllers_make_follow_the_pods", follows),
    Case::row("C6", "the_same_endpoint_twice_is_one", once),
    Case::row("C6", "of_two_pods_with_one_address_the_ready_one_counts", ready_wins),
];

/// The kernel's ids of a Service's backends: one that stays was never removed.
fn ids(stage: &Stage<'_>, service: &StageService) -> Result<BTreeMap<(String, u16, String), u32>> {
    let all = stage.cluster.node(1).ask(Agent::backends)?;
    Ok(all
        .into_iter()
        .filter(|backend| backend.service == service.name)
        .map(|backend| ((backend.addr.to_string(), backend.port, backend.protocol), backend.id))
        .collect())
}

fn moves(stage: &Stage<'_>) -> Result<String> {
    let pods = stage.pods(&[1, 2])?;
    let (moving, other) = (&pods[0], &pods[1]);
    let service = stage.named_service("hand", stage.by_hand(), &json!({}))?;
    let client = stage.client(3)?;
    // Which slice has whom; what is left out is removed.
    let say = |a: Option<&[usize]>, b: Option<&[usize]>| -> Result<()> {
        for family in stage.families() {
            for (suffix, members) in [("b", b), ("a", a)] {
                let of =
                    |members: &[usize]| json!(members.iter().map(|n| ready(&pods[*n], *family)).collect::<Vec<_>>());
                let path = stage.slice(suffix, &service.name, *family, &of(members.unwrap_or_default()))?;
                if members.is_none() {
                    stage.cluster.api().delete(&path, None)?;
                }
            }
        }
        stage.cluster.settle()
    };
    let meet = |who: &[&_]| -> Result<()> {
        for family in stage.families() {
            stage.meet(&From::Pod(&client), service.cluster(*family)?, who)?;
        }
        stage.holds(1, &service, who)
    };
    say(Some(&[0]), Some(&[1]))?;
    meet(&[moving, other])?;
    let before = ids(stage, &service)?;
    for (a, b) in [
        (Some(&[0][..]), &[0, 1][..]),
        (Some(&[]), &[0, 1]),
        (Some(&[0]), &[1, 0]),
        (None, &[0, 1]),
    ] {
        say(a, Some(b))?;
        meet(&[moving, other]).with_context(|| format!("with {a:?} and {b:?}"))?;
        let now = ids(stage, &service)?;
        ensure!(
            now == before,
            "with {a:?} and {b:?} backends were made anew: {now:?} after {before:?}"
        );
    }
    say(None, Some(&[1]))?;
    meet(&[other])?;
    say(None, None)?;
    stage.holds(1, &service, &[])?;
    Ok("over five steps between two slices the backend stayed the same, and went with the last".to_owned())
}

fn follows(stage: &Stage<'_>) -> Result<String> {
    let first = stage.pod(1)?;
    let service = stage.service(|_| {})?;
    let client = stage.client(2)?;
    let check = |who: &[&_]| -> Result<()> {
        stage.have(&service, who)?;
        for family in stage.families() {
            stage.meet(&From::Pod(&client), service.cluster(*family)?, who)?;
        }
        (1..=3).try_for_each(|node| stage.holds(node, &service, who))
    };
    check(&[&first])?;
    // A slice by hand beside those of the controller counts too.
    let (second, third) = (stage.pod(2)?, stage.client(3)?);
    check(&[&first, &second])?;
    for family in stage.families() {
        stage.slice(
            "hand",
            &service.name,
            *family,
            &json!([ready(&third, *family), ready(&first, *family)]),
        )?;
    }
    stage.cluster.settle()?;
    stage.holds(1, &service, &[&first, &second, &third])?;
    for family in stage.families() {
        stage.meet(
            &From::Pod(&client),
            service.cluster(*family)?,
            &[&first, &second, &third],
        )?;
    }
    // What the controller drops and the other slice still has, stays.
    stage.set_ready(&first, false)?;
    stage.slices_say(&service, "one that is not ready", |found| {
        found.iter().any(|one| one["conditions"]["ready"] == false)
    })?;
    let path = |family: &Family| {
        let name = format!("{}-hand-{family}", stage.name);
        format!("/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/{name}")
    };
    stage.holds(1, &service, &[&first, &second, &third])?;
    for family in stage.families() {
        stage.cluster.api().delete(&path(family), None)?;
    }
    check(&[&second])?;
    Ok("two pods by the controller, a third and one of the two by hand".to_owned())
}

fn once(stage: &Stage<'_>) -> Result<String> {
    let pods = stage.pods(&[1, 2])?;
    let (twice, other) = (&pods[0], &pods[1]);
    let service = stage.named_service("hand", stage.by_hand(), &json!({}))?;
    for family in stage.families() {
        stage.slice(
            "a",
            &service.name,
            *family,
            &json!([ready(twice, *family), ready(other, *family)]),
        )?;
        for suffix in ["b", "c", "d"] {
            stage.slice(suffix, &service.name, *family, &json!([ready(twice, *family)]))?;
        }
    }
    stage.cluster.settle()?;
    stage.holds(1, &service, &[twice, other])?;
    let client = stage.client(1)?;
    let mut shares = Vec::new();
    for family in stage.families() {
        let met = stage.dial_many(&From::Pod(&client), service.cluster(*family)?, 100)?;
        let of_twice = met.iter().filter(|met| met.name == twice.name).count();
        // Four times the weight would be 80 of 100; one half is 50, and less than 30 or more than 70 is no chance.
        ensure!(
            (25..=75).contains(&of_twice),
            "{of_twice} of 100 connections met one of two pods"
        );
        shares.push(of_twice);
    }
    let held = ids(stage, &service)?.len();
    ensure!(
        held == 2 * stage.families().len(),
        "{held} backends, and not one for each address"
    );
    stage.wait_connects(1, &service, 100 * stage.families().len() as u64)?;
    Ok(format!(
        "{shares:?} of 100 connections to a pod that four slices have, one of two"
    ))
}

fn ready_wins(stage: &Stage<'_>) -> Result<String> {
    let pod = stage.pod(1)?;
    let other = stage.pod(2)?;
    let client = stage.client(3)?;
    let service = stage.named_service("hand", stage.by_hand(), &json!({}))?;
    let not = [
        json!({"ready": false, "serving": false, "terminating": false}),
        json!({"ready": false, "serving": true, "terminating": true}),
        json!({"ready": false, "serving": false, "terminating": true}),
    ];
    for worse in &not {
        for (ready_at, worse_at) in [("a", "b"), ("b", "a")] {
            for family in stage.families() {
                let mut old = endpoint(&pod, *family, worse);
                old["targetRef"]["name"] = json!("another-pod");
                stage.slice(ready_at, &service.name, *family, &json!([ready(&pod, *family)]))?;
                stage.slice(worse_at, &service.name, *family, &json!([old, ready(&other, *family)]))?;
            }
            stage.cluster.settle()?;
            stage.holds(1, &service, &[&pod, &other])?;
        }
        for family in stage.families() {
            stage.meet(&From::Pod(&client), service.cluster(*family)?, &[&pod, &other])?;
        }
    }
    // The other way round: without a ready record the address gets nothing.
    for family in stage.families() {
        let worse = json!([endpoint(&pod, *family, &not[0])]);
        stage.slice("b", &service.name, *family, &worse)?;
        stage.slice(
            "a",
            &service.name,
            *family,
            &json!([endpoint(&pod, *family, &not[2]), ready(&other, *family)]),
        )?;
    }
    stage.cluster.settle()?;
    for family in stage.families() {
        stage.meet(&From::Pod(&client), service.cluster(*family)?, &[&other])?;
    }
    stage.holds(1, &service, &[&other])?;
    Ok("three kinds of worse records, in slices before and after".to_owned())
}
