//! Which proxy translates Services on this node.
//!
//! Found by its traces, the surest first: other owners of Services, then IPVS and rules that know one of the Services, then a
//! process that listens where clients dial. Processes are looked through only for a listener that was found. The choice is
//! pure; what is looked at is gathered before.

use std::{
    collections::HashSet,
    fs,
    net::{IpAddr, SocketAddr},
    ops::ControlFlow,
    path::Path,
};

use serde::Serialize;

use super::{
    ipvs,
    owners::{self, Owner, System},
    rules,
    sockets::{self, LISTEN},
};
use crate::model::Protocol;

/// Open files of processes that are looked at for a listener's owner.
const MAX_FILES: usize = 500_000;

/// What translates Services.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Kind {
    /// kube-proxy in its iptables mode.
    KubeProxyIptables,
    /// kube-proxy in its nftables mode.
    KubeProxyNftables,
    /// kube-proxy in its IPVS mode.
    KubeProxyIpvs,
    /// IPVS that something else programs.
    Ipvs,
    /// Rules of nftables or iptables that know a Service and are not kube-proxy's.
    Rules,
    /// Cilium.
    Cilium,
    /// Calico's eBPF dataplane.
    CalicoEbpf,
    /// This agent.
    Evenkeel,
    /// A process that accepts connections and relays them.
    Userspace,
    /// None was seen.
    Unseen,
}

/// The proxy in use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Proxy {
    /// What it is.
    pub kind: Kind,
    /// Its name, for people.
    pub name: String,
    /// What was found of it.
    pub trace: String,
    /// What could not be looked at, so that another proxy may hide there.
    pub unseen: Vec<String>,
}

impl Proxy {
    pub(super) fn new(kind: Kind, name: impl Into<String>, trace: impl Into<String>) -> Self {
        Self {
            kind,
            name: name.into(),
            trace: trace.into(),
            unseen: Vec::new(),
        }
    }

    /// This agent, which knows without looking that it balances.
    pub fn evenkeel() -> Self {
        Self::new(Kind::Evenkeel, "Evenkeel", "this agent runs in balance mode")
    }

    /// Looks for the proxy of this network namespace that serves the given frontends of TCP.
    pub fn find(bpffs: &Path, frontends: &HashSet<SocketAddr>) -> Self {
        let owners = owners::find(bpffs);
        let mut seen = Seen {
            owners: owners.found,
            unseen: owners.unseen,
            ..Seen::default()
        };
        match ipvs::list() {
            Ok(servers) => {
                let servers = servers.unwrap_or_default();
                seen.virtual_servers = servers.len();
                seen.served_by_ipvs = servers
                    .into_iter()
                    .map(|server| server.frontend)
                    .find(|frontend| frontends.contains(frontend));
            }
            Err(error) => seen.unseen.push(error.reason()),
        }
        // An owner is known by its own traces; reading all rules is for the others.
        if seen.owners.is_empty() {
            match rules::read() {
                Ok(reach) => {
                    seen.served_by_rules = frontends
                        .iter()
                        .find(|&&frontend| reach.contains_key(&(frontend, Protocol::Tcp)))
                        .copied();
                }
                Err(error) => seen.unseen.push(error.reason()),
            }
            if seen.served_by_ipvs.or(seen.served_by_rules).is_none() {
                match listener(frontends) {
                    Ok(found) => seen.listener = found,
                    Err(error) => seen.unseen.push(error.reason()),
                }
            }
        }
        choose(seen)
    }
}

/// A listener on a frontend's address.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Listener {
    frontend: SocketAddr,
    /// The process that holds it; none where it cannot be seen.
    process: Option<String>,
}

/// What was seen on the node.
#[derive(Clone, Debug, Default)]
struct Seen {
    owners: Vec<Owner>,
    virtual_servers: usize,
    served_by_ipvs: Option<SocketAddr>,
    served_by_rules: Option<SocketAddr>,
    listener: Option<Listener>,
    unseen: Vec<String>,
}

