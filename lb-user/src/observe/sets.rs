//! One backend set under observation: who starves, who has drifted, since when, and why.
//!
//! A [`Watch`] joins the pure judges of `analysis` on one set's readings. Which counters tell selection is decided here: those
//! of the frontends' clients (which of them is [`super::audience`]'s business), or, where a userspace proxy hides the choice,
//! those of sockets that dial endpoints directly. Where many connections could not be told by endpoint nobody is judged: what
//! was not seen may be what is missed.

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, HashSet, VecDeque},
    net::SocketAddr,
};

use lb_common::backend::{BackendCounters, ServiceCounters, Tally};

use super::audience::{self, Audience};
use crate::analysis::{
    cause::{Cause, ReuseEvidence, Verdict},
    drift::{Drift, DriftJudgement, DriftStatus},
    imbalance::{self, Imbalance},
    reuse::ReuseCounts,
    starvation::{Clock, Detector, Judgement, MemberReading, Status},
    stickiness::chance_of_shares,
    window::{Reading, Window},
};

/// How far the windows of evenness look back, in nanoseconds.
pub const WINDOW_NS: u64 = 60_000_000_000;
/// The most readings a window keeps: one a second.
const WINDOW_READINGS: usize = 60;
/// The share of connections that must be told by endpoint for endpoints to be judged.
const MIN_ATTRIBUTED: f64 = 0.9;
/// An endpoint starves below this part of its share: so much must be certain to be missing.
const STARVED_SHARE: f64 = 0.25;
/// Connections from which on direct dials are believed to carry them, where hardly any was told by endpoint.
const MIN_DIRECT: u64 = 20;
/// How often the counts that causes rest on are put down, and how many of them are kept: the last two minutes.
const TRAIL_STEP_NS: u64 = 5_000_000_000;
const TRAIL: usize = 24;

/// A set without any change is read this often, so that windows and rates go on with the time.
const IDLE_NS: u64 = 10_000_000_000;
/// How long a set must be for further clients before it is judged by them too, in nanoseconds: endpoints of a node that come and
/// go change who shares them, and a judge that begins anew each time would never come to a judgement.
const WIDER_NS: u64 = 300_000_000_000;

/// One member of a set at a reading.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// The backend's id.
    pub backend: u32,
    /// Its weight; 0 is not eligible.
    pub weight: u32,
    /// Its counters.
    pub counters: BackendCounters,
}

/// Who chooses the endpoint, as far as that is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Traffic {
    /// Evenkeel.
    Balanced,
    /// Somebody's rules, seen in the packets; or nobody knows.
    Translated,
    /// A process that accepts connections and dials endpoints itself.
    Relayed,
}

/// Which counters tell how endpoints are selected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Basis {
    /// Those of the frontends' clients for whom the set is.
    Frontends(Audience),
    /// Those of sockets that dial endpoints directly, for somebody relays what the frontends get.
    Direct,
}

impl Default for Basis {
    fn default() -> Self {
        Self::Frontends(Audience::default())
    }
}

impl Basis {
    fn tally(self, counters: &BackendCounters) -> Tally {
        match self {
            Self::Frontends(audience) => audience.of(counters),
            Self::Direct => counters.direct,
        }
    }

    /// New connections of a backend.
    pub fn started(self, counters: &BackendCounters) -> u64 {
        self.tally(counters).connects
    }

    /// Open connections of a backend.
    pub fn open(self, counters: &BackendCounters) -> u64 {
        audience::open(&self.tally(counters))
    }

    /// Whether other sets' connections are among them, so that nobody can be judged.
    pub const fn is_mixed(self) -> bool {
        matches!(self, Self::Frontends(Audience { mixed: true, .. }))
    }
}

/// Which connections an alarm is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// New ones.
    New,
    /// Open ones.
    Open,
}

impl Kind {
    /// The word in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::New => "new",
            Self::Open => "open",
        }
    }
}

