//! Whose address a server sees, and whose address a client is answered from.

use std::net::UdpSocket;

use anyhow::{Context, Result, ensure};

use super::Case;
use crate::lab::{
    Lab,
    dial::{Dialer, Failure, patience},
    plan::{self, Family},
    service::Service,
    state::Transport,
};

/// The cases.
pub const CASES: &[Case] = &[
    Case::new("C17", "sources_are_kept_but_towards_other_nodes", kept),
    Case::new(
        "C17",
        "a_pod_with_the_nodes_addresses_is_an_endpoint_like_others",
        host_network,
    ),
    Case::new("K20", "answers_come_from_the_address_that_was_asked", answers),
    Case::new("K20", "two_frontends_of_one_backend_never_share_a_tuple", collision),
    Case::new("K40", "a_pod_reaches_itself_through_its_service", own_service),
    Case::new("K40", "a_guest_reaches_itself_through_its_service", guest_hairpin),
];

fn kept(lab: &Lab, family: Family) -> Result<String> {
    let client = plan::client(family, 1);
    let service = lab.service(family).load_balancer("VIP");
    service.apply(&[lab.pod(1, 1).ready(family)])?;
    for (node, source) in [(1, client), (3, plan::node(family, 3))] {
        service.route_to(&[node])?;
        for target in [service.routed(), service.node_port(node)] {
            let talk = lab.outside().open(target)?;
            ensure!(talk.met.peer.ip() == source, "{:?} by {target}", talk.met);
            let kept = talk.met.peer == talk.own()?;
            ensure!(kept == (node == 1), "the port too: {:?} of {}", talk.met, talk.own()?);
            let flow = lab
                .node(node)
                .flow(Transport::Tcp, talk.own()?, target)?
                .context("the flow of an open connection")?;
            ensure!(flow.is_answered() && !flow.is_closed(), "{flow:?}");
            ensure!((flow.source_port.get() == 0) == kept, "{flow:?}");
            let asked = lab.outside().ask(target)?;
            ensure!(asked.peer.ip() == source, "{asked:?}");
        }
    }
    for (from, source) in [(&lab.guest, lab.guest_ip(family)), (&lab.wires.far, plan::far(family))] {
        let met = Dialer::new(from).dial(service.node_port(1))?;
        ensure!(met.peer.ip() == source, "{met:?}");
    }
    Ok("kept to a pod of the node, the node's own to a pod elsewhere".to_owned())
}

fn host_network(lab: &Lab, family: Family) -> Result<String> {
    let service = lab.service(family);
    service.apply(&[lab.host_pod().ready(family)])?;
    for (node, source) in [(3, plan::client(family, 1)), (1, plan::node(family, 1))] {
        for met in lab.outside().dial_many(service.node_port(node), 4)? {
            ensure!(met.name == "host-3" && met.peer.ip() == source, "{met:?}");
        }
        let asked = lab.outside().ask(service.node_port(node))?;
        ensure!(asked.peer.ip() == source, "{asked:?}");
        service.wait_connects(node, 5)?;
    }
    let met = lab
        .node(1)
        .inside(|| lab.pod(1, 1).dialer().dial(service.cluster()))??;
    ensure!(met.name == "host-3", "{met:?}");
    let met = lab
        .node(3)
        .inside(|| Dialer::new(&lab.node(3).netns).dial(service.cluster()))??;
    ensure!(met.name == "host-3", "{met:?}");
    Ok("from outside through its own node and through another, and from pods".to_owned())
}

