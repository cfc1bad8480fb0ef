//! What the translating rules of this network namespace say: for each frontend, the endpoints that its traffic can reach.
//!
//! The rules are a graph: a frontend's rule or map entry leads to a chain, from there jumps lead on, and translations end
//! it. That holds for kube-proxy's iptables mode (where iptables writes nftables), for its nftables mode, and for rules that
//! others wrote in that manner. One shortcut is taken: kube-proxy's nftables mode chooses among endpoints by a map in each
//! Service's chain, and reading ten thousand maps is too much, so the endpoints' chains are found by their names, which
//! begin with the Service's and the port's. Joining is pure; [`read`] alone asks the kernel.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    net::SocketAddr,
    time::Duration,
};

use super::{
    Error, Result, legacy,
    nftables::{self, Mapped, Rule, Set, Target},
};
use crate::model::Protocol;

/// Maps that are looked into for frontends; kube-proxy has four.
const MAX_MAPS: usize = 64;

/// The endpoints of one frontend.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Reached {
    pub(super) endpoints: HashSet<SocketAddr>,
    /// How long a client stays with its endpoint.
    pub(super) persistent: Option<Duration>,
    /// Whether more endpoints are reached than the rules name one by one.
    pub(super) computed: bool,
}

/// By frontend; those of all addresses of the node have the unspecified one.
pub(super) type Reach = HashMap<(SocketAddr, Protocol), Reached>;

/// One table of rules, as it was read.
#[derive(Clone, Debug, Default)]
struct Table {
    family: u8,
    rules: Vec<Rule>,
    sets: Vec<Set>,
    maps: Vec<Mapped>,
}

/// Reads all tables that translate.
pub(super) fn read() -> Result<Reach> {
    let list = |what: String| move |source| Error::List { what, source };
    let chains = nftables::chains().map_err(list("the chains of nftables".to_owned()))?;
    let names: BTreeSet<_> = chains
        .into_iter()
        .filter(|chain| chain.translates)
        .map(|chain| (chain.family, chain.table))
        .collect();
    let mut reach = Reach::new();
    for (family, name) in names {
        let rules = nftables::rules(family, &name).map_err(list(format!("the rules of the nftables table {name}")))?;
        let sets = nftables::sets(family, &name).map_err(list(format!("the sets of the nftables table {name}")))?;
        let mut maps = Vec::new();
        for map in dispatching(&rules).into_iter().take(MAX_MAPS) {
            let entries = nftables::verdicts(family, &name, map);
            maps.extend(entries.map_err(list(format!("the map {map} of the nftables table {name}")))?);
        }
        let table = Table {
            family,
            rules,
            sets,
            maps,
        };
        join(&table, &mut reach);
    }
    for legacy::Nat { family, rules } in legacy::read().map_err(list("the rules of iptables".to_owned()))? {
        let table = Table {
            family,
            rules,
            ..Table::default()
        };
        join(&table, &mut reach);
    }
    Ok(reach)
}

/// The maps that can lead from a frontend to a chain: those outside the Services' own chains.
fn dispatching(rules: &[Rule]) -> BTreeSet<&str> {
    rules
        .iter()
        .filter(|rule| service_of(&rule.chain).is_none())
        .filter_map(|rule| match &rule.target {
            Some(Target::Map(name)) => Some(name.as_str()),
            _ => None,
        })
        .collect()
}

/// Adds what a table's rules say.
fn join(table: &Table, reach: &mut Reach) {
    let graph = Graph::new(table);
    for rule in &table.rules {
        // kube-proxy asks for a node's address before it comes to this chain.
        let everywhere = || (rule.chain == "KUBE-NODEPORTS").then(|| nftables::any_address(table.family));
        let address = rule.address.or_else(everywhere);
        let (Some(address), Some(port), Some(target)) = (address, rule.port, &rule.target) else {
            continue;
        };
        let protocols = match rule.protocol {
            Some(protocol) => vec![protocol],
            None => vec![Protocol::Tcp, Protocol::Udp],
        };
        for protocol in protocols {
            let frontend = SocketAddr::new(address, port);
            let reached = reach.entry((frontend, protocol)).or_default();
            graph.follow(&rule.chain, target, port, &mut HashSet::new(), reached);
        }
    }
    for entry in &table.maps {
        let reached = reach.entry((entry.frontend, entry.protocol)).or_default();
        if let Some(chain) = &entry.chain {
            graph.walk(chain, entry.frontend.port(), &mut HashSet::new(), reached);
        }
    }
}

