//! `evenkeel explain`: where a flow goes, and why.

use std::{
    fmt::Write as _,
    net::{IpAddr, SocketAddr},
};

use clap::{Args, ValueEnum};

use super::{
    Context, Failure, Found,
    grid::{Grid, Tone, endpoint, percent},
    output::Output,
};
use crate::view::{CandidateView, ExplainView, Query, Whence};

/// Explain where a connection would go, and why
#[derive(Debug, Args)]
#[command(
    after_help = "A TCP connection of a socket on this node that is still to be made has several candidates, each with its chance. \
    Packets from outside, or of a guest, have one answer once the client's port is given: the flow that the table has, with what \
    has changed since, or where the tuple's hash leads. Without --from, addresses of this node and of its Pods are sockets here, \
    and what an uplink leads to is outside; the answer says what was assumed.\n\nExamples:\n  \
    evenkeel explain 10.244.1.9 10.96.7.7:80\n  \
    evenkeel explain 10.244.1.9:40000 [fd00:96::a]:53 --protocol udp\n  \
    evenkeel explain 198.51.100.7:51000 192.0.2.4:30080 --from outside"
)]
pub(super) struct ExplainArgs {
    /// The client: ADDR, or ADDR:PORT where a flow that exists is meant
    #[arg(value_name = "SRC", value_parser = parse_source)]
    source: Source,
    /// The address and port that it dials
    #[arg(value_name = "VIP:PORT", value_parser = parse_vip)]
    vip: SocketAddr,
    /// Where it begins: packets from outside, packets of a guest, or a socket on this node [default: by the client's address]
    #[arg(long, value_enum, value_name = "WHERE")]
    from: Option<FromArg>,
    /// The protocol
    #[arg(short, long, value_enum, default_value_t = ProtocolArg::Tcp)]
    protocol: ProtocolArg,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ProtocolArg {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum FromArg {
    /// Packets that come in by an uplink.
    Outside,
    /// Packets of a guest with its own kernel.
    Guest,
    /// A socket on this node.
    Node,
}

impl FromArg {
    fn whence(self) -> Whence {
        match self {
            Self::Outside => Whence::Outside,
            Self::Guest => Whence::Guest,
            Self::Node => Whence::Node,
        }
    }
}

/// A client's address, with its port where one is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Source {
    addr: IpAddr,
    port: Option<u16>,
}

fn parse_source(text: &str) -> Result<Source, String> {
    if let Ok(addr) = text.parse() {
        return Ok(Source { addr, port: None });
    }
    text.parse::<SocketAddr>()
        .map(|address| Source {
            addr: address.ip(),
            port: Some(address.port()),
        })
        .map_err(|_| "allowed are ADDR and ADDR:PORT, such as 10.244.1.9 or [fd00::9]:40000".to_owned())
}

fn parse_vip(text: &str) -> Result<SocketAddr, String> {
    text.parse::<SocketAddr>()
        .ok()
        .filter(|address| address.port() != 0)
        .ok_or_else(|| "allowed is ADDR:PORT, such as 10.96.0.10:53 or [fd00:96::a]:53".to_owned())
}

pub(super) fn run(args: &ExplainArgs, context: &Context) -> Result<Found, Failure> {
    context.show(&Query::Explain {
        source: args.source.addr,
        source_port: args.source.port,
        vip: args.vip,
        protocol: match args.protocol {
            ProtocolArg::Tcp => "TCP".to_owned(),
            ProtocolArg::Udp => "UDP".to_owned(),
        },
        from: args.from.map(FromArg::whence),
    })?;
    Ok(Found::Fine)
}

/// Writes the explanation for people.
pub(super) fn text(view: &ExplainView, output: Output) -> String {
    let mut out = format!("{} → {}/{}: {}", view.source, view.vip, view.protocol, view.verdict);
    // Writing into a String cannot fail.
    if let Some(service) = &view.service {
        let kind = view.frontend_kind.as_deref().unwrap_or("frontend");
        let _infallible = write!(out, " ({kind} of {service})");
    }
    if view.from != Whence::Node {
        let _infallible = write!(out, ", from {}", view.from);
    }
    out.push('\n');
    for (index, step) in view.steps.iter().enumerate() {
        let _infallible = writeln!(out, "  {}. {step}", index + 1);
    }
    if !view.candidates.is_empty() {
        out.push('\n');
        out.push_str(&candidates("BACKEND", &view.candidates).render(output.headers, output.color));
    }
    if !view.next.is_empty() {
        out.push('\n');
        out.push_str(&candidates("A NEW CONNECTION", &view.next).render(output.headers, output.color));
    }
    out
}

fn candidates(title: &'static str, items: &[CandidateView]) -> Grid {
    let mut grid = Grid::new(&[title, ">ID", ">CHANCE"]);
    for candidate in items {
        grid.row(
            Tone::Plain,
            [
                endpoint(candidate.addr, candidate.port),
                candidate.id.to_string(),
                percent(candidate.chance),
            ],
        );
    }
    grid
}
