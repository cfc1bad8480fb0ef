//! The selected Service: its backends as bars against what would be fair.

use super::{
    super::state::{Row, Side, State},
    canvas::{Canvas, Tone, cut},
    verdict,
};
use crate::{
    cli::grid::duration,
    draw::{abridge, compact, percent, wrap},
    view::{DiagnosisView, EndpointView, ImbalanceView},
};

/// One backend's numbers on the side that is looked at.
#[derive(Clone, Copy, Debug)]
struct Share {
    share: f64,
    fair: f64,
}

/// Evenness on the side that is looked at.
pub(super) fn evenness(state: &State, row: &Row<'_>) -> Option<ImbalanceView> {
    match state.side {
        Side::New => row.service.diagnosis.new_connections,
        Side::Open => row.service.diagnosis.open_connections,
    }
}

/// Draws the backends from a row on: a title, a header, and `height` rows.
pub(super) fn draw(canvas: &mut Canvas<'_>, state: &State, row: &Row<'_>, top: u16, height: u16) {
    let diagnosis = &row.service.diagnosis;
    let width = canvas.width();
    let (_, tone) = verdict(diagnosis.verdict);
    let sentence = diagnosis.sentences.first().map_or("", String::as_str);
    let name = format!("{}/{}", diagnosis.namespace, diagnosis.service);
    let title = format!("{}: {sentence}", abridge(&name, usize::from(width) / 2));
    let tone = if tone == Tone::Plain { Tone::Strong } else { tone };
    canvas.put(0, top, width, &cut(&title, usize::from(width)), tone);

    let columns = Columns::new(width);
    let y = top + 1;
    canvas.put(2, y, columns.name, "BACKEND", Tone::Head);
    let what = format!("SHARE OF {} (│ fair)", state.side.name().to_uppercase());
    canvas.put(columns.bar_at, y, columns.bar, &what, Tone::Head);
    for (index, title) in ["SHARE", "OPEN", "STATUS", "AGE"].into_iter().enumerate() {
        let (x, wide) = columns.numbers[index];
        canvas.put_right(x, y, wide, title, Tone::Head);
    }

    let mut endpoints: Vec<&EndpointView> = diagnosis.endpoints.iter().collect();
    endpoints.sort_by_key(|endpoint| endpoint.status != "starved");
    let shares = shares(state.side, &diagnosis.endpoints);
    let most = diagnosis.endpoints.iter().map(|endpoint| {
        let share = shares(endpoint);
        share.share.max(share.fair)
    });
    let most = most.fold(0.0, f64::max).max(1e-9);
    let visible = usize::from(height);
    let shown = if endpoints.len() > visible {
        visible.saturating_sub(1)
    } else {
        endpoints.len()
    };
    for (line, endpoint) in endpoints.iter().take(shown).enumerate() {
        backend(
            canvas,
            state,
            &columns,
            endpoint,
            shares(endpoint),
            most,
            y + 1 + line as u16,
        );
    }
    if shown < endpoints.len() {
        let rest = &endpoints[shown..];
        let low = rest
            .iter()
            .map(|endpoint| shares(endpoint).share)
            .fold(f64::INFINITY, f64::min);
        let high = rest.iter().map(|endpoint| shares(endpoint).share).fold(0.0, f64::max);
        let text = format!("… {} more, {} to {} each", rest.len(), percent(low), percent(high));
        canvas.put(2, y + 1 + shown as u16, width - 2, &text, Tone::Plain);
    } else {
        words(canvas, diagnosis, y + 2 + shown as u16, top + 2 + height);
    }
}

/// What else the diagnosis says, in the rows that are left.
fn words(canvas: &mut Canvas<'_>, diagnosis: &DiagnosisView, from: u16, end: u16) {
    let room = usize::from(canvas.width()) - 4;
    let rest = diagnosis.sentences.iter().skip(1).map(|sentence| ("  ", sentence));
    let advice = diagnosis.advice.iter().map(|advice| ("→ ", advice));
    let lines = rest.chain(advice).flat_map(|(sign, text)| {
        let wrapped = wrap(text, room.saturating_sub(2));
        wrapped
            .into_iter()
            .enumerate()
            .map(move |(index, line)| format!("{}{line}", if index == 0 { sign } else { "  " }))
    });
    for (y, line) in (from..end).zip(lines) {
        canvas.put(2, y, canvas.width() - 2, &line, Tone::Plain);
    }
}