/// A starved endpoint, with the numbers of the judgement that holds.
#[derive(Clone, Debug, PartialEq)]
pub struct Alarm {
    /// The backend's id.
    pub backend: u32,
    /// Its address, kept for the time when nobody knows the id any more; told by whoever knows it.
    pub endpoint: Option<SocketAddr>,
    /// Which view found it.
    pub kind: Kind,
    /// When it was raised, nanoseconds of the monotonic clock.
    pub raised_ns: u64,
    /// Since when the endpoint is starved.
    pub since_ns: u64,
    /// Connections that it should have (got).
    pub expected: f64,
    /// Connections that it has (got).
    pub seen: u64,
    /// How often chance alone gives so few.
    pub probability: f64,
    /// The window's length, in seconds.
    pub window_seconds: f64,
    /// When the endpoint became usable, where that was seen.
    pub born_ns: Option<u64>,
    /// Whether the window began with its birth.
    pub since_birth: bool,
    /// Why, as far as it is known; told by whoever has the evidence.
    pub verdict: Verdict,
}

/// What a reading changed.
#[derive(Clone, Debug, PartialEq)]
pub struct AlarmChange {
    /// The alarm, as it was when it ended if it is over.
    pub alarm: Alarm,
    /// Whether it begins or ends.
    pub raised: bool,
}

/// Counts at one moment, for evidence over a recent time.
#[derive(Clone, Debug)]
struct Trace {
    at_ns: u64,
    reuse: ReuseEvidence,
    totals: BTreeMap<u32, u64>,
}

/// The evidence that the counts themselves give.
#[derive(Clone, Debug, Default)]
pub struct Recent {
    /// Tuple reuse of the Service over the last minutes.
    pub reuse: ReuseEvidence,
    /// Σ p² over the shares that the endpoints had over the same time.
    pub observed_chance: Option<f64>,
    /// Σ w² over the weights.
    pub fair_chance: Option<f64>,
}

/// One set under observation.
#[derive(Debug)]
pub struct Watch {
    basis: Basis,
    /// Since when the set is for more clients than those it is judged by.
    wider_since_ns: Option<u64>,
    detector: Detector,
    drift: Drift,
    window: Window,
    /// When each member came; 0 where it was there at the first reading.
    births: BTreeMap<u32, u64>,
    /// What each member's counter showed when it came.
    baseline: BTreeMap<u32, u64>,
    /// Members that were there before: when one comes again, its counter has a past.
    seen: HashSet<u32>,
    members: Vec<MemberReading>,
    /// (time, connections, of them attributed) of the Service, over the window.
    told: VecDeque<(u64, u64, u64)>,
    alarms: BTreeMap<u32, Alarm>,
    trail: VecDeque<Trace>,
    first_ns: u64,
    last_ns: u64,
}

impl Default for Watch {
    fn default() -> Self {
        Self {
            basis: Basis::default(),
            wider_since_ns: None,
            detector: Detector::new(),
            drift: Drift::new(),
            window: Window::new(WINDOW_NS, WINDOW_READINGS),
            births: BTreeMap::new(),
            baseline: BTreeMap::new(),
            seen: HashSet::new(),
            members: Vec::new(),
            told: VecDeque::new(),
            alarms: BTreeMap::new(),
            trail: VecDeque::new(),
            first_ns: 0,
            last_ns: 0,
        }
    }
}

impl Watch {
    /// Takes a reading of all members, of the Service's counters and of its reuse; returns the alarms that begin or end.
    ///
    /// `traffic` says who tells the endpoint: in balance mode every connection's is known, and `service.attributed` is not looked at.
    /// `audience` says whose connections the set is for.
    pub fn read(
        &mut self,
        now_ns: u64,
        traffic: Traffic,
        audience: Audience,
        service: &ServiceCounters,
        samples: &[Sample],
        reuse: &ReuseCounts,
    ) -> Vec<AlarmChange> {
        let attributed = match traffic {
            Traffic::Balanced => service.connects,
            Traffic::Translated | Traffic::Relayed => service.attributed,
        };
        let mut ended = self.settle_basis(now_ns, traffic, audience, service.connects, attributed);
        let first = self.first_ns == 0;
        if first {
            self.first_ns = now_ns;
        }
        self.last_ns = now_ns;
        let there: HashSet<u32> = samples.iter().map(|sample| sample.backend).collect();
        let eligible: HashSet<u32> = samples.iter().filter(|s| s.weight > 0).map(|s| s.backend).collect();
        self.births.retain(|id, _| eligible.contains(id));
        self.baseline.retain(|id, _| there.contains(id));
        self.members.clear();
        for sample in samples {
            let started = self.basis.started(&sample.counters);
            // A counter that is there at the first reading may have grown before this agent; one that comes later is new.
            let past = first || self.seen.contains(&sample.backend);
            let baseline = self
                .baseline
                .entry(sample.backend)
                .or_insert(if past { started } else { 0 });
            self.seen.insert(sample.backend);
            if started < *baseline {
                *baseline = started;
            }
            if sample.weight > 0 {
                self.births
                    .entry(sample.backend)
                    .or_insert(if first { 0 } else { now_ns });
            }
            self.members.push(MemberReading {
                backend: sample.backend,
                weight: sample.weight,
                usable_since_ns: self.births.get(&sample.backend).copied().unwrap_or(0),
                started,
                open: Some(self.basis.open(&sample.counters)),
            });
        }
        let readings: Vec<Reading> = self.readings();
        self.window.read(now_ns, &readings);
        self.note_told(now_ns, service.connects, attributed);
        self.note_trail(now_ns, reuse);
        if self.is_told() {
            self.detector.read(now_ns, &self.members);
            self.drift.read(now_ns, &self.members);
        } else {
            // Whoever seems to starve may be the one whose connections are not seen. The judges begin anew when they are.
            self.detector = Detector::new();
            self.drift = Drift::new();
        }
        ended.extend(self.settle_alarms(now_ns));
        ended
    }