fn choose(seen: Seen) -> Proxy {
    let owner = |wanted: System| seen.owners.iter().find(|owner| owner.system == wanted);
    let of = |kind, name, system| owner(system).map(|owner| Proxy::new(kind, name, owner.trace.clone()));
    // kube-proxy's IPVS mode has chains of the iptables mode too; a device that it left behind has no virtual servers.
    let ipvs_mode = || of(Kind::KubeProxyIpvs, "kube-proxy (ipvs)", System::KubeProxyIpvs);
    let proxy = of(Kind::Cilium, "Cilium", System::Cilium)
        .or_else(|| of(Kind::CalicoEbpf, "Calico (eBPF)", System::CalicoEbpf))
        .or_else(|| ipvs_mode().filter(|_| seen.virtual_servers > 0))
        .or_else(|| {
            of(
                Kind::KubeProxyNftables,
                "kube-proxy (nftables)",
                System::KubeProxyNftables,
            )
        })
        .or_else(|| {
            of(
                Kind::KubeProxyIptables,
                "kube-proxy (iptables)",
                System::KubeProxyIptables,
            )
        })
        .or_else(ipvs_mode)
        .or_else(|| {
            let frontend = seen.served_by_ipvs?;
            Some(Proxy::new(
                Kind::Ipvs,
                "IPVS",
                format!("a virtual server for {frontend}"),
            ))
        })
        .or_else(|| {
            let frontend = seen.served_by_rules?;
            Some(Proxy::new(
                Kind::Rules,
                "nftables or iptables rules",
                format!("a rule for {frontend}"),
            ))
        })
        .or_else(|| {
            let Listener { frontend, process } = seen.listener?;
            let name = process.unwrap_or_else(|| "a process that cannot be seen from here".to_owned());
            Some(Proxy::new(Kind::Userspace, name, format!("listens on {frontend}")))
        })
        .or_else(|| {
            let trace = format!("{} virtual servers, none for a known Service", seen.virtual_servers);
            (seen.virtual_servers > 0).then(|| Proxy::new(Kind::Ipvs, "IPVS", trace))
        })
        .unwrap_or_else(|| Proxy::new(Kind::Unseen, "none seen", "no trace of a proxy"));
    Proxy {
        unseen: seen.unseen,
        ..proxy
    }
}

/// Looks for a listener on one of the frontends, by its address or on all addresses of this network namespace.
fn listener(frontends: &HashSet<SocketAddr>) -> super::Result<Option<Listener>> {
    let own = own_addresses();
    let here: HashSet<u16> = frontends
        .iter()
        .filter(|frontend| own.contains(&frontend.ip()))
        .map(SocketAddr::port)
        .collect();
    let mut found = None;
    sockets::each(|socket| {
        // The kernel lists listeners first.
        if socket.state != LISTEN || found.is_some() {
            return ControlFlow::Break(());
        }
        let local = socket.local;
        if frontends.contains(&local) {
            found = Some((local, socket.inode));
        } else if local.ip().is_unspecified() && here.contains(&local.port()) {
            let frontend = frontends
                .iter()
                .find(|frontend| frontend.port() == local.port() && own.contains(&frontend.ip()));
            found = frontend.map(|&frontend| (frontend, socket.inode));
        }
        ControlFlow::Continue(())
    })?;
    Ok(found.map(|(frontend, inode)| Listener {
        frontend,
        process: process_of(inode),
    }))
}

/// The addresses of this network namespace.
fn own_addresses() -> HashSet<IpAddr> {
    nix::ifaddrs::getifaddrs()
        .into_iter()
        .flatten()
        .filter_map(|device| {
            let address = device.address?;
            let v4 = address.as_sockaddr_in().map(|a| IpAddr::V4(a.ip()));
            v4.or_else(|| address.as_sockaddr_in6().map(|a| IpAddr::V6(a.ip())))
        })
        .collect()
}

