//! The connections that are open or just closed, from the flow table and from the state of sockets.

use std::{
    collections::{HashMap, HashSet},
    net::SocketAddr,
};

use lb_common::{addr::Addr, flow::Flow, socket::SocketState};

use super::state::{Shared, lock};
use crate::{
    analysis::stickiness::Client,
    model::ObjectName,
    observe::{Observation, monotonic_ns},
    view::{ConnFilter, ConnListView, ConnView, MAX_CONNS, Origin, QueryError, ServiceFilter, Youngest, is_live},
};

/// One of either kind, before it is put into words.
enum Found {
    Flow(Box<Flow>),
    Socket(Box<SocketState>),
}

impl Found {
    fn service_id(&self) -> u32 {
        match self {
            Self::Flow(flow) => flow.service_id,
            Self::Socket(socket) => socket.service_id,
        }
    }
}

impl Shared {
    /// The connections of the Services that pass a filter; of more than the limit the youngest.
    pub(super) fn conns_view(&self, filter: &ServiceFilter, which: &ConnFilter) -> Result<ConnListView, QueryError> {
        let (names, wanted) = self.named(filter);
        let now_ns = monotonic_ns();
        let mut youngest = Youngest::new(which.limit.min(MAX_CONNS) as usize);
        // Neither map is read under a lock: with a hundred thousand entries that takes tens of milliseconds.
        let flow_now_ns = self.census.flow_now_ns(now_ns);
        if which.origin != Some(Origin::Node) {
            let scanned = self.census.flows(|flow| {
                if is_live(flow, flow_now_ns)
                    && wanted.admits(flow.service_id)
                    && which.admits(Origin::Outside, flow.client)
                {
                    // Both clocks are told apart by an offset that tests alone set.
                    let start_ns = flow.start_ns.wrapping_sub(flow_now_ns.wrapping_sub(now_ns));
                    youngest.push(start_ns, || Found::Flow(Box::new(*flow)));
                }
            });
            scanned.map_err(|error| QueryError::Failed(error.to_string()))?;
        }
        if which.origin != Some(Origin::Outside) {
            for socket in self.census.sockets() {
                if wanted.admits(socket.service_id) && which.admits(Origin::Node, socket.client) {
                    youngest.push(socket.start_ns, || Found::Socket(Box::new(socket)));
                }
            }
        }
        let (found, total) = youngest.finish();
        let observation = lock(&self.observation);
        let mut items: Vec<ConnView> = found
            .into_iter()
            .map(|found| {
                let mut view = match &found {
                    Found::Flow(flow) => ConnView::of_flow(flow, flow_now_ns),
                    Found::Socket(socket) => {
                        let backend = self.directory.backend(socket.backend_id);
                        ConnView::of_socket(socket, backend, now_ns)
                    }
                };
                if let Some(name) = names.get(&found.service_id()) {
                    view.namespace = name.namespace.to_string();
                    view.service = name.name.to_string();
                }
                view.workload = workload(&observation, view.client);
                view
            })
            .collect();
        drop(observation);
        items.sort_by(|a, b| {
            (
                &a.namespace,
                &a.service,
                &a.protocol,
                a.client,
                a.frontend,
                a.backend_id,
            )
                .cmp(&(
                    &b.namespace,
                    &b.service,
                    &b.protocol,
                    b.client,
                    b.frontend,
                    b.backend_id,
                ))
        });
        Ok(ConnListView { items, total })
    }

    /// The names of all Services by id, and which of them a filter lets pass.
    fn named(&self, filter: &ServiceFilter) -> (HashMap<u32, ObjectName>, Wanted) {
        let reconciler = lock(&self.reconciler);
        let all = reconciler.applied();
        let names = (all.iter())
            .map(|(name, service)| (service.service_id, name.clone()))
            .collect();
        let own = (all.iter())
            .filter(|(name, _)| reconciler.is_own(name))
            .map(|(_, service)| service.service_id)
            .collect();
        let only = (*filter != ServiceFilter::default()).then(|| {
            (all.iter())
                .filter(|(name, _)| filter.admits(name))
                .map(|(_, service)| service.service_id)
                .collect()
        });
        (names, Wanted { own, only })
    }
}

/// Which Services' connections are shown.
struct Wanted {
    /// The agent's own, which never are.
    own: HashSet<u32>,
    /// Those that were asked for; none for all, those of Services that are gone too.
    only: Option<HashSet<u32>>,
}

impl Wanted {
    fn admits(&self, service_id: u32) -> bool {
        !self.own.contains(&service_id) && self.only.as_ref().is_none_or(|only| only.contains(&service_id))
    }
}

/// The workload at an address, where the node's Pods tell.
fn workload(observation: &Observation, client: SocketAddr) -> Option<String> {
    let client = Client {
        netns: 0,
        address: Addr::from(client.ip()).octets(),
    };
    observation.caller(&client)?.workload()
}