    /// Whether a reading would say nothing new: nothing has changed since the last one, which is not long ago.
    pub fn is_idle(&self, now_ns: u64, audience: Audience, samples: &[Sample]) -> bool {
        let same = |(member, sample): (&MemberReading, &Sample)| {
            let counters = &sample.counters;
            (member.backend, member.weight) == (sample.backend, sample.weight)
                && (member.started, member.open) == (self.basis.started(counters), Some(self.basis.open(counters)))
        };
        self.first_ns > 0
            && now_ns < self.last_ns + IDLE_NS
            && match self.basis {
                Basis::Direct => true,
                Basis::Frontends(judged) => {
                    judged == audience || (self.wider_since_ns.is_some() && judged.is_part_of(audience))
                }
            }
            && self.members.len() == samples.len()
            && self.members.iter().zip(samples).all(same)
    }

    /// Changes the basis when a userspace proxy comes or goes, or when the set is for other clients than before; everything
    /// then begins anew, and the alarms end. Where it is for further clients too, those so far are as good a basis as before,
    /// and stay it for [`WIDER_NS`].
    ///
    /// That there is a proxy must be known: probes and clients of a headless Service dial endpoints directly as well.
    fn settle_basis(
        &mut self,
        now_ns: u64,
        traffic: Traffic,
        audience: Audience,
        connects: u64,
        attributed: u64,
    ) -> Vec<AlarmChange> {
        let basis = if traffic == Traffic::Relayed && connects >= MIN_DIRECT && attributed * 10 < connects {
            Basis::Direct
        } else if traffic != Traffic::Relayed || attributed * 10 >= connects || self.basis != Basis::Direct {
            Basis::Frontends(audience)
        } else {
            self.basis
        };
        if basis == self.basis {
            self.wider_since_ns = None;
            return Vec::new();
        }
        if self.first_ns > 0
            && let (Basis::Frontends(judged), Basis::Frontends(wider)) = (self.basis, basis)
            && judged.is_part_of(wider)
            && now_ns < self.wider_since_ns.get_or_insert(now_ns).saturating_add(WIDER_NS)
        {
            return Vec::new();
        }
        let fresh = Self {
            basis,
            ..Self::default()
        };
        std::mem::replace(self, fresh).end()
    }

    /// The alarms that end because nobody watches any more.
    pub fn end(self) -> Vec<AlarmChange> {
        self.alarms
            .into_values()
            .map(|alarm| AlarmChange { alarm, raised: false })
            .collect()
    }

    fn readings(&self) -> Vec<Reading> {
        self.members
            .iter()
            .map(|member| Reading {
                backend: member.backend,
                weight: member.weight,
                total: member.started,
            })
            .collect()
    }

    fn note_told(&mut self, now_ns: u64, connects: u64, attributed: u64) {
        self.told.push_back((now_ns, connects, attributed));
        while self.told.len() > WINDOW_READINGS
            || (self.told.front()).is_some_and(|(at_ns, ..)| at_ns + WINDOW_NS < now_ns)
        {
            self.told.pop_front();
        }
    }

    /// The share of the window's connections whose endpoint is known; none without connections, and where direct dials count.
    pub fn told_share(&self) -> Option<f64> {
        if self.basis == Basis::Direct {
            return None;
        }
        let (first, last) = (self.told.front()?, self.told.back()?);
        let connects = last.1.saturating_sub(first.1);
        // A connection that was dialled at the moment of the reading is not told yet.
        let told = last.2.saturating_sub(first.2) + 1;
        (connects > 0).then(|| (told as f64 / connects as f64).min(1.0))
    }

