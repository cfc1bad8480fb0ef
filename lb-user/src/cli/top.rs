//! `evenkeel top`: the node's Services on a terminal, as they go.
//!
//! `state` holds what is shown and what keys do to it, `draw` puts it on a screen; both are pure. `feed` asks the agent on
//! a thread of its own, so that a slow agent never makes a key wait. The loop here joins them, and the terminal is put
//! back whatever ends it: a key, a signal, an error, a panic.

mod draw;
mod feed;
mod state;
#[cfg(test)]
mod tests;

use std::{
    io::{self, IsTerminal},
    time::{Duration, SystemTime},
};

use anyhow::Context as _;
use clap::Args;
use ratatui::{
    Terminal,
    backend::Backend,
    buffer::Buffer,
    crossterm::event::{self, Event, KeyEventKind},
    layout::Rect,
};

use self::{
    draw::Paint,
    feed::Feed,
    state::{State, Step},
};
use super::{Context, Failure, Found, output};
use crate::{
    control::AskError,
    interrupt::Interrupts,
    view::{Answer, Query, QueryError, ServiceFilter, Timestamp},
};

/// Watch the Services: verdicts, rates, shares as bars, port reuse, alarms
#[derive(Debug, Args)]
#[command(
    after_help = "Keys: q quits, up and down select, s sorts, / filters, p pauses, n and o switch between new and open \
    connections, ? helps. Where standard output is no terminal, one screen is printed.\n\nExamples:\n  \
    evenkeel top\n  \
    evenkeel top --interval 5\n  \
    evenkeel top --once"
)]
pub(super) struct TopArgs {
    /// Print one screen as text and end
    #[arg(long)]
    once: bool,
    /// Seconds between two looks at the agent
    #[arg(long, value_name = "SECONDS", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=3600))]
    interval: u64,
}

/// How long the loop waits for a key before it looks at the agent's answers and at signals.
const TURN: Duration = Duration::from_millis(50);

pub(super) fn run(args: &TopArgs, context: &Context) -> Result<Found, Failure> {
    if !context.output.for_people() {
        return Err(Failure::Usage(
            "--output: top draws a screen; `evenkeel report -o json` prints what it draws".to_owned(),
        ));
    }
    if args.once || !io::stdout().is_terminal() {
        return once(context);
    }
    let paint = Paint {
        color: context.output.color,
    };
    let interrupts = Interrupts::catch().context("catch signals")?;
    let feed = Feed::start(&context.socket, Duration::from_secs(args.interval)).context("start a thread")?;
    // From here on a panic puts the terminal back before it is reported.
    let mut terminal = ratatui::try_init().context("take over the terminal")?;
    let played = play(&mut terminal, &feed, &interrupts, paint);
    let restored = ratatui::try_restore().context("give the terminal back");
    played?;
    restored?;
    Ok(Found::Fine)
}

/// Draws, reads keys and takes in answers until it is enough.
fn play<B: Backend>(
    terminal: &mut Terminal<B>,
    feed: &Feed,
    interrupts: &Interrupts,
    paint: Paint,
) -> Result<(), Failure>
where
    B::Error: std::error::Error + Send + Sync + 'static,
{
    let mut state = State::new(now());
    let mut stale = true;
    while interrupts.check().is_ok() {
        for answer in feed.answers() {
            state.take(answer.time, answer.result);
            stale = true;
        }
        if state.tick(now()) || stale {
            terminal
                .draw(|frame| draw::screen(&state, paint, frame.area(), frame.buffer_mut()))
                .context("draw")?;
            stale = false;
        }
        if !event::poll(TURN).context("wait for a key")? {
            continue;
        }
        match event::read().context("read a key")? {
            Event::Key(key) if key.kind != KeyEventKind::Release => {
                if state.press(key) == Step::Quit {
                    return Ok(());
                }
                stale = true;
            }
            Event::Resize(..) => stale = true,
            _ => {}
        }
    }
    Ok(())
}

/// Prints one screen.
fn once(context: &Context) -> Result<Found, Failure> {
    let answer = context.ask(&Query::Report {
        filter: ServiceFilter::default(),
    })?;
    let Answer::Report(report) = answer else {
        return Err(Failure::Ask(AskError::Refused(QueryError::Failed(
            "the answer is no report".to_owned(),
        ))));
    };
    let mut state = State::new(report.node.time);
    state.take(report.node.time, Ok(report));
    let (columns, rows) = size();
    output::write(&text(&state, columns, rows))?;
    Ok(Found::Fine)
}

/// A screen as plain text.
fn text(state: &State, columns: u16, rows: u16) -> String {
    let area = Rect::new(0, 0, columns, rows);
    let mut buffer = Buffer::empty(area);
    draw::screen(state, Paint { color: false }, area, &mut buffer);
    draw::plain(&buffer)
}

/// The terminal's size; without a terminal what COLUMNS and LINES say, or 80 by 24.
fn size() -> (u16, u16) {
    let said = |name: &str, otherwise: u16| {
        std::env::var(name)
            .ok()
            .and_then(|value| value.parse().ok())
            .filter(|value| (20..=500).contains(value))
            .unwrap_or(otherwise)
    };
    if io::stdout().is_terminal()
        && let Ok((columns, rows)) = ratatui::crossterm::terminal::size()
    {
        return (columns, rows.saturating_sub(1));
    }
    (said("COLUMNS", 80), said("LINES", 24))
}

fn now() -> Timestamp {
    Timestamp::from_system(SystemTime::now())
}
