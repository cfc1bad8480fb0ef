//! Service rules in nftables, the way kube-proxy's nftables mode lays them out, as a reference to compare with.
//!
//! One map from (address, protocol, port) to a Service's chain, in it a random choice among endpoint chains, in each of
//! those one DNAT: the same shape, hooks and masquerade marks, so that choice and cost are those of that design. Rendering
//! is pure; [`load`] hands a transaction to `nft` inside a namespace.

use std::{
    fmt::Write as _,
    io::Write as _,
    net::{Ipv4Addr, SocketAddr},
    process::{Command, Stdio},
};

use super::{Doing, Error, Netns, Result};
use crate::model::Protocol;

/// The name of the tables that are written.
pub const TABLE: &str = "evenkeel-reference";

/// A Service as the rules see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// A name for its chains: letters, digits, `-`, `.`, `/`.
    pub name: String,
    /// What clients dial.
    pub frontend: SocketAddr,
    /// Its protocol.
    pub protocol: Protocol,
    /// Where connections go; of the frontend's family.
    pub endpoints: Vec<SocketAddr>,
}

/// Renders the transaction that makes the tables with all these Services in place of what was there.
pub fn render_all(services: &[Service]) -> String {
    let mut out = String::new();
    for ipv6 in [false, true] {
        let own: Vec<_> = services.iter().filter(|s| s.frontend.is_ipv6() == ipv6).collect();
        if !own.is_empty() {
            render_table(&mut out, family(ipv6), &own);
        }
    }
    out
}

/// Renders the transaction that gives a Service other endpoints and touches nothing else.
pub fn render_change(old: &Service, new: &Service) -> String {
    let table = format!("{} {TABLE}", family(old.frontend.is_ipv6()));
    let mut out = String::new();
    let fresh = new.endpoints.iter().filter(|e| !old.endpoints.contains(e));
    for &endpoint in fresh {
        render_endpoint(&mut out, &table, new, endpoint);
    }
    match (old.endpoints.is_empty(), new.endpoints.is_empty()) {
        (false, false) => {
            line(&mut out, format_args!("flush chain {table} {}", chain(new)));
            render_choice(&mut out, &table, new);
        }
        (true, false) => {
            line(
                &mut out,
                format_args!("delete element {table} no-endpoint-services {{ {} }}", key(old)),
            );
            render_service(&mut out, &table, new);
        }
        (false, true) => {
            line(
                &mut out,
                format_args!("delete element {table} service-ips {{ {} }}", key(old)),
            );
            line(&mut out, format_args!("flush chain {table} {}", chain(old)));
            line(&mut out, format_args!("delete chain {table} {}", chain(old)));
            render_refusal(&mut out, &table, new);
        }
        (true, true) => {}
    }
    let gone = old.endpoints.iter().filter(|e| !new.endpoints.contains(e));
    for &endpoint in gone {
        let chain = endpoint_chain(old, endpoint);
        line(
            &mut out,
            format_args!("flush chain {table} {chain}\ndelete chain {table} {chain}"),
        );
    }
    out
}

/// Services that nobody dials, to fill tables with: `10.97.x.y:80`, each with `endpoints` endpoints in `10.128.0.0/9`.
pub fn fillers(count: u32, endpoints: u32) -> Vec<Service> {
    let address = |base: [u8; 4], n: u32| Ipv4Addr::from(u32::from_be_bytes(base) + n);
    (0..count)
        .map(|n| Service {
            name: format!("default/filler-{n}/tcp/http"),
            frontend: SocketAddr::from((address([10, 97, 0, 0], n), 80)),
            protocol: Protocol::Tcp,
            endpoints: (0..endpoints)
                .map(|e| SocketAddr::from((address([10, 128, 0, 1], n * endpoints + e), 8080)))
                .collect(),
        })
        .collect()
}

