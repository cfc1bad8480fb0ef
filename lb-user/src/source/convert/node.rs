//! Nodes.

use std::net::IpAddr;

use k8s_openapi::api::core::v1 as k8s;

use super::{Edge, LABEL_ZONE, Names, TAINT_AUTOSCALER};
use crate::model::{Node, ObjectName};

pub(super) fn convert(edge: &mut Edge<'_>, names: &mut Names, name: ObjectName, node: &k8s::Node) -> Node {
    let zone = node.metadata.labels.as_ref().and_then(|labels| labels.get(LABEL_ZONE));
    let addresses = node
        .status
        .as_ref()
        .and_then(|status| status.addresses.as_deref())
        .unwrap_or_default();
    let mut of_type = |wanted: &str| -> Box<[IpAddr]> {
        addresses
            .iter()
            .enumerate()
            .filter(|(_, entry)| entry.type_ == wanted)
            .filter_map(|(i, entry)| edge.address(format!("status.addresses[{i}].address"), &entry.address))
            .collect()
    };
    let internal_ips = of_type("InternalIP");
    let external_ips = of_type("ExternalIP");
    let tainted = node
        .spec
        .as_ref()
        .and_then(|spec| spec.taints.as_deref())
        .unwrap_or_default()
        .iter()
        .any(|taint| taint.key == TAINT_AUTOSCALER);
    Node {
        name: name.name,
        zone: zone.filter(|zone| !zone.is_empty()).map(|zone| names.share(zone)),
        internal_ips,
        external_ips,
        leaving: tainted || node.metadata.deletion_timestamp.is_some(),
    }
}
