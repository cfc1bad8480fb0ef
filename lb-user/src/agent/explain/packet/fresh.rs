//! A packet that no flow is known of: who may use the frontend, which backend it gets, and with which source it leaves.

use std::net::{IpAddr, SocketAddr};

use lb_common::{
    abi::TCP,
    addr::Addr,
    affinity::{AffinityKey, Membership},
    backend::Backend,
    flow::{Flow, side},
    frontend::flag,
    hash,
    select::Tables,
};

use super::{Choice, Question, choose, failed};
use crate::{
    agent::{
        answers::set_name,
        explain::{Front, Published, candidate, candidates},
    },
    datapath::kernel::MapsError,
    view::{
        CandidateView, ExplainView, QueryError, Verdict, Whence, socket_address,
        wording::numbers::{counted, seconds},
    },
};

/// The source ports over which the chances of an unknown one are told.
const PORTS: std::ops::RangeInclusive<u16> = 1_024..=u16::MAX;

/// What becomes of a packet that no flow is known of.
#[derive(Debug)]
pub(super) struct Fresh {
    pub(super) verdict: Verdict,
    pub(super) candidates: Vec<CandidateView>,
    pub(super) source_address: Option<IpAddr>,
    pub(super) steps: Vec<String>,
}

impl Fresh {
    /// Makes it the answer.
    pub(super) fn tell(self, view: &mut ExplainView) {
        view.verdict = self.verdict;
        view.candidates = self.candidates;
        view.source_address = self.source_address;
        view.steps.extend(self.steps);
    }

    fn ends(verdict: Verdict, steps: Vec<String>) -> Self {
        Self {
            verdict,
            candidates: Vec::new(),
            source_address: None,
            steps,
        }
    }
}

