use proptest::prelude::*;

use super::{
    rule::{Dnat, Rule, Target},
    *,
};
use crate::netlink::align;

/// An attribute with a value.
fn value(kind: u16, bytes: &[u8]) -> Vec<u8> {
    let mut out = ((bytes.len() + 4) as u16).to_ne_bytes().to_vec();
    out.extend(kind.to_ne_bytes());
    out.extend(bytes);
    out.resize(align(out.len()), 0);
    out
}

fn words(kind: u16, text: &str) -> Vec<u8> {
    let mut out = Vec::new();
    push_text(&mut out, kind, text);
    out
}

fn word(kind: u16, number: u32) -> Vec<u8> {
    value(kind, &number.to_be_bytes())
}

fn expression(name: &str, attributes: &[Vec<u8>]) -> Vec<u8> {
    value(1, &[words(1, name), value(2, &attributes.concat())].concat())
}

fn load_payload(register: u32, base: u32, offset: u32, length: u32) -> Vec<u8> {
    let attributes = [word(1, register), word(2, base), word(3, offset), word(4, length)];
    expression("payload", &attributes)
}

fn load_protocol(register: u32) -> Vec<u8> {
    expression("meta", &[word(1, register), word(2, 16)])
}

fn compare(register: u32, operation: u32, bytes: &[u8]) -> Vec<u8> {
    let data = value(3, &value(1, bytes));
    expression("cmp", &[word(1, register), word(2, operation), data])
}

fn immediate(register: u32, bytes: &[u8]) -> Vec<u8> {
    expression("immediate", &[word(1, register), value(2, &value(1, bytes))])
}

fn verdict(code: i32, chain: &str) -> Vec<u8> {
    value(2, &[word(1, code.cast_unsigned()), words(2, chain)].concat())
}

fn jump(code: i32, chain: &str) -> Vec<u8> {
    expression("immediate", &[word(1, 0), value(2, &verdict(code, chain))])
}

fn xt(what: &str, name: &str, revision: u32, info: &[u8]) -> Vec<u8> {
    expression(what, &[words(1, name), word(2, revision), value(3, info)])
}

fn read(family: u8, expressions: &[Vec<u8>]) -> Rule {
    Rule::read(family, "chain".to_owned(), &expressions.concat())
}

fn frontend_of(rule: &Rule) -> (Option<String>, Option<Protocol>, Option<u16>) {
    (rule.address.map(|a| a.to_string()), rule.protocol, rule.port)
}

#[test]
fn a_services_rule_leads_to_its_chain() {
    let rule = read(
        2,
        &[
            load_protocol(1),
            compare(1, 0, &[6]),
            load_payload(1, 1, 16, 4),
            compare(1, 0, &[10, 96, 0, 10]),
            xt("match", "comment", 0, b"the web site"),
            load_payload(1, 2, 2, 2),
            compare(1, 0, &80_u16.to_be_bytes()),
            expression("counter", &[value(1, &[0; 8]), value(2, &[0; 8])]),
            jump(-3, "KUBE-SVC-AAA"),
        ],
    );
    assert_eq!(
        frontend_of(&rule),
        (Some("10.96.0.10".to_owned()), Some(Protocol::Tcp), Some(80))
    );
    assert_eq!(rule.target, Some(Target::Chain("KUBE-SVC-AAA".to_owned())));
}

#[test]
fn what_is_compared_otherwise_or_masked_is_not_asked_for() {
    let address = [10, 96, 0, 10];
    let not_equal = read(2, &[load_payload(1, 1, 16, 4), compare(1, 1, &address)]);
    assert_eq!(not_equal.address, None);
    let source = read(2, &[load_payload(1, 1, 12, 4), compare(1, 0, &address)]);
    assert_eq!(source.address, None);
    let masked = read(
        2,
        &[
            load_payload(1, 1, 16, 4),
            expression("bitwise", &[word(1, 1), word(2, 1), word(3, 4)]),
            compare(1, 0, &address),
        ],
    );
    assert_eq!(masked.address, None);
    let kept_apart = read(
        2,
        &[
            load_payload(9, 1, 16, 4),
            expression("bitwise", &[word(1, 1), word(2, 1), word(3, 4)]),
            compare(9, 0, &address),
        ],
    );
    assert_eq!(kept_apart.address, Some(address.into()));
}

