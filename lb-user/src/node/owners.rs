//! Who else translates Services on this node: kube-proxy in its modes, Cilium, Calico.
//!
//! Found by what each leaves in the kernel: devices, chains (asked for over netlink, so that no tool need be installed), pins.
//! The agent refuses to balance beside them and watches beside them gladly.

use std::{fs, io, path::Path};

use super::{kube_proxy, legacy, nftables};

/// The system that an owner of Services is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum System {
    /// kube-proxy in its IPVS mode.
    KubeProxyIpvs,
    /// kube-proxy in its iptables mode.
    KubeProxyIptables,
    /// kube-proxy in its nftables mode.
    KubeProxyNftables,
    /// Cilium in kube-proxy's place.
    Cilium,
    /// Calico's eBPF dataplane.
    CalicoEbpf,
}

/// Another owner of Services.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Which it is.
    pub system: System,
    /// Its name.
    pub name: &'static str,
    /// What was found of it.
    pub trace: String,
}

impl System {
    /// Whether it is kube-proxy, in whichever mode.
    pub fn is_kube_proxy(self) -> bool {
        matches!(
            self,
            Self::KubeProxyIpvs | Self::KubeProxyIptables | Self::KubeProxyNftables
        )
    }
}

impl Owner {
    /// An owner, of which something was found.
    pub fn new(system: System, trace: String) -> Self {
        let name = match system {
            System::KubeProxyIpvs => "kube-proxy (ipvs)",
            System::KubeProxyIptables => "kube-proxy (iptables)",
            System::KubeProxyNftables => "kube-proxy (nftables)",
            System::Cilium => "Cilium",
            System::CalicoEbpf => "Calico (eBPF)",
        };
        Self { system, name, trace }
    }
}

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
    match nftables::chains() {
        Ok(all) => owners.found.extend(kube_proxy::by_chains(&all)),
        Err(error) => owners.unseen.push(format!("nftables chains: {error}")),
    }
    match legacy::read() {
        Ok(tables) => owners.found.extend(kube_proxy::by_legacy_rules(&tables)),
        Err(error) => owners.unseen.push(format!("rules of the old iptables: {error}")),
    }
    let mut pins = names(bpffs).unwrap_or_default();
    pins.extend(names(&bpffs.join("tc/globals")).unwrap_or_default());
    owners.found.extend(by_pin(&pins));
    owners.found = joined(owners.found);
    owners
}

/// Each system once, with all its traces.
fn joined(found: Vec<Owner>) -> Vec<Owner> {
    let mut joined: Vec<Owner> = Vec::new();
    for owner in found {
        match joined.iter_mut().find(|known| known.system == owner.system) {
            Some(known) => known.trace = format!("{}, {}", known.trace, owner.trace),
            None => joined.push(owner),
        }
    }
    joined
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
    let traced = |system, matches: &dyn Fn(&str) -> bool| {
        let device = devices.iter().find(|device| matches(device))?;
        Some(Owner::new(system, format!("device {device}")))
    };
    [
        kube_proxy::by_device(devices),
        traced(System::Cilium, &|device| {
            device == "cilium_host" || device == "cilium_net"
        }),
        traced(System::CalicoEbpf, &|device| device == "bpfin.cali"),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn by_pin(pins: &[String]) -> Vec<Owner> {
    let traced = |system, matches: &dyn Fn(&str) -> bool| {
        let pin = pins.iter().find(|pin| matches(pin))?;
        Some(Owner::new(system, format!("BPF pin {pin}")))
    };
    [
        traced(System::Cilium, &|pin| pin == "cilium" || pin.starts_with("cilium_")),
        traced(System::CalicoEbpf, &|pin| {
            pin.starts_with("cali_") && pin.contains("nat")
        }),
    ]
    .into_iter()
    .flatten()
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|&text| text.to_owned()).collect()
    }

    #[test]
    fn each_owner_is_known_by_its_traces() {
        let found = by_device(&strings(&["lo", "eth0", "kube-ipvs0", "cilium_net"]));
        assert_eq!(
            found.iter().map(|owner| owner.system).collect::<Vec<_>>(),
            [System::KubeProxyIpvs, System::Cilium]
        );
        assert!(by_device(&strings(&["lo", "cali1234"])).is_empty());
        assert_eq!(by_pin(&strings(&["cilium", "evenkeel"])).len(), 1);
        assert_eq!(by_pin(&strings(&["cali_v4_nat_fe3"])).len(), 1);
        assert!(by_pin(&strings(&["evenkeel", "ip", "tc"])).is_empty());
    }

    #[test]
    fn the_traces_of_one_system_are_one_owner() {
        let owner = |system, trace: &str| Owner::new(system, trace.to_owned());
        let found = joined(vec![
            owner(System::KubeProxyIpvs, "a"),
            owner(System::Cilium, "b"),
            owner(System::KubeProxyIpvs, "c"),
        ]);
        let shown: Vec<_> = found.iter().map(|owner| (owner.system, owner.trace.as_str())).collect();
        assert_eq!(shown, [(System::KubeProxyIpvs, "a, c"), (System::Cilium, "b")]);
    }
}
