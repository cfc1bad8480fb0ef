//! One Service's pictures as one SVG: what goes into a chat or an issue.

use super::{node_line, pictures, series::Series, sheet::Sheet, style, verdict_words};
use crate::{
    draw::{abridge, text_width, wrap},
    view::{DiagnosisView, ReportView, ServiceReportView, VerdictKind},
};

const MARGIN: f64 = 24.0;
const GAP: f64 = 16.0;
const WIDTH: f64 = 2.0 * MARGIN + 3.0 * pictures::SMALL.0 + 2.0 * GAP;
/// The size of the sentences.
const BODY: f64 = 13.0;

/// Draws a Service, or says that there is none.
pub(super) fn poster(report: &ReportView, service: Option<&ServiceReportView>) -> String {
    let Some(service) = service else {
        let mut sheet = Sheet::new(WIDTH, 140.0, "Evenkeel report");
        sheet.text(MARGIN, 48.0, "title", "No Service had traffic on this node.");
        sheet.text(MARGIN, 74.0, "soft body", &node_line(report));
        return sheet.alone(&style::drawing());
    };
    let diagnosis = &service.diagnosis;
    let name = format!("{}/{}", diagnosis.namespace, diagnosis.service);
    let top = 92.0;
    let left = MARGIN + pictures::LARGE.0 + GAP;
    let sentences = column(diagnosis, WIDTH - MARGIN - left);
    let text_bottom = top + 20.0 + sentences.iter().map(|line| line.1).sum::<f64>();
    let second_row = (top + pictures::LARGE.1).max(text_bottom) + GAP;
    let height = second_row + pictures::SMALL.1 + MARGIN;

    let title = format!("{name}: {}", verdict_words(diagnosis.verdict));
    let mut sheet = Sheet::new(WIDTH, height.ceil(), &title);
    let shown = abridge(&name, 64);
    sheet.text(MARGIN, 44.0, "title", &shown);
    let class = match diagnosis.verdict {
        VerdictKind::Starved | VerdictKind::Uneven => "title alarm",
        _ => "title soft",
    };
    sheet.text(
        MARGIN + text_width(&shown, 22.0) + 12.0,
        44.0,
        class,
        verdict_words(diagnosis.verdict),
    );
    let node = report.node.node.as_deref().unwrap_or("this node");
    let about = format!("{} on {node}: {}", diagnosis.set, node_line(report));
    sheet.text(MARGIN, 68.0, "soft body", &abridge(&about, 170));

    let series = Series::new(report, service);
    sheet.push(format_args!("{}", pictures::shares(&series).nested(MARGIN, top)));
    let mut y = top + 20.0;
    for (class, step, text) in sentences {
        sheet.text(left, y, class, &text);
        y += step;
    }
    let small = [
        pictures::intervals(&service.intervals),
        pictures::dispersion(&series),
        pictures::open(&series),
    ];
    for (index, picture) in small.iter().enumerate() {
        let x = MARGIN + index as f64 * (pictures::SMALL.0 + GAP);
        sheet.push(format_args!("{}", picture.nested(x, second_row)));
    }
    sheet.alone(&style::drawing())
}

/// The verdict's sentences and the advice, in lines of a width: class, distance to the next, text.
fn column(diagnosis: &DiagnosisView, width: f64) -> Vec<(&'static str, f64, String)> {
    let letters = (width / (BODY * 0.6)) as usize;
    let mut lines = Vec::new();
    let mut block = |class: &'static str, text: &str| {
        let wrapped = wrap(text, letters);
        let last = wrapped.len().saturating_sub(1);
        for (index, line) in wrapped.into_iter().enumerate() {
            lines.push((class, if index == last { 26.0 } else { 18.0 }, line));
        }
    };
    for (index, sentence) in diagnosis.sentences.iter().enumerate() {
        block(if index == 0 { "body strong" } else { "body" }, sentence);
    }
    if !diagnosis.advice.is_empty() {
        block("head", "What to do");
        for advice in &diagnosis.advice {
            block("body", advice);
        }
    }
    lines
}
