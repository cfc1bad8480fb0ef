//! The four pictures of a Service: who got the new connections, who holds the open ones, how soon ports were used again,
//! and how uneven it was against chance.
//!
//! Each says by itself what it shows: a starved endpoint's line is thick, labelled, and what it should have got is shaded.

use std::fmt::Write as _;

use super::{
    series::{Line, Look, NAMED, Series},
    sheet::{Frame, Mark, Sheet, TEXT},
    style::LINES,
};
use crate::{
    draw::{Scale, abridge, clock, compact, percent, text_width, thousands},
    view::{IntervalView, Timestamp},
};

/// The size of the small pictures.
pub(super) const SMALL: (f64, f64) = (400.0, 270.0);
/// The size of the large one.
pub(super) const LARGE: (f64, f64) = (760.0, 360.0);
/// Marks closer than this part of the time shown share a label.
const CLOSE: f64 = 0.03;

/// Whose values a picture of lines shows.
struct Values {
    own: for<'a> fn(&'a Line<'_>) -> &'a [Option<f64>],
    fair: for<'a> fn(&'a Line<'_>) -> &'a [Option<f64>],
    label: fn(f64) -> String,
    tick: fn(f64) -> String,
}

const SHARES: Values = Values {
    own: |line| &line.share,
    fair: |line| &line.fair,
    label: percent,
    tick: |share| format!("{} %", compact(share * 100.0)),
};

const OPEN: Values = Values {
    own: |line| &line.open,
    fair: |line| &line.fair_open,
    label: compact,
    tick: compact,
};

/// Share of the new connections by endpoint.
pub(super) fn shares(series: &Series<'_>) -> Sheet {
    let title = format!(
        "Share of new connections, in steps of {} s",
        compact(series.step_seconds)
    );
    let mut sheet = Sheet::new(LARGE.0, LARGE.1, &title);
    sheet.text(8.0, 18.0, "head", &title);
    let edges = (52.0, LARGE.0 - 190.0, 66.0, LARGE.1 - 28.0);
    lines(&mut sheet, series, edges, &SHARES, "new", 2);
    sheet
}

/// Open connections by endpoint.
pub(super) fn open(series: &Series<'_>) -> Sheet {
    let title = "Open connections";
    let mut sheet = Sheet::new(SMALL.0, SMALL.1, title);
    sheet.text(8.0, 18.0, "head", title);
    let edges = (44.0, SMALL.0 - 148.0, 58.0, SMALL.1 - 28.0);
    lines(&mut sheet, series, edges, &OPEN, "open", 2);
    sheet
}

fn lines(
    sheet: &mut Sheet,
    series: &Series<'_>,
    edges: (f64, f64, f64, f64),
    values: &Values,
    view: &str,
    mark_lines: usize,
) {
    let frame = Frame::new(edges, series.begin, series.end());
    let shown = series.lines.iter().flat_map(|line| (values.own)(line)).flatten();
    let Some(most) = shown.copied().reduce(f64::max) else {
        nothing(sheet, "No connection to a known endpoint in this time.");
        return;
    };
    let fair = series.lines.iter().flat_map(|line| (values.fair)(line)).flatten();
    let most = fair.copied().fold(most, f64::max).max(1e-9);
    let y = Scale::linear((0.0, most * 1.08), (frame.bottom, frame.top));
    frame.axes(sheet, &y, 4, values.tick);
    missing(sheet, &frame, series, values, view, &y);
    // How many connections are open differs by how long they last; what would be even is of interest where it is wanting.
    let fair_matters = view == "new" || series.starved(view).next().is_some();
    let mut labels = labels(&frame, series, values, &y);
    if series.equal_weights && fair_matters {
        let fair: Vec<Option<f64>> = (0..series.times.len())
            .map(|step| {
                series
                    .lines
                    .iter()
                    .find_map(|line| (values.fair)(line).get(step).copied().flatten())
            })
            .collect();
        let moments: Vec<Timestamp> = series
            .lines
            .iter()
            .flat_map(|line| [line.born, line.gone])
            .flatten()
            .collect();
        let runs = frame.stairs(&series.times, &fair, &moments, &y);
        sheet.curve("fair", &runs, "An equal share");
        if let Some(last) = fair.last().copied().flatten() {
            labels.push((
                y.at(last),
                "soft num".to_owned(),
                format!("{}  equal share", (values.label)(last)),
            ));
        }
    }
    // What matters most is drawn last.
    for line in series.lines.iter().rev() {
        let runs = frame.runs(&series.times, (values.own)(line), (line.born, line.gone), &y);
        sheet.curve(&format!("line {}", class(line.look)), &runs, &line.name);
    }
    frame.marks(sheet, &marks(series, sheet.width > SMALL.0), mark_lines);
    frame.labels(sheet, labels);
    annotate(sheet, &frame, series, values, view, &y);
}

