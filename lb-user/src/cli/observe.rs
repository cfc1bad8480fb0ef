//! `evenkeel observe`: what happens, as it happens, or as it was written down.

mod filter;
mod line;
mod replay;
#[cfg(test)]
mod tests;

use std::{
    io::{self, BufRead, BufReader, Write},
    net::IpAddr,
    ops::ControlFlow,
    path::PathBuf,
};

use clap::{ArgGroup, Args};
use filter::{Client, Filter, Kind, Outcome, Target};
pub(super) use line::line;

use super::{
    Context, Failure, Found, backend,
    output::{Format, Output},
};
use crate::{
    control::{self, AskError},
    model::ObjectName,
    view::{Answer, Document, EventView, Origin, parse_service_name},
};

/// Show connections, port reuse and alarms as they happen, or replay them from a file
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("end").args(["count", "last"]))]
#[command(
    after_help = "Without -f it ends after 20 events, or --count; with --from it ends with the file. Filters of different \
    kinds must all pass; of several --outcome or --type one must. `-o json` prints one document a line, which --from reads \
    again. Notes of events that were left out pass every filter and are not counted. A line of a file that is no event is \
    named on standard error, the others are shown, and the exit code is 1.\n\nExamples:\n  \
    evenkeel observe -f\n  \
    evenkeel observe -f shop/web --outcome failed\n  \
    evenkeel observe -f --outside\n  \
    evenkeel observe --type alarm --count 1\n  \
    evenkeel observe -f shop/web -o json > events.jsonl\n  \
    evenkeel observe --from events.jsonl --backend 10.244.1.7 --last 10"
)]
pub(super) struct ObserveArgs {
    /// Only this Service: NAME (in `default`) or NAMESPACE/NAME
    #[arg(value_name = "SERVICE", value_parser = parse_service_name, conflicts_with = "namespace")]
    service: Option<ObjectName>,
    /// Only Services of this namespace
    #[arg(short, long, value_name = "NAMESPACE")]
    namespace: Option<String>,
    /// Follow until interrupted, or until --count events came
    #[arg(short, long, conflicts_with = "from")]
    follow: bool,
    /// Only events of this endpoint
    #[arg(long, value_name = "ADDR[:PORT]", value_parser = filter::parse_target)]
    backend: Option<Target>,
    /// Only events of this client: an address, or a workload as NAME or NAMESPACE/NAME
    #[arg(long, value_name = "ADDR[:PORT]|WORKLOAD", value_parser = filter::parse_client)]
    client: Option<Client>,
    /// Only connections that came in as packets, from outside the node or from a guest
    #[arg(long, conflicts_with = "local")]
    outside: bool,
    /// Only connections of sockets on this node
    #[arg(long)]
    local: bool,
    /// Only events with this outcome; may be given again
    #[arg(long, value_name = "OUTCOME", value_enum)]
    outcome: Vec<Outcome>,
    /// Only events of this type; may be given again
    #[arg(long = "type", value_name = "TYPE", value_enum)]
    kind: Vec<Kind>,
    /// End after so many events
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Show only the last so many events of the file
    #[arg(long, value_name = "N", requires = "from", value_parser = clap::value_parser!(u64).range(1..))]
    last: Option<u64>,
    /// Replay a file of events as `-o json` writes them; `-` is standard input
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,
}

/// Events shown without -f, unless told otherwise.
const DEFAULT_COUNT: u64 = 20;

pub(super) fn run(args: ObserveArgs, context: &Context) -> Result<Found, Failure> {
    if matches!(context.output.format, Format::Yaml | Format::Name) {
        return Err(Failure::Usage(
            "--output: events are a stream; allowed here are table, wide and json".to_owned(),
        ));
    }
    let filter = Filter {
        services: backend::filter(args.service.as_ref(), args.namespace.as_deref()),
        backend: args.backend,
        client: args.client,
        origin: Origin::asked(args.outside, args.local),
        outcomes: args.outcome,
        kinds: args.kind,
    };
    let mut printer = Printer::new(io::stdout(), context.output);
    if let Some(path) = args.from {
        let (name, reader): (String, Box<dyn BufRead>) = if path.as_os_str() == "-" {
            ("standard input".to_owned(), Box::new(io::stdin().lock()))
        } else {
            let file = std::fs::File::open(&path)
                .map_err(|error| Failure::Usage(format!("--from {}: {error}", path.display())))?;
            (path.display().to_string(), Box::new(BufReader::new(file)))
        };
        let bounds = replay::Bounds {
            count: args.count,
            last: args.last,
        };
        let bad = replay::replay(&name, reader, &filter, bounds, &mut printer, &mut io::stderr())?;
        return Ok(if bad == 0 { Found::Fine } else { Found::Problem });
    }
    let mut left = match (args.count, args.follow) {
        (Some(count), _) => count,
        (None, true) => u64::MAX,
        (None, false) => DEFAULT_COUNT,
    };
    let mut failed = None;
    let mut ended = false;
    control::follow(&context.socket, filter.services.clone(), |event| {
        if !filter.admits(&event) {
            return ControlFlow::Continue(());
        }
        match printer.print(&event) {
            Ok(Gone::No) => {}
            Ok(Gone::Yes) => {
                ended = true;
                return ControlFlow::Break(());
            }
            Err(error) => {
                failed = Some(error);
                return ControlFlow::Break(());
            }
        }
        if !matches!(event, EventView::Lost { .. }) {
            left -= 1;
        }
        if left == 0 {
            ended = true;
            return ControlFlow::Break(());
        }
        ControlFlow::Continue(())
    })?;
    match failed {
        Some(failure) => Err(failure),
        None if ended => Ok(Found::Fine),
        // A stream has no end of its own: whoever follows must learn that there is nothing to follow any more.
        None => Err(AskError::Lost {
            path: context.socket.clone(),
            source: io::Error::new(io::ErrorKind::UnexpectedEof, "it ended the stream"),
        }
        .into()),
    }
}

/// Whether the reader of what is printed has gone away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gone {
    Yes,
    No,
}

/// Prints events, one a line.
#[derive(Debug)]
struct Printer<W> {
    out: W,
    output: Output,
}

impl<W: Write> Printer<W> {
    fn new(out: W, output: Output) -> Self {
        Self { out, output }
    }

    fn print(&mut self, event: &EventView) -> Result<Gone, Failure> {
        let text = if self.output.for_people() {
            line(event, self.output)
        } else {
            let document = Document::from(Answer::Event(Box::new(event.clone())));
            serde_json::to_string(&document).map_err(anyhow::Error::from)? + "\n"
        };
        match self.out.write_all(text.as_bytes()).and_then(|()| self.out.flush()) {
            Ok(()) => Ok(Gone::No),
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(Gone::Yes),
            Err(error) => Err(anyhow::Error::from(error).context("standard output").into()),
        }
    }
}

/// The address without the mapping of IPv4 into IPv6.
fn plain(addr: IpAddr) -> IpAddr {
    addr.to_canonical()
}
