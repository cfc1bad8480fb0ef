//! One event as a line for people.

use crate::{
    cli::{
        grid::{Tone, endpoint},
        output::Output,
    },
    view::{
        EventView, Origin,
        wording::numbers::{chance, count, counted, expected, seconds},
    },
};

/// Writes one event for people, coloured where it should strike the eye.
pub(in crate::cli) fn line(event: &EventView, output: Output) -> String {
    let (tone, text) = said(event);
    // A replayed file may hold anything: a control character must not reach the terminal or tear the line apart.
    let text: String = text
        .chars()
        .map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c })
        .collect();
    tone.paint(&format!("{}  {text}", event.time()), output.color) + "\n"
}

fn said(event: &EventView) -> (Tone, String) {
    match event {
        EventView::Connection {
            namespace,
            service,
            client,
            origin,
            workload,
            frontend,
            protocol,
            backend,
            outcome,
            errno,
            connect_seconds,
            duration_seconds,
            ..
        } => {
            // The port of a client whose first packet never left is not known.
            let from = if client.port() == 0 {
                client.ip().to_string()
            } else {
                client.to_string()
            };
            let who = whence(*origin, workload.as_deref());
            let to = backend.map_or_else(|| "(endpoint not seen)".to_owned(), |backend| backend.to_string());
            let took = match (outcome.as_str(), connect_seconds) {
                (_, Some(connect)) => format!(" in {}, lasted {}", seconds(*connect), seconds(*duration_seconds)),
                ("established", None) => format!(", lasted {}", seconds(*duration_seconds)),
                (_, None) => format!(" after {}", seconds(*duration_seconds)),
            };
            let number = errno.map_or_else(String::new, |errno| format!(" (errno {errno})"));
            let tone = match outcome.as_str() {
                "established" => Tone::Plain,
                "abandoned" => Tone::Warn,
                _ => Tone::Bad,
            };
            let text =
                format!("{namespace}/{service}  {from}{who} → {frontend}/{protocol} → {to}  {outcome}{number}{took}");
            (tone, text)
        }
        EventView::Reuse {
            namespace,
            service,
            client,
            origin,
            interval_seconds,
            outcome,
            ..
        } => {
            let met = match outcome.as_str() {
                "same_backend" => "met the same endpoint again",
                "moved" => "met another endpoint",
                "stale_backend" => "the endpoint of the use before is gone",
                "unknown_backend" => "an endpoint was not seen",
                other => other,
            };
            let text = format!(
                "{namespace}/{service}  {client}{} reused its port after {}: {met}",
                whence(*origin, None),
                seconds(*interval_seconds)
            );
            (Tone::Plain, text)
        }
        EventView::Alarm {
            namespace,
            service,
            addr,
            port,
            raised,
            cause,
            expected: fair,
            seen,
            probability,
            window_seconds,
            ..
        } => {
            let numbers = format!(
                "{} where {} would be fair, in {}",
                counted(*seen, "connection"),
                expected(*fair),
                seconds(*window_seconds)
            );
            let who = endpoint(*addr, *port);
            if *raised {
                let alone = chance(*probability);
                let text = format!(
                    "{namespace}/{service}  ALARM {who} is starved ({cause}): {numbers} (by chance alone: {alone})"
                );
                (Tone::Bad, text)
            } else {
                let text = format!("{namespace}/{service}  {who} is starved no longer ({cause}): {numbers}");
                (Tone::Good, text)
            }
        }
        EventView::Lost { events, .. } => {
            let text = format!(
                "{} left out: they came faster than they were read",
                if *events == 1 {
                    "1 event was".to_owned()
                } else {
                    format!("{} events were", count(*events))
                }
            );
            (Tone::Warn, text)
        }
    }
}

/// What is known of a client beside its address.
fn whence(origin: Origin, workload: Option<&str>) -> String {
    match (origin, workload) {
        (Origin::Node, None) => String::new(),
        (Origin::Node, Some(name)) => format!(" ({name})"),
        (Origin::Outside, None) => " (outside)".to_owned(),
        (Origin::Outside, Some(name)) => format!(" ({name}, outside)"),
    }
}
