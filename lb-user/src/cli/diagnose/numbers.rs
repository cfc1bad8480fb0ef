//! The numbers under a verdict.

use std::fmt::Write as _;

use super::paragraph;
use crate::{
    cli::{
        grid::{Grid, Tone, endpoint},
        output::Output,
    },
    view::{
        AudienceView, DiagnosisView, EndpointView, ImbalanceView, LatencyView, ServiceReuseView, Timestamp,
        wording::numbers::{chance, count, counted, expected, measure, percent, percent_of, seconds},
    },
};

/// Writes the numbers of one backend set, each with its sample.
pub(super) fn write(item: &DiagnosisView, now: Timestamp, output: Output, out: &mut String) {
    if !item.endpoints.is_empty() {
        out.push('\n');
        for line in endpoints(item, now).render(output.headers, output.color).lines() {
            let _infallible = writeln!(out, "  {line}");
        }
    }
    out.push('\n');
    let mut line = |label: &str, value: &str| paragraph(value, &format!("  {label:<14}"), &" ".repeat(16), out);
    let views = [
        ("New, 1 min:", &item.new_connections),
        ("New, all:", &item.new_since_start),
        ("Open:", &item.open_connections),
    ];
    for (label, found) in views {
        if let Some(found) = found {
            line(label, &evenness(found));
        }
    }
    line("Attribution:", &attribution(item));
    match item.audience {
        AudienceView::Node => {}
        AudienceView::Outside => line("Judged by:", "connections from outside alone, which this set is for"),
        AudienceView::All => line("Judged by:", "connections from this node and from outside together"),
        AudienceView::Mixed => line("Judged by:", "nothing: other sets' connections are among these"),
    }
    if let Some(reuse) = &item.reuse {
        line("Port reuse:", &reuse_line(reuse));
    }
    if let Some(clients) = &item.clients {
        let mut text = counted(clients.clients, "client");
        if let Some(share) = clients.same_share {
            let _infallible = write!(
                text,
                "; {} of {} met the endpoint of the same client's connection before",
                percent(share),
                counted(clients.compared, "connection")
            );
        }
        if let Some(share) = clients.expected_same_share.filter(|_| clients.same_share.is_some()) {
            let _infallible = write!(text, ", chance gives {}", percent(share));
        }
        line("Clients:", &text);
    }
    line("Failures:", &failures(item));
    if let Some(latency) = item.latency.filter(|latency| latency.n > 0) {
        line("Connect time:", &latency_line(latency));
    }
    if let Some(ports) = &item.ports {
        line(
            "Source ports:",
            &format!(
                "at most {} of {} ({}) in use or just closed, from {} to {}",
                count(ports.used),
                count(ports.range),
                percent(ports.ratio),
                ports.client,
                ports.destination
            ),
        );
    }
}

/// The endpoints: what each got of the new connections of the last minute next to what is fair, and for how long it has been usable.
fn endpoints(item: &DiagnosisView, now: Timestamp) -> Grid {
    let total: u64 = item.endpoints.iter().map(|found| found.window_connects).sum();
    let fair: f64 = item.endpoints.iter().map(|found| found.window_expected).sum();
    let mut grid = Grid::new(&["ENDPOINT", "STATUS", ">NEW/MIN", ">SHARE", ">FAIR", ">OPEN", ">AGE"]);
    let mut sorted: Vec<&EndpointView> = item.endpoints.iter().collect();
    // A starved one must not be looked for among hundreds.
    sorted.sort_by_key(|found| found.status != "starved");
    for found in sorted {
        grid.row(
            tone(found),
            [
                endpoint(found.addr, found.port),
                status(found),
                count(found.window_connects),
                if total > 0 {
                    percent_of(found.window_connects, total)
                } else {
                    String::new()
                },
                if fair > 0.0 {
                    percent(found.window_expected / fair)
                } else {
                    String::new()
                },
                count(found.open),
                found
                    .born
                    .map_or_else(String::new, |born| seconds(now.since(born).as_secs_f64())),
            ],
        );
    }
    grid
}

/// The status, and what explains it where something is at hand.
fn status(found: &EndpointView) -> String {
    match (&found.excluded, found.programmed) {
        (Some(why), _) => format!("{} ({why})", found.status),
        (None, Some(false)) => format!("{} (not programmed)", found.status),
        _ if found.proxy_weight == Some(0) => format!("{} (weight 0)", found.status),
        _ => found.status.clone(),
    }
}

fn tone(found: &EndpointView) -> Tone {
    match found.status.as_str() {
        "starved" => Tone::Bad,
        "excluded" => Tone::Warn,
        _ => Tone::Plain,
    }
}

fn evenness(found: &ImbalanceView) -> String {
    let sample = format!("{} over {}", count(found.n), counted(found.backends, "endpoint"));
    if found.insufficient {
        return format!("{sample}: too few to judge");
    }
    let mut text = sample;
    for (name, value) in [("max/mean", found.max_over_mean), ("cv", found.cv)] {
        if let Some(value) = value {
            let _infallible = write!(text, ", {name} {}", measure(value));
        }
    }
    if let Some(dispersion) = found.dispersion {
        let _infallible = write!(
            text,
            ", dispersion {} where chance gives 1 (by chance alone: {})",
            measure(dispersion),
            chance(found.p)
        );
    }
    text
}

fn attribution(item: &DiagnosisView) -> String {
    let found = &item.attribution;
    let mut text = format!(
        "{} of {} could be told by endpoint ({}), {} not",
        count(found.attributed),
        counted(found.connects, "connection"),
        percent_of(found.attributed, found.connects),
        count(found.unknown)
    );
    if found.outside > 0 {
        let _infallible = write!(text, "; {} came from outside", count(found.outside));
    }
    if found.direct > 0 {
        let _infallible = write!(text, "; {} went straight to endpoints", count(found.direct));
    }
    if found.earlier > 0 {
        let _infallible = write!(text, "; {} were open before the agent started", count(found.earlier));
    }
    text
}

fn reuse_line(reuse: &ServiceReuseView) -> String {
    let mut text = format!(
        "{} of {} ({}) on a client port used shortly before",
        count(reuse.total),
        counted(reuse.connections, "connection"),
        percent_of(reuse.total, reuse.connections)
    );
    if let Some(share) = reuse.same_share {
        let _infallible = write!(
            text,
            "; of the {} that could be compared {} met the same endpoint again",
            count(reuse.same_backend + reuse.moved),
            percent(share)
        );
        if let Some(by_chance) = reuse.expected_same_share {
            let _infallible = write!(text, ", chance gives {}", percent(by_chance));
        }
    }
    if reuse.unknown_backend > 0 {
        let _infallible = write!(text, "; of {} an endpoint was not seen", count(reuse.unknown_backend));
    }
    text
}

fn failures(item: &DiagnosisView) -> String {
    let all: Vec<String> = item
        .failed
        .iter()
        .filter(|&(_, &n)| n > 0)
        .map(|(reason, &n)| format!("{} {reason}", count(n)))
        .collect();
    if all.is_empty() {
        "none seen".to_owned()
    } else {
        all.join(", ")
    }
}

fn latency_line(latency: LatencyView) -> String {
    let at_most = |value: Option<f64>| {
        value.map_or_else(
            || "beyond the last bucket".to_owned(),
            |value| format!("at most {}", seconds(value)),
        )
    };
    format!(
        "half {}, 99 of 100 {} (n {})",
        at_most(latency.p50_seconds),
        at_most(latency.p99_seconds),
        expected(latency.n as f64)
    )
}
