//! The checks on who else translates Services here, and the words with which the agent refuses to balance beside them.
//!
//! The look itself is the node's room's. What stands in the way, where it was found and the way out are said in one place, so that
//! the doctor and the agent say the same.

use super::{Check, Plan, State};
use crate::view::Mode;

pub use crate::node::{
    kube_proxy::Running,
    owners::{Owner, Owners, System, find},
};

/// The checks, each with what it looks for.
const CHECKS: [(&str, &str, System); 5] = [
    (
        "owner.kube-proxy-nftables",
        "rules of kube-proxy (nftables)",
        System::KubeProxyNftables,
    ),
    (
        "owner.kube-proxy-iptables",
        "rules of kube-proxy (iptables)",
        System::KubeProxyIptables,
    ),
    (
        "owner.kube-proxy-ipvs",
        "device or rules of kube-proxy (ipvs)",
        System::KubeProxyIpvs,
    ),
    ("owner.cilium", "Cilium", System::Cilium),
    ("owner.calico", "Calico (eBPF)", System::CalicoEbpf),
];

/// The check on kube-proxy itself, whatever it has written.
const RUNNING: &str = "owner.kube-proxy-running";

/// The agent's flag with which it balances beside kube-proxy all the same.
pub const BESIDE: &str = "--beside-kube-proxy";

/// How to end kube-proxy on this node.
const END_KUBE_PROXY: &str = "end it on this node: keep its DaemonSet off the node by a nodeSelector or node affinity (docs/kube-proxy.md), stop its \
                              unit, or start k3s with --disable-kube-proxy";

pub(super) fn examine(plan: &Plan) -> Vec<Check> {
    judge(plan.mode, &find(&plan.bpffs), &Running::find())
}

fn judge(mode: Mode, owners: &Owners, running: &Running) -> Vec<Check> {
    let mut checks: Vec<Check> = CHECKS
        .iter()
        .map(|&(id, name, system)| {
            let wanted = format!("no {name} on this node, or observe mode");
            match (owners.found.iter().find(|owner| owner.system == system), mode) {
                (None, _) => Check::new(id, State::Ok, "not found", &wanted, ""),
                (Some(owner), Mode::Observe) => Check::new(id, State::Ok, &owner.trace, &wanted, ""),
                (Some(owner), Mode::Balance) => Check::new(
                    id,
                    State::Fail,
                    &owner.trace,
                    &wanted,
                    &way_out(system, running.is_certain()),
                ),
            }
        })
        .collect();
    checks.push(running_check(mode, running));
    let unseen: Vec<&str> = owners
        .unseen
        .iter()
        .chain(&running.unseen)
        .map(String::as_str)
        .collect();
    if !unseen.is_empty() {
        checks.push(Check::new(
            "owner.unseen",
            State::Warn,
            unseen.join("; "),
            "all of it can be looked at",
            "run as root in the host's network namespace; check the rest by hand",
        ));
    }
    checks
}

fn running_check(mode: Mode, running: &Running) -> Check {
    let wanted = "no kube-proxy at work on this node, or observe mode";
    let found = match running.trace() {
        trace if trace.is_empty() => "not found".to_owned(),
        trace => trace,
    };
    let (state, hint) = match mode {
        Mode::Balance if running.is_certain() => (State::Fail, format!("{END_KUBE_PROXY}; or use --mode observe")),
        Mode::Balance if running.is_likely() => (
            State::Warn,
            format!(
                "kube-proxy listens on these ports by default: see who does here (ss -ltnp); if it is kube-proxy, {END_KUBE_PROXY}"
            ),
        ),
        Mode::Balance | Mode::Observe => (State::Ok, String::new()),
    };
    Check::new(RUNNING, state, found, wanted, &hint)
}

