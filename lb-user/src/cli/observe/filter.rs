//! Which events are shown: pure predicates, and how the command line names them.

use std::net::{IpAddr, SocketAddr};

use clap::ValueEnum;

use super::plain;
use crate::{
    model::ObjectName,
    view::{EventView, Origin, ServiceFilter},
};

/// What an event must be; every part that is given must hold.
#[derive(Clone, Debug, Default)]
pub(super) struct Filter {
    pub(super) services: ServiceFilter,
    pub(super) backend: Option<Target>,
    pub(super) client: Option<Client>,
    /// Where a connection came from.
    pub(super) origin: Option<Origin>,
    /// One of them, where any is given.
    pub(super) outcomes: Vec<Outcome>,
    /// One of them, where any is given.
    pub(super) kinds: Vec<Kind>,
}

/// An address, with a port where only that one is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) addr: IpAddr,
    pub(super) port: Option<u16>,
}

/// A client: by its address, or by the workload that it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Client {
    Address(Target),
    /// `NAMESPACE/NAME`, or a name in whatever namespace.
    Workload(String),
}

/// The types of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Kind {
    /// A connection that ended, or failed to begin.
    Connection,
    /// A source port that was used again.
    Reuse,
    /// An endpoint that is starved, or is so no longer.
    Alarm,
}

/// The outcomes of connections and of reuses, as events name them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(super) enum Outcome {
    /// The connection was established.
    Established,
    /// Refused, timed out, unreachable, without a local port, or failed otherwise.
    Failed,
    /// The other side refused.
    Refused,
    /// Nobody answered in time.
    TimedOut,
    /// There was no way there.
    Unreachable,
    /// No source port was free.
    NoLocalPort,
    /// The client gave up before an answer.
    Abandoned,
    /// Another error.
    Other,
    /// The reused port met the same endpoint.
    SameBackend,
    /// The reused port met another endpoint.
    Moved,
    /// The endpoint of the use before is gone.
    StaleBackend,
    /// An endpoint was not seen.
    UnknownBackend,
}

impl Outcome {
    fn covers(self, found: &str) -> bool {
        match self {
            Self::Failed => !matches!(found, "established" | "abandoned"),
            Self::Established => found == "established",
            Self::Refused => found == "refused",
            Self::TimedOut => found == "timed_out",
            Self::Unreachable => found == "unreachable",
            Self::NoLocalPort => found == "no_local_port",
            Self::Abandoned => found == "abandoned",
            Self::Other => found == "other",
            Self::SameBackend => found == "same_backend",
            Self::Moved => found == "moved",
            Self::StaleBackend => found == "stale_backend",
            Self::UnknownBackend => found == "unknown_backend",
        }
    }
}

impl Target {
    fn admits(self, found: SocketAddr) -> bool {
        plain(self.addr) == plain(found.ip()) && self.port.is_none_or(|port| port == found.port())
    }
}

impl Client {
    fn admits(&self, found: SocketAddr, workload: Option<&str>) -> bool {
        match self {
            Self::Address(target) => target.admits(found),
            Self::Workload(wanted) => workload.is_some_and(|workload| {
                workload == wanted
                    || workload
                        .rsplit_once('/')
                        .is_some_and(|(_, name)| name == wanted && !wanted.contains('/'))
            }),
        }
    }
}

impl Filter {
    /// Whether an event is shown. Notes of events that were left out always are: they say what the rest is worth.
    pub(super) fn admits(&self, event: &EventView) -> bool {
        let of_service = |namespace: &str, service: &str| self.services.admits(&ObjectName::new(namespace, service));
        let of_kind = |kind: Kind| self.kinds.is_empty() || self.kinds.contains(&kind);
        match event {
            EventView::Connection {
                namespace,
                service,
                client,
                origin,
                workload,
                backend,
                outcome,
                ..
            } => {
                of_kind(Kind::Connection)
                    && of_service(namespace, service)
                    && self.origin.is_none_or(|wanted| wanted == *origin)
                    && self
                        .backend
                        .is_none_or(|wanted| backend.is_some_and(|found| wanted.admits(found)))
                    && self
                        .client
                        .as_ref()
                        .is_none_or(|wanted| wanted.admits(*client, workload.as_deref()))
                    && (self.outcomes.is_empty() || self.outcomes.iter().any(|wanted| wanted.covers(outcome)))
            }
            // A reuse names neither an endpoint nor a workload.
            EventView::Reuse {
                namespace,
                service,
                client,
                origin,
                outcome,
                ..
            } => {
                of_kind(Kind::Reuse)
                    && of_service(namespace, service)
                    && self.origin.is_none_or(|wanted| wanted == *origin)
                    && self.backend.is_none()
                    && self.client.as_ref().is_none_or(|wanted| wanted.admits(*client, None))
                    && (self.outcomes.is_empty()
                        || self
                            .outcomes
                            .iter()
                            .any(|wanted| *wanted != Outcome::Failed && wanted.covers(outcome)))
            }
            // An alarm names neither a client nor an outcome, and is about clients from everywhere.
            EventView::Alarm {
                namespace,
                service,
                addr,
                port,
                ..
            } => {
                of_kind(Kind::Alarm)
                    && of_service(namespace, service)
                    && self
                        .backend
                        .is_none_or(|wanted| wanted.admits(SocketAddr::new(*addr, *port)))
                    && self.client.is_none()
                    && self.origin.is_none()
                    && self.outcomes.is_empty()
            }
            EventView::Lost { .. } => true,
        }
    }
}

/// Reads `ADDR`, `ADDR:PORT` or `[ADDR]:PORT`.
pub(super) fn parse_target(text: &str) -> Result<Target, String> {
    if let Ok(addr) = text.parse::<IpAddr>() {
        return Ok(Target { addr, port: None });
    }
    match text.parse::<SocketAddr>() {
        Ok(found) if found.port() > 0 => Ok(Target {
            addr: found.ip(),
            port: Some(found.port()),
        }),
        _ => Err(format!(
            "`{text}` is not an address; allowed are ADDR, ADDR:PORT and [ADDR]:PORT"
        )),
    }
}

/// Reads an address as [`parse_target`] does, or a workload's name.
pub(super) fn parse_client(text: &str) -> Result<Client, String> {
    let wrong = || {
        format!("`{text}` is neither an address nor a workload; allowed are ADDR, ADDR:PORT, NAME and NAMESPACE/NAME")
    };
    if let Ok(target) = parse_target(text) {
        return Ok(Client::Address(target));
    }
    // What is made of digits and dots was meant to be an address.
    if !text.bytes().any(|b| b.is_ascii_lowercase()) {
        return Err(wrong());
    }
    crate::view::parse_service_name(text).map_err(|_| wrong())?;
    Ok(Client::Workload(text.to_owned()))
}