/// Hands a transaction to `nft` inside a namespace; all of it comes true or nothing.
///
/// # Errors
/// Where `nft` is not installed, or the kernel refuses the rules.
pub fn load(netns: &Netns, transaction: &str) -> Result<()> {
    let mut command = Command::new("nft");
    command
        .args(["-f", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let mut nft = netns
        .place(&mut command)
        .spawn()
        .doing(|| "start nft (package nftables)".to_owned())?;
    if let Some(mut stdin) = nft.stdin.take() {
        // If nft ends early, its own message says more than a broken pipe does.
        let _ = stdin.write_all(transaction.as_bytes());
    }
    let ended = nft.wait_with_output().doing(|| "wait for nft".to_owned())?;
    if ended.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&ended.stderr);
    Err(Error::Command {
        program: "nft".to_owned(),
        status: ended.status,
        stderr: stderr.lines().take(4).collect::<Vec<_>>().join(" / "),
    })
}

fn render_table(out: &mut String, family: &str, services: &[&Service]) {
    let table = format!("{family} {TABLE}");
    let address_type = if family == "ip" { "ipv4_addr" } else { "ipv6_addr" };
    // Adding first makes the deletion succeed on a fresh namespace too.
    line(
        out,
        format_args!(
            "add table {table}\n\
             delete table {table}\n\
             add table {table}\n\
             add map {table} service-ips {{ type {address_type} . inet_proto . inet_service : verdict ; }}\n\
             add map {table} no-endpoint-services {{ type {address_type} . inet_proto . inet_service : verdict ; }}\n\
             add chain {table} reject-chain\n\
             add rule {table} reject-chain reject\n\
             add chain {table} mark-for-masquerade\n\
             add rule {table} mark-for-masquerade meta mark set meta mark or 0x4000\n\
             add chain {table} services\n\
             add rule {table} services {family} daddr . meta l4proto . th dport vmap @service-ips\n\
             add chain {table} service-endpoints-check\n\
             add rule {table} service-endpoints-check {family} daddr . meta l4proto . th dport vmap \
             @no-endpoint-services\n\
             add chain {table} filter-output {{ type filter hook output priority 0 ; }}\n\
             add rule {table} filter-output ct state new jump service-endpoints-check\n\
             add chain {table} nat-output {{ type nat hook output priority -100 ; }}\n\
             add rule {table} nat-output jump services\n\
             add chain {table} nat-prerouting {{ type nat hook prerouting priority -100 ; }}\n\
             add rule {table} nat-prerouting jump services\n\
             add chain {table} nat-postrouting {{ type nat hook postrouting priority 100 ; }}\n\
             add rule {table} nat-postrouting meta mark & 0x4000 == 0 return\n\
             add rule {table} nat-postrouting meta mark set meta mark xor 0x4000\n\
             add rule {table} nat-postrouting masquerade fully-random"
        ),
    );
    for service in services {
        for &endpoint in &service.endpoints {
            render_endpoint(out, &table, service, endpoint);
        }
        if service.endpoints.is_empty() {
            render_refusal(out, &table, service);
        } else {
            render_service(out, &table, service);
        }
    }
}

fn render_endpoint(out: &mut String, table: &str, service: &Service, endpoint: SocketAddr) {
    let chain = endpoint_chain(service, endpoint);
    let family = family(endpoint.is_ipv6());
    line(
        out,
        format_args!(
            "add chain {table} {chain}\n\
             add rule {table} {chain} {family} saddr {ip} jump mark-for-masquerade\n\
             add rule {table} {chain} meta l4proto {protocol} dnat to {endpoint}",
            ip = endpoint.ip(),
            protocol = protocol(service),
        ),
    );
}

fn render_service(out: &mut String, table: &str, service: &Service) {
    line(out, format_args!("add chain {table} {}", chain(service)));
    render_choice(out, table, service);
    line(
        out,
        format_args!(
            "add element {table} service-ips {{ {} : goto {} }}",
            key(service),
            chain(service)
        ),
    );
}

fn render_refusal(out: &mut String, table: &str, service: &Service) {
    line(
        out,
        format_args!(
            "add element {table} no-endpoint-services {{ {} : goto reject-chain }}",
            key(service)
        ),
    );
}

fn render_choice(out: &mut String, table: &str, service: &Service) {
    let chain = chain(service);
    let choices: Vec<_> = service
        .endpoints
        .iter()
        .enumerate()
        .map(|(n, &endpoint)| format!("{n} : goto {}", endpoint_chain(service, endpoint)))
        .collect();
    line(
        out,
        format_args!(
            "add rule {table} {chain} numgen random mod {} vmap {{ {} }}",
            choices.len(),
            choices.join(", ")
        ),
    );
}

fn chain(service: &Service) -> String {
    format!("service-{}", service.name)
}

fn endpoint_chain(service: &Service, endpoint: SocketAddr) -> String {
    // A colon ends a name in nft's language.
    let address = endpoint.ip().to_string().replace(':', ".");
    format!("endpoint-{}__{address}/{}", service.name, endpoint.port())
}

fn key(service: &Service) -> String {
    let frontend = service.frontend;
    format!("{} . {} . {}", frontend.ip(), protocol(service), frontend.port())
}

fn protocol(service: &Service) -> &'static str {
    match service.protocol {
        Protocol::Tcp => "tcp",
        Protocol::Udp => "udp",
    }
}

fn family(ipv6: bool) -> &'static str {
    if ipv6 { "ip6" } else { "ip" }
}

/// Appends a line; writing to a `String` cannot fail.
fn line(out: &mut String, content: std::fmt::Arguments<'_>) {
    let _ = writeln!(out, "{content}");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(endpoints: &[&str]) -> Service {
        Service {
            name: "default/web/tcp/http".to_owned(),
            frontend: "10.96.0.10:80".parse().expect("an address"),
            protocol: Protocol::Tcp,
            endpoints: endpoints.iter().map(|e| e.parse().expect("an address")).collect(),
        }
    }

    #[test]
    fn a_service_becomes_map_entry_choice_and_dnat() {
        insta::assert_snapshot!(render_all(&[service(&["10.244.1.1:8080", "10.244.1.2:8080"])]));
    }

    #[test]
    fn a_change_adds_before_it_switches_and_removes_after() {
        insta::assert_snapshot!(render_change(
            &service(&["10.244.1.1:8080", "10.244.1.2:8080"]),
            &service(&["10.244.1.2:8080", "10.244.1.3:8080"]),
        ));
    }

    #[test]
    fn losing_all_endpoints_turns_into_a_refusal_and_back() {
        let some = service(&["10.244.1.1:8080"]);
        let none = service(&[]);
        insta::assert_snapshot!(format!(
            "{}\n{}",
            render_change(&some, &none),
            render_change(&none, &some)
        ));
    }

    #[test]
    fn fillers_have_addresses_of_their_own() {
        let many = fillers(1000, 10);
        let mut endpoints: Vec<_> = many.iter().flat_map(|s| s.endpoints.clone()).collect();
        endpoints.sort();
        endpoints.dedup();
        assert_eq!((many.len(), endpoints.len()), (1000, 10_000));
        assert_eq!(many[999].frontend, "10.97.3.231:80".parse().expect("an address"));
    }
}
