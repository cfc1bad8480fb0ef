//! `evenkeel service list|get`.

use std::fmt::Write as _;

use clap::{Args, Subcommand};

use super::{
    Context, Failure, Found, backend,
    grid::{Grid, Tone, decimal, endpoint},
    output::{self, Output},
};
use crate::{
    model::ObjectName,
    view::{Answer, FrontendView, OutsideView, Query, ServiceFilter, ServiceView, parse_service_name},
};

/// Show Services: frontends, backends, connections, evenness
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    evenkeel service list\n  \
    evenkeel service list -n shop -o wide\n  \
    evenkeel service get shop/web")]
pub(super) struct ServiceArgs {
    #[command(subcommand)]
    verb: ServiceVerb,
}

#[derive(Debug, Subcommand)]
enum ServiceVerb {
    /// List Services
    #[command(after_help = "Examples:\n  evenkeel service list\n  evenkeel service list -n shop -o wide")]
    List {
        /// Only in this namespace
        #[arg(short, long, value_name = "NAMESPACE")]
        namespace: Option<String>,
    },
    /// Show one Service with its backends
    #[command(after_help = "Examples:\n  evenkeel service get shop/web\n  evenkeel service get shop/web -o json")]
    Get {
        /// The Service: NAME (in `default`) or NAMESPACE/NAME
        #[arg(value_name = "SERVICE", value_parser = parse_service_name)]
        name: ObjectName,
    },
}

pub(super) fn run(args: &ServiceArgs, context: &Context) -> Result<Found, Failure> {
    match &args.verb {
        ServiceVerb::List { namespace } => {
            let filter = ServiceFilter {
                namespace: namespace.clone(),
                name: None,
            };
            context.show(&Query::Services { filter })?;
        }
        ServiceVerb::Get { name } => {
            context.show(&Query::Service {
                namespace: name.namespace.to_string(),
                name: name.name.to_string(),
            })?;
            if context.output.for_people() {
                let filter = ServiceFilter {
                    namespace: Some(name.namespace.to_string()),
                    name: Some(name.name.to_string()),
                };
                let answer = context.ask(&Query::Backends { filter })?;
                if let Answer::BackendList { items } = &answer {
                    let wide = context.output.format == output::Format::Wide;
                    let grid = backend::list(items, wide);
                    output::write(&format!(
                        "\n{}",
                        grid.render(context.output.headers, context.output.color)
                    ))?;
                }
            }
        }
    }
    Ok(Found::Fine)
}

/// The table of Services.
pub(super) fn list(items: &[ServiceView], wide: bool) -> Grid {
    let mut header = vec![
        "NAMESPACE",
        "NAME",
        "FRONTENDS",
        ">BACKENDS",
        ">CONNECTS",
        ">FAILED",
        ">ACTIVE",
        ">MAX/MEAN",
        ">N",
    ];
    if wide {
        header.extend([">OUTSIDE", ">CV", ">DISPERSION", ">ID"]);
    }
    let mut grid = Grid::new(&header);
    for item in items {
        let total = item.backends.active + item.backends.draining + item.backends.ejected;
        let mut cells = vec![
            item.namespace.clone(),
            item.name.clone(),
            frontends(&item.frontends, wide),
            format!("{}/{total}", item.backends.active),
            item.connects.to_string(),
            item.failed.values().sum::<u64>().to_string(),
            item.active.to_string(),
            evenness(item, |view| view.max_over_mean),
            item.imbalance.map_or_else(|| "0".to_owned(), |view| view.n.to_string()),
        ];
        if wide {
            cells.extend([
                item.outside.to_string(),
                evenness(item, |view| view.cv),
                evenness(item, |view| view.dispersion),
                item.id.to_string(),
            ]);
        }
        let tone = if item.imbalance.is_some_and(|view| view.alarm) {
            Tone::Bad
        } else if item.backends.active == 0 {
            Tone::Warn
        } else {
            Tone::Plain
        };
        grid.row(tone, cells);
    }
    grid
}

/// A measure of evenness, or a word in its place while the sample says nothing.
fn evenness(item: &ServiceView, measure: impl Fn(&crate::view::ImbalanceView) -> Option<f64>) -> String {
    match &item.imbalance {
        Some(view) if view.insufficient => "insufficient".to_owned(),
        Some(view) => decimal(measure(view)),
        None => String::new(),
    }
}

/// What clients outside meet, in words that hold no blank.
fn met_outside(found: &OutsideView) -> String {
    let mut text = found.scope.clone();
    if found.masquerade {
        text.push_str(",masquerade");
    }
    if found.source_ranges {
        text.push_str(",source-ranges");
    }
    text
}

fn frontends(all: &[FrontendView], wide: bool) -> String {
    let text = |frontend: &FrontendView| format!("{}/{}", endpoint(frontend.addr, frontend.port), frontend.protocol);
    match all {
        [] => String::new(),
        [first, rest @ ..] if !wide && !rest.is_empty() => format!("{} +{}", text(first), rest.len()),
        all => all.iter().map(text).collect::<Vec<_>>().join(","),
    }
}

/// One Service for people, without its backends' table.
pub(super) fn describe(view: &ServiceView, output: Output) -> String {
    let mut out = String::new();
    let mut line = |name: &str, value: String| {
        // Writing into a String cannot fail.
        let _infallible = writeln!(out, "{name:<12}{value}");
    };
    line("Service:", format!("{}/{} (id {})", view.namespace, view.name, view.id));
    let states = view.backends;
    line(
        "Backends:",
        format!(
            "{} active, {} draining, {} ejected",
            states.active, states.draining, states.ejected
        ),
    );
    let failed: u64 = view.failed.values().sum();
    let outside = if view.outside > 0 {
        format!(", {} from outside", view.outside)
    } else {
        String::new()
    };
    line(
        "Connects:",
        format!("{} ({failed} failed, {} active{outside})", view.connects, view.active),
    );
    for (reason, count) in &view.failed {
        line("", format!("{count} {reason}"));
    }
    match &view.imbalance {
        // Beside another proxy the Service's connections are seen and their backends are not.
        None if view.connects > 0 => line("Evenness:", "not known: no connection was seen on a backend".to_owned()),
        None => line("Evenness:", "no connections counted yet".to_owned()),
        Some(found) if found.insufficient => {
            line(
                "Evenness:",
                format!("insufficient: {} connections over {} backends", found.n, found.backends),
            );
        }
        Some(found) => {
            let numbers = format!(
                "max/mean {}, cv {}, dispersion {} (1 is chance), n {}",
                decimal(found.max_over_mean),
                decimal(found.cv),
                decimal(found.dispersion),
                found.n
            );
            line("Evenness:", numbers);
            let verdict = if found.alarm {
                "uneven beyond chance"
            } else {
                "within chance, or too small to matter"
            };
            line("", format!("{verdict} (p = {:.1e})", found.p));
        }
    }
    out.push('\n');
    let mut grid = Grid::new(&["KIND", "FRONTEND", "PROTOCOL", "AFFINITY", "OUTSIDE"]);
    for frontend in &view.frontends {
        grid.row(
            Tone::Plain,
            [
                frontend.kind.clone(),
                endpoint(frontend.addr, frontend.port),
                frontend.protocol.clone(),
                frontend
                    .affinity_seconds
                    .map_or_else(String::new, |seconds| format!("{seconds}s")),
                frontend.outside.as_ref().map_or_else(String::new, met_outside),
            ],
        );
    }
    out.push_str(&grid.render(output.headers, output.color));
    out
}
