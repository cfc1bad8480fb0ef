//! What an operator is told of traffic from outside: the list of connections.

use anyhow::{Context, Result, ensure};

use super::Case;
use crate::{
    agent::{Agent, until},
    lab::{Lab, plan::Family},
    runner::scaled,
};

/// The cases.
pub const CASES: &[Case] = &[Case::new(
    "CONN",
    "connections_from_outside_are_listed_with_their_pod",
    listed,
)];

fn listed(lab: &Lab, family: Family) -> Result<String> {
    let service = lab.service(family).load_balancer("VIP");
    service.apply(&[lab.pod(1, 1).ready(family), lab.pod(3, 1).ready(family)])?;
    let mut talks = Vec::new();
    for _ in 0..scaled(8, 6) {
        talks.push(lab.outside().open(service.routed())?);
    }
    for talk in &talks {
        let own = talk.own()?;
        let found = until("the list to have a connection", || {
            let list = lab.node(1).ask(Agent::conns)?;
            let found = list
                .items
                .into_iter()
                .find(|conn| conn.client == own && conn.frontend == service.routed());
            found.with_context(|| format!("{own} is not listed"))
        })?;
        let source = (talk.met.peer != own).then_some(talk.met.peer);
        let seen = (found.frontend, found.backend, found.source);
        let wanted = (service.routed(), Some(talk.met.own), source);
        ensure!(seen == wanted, "{found:?}, and the pod saw {:?}", talk.met);
        ensure!(
            found.service == service.name && found.state.name() == "established",
            "{found:?}"
        );
    }
    Ok(format!("{} connections, with their pods and sources", talks.len()))
}
