//! What a node's network has, as far as anybody could have changed it: rules, settings, addresses, routes, listeners, hooks.
//!
//! Left out is what moves by itself: counters, the number of tracked connections, neighbours. Sockets of the Unix family
//! are no listeners of the network.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::Path,
    process::Command,
};

use anyhow::{Context, Result, ensure};
use aya_obj::generated::bpf_attach_type;
use lb_tests::{
    agent::{Node, must},
    bpf,
};
use lb_user::lab::link;

/// A setting that is a count.
const COUNTS: &str = "nf_conntrack_count";

/// Everything, by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Snapshot {
    values: BTreeMap<String, String>,
    listeners: BTreeSet<String>,
}

impl Snapshot {
    pub(crate) fn take(node: &Node) -> Result<Self> {
        let mut values = BTreeMap::new();
        for words in [
            &["nft", "-s", "list", "ruleset"][..],
            &["iptables-save"],
            &["ip6tables-save"],
            &["ip", "-j", "addr", "show"],
            &["ip", "-j", "-d", "link", "show"],
            &["ip", "-4", "-j", "route", "show", "table", "all"],
            &["ip", "-6", "-j", "route", "show", "table", "all"],
            &["ip", "-4", "-j", "rule", "show"],
            &["ip", "-6", "-j", "rule", "show"],
        ] {
            if let Some(said) = said(node, words)? {
                values.insert(words.join(" "), said);
            }
        }
        let (settings, listeners) = node.netns().run(|| -> Result<_> {
            let mut settings = BTreeMap::new();
            // The kernel shows the settings of the reader's own namespace.
            read_settings(Path::new("/proc/sys/net"), &mut settings).context("read /proc/sys/net")?;
            Ok((settings, listeners()?))
        })??;
        values.extend(settings);
        Ok(Self { values, listeners })
    }

    pub(crate) fn len(&self) -> usize {
        self.values.len()
    }
}

/// Whether the kernel has finished with the addresses that it gives devices by itself.
pub(crate) fn is_settled(node: &Node) -> Result<()> {
    let addresses = said(node, &["ip", "-j", "addr", "show"])?.context("there is no ip")?;
    must(!addresses.contains("tentative"), || addresses.clone())
}

/// The names of what differs; listeners that came or went with `+` and `-`.
pub(crate) fn difference(before: &Snapshot, after: &Snapshot) -> Vec<String> {
    let names: BTreeSet<&String> = before.values.keys().chain(after.values.keys()).collect();
    let changed = names
        .into_iter()
        .filter(|name| before.values.get(*name) != after.values.get(*name))
        .map(|name| {
            let of = |side: &Snapshot| side.values.get(name).cloned().unwrap_or_default();
            format!("{name}: {} became {}", of(before), of(after))
        });
    let came = after.listeners.difference(&before.listeners).map(|l| format!("+ {l}"));
    let went = before.listeners.difference(&after.listeners).map(|l| format!("- {l}"));
    changed.chain(came).chain(went).collect()
}

/// What a program prints in the node's namespace, without counters and dates; none where it is not installed.
fn said(node: &Node, words: &[&str]) -> Result<Option<String>> {
    let (program, arguments) = words.split_first().context("a command")?;
    let mut command = Command::new(program);
    command.args(arguments);
    let output = match node.netns().place(&mut command).output() {
        Ok(output) => output,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("start {program}")),
    };
    ensure!(
        output.status.success(),
        "{words:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let text = String::from_utf8(output.stdout)?;
    let lines: Vec<&str> = text
        .lines()
        .filter(|line| !line.starts_with('#'))
        // A chain's policy stands before its counters.
        .map(|line| {
            line.split_once(" [")
                .filter(|_| line.starts_with(':'))
                .map_or(line, |(kept, _)| kept)
        })
        .collect();
    Ok(Some(lines.join("\n")))
}

/// All settings below a folder; what cannot be read is as good as any value.
fn read_settings(folder: &Path, into: &mut BTreeMap<String, String>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            read_settings(&path, into)?;
        } else if entry.file_name() != COUNTS {
            let value = fs::read_to_string(&path).unwrap_or_else(|error| format!("({})", error.kind()));
            into.insert(path.display().to_string(), value);
        }
    }
    Ok(())
}

/// Where anybody listens, as the kernel writes addresses: TCP in LISTEN, and UDP, raw and packet sockets of any kind.
fn listeners() -> Result<BTreeSet<String>> {
    const LISTEN: &str = "0A";
    let mut found = BTreeSet::new();
    for family in ["tcp", "tcp6", "udp", "udp6", "raw", "raw6", "packet"] {
        let path = format!("/proc/thread-self/net/{family}");
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error).context(path),
        };
        for line in text.lines().skip(1) {
            let columns: Vec<&str> = line.split_whitespace().collect();
            let (Some(address), Some(state)) = (columns.get(1), columns.get(3)) else {
                continue;
            };
            if !family.starts_with("tcp") || *state == LISTEN {
                found.insert(format!("{family} {address}"));
            }
        }
    }
    Ok(found)
}

/// Which programs are attached where packets and sockets pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hooks {
    /// The cgroup's hooks that have programs.
    pub(crate) cgroup: Vec<&'static str>,
    /// Programs on each interface, inwards and outwards.
    interfaces: BTreeMap<String, [u32; 2]>,
    /// Queueing disciplines and filters.
    traffic_control: String,
}

impl Hooks {
    pub(crate) fn look(node: &Node) -> Result<Self> {
        let mut interfaces = BTreeMap::new();
        let mut traffic_control = said(node, &["tc", "qdisc", "show"])?.unwrap_or_default();
        for name in ["lo", lb_tests::beside::UPLINK] {
            let index = link::index_of(node.netns(), name)?;
            let counts = node.netns().run(|| -> io::Result<[u32; 2]> {
                Ok([
                    bpf::attached_to_interface(index, bpf_attach_type::BPF_TCX_INGRESS)?,
                    bpf::attached_to_interface(index, bpf_attach_type::BPF_TCX_EGRESS)?,
                ])
            })??;
            interfaces.insert(name.to_owned(), counts);
            for direction in ["ingress", "egress"] {
                let filters = said(node, &["tc", "filter", "show", "dev", name, direction])?;
                traffic_control += &filters.unwrap_or_default();
            }
        }
        Ok(Self {
            cgroup: bpf::attached_hooks(node.cgroup().path())?,
            interfaces,
            traffic_control,
        })
    }

    /// Whether nothing is attached.
    pub(crate) fn is_bare(&self) -> bool {
        self.cgroup.is_empty() && self.interfaces.values().all(|counts| *counts == [0, 0])
    }

    /// Whether programs are attached in both directions of each interface, by TCX or as filters.
    pub(crate) fn sees_packets(&self) -> bool {
        let by_tcx = self.interfaces.values().all(|counts| *counts == [1, 1]);
        by_tcx || self.traffic_control.contains("bpf")
    }
}
