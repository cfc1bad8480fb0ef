//! Events read back from where `-o json` wrote them.

use std::{
    collections::VecDeque,
    io::{self, BufRead, Read, Write},
};

use super::{Filter, Gone, Printer};
use crate::{
    cli::Failure,
    view::{Answer, Document, EventView, SCHEMA_VERSION},
};

/// How many of the events that pass are shown.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Bounds {
    /// The first so many.
    pub(super) count: Option<u64>,
    /// The last so many.
    pub(super) last: Option<u64>,
}

/// The longest line that is read, in bytes; an event has some 500.
const MAX_LINE: u64 = 1024 * 1024;

/// Replays `reader` into `printer`; complains of each line that is no event, and returns how many those were.
pub(super) fn replay<W: Write>(
    name: &str,
    mut reader: impl BufRead,
    filter: &Filter,
    bounds: Bounds,
    printer: &mut Printer<W>,
    complaints: &mut dyn Write,
) -> Result<u64, Failure> {
    let last = bounds.last.map(|last| usize::try_from(last).unwrap_or(usize::MAX));
    let mut kept: VecDeque<EventView> = VecDeque::new();
    let mut left = bounds.count.unwrap_or(u64::MAX);
    let (mut number, mut bad) = (0_u64, 0_u64);
    let mut bytes = Vec::new();
    while left > 0 && next_line(&mut reader, &mut bytes).map_err(|error| broken(name, number, error))? {
        number += 1;
        if bytes.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        let event = match parse(&bytes) {
            Ok(event) => event,
            Err(what) => {
                bad += 1;
                // Who has closed standard error does not want to know.
                let _unheard = writeln!(complaints, "evenkeel: {name}, line {number}: {what}");
                continue;
            }
        };
        if !filter.admits(&event) {
            continue;
        }
        if let Some(last) = last {
            if kept.len() == last {
                kept.pop_front();
            }
            kept.push_back(event);
            continue;
        }
        if printer.print(&event)? == Gone::Yes {
            return Ok(bad);
        }
        if !matches!(event, EventView::Lost { .. }) {
            left -= 1;
        }
    }
    for event in kept {
        if printer.print(&event)? == Gone::Yes {
            break;
        }
    }
    Ok(bad)
}

fn broken(name: &str, after: u64, error: io::Error) -> Failure {
    anyhow::Error::from(error)
        .context(format!("{name}, after line {after}"))
        .into()
}

/// Reads a line without its end into `bytes`; of one that is too long only as much as tells so. False at the end.
fn next_line(reader: &mut impl BufRead, bytes: &mut Vec<u8>) -> io::Result<bool> {
    bytes.clear();
    let read = reader.by_ref().take(MAX_LINE + 1).read_until(b'\n', bytes)?;
    if bytes.last() == Some(&b'\n') {
        bytes.pop();
    } else if bytes.len() as u64 > MAX_LINE {
        reader.skip_until(b'\n')?;
    }
    Ok(read > 0)
}

/// Reads one event, or says what is wrong with the line.
fn parse(bytes: &[u8]) -> Result<EventView, String> {
    if bytes.len() as u64 > MAX_LINE {
        return Err(format!("longer than {MAX_LINE} bytes; an event has some 500"));
    }
    let value: serde_json::Value = serde_json::from_slice(bytes).map_err(|error| {
        // The parser counts lines within the line.
        format!("not JSON: {}", error.to_string().replace("line 1 ", ""))
    })?;
    match value.get("schemaVersion").and_then(serde_json::Value::as_u64) {
        Some(version) if version == u64::from(SCHEMA_VERSION) => {}
        Some(version) => {
            return Err(format!(
                "schemaVersion is {version}; this version reads {SCHEMA_VERSION}"
            ));
        }
        None => {
            return Err(format!(
                "field `schemaVersion` is missing or no number; allowed is {SCHEMA_VERSION}"
            ));
        }
    }
    let kind = value.get("kind").cloned().unwrap_or_default();
    if kind != "Event" {
        return Err(format!("field `kind` is {kind}; allowed is \"Event\""));
    }
    match serde_json::from_value(value).map(|document: Document| document.answer) {
        Ok(Answer::Event(event)) => Ok(*event),
        Ok(_) => Err("not an event".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}
