//! What the translation of packets needs: interfaces that lead out, forwarding, source ports of its own.

use std::{fs, ops::RangeInclusive};

use lb_common::{addr::Addr, flow::side};

use super::{Check, Plan, State};
use crate::{
    config::{PortRange, Uplinks},
    datapath::attach::{self, Layer},
    node::{
        links::{self, Choice, Chosen, Network, Wish},
        nftables::{self, Chain},
        settings::Sysctls,
    },
    view::Mode,
};

/// The ports that a cluster gives to node ports, unless it is told otherwise.
const NODE_PORTS: RangeInclusive<u16> = 30_000..=32_767;

/// Examines what the plan's translation of packets needs; nothing where it translates none.
pub(super) fn examine(plan: &Plan) -> Vec<Check> {
    if plan.mode == Mode::Observe || plan.uplinks == Uplinks::None && plan.guests.is_empty() {
        return Vec::new();
    }
    let wish = Wish {
        uplinks: &plan.uplinks,
        guests: &plan.guests,
        node: &plan.node_addresses,
    };
    let choice = match Network::read() {
        Ok(network) => links::choose(&network, &wish),
        Err(error) => {
            return vec![Check::new(
                "uplinks",
                State::Fail,
                error.reason(),
                "the interfaces can be listed",
                "run the doctor in the host's network namespace",
            )];
        }
    };
    let blind = plan.uplinks == Uplinks::Auto && plan.node_addresses.is_empty();
    let mut checks = vec![hook(attach::has_tcx()), uplinks(&choice, blind)];
    checks.extend(needs(&choice, plan.snat_ports));
    checks
}

/// What should be as it is while packets of these interfaces are translated, without the interfaces themselves.
fn needs(choice: &Choice, snat_ports: PortRange) -> Vec<Check> {
    let read = |path: &str| {
        let text = fs::read_to_string(format!("/proc/sys/net/{path}")).ok()?;
        Some(text.trim().to_owned())
    };
    let has = |family: fn(&Chosen) -> Addr| choice.chosen.iter().any(|chosen| family(chosen) != Addr::ZERO);
    let strict: Vec<&str> = choice
        .chosen
        .iter()
        .filter(|chosen| {
            let of = |name: &str| read(&format!("ipv4/conf/{name}/rp_filter"));
            is_strict(of("all").as_deref(), of(&chosen.name).as_deref())
        })
        .map(|chosen| chosen.name.as_str())
        .collect();
    vec![
        forwarding(
            "sysctl.ip_forward",
            "net.ipv4.ip_forward",
            has(|chosen| chosen.interface.v4),
            read("ipv4/ip_forward").as_deref(),
        ),
        forwarding(
            "sysctl.ipv6_forwarding",
            "net.ipv6.conf.all.forwarding",
            has(|chosen| chosen.interface.v6),
            read("ipv6/conf/all/forwarding").as_deref(),
        ),
        ports(snat_ports, Sysctls::read().local_ports().as_ref()),
        reverse_path(&strict, choice.chosen.len()),
        forward_chains(nftables::chains().map_err(|error| error.to_string()), has_legacy()),
    ]
}

/// What an agent should say of the interfaces that it has chosen: what is not as it should be around them.
pub fn complaints(choice: &Choice, snat_ports: PortRange) -> Vec<Check> {
    let mut checks = needs(choice, snat_ports);
    checks.retain(|check| check.state != State::Ok);
    checks
}

fn hook(has_tcx: bool) -> Check {
    let found = if has_tcx {
        "links for programs (TCX)"
    } else {
        "filters of the clsact qdisc: `evenkeel cleanup` removes them"
    };
    Check::new("tc.hook", State::Ok, found, "any; links from kernel 6.6 on", "")
}

