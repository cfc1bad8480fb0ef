//! What can be asked, what can go wrong, and the trait that answers.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

use super::{
    Answer, BackendView, ConnFilter, ConnListView, DiagnosisView, ExplainView, GraphView, MapDumpView, MapInfoView,
    NodeFactsView, ReportView, ReuseView, ServiceView, StatusView, TableView, Whence,
};
use crate::model::{ObjectName, Protocol};

/// Which Services a list is about; an absent field lets all pass.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ServiceFilter {
    /// Only those in this namespace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// Only those of this name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

impl ServiceFilter {
    /// Whether a Service passes.
    pub fn admits(&self, name: &ObjectName) -> bool {
        let same = |wanted: &Option<String>, found: &str| wanted.as_deref().is_none_or(|wanted| wanted == found);
        same(&self.namespace, &name.namespace) && same(&self.name, &name.name)
    }
}

/// A flow that might be, for `explain`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExplainQuery {
    /// The client's address.
    pub source: IpAddr,
    /// The client's port, where a flow that exists is meant.
    pub source_port: Option<u16>,
    /// The address and port dialled.
    pub vip: SocketAddr,
    /// The protocol.
    pub protocol: Protocol,
    /// Where it begins; none to tell it by the client's address.
    pub from: Option<Whence>,
}

/// One question to the agent; the control socket's request line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(
    tag = "query",
    rename_all = "camelCase",
    rename_all_fields = "camelCase",
    deny_unknown_fields
)]
pub enum Query {
    /// How the agent is.
    Status {},
    /// The Services that pass a filter.
    Services {
        /// Which ones.
        #[serde(default)]
        filter: ServiceFilter,
    },
    /// One Service.
    Service {
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
    },
    /// The backends of the Services that pass a filter.
    Backends {
        /// Of which Services.
        #[serde(default)]
        filter: ServiceFilter,
    },
    /// The connections of the Services that pass a filter.
    Conns {
        /// Of which Services.
        #[serde(default)]
        filter: ServiceFilter,
        /// Which ones of them.
        #[serde(default)]
        which: ConnFilter,
    },
    /// Tuple reuse of the Services that pass a filter.
    Reuse {
        /// Of which Services.
        #[serde(default)]
        filter: ServiceFilter,
    },
    /// The Maglev tables of one Service.
    Table {
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
    },
    /// Where a flow goes.
    Explain {
        /// The client's address.
        source: IpAddr,
        /// The client's port, where a flow that exists is meant.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        source_port: Option<u16>,
        /// The address and port dialled.
        vip: SocketAddr,
        /// `TCP` or `UDP`.
        protocol: String,
        /// Where it begins; left out to tell it by the client's address.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        from: Option<Whence>,
    },
    /// The maps in the kernel.
    Maps {},
    /// The contents of one map.
    MapDump {
        /// The map's name.
        name: String,
    },
    /// Why load is uneven, for the Services that pass a filter.
    Diagnose {
        /// Which ones.
        #[serde(default)]
        filter: ServiceFilter,
    },
    /// The Services that pass a filter over time.
    Report {
        /// Which ones.
        #[serde(default)]
        filter: ServiceFilter,
    },
    /// Who calls the Services that pass a filter.
    Graph {
        /// Which ones.
        #[serde(default)]
        filter: ServiceFilter,
    },
    /// What happens to the Services that pass a filter, as it happens: many answers, until the reader goes away.
    Follow {
        /// Which ones.
        #[serde(default)]
        filter: ServiceFilter,
    },
}

/// Why a question has no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(tag = "reason", content = "message", rename_all = "camelCase")]
pub enum QueryError {
    /// What was asked for does not exist; the text names it, such as "Service default/web".
    #[error("not found: {0}")]
    NotFound(String),
    /// The question itself is wrong: what was found, and what is allowed.
    #[error("bad request: {0}")]
    Invalid(String),
    /// The agent cannot tell yet: what it waits for.
    #[error("not ready: {0}")]
    NotReady(String),
    /// Reading the kernel or the agent's state failed.
    #[error("failed: {0}")]
    Failed(String),
}

/// Everything that the agent can be asked; implemented by the agent, and by a fixture in tests.
///
/// The methods may read kernel maps: callers run them where blocking is allowed.
pub trait Answers: Send + Sync {
    /// How the agent is.
    fn status(&self) -> Result<StatusView, QueryError>;
    /// The Services that pass a filter, sorted by (namespace, name).
    fn services(&self, filter: &ServiceFilter) -> Result<Vec<ServiceView>, QueryError>;
    /// One Service.
    fn service(&self, name: &ObjectName) -> Result<ServiceView, QueryError>;
    /// Backends of the Services that pass a filter, sorted by (service, address, port).
    fn backends(&self, filter: &ServiceFilter) -> Result<Vec<BackendView>, QueryError>;
    /// Connections of the Services that pass a filter, sorted; where there are more than the limit, the youngest.
    fn conns(&self, filter: &ServiceFilter, which: &ConnFilter) -> Result<ConnListView, QueryError>;
    /// Tuple reuse, with the Services that pass a filter.
    fn reuse(&self, filter: &ServiceFilter) -> Result<ReuseView, QueryError>;
    /// The Maglev tables of one Service, one a backend set.
    fn table(&self, name: &ObjectName) -> Result<Vec<TableView>, QueryError>;
    /// Where a flow goes, and why.
    fn explain(&self, flow: &ExplainQuery) -> Result<ExplainView, QueryError>;
    /// The maps in the kernel.
    fn maps(&self) -> Result<Vec<MapInfoView>, QueryError>;
    /// The contents of one map, by its name without regard to case.
    fn map_dump(&self, name: &str) -> Result<MapDumpView, QueryError>;
    /// Why load is uneven, the worst verdict first.
    fn diagnose(&self, filter: &ServiceFilter) -> Result<(NodeFactsView, Vec<DiagnosisView>), QueryError>;
    /// The Services over time.
    fn report(&self, filter: &ServiceFilter) -> Result<ReportView, QueryError>;
    /// Who calls whom.
    fn graph(&self, filter: &ServiceFilter) -> Result<GraphView, QueryError>;
    /// A reader for what happens from now on.
    fn follow(&self, filter: &ServiceFilter) -> Result<EventReader, QueryError>;
}

