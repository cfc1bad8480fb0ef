//! The maps of translated packets, as rows.

use std::net::IpAddr;

use lb_common::{
    addr::Addr,
    flow::{Flow, role, side, state},
    maps as names,
};

use super::{MAX_ROWS, at, order_of, protocol};
use crate::datapath::{flows::Flows, kernel::MapsError};

/// Whether a map is one of these.
pub(super) fn is_one(name: &str) -> bool {
    [
        names::FLOWS,
        names::TUPLES,
        names::FLOW_HAND,
        names::FRAGMENTS,
        names::INTERFACES,
        names::SETTINGS,
    ]
    .contains(&name)
}

/// Reads one of the maps: what a row is sorted by, its key and its value.
pub(super) fn rows(flows: &Flows, name: &str, mut push: impl FnMut(Vec<u8>, String, String)) -> Result<(), MapsError> {
    match name {
        names::FLOWS => {
            // One more than is shown, so that the dump says that it is cut.
            let mut left = MAX_ROWS + 1;
            flows.scan(|slot, flow| {
                if left > 0 {
                    left -= 1;
                    push(slot.to_be_bytes().to_vec(), slot.to_string(), flow_text(flow));
                }
            })?;
        }
        names::TUPLES => {
            for (tuple, entry) in flows.tuples().take(MAX_ROWS + 1) {
                let mut order = order_of(tuple.low, tuple.low_port, tuple.proto);
                order.extend(order_of(tuple.high, tuple.high_port, tuple.proto));
                let role = match entry.role() {
                    role::FRONT => "front",
                    role::MIDDLE => "middle",
                    role::BACK => "back",
                    _ => "unknown",
                };
                push(
                    order,
                    format!(
                        "{} {}/{}",
                        at(tuple.low, tuple.low_port),
                        at(tuple.high, tuple.high_port),
                        protocol(tuple.proto)
                    ),
                    format!("slot={} serial={} role={role}", entry.slot, entry.serial()),
                );
            }
        }
        names::FLOW_HAND => push(
            Vec::new(),
            "0".to_owned(),
            format!("slots looked at, ever: {}", flows.hand()?),
        ),
        names::FRAGMENTS => {
            for (key, ports) in flows.fragments().take(MAX_ROWS + 1) {
                let mut order = order_of(key.src, ports.src_port, key.proto);
                order.extend(key.id.to_ne_bytes());
                // As it lies in the packet: two bytes of IPv4, four of IPv6.
                let id = if key.src.is_v4() {
                    u32::from(u16::from_be(key.id as u16))
                } else {
                    u32::from_be(key.id)
                };
                push(
                    order,
                    format!(
                        "{} {} id={id:x}/{}",
                        IpAddr::from(key.src),
                        IpAddr::from(key.dst),
                        protocol(key.proto)
                    ),
                    format!(
                        "source_port={} target_port={}",
                        ports.src_port.get(),
                        ports.dst_port.get()
                    ),
                );
            }
        }
        names::INTERFACES => {
            for (index, interface) in flows.interfaces()? {
                let side = match interface.side {
                    side::UPLINK => "uplink",
                    side::GUEST => "guest",
                    _ => "unknown",
                };
                push(
                    index.to_be_bytes().to_vec(),
                    format!("index {index}"),
                    format!("side={side} v4={} v6={}", or_none(interface.v4), or_none(interface.v6)),
                );
            }
        }
        _ => {
            let settings = flows.settings()?;
            push(
                Vec::new(),
                "0".to_owned(),
                format!(
                    "flow_slots={} source_ports={}-{} clock_offset_ns={}",
                    settings.flow_slots, settings.first_port, settings.last_port, settings.clock_offset_ns
                ),
            );
        }
    }
    Ok(())
}

fn flow_text(flow: &Flow) -> String {
    let source = if flow.source_port.0 == 0 {
        "none".to_owned()
    } else {
        at(flow.source, flow.source_port).to_string()
    };
    let ended = if flow.state() == state::ENDED { "ended" } else { "live" };
    format!(
        "{}/{} client={} backend={} source={source} state={ended} serial={} service={} set={} backend_id={} generation={} \
         flags={:#x} client_sent={:#x} backend_sent={:#x} start_ns={} established_ns={} seen_ns={}",
        at(flow.vip, flow.vip_port),
        protocol(flow.proto),
        at(flow.client, flow.client_port),
        at(flow.backend, flow.backend_port),
        flow.serial(),
        flow.service_id,
        flow.set_id,
        flow.backend_id,
        flow.generation,
        flow.flags,
        flow.client_sent,
        flow.backend_sent,
        flow.start_ns,
        flow.established_ns,
        flow.seen_ns
    )
}

fn or_none(address: Addr) -> String {
    if address == Addr::ZERO {
        "none".to_owned()
    } else {
        IpAddr::from(address).to_string()
    }
}
