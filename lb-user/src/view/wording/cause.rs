//! The causes of starvation and the facts that each rests on.

use std::net::IpAddr;

use super::numbers::{count, counted, percent, percent_of, seconds};

/// A cause with the numbers behind it. What was not measured is none, and no sentence is made of it.
#[derive(Clone, Debug, PartialEq)]
pub enum Evidence {
    /// The proxy has not got the endpoint in its tables.
    NotProgrammed {
        /// Whose tables were read, such as `kube-proxy (ipvs)`.
        proxy: Option<String>,
        /// For how long the endpoint has been usable.
        usable_seconds: Option<f64>,
    },
    /// Clients reuse source ports, and a reuse meets the endpoint of the use before.
    PortReuse {
        /// Reuses whose endpoint could be compared with the one before.
        compared: u64,
        /// Of them those that met the same one.
        same: u64,
        /// The share of them (0 to 1) that chance alone would give.
        chance: Option<f64>,
        /// Connections that were looked at, and of them those that reused a port.
        reused: Option<Reused>,
        /// `net.ipv4.vs.conn_reuse_mode`, where the kernel has it.
        conn_reuse_mode: Option<u32>,
        /// The client that uses most of its ports.
        ports: Option<Ports>,
    },
    /// Connections stay open, so that few are new.
    LongLived {
        /// Connections open on all endpoints.
        open: u64,
        /// Of them those that began before the endpoint was usable.
        older: Option<u64>,
        /// New connections in the window, over all endpoints.
        new: u64,
        /// The window's length.
        window_seconds: f64,
    },
    /// A client stays with its endpoint, by affinity.
    Affinity {
        /// For how long, where the Service says so.
        timeout_seconds: Option<u32>,
        /// Distinct clients seen.
        clients: u64,
        /// Eligible endpoints.
        endpoints: u64,
        /// Consecutive connections of one client that could be compared.
        compared: u64,
        /// The share of them (0 to 1) that met the same endpoint.
        same_share: Option<f64>,
        /// The share of them (0 to 1) that chance alone would give.
        chance: Option<f64>,
    },
    /// The endpoint's weight is 0.
    ZeroWeight {
        /// Where that was read, such as `the IPVS table`.
        place: Option<String>,
    },
    /// The endpoint is meant for clients elsewhere.
    Topology {
        /// The zones that its hints name.
        for_zones: Vec<String>,
        /// This node's zone.
        zone: Option<String>,
    },
    /// No cause fits.
    Unknown {
        /// Causes that were looked at and do not fit, by name, such as `port_reuse`.
        ruled_out: Vec<String>,
    },
}

/// How many connections reused a port.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reused {
    /// Connections that were looked at.
    pub connections: u64,
    /// Of them those that reused a port.
    pub reuses: u64,
    /// The longest time since the port's last close that counts.
    pub horizon_seconds: f64,
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

impl Evidence {
    /// The cause's name, as in JSON and in metrics.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::NotProgrammed { .. } => "not_programmed",
            Self::PortReuse { .. } => "port_reuse",
            Self::LongLived { .. } => "long_lived",
            Self::Affinity { .. } => "affinity",
            Self::ZeroWeight { .. } => "zero_weight",
            Self::Topology { .. } => "topology",
            Self::Unknown { .. } => "unknown",
        }
    }

    /// The cause in words.
    pub(super) const fn title(&self) -> &'static str {
        match self {
            Self::NotProgrammed { .. } => "the proxy has not got the endpoint",
            Self::PortReuse { .. } => "source ports are reused",
            Self::LongLived { .. } => "connections live long",
            Self::Affinity { .. } => "clients are kept on their endpoint",
            Self::ZeroWeight { .. } => "its weight is 0",
            Self::Topology { .. } => "it is meant for clients elsewhere",
            Self::Unknown { .. } => "unknown",
        }
    }

    /// How sure the cause is: some are read off the proxy or the manifests, others follow from counts.
    pub(super) const fn certainty(&self) -> &'static str {
        match self {
            Self::PortReuse { .. } | Self::LongLived { .. } | Self::Affinity { .. } => "Likely cause",
            Self::NotProgrammed { .. } | Self::ZeroWeight { .. } | Self::Topology { .. } | Self::Unknown { .. } => {
                "Cause"
            }
        }
    }
}