/// Judges the choice; `blind` where the agent's may be another one, as it may learn addresses of the node from its Node object.
fn uplinks(choice: &Choice, blind: bool) -> Check {
    let id = "uplinks";
    let wanted = "an interface that leads out of the node";
    let named = |wanted: u32| -> Vec<String> {
        let all = choice.chosen.iter().filter(|chosen| chosen.interface.side == wanted);
        all.map(|chosen| format!("{} ({})", chosen.name, chosen.reason))
            .collect()
    };
    let unread: Vec<&str> = choice
        .chosen
        .iter()
        .filter(|chosen| Layer::of_hardware(chosen.hardware).is_none())
        .map(|chosen| chosen.name.as_str())
        .collect();
    let (out, guests) = (named(side::UPLINK), named(side::GUEST));
    let mut found = if out.is_empty() {
        "none".to_owned()
    } else {
        out.join(", ")
    };
    if !guests.is_empty() {
        found = format!("{found}; guests behind {}", guests.join(", "));
    }
    if blind {
        found.push_str("; without --node-address, what carries only an address of the Node object is not seen here");
    }
    if !unread.is_empty() {
        return Check::new(
            id,
            State::Warn,
            format!("{found}; not readable: {}", unread.join(", ")),
            wanted,
            "name other interfaces with --uplink: packets of these begin with a header that no program here reads",
        );
    }
    if !choice.missing.is_empty() {
        return Check::new(
            id,
            State::Warn,
            format!("{found}; not there: {}", choice.missing.join(", ")),
            wanted,
            "check the names given to --uplink; the agent awaits these interfaces",
        );
    }
    if out.is_empty() && guests.is_empty() {
        return Check::new(
            id,
            State::Warn,
            found,
            wanted,
            "name one with --uplink, or let the agent find it by --node-address; without one, nobody outside reaches a Service",
        );
    }
    Check::new(id, State::Ok, found, wanted, "")
}

fn forwarding(id: &str, name: &str, needed: bool, setting: Option<&str>) -> Check {
    let wanted = format!("{name} is 1");
    if !needed {
        return Check::new(
            id,
            State::Ok,
            "not needed: no interface with such an address",
            &wanted,
            "",
        );
    }
    match setting {
        Some("1") => Check::new(id, State::Ok, "1", &wanted, ""),
        found => Check::new(
            id,
            State::Fail,
            found.unwrap_or("cannot be read"),
            &wanted,
            &format!("packets from outside end here instead of at a backend: sysctl -w {name}=1"),
        ),
    }
}

fn ports(range: PortRange, local: Option<&RangeInclusive<u16>>) -> Check {
    let id = "snat_ports";
    let wanted = "source ports that nobody else uses";
    if let Some(local) = local.filter(|local| range.overlaps(local)) {
        return Check::new(
            id,
            State::Warn,
            format!(
                "{range} overlaps net.ipv4.ip_local_port_range ({} to {})",
                local.start(),
                local.end()
            ),
            wanted,
            "a socket of this node and a translated connection may meet on one port: choose another range with --snat-ports",
        );
    }
    if range.overlaps(&NODE_PORTS) {
        return Check::new(
            id,
            State::Warn,
            format!("{range} overlaps the node ports (30000 to 32767)"),
            wanted,
            "answers to a translated connection may be taken for a node port's traffic: choose another range with --snat-ports",
        );
    }
    Check::new(id, State::Ok, range.to_string(), wanted, "")
}

/// Whether the old iptables, whose rules are not in nftables, has rules for what is forwarded.
fn has_legacy() -> bool {
    let names = ["/proc/net/ip_tables_names", "/proc/net/ip6_tables_names"];
    let mut texts = names.iter().filter_map(|path| fs::read_to_string(path).ok());
    texts.any(|text| text.lines().any(|table| table == "filter"))
}

/// Judges the chains that translated packets are routed through; single rules are not judged.
fn forward_chains(chains: Result<Vec<Chain>, String>, has_legacy: bool) -> Check {
    let id = "netfilter.forward";
    let wanted = "no chain of forwarded packets with the policy to drop";
    let chains = match chains {
        Ok(chains) => chains,
        Err(why) => {
            let hint = "see whether something on this node drops forwarded packets: nft list chains";
            return Check::new(id, State::Warn, format!("cannot be listed: {why}"), wanted, hint);
        }
    };
    let family = |number: u8| match number {
        2 => "ip",
        10 => "ip6",
        _ => "inet",
    };
    let dropping: Vec<String> = chains
        .iter()
        .filter(|chain| chain.drops_forwarded)
        .map(|chain| format!("{} {} {}", family(chain.family), chain.table, chain.name))
        .collect();
    if dropping.is_empty() {
        let found = if has_legacy {
            "none; what the old iptables has is not read"
        } else {
            "none"
        };
        return Check::new(id, State::Ok, found, wanted, "");
    }
    Check::new(
        id,
        State::Warn,
        dropping.join(", "),
        wanted,
        "packets from outside end there on their way to a backend elsewhere, unless a rule accepts them: accept those to and from \
         the backends, or set the policy to accept",
    )
}

/// Whether the kernel drops packets whose sender it would answer through another interface; the stricter setting counts.
fn is_strict(all: Option<&str>, own: Option<&str>) -> bool {
    let number = |setting: Option<&str>| setting.and_then(|text| text.parse::<u8>().ok()).unwrap_or(0);
    number(all).max(number(own)) == 1
}

