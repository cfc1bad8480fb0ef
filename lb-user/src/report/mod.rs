//! The report: a node's Services over time as one page, or one Service's pictures as one SVG.
//!
//! Pure: a [`ReportView`] in, text out. The page needs no scripts and nothing from elsewhere, works in light and in dark,
//! and is well-formed XML. The invariant: whatever the view holds (names, addresses, sentences) is text in the result,
//! never markup.

#[cfg(test)]
pub(crate) mod example;
mod page;
mod pictures;
mod poster;
mod series;
mod sheet;
mod style;
mod tables;
#[cfg(test)]
mod tests;

use crate::view::{Mode, ReportView, ServiceReportView, VerdictKind};

/// Draws the whole report as a page of XHTML-clean HTML.
pub fn page(report: &ReportView) -> String {
    page::page(report)
}

/// Draws the Service with the worst verdict as an SVG; without any Service it says so.
pub fn picture(report: &ReportView) -> String {
    poster::poster(report, worst(report))
}

/// The Service with the worst verdict, the first among equals.
fn worst(report: &ReportView) -> Option<&ServiceReportView> {
    report.services.iter().min_by_key(|service| service.diagnosis.verdict)
}

/// The verdict for people: a sign that needs no colour, and the word.
fn verdict_words(kind: VerdictKind) -> &'static str {
    match kind {
        VerdictKind::Starved => "✖ starved",
        VerdictKind::Uneven => "▲ uneven",
        VerdictKind::Even => "✔ even",
        VerdictKind::Insufficient => "… too few connections",
        VerdictKind::NoTraffic => "– no traffic",
    }
}

/// One line about the node.
fn node_line(report: &ReportView) -> String {
    let node = &report.node;
    let beside = match (&node.proxy, node.mode) {
        (Some(proxy), _) => format!(" beside {proxy}"),
        (None, Mode::Observe) => ", no proxy found".to_owned(),
        (None, Mode::Balance) => String::new(),
    };
    format!(
        "{} mode{beside}, Linux {}, counting since {}, as of {}",
        node.mode,
        node.kernel,
        second(node.since),
        second(node.time)
    )
}

/// A time to the second.
fn second(time: crate::view::Timestamp) -> String {
    let text = time.to_string();
    let whole = text.split('.').next().unwrap_or_default();
    format!("{whole}Z")
}
