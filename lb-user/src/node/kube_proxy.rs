//! kube-proxy's traces in this network namespace: what each of its modes writes into the kernel, and whether it runs.
//!
//! What it has written and whether it runs are two facts: a kube-proxy that has ended leaves its rules in force, and one that has
//! just started has written none yet. Judging is pure. Chains that the kubelet writes (canaries, firewall marks) are no trace.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs,
    io::{self, Read, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream},
    ops::ControlFlow,
    time::Duration,
};

use super::{
    ipvs,
    legacy::Nat,
    nftables::Chain,
    owners::{Owner, System},
    proxy::process_of,
    sockets::{self, LISTEN},
};

/// The table of the nftables mode, one for each family of addresses.
const TABLE: &str = "kube-proxy";
/// Chains that this table always has, whatever Services there are.
const OWN_CHAINS: [&str; 3] = ["services", "nat-prerouting", "nat-output"];
/// The chain that both modes of iptables' rules dispatch from.
const SERVICES: &str = "KUBE-SERVICES";
/// Chains that the IPVS mode alone has beside it, in the same table.
const IPVS_CHAINS: [&str; 2] = ["KUBE-LOAD-BALANCER", "KUBE-NODE-PORT"];
/// How the chains of a Service's port begin in the iptables mode: for all endpoints, for those of this node, for clients outside.
const SERVICE_CHAINS: [&str; 3] = ["KUBE-SVC-", "KUBE-SVL-", "KUBE-EXT-"];
/// The device that the IPVS mode gives the Services' addresses to.
const DEVICE: &str = "kube-ipvs0";
/// The process's name.
const PROCESS: &str = "kube-proxy";
/// Where kube-proxy answers health checks by default.
pub const HEALTH_PORT: u16 = 10_256;
/// Where it serves its metrics, and the name of its mode, by default.
pub const METRICS_PORT: u16 = 10_249;
/// How long it may take to tell its mode.
const ANSWER: Duration = Duration::from_millis(500);

/// What the rules of nftables and of an iptables that writes them show of kube-proxy.
pub(super) fn by_chains(all: &[Chain]) -> Vec<Owner> {
    let mut tables: BTreeMap<u8, Vec<&str>> = BTreeMap::new();
    let mut nat: BTreeMap<u8, BTreeSet<&str>> = BTreeMap::new();
    for chain in all {
        match chain.table.as_str() {
            TABLE => tables.entry(chain.family).or_default().push(&chain.name),
            "nat" => {
                nat.entry(chain.family).or_default().insert(&chain.name);
            }
            _ => {}
        }
    }
    // Its tables are of one family of addresses each; another's table of this name may be for both.
    tables.retain(|&family, chains| {
        family_name(family).is_some() && chains.iter().any(|chain| OWN_CHAINS.contains(chain))
    });
    let mut owners = Vec::new();
    if !tables.is_empty() {
        let found: Vec<String> = tables
            .iter()
            .map(|(&family, chains)| {
                let of_services: BTreeSet<&str> = chains
                    .iter()
                    .filter_map(|chain| chain.strip_prefix("service-"))
                    .filter(|name| name.contains('/'))
                    .collect();
                format!(
                    "table {} {TABLE} ({} chains, {} Service ports)",
                    family_name(family).unwrap_or_default(),
                    chains.len(),
                    of_services.len()
                )
            })
            .collect();
        owners.push(Owner::new(System::KubeProxyNftables, found.join(", ")));
    }
    owners.extend(by_iptables(&nat, "table"));
    owners
}

/// What the rules of the old iptables show of kube-proxy; a chain of its is never without rules.
pub(super) fn by_legacy_rules(tables: &[Nat]) -> Vec<Owner> {
    let nat = tables
        .iter()
        .map(|table| {
            let chains = table.rules.iter().map(|rule| rule.chain.as_str()).collect();
            (table.family, chains)
        })
        .collect();
    by_iptables(&nat, "the old iptables' table").into_iter().collect()
}

