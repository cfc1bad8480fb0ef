//! `map dump`: the kernel's maps as people write addresses, straight from the kernel.

pub(super) mod packets;

use std::net::{IpAddr, SocketAddr};

use lb_common::{
    addr::{Addr, Port},
    backend::state,
    counter::{self, action, hook},
    flow::{Flow, flag as flow_flag, side, state as flow_state},
    frontend::{Frontend, SourceKey, flag},
    maps as names,
};

use crate::{
    compile::Source,
    reconcile::Reconciler,
    view::{ConnState, MapDumpView, MapRowView, QueryError},
};

/// The most rows of one dump.
const MAX_ROWS: usize = 100_000;

fn at(addr: Addr, port: Port) -> SocketAddr {
    SocketAddr::new(IpAddr::from(addr), port.get())
}

fn protocol(proto: u8) -> &'static str {
    match proto {
        lb_common::abi::TCP => "TCP",
        lb_common::abi::UDP => "UDP",
        _ => "?",
    }
}

/// A row, with the bytes that it is sorted by.
type Row = (Vec<u8>, MapRowView);

/// Sorted by the key itself, not by its text, so that 10.0.0.9 stands before 10.0.0.10.
fn view(name: &str, mut rows: Vec<Row>) -> MapDumpView {
    rows.sort_by(|a, b| a.0.cmp(&b.0));
    let truncated = rows.len() > MAX_ROWS;
    rows.truncate(MAX_ROWS);
    MapDumpView {
        name: name.to_owned(),
        truncated,
        rows: rows.into_iter().map(|(_, row)| row).collect(),
    }
}

