//! Packets that come in: from outside the node, or of a guest.
//!
//! In the order of the ingress program: the flow that the table has, else the frontend and who may use it, the set, the memory of
//! affinity, the hash; and what the egress program will do with the source. [`choose`] mirrors the program's choice; a test
//! compares both.

mod fresh;
#[cfg(test)]
mod tests;

use fresh::fresh_end;
use lb_common::{
    abi::TCP,
    addr::{Addr, Port},
    backend::{Backend, state},
    flow::{BACKEND_TRIES, Flow, TupleKey, flag as flow_flag, side},
    hash, select,
};

use super::{Front, Published, whence::Told};
use crate::{
    agent::{answers::set_name, state::Shared},
    compile::{CompiledSet, proto},
    datapath::kernel::MapsError,
    observe::monotonic_ns,
    reconcile::Reconciler,
    view::{
        CandidateView, ConnView, ExplainQuery, ExplainView, FlowView, QueryError, Verdict, Whence, socket_address,
        wording::numbers::{counted, seconds},
    },
};

/// The ends of a client's packets.
#[derive(Clone, Copy, Debug)]
struct Ends {
    src: Addr,
    src_port: Port,
    dst: Addr,
    dst_port: Port,
    proto: u8,
}

impl Ends {
    fn hash(self) -> u64 {
        select::packet_hash(self.src, self.src_port, self.dst, self.dst_port, self.proto)
    }

    fn front(self) -> TupleKey {
        TupleKey::between(self.src, self.src_port, self.dst, self.dst_port, self.proto)
    }

    fn middle(self, backend: &Backend) -> TupleKey {
        TupleKey::between(self.src, self.src_port, backend.addr, backend.port, self.proto)
    }
}

/// What the ingress program would choose.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Choice {
    /// Nobody is usable.
    Nobody,
    /// The client talks to each that was tried already, from the same port.
    Collision,
    /// This backend, at the so-manieth try.
    Backend { id: u32, backend: Backend, tries: u32 },
}

/// The choice for a packet whose tuple has this hash: whom affinity remembers, else whom the hash falls on, unless it is taken;
/// whom the hash falls on then, for memory is asked once.
fn choose(
    tables: &Published<'_>,
    mut hash: u64,
    remembered: Option<(u32, Backend)>,
    taken: impl Fn(&Backend) -> Result<bool, MapsError>,
) -> Result<Choice, MapsError> {
    for tries in 1..=BACKEND_TRIES {
        let picked = || select::pick(tables, tables.set.word, tables.header(), hash).map(|pick| pick.backend);
        let Some((id, backend)) = remembered.filter(|_| tries == 1).or_else(picked) else {
            return Ok(Choice::Nobody);
        };
        if !taken(&backend)? {
            return Ok(Choice::Backend { id, backend, tries });
        }
        hash = hash::mix(hash);
    }
    Ok(Choice::Collision)
}

/// A question about packets, with what it is asked of.
struct Question<'a> {
    reconciler: &'a Reconciler,
    told: &'a Told,
    flow: &'a ExplainQuery,
    now_ns: u64,
    flow_now_ns: u64,
}

/// Answers for packets of a client outside, or of a guest.
pub(super) fn explain(
    mut view: ExplainView,
    shared: &Shared,
    reconciler: &Reconciler,
    front: Option<Front<'_>>,
    flow: &ExplainQuery,
    told: &Told,
) -> Result<ExplainView, QueryError> {
    let now_ns = monotonic_ns();
    let question = Question {
        reconciler,
        told,
        flow,
        now_ns,
        flow_now_ns: shared.census.flow_now_ns(now_ns),
    };
    let wanted_side = match told.from {
        Whence::Guest => side::GUEST,
        _ => side::UPLINK,
    };
    if !told
        .interfaces
        .iter()
        .any(|(_, _, interface)| interface.side == wanted_side)
    {
        view.steps.push(format!(
            "there is no {}: such packets pass untouched",
            match told.from {
                Whence::Guest => "interface of guests (--guest-interface)",
                _ => "uplink where packets are translated (--uplink)",
            }
        ));
        return Ok(view);
    }
    let known = match question.ends() {
        Some(ends) => question.known(ends)?,
        None => None,
    };
    if let Some(known) = known {
        return question.follow(view, front, &known);
    }
    let fresh = question.fresh(front, None)?;
    fresh.tell(&mut view);
    Ok(view)
}

fn failed(error: impl std::fmt::Display) -> QueryError {
    QueryError::Failed(error.to_string())
}

impl<'a> Question<'a> {
    fn proto(&self) -> u8 {
        proto(self.flow.protocol)
    }

    fn with_port(&self, port: u16) -> Ends {
        Ends {
            src: self.flow.source.into(),
            src_port: Port::new(port),
            dst: self.flow.vip.ip().into(),
            dst_port: Port::new(self.flow.vip.port()),
            proto: self.proto(),
        }
    }

    /// The ends, where the client's port is given.
    fn ends(&self) -> Option<Ends> {
        self.flow.source_port.map(|port| self.with_port(port))
    }

    /// The flow of the tuple, if its client is the one that is asked for.
    fn known(&self, ends: Ends) -> Result<Option<Flow>, QueryError> {
        let found = self.reconciler.kernel().flows().find(&ends.front()).map_err(failed)?;
        Ok(found
            .and_then(|(_, flow)| flow)
            .filter(|flow| flow.is_client(&ends.src, ends.src_port) && flow.is_vip(&ends.dst, ends.dst_port)))
    }

