//! The maps that hold as much as there are flows. They are read through handles of their own: nobody waits for a dump of them
//! who has to write to the kernel.

use std::net::IpAddr;

use lb_common::{addr::Port, flow::role, maps as names};

use super::{MAX_ROWS, Row, at, flow, order_of, protocol, view};
use crate::{
    datapath::flows::Flows,
    view::{MapDumpView, MapRowView, QueryError},
};

/// The maps that are dumped here.
const LARGE: [&str; 3] = [names::FLOWS, names::TUPLES, names::FRAGMENTS];

/// The name of one of these maps, however it is written; none for other maps.
pub(in crate::agent) fn known(name: &str) -> Option<&'static str> {
    LARGE.into_iter().find(|known| known.eq_ignore_ascii_case(name))
}

/// Reads one of these maps, by the name that [`known`] gives.
pub(in crate::agent) fn dump(flows: &Flows, name: &str) -> Result<MapDumpView, QueryError> {
    let failed = |error: &dyn std::fmt::Display| QueryError::Failed(error.to_string());
    let mut rows: Vec<Row> = Vec::new();
    let mut push = |order: Vec<u8>, key: String, value: String| rows.push((order, MapRowView { key, value }));
    match name {
        names::FLOWS => {
            // Of a large table no more is put into words than is shown.
            let mut seen = 0_usize;
            flows
                .scan(|slot, f| {
                    seen += 1;
                    if seen <= MAX_ROWS + 1 {
                        push(slot.to_be_bytes().to_vec(), slot.to_string(), flow(f));
                    }
                })
                .map_err(|e| failed(&e))?;
        }
        names::TUPLES => {
            for (key, entry) in flows.tuples().take(MAX_ROWS + 1) {
                let mut order = order_of(key.low, key.low_port, key.proto);
                order.extend(order_of(key.high, key.high_port, 0));
                push(
                    order,
                    format!(
                        "{} {}/{}",
                        at(key.low, key.low_port),
                        at(key.high, key.high_port),
                        protocol(key.proto)
                    ),
                    format!(
                        "slot={} serial={} role={}",
                        entry.slot,
                        entry.serial(),
                        match entry.role() {
                            role::FRONT => "front",
                            role::MIDDLE => "middle",
                            role::BACK => "back",
                            _ => "?",
                        }
                    ),
                );
            }
        }
        _ => {
            for (key, ports) in flows.fragments().take(MAX_ROWS + 1) {
                let mut order = order_of(key.src, Port(0), key.proto);
                order.extend(order_of(key.dst, Port(0), 0));
                order.extend(key.id.to_ne_bytes());
                push(
                    order,
                    format!(
                        "{} {}/{} id={:08x}",
                        IpAddr::from(key.src),
                        IpAddr::from(key.dst),
                        protocol(key.proto),
                        key.id
                    ),
                    format!(
                        "source_port={} destination_port={}",
                        ports.src_port.get(),
                        ports.dst_port.get()
                    ),
                );
            }
        }
    }
    Ok(view(name, rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_maps_are_known_however_they_are_written_and_no_others() {
        assert_eq!(known("flows"), Some(names::FLOWS));
        assert_eq!(known("Tuples"), Some(names::TUPLES));
        assert_eq!(known(names::FRAGMENTS), Some(names::FRAGMENTS));
        assert_eq!(known(names::FLOW_HAND), None);
    }
}
