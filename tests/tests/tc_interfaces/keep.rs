//! Programs that outlive an agent, come back when they are lost, and go when they are not wanted.

use std::fs;

use anyhow::{Context, Result};
use lb_tests::agent::{NODE_NAME, NODE_V6, Node, must, until};
use lb_user::lab::Child;
use serde_json::{Value, json};

use crate::place::{
    Attached, NEAR, TRANSLATORS, add_pair, add_uplink, attached, attached_names, describe_strangers, described,
    has_links, index, pinned_links, run, tool, uplink, wait_attached, wait_described,
};

fn holders(all: &[Attached]) -> Vec<&str> {
    all.iter().map(|attached| attached.holder.as_str()).collect()
}

pub(super) fn restart(node: &Node) -> Result<()> {
    let _far = add_uplink(node)?;
    let agent = node.start(&[])?;
    wait_attached(node, "up0", &TRANSLATORS)?;
    let wanted = [(index(node, "up0")?, uplink(NEAR, NODE_V6))];
    wait_described(node, &wanted)?;
    let first = attached(node, "up0")?;
    agent.kill()?;
    let without = attached(node, "up0")?;
    must(first == without, || format!("{first:?} became {without:?}"))?;

    let agent = node.start(&[])?;
    let second = attached(node, "up0")?;
    must(holders(&first) == holders(&second), || {
        format!("{first:?} became {second:?}")
    })?;
    let swapped = first
        .iter()
        .zip(&second)
        .all(|(old, new)| old.program != new.program && old.name == new.name);
    must(swapped, || format!("{first:?} became {second:?}"))?;
    wait_described(node, &wanted)?;
    // An orderly end leaves them, too.
    agent.stop()?;
    let third = attached(node, "up0")?;
    must(second == third, || format!("{second:?} became {third:?}"))
}

/// An uplink that only the Node object makes one: a restarted agent must not take it away before it has read the object.
pub(super) fn restart_unknown(node: &Node) -> Result<()> {
    let _far = add_pair(node, "up0")?;
    run(node, &format!("ip address add {NEAR}/24 dev up0"))?;
    let object = json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": NODE_NAME},
        "status": {"addresses": [{"type": "InternalIP", "address": NEAR}]},
    });
    node.write("node.yaml", &[object])?;
    // Without the addresses that the harness gives by flags.
    let command = || {
        let mut command = node.command(&["agent", "--bpffs", "/sys/fs/bpf", "--metrics-address", "none"]);
        command.args(["--node-name", NODE_NAME, "--pin-name", node.pin_name()]);
        command
            .arg("--source")
            .arg(format!("dir:{}", node.manifests().path().display()));
        command.arg("--cgroup").arg(node.cgroup().path());
        command
    };
    let log = node.folder().join("unknown.log");
    let mut agent = Child::start(&mut command(), &log)?;
    wait_attached(node, "up0", &TRANSLATORS)?;
    let wanted = [(index(node, "up0")?, uplink(NEAR, ""))];
    wait_described(node, &wanted)?;
    let before = attached(node, "up0")?;
    let synchronised = |times: usize| {
        until("the first synchronisation", || {
            let said = fs::read_to_string(&log)?;
            must(said.matches("first synchronisation").count() == times, || said.clone())
        })
    };
    synchronised(1)?;
    agent.kill()?;
    let mut agent = Child::start(&mut command(), &log)?;
    until("the programs to be swapped", || {
        let after = attached(node, "up0")?;
        must(after.len() == 2 && after[0].program != before[0].program, || {
            format!("{after:?}")
        })
    })?;
    synchronised(2)?;
    until("the interface to be chosen by the node's address", || {
        let status = node.run(&["status", "-o", "json"])?;
        let status: Value = serde_json::from_slice(&status.stdout)?;
        let why = status["interfaces"][0]["reason"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        must(why.contains("carries the node's address"), || status.to_string())
    })?;
    let after = attached(node, "up0")?;
    must(holders(&before) == holders(&after), || {
        format!("{before:?} became {after:?}")
    })?;
    wait_described(node, &wanted)?;
    Ok(agent.kill()?)
}

