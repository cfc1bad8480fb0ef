//! Connections that begin at a socket of this node.
//!
//! A future TCP connect has candidates with their chance: its key is the socket's cookie, which does not exist yet. Affinity
//! has one answer where the client is known.

use lb_common::{
    frontend::{Frontend, flag},
    hash, select,
};

use super::{Front, Published, candidates};
use crate::{
    agent::answers::set_name,
    compile::{Compiled, CompiledSet},
    model::Protocol,
    reconcile::Reconciler,
    view::{CandidateView, ExplainQuery, ExplainView, QueryError, Verdict},
};

/// How many keys are tried to tell the chances.
const TRIALS: u64 = 20_000;

/// Answers for a connection of a socket here.
pub(super) fn explain(
    mut view: ExplainView,
    reconciler: &Reconciler,
    front: Front<'_>,
    flow: &ExplainQuery,
) -> Result<ExplainView, QueryError> {
    let Front { service, frontend, .. } = front;
    let set = front.set(frontend.set_id)?;
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
        let (header, word) = (tables.header(), set.word);
        let key = select::socket_hash(hash::mix(trial), set.set_id);
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
    candidates(service, set, &counts)
}
