//! What the path does to packets: longer ones than it carries, and checksums that a device is to make.

use anyhow::{Context, Result, ensure};
use lb_user::lab::link;
use nix::errno::Errno;

use super::{Case, refused_quickly};
use crate::{
    agent::until,
    lab::{
        Lab,
        dial::{Datagrams, Dialer, Failure, silence},
        plan::Family,
        topology::{ETH, UPLINK},
    },
    runner::scaled,
};

/// The cases.
pub const CASES: &[Case] = &[
    Case::new(
        "PMTU",
        "a_backend_learns_of_a_narrow_path_to_the_client",
        towards_client,
    ),
    Case::new(
        "PMTU",
        "a_client_learns_of_a_narrow_path_to_the_backend",
        towards_backend,
    ),
    Case::new("OFFLOAD", "checksums_come_out_right_with_and_without_offload", offload),
];

/// Longer than the narrow links, shorter than all others.
const LONG: usize = 1_440;

/// Waits until answers of that length are known to be too long.
pub(super) fn answers_too_long(socket: &Datagrams) -> Result<()> {
    until("the pod to learn of the narrow path", || {
        let (met, len) = socket.exchange_long(1, LONG)?;
        ensure!(met.too_long, "an answer of {len} bytes came through");
        Ok(())
    })
}

/// Waits until requests of that length are known to be too long.
pub(super) fn requests_too_long(socket: &Datagrams) -> Result<()> {
    socket.keep_whole()?;
    until("the client to learn of the narrow path", || {
        let met = socket.exchange_long(LONG, 1);
        ensure!(met == Err(Failure::Other(Errno::EMSGSIZE)), "{met:?}");
        Ok(())
    })
}

fn towards_client(lab: &Lab, family: Family) -> Result<String> {
    let mut words = Vec::new();
    let far = Dialer::new(&lab.wires.far);
    for node in [1, 3] {
        // A pod that has not learned of the path yet.
        let pod = lab.add_pod(node)?;
        until("the wires to the new pod", || {
            Ok(lab.outside().dial(pod.target(family))?)
        })?;
        let service = lab.service(family).load_balancer("VIP");
        service.apply(&[pod.ready(family)])?;
        let errors = lab.node(1).counted("icmp_translated")?;
        let socket = far.within(silence()).datagrams(service.routed_df())?;
        answers_too_long(&socket).with_context(|| pod.name.clone())?;
        lab.node(1).wait_counted("icmp_translated", errors + 1)?;
        requests_too_long(&socket)?;
        far.open(service.routed())?
            .transfer(scaled(400_000, 100_000), || Ok(()))
            .with_context(|| format!("a transfer to {}", pod.name))?;
        words.push(pod.name.clone());
    }
    Ok(format!(
        "{} were told by the node, streams came through",
        words.join(" and ")
    ))
}

fn towards_backend(lab: &Lab, family: Family) -> Result<String> {
    let deep = lab.deep_pod();
    let mut words = Vec::new();
    for node in [1, 2] {
        let service = lab.service(family);
        service.apply(&[deep.ready(family)])?;
        let errors = lab.node(node).counted("icmp_translated")?;
        let socket = lab.outside().within(silence()).datagrams(service.node_port_df(node))?;
        requests_too_long(&socket).with_context(|| format!("through node {node}"))?;
        lab.node(node).wait_counted("icmp_translated", errors + 1)?;
        answers_too_long(&socket)?;
        lab.outside()
            .open(service.node_port(node))?
            .transfer(scaled(400_000, 100_000), || Ok(()))
            .with_context(|| format!("a transfer through node {node}"))?;
        words.push(format!("node {node}"));
    }
    Ok(format!(
        "the client was told through {}, streams came through",
        words.join(" and ")
    ))
}

fn offload(lab: &Lab, family: Family) -> Result<String> {
    let devices = [
        (&lab.wires.client, ETH),
        (&lab.pod(1, 1).netns, ETH),
        (&lab.pod(2, 1).netns, ETH),
        (&lab.guest, ETH),
        (&lab.node(1).netns, UPLINK),
    ];
    let services = [lab.pod(1, 1), lab.pod(2, 1)].map(|pod| (pod, lab.service(family)));
    for (pod, service) in &services {
        service.apply(&[pod.ready(family)])?;
    }
    let empty = lab.service(family);
    empty.apply(&[])?;
    let exercised = [false, true].into_iter().try_for_each(|on| {
        for (netns, device) in devices {
            link::set_checksum_offload(netns, device, on)?;
        }
        for (pod, service) in &services {
            let target = service.node_port(1);
            let what = format!("offload {}, {}", if on { "on" } else { "off" }, pod.name);
            lab.outside()
                .open(target)?
                .transfer(scaled(300_000, 100_000), || Ok(()))
                .with_context(|| what.clone())?;
            lab.outside().ask(target).with_context(|| what.clone())?;
            let socket = lab.outside().datagrams(target)?;
            socket.exchange_long(4_000, 4_000).with_context(|| what.clone())?;
            Dialer::new(&lab.guest)
                .open(service.cluster())?
                .transfer(50_000, || Ok(()))
                .with_context(|| format!("{what}, from a guest"))?;
        }
        refused_quickly(&lab.outside(), empty.node_port(1))?;
        refused_quickly(&Dialer::new(&lab.guest), empty.cluster())?;
        Ok(())
    });
    // Left as it was found, whatever happened.
    for (netns, device) in devices {
        link::set_checksum_offload(netns, device, true)?;
    }
    exercised.map(|()| "streams, datagrams, fragments and refusals, off and on".to_owned())
}
