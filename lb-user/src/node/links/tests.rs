use proptest::prelude::*;

use super::*;
use crate::netlink::{push, push_text};

const ETHERNET: u16 = 1;
const NONE: u16 = 0xfffe;

fn link(index: u32, name: &str, kind: &str) -> Link {
    Link {
        index,
        name: name.to_owned(),
        kind: kind.to_owned(),
        master: None,
        hardware: ETHERNET,
        up: true,
        loopback: false,
    }
}

fn at(index: u32, address: &str) -> Address {
    let address: IpAddr = address.parse().expect("an address");
    Address {
        index,
        address,
        global: !is_link_local(address) && !address.is_loopback(),
        passing: false,
    }
}

fn addr(text: &str) -> Addr {
    Addr::from(text.parse::<IpAddr>().expect("an address"))
}

fn ips(texts: &[&str]) -> Vec<IpAddr> {
    texts.iter().map(|text| text.parse().expect("an address")).collect()
}

/// A node: loopback, an uplink with the node's addresses, a second uplink with a default route, a bridge of pods with a port.
pub(super) fn node() -> Network {
    let lo = Link {
        loopback: true,
        ..link(1, "lo", "")
    };
    let port = Link {
        master: Some(4),
        ..link(5, "veth1", "veth")
    };
    Network {
        links: vec![
            lo,
            link(2, "eth0", "vlan"),
            link(3, "eth1", "vlan"),
            link(4, "cni0", "bridge"),
            port,
        ],
        addresses: vec![
            at(1, "127.0.0.1"),
            at(1, "::1"),
            at(2, "192.0.2.99"),
            at(2, "192.0.2.10"),
            at(2, "fe80::2"),
            at(2, "2001:db8::10"),
            at(3, "198.51.100.7"),
            at(4, "10.244.1.1"),
        ],
        default_routes: BTreeSet::from([3]),
    }
}

fn choose_with(network: &Network, uplinks: &Uplinks, guests: &[&str], of_node: &[&str]) -> Choice {
    let guests: Vec<NamePattern> = guests.iter().map(|text| text.parse().expect("a pattern")).collect();
    choose(
        network,
        &Wish {
            uplinks,
            guests: &guests,
            node: &ips(of_node),
        },
    )
}

fn auto(network: &Network, of_node: &[&str]) -> Vec<Chosen> {
    choose_with(network, &Uplinks::Auto, &[], of_node).chosen
}

pub(super) fn names(chosen: &[Chosen]) -> Vec<&str> {
    chosen.iter().map(|chosen| chosen.name.as_str()).collect()
}

#[test]
fn auto_takes_what_carries_the_node_or_its_default_route() {
    let chosen = auto(&node(), &["192.0.2.10", "2001:db8::10"]);
    assert_eq!(names(&chosen), ["eth0", "eth1"]);
    let reason = Reason::NodeAddress("192.0.2.10".parse().expect("an address"));
    assert_eq!(chosen[0].reason, reason);
    assert_eq!(chosen[1].reason, Reason::DefaultRoute);
    assert!(chosen.iter().all(|chosen| chosen.interface.side == side::UPLINK));
    // Without a word of the node, its routes alone tell.
    assert_eq!(names(&auto(&node(), &[])), ["eth1"]);
}

#[test]
fn the_source_is_the_nodes_own_address_before_what_else_is_there() {
    let chosen = auto(&node(), &["192.0.2.10", "2001:db8::10"]);
    assert_eq!(chosen[0].interface.v4, addr("192.0.2.10"));
    assert_eq!(chosen[0].interface.v6, addr("2001:db8::10"));
    // Here is no address of the node: what is there of IPv4, and the node's primary one of IPv6.
    assert_eq!(chosen[1].interface.v4, addr("198.51.100.7"));
    assert_eq!(chosen[1].interface.v6, addr("2001:db8::10"));
}

#[test]
fn without_a_word_of_the_node_the_default_routes_interface_lends_its_address() {
    let mut network = node();
    network.addresses.retain(|address| address.index != 2);
    let named = Uplinks::Named(vec!["eth0".to_owned()]);
    let chosen = choose_with(&network, &named, &[], &[]).chosen;
    assert_eq!(chosen[0].interface.v4, addr("198.51.100.7"));
    assert_eq!(chosen[0].interface.v6, Addr::ZERO);
}

