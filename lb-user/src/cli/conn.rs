//! `evenkeel conn list`.

use std::{fmt::Write as _, net::IpAddr};

use clap::{Args, Subcommand};

use super::{
    Context, Failure, Found, backend,
    grid::{Grid, Tone, duration},
    output::Output,
};
use crate::{
    model::ObjectName,
    view::{ConnFilter, ConnListView, ConnState, ConnView, MAX_CONNS, Origin, Query, parse_service_name},
};

/// Show connections that are open or just closed: of this node's sockets, and flows from outside
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    evenkeel conn list\n  \
    evenkeel conn list shop/web --outside -o wide\n  \
    evenkeel conn list --client 198.51.100.7 -o json")]
pub(super) struct ConnArgs {
    #[command(subcommand)]
    verb: ConnVerb,
}

#[derive(Debug, Subcommand)]
enum ConnVerb {
    /// List connections, by Service and client; flows that have expired are left out
    #[command(
        after_help = "ORIGIN is `node` for a socket on this node, `outside` for packets that came in. SOURCE is the node's own address \
    towards the endpoint, where the endpoint does not see the client's. AGE counts from the first packet (or the dial), IDLE from the \
    last one seen; it is up to a quarter of a second late, and sockets have none.\n\nExamples:\n  \
    evenkeel conn list\n  \
    evenkeel conn list shop/web --outside -o wide\n  \
    evenkeel conn list --client 198.51.100.7 --limit 100 -o json"
    )]
    List {
        /// Only of this Service: NAME (in `default`) or NAMESPACE/NAME
        #[arg(value_name = "SERVICE", value_parser = parse_service_name, conflicts_with = "namespace")]
        service: Option<ObjectName>,
        /// Only in this namespace
        #[arg(short, long, value_name = "NAMESPACE")]
        namespace: Option<String>,
        /// Only flows that came in as packets, from outside the node or from a guest
        #[arg(long, conflicts_with = "local")]
        outside: bool,
        /// Only connections of sockets on this node
        #[arg(long)]
        local: bool,
        /// Only of this client
        #[arg(long, value_name = "ADDR")]
        client: Option<IpAddr>,
        /// The most that are listed; of more the youngest are
        #[arg(long, value_name = "N", default_value_t = crate::view::DEFAULT_CONNS, value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_CONNS)))]
        limit: u32,
    },
}

pub(super) fn run(args: &ConnArgs, context: &Context) -> Result<Found, Failure> {
    let ConnVerb::List {
        service,
        namespace,
        outside,
        local,
        client,
        limit,
    } = &args.verb;
    context.show(&Query::Conns {
        filter: backend::filter(service.as_ref(), namespace.as_deref()),
        which: ConnFilter {
            origin: Origin::asked(*outside, *local),
            client: *client,
            limit: *limit,
        },
    })?;
    Ok(Found::Fine)
}

/// The table of connections.
pub(super) fn list(view: &ConnListView, wide: bool, output: Output) -> String {
    let mut header = vec![
        "SERVICE", "PROTOCOL", "ORIGIN", "CLIENT", "FRONTEND", "BACKEND", "SOURCE", "STATE", ">AGE", ">IDLE",
    ];
    if wide {
        header.extend(["WORKLOAD", ">BACKEND-ID", ">GENERATION", "RESUMED"]);
    }
    let mut grid = Grid::new(&header);
    for item in &view.items {
        let mut cells = vec![
            service(item),
            item.protocol.clone(),
            item.origin.to_string(),
            client(item),
            item.frontend.to_string(),
            item.backend.map_or_else(String::new, |backend| backend.to_string()),
            item.source.map_or_else(String::new, |source| source.to_string()),
            item.state.to_string(),
            duration(item.age_seconds),
            item.idle_seconds.map_or_else(String::new, duration),
        ];
        if wide {
            cells.extend([
                item.workload.clone().unwrap_or_default(),
                item.backend_id.to_string(),
                item.generation.map_or_else(String::new, |number| number.to_string()),
                if item.resumed { "yes".to_owned() } else { String::new() },
            ]);
        }
        let tone = match item.state {
            ConnState::SynSent | ConnState::Unanswered if item.age_seconds >= 3.0 => Tone::Warn,
            _ => Tone::Plain,
        };
        grid.row(tone, cells);
    }
    let mut out = grid.render(output.headers, output.color);
    let shown = view.items.len() as u64;
    if view.total > shown {
        // Writing into a String cannot fail.
        let _infallible = writeln!(out, "(the youngest {shown} of {}; --limit shows more)", view.total);
    }
    out
}

/// The name of a connection in lists of names.
pub(super) fn name(item: &ConnView) -> String {
    format!("connection/{}/{}/{}", client(item), item.frontend, item.protocol)
}

fn service(item: &ConnView) -> String {
    if item.service.is_empty() {
        String::new()
    } else {
        format!("{}/{}", item.namespace, item.service)
    }
}

/// The client; a socket whose SYN has not left has no address yet.
fn client(item: &ConnView) -> String {
    if item.client.port() == 0 && item.client.ip().is_unspecified() {
        String::new()
    } else {
        item.client.to_string()
    }
}
