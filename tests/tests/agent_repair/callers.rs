//! Who calls: a Pod's connections are its Deployment's, in the graph and in the events.

use std::{collections::BTreeMap, net::IpAddr, ops::ControlFlow, sync::mpsc, thread};

use anyhow::{Result, bail};
use lb_tests::agent::{
    Agent, NODE_NAME, Node, must, until,
    web::{BACKENDS, VIP, serve_all, write_web},
};
use lb_user::{
    control,
    lab::{
        Netns,
        client::{self, Load},
        link,
        server::Manner,
    },
    view::{Answer, EventView, Query, ServiceFilter},
};
use serde_json::{Value, json};

const POD: &str = "10.1.0.2";

fn nginx() -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "nginx-6d4cf56db6-x7k2p", "namespace": "shop",
            "labels": {"app": "nginx", "pod-template-hash": "6d4cf56db6"},
            "ownerReferences": [{
                "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "nginx-6d4cf56db6", "uid": "1", "controller": true,
            }],
        },
        "spec": {"nodeName": NODE_NAME, "containers": [{"name": "nginx", "image": "nginx"}]},
        "status": {"phase": "Running", "podIP": POD, "podIPs": [{"ip": POD}]},
    })
}

/// (Connections, failures) by caller, over all Services.
fn calls(agent: &Agent) -> Result<BTreeMap<String, (u64, u64)>> {
    let query = Query::Graph {
        filter: ServiceFilter::default(),
    };
    match agent.ask(&query)? {
        Answer::Graph(view) => Ok(view
            .calls
            .into_iter()
            .map(|call| {
                let client = call.client;
                let caller = format!("{} {}/{}", client.kind, client.namespace, client.name);
                (caller, (call.connections, call.failures))
            })
            .collect()),
        other => bail!("not a graph: {other:?}"),
    }
}

fn expect(agent: &Agent, what: &str, wanted: &[(&str, (u64, u64))]) -> Result<()> {
    let wanted = wanted.iter().map(|(caller, counts)| ((*caller).to_owned(), *counts));
    let wanted: BTreeMap<_, _> = wanted.collect();
    until(what, || {
        let found = calls(agent)?;
        must(found == wanted, || format!("{found:?}, and not {wanted:?}"))
    })
}

/// A client's namespace beside the node's.
fn pod_of(node: &Node) -> Result<Netns> {
    let (gateway, own): (IpAddr, IpAddr) = ("10.1.0.1".parse()?, POD.parse()?);
    let pod = Netns::new()?;
    link::join((node.netns(), "pod0"), (&pod, "eth0"))?;
    link::add_address(node.netns(), "pod0", gateway, 24)?;
    link::add_address(&pod, "eth0", own, 24)?;
    link::add_default_route(&pod, "eth0", gateway)?;
    Ok(pod)
}

pub(super) fn callers(node: &Node) -> Result<()> {
    let servers = serve_all(node, Manner::Greet)?;
    write_web(node, &BACKENDS)?;
    let pod = pod_of(node)?;
    let dial = || -> Result<bool> {
        let load = Load::tcp(VIP.parse()?);
        Ok(pod.run(|| client::try_once(&load))?.outcome.is_ok())
    };
    let agent = node.start(&[])?;

    must(dial()?, || "the Pod is not served".to_owned())?;
    node.dial(VIP)?;
    let host = format!("Node /{NODE_NAME}");
    expect(
        &agent,
        "an unknown Pod",
        &[("Address /10.1.0.2", (1, 0)), (&host, (1, 0))],
    )?;

    node.write("pods.yaml", &[nginx()])?;
    let nginx = "Deployment shop/nginx";
    expect(&agent, "the Pod to be known", &[(nginx, (1, 0)), (&host, (1, 0))])?;

    let (sender, events) = mpsc::channel();
    let socket = node.socket();
    let follower = thread::spawn(move || {
        control::follow(&socket, ServiceFilter::default(), |event| {
            if let EventView::Connection { client, workload, .. } = event {
                // A receiver that is gone has seen enough.
                let _ = sender.send((client.ip(), workload));
                return ControlFlow::Break(());
            }
            ControlFlow::Continue(())
        })
    });
    // The first connections may come before the follower.
    let mut dials = 1;
    let (client, workload) = until("an event of the Pod", || {
        must(dial()?, || "the Pod is not served".to_owned())?;
        dials += 1;
        Ok(events.try_recv()?)
    })?;
    must(
        client.to_string() == POD && workload.as_deref() == Some("shop/nginx"),
        || format!("{client} is told to be {workload:?}"),
    )?;
    if let Err(error) = follower.join() {
        std::panic::resume_unwind(error);
    }

    drop(servers);
    must(!dial()?, || "served by nobody".to_owned())?;
    expect(&agent, "the refusal", &[(nginx, (dials + 1, 1)), (&host, (1, 0))])?;

    // What a Pod did remains its workload's when the Pod is gone.
    node.write("pods.yaml", &[])?;
    until("the Pod to go", || {
        let kinds = agent.status()?.source.kinds;
        let pods = kinds.iter().find(|kind| kind.kind == "Pod");
        must(pods.is_some_and(|pods| pods.objects == 0), || format!("{kinds:?}"))
    })?;
    expect(&agent, "the calls to stay", &[(nginx, (dials + 1, 1)), (&host, (1, 0))])?;
    let metrics = agent.metrics()?;
    must(
        metrics.contains_key(r#"evenkeel_source_synced_timestamp_seconds{kind="Pod"}"#),
        || format!("{metrics:?}"),
    )?;
    agent.stop()
}