/// What chains of the table `nat` show, by family.
fn by_iptables(nat: &BTreeMap<u8, BTreeSet<&str>>, place: &str) -> Option<Owner> {
    let mut ipvs_mode = false;
    let mut found = Vec::new();
    for (&family, chains) in nat {
        let Some(family) = family_name(family).filter(|_| chains.contains(SERVICES)) else {
            continue;
        };
        let ipvs: Vec<&str> = IPVS_CHAINS.into_iter().filter(|chain| chains.contains(chain)).collect();
        let of_services = chains
            .iter()
            .filter(|chain| SERVICE_CHAINS.iter().any(|prefix| chain.starts_with(prefix)))
            .count();
        let mut trace = format!("chain {SERVICES} in {place} {family} nat");
        // Writing into a String cannot fail.
        let _infallible = if ipvs.is_empty() {
            write!(trace, " (and {of_services} of Service ports)")
        } else {
            write!(trace, " (and {})", ipvs.join(", "))
        };
        ipvs_mode |= !ipvs.is_empty() && of_services == 0;
        found.push(trace);
    }
    let system = if ipvs_mode {
        System::KubeProxyIpvs
    } else {
        System::KubeProxyIptables
    };
    (!found.is_empty()).then(|| Owner::new(system, found.join(", ")))
}

/// The family of a table of nftables that kube-proxy has one for.
fn family_name(family: u8) -> Option<&'static str> {
    match family {
        2 => Some("ip"),
        10 => Some("ip6"),
        _ => None,
    }
}

/// What the device of the IPVS mode shows.
pub(super) fn by_device(devices: &[String]) -> Option<Owner> {
    devices.iter().any(|device| device == DEVICE).then(|| {
        let addresses = nix::ifaddrs::getifaddrs()
            .into_iter()
            .flatten()
            .filter(|found| found.interface_name == DEVICE)
            .filter_map(|found| found.address)
            .filter(|address| address.as_sockaddr_in().is_some() || address.as_sockaddr_in6().is_some())
            .count();
        let servers = match ipvs::list() {
            Ok(servers) => format!("{} virtual servers of IPVS", servers.unwrap_or_default().len()),
            Err(error) => error.reason(),
        };
        let trace = format!("device {DEVICE} with {addresses} addresses, {servers}");
        Owner::new(System::KubeProxyIpvs, trace)
    })
}

/// What shows that kube-proxy runs in this network namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Running {
    /// Its process, where processes of the host can be seen.
    pub process: Option<u32>,
    /// The mode that it tells where it serves its metrics.
    pub mode: Option<String>,
    /// Which of its two default ports somebody listens on.
    pub ports: BTreeSet<u16>,
    /// Others that are known to hold one of the ports.
    pub others: Vec<String>,
    /// What could not be looked at.
    pub unseen: Vec<String>,
}

impl Running {
    /// Looks for it: its process, its ports, and what it says of itself there.
    pub fn find() -> Self {
        let mut running = Self::default();
        match process() {
            Ok(process) => running.process = process,
            Err(error) => running.unseen.push(format!("processes: {error}")),
        }
        let mut listeners = Vec::new();
        let looked = sockets::each(|socket| {
            // The kernel lists listeners first.
            if socket.state != LISTEN {
                return ControlFlow::Break(());
            }
            if [HEALTH_PORT, METRICS_PORT].contains(&socket.local.port()) {
                listeners.push((socket.local, socket.inode));
            }
            ControlFlow::Continue(())
        });
        if let Err(error) = looked {
            running.unseen.push(error.reason());
        }
        for (local, inode) in listeners {
            running.ports.insert(local.port());
            if local.port() == METRICS_PORT && running.mode.is_none() {
                running.mode = ask_mode(local).ok().flatten();
            }
            if let Some(name) = process_of(inode).filter(|name| name != PROCESS) {
                running.others.push(format!("{name} has port {}", local.port()));
            }
        }
        running
    }

    /// Whether it runs, by its own process or its own word. Its ports alone may be another's.
    pub fn is_certain(&self) -> bool {
        self.process.is_some() || self.mode.is_some()
    }

    /// Whether somebody who cannot be seen listens on its ports.
    pub fn is_likely(&self) -> bool {
        !self.ports.is_empty() && self.others.is_empty()
    }

