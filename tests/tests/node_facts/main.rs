//! What the node says, read from real rules, sockets and settings in namespaces of our own.

mod iptables;
mod kube_proxy;

use std::{
    collections::{HashMap, HashSet},
    fmt::Write as _,
    io::Read,
    net::{SocketAddr, TcpListener, TcpStream},
    path::Path,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use lb_user::{
    lab::{Netns, Server, client, link, nft, server::Manner},
    model::Protocol,
    node::{
        inventory,
        nftables::{self, Target},
        owners::{self, System},
        proxy::{Kind, Proxy},
        settings,
        table::{Finding, Table},
    },
};

fn address(text: &str) -> SocketAddr {
    text.parse().expect("an address")
}

/// A folder without pins, in place of a BPF file system.
fn no_pins() -> Result<tempfile::TempDir> {
    Ok(tempfile::tempdir()?)
}

fn look(netns: &Netns, frontends: &[SocketAddr]) -> Result<(Proxy, Table)> {
    let folder = no_pins()?;
    let frontends: HashSet<_> = frontends.iter().copied().collect();
    Ok(netns.run(|| {
        let proxy = Proxy::find(folder.path(), &frontends);
        let table = Table::read(&proxy);
        (proxy, table)
    })?)
}

/// How the table finds an endpoint of a frontend: programmed, absent, absent with its frontend, or the reason why not known.
fn found(table: &Table, frontend: &str, endpoint: &str) -> String {
    match table.find(address(frontend), Protocol::Tcp, address(endpoint)) {
        Finding::Programmed { .. } => "programmed".to_owned(),
        Finding::Absent { service: Some(_) } => "absent".to_owned(),
        Finding::Absent { service: None } => "no frontend".to_owned(),
        Finding::Unknown(reason) => reason.to_owned(),
    }
}

/// Rules in kube-proxy's layout and under its names.
fn as_kube_proxy(services: &[nft::Service]) -> String {
    nft::render_all(services).replace(nft::TABLE, "kube-proxy")
}

fn service(name: &str, frontend: &str, endpoints: &[&str]) -> nft::Service {
    nft::Service {
        name: name.to_owned(),
        frontend: address(frontend),
        protocol: Protocol::Tcp,
        endpoints: endpoints.iter().map(|&endpoint| address(endpoint)).collect(),
    }
}

#[test]
fn an_empty_namespace_has_no_proxy() -> Result<()> {
    let netns = Netns::new()?;
    let (proxy, table) = look(&netns, &[address("10.96.0.10:80")])?;
    assert_eq!(proxy.kind, Kind::Unseen);
    assert_eq!(proxy.unseen, [""; 0]);
    assert_eq!(
        found(&table, "10.96.0.10:80", "10.244.1.1:8080"),
        "no proxy was seen on this node"
    );
    Ok(())
}

#[test]
fn kube_proxys_nftables_mode_is_read_in_both_families_among_many_services() -> Result<()> {
    let netns = Netns::new()?;
    let mut services = nft::fillers(500, 3);
    services.push(service(
        "ULMVA6XW-shop/web/tcp/http",
        "10.96.0.10:80",
        &["10.244.1.1:8080", "10.244.1.2:8080"],
    ));
    services.push(service("shop/six/tcp/http", "[fd00::10]:80", &["[fd00:1::1]:8080"]));
    services.push(service("shop/none/tcp/http", "10.96.0.11:80", &[]));
    nft::load(&netns, &as_kube_proxy(&services))?;
    let (proxy, table) = look(&netns, &[address("10.96.0.10:80")])?;
    assert_eq!(
        (proxy.kind, proxy.name.as_str()),
        (Kind::KubeProxyNftables, "kube-proxy (nftables)")
    );
    assert_eq!(table.unknown(), None);
    for (frontend, endpoint, expected) in [
        ("10.96.0.10:80", "10.244.1.1:8080", "programmed"),
        ("10.96.0.10:80", "10.244.1.2:8080", "programmed"),
        ("10.96.0.10:80", "10.244.1.3:8080", "absent"),
        ("10.96.0.10:80", "10.244.1.1:8081", "absent"),
        ("[fd00::10]:80", "[fd00:1::1]:8080", "programmed"),
        ("[fd00::10]:80", "[fd00:1::2]:8080", "absent"),
        ("10.96.0.11:80", "10.244.1.1:8080", "absent"),
        ("10.96.0.12:80", "10.244.1.1:8080", "no frontend"),
        ("10.97.1.243:80", "10.128.5.220:8080", "programmed"),
    ] {
        assert_eq!(found(&table, frontend, endpoint), expected, "{frontend} {endpoint}");
    }
    let web = table
        .service(address("10.96.0.10:80"), Protocol::Tcp)
        .context("the service")?;
    assert_eq!((web.backends.len(), web.persistent), (2, None));
    assert_eq!(web.scheduler.as_deref(), Some("random"));

    assert!(netns.run(|| table.is_current())?);

    // A port of every address of the node, in the map that kube-proxy has for those.
    nft::load(
        &netns,
        "add map ip kube-proxy service-nodeports { type inet_proto . inet_service : verdict; }\n\
         add rule ip kube-proxy services meta l4proto . th dport vmap @service-nodeports\n\
         add element ip kube-proxy service-nodeports { tcp . 30080 : goto service-ULMVA6XW-shop/web/tcp/http }\n",
    )?;
    assert!(!netns.run(|| table.is_current())?);
    let (_, table) = look(&netns, &[])?;
    assert_eq!(found(&table, "192.0.2.1:30080", "10.244.1.1:8080"), "programmed");
    assert_eq!(found(&table, "192.0.2.1:30081", "10.244.1.1:8080"), "no frontend");

    // An endpoint's chain that is emptied, as kube-proxy does before it removes one, is no endpoint any more.
    nft::load(
        &netns,
        "flush chain ip kube-proxy endpoint-ULMVA6XW-shop/web/tcp/http__10.244.1.2/8080\n",
    )?;
    let (_, table) = look(&netns, &[])?;
    assert_eq!(found(&table, "10.96.0.10:80", "10.244.1.2:8080"), "absent");
    Ok(())
}

#[test]
fn kube_proxys_iptables_mode_is_read_where_iptables_writes_nftables() -> Result<()> {
    let netns = Netns::new()?;
    let mut chains = "add table ip nat\n\
                      add chain ip nat OUTPUT { type nat hook output priority -100; }\n"
        .to_owned();
    for name in ["SERVICES", "SVC-WEB", "SVC-DNS", "SEP-1", "SEP-2", "SEP-3"] {
        writeln!(chains, "add chain ip nat KUBE-{name}")?;
    }
    nft::load(&netns, &chains)?;
    netns.run(|| -> Result<()> {
        use iptables::{append, dnat, jump, seen_within, tcp, to_frontend};
        append("OUTPUT", &[jump("KUBE-SERVICES")])?;
        for (frontend, chain) in [("10.96.0.10:80", "KUBE-SVC-WEB"), ("10.96.0.11:80", "KUBE-SVC-DNS")] {
            append("KUBE-SERVICES", &[to_frontend(address(frontend))?, jump(chain)])?;
        }
        append("KUBE-SVC-WEB", &[seen_within(10_800, "KUBE-SEP-1"), jump("KUBE-SEP-1")])?;
        for (service, endpoint) in [("WEB", 1), ("WEB", 2), ("DNS", 3)] {
            append(&format!("KUBE-SVC-{service}"), &[jump(&format!("KUBE-SEP-{endpoint}"))])?;
            let target = dnat(SocketAddr::from(([10, 244, 1, endpoint], 8080)))?;
            append(&format!("KUBE-SEP-{endpoint}"), &[tcp(), target])?;
        }
        Ok(())
    })??;
    let (proxy, table) = look(&netns, &[address("10.96.0.10:80")])?;
    assert_eq!(
        (proxy.kind, proxy.name.as_str()),
        (Kind::KubeProxyIptables, "kube-proxy (iptables)")
    );
    for (frontend, endpoint, expected) in [
        ("10.96.0.10:80", "10.244.1.1:8080", "programmed"),
        ("10.96.0.10:80", "10.244.1.2:8080", "programmed"),
        ("10.96.0.10:80", "10.244.1.3:8080", "absent"),
        ("10.96.0.11:80", "10.244.1.3:8080", "programmed"),
        ("10.96.0.12:80", "10.244.1.3:8080", "no frontend"),
    ] {
        assert_eq!(found(&table, frontend, endpoint), expected, "{frontend} {endpoint}");
    }
    let persistent = |frontend: &str| Some(table.service(address(frontend), Protocol::Tcp)?.persistent);
    assert_eq!(persistent("10.96.0.10:80"), Some(Some(Duration::from_hours(3))));
    assert_eq!(persistent("10.96.0.11:80"), Some(None));
    Ok(())
}

#[test]
fn affinity_is_seen_by_its_sets() -> Result<()> {
    let netns = Netns::new()?;
    let services = [service("shop/web/tcp/http", "10.96.0.10:80", &["10.244.1.1:8080"])];
    let set = "affinity-shop/web/tcp/http__10.244.1.1/8080";
    nft::load(
        &netns,
        &format!(
            "{}add set ip kube-proxy {set} {{ type ipv4_addr; flags dynamic,timeout; timeout 10800s; }}\n",
            as_kube_proxy(&services)
        ),
    )?;
    let (_, table) = look(&netns, &[])?;
    let web = table
        .service(address("10.96.0.10:80"), Protocol::Tcp)
        .context("the service")?;
    assert_eq!(web.persistent, Some(Duration::from_hours(3)));
    Ok(())
}

#[test]
fn rules_that_others_wrote_are_read_as_far_as_they_say() -> Result<()> {
    let netns = Netns::new()?;
    nft::load(
        &netns,
        "table ip site {\n\
           chain output {\n\
             type nat hook output priority -100;\n\
             ip daddr 10.96.0.10 tcp dport 80 dnat to 10.244.1.1:8080\n\
             ip daddr 10.96.0.11 tcp dport 80 dnat to numgen random mod 2 map { 0 : 10.244.1.1, 1 : 10.244.1.2 }\n\
             ip daddr . tcp dport vmap { 10.96.0.12 . 80 : jump web }\n\
             ip daddr 10.96.0.13 jump web\n\
             ip daddr 10.96.0.14 udp dport 53 dnat to 10.244.1.5\n\
           }\n\
           chain web { meta l4proto tcp dnat to 10.244.1.3:8080; }\n\
         }\n",
    )?;
    let (proxy, table) = look(&netns, &[address("10.96.0.10:80")])?;
    assert_eq!(proxy.kind, Kind::Rules);
    assert_eq!(found(&table, "10.96.0.10:80", "10.244.1.1:8080"), "programmed");
    assert_eq!(found(&table, "10.96.0.10:80", "10.244.1.2:8080"), "absent");
    assert_eq!(
        found(&table, "10.96.0.11:80", "10.244.1.2:80"),
        "the rules compute the endpoint for each connection"
    );
    // Reached by ways that are not read: not known, rather than absent.
    for frontend in ["10.96.0.12:80", "10.96.0.13:80"] {
        assert_eq!(
            found(&table, frontend, "10.244.1.3:8080"),
            "no rule names the frontend in a way that is read"
        );
    }
    let dns = table.find(address("10.96.0.14:53"), Protocol::Udp, address("10.244.1.5:53"));
    assert!(matches!(dns, Finding::Programmed { .. }), "{dns:?}");
    // Without a Service that the rules know, they are no proxy.
    let (proxy, _) = look(&netns, &[address("10.96.0.99:80")])?;
    assert_eq!(proxy.kind, Kind::Unseen);
    Ok(())
}

#[test]
fn a_rule_comes_out_as_it_went_in() -> Result<()> {
    let netns = Netns::new()?;
    nft::load(
        &netns,
        "table ip6 site {\n\
           chain output { type nat hook output priority -100; ip6 daddr fd00::a tcp dport 443 goto web; }\n\
           chain web { meta l4proto tcp dnat to [fd00:1::1]:8443; }\n\
         }\n",
    )?;
    let (chains, rules) = netns.run(|| (nftables::chains(), nftables::rules(10, "site")))?;
    let chains = chains?;
    let translating: Vec<_> = chains.iter().map(|c| (c.name.as_str(), c.translates)).collect();
    assert_eq!(translating, [("output", true), ("web", false)]);
    let [dispatch, endpoint] = &rules?[..] else {
        anyhow::bail!("two rules");
    };
    assert_eq!(dispatch.address, Some("fd00::a".parse()?));
    assert_eq!((dispatch.protocol, dispatch.port), (Some(Protocol::Tcp), Some(443)));
    assert_eq!(dispatch.target, Some(Target::Chain("web".to_owned())));
    let Some(Target::Dnat(dnat)) = &endpoint.target else {
        anyhow::bail!("a translation: {endpoint:?}");
    };
    assert_eq!(dnat.endpoint(443), address("[fd00:1::1]:8443"));
    Ok(())
}

#[test]
fn other_owners_are_found_by_their_chains_and_devices() -> Result<()> {
    let folder = no_pins()?;
    let systems = |netns: &Netns| -> Result<Vec<System>> {
        let owners = netns.run(|| owners::find(folder.path()))?;
        ensure!(owners.unseen.is_empty(), "{:?}", owners.unseen);
        Ok(owners.found.iter().map(|owner| owner.system).collect())
    };
    let netns = Netns::new()?;
    assert_eq!(systems(&netns)?, []);
    let other = Netns::new()?;
    link::join((&netns, "cilium_host"), (&other, "cilium_net"))?;
    nft::load(&netns, "table ip nat { chain KUBE-SERVICES { }\n}\n")?;
    assert_eq!(systems(&netns)?, [System::Cilium, System::KubeProxyIptables]);
    let (proxy, _) = look(&netns, &[])?;
    assert_eq!(proxy.kind, Kind::Cilium);
    Ok(())
}

#[test]
fn a_process_that_listens_where_clients_dial_is_the_proxy() -> Result<()> {
    let netns = Netns::new()?;
    let peer = Netns::new()?;
    link::join((&netns, "up"), (&peer, "down"))?;
    let vip = address("10.96.0.10:80");
    link::add_address(&netns, "up", vip.ip(), 32)?;
    let _listener = netns.run(|| TcpListener::bind(vip))??;
    let (proxy, table) = look(&netns, &[vip])?;
    assert_eq!(
        (proxy.kind, proxy.trace.as_str()),
        (Kind::Userspace, "listens on 10.96.0.10:80")
    );
    let own_name = std::fs::read_to_string("/proc/self/comm")?;
    assert_eq!(proxy.name, own_name.trim());
    assert!(found(&table, "10.96.0.10:80", "10.244.1.1:8080").contains("relays"));
    // A listener in another namespace serves nobody here.
    let (proxy, _) = look(&peer, &[vip])?;
    assert_eq!(proxy.kind, Kind::Unseen);
    Ok(())
}

#[test]
fn open_connections_are_counted_for_each_frontend_of_both_families() -> Result<()> {
    let (near, far) = (Netns::new()?, Netns::new()?);
    link::join((&near, "up"), (&far, "down"))?;
    for (netns, device, text, prefix) in [
        (&near, "up", "10.0.0.1", 24),
        (&near, "up", "fd00::1", 64),
        (&far, "down", "10.0.0.2", 24),
        (&far, "down", "fd00::2", 64),
    ] {
        link::add_address(netns, device, text.parse()?, prefix)?;
    }
    let (v4, v6, other) = (address("10.0.0.2:80"), address("[fd00::2]:80"), address("10.0.0.2:81"));
    let _server = Server::start(&far, &[v4, v6, other], Manner::Stay)?;
    let dial =
        |to: SocketAddr| -> Result<TcpStream> { Ok(near.run(|| client::connect_tcp(to, Duration::from_secs(2)))??) };
    let mapped = address("[::ffff:10.0.0.2]:80");
    let mut open = Vec::new();
    for to in [v4, v4, mapped, v6, other] {
        open.push(dial(to)?);
    }
    let frontends = HashSet::from([v4, v6, address("10.0.0.9:80")]);
    let count = || -> Result<HashMap<SocketAddr, u64>> { Ok(near.run(|| inventory::open_connections(&frontends))??) };
    assert_eq!(count()?, HashMap::from([(v4, 3), (v6, 1)]));
    // The far side has them too, but as the server.
    assert_eq!(far.run(|| inventory::open_connections(&frontends))??, HashMap::new());
    let mut first = open.remove(0);
    client::read_name(&mut first)?;
    first.shutdown(std::net::Shutdown::Write)?;
    let mut rest = Vec::new();
    first.read_to_end(&mut rest)?;
    drop(first);
    assert_eq!(count()?, HashMap::from([(v4, 2), (v6, 1)]));
    Ok(())
}

#[test]
fn settings_are_those_of_the_namespace() -> Result<()> {
    let netns = Netns::new()?;
    netns.set_local_ports(40_000, 40_199)?;
    netns.write_sysctl("ipv4/ip_local_reserved_ports", "40000-40009,50000")?;
    netns.write_sysctl("ipv4/tcp_fin_timeout", "30")?;
    let read = netns.run(|| settings::read(Kind::KubeProxyNftables))?;
    let setting = |name: &str| read.iter().find(|s| s.name == name).context(name.to_owned());
    let ports = setting("net.ipv4.ip_local_port_range")?;
    let advice = ports.advice.as_deref().context("an advice")?;
    assert!(
        advice.contains("190 ports carry 3 new connections a second"),
        "{advice}"
    );
    let reserved = setting("net.ipv4.ip_local_reserved_ports")?;
    assert_eq!(reserved.value.as_deref(), Some("10 within the range"));
    let fin = setting("net.ipv4.tcp_fin_timeout")?;
    assert!(fin.value.as_deref() == Some("30") && fin.advice.is_some(), "{fin:?}");
    if !Path::new("/proc/net/ip_vs").exists() {
        assert_eq!(setting("net.ipv4.vs.conn_reuse_mode")?.value, None);
        assert_eq!(setting("ipvs.timeout.tcpfin")?.value, None);
    }
    Ok(())
}