fn reverse_path(strict: &[&str], interfaces: usize) -> Check {
    let id = "sysctl.rp_filter";
    let wanted = "not 1 where packets have several ways in";
    if strict.is_empty() || interfaces < 2 {
        let found = if strict.is_empty() {
            "loose or off"
        } else {
            "strict, with one way in"
        };
        return Check::new(id, State::Ok, found, wanted, "");
    }
    Check::new(
        id,
        State::Warn,
        format!("strict on {}", strict.join(", ")),
        wanted,
        "what comes in by another interface than its answer leaves by is dropped: set net.ipv4.conf.NAME.rp_filter=2",
    )
}

#[cfg(test)]
mod tests {
    use lb_common::flow::Interface;

    use super::*;
    use crate::node::links::Reason;

    fn chosen(name: &str, side: u32, hardware: u16) -> Chosen {
        Chosen {
            index: 2,
            name: name.to_owned(),
            hardware,
            interface: Interface {
                side,
                ..Interface::default()
            },
            reason: Reason::DefaultRoute,
        }
    }

    #[test]
    fn uplinks_are_named_with_their_reasons() {
        let mut choice = Choice {
            chosen: vec![chosen("eth0", side::UPLINK, 1)],
            missing: Vec::new(),
        };
        let found = uplinks(&choice, false);
        assert_eq!(
            (found.state, found.found.as_str()),
            (State::Ok, "eth0 (has a default route)")
        );
        let blind = uplinks(&choice, true);
        assert_eq!(blind.state, State::Ok);
        assert!(blind.found.contains("without --node-address"), "{blind:?}");
        choice.chosen.push(chosen("tap0", side::GUEST, 1));
        assert!(
            uplinks(&choice, false)
                .found
                .ends_with("guests behind tap0 (has a default route)")
        );
        choice.missing.push("eth9".to_owned());
        let found = uplinks(&choice, false);
        assert!(
            found.state == State::Warn && found.found.contains("not there: eth9"),
            "{found:?}"
        );
        choice.chosen.push(chosen("ib0", side::UPLINK, 32));
        let found = uplinks(&choice, false);
        assert!(
            found.state == State::Warn && found.found.contains("not readable: ib0"),
            "{found:?}"
        );
        assert_eq!(uplinks(&Choice::default(), false).state, State::Warn);
    }

    #[test]
    fn forwarding_is_needed_where_packets_of_the_family_come_in() {
        let judge = |needed, setting| forwarding("x", "net.ipv4.ip_forward", needed, setting).state;
        assert_eq!(judge(true, Some("1")), State::Ok);
        assert_eq!(judge(true, Some("0")), State::Fail);
        assert_eq!(judge(true, None), State::Fail);
        assert_eq!(judge(false, Some("0")), State::Ok);
        let found = forwarding("x", "net.ipv4.ip_forward", true, Some("0"));
        assert!(found.hint.ends_with("sysctl -w net.ipv4.ip_forward=1"), "{found:?}");
    }

    #[test]
    fn source_ports_stand_apart() {
        let range = |first, last| PortRange { first, last };
        let local = 32_768..=60_999;
        assert_eq!(ports(range(10_000, 29_999), Some(&local)).state, State::Ok);
        assert_eq!(ports(range(10_000, 29_999), None).state, State::Ok);
        assert!(
            ports(range(20_000, 40_000), Some(&local))
                .found
                .contains("ip_local_port_range")
        );
        assert!(ports(range(20_000, 30_000), Some(&local)).found.contains("node ports"));
    }

    #[test]
    fn chains_that_drop_forwarded_packets_are_named() {
        let chain = |family, drops_forwarded| Chain {
            family,
            table: "filter".to_owned(),
            name: "FORWARD".to_owned(),
            translates: false,
            drops_forwarded,
        };
        let found = forward_chains(Ok(vec![chain(2, true), chain(10, false)]), false);
        assert_eq!((found.state, found.found.as_str()), (State::Warn, "ip filter FORWARD"));
        assert_eq!(forward_chains(Ok(vec![chain(2, false)]), false).state, State::Ok);
        assert!(forward_chains(Ok(Vec::new()), true).found.contains("not read"));
        assert_eq!(forward_chains(Err("no".to_owned()), false).state, State::Warn);
    }

    #[test]
    fn a_strict_reverse_path_matters_with_several_ways_in() {
        assert!(is_strict(Some("1"), Some("0")) && is_strict(Some("0"), Some("1")));
        assert!(!is_strict(Some("1"), Some("2")) && !is_strict(Some("0"), None));
        assert_eq!(reverse_path(&["eth0"], 1).state, State::Ok);
        assert_eq!(reverse_path(&["eth0"], 2).state, State::Warn);
        assert_eq!(reverse_path(&[], 2).state, State::Ok);
    }
}