fn class(look: Look) -> String {
    match look {
        Look::Starved => "alarm".to_owned(),
        Look::Named(index) => format!("l{}", index % LINES),
        Look::Other => "other".to_owned(),
    }
}

/// Shades what endpoints should have got and did not: as one shape, so that many of them are no darker than one.
fn missing(sheet: &mut Sheet, frame: &Frame, series: &Series<'_>, values: &Values, view: &str, y: &Scale) {
    let mut path = String::new();
    for (line, _) in series.starved(view) {
        let life = (line.born, line.gone);
        let upper = frame.runs(&series.times, (values.fair)(line), life, y);
        let lower: Vec<Option<f64>> = (values.own)(line)
            .iter()
            .zip((values.fair)(line))
            .map(|(own, fair)| Some(own.unwrap_or(0.0).min((*fair)?)))
            .collect();
        let lower = frame.runs(&series.times, &lower, life, y);
        for (upper, lower) in upper.iter().zip(&lower) {
            for (index, (x, y)) in upper.iter().chain(lower.iter().rev()).enumerate() {
                let letter = if index == 0 { 'M' } else { 'L' };
                // Writing into a String cannot fail.
                let _infallible = write!(path, "{letter}{x:.1} {y:.1}");
            }
            path.push('Z');
        }
    }
    if !path.is_empty() {
        sheet.push(format_args!(r#"<path class="missing" d="{path}"/>"#));
    }
}

/// Says beside the shade what is missing.
fn annotate(sheet: &mut Sheet, frame: &Frame, series: &Series<'_>, values: &Values, view: &str, y: &Scale) {
    let found: Vec<_> = series.starved(view).collect();
    let Some((first, alarm)) = found.first() else { return };
    let mut expected = 0.0;
    let mut seen = 0;
    for (_, starved) in &found {
        expected += starved.expected;
        seen += starved.seen;
    }
    let who = if found.len() == 1 {
        "STARVED".to_owned()
    } else {
        format!("{} STARVED", found.len())
    };
    let expected = thousands(expected.round().max(0.0) as u64);
    let mut said = vec![who, format!("{} of {expected} expected", thousands(seen))];
    said.push(format!("cause: {}", alarm.cause));
    if let Some(seconds) = alarm.seconds_to_verdict {
        said.push(format!("found after {seconds:.1} s"));
    }
    let from = first
        .born
        .filter(|born| frame.holds(*born))
        .map_or(frame.left, |born| frame.x(born));
    let fair = (values.fair)(first).iter().flatten().last().copied().unwrap_or(0.0);
    let (top, zero) = (y.at(fair), y.at(0.0));
    let rows = (((zero - top - 8.0) / 17.0) as usize).min(said.len()).max(1);
    let widest = said
        .iter()
        .take(rows)
        .map(|text| text_width(text, 14.0))
        .fold(0.0, f64::max);
    let right_of = from + 12.0 + widest < frame.right;
    let (x, class) = if right_of {
        (from + 10.0, "alarm head halo")
    } else {
        (frame.right - 6.0, "alarm head halo end")
    };
    let middle = f64::midpoint(top, zero);
    let first_row = middle - (rows as f64 - 1.0) * 8.5 + 5.0;
    for (row, text) in said.iter().take(rows).enumerate() {
        sheet.text(x, first_row + row as f64 * 17.0, class, text);
    }
}

/// The labels right of the lines: name and last value.
fn labels(frame: &Frame, series: &Series<'_>, values: &Values, y: &Scale) -> Vec<(f64, String, String)> {
    let room = if frame.right > SMALL.0 { LARGE.0 } else { SMALL.0 } - frame.right - 14.0;
    let mut labels = Vec::new();
    let mut others: Vec<f64> = Vec::new();
    let mut unnamed = 0_usize;
    for line in &series.lines {
        let Some(last) = (values.own)(line).iter().flatten().last().copied() else {
            continue;
        };
        let value = (values.label)(last);
        if line.look == Look::Other {
            others.push(last);
        } else if line.look == Look::Starved && labels.len() >= NAMED / 2 {
            // The starved come first, so only they can be in the list already.
            unnamed += 1;
        } else {
            let mut text = format!("{value}  {}", line.label);
            if text_width(&text, TEXT) > room {
                let letters = (room / text_width("m", TEXT)) as usize;
                text = format!(
                    "{value}  {}",
                    abridge(&line.name, letters.saturating_sub(value.chars().count() + 2).max(6))
                );
            }
            labels.push((y.at(last), format!("num {}", text_class(line.look)), text));
        }
    }
    if unnamed > 0 {
        labels.push((frame.bottom, "alarm".to_owned(), format!("{unnamed} more starved")));
    }
    if let (Some(low), Some(high)) = (
        others.iter().copied().reduce(f64::min),
        others.iter().copied().reduce(f64::max),
    ) {
        let (low, high) = ((values.label)(low), (values.label)(high));
        let text = format!("{} others, {low} to {high}", others.len());
        let at = f64::midpoint(frame.top, frame.bottom);
        labels.push((at, "soft".to_owned(), text));
    }
    labels
}

fn text_class(look: Look) -> String {
    match look {
        Look::Starved => "alarm strong".to_owned(),
        look => class(look),
    }
}

/// Births and departures within the time shown, those close together as one.
fn marks(series: &Series<'_>, named: bool) -> Vec<Mark> {
    let near = series.end().since(series.begin).as_secs_f64() * CLOSE;
    let within = |time: &Timestamp| *time > series.begin && *time <= series.end();
    let mut marks = Vec::new();
    for (verb, moment) in [
        ("added", (|line| line.born) as fn(&Line<'_>) -> Option<Timestamp>),
        ("removed", |line| line.gone),
    ] {
        let mut moments: Vec<(Timestamp, &Line<'_>)> = series
            .lines
            .iter()
            .filter_map(|line| Some((moment(line).filter(within)?, line)))
            .collect();
        moments.sort_by_key(|(time, _)| *time);
        let mut rest = moments.as_slice();
        while let Some((first, line)) = rest.first() {
            let count = rest
                .iter()
                .take_while(|(time, _)| time.since(*first).as_secs_f64() <= near)
                .count();
            let (group, later) = rest.split_at(count);
            rest = later;
            let what = match (count, named) {
                (1, true) => format!("{} ", line.label),
                (1, false) => String::new(),
                (_, true) => format!("{count} endpoints "),
                (_, false) => format!("{count} "),
            };
            marks.push(Mark {
                time: *first,
                text: format!("{what}{verb} {}", clock(*first)),
                alarm: verb == "added" && group.iter().any(|(_, line)| line.starved.is_some()),
            });
        }
    }
    // The first to get a place for its label is the one that matters most.
    marks.sort_by_key(|mark| (!mark.alarm, mark.time));
    marks
}

/// How soon source ports were used again.
pub(super) fn intervals(buckets: &[IntervalView]) -> Sheet {
    let total: u64 = buckets.iter().map(|bucket| bucket.count).sum();
    let title = format!("Source port used again after … ({} times)", thousands(total));
    let mut sheet = Sheet::new(SMALL.0, SMALL.1, &title);
    sheet.text(8.0, 18.0, "head", &title);
    if total == 0 {
        nothing(&mut sheet, "No source port was used again.");
        return sheet;
    }
    let (left, right, top, bottom) = (14.0, SMALL.0 - 10.0, 82.0, SMALL.1 - 28.0);
    let wide = (right - left) / buckets.len() as f64;
    let most = buckets.iter().map(|bucket| bucket.count).max().unwrap_or(1) as f64;
    let y = Scale::linear((0.0, most * 1.12), (bottom, top));
    let edge_at = |seconds: f64| {
        buckets
            .iter()
            .position(|bucket| bucket.up_to_seconds == Some(seconds))
            .map(|index| left + (index + 1) as f64 * wide)
    };
    let held = (edge_at(60.0), edge_at(120.0));
    if let (Some(from), Some(to)) = held {
        sheet.push(format_args!(
            r#"<rect class="zone" x="{from:.1}" y="{top:.1}" width="{:.1}" height="{:.1}"><title>A socket has let go of the port, IPVS and conntrack still know it</title></rect>"#,
            to - from,
            bottom - top
        ));
    }
    for (index, bucket) in buckets.iter().enumerate() {
        let x = left + index as f64 * wide;
        let height = bottom - y.at(bucket.count as f64);
        let held = bucket.up_to_seconds.is_some_and(|edge| edge > 60.0 && edge <= 120.0);
        let name = bucket
            .up_to_seconds
            .map_or_else(|| "longer".to_owned(), |edge| format!("up to {} s", compact(edge)));
        sheet.push(format_args!(
            r#"<rect class="{}" x="{:.1}" y="{:.1}" width="{:.1}" height="{height:.1}"><title>{name}: {}</title></rect>"#,
            if held { "alarm" } else { "bar" },
            x + 2.0,
            bottom - height,
            wide - 4.0,
            thousands(bucket.count)
        ));
        if bucket.count > 0 {
            sheet.text(
                x + wide / 2.0,
                bottom - height - 4.0,
                "num middle halo",
                &compact(bucket.count as f64),
            );
        }
        if let Some(edge) = bucket.up_to_seconds {
            sheet.text(x + wide, bottom + 16.0, "soft num middle", &compact(edge));
        }
    }
    sheet.text(left, bottom + 16.0, "soft num", "0");
    sheet.text(right, bottom + 16.0, "soft end", "s");
    sheet.stroke("axis", (left, bottom), (right, bottom));
    for (edge, line, text) in [
        (held.0, 0.0, "60 s: TIME_WAIT of sockets ends"),
        (held.1, 1.0, "120 s: IPVS and conntrack forget"),
    ] {
        let Some(x) = edge else { continue };
        let at = top - 8.0 - line * 16.0;
        sheet.stroke("mark", (x, at - 10.0), (x, bottom));
        sheet.text(x - 5.0, at, "end", text);
    }
    sheet
}

/// How uneven the new connections were, against chance.
pub(super) fn dispersion(series: &Series<'_>) -> Sheet {
    let title = "Dispersion of new connections, a minute each";
    let mut sheet = Sheet::new(SMALL.0, SMALL.1, title);
    sheet.text(8.0, 18.0, "head", title);
    let values = series.dispersion.iter().map(|(_, value)| *value);
    let (Some(low), Some(high)) = (values.clone().reduce(f64::min), values.reduce(f64::max)) else {
        nothing(&mut sheet, "Too few connections to tell it from chance.");
        return sheet;
    };
    let frame = Frame::new((44.0, SMALL.0 - 88.0, 58.0, SMALL.1 - 28.0), series.begin, series.end());
    let y = Scale::log((low.clamp(0.1, 0.9), high.max(10.0)), (frame.bottom, frame.top));
    frame.axes(&mut sheet, &y, 5, compact);
    frame.marks(&mut sheet, &marks(series, false), 2);
    let one = y.at(1.0);
    sheet.stroke("fair", (frame.left, one), (frame.right, one));
    // Points further apart than the minute that each is about are not joined.
    let mut runs: Vec<Vec<(f64, f64)>> = Vec::new();
    let mut before: Option<Timestamp> = None;
    for (time, value) in &series.dispersion {
        let joined = before.is_some_and(|before| time.since(before).as_secs_f64() <= 60.0);
        let point = (frame.x(*time), y.at(*value));
        match runs.last_mut().filter(|_| joined) {
            Some(run) => run.push(point),
            None => runs.push(vec![point]),
        }
        before = Some(*time);
    }
    sheet.curve("line l0", &runs, "Dispersion");
    let mut labels = vec![(one, "strong".to_owned(), "1 = chance".to_owned())];
    if let Some((_, last)) = series.dispersion.last() {
        labels.push((y.at(*last), "num l0 strong".to_owned(), compact(*last)));
    }
    frame.labels(&mut sheet, labels);
    sheet
}

fn nothing(sheet: &mut Sheet, why: &str) {
    let (x, y) = (sheet.width / 2.0, sheet.height / 2.0);
    sheet.text(x, y, "soft middle", why);
}
