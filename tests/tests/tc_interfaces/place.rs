//! A node with interfaces, and what the kernel says of them.

use std::{
    collections::{BTreeMap, HashMap as StdMap},
    fmt,
    net::IpAddr,
    process::Output,
};

use anyhow::{Context, Result};
use aya::{
    maps::{HashMap, Map},
    programs::loaded_programs,
};
use aya_obj::generated::bpf_attach_type::{BPF_TCX_EGRESS, BPF_TCX_INGRESS};
use lb_common::{
    addr::Addr,
    flow::{Interface, side},
    maps as names,
};
use lb_tests::{
    agent::{Node, must, until, web::pinned_map},
    bpf, tool,
};
use lb_user::lab::{Netns, link};
use serde_json::Value;

/// The address of the near end.
pub(super) const NEAR: &str = "203.0.113.5";
/// The router behind the far end.
pub(super) const ROUTER: &str = "203.0.113.1";

/// Runs a network tool in a namespace.
pub(super) fn tool(netns: &Netns, line: &str) -> Result<Output> {
    let (program, arguments) = line.split_once(' ').unwrap_or((line, ""));
    let arguments: Vec<&str> = arguments.split_whitespace().collect();
    tool::run(netns, program, &arguments)
}

/// Runs a network tool on the node.
pub(super) fn run(node: &Node, line: &str) -> Result<()> {
    tool(node.netns(), line).map(drop)
}

/// Gives the node an interface that leads somewhere; what it returns keeps the other end.
pub(super) fn add_pair(node: &Node, name: &str) -> Result<Netns> {
    let far = Netns::new()?;
    link::join((node.netns(), name), (&far, "far"))?;
    Ok(far)
}

/// Gives the node an uplink: `up0`, with an address and the default route.
pub(super) fn add_uplink(node: &Node) -> Result<Netns> {
    let far = add_pair(node, "up0")?;
    run(node, &format!("ip address add {NEAR}/24 dev up0"))?;
    route(node)?;
    Ok(far)
}

/// Sets the default route through `up0`.
pub(super) fn route(node: &Node) -> Result<()> {
    run(node, &format!("ip route add default via {ROUTER} dev up0"))
}

/// The index of the node's interface.
pub(super) fn index(node: &Node, name: &str) -> Result<u32> {
    Ok(link::index_of(node.netns(), name)?)
}

/// One attached program.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Attached {
    /// The program's name.
    pub(super) name: String,
    /// Its id in the kernel.
    pub(super) program: u32,
    /// What holds it there: the link's id, or the filter's priority and handle.
    pub(super) holder: String,
}

impl fmt::Display for Attached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// Whether this kernel's interfaces have links for programs.
pub(super) fn has_links() -> bool {
    use aya::util::KernelVersion;
    KernelVersion::current().is_ok_and(|version| version >= KernelVersion::new(6, 6, 0))
}

/// The programs of an interface, those of packets that come in first, each side in the order in which they run.
pub(super) fn attached(node: &Node, name: &str) -> Result<Vec<Attached>> {
    if !has_links() {
        return filters(node, name);
    }
    // One that goes while it is asked of is nobody's.
    let by_id: StdMap<u32, String> = loaded_programs()
        .flatten()
        .map(|program| (program.id(), program.name_as_str().unwrap_or_default().to_owned()))
        .collect();
    let index = index(node, name)?;
    let mut all = Vec::new();
    for hook in [BPF_TCX_INGRESS, BPF_TCX_EGRESS] {
        for (link, program) in node.netns().run(|| bpf::programs_of_interface(index, hook))?? {
            all.push(Attached {
                name: by_id.get(&program).cloned().unwrap_or_default(),
                program,
                holder: link.to_string(),
            });
        }
    }
    Ok(all)
}

fn filters(node: &Node, name: &str) -> Result<Vec<Attached>> {
    let mut all = Vec::new();
    for side in ["ingress", "egress"] {
        let output = tool(node.netns(), &format!("tc -j filter show dev {name} {side}"))?;
        let text = String::from_utf8(output.stdout)?;
        let entries: Vec<Value> = if text.trim().is_empty() {
            Vec::new()
        } else {
            serde_json::from_str(&text).with_context(|| text.clone())?
        };
        for entry in entries.iter().filter(|entry| entry["options"]["prog"].is_object()) {
            let (options, program) = (&entry["options"], &entry["options"]["prog"]);
            all.push(Attached {
                name: program["name"].as_str().context("a program has a name")?.to_owned(),
                program: u32::try_from(program["id"].as_u64().context("a program has an id")?)?,
                holder: format!("{}/{}/{}", options["bpf_name"], entry["pref"], options["handle"]),
            });
        }
    }
    Ok(all)
}

/// The names of what is attached.
pub(super) fn attached_names(node: &Node, name: &str) -> Result<Vec<String>> {
    Ok(attached(node, name)?.iter().map(ToString::to_string).collect())
}

/// Waits until exactly these programs are attached.
pub(super) fn wait_attached(node: &Node, name: &str, wanted: &[&str]) -> Result<()> {
    until(&format!("the programs of {name} to be {wanted:?}"), || {
        let found = attached_names(node, name)?;
        must(found == wanted, || format!("{found:?} are attached"))
    })
}

/// The translators behind an Ethernet header.
pub(super) const TRANSLATORS: [&str; 2] = ["lb_ingress", "lb_egress"];

/// What the programs know of interfaces, by index.
pub(super) fn described(node: &Node) -> Result<BTreeMap<u32, Interface>> {
    let map: HashMap<_, u32, Interface> = HashMap::try_from(Map::HashMap(pinned_map(node, names::INTERFACES)?))?;
    Ok(map.iter().collect::<Result<_, _>>()?)
}

/// Describes interfaces that are not there, until no more find room; returns how many did.
pub(super) fn describe_strangers(node: &Node) -> Result<usize> {
    let mut map: HashMap<_, u32, Interface> = HashMap::try_from(Map::HashMap(pinned_map(node, names::INTERFACES)?))?;
    let indices = 1_000_000..1_000_000 + 2 * names::MAX_INTERFACES;
    Ok(indices
        .take_while(|index| map.insert(index, uplink(NEAR, ""), 0).is_ok())
        .count())
}

/// Waits until exactly these interfaces are described.
pub(super) fn wait_described(node: &Node, wanted: &[(u32, Interface)]) -> Result<()> {
    let wanted: BTreeMap<u32, Interface> = wanted.iter().copied().collect();
    until("the interfaces to be described", || {
        let found = described(node)?;
        must(found == wanted, || format!("{found:?} are there, not {wanted:?}"))
    })
}

/// A description; an empty text is no address.
pub(super) fn interface(v4: &str, v6: &str, side: u32) -> Interface {
    let addr = |text: &str| text.parse::<IpAddr>().map(Addr::from).unwrap_or_default();
    Interface {
        v4: addr(v4),
        v6: addr(v6),
        side,
        pad: 0,
    }
}

/// The description of an uplink.
pub(super) fn uplink(v4: &str, v6: &str) -> Interface {
    interface(v4, v6, side::UPLINK)
}

/// Names of pinned links of interfaces.
pub(super) fn pinned_links(node: &Node) -> Result<Vec<String>> {
    let mut links: Vec<String> = std::fs::read_dir(node.own_pins())?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<Result<_>>()?;
    links.retain(|name| {
        ["link-lb_", "link-raw_", "link-tc_"]
            .iter()
            .any(|kind| name.starts_with(kind))
    });
    links.sort();
    Ok(links)
}
