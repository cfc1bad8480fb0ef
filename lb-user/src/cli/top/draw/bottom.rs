//! Below: how soon the selected Service's clients use a source port again, and the alarms of all Services.

use super::{
    super::state::Row,
    canvas::{Canvas, Tone},
};
use crate::{
    cli::grid::duration,
    draw::{compact, thousands, wrap},
    view::{ReportView, ServiceReportView, VerdictKind},
};

/// Columns below which there is room for the histogram alone.
const BOTH: u16 = 74;
/// The eighths of a cell.
const EIGHTHS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Draws both from a row on, in `height` rows.
pub(super) fn draw(canvas: &mut Canvas<'_>, report: &ReportView, row: &Row<'_>, top: u16, height: u16) {
    let buckets = row.service.intervals.len().max(1) as u16;
    let wide = if canvas.width() >= 110 { 7 } else { 5 };
    let histogram_width = buckets * wide + 2;
    histogram(canvas, row.service, top, height, wide);
    let left = histogram_width.max(46) + 1;
    if canvas.width() >= BOTH && left + 20 <= canvas.width() {
        alarms(canvas, report, left, top, height);
    }
}

fn histogram(canvas: &mut Canvas<'_>, service: &ServiceReportView, top: u16, height: u16, wide: u16) {
    let total: u64 = service.intervals.iter().map(|bucket| bucket.count).sum();
    let title = format!("SOURCE PORT USED AGAIN AFTER … ({})", thousands(total));
    canvas.put(0, top, canvas.width(), &title, Tone::Head);
    if total == 0 {
        canvas.put(2, top + 1, 44, "No source port was used again.", Tone::Plain);
        return;
    }
    let most = service
        .intervals
        .iter()
        .map(|bucket| bucket.count)
        .max()
        .unwrap_or(1)
        .max(1);
    let bars = height - 4;
    let (counts, labels, marks) = (top + 1, top + height - 2, top + height - 1);
    for (index, bucket) in service.intervals.iter().enumerate() {
        let x = 1 + index as u16 * wide;
        // Ports that sockets have let go of, and IPVS and conntrack still know.
        let held = bucket.up_to_seconds.is_some_and(|edge| edge > 60.0 && edge <= 120.0);
        let tone = if held { Tone::Alarm } else { Tone::Fill };
        if bucket.count > 0 {
            canvas.put_right(x, counts, wide - 1, &compact(bucket.count as f64), Tone::Plain);
        }
        let eighths = (u128::from(bucket.count) * u128::from(bars) * 8).div_ceil(u128::from(most)) as u64;
        for line in 0..bars {
            let below = u64::from(bars - 1 - line) * 8;
            let part = eighths.saturating_sub(below).min(8) as usize;
            let cell = EIGHTHS[part].to_string().repeat(usize::from(wide) - 1);
            canvas.put(x, top + 2 + line, wide - 1, &cell, tone);
        }
        let label = bucket
            .up_to_seconds
            .map_or_else(|| "more".to_owned(), |edge| format!("≤{}", compact(edge)));
        canvas.put_right(x, labels, wide - 1, &label, Tone::Plain);
    }
    let edge_at = |seconds: f64| {
        let place = service
            .intervals
            .iter()
            .position(|bucket| bucket.up_to_seconds == Some(seconds));
        place.map(|index| (index as u16 + 1) * wide)
    };
    for (edge, text) in [(60.0, "60 s: TIME_WAIT ends┘"), (120.0, "└120 s: IPVS")] {
        let Some(x) = edge_at(edge) else { continue };
        for y in top + 2..marks {
            canvas.put(x, y, 1, "┊", Tone::Strong);
        }
        let length = text.chars().count() as u16;
        if text.starts_with('└') {
            canvas.put(x, marks, length, text, Tone::Strong);
        } else {
            let from = (x + 1).saturating_sub(length);
            canvas.put(from, marks, length, text, Tone::Strong);
        }
    }
}

fn alarms(canvas: &mut Canvas<'_>, report: &ReportView, left: u16, top: u16, height: u16) {
    let mut lines: Vec<(Tone, String)> = Vec::new();
    let width = canvas.width() - left;
    let mut said = 0;
    let mut add = |tone, sign: &str, text: &str| {
        said += 1;
        for (index, line) in wrap(text, usize::from(width).saturating_sub(4).max(8))
            .into_iter()
            .enumerate()
        {
            let sign = if index == 0 { sign } else { "" };
            lines.push((tone, format!("{sign:<3}{line}")));
        }
    };
    for service in &report.services {
        let diagnosis = &service.diagnosis;
        let name = format!("{}/{}", diagnosis.namespace, diagnosis.service);
        for starved in &diagnosis.starved {
            let endpoint = std::net::SocketAddr::new(starved.addr, starved.port);
            let since = duration(report.node.time.since(starved.since).as_secs_f64());
            add(
                Tone::Alarm,
                "!!",
                &format!("{name} {endpoint} starved for {since}, {}", starved.cause),
            );
        }
        if diagnosis.verdict == VerdictKind::Uneven {
            let dispersion = diagnosis.new_connections.and_then(|view| view.dispersion);
            let dispersion = dispersion.map_or_else(String::new, |value| format!(", dispersion {}", compact(value)));
            add(Tone::Warn, "!", &format!("{name} uneven{dispersion}"));
        }
    }
    canvas.put(left, top, width, &format!("ALARMS ({said})"), Tone::Head);
    if lines.is_empty() {
        canvas.put(left, top + 1, width, "none", Tone::Plain);
    }
    let room = usize::from(height) - 1;
    let shown = if lines.len() > room { room - 1 } else { lines.len() };
    for (index, (tone, line)) in lines.iter().take(shown).enumerate() {
        canvas.put(left, top + 1 + index as u16, width, line, *tone);
    }
    if shown < lines.len() {
        canvas.put(left, top + 1 + shown as u16, width, "…", Tone::Plain);
    }
}
