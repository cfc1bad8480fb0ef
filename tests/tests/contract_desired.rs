//! The contract's rules, from manifests to what is wanted: one folder in `golden/` a case, its name begins with the row.
//!
//! `desired.txt` holds what is wanted after each state, which Services were touched on the way, and what was not taken.

use std::fmt::Write as _;

use lb_tests::golden;
use lb_user::{
    desired::{Changed, Desired, HealthCheck},
    model::{DesiredService, Member, Problem, Protocol, Scope, SetName, Update, WhenEmpty, WhenEmptyOutside},
};

/// Brings the fold to the state that a file holds; tells which Services that touched.
fn bring(desired: &mut Desired, file: &str, text: &str) -> Vec<String> {
    let mut changed = Changed::default();
    for update in golden::updates(file, text) {
        changed.merge(desired.apply(update));
    }
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
        if let Some(outside) = frontend.outside {
            let _ = write!(out, "    from outside -> {}", set_name(&service.sets[outside.set].name));
            let says = [
                (outside.when_empty == WhenEmptyOutside::Silence, ", silent if empty"),
                (outside.masquerade, ", masqueraded"),
                (outside.source_ranges, ", from source ranges alone"),
            ];
            let said: String = says.iter().filter(|(is, _)| *is).map(|(_, said)| *said).collect();
            let _ = writeln!(out, "{said}");
        }
    }
    if !service.sources.is_empty() {
        let ranges: Vec<String> = service.sources.iter().map(ToString::to_string).collect();
        let _ = writeln!(out, "  source ranges: {}", ranges.join(", "));
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
    for HealthCheck {
        port,
        service,
        local_endpoints,
        ..
    } in desired.health_checks()
    {
        let _ = writeln!(
            out,
            "health check at port {port}: {service} has {local_endpoints} endpoints here"
        );
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
    let steps = golden::steps(case);
    let (config, host) = golden::configure(&steps[0].1);
    let mut desired = Desired::new(config);
    desired.apply(Update::Addresses(host));
    let mut said = String::new();
    for (file, text) in &steps {
        let changed = bring(&mut desired, file, text);
        let _ = writeln!(said, "== {file} (touched: {})", changed.join(", "));
        said.push_str(&render(&desired));
        let before: Vec<DesiredService> = desired.services().collect();
        assert!(
            bring(&mut desired, file, text).is_empty(),
            "{case}: the same state again touches something"
        );
        assert_eq!(
            before,
            desired.services().collect::<Vec<_>>(),
            "{case}: the same state again changes something"
        );
    }
    golden::compare(case, "desired.txt", &said);
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
            for case in golden::cases() {
                assert!(known.contains(&&*case), "golden/{case} has no test");
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
    c07_outside_falls_back_on_its_own
    c07_ready_ones_only
    c08_half_hinted_uses_all
    c08_no_topology_in_the_fallback
    c08_same_node_hints
    c08_zone_hints
    c09_local_without_a_local_endpoint
    c09_outside_local_without_a_local_endpoint
    c10_from_inside_the_cluster_set_counts
    c11_no_endpoints_refuse
    c11_outside_local_without_any_endpoint
    c12_no_node_port_without_the_type
    c12_node_ports_all
    c12_node_ports_in_ranges
    c12_node_ports_primary
    c13_load_balancer_ip_mode
    c14_source_ranges_are_read
    c14_source_ranges_limit_their_family
    c14_source_ranges_want_a_load_balancers_address
    c15_external_ips
    c15_external_ips_switched_off
    c16_local_load_balancer_without_node_port
    c16_load_balancer_without_node_port
    c17_the_external_policy_acts_live
    c18_affinity_acts_live
    c18_affinity_out_of_bounds
    c18_no_affinity_to_an_endpoint_that_is_not_usable
    c20_terminating_endpoints_drain
    c21_health_checks
    c21_one_owner_for_each_health_check_port
    hostile_endpoint_addresses
    hostile_service_addresses
    k33_ports_share_one_table
    one_owner_for_each_address
    publish_not_ready_addresses
    weights
}
