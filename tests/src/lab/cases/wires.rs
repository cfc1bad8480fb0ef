//! The lab itself: who reaches whom without any proxy, what a narrow path does, and that rules of nftables translate here.

use anyhow::{Result, ensure};
use lb_user::{
    lab::{link, nft},
    model::Protocol,
};

use super::{
    Case,
    path::{answers_too_long, requests_too_long},
    unserved,
};
use crate::agent::until;
use crate::lab::{
    Lab,
    dial::{Dialer, Failure, silence},
    plan::{self, Family},
    topology::ETH,
};

/// The cases.
pub const CASES: &[Case] = &[
    Case::without_agents("LAB", "pods_are_reached_and_see_who_comes", reach),
    Case::without_agents("LAB", "a_narrow_path_is_found_out_by_both_sides", narrow),
    Case::without_agents("LAB", "long_datagrams_travel_in_fragments", fragments),
    Case::without_agents("LAB", "checksum_offload_can_be_switched", offload),
    Case::without_agents("LAB", "nothing_answers_for_a_service_without_an_agent", control),
    Case::without_agents("LAB", "rules_of_nftables_translate_here", reference),
];

fn reach(lab: &Lab, family: Family) -> Result<String> {
    let mut met = 0;
    for node in 1..=plan::NODES {
        for n in 1..=2 {
            let pod = lab.pod(node, n);
            for (from, source) in [
                (&lab.wires.client, plan::client(family, 1)),
                (&lab.wires.far, plan::far(family)),
                (&lab.pod(1, 2).netns, plan::pod(family, 1, 2)),
            ] {
                if pod.ip(family) == source {
                    continue;
                }
                let dialer = Dialer::new(from);
                for seen in [dialer.dial(pod.target(family))?, dialer.ask(pod.target(family))?] {
                    ensure!(
                        seen.name == pod.name && seen.peer.ip() == source,
                        "{seen:?} of {}",
                        pod.name
                    );
                    met += 1;
                }
            }
        }
    }
    let host = lab.outside().dial(lab.host_pod().target(family))?;
    ensure!(
        host.name == "host-3" && host.peer.ip() == plan::client(family, 1),
        "{host:?}"
    );
    Ok(format!("{met} exchanges, every source as it was"))
}

fn narrow(lab: &Lab, family: Family) -> Result<String> {
    let far = Dialer::new(&lab.wires.far);
    // What hosts learn of a path they remember: these are hosts that no other case needs.
    let pod = lab.add_pod(3)?;
    until("the wires to the new pod", || Ok(far.dial(pod.target(family))?))?;
    let datagrams = far
        .within(silence())
        .datagrams(plan::at(pod.ip(family), plan::TARGET_DF))?;
    answers_too_long(&datagrams)?;
    requests_too_long(&datagrams)?;
    let mut talk = far.open(lab.pod(2, 1).target(family))?;
    talk.transfer(300_000, || Ok(()))?;
    let mut talk = lab.outside().open(lab.deep_pod().target(family))?;
    talk.transfer(300_000, || Ok(()))?;
    Ok("datagrams and streams both ways".to_owned())
}

fn fragments(lab: &Lab, family: Family) -> Result<String> {
    let (met, len) = lab
        .outside()
        .datagrams(lab.pod(2, 1).target(family))?
        .exchange_long(8000, 7000)?;
    ensure!((met.len, len) == (Some(8000), 7000), "{met:?}, {len}");
    Ok("8,000 bytes there, 7,000 back".to_owned())
}

fn offload(lab: &Lab, family: Family) -> Result<String> {
    let pod = lab.pod(1, 1);
    for on in [false, true] {
        for netns in [&lab.wires.client, &pod.netns] {
            link::set_checksum_offload(netns, ETH, on)?;
        }
        lab.outside().open(pod.target(family))?.transfer(200_000, || Ok(()))?;
        lab.outside().ask(pod.target(family))?;
    }
    Ok("transfers with checksums made in software, and left to the device".to_owned())
}

fn control(lab: &Lab, family: Family) -> Result<String> {
    let service = lab.service(family).load_balancer("VIP");
    service.write(&[lab.pod(1, 1).ready(family)])?;
    for target in [service.routed(), service.cluster()] {
        unserved(&lab.outside(), target)?;
    }
    let met = lab.outside().dial(service.node_port(1));
    ensure!(met == Err(Failure::Refused), "the node port: {met:?}");
    Ok("cluster address, routed address and node port lead nowhere".to_owned())
}

fn reference(lab: &Lab, family: Family) -> Result<String> {
    let service = lab.service(family);
    let endpoints = [lab.pod(1, 1).target(family), lab.pod(1, 2).target(family)];
    let rules = nft::Service {
        name: format!("default/{}/tcp/tcp", service.name),
        frontend: service.routed(),
        protocol: Protocol::Tcp,
        endpoints: endpoints.to_vec(),
    };
    let netns = &lab.node(1).netns;
    nft::load(netns, &nft::render_all(&[rules]))?;
    let mut met = [0; 2];
    let dialled = (0..40).try_for_each(|_| {
        let seen = lab.outside().dial(service.routed())?;
        ensure!(seen.peer.ip() == plan::client(family, 1), "{seen:?}");
        let at = endpoints.iter().position(|one| *one == seen.own);
        met[at.ok_or_else(|| anyhow::anyhow!("{seen:?}"))?] += 1;
        Ok(())
    });
    let table = if family == Family::V4 { "ip" } else { "ip6" };
    nft::load(netns, &format!("delete table {table} {}\n", nft::TABLE))?;
    dialled?;
    ensure!(met.iter().all(|count| *count > 0), "{met:?}");
    Ok(format!("{met:?} of 40 connections to two pods"))
}
