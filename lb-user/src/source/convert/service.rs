//! Services.

use std::{net::IpAddr, sync::Arc};

use k8s_openapi::api::core::v1 as k8s;

use super::{Edge, LABEL_HEADLESS, LABEL_PROXY_NAME, Names, quote};
use crate::model::{
    Affinity, Cidr, Family, LoadBalancerAddress, ObjectName, Service, ServicePort, ServiceType, SourceRanges,
};

/// The longest ClientIP affinity in seconds: a day.
const MAX_AFFINITY_SECONDS: i32 = 86_400;
/// The affinity timeout where the Service names none: three hours.
const DEFAULT_AFFINITY_SECONDS: u32 = 10_800;

pub(super) fn convert(
    edge: &mut Edge<'_>,
    names: &mut Names,
    name: ObjectName,
    origin: &Arc<str>,
    service: &k8s::Service,
) -> Option<Service> {
    let no_spec = k8s::ServiceSpec::default();
    let spec = service.spec.as_ref().unwrap_or(&no_spec);
    let label = |key: &str| service.metadata.labels.as_ref().and_then(|labels| labels.get(key));

    let service_type = edge.choice(
        "spec.type",
        spec.type_.as_deref(),
        ServiceType::ClusterIp,
        &[
            ("ClusterIP", ServiceType::ClusterIp),
            ("NodePort", ServiceType::NodePort),
            ("LoadBalancer", ServiceType::LoadBalancer),
            ("ExternalName", ServiceType::ExternalName),
        ],
    );
    let policies = [("Cluster", false), ("Local", true)];
    let internal_local = edge.choice(
        "spec.internalTrafficPolicy",
        spec.internal_traffic_policy.as_deref(),
        false,
        &policies,
    );
    let external_local = edge.choice(
        "spec.externalTrafficPolicy",
        spec.external_traffic_policy.as_deref(),
        false,
        &policies,
    );
    let affinity = affinity(edge, spec);
    let cluster_ips = cluster_ips(edge, spec);
    let external_ips = spec
        .external_ips
        .iter()
        .flatten()
        .enumerate()
        .filter_map(|(i, text)| edge.address(format!("spec.externalIPs[{i}]"), text))
        .collect();
    let load_balancer = load_balancer(edge, service);
    let source_ranges = source_ranges(edge, spec);
    let ports = ports(edge, names, spec);
    let health_check_node_port = edge.port("spec.healthCheckNodePort", spec.health_check_node_port);

    Some(Service {
        name,
        origin: origin.clone(),
        created: service
            .metadata
            .creation_timestamp
            .as_ref()
            .map(|time| time.0.as_second()),
        proxy_name: label(LABEL_PROXY_NAME).map(|text| names.share(text)),
        headless_label: label(LABEL_HEADLESS).is_some(),
        service_type: service_type?,
        cluster_ips,
        external_ips,
        load_balancer,
        source_ranges,
        ports,
        affinity: affinity.ok()?,
        internal_local: internal_local?,
        external_local: external_local?,
        health_check_node_port,
    })
}

/// The affinity that the Service asks for (C18); an error if it asks for what does not exist.
fn affinity(edge: &mut Edge<'_>, spec: &k8s::ServiceSpec) -> Result<Option<Affinity>, ()> {
    let on = edge
        .choice(
            "spec.sessionAffinity",
            spec.session_affinity.as_deref(),
            false,
            &[("None", false), ("ClientIP", true)],
        )
        .ok_or(())?;
    if !on {
        return Ok(None);
    }
    let seconds = spec
        .session_affinity_config
        .as_ref()
        .and_then(|config| config.client_ip.as_ref())
        .and_then(|client_ip| client_ip.timeout_seconds);
    match seconds {
        None => Ok(Some(Affinity {
            seconds: DEFAULT_AFFINITY_SECONDS,
        })),
        Some(seconds @ 1..=MAX_AFFINITY_SECONDS) => Ok(Some(Affinity {
            seconds: seconds.unsigned_abs(),
        })),
        Some(other) => {
            edge.report(
                "spec.sessionAffinityConfig.clientIP.timeoutSeconds",
                format!("found {other}; wanted 1 to {MAX_AFFINITY_SECONDS}"),
            );
            Err(())
        }
    }
}

