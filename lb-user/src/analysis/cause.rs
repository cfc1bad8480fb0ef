//! Why an endpoint gets too little: from the facts at hand to one cause, with the facts that decided.
//!
//! Hard facts come first, for they need no statistics: an endpoint that topology hints exclude, that the proxy does not have, or
//! that has no weight there, gets nothing whatever the clients do. Then come what the clients do (they keep their
//! connections, or are kept at their backend), and only then port reuse: in each of the former, too, a reused tuple can meet the
//! same backend again, so that pinned reuse is evidence only where neither explains it.
//!
//! # Port reuse: two chances
//!
//! "A reused tuple met the same backend more often than chance": which chance? If reuse starves an endpoint, its share is
//! near zero, and so Σ p² over the *observed* shares is larger than Σ w² over a *fair* choice by weight: 1/2 against 1/3 where
//! one of three starves. Against the fair chance alone, anything that starves one of three would look like pinning, as the other
//! two meet themselves in half of the cases. So reuse must be pinned beyond the larger of the two. But where one endpoint
//! is left that gets everything (one old, one new), the observed chance is 1 and can never be exceeded. There the
//! measurement cannot decide; the proxy's own setting can: IPVS with `conn_reuse_mode` 0 is known to pin, and with that fact
//! beside it, "beyond the fair chance" is enough. Both chances are reported.
//!
//! *Beyond chance* is exact enough for any count: P(at least `same` of `n`) ≤ exp(−n · KL(same/n ‖ chance)) (Chernoff), held against
//! [`PINNED_P`]. *Frequent enough*: with q the part of all connections that were pinned beyond chance, the starved endpoint would
//! still get 1 − q of its share from the others. Starved means less than a quarter, so q must exceed three quarters; a smaller
//! q cannot be why.

#[cfg(test)]
mod tests;

use super::drift::{DriftJudgement, DriftStatus};

/// The bound on the probability that chance alone repeats backends so often.
pub const PINNED_P: f64 = 1e-6;
/// Fewer comparable reuses, or pairs of one client's connections, say nothing.
pub const MIN_COMPARED: u64 = 20;
/// The part of all connections that must be pinned before reuse explains a starved endpoint.
pub const MIN_PINNED_SHARE: f64 = 0.75;
/// The share of pairs that meet the same backend from which clients count as kept there.
pub const STICKY_SHARE: f64 = 0.95;

/// Why an endpoint gets too little.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Cause {
    /// The proxy does not have the endpoint.
    NotProgrammed,
    /// Reused tuples are kept at the backend of their previous use.
    PortReuse,
    /// Clients keep their old connections and make hardly any new ones.
    LongLived,
    /// Clients are kept at their backend.
    Affinity,
    /// The proxy gives it no weight.
    ZeroWeight,
    /// Topology hints give this node's traffic to others.
    Topology,
    /// None of these, or too little is known.
    Unknown,
}

impl Cause {
    /// All causes, in the order of their documentation.
    pub const ALL: [Self; 7] = [
        Self::NotProgrammed,
        Self::PortReuse,
        Self::LongLived,
        Self::Affinity,
        Self::ZeroWeight,
        Self::Topology,
        Self::Unknown,
    ];

    /// The name in metrics, JSON and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::NotProgrammed => "not_programmed",
            Self::PortReuse => "port_reuse",
            Self::LongLived => "long_lived",
            Self::Affinity => "affinity",
            Self::ZeroWeight => "zero_weight",
            Self::Topology => "topology",
            Self::Unknown => "unknown",
        }
    }
}

/// Reuse of tuples on a Service, over a recent time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReuseEvidence {
    /// All connections.
    pub connections: u64,
    /// Those that reused a tuple, whatever came of it.
    pub reuses: u64,
    /// Reuses that met the same backend.
    pub same: u64,
    /// Reuses that met another one though the previous one was usable.
    pub moved: u64,
}

/// Consecutive connections of single clients, over a recent time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StickinessEvidence {
    /// Pairs from different source ports.
    pub pairs: u64,
    /// Those that met the same backend.
    pub same: u64,
}

/// What is known of a starved endpoint and its Service; the default is that nothing is.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Evidence {
    /// Whether the proxy on this node has the endpoint.
    pub in_proxy: Option<bool>,
    /// The weight that the proxy gives it.
    pub proxy_weight: Option<u32>,
    /// Whether topology hints exclude it for clients of this node.
    pub excluded_by_topology: bool,
    /// Whether the Service asks for session affinity.
    pub affinity_configured: bool,
    /// How clients' consecutive connections met their backends.
    pub stickiness: Option<StickinessEvidence>,
    /// How reused tuples met theirs.
    pub reuse: Option<ReuseEvidence>,
    /// The chance to meet the same backend at a fair choice by weight among the eligible endpoints (Σ w²).
    pub fair_chance: Option<f64>,
    /// The chance over the shares that the backends really had, over the same time as the counts (Σ p²).
    pub observed_chance: Option<f64>,
    /// Whether the proxy is IPVS.
    pub ipvs: Option<bool>,
    /// `net.ipv4.vs.conn_reuse_mode`, where IPVS is loaded.
    pub conn_reuse_mode: Option<u8>,
    /// Whether the proxy chooses by a hash of the tuple: then a reused one meets the same backend, and nobody starves by that.
    pub hashes_tuples: bool,
    /// The view of open connections.
    pub drift: Option<DriftJudgement>,
}

