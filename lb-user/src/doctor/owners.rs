//! Who else translates Services on this node: kube-proxy in its modes, Cilium, Calico.
//!
//! The agent refuses to balance beside them and watches beside them gladly. Found by what each leaves in the kernel: devices,
//! chains (asked for over netlink, so that no tool need be installed), pins.

mod chains;

use std::{fs, io, path::Path};

use super::{Check, Plan, State};
use crate::view::Mode;

/// Another owner of Services.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Its name.
    pub name: &'static str,
    /// What was found of it.
    pub trace: String,
}

/// The owners looked for, with the checks' names.
const KNOWN: [(&str, &str); 4] = [
    ("owner.kube-proxy-ipvs", "kube-proxy (ipvs)"),
    ("owner.kube-proxy-rules", "kube-proxy (iptables or nftables)"),
    ("owner.cilium", "Cilium"),
    ("owner.calico", "Calico (eBPF)"),
];

/// What the look at this node found, and what it could not see.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Owners {
    /// The owners found.
    pub found: Vec<Owner>,
    /// Why some could not be looked for.
    pub unseen: Vec<String>,
}

/// Looks at this node's network namespace and BPF file system.
pub fn find(bpffs: &Path) -> Owners {
    let mut owners = Owners::default();
    match devices() {
        Ok(devices) => owners.found.extend(by_device(&devices)),
        Err(error) => owners.unseen.push(format!("network devices: {error}")),
    }
    match chains::list() {
        Ok(all) => owners.found.extend(by_chain(&all)),
        Err(error) => owners.unseen.push(format!("nftables chains: {error}")),
    }
    // Rules of the old iptables are in no netlink dump; the file names the tables that were ever used.
    if fs::read_to_string("/proc/net/ip_tables_names").is_ok_and(|tables| tables.lines().any(|table| table == "nat")) {
        owners
            .unseen
            .push("legacy iptables has a nat table whose chains cannot be seen".to_owned());
    }
    let mut pins = names(bpffs).unwrap_or_default();
    pins.extend(names(&bpffs.join("tc/globals")).unwrap_or_default());
    owners.found.extend(by_pin(&pins));
    owners
}

/// Names of the devices of this network namespace; /sys would show those of the namespace in which it was mounted.
fn devices() -> io::Result<Vec<String>> {
    let devices = nix::net::if_::if_nameindex()?;
    Ok(devices
        .iter()
        .map(|device| device.name().to_string_lossy().into_owned())
        .collect())
}

fn names(folder: &Path) -> io::Result<Vec<String>> {
    fs::read_dir(folder)?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect()
}

fn by_device(devices: &[String]) -> Vec<Owner> {
    let named = |name: &'static str, matches: &dyn Fn(&str) -> bool| {
        let device = devices.iter().find(|device| matches(device))?;
        Some(Owner {
            name,
            trace: format!("device {device}"),
        })
    };
    [
        named(KNOWN[0].1, &|device| device == "kube-ipvs0"),
        named(KNOWN[2].1, &|device| device == "cilium_host" || device == "cilium_net"),
        named(KNOWN[3].1, &|device| device == "bpfin.cali"),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn by_chain(all: &[chains::Chain]) -> Option<Owner> {
    // The iptables mode writes KUBE-SERVICES into a nat table, the nftables mode owns the table kube-proxy. Lone KUBE-*
    // chains (hints, firewall marks) are the kubelet's and translate nothing.
    let services = all
        .iter()
        .find(|chain| chain.name == "KUBE-SERVICES" || chain.table == "kube-proxy")?;
    Some(Owner {
        name: KNOWN[1].1,
        trace: format!("chain {} in table {}", services.name, services.table),
    })
}

fn by_pin(pins: &[String]) -> Vec<Owner> {
    let named = |name: &'static str, matches: &dyn Fn(&str) -> bool| {
        let pin = pins.iter().find(|pin| matches(pin))?;
        Some(Owner {
            name,
            trace: format!("BPF pin {pin}"),
        })
    };
    [
        named(KNOWN[2].1, &|pin| pin == "cilium" || pin.starts_with("cilium_")),
        named(KNOWN[3].1, &|pin| pin.starts_with("cali_") && pin.contains("nat")),
    ]
    .into_iter()
    .flatten()
    .collect()
}

pub(super) fn examine(plan: &Plan) -> Vec<Check> {
    judge(plan.mode, &find(&plan.bpffs))
}

fn judge(mode: Mode, owners: &Owners) -> Vec<Check> {
    let mut checks: Vec<Check> = KNOWN
        .iter()
        .map(|&(id, name)| {
            let traces: Vec<&str> = owners
                .found
                .iter()
                .filter(|owner| owner.name == name)
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
    use super::{chains::Chain, *};

    fn strings(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|&text| text.to_owned()).collect()
    }

    fn chain(table: &str, name: &str) -> Chain {
        Chain {
            table: table.to_owned(),
            name: name.to_owned(),
        }
    }

    #[test]
    fn each_owner_is_known_by_its_traces() {
        let found = by_device(&strings(&["lo", "eth0", "kube-ipvs0", "cilium_net"]));
        assert_eq!(
            found.iter().map(|owner| owner.name).collect::<Vec<_>>(),
            ["kube-proxy (ipvs)", "Cilium"]
        );
        assert!(by_device(&strings(&["lo", "cali1234"])).is_empty());
        assert!(by_chain(&[chain("nat", "PREROUTING"), chain("mangle", "KUBE-KUBELET-CANARY")]).is_none());
        assert!(by_chain(&[chain("nat", "KUBE-SERVICES")]).is_some());
        assert!(by_chain(&[chain("kube-proxy", "services")]).is_some());
        assert_eq!(by_pin(&strings(&["cilium", "evenkeel"])).len(), 1);
        assert_eq!(by_pin(&strings(&["cali_v4_nat_fe3"])).len(), 1);
        assert!(by_pin(&strings(&["evenkeel", "ip", "tc"])).is_empty());
    }

    #[test]
    fn an_owner_fails_balance_and_suits_observe() {
        let owners = Owners {
            found: by_device(&strings(&["kube-ipvs0"])),
            unseen: vec![],
        };
        let state = |mode, id: &str| {
            judge(mode, &owners)
                .into_iter()
                .find(|check| check.id == id)
                .map(|check| check.state)
        };
        assert_eq!(state(Mode::Balance, "owner.kube-proxy-ipvs"), Some(State::Fail));
        assert_eq!(state(Mode::Observe, "owner.kube-proxy-ipvs"), Some(State::Ok));
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