/// A table's chains and how they hang together.
#[derive(Debug)]
struct Graph<'t> {
    chains: HashMap<&'t str, Vec<&'t Rule>>,
    /// The endpoints' chains of each Service's port.
    endpoints: HashMap<&'t str, Vec<&'t str>>,
    /// How long each Service's port remembers a client.
    remembers: HashMap<&'t str, Duration>,
}

impl<'t> Graph<'t> {
    fn new(table: &'t Table) -> Self {
        let mut graph = Self {
            chains: HashMap::new(),
            endpoints: HashMap::new(),
            remembers: HashMap::new(),
        };
        for rule in &table.rules {
            graph.chains.entry(&rule.chain).or_default().push(rule);
        }
        // A chain without rules is one that kube-proxy has emptied and will remove: it is no endpoint's any more.
        for &chain in graph.chains.keys() {
            if let Some(port) = endpoint_of(chain) {
                graph.endpoints.entry(port).or_default().push(chain);
            }
        }
        for set in &table.sets {
            if let (Some(port), Some(timeout)) = (affinity_of(&set.name), set.timeout) {
                graph.remembers.insert(port, timeout);
            }
        }
        graph
    }

    fn walk<'a>(&'a self, chain: &'a str, port: u16, seen: &mut HashSet<&'a str>, reached: &mut Reached) {
        if !seen.insert(chain) {
            return;
        }
        for rule in self.chains.get(chain).into_iter().flatten() {
            reached.persistent = reached.persistent.or(rule.remembers);
            if let Some(target) = &rule.target {
                self.follow(chain, target, port, seen, reached);
            }
        }
    }

    fn follow<'a>(
        &'a self,
        chain: &'a str,
        target: &'a Target,
        port: u16,
        seen: &mut HashSet<&'a str>,
        reached: &mut Reached,
    ) {
        match target {
            Target::Dnat(dnat) => {
                reached.endpoints.insert(dnat.endpoint(port));
            }
            Target::Computed => reached.computed = true,
            Target::Chain(next) => self.walk(next, port, seen, reached),
            Target::Map(_) => match service_of(chain) {
                Some(service) => {
                    reached.persistent = reached.persistent.or(self.remembers.get(service).copied());
                    for &endpoint in self.endpoints.get(service).into_iter().flatten() {
                        self.walk(endpoint, port, seen, reached);
                    }
                }
                None => reached.computed = true,
            },
        }
    }
}

/// The Service's port (`namespace/name/protocol/port`) whose chain this is, in kube-proxy's nftables mode.
fn service_of(chain: &str) -> Option<&str> {
    ["service-", "local-", "external-"]
        .iter()
        .find_map(|prefix| chain.strip_prefix(prefix))
        .map(without_hash)
        .filter(|name| name.contains('/'))
}

/// The Service's port whose endpoint's chain this is: `endpoint-HASH-namespace/name/protocol/port__address/port`.
fn endpoint_of(chain: &str) -> Option<&str> {
    Some(without_hash(chain.strip_prefix("endpoint-")?).split_once("__")?.0)
}

/// The Service's port whose endpoint's memory of clients this set is.
fn affinity_of(set: &str) -> Option<&str> {
    Some(without_hash(set.strip_prefix("affinity-")?).split_once("__")?.0)
}