/// Each endpoint's share, and the share that it is entitled to.
fn shares(side: Side, endpoints: &[EndpointView]) -> impl Fn(&EndpointView) -> Share {
    let weight = move |endpoint: &EndpointView| match (side, endpoint.excluded.is_some()) {
        (_, true) => 0.0,
        (Side::New, false) => endpoint.window_expected,
        (Side::Open, false) => f64::from(endpoint.weight),
    };
    let count = move |endpoint: &EndpointView| match side {
        Side::New => endpoint.window_connects,
        Side::Open => endpoint.open,
    };
    let expected: f64 = endpoints.iter().map(weight).sum();
    // Before anything is expected of the window, weights say what would be fair.
    let by_weight = expected <= 0.0;
    let weight = move |endpoint: &EndpointView| {
        if by_weight && endpoint.excluded.is_none() {
            f64::from(endpoint.weight)
        } else {
            weight(endpoint)
        }
    };
    let all: f64 = endpoints.iter().map(weight).sum();
    let total: u64 = endpoints.iter().map(count).sum();
    move |endpoint| Share {
        share: if total > 0 {
            count(endpoint) as f64 / total as f64
        } else {
            0.0
        },
        fair: if all > 0.0 { weight(endpoint) / all } else { 0.0 },
    }
}

/// Where the columns stand.
struct Columns {
    name: u16,
    bar_at: u16,
    bar: u16,
    /// Place and width of share, open, status, age.
    numbers: [(u16, u16); 4],
}

impl Columns {
    fn new(width: u16) -> Self {
        let widths = [7, 6, 9, 7];
        let name = (width / 4).clamp(18, 47);
        let right = width - widths.iter().map(|wide| wide + 1).sum::<u16>();
        let bar_at = 2 + name + 1;
        let mut x = right;
        let numbers = widths.map(|wide| {
            let place = (x + 1, wide);
            x += wide + 1;
            place
        });
        Self {
            name,
            bar_at,
            bar: right.saturating_sub(bar_at),
            numbers,
        }
    }
}

fn backend(
    canvas: &mut Canvas<'_>,
    state: &State,
    columns: &Columns,
    endpoint: &EndpointView,
    share: Share,
    most: f64,
    y: u16,
) {
    let starved = endpoint.status == "starved";
    let name = std::net::SocketAddr::new(endpoint.addr, endpoint.port).to_string();
    if starved {
        canvas.put(0, y, 2, "!!", Tone::Alarm);
    }
    let tone = if starved { Tone::Alarm } else { Tone::Plain };
    canvas.put(2, y, columns.name, &abridge(&name, usize::from(columns.name)), tone);
    let fill = if starved { Tone::Alarm } else { Tone::Fill };
    canvas.put(
        columns.bar_at,
        y,
        columns.bar,
        &bar(share, most, usize::from(columns.bar)),
        fill,
    );
    let age = endpoint.born.map_or_else(
        || "-".to_owned(),
        |born| {
            let text = duration(state.now.since(born).as_secs_f64());
            // The two largest units say enough.
            let units: Vec<&str> = text.split_inclusive(|c: char| c.is_ascii_alphabetic()).collect();
            units.into_iter().take(2).collect()
        },
    );
    let status = endpoint.excluded.as_deref().unwrap_or(&endpoint.status);
    let status = if starved { "STARVED" } else { status };
    let cells = [
        percent(share.share),
        compact(endpoint.open as f64),
        status.to_owned(),
        age,
    ];
    for (cell, (x, wide)) in cells.into_iter().zip(columns.numbers) {
        canvas.put_right(x, y, wide, &cell, tone);
    }
}

/// A bar with the fair share marked, the longest a little shorter than its place.
fn bar(share: Share, most: f64, width: usize) -> String {
    let full = width.saturating_sub(2) as f64;
    let cells = |part: f64| (part / most * full).round().max(0.0) as usize;
    let mut length = cells(share.share);
    if length == 0 && share.share > 0.0 {
        length = 1;
    }
    let fair = cells(share.fair);
    (0..width.saturating_sub(1))
        .map(|cell| match (cell < length, cell == fair && share.fair > 0.0) {
            (true, true) => '┃',
            (false, true) => '│',
            (true, false) => '█',
            (false, false) => ' ',
        })
        .collect()
}