/// What to do about a system that translates Services here.
fn way_out(system: System, runs: bool) -> String {
    let leftovers = match system {
        System::KubeProxyNftables => "(or nft delete table ip kube-proxy; nft delete table ip6 kube-proxy)",
        System::KubeProxyIptables => "(it leaves the kubelet's own chains alone)",
        System::KubeProxyIpvs => {
            "(or ipvsadm --clear; ip link delete kube-ipvs0; and the chains by `kube-proxy --cleanup`)"
        }
        System::Cilium => {
            return "run Cilium with kubeProxyReplacement=false and remove what it left, or use --mode observe"
                .to_owned();
        }
        System::CalicoEbpf => {
            return "set Calico's bpfEnabled to false and remove what it left, or use --mode observe".to_owned();
        }
    };
    let end = if runs {
        format!("{END_KUBE_PROXY}; then ")
    } else {
        String::new()
    };
    format!(
        "{end}remove what it left in force: run `kube-proxy --cleanup` as root in the host's network namespace {leftovers}; or use \
         --mode observe, or {BESIDE} to take over first"
    )
}

/// Why an agent may not balance here; none where nothing stands in its way. `beside` passes over kube-proxy, and over nothing else.
pub fn refusal(owners: &Owners, running: &Running, beside: bool) -> Option<String> {
    let in_the_way: Vec<&Owner> = owners
        .found
        .iter()
        .filter(|owner| !(beside && owner.system.is_kube_proxy()))
        .collect();
    let runs = running.is_certain() && !beside;
    let Some(first) = in_the_way.first() else {
        return runs.then(|| {
            format!(
                "kube-proxy runs on this node ({}) and is about to write its rules: {END_KUBE_PROXY}; or use --mode observe, or \
                 {BESIDE} to take over first",
                running.trace()
            )
        });
    };
    let mut said: Vec<String> = in_the_way
        .iter()
        .map(|owner| format!("{} translates Services on this node: {}", owner.name, owner.trace))
        .collect();
    if in_the_way.iter().any(|owner| owner.system.is_kube_proxy()) {
        said.push(if runs {
            format!("kube-proxy runs: {}", running.trace())
        } else {
            "kube-proxy itself was not seen to run, so this is probably left over from one that ran".to_owned()
        });
    }
    said.push(format!("what to do: {}", way_out(first.system, runs)));
    Some(said.join(". "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(found: &[(System, &str)]) -> Owners {
        let owner = |&(system, trace): &(System, &str)| Owner::new(system, trace.to_owned());
        Owners {
            found: found.iter().map(owner).collect(),
            unseen: vec![],
        }
    }

    fn at_work() -> Running {
        Running {
            process: Some(71),
            ports: [10_256].into(),
            ..Running::default()
        }
    }

    fn check(mode: Mode, owners: &Owners, running: &Running, id: &str) -> Option<Check> {
        judge(mode, owners, running).into_iter().find(|check| check.id == id)
    }

    #[test]
    fn an_owner_fails_balance_and_suits_observe() {
        for (system, id) in [
            (System::KubeProxyNftables, "owner.kube-proxy-nftables"),
            (System::KubeProxyIptables, "owner.kube-proxy-iptables"),
            (System::KubeProxyIpvs, "owner.kube-proxy-ipvs"),
            (System::Cilium, "owner.cilium"),
            (System::CalicoEbpf, "owner.calico"),
        ] {
            let owners = with(&[(system, "its trace")]);
            let state =
                |mode, id| check(mode, &owners, &Running::default(), id).map(|check| (check.state, check.found));
            assert_eq!(state(Mode::Balance, id), Some((State::Fail, "its trace".to_owned())));
            assert_eq!(state(Mode::Observe, id), Some((State::Ok, "its trace".to_owned())));
            let failed = judge(Mode::Balance, &owners, &Running::default());
            assert_eq!(failed.iter().filter(|check| check.state != State::Ok).count(), 1);
        }
    }

    #[test]
    fn what_to_do_depends_on_whether_it_runs() {
        let owners = with(&[(System::KubeProxyNftables, "table ip kube-proxy")]);
        let hint = |running: &Running| {
            check(Mode::Balance, &owners, running, "owner.kube-proxy-nftables").map(|check| check.hint)
        };
        let (left, runs) = (hint(&Running::default()), hint(&at_work()));
        for hint in [&left, &runs] {
            let hint = hint.as_deref().unwrap_or_default();
            for word in [
                "kube-proxy --cleanup",
                "nft delete table ip kube-proxy",
                "--mode observe",
                BESIDE,
            ] {
                assert!(hint.contains(word), "{word}: {hint}");
            }
        }
        assert!(left.is_some_and(|hint| hint.starts_with("remove what it left in force")));
        assert!(runs.is_some_and(|hint| hint.starts_with("end it on this node")));
    }

    #[test]
    fn ports_that_nobody_explains_are_a_warning() {
        let nobody = Owners::default();
        let state = |mode, running: &Running| check(mode, &nobody, running, RUNNING).map(|check| check.state);
        let ports = Running {
            process: None,
            ..at_work()
        };
        let others = Running {
            others: vec!["evenkeel has port 10256".to_owned()],
            ..ports.clone()
        };
        assert_eq!(state(Mode::Balance, &at_work()), Some(State::Fail));
        assert_eq!(state(Mode::Balance, &ports), Some(State::Warn));
        assert_eq!(state(Mode::Balance, &others), Some(State::Ok));
        assert_eq!(state(Mode::Balance, &Running::default()), Some(State::Ok));
        assert_eq!(state(Mode::Observe, &at_work()), Some(State::Ok));
    }

    #[test]
    fn a_refusal_names_all_that_was_found_and_the_way_out() {
        let both = with(&[
            (System::KubeProxyNftables, "table ip kube-proxy"),
            (System::KubeProxyIptables, "chain KUBE-SERVICES"),
        ]);
        let said = refusal(&both, &at_work(), false).expect("a refusal");
        for word in [
            "kube-proxy (nftables) translates Services on this node: table ip kube-proxy",
            "kube-proxy (iptables) translates Services on this node: chain KUBE-SERVICES",
            "kube-proxy runs: process 71 (kube-proxy), a listener on port 10256",
            "nodeSelector",
            "kube-proxy --cleanup",
            "--mode observe",
        ] {
            assert!(said.contains(word), "{word}: {said}");
        }
        let left = refusal(&both, &Running::default(), false).expect("a refusal");
        assert!(left.contains("left over") && !left.contains("nodeSelector"), "{left}");
    }

    #[test]
    fn a_kube_proxy_without_rules_is_refused_and_its_ports_alone_are_not() {
        let nobody = Owners::default();
        let said = refusal(&nobody, &at_work(), false).expect("a refusal");
        assert!(said.starts_with("kube-proxy runs on this node (process 71"), "{said}");
        let ports = Running {
            process: None,
            ..at_work()
        };
        assert_eq!(refusal(&nobody, &ports, false), None);
        assert_eq!(refusal(&nobody, &Running::default(), false), None);
    }

    #[test]
    fn the_override_is_for_kube_proxy_alone() {
        let owners = with(&[
            (System::KubeProxyIpvs, "device kube-ipvs0"),
            (System::Cilium, "device cilium_host"),
        ]);
        let said = refusal(&owners, &at_work(), true).expect("a refusal");
        assert!(said.contains("Cilium") && !said.contains("kube-proxy ("), "{said}");
        assert_eq!(refusal(&with(&[(System::KubeProxyIpvs, "x")]), &at_work(), true), None);
    }

    #[test]
    fn what_could_not_be_seen_is_said() {
        let owners = Owners {
            found: vec![],
            unseen: vec!["nftables chains: denied".to_owned()],
        };
        let checks = judge(Mode::Balance, &owners, &Running::default());
        assert!(
            checks
                .iter()
                .any(|check| check.id == "owner.unseen" && check.state == State::Warn)
        );
    }
}
