//! A Service's history as the lines of a picture: put into steps that say something, with what would be fair beside them.
//!
//! Nothing is drawn here. The invariant: a line has a value for each step, and none where there is nothing to say (before
//! the endpoint was there, after it left, while nobody connected).

use std::net::{IpAddr, SocketAddr};

use crate::{
    draw::abridge,
    view::{HistoryBackendView, HistoryPointView, ReportView, ServiceReportView, StarvedView, Timestamp},
};

/// Lines that get a colour and a name; the rest is drawn thin and counted.
pub(super) const NAMED: usize = 8;
/// Steps a picture has at most.
const STEPS: usize = 90;
/// Steps it keeps, where it can, however few connections there are.
const FEWEST_STEPS: usize = 24;
/// New connections that a step should have for each endpoint: with fewer, chance draws most of the line.
const WANTED: f64 = 40.0;
/// Characters of a label.
const LABEL: usize = 22;

/// What the pictures of one Service show.
#[derive(Debug)]
pub(super) struct Series<'v> {
    /// The steps' ends.
    pub(super) times: Vec<Timestamp>,
    /// When the first step began.
    pub(super) begin: Timestamp,
    /// How long a step is, in seconds.
    pub(super) step_seconds: f64,
    /// The endpoints: the starved first, then as in the history.
    pub(super) lines: Vec<Line<'v>>,
    /// True if every endpoint is entitled to the same share.
    pub(super) equal_weights: bool,
    /// Dispersion at the points where it is known.
    pub(super) dispersion: Vec<(Timestamp, f64)>,
}

/// One endpoint over time.
#[derive(Debug)]
pub(super) struct Line<'v> {
    /// Its address and port, in full.
    pub(super) name: String,
    /// The same, short enough for a label.
    pub(super) label: String,
    /// How it is drawn.
    pub(super) look: Look,
    /// The alarm, if it is starved.
    pub(super) starved: Option<&'v StarvedView>,
    /// When it became usable, if that was seen.
    pub(super) born: Option<Timestamp>,
    /// When it ceased to be eligible, if it has.
    pub(super) gone: Option<Timestamp>,
    /// Its share of the new connections (0 to 1).
    pub(super) share: Vec<Option<f64>>,
    /// The share that its weight entitles it to (0 to 1).
    pub(super) fair: Vec<Option<f64>>,
    /// Its open connections.
    pub(super) open: Vec<Option<f64>>,
    /// The open connections that its weight entitles it to.
    pub(super) fair_open: Vec<Option<f64>>,
}

/// How a line is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// So that nobody misses it.
    Starved,
    /// In the colour of this number.
    Named(usize),
    /// Thin, without a name.
    Other,
}

/// The address and port that an alarm, an endpoint or a line is about.
fn key(addr: IpAddr, port: u16) -> SocketAddr {
    SocketAddr::new(addr, port)
}

impl<'v> Series<'v> {
    /// Reads a Service's history.
    pub(super) fn new(report: &ReportView, service: &'v ServiceReportView) -> Self {
        let points = &service.points;
        let step = points_a_step(points, service.backends.len());
        let chunks: Vec<&[HistoryPointView]> = points.chunks(step).collect();
        let times: Vec<Timestamp> = chunks.iter().filter_map(|chunk| Some(chunk.last()?.time)).collect();
        let back = (report.step_seconds.max(0.0) * 1e3) as i64;
        let begin = points.first().map_or(report.node.time, |first| {
            Timestamp::from_unix_millis(first.time.unix_millis() - back)
        });
        let backends = backends(service);
        let mut lines: Vec<Line<'v>> = backends
            .iter()
            .enumerate()
            .map(|(index, backend)| line(service, backend, index, &chunks))
            .collect();
        let weights = weights(service, &backends);
        settle_fair(&mut lines, &weights);
        lines.sort_by_key(|line| line.starved.is_none());
        let mut named = 0;
        let few = lines.len() <= NAMED;
        for line in &mut lines {
            line.look = match line.starved {
                Some(_) => Look::Starved,
                None if few || named < NAMED / 2 => Look::Named(named),
                None => Look::Other,
            };
            named += usize::from(line.starved.is_none());
        }
        let dispersion = points
            .iter()
            .filter_map(|point| Some((point.time, point.dispersion.filter(|d| d.is_finite())?)))
            .collect();
        Self {
            times,
            begin,
            step_seconds: report.step_seconds * step as f64,
            lines,
            equal_weights: weights.windows(2).all(|pair| pair[0] == pair[1]),
            dispersion,
        }
    }

    /// When the last step ended.
    pub(super) fn end(&self) -> Timestamp {
        self.times.last().copied().unwrap_or(self.begin)
    }

