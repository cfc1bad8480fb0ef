//! What `explain` and `conn list` say of packets from outside, beside what the programs do with them.

use std::{collections::BTreeMap, net::SocketAddr};

use anyhow::{Context, Result, bail, ensure};
use lb_user::{
    control,
    view::{Answer, ConnFilter, ConnState, ConnView, ExplainView, Origin, Query, ServiceFilter, Verdict, Whence},
};

use super::{Case, refused_quickly};
use crate::{
    lab::{
        Lab,
        plan::{self, Family},
        pod::Pod,
        service::Service,
        state::Transport,
    },
    runner::scaled,
};

/// The cases.
pub const CASES: &[Case] = &[
    Case::new("EXPLAIN", "each_answer_is_what_the_programs_do", answers),
    Case::new("EXPLAIN", "a_flow_shows_what_has_changed_since", changes),
    Case::new("EXPLAIN", "who_is_not_served_is_told_why", reasons),
];

/// Asks a node's agent about a tuple.
fn explain(lab: &Lab, node: u8, client: SocketAddr, vip: SocketAddr, transport: Transport) -> Result<ExplainView> {
    explain_from(lab, node, client, vip, transport, None)
}

fn explain_from(
    lab: &Lab,
    node: u8,
    client: SocketAddr,
    vip: SocketAddr,
    transport: Transport,
    from: Option<Whence>,
) -> Result<ExplainView> {
    let query = Query::Explain {
        source: client.ip(),
        source_port: (client.port() != 0).then_some(client.port()),
        vip,
        protocol: match transport {
            Transport::Tcp => "TCP".to_owned(),
            Transport::Udp => "UDP".to_owned(),
        },
        from,
    };
    match control::ask(&lab.node(node).socket(), &query)? {
        Answer::Explain(view) => Ok(view),
        other => bail!("not an explanation: {other:?}"),
    }
}

/// The flows of a Service that a node's agent lists, by client.
fn listed(lab: &Lab, node: u8, service: &Service<'_>) -> Result<BTreeMap<SocketAddr, ConnView>> {
    let query = Query::Conns {
        filter: ServiceFilter {
            namespace: Some("default".to_owned()),
            name: Some(service.name.clone()),
        },
        which: ConnFilter {
            origin: Some(Origin::Outside),
            ..ConnFilter::default()
        },
    };
    match control::ask(&lab.node(node).socket(), &query)? {
        Answer::ConnList(view) => Ok(view.items.into_iter().map(|item| (item.client, item)).collect()),
        other => bail!("not connections: {other:?}"),
    }
}

fn only(view: &ExplainView) -> Result<SocketAddr> {
    match view.candidates.as_slice() {
        [one] => Ok(SocketAddr::new(one.addr, one.port)),
        _ => bail!("not one candidate: {view:?}"),
    }
}

