use std::collections::BTreeSet;

use super::*;
use crate::view::{Answers, CallView, ServiceFilter, fixture::Fixture};

fn calls() -> GraphView {
    Fixture { ready: true }
        .graph(&ServiceFilter::default())
        .expect("the fixture has calls")
}

fn call(client: (&str, &str, &str), service: (&str, &str)) -> CallView {
    let mut call = calls().calls.remove(0);
    call.client = WorkloadView {
        namespace: client.0.into(),
        kind: client.1.into(),
        name: client.2.into(),
    };
    (call.namespace, call.service) = (service.0.into(), service.1.into());
    call
}

/// Names that a picture must survive.
fn nasty() -> GraphView {
    let mut view = calls();
    view.calls = vec![
        call(("a\"b", "Deployment", "x\\"), ("a\"b", "y -> z; }")),
        call(("", "Address", "fd00::1"), ("new\nline", "{")),
    ];
    view
}

/// A token of the DOT language.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Token {
    Id(String),
    Sign(&'static str),
}

fn tokens(text: &str) -> Vec<Token> {
    let mut rest = text;
    let mut out = Vec::new();
    'next: while let Some(first) = rest.chars().next() {
        if first.is_whitespace() {
            rest = &rest[first.len_utf8()..];
            continue;
        }
        for sign in ["->", "{", "}", "[", "]", "=", ",", ";"] {
            if let Some(after) = rest.strip_prefix(sign) {
                out.push(Token::Sign(sign));
                rest = after;
                continue 'next;
            }
        }
        let mut id = String::new();
        let length = if first == '"' {
            let mut escaped = false;
            let end = rest[1..].char_indices().find(|&(_, c)| {
                let ends = c == '"' && !escaped;
                escaped = c == '\\' && !escaped;
                if !ends {
                    id.push(c);
                }
                ends
            });
            end.expect("a string ends").0 + 2
        } else {
            id = rest
                .chars()
                .take_while(|c| c.is_ascii_alphanumeric() || *c == '_')
                .collect();
            assert!(!id.is_empty(), "neither a sign nor an id: {rest}");
            id.len()
        };
        out.push(Token::Id(id));
        rest = &rest[length..];
    }
    out
}

/// Keys and values.
type Attributes = Vec<(String, String)>;

#[derive(Debug, Default)]
struct Digraph {
    nodes: BTreeSet<String>,
    clusters: Vec<String>,
    edges: Vec<(String, String, Attributes)>,
}

/// Reads the part of the DOT language that is written here, and panics at anything else.
fn parse(text: &str) -> Digraph {
    let all = tokens(text);
    let mut at = all.iter();
    let mut next = || at.next().cloned();
    assert_eq!(next(), Some(Token::Id("digraph".into())));
    assert!(matches!(next(), Some(Token::Id(_))));
    assert_eq!(next(), Some(Token::Sign("{")));
    let mut graph = Digraph::default();
    let mut depth = 1;
    while depth > 0 {
        let id = match next() {
            Some(Token::Sign("}")) => {
                depth -= 1;
                continue;
            }
            Some(Token::Id(id)) => id,
            other => panic!("{other:?} begins no statement"),
        };
        if id == "subgraph" {
            let Some(Token::Id(name)) = next() else {
                panic!("a subgraph has a name")
            };
            graph.clusters.push(name);
            assert_eq!(next(), Some(Token::Sign("{")));
            depth += 1;
            continue;
        }
        let mut to = None;
        let mut sign = next();
        if sign == Some(Token::Sign("->")) {
            let Some(Token::Id(target)) = next() else {
                panic!("an edge has a target")
            };
            to = Some(target);
            sign = next();
        }
        let mut attributes = Vec::new();
        match sign {
            Some(Token::Sign("=")) => {
                assert!(matches!(next(), Some(Token::Id(_))));
                assert_eq!(next(), Some(Token::Sign(";")));
                continue;
            }
            Some(Token::Sign("[")) => loop {
                let (Some(Token::Id(key)), Some(Token::Sign("=")), Some(Token::Id(value))) = (next(), next(), next())
                else {
                    panic!("an attribute is key=value")
                };
                attributes.push((key, value));
                match next() {
                    Some(Token::Sign(",")) => {}
                    Some(Token::Sign("]")) => break,
                    other => panic!("{other:?} in a list of attributes"),
                }
            },
            other => panic!("{other:?} after {id}"),
        }
        assert_eq!(next(), Some(Token::Sign(";")));
        match to {
            Some(to) => graph.edges.push((id, to, attributes)),
            None if id == "node" => {}
            None => assert!(graph.nodes.insert(id), "a node is declared once"),
        }
    }
    assert_eq!(next(), None, "nothing follows the digraph");
    graph
}

