//! `evenkeel backend list`.

use clap::{Args, Subcommand};

use super::{
    Context, Failure, Found,
    grid::{Grid, Tone, endpoint, percent},
};
use crate::{
    model::ObjectName,
    view::{BackendState, BackendView, Query, ServiceFilter, parse_service_name},
};

/// Show backends: state, connections, share of new connections next to the fair one
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    evenkeel backend list\n  \
    evenkeel backend list shop/web -o wide\n  \
    evenkeel backend list -n shop -o json")]
pub(super) struct BackendArgs {
    #[command(subcommand)]
    verb: BackendVerb,
}

#[derive(Debug, Subcommand)]
enum BackendVerb {
    /// List backends
    #[command(after_help = "Examples:\n  evenkeel backend list\n  evenkeel backend list shop/web -o wide")]
    List {
        /// Only of this Service: NAME (in `default`) or NAMESPACE/NAME
        #[arg(value_name = "SERVICE", value_parser = parse_service_name, conflicts_with = "namespace")]
        service: Option<ObjectName>,
        /// Only in this namespace
        #[arg(short, long, value_name = "NAMESPACE")]
        namespace: Option<String>,
    },
}

/// The filter of verbs that take a Service or a namespace.
pub(super) fn filter(service: Option<&ObjectName>, namespace: Option<&str>) -> ServiceFilter {
    match service {
        Some(name) => ServiceFilter {
            namespace: Some(name.namespace.to_string()),
            name: Some(name.name.to_string()),
        },
        None => ServiceFilter {
            namespace: namespace.map(str::to_owned),
            name: None,
        },
    }
}

pub(super) fn run(args: &BackendArgs, context: &Context) -> Result<Found, Failure> {
    let BackendVerb::List { service, namespace } = &args.verb;
    context.show(&Query::Backends {
        filter: filter(service.as_ref(), namespace.as_deref()),
    })?;
    Ok(Found::Fine)
}

/// The table of backends.
pub(super) fn list(items: &[BackendView], wide: bool) -> Grid {
    let mut header = vec![
        "NAMESPACE",
        "SERVICE",
        "ADDRESS",
        "STATE",
        ">WEIGHT",
        ">CONNECTS",
        ">FAILED",
        ">ACTIVE",
        ">SHARE",
        ">FAIR",
        ">N",
    ];
    if wide {
        header.extend([">OUTSIDE", "PROTOCOL", ">ID"]);
    }
    let mut grid = Grid::new(&header);
    for item in items {
        let mut cells = vec![
            item.namespace.clone(),
            item.service.clone(),
            endpoint(item.addr, item.port),
            item.state.to_string(),
            item.weight.to_string(),
            item.connects.to_string(),
            item.failed.to_string(),
            item.active.to_string(),
            item.share.map_or_else(String::new, percent),
            item.fair_share.map_or_else(String::new, percent),
            item.window_connects.to_string(),
        ];
        if wide {
            cells.extend([item.outside.to_string(), item.protocol.clone(), item.id.to_string()]);
        }
        let tone = match item.state {
            BackendState::Active => Tone::Plain,
            BackendState::Draining => Tone::Warn,
            BackendState::Ejected => Tone::Bad,
        };
        grid.row(tone, cells);
    }
    grid
}
