//! `explain`: where a flow goes, and why, by the same decisions that the kernel programs make.
//!
//! What begins at a socket of this node is [`socket`]'s: a future TCP connect has candidates with their chance, since its key is
//! the socket's cookie, which does not exist yet. What comes in as packets is [`packet`]'s: a tuple has one answer. Which of them
//! is meant is told, or taken from the client's address ([`whence`]).

mod packet;
mod socket;
mod whence;

use std::net::SocketAddr;

use lb_common::{
    backend::{Backend, state},
    frontend::Frontend,
    select::Tables,
    set::{ListEntry, SLOTS_PER_ELEMENT},
};

use super::{
    answers::{frontend_of, key_of, kind_name, protocol_name},
    state::{Shared, lock},
};
use crate::{
    compile::{Compiled, CompiledSet},
    model::ObjectName,
    reconcile::Reconciler,
    view::{CandidateView, ExplainQuery, ExplainView, Mode, QueryError, Verdict, Whence},
};

/// One set as [`lb_common::select`] reads it.
#[derive(Clone, Copy)]
struct Published<'a> {
    service: &'a Compiled,
    set: &'a CompiledSet,
    slots: &'a [u16],
    started: &'a [u64],
}

impl Published<'_> {
    /// The header of the set's list; the table begins at 0 here.
    fn header(&self) -> ListEntry {
        ListEntry {
            a: 0,
            b: self.set.table.slots,
            c: 0,
        }
    }
}

impl Tables for Published<'_> {
    type Backend = (u32, Backend);

    fn list(&self, index: u32) -> Option<ListEntry> {
        let at = index.checked_sub(self.set.word.offset())?;
        if at == 0 {
            return Some(self.header());
        }
        let (id, weight) = self.set.members.get(at as usize - 1)?;
        Some(ListEntry {
            a: *id,
            b: u32::from(*weight),
            c: self.started.get(at as usize - 1).copied().unwrap_or(0),
        })
    }

    fn element(&self, index: u32) -> Option<u64> {
        let first = (index * SLOTS_PER_ELEMENT) as usize;
        let four = self
            .slots
            .get(first..(first + SLOTS_PER_ELEMENT as usize).min(self.slots.len()))?;
        Some(four.iter().rev().fold(0, |e, slot| e << 16 | u64::from(*slot)))
    }

    fn backend(&self, id: u32) -> Option<((u32, Backend), bool)> {
        let found = self.service.backends.iter().find(|(known, _)| *known == id)?;
        Some((*found, found.1.state == state::ACTIVE))
    }
}

/// A frontend with its Service.
#[derive(Clone, Copy)]
struct Front<'a> {
    name: &'a ObjectName,
    service: &'a Compiled,
    frontend: Frontend,
}

impl<'a> Front<'a> {
    fn find(reconciler: &'a Reconciler, flow: &ExplainQuery) -> Option<Self> {
        let key = key_of(flow.vip.ip(), flow.vip.port(), flow.protocol);
        reconciler.applied().iter().find_map(|(name, service)| {
            let at = service.frontends.binary_search_by_key(&key, |(k, _)| *k).ok()?;
            let frontend = service.frontends[at].1;
            Some(Self {
                name,
                service,
                frontend,
            })
        })
    }

    /// The set of this id, which must be there.
    fn set(&self, set_id: u32) -> Result<&'a CompiledSet, QueryError> {
        let service = self.service;
        service.sets.iter().find(|set| set.set_id == set_id).ok_or_else(|| {
            QueryError::Failed(format!(
                "a frontend of {} names set {set_id}, which is not there",
                self.name
            ))
        })
    }
}

/// Answers for one flow.
pub(super) fn explain(shared: &Shared, flow: &ExplainQuery) -> Result<ExplainView, QueryError> {
    // What the node says of its interfaces and addresses is read before anything is locked.
    let told = match (shared.config.mode, flow.from) {
        (Mode::Observe, _) => whence::Told::default(),
        (Mode::Balance, from) => whence::tell(shared, flow.source, from),
    };
    let source = match flow.source_port {
        Some(port) => SocketAddr::new(flow.source, port).to_string(),
        None => flow.source.to_string(),
    };
    let mut view = ExplainView {
        source,
        vip: flow.vip,
        protocol: protocol_name(flow.protocol).to_owned(),
        from: told.from,
        assumed: told.assumed.is_some(),
        verdict: Verdict::Passed,
        service: None,
        frontend_kind: None,
        candidates: Vec::new(),
        source_address: None,
        flow: None,
        next: Vec::new(),
        steps: told.assumed.iter().cloned().collect(),
    };
    let reconciler = lock(&shared.reconciler);
    if !reconciler.is_synced() {
        return Err(QueryError::NotReady("the first synchronisation is not done".to_owned()));
    }
    let front = Front::find(&reconciler, flow);
    if let Some(front) = front {
        name(&mut view, &reconciler, front, flow);
    }
    match (shared.config.mode, told.from) {
        (Mode::Observe, _) if front.is_some() => {
            view.verdict = Verdict::Observed;
            view.steps
                .push("this agent observes: whoever else translates decides".to_owned());
            Ok(view)
        }
        (Mode::Balance, Whence::Outside | Whence::Guest) => {
            packet::explain(view, shared, &reconciler, front, flow, &told)
        }
        _ => {
            if let Some(front) = front {
                return socket::explain(view, &reconciler, front, flow);
            }
            view.steps.push(format!(
                "no frontend is {}/{}: the connection goes where it is sent",
                flow.vip, view.protocol
            ));
            Ok(view)
        }
    }
}

/// Says whose frontend it is.
fn name(view: &mut ExplainView, reconciler: &Reconciler, front: Front<'_>, flow: &ExplainQuery) {
    let key = key_of(flow.vip.ip(), flow.vip.port(), flow.protocol);
    let desired = reconciler.desired_service(front.name);
    let kind = desired
        .as_ref()
        .and_then(|d| frontend_of(d, &key))
        .map(|f| kind_name(f.kind));
    view.service = Some(front.name.to_string());
    view.frontend_kind = kind.map(str::to_owned);
    view.steps.push(format!(
        "{}/{} is a {} frontend of Service {}",
        flow.vip,
        view.protocol,
        kind.unwrap_or("known"),
        front.name
    ));
}

/// Candidates of these counts, sorted by address; those that were never met are left out.
fn candidates(service: &Compiled, set: &CompiledSet, counts: &[u64]) -> Vec<CandidateView> {
    let total: u64 = counts.iter().sum();
    let mut candidates: Vec<CandidateView> = (set.members.iter().zip(counts))
        .filter(|(_, count)| **count > 0)
        .filter_map(|((id, _), count)| {
            let (_, backend) = service.backends.iter().find(|(known, _)| known == id)?;
            Some(candidate(*id, backend, *count as f64 / total as f64))
        })
        .collect();
    candidates.sort_by_key(|c| (c.addr, c.port));
    candidates
}

fn candidate(id: u32, backend: &Backend, chance: f64) -> CandidateView {
    CandidateView {
        addr: backend.addr.into(),
        port: backend.port.get(),
        id,
        chance,
    }
}
