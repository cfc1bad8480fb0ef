//! kube-proxy in its modes: what the doctor and a refused agent must say of it, and, in `process`, the real one.
//!
//! Who runs them beside what is the tests'. Rules that a real one wrote are at hand.

pub mod process;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::agent::{Agent, Node, until};

/// The rules of a real kube-proxy in its nftables mode, as `nft` takes them; see the README beside them.
pub const NFTABLES: &str = include_str!("../../tests/node_facts/captured/nftables.nft");

/// A mode of kube-proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// `--proxy-mode nftables`.
    Nftables,
    /// `--proxy-mode iptables`, with either iptables.
    Iptables,
    /// `--proxy-mode ipvs`.
    Ipvs,
}

impl Mode {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Nftables, Self::Iptables, Self::Ipvs];

    /// Its name, as `--proxy-mode` takes it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nftables => "nftables",
            Self::Iptables => "iptables",
            Self::Ipvs => "ipvs",
        }
    }

    /// The doctor's check that is about it.
    pub fn check(self) -> String {
        format!("owner.kube-proxy-{}", self.name())
    }

    /// What is named of its traces, whatever Services there are.
    pub const fn trace(self) -> &'static str {
        match self {
            Self::Nftables => "table ip kube-proxy (",
            Self::Iptables => "chain KUBE-SERVICES in ",
            Self::Ipvs => "device kube-ipvs0 with ",
        }
    }
}

/// What `evenkeel doctor -o json` says on a node, for a mode of the agent.
///
/// # Errors
/// Where it is no JSON.
pub fn doctor(node: &Node, mode: &str) -> Result<Value> {
    let output = node.run(&["doctor", "--mode", mode, "-o", "json"])?;
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// What the status says of other proxies.
fn rivals(agent: &Agent) -> Result<Vec<String>> {
    let problems = agent.status()?.problems;
    let of_proxies = problems.into_iter().filter(|problem| problem.field == "--mode balance");
    Ok(of_proxies
        .map(|problem| format!("{}: {}", problem.object, problem.message))
        .collect())
}

/// Waits until the status names these other proxies and no more, each by the start of what it says.
///
/// # Errors
/// What it says instead.
pub fn wait_rivals(agent: &Agent, wanted: &[&str]) -> Result<()> {
    until("the status to say who else is at work", || {
        let found = rivals(agent)?;
        let same =
            found.len() == wanted.len() && found.iter().zip(wanted).all(|(found, start)| found.starts_with(start));
        ensure!(same, "{found:?}");
        Ok(())
    })
}

/// The doctor's check on whether kube-proxy runs.
pub const RUNNING: &str = "owner.kube-proxy-running";

/// One check of what `evenkeel doctor -o json` says: state, what was found, what to do.
///
/// # Errors
/// Where the document has no such check.
pub fn check(document: &Value, id: &str) -> Result<(String, String, String)> {
    let checks = document["checks"].as_array().context("no checks")?;
    let check = checks.iter().find(|check| check["id"] == id);
    let check = check.with_context(|| format!("no check {id}"))?;
    let text = |field: &str| check[field].as_str().unwrap_or_default().to_owned();
    Ok((text("state"), text("found"), text("hint")))
}

/// Holds a doctor's document to what must be said in balance mode: what `wrote` left fails and no other mode does, and whether it runs.
///
/// # Errors
/// Where it says anything else.
pub fn diagnosed(document: &Value, wrote: Option<Mode>, runs: bool) -> Result<()> {
    for mode in Mode::ALL {
        let (state, found, hint) = check(document, &mode.check())?;
        if wrote == Some(mode) {
            ensure!(
                state == "fail" && found.contains(mode.trace()) && hint.contains("kube-proxy --cleanup"),
                "{mode:?}: {state}: {found}: {hint}"
            );
        } else {
            ensure!(state == "ok" && found == "not found", "{mode:?}: {state}: {found}");
        }
    }
    let (state, found, hint) = check(document, RUNNING)?;
    if runs {
        ensure!(
            state == "fail"
                && (found.contains("(kube-proxy)") || found.contains("says mode "))
                && hint.contains("nodeSelector"),
            "{state}: {found}: {hint}"
        );
    } else {
        ensure!(state == "ok", "{state}: {found}");
    }
    Ok(())
}

/// Holds a refused agent's exit code and words to what must be said: what was found, and each way out.
///
/// # Errors
/// Where something is missing.
pub fn refused(code: i32, said: &str, wrote: Mode, runs: bool) -> Result<()> {
    ensure!(code == 1, "exit code {code}: {said}");
    let owner = format!("kube-proxy ({}) translates Services on this node", wrote.name());
    let whether = if runs { "kube-proxy runs: " } else { "left over" };
    for word in [
        owner.as_str(),
        wrote.trace(),
        whether,
        "kube-proxy --cleanup",
        "--mode observe",
        "--beside-kube-proxy",
    ] {
        ensure!(said.contains(word), "{word:?} is not in {said}");
    }
    Ok(())
}
