//! `evenkeel map list|dump`: the maps in the kernel.

use clap::{Args, Subcommand};

use super::{
    Context, Failure, Found,
    grid::{Grid, Tone},
    output::Output,
};
use crate::view::{MapDumpView, MapInfoView, Query};

/// Show the maps in the kernel and what is in them
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  evenkeel map list\n  evenkeel map dump FRONTENDS")]
pub(super) struct MapArgs {
    #[command(subcommand)]
    verb: MapVerb,
}

#[derive(Debug, Subcommand)]
enum MapVerb {
    /// List the maps with their sizes
    #[command(after_help = "Examples:\n  evenkeel map list\n  evenkeel map list -o wide")]
    List,
    /// Print the entries of one map, addresses and ports as people write them
    #[command(after_help = "Examples:\n  evenkeel map dump FRONTENDS\n  evenkeel map dump backends -o json")]
    Dump {
        /// The map's name, in any case
        #[arg(value_name = "NAME")]
        name: String,
    },
}

pub(super) fn run(args: &MapArgs, context: &Context) -> Result<Found, Failure> {
    context.show(&match &args.verb {
        MapVerb::List => Query::Maps {},
        MapVerb::Dump { name } => Query::MapDump { name: name.clone() },
    })?;
    Ok(Found::Fine)
}

/// The table of maps.
pub(super) fn list(items: &[MapInfoView], wide: bool) -> Grid {
    let mut header = vec!["NAME", "TYPE", ">ENTRIES", ">MAX", ">KEY", ">VALUE", ">KIB"];
    if wide {
        header.extend([">ID", "PIN"]);
    }
    let mut grid = Grid::new(&header);
    for item in items {
        let number = |value: Option<u64>| value.map_or_else(String::new, |value| value.to_string());
        let mut cells = vec![
            item.name.clone(),
            item.map_type.clone(),
            number(item.entries),
            item.max_entries.to_string(),
            item.key_size.to_string(),
            item.value_size.to_string(),
            number(item.memory_bytes.map(|bytes| bytes.div_ceil(1024))),
        ];
        if wide {
            cells.extend([item.id.to_string(), item.pin.clone().unwrap_or_default()]);
        }
        grid.row(Tone::Plain, cells);
    }
    grid
}

/// Writes a map's contents for people.
pub(super) fn dump(view: &MapDumpView, output: Output) -> String {
    let mut grid = Grid::new(&["KEY", "VALUE"]);
    for row in &view.rows {
        grid.row(Tone::Plain, [row.key.clone(), row.value.clone()]);
    }
    let mut out = grid.render(output.headers, output.color);
    if view.truncated {
        out.push_str("(there are more entries than these)\n");
    }
    out
}
