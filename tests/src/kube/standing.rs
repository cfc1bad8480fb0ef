//! The cluster that stands until it is taken down.

use anyhow::{Context, Result};
use lb_user::lab::mounts::BpfFs;
use serde_json::{Map, Value, json};

use super::{Cluster, programs};
use crate::{
    command_line::say,
    interrupt,
    standing::{Place, Standing, names},
};

pub use crate::standing::HOLD;

/// What stands.
pub const STANDING: Standing = Standing {
    name: "cluster",
    socket: "/run/evenkeel-kube.sock",
    log: "evenkeel-kube.log",
    task: "cargo xtask kube",
};

/// Builds a cluster that stands, and says where everything is.
///
/// # Errors
/// Where one stands already or cannot be built.
pub fn up() -> Result<()> {
    let places = STANDING.up()?;
    say(&format!(
        "The cluster stands. Its places: {}.\n\
         Ask the API server:  cargo xtask kube exec control -- kubectl get nodes,services,endpointslices -A\n\
         Ask an agent:        cargo xtask kube exec node-1 -- evenkeel status\n\
         How it is:           cargo xtask kube status\n\
         Take it down:        cargo xtask kube down",
        names(&places).join(", ")
    ));
    Ok(())
}

/// Says how the standing cluster is.
///
/// # Errors
/// Where none stands.
pub fn status() -> Result<()> {
    let told = STANDING.ask("status").context("no cluster stands")?;
    for (name, word) in told.as_object().into_iter().flatten() {
        say(&format!("{name:<28} {}", word.as_str().unwrap_or_default()));
    }
    Ok(())
}

/// Holds a cluster until it is asked to let go, or a signal comes.
///
/// # Errors
/// Where it cannot be built.
pub fn hold() -> Result<()> {
    interrupt::catch()?;
    let _mounts = BpfFs::enter_private()?;
    let cluster = Cluster::new(&say)?;
    let kubeconfig = cluster.plane().kubeconfig().display().to_string();
    let path = programs::folder()
        .map(|folder| programs::search_path(&folder).to_string_lossy().into_owned())
        .unwrap_or_default();
    let places: Vec<Place> = cluster
        .places()
        .into_iter()
        .map(|(name, node, netns)| {
            let node = node.map(|number| cluster.node(number));
            let mut environment = vec![("KUBECONFIG", kubeconfig.clone()), ("PATH", path.clone())];
            if let Some(node) = node {
                environment.push(("EVENKEEL_SOCKET", node.socket().display().to_string()));
            }
            Place {
                name,
                netns,
                cgroup: node.map(|node| node.cgroup().path().to_owned()),
                environment,
            }
        })
        .collect();
    let mut further = Map::new();
    further.insert("folder".to_owned(), json!(cluster.folder()));
    STANDING.serve(cluster, &places, further, describe)
}

fn describe(cluster: &Cluster) -> Value {
    let word = |result: Result<String>| result.unwrap_or_else(|error| format!("{error:#}"));
    let mut told = Map::new();
    let well = cluster.api().is_well("/readyz").map(|()| "ready".to_owned());
    told.insert("kube-apiserver".to_owned(), json!(word(well)));
    let pods = cluster.api().items("/api/v1/pods").map(|pods| pods.len().to_string());
    told.insert("pods".to_owned(), json!(word(pods)));
    for node in cluster.nodes() {
        let agent = node.ask(|agent| {
            let status = agent.status()?;
            Ok(format!(
                "agent {} Services, {} backends",
                status.counts.services, status.counts.backends
            ))
        });
        told.insert(node.name(), json!(word(agent)));
    }
    Value::Object(told)
}