/// Asks before each packet where it will go, and afterwards what the table has.
fn answers(lab: &Lab, family: Family) -> Result<String> {
    let service = lab.service(family).load_balancer("VIP");
    let pods: Vec<&Pod> = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1)]
        .map(|(node, n)| lab.pod(node, n))
        .into();
    let ready: Vec<_> = pods.iter().map(|pod| pod.ready(family)).collect();
    service.apply(&ready)?;
    let vip = service.routed();
    let count = scaled(200, 40);
    let (mut own, mut met_pods) = (0, BTreeMap::<String, u32>::new());
    let mut wanted = BTreeMap::new();
    for n in 0..count {
        let client = plan::at(plan::client(family, 1 + (n % 3) as u8), lab.next_port());
        let told = explain(lab, 1, client, vip, Transport::Udp)?;
        let at = only(&told)?;
        ensure!(
            told.verdict == Verdict::Translated
                && told.from == Whence::Outside
                && told.assumed
                && told.flow.is_none()
                && told.service.as_deref() == Some(&format!("default/{}", service.name)),
            "before the first packet: {told:?}"
        );
        let met = lab
            .outside()
            .from(client)
            .ask(vip)
            .with_context(|| format!("ask from {client}"))?;
        let pod = pods
            .iter()
            .find(|pod| pod.name == met.name)
            .context("a pod of the Service")?;
        ensure!(
            at == pod.target(family),
            "{client} should meet {at}, and met {met:?}: {told:?}"
        );
        match told.source_address {
            Some(source) => {
                own += 1;
                ensure!(source == met.peer.ip() && pod.node != 1, "{met:?} with {told:?}");
            }
            None => ensure!(met.peer == client && pod.node == 1, "{met:?} with {told:?}"),
        }
        *met_pods.entry(met.name).or_default() += 1;
        wanted.insert(client, (at, met.peer));
    }
    let flows = listed(lab, 1, &service)?;
    for (client, (at, peer)) in &wanted {
        let told = explain(lab, 1, *client, vip, Transport::Udp)?;
        let flow = told.flow.as_ref().with_context(|| format!("no flow: {told:?}"))?;
        ensure!(
            only(&told)? == *at && flow.backend == *at && flow.backend_state == "active",
            "{told:?}"
        );
        ensure!(
            flow.generation_now == Some(flow.generation),
            "nothing has changed: {flow:?}"
        );
        let shown = flows.get(client).with_context(|| format!("{client} is not listed"))?;
        ensure!(
            shown.backend == Some(*at)
                && shown.frontend == vip
                && shown.state == ConnState::Answered
                && shown.source.unwrap_or(*client) == *peer
                && flow.source == shown.source,
            "{shown:?}, and the pod saw {peer}"
        );
    }
    ensure!(
        flows.len() == wanted.len(),
        "{} of {} are listed",
        flows.len(),
        wanted.len()
    );
    ensure!(
        own > 0 && own < count && met_pods.len() == pods.len(),
        "{own} of {count}, {met_pods:?}"
    );
    // Without a port the answer is a chance, and the chances are those that came true.
    let spread = explain(lab, 1, plan::at(plan::client(family, 1), 0), vip, Transport::Udp)?;
    ensure!(spread.candidates.len() == pods.len(), "{spread:?}");
    let sum: f64 = spread.candidates.iter().map(|one| one.chance).sum();
    ensure!((sum - 1.0).abs() < 1e-9, "{spread:?}");
    Ok(format!(
        "{count} of {count} tuples as they were told, {own} with the node's own source"
    ))
}

/// A connection whose pod begins to terminate.
fn changes(lab: &Lab, family: Family) -> Result<String> {
    let service = lab.service(family).load_balancer("VIP");
    let (a, b) = (lab.pod(1, 1), lab.pod(2, 1));
    service.apply(&[a.ready(family), b.ready(family)])?;
    let vip = service.routed();
    let client = plan::at(plan::client(family, 2), lab.next_port());
    let told = only(&explain(lab, 1, client, vip, Transport::Tcp)?)?;
    let talk = lab.outside().from(client).open(vip)?;
    let (met, other) = if talk.met.name == a.name { (a, b) } else { (b, a) };
    ensure!(told == met.target(family), "told {told}, met {:?}", talk.met);
    let view = explain(lab, 1, client, vip, Transport::Tcp)?;
    let flow = view.flow.as_ref().context("the flow of an open connection")?;
    ensure!(
        flow.state == ConnState::Established && flow.backend_state == "active",
        "{view:?}"
    );
    ensure!(view.next.len() == 1 && view.next[0].addr == met.ip(family), "{view:?}");
    service.apply(&[met.draining(family), other.ready(family)])?;
    let view = explain(lab, 1, client, vip, Transport::Tcp)?;
    let flow = view.flow.as_ref().context("the flow of an open connection")?;
    ensure!(only(&view)? == met.target(family), "an open connection stays: {view:?}");
    ensure!(
        flow.backend_state == "draining" && flow.generation_now.is_some_and(|now| now != flow.generation),
        "{flow:?}"
    );
    ensure!(
        view.next.len() == 1 && view.next[0].addr == other.ip(family),
        "{view:?}"
    );
    talk.have_closed()?;
    let view = explain(lab, 1, client, vip, Transport::Tcp)?;
    let flow = view.flow.as_ref().context("a closed flow keeps its slot for a while")?;
    ensure!(flow.state == ConnState::Closed, "{flow:?}");
    // What was told of a new connection on the same tuple is what comes.
    let again = lab.outside().from(client).open(vip)?;
    ensure!(again.met.name == other.name, "{:?}", again.met);
    again.have_closed()?;
    service.apply(&[other.ready(family)])?;
    Ok(format!("kept at {}, then chosen anew to {}", met.name, other.name))
}

