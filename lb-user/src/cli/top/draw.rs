//! A state, on a screen. Pure: it writes into a buffer of cells.
//!
//! Whatever a colour says, a word, a sign or the place says too: without colours nothing is lost.

mod bottom;
mod canvas;
mod detail;

pub(super) use self::canvas::{Paint, plain};

use ratatui::{buffer::Buffer, layout::Rect};

use self::canvas::{Canvas, Tone, cut};
use super::state::{Mode, Row, State};
use crate::{
    cli::grid::duration,
    draw::{clock, compact, percent, thousands},
    view::{self, ReportView, VerdictKind},
};

/// The smallest screen that holds anything of use.
const SMALLEST: (u16, u16) = (60, 16);
/// Rows from which there is room for the histogram and the alarms.
const ROOMY: u16 = 22;

/// Draws the state.
pub(super) fn screen(state: &State, paint: Paint, area: Rect, buffer: &mut Buffer) {
    let mut canvas = Canvas::new(buffer, area, paint);
    if area.width < SMALLEST.0 || area.height < SMALLEST.1 {
        too_small(&mut canvas);
        return;
    }
    header(&mut canvas, state);
    match &state.report {
        Some(report) => body(&mut canvas, state, report),
        None => waiting(&mut canvas, state),
    }
    footer(&mut canvas, state);
    if state.mode == Mode::Helping {
        help(&mut canvas);
    }
}

fn too_small(canvas: &mut Canvas<'_>) {
    let said = [
        format!("evenkeel top needs {} × {}.", SMALLEST.0, SMALLEST.1),
        format!("This screen: {} × {}.", canvas.width(), canvas.height()),
        "q quits.".to_owned(),
    ];
    for (row, text) in said.iter().enumerate() {
        canvas.put(0, row as u16, canvas.width(), text, Tone::Plain);
    }
}

fn waiting(canvas: &mut Canvas<'_>, state: &State) {
    let said = match &state.silent {
        None => "Waiting for the agent's first answer …".to_owned(),
        Some((_, why)) => format!("No answer yet: {why}"),
    };
    let middle = canvas.height() / 2;
    for (row, line) in crate::draw::wrap(&said, usize::from(canvas.width()) - 4)
        .iter()
        .take(4)
        .enumerate()
    {
        canvas.put(2, middle + row as u16, canvas.width() - 4, line, Tone::Plain);
    }
}

fn header(canvas: &mut Canvas<'_>, state: &State) {
    let width = canvas.width();
    canvas.fill(0, Tone::Bar);
    let time = format!("{}Z ", clock(state.now));
    let node = match &state.report {
        None => " evenkeel top".to_owned(),
        Some(report) => {
            let node = &report.node;
            // Where Evenkeel itself balances, nobody else is looked for.
            let beside = match (&node.proxy, node.mode) {
                (Some(proxy), _) => format!("  {proxy}"),
                (None, view::Mode::Observe) => "  no proxy found".to_owned(),
                (None, view::Mode::Balance) => String::new(),
            };
            format!(
                " evenkeel top  {}  {}{beside}  Linux {}",
                node.node.as_deref().unwrap_or("this node"),
                node.mode,
                node.kernel
            )
        }
    };
    let room = width.saturating_sub(time.chars().count() as u16 + 1);
    canvas.put(0, 0, room, &cut(&node, usize::from(room)), Tone::Bar);
    canvas.put(width - time.chars().count() as u16, 0, width, &time, Tone::Bar);
    if let Some((since, why)) = &state.silent {
        let text = format!(" AGENT UNREACHABLE since {}Z, trying on: {why}", clock(*since));
        canvas.put(0, 1, width, &cut(&text, usize::from(width)), Tone::Alarm);
        return;
    }
    let Some(report) = &state.report else { return };
    let alarms = state.alarms();
    let alarm = format!(" {alarms} alarm{}", if alarms == 1 { "" } else { "s" });
    canvas.put(0, 1, width, &alarm, if alarms > 0 { Tone::Alarm } else { Tone::Good });
    let mut parts = vec![
        format!("{} events lost", thousands(report.node.events_lost)),
        format!(
            "counting {}",
            duration(report.node.time.since(report.node.since).as_secs_f64())
        ),
        format!("{} connections", state.side.name()),
        format!("sorted by {}", state.sort.name()),
    ];
    if !state.filter.is_empty() {
        parts.insert(0, format!("filter \"{}\"", state.filter));
    }
    if state.paused {
        parts.insert(0, format!("PAUSED at {}Z", clock(report.node.time)));
    }
    let left = alarm.chars().count() as u16 + 2;
    let text = cut(&parts.join("  "), usize::from(width - left));
    canvas.put(
        left,
        1,
        width,
        &text,
        if state.paused { Tone::Strong } else { Tone::Plain },
    );
}

