use super::*;
use crate::{
    cli::output::{ColorChoice, Format},
    view::{Answers, ServiceFilter, fixture::Fixture},
};

fn diagnosed() -> (NodeFactsView, Vec<DiagnosisView>) {
    Fixture { ready: true }
        .diagnose(&ServiceFilter::default())
        .expect("the fixture has diagnoses")
}

fn plain() -> Output {
    Output::new(Format::Table, true, ColorChoice::Never)
}

/// As the agent words it: the fixture's texts are shorter.
fn worded() -> (NodeFactsView, Vec<DiagnosisView>) {
    let (node, mut items) = diagnosed();
    let item = &mut items[0];
    item.sentences = vec![
        "[fd00::7]:8080 is starved: in its first 28 s it got 0 new connections where 333 would be fair (by chance alone: \
         1 in 10^144; found 26 s ago)."
            .into(),
        "Likely cause: source ports are reused. 640 of 640 connections met the same endpoint.".into(),
    ];
    item.starved[0].because = vec![
        "640 of 640 connections met the same endpoint.".into(),
        "net.ipv4.vs.conn_reuse_mode is 0: IPVS sends a new connection that matches an entry it still keeps (120 s after a \
         close) to that entry's endpoint."
            .into(),
    ];
    item.advice
        .push("Give the clients more source ports: a wider net.ipv4.ip_local_port_range.".into());
    (node, items)
}

/// An even Service beside the others.
fn even() -> DiagnosisView {
    let (_, mut items) = diagnosed();
    let mut item = items.swap_remove(0);
    item.service = "api".into();
    item.verdict = VerdictKind::Even;
    item.sentences = vec!["New connections are within what chance gives: 1,000 over 3 endpoints in 60 s.".into()];
    item.starved.clear();
    item.advice.clear();
    item.reuse = None;
    item.clients = None;
    item.failed.clear();
    item.latency = None;
    item.ports = None;
    item
}

#[test]
fn the_verdict_comes_first_and_the_advice_last() {
    let (node, items) = worded();
    let text = page(&node, &items[..1], Detail::Full, plain());
    insta::assert_snapshot!("starved", text);
    let place = |what: &str| text.find(what).unwrap_or_else(|| panic!("{what} is not in: {text}"));
    let order = [
        "STARVED",
        "is starved",
        "Why [fd00::7]:8080",
        "ENDPOINT",
        "Attribution:",
        "Node\n",
        "Advice\n",
    ]
    .map(place);
    assert!(order.is_sorted(), "{order:?}");
}

#[test]
fn every_line_fits_a_terminal() {
    let (node, mut items) = worded();
    items.push(even());
    for line in page(&node, &items, Detail::Full, plain()).lines() {
        assert!(line.chars().count() <= WIDTH, "{line}");
        assert_eq!(line, line.trim_end());
    }
}

#[test]
fn a_fact_that_was_said_is_not_said_again() {
    let (node, items) = worded();
    let text = page(&node, &items, Detail::Full, plain());
    assert_eq!(text.matches("640 of 640 connections met").count(), 1, "{text}");
}

#[test]
fn the_overview_is_a_line_each_and_the_whole_of_what_is_not_even() {
    let (node, mut items) = worded();
    // The agent may send them in any order.
    items.insert(0, even());
    let text = page(&node, &items, Detail::Overview, plain());
    insta::assert_snapshot!("overview", text);
    let words: Vec<&str> = text
        .lines()
        .take(3)
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    assert_eq!(words, ["VERDICT", "starved", "even"]);
    assert_eq!(text.matches("ENDPOINT").count(), 1, "only the starved one in full");
    assert!(text.contains("1 backend set without traffic not shown"), "{text}");
    let full = page(&node, &items, Detail::Full, plain());
    assert_eq!(full.matches("Attribution:").count(), 3, "all of them");
}

#[test]
fn facts_that_many_share_are_said_once() {
    let (node, mut items) = worded();
    let one = items[0].starved[0].clone();
    items[0].starved = (1..=9).map(|port| StarvedView { port, ..one.clone() }).collect();
    let text = page(&node, &items, Detail::Full, plain());
    assert_eq!(text.matches("  - net.ipv4.vs.conn_reuse_mode").count(), 1, "{text}");
    assert!(text.contains("and 6 more:"), "{text}");
}

#[test]
fn nothing_to_say_is_said() {
    let (node, items) = diagnosed();
    let text = page(&node, &items[1..], Detail::Overview, plain());
    assert!(text.starts_with("No connection to a Service was seen.\n"), "{text}");
    assert!(page(&node, &[], Detail::Overview, plain()).starts_with("There is no Service here.\n"));
}

#[test]
fn advice_that_two_sets_share_is_said_once() {
    let (node, mut items) = worded();
    let mut second = items[0].clone();
    second.set = "http/TCP/IPv6/cluster".into();
    items.insert(1, second);
    let text = page(&node, &items, Detail::Overview, plain());
    assert_eq!(text.matches("1. Set net.ipv4.vs").count(), 1, "{text}");
    assert!(
        text.contains("Advice for shop/web http/TCP/IPv4/cluster, shop/web http/TCP/IPv6/cluster"),
        "{text}"
    );
}

#[test]
fn verdicts_have_colours() {
    let (node, mut items) = worded();
    items.push(even());
    let text = page(
        &node,
        &items,
        Detail::Full,
        Output::new(Format::Table, true, ColorChoice::Always),
    );
    for code in ["\x1b[31mshop/web", "\x1b[32mshop/api", "\x1b[31m[fd00::7]"] {
        assert!(text.contains(code), "{code:?} is not in: {text}");
    }
}

#[test]
fn a_word_that_is_too_long_has_a_line_of_its_own() {
    let mut out = String::new();
    paragraph(&format!("a {} b", "x".repeat(100)), "- ", "  ", &mut out);
    assert_eq!(out, format!("- a\n  {}\n  b\n", "x".repeat(100)));
}
