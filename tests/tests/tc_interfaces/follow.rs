//! Interfaces that come, go and change.

use anyhow::Result;
use lb_common::flow::side;
use lb_tests::{
    agent::{NODE_V4, NODE_V6, Node, must, until},
    runner::skip,
};
use lb_user::view::InterfaceSide;

use crate::place::{
    NEAR, TRANSLATORS, add_pair, add_uplink, attached, attached_names, index, interface, pinned_links, route, run,
    uplink, wait_attached, wait_described,
};

pub(super) fn found(node: &Node) -> Result<()> {
    let _far = add_uplink(node)?;
    let _other = add_pair(node, "idle0")?;
    let agent = node.start(&[])?;
    // Where it is ready, it translates.
    let names = attached_names(node, "up0")?;
    must(names == TRANSLATORS, || format!("{names:?}"))?;
    wait_described(node, &[(index(node, "up0")?, uplink(NEAR, NODE_V6))])?;
    let none = attached(node, "idle0")?;
    must(none.is_empty(), || format!("{none:?}"))?;
    let none = attached(node, "lo")?;
    must(none.is_empty(), || format!("{none:?}"))?;

    let status = agent.status()?;
    let [shown] = &status.interfaces[..] else {
        anyhow::bail!("{:?}", status.interfaces);
    };
    let addresses: Vec<String> = shown.addresses.iter().map(ToString::to_string).collect();
    must(
        (shown.name.as_str(), shown.side) == ("up0", InterfaceSide::Uplink)
            && shown.index == Some(index(node, "up0")?)
            && addresses == [NEAR, NODE_V6]
            && shown.reason.as_deref() == Some("has a default route")
            && shown.problem.is_none(),
        || format!("{shown:?}"),
    )?;
    for program in TRANSLATORS {
        let shown = status.programs.iter().find(|shown| shown.name == program);
        must(
            shown.is_some_and(|shown| shown.attached && shown.target == "up0"),
            || format!("{shown:?}"),
        )?;
    }
    agent.stop()
}

pub(super) fn down_and_up(node: &Node) -> Result<()> {
    let _far = add_uplink(node)?;
    let agent = node.start(&[])?;
    wait_attached(node, "up0", &TRANSLATORS)?;
    let before = attached(node, "up0")?;
    let shown_as = |reason: &str| {
        until("the agent to look", || {
            let shown = agent.status()?.interfaces;
            must(shown.len() == 1 && shown[0].reason.as_deref() == Some(reason), || {
                format!("{shown:?}")
            })
        })
    };
    // Its route goes with it; connections that are under way outlast that.
    run(node, "ip link set up0 down")?;
    shown_as("was an uplink until a moment ago")?;
    let meanwhile = attached(node, "up0")?;
    must(before == meanwhile, || format!("{before:?} became {meanwhile:?}"))?;
    run(node, "ip link set up0 up")?;
    route(node)?;
    shown_as("has a default route")?;
    let after = attached(node, "up0")?;
    must(before == after, || format!("{before:?} became {after:?}"))?;
    wait_described(node, &[(index(node, "up0")?, uplink(NEAR, NODE_V6))])?;
    agent.stop()
}

pub(super) fn address(node: &Node) -> Result<()> {
    let _far = add_uplink(node)?;
    let agent = node.start(&[])?;
    let up = index(node, "up0")?;
    wait_described(node, &[(up, uplink(NEAR, NODE_V6))])?;
    let before = attached(node, "up0")?;
    run(node, "ip address add 2001:db8:7::5/64 dev up0 nodad")?;
    wait_described(node, &[(up, uplink(NEAR, "2001:db8:7::5"))])?;
    // The node's own address there wins over what was there before.
    run(node, &format!("ip address add {NODE_V4}/32 dev up0"))?;
    wait_described(node, &[(up, uplink(NODE_V4, "2001:db8:7::5"))])?;
    run(node, &format!("ip address del {NODE_V4}/32 dev up0"))?;
    run(node, "ip address del 2001:db8:7::5/64 dev up0")?;
    wait_described(node, &[(up, uplink(NEAR, NODE_V6))])?;
    let after = attached(node, "up0")?;
    must(before == after, || format!("{before:?} became {after:?}"))?;
    agent.stop()
}