fn answers(lab: &Lab, family: Family) -> Result<String> {
    let services = [lab.pod(1, 1), lab.pod(2, 1)].map(|pod| (pod, lab.service(family).load_balancer("VIP")));
    for (pod, service) in &services {
        service.apply(&[pod.ready(family)])?;
    }
    let any = match family {
        Family::V4 => plan::at(std::net::Ipv4Addr::UNSPECIFIED.into(), 0),
        Family::V6 => plan::at(std::net::Ipv6Addr::UNSPECIFIED.into(), 0),
    };
    let mut asked = 0;
    for netns in [&lab.wires.client, &lab.guest] {
        // One socket that asks two Services in turn: each answer must say whose it is.
        let socket = netns.run(|| UdpSocket::bind(any))??;
        socket.set_read_timeout(Some(patience()))?;
        for _ in 0..4 {
            for (_, service) in &services {
                socket.send_to(b"?", service.routed())?;
                let (_, from) = socket
                    .recv_from(&mut [0; 256])
                    .with_context(|| format!("the answer of {}", service.routed()))?;
                ensure!(
                    from == service.routed(),
                    "{} was asked, and {from} answered",
                    service.routed()
                );
                asked += 1;
            }
        }
    }
    Ok(format!("{asked} answers, each from where it was asked"))
}

fn collision(lab: &Lab, family: Family) -> Result<String> {
    let services = [(); 2].map(|()| lab.service(family).load_balancer("VIP"));
    for service in &services {
        service.apply(&[lab.pod(1, 1).ready(family)])?;
    }
    let [first, second] = services.each_ref().map(Service::routed);
    let before = lab.node(1).counted("collision")?;
    let from = plan::at(plan::client(family, 1), lab.next_port());
    let mut talk = lab.outside().from(from).open(first)?;
    // To the backend both connections would be one: answers could not be told apart.
    let met = lab.outside().from(from).dial(second);
    ensure!(met == Err(Failure::Refused), "the second connection: {met:?}");
    lab.node(1).wait_counted("collision", before + 1)?;
    talk.say("still here").context("the first connection")?;
    let own = talk.own()?;
    talk.have_closed()?;
    ensure!(own == from, "{own} is not {from}");
    let met = lab
        .outside()
        .from(from)
        .dial(second)
        .context("when the first is closed")?;
    ensure!(met.peer == from, "{met:?}");
    Ok("refused while the first is open, served when it has closed".to_owned())
}

fn own_service(lab: &Lab, family: Family) -> Result<String> {
    let pod = lab.pod(1, 1);
    let service = lab.service(family);
    service.apply(&[pod.ready(family)])?;
    let (stream, datagram) = lab.node(1).inside(|| {
        (
            pod.dialer().dial(service.cluster()),
            pod.dialer().ask(service.cluster()),
        )
    })?;
    for met in [stream?, datagram?] {
        ensure!(met.name == pod.name && met.peer.ip() == pod.ip(family), "{met:?}");
    }
    service.wait_connects(1, 2)?;
    Ok("TCP and UDP, its own address as the source".to_owned())
}

fn guest_hairpin(lab: &Lab, family: Family) -> Result<String> {
    let serving = lab.serve_in_guest()?;
    let service = lab.service(family);
    let mut endpoint = lab.pod(1, 1).ready(family);
    endpoint["addresses"] = serde_json::json!([lab.guest_ip(family)]);
    endpoint["targetRef"]["name"] = "guest".into();
    endpoint["targetRef"]["uid"] = "uid-guest".into();
    service.apply(&[endpoint])?;
    let guest = Dialer::new(&lab.guest);
    let mut talk = guest.open(service.cluster())?;
    // Its own address would be refused by its own kernel: it meets the node's.
    let gateway = plan::pod_gateway(family, 1);
    ensure!(
        talk.met.name == "guest" && talk.met.peer.ip() == gateway,
        "{:?}",
        talk.met
    );
    talk.transfer(100_000, || Ok(()))?;
    talk.close()?;
    let met = guest.ask(service.cluster())?;
    ensure!(met.name == "guest" && met.peer.ip() == gateway, "{met:?}");
    // From elsewhere it is an endpoint like others.
    let met = lab.outside().dial(service.node_port(1))?;
    ensure!(
        met.name == "guest" && met.peer.ip() == plan::client(family, 1),
        "{met:?}"
    );
    service.wait_connects(1, 3)?;
    ensure!(serving.accepted() == 2, "{} connections arrived", serving.accepted());
    Ok("TCP and UDP, the node's address as the source".to_owned())
}
