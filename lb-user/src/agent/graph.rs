//! Who calls whom, by what clients are known as.

use std::{collections::BTreeMap, net::IpAddr};

use super::state::{Shared, lock};
use crate::{
    observe::{address, clients::Caller, wall},
    view::{CallView, GraphView, QueryError, ServiceFilter, Timestamp, WorkloadView},
};

impl Shared {
    /// The calls of the Services that pass a filter, those of one workload put together.
    pub(super) fn graph_view(&self, filter: &ServiceFilter) -> Result<GraphView, QueryError> {
        let reconciler = lock(&self.reconciler);
        let observation = lock(&self.observation);
        let own = super::addresses::read().map_err(|error| QueryError::Failed(error.to_string()))?;
        let names: BTreeMap<u32, _> = Self::shown(&reconciler, filter)
            .map(|(name, service)| (service.service_id, name))
            .collect();
        let mut calls: BTreeMap<(WorkloadView, u32), (u64, u64, u64)> = BTreeMap::new();
        for (client, service, counts) in observation.calls().iter() {
            if !names.contains_key(&service) {
                continue;
            }
            let client = match observation.caller(client) {
                Some(Caller::Pod(pod)) => WorkloadView {
                    namespace: pod.name.namespace.to_string(),
                    kind: pod.workload.kind.to_string(),
                    name: pod.workload.name.to_string(),
                },
                Some(Caller::Node) => self.node_as_caller(),
                None => self.unknown_caller(address(client.address), &own.addresses),
            };
            let sum = calls.entry((client, service)).or_default();
            sum.0 += counts.connections;
            sum.1 += counts.failures;
            sum.2 = sum.2.max(counts.last_ns);
        }
        let mut calls: Vec<CallView> = calls
            .into_iter()
            .filter_map(|((client, service), (connections, failures, last_ns))| {
                let name = names.get(&service)?;
                Some(CallView {
                    client,
                    namespace: name.namespace.to_string(),
                    service: name.name.to_string(),
                    connections,
                    failures,
                    last_seen: wall(last_ns),
                })
            })
            .collect();
        calls.sort_by(|a, b| (&a.client, &a.namespace, &a.service).cmp(&(&b.client, &b.namespace, &b.service)));
        Ok(GraphView {
            since: Timestamp::from_system(self.started),
            calls,
            forgotten: observation.calls().forgotten(),
        })
    }

    fn node_as_caller(&self) -> WorkloadView {
        WorkloadView {
            namespace: String::new(),
            kind: "Node".to_owned(),
            name: self.config.node_name.clone(),
        }
    }

    /// What a client is called of which no Pod is known.
    fn unknown_caller(&self, client: IpAddr, own: &[IpAddr]) -> WorkloadView {
        if client.is_loopback() || client.is_unspecified() || own.contains(&client) {
            return self.node_as_caller();
        }
        WorkloadView {
            namespace: String::new(),
            kind: "Address".to_owned(),
            name: client.to_string(),
        }
    }
}
