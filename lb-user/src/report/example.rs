//! Reports for the tests of the pictures and of `top`, made from the small agent of the views' fixture.

use std::net::IpAddr;

use crate::{
    analysis::imbalance,
    view::{
        Answers, DiagnosisView, EndpointView, HistoryBackendView, HistoryPointView, ReportView, ServiceFilter,
        ServiceReportView, StarvedView, Timestamp, VerdictKind, fixture::Fixture,
    },
};

/// The fixture's report: one starved Service.
pub(crate) fn fixture() -> ReportView {
    Fixture { ready: true }
        .report(&ServiceFilter::default())
        .expect("the fixture answers everything")
}

/// How many seconds the histories are long.
const SECONDS: u64 = 300;

/// A little unevenness that is the same each time: 0 to `below`.
fn jitter(second: u64, index: usize, below: u64) -> u64 {
    let mut x = second.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (index as u64 + 1).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^= x >> 29;
    x = x.wrapping_mul(0x94d0_49bb_1331_11eb);
    (x ^ (x >> 32)) % below.max(1)
}

/// What a Service of the example is like.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan<'a> {
    /// `NAMESPACE/NAME`.
    pub(crate) name: (&'a str, &'a str),
    /// The verdict.
    pub(crate) verdict: VerdictKind,
    /// How many backends.
    pub(crate) backends: usize,
    /// How many of them, the last ones, came 100 s before the end.
    pub(crate) young: usize,
    /// Whether those get nothing.
    pub(crate) starved: bool,
    /// New connections of a backend in a second, about.
    pub(crate) rate: u64,
}

fn address(index: usize) -> IpAddr {
    IpAddr::from([10, 244, (1 + index / 200) as u8, (5 + index % 200) as u8])
}

/// A Service that goes as planned.
pub(crate) fn service(plan: &Plan<'_>) -> ServiceReportView {
    let report = fixture();
    let now = report.node.time;
    let at = |second: u64| Timestamp::from_unix_millis(now.unix_millis() - (SECONDS - second).cast_signed() * 1_000);
    let birth = SECONDS - 100;
    let is_young = |index: usize| index + plan.young >= plan.backends;
    let starves = |index: usize| plan.starved && is_young(index);
    let started = |second: u64, index: usize| {
        if plan.rate == 0 || starves(index) || (is_young(index) && second <= birth) {
            0
        } else {
            plan.rate + jitter(second, index, plan.rate + 1) - plan.rate / 2
        }
    };
    let points: Vec<HistoryPointView> = (1..=SECONDS)
        .map(|second| HistoryPointView {
            time: at(second),
            started: (0..plan.backends).map(|index| started(second, index)).collect(),
            open: (0..plan.backends)
                .map(|index| {
                    let busy = started(second, index) > 0;
                    if busy { 2 + jitter(second / 7, index, 4) } else { 0 }
                })
                .collect(),
            dispersion: (second > 20 && plan.rate > 0).then(|| {
                let since = second.saturating_sub(birth) as f64;
                let fair = 0.5 + jitter(second / 5, 9, 10) as f64 / 10.0;
                if plan.starved {
                    fair + since * plan.rate as f64 * 0.6
                } else {
                    fair
                }
            }),
        })
        .collect();
    let minute = |index: usize| -> u64 { points.iter().rev().take(60).map(|point| point.started[index]).sum() };
    let all: u64 = (0..plan.backends).map(minute).sum();
    let expected = all as f64 / plan.backends.max(1) as f64;
    let evenness = imbalance::by_weight((0..plan.backends).map(|index| (1, minute(index))));
    let born = |index: usize| is_young(index).then(|| at(birth));
    let template = report.services[0].diagnosis.clone();
    let endpoints: Vec<EndpointView> = (0..plan.backends)
        .map(|index| EndpointView {
            addr: address(index),
            id: index as u32 + 1,
            status: match (starves(index), plan.verdict) {
                (true, _) => "starved",
                (false, VerdictKind::Insufficient | VerdictKind::NoTraffic) => "unknown",
                _ => "fair",
            }
            .into(),
            born: born(index),
            window_connects: minute(index),
            window_expected: expected,
            connects: points.iter().map(|point| point.started[index]).sum(),
            open: points.last().map_or(0, |point| point.open[index]),
            ..template.endpoints[0].clone()
        })
        .collect();
    let starved: Vec<StarvedView> = (0..plan.backends)
        .filter(|index| starves(*index))
        .map(|index| StarvedView {
            addr: address(index),
            expected,
            since: at(birth),
            ..template.starved[0].clone()
        })
        .collect();
    let connects: u64 = endpoints.iter().map(|endpoint| endpoint.connects).sum();
    let mut diagnosis = DiagnosisView {
        namespace: plan.name.0.into(),
        service: plan.name.1.into(),
        verdict: plan.verdict,
        new_connections: (all > 0).then(|| evenness.into()),
        new_since_start: (all > 0).then(|| evenness.into()),
        open_connections: (all > 0)
            .then(|| imbalance::by_weight(endpoints.iter().map(|endpoint| (1, endpoint.open))).into()),
        endpoints,
        starved,
        ..template
    };
    diagnosis.attribution.connects = connects;
    diagnosis.attribution.attributed = connects;
    diagnosis.attribution.unknown = 0;
    diagnosis.attribution.outside = 0;
    if let Some(starved) = diagnosis.starved.first() {
        diagnosis.sentences[0] = format!(
            "{}:{} is starved: 0 of {expected:.0} expected new connections in the last minute (chance: 1e-204).",
            starved.addr, starved.port
        );
    }
    if plan.verdict != VerdictKind::Starved {
        diagnosis.sentences = vec![format!("New connections are within what chance gives (n = {all}).")];
        diagnosis.advice.clear();
        diagnosis.failed.clear();
        diagnosis.reuse = None;
    }
    ServiceReportView {
        diagnosis,
        backends: (0..plan.backends)
            .map(|index| HistoryBackendView {
                addr: address(index),
                port: 8080,
                born: born(index),
                gone: None,
            })
            .collect(),
        points,
        intervals: if plan.verdict == VerdictKind::Starved {
            report.services[0].intervals.clone()
        } else {
            Vec::new()
        },
    }
}

/// A busy node: the founding story, a scale-out that helped, a large Service, one with too few connections.
pub(crate) fn busy() -> ReportView {
    let plan = |name, verdict, backends, young, starved, rate| {
        service(&Plan {
            name,
            verdict,
            backends,
            young,
            starved,
            rate,
        })
    };
    ReportView {
        services: vec![
            plan(("shop", "web"), VerdictKind::Starved, 3, 1, true, 12),
            plan(("shop", "catalog"), VerdictKind::Even, 6, 3, false, 20),
            plan(("big", "sessions"), VerdictKind::Even, 100, 0, false, 3),
            plan(("default", "quiet"), VerdictKind::Insufficient, 2, 0, false, 0),
        ],
        ..fixture()
    }
}
