//! The sentences of a diagnosis: what was measured, on how many samples, what chance would give, and what to do.
//!
//! Pure: plain numbers come in, sentences go out; who measured them is the agent's business. Two rules hold for every
//! sentence: it says no more than its numbers do (a cause that was inferred is called likely, one that was read off the
//! proxy is not), and a small sample is called one.

mod advice;
mod cause;
pub mod numbers;
#[cfg(test)]
mod tests;

use std::net::{IpAddr, SocketAddr};

pub use advice::advice;
pub use cause::because;
use cause::{certainty, title};
use numbers::{chance, count, counted, expected, measure, percent, percent_of, seconds};

use super::{ImbalanceView, VerdictKind};
use crate::analysis::cause::{Cause, Fact};

/// What a diagnosis of one backend set rests on.
#[derive(Clone, Debug, PartialEq)]
pub struct Findings {
    /// The Service as people write it: `shop/web`.
    pub service: String,
    /// The verdict.
    pub verdict: VerdictKind,
    /// For how long the agent has been counting.
    pub watched_seconds: f64,
    /// Connections to the Service in that time.
    pub connects: u64,
    /// Of them those whose endpoint was seen.
    pub attributed: u64,
    /// Evenness of the new connections of the recent window.
    pub new: Option<Evenness>,
    /// Evenness of the connections that are open now.
    pub open: Option<Evenness>,
    /// The starved endpoints.
    pub starved: Vec<Starved>,
    /// What is known beside the facts of the causes.
    pub known: Known,
    /// Whether other sets' connections are among those counted, so that nobody is judged.
    pub mixed: bool,
    /// Whether Evenkeel itself balances this Service; otherwise somebody else translates.
    pub balanced_here: bool,
}

/// How even a sample is.
#[derive(Clone, Debug, PartialEq)]
pub struct Evenness {
    /// Connections in the sample.
    pub n: u64,
    /// Eligible endpoints.
    pub endpoints: u64,
    /// The time in which the connections began; none for those that are open now.
    pub window_seconds: Option<f64>,
    /// X²/(k−1): 1 is chance.
    pub dispersion: Option<f64>,
    /// How often chance alone is at least this uneven.
    pub probability: f64,
    /// Too few to say anything.
    pub insufficient: bool,
    /// Beyond chance, and by enough to matter.
    pub alarm: bool,
    /// The endpoint that is farthest from its fair share.
    pub farthest: Option<Farthest>,
}

/// The endpoint that is farthest from its fair share.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Farthest {
    /// Which one.
    pub endpoint: SocketAddr,
    /// Its connections.
    pub seen: u64,
    /// Those that its weight entitles it to.
    pub expected: f64,
}

impl Evenness {
    /// Takes the numbers of a view; `window_seconds` is none for connections that are open now.
    pub fn new(found: &ImbalanceView, window_seconds: Option<f64>, farthest: Option<Farthest>) -> Self {
        Self {
            n: found.n,
            endpoints: found.backends,
            window_seconds,
            dispersion: found.dispersion,
            probability: found.p,
            insufficient: found.insufficient,
            alarm: found.alarm,
            farthest,
        }
    }
}

impl Farthest {
    /// Picks among (endpoint, seen, expected) the one that adds most to X²; none where nothing was expected.
    pub fn among(shares: impl IntoIterator<Item = (SocketAddr, u64, f64)>) -> Option<Self> {
        let part = |found: &Self| (found.seen as f64 - found.expected).powi(2) / found.expected;
        shares
            .into_iter()
            .filter(|&(_, _, expected)| expected > 0.0)
            .map(|(endpoint, seen, expected)| Self {
                endpoint,
                seen,
                expected,
            })
            .max_by(|a, b| part(a).total_cmp(&part(b)))
    }
}

/// Which connections a finding is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Connections {
    /// New ones: how endpoints are selected.
    New,
    /// Open ones: how load has drifted.
    Open,
}