#[test]
fn the_digraph_is_one() {
    let text = dot::digraph(&calls());
    insta::assert_snapshot!("dot", text);
    let graph = parse(&text);
    assert_eq!(graph.clusters, ["cluster_default", "cluster_shop"]);
    assert_eq!((graph.nodes.len(), graph.edges.len()), (5, 4));
    let red: Vec<&str> = graph
        .edges
        .iter()
        .filter(|(_, _, attributes)| attributes.contains(&("color".into(), "red".into())))
        .map(|(_, to, _)| to.as_str())
        .collect();
    assert_eq!(red, ["Service/shop/web"], "the call with failures");
}

#[test]
fn every_edge_joins_two_declared_nodes_whatever_their_names() {
    for view in [calls(), nasty()] {
        let graph = parse(&dot::digraph(&view));
        assert_eq!(graph.edges.len(), view.calls.len());
        for (from, to, attributes) in &graph.edges {
            assert!(graph.nodes.contains(from) && graph.nodes.contains(to), "{from} -> {to}");
            assert_eq!(attributes[0].0, "label");
        }
    }
}

#[test]
fn a_graph_without_calls_is_a_graph() {
    let mut view = calls();
    view.calls.clear();
    let graph = parse(&dot::digraph(&view));
    assert!(graph.nodes.is_empty() && graph.edges.is_empty());
    let text = sidecar::manifests(&view, "cluster.local", &["istio-system/*"]).expect("YAML");
    assert!(text.contains("No workload") && !text.contains("---"), "{text}");
}

fn documents(text: &str) -> Vec<serde_json::Value> {
    text.split("---\n")
        .skip(1)
        .map(|document| serde_saphyr::from_str(document).expect("YAML"))
        .collect()
}

#[test]
fn a_sidecar_holds_what_its_namespace_calls_and_no_more() {
    let mut view = calls();
    view.calls.push(call(("jobs", "CronJob", "nightly"), ("shop", "web")));
    view.calls.push(call(("Bad_Name", "Deployment", "x"), ("shop", "web")));
    view.forgotten = 7;
    let text = sidecar::manifests(&view, "cluster.local", &["istio-system/*"]).expect("YAML");
    insta::assert_snapshot!("sidecars", text);
    let documents = documents(&text);
    assert_eq!(documents.len(), 2);
    for (document, namespace, hosts) in [
        (
            &documents[0],
            "jobs",
            &["istio-system/*", "shop/web.shop.svc.cluster.local"][..],
        ),
        (
            &documents[1],
            "shop",
            &[
                "istio-system/*",
                "default/dns.default.svc.cluster.local",
                "shop/web.shop.svc.cluster.local",
            ],
        ),
    ] {
        assert_eq!(document["apiVersion"], "networking.istio.io/v1");
        assert_eq!(document["kind"], "Sidecar");
        assert_eq!(document["metadata"]["name"], "default");
        assert_eq!(document["metadata"]["namespace"], namespace);
        assert_eq!(document["spec"]["egress"][0]["hosts"], serde_json::json!(hosts));
    }
    assert!(text.contains("# Left out: 2 callers in no namespace"), "{text}");
    assert!(text.contains("# Left out: 1 caller with a name"), "{text}");
    assert!(text.contains("# Incomplete: 7 calls"), "{text}");
}

#[test]
fn the_domain_and_the_extra_hosts_can_be_chosen() {
    let text = sidecar::manifests(&calls(), "corp.example", &[]).expect("YAML");
    assert!(
        text.contains("shop/web.shop.svc.corp.example") && !text.contains("istio-system"),
        "{text}"
    );
    for good in ["cluster.local", "a"] {
        assert_eq!(sidecar::parse_domain(good).as_deref(), Ok(good));
    }
    for bad in ["", ".", "cluster.local.", "Cluster", "a b", "-a"] {
        assert!(sidecar::parse_domain(bad).is_err(), "{bad}");
    }
    for good in [
        "istio-system/*",
        "./*",
        "*/*.example.com",
        "none",
        "shop/web.shop.svc.cluster.local",
    ] {
        assert_eq!(sidecar::parse_host(good).as_deref(), Ok(good));
    }
    for bad in ["", "istio-system", "/x", "a/", "A/*", "a/b c", "a/*.*"] {
        assert!(sidecar::parse_host(bad).is_err(), "{bad}");
    }
}
