//! The envelope: which kind of answer it is, and the version of its shape.

use serde::{Deserialize, Serialize};

use super::{
    BackendView, ConnListView, DiagnosisView, EventView, ExplainView, GraphView, MapDumpView, MapInfoView,
    NodeFactsView, QueryError, ReportView, ReuseView, ServiceView, StatusView, TableView,
};

/// The version of every shape in this module; it rises when a field changes its meaning or goes, not when one is added.
pub const SCHEMA_VERSION: u32 = 1;

/// An answer, by kind.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind")]
pub enum Answer {
    /// To [`super::Query::Status`].
    Status(Box<StatusView>),
    /// To [`super::Query::Services`].
    ServiceList {
        /// The Services.
        items: Vec<ServiceView>,
    },
    /// To [`super::Query::Service`].
    Service(Box<ServiceView>),
    /// To [`super::Query::Backends`].
    BackendList {
        /// The backends.
        items: Vec<BackendView>,
    },
    /// To [`super::Query::Conns`].
    ConnList(ConnListView),
    /// To [`super::Query::Reuse`].
    Reuse(ReuseView),
    /// To [`super::Query::Table`].
    TableList {
        /// The tables, one a backend set.
        items: Vec<TableView>,
    },
    /// To [`super::Query::Explain`].
    Explain(ExplainView),
    /// To [`super::Query::Maps`].
    MapList {
        /// The maps.
        items: Vec<MapInfoView>,
    },
    /// To [`super::Query::MapDump`].
    MapDump(MapDumpView),
    /// To [`super::Query::Diagnose`].
    DiagnosisList {
        /// The node and its settings.
        node: Box<NodeFactsView>,
        /// The diagnoses, the worst verdict first.
        items: Vec<DiagnosisView>,
    },
    /// To [`super::Query::Report`].
    Report(Box<ReportView>),
    /// To [`super::Query::Graph`].
    Graph(GraphView),
    /// One of many, to [`super::Query::Follow`].
    Event(Box<EventView>),
    /// To any question that has no answer.
    Error(QueryError),
}

/// An answer with the version of its shape: what `-o json` prints and the control socket carries.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Document {
    /// [`SCHEMA_VERSION`] of whoever wrote it.
    pub schema_version: u32,
    /// The answer.
    #[serde(flatten)]
    pub answer: Answer,
}

impl From<Answer> for Document {
    fn from(answer: Answer) -> Self {
        Self {
            schema_version: SCHEMA_VERSION,
            answer,
        }
    }
}