    fn note_trail(&mut self, now_ns: u64, reuse: &ReuseCounts) {
        if (self.trail.back()).is_some_and(|last| now_ns < last.at_ns + TRAIL_STEP_NS) {
            return;
        }
        self.trail.push_back(Trace {
            at_ns: now_ns,
            reuse: reuse_of(reuse),
            totals: self
                .members
                .iter()
                .map(|member| (member.backend, member.started))
                .collect(),
        });
        if self.trail.len() > TRAIL {
            self.trail.pop_front();
        }
    }

    /// The evidence of the counts over the last two minutes.
    pub fn recent(&self, reuse: &ReuseCounts) -> Recent {
        let now = reuse_of(reuse);
        let weights = self.members.iter().map(|member| u64::from(member.weight));
        let fair_chance = chance_of_shares(weights);
        let Some(oldest) = self.trail.front() else {
            return Recent {
                reuse: now,
                observed_chance: None,
                fair_chance,
            };
        };
        let shares = self.members.iter().map(|member| {
            let before = oldest.totals.get(&member.backend).copied().unwrap_or(0);
            member.started.saturating_sub(before)
        });
        Recent {
            reuse: ReuseEvidence {
                connections: now.connections.saturating_sub(oldest.reuse.connections),
                reuses: now.reuses.saturating_sub(oldest.reuse.reuses),
                same: now.same.saturating_sub(oldest.reuse.same),
                moved: now.moved.saturating_sub(oldest.reuse.moved),
            },
            observed_chance: chance_of_shares(shares),
            fair_chance,
        }
    }

    fn settle_alarms(&mut self, now_ns: u64) -> Vec<AlarmChange> {
        let mut found: BTreeMap<u32, Alarm> = BTreeMap::new();
        for judgement in self.drift.judgements() {
            if judgement.status == DriftStatus::LongLived {
                found.insert(judgement.backend, self.of_open(&judgement, now_ns));
            }
        }
        // All that was not told may have been the one endpoint's: it starves for certain only where that is too little.
        let eligible = self.members.iter().filter(|member| member.weight > 0).count();
        let told = self.told_share().unwrap_or(1.0);
        let certain = (1.0 - told) / told * (eligible as f64) < STARVED_SHARE;
        for judgement in self.detector.judgements() {
            let known = self.alarms.contains_key(&judgement.backend);
            if judgement.status == Status::Starved && (certain || known) {
                found.insert(judgement.backend, self.of_new(&judgement, now_ns));
            }
        }
        let mut changes = Vec::new();
        for (_, alarm) in self.alarms.extract_if(.., |id, _| !found.contains_key(id)) {
            changes.push(AlarmChange { alarm, raised: false });
        }
        for (id, mut alarm) in found {
            match self.alarms.get(&id) {
                Some(known) => {
                    alarm.raised_ns = known.raised_ns;
                    alarm.verdict = known.verdict.clone();
                    alarm.endpoint = known.endpoint;
                }
                None => changes.push(AlarmChange {
                    alarm: alarm.clone(),
                    raised: true,
                }),
            }
            self.alarms.insert(id, alarm);
        }
        changes
    }

    fn of_new(&self, judgement: &Judgement, now_ns: u64) -> Alarm {
        Alarm {
            backend: judgement.backend,
            endpoint: None,
            kind: Kind::New,
            raised_ns: now_ns,
            since_ns: judgement.starved_since_ns.unwrap_or(judgement.window_start_ns),
            expected: judgement.expected,
            seen: judgement.observed,
            probability: judgement.probability,
            window_seconds: seconds(judgement.window_start_ns, judgement.window_end_ns),
            born_ns: self.born_ns(judgement.backend),
            since_birth: judgement.clock == Clock::Birth,
            verdict: unknown(),
        }
    }

    fn of_open(&self, judgement: &DriftJudgement, now_ns: u64) -> Alarm {
        Alarm {
            backend: judgement.backend,
            endpoint: None,
            kind: Kind::Open,
            raised_ns: now_ns,
            since_ns: judgement.since_ns.unwrap_or(now_ns),
            expected: judgement.fair,
            seen: judgement.open,
            probability: judgement.probability,
            window_seconds: judgement.new_seconds,
            born_ns: self.born_ns(judgement.backend),
            since_birth: false,
            verdict: unknown(),
        }
    }