    /// What became of a flow's backend: one of [`state`], as the programs see it.
    fn backend_state(&self, flow: &Flow) -> u8 {
        let services = self.reconciler.applied().values();
        services
            .flat_map(|service| &service.backends)
            .find(|(id, _)| *id == flow.backend_id)
            .filter(|(_, backend)| flow.is_backend(&backend.addr, backend.port))
            .map_or(state::VACANT, |(_, backend)| backend.state)
    }

    fn set_of(&self, flow: &Flow) -> Option<&'a CompiledSet> {
        let services = self.reconciler.applied().values();
        (services.filter(|service| service.service_id == flow.service_id))
            .flat_map(|service| &service.sets)
            .find(|set| set.set_id == flow.set_id)
    }

    /// A flow that the table has: its packets, and what a new connection on its tuple would meet.
    fn follow(&self, mut view: ExplainView, front: Option<Front<'_>>, flow: &Flow) -> Result<ExplainView, QueryError> {
        let told = ConnView::of_flow(flow, self.flow_now_ns);
        let backend_state = self.backend_state(flow);
        let set = self.set_of(flow);
        let generation_now = set.map(|set| set.word.generation());
        let backend = socket_address(flow.backend, flow.backend_port);
        view.flow = Some(FlowView {
            backend,
            backend_id: flow.backend_id,
            backend_state: state_name(backend_state).to_owned(),
            state: told.state,
            age_seconds: told.age_seconds,
            idle_seconds: told.idle_seconds.unwrap_or_default(),
            source: told.source,
            resumed: told.resumed,
            generation: flow.generation,
            generation_now,
        });
        self.tell_flow(&mut view, flow, set);
        let fresh = self.fresh(front, Some(flow))?;
        if flow.is_expired(self.flow_now_ns) {
            view.steps.push(format!(
                "no packet was seen for {}: it has expired, and the client's next packet is placed anew",
                seconds(told.idle_seconds.unwrap_or_default())
            ));
            fresh.tell(&mut view);
            return Ok(view);
        }
        if flow.flags & flow_flag::EXHAUSTED != 0 {
            view.verdict = Verdict::Refused;
            view.steps.push(
                "no port was free for the node's own source: the client's next packet is refused, and the flow ends by it"
                    .to_owned(),
            );
            return Ok(view);
        }
        if flow.proto != TCP && backend_state == state::VACANT {
            view.steps.push(format!(
                "{backend} has left every set: the next datagram is placed again"
            ));
            fresh.tell(&mut view);
            return Ok(view);
        }
        view.verdict = Verdict::Translated;
        view.candidates = vec![CandidateView {
            addr: backend.ip(),
            port: backend.port(),
            id: flow.backend_id,
            chance: 1.0,
        }];
        view.source_address = told.source.map(|source| source.ip());
        view.steps
            .push(format!("{backend} is {} now", state_name(backend_state)));
        view.steps.push(format!("its packets go on to {backend}"));
        let is_same_set = generation_now == Some(flow.generation);
        if flow.proto == TCP && flow.is_open() && is_same_set && backend_state == state::ACTIVE {
            view.steps.push(format!(
                "the connection is open: a SYN ends nothing, it goes to {backend} too, which tells the client what it knows"
            ));
            view.next.clone_from(&view.candidates);
        } else if flow.proto == TCP {
            let repeatable = backend_state == state::ACTIVE && flow.repeats(flow.isn);
            view.steps.push(format!(
                "{} ends this flow and is placed anew in the same packet{}",
                if repeatable {
                    "a SYN that does not repeat its first one"
                } else {
                    "any SYN"
                },
                fresh_end(&fresh)
            ));
            view.next = fresh.candidates;
        }
        Ok(view)
    }

    /// What the flow is, and what has changed since it began.
    fn tell_flow(&self, view: &mut ExplainView, flow: &Flow, set: Option<&CompiledSet>) {
        let told = ConnView::of_flow(flow, self.flow_now_ns);
        let begun = if told.resumed {
            "taken up in the middle and placed by its tuple's hash"
        } else {
            "begun"
        };
        view.steps.push(format!(
            "the flow table has this tuple: {}, {begun} {} ago",
            told.state,
            seconds(told.age_seconds)
        ));
        let since = match set {
            None => "that set is gone".to_owned(),
            Some(set) if set.word.generation() == flow.generation => "it is the same now".to_owned(),
            Some(set) => format!(
                "it is at publication {} now, with {}",
                set.word.generation(),
                counted(set.members.len() as u64, "endpoint")
            ),
        };
        view.steps.push(format!(
            "its endpoint was chosen from {} in publication {}; {since}",
            set.map_or_else(
                || format!("set {}", flow.set_id),
                |set| format!("set {}", set_name(&set.name))
            ),
            flow.generation
        ));
    }

    fn protocol(&self) -> &'static str {
        crate::agent::answers::protocol_name(self.flow.protocol)
    }
}

/// The word for a backend's state.
const fn state_name(found: u8) -> &'static str {
    match found {
        state::ACTIVE => "active",
        state::DRAINING => "draining",
        state::EJECTED => "ejected",
        _ => "gone",
    }
}