/// One fact that bears on the cause.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fact {
    /// Topology hints exclude the endpoint for clients of this node.
    ExcludedByTopology,
    /// The proxy does not have the endpoint.
    NotInProxy,
    /// The proxy has the endpoint.
    InProxy,
    /// The proxy's weight for it.
    ProxyWeight {
        /// The weight.
        weight: u32,
    },
    /// It has far fewer open connections than is fair, and at the present rate will for long.
    OpenFarBelowFair {
        /// Open connections.
        open: u64,
        /// A fair share of those that are open.
        fair: f64,
        /// New connections a second, at most.
        rate_at_most: f64,
        /// Seconds to half its share, at least.
        seconds_to_half: f64,
    },
    /// The Service asks for session affinity.
    AffinityConfigured,
    /// How often consecutive connections of one client, from different ports, met the same backend.
    Stickiness {
        /// Those that did.
        same: u64,
        /// All of them.
        pairs: u64,
        /// Chance at a fair choice.
        fair_chance: f64,
        /// Chance over the observed shares.
        observed_chance: f64,
        /// Whether so many clients are kept at their backend, beyond chance.
        sticky: bool,
    },
    /// How often a reused tuple met the same backend.
    Reuse {
        /// Those that did.
        same: u64,
        /// Those that could have.
        compared: u64,
        /// Chance at a fair choice.
        fair_chance: f64,
        /// Chance over the observed shares.
        observed_chance: f64,
        /// An upper bound of the probability that the larger chance gives so many.
        probability: f64,
    },
    /// How much of the traffic reuse can take away from an endpoint.
    ReuseFrequency {
        /// Connections that reused a tuple.
        reuses: u64,
        /// All connections.
        connections: u64,
        /// The part of all connections that was pinned beyond chance.
        pinned: f64,
        /// Whether that is enough to starve an endpoint.
        enough: bool,
    },
    /// IPVS keeps reused tuples at their backend (`conn_reuse_mode` 0).
    IpvsPinsReuse,
    /// IPVS chooses anew on reuse, says this network namespace's setting.
    IpvsReschedules {
        /// `conn_reuse_mode`.
        mode: u8,
    },
    /// The proxy chooses by a hash of the tuple.
    HashesTuples,
}

/// A cause with the facts that bear on it, the deciding ones first.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// The cause.
    pub cause: Cause,
    /// Why; for [`Cause::Unknown`] what was looked at.
    pub because: Vec<Fact>,
}

/// Names the cause that the evidence supports.
pub fn cause(evidence: &Evidence) -> Verdict {
    let verdict = |cause, because| Verdict { cause, because };
    // An endpoint that the proxy has in spite of the hints is not kept from traffic by them.
    if evidence.excluded_by_topology && evidence.in_proxy != Some(true) {
        return verdict(Cause::Topology, vec![Fact::ExcludedByTopology]);
    }
    if evidence.in_proxy == Some(false) {
        return verdict(Cause::NotProgrammed, vec![Fact::NotInProxy]);
    }
    let mut seen = Vec::new();
    if evidence.in_proxy == Some(true) {
        seen.push(Fact::InProxy);
    }
    if let Some(weight) = evidence.proxy_weight {
        seen.push(Fact::ProxyWeight { weight });
        if weight == 0 {
            seen.reverse();
            return verdict(Cause::ZeroWeight, seen);
        }
    }
    if let Some(fact) = long_lived(evidence) {
        return verdict(Cause::LongLived, deciding(vec![fact], seen));
    }
    let (affinity, facts) = affinity(evidence);
    if affinity {
        return verdict(Cause::Affinity, deciding(facts, seen));
    }
    seen.extend(facts);
    let (reuse, facts) = port_reuse(evidence);
    if reuse {
        return verdict(Cause::PortReuse, deciding(facts, seen));
    }
    seen.extend(facts);
    verdict(Cause::Unknown, seen)
}

fn deciding(mut facts: Vec<Fact>, seen: Vec<Fact>) -> Vec<Fact> {
    facts.extend(seen);
    facts
}