/// The first cluster IP of each family; none if the Service is headless (C1, C2).
fn cluster_ips(edge: &mut Edge<'_>, spec: &k8s::ServiceSpec) -> Box<[IpAddr]> {
    let (field, texts) = match spec.cluster_ips.as_deref() {
        Some(texts) if !texts.is_empty() => ("spec.clusterIPs", texts),
        _ => ("spec.clusterIP", spec.cluster_ip.as_slice()),
    };
    let headless = |text: &String| text.is_empty() || text == "None";
    if texts.iter().any(headless) {
        return Box::default();
    }
    let mut taken: Vec<IpAddr> = Vec::with_capacity(texts.len());
    for (i, text) in texts.iter().enumerate() {
        let field = if field == "spec.clusterIPs" {
            format!("{field}[{i}]")
        } else {
            field.to_owned()
        };
        let Some(addr) = edge.address(field.clone(), text) else {
            continue;
        };
        if taken.iter().any(|other| Family::of(*other) == Family::of(addr)) {
            edge.report(
                field,
                format!("{addr} is the second address of its family; wanted at most one of each"),
            );
            continue;
        }
        taken.push(addr);
    }
    taken.into()
}

/// The load balancer's addresses (C13).
fn load_balancer(edge: &mut Edge<'_>, service: &k8s::Service) -> Box<[LoadBalancerAddress]> {
    let ingress = service
        .status
        .as_ref()
        .and_then(|status| status.load_balancer.as_ref())
        .and_then(|status| status.ingress.as_deref())
        .unwrap_or_default();
    let mut taken = Vec::with_capacity(ingress.len());
    for (i, entry) in ingress.iter().enumerate() {
        let Some(text) = entry.ip.as_deref().filter(|ip| !ip.is_empty()) else {
            continue; // A host name alone is somebody else's to resolve.
        };
        let modes = [("VIP", true), ("Proxy", false)];
        let vip = edge.choice(
            &format!("status.loadBalancer.ingress[{i}].ipMode"),
            entry.ip_mode.as_deref(),
            true,
            &modes,
        );
        let addr = edge.address(format!("status.loadBalancer.ingress[{i}].ip"), text);
        if let (Some(addr), Some(vip)) = (addr, vip) {
            taken.push(LoadBalancerAddress { addr, vip });
        }
    }
    taken.into()
}

/// Who may use the load balancer's addresses (C14). A bad entry is reported and admits nobody: it limits the family that it
/// seems to be of, or both.
fn source_ranges(edge: &mut Edge<'_>, spec: &k8s::ServiceSpec) -> SourceRanges {
    let texts = spec.load_balancer_source_ranges.as_deref().unwrap_or_default();
    let (mut v4, mut v6): (Option<Vec<Cidr>>, Option<Vec<Cidr>>) = (None, None);
    for (i, text) in texts.iter().enumerate() {
        match text.trim().parse::<Cidr>() {
            Ok(range) if range.is_ipv6() => v6.get_or_insert_default().push(range),
            Ok(range) => v4.get_or_insert_default().push(range),
            Err(error) => {
                edge.report(
                    format!("spec.loadBalancerSourceRanges[{i}]"),
                    format!("found {}, which {error}", quote(text)),
                );
                if !text.contains(':') {
                    v4.get_or_insert_default();
                }
                if text.contains(':') || !text.contains('.') {
                    v6.get_or_insert_default();
                }
            }
        }
    }
    let limited = |ranges: Option<Vec<Cidr>>| -> Option<Box<[Cidr]>> {
        let ranges = ranges.filter(|ranges| !ranges.iter().any(Cidr::is_everything))?;
        Some(ranges.into())
    };
    SourceRanges {
        v4: limited(v4),
        v6: limited(v6),
    }
}

fn ports(edge: &mut Edge<'_>, names: &mut Names, spec: &k8s::ServiceSpec) -> Box<[ServicePort]> {
    let mut taken: Vec<ServicePort> = Vec::new();
    for (i, entry) in spec.ports.iter().flatten().enumerate() {
        let name = entry.name.as_deref().unwrap_or_default();
        let protocol = edge.protocol(format!("spec.ports[{i}].protocol"), entry.protocol.as_deref());
        let port = edge.port(format!("spec.ports[{i}].port"), Some(entry.port));
        let named = edge.port_name(format!("spec.ports[{i}].name"), name);
        let node_port = edge.port(format!("spec.ports[{i}].nodePort"), entry.node_port);
        let (Some(protocol), Some(port), true) = (protocol, port, named) else {
            continue;
        };
        if taken.iter().any(|p| *p.name == *name && p.protocol == protocol) {
            edge.report(
                format!("spec.ports[{i}]"),
                format!("is the second port with name {name:?} and this protocol; wanted distinct ones"),
            );
            continue;
        }
        taken.push(ServicePort {
            name: names.share(name),
            protocol,
            port,
            node_port,
        });
    }
    taken.into()
}
