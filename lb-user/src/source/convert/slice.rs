//! EndpointSlices.

use std::{sync::Arc, time::SystemTime};

use k8s_openapi::api::discovery::v1 as k8s;

use super::{ANNOTATION_CHANGED, ANNOTATION_WEIGHT, Edge, LABEL_SERVICE_NAME, MAX_WEIGHT, Names, quote};
use crate::model::{Endpoint, Family, Hints, ObjectName, Slice, SlicePort};

pub(super) fn convert(
    edge: &mut Edge<'_>,
    names: &mut Names,
    name: ObjectName,
    slice: &k8s::EndpointSlice,
) -> Option<Slice> {
    let family = match slice.address_type.as_str() {
        "IPv4" => Family::V4,
        "IPv6" => Family::V6,
        "FQDN" => return None, // Host names are nothing to balance onto (C2).
        other => {
            edge.report("addressType", format!("found {}; wanted IPv4 or IPv6", quote(other)));
            return None;
        }
    };
    let service = slice
        .metadata
        .labels
        .as_ref()
        .and_then(|labels| labels.get(LABEL_SERVICE_NAME))
        .filter(|service| !service.is_empty())?;
    let weight = weight(edge, slice);
    let ports = ports(edge, names, slice);
    let endpoints = slice
        .endpoints
        .iter()
        .enumerate()
        .filter_map(|(i, entry)| endpoint(edge, names, family, i, entry))
        .collect();
    Some(Slice {
        name,
        service: names.share(service),
        family,
        weight: weight?,
        changed_at: changed_at(slice),
        ports,
        endpoints,
    })
}

fn weight(edge: &mut Edge<'_>, slice: &k8s::EndpointSlice) -> Option<u16> {
    let Some(text) = slice
        .metadata
        .annotations
        .as_ref()
        .and_then(|a| a.get(ANNOTATION_WEIGHT))
    else {
        return Some(1);
    };
    // Digits alone: `u16::from_str` would take a plus sign.
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let weight = text.parse().ok().filter(|&weight| digits && weight <= MAX_WEIGHT);
    if weight.is_none() {
        edge.report(
            format!("metadata.annotations[{ANNOTATION_WEIGHT}]"),
            format!("found {}; wanted a whole number from 0 to {MAX_WEIGHT}", quote(text)),
        );
    }
    weight
}

/// When the change happened that the slice was written for. It is measured by and nothing else, so one that is no time is passed over.
fn changed_at(slice: &k8s::EndpointSlice) -> Option<SystemTime> {
    let text = slice.metadata.annotations.as_ref()?.get(ANNOTATION_CHANGED)?;
    let time: k8s_openapi::jiff::Timestamp = text.parse().ok()?;
    Some(time.into())
}

fn ports(edge: &mut Edge<'_>, names: &mut Names, slice: &k8s::EndpointSlice) -> Box<[SlicePort]> {
    let mut taken = Vec::new();
    for (i, entry) in slice.ports.iter().flatten().enumerate() {
        let name = entry.name.as_deref().unwrap_or_default();
        let Some(port) = edge.port(format!("ports[{i}].port"), entry.port) else {
            continue;
        };
        let Some(protocol) = edge.protocol(format!("ports[{i}].protocol"), entry.protocol.as_deref()) else {
            continue;
        };
        if edge.port_name(format!("ports[{i}].name"), name) {
            taken.push(SlicePort {
                name: names.share(name),
                protocol,
                port,
            });
        }
    }
    taken.into()
}

fn endpoint(
    edge: &mut Edge<'_>,
    names: &mut Names,
    family: Family,
    i: usize,
    entry: &k8s::Endpoint,
) -> Option<Endpoint> {
    let Some(text) = entry.addresses.first() else {
        edge.report(format!("endpoints[{i}].addresses"), "is empty; wanted an address");
        return None;
    };
    let field = format!("endpoints[{i}].addresses[0]");
    let addr = edge.address(field.clone(), text)?;
    if Family::of(addr) != family {
        let wanted = match family {
            Family::V4 => "IPv4",
            Family::V6 => "IPv6",
        };
        edge.report(
            field,
            format!("{addr} is not of the slice's addressType; wanted {wanted}"),
        );
        return None;
    }
    let conditions = entry.conditions.as_ref();
    let mut share = |text: &Option<String>| text.as_deref().filter(|t| !t.is_empty()).map(|t| names.share(t));
    let node = share(&entry.node_name);
    let zone = share(&entry.zone);
    Some(Endpoint {
        addr,
        ready: conditions.and_then(|c| c.ready).unwrap_or(true),
        serving: conditions.and_then(|c| c.serving).unwrap_or(true),
        terminating: conditions.and_then(|c| c.terminating).unwrap_or(false),
        node,
        zone,
        hints: hints(names, entry),
    })
}

fn hints(names: &mut Names, entry: &k8s::Endpoint) -> Option<Arc<Hints>> {
    let hints = entry.hints.as_ref()?;
    let zones: Box<[Arc<str>]> = hints.for_zones.iter().flatten().map(|z| names.share(&z.name)).collect();
    let nodes: Box<[Arc<str>]> = hints.for_nodes.iter().flatten().map(|n| names.share(&n.name)).collect();
    (!zones.is_empty() || !nodes.is_empty()).then(|| names.share_hints(Hints { zones, nodes }))
}