pub(super) fn vlan(node: &Node) -> Result<()> {
    let _far = add_uplink(node)?;
    let agent = node.start(&[])?;
    wait_attached(node, "up0", &TRANSLATORS)?;
    // Where there are no VLAN devices, another one with such a name: its dot is not for file systems of pins.
    let _tagged = match run(node, "ip link add link up0 name up0.7 type vlan id 7") {
        Ok(()) => None,
        Err(_) => Some(add_pair(node, "up0.7")?),
    };
    run(node, "ip link set up0.7 up")?;
    run(node, &format!("ip address add {NODE_V4}/32 dev up0.7"))?;
    wait_attached(node, "up0.7", &TRANSLATORS)?;
    let (up, tagged) = (index(node, "up0")?, index(node, "up0.7")?);
    wait_described(node, &[(up, uplink(NEAR, NODE_V6)), (tagged, uplink(NODE_V4, NODE_V6))])?;
    run(node, "ip link del up0.7")?;
    wait_described(node, &[(up, uplink(NEAR, NODE_V6))])?;
    until("its pins to go", || {
        let gone = pinned_links(node)?;
        must(!gone.iter().any(|link| link.ends_with(&format!("-{tagged}"))), || {
            format!("{gone:?}")
        })
    })?;
    wait_attached(node, "up0", &TRANSLATORS)?;
    agent.stop()
}

pub(super) fn bridge(node: &Node) -> Result<()> {
    let _far = add_uplink(node)?;
    run(node, "ip link add br0 type bridge").map_err(|error| skip(format!("this kernel has no bridges ({error})")))?;
    let agent = node.start(&[])?;
    wait_attached(node, "up0", &TRANSLATORS)?;
    // The uplink becomes a port, and its address and route move to the bridge, as a node's set-up does it.
    run(node, "ip link set up0 master br0")?;
    wait_attached(node, "up0", &[])?;
    run(node, &format!("ip address del {NEAR}/24 dev up0"))?;
    run(node, "ip link set br0 up")?;
    run(node, &format!("ip address add {NEAR}/24 dev br0"))?;
    run(node, "ip route add default dev br0")?;
    wait_attached(node, "br0", &TRANSLATORS)?;
    wait_attached(node, "up0", &[])?;
    wait_described(node, &[(index(node, "br0")?, uplink(NEAR, NODE_V6))])?;
    agent.stop()
}

pub(super) fn awaited(node: &Node) -> Result<()> {
    let _far = add_uplink(node)?;
    let agent = node.start(&["--uplink", "later0"])?;
    wait_described(node, &[])?;
    let missing = agent.status()?.interfaces;
    must(
        missing.len() == 1 && missing[0].name == "later0" && missing[0].problem.is_some(),
        || format!("{missing:?}"),
    )?;
    let _later = add_pair(node, "later0")?;
    wait_attached(node, "later0", &TRANSLATORS)?;
    // A name is a name, whatever the interface's state.
    run(node, "ip link set later0 down")?;
    wait_described(node, &[(index(node, "later0")?, uplink(NODE_V4, NODE_V6))])?;
    let none = attached(node, "up0")?;
    must(none.is_empty(), || format!("{none:?}"))?;
    agent.stop()
}

pub(super) fn renamed_guest(node: &Node) -> Result<()> {
    let _guest = add_pair(node, "gst0")?;
    let _other = add_pair(node, "other0")?;
    run(node, "ip address add 198.51.100.1/24 dev gst0")?;
    let agent = node.start(&["--uplink", "none", "--guest-interface", "gst*,tap*"])?;
    wait_attached(node, "gst0", &TRANSLATORS)?;
    let guest = index(node, "gst0")?;
    let wanted = [(guest, interface("198.51.100.1", NODE_V6, side::GUEST))];
    wait_described(node, &wanted)?;
    let before = attached(node, "gst0")?;
    let pins = pinned_links(node)?;
    run(node, "ip link set gst0 down")?;
    run(node, "ip link set gst0 name gst.9")?;
    run(node, "ip link set gst.9 up")?;
    until("the new name to be known", || {
        let shown = agent.status()?.interfaces;
        must(shown.len() == 1 && shown[0].name == "gst.9", || format!("{shown:?}"))
    })?;
    let after = attached(node, "gst.9")?;
    must(before == after && after.len() == 2, || {
        format!("{before:?} became {after:?}")
    })?;
    let still = pinned_links(node)?;
    must(pins == still, || format!("{pins:?} became {still:?}"))?;
    // A name that no pattern means ends it.
    run(node, "ip link set gst.9 down")?;
    run(node, "ip link set gst.9 name plain0")?;
    wait_attached(node, "plain0", &[])?;
    wait_described(node, &[])?;
    let none = attached(node, "other0")?;
    must(none.is_empty(), || format!("{none:?}"))?;
    agent.stop()
}

pub(super) fn raw(node: &Node) -> Result<()> {
    run(node, "ip tuntap add mode tun name tun0")
        .map_err(|error| skip(format!("this kernel has no tun devices ({error})")))?;
    run(node, "ip link set tun0 up")?;
    run(node, &format!("ip address add {NODE_V4}/32 dev tun0"))?;
    let agent = node.start(&[])?;
    wait_attached(node, "tun0", &["raw_ingress", "raw_egress"])?;
    wait_described(node, &[(index(node, "tun0")?, uplink(NODE_V4, NODE_V6))])?;
    agent.stop()
}
