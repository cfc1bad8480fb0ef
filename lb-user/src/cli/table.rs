//! `evenkeel table get`: the Maglev tables of a Service.

use std::fmt::Write as _;

use clap::{Args, Subcommand};

use super::{
    Context, Failure, Found,
    grid::{Grid, Tone, endpoint, percent},
    output::Output,
};
use crate::{
    model::ObjectName,
    view::{Query, TableView, parse_service_name},
};

/// Show the lookup tables of a Service
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    evenkeel table get shop/web\n  \
    evenkeel table get shop/web -o json")]
pub(super) struct TableArgs {
    #[command(subcommand)]
    verb: TableVerb,
}

#[derive(Debug, Subcommand)]
enum TableVerb {
    /// Show the tables of one Service: size, generation, digest, slots by backend
    #[command(after_help = "Examples:\n  evenkeel table get shop/web\n  evenkeel table get shop/web -o json")]
    Get {
        /// The Service: NAME (in `default`) or NAMESPACE/NAME
        #[arg(value_name = "SERVICE", value_parser = parse_service_name)]
        name: ObjectName,
    },
}

pub(super) fn run(args: &TableArgs, context: &Context) -> Result<Found, Failure> {
    let TableVerb::Get { name } = &args.verb;
    context.show(&Query::Table {
        namespace: name.namespace.to_string(),
        name: name.name.to_string(),
    })?;
    Ok(Found::Fine)
}

/// Writes the tables for people.
pub(super) fn text(items: &[TableView], output: Output) -> String {
    let mut out = String::new();
    for (index, item) in items.iter().enumerate() {
        if index > 0 {
            out.push('\n');
        }
        // Writing into a String cannot fail.
        let _infallible = writeln!(
            out,
            "{}/{} {} (set {}): {} slots, generation {}, digest {}",
            item.namespace, item.service, item.set, item.set_id, item.size, item.generation, item.digest
        );
        let mut grid = Grid::new(&["BACKEND", ">ID", ">WEIGHT", ">SLOTS", ">SHARE", ">FAIR"]);
        for backend in &item.backends {
            grid.row(
                Tone::Plain,
                [
                    endpoint(backend.addr, backend.port),
                    backend.id.to_string(),
                    backend.weight.to_string(),
                    backend.slots.to_string(),
                    percent(backend.share),
                    percent(backend.fair_share),
                ],
            );
        }
        out.push_str(&grid.render(output.headers, output.color));
    }
    out
}
