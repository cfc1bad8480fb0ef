//! Where packets are translated: brings the programs to the interfaces that are chosen, and tells them what each is.
//!
//! What is chosen is decided in [`crate::node::links`]. The order of an interface's life: it is described to the programs, then
//! they are attached; they are detached, then it is forgotten. The invariant: an interface that refuses keeps no other waiting.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::{Duration, Instant},
};

use lb_common::{
    addr::Addr,
    flow::{Interface, side},
};

use super::state::{Shared, lock};
use crate::{
    datapath::attach::{self, AttachError, Layer},
    doctor::{self, Check},
    model::Kind,
    node::links::{self, Choice, Chosen, Held, Network, Reason, Wish},
    view::{InterfaceSide, InterfaceView},
};

/// What is said where the programs cannot be loaded.
const UNLOADABLE: &str = "the kernel refuses the programs; the agent's log says why";
/// How much longer than a look at all routes took it is left alone: a node may have a million of them.
const ROUTES_REST: u32 = 50;
/// A shorter rest is none.
const LONG_REST: Duration = Duration::from_millis(100);

/// What is known of the interfaces where packets are translated.
#[derive(Debug, Default)]
pub(super) struct Uplinks {
    /// What was chosen last, by index.
    chosen: BTreeMap<u32, Chosen>,
    /// Why an interface that was chosen does not translate, by index.
    refused: BTreeMap<u32, String>,
    /// Uplinks that are named and not there.
    missing: Vec<String>,
    /// Kinds of interfaces whose programs the kernel refuses: it would refuse them again, after seconds of work.
    unloadable: Vec<Layer>,
    /// Interfaces with a default route, and when to look for them again.
    default_routes: Option<(BTreeSet<u32>, Instant)>,
    /// What was chosen a moment ago.
    held: Held,
    /// The node's addresses, as they were last known.
    node: Vec<IpAddr>,
    /// What was said of the node's settings, once they were looked at.
    complaints: Option<Vec<Check>>,
    /// Whether what an earlier agent has left was taken away.
    swept: bool,
    /// Why not.
    unswept: Option<String>,
}

impl Uplinks {
    fn read(&mut self) -> Result<Network, String> {
        let now = Instant::now();
        // A reading that lacks what is held may lack the very route that has come back since.
        let mut awaited = self
            .chosen
            .values()
            .filter(|chosen| matches!(chosen.reason, Reason::DefaultRoute | Reason::Held));
        let known = self
            .default_routes
            .take()
            .filter(|(routes, until)| now < *until && awaited.all(|chosen| routes.contains(&chosen.index)));
        let (routes, until) = if let Some(known) = known {
            known
        } else {
            let routes = links::read_default_routes().map_err(|error| error.reason())?;
            let rest = now.elapsed() * ROUTES_REST;
            // On most nodes a look takes next to nothing, and every change is looked at.
            let rest = if rest < LONG_REST { Duration::ZERO } else { rest };
            (routes, Instant::now() + rest)
        };
        let network = Network::read_with(&routes).map_err(|error| error.reason());
        self.default_routes = Some((routes, until));
        network
    }

    /// What `status` shows.
    pub(super) fn views(&self) -> Vec<InterfaceView> {
        let there = self.chosen.values().map(|chosen| InterfaceView {
            name: chosen.name.clone(),
            index: Some(chosen.index),
            side: match chosen.interface.side {
                side::GUEST => InterfaceSide::Guest,
                _ => InterfaceSide::Uplink,
            },
            addresses: [chosen.interface.v4, chosen.interface.v6]
                .into_iter()
                .filter(|address| *address != Addr::ZERO)
                .map(IpAddr::from)
                .collect(),
            reason: Some(chosen.reason.to_string()),
            problem: self.refused.get(&chosen.index).cloned(),
        });
        let missing = self.missing.iter().map(|name| InterfaceView {
            name: name.clone(),
            index: None,
            side: InterfaceSide::Uplink,
            addresses: Vec::new(),
            reason: None,
            problem: Some("there is no interface of this name".to_owned()),
        });
        there.chain(missing).collect()
    }
}

/// What the programs were told of interfaces, by index.
type Described = BTreeMap<u32, Interface>;
/// Why interfaces could not be described, by index.
type Refusals = BTreeMap<u32, String>;