impl Question<'_> {
    /// What becomes of a packet that no flow is known of; `old` is a flow that ends by it.
    pub(super) fn fresh(&self, front: Option<Front<'_>>, old: Option<&Flow>) -> Result<Fresh, QueryError> {
        let Some(front) = front else {
            let step = format!(
                "no frontend is {}/{}: the packet passes untouched",
                self.flow.vip,
                self.protocol()
            );
            return Ok(Fresh::ends(Verdict::Passed, vec![step]));
        };
        let guest = self.told.from == Whence::Guest;
        let frontend = front.frontend;
        if !guest && frontend.flags & flag::OUTSIDE == 0 {
            let step = "it is not served to clients outside: the packet passes untouched".to_owned();
            return Ok(Fresh::ends(Verdict::Passed, vec![step]));
        }
        let mut steps = Vec::new();
        if !guest && frontend.flags & flag::SOURCE_RANGES != 0 {
            let service = front.service;
            let admits = (service.sources.iter()).any(|source| source.admits(service.service_id, self.flow.source));
            if !admits {
                steps.push(format!(
                    "no source range of the Service holds {}: dropped",
                    self.flow.source
                ));
                return Ok(Fresh::ends(Verdict::Dropped, steps));
            }
            steps.push(format!("a source range of the Service holds {}", self.flow.source));
        }
        let set = front.set(if guest {
            frontend.set_id
        } else {
            frontend.outside_set_id
        })?;
        let silent = if guest {
            flag::UNREACHABLE_WHEN_EMPTY
        } else {
            flag::SILENT_WHEN_EMPTY_OUTSIDE
        };
        let nobody = |mut steps: Vec<String>| {
            if frontend.flags & silent != 0 {
                steps.push(format!(
                    "set {} has no usable endpoint on this node, and its policy is Local: dropped",
                    set_name(&set.name)
                ));
                return Fresh::ends(Verdict::Dropped, steps);
            }
            let answer = if self.proto() == TCP { "RST" } else { "port unreachable" };
            steps.push(format!(
                "set {} has no usable endpoint: {answer} at once",
                set_name(&set.name)
            ));
            Fresh::ends(Verdict::Refused, steps)
        };
        if set.word.count() == 0 {
            return Ok(nobody(steps));
        }
        let kernel = self.reconciler.kernel();
        let slots = kernel.table(set.table.offset, set.table.slots).map_err(failed)?;
        let tables = Published {
            service: front.service,
            set,
            slots: &slots,
            started: &[],
        };
        steps.push(format!(
            "set {} has {} in a Maglev table of {} slots (generation {})",
            set_name(&set.name),
            counted(set.members.len() as u64, "usable endpoint"),
            set.table.slots,
            set.word.generation()
        ));
        let remembered = self.remembered(&tables, frontend.affinity_seconds, &mut steps)?;
        let Some(ends) = self.ends() else {
            return self.spread(&tables, remembered, frontend.flags, steps);
        };
        let taken = |backend: &Backend| -> Result<bool, MapsError> {
            let found = kernel.flows().find(&ends.middle(backend))?;
            Ok(found.and_then(|(_, flow)| flow).is_some_and(|flow| {
                let ours = old.is_some_and(|old| old.serial() == flow.serial() && old.start_ns == flow.start_ns);
                !ours && !flow.is_closed() && !flow.is_expired(self.flow_now_ns)
            }))
        };
        match choose(&tables, ends.hash(), remembered, taken).map_err(failed)? {
            Choice::Nobody => Ok(nobody(steps)),
            Choice::Collision => {
                steps.push(
                    "from this port the client talks to each endpoint that was tried already, through another frontend: refused"
                        .to_owned(),
                );
                Ok(Fresh::ends(Verdict::Refused, steps))
            }
            Choice::Backend { id, backend, tries } => {
                let at = socket_address(backend.addr, backend.port);
                if tries > 1 {
                    steps.push(format!(
                        "the client talks to {} already, from this port through another frontend; {at} comes next",
                        counted(u64::from(tries - 1), "endpoint")
                    ));
                } else if remembered.is_none() {
                    let slot = hash::scale((ends.hash() >> 32) as u32, set.table.slots);
                    steps.push(format!(
                        "the tuple's hash falls on slot {slot}, which leads to {at}; every node chooses alike"
                    ));
                }
                self.leave(
                    &backend,
                    frontend.flags,
                    Fresh {
                        verdict: Verdict::Translated,
                        candidates: vec![candidate(id, &backend, 1.0)],
                        source_address: None,
                        steps,
                    },
                )
            }
        }
    }

    /// Whom affinity remembers, as the program looks it up.
    fn remembered(
        &self,
        tables: &Published<'_>,
        affinity_seconds: u32,
        steps: &mut Vec<String>,
    ) -> Result<Option<(u32, Backend)>, QueryError> {
        if affinity_seconds == 0 {
            return Ok(None);
        }
        let set_id = tables.set.set_id;
        let kernel = self.reconciler.kernel();
        let memory = kernel
            .affinity(&AffinityKey::outside(self.flow.source.into(), set_id))
            .map_err(failed)?;
        let Some(memory) = memory.filter(|memory| memory.holds(self.now_ns, affinity_seconds)) else {
            steps.push(format!(
                "ClientIP affinity of {affinity_seconds} s: nothing is remembered of this client"
            ));
            return Ok(None);
        };
        let member = Membership {
            set_id,
            backend_id: memory.backend_id,
        };
        let usable = tables.backend(memory.backend_id).filter(|(_, usable)| *usable);
        let Some((found, _)) = usable.filter(|_| kernel.is_member(&member)) else {
            steps.push(format!(
                "ClientIP affinity of {affinity_seconds} s: the endpoint that this client met last is not usable any more"
            ));
            return Ok(None);
        };
        steps.push(format!(
            "ClientIP affinity of {affinity_seconds} s: this client met {} {} ago, and meets it again",
            socket_address(found.1.addr, found.1.port),
            seconds(self.now_ns.saturating_sub(memory.last_ns) as f64 / 1e9)
        ));
        Ok(Some(found))
    }

    /// The chances over all source ports, where the client's is not known.
    fn spread(
        &self,
        tables: &Published<'_>,
        remembered: Option<(u32, Backend)>,
        flags: u32,
        mut steps: Vec<String>,
    ) -> Result<Fresh, QueryError> {
        if let Some((id, backend)) = remembered {
            return self.leave(
                &backend,
                flags,
                Fresh {
                    verdict: Verdict::Translated,
                    candidates: vec![candidate(id, &backend, 1.0)],
                    source_address: None,
                    steps,
                },
            );
        }
        let mut counts = vec![0_u64; tables.set.members.len()];
        for port in PORTS {
            let choice = choose(tables, self.with_port(port).hash(), None, |_| Ok(false)).map_err(failed)?;
            if let Choice::Backend { id, .. } = choice
                && let Some(at) = tables.set.members.iter().position(|(member, _)| *member == id)
            {
                counts[at] += 1;
            }
        }
        steps.push(format!(
            "the client's port is not given: the chances are those over ports {} to {}; with a port there is one answer",
            PORTS.start(),
            PORTS.end()
        ));
        if self.told.from == Whence::Outside && flags & flag::MASQUERADE_OUTSIDE != 0 {
            steps.push(
                "an endpoint behind an uplink sees the node's own source, one on this node the client's".to_owned(),
            );
        }
        Ok(Fresh {
            verdict: Verdict::Translated,
            candidates: candidates(tables.service, tables.set, &counts),
            source_address: None,
            steps,
        })
    }

    /// What the egress program does with the source on the way to a backend.
    fn leave(&self, backend: &Backend, flags: u32, mut fresh: Fresh) -> Result<Fresh, QueryError> {
        let to = IpAddr::from(backend.addr);
        let way = self.told.leads(to).map_err(QueryError::Failed)?;
        let masquerade = self.told.from == Whence::Outside && flags & flag::MASQUERADE_OUTSIDE != 0;
        let hairpin = backend.addr == Addr::from(self.flow.source);
        let Some((_, name, interface)) = way.filter(|(_, _, interface)| {
            if interface.side == side::GUEST {
                hairpin
            } else {
                masquerade
            }
        }) else {
            let why = match way {
                Some((_, name, _)) => format!("{to} is reached by {name}, and its policy keeps sources"),
                None => format!("{to} is reached by no uplink"),
            };
            fresh
                .steps
                .push(format!("{why}: the endpoint sees the client's own address"));
            return Ok(fresh);
        };
        let source = if to.is_ipv4() { interface.v4 } else { interface.v6 };
        if source == Addr::ZERO {
            fresh
                .steps
                .push(format!("{name} leads to {to} and has no address to send from: dropped"));
            return Ok(Fresh::ends(Verdict::Dropped, fresh.steps));
        }
        let settings = self.reconciler.kernel().flows().settings().map_err(failed)?;
        let source = IpAddr::from(source);
        fresh.steps.push(format!(
            "{to} is reached by {name}{}: it sees the node's own {source} with a port of {} to {}",
            if interface.side == side::GUEST {
                ", and is the client itself"
            } else {
                ""
            },
            settings.first_port,
            settings.last_port
        ));
        fresh.source_address = Some(source);
        Ok(fresh)
    }
}

/// How the sentence about a new connection ends.
pub(super) fn fresh_end(fresh: &Fresh) -> String {
    match (&fresh.verdict, fresh.candidates.as_slice()) {
        (Verdict::Translated, [only]) => format!(": it would go to {}", SocketAddr::new(only.addr, only.port)),
        (Verdict::Translated, _) => String::new(),
        (verdict, _) => {
            let why = fresh.steps.last().map_or_else(String::new, |step| format!(" ({step})"));
            format!(": it would be {verdict}{why}")
        }
    }
}
