//! Which Services are served, in which families, and which of their ports lead where (C1 to C3).

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use super::{Case, Changed, MANY, Over, Scene, Stage, knows, ready, served_at};
use crate::{
    agent::until,
    kube::stage::{From, PORT, StageService},
    lab::{
        dial::{Failure, patience},
        plan::{self, Family, TARGET, TARGET_SECOND},
    },
};

/// The cases.
pub const CASES: &[Case] = &[
    Case::row(
        "C1",
        "labels_and_types_take_a_service_away_and_give_it_back",
        comes_and_goes,
    ),
    Case::once("C1", "a_proxy_name_serves_those_that_ask_for_it", proxy_name),
    Case::row("C2", "families_are_served_on_their_own", families),
    Case::row("C2", "a_second_family_comes_and_goes_beside_the_first", second_family),
    Case::row("C3", "ports_lead_by_name_and_protocol", ports),
    Case::row("C3", "one_number_serves_both_protocols_on_their_own", one_number),
];

const PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";
const HEADLESS: &str = "service.kubernetes.io/headless";

fn comes_and_goes(stage: &Stage<'_>) -> Result<String> {
    let pods = stage.pods(&[1, 2])?;
    let all: Vec<_> = pods.iter().collect();
    let mut service = stage.service(|_| {})?;
    let client = stage.client(1)?;
    let served = |service: &StageService| -> Result<()> {
        stage.have(service, &all)?;
        for family in stage.families() {
            stage.meet(&From::Pod(&client), service.cluster(*family)?, &all)?;
        }
        stage.holds(3, service, &all)
    };
    let gone = |service: &StageService, what: &str| -> Result<()> {
        stage.cluster.settle()?;
        for node in 1..=plan::NODES {
            ensure!(!knows(stage, node, service)?, "{what}: node {node} serves it still");
        }
        Ok(())
    };
    served(&service)?;
    for label in [PROXY_NAME, HEADLESS] {
        let labels = |value: Value| json!({"metadata": {"labels": {label: value}}});
        stage.cluster.api().patch(&service.path(), &labels(json!("another")))?;
        gone(&service, label)?;
        for family in stage.families() {
            stage.unserved(&From::Pod(&client), service.cluster(*family)?)?;
        }
        stage.cluster.api().patch(&service.path(), &labels(Value::Null))?;
        served(&service)?;
    }
    let before: Vec<_> = stage
        .families()
        .iter()
        .map(|family| service.cluster(*family))
        .collect::<Result<_>>()?;
    stage.change(
        &mut service,
        &json!({"type": "ExternalName", "externalName": "elsewhere.example"}),
    )?;
    gone(&service, "ExternalName")?;
    for address in before {
        stage.unserved(&From::Pod(&client), address)?;
    }
    let mut back = stage.service_spec();
    back["type"] = json!("ClusterIP");
    back["externalName"] = Value::Null;
    stage.change(&mut service, &back)?;
    served(&service)?;
    let mut headless = stage.service_spec();
    headless["clusterIP"] = json!("None");
    let headless = stage.named_service("none", headless, &json!({}))?;
    stage.wait_endpoints(&headless, &all)?;
    gone(&headless, "clusterIP None")?;
    Ok("two labels, ExternalName and back, each a delete and an add; a headless one never served".to_owned())
}

fn proxy_name(stage: &Stage<'_>) -> Result<String> {
    let pods = stage.pods(&[2])?;
    let all: Vec<_> = pods.iter().collect();
    let own = stage.service(|_| {})?;
    let labels = json!({"labels": {PROXY_NAME: "lab-proxy"}});
    let named = stage.named_service("named", stage.service_spec(), &labels)?;
    stage.wait_endpoints(&named, &all)?;
    stage.have(&own, &all)?;
    ensure!(
        !knows(stage, 1, &named)?,
        "a Service that asks for another proxy is served"
    );
    let changed = Changed::restart(stage.cluster.node(1), &["--proxy-name", "lab-proxy"])?;
    let clients = [stage.client(1)?, stage.client(3)?];
    // The mark that agents are known to be up to date by asks for no proxy: here the named Service itself tells.
    until("the agent with another name", || stage.holds(1, &named, &all))?;
    ensure!(
        !knows(stage, 1, &own)?,
        "a Service that asks for no proxy is served by a named one"
    );
    for family in stage.families() {
        for (client, served, other) in [(&clients[0], &named, &own), (&clients[1], &own, &named)] {
            stage.meet(&From::Pod(client), served.cluster(*family)?, &all)?;
            stage.unserved(&From::Pod(client), other.cluster(*family)?)?;
        }
    }
    changed.put_back()?;
    stage.cluster.settle()?;
    ensure!(!knows(stage, 1, &named)?, "what the named proxy served is served on");
    for family in stage.families() {
        stage.meet(&From::Pod(&clients[0]), own.cluster(*family)?, &all)?;
    }
    Ok("a named agent serves what asks for it alone, the others the rest".to_owned())
}

