//! What `top` shows, and what answers and keys do to it. No clock, no terminal: times and keys come in as arguments.
//!
//! The invariant: the selection names a Service, not a row, so that it stays where it is while rows change places.

use std::collections::{BTreeMap, VecDeque};

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use crate::view::{DiagnosisView, ReportView, ServiceReportView, Timestamp, VerdictKind};

/// How far back a rate looks, in seconds.
const RATE_SECONDS: f64 = 10.0;

/// What to do after a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Go on.
    Continue,
    /// End.
    Quit,
}

/// The order of the Services.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sort {
    /// The worst verdict first.
    Verdict,
    /// The busiest first.
    Rate,
    /// By name.
    Name,
    /// The most uneven first.
    Dispersion,
}

impl Sort {
    /// Its word.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Verdict => "verdict",
            Self::Rate => "rate",
            Self::Name => "name",
            Self::Dispersion => "dispersion",
        }
    }

    fn next(self) -> Self {
        match self {
            Self::Verdict => Self::Rate,
            Self::Rate => Self::Name,
            Self::Name => Self::Dispersion,
            Self::Dispersion => Self::Verdict,
        }
    }
}

/// Which connections the shares are about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// New connections: how backends are chosen.
    New,
    /// Open connections: how load has drifted.
    Open,
}

impl Side {
    /// Its word.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::New => "new",
            Self::Open => "open",
        }
    }
}

/// What keys mean just now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// The ordinary keys.
    Watching,
    /// Letters go into the filter.
    Typing,
    /// The help is shown; any key ends it.
    Helping,
}

/// A backend set: namespace, Service, set.
type Key = (String, String, String);

/// One row of the table of Services.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row<'s> {
    /// What the agent says of it.
    pub(super) service: &'s ServiceReportView,
    /// New connections a second.
    pub(super) rate: f64,
    /// Connections open now.
    pub(super) open: u64,
    /// Dispersion on the side that is looked at; none where there is too little.
    pub(super) dispersion: Option<f64>,
}

/// What is shown.
#[derive(Debug)]
pub(super) struct State {
    /// The present.
    pub(super) now: Timestamp,
    /// The last report.
    pub(super) report: Option<Box<ReportView>>,
    /// Since when the agent has not answered, and what the last question met.
    pub(super) silent: Option<(Timestamp, String)>,
    /// The order of the Services.
    pub(super) sort: Sort,
    /// Which connections are looked at.
    pub(super) side: Side,
    /// What a Service must contain to be shown.
    pub(super) filter: String,
    /// Whether the report is held as it was.
    pub(super) paused: bool,
    /// What keys mean.
    pub(super) mode: Mode,
    selected: Option<Key>,
    /// Connections of each set at the last few reports.
    counted: BTreeMap<Key, VecDeque<(Timestamp, u64)>>,
}

fn key(diagnosis: &DiagnosisView) -> Key {
    (
        diagnosis.namespace.clone(),
        diagnosis.service.clone(),
        diagnosis.set.clone(),
    )
}

impl State {
    /// Nothing is known yet.
    pub(super) fn new(now: Timestamp) -> Self {
        Self {
            now,
            report: None,
            silent: None,
            sort: Sort::Verdict,
            side: Side::New,
            filter: String::new(),
            paused: false,
            mode: Mode::Watching,
            selected: None,
            counted: BTreeMap::new(),
        }
    }

    /// Time passes; true if that shows.
    pub(super) fn tick(&mut self, now: Timestamp) -> bool {
        let second = |time: Timestamp| time.unix_millis().div_euclid(1_000);
        let shows = second(now) != second(self.now);
        self.now = now;
        shows
    }

    /// Takes in what came of a question.
    pub(super) fn take(&mut self, time: Timestamp, result: Result<Box<ReportView>, String>) {
        self.now = self.now.max(time);
        match result {
            Err(why) => {
                let since = self.silent.take().map_or(time, |(since, _)| since);
                self.silent = Some((since, why));
            }
            Ok(report) => {
                self.silent = None;
                if !self.paused {
                    self.count(&report);
                    self.report = Some(report);
                }
            }
        }
    }

    fn count(&mut self, report: &ReportView) {
        let mut before = std::mem::take(&mut self.counted);
        for service in &report.services {
            let key = key(&service.diagnosis);
            let mut counts = before.remove(&key).unwrap_or_default();
            let now = service.diagnosis.attribution.connects;
            // An agent that started anew counts from 0.
            if counts.back().is_some_and(|(_, last)| *last > now) {
                counts.clear();
            }
            counts.push_back((report.node.time, now));
            while counts
                .front()
                .is_some_and(|(time, _)| report.node.time.since(*time).as_secs_f64() > RATE_SECONDS)
            {
                counts.pop_front();
            }
            self.counted.insert(key, counts);
        }
    }

    /// New connections a second: from the counts of the last seconds, at first from the history that came along.
    fn rate(&self, report: &ReportView, service: &ServiceReportView) -> f64 {
        if let Some(counts) = self.counted.get(&key(&service.diagnosis))
            && let (Some((from, before)), Some((to, after))) = (counts.front(), counts.back())
            && from < to
        {
            return (after - before) as f64 / to.since(*from).as_secs_f64();
        }
        let step = if report.step_seconds > 0.0 {
            report.step_seconds
        } else {
            1.0
        };
        let points = ((RATE_SECONDS / step).ceil() as usize).min(service.points.len());
        let started: u64 = service.points[service.points.len() - points..]
            .iter()
            .flat_map(|point| &point.started)
            .sum();
        if points == 0 {
            0.0
        } else {
            started as f64 / (points as f64 * step)
        }
    }