#[test]
fn addresses_that_pass_or_are_not_usable_yet_are_no_first_choice() {
    let mut network = node();
    network.addresses = vec![
        Address {
            passing: true,
            ..at(3, "2001:db8::aaaa")
        },
        Address {
            global: false,
            ..at(3, "2001:db8::bbbb")
        },
        at(3, "2001:db8::cccc"),
    ];
    assert_eq!(auto(&network, &[])[0].interface.v6, addr("2001:db8::cccc"));
    network.addresses.truncate(2);
    assert_eq!(auto(&network, &[])[0].interface.v6, addr("2001:db8::aaaa"));
}

#[test]
fn ports_of_bridges_and_bonds_are_left_to_their_master() {
    for kind in MASTERS {
        let mut network = node();
        network.links[3].kind = kind.to_owned();
        network.default_routes = BTreeSet::from([4, 5]);
        assert_eq!(names(&auto(&network, &[])), ["cni0"], "{kind}");
    }
    // A member of a VRF carries its own packets.
    let mut network = node();
    network.links[3].kind = "vrf".to_owned();
    network.default_routes = BTreeSet::from([5]);
    assert_eq!(names(&auto(&network, &[])), ["veth1"]);
}

#[test]
fn what_is_down_or_loopback_is_not_chosen() {
    let mut network = node();
    network.links[1].up = false;
    network.default_routes.insert(1);
    assert_eq!(names(&auto(&network, &["192.0.2.10", "127.0.0.1"])), ["eth1"]);
}

#[test]
fn tunnels_count_with_an_address_or_without() {
    for kind in TUNNELS {
        let mut network = node();
        network.default_routes.clear();
        network.links.push(Link {
            hardware: NONE,
            ..link(7, "overlay", kind)
        });
        let chosen = auto(&network, &["192.0.2.10"]);
        assert_eq!(names(&chosen), ["eth0", "overlay"], "{kind}");
        assert_eq!(
            (chosen[1].reason, chosen[1].hardware, chosen[1].interface.v4),
            (Reason::Tunnel, NONE, addr("192.0.2.10")),
            "{kind}"
        );
        network.addresses.push(at(7, "10.244.1.0"));
        assert_eq!(auto(&network, &["192.0.2.10"])[1].interface.v4, addr("10.244.1.0"));
        network.links[5].up = false;
        assert_eq!(names(&auto(&network, &[])), [""; 0], "{kind}");
    }
}

#[test]
fn network_cards_count_with_an_address_though_no_default_route_leads_there() {
    let mut network = node();
    network.default_routes.clear();
    network.links.push(link(7, "eno2", ""));
    network.addresses.push(at(7, "fe80::7"));
    assert_eq!(names(&auto(&network, &[])), [""; 0]);
    network.addresses.push(at(7, "198.51.100.9"));
    let chosen = auto(&network, &[]);
    assert_eq!((names(&chosen), chosen[0].reason), (vec!["eno2"], Reason::Address));
    assert_eq!(chosen[0].interface.v4, addr("198.51.100.9"));
    // As a port, or as what a driver made up for pods, it does not.
    network.links[5].kind = "veth".to_owned();
    assert_eq!(names(&auto(&network, &[])), [""; 0]);
    network.links[5].kind = String::new();
    network.links[5].master = Some(4);
    assert_eq!(names(&auto(&network, &[])), [""; 0]);
}

#[test]
fn names_are_taken_whatever_they_carry_and_awaited_where_they_are_not() {
    let wanted = Uplinks::Named(vec!["veth1".to_owned(), "eth9".to_owned()]);
    let mut network = node();
    network.links[4].up = false;
    let choice = choose_with(&network, &wanted, &[], &[]);
    assert_eq!(names(&choice.chosen), ["veth1"]);
    assert_eq!(choice.chosen[0].reason, Reason::Named);
    assert_eq!(choice.missing, ["eth9"]);
}