/// The table of Services, the selected one's backends, and what stands below.
fn body(canvas: &mut Canvas<'_>, state: &State, report: &ReportView) {
    let rows = state.rows();
    let selected = state.selected(&rows);
    let height = canvas.height();
    let bottom = match height {
        0..ROOMY => 0,
        ROOMY..36 => 7,
        _ => 10,
    };
    // Two lines of header, one of the table's, two of the backends', one of keys.
    let free = height - 6 - bottom;
    let chosen = rows.get(selected);
    let endpoints = chosen.map_or(1, |row| row.service.diagnosis.endpoints.len().max(1));
    let (services, backends) = share(free, rows.len().max(1), endpoints);
    table(canvas, state, &rows, selected, services);
    let top = 3 + services;
    if let Some(row) = chosen {
        detail::draw(canvas, state, row, top, backends);
        if bottom > 0 {
            bottom::draw(canvas, report, row, height - 1 - bottom, bottom);
        }
    } else {
        let why = if report.services.is_empty() {
            "No Service has had traffic on this node."
        } else {
            "No Service passes the filter; Esc clears it."
        };
        canvas.put(2, top, canvas.width() - 2, why, Tone::Plain);
    }
}

/// Shares rows between two lists by need; who needs less than half leaves the rest to the other.
fn share(free: u16, first: usize, second: usize) -> (u16, u16) {
    let need = |rows: usize| u16::try_from(rows).unwrap_or(u16::MAX);
    let (first, second) = (need(first), need(second));
    if first.saturating_add(second) <= free {
        return (first, free - first);
    }
    let half = free / 2;
    if first <= half {
        (first, free - first)
    } else if second <= free - half {
        (free - second, second)
    } else {
        (half, free - half)
    }
}

/// One column of the table: its title, its width, what it shows.
struct Column {
    title: &'static str,
    width: u16,
    cell: fn(&Row<'_>, &State) -> String,
}

fn number(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), compact)
}

/// The columns right of the name, the dispensable last.
const COLUMNS: [Column; 8] = [
    Column {
        title: "VERDICT",
        width: 8,
        cell: |row, _| verdict(row.service.diagnosis.verdict).0.to_owned(),
    },
    Column {
        title: "NEW/S",
        width: 6,
        cell: |row, _| compact(row.rate),
    },
    Column {
        title: "OPEN",
        width: 5,
        cell: |row, _| compact(row.open as f64),
    },
    Column {
        title: "DISP",
        width: 5,
        cell: |row, _| number(row.dispersion),
    },
    Column {
        title: "MAX/M",
        width: 5,
        cell: |row, state| number(detail::evenness(state, row).and_then(|view| view.max_over_mean)),
    },
    Column {
        title: "N",
        width: 6,
        cell: |row, state| compact(detail::evenness(state, row).map_or(0, |view| view.n) as f64),
    },
    Column {
        title: "REUSE",
        width: 6,
        cell: |row, _| match &row.service.diagnosis.reuse {
            Some(reuse) if reuse.connections > 0 => {
                percent(reuse.total as f64 / reuse.connections as f64).replace(' ', "")
            }
            _ => "-".to_owned(),
        },
    },
    Column {
        title: "FAIL",
        width: 5,
        cell: |row, _| compact(row.service.diagnosis.failed.values().sum::<u64>() as f64),
    },
];

/// Columns that the name needs at least.
const NAME: u16 = 22;

