//! The contract's rules, from manifests to what is wanted: one folder in `golden/` a case, its name begins with the row.
//!
//! A folder holds the states of a small cluster (`1.yaml`, `2.yaml`, ...), each one whole, and `desired.txt`: what is
//! wanted after each, which Services were touched on the way, and what was not taken. The first line of `1.yaml` may set
//! options. `EVENKEEL_BLESS=1` writes the files anew; the difference is then to be read by a person.

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

use lb_user::{
    desired::{Config, Desired, NodePortAddresses},
    model::{
        Content, DesiredService, Kind, Member, NodeAddresses, Object, Problem, Protocol, Scope, SetName, Update,
        WhenEmpty,
    },
    source::{convert::Names, dir::read_manifest},
};

const NODE: &str = "node-1";

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden")
}

/// The settings of a case: the words after `# options:` in its first line.
fn configure(first_line: &str) -> (Config, NodeAddresses) {
    let mut config = Config {
        node_name: NODE.to_owned(),
        proxy_name: None,
        external_ips: true,
        node_port_addresses: NodePortAddresses::Primary,
        awaited: vec![Kind::Service, Kind::Slice, Kind::Node],
    };
    let mut host = NodeAddresses::default();
    let options = first_line.strip_prefix("# options:").unwrap_or_default();
    for option in options.split_whitespace() {
        let (key, value) = option.split_once('=').expect("key=value");
        match key {
            "proxy-name" => config.proxy_name = Some(value.to_owned()),
            "external-ips" => config.external_ips = value == "on",
            "node-ports" => {
                config.node_port_addresses = match value {
                    "all" => NodePortAddresses::All,
                    "primary" => NodePortAddresses::Primary,
                    ranges => NodePortAddresses::Ranges(
                        ranges.split(',').map(|range| range.parse().expect("a range")).collect(),
                    ),
                }
            }
            "host" => host.addresses = value.split(',').map(|addr| addr.parse().expect("an address")).collect(),
            other => panic!("no option {other}"),
        }
    }
    (config, host)
}

/// Brings the fold to the state that a file holds; tells which Services that touched.
fn bring(desired: &mut Desired, file: &str, text: &str) -> Vec<String> {
    let (objects, problems) = read_manifest(file, text.as_bytes(), &mut Names::default()).expect("valid YAML");
    let (mut services, mut slices, mut nodes) = (Vec::new(), Vec::new(), Vec::new());
    for object in objects {
        match object {
            Object::Service(service) => services.push(service),
            Object::Slice(slice) => slices.push(slice),
            Object::Node(node) => nodes.push(node),
        }
    }
    let mut changed = desired.apply(Update::Replace(Content::Nodes(nodes)));
    changed.merge(desired.apply(Update::Replace(Content::Slices(slices))));
    changed.merge(desired.apply(Update::Replace(Content::Services(services))));
    let subject = "manifest".into();
    changed.merge(desired.apply(Update::Problems { subject, problems }));
    changed.services.iter().map(ToString::to_string).collect()
}

fn protocol(protocol: Protocol) -> &'static str {
    match protocol {
        Protocol::Tcp => "TCP",
        Protocol::Udp => "UDP",
    }
}

fn set_name(set: &SetName) -> String {
    let name = if set.port_name.is_empty() {
        "(unnamed)"
    } else {
        &set.port_name
    };
    let family = if set.ipv6 { "IPv6" } else { "IPv4" };
    let scope = match set.scope {
        Scope::Cluster => "Cluster",
        Scope::Local => "Local",
    };
    format!("{name} {} {family} {scope}", protocol(set.protocol))
}

fn members(members: &[Member]) -> String {
    let texts: Vec<String> = members
        .iter()
        .map(|member| {
            let socket = std::net::SocketAddr::new(member.addr, member.port.get());
            if member.weight == 1 {
                socket.to_string()
            } else {
                format!("{socket} (weight {})", member.weight)
            }
        })
        .collect();
    if texts.is_empty() {
        "none".to_owned()
    } else {
        texts.join(", ")
    }
}

fn render_service(out: &mut String, service: &DesiredService) {
    let _ = writeln!(out, "{}", service.name);
    for frontend in &service.frontends {
        let socket = std::net::SocketAddr::new(frontend.addr, frontend.port.get());
        let set = set_name(&service.sets[frontend.set].name);
        let _ = write!(
            out,
            "  {:?} {socket} {} -> {set}",
            frontend.kind,
            protocol(frontend.protocol)
        );
        if frontend.when_empty == WhenEmpty::Unreachable {
            let _ = write!(out, ", unreachable if empty");
        }
        if let Some(seconds) = frontend.affinity_seconds {
            let _ = write!(out, ", affinity {seconds} s");
        }
        let _ = writeln!(out);
    }
    for set in &service.sets {
        let _ = writeln!(out, "  [{}] {}", set_name(&set.name), members(&set.members));
        if !set.draining.is_empty() {
            let _ = writeln!(out, "  [{}] draining: {}", set_name(&set.name), members(&set.draining));
        }
    }
}