/// Reads one map; `interfaces` are the names of those where packets are translated, by index.
pub(super) fn dump(
    reconciler: &Reconciler,
    interfaces: &[(u32, String)],
    name: &str,
) -> Result<MapDumpView, QueryError> {
    let kernel = reconciler.kernel();
    let all = kernel.facts();
    let Some(name) = all.keys().find(|known| known.eq_ignore_ascii_case(name)) else {
        let known: Vec<&str> = all.keys().copied().collect();
        return Err(QueryError::NotFound(format!(
            "map `{name}`; there are {}",
            known.join(", ")
        )));
    };
    let failed = |error: &dyn std::fmt::Display| QueryError::Failed(error.to_string());
    let mut rows: Vec<Row> = Vec::new();
    let mut push = |order: Vec<u8>, key: String, value: String| rows.push((order, MapRowView { key, value }));
    match *name {
        names::FRONTENDS
        | names::SETS
        | names::LISTS
        | names::TABLES
        | names::BACKENDS
        | names::MEMBERS
        | names::SOURCES => {
            let contents = kernel.dump().map_err(|e| failed(&e))?;
            match *name {
                names::FRONTENDS => {
                    for (key, value) in contents.frontends {
                        let kind = ["ClusterIP", "NodePort", "ExternalIP", "LoadBalancer"]
                            [(value.flags >> flag::KIND_SHIFT & flag::KIND_MASK) as usize];
                        let empty = if value.flags & flag::UNREACHABLE_WHEN_EMPTY == 0 {
                            "refuse"
                        } else {
                            "unreachable"
                        };
                        push(
                            order_of(key.addr, key.port, key.proto),
                            format!("{}/{}", at(key.addr, key.port), protocol(key.proto)),
                            format!(
                                "service={} set={} kind={kind} when_empty={empty} affinity_seconds={} {}",
                                value.service_id,
                                value.set_id,
                                value.affinity_seconds,
                                outside(&value)
                            ),
                        );
                    }
                }
                names::SETS => {
                    for (id, word) in contents.sets {
                        push(
                            id.to_be_bytes().to_vec(),
                            id.to_string(),
                            format!(
                                "list={} members={} generation={}",
                                word.offset(),
                                word.count(),
                                word.generation()
                            ),
                        );
                    }
                }
                names::LISTS => {
                    for (id, list) in contents.lists {
                        let members: Vec<String> = list
                            .members
                            .iter()
                            .map(|(backend, weight)| format!("{backend}x{weight}"))
                            .collect();
                        push(
                            id.to_be_bytes().to_vec(),
                            format!("set {id}"),
                            format!(
                                "table={} slots={} members={}",
                                list.table,
                                list.slots,
                                members.join(",")
                            ),
                        );
                    }
                }
                names::TABLES => {
                    for (id, list) in contents.lists {
                        push(
                            id.to_be_bytes().to_vec(),
                            format!("set {id}"),
                            format!(
                                "offset={} slots={} digest={:016x}",
                                list.table, list.slots, list.content
                            ),
                        );
                    }
                }
                names::BACKENDS => {
                    for (id, backend) in contents.backends {
                        let state = match backend.state {
                            state::ACTIVE => "active",
                            state::DRAINING => "draining",
                            state::EJECTED => "ejected",
                            _ => "unknown",
                        };
                        push(
                            id.to_be_bytes().to_vec(),
                            id.to_string(),
                            format!(
                                "{}/{} service={} state={state}",
                                at(backend.addr, backend.port),
                                protocol(backend.proto),
                                backend.service_id
                            ),
                        );
                    }
                }
                names::SOURCES => {
                    for source in contents.sources {
                        let SourceKey { service_id, addr } = source.key;
                        let mut order = service_id.to_be_bytes().to_vec();
                        order.extend(order_of(addr, Port::default(), 0));
                        order.push(source.bits as u8);
                        push(
                            order,
                            format!("service {service_id} {}", range(&source)),
                            "1".to_owned(),
                        );
                    }
                }
                _ => {
                    for member in contents.memberships {
                        let mut order = member.set_id.to_be_bytes().to_vec();
                        order.extend(member.backend_id.to_be_bytes());
                        push(
                            order,
                            format!("set {} backend {}", member.set_id, member.backend_id),
                            "1".to_owned(),
                        );
                    }
                }
            }
        }
        names::SERVICE_STATS => kernel
            .service_counters(u32::MAX, |id, c| {
                if c != lb_common::backend::ServiceCounters::default() {
                    push(
                        id.to_be_bytes().to_vec(),
                        id.to_string(),
                        format!(
                            "connects={} rejected={} established={} closed={} failed={} attributed={} direct={} outside={}",
                            c.connects,
                            c.rejected,
                            c.established,
                            c.closed,
                            c.failed.iter().sum::<u64>(),
                            c.attributed,
                            c.direct,
                            c.outside
                        ),
                    );
                }
            })
            .map_err(|e| failed(&e))?,
        names::BACKEND_STATS => kernel
            .backend_counters(u32::MAX, |id, c| {
                if c != lb_common::backend::BackendCounters::default() {
                    push(
                        id.to_be_bytes().to_vec(),
                        id.to_string(),
                        format!(
                            "connects={} established={} failed={} closed={} direct={} outside={}",
                            c.inside.connects,
                            c.inside.established,
                            c.inside.failed,
                            c.inside.closed,
                            c.direct.connects,
                            c.outside.connects
                        ),
                    );
                }
            })
            .map_err(|e| failed(&e))?,
        names::SOCKETS => {
            for (cookie, s) in kernel.sockets() {
                push(
                    cookie.to_be_bytes().to_vec(),
                    cookie.to_string(),
                    format!(
                        "{}/{} client={} service={} backend={} phase={}",
                        at(s.vip, s.vip_port),
                        protocol(s.proto),
                        at(s.client, s.client_port),
                        s.service_id,
                        s.backend_id,
                        s.phase
                    ),
                );
            }
        }
        names::DIALS => {
            for (key, cookie) in kernel.dials() {
                push(
                    order_of(key.addr, key.port, key.proto),
                    format!("{}/{}", at(key.addr, key.port), protocol(key.proto)),
                    format!("socket={cookie}"),
                );
            }
        }
        names::PASSAGES => {
            for (key, p) in kernel.passages() {
                push(
                    order_of(key.addr, key.port, key.proto),
                    format!("{}/{}", at(key.addr, key.port), protocol(key.proto)),
                    format!("syn_ns={}", p.syn_ns),
                );
            }
        }
        names::UDP_REVERSE => {
            for (key, r) in kernel.reverse_entries() {
                let mut order = key.cookie.to_be_bytes().to_vec();
                order.extend(order_of(key.addr, key.port, 0));
                push(
                    order,
                    format!("{} {}", key.cookie, at(key.addr, key.port)),
                    format!("{} backend={}", at(r.vip, r.vip_port), r.backend_id),
                );
            }
        }
        names::UDP_SOCKETS => {
            for (cookie, head) in kernel.udp_sockets() {
                push(
                    cookie.to_be_bytes().to_vec(),
                    cookie.to_string(),
                    format!("first={} length={}", at(head.addr, head.port), head.length),
                );
            }
        }
        names::AFFINITY => {
            for (key, a) in kernel.affinities() {
                let client = if key.origin == 0 {
                    let cookie = u64::from(key.client.words[1]) << 32 | u64::from(key.client.words[0]);
                    format!("netns {cookie}")
                } else {
                    IpAddr::from(key.client).to_string()
                };
                let mut order = key.set_id.to_be_bytes().to_vec();
                order.extend(client.bytes());
                push(
                    order,
                    format!("set {} {client}", key.set_id),
                    format!("backend={} last_ns={}", a.backend_id, a.last_ns),
                );
            }
        }
        names::INTERFACES => {
            for (index, interface) in kernel.flows().interfaces().map_err(|e| failed(&e))? {
                let address = |found: Addr| {
                    if found == Addr::ZERO {
                        "-".to_owned()
                    } else {
                        IpAddr::from(found).to_string()
                    }
                };
                let name = interfaces.iter().find(|(known, _)| *known == index);
                push(
                    index.to_be_bytes().to_vec(),
                    name.map_or_else(|| index.to_string(), |(_, name)| format!("{index} {name}")),
                    format!(
                        "side={} v4={} v6={}",
                        if interface.side == side::GUEST { "guest" } else { "uplink" },
                        address(interface.v4),
                        address(interface.v6)
                    ),
                );
            }
        }
        names::SETTINGS => {
            let settings = kernel.flows().settings().map_err(|e| failed(&e))?;
            for (order, (key, value)) in [
                ("clock_offset_ns", settings.clock_offset_ns),
                ("flow_slots", u64::from(settings.flow_slots)),
                ("first_port", u64::from(settings.first_port)),
                ("last_port", u64::from(settings.last_port)),
            ]
            .into_iter()
            .enumerate()
            {
                push(vec![order as u8], key.to_owned(), value.to_string());
            }
        }
        names::FLOW_HAND => {
            let hand = kernel.flows().hand().map_err(|e| failed(&e))?;
            push(Vec::new(), "slots looked at".to_owned(), hand.to_string());
        }
        names::OPTED_OUT => {
            for id in kernel.opted_out() {
                push(id.to_be_bytes().to_vec(), format!("cgroup {id}"), "1".to_owned());
            }
        }
        names::COUNTERS => {
            let counters = kernel.counters().map_err(|e| failed(&e))?;
            for h in 0..hook::COUNT {
                for a in 0..action::COUNT {
                    let index = counter::index(h, a);
                    let value = counters[index as usize];
                    if value > 0 {
                        push(
                            index.to_be_bytes().to_vec(),
                            format!("{} {}", hook::NAMES[h as usize], action::NAMES[a as usize]),
                            value.to_string(),
                        );
                    }
                }
            }
        }
        other => {
            return Err(QueryError::Invalid(format!(
                "map {other} cannot be dumped: it is read by the agent alone"
            )));
        }
    }
    Ok(view(name, rows))
}

