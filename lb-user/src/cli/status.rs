//! `evenkeel status`: how the agent is.

use std::{
    fmt::Write as _,
    thread,
    time::{Duration, Instant},
};

use clap::Args;

use super::{
    Context, Failure, Found,
    grid::{Grid, Tone, duration, percent},
    output::Output,
};
use crate::view::{Answer, Query, StatusView, Timestamp};

/// Show how the agent is: health, source, sync, programs, maps, problems
#[derive(Debug, Args)]
#[command(
    after_help = "Exits with 1 while something is unhealthy or not attached, or packets of an interface are not translated.\n\nExamples:\n  \
    evenkeel status\n  \
    evenkeel status --wait --timeout 30\n  \
    evenkeel status -o json"
)]
pub(super) struct StatusArgs {
    /// Wait until the agent is up and ready
    #[arg(long)]
    wait: bool,
    /// How many seconds to wait at most
    #[arg(long, value_name = "SECONDS", default_value_t = 60, requires = "wait")]
    timeout: u32,
}

/// How often `--wait` asks.
const POLL: Duration = Duration::from_millis(200);

pub(super) fn run(args: &StatusArgs, context: &Context) -> Result<Found, Failure> {
    let deadline = Instant::now() + Duration::from_secs(u64::from(args.timeout));
    loop {
        let asked = context.ask(&Query::Status {});
        let settled = matches!(&asked, Ok(Answer::Status(view)) if is_fine(view));
        if args.wait && !settled && Instant::now() < deadline {
            thread::sleep(POLL);
            continue;
        }
        let answer = asked?;
        context.output.print(&answer)?;
        return Ok(if settled { Found::Fine } else { Found::Problem });
    }
}

fn is_fine(view: &StatusView) -> bool {
    view.health.live
        && view.health.ready
        && view.health.healthy
        && view.programs.iter().all(|program| program.attached)
        && view.interfaces.iter().all(|interface| interface.problem.is_none())
}

/// Writes the status for people.
pub(super) fn text(view: &StatusView, output: Output) -> String {
    let mut out = String::new();
    let mut line = |name: &str, value: &str, tone: Tone| {
        // Writing into a String cannot fail.
        let _infallible = writeln!(out, "{}", tone.paint(&format!("{name:<12}{value}"), output.color));
    };
    let good = |fine: bool| if fine { Tone::Plain } else { Tone::Bad };
    line(
        "Agent:",
        &format!("{} (abi {}), {} mode", view.version, view.abi, view.mode),
        Tone::Plain,
    );
    let node = view.node.as_deref().unwrap_or("-");
    line("Node:", &format!("{node}, kernel {}", view.kernel), Tone::Plain);
    line(
        "Uptime:",
        &format!("{} (since {})", duration(view.uptime_seconds), view.started),
        Tone::Plain,
    );
    let health = &view.health;
    let words = [
        ("live", health.live),
        ("ready", health.ready),
        ("healthy", health.healthy),
    ]
    .map(|(word, is)| if is { word.to_owned() } else { format!("not {word}") });
    line(
        "Health:",
        &words.join(", "),
        good(health.live && health.ready && health.healthy),
    );
    for reason in &health.reasons {
        line("", reason, Tone::Bad);
    }
    let source = if view.source.synced { "synced" } else { "not synced yet" };
    line(
        "Source:",
        &format!("{}, {source}", view.source.name),
        good(view.source.synced),
    );
    // What is wrong with all kinds is wrong with the source, and told once.
    let first = view.source.kinds.first().and_then(|kind| kind.error.as_ref());
    let alike = view.source.kinds.iter().all(|kind| kind.error.as_ref() == first);
    for kind in &view.source.kinds {
        let when = kind.synced.map_or_else(|| "never".to_owned(), |at| ago(view.time, at));
        line(
            "",
            &format!("{}: {} objects, confirmed {when}", kind.kind, kind.objects),
            Tone::Plain,
        );
        if let Some(error) = kind.error.as_ref().filter(|_| !alike) {
            line("", &format!("{}: {error}", kind.kind), Tone::Bad);
        }
    }
    if let Some(error) = view.source.last_error.as_ref().filter(|_| alike) {
        line("", error, Tone::Bad);
    }
    line("Sync:", &sync(view), good(view.sync.last_error.is_none()));
    if let Some(error) = &view.sync.last_error {
        line("", error, Tone::Bad);
    }
    let counts = &view.counts;
    line(
        "Objects:",
        &format!(
            "{} Services, {} frontends, {} sets, {} backends",
            counts.services, counts.frontends, counts.sets, counts.backends
        ),
        Tone::Plain,
    );
    line(
        "Traffic:",
        &format!(
            "{} connects, {} failed, {} active, {} records lost",
            counts.connects, counts.failed, counts.active, counts.events_lost
        ),
        if counts.events_lost == 0 {
            Tone::Plain
        } else {
            Tone::Warn
        },
    );
    out.push('\n');
    out.push_str(&programs(view).render(output.headers, output.color));
    if !view.interfaces.is_empty() {
        out.push('\n');
        out.push_str(&interfaces(view).render(output.headers, output.color));
    }
    out.push('\n');
    out.push_str(&maps(view).render(output.headers, output.color));
    if !view.problems.is_empty() {
        out.push('\n');
        out.push_str(&problems(view).render(output.headers, output.color));
    }
    out
}