/// Leaves out the hash before a name: eight of A to Z and 2 to 7, which no namespace begins with.
fn without_hash(name: &str) -> &str {
    match name.split_once('-') {
        Some((hash, rest)) if hash.len() == 8 && hash.bytes().all(|byte| matches!(byte, b'A'..=b'Z' | b'2'..=b'7')) => {
            rest
        }
        _ => name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::nftables::Dnat;

    fn rule(chain: &str, target: Target) -> Rule {
        Rule {
            chain: chain.to_owned(),
            target: Some(target),
            ..Rule::default()
        }
    }

    fn to(chain: &str) -> Target {
        Target::Chain(chain.to_owned())
    }

    fn dnat(endpoint: &str) -> Target {
        let endpoint = address(endpoint);
        Target::Dnat(Dnat {
            address: endpoint.ip(),
            port: Some(endpoint.port()),
        })
    }

    fn address(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    fn for_frontend(frontend: &str, mut rule: Rule) -> Rule {
        let frontend = address(frontend);
        rule.address = Some(frontend.ip());
        rule.port = Some(frontend.port());
        rule.protocol = Some(Protocol::Tcp);
        rule
    }

    fn joined(table: &Table) -> Reach {
        let mut reach = Reach::new();
        join(table, &mut reach);
        reach
    }

    fn endpoints(reach: &Reach, frontend: &str) -> Vec<String> {
        let reached = &reach[&(address(frontend), Protocol::Tcp)];
        let mut endpoints: Vec<_> = reached.endpoints.iter().map(SocketAddr::to_string).collect();
        endpoints.sort();
        endpoints
    }

    #[test]
    fn iptables_chains_lead_from_a_service_to_its_endpoints_alone() {
        let table = Table {
            rules: vec![
                rule("OUTPUT", to("KUBE-SERVICES")),
                for_frontend("10.96.0.10:80", rule("KUBE-SERVICES", to("KUBE-SVC-A"))),
                for_frontend("10.96.0.11:80", rule("KUBE-SERVICES", to("KUBE-SVC-B"))),
                Rule {
                    address: None,
                    ..for_frontend("0.0.0.0:30080", rule("KUBE-NODEPORTS", to("KUBE-SVC-B")))
                },
                // A service's chain marks what comes from outside.
                for_frontend("10.96.0.10:80", rule("KUBE-SVC-A", to("KUBE-MARK-MASQ"))),
                Rule {
                    remembers: Some(Duration::from_mins(3)),
                    ..rule("KUBE-SVC-A", to("KUBE-SEP-1"))
                },
                rule("KUBE-SVC-A", to("KUBE-SEP-1")),
                rule("KUBE-SVC-A", to("KUBE-SEP-2")),
                rule("KUBE-SEP-1", dnat("10.244.1.1:8080")),
                rule("KUBE-SEP-2", dnat("10.244.1.2:8080")),
                rule("KUBE-SVC-B", to("KUBE-SEP-3")),
                rule("KUBE-SEP-3", dnat("10.244.1.3:8080")),
            ],
            ..Table::default()
        };
        let reach = joined(&table);
        assert_eq!(
            endpoints(&reach, "10.96.0.10:80"),
            ["10.244.1.1:8080", "10.244.1.2:8080"]
        );
        assert_eq!(endpoints(&reach, "10.96.0.11:80"), ["10.244.1.3:8080"]);
        assert_eq!(endpoints(&reach, "0.0.0.0:30080"), ["10.244.1.3:8080"]);
        let web = &reach[&(address("10.96.0.10:80"), Protocol::Tcp)];
        assert_eq!((web.persistent, web.computed), (Some(Duration::from_mins(3)), false));
        assert!(!reach.contains_key(&(address("10.96.0.10:80"), Protocol::Udp)));
    }

    #[test]
    fn nftables_chains_are_joined_by_the_names_of_services() {
        let map = || Target::Map("__map7".to_owned());
        let entry = |frontend: &str, chain: Option<&str>| Mapped {
            frontend: address(frontend),
            protocol: Protocol::Tcp,
            chain: chain.map(str::to_owned),
        };
        let table = Table {
            family: 2,
            rules: vec![
                rule("services", Target::Map("service-ips".to_owned())),
                rule("service-ULMVA6XW-shop/web/tcp/http", map()),
                rule(
                    "external-ULMVA6XW-shop/web/tcp/http",
                    to("service-ULMVA6XW-shop/web/tcp/http"),
                ),
                rule(
                    "endpoint-5OJB2KTY-shop/web/tcp/http__10.244.1.1/8080",
                    to("mark-for-masquerade"),
                ),
                rule(
                    "endpoint-5OJB2KTY-shop/web/tcp/http__10.244.1.1/8080",
                    dnat("10.244.1.1:8080"),
                ),
                rule(
                    "endpoint-6OJB2KTY-shop/web/tcp/http__fd00..1/8080",
                    dnat("[fd00::1]:8080"),
                ),
                rule(
                    "endpoint-7OJB2KTY-shop/web/tcp/https__10.244.1.1/8443",
                    dnat("10.244.1.1:8443"),
                ),
            ],
            sets: vec![Set {
                name: "affinity-5OJB2KTY-shop/web/tcp/http__10.244.1.1/8080".to_owned(),
                timeout: Some(Duration::from_hours(3)),
            }],
            maps: vec![
                entry("10.96.0.10:80", Some("service-ULMVA6XW-shop/web/tcp/http")),
                entry("192.0.2.1:80", Some("external-ULMVA6XW-shop/web/tcp/http")),
                entry("10.96.0.99:80", None),
            ],
        };
        assert_eq!(dispatching(&table.rules), BTreeSet::from(["service-ips"]));
        let reach = joined(&table);
        for frontend in ["10.96.0.10:80", "192.0.2.1:80"] {
            assert_eq!(endpoints(&reach, frontend), ["10.244.1.1:8080", "[fd00::1]:8080"]);
            let reached = &reach[&(address(frontend), Protocol::Tcp)];
            assert_eq!(
                (reached.persistent, reached.computed),
                (Some(Duration::from_hours(3)), false)
            );
        }
        assert!(endpoints(&reach, "10.96.0.99:80").is_empty());
    }

    #[test]
    fn what_rules_compute_is_marked_and_rings_end() {
        let table = Table {
            rules: vec![
                for_frontend("10.96.0.10:80", rule("output", Target::Computed)),
                for_frontend("10.96.0.11:80", rule("output", to("ring"))),
                rule("ring", to("ring")),
                rule("ring", Target::Map("__map0".to_owned())),
                for_frontend("10.96.0.12:80", rule("output", dnat("10.244.1.1:8080"))),
            ],
            ..Table::default()
        };
        let reach = joined(&table);
        let computed = |frontend: &str| reach[&(address(frontend), Protocol::Tcp)].computed;
        assert!(computed("10.96.0.10:80") && computed("10.96.0.11:80") && !computed("10.96.0.12:80"));
        assert_eq!(endpoints(&reach, "10.96.0.12:80"), ["10.244.1.1:8080"]);
    }

    #[test]
    fn names_are_taken_apart_with_and_without_a_hash() {
        assert_eq!(
            service_of("service-ULMVA6XW-ns1/svc1/tcp/p80"),
            Some("ns1/svc1/tcp/p80")
        );
        assert_eq!(service_of("service-default/web/tcp/http"), Some("default/web/tcp/http"));
        assert_eq!(service_of("service-my-name/web/tcp/http"), Some("my-name/web/tcp/http"));
        assert_eq!(service_of("service-endpoints-check"), None);
        assert_eq!(service_of("KUBE-SVC-A"), None);
        assert_eq!(
            endpoint_of("endpoint-5OJB2KTY-ns1/svc1/tcp/p80__10.180.0.1/80"),
            Some("ns1/svc1/tcp/p80")
        );
        assert_eq!(endpoint_of("endpoint-x"), None);
        assert_eq!(affinity_of("affinity-5OJB2KTY-a/b/udp/__10.0.0.1/53"), Some("a/b/udp/"));
    }
}