    /// What was found, in one phrase; empty where nothing was.
    pub fn trace(&self) -> String {
        let mut found = Vec::new();
        if let Some(process) = self.process {
            found.push(format!("process {process} ({PROCESS})"));
        }
        if let Some(mode) = &self.mode {
            found.push(format!("port {METRICS_PORT} says mode {mode}"));
        }
        let told = self.mode.is_some().then_some(METRICS_PORT);
        for port in self.ports.iter().filter(|&&port| Some(port) != told) {
            found.push(format!("a listener on port {port}"));
        }
        found.extend(self.others.iter().cloned());
        found.join(", ")
    }
}

/// The process of kube-proxy in this network namespace, if there is one in sight.
fn process() -> io::Result<Option<u32>> {
    let own = fs::read_link("/proc/thread-self/ns/net")?;
    for entry in fs::read_dir("/proc")?.flatten() {
        let Some(id) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // One that ends meanwhile, or that may not be looked at, is passed over.
        let is_it = fs::read_to_string(entry.path().join("comm")).is_ok_and(|name| name.trim_end() == PROCESS);
        if is_it && fs::read_link(entry.path().join("ns/net")).is_ok_and(|netns| netns == own) {
            return Ok(Some(id));
        }
    }
    Ok(None)
}

/// Asks who listens there for its mode, as kube-proxy alone tells it.
fn ask_mode(listener: SocketAddr) -> io::Result<Option<String>> {
    let address = match listener.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    let mut stream = TcpStream::connect_timeout(&SocketAddr::new(address, listener.port()), ANSWER)?;
    stream.set_read_timeout(Some(ANSWER))?;
    stream.set_write_timeout(Some(ANSWER))?;
    write!(stream, "GET /proxyMode HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
    let mut answer = String::new();
    // Whoever it is may send for ever.
    stream.take(4_096).read_to_string(&mut answer)?;
    Ok(mode_of(&answer))
}

/// The mode in an answer of HTTP.
fn mode_of(answer: &str) -> Option<String> {
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let fine = head.split(' ').nth(1) == Some("200");
    let mode = body.trim();
    (fine && ["iptables", "nftables", "ipvs"].contains(&mode)).then(|| mode.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::nftables;

    fn chain(family: u8, table: &str, name: &str) -> Chain {
        Chain {
            family,
            table: table.to_owned(),
            name: name.to_owned(),
            translates: false,
            drops_forwarded: false,
        }
    }

    fn chains(family: u8, table: &str, names: &[&str]) -> Vec<Chain> {
        names.iter().map(|name| chain(family, table, name)).collect()
    }

    fn found(chains: &[Chain]) -> Vec<(System, String)> {
        let owners = by_chains(chains);
        owners.into_iter().map(|owner| (owner.system, owner.trace)).collect()
    }

    #[test]
    fn the_nftables_mode_is_known_by_its_tables() {
        let names = [
            "services",
            "nat-output",
            "service-ULMVA6XW-shop/web/tcp/http",
            "service-endpoints-check",
            "endpoint-5OJB2KTY-shop/web/tcp/http__10.244.1.1/8080",
        ];
        let all = [chains(2, TABLE, &names), chains(10, TABLE, &names[..2])].concat();
        let trace = "table ip kube-proxy (5 chains, 1 Service ports), table ip6 kube-proxy (2 chains, 0 Service ports)";
        assert_eq!(found(&all), [(System::KubeProxyNftables, trace.to_owned())]);
    }

    #[test]
    fn names_that_are_alike_are_nobodys() {
        let others = [
            // For both families, and without what kube-proxy always has.
            chains(1, TABLE, &["services", "nat-output"]),
            chains(2, TABLE, &["input"]),
            chains(2, "kube-proxy-lite", &["services", "nat-output"]),
            chains(2, "evenkeel-lab", &["services", "output"]),
            // The kubelet's, of several of its versions.
            chains(
                2,
                "mangle",
                &["KUBE-KUBELET-CANARY", "KUBE-IPTABLES-HINT", "KUBE-PROXY-CANARY"],
            ),
            chains(2, "filter", &["KUBE-FIREWALL", "KUBE-KUBELET-CANARY", SERVICES]),
            chains(
                2,
                "nat",
                &[
                    "KUBE-MARK-MASQ",
                    "KUBE-MARK-DROP",
                    "KUBE-POSTROUTING",
                    "KUBE-KUBELET-CANARY",
                ],
            ),
            chains(2, "nat", &["PREROUTING", "OUTPUT", "DOCKER", "CNI-HOSTPORT-DNAT"]),
            chains(7, "nat", &[SERVICES]),
        ];
        assert_eq!(found(&others.concat()), []);
    }

    #[test]
    fn the_modes_of_iptables_rules_are_told_apart() {
        let iptables = chains(
            2,
            "nat",
            &[SERVICES, "KUBE-NODEPORTS", "KUBE-SVC-A", "KUBE-EXT-A", "KUBE-SEP-1"],
        );
        let trace = "chain KUBE-SERVICES in table ip nat (and 2 of Service ports)";
        assert_eq!(found(&iptables), [(System::KubeProxyIptables, trace.to_owned())]);
        let ipvs = chains(10, "nat", &[SERVICES, "KUBE-NODE-PORT", "KUBE-LOAD-BALANCER"]);
        let trace = "chain KUBE-SERVICES in table ip6 nat (and KUBE-LOAD-BALANCER, KUBE-NODE-PORT)";
        assert_eq!(found(&ipvs), [(System::KubeProxyIpvs, trace.to_owned())]);
        // What a change of modes left behind shows beside the new one.
        let both = [chains(2, TABLE, &OWN_CHAINS), iptables].concat();
        let systems: Vec<_> = found(&both).into_iter().map(|(system, _)| system).collect();
        assert_eq!(systems, [System::KubeProxyNftables, System::KubeProxyIptables]);
    }

    #[test]
    fn the_old_iptables_is_read_alike() {
        let tables = |chains: &[&str]| {
            let rules = chains.iter().map(|&chain| nftables::Rule {
                chain: chain.to_owned(),
                ..nftables::Rule::default()
            });
            [Nat {
                family: 2,
                rules: rules.collect(),
            }]
        };
        let owners = by_legacy_rules(&tables(&[SERVICES, "KUBE-SVC-A", "KUBE-SVC-A"]));
        assert_eq!(owners.len(), 1);
        assert_eq!(
            owners[0].trace,
            "chain KUBE-SERVICES in the old iptables' table ip nat (and 1 of Service ports)"
        );
        assert!(by_legacy_rules(&tables(&["DOCKER", "KUBE-POSTROUTING"])).is_empty());
    }

    #[test]
    fn the_mode_is_taken_from_kube_proxys_own_answer_alone() {
        assert_eq!(
            mode_of("HTTP/1.0 200 OK\r\nA: b\r\n\r\nnftables").as_deref(),
            Some("nftables")
        );
        for answer in [
            "HTTP/1.0 404 Not Found\r\n\r\nnftables",
            "HTTP/1.0 200 OK\r\n\r\n<html>ipvs</html>",
            "HTTP/1.0 200 OK\r\n\r\n",
            "nftables",
            "",
        ] {
            assert_eq!(mode_of(answer), None, "{answer:?}");
        }
    }

    #[test]
    fn ports_alone_are_likely_and_never_certain() {
        let ports = Running {
            ports: [HEALTH_PORT].into(),
            ..Running::default()
        };
        assert!(ports.is_likely() && !ports.is_certain());
        assert_eq!(ports.trace(), "a listener on port 10256");
        let another = Running {
            others: vec!["evenkeel has port 10256".to_owned()],
            ..ports.clone()
        };
        assert!(!another.is_likely() && !another.is_certain());
        let certain = Running {
            process: Some(7),
            mode: Some("ipvs".to_owned()),
            ports: [HEALTH_PORT, METRICS_PORT].into(),
            ..Running::default()
        };
        assert!(certain.is_certain());
        assert_eq!(
            certain.trace(),
            "process 7 (kube-proxy), port 10249 says mode ipvs, a listener on port 10256"
        );
    }
}
