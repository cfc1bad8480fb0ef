//! Which Service each frontend in the kernel leads to.
//!
//! A frontend may move between Services, and one of the two may be refused: then the one must not remove what the other
//! has by now. Invariant: what is in here is what the kernel's frontend map is believed to hold.

use std::collections::HashMap;

use lb_common::frontend::{Frontend, FrontendKey};

use crate::{compile::Compiled, plan::Plan};

/// Frontend → id of its Service.
#[derive(Debug, Default)]
pub(super) struct Owners(HashMap<FrontendKey, u32>);

impl Owners {
    /// Forgets everything.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Notes that a Service has changed in the kernel. Returns the frontends that it took from others, which still count
    /// them as theirs.
    pub(super) fn exchange(&mut self, old: Option<&Compiled>, new: Option<&Compiled>) -> Vec<(FrontendKey, u32)> {
        if let Some(old) = old {
            for (key, _) in &old.frontends {
                if self.0.get(key) == Some(&old.service_id) {
                    self.0.remove(key);
                }
            }
        }
        let mut taken = Vec::new();
        if let Some(new) = new {
            for (key, _) in &new.frontends {
                if let Some(other) = self.0.insert(*key, new.service_id) {
                    taken.push((*key, other));
                }
            }
        }
        taken
    }

    /// Whether a frontend is another Service's.
    pub(super) fn is_elsewhere(&self, key: &FrontendKey, service_id: u32) -> bool {
        self.0.get(key).is_some_and(|owner| *owner != service_id)
    }

    /// Whether a plan takes a frontend from another Service.
    pub(super) fn gains(&self, plan: &Plan, service_id: u32) -> bool {
        plan.put_frontends.keys().any(|key| self.is_elsewhere(key, service_id))
    }

    /// Lets a Service's plan leave alone what is another's by now.
    pub(super) fn spare(&self, plan: &mut Plan, service_id: u32) {
        plan.drop_frontends.retain(|key| !self.is_elsewhere(key, service_id));
    }

    /// Lets the plan back to a Service's old state return what belongs to others, and take nothing from them. `held` tells
    /// another Service's frontend.
    pub(super) fn give_back(
        &self,
        back: &mut Plan,
        service_id: u32,
        held: impl Fn(u32, &FrontendKey) -> Option<Frontend>,
    ) {
        back.put_frontends.retain(|key, _| !self.is_elsewhere(key, service_id));
        let drops = std::mem::take(&mut back.drop_frontends);
        for key in drops {
            let owner = self.0.get(&key).filter(|owner| **owner != service_id);
            match owner.and_then(|owner| held(*owner, &key)) {
                Some(value) => {
                    back.put_frontends.insert(key, value);
                }
                None => {
                    back.drop_frontends.insert(key);
                }
            }
        }
    }
}
