//! What the agent is told, what it tells the programs, and what the doctor says of it beforehand.

use std::path::PathBuf;

use anyhow::{Context, Result};
use aya::maps::{Array, Map, MapData};
use lb_common::{abi::FLOW_VERSION, flow::Settings, maps as names};
use lb_tests::agent::{NODE_V4, NODE_V6, Node, must, web::pinned_map};
use serde_json::Value;

use crate::place::{TRANSLATORS, add_uplink, attached, wait_attached};

fn flow_map(node: &Node, name: &str) -> PathBuf {
    node.pins().join(format!("flows-{FLOW_VERSION}")).join(name)
}

fn entries(node: &Node, name: &str) -> Result<u32> {
    Ok(MapData::from_pin(flow_map(node, name))?.info()?.max_entries())
}

fn settings(node: &Node) -> Result<Settings> {
    let map: Array<_, Settings> = Array::try_from(Map::Array(pinned_map(node, names::SETTINGS)?))?;
    Ok(map.get(&0, 0)?)
}

pub(super) fn flow_size(node: &Node) -> Result<()> {
    let _far = add_uplink(node)?;
    let agent = node.start(&["--max-flows", "4096", "--snat-ports", "20000-20099"])?;
    wait_attached(node, "up0", &TRANSLATORS)?;
    let wanted = Settings {
        clock_offset_ns: 0,
        flow_slots: 4_096,
        first_port: 20_000,
        last_port: 20_099,
    };
    let found = settings(node)?;
    must(found == wanted, || format!("{found:?}"))?;
    let sizes = (entries(node, names::FLOWS)?, entries(node, names::TUPLES)?);
    must(sizes == (4_096, 3 * 4_096), || format!("{sizes:?}"))?;
    agent.kill()?;

    // The table that is there is kept, as it is, whatever size is asked for; ports change with the agent.
    let agent = node.start(&["--max-flows", "8192"])?;
    let found = settings(node)?;
    let wanted = Settings {
        first_port: 10_000,
        last_port: 29_999,
        ..wanted
    };
    must(found == wanted, || format!("{found:?}"))?;
    let problems = agent.status()?.problems;
    must(
        problems
            .iter()
            .any(|problem| problem.field == "--max-flows" && problem.message.contains("4096 slots")),
        || format!("{problems:?}"),
    )?;
    agent.kill()?;

    // Without uplinks nothing of it stays, so that the next agent has the size that it asks for.
    let agent = node.start(&["--uplink", "none"])?;
    must(!flow_map(node, names::FLOWS).exists(), || {
        "the flows are still there".to_owned()
    })?;
    agent.kill()?;
    let agent = node.start(&["--max-flows", "8192"])?;
    let found = settings(node)?;
    must(found.flow_slots == 8_192, || format!("{found:?}"))?;
    agent.stop()
}

pub(super) fn flags(node: &Node) -> Result<()> {
    for (flags, why) in [
        (
            &["--mode", "observe", "--uplink", "auto"][..],
            "observe mode translates nothing",
        ),
        (
            &["--mode", "observe", "--guest-interface", "tap0"],
            "observe mode translates nothing",
        ),
        (&["--uplink", "auto,eth0"], "stands alone"),
        (&["--uplink", "a/b"], "no interface's name"),
        (&["--guest-interface", "*"], "allowed are an interface's name"),
        (&["--snat-ports", "2000-1999"], "FIRST-LAST"),
        (&["--snat-ports", "80-2000"], "FIRST-LAST"),
        (&["--snat-ports", "2000-2014"], "FIRST-LAST"),
        (&["--max-flows", "0"], "allowed are 1 to"),
    ] {
        let (code, said) = node.run_agent(&mut node.agent_command(flags))?;
        must(code == 2 && said.contains(why), || format!("{flags:?}: {code}, {said}"))?;
    }
    let _far = add_uplink(node)?;
    let agent = node.start(&["--mode", "observe", "--uplink", "none"])?;
    wait_attached(node, "up0", &["tc_ingress", "tc_egress"])?;
    agent.stop()?;
    let none = attached(node, "up0")?;
    must(none.is_empty(), || format!("{none:?}"))
}

pub(super) fn doctor(node: &Node) -> Result<()> {
    let cgroup = node.cgroup().path().display().to_string();
    let check = |flags: &[&str], id: &str| -> Result<(String, String)> {
        let output = node.run(&[&["doctor", "--cgroup", &cgroup, "-o", "json"], flags].concat())?;
        let document: Value = serde_json::from_slice(&output.stdout)?;
        let checks = document["checks"].as_array().context("no checks")?;
        let check = checks
            .iter()
            .find(|check| check["id"] == id)
            .with_context(|| format!("no check {id}"))?;
        let text = |field: &str| check[field].as_str().unwrap_or_default().to_owned();
        Ok((text("state"), text("found")))
    };
    let must_be = |flags: &[&str], id: &str, state: &str, found: &str| -> Result<()> {
        let said = check(flags, id)?;
        must(said.0 == state && said.1.contains(found), || {
            format!("{flags:?}, {id}: {said:?}")
        })
    };
    must_be(&[], "uplinks", "warn", "none")?;
    let _far = add_uplink(node)?;
    must_be(&[], "uplinks", "ok", "up0 (has a default route)")?;
    must_be(&[], "uplinks", "ok", "without --node-address")?;
    must_be(&[], "tc.hook", "ok", "")?;
    must_be(&["--guest-interface", "up*"], "uplinks", "ok", "guests behind up0")?;
    must_be(&["--uplink", "up9"], "uplinks", "warn", "not there: up9")?;

    node.netns().write_sysctl("ipv4/ip_forward", "0")?;
    must_be(&[], "sysctl.ip_forward", "fail", "0")?;
    node.netns().write_sysctl("ipv4/ip_forward", "1")?;
    must_be(&[], "sysctl.ip_forward", "ok", "1")?;
    // Without an IPv6 address nothing of IPv6 comes in.
    must_be(&[], "sysctl.ipv6_forwarding", "ok", "not needed")?;
    let node_v6 = &["--node-address", NODE_V4, "--node-address", NODE_V6][..];
    must_be(node_v6, "sysctl.ipv6_forwarding", "fail", "0")?;

    must_be(&[], "snat_ports", "ok", "10000-29999")?;
    must_be(&["--snat-ports", "30000-30100"], "snat_ports", "warn", "node ports")?;
    node.netns().set_local_ports(20_000, 40_000)?;
    must_be(&[], "snat_ports", "warn", "ip_local_port_range")?;

    // Observe mode needs none of this.
    let observed = check(&["--mode", "observe"], "uplinks");
    must(observed.is_err(), || format!("{observed:?}"))
}
