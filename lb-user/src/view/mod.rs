//! What people and scripts see: every answer of the agent as plain data, and the trait by which the agent gives it.
//!
//! The types are the contract of `-o json` (`schemaVersion` 1, camelCase, addresses and ports as people write them, times
//! RFC 3339 UTC, durations in seconds) and of the control socket alike; snapshot tests keep them. How tables look is
//! `cli`; where the values come from is the agent's business, behind [`Answers`].

mod answer;
mod conn;
mod diagnosis;
mod event;
mod explain;
#[cfg(test)]
pub mod fixture;
mod graph;
mod map;
mod origin;
mod query;
mod report;
mod reuse;
mod service;
mod status;
mod table;
mod time;
pub mod wording;

pub use answer::{Answer, Document, SCHEMA_VERSION};
pub use conn::{
    ConnFilter, ConnListView, ConnState, ConnView, DEFAULT_CONNS, MAX_CONNS, Youngest, is_live, socket_address,
};
pub use diagnosis::{
    AttributionView, ClientsView, DiagnosisView, EndpointView, LatencyView, NodeFactsView, PortUseView, SettingView,
    StarvedView, VerdictKind,
};
pub use event::EventView;
pub use explain::{CandidateView, ExplainView, FlowView, Verdict, Whence};
pub use graph::{CallView, GraphView, WorkloadView};
pub use map::{MapDumpView, MapInfoView, MapRowView};
pub use origin::{AudienceView, Origin};
pub use query::{Answers, EventReader, ExplainQuery, Query, QueryError, ServiceFilter, parse_service_name};
pub use report::{HistoryBackendView, HistoryPointView, ReportView, ServiceReportView};
pub use reuse::{ClientReuseView, IntervalView, MAX_CLIENTS, ReuseView, ServiceReuseView};
pub use service::{
    BackendCountsView, BackendState, BackendView, FrontendView, ImbalanceView, OutsideView, ServiceView,
};
pub use status::{
    CountsView, HealthView, InterfaceSide, InterfaceView, KindView, MapUsageView, Mode, ProblemView, ProgramView,
    SourceView, StatusView, SyncView,
};
pub use table::{TableSlotsView, TableView};
pub use time::{ParseTimestampError, Timestamp};