fn families(stage: &Stage<'_>) -> Result<String> {
    let pods = stage.pods(&[1, 2, 3])?;
    let service = stage.named_service("hand", stage.by_hand(), &json!({}))?;
    // Each family has a pod of its own; further addresses of an endpoint do not count.
    let of = |family: Family| &pods[usize::from(family == Family::V6)];
    for family in Family::ALL {
        let mut endpoint = ready(of(family), family);
        endpoint["addresses"] = json!([of(family).place.ip(family), pods[2].place.ip(family)]);
        stage.slice("a", &service.name, family, &json!([endpoint]))?;
    }
    let mut names = stage.slice_object(
        "names",
        &service.name,
        Family::V4,
        &json!([{"addresses": ["pod.example"]}]),
    );
    names["addressType"] = json!("FQDN");
    stage.put(&names)?;
    stage.cluster.settle()?;
    let client = stage.client(1)?;
    for family in stage.families() {
        stage.meet(&From::Pod(&client), service.cluster(*family)?, &[of(*family)])?;
    }
    for node in 1..=plan::NODES {
        let fronts = served_at(stage, node, &service, "ClusterIP")?;
        let wanted = stage.families().iter().map(|family| Ok(service.cluster(*family)?.ip()));
        ensure!(
            fronts == wanted.collect::<Result<_>>()?,
            "node {node} serves {fronts:?}"
        );
        let held = super::backends(stage, node, &service)?;
        let held: Vec<_> = held.into_keys().collect();
        let wanted: Vec<_> = stage
            .families()
            .iter()
            .map(|family| of(*family).place.ip(*family))
            .collect();
        ensure!(held == wanted, "node {node} holds {held:?} and not {wanted:?}");
    }
    Ok("a pod of each family's own, second addresses and host names left out".to_owned())
}

fn second_family(stage: &Stage<'_>) -> Result<String> {
    let pods = stage.pods(&[1, 2])?;
    let all: Vec<_> = pods.iter().collect();
    let first = stage.families()[0];
    let second = if first == Family::V4 { Family::V6 } else { Family::V4 };
    let mut service = stage.service(|spec| {
        spec["ipFamilyPolicy"] = json!("SingleStack");
        spec["ipFamilies"] = json!([first.kubernetes_name()]);
    })?;
    let client = stage.client(3)?;
    let of_first = |service: &StageService| -> Result<()> {
        until("slices of one family", || {
            let found = stage.slices(service)?;
            let fine = !found.is_empty()
                && found
                    .iter()
                    .all(|slice| slice["addressType"] == first.kubernetes_name());
            ensure!(fine, "{found:?}");
            let ready = super::endpoints(stage, service, first)?;
            ensure!(ready.len() == all.len(), "{ready:?}");
            Ok(())
        })?;
        stage.cluster.settle()?;
        stage.meet(&From::Pod(&client), service.cluster(first)?, &all)?;
        let fronts = served_at(stage, 3, service, "ClusterIP")?;
        ensure!(fronts == [service.cluster(first)?.ip()].into(), "{fronts:?}");
        Ok(())
    };
    of_first(&service)?;
    stage.change(&mut service, &json!({"ipFamilyPolicy": "RequireDualStack"}))?;
    until("slices of both families", || {
        let found = [first, second].map(|family| super::endpoints(stage, &service, family));
        for endpoints in found {
            let endpoints = endpoints?;
            let ready = endpoints
                .iter()
                .filter(|one| one["conditions"]["ready"] == true)
                .count();
            ensure!(ready == all.len(), "{endpoints:?}");
        }
        Ok(())
    })?;
    stage.cluster.settle()?;
    let added = service.cluster(second)?;
    for target in [service.cluster(first)?, added] {
        stage.meet(&From::Pod(&client), target, &all)?;
    }
    stage.change(&mut service, &json!({"ipFamilyPolicy": "SingleStack"}))?;
    of_first(&service)?;
    stage.unserved(&From::Pod(&client), added)?;
    Ok(format!("{second} came and went beside {first}"))
}