/// Events of the Services that pass a filter, from the moment it was asked for.
///
/// It holds a bounded number of events for its reader; those beyond are left out, and counted in an [`EventView::Lost`](super::EventView::Lost).
pub type EventReader = tokio::sync::mpsc::Receiver<super::EventView>;

impl Query {
    /// Asks the question.
    pub fn ask(&self, answers: &dyn Answers) -> Result<Answer, QueryError> {
        Ok(match self {
            Self::Status {} => Answer::Status(Box::new(answers.status()?)),
            Self::Services { filter } => Answer::ServiceList {
                items: answers.services(filter)?,
            },
            Self::Service { namespace, name } => {
                Answer::Service(Box::new(answers.service(&ObjectName::new(namespace, name))?))
            }
            Self::Backends { filter } => Answer::BackendList {
                items: answers.backends(filter)?,
            },
            Self::Conns { filter, which } => Answer::ConnList(answers.conns(filter, which)?),
            Self::Reuse { filter } => Answer::Reuse(answers.reuse(filter)?),
            Self::Table { namespace, name } => Answer::TableList {
                items: answers.table(&ObjectName::new(namespace, name))?,
            },
            Self::Explain {
                source,
                source_port,
                vip,
                protocol,
                from,
            } => Answer::Explain(answers.explain(&ExplainQuery {
                source: *source,
                source_port: *source_port,
                vip: *vip,
                protocol: parse_protocol(protocol)?,
                from: *from,
            })?),
            Self::Maps {} => Answer::MapList { items: answers.maps()? },
            Self::MapDump { name } => Answer::MapDump(answers.map_dump(name)?),
            Self::Diagnose { filter } => {
                let (node, items) = answers.diagnose(filter)?;
                Answer::DiagnosisList {
                    node: Box::new(node),
                    items,
                }
            }
            Self::Report { filter } => Answer::Report(Box::new(answers.report(filter)?)),
            Self::Graph { filter } => Answer::Graph(answers.graph(filter)?),
            Self::Follow { .. } => {
                return Err(QueryError::Invalid(
                    "a stream of events is not one answer; ask for it by `evenkeel observe`".to_owned(),
                ));
            }
        })
    }
}

fn parse_protocol(text: &str) -> Result<Protocol, QueryError> {
    match text {
        "TCP" => Ok(Protocol::Tcp),
        "UDP" => Ok(Protocol::Udp),
        other => Err(QueryError::Invalid(format!(
            "protocol `{other}`: allowed are TCP and UDP"
        ))),
    }
}

/// Reads `NAME` (in the namespace `default`) or `NAMESPACE/NAME`.
pub fn parse_service_name(text: &str) -> Result<ObjectName, String> {
    let (namespace, name) = text.split_once('/').unwrap_or(("default", text));
    for part in [namespace, name] {
        let letters = part
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'.');
        if part.is_empty() || part.len() > 253 || !letters {
            return Err(format!(
                "`{text}` is not a Service's name; allowed are NAME and NAMESPACE/NAME"
            ));
        }
    }
    Ok(ObjectName::new(namespace, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_without_a_namespace_is_in_default() {
        assert_eq!(parse_service_name("web"), Ok(ObjectName::new("default", "web")));
        assert_eq!(parse_service_name("shop/web"), Ok(ObjectName::new("shop", "web")));
        for bad in ["", "/", "a/", "/a", "a/b/c", "A", "a b"] {
            assert!(parse_service_name(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_filter_admits_what_it_names() {
        let web = ObjectName::new("shop", "web");
        let filter = |namespace: Option<&str>, name: Option<&str>| ServiceFilter {
            namespace: namespace.map(str::to_owned),
            name: name.map(str::to_owned),
        };
        assert!(filter(None, None).admits(&web));
        assert!(filter(Some("shop"), None).admits(&web));
        assert!(filter(Some("shop"), Some("web")).admits(&web));
        assert!(!filter(Some("default"), None).admits(&web));
        assert!(!filter(None, Some("api")).admits(&web));
    }

    #[test]
    fn a_request_line_with_an_unknown_field_is_refused() {
        for line in [
            r#"{"query":"status","verbose":true}"#,
            r#"{"query":"everything"}"#,
            r#"{"query":"service","name":"web"}"#,
            r#"{"query":"explain","source":"10.0.0.300","vip":"10.0.0.1:80","protocol":"TCP"}"#,
        ] {
            assert!(serde_json::from_str::<Query>(line).is_err(), "{line}");
        }
        let services: Query = serde_json::from_str(r#"{"query":"services"}"#).expect("a filter may be left out");
        assert_eq!(
            services,
            Query::Services {
                filter: ServiceFilter::default()
            }
        );
    }
}