impl Shared {
    /// Brings the translators to where they are wanted now, and takes them away from everywhere else.
    pub(super) fn follow_uplinks(&self) -> Result<(), String> {
        let mut uplinks = lock(&self.uplinks);
        if !lock(&self.programs).predecessors.is_empty() {
            return Ok(());
        }
        let mut settled = true;
        let wanted = if self.config.translates() {
            let network = uplinks.read()?;
            settled = self.learn_node(&mut uplinks.node);
            let node = uplinks.node.clone();
            let wish = Wish {
                uplinks: &self.config.uplinks,
                guests: &self.config.guests,
                node: &node,
            };
            let mut choice = links::choose(&network, &wish);
            if !settled {
                let described = {
                    let reconciler = lock(&self.reconciler);
                    let flows = reconciler.kernel().flows();
                    flows.interfaces().map_err(|error| error.to_string())?
                };
                choice.keep_earlier(&network, &wish, &described);
            }
            uplinks.held.hold(&mut choice, &network, &wish, Instant::now());
            choice
        } else if uplinks.swept {
            return Ok(());
        } else {
            Choice::default()
        };
        if wanted.missing != uplinks.missing {
            for name in wanted.missing.iter().filter(|name| !uplinks.missing.contains(name)) {
                tracing::warn!(interface = %name, "an uplink that is named is not there; it is awaited");
            }
            uplinks.missing = wanted.missing;
        }
        let wanted: BTreeMap<u32, Chosen> = wanted.chosen.into_iter().map(|chosen| (chosen.index, chosen)).collect();
        let attached = self.bring(&mut uplinks, &wanted)?;
        self.take_away(&mut uplinks, &wanted, &attached)?;
        if self.config.translates() && (uplinks.chosen != wanted || uplinks.complaints.is_none()) {
            self.complain(&mut uplinks, &wanted);
        }
        uplinks.swept |= settled && uplinks.unswept.is_none();
        uplinks.chosen = wanted;
        Ok(())
    }

    /// Says what on this node keeps packets of these interfaces from where they should go, unless it was said.
    fn complain(&self, uplinks: &mut Uplinks, wanted: &BTreeMap<u32, Chosen>) {
        let choice = Choice {
            chosen: wanted.values().cloned().collect(),
            missing: Vec::new(),
        };
        let complaints = doctor::packets::complaints(&choice, self.config.snat_ports);
        let said = uplinks.complaints.take().unwrap_or_default();
        for check in complaints.iter().filter(|check| !said.contains(check)) {
            tracing::warn!(check = %check.id, found = %check.found, wanted = %check.wanted, "{}", check.hint);
        }
        uplinks.complaints = Some(complaints);
    }

    /// Learns the node's addresses, those of the flags before those of the Node object, and tells whether they are known: until
    /// the source has told of Nodes, nobody can say that there is none. A Node that is deleted leaves its addresses behind, as
    /// the node itself is still there.
    fn learn_node(&self, addresses: &mut Vec<IpAddr>) -> bool {
        if !self.config.node_addresses.is_empty() {
            addresses.clone_from(&self.config.node_addresses);
            return true;
        }
        let reconciler = lock(&self.reconciler);
        let desired = reconciler.desired();
        if let Some(node) = desired.node() {
            *addresses = node.internal_ips.iter().chain(&node.external_ips).copied().collect();
        }
        desired.synced_kind(Kind::Node)
    }

    /// Describes the wanted interfaces, the uplinks first; returns what was described before, and which could not be, and why.
    ///
    /// Interfaces that are gone make room for those that come.
    fn describe(&self, wanted: &BTreeMap<u32, Chosen>) -> Result<(Described, Refusals), String> {
        let all = attach::interfaces().map_err(|error| error.to_string())?;
        let all: BTreeSet<u32> = all.into_iter().map(|(_, index)| index).collect();
        let mut reconciler = lock(&self.reconciler);
        let flows = reconciler.kernel_mut().flows_mut();
        let mut described: BTreeMap<u32, Interface> =
            flows.interfaces().map_err(|e| e.to_string())?.into_iter().collect();
        let gone = |index: &u32| !wanted.contains_key(index) && !all.contains(index);
        for (index, _) in described.extract_if(.., |index, _| gone(index)) {
            flows.remove_interface(index).map_err(|error| error.to_string())?;
        }
        let mut order: Vec<&Chosen> = wanted.values().collect();
        order.sort_by_key(|chosen| chosen.interface.side != side::UPLINK);
        let mut refusals = BTreeMap::new();
        for chosen in order {
            if described.get(&chosen.index) != Some(&chosen.interface)
                && let Err(error) = flows.put_interface(chosen.index, &chosen.interface)
            {
                refusals.insert(chosen.index, error.to_string());
            }
        }
        Ok((described, refusals))
    }