    /// The starved lines that a view found.
    pub(super) fn starved(&self, view: &str) -> impl Iterator<Item = (&Line<'v>, &'v StarvedView)> {
        self.lines
            .iter()
            .filter_map(move |line| Some((line, line.starved.filter(|starved| starved.view == view)?)))
    }
}

/// How many points make a step.
fn points_a_step(points: &[HistoryPointView], backends: usize) -> usize {
    let count = points.len().max(1);
    let total: u64 = points.iter().flat_map(|point| &point.started).sum();
    let a_point = (total as f64 / count as f64).max(1e-9);
    let wanted = (WANTED * backends.max(1) as f64 / a_point).ceil() as usize;
    let least = count.div_ceil(STEPS);
    wanted.clamp(least, (count / FEWEST_STEPS).max(least))
}

/// The history's endpoints, and the starved ones that no connection ever made part of it.
fn backends(service: &ServiceReportView) -> Vec<HistoryBackendView> {
    let mut backends = service.backends.clone();
    for starved in &service.diagnosis.starved {
        let own = key(starved.addr, starved.port);
        if backends.iter().all(|backend| key(backend.addr, backend.port) != own) {
            let endpoint =
                (service.diagnosis.endpoints.iter()).find(|endpoint| key(endpoint.addr, endpoint.port) == own);
            backends.push(HistoryBackendView {
                addr: starved.addr,
                port: starved.port,
                born: Some(endpoint.and_then(|endpoint| endpoint.born).unwrap_or(starved.since)),
                gone: None,
            });
        }
    }
    backends
}

fn line<'v>(
    service: &'v ServiceReportView,
    backend: &HistoryBackendView,
    index: usize,
    chunks: &[&[HistoryPointView]],
) -> Line<'v> {
    let own = key(backend.addr, backend.port);
    // A step in which the endpoint came or left counts for it from then on, or until then.
    let there = |point: &&HistoryPointView| {
        backend.born.is_none_or(|born| born < point.time) && backend.gone.is_none_or(|gone| gone > point.time)
    };
    let share = |chunk: &&[HistoryPointView]| {
        let all: u64 = chunk.iter().filter(there).flat_map(|point| &point.started).sum();
        let own = chunk.iter().filter(there).filter_map(|point| point.started.get(index));
        (all > 0).then(|| own.sum::<u64>() as f64 / all as f64)
    };
    let open = |chunk: &&[HistoryPointView]| {
        let last = chunk.iter().rfind(there)?;
        Some(last.open.get(index).copied().unwrap_or(0) as f64)
    };
    let name = if backend.addr.is_unspecified() {
        "a former endpoint".to_owned()
    } else {
        own.to_string()
    };
    Line {
        label: abridge(&name, LABEL),
        name,
        look: Look::Other,
        starved: service
            .diagnosis
            .starved
            .iter()
            .find(|starved| key(starved.addr, starved.port) == own),
        born: backend.born,
        gone: backend.gone,
        share: chunks.iter().map(share).collect(),
        fair: Vec::new(),
        open: chunks.iter().map(open).collect(),
        fair_open: Vec::new(),
    }
}

/// The weights of the history's endpoints; 1 for one that is no longer known.
fn weights(service: &ServiceReportView, backends: &[HistoryBackendView]) -> Vec<u32> {
    let weight = |own: SocketAddr| {
        let found = service
            .diagnosis
            .endpoints
            .iter()
            .find(|endpoint| key(endpoint.addr, endpoint.port) == own);
        found.map_or(1, |endpoint| endpoint.weight)
    };
    backends
        .iter()
        .map(|backend| weight(key(backend.addr, backend.port)))
        .collect()
}

/// Gives each line, at each step, what it would get by weight among those that were there.
fn settle_fair(lines: &mut [Line<'_>], weights: &[u32]) {
    let steps = lines.first().map_or(0, |line| line.open.len());
    for step in 0..steps {
        let present = |line: &Line<'_>| line.open[step].is_some();
        let among = |value: fn(&Line<'_>, usize) -> f64| -> f64 { lines.iter().map(|line| value(line, step)).sum() };
        let open = among(|line, step| line.open[step].unwrap_or(0.0));
        let all: f64 = lines
            .iter()
            .zip(weights)
            .filter(|(line, _)| present(line))
            .map(|(_, weight)| f64::from(*weight))
            .sum();
        for (line, weight) in lines.iter_mut().zip(weights) {
            let part = (line.open[step].is_some() && all > 0.0).then(|| f64::from(*weight) / all);
            line.fair.push(part);
            line.fair_open.push(part.map(|part| part * open));
        }
    }
}
