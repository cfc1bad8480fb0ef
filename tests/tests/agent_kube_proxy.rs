//! An agent beside kube-proxy: balance refuses to fight it, observe does not mind, and an override takes over.
//!
//! kube-proxy itself is its rules here, as a real one wrote them (`node_facts/captured`); `sock_kube_proxy` has the real one.

use std::process::ExitCode;

use anyhow::Result;
use lb_tests::{
    agent::{
        Node, must, trial,
        web::{BACKENDS, VIP, serve_all, write_web},
    },
    kube_proxy::{self, Mode, NFTABLES},
    runner,
};
use lb_user::lab::{nft, server::Manner};

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

fn refusal(node: &Node) -> Result<()> {
    nft::load(node.netns(), NFTABLES)?;
    let (code, said) = node.run_agent(&mut node.agent_command(&[]))?;
    kube_proxy::refused(code, &said, Mode::Nftables, false)?;
    must(
        said.contains(TABLES) && said.contains("nft delete table ip kube-proxy"),
        || said,
    )?;
    must(!node.own_pins().exists(), || "something was pinned".to_owned())?;
    kube_proxy::diagnosed(&kube_proxy::doctor(node, "balance")?, Some(Mode::Nftables), false)?;
    let (state, found, _) = kube_proxy::check(&kube_proxy::doctor(node, "observe")?, &Mode::Nftables.check())?;
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

fn beside(node: &Node) -> Result<()> {
    write_web(node, &BACKENDS)?;
    let _servers = serve_all(node, Manner::Greet)?;
    nft::load(node.netns(), NFTABLES)?;
    let agent = node.start(&["--beside-kube-proxy"])?;
    // These rules lead elsewhere; the socket hooks come before them.
    node.dial_many(VIP, 20)?;
    kube_proxy::wait_rivals(
        &agent,
        &["kube-proxy (nftables): translates Services beside this agent: table ip kube-proxy"],
    )?;
    must(agent.metrics()?.get("evenkeel_problems") >= Some(&1.0), || {
        "no problem is counted".to_owned()
    })?;
    remove_rules(node)?;
    node.dial_many(VIP, 20)?;
    kube_proxy::wait_rivals(&agent, &[])?;
    agent.stop()
}

fn later(node: &Node) -> Result<()> {
    let agent = node.start(&[])?;
    kube_proxy::wait_rivals(&agent, &[])?;
    nft::load(node.netns(), NFTABLES)?;
    kube_proxy::wait_rivals(&agent, &["kube-proxy (nftables): "])?;
    must(node.log().contains("translates Services beside this agent"), || {
        node.log()
    })?;
    agent.stop()
}