    /// Describes the wanted interfaces and attaches there; returns where that has come to pass.
    fn bring(&self, uplinks: &mut Uplinks, wanted: &BTreeMap<u32, Chosen>) -> Result<BTreeSet<u32>, String> {
        let (described, mut refusals) = self.describe(wanted)?;
        let mut programs = lock(&self.programs);
        let programs = &mut *programs;
        let there: BTreeSet<u32> = programs.attachments.translated().into_iter().collect();
        let mut attached = BTreeSet::new();
        for (index, chosen) in wanted {
            let known = uplinks.chosen.get(index);
            let is_new = known.is_none_or(|known| known.interface != chosen.interface || known.name != chosen.name);
            let translates = there.contains(index) && known.is_some_and(|known| known.hardware == chosen.hardware);
            if translates && !refusals.contains_key(index) {
                attached.insert(*index);
                if is_new {
                    tell(chosen, "an interface where packets are translated has changed");
                }
                continue;
            }
            let refused = match (refusals.remove(index), Layer::of_hardware(chosen.hardware)) {
                (Some(why), _) => Err(why),
                (None, None) => Err(format!(
                    "its packets begin with a header that nobody here reads (type {})",
                    chosen.hardware
                )),
                (None, Some(layer)) if uplinks.unloadable.contains(&layer) => Err(UNLOADABLE.to_owned()),
                (None, Some(layer)) => {
                    match programs
                        .attachments
                        .translate(&mut programs.object, *index, &chosen.name, layer)
                    {
                        Ok(_) => Ok(()),
                        Err(AttachError::Interface { .. }) => {
                            tracing::debug!(interface = %chosen.name, "went before its packets could be translated");
                            continue;
                        }
                        Err(AttachError::Object(error)) if error.is_final() => {
                            // The verifier's log is for the agent's, once.
                            tracing::error!(%error, "the programs that translate packets cannot be loaded");
                            uplinks.unloadable.push(layer);
                            Err(UNLOADABLE.to_owned())
                        }
                        Err(error) => Err(error.to_string()),
                    }
                }
            };
            match refused {
                Ok(()) => {
                    attached.insert(*index);
                    uplinks.refused.remove(index);
                    if described.get(index) == Some(&chosen.interface) {
                        tell(chosen, "packets go on being translated");
                    } else {
                        tell(chosen, "packets are translated");
                    }
                }
                Err(why) => {
                    if uplinks.refused.get(index) != Some(&why) {
                        tracing::warn!(interface = %chosen.name, %why, "packets are not translated here");
                        uplinks.refused.insert(*index, why);
                    }
                }
            }
        }
        Ok(attached)
    }

    /// Detaches from every interface that is not wanted, and forgets those that carry no translators.
    fn take_away(
        &self,
        uplinks: &mut Uplinks,
        wanted: &BTreeMap<u32, Chosen>,
        attached: &BTreeSet<u32>,
    ) -> Result<(), String> {
        let mut kept = attached.clone();
        {
            let mut programs = lock(&self.programs);
            // Listed under the lock: by an older list, what was attached meanwhile would be taken for gone.
            let there = attach::interfaces().map_err(|error| error.to_string())?;
            let attachments = &mut programs.attachments;
            attachments.keep_interfaces(&there);
            for index in attachments.translated() {
                if !wanted.contains_key(&index) {
                    attachments.stop_translating(index).map_err(|error| error.to_string())?;
                }
            }
            for (index, chosen) in uplinks.chosen.iter().filter(|(index, _)| !wanted.contains_key(index)) {
                // What could not be taken over from an earlier agent is not among those.
                attachments
                    .stop_translating(*index)
                    .map_err(|error| error.to_string())?;
                tracing::info!(interface = %chosen.name, index, "packets are translated no longer");
            }
            // Where the try to take over has failed, an earlier agent's programs go on by what they were told.
            for index in wanted.keys().filter(|index| !attached.contains(index)) {
                if attachments.has_translators(*index).map_err(|error| error.to_string())? {
                    kept.insert(*index);
                }
            }
            if !uplinks.swept {
                match attachments.sweep_interfaces(|index| wanted.contains_key(&index)) {
                    Ok(swept) => {
                        uplinks.unswept = None;
                        if !swept.is_empty() {
                            tracing::info!(links = ?swept, "detached what an earlier agent had attached to interfaces");
                        }
                    }
                    Err(error) => {
                        let why = Some(error.to_string());
                        if uplinks.unswept != why {
                            tracing::warn!(%error, "what an earlier agent has attached cannot be detached; it is tried again");
                            uplinks.unswept = why;
                        }
                    }
                }
            }
        }
        uplinks.refused.retain(|index, _| wanted.contains_key(index));
        let mut reconciler = lock(&self.reconciler);
        let flows = reconciler.kernel_mut().flows_mut();
        for (index, _) in flows.interfaces().map_err(|error| error.to_string())? {
            if !kept.contains(&index) {
                flows.remove_interface(index).map_err(|error| error.to_string())?;
            }
        }
        Ok(())
    }
}

fn tell(chosen: &Chosen, what: &str) {
    let text = |address: Addr| match address {
        none if none == Addr::ZERO => String::new(),
        address => IpAddr::from(address).to_string(),
    };
    tracing::info!(
        interface = %chosen.name,
        index = chosen.index,
        side = if chosen.interface.side == side::GUEST { "guest" } else { "uplink" },
        why = %chosen.reason,
        v4 = %text(chosen.interface.v4),
        v6 = %text(chosen.interface.v6),
        "{what}"
    );
}
