//! `evenkeel reuse`: tuple reuse.

use std::fmt::Write as _;

use clap::Args;

use super::{
    Context, Failure, Found,
    backend::filter,
    grid::{Grid, Tone, percent},
    output::Output,
};
use crate::{
    model::ObjectName,
    view::{Query, ReuseView, parse_service_name},
};

/// Show how soon clients reuse a source port, and whether they meet the same backend again
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    evenkeel reuse\n  \
    evenkeel reuse shop/web\n  \
    evenkeel reuse -o json")]
pub(super) struct ReuseArgs {
    /// Only this Service's line: NAME (in `default`) or NAMESPACE/NAME
    #[arg(value_name = "SERVICE", value_parser = parse_service_name, conflicts_with = "namespace")]
    service: Option<ObjectName>,
    /// Only the lines of this namespace
    #[arg(short, long, value_name = "NAMESPACE")]
    namespace: Option<String>,
}

pub(super) fn run(args: &ReuseArgs, context: &Context) -> Result<Found, Failure> {
    context.show(&Query::Reuse {
        filter: filter(args.service.as_ref(), args.namespace.as_deref()),
    })?;
    Ok(Found::Fine)
}

/// The widest bar of the histogram.
const BAR: f64 = 40.0;

/// Writes the reuse for people.
pub(super) fn text(view: &ReuseView, output: Output) -> String {
    let mut out = String::new();
    let mut line = |name: &str, value: String| {
        // Writing into a String cannot fail.
        let _infallible = writeln!(out, "{name:<14}{value}");
    };
    line("Connections:", view.connections.to_string());
    line(
        "Reuses:",
        format!("{} within {} s of the previous close", view.total, view.horizon_seconds),
    );
    line("Outcome:", outcome(view));
    line(
        "Same backend:",
        same(
            view.same_share,
            view.expected_same_share,
            view.same_backend + view.moved,
            view.unknown_backend,
        ),
    );
    line(
        "Overlaps:",
        format!("{} (a use began while another was open; not reuses)", view.overlap),
    );
    if view.backend_level_connections > 0 {
        line(
            "Direct:",
            format!(
                "{} reuses among {} connections straight to backends (counted apart)",
                view.backend_level_total, view.backend_level_connections
            ),
        );
    }
    line(
        "Tracked:",
        format!(
            "{} tuples, {} forgotten too soon, {} records too late",
            view.tuples, view.evicted, view.late
        ),
    );
    out.push('\n');

    let most = view
        .intervals
        .iter()
        .map(|bucket| bucket.count)
        .max()
        .unwrap_or(0)
        .max(1);
    let mut grid = Grid::new(&[">INTERVAL", ">REUSES", "HISTOGRAM"]);
    for bucket in &view.intervals {
        let edge = bucket
            .up_to_seconds
            .map_or_else(|| "longer".to_owned(), |edge| format!("≤ {edge} s"));
        let length = (bucket.count as f64 / most as f64 * BAR).ceil() as usize;
        // The blank keeps an empty bar from being marked as an absent value.
        grid.row(
            Tone::Plain,
            [edge, bucket.count.to_string(), format!(" {}", "█".repeat(length))],
        );
    }
    out.push_str(&grid.render(output.headers, output.color));

    if !view.services.is_empty() {
        out.push('\n');
        let mut grid = Grid::new(&[
            "NAMESPACE",
            "NAME",
            ">CONNECTIONS",
            ">REUSES",
            ">SAME",
            ">MOVED",
            ">STALE",
            ">UNKNOWN",
            ">OVERLAP",
            ">SAME SHARE",
            ">BY CHANCE",
        ]);
        for service in &view.services {
            grid.row(
                Tone::Plain,
                [service.namespace.clone(), service.name.clone()]
                    .into_iter()
                    .chain(cells([
                        service.connections,
                        service.total,
                        service.same_backend,
                        service.moved,
                        service.stale_backend,
                        service.unknown_backend,
                        service.overlap,
                    ]))
                    .chain(
                        [service.same_share, service.expected_same_share]
                            .map(|share| share.map_or_else(String::new, percent)),
                    ),
            );
        }
        out.push_str(&grid.render(output.headers, output.color));
    }
    if !view.clients.is_empty() {
        out.push('\n');
        let mut grid = Grid::new(&[
            "CLIENT",
            "WORKLOAD",
            "SERVICE",
            ">CONNECTIONS",
            ">REUSES",
            ">SAME",
            ">MOVED",
            ">STALE",
            ">UNKNOWN",
        ]);
        for client in &view.clients {
            grid.row(
                Tone::Plain,
                [
                    client.client.to_string(),
                    client.workload.clone().unwrap_or_default(),
                    format!("{}/{}", client.namespace, client.name),
                ]
                .into_iter()
                .chain(cells([
                    client.connections,
                    client.total,
                    client.same_backend,
                    client.moved,
                    client.stale_backend,
                    client.unknown_backend,
                ])),
            );
        }
        out.push_str(&grid.render(output.headers, output.color));
        if view.clients_forgotten > 0 {
            // Writing into a String cannot fail.
            let _infallible = writeln!(
                out,
                "{} clients were forgotten for want of room.",
                view.clients_forgotten
            );
        }
    }
    out
}

/// Counts as cells of a table.
fn cells<const N: usize>(counts: [u64; N]) -> [String; N] {
    counts.map(|count| count.to_string())
}

/// What became of the reuses. Where all backends were out of sight, that is the whole answer.
fn outcome(view: &ReuseView) -> String {
    let unknown = format!(
        "{} whose backend was not seen (somebody else translates)",
        view.unknown_backend
    );
    if view.unknown_backend > 0 && view.unknown_backend == view.total {
        return unknown;
    }
    let mut known = format!(
        "{} met the same backend, {} another, {} came after a backend that was gone",
        view.same_backend, view.moved, view.stale_backend
    );
    if view.unknown_backend > 0 {
        known = format!("{known}, {unknown}");
    }
    known
}

fn same(share: Option<f64>, expected: Option<f64>, n: u64, unknown: u64) -> String {
    match (share, expected) {
        (Some(share), Some(expected)) => {
            format!(
                "{} of {n}; chance alone would give {}",
                percent(share),
                percent(expected)
            )
        }
        (Some(share), None) => format!("{} of {n}", percent(share)),
        (None, _) if unknown > 0 => "not known".to_owned(),
        (None, _) => "no reuse could have met it".to_owned(),
    }
}