fn render(desired: &Desired) -> String {
    let mut out = String::new();
    let mut services: Vec<DesiredService> = desired.services().collect();
    services.sort_by(|a, b| a.name.cmp(&b.name));
    for service in &services {
        render_service(&mut out, service);
    }
    if services.is_empty() {
        out.push_str("nothing is served\n");
    }
    for Problem {
        object, field, message, ..
    } in desired.problems()
    {
        let _ = writeln!(out, "problem: {object}: {field}: {message}");
    }
    out
}

fn check(case: &str) {
    let folder = golden().join(case);
    let read = |file: &str| fs::read_to_string(folder.join(file));
    let mut said = String::new();
    let mut fold: Option<Desired> = None;
    for step in 1.. {
        let file = format!("{step}.yaml");
        let Ok(text) = read(&file) else {
            assert!(step > 1, "{case} has no 1.yaml");
            break;
        };
        if fold.is_none() {
            let (config, host) = configure(text.lines().next().unwrap_or_default());
            let mut desired = Desired::new(config);
            desired.apply(Update::Addresses(host));
            fold = Some(desired);
        }
        let desired = fold.as_mut().expect("made above");
        let changed = bring(desired, &file, &text);
        let _ = writeln!(said, "== {file} (touched: {})", changed.join(", "));
        said.push_str(&render(desired));
        let before: Vec<DesiredService> = desired.services().collect();
        assert!(
            bring(desired, &file, &text).is_empty(),
            "{case}: the same state again touches something"
        );
        assert_eq!(
            before,
            desired.services().collect::<Vec<_>>(),
            "{case}: the same state again changes something"
        );
    }
    if std::env::var_os("EVENKEEL_BLESS").is_some_and(|bless| bless == "1") {
        fs::write(folder.join("desired.txt"), &said).expect("the golden file is written");
        return;
    }
    let wanted = read("desired.txt").unwrap_or_default();
    assert!(
        said == wanted,
        "{case} differs from its golden file; wanted:\n{wanted}\nfound:\n{said}\n(EVENKEEL_BLESS=1 writes it anew)"
    );
}

macro_rules! cases {
    ($($case:ident)*) => {
        $(
            #[test]
            fn $case() {
                check(stringify!($case));
            }
        )*

        /// A folder without a test would be a rule that nobody checks.
        #[test]
        fn every_case_has_a_test() {
            let known = [$(stringify!($case)),*];
            let listed = fs::read_dir(golden()).expect("the folder of cases");
            for entry in listed {
                let entry = entry.expect("an entry");
                if !entry.path().join("desired.txt").exists() {
                    continue;
                }
                let name = entry.file_name().to_string_lossy().into_owned();
                assert!(known.contains(&&*name), "golden/{name} has no test");
            }
        }
    };
}

cases! {
    bad_service_fields
    c01_headless_and_external_name
    c01_other_proxy_name
    c01_proxy_name_label
    c02_families_are_independent
    c03_ports_by_name_and_protocol
    c03_the_empty_name_is_a_name
    c04_slices_merge_and_endpoints_move
    c05_condition_defaults
    c06_duplicates
    c07_fallback_to_terminating
    c07_local_and_cluster_are_independent
    c07_ready_ones_only
    c08_half_hinted_uses_all
    c08_no_topology_in_the_fallback
    c08_same_node_hints
    c08_zone_hints
    c09_local_without_a_local_endpoint
    c10_from_inside_the_cluster_set_counts
    c11_no_endpoints_refuse
    c12_no_node_port_without_the_type
    c12_node_ports_all
    c12_node_ports_in_ranges
    c12_node_ports_primary
    c13_load_balancer_ip_mode
    c14_source_ranges_are_read
    c15_external_ips
    c15_external_ips_switched_off
    c16_load_balancer_without_node_port
    c18_affinity_acts_live
    c18_affinity_out_of_bounds
    c18_no_affinity_to_an_endpoint_that_is_not_usable
    c20_terminating_endpoints_drain
    hostile_endpoint_addresses
    hostile_service_addresses
    one_owner_for_each_address
    publish_not_ready_addresses
    weights
}