/// What clients outside the node meet at a frontend.
fn outside(frontend: &Frontend) -> String {
    let has = |bit| frontend.flags & bit != 0;
    if !has(flag::OUTSIDE) {
        return "outside=no".to_owned();
    }
    let when_empty = if has(flag::SILENT_WHEN_EMPTY_OUTSIDE) {
        "silent"
    } else {
        "refuse"
    };
    format!(
        "outside={} outside_when_empty={when_empty} masquerade={} source_ranges={}",
        frontend.outside_set_id,
        has(flag::MASQUERADE_OUTSIDE),
        has(flag::SOURCE_RANGES)
    )
}

/// A source range as people write it.
fn range(source: &Source) -> String {
    let bits = source.bits.saturating_sub(SourceKey::BITS - 128);
    match IpAddr::from(source.key.addr) {
        IpAddr::V4(v4) if bits >= 96 => format!("{v4}/{}", bits - 96),
        IpAddr::V4(v4) => format!("{}/{bits}", v4.to_ipv6_mapped()),
        IpAddr::V6(v6) => format!("{v6}/{bits}"),
    }
}

/// A flow's words.
fn flow(f: &Flow) -> String {
    let state = match f.state() {
        flow_state::FREE => "free",
        flow_state::BUSY => "busy",
        flow_state::LIVE => "live",
        _ => "ended",
    };
    let source = if f.source_port.0 == 0 {
        "-".to_owned()
    } else {
        at(f.source, f.source_port).to_string()
    };
    let flags: Vec<&str> = [
        (flow_flag::MASQUERADE, "masquerade"),
        (flow_flag::HAIRPIN, "hairpin"),
        (flow_flag::RESUMED, "resumed"),
        (flow_flag::EXHAUSTED, "exhausted"),
    ]
    .into_iter()
    .filter(|(bit, _)| f.flags & bit != 0)
    .map(|(_, name)| name)
    .collect();
    format!(
        "{} -> {}/{} -> {} source={source} {state} connection={} serial={} service={} set={} backend={} generation={} flags={} \
         client_sent={:#x} backend_sent={:#x} start_ns={} established_ns={} seen_ns={}",
        at(f.client, f.client_port),
        at(f.vip, f.vip_port),
        protocol(f.proto),
        at(f.backend, f.backend_port),
        ConnState::of_flow(f),
        f.serial(),
        f.service_id,
        f.set_id,
        f.backend_id,
        f.generation,
        if flags.is_empty() {
            "-".to_owned()
        } else {
            flags.join(",")
        },
        f.client_sent,
        f.backend_sent,
        f.start_ns,
        f.established_ns,
        f.seen_ns
    )
}

