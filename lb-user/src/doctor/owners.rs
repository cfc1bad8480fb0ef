//! The checks on who else translates Services here; the look itself is the node's room's.

use super::{Check, Plan, State};
use crate::view::Mode;

pub use crate::node::owners::{Owner, Owners, System, find};

/// The checks, each with what it looks for.
const CHECKS: [(&str, &str, &[System]); 4] = [
    ("owner.kube-proxy-ipvs", "kube-proxy (ipvs)", &[System::KubeProxyIpvs]),
    (
        "owner.kube-proxy-rules",
        "kube-proxy (iptables or nftables)",
        &[System::KubeProxyIptables, System::KubeProxyNftables],
    ),
    ("owner.cilium", "Cilium", &[System::Cilium]),
    ("owner.calico", "Calico (eBPF)", &[System::CalicoEbpf]),
];

pub(super) fn examine(plan: &Plan) -> Vec<Check> {
    judge(plan.mode, &find(&plan.bpffs))
}

fn judge(mode: Mode, owners: &Owners) -> Vec<Check> {
    let mut checks: Vec<Check> = CHECKS
        .iter()
        .map(|&(id, name, systems)| {
            let traces: Vec<&str> = owners
                .found
                .iter()
                .filter(|owner| systems.contains(&owner.system))
                .map(|owner| owner.trace.as_str())
                .collect();
            let wanted = format!("no {name} on this node, or observe mode");
            match (traces.is_empty(), mode) {
                (true, _) => Check::new(id, State::Ok, "not found", &wanted, ""),
                (false, Mode::Observe) => Check::new(id, State::Ok, traces.join(", "), &wanted, ""),
                (false, Mode::Balance) => Check::new(
                    id,
                    State::Fail,
                    traces.join(", "),
                    &wanted,
                    "remove it and what it left behind, or run the agent with --mode observe",
                ),
            }
        })
        .collect();
    if !owners.unseen.is_empty() {
        checks.push(Check::new(
            "owner.unseen",
            State::Warn,
            owners.unseen.join("; "),
            "all of it can be looked at",
            "run as root in the host's network namespace; check the rest by hand",
        ));
    }
    checks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_fails_balance_and_suits_observe() {
        let owners = Owners {
            found: vec![Owner {
                system: System::KubeProxyNftables,
                name: "kube-proxy",
                trace: "chain services in table kube-proxy".to_owned(),
            }],
            unseen: vec![],
        };
        let state = |mode, id: &str| {
            judge(mode, &owners)
                .into_iter()
                .find(|check| check.id == id)
                .map(|check| check.state)
        };
        assert_eq!(state(Mode::Balance, "owner.kube-proxy-rules"), Some(State::Fail));
        assert_eq!(state(Mode::Observe, "owner.kube-proxy-rules"), Some(State::Ok));
        assert_eq!(state(Mode::Balance, "owner.cilium"), Some(State::Ok));
        assert_eq!(state(Mode::Balance, "owner.unseen"), None);
    }

    #[test]
    fn what_could_not_be_seen_is_said() {
        let owners = Owners {
            found: vec![],
            unseen: vec!["nftables chains: denied".to_owned()],
        };
        let checks = judge(Mode::Balance, &owners);
        assert!(
            checks
                .iter()
                .any(|check| check.id == "owner.unseen" && check.state == State::Warn)
        );
    }
}