    /// The Services that pass the filter, in order.
    pub(super) fn rows(&self) -> Vec<Row<'_>> {
        let Some(report) = &self.report else {
            return Vec::new();
        };
        let mut rows: Vec<Row<'_>> = report
            .services
            .iter()
            .filter(|service| self.admits(&service.diagnosis))
            .map(|service| {
                let diagnosis = &service.diagnosis;
                let evenness = match self.side {
                    Side::New => diagnosis.new_connections,
                    Side::Open => diagnosis.open_connections,
                };
                Row {
                    service,
                    rate: self.rate(report, service),
                    open: diagnosis.endpoints.iter().map(|endpoint| endpoint.open).sum(),
                    dispersion: evenness
                        .filter(|view| !view.insufficient)
                        .and_then(|view| view.dispersion),
                }
            })
            .collect();
        rows.sort_by(|a, b| {
            let (left, right) = (&a.service.diagnosis, &b.service.diagnosis);
            let first = match self.sort {
                Sort::Verdict => left.verdict.cmp(&right.verdict),
                Sort::Rate => b.rate.total_cmp(&a.rate),
                Sort::Name => std::cmp::Ordering::Equal,
                Sort::Dispersion => b
                    .dispersion
                    .unwrap_or(f64::NEG_INFINITY)
                    .total_cmp(&a.dispersion.unwrap_or(f64::NEG_INFINITY)),
            };
            first.then_with(|| {
                (&left.namespace, &left.service, &left.set).cmp(&(&right.namespace, &right.service, &right.set))
            })
        });
        rows
    }

    fn admits(&self, diagnosis: &DiagnosisView) -> bool {
        let wanted = self.filter.to_lowercase();
        wanted.is_empty()
            || format!(
                "{}/{} {} {}",
                diagnosis.namespace,
                diagnosis.service,
                diagnosis.set,
                diagnosis.verdict.name()
            )
            .to_lowercase()
            .contains(&wanted)
            || diagnosis
                .endpoints
                .iter()
                .any(|endpoint| endpoint.addr.to_string().contains(&wanted))
    }

    /// Which of the rows is selected: the one that was, else the first.
    pub(super) fn selected(&self, rows: &[Row<'_>]) -> usize {
        let wanted = self.selected.as_ref();
        wanted
            .and_then(|wanted| rows.iter().position(|row| key(&row.service.diagnosis) == *wanted))
            .unwrap_or(0)
    }

    /// Alarms: starved endpoints and uneven Services, over all Services whatever the filter.
    pub(super) fn alarms(&self) -> usize {
        let services = self.report.iter().flat_map(|report| &report.services);
        services
            .map(|service| {
                let uneven = service.diagnosis.verdict == VerdictKind::Uneven;
                service.diagnosis.starved.len() + usize::from(uneven)
            })
            .sum()
    }

    /// A key was pressed.
    pub(super) fn press(&mut self, pressed: KeyEvent) -> Step {
        if pressed.modifiers.contains(KeyModifiers::CONTROL) {
            return match pressed.code {
                KeyCode::Char('c' | 'd') => Step::Quit,
                _ => Step::Continue,
            };
        }
        match self.mode {
            Mode::Helping => self.mode = Mode::Watching,
            Mode::Typing => self.type_filter(pressed.code),
            Mode::Watching => return self.command(pressed.code),
        }
        Step::Continue
    }

    fn type_filter(&mut self, code: KeyCode) {
        match code {
            KeyCode::Enter => self.mode = Mode::Watching,
            KeyCode::Esc => {
                self.filter.clear();
                self.mode = Mode::Watching;
            }
            KeyCode::Backspace => {
                self.filter.pop();
            }
            KeyCode::Char(letter) if !letter.is_control() && self.filter.chars().count() < 64 => {
                self.filter.push(letter);
            }
            _ => {}
        }
    }

    fn command(&mut self, code: KeyCode) -> Step {
        match code {
            KeyCode::Char('q' | 'Q') => return Step::Quit,
            KeyCode::Char('s') => self.sort = self.sort.next(),
            KeyCode::Char('/') => self.mode = Mode::Typing,
            KeyCode::Char('p' | ' ') => self.paused = !self.paused,
            KeyCode::Char('n') => self.side = Side::New,
            KeyCode::Char('o') => self.side = Side::Open,
            KeyCode::Char('?' | 'h') | KeyCode::F(1) => self.mode = Mode::Helping,
            KeyCode::Esc => self.filter.clear(),
            KeyCode::Down | KeyCode::Char('j') => self.go(1),
            KeyCode::Up | KeyCode::Char('k') => self.go(-1),
            KeyCode::PageDown => self.go(10),
            KeyCode::PageUp => self.go(-10),
            KeyCode::Home | KeyCode::Char('g') => self.go(isize::MIN),
            KeyCode::End | KeyCode::Char('G') => self.go(isize::MAX),
            _ => {}
        }
        Step::Continue
    }

    fn go(&mut self, by: isize) {
        let rows = self.rows();
        let Some(last) = rows.len().checked_sub(1) else {
            return;
        };
        let to = self.selected(&rows).saturating_add_signed(by).min(last);
        let chosen = rows.get(to).map(|row| key(&row.service.diagnosis));
        self.selected = chosen;
    }
}
