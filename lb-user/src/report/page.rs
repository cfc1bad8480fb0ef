//! The page: the node first, then a section for each Service, the worst first.

use std::fmt::Write as _;

use super::{node_line, pictures, second, series::Series, style, tables, verdict_words};
use crate::{
    draw::{escape, thousands},
    view::{DiagnosisView, ReportView, ServiceReportView, VerdictKind},
};

/// Writes the page.
pub(super) fn page(report: &ReportView) -> String {
    let mut services: Vec<&ServiceReportView> = report.services.iter().collect();
    services.retain(|service| service.diagnosis.verdict != VerdictKind::NoTraffic);
    services.sort_by_key(|service| service.diagnosis.verdict);
    let idle = report.services.len() - services.len();
    let node = report.node.node.as_deref().unwrap_or("this node");
    let mut body = String::new();
    // Writing into a String cannot fail.
    let _infallible = write!(
        body,
        "<header>\n<h1>{}</h1>\n<p class=\"soft\">Evenkeel on {}: {}.</p>\n",
        escape(&headline(&services)),
        escape(node),
        escape(&node_line(report))
    );
    if report.node.events_lost > 0 {
        let _infallible = writeln!(
            body,
            "<p class=\"starved\">{} records were lost between the kernel and the agent: what is derived from them is \
             undercounted.</p>",
            thousands(report.node.events_lost)
        );
    }
    body.push_str("</header>\n");
    if services.len() > 1 {
        body.push_str(&overview(&services));
    }
    for (index, service) in services.iter().enumerate() {
        section(&mut body, report, service, index);
    }
    if idle > 0 {
        let _infallible = writeln!(
            body,
            "<p class=\"soft\">{} without traffic.</p>",
            count(idle, "Service")
        );
    }
    body.push_str(&tables::node(&report.node));
    let _infallible = writeln!(
        body,
        "<footer>Dashed: an equal share. Dispersion is X²/(k−1): 1 is what chance alone gives, far above 1 is real. Times \
         are UTC. Made by evenkeel {} on {}.</footer>",
        env!("CARGO_PKG_VERSION"),
        second(report.node.time)
    );
    format!(
        "<!DOCTYPE html>\n<html xmlns=\"http://www.w3.org/1999/xhtml\" lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\"/>\n\
         <link rel=\"icon\" href=\"data:,\"/>\n\
         <title>Evenkeel report: {}</title>\n<style>\n{}</style>\n</head>\n<body>\n<main>\n{body}</main>\n</body>\n</html>\n",
        escape(node),
        style::page()
    )
}

/// The page in one sentence.
fn headline(services: &[&ServiceReportView]) -> String {
    let of = |kind| {
        let found: Vec<&DiagnosisView> = services
            .iter()
            .map(|service| &service.diagnosis)
            .filter(|diagnosis| diagnosis.verdict == kind)
            .collect();
        found
    };
    let (starved, uneven) = (of(VerdictKind::Starved), of(VerdictKind::Uneven));
    let name = |diagnosis: &DiagnosisView| format!("{}/{}", diagnosis.namespace, diagnosis.service);
    match (starved.as_slice(), uneven.as_slice()) {
        ([], []) if services.is_empty() => "No Service had traffic on this node".to_owned(),
        ([], []) => format!("No uneven load among {}", count(services.len(), "Service")),
        ([], [one]) => format!("{} is loaded unevenly", name(one)),
        ([], many) => format!(
            "{} of {} are loaded unevenly",
            many.len(),
            count(services.len(), "Service")
        ),
        ([one], _) => format!(
            "{}: {} starved",
            name(one),
            match one.starved.len() {
                1 => "one endpoint is".to_owned(),
                n => format!("{n} endpoints are"),
            }
        ),
        (many, _) => format!(
            "{} of {} starve endpoints",
            many.len(),
            count(services.len(), "Service")
        ),
    }
}

/// `1 Service`, `2 Services`.
pub(super) fn count(n: usize, noun: &str) -> String {
    format!("{n} {noun}{}", if n == 1 { "" } else { "s" })
}

/// The verdict as a badge: a sign, a word and a colour.
fn badge(kind: VerdictKind) -> String {
    format!("<span class=\"badge {}\">{}</span>", kind.name(), verdict_words(kind))
}

fn overview(services: &[&ServiceReportView]) -> String {
    let mut rows = String::new();
    for (index, service) in services.iter().enumerate() {
        let diagnosis = &service.diagnosis;
        let _infallible = writeln!(
            rows,
            "<tr><td><a href=\"#service-{index}\">{}/{}</a></td><td class=\"any\">{}</td><td class=\"k {}\">{}</td>\
             <td class=\"any\">{}</td></tr>",
            escape(&diagnosis.namespace),
            escape(&diagnosis.service),
            escape(&diagnosis.set),
            diagnosis.verdict.name(),
            verdict_words(diagnosis.verdict),
            escape(diagnosis.sentences.first().map_or("", String::as_str)),
        );
    }
    format!(
        "<section>\n<div class=\"scroll\"><table>\n<tr><th>Service</th><th>Backends</th><th>Verdict</th><th>In short</th></tr>\n\
         {rows}</table></div>\n</section>\n"
    )
}

fn section(body: &mut String, report: &ReportView, service: &ServiceReportView, index: usize) {
    let diagnosis = &service.diagnosis;
    let series = Series::new(report, service);
    let _infallible = write!(
        body,
        "<section id=\"service-{index}\">\n<div class=\"top\"><h2>{}/{}</h2>{}<span class=\"soft any\">{}</span></div>\n\
         <div class=\"beside\">\n<div class=\"wide scroll\">\n{}</div>\n<div>\n{}{}</div>\n</div>\n\
         <div class=\"three\">\n<div>{}</div>\n<div>{}</div>\n<div>{}</div>\n</div>\n",
        escape(&diagnosis.namespace),
        escape(&diagnosis.service),
        badge(diagnosis.verdict),
        escape(&diagnosis.set),
        pictures::shares(&series).inline(),
        list("said", &diagnosis.sentences),
        if diagnosis.advice.is_empty() {
            String::new()
        } else {
            format!("<h3>What to do</h3>\n{}", list("advice", &diagnosis.advice))
        },
        pictures::intervals(&service.intervals).inline(),
        pictures::dispersion(&series).inline(),
        pictures::open(&series).inline(),
    );
    body.push_str(&tables::endpoints(diagnosis, report.node.time));
    body.push_str(&tables::numbers(diagnosis));
    body.push_str("</section>\n");
}

fn list(class: &str, items: &[String]) -> String {
    if items.is_empty() {
        return String::new();
    }
    let mut out = format!("<ul class=\"{class}\">\n");
    for item in items {
        let _infallible = writeln!(out, "<li>{}</li>", escape(item));
    }
    out.push_str("</ul>\n");
    out
}