#[test]
fn iptables_ports_are_read_from_its_own_match() {
    let info = |name: &str, first: u16, last: u16, inverted: u8| {
        let mut info = [0_u16, 65_535, first, last].map(u16::to_ne_bytes).concat();
        if name == "tcp" {
            info.extend([0, 0, 0]);
        }
        info.extend([inverted, 0, 0, 0, 0]);
        read(2, &[xt("match", name, 0, &info)]).port
    };
    assert_eq!(info("tcp", 80, 80, 0), Some(80));
    assert_eq!(info("udp", 53, 53, 0), Some(53));
    assert_eq!(info("tcp", 80, 90, 0), None);
    assert_eq!(info("tcp", 80, 80, 2), None);
    assert_eq!(info("udp", 53, 53, 2), None);
}

#[test]
fn iptables_translations_are_read_in_all_their_revisions() {
    let wide = |bytes: &[u8]| [bytes, &[0; 16][bytes.len()..]].concat();
    let range = |flags: u32, first: &[u8], last: &[u8], ports: [u16; 2]| {
        [
            flags.to_ne_bytes().to_vec(),
            first.to_vec(),
            last.to_vec(),
            ports.map(u16::to_be_bytes).concat(),
        ]
        .concat()
    };
    let target = |family: u8, revision: u32, info: &[u8]| read(family, &[xt("target", "DNAT", revision, info)]).target;
    let dnat = |text: &str, port: Option<u16>| {
        Some(Target::Dnat(Dnat {
            address: text.parse().expect("an address"),
            port,
        }))
    };
    let v4 = [10, 244, 1, 1];
    let modern = range(3, &wide(&v4), &wide(&v4), [8080, 8080]);
    assert_eq!(
        target(2, 2, &[modern.clone(), vec![0; 4]].concat()),
        dnat("10.244.1.1", Some(8080))
    );
    let old = [1_u32.to_ne_bytes().to_vec(), range(3, &v4, &v4, [8080, 8080])].concat();
    assert_eq!(target(2, 0, &old), dnat("10.244.1.1", Some(8080)));
    let v6 = Ipv6Addr::from([0xfd00, 0, 0, 0, 0, 0, 0, 7]).octets();
    assert_eq!(target(10, 1, &range(3, &v6, &v6, [80, 80])), dnat("fd00::7", Some(80)));
    assert_eq!(
        target(2, 2, &range(1, &wide(&v4), &wide(&v4), [0, 0])),
        dnat("10.244.1.1", None)
    );
    // A range of addresses or ports, or a port alone, is chosen from for each connection.
    let other = [10, 244, 1, 9];
    assert_eq!(
        target(2, 2, &range(1, &wide(&v4), &wide(&other), [0, 0])),
        Some(Target::Computed)
    );
    assert_eq!(
        target(2, 2, &range(3, &wide(&v4), &wide(&v4), [80, 90])),
        Some(Target::Computed)
    );
    assert_eq!(
        target(2, 2, &range(2, &wide(&[]), &wide(&[]), [80, 80])),
        Some(Target::Computed)
    );
    assert_eq!(target(2, 2, &[0; 7]), Some(Target::Computed));
    assert_eq!(read(2, &[xt("target", "MARK", 2, &[0; 8])]).target, None);
}

#[test]
fn nftables_translations_are_read_from_registers() {
    let nat =
        |kind: u32, registers: &[Vec<u8>]| expression("nat", &[&[word(1, kind), word(2, 2)][..], registers].concat());
    let fixed = read(
        2,
        &[
            immediate(1, &[10, 244, 1, 1]),
            immediate(2, &8080_u16.to_be_bytes()),
            nat(1, &[word(3, 1), word(5, 2)]),
        ],
    );
    let target = Dnat {
        address: [10, 244, 1, 1].into(),
        port: Some(8080),
    };
    assert_eq!(fixed.target, Some(Target::Dnat(target)));
    assert_eq!(target.endpoint(80).to_string(), "10.244.1.1:8080");
    let port_stays = read(2, &[immediate(8, &[10, 244, 1, 1]), nat(1, &[word(3, 1)])]);
    assert!(matches!(port_stays.target, Some(Target::Dnat(Dnat { port: None, .. }))));
    let computed = read(
        2,
        &[
            immediate(1, &[10, 244, 1, 1]),
            expression("numgen", &[word(1, 1), word(2, 3)]),
            expression("lookup", &[words(1, "__map0"), word(2, 1), word(3, 1)]),
            nat(1, &[word(3, 1)]),
        ],
    );
    assert_eq!(computed.target, Some(Target::Computed));
    let source = read(2, &[immediate(1, &[10, 244, 1, 1]), nat(0, &[word(3, 1)])]);
    assert_eq!(source.target, None);
}