fn sync(view: &StatusView) -> String {
    let sync = &view.sync;
    let mut text = match sync.last_applied {
        Some(at) => format!("applied {}", ago(view.time, at)),
        None => "nothing applied yet".to_owned(),
    };
    if let Some(seconds) = sync.last_duration_seconds {
        let _infallible = write!(text, " in {:.1} ms", seconds * 1e3);
    }
    if let Some(since) = sync.pending_since {
        let _infallible = write!(text, ", a change waits since {}", ago(view.time, since));
    }
    let _infallible = write!(text, ", {} failures, {} repairs", sync.failures, sync.repairs);
    text
}

fn ago(now: Timestamp, then: Timestamp) -> String {
    format!("{} ago", duration(now.since(then).as_secs_f64()))
}

fn programs(view: &StatusView) -> Grid {
    let mut grid = Grid::new(&["PROGRAM", "HOOK", "TARGET", "ATTACHED", ">LINK"]);
    for program in &view.programs {
        let (tone, attached) = if program.attached {
            (Tone::Plain, "yes")
        } else {
            (Tone::Bad, "no")
        };
        grid.row(
            tone,
            [
                program.name.clone(),
                program.hook.clone(),
                program.target.clone(),
                attached.to_owned(),
                program.link_id.map_or_else(String::new, |id| id.to_string()),
            ],
        );
    }
    grid
}

fn interfaces(view: &StatusView) -> Grid {
    let mut grid = Grid::new(&["INTERFACE", "SIDE", "ADDRESSES", "WHY"]);
    for interface in &view.interfaces {
        let addresses: Vec<String> = interface.addresses.iter().map(ToString::to_string).collect();
        let (tone, why) = match (&interface.problem, &interface.reason) {
            (Some(problem), _) => (Tone::Bad, problem.as_str()),
            (None, reason) => (Tone::Plain, reason.as_deref().unwrap_or_default()),
        };
        let side = interface.side.to_string();
        grid.row(
            tone,
            [interface.name.clone(), side, addresses.join(", "), why.to_owned()],
        );
    }
    grid
}

fn maps(view: &StatusView) -> Grid {
    let mut grid = Grid::new(&["MAP", ">ENTRIES", ">MAX", ">USED"]);
    for map in &view.maps {
        let used = if map.max_entries == 0 {
            0.0
        } else {
            map.entries as f64 / map.max_entries as f64
        };
        let tone = match used {
            used if used >= 0.95 => Tone::Bad,
            used if used >= 0.8 => Tone::Warn,
            _ => Tone::Plain,
        };
        grid.row(
            tone,
            [
                map.name.clone(),
                map.entries.to_string(),
                map.max_entries.to_string(),
                percent(used),
            ],
        );
    }
    grid
}

fn problems(view: &StatusView) -> Grid {
    let mut grid = Grid::new(&["PROBLEM IN", "OBJECT", "FIELD", "MESSAGE"]);
    for problem in &view.problems {
        grid.row(
            Tone::Warn,
            [
                problem.origin.clone(),
                problem.object.clone(),
                problem.field.clone(),
                problem.message.clone(),
            ],
        );
    }
    grid
}