#[test]
fn guests_are_opted_in_by_pattern_and_give_way_to_uplinks_by_name() {
    let choice = choose_with(&node(), &Uplinks::None, &["veth*"], &["192.0.2.10"]);
    assert_eq!(names(&choice.chosen), ["veth1"]);
    assert_eq!(choice.chosen[0].interface.side, side::GUEST);
    assert_eq!(choice.chosen[0].interface.v4, addr("192.0.2.10"));
    let both = choose_with(&node(), &Uplinks::Named(vec!["eth1".to_owned()]), &["eth*"], &[]);
    let sides: Vec<u32> = both.chosen.iter().map(|chosen| chosen.interface.side).collect();
    assert_eq!(
        (names(&both.chosen), sides),
        (vec!["eth0", "eth1"], vec![side::GUEST, side::UPLINK])
    );
    // By itself, an uplink's choice does not win over a guest's name.
    let auto = choose_with(&node(), &Uplinks::Auto, &["eth1"], &[]);
    assert_eq!(auto.chosen[0].interface.side, side::GUEST);
    // Loopback has no guest behind it, whatever a pattern says.
    assert!(choose_with(&node(), &Uplinks::None, &["l*"], &[]).chosen.is_empty());
}

fn networks() -> impl Strategy<Value = Network> {
    let kinds = prop::sample::select(vec!["", "veth", "bridge", "bond", "vrf", "vxlan", "wireguard"]);
    let link = (kinds, prop::option::of(1..9_u32), any::<bool>(), any::<bool>());
    let address = (1..9_u32, 0..6_u8, any::<bool>(), any::<bool>(), any::<bool>());
    (
        prop::collection::vec(link, 0..8),
        prop::collection::vec(address, 0..10),
        prop::collection::btree_set(1..9_u32, 0..4),
    )
        .prop_map(|(links, addresses, default_routes)| Network {
            links: (1..)
                .zip(links)
                .map(|(index, (kind, master, up, loopback))| Link {
                    master: master.filter(|master| *master != index),
                    up,
                    loopback,
                    ..self::link(index, &format!("if{index}"), kind)
                })
                .collect(),
            addresses: addresses
                .into_iter()
                .map(|(index, last, six, global, passing)| Address {
                    index,
                    address: if six {
                        Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, last.into()).into()
                    } else {
                        Ipv4Addr::new(192, 0, 2, last).into()
                    },
                    global,
                    passing,
                })
                .collect(),
            default_routes,
        })
}

proptest! {
    /// Whatever there is, the choice is sound: no port beside its master, no loopback, nothing twice, and no source that may not
    /// be sent from.
    #[test]
    fn choices_are_sound(network in networks(), of_node in prop::collection::vec(0..6_u8, 0..3)) {
        let of_node: Vec<IpAddr> = of_node.into_iter().map(|last| Ipv4Addr::new(192, 0, 2, last).into()).collect();
        let wish = Wish { uplinks: &Uplinks::Auto, guests: &[], node: &of_node };
        let choice = choose(&network, &wish);
        prop_assert!(choice.missing.is_empty());
        let mut seen = BTreeSet::new();
        for chosen in &choice.chosen {
            prop_assert!(seen.insert(chosen.index));
            let link = network.link(chosen.index).expect("it is chosen from these");
            prop_assert!(link.up && !link.loopback && !is_port(&network, link));
            for source in [chosen.interface.v4, chosen.interface.v6].into_iter().filter(|source| *source != Addr::ZERO) {
                let source = IpAddr::from(source);
                let usable = network.addresses.iter().any(|a| a.address == source && a.global);
                prop_assert!(usable || of_node.contains(&source), "{source}");
                prop_assert_eq!(source.is_ipv4(), Addr::from(source) == chosen.interface.v4);
            }
        }
        // What is chosen does not hang on what else there is: a second look at the same gives the same.
        prop_assert_eq!(choose(&network, &wish), choice);
    }

    #[test]
    fn any_bytes_are_an_error_or_a_value(bytes in prop::collection::vec(any::<u8>(), 0..120)) {
        let _outcome = (super::link(&bytes).is_ok(), address(&bytes).is_ok(), default_route(&bytes).is_ok());
    }
}