/// One starved endpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct Starved {
    /// Which one.
    pub endpoint: SocketAddr,
    /// By which connections it was found.
    pub connections: Connections,
    /// Those that it should have got, by weight.
    pub expected: f64,
    /// Those that it got.
    pub seen: u64,
    /// How often chance alone gives so few or fewer.
    pub probability: f64,
    /// The length of the window that was judged.
    pub window_seconds: f64,
    /// Whether that window began with the endpoint's birth.
    pub since_birth: bool,
    /// For how long the alarm has stood.
    pub standing_seconds: f64,
    /// Why.
    pub cause: Cause,
    /// The facts that bear on it, the deciding ones first.
    pub facts: Vec<Fact>,
    /// For how long it has been usable, where its birth was seen.
    pub usable_seconds: Option<f64>,
    /// The zones of its topology hints, where it has any.
    pub zones: Option<Zones>,
}

/// Where an endpoint is meant for, and where this node is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Zones {
    /// The zones that the endpoint's hints name.
    pub hinted: Vec<String>,
    /// This node's zone.
    pub own: Option<String>,
}

/// What is known beside the facts of a cause; what was not measured is none, and no sentence is made of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Known {
    /// Whose tables were read, such as `kube-proxy (ipvs)`.
    pub proxy: Option<String>,
    /// The Service's affinity timeout.
    pub affinity_seconds: Option<u32>,
    /// The longest interval that counts as a reuse.
    pub reuse_horizon_seconds: Option<f64>,
    /// Distinct clients seen.
    pub clients: Option<u64>,
    /// Eligible endpoints.
    pub endpoints: u64,
    /// The client that uses most of its port range.
    pub ports: Option<Ports>,
}

/// How a client uses its port range towards one destination.
#[derive(Clone, Debug, PartialEq)]
pub struct Ports {
    /// The client.
    pub client: IpAddr,
    /// What it dials.
    pub destination: String,
    /// Ports in use or just closed.
    pub used: u64,
    /// Ports of the range.
    pub range: u64,
}

/// Starved endpoints that get a sentence each; further ones are counted.
const NAMED: usize = 3;

/// The verdict in sentences, the most important first.
pub fn sentences(findings: &Findings) -> Vec<String> {
    let mut out = Vec::new();
    match findings.verdict {
        VerdictKind::NoTraffic => {
            out.push(format!(
                "No connection to this Service was seen from this node in {}.",
                seconds(findings.watched_seconds)
            ));
            return out;
        }
        VerdictKind::Starved => starvation(findings, &mut out),
        VerdictKind::Uneven | VerdictKind::Even | VerdictKind::Insufficient => {}
    }
    if findings.connects > 0 && findings.attributed == 0 {
        out.push(format!(
            "None of the {} in {} could be told by endpoint, so nothing is known of their evenness.",
            counted(findings.connects, "connection"),
            seconds(findings.watched_seconds)
        ));
        return out;
    }
    if findings.mixed {
        out.push(
            "Clients under different traffic policies share these endpoints here, and their connections cannot be told apart: \
             endpoints are not compared."
                .to_owned(),
        );
        return out;
    }
    match (&findings.new, &findings.open) {
        (Some(new), Some(open)) if findings.verdict == VerdictKind::Uneven && open.alarm && !new.alarm => {
            out.extend([evenness(open, Connections::Open), evenness(new, Connections::New)]);
        }
        (new, open) => {
            out.extend(new.as_ref().map(|new| evenness(new, Connections::New)));
            out.extend(open.as_ref().map(|open| evenness(open, Connections::Open)));
        }
    }
    if out.is_empty() {
        out.push(format!(
            "{} in {}, none of them recent: there is nothing to judge.",
            counted(findings.connects, "connection"),
            seconds(findings.watched_seconds)
        ));
    }
    let unknown = findings.connects.saturating_sub(findings.attributed);
    if unknown > 0 {
        out.push(format!(
            "{} of {} ({}) could not be told by endpoint and {} in none of the shares.",
            count(unknown),
            counted(findings.connects, "connection"),
            percent_of(unknown, findings.connects),
            if unknown == 1 { "is" } else { "are" }
        ));
    }
    out
}

