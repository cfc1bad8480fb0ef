//! `evenkeel doctor`: is this node fit for the agent?

use std::{net::IpAddr, path::PathBuf};

use clap::{Args, ValueEnum};
use serde::Serialize;

use super::{
    Context, Failure, Found,
    grid::{Grid, Tone},
    output::{self, Format},
};
use crate::{
    config::{NamePattern, PortRange, Uplinks},
    doctor::{Check, Plan, State, examine},
    view::{Mode, SCHEMA_VERSION},
};

/// Check whether this node is fit for the agent, before anything is installed
#[derive(Debug, Args)]
#[command(
    after_help = "Changes nothing and needs no agent. Exits with 1 when a check fails.\n\nExamples:\n  \
    sudo evenkeel doctor\n  \
    sudo evenkeel doctor --mode observe\n  \
    sudo evenkeel doctor --node-address 192.0.2.10\n  \
    sudo evenkeel doctor -o json"
)]
pub(super) struct DoctorArgs {
    /// The mode that the agent is to run in
    #[arg(long, env = "EVENKEEL_MODE", value_enum, default_value_t = ModeArg::Balance)]
    mode: ModeArg,
    /// The BPF file system
    #[arg(long, env = "EVENKEEL_BPFFS", value_name = "PATH", default_value = "/sys/fs/bpf")]
    bpffs: PathBuf,
    /// The cgroup v2 directory to attach to [default: the root of the mounted cgroup2 hierarchy]
    #[arg(long, env = "EVENKEEL_CGROUP", value_name = "PATH")]
    cgroup: Option<PathBuf>,
    /// Interfaces that lead out of the node, as the agent is to be told: `auto`, `none`, or names (repeatable)
    #[arg(
        long = "uplink",
        env = "EVENKEEL_UPLINK",
        value_name = "auto|none|NAME",
        value_delimiter = ','
    )]
    uplinks: Vec<String>,
    /// Interfaces with guests behind them, as the agent is to be told (repeatable)
    #[arg(
        long = "guest-interface",
        env = "EVENKEEL_GUEST_INTERFACE",
        value_name = "NAME|PREFIX*",
        value_delimiter = ','
    )]
    guests: Vec<NamePattern>,
    /// An address of this node, as its Node object gives it (repeatable)
    #[arg(
        long = "node-address",
        env = "EVENKEEL_NODE_ADDRESS",
        value_name = "ADDR",
        value_delimiter = ','
    )]
    node_addresses: Vec<IpAddr>,
    /// The node's own source ports towards backends on other nodes, as the agent is to be told
    #[arg(long, env = "EVENKEEL_SNAT_PORTS", value_name = "FIRST-LAST", default_value_t = PortRange::default())]
    snat_ports: PortRange,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ModeArg {
    /// Translate frontends to backends.
    Balance,
    /// Only watch.
    Observe,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct DoctorDocument<'a> {
    schema_version: u32,
    kind: &'static str,
    checks: &'a [Check],
}

pub(super) fn run(args: &DoctorArgs, context: &Context) -> Result<Found, Failure> {
    let mode = match args.mode {
        ModeArg::Balance => Mode::Balance,
        ModeArg::Observe => Mode::Observe,
    };
    let uplinks =
        Uplinks::from_words(&args.uplinks, mode).map_err(|error| Failure::Usage(format!("--uplink: {error}")))?;
    let checks = examine(&Plan {
        mode,
        bpffs: args.bpffs.clone(),
        cgroup: args.cgroup.clone(),
        uplinks,
        guests: args.guests.clone(),
        node_addresses: args.node_addresses.clone(),
        snat_ports: args.snat_ports,
    });
    let text = match context.output.format {
        Format::Json | Format::Yaml => context.output.document(&DoctorDocument {
            schema_version: SCHEMA_VERSION,
            kind: "Doctor",
            checks: &checks,
        })?,
        Format::Name => output::one_a_line(checks.iter().map(|check| format!("check/{}", check.id))),
        Format::Table | Format::Wide => {
            let wide = context.output.format == Format::Wide;
            table(&checks, wide).render(context.output.headers, context.output.color)
        }
    };
    output::write(&text)?;
    let failed = checks.iter().any(|check| check.state == State::Fail);
    Ok(if failed { Found::Problem } else { Found::Fine })
}

/// The table of checks; what is wanted and what to do stand in it only where they matter, or by `-o wide`.
fn table(checks: &[Check], wide: bool) -> Grid {
    let mut grid = Grid::new(&["CHECK", "STATE", "FOUND", "WANTED", "HINT"]);
    for check in checks {
        let (tone, state) = match check.state {
            State::Ok => (Tone::Good, "ok"),
            State::Warn => (Tone::Warn, "warn"),
            State::Fail => (Tone::Bad, "fail"),
        };
        let wanted = if wide || check.state != State::Ok {
            check.wanted.as_str()
        } else {
            ""
        };
        grid.row(
            tone,
            [&check.id, state, &check.found, wanted, &check.hint].map(str::to_owned),
        );
    }
    grid
}