#[test]
fn messages_of_the_kernel_are_read() {
    let mut message = [
        &[0_u8, 0][..],
        &NONE.to_ne_bytes(),
        &7_u32.to_ne_bytes(),
        &1_u32.to_ne_bytes(),
        &[0; 4],
    ]
    .concat();
    push_text(&mut message, IFLA_IFNAME, "wg0");
    let mut info = Vec::new();
    push_text(&mut info, INFO_KIND, "wireguard");
    push(&mut message, IFLA_LINKINFO, &info);
    push(&mut message, IFLA_MASTER, &3_u32.to_ne_bytes());
    let wanted = Link {
        hardware: NONE,
        master: Some(3),
        ..link(7, "wg0", "wireguard")
    };
    assert_eq!(super::link(&message).expect("a sound message"), wanted);

    // 192.0.2.1 towards 192.0.2.2: one's own is the local one.
    let mut message = [&[2_u8, 32, 0x80, 0][..], &7_u32.to_ne_bytes()].concat();
    push(&mut message, IFA_ADDRESS, &[192, 0, 2, 2]);
    push(&mut message, IFA_LOCAL, &[192, 0, 2, 1]);
    assert_eq!(address(&message).expect("a sound message"), Some(at(7, "192.0.2.1")));
    // Tentative: the attribute of the flags counts, not the byte.
    push(
        &mut message,
        IFA_FLAGS,
        &(libc::IFA_F_TENTATIVE | libc::IFA_F_TEMPORARY).to_ne_bytes(),
    );
    let found = address(&message).expect("a sound message").expect("an address");
    assert!(!found.global && !found.passing, "{found:?}");

    let mut message = vec![2_u8, 0, 0, 0, 254, 0, 0, ROUTE_UNICAST, 0, 0, 0, 0];
    let mut several = message.clone();
    push(&mut message, RTA_OIF, &7_u32.to_ne_bytes());
    assert_eq!(default_route(&message).expect("a sound message"), [7]);
    message[1] = 24;
    assert!(default_route(&message).expect("a sound message").is_empty());
    let hop = |index: u32| [&[16_u8, 0, 0, 0][..], &index.to_ne_bytes(), &[0; 8]].concat();
    push(&mut several, RTA_MULTIPATH, &[hop(3), hop(4)].concat());
    assert_eq!(default_route(&several).expect("a sound message"), [3, 4]);
    several[4] = 99;
    assert!(default_route(&several).expect("a sound message").is_empty());
}

#[test]
fn this_namespace_is_read() {
    let network = Network::read().expect("the kernel tells");
    let lo = network
        .links
        .iter()
        .find(|link| link.loopback)
        .expect("there is a loopback device");
    assert_eq!((lo.name.as_str(), lo.kind.as_str(), lo.master), ("lo", "", None));
}

#[test]
fn what_an_earlier_agent_chose_stays_until_the_node_is_known() {
    let network = node();
    let of_earlier = Interface {
        v4: addr("192.0.2.10"),
        v6: addr("2001:db8::10"),
        side: side::UPLINK,
        pad: 0,
    };
    // The bridge's port, and an interface that is gone.
    let described = [2, 3, 5, 99].map(|index| (index, of_earlier));
    let wish = |uplinks| Wish {
        uplinks,
        guests: &[],
        node: &[],
    };
    let mut choice = choose(&network, &wish(&Uplinks::Auto));
    assert_eq!(names(&choice.chosen), ["eth1"]);
    choice.keep_earlier(&network, &wish(&Uplinks::Auto), &described);
    assert_eq!(names(&choice.chosen), ["eth1", "eth0"]);
    assert!(choice.chosen.iter().all(|chosen| chosen.interface == of_earlier));
    assert_eq!(choice.chosen[0].reason, Reason::DefaultRoute);
    assert_eq!(choice.chosen[1].reason, Reason::Earlier);

    // By name, the node decides the sources alone, and no source is kept that nobody has any more.
    let named = Uplinks::Named(vec!["eth1".to_owned()]);
    let gone = Interface {
        v4: addr("192.0.2.77"),
        ..of_earlier
    };
    let mut choice = choose(&network, &wish(&named));
    choice.keep_earlier(&network, &wish(&named), &[(2, gone), (3, gone)]);
    assert_eq!(names(&choice.chosen), ["eth1"]);
    assert_eq!(choice.chosen[0].interface.v4, addr("198.51.100.7"));
    assert_eq!(choice.chosen[0].interface.v6, addr("2001:db8::10"));
    let mut choice = choose(&network, &wish(&Uplinks::None));
    choice.keep_earlier(&network, &wish(&Uplinks::None), &described);
    assert!(choice.chosen.is_empty());
}