/// The starved endpoints, then each distinct cause with the first fact that it rests on.
fn starvation(findings: &Findings, out: &mut Vec<String>) {
    let all = &findings.starved;
    out.extend(all.iter().take(NAMED).map(starved));
    if let Some(more) = all.len().checked_sub(NAMED).filter(|&more| more > 0) {
        let verb = if more == 1 { "is" } else { "are" };
        out.push(format!(
            "{} {verb} starved too.",
            counted(more as u64, "further endpoint")
        ));
    }
    let mut said: Vec<Cause> = Vec::new();
    for found in all {
        if said.contains(&found.cause) {
            continue;
        }
        said.push(found.cause);
        let fact = because(found, &findings.known).into_iter().next().unwrap_or_default();
        let line = format!("{}: {}. {fact}", certainty(found.cause), title(found.cause));
        out.push(line.trim_end().to_owned());
    }
}

fn starved(found: &Starved) -> String {
    let Starved { endpoint, seen, .. } = found;
    let fair = expected(found.expected);
    let alone = chance(found.probability);
    let window = seconds(found.window_seconds);
    let what = match (found.connections, found.since_birth) {
        (Connections::New, true) => format!(
            "in its first {window} it got {} where {fair} would be fair",
            counted(*seen, "new connection")
        ),
        (Connections::New, false) => {
            format!(
                "in {window} it got {} where {fair} would be fair",
                counted(*seen, "new connection")
            )
        }
        (Connections::Open, _) => {
            format!(
                "it holds {} where {fair} would be fair",
                counted(*seen, "open connection")
            )
        }
    };
    let standing = if found.standing_seconds >= 1.0 {
        format!("; found {} ago", seconds(found.standing_seconds))
    } else {
        String::new()
    };
    format!("{endpoint} is starved: {what} (by chance alone: {alone}{standing}).")
}

/// One view's evenness in a sentence.
fn evenness(found: &Evenness, connections: Connections) -> String {
    let (name, verb) = match connections {
        Connections::New => ("New connections", "got"),
        Connections::Open => ("Open connections", "holds"),
    };
    let mut sample = format!("{} over {}", count(found.n), counted(found.endpoints, "endpoint"));
    if let Some(window) = found.window_seconds {
        sample = format!("{sample} in {}", seconds(window));
    }
    if found.endpoints < 2 {
        return format!(
            "{name} have one endpoint to go to ({}), so there is nothing to compare.",
            count(found.n)
        );
    }
    if found.insufficient {
        return format!(
            "{name} are too few to judge: {sample}. With fewer than 5 expected on an endpoint, differences are noise."
        );
    }
    let measured = found.dispersion.map_or_else(
        || sample.clone(),
        |dispersion| format!("{sample}, dispersion {} where chance gives 1", measure(dispersion)),
    );
    if found.alarm {
        let farthest = found.farthest.map_or_else(String::new, |farthest| {
            format!(
                "{} {verb} {} where {} would be fair ({} of it); ",
                farthest.endpoint,
                count(farthest.seen),
                expected(farthest.expected),
                percent(if farthest.expected > 0.0 {
                    farthest.seen as f64 / farthest.expected
                } else {
                    0.0
                })
            )
        });
        return format!(
            "{name} are uneven: {farthest}{measured} (by chance alone: {}).",
            chance(found.probability)
        );
    }
    if found.probability < 1e-6 {
        return format!(
            "{name} differ more than chance alone would make them (by chance: {}), but no share by over 25 %, too little \
             to matter: {measured}.",
            chance(found.probability)
        );
    }
    format!("{name} are within what chance gives: {measured}.")
}