/// The name of the process that holds a socket; none where it runs out of sight, or too many files are open to look at all.
pub(super) fn process_of(inode: u64) -> Option<String> {
    let wanted = format!("socket:[{inode}]");
    let mut left = MAX_FILES;
    for process in fs::read_dir("/proc").ok()?.flatten() {
        if !process
            .file_name()
            .to_string_lossy()
            .bytes()
            .all(|byte| byte.is_ascii_digit())
        {
            continue;
        }
        // A process that ends meanwhile, or that may not be looked at, is passed over.
        let Ok(files) = fs::read_dir(process.path().join("fd")) else {
            continue;
        };
        for file in files.flatten() {
            left = left.checked_sub(1)?;
            if fs::read_link(file.path()).is_ok_and(|target| target.as_os_str() == wanted.as_str()) {
                let name = fs::read_to_string(process.path().join("comm")).ok()?;
                return Some(name.trim().to_owned());
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn owner(system: System) -> Owner {
        Owner {
            system,
            name: "x",
            trace: "its trace".to_owned(),
        }
    }

    fn frontend() -> SocketAddr {
        SocketAddr::from(([10, 96, 0, 10], 80))
    }

    fn kind(seen: Seen) -> Kind {
        choose(seen).kind
    }

    #[test]
    fn owners_go_before_everything_else() {
        for (system, expected) in [
            (System::Cilium, Kind::Cilium),
            (System::CalicoEbpf, Kind::CalicoEbpf),
            (System::KubeProxyNftables, Kind::KubeProxyNftables),
            (System::KubeProxyIptables, Kind::KubeProxyIptables),
            (System::KubeProxyIpvs, Kind::KubeProxyIpvs),
        ] {
            let proxy = choose(Seen {
                owners: vec![owner(system)],
                served_by_ipvs: Some(frontend()),
                ..Seen::default()
            });
            assert_eq!((proxy.kind, proxy.trace.as_str()), (expected, "its trace"));
        }
    }

    #[test]
    fn the_ipvs_mode_is_known_by_virtual_servers_beside_its_chains() {
        let seen = |virtual_servers| Seen {
            owners: vec![owner(System::KubeProxyIpvs), owner(System::KubeProxyIptables)],
            virtual_servers,
            ..Seen::default()
        };
        assert_eq!(kind(seen(3)), Kind::KubeProxyIpvs);
        assert_eq!(kind(seen(0)), Kind::KubeProxyIptables);
    }

    #[test]
    fn who_serves_a_frontend_goes_before_who_is_merely_there() {
        let listener = Some(Listener {
            frontend: frontend(),
            process: Some("haproxy".to_owned()),
        });
        let bare = Seen {
            virtual_servers: 2,
            unseen: vec!["something".to_owned()],
            ..Seen::default()
        };
        let relayed = choose(Seen {
            listener,
            ..bare.clone()
        });
        assert_eq!((relayed.kind, relayed.name.as_str()), (Kind::Userspace, "haproxy"));
        assert_eq!(relayed.unseen, ["something"]);
        let served_by_rules = Some(frontend());
        assert_eq!(
            kind(Seen {
                served_by_rules,
                ..bare.clone()
            }),
            Kind::Rules
        );
        assert_eq!(kind(bare.clone()), Kind::Ipvs);
        assert_eq!(
            kind(Seen {
                virtual_servers: 0,
                ..bare
            }),
            Kind::Unseen
        );
        assert_eq!(kind(Seen::default()), Kind::Unseen);
    }

    #[test]
    fn a_listener_is_found_with_its_process() {
        let socket = TcpListener::bind("127.0.0.1:0").expect("a listener");
        let dialled = socket.local_addr().expect("its address");
        let own_name = fs::read_to_string("/proc/self/comm").expect("a name");
        let found = listener(&HashSet::from([dialled]))
            .expect("readable")
            .expect("a listener");
        assert_eq!(found.frontend, dialled);
        assert_eq!(found.process.as_deref(), Some(own_name.trim()));
        let everywhere = TcpListener::bind("0.0.0.0:0").expect("a listener");
        let port = everywhere.local_addr().expect("its address").port();
        let local = SocketAddr::from(([127, 0, 0, 1], port));
        let foreign = SocketAddr::from(([192, 0, 2, 1], port));
        assert!(listener(&HashSet::from([local])).expect("readable").is_some());
        assert_eq!(listener(&HashSet::from([foreign])).expect("readable"), None);
    }
}