pub(super) fn upgrade(node: &Node) -> Result<()> {
    let _far = add_uplink(node)?;
    let agent = node.start(&["--interface", "up0"])?;
    let all = ["lb_ingress", "tc_ingress", "lb_egress", "tc_egress"];
    wait_attached(node, "up0", &all)?;
    let before = attached(node, "up0")?;
    agent.kill()?;
    // To the next agent these are the pins of ABI 0. Observers' links were named by their interface's name once.
    let old = node.pins().join("0");
    fs::rename(node.own_pins(), &old).context("rename the folder of pins")?;
    if has_links() {
        let up = index(node, "up0")?;
        fs::rename(
            old.join(format!("link-tc_ingress-{up}")),
            old.join("link-tc_ingress-up0"),
        )?;
    }
    let agent = node.start(&["--interface", "up0"])?;
    until("the old pins to go", || {
        must(!old.exists(), || "the old folder is still there".to_owned())
    })?;
    until("all programs to be swapped", || {
        let after = attached(node, "up0")?;
        let swapped = before
            .iter()
            .zip(&after)
            .all(|(old, new)| old.program != new.program && old.name == new.name);
        must(after.len() == 4 && swapped, || format!("{before:?} became {after:?}"))
    })?;
    let after = attached(node, "up0")?;
    must(holders(&before) == holders(&after), || {
        format!("{before:?} became {after:?}")
    })?;
    wait_described(node, &[(index(node, "up0")?, uplink(NEAR, NODE_V6))])?;
    agent.stop()
}

pub(super) fn refusal(node: &Node) -> Result<()> {
    let _far = add_uplink(node)?;
    let agent = node.start(&[])?;
    wait_attached(node, "up0", &TRANSLATORS)?;
    let wanted = [(index(node, "up0")?, uplink(NEAR, NODE_V6))];
    agent.kill()?;
    if !has_links() {
        return Ok(());
    }
    // Folders in the place of two pins, which no link can be taken over from nor pinned to.
    let folders =
        ["lb_ingress", "tc_ingress"].map(|program| node.own_pins().join(format!("link-{program}-{}", wanted[0].0)));
    fs::remove_file(&folders[0])?;
    for folder in &folders {
        fs::create_dir(folder)?;
    }
    // One of all interfaces refuses; the agent starts, and what worked there goes on working.
    let agent = node.start(&["--interface", "all"])?;
    let shown = agent.status()?.interfaces;
    must(shown.len() == 1 && shown[0].problem.is_some(), || format!("{shown:?}"))?;
    wait_attached(node, "up0", &["lb_egress"])?;
    wait_described(node, &wanted)?;
    for folder in &folders {
        fs::remove_dir(folder)?;
    }
    wait_attached(node, "up0", &["lb_ingress", "tc_ingress", "lb_egress", "tc_egress"])?;
    wait_described(node, &wanted)?;
    agent.stop()
}

pub(super) fn restart_without(node: &Node) -> Result<()> {
    let _far = add_uplink(node)?;
    let agent = node.start(&[])?;
    wait_attached(node, "up0", &TRANSLATORS)?;
    agent.kill()?;
    let agent = node.start(&["--uplink", "none"])?;
    let none = attached(node, "up0")?;
    must(none.is_empty(), || format!("{none:?}"))?;
    let none = described(node)?;
    must(none.is_empty(), || format!("{none:?}"))?;
    let none = pinned_links(node)?;
    must(none.is_empty(), || format!("{none:?}"))?;
    agent.kill()?;

    // The observer, too, takes away what translates.
    let agent = node.start(&[])?;
    wait_attached(node, "up0", &TRANSLATORS)?;
    agent.kill()?;
    let agent = node.start(&["--mode", "observe"])?;
    wait_attached(node, "up0", &["tc_ingress", "tc_egress"])?;
    agent.stop()?;
    let none = attached(node, "up0")?;
    must(none.is_empty(), || format!("{none:?}"))
}

pub(super) fn crowded(node: &Node) -> Result<()> {
    let _far = add_uplink(node)?;
    let agent = node.start(&["--uplink", "none", "--guest-interface", "none0"])?;
    agent.kill()?;
    // Interfaces that have gone while no agent ran.
    let filled = describe_strangers(node)?;
    must(filled > 1_000, || format!("only {filled} found room"))?;
    let agent = node.start(&[])?;
    wait_attached(node, "up0", &TRANSLATORS)?;
    wait_described(node, &[(index(node, "up0")?, uplink(NEAR, NODE_V6))])?;
    agent.stop()
}

