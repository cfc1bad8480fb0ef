//! `evenkeel graph`: who calls whom.

mod dot;
mod sidecar;
#[cfg(test)]
mod tests;

use std::fmt::Write as _;

use clap::Args;

use super::{
    Context, Failure, Found,
    backend::filter,
    grid::{Grid, Tone},
    output::{self, Output, Picture},
};
use crate::view::{
    Answer, GraphView, Query, WorkloadView,
    wording::numbers::{count, counted},
};

/// Show which workload calls which Service, as a table, a picture or Istio Sidecars
#[derive(Debug, Args)]
#[command(after_help = "Besides the forms of every command, -o takes here:\n  \
    dot            a Graphviz digraph\n  \
    istio-sidecar  a Sidecar for each namespace, scoped to what its workloads called\n\n\
    A node sees the calls of its own clients, and only those made while the agent ran: put the nodes' answers together \
    before Sidecars are applied.\n\nExamples:\n  \
    evenkeel graph\n  \
    evenkeel graph -n shop -o json\n  \
    evenkeel graph -o dot | dot -Tsvg > calls.svg\n  \
    evenkeel graph -o istio-sidecar --cluster-domain cluster.local")]
pub(super) struct GraphArgs {
    /// Only calls of Services of this namespace
    #[arg(short, long, value_name = "NAMESPACE")]
    namespace: Option<String>,
    /// The cluster's DNS domain, for `-o istio-sidecar`
    #[arg(long, value_name = "DOMAIN", default_value = "cluster.local", value_parser = sidecar::parse_domain)]
    cluster_domain: String,
    /// Hosts that every Sidecar gets besides, for `-o istio-sidecar`; `none` for none; may be given again
    #[arg(long, value_name = "NAMESPACE/HOST", default_value = "istio-system/*", value_parser = sidecar::parse_host)]
    extra_host: Vec<String>,
}

pub(super) fn run(args: &GraphArgs, picture: Option<Picture>, context: &Context) -> Result<Found, Failure> {
    let answer = context.ask(&Query::Graph {
        filter: filter(None, args.namespace.as_deref()),
    })?;
    match (picture, &answer) {
        (Some(Picture::Dot), Answer::Graph(view)) => output::write(&dot::digraph(view))?,
        (Some(Picture::IstioSidecar), Answer::Graph(view)) => {
            let extra: Vec<&str> = args
                .extra_host
                .iter()
                .map(String::as_str)
                .filter(|&host| host != "none")
                .collect();
            output::write(&sidecar::manifests(view, &args.cluster_domain, &extra)?)?;
        }
        _ => context.output.print(&answer)?,
    }
    Ok(Found::Fine)
}

/// Writes the calls for people.
pub(super) fn text(view: &GraphView, output: Output) -> String {
    let mut grid = Grid::new(&["CALLER", "KIND", "SERVICE", ">CONNECTIONS", ">FAILURES", "LAST SEEN"]);
    for call in &view.calls {
        grid.row(
            if call.failures > 0 { Tone::Warn } else { Tone::Plain },
            [
                caller(&call.client),
                call.client.kind.clone(),
                format!("{}/{}", call.namespace, call.service),
                count(call.connections),
                count(call.failures),
                call.last_seen.to_string(),
            ],
        );
    }
    let mut out = grid.render(output.headers, output.color);
    if output.headers {
        let calls = counted(view.calls.len() as u64, "call");
        // Writing into a String cannot fail.
        let _infallible = write!(out, "\n{calls} seen since {}", view.since);
        if view.forgotten > 0 {
            let _infallible = write!(out, "; {} forgotten for want of room", count(view.forgotten));
        }
        out.push_str(".\n");
    }
    out
}

/// A workload's name with its namespace, where it has one.
fn caller(client: &WorkloadView) -> String {
    if client.namespace.is_empty() {
        client.name.clone()
    } else {
        format!("{}/{}", client.namespace, client.name)
    }
}