/// A verdict's word and tone.
fn verdict(kind: VerdictKind) -> (&'static str, Tone) {
    match kind {
        VerdictKind::Starved => ("STARVED", Tone::Alarm),
        VerdictKind::Uneven => ("UNEVEN", Tone::Warn),
        VerdictKind::Even => ("even", Tone::Good),
        VerdictKind::Insufficient => ("too few", Tone::Plain),
        VerdictKind::NoTraffic => ("idle", Tone::Plain),
    }
}

fn table(canvas: &mut Canvas<'_>, state: &State, rows: &[Row<'_>], selected: usize, height: u16) {
    let mut columns = COLUMNS.len();
    let wide = |columns: usize| COLUMNS[..columns].iter().map(|column| column.width + 1).sum::<u16>();
    while columns > 3 && wide(columns) + NAME + 2 > canvas.width() {
        columns -= 1;
    }
    let name = canvas.width() - 2 - wide(columns);
    canvas.put(2, 2, name, "SERVICE", Tone::Head);
    let mut x = 2 + name;
    for column in &COLUMNS[..columns] {
        canvas.put_right(x + 1, 2, column.width, column.title, Tone::Head);
        x += column.width + 1;
    }
    let visible = usize::from(height);
    // The selected row stays in sight.
    let first = (selected + 1)
        .saturating_sub(visible)
        .min(rows.len().saturating_sub(visible));
    for (line, (index, row)) in rows.iter().enumerate().skip(first).take(visible).enumerate() {
        let y = 3 + line as u16;
        let diagnosis = &row.service.diagnosis;
        let (_, tone) = verdict(diagnosis.verdict);
        let chosen = index == selected;
        if chosen {
            canvas.fill(y, Tone::Chosen);
            canvas.put(0, y, 2, "▶ ", Tone::Chosen);
        }
        let mut text = format!("{}/{} {}", diagnosis.namespace, diagnosis.service, diagnosis.set);
        text = cut(&text, usize::from(name) - 1);
        canvas.put(2, y, name, &text, if chosen { Tone::Chosen } else { Tone::Plain });
        let mut x = 2 + name;
        for (place, column) in COLUMNS[..columns].iter().enumerate() {
            let tone = match (chosen, place) {
                (true, _) => Tone::Chosen,
                (false, 0) => tone,
                (false, _) => Tone::Plain,
            };
            canvas.put_right(x + 1, y, column.width, &(column.cell)(row, state), tone);
            x += column.width + 1;
        }
    }
}

fn footer(canvas: &mut Canvas<'_>, state: &State) {
    let y = canvas.height() - 1;
    canvas.fill(y, Tone::Bar);
    let text = match state.mode {
        Mode::Typing => format!(" filter: {}▏  Enter keeps it, Esc clears it", state.filter),
        _ => " q quit  ↑↓ select  s sort  / filter  p pause  n new  o open  ? help".to_owned(),
    };
    canvas.put(0, y, canvas.width(), &text, Tone::Bar);
}

fn help(canvas: &mut Canvas<'_>) {
    const LINES: [&str; 14] = [
        "q, Ctrl-C    quit",
        "↑ ↓, k j     select a Service",
        "s            sort: verdict, rate, name, dispersion",
        "/            show only what contains a text; Esc clears",
        "p, space     pause and go on",
        "n            shares of new connections (last minute)",
        "o            shares of open connections",
        "",
        "DISP   dispersion: 1 is what chance gives, far above 1 is",
        "       real; MAX/M the largest share against the mean",
        "N      connections that both rest on",
        "REUSE  connections on a source port used just before",
        "┃ │    in a bar: the share that the weight entitles to",
        "                                  any key closes this",
    ];
    let (wide, high) = (60, LINES.len() as u16 + 1);
    let x = (canvas.width() - wide) / 2;
    let y = (canvas.height() - high) / 2;
    canvas.put(x, y, wide, &format!("{:<60}", " Keys and columns"), Tone::Bar);
    for (row, line) in LINES.iter().enumerate() {
        canvas.put(x, y + 1 + row as u16, wide, &format!(" {line:<59}"), Tone::Plain);
    }
}
