//! How long an interface stays chosen that was chosen by itself and is no longer.
//!
//! An address that is renewed or a route that is set anew is gone for a moment; connections of clients outside last longer than
//! that. Pure: the time is given. The invariants: what was named or is a guest's is never held, nor is a port beside its master.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use super::{Choice, Chosen, Network, Reason, Wish, interface, is_port};
use crate::config::Uplinks;

/// How long an interface stays chosen after it ceased to qualify.
pub const HOLD: Duration = Duration::from_mins(1);

/// The interfaces that qualified by themselves, and when each did last.
#[derive(Debug, Default)]
pub struct Held(BTreeMap<u32, (u16, Instant)>);

impl Held {
    /// Adds to a choice what was in an earlier one less than [`HOLD`] ago and is still there, and notes this one.
    pub fn hold(&mut self, choice: &mut Choice, network: &Network, wish: &Wish<'_>, now: Instant) {
        for chosen in &choice.chosen {
            match chosen.reason {
                Reason::NodeAddress(_) | Reason::DefaultRoute | Reason::Address | Reason::Tunnel => {
                    self.0.insert(chosen.index, (chosen.hardware, now));
                }
                Reason::Named | Reason::Guest => {
                    self.0.remove(&chosen.index);
                }
                Reason::Held | Reason::Earlier => {}
            }
        }
        let automatic = *wish.uplinks == Uplinks::Auto;
        self.0.retain(|index, (hardware, last)| {
            let there = network.link(*index).filter(|link| link.hardware == *hardware);
            automatic && now.duration_since(*last) < HOLD && there.is_some_and(|link| !is_port(network, link))
        });
        for index in self.0.keys() {
            if let Some(link) = network.link(*index)
                && choice.chosen.iter().all(|chosen| chosen.index != *index)
            {
                choice.chosen.push(Chosen {
                    index: *index,
                    name: link.name.clone(),
                    hardware: link.hardware,
                    interface: interface(network, wish, *index, lb_common::flow::side::UPLINK),
                    reason: Reason::Held,
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::tests::{names, node},
        *,
    };

    fn look(held: &mut Held, network: &Network, uplinks: &Uplinks, now: Instant) -> Vec<(String, Reason)> {
        let wish = Wish {
            uplinks,
            guests: &[],
            node: &[],
        };
        let mut choice = super::super::choose(network, &wish);
        held.hold(&mut choice, network, &wish, now);
        assert_eq!(names(&choice.chosen).len(), choice.chosen.len());
        choice.chosen.into_iter().map(|c| (c.name, c.reason)).collect()
    }

    #[test]
    fn a_flap_keeps_an_interface_for_a_while() {
        let (mut held, auto, began) = (Held::default(), Uplinks::Auto, Instant::now());
        let up = node();
        let mut routeless = node();
        routeless.default_routes.clear();
        let mut down = node();
        down.links[2].up = false;
        let chosen = |reason| ("eth1".to_owned(), reason);
        let first = look(&mut held, &up, &auto, began);
        assert!(first.contains(&chosen(Reason::DefaultRoute)), "{first:?}");
        let soon = began + HOLD / 2;
        let flapped = look(&mut held, &down, &auto, soon);
        assert!(flapped.contains(&chosen(Reason::Held)), "{flapped:?}");
        // It counts from when it qualified last, not from when it was held last.
        let back = look(&mut held, &up, &auto, soon);
        assert!(back.contains(&chosen(Reason::DefaultRoute)), "{back:?}");
        let later = look(&mut held, &down, &auto, began + HOLD);
        assert!(later.contains(&chosen(Reason::Held)), "{later:?}");
        let late = look(&mut held, &down, &auto, soon + HOLD);
        assert!(late.iter().all(|(name, _)| name != "eth1"), "{late:?}");
        let late = look(&mut held, &down, &auto, soon + HOLD);
        assert!(late.iter().all(|(name, _)| name != "eth1"), "{late:?}");
    }

    #[test]
    fn what_has_gone_or_become_a_port_goes_at_once() {
        let auto = Uplinks::Auto;
        let gone = |change: fn(&mut Network)| {
            let (mut held, now) = (Held::default(), Instant::now());
            look(&mut held, &node(), &auto, now);
            let mut network = node();
            network.default_routes.clear();
            change(&mut network);
            let chosen = look(&mut held, &network, &auto, now);
            assert!(chosen.iter().all(|(name, _)| name != "eth1"), "{chosen:?}");
        };
        gone(|network| {
            network.links.remove(2);
        });
        gone(|network| network.links[2].master = Some(4));
        // The number is another interface's by now.
        gone(|network| {
            network.links[2].hardware = 768;
            network.links[2].name = "tun1".to_owned();
        });
        // Nobody holds what was named, nor anything where only names count.
        let (mut held, now) = (Held::default(), Instant::now());
        let named = Uplinks::Named(vec!["eth1".to_owned()]);
        look(&mut held, &node(), &named, now);
        let mut network = node();
        network.links[2].name = "eth7".to_owned();
        assert!(look(&mut held, &network, &named, now).is_empty());
    }
}