/// What a cause rests on, in sentences, the strongest first.
pub fn because(evidence: &Evidence) -> Vec<String> {
    let mut out = Vec::new();
    match evidence {
        Evidence::NotProgrammed { proxy, usable_seconds } => {
            let whose = proxy.as_deref().unwrap_or("the proxy");
            let usable = usable_seconds.map_or_else(String::new, |usable| {
                format!(", though it has been usable for {}", seconds(usable))
            });
            out.push(format!("The endpoint is not in the tables of {whose}{usable}."));
        }
        Evidence::PortReuse {
            compared,
            same,
            chance,
            reused,
            conn_reuse_mode,
            ports,
        } => port_reuse(
            (*same, *compared, *chance),
            *reused,
            *conn_reuse_mode,
            ports.as_ref(),
            &mut out,
        ),
        Evidence::LongLived {
            open,
            older,
            new,
            window_seconds,
        } => {
            if let Some(older) = older {
                out.push(format!(
                    "{} of {} ({}) began before the endpoint was usable, and a connection stays where it began.",
                    count(*older),
                    counted(*open, "open connection"),
                    percent_of(*older, *open)
                ));
            }
            out.push(format!(
                "{} began in {}, next to {} that {} open.",
                counted(*new, "new connection"),
                seconds(*window_seconds),
                count(*open),
                if *open == 1 { "is" } else { "are" }
            ));
        }
        Evidence::Affinity {
            timeout_seconds,
            clients,
            endpoints,
            compared,
            same_share,
            chance,
        } => {
            if let Some(timeout) = timeout_seconds {
                out.push(format!(
                    "The Service has affinity by client address: a client keeps its endpoint until it has been away for {}.",
                    seconds(f64::from(*timeout))
                ));
            }
            if let Some(share) = same_share {
                let by_chance = chance.map_or_else(String::new, |chance| format!("; chance gives {}", percent(chance)));
                out.push(format!(
                    "{} of {} met the same endpoint as the client's connection before{by_chance}.{}",
                    percent(*share),
                    counted(*compared, "connection"),
                    small(*compared)
                ));
            }
            if *clients > 0 && clients <= endpoints {
                out.push(format!(
                    "{} {} seen for {}: so few cannot be even where each stays.",
                    counted(*clients, "client"),
                    if *clients == 1 { "was" } else { "were" },
                    counted(*endpoints, "endpoint")
                ));
            }
        }
        Evidence::ZeroWeight { place } => {
            let place = place
                .as_deref()
                .map_or_else(String::new, |place| format!(" in {place}"));
            out.push(format!(
                "The endpoint's weight is 0{place}: no new connection is meant for it."
            ));
        }
        Evidence::Topology { for_zones, zone } => {
            let hints = match for_zones.as_slice() {
                [] => "The endpoint is not meant for clients on this node".to_owned(),
                [one] => format!("The endpoint's hints name zone {one}"),
                more => format!("The endpoint's hints name zones {}", more.join(", ")),
            };
            out.push(match zone {
                Some(zone) => format!("{hints}; this node is in zone {zone}."),
                None => format!("{hints}."),
            });
        }
        Evidence::Unknown { ruled_out } => {
            out.push(if ruled_out.is_empty() {
                "No cause could be examined: the facts for it were not measured.".to_owned()
            } else {
                format!("None of these fits what was measured: {}.", ruled_out.join(", "))
            });
        }
    }
    out
}

fn port_reuse(
    (same, compared, chance): (u64, u64, Option<f64>),
    reused: Option<Reused>,
    mode: Option<u32>,
    ports: Option<&Ports>,
    out: &mut Vec<String>,
) {
    if compared > 0 {
        let by_chance = chance.map_or_else(String::new, |chance| format!("; chance gives {}", percent(chance)));
        out.push(format!(
            "{} of {} that reused a client port ({}) met the same endpoint as the use before{by_chance}.{}",
            count(same),
            counted(compared, "connection"),
            percent_of(same, compared),
            small(compared)
        ));
    }
    if let Some(reused) = reused {
        out.push(format!(
            "{} of {} ({}) reused a client port within {} of its last close.",
            count(reused.reuses),
            counted(reused.connections, "connection"),
            percent_of(reused.reuses, reused.connections),
            seconds(reused.horizon_seconds)
        ));
    }
    match mode {
        Some(0) => out.push(
            "net.ipv4.vs.conn_reuse_mode is 0: IPVS sends a new connection that matches an entry it still keeps (120 s \
             after a close) to that entry's endpoint."
                .to_owned(),
        ),
        Some(mode) => out.push(format!(
            "net.ipv4.vs.conn_reuse_mode is {mode}, by which IPVS chooses anew on a reused port."
        )),
        None => {}
    }
    if let Some(ports) = ports {
        out.push(format!(
            "{} holds {} of the {} ports of its range ({}) towards {}, or closed them less than 60 s ago.",
            ports.client,
            count(ports.used),
            count(ports.range),
            percent_of(ports.used, ports.range),
            ports.destination
        ));
    }
}

/// Says of a small sample that it is one.
fn small(n: u64) -> &'static str {
    if n < 30 { " That is a small sample." } else { "" }
}