/// Everybody who is turned away, with the reason.
fn reasons(lab: &Lab, family: Family) -> Result<String> {
    let client = plan::at(plan::client(family, 1), lab.next_port());
    let says = |view: &ExplainView, verdict: Verdict, word: &str| {
        let told = view.verdict == verdict && view.steps.iter().any(|step| step.contains(word));
        ensure!(told, "not {verdict} for {word}: {view:?}");
        Ok(())
    };
    let service = lab.service(family).load_balancer("VIP");
    service.apply(&[])?;
    let view = explain(lab, 1, client, service.routed(), Transport::Tcp)?;
    says(&view, Verdict::Refused, "no usable endpoint: RST")?;
    refused_quickly(&lab.outside(), service.routed())?;
    let local = service.with("externalTrafficPolicy", "Local");
    local.apply(&[lab.pod(2, 1).ready(family)])?;
    let view = explain(lab, 1, client, local.routed(), Transport::Tcp)?;
    says(&view, Verdict::Dropped, "policy is Local")?;
    lab.outside().expect_silence(local.routed())?;
    // The cluster address is for clients inside alone; what is a guest's is told by its interface.
    let view = explain(lab, 1, client, local.cluster(), Transport::Tcp)?;
    says(&view, Verdict::Passed, "not served to clients outside")?;
    let guest = plan::at(lab.guest_ip(family), 40_000);
    let view = explain(lab, 1, guest, local.cluster(), Transport::Tcp)?;
    ensure!(
        view.from == Whence::Guest && view.assumed && only(&view)? == lab.pod(2, 1).target(family),
        "{view:?}"
    );
    // Pods are behind no uplink; whoever says otherwise is believed.
    let pod = plan::at(lab.pod(1, 1).ip(family), 0);
    let view = explain(lab, 1, pod, local.cluster(), Transport::Tcp)?;
    ensure!(
        view.from == Whence::Node && view.assumed && view.verdict == Verdict::Translated,
        "{view:?}"
    );
    let view = explain_from(lab, 1, pod, local.cluster(), Transport::Tcp, Some(Whence::Outside))?;
    ensure!(
        view.from == Whence::Outside && !view.assumed && view.verdict == Verdict::Passed,
        "{view:?}"
    );
    let nobodys = plan::at(plan::client(family, 2), 1);
    let ranged = local.with("externalTrafficPolicy", "Cluster").with(
        "loadBalancerSourceRanges",
        vec![format!("{}/{}", nobodys.ip(), family.host_len())],
    );
    ranged.apply(&[lab.pod(2, 1).ready(family)])?;
    let view = explain(lab, 1, client, ranged.routed(), Transport::Tcp)?;
    says(&view, Verdict::Dropped, "no source range")?;
    lab.outside().from(client).expect_silence(ranged.routed())?;
    let view = explain(lab, 1, nobodys, ranged.routed(), Transport::Tcp)?;
    says(&view, Verdict::Translated, "source range of the Service holds")?;
    lab.outside().from(plan::at(nobodys.ip(), 0)).dial(ranged.routed())?;
    Ok("refused, dropped twice, passed; a guest and a pod told apart".to_owned())
}
