//! The causes of starvation in words, and a sentence for each fact that bears on one.

use super::{
    Known, Starved, Zones,
    numbers::{chance, count, counted, measure, percent, percent_of, seconds},
};
use crate::analysis::cause::{Cause, Fact};

/// The cause in words.
pub(super) const fn title(cause: Cause) -> &'static str {
    match cause {
        Cause::NotProgrammed => "the proxy has not got the endpoint",
        Cause::PortReuse => "source ports are reused",
        Cause::LongLived => "connections live long",
        Cause::Affinity => "clients are kept on their endpoint",
        Cause::ZeroWeight => "its weight is 0",
        Cause::Topology => "it is meant for clients elsewhere",
        Cause::Unknown => "unknown",
    }
}

/// How sure the cause is: some are read off the proxy or the manifests, others follow from counts.
pub(super) const fn certainty(cause: Cause) -> &'static str {
    match cause {
        Cause::PortReuse | Cause::LongLived | Cause::Affinity => "Likely cause",
        Cause::NotProgrammed | Cause::ZeroWeight | Cause::Topology | Cause::Unknown => "Cause",
    }
}

/// What a starved endpoint's cause rests on, in sentences, the deciding ones first.
pub fn because(found: &Starved, known: &Known) -> Vec<String> {
    let mut out = Vec::new();
    if found.cause == Cause::Unknown {
        out.push(
            if found.facts.is_empty() {
                "No cause could be examined: the facts for it were not measured."
            } else {
                "None that can be told fits what was measured."
            }
            .to_owned(),
        );
    }
    out.extend(found.facts.iter().map(|fact| sentence(fact, found, known)));
    if let (Cause::Affinity, Some(clients)) = (found.cause, known.clients)
        && (1..=known.endpoints).contains(&clients)
    {
        out.push(format!(
            "{} {} seen for {}: so few cannot be even where each stays.",
            counted(clients, "client"),
            if clients == 1 { "was" } else { "were" },
            counted(known.endpoints, "endpoint")
        ));
    }
    if let (Cause::PortReuse, Some(ports)) = (found.cause, &known.ports) {
        out.push(format!(
            "{} holds {} of the {} ports of this node's range ({}) towards {}, or closed them less than 60 s ago.",
            ports.client,
            count(ports.used),
            count(ports.range),
            percent_of(ports.used, ports.range),
            ports.destination
        ));
    }
    out
}

fn sentence(fact: &Fact, found: &Starved, known: &Known) -> String {
    let proxy = known.proxy.as_deref().unwrap_or("the proxy");
    match *fact {
        Fact::ExcludedByTopology => topology(found.zones.as_ref()),
        Fact::NotInProxy => {
            let usable = found.usable_seconds.map_or_else(String::new, |usable| {
                format!(", though it has been usable for {}", seconds(usable))
            });
            format!("The endpoint is not in the tables of {proxy}{usable}.")
        }
        Fact::InProxy => format!("The endpoint is in the tables of {proxy}."),
        Fact::ProxyWeight { weight: 0 } => {
            format!("Its weight in the tables of {proxy} is 0: no new connection is meant for it.")
        }
        Fact::ProxyWeight { weight } => format!("Its weight in the tables of {proxy} is {weight}."),
        Fact::OpenFarBelowFair {
            open,
            fair,
            rate_at_most,
            seconds_to_half,
        } => format!(
            "It holds {} where {} would be fair, and at the present rate (at most {} new a second) it takes {} or more to get \
             half of that.",
            counted(open, "open connection"),
            super::expected(fair),
            measure(rate_at_most),
            seconds(seconds_to_half)
        ),
        Fact::AffinityConfigured => {
            let timeout = known.affinity_seconds.map_or_else(String::new, |timeout| {
                format!(
                    ": a client keeps its endpoint until it has been away for {}",
                    seconds(f64::from(timeout))
                )
            });
            format!("The Service asks for affinity by client address{timeout}.")
        }
        Fact::Stickiness {
            same,
            pairs,
            fair_chance,
            observed_chance,
            sticky,
        } => format!(
            "{} of {} ({}) met the same endpoint as the same client's connection before, from another port; {}{}.{}",
            count(same),
            counted(pairs, "connection"),
            percent_of(same, pairs),
            by_chance(fair_chance, observed_chance),
            if sticky { "" } else { "; so clients are not kept" },
            small(pairs)
        ),
        Fact::Reuse { compared: 0, .. } => "No reuse of a client port could be compared.".to_owned(),
        Fact::Reuse {
            same,
            compared,
            fair_chance,
            observed_chance,
            probability,
        } => format!(
            "{} of {} that reused a client port ({}) met the same endpoint as the use before; {} (so many by chance alone: at \
             most {}).{}",
            count(same),
            counted(compared, "connection"),
            percent_of(same, compared),
            by_chance(fair_chance, observed_chance),
            chance(probability),
            small(compared)
        ),
        Fact::ReuseFrequency {
            reuses,
            connections,
            pinned,
            enough,
        } => {
            let within = known.reuse_horizon_seconds.map_or_else(String::new, |horizon| {
                format!(" within {} of its last close", seconds(horizon))
            });
            format!(
                "{} of {} ({}) reused a client port{within}; {} of all were kept on their endpoint beyond chance{}.",
                count(reuses),
                counted(connections, "connection"),
                percent_of(reuses, connections),
                percent(pinned),
                if enough { "" } else { ", too few to starve one" }
            )
        }
        Fact::IpvsPinsReuse => {
            "net.ipv4.vs.conn_reuse_mode is 0: IPVS sends a new connection that matches an entry it still \
                                keeps (120 s after a close) to that entry's endpoint."
                .to_owned()
        }
        Fact::IpvsReschedules { mode } => {
            format!("net.ipv4.vs.conn_reuse_mode is {mode}, by which IPVS chooses anew on a reused port.")
        }
        Fact::HashesTuples => {
            "The proxy chooses by a hash of addresses and ports: there a reused port meets the same endpoint \
                               again, and none starves by that."
                .to_owned()
        }
    }
}

fn topology(zones: Option<&Zones>) -> String {
    let Some(zones) = zones else {
        return "Topology hints keep this node's clients from the endpoint.".to_owned();
    };
    let hints = match zones.hinted.as_slice() {
        [] => "The endpoint's hints keep this node's clients from it".to_owned(),
        [one] => format!("The endpoint's hints name zone {one}"),
        more => format!("The endpoint's hints name zones {}", more.join(", ")),
    };
    match &zones.own {
        Some(own) => format!("{hints}; this node is in zone {own}."),
        None => format!("{hints}."),
    }
}

/// What chance gives: one number, or two where fair shares and those that were seen differ.
fn by_chance(fair: f64, observed: f64) -> String {
    let (fair, observed) = (percent(fair), percent(observed));
    if fair == observed {
        format!("chance gives {fair}")
    } else {
        format!("chance gives {fair} at fair shares and {observed} at those that were seen")
    }
}

/// Says of a small sample that it is one.
fn small(n: u64) -> &'static str {
    if n < 30 { " That is a small sample." } else { "" }
}