#[test]
fn a_verdict_map_and_a_memory_of_clients_are_seen() {
    let rule = read(
        2,
        &[
            xt(
                "match",
                "recent",
                1,
                &[&10_800_u32.to_ne_bytes()[..], &[0; 220]].concat(),
            ),
            expression("lookup", &[words(1, "service-ips"), word(2, 1), word(3, 0)]),
        ],
    );
    assert_eq!(rule.remembers, Some(Duration::from_hours(3)));
    assert_eq!(rule.target, Some(Target::Map("service-ips".to_owned())));
}

#[test]
fn a_maps_elements_are_frontends_of_either_family() {
    let element = |address: &[u8], protocol: u8, verdict: Vec<u8>| {
        let key = [address, &[protocol, 0, 0, 0, 0, 80, 0, 0]].concat();
        [value(1, &value(1, &key)), value(2, &verdict)].concat()
    };
    let to_chain = verdict(-4, "service-web");
    let v4 = mapped(2, &element(&[10, 96, 0, 10], 6, to_chain.clone())).expect("an entry");
    assert_eq!(v4.frontend.to_string(), "10.96.0.10:80");
    assert_eq!((v4.protocol, v4.chain.as_deref()), (Protocol::Tcp, Some("service-web")));
    let v6 = mapped(2, &element(&[0xfd; 16], 17, to_chain.clone())).expect("an entry");
    assert!(v6.frontend.is_ipv6() && v6.protocol == Protocol::Udp);
    let dropped = mapped(2, &element(&[10, 96, 0, 10], 6, value(2, &word(1, 0)))).expect("an entry");
    assert_eq!(dropped.chain, None);
    // A map whose key is a protocol and a port.
    let node_port = |family| {
        mapped(family, &element(&[], 6, to_chain.clone()))
            .expect("an entry")
            .frontend
    };
    assert_eq!(node_port(2).to_string(), "0.0.0.0:80");
    assert_eq!(node_port(10).to_string(), "[::]:80");
    // SCTP, and a key of another shape.
    assert_eq!(mapped(2, &element(&[10, 96, 0, 10], 132, to_chain.clone())), None);
    assert_eq!(mapped(2, &element(&[10, 96], 6, to_chain)), None);
}

#[test]
fn chains_and_sets_are_read() {
    let payload = [
        &[2, 0, 0, 0][..],
        &words(CHAIN_TABLE, "nat"),
        &words(CHAIN_NAME, "PREROUTING"),
        &words(CHAIN_TYPE, "nat"),
    ]
    .concat();
    let hooked = chain(&payload).expect("a message").expect("a chain");
    assert_eq!((hooked.family, hooked.translates), (2, true));
    assert!(!hooked.drops_forwarded);
    let based = |family: u8, hook: u32, policy: u32| {
        let payload = [
            &[family, 0, 0, 0][..],
            &words(CHAIN_TABLE, "filter"),
            &words(CHAIN_NAME, "FORWARD"),
            &value(CHAIN_HOOK, &word(HOOK_NUMBER, hook)),
            &word(CHAIN_POLICY, policy),
        ]
        .concat();
        chain(&payload).expect("a message").expect("a chain").drops_forwarded
    };
    assert!(based(1, 2, 0) && based(2, 2, 0) && based(10, 2, 0));
    // It accepts; stands at another hook; sees frames of bridges.
    assert!(!based(2, 2, 1) && !based(2, 1, 0) && !based(7, 2, 0));
    let payload = [
        &[2, 0, 0, 0][..],
        &words(SET_NAME, "affinity-x"),
        &value(SET_TIMEOUT, &10_800_000_u64.to_be_bytes()),
    ]
    .concat();
    let set = set(&payload).expect("a message").expect("a set");
    assert_eq!(set.timeout, Some(Duration::from_hours(3)));
    assert!(chain(&[]).is_err());
}

proptest! {
    #[test]
    fn any_expressions_end_without_a_panic(bytes in proptest::collection::vec(0_u8..24, 0..300)) {
        let _outcome = Rule::read(2, String::new(), &bytes);
        let _outcome = (mapped(2, &bytes), chain(&bytes), set(&bytes));
    }

    #[test]
    fn any_target_is_one_or_computed(revision in 0_u32..4, family in 0_u8..12, info in proptest::collection::vec(any::<u8>(), 0..60)) {
        let rule = read(family, &[xt("target", "DNAT", revision, &info), xt("match", "tcp", 0, &info), xt("match", "recent", 1, &info)]);
        prop_assert!(matches!(rule.target, Some(Target::Dnat(_) | Target::Computed)));
    }
}
