//! An agent beside kube-proxy: balance refuses to fight it, observe does not mind, and an override takes over.
//!
//! kube-proxy itself is its rules here, as a real one wrote them (`node_facts/captured`).

use std::process::ExitCode;

use anyhow::{Context, Result};
use lb_tests::{
    agent::{
        Agent, Node, must, trial, until,
        web::{BACKENDS, VIP, serve_all, write_web},
    },
    runner,
};
use lb_user::lab::{nft, server::Manner};
use serde_json::Value;

const RULES: &str = include_str!("node_facts/captured/nftables.nft");
const TABLES: &str =
    "table ip kube-proxy (22 chains, 3 Service ports), table ip6 kube-proxy (18 chains, 1 Service ports)";

fn main() -> ExitCode {
    runner::run(vec![
        trial("balance_refuses_to_fight_kube_proxy_and_says_what_to_do", refusal),
        trial("beside_kube_proxy_takes_over_and_says_so", beside),
        trial("a_kube_proxy_that_comes_later_is_a_problem_of_the_status", later),
    ])
}

fn remove_rules(node: &Node) -> Result<()> {
    nft::load(
        node.netns(),
        "delete table ip kube-proxy\ndelete table ip6 kube-proxy\n",
    )?;
    Ok(())
}

/// The state and the words of one of the doctor's checks.
fn check(node: &Node, mode: &str, id: &str) -> Result<(String, String, String)> {
    let output = node.run(&["doctor", "--mode", mode, "-o", "json"])?;
    let document: Value = serde_json::from_slice(&output.stdout)?;
    let checks = document["checks"].as_array().context("checks")?;
    let check = checks.iter().find(|check| check["id"] == id).context(id.to_owned())?;
    let text = |field: &str| check[field].as_str().unwrap_or_default().to_owned();
    Ok((text("state"), text("found"), text("hint")))
}

fn refusal(node: &Node) -> Result<()> {
    nft::load(node.netns(), RULES)?;
    let (code, said) = node.run_agent(&mut node.agent_command(&[]))?;
    must(code == 1, || format!("exit code {code}: {said}"))?;
    for word in [
        "kube-proxy (nftables) translates Services on this node",
        TABLES,
        "left over",
        "kube-proxy --cleanup",
        "nft delete table ip kube-proxy",
        "--mode observe",
        "--beside-kube-proxy",
    ] {
        must(said.contains(word), || format!("{word:?} is not in {said}"))?;
    }
    must(!node.own_pins().exists(), || "something was pinned".to_owned())?;
    let (state, found, hint) = check(node, "balance", "owner.kube-proxy-nftables")?;
    must(
        (state.as_str(), found.as_str()) == ("fail", TABLES) && hint.contains("kube-proxy --cleanup"),
        || format!("{state}: {found}: {hint}"),
    )?;
    let (state, found, _) = check(node, "observe", "owner.kube-proxy-nftables")?;
    must((state.as_str(), found.as_str()) == ("ok", TABLES), || {
        format!("{state}: {found}")
    })?;
    // To watch is never refused.
    node.start(&["--mode", "observe"])?.stop()?;
    // What would take over has no place there.
    let flags = ["--mode", "observe", "--beside-kube-proxy"];
    let (code, said) = node.run_agent(&mut node.agent_command(&flags))?;
    must(code == 2 && said.contains("--beside-kube-proxy"), || {
        format!("{code}: {said}")
    })?;
    remove_rules(node)?;
    node.start(&[])?.stop()
}

/// What the status says of other proxies.
fn rivals(agent: &Agent) -> Result<Vec<String>> {
    let problems = agent.status()?.problems;
    let of_proxies = problems.into_iter().filter(|problem| problem.field == "--mode balance");
    Ok(of_proxies
        .map(|problem| format!("{}: {}", problem.object, problem.message))
        .collect())
}

/// Waits until the status says this of other proxies.
fn wait_rivals(agent: &Agent, wanted: &[&str]) -> Result<()> {
    until("the status to say who else is at work", || {
        let found = rivals(agent)?;
        let same =
            found.len() == wanted.len() && found.iter().zip(wanted).all(|(found, start)| found.starts_with(start));
        must(same, || format!("{found:?}"))
    })
}

fn beside(node: &Node) -> Result<()> {
    write_web(node, &BACKENDS)?;
    let _servers = serve_all(node, Manner::Greet)?;
    nft::load(node.netns(), RULES)?;
    let agent = node.start(&["--beside-kube-proxy"])?;
    // These rules lead elsewhere; the socket hooks come before them.
    node.dial_many(VIP, 20)?;
    wait_rivals(
        &agent,
        &["kube-proxy (nftables): translates Services beside this agent: table ip kube-proxy"],
    )?;
    must(agent.metrics()?.get("evenkeel_problems") >= Some(&1.0), || {
        "no problem is counted".to_owned()
    })?;
    remove_rules(node)?;
    node.dial_many(VIP, 20)?;
    wait_rivals(&agent, &[])?;
    agent.stop()
}

fn later(node: &Node) -> Result<()> {
    let agent = node.start(&[])?;
    wait_rivals(&agent, &[])?;
    nft::load(node.netns(), RULES)?;
    wait_rivals(&agent, &["kube-proxy (nftables): "])?;
    must(node.log().contains("translates Services beside this agent"), || {
        node.log()
    })?;
    agent.stop()
}