pub(super) fn repair(node: &Node) -> Result<()> {
    let _far = add_uplink(node)?;
    let agent = node.start(&[])?;
    wait_attached(node, "up0", &TRANSLATORS)?;
    if has_links() {
        let up = index(node, "up0")?;
        fs::remove_file(node.own_pins().join(format!("link-lb_egress-{up}")))?;
        wait_attached(node, "up0", &TRANSLATORS)?;
        lb_tests::bpf::detach_pinned_link(&node.own_pins().join(format!("link-lb_ingress-{up}")))?;
    } else {
        run(node, "tc filter del dev up0 egress pref 224")?;
        wait_attached(node, "up0", &TRANSLATORS)?;
        run(node, "tc qdisc del dev up0 clsact")?;
    }
    let lost = attached_names(node, "up0")?;
    wait_attached(node, "up0", &TRANSLATORS)?;
    until("the repairs to be counted", || {
        let repairs = agent.status()?.sync.repairs;
        must(repairs >= 2, || format!("{repairs} repairs; {lost:?} were left"))
    })?;
    agent.stop()
}

pub(super) fn shared(node: &Node) -> Result<()> {
    let _far = add_uplink(node)?;
    let agent = node.start(&["--interface", "up0"])?;
    // Translators are nearest to the beginning, whatever came first.
    let all = ["lb_ingress", "tc_ingress", "lb_egress", "tc_egress"];
    wait_attached(node, "up0", &all)?;
    agent.kill()?;
    let agent = node.start(&["--interface", "up0", "--uplink", "none"])?;
    wait_attached(node, "up0", &["tc_ingress", "tc_egress"])?;
    agent.kill()?;
    let agent = node.start(&["--interface", "up0"])?;
    wait_attached(node, "up0", &all)?;
    agent.kill()?;
    let agent = node.start(&[])?;
    wait_attached(node, "up0", &TRANSLATORS)?;
    agent.stop()
}

pub(super) fn others(node: &Node) -> Result<()> {
    let _far = add_uplink(node)?;
    // Somebody else's filter, on the qdisc where filters are.
    run(node, "tc qdisc add dev up0 clsact")?;
    let foreign = "pref 7 protocol ip u32 match u32 0 0 action ok";
    let theirs = || -> Result<String> {
        let shown = tool(node.netns(), "tc filter show dev up0 ingress")?;
        let shown = String::from_utf8(shown.stdout)?;
        Ok(shown
            .lines()
            .filter(|line| line.contains("pref 7 "))
            .collect::<Vec<_>>()
            .join("\n"))
    };
    let has_filter = run(node, &format!("tc filter add dev up0 ingress {foreign}")).is_ok();
    let before = theirs()?;
    must(!has_filter || !before.is_empty(), || {
        "the filter is not shown".to_owned()
    })?;
    let agent = node.start(&["--interface", "up0"])?;
    until("all four programs", || {
        let all = attached(node, "up0")?;
        must(all.len() == 4, || format!("{all:?}"))
    })?;
    agent.kill()?;
    node.cleanup()?;
    wait_attached(node, "up0", &[])?;
    let after = theirs()?;
    must(before == after, || format!("{before:?} became {after:?}"))?;
    let shown = tool(node.netns(), "tc qdisc show dev up0")?;
    let shown = String::from_utf8(shown.stdout)?;
    must(shown.contains("clsact"), || shown.clone())
}

pub(super) fn cleanup(node: &Node) -> Result<()> {
    let _far = add_uplink(node)?;
    let agent = node.start(&["--interface", "up0"])?;
    until("all four programs", || {
        let all = attached(node, "up0")?;
        must(all.len() == 4, || format!("{all:?}"))
    })?;
    let flows = node.pins().join(format!("flows-{}", lb_common::abi::FLOW_VERSION));
    let mut maps: Vec<_> = fs::read_dir(&flows)
        .with_context(|| flows.display().to_string())?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<Result<_>>()?;
    maps.sort();
    must(maps == ["FLOWS", "FLOW_HAND", "TUPLES"], || format!("{maps:?}"))?;
    agent.kill()?;

    let dry = node.run(&["cleanup", "--pin-name", node.pin_name(), "--dry-run"])?;
    let dry = String::from_utf8(dry.stdout)?;
    let all = attached(node, "up0")?;
    must(all.len() == 4, || format!("a dry run left {all:?}"))?;
    let said = node.cleanup()?;
    must(dry.replace("would remove", "removed") == said, || {
        format!("{dry}\n{said}")
    })?;
    for program in ["lb_ingress", "lb_egress", "tc_ingress", "tc_egress"] {
        must(said.contains(program), || format!("{program} is not named in: {said}"))?;
    }
    wait_attached(node, "up0", &[])?;
    must(!node.pins().exists(), || "pins are left".to_owned())?;
    must(node.cleanup()?.contains("nothing to remove"), || {
        "something was left".to_owned()
    })
}