    /// Says what address an alarm is about.
    pub fn locate(&mut self, backend: u32, endpoint: Option<SocketAddr>) {
        if let Some(alarm) = self.alarms.get_mut(&backend) {
            alarm.endpoint = endpoint;
        }
    }

    /// Whether enough of the window's connections could be told by endpoint, and by set, for endpoints to be compared.
    pub fn is_told(&self) -> bool {
        !self.basis.is_mixed() && self.told_share().is_none_or(|share| share >= MIN_ATTRIBUTED)
    }

    /// Evenness of the window's new connections; insufficient too where too few could be told by endpoint.
    pub fn imbalance(&self) -> Imbalance {
        let found = self.window.imbalance();
        if !self.is_told() {
            return Imbalance {
                insufficient: true,
                alarm: false,
                ..found
            };
        }
        found
    }

    /// Says why an endpoint starves.
    pub fn explain(&mut self, backend: u32, verdict: Verdict) {
        if let Some(alarm) = self.alarms.get_mut(&backend) {
            alarm.verdict = verdict;
        }
    }

    /// The alarms that hold, by backend.
    pub fn alarms(&self) -> impl Iterator<Item = &Alarm> {
        self.alarms.values()
    }

    /// The verdict on a member's new connections.
    pub fn judgement(&self, backend: u32) -> Option<Judgement> {
        self.detector.judgement(backend)
    }

    /// The verdict on a member's open connections.
    pub fn drift(&self, backend: u32) -> Option<DriftJudgement> {
        self.drift.judgement(backend)
    }

    /// When a member became usable, nanoseconds; none if it was there at the first reading.
    pub fn born_ns(&self, backend: u32) -> Option<u64> {
        self.births.get(&backend).copied().filter(|born| *born > 0)
    }

    /// The window of new connections.
    pub fn window(&self) -> &Window {
        &self.window
    }

    /// What the counters are based on.
    pub fn basis(&self) -> Basis {
        self.basis
    }

    /// New connections of a member since the start (or since it came), and those that are open.
    pub fn counts(&self, backend: u32) -> (u64, u64) {
        let member = self.members.iter().find(|member| member.backend == backend);
        let baseline = self.baseline.get(&backend).copied().unwrap_or(0);
        member.map_or((0, 0), |m| (m.started.saturating_sub(baseline), m.open.unwrap_or(0)))
    }

    /// Evenness of the new connections since the start, over the members that are eligible now and were so at the first
    /// reading; one that came later would be compared with a time in which it was not there.
    pub fn since_start(&self) -> Imbalance {
        imbalance::by_weight(self.members.iter().filter(|m| m.usable_since_ns == 0).map(|member| {
            let (started, _) = self.counts(member.backend);
            (member.weight, started)
        }))
    }

    /// Evenness of the open connections; insufficient too where other sets' connections are among them.
    pub fn open(&self) -> Imbalance {
        let found = imbalance::by_weight(
            self.members
                .iter()
                .map(|member| (member.weight, member.open.unwrap_or(0))),
        );
        if self.basis.is_mixed() {
            return Imbalance {
                insufficient: true,
                alarm: false,
                ..found
            };
        }
        found
    }

    /// The connections that are open, by backend.
    pub fn open_counts(&self) -> BTreeMap<u32, u64> {
        self.members
            .iter()
            .map(|member| (member.backend, member.open.unwrap_or(0)))
            .collect()
    }

    /// The last reading as the window and the history take it.
    pub fn last_reading(&self) -> Vec<Reading> {
        self.readings()
    }

    /// Whether any member has had a connection.
    pub fn has_traffic(&self) -> bool {
        self.members.iter().any(|member| {
            let (started, open) = self.counts(member.backend);
            started + open > 0
        })
    }
}

fn unknown() -> Verdict {
    Verdict {
        cause: Cause::Unknown,
        because: Vec::new(),
    }
}

fn reuse_of(counts: &ReuseCounts) -> ReuseEvidence {
    ReuseEvidence {
        connections: counts.connections,
        reuses: counts.total(),
        same: counts.same_backend,
        moved: counts.moved,
    }
}

fn seconds(from_ns: u64, to_ns: u64) -> f64 {
    to_ns.saturating_sub(from_ns) as f64 / 1e9
}