fn long_lived(evidence: &Evidence) -> Option<Fact> {
    let drift = evidence.drift.filter(|drift| drift.status == DriftStatus::LongLived)?;
    Some(Fact::OpenFarBelowFair {
        open: drift.open,
        fair: drift.fair,
        rate_at_most: drift.rate_at_most,
        seconds_to_half: drift.seconds_to_half,
    })
}

/// Whether clients are kept at their backend, by the Service's wish or by the proxy's own.
fn affinity(evidence: &Evidence) -> (bool, Vec<Fact>) {
    let mut facts = Vec::new();
    if evidence.affinity_configured {
        facts.push(Fact::AffinityConfigured);
    }
    let (fair_chance, observed_chance) = evidence.chances();
    let measured = evidence
        .stickiness
        .filter(|stickiness| stickiness.pairs >= MIN_COMPARED);
    let Some(StickinessEvidence { pairs, same }) = measured else {
        // Too little was seen to contradict what was asked for.
        return (evidence.affinity_configured, facts);
    };
    let high = same as f64 >= STICKY_SHARE * pairs as f64;
    let beyond = chance_of_so_many(same, pairs, fair_chance.max(observed_chance)) < PINNED_P;
    // A lone client that is kept makes the observed chance 1: then the wish beside it decides.
    let sticky = high && (beyond || evidence.affinity_configured);
    facts.push(Fact::Stickiness {
        same,
        pairs,
        fair_chance,
        observed_chance,
        sticky,
    });
    (sticky, facts)
}

/// Whether reuse is pinned to backends, and frequent enough to starve an endpoint.
fn port_reuse(evidence: &Evidence) -> (bool, Vec<Fact>) {
    let mut facts = Vec::new();
    let pins = evidence.ipvs == Some(true) && evidence.conn_reuse_mode == Some(0);
    if let (Some(true), Some(mode)) = (evidence.ipvs, evidence.conn_reuse_mode) {
        facts.push(if mode == 0 {
            Fact::IpvsPinsReuse
        } else {
            Fact::IpvsReschedules { mode }
        });
    }
    if evidence.hashes_tuples {
        facts.push(Fact::HashesTuples);
    }
    let Some(reuse) = evidence.reuse else {
        return (false, facts);
    };
    let (fair_chance, observed_chance) = evidence.chances();
    let compared = reuse.same.saturating_add(reuse.moved);
    let probability = chance_of_so_many(reuse.same, compared, fair_chance.max(observed_chance));
    let beyond_fair = chance_of_so_many(reuse.same, compared, fair_chance) < PINNED_P;
    let pinned = pinned_share(&reuse, fair_chance);
    let enough = pinned > MIN_PINNED_SHARE;
    let measured = [
        Fact::Reuse {
            same: reuse.same,
            compared,
            fair_chance,
            observed_chance,
            probability,
        },
        Fact::ReuseFrequency {
            reuses: reuse.reuses,
            connections: reuse.connections,
            pinned,
            enough,
        },
    ];
    let is_pinned = compared >= MIN_COMPARED && beyond_fair && (probability < PINNED_P || pins);
    let explains = is_pinned && enough && !evidence.hashes_tuples;
    (explains, measured.into_iter().chain(facts).collect())
}

impl Evidence {
    /// Both chances to meet the same backend; one that is not known is the other, or 1, against which nothing is proof.
    fn chances(&self) -> (f64, f64) {
        let fair = self.fair_chance.or(self.observed_chance).unwrap_or(1.0);
        (fair, self.observed_chance.unwrap_or(fair))
    }
}

/// The part of all connections that met their backend by reuse alone, beyond what a fair choice would have given.
fn pinned_share(reuse: &ReuseEvidence, chance: f64) -> f64 {
    let compared = reuse.same.saturating_add(reuse.moved);
    if compared == 0 || reuse.connections == 0 || chance >= 1.0 {
        return 0.0;
    }
    let same = reuse.same as f64 / compared as f64;
    let frequency = (reuse.reuses as f64 / reuse.connections as f64).min(1.0);
    (frequency * (same - chance) / (1.0 - chance)).max(0.0)
}

/// An upper bound of P(Binomial(`n`, `chance`) ≥ `hits`): exp(−n · KL(hits/n ‖ chance)).
fn chance_of_so_many(hits: u64, n: u64, chance: f64) -> f64 {
    let share = hits as f64 / n as f64;
    // Not a number without any, and no more than chance gives: nothing is proven.
    if share.is_nan() || chance.is_nan() || share <= chance {
        return 1.0;
    }
    if chance <= 0.0 {
        return 0.0;
    }
    let term = |p: f64, q: f64| if p > 0.0 { p * (p / q).ln() } else { 0.0 };
    let divergence = term(share, chance) + term(1.0 - share, 1.0 - chance);
    (-(n as f64) * divergence).exp().min(1.0)
}
