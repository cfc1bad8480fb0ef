//! The Services over time: histories with the diagnoses beside them.

use std::net::SocketAddr;

use super::state::{Shared, lock};
use crate::{
    analysis::{history::History, reuse::ReuseCounts},
    observe::wall,
    view::{
        HistoryBackendView, HistoryPointView, IntervalView, QueryError, ReportView, ServiceFilter, ServiceReportView,
    },
};

impl Shared {
    /// The Services over time.
    pub(super) fn report_view(&self, filter: &ServiceFilter) -> Result<ReportView, QueryError> {
        let (node, diagnoses) = self.diagnoses(filter)?;
        let observation = lock(&self.observation);
        let services = diagnoses
            .into_iter()
            .map(|(diagnosis, key)| {
                let history = observation.histories().get(&key);
                let lines = history.map(History::backends).unwrap_or_default();
                let width = lines.len();
                let widened = |counts: &[u32]| -> Vec<u64> {
                    let mut counts: Vec<u64> = counts.iter().map(|count| u64::from(*count)).collect();
                    counts.resize(width, 0);
                    counts
                };
                let backends = lines
                    .iter()
                    .map(|line| {
                        let known = (diagnosis.endpoints.iter())
                            .find(|endpoint| endpoint.id == line.backend && line.backend != 0);
                        let address = known
                            .map(|endpoint| SocketAddr::new(endpoint.addr, endpoint.port))
                            .or_else(|| self.directory.backend(line.backend));
                        HistoryBackendView {
                            addr: address.map_or(std::net::Ipv4Addr::UNSPECIFIED.into(), |address| address.ip()),
                            port: address.map_or(0, |address| address.port()),
                            born: line.born_ns.map(wall),
                            gone: line.gone_ns.map(wall),
                        }
                    })
                    .collect();
                let points = history
                    .map(History::steps)
                    .unwrap_or_default()
                    .iter()
                    .map(|step| HistoryPointView {
                        time: wall(step.end_ns),
                        started: widened(&step.started),
                        open: widened(&step.open),
                        dispersion: step.dispersion,
                    })
                    .collect();
                let nothing = ReuseCounts::default();
                let intervals = IntervalView::all(observation.reuse().service(key.0).unwrap_or(&nothing));
                ServiceReportView {
                    diagnosis,
                    backends,
                    points,
                    intervals,
                }
            })
            .collect();
        Ok(ReportView {
            node,
            step_seconds: observation.histories().step_seconds(),
            services,
        })
    }
}