fn ports(stage: &Stage<'_>) -> Result<String> {
    let pods = stage.pods(&[1, 2])?;
    let all: Vec<_> = pods.iter().collect();
    let mut spec = stage.two_ports();
    if let Some(ports) = spec["ports"].as_array_mut() {
        ports.push(Stage::second_port("second", PORT + 1));
    }
    let service = stage.named_service("named", spec, &json!({}))?;
    let nameless = stage.named_service(
        "nameless",
        {
            let mut spec = stage.service_spec();
            spec["ports"] = json!([{"protocol": "TCP", "port": PORT, "targetPort": TARGET_SECOND}]);
            spec
        },
        &json!({}),
    )?;
    stage.wait_endpoints(&nameless, &all)?;
    stage.have(&service, &all)?;
    let client = stage.client(1)?;
    let from = From::Pod(&client);
    for family in stage.families() {
        let at = service.cluster(*family)?;
        let second = plan::at(at.ip(), PORT + 1);
        for (target, port) in [
            (at, TARGET),
            (second, TARGET_SECOND),
            (nameless.cluster(*family)?, TARGET_SECOND),
        ] {
            for met in stage.dial_many(&from, target, 4)? {
                ensure!(
                    met.own.port() == port,
                    "{target} leads to {met:?} and not to port {port}"
                );
            }
        }
        let met = stage.attempt(&from, Over::Udp, at, patience())??;
        ensure!(met.own.port() == TARGET && met.len.is_some(), "{met:?}");
        // A port that the Service has not is nobody's.
        stage.unserved(&from, plan::at(at.ip(), PORT + 2))?;
    }
    stage.wait_connects(1, &service, stage.families().len() as u64 * 9)?;
    stage.wait_connects(1, &nameless, stage.families().len() as u64 * 4)?;
    Ok("two named ports, one of UDP, and one without a name".to_owned())
}

fn one_number(stage: &Stage<'_>) -> Result<String> {
    let pods = stage.pods(&[1, 2, 3])?;
    let service = stage.named_service("hand", stage.by_hand(), &json!({}))?;
    for family in stage.families() {
        let slice = |suffix: &str, pod: usize, ports: Value| -> Result<()> {
            let mut object = stage.slice_object(suffix, &service.name, *family, &json!([ready(&pods[pod], *family)]));
            object["ports"] = ports;
            stage.put(&object).map(drop)
        };
        slice("tcp", 0, json!([{"name": "tcp", "protocol": "TCP", "port": TARGET}]))?;
        slice("udp", 1, json!([{"name": "udp", "protocol": "UDP", "port": TARGET}]))?;
        // The right name of the wrong protocol, the other way round, no name, and no number.
        slice(
            "others",
            2,
            json!([
                {"name": "tcp", "protocol": "UDP", "port": TARGET}, {"name": "udp", "protocol": "TCP", "port": TARGET},
                {"name": "", "protocol": "TCP", "port": TARGET},
            ]),
        )?;
        slice(
            "nil",
            2,
            json!([{"name": "tcp", "protocol": "TCP"}, {"name": "udp", "protocol": "UDP"}]),
        )?;
    }
    stage.cluster.settle()?;
    let client = stage.client(1)?;
    let from = From::Pod(&client);
    for family in stage.families() {
        let at = service.cluster(*family)?;
        stage.meet(&from, at, &[&pods[0]])?;
        for _ in 0..MANY / 4 {
            let met = stage.attempt(&from, Over::Udp, at, patience())??;
            ensure!(met.name == pods[1].name, "a datagram met {met:?}");
        }
    }
    stage.holds(1, &service, &[&pods[0], &pods[1]])?;
    // One protocol loses its endpoint, and the other goes on.
    for family in stage.families() {
        stage.slice("tcp", &service.name, *family, &json!([]))?;
    }
    stage.cluster.settle()?;
    for family in stage.families() {
        let at = service.cluster(*family)?;
        let met = stage.attempt(&from, Over::Tcp, at, super::AT_ONCE)?;
        ensure!(met == Err(Failure::Refused), "{met:?}");
        stage.attempt(&from, Over::Udp, at, patience())??;
    }
    Ok("TCP and UDP of port 80 to pods of their own; wrong and missing ports left out".to_owned())
}
