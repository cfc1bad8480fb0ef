//! `explain`: where a flow goes, and why, by the same decisions that the kernel programs make.
//!
//! A future TCP connect has candidates with their chance: its key is the socket's cookie, which does not exist yet. Affinity
//! has one answer where the client is known.

use std::net::SocketAddr;

use lb_common::{
    backend::{Backend, state},
    frontend::{Frontend, flag},
    hash,
    select::{self, Tables},
    set::{ListEntry, SLOTS_PER_ELEMENT, SetWord},
};

use super::{
    answers::{frontend_of, key_of, kind_name, protocol_name, set_name},
    state::{Shared, lock},
};
use crate::{
    compile::{Compiled, CompiledSet},
    model::Protocol,
    view::{CandidateView, ExplainQuery, ExplainView, Mode, QueryError, Verdict},
};

/// How many keys are tried to tell the chances.
const TRIALS: u64 = 20_000;

/// One set as [`select`] reads it.
struct Published<'a> {
    service: &'a Compiled,
    set: &'a CompiledSet,
    slots: &'a [u16],
    started: &'a [u64],
}

impl Tables for Published<'_> {
    type Backend = (u32, Backend);

    fn list(&self, index: u32) -> Option<ListEntry> {
        let at = index.checked_sub(self.set.word.offset())?;
        if at == 0 {
            return Some(ListEntry {
                a: 0,
                b: self.set.table.slots,
                c: 0,
            });
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

/// Answers for one flow.
pub(super) fn explain(shared: &Shared, flow: &ExplainQuery) -> Result<ExplainView, QueryError> {
    let source = match flow.source_port {
        Some(port) => SocketAddr::new(flow.source, port).to_string(),
        None => flow.source.to_string(),
    };
    let mut view = ExplainView {
        source,
        vip: flow.vip,
        protocol: protocol_name(flow.protocol).to_owned(),
        verdict: Verdict::Passed,
        service: None,
        frontend_kind: None,
        candidates: Vec::new(),
        steps: Vec::new(),
    };
    let reconciler = lock(&shared.reconciler);
    if !reconciler.is_synced() {
        return Err(QueryError::NotReady("the first synchronisation is not done".to_owned()));
    }
    let key = key_of(flow.vip.ip(), flow.vip.port(), flow.protocol);
    let found = reconciler.applied().iter().find_map(|(name, service)| {
        let at = service.frontends.binary_search_by_key(&key, |(k, _)| *k).ok()?;
        Some((name, service, service.frontends[at].1))
    });
    let Some((name, service, frontend)) = found else {
        view.steps.push(format!(
            "no frontend is {}/{}: the connection goes where it is sent",
            flow.vip, view.protocol
        ));
        return Ok(view);
    };
    let desired = reconciler.desired_service(name);
    let kind = desired
        .as_ref()
        .and_then(|d| frontend_of(d, &key))
        .map(|f| kind_name(f.kind));
    view.service = Some(name.to_string());
    view.frontend_kind = kind.map(str::to_owned);
    view.steps.push(format!(
        "{}/{} is a {} frontend of Service {name}",
        flow.vip,
        view.protocol,
        kind.unwrap_or("known")
    ));
    if shared.config.mode == Mode::Observe {
        view.verdict = Verdict::Observed;
        view.steps
            .push("this agent observes: whoever else translates decides".to_owned());
        return Ok(view);
    }
    let Some(set) = service.sets.iter().find(|set| set.set_id == frontend.set_id) else {
        return Err(QueryError::Failed(format!(
            "frontend {} names set {}, which is not there",
            flow.vip, frontend.set_id
        )));
    };
    if set.word.count() == 0 {
        reject(&mut view, frontend, set);
        return Ok(view);
    }
    let slots = reconciler
        .kernel()
        .table(set.table.offset, set.table.slots)
        .map_err(|error| QueryError::Failed(error.to_string()))?;
    let mut started = reconciler
        .kernel()
        .started(set.word)
        .map_err(|error| QueryError::Failed(error.to_string()))?;
    view.verdict = Verdict::Translated;
    view.steps.push(format!(
        "set {} has {} usable endpoints in a Maglev table of {} slots (generation {})",
        set_name(&set.name),
        set.members.len(),
        set.table.slots,
        set.word.generation()
    ));
    if frontend.affinity_seconds > 0 {
        view.steps.push(format!(
            "ClientIP affinity: a client (network namespace) that connected within {} s meets its backend again; a new one is placed as below",
            frontend.affinity_seconds
        ));
    }
    let balanced = flow.protocol == Protocol::Tcp;
    view.steps.push(if balanced {
        "each TCP connection is its own key: of two slots the one whose endpoint has started fewer connections for its weight wins"
            .to_owned()
    } else {
        "each UDP socket is one key and stays with its slot's endpoint".to_owned()
    });
    view.candidates = chances(service, set, &slots, &mut started, balanced);
    Ok(view)
}

fn reject(view: &mut ExplainView, frontend: Frontend, set: &CompiledSet) {
    if frontend.flags & flag::UNREACHABLE_WHEN_EMPTY != 0 {
        view.verdict = Verdict::Unreachable;
        view.steps.push(format!(
            "set {} has no usable endpoint on this node, and its policy is Local: EHOSTUNREACH at once",
            set_name(&set.name)
        ));
    } else {
        view.verdict = Verdict::Refused;
        view.steps.push(format!(
            "set {} has no usable endpoint: ECONNREFUSED at once",
            set_name(&set.name)
        ));
    }
}

/// The chances of the next connection, by trying many keys on what the kernel holds now.
fn chances(
    service: &Compiled,
    set: &CompiledSet,
    slots: &[u16],
    started: &mut [u64],
    balanced: bool,
) -> Vec<CandidateView> {
    let mut counts = vec![0u64; set.members.len()];
    // What is told is the long run, not the next millisecond: differences of started connections even out at once.
    started.fill(0);
    for trial in 0..TRIALS {
        let tables = Published {
            service,
            set,
            slots,
            started,
        };
        let header = ListEntry {
            a: 0,
            b: set.table.slots,
            c: 0,
        };
        let key = select::socket_hash(hash::mix(trial), set.set_id);
        let word: SetWord = set.word;
        let pick = if balanced {
            select::pick_balanced(&tables, word, header, key)
        } else {
            select::pick(&tables, word, header, key)
        };
        if let Some(pick) = pick {
            let member = (pick.list_index - word.offset() - 1) as usize;
            counts[member] += 1;
            if balanced {
                started[member] += 1;
            }
        }
    }
    let total: u64 = counts.iter().sum();
    let mut candidates: Vec<CandidateView> = set
        .members
        .iter()
        .zip(counts)
        .filter(|(_, count)| *count > 0)
        .filter_map(|((id, _), count)| {
            let (_, backend) = service.backends.iter().find(|(known, _)| known == id)?;
            Some(CandidateView {
                addr: backend.addr.into(),
                port: backend.port.get(),
                id: *id,
                chance: count as f64 / total as f64,
            })
        })
        .collect();
    candidates.sort_by_key(|c| (c.addr, c.port));
    candidates
}