fn order_of(addr: Addr, port: Port, proto: u8) -> Vec<u8> {
    let mut order: Vec<u8> = addr.words.iter().flat_map(|w| w.to_ne_bytes()).collect();
    order.extend(port.get().to_be_bytes());
    order.push(proto);
    order
}

#[cfg(test)]
mod tests {
    use lb_common::abi::TCP;

    use super::*;

    #[test]
    fn a_flow_is_one_line_of_words() {
        let end = |last: u8| Addr::from_v4(u32::from_be_bytes([192, 0, 2, last]).to_be());
        let masqueraded = Flow {
            client: end(1),
            client_port: Port::new(40_000),
            vip: end(2),
            vip_port: Port::new(80),
            backend: end(3),
            backend_port: Port::new(8080),
            source: end(2),
            source_port: Port::new(10_000),
            proto: TCP,
            version: lb_common::flow::version(7, flow_state::LIVE),
            flags: flow_flag::MASQUERADE | flow_flag::RESUMED,
            client_sent: 1,
            backend_sent: 3,
            ..Flow::default()
        };
        assert_eq!(
            flow(&masqueraded),
            "192.0.2.1:40000 -> 192.0.2.2:80/TCP -> 192.0.2.3:8080 source=192.0.2.2:10000 live connection=half_closed serial=7 \
             service=0 set=0 backend=0 generation=0 flags=masquerade,resumed client_sent=0x1 backend_sent=0x3 start_ns=0 \
             established_ns=0 seen_ns=0"
        );
    }
}
