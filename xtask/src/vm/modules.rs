//! Which kernel modules the guest loads, in an order in which each finds what it needs.
//!
//! Dependencies are read from the modules themselves, since an unpacked package has no `modules.dep`. The invariant: a
//! module comes after all that it depends on.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::command;

/// What the tests and the reference proxies use. A kernel that has one built in, or not at all, is asked no further:
/// the test that needs it says what is missing.
const WANTED: &[&str] = &[
    "veth",
    "dummy",
    "bridge",
    "8021q",
    "tun",
    "nf_conntrack",
    "nf_nat",
    "nf_tables",
    "nft_chain_nat",
    "nft_nat",
    "nft_ct",
    "nft_numgen",
    "nft_hash",
    "nft_masq",
    "nft_redir",
    "nft_reject",
    "nft_reject_inet",
    "nft_reject_ipv4",
    "nft_reject_ipv6",
    "nft_limit",
    "nft_fib",
    "nft_fib_ipv4",
    "nft_fib_ipv6",
    "nft_fib_inet",
    "nft_objref",
    "nft_counter",
    "nf_conntrack_netlink",
    "ip_vs",
    "ip_vs_rr",
    "ip_vs_wrr",
    "ip_vs_sh",
    "ip_vs_lc",
    "sch_ingress",
    "cls_bpf",
    "act_bpf",
    "act_mirred",
    "act_gact",
    "sch_netem",
    "inet_diag",
    "tcp_diag",
    "udp_diag",
    "raw_diag",
    "unix_diag",
];

/// What kube-proxy's rules use besides, in its modes with iptables and with IPVS.
pub(crate) const KUBE_PROXY: &[&str] = &[
    "x_tables",
    "nft_compat",
    "xt_addrtype",
    "xt_comment",
    "xt_conntrack",
    "xt_mark",
    "xt_MASQUERADE",
    "xt_nat",
    "xt_nfacct",
    "xt_set",
    "xt_statistic",
    "xt_tcpudp",
    "ipt_REJECT",
    "ip6t_REJECT",
    "ip_set",
    "ip_set_bitmap_port",
    "ip_set_hash_ip",
    "ip_set_hash_ipport",
    "ip_set_hash_ipportip",
    "ip_set_hash_ipportnet",
];

/// A module's name and its uncompressed content.
pub(crate) struct Module {
    pub(crate) name: String,
    pub(crate) content: Vec<u8>,
}

/// Reads the wanted modules, these others and all they depend on, in loading order.
pub(crate) fn in_order(folder: &Path, others: &[&str]) -> Result<Vec<Module>> {
    let mut files = BTreeMap::new();
    index(&folder.join("kernel"), &mut files)?;
    let mut order = Vec::new();
    let mut seen = BTreeSet::new();
    for name in WANTED.iter().chain(others) {
        visit(name, &files, &mut seen, &mut order)?;
    }
    Ok(order)
}

fn visit(
    name: &str,
    files: &BTreeMap<String, PathBuf>,
    seen: &mut BTreeSet<String>,
    order: &mut Vec<Module>,
) -> Result<()> {
    let Some(file) = files.get(name) else {
        return Ok(());
    };
    if !seen.insert(name.to_owned()) {
        return Ok(());
    }
    let content = read(file)?;
    for dependency in dependencies(&content) {
        visit(&dependency, files, seen, order)?;
    }
    order.push(Module {
        name: name.to_owned(),
        content,
    });
    Ok(())
}

/// Maps module names, as the kernel writes them, to files.
fn index(folder: &Path, files: &mut BTreeMap<String, PathBuf>) -> Result<()> {
    let entries = fs::read_dir(folder).with_context(|| format!("read {}", folder.display()))?;
    for entry in entries {
        let path = entry.with_context(|| format!("read {}", folder.display()))?.path();
        if path.is_dir() {
            index(&path, files)?;
        } else if let Some((stem, _)) = path
            .file_name()
            .and_then(|name| name.to_str())
            .and_then(|name| name.split_once(".ko"))
        {
            files.insert(stem.replace('-', "_"), path);
        }
    }
    Ok(())
}

fn read(file: &Path) -> Result<Vec<u8>> {
    match file.extension().and_then(|extension| extension.to_str()) {
        Some("ko") => fs::read(file).with_context(|| format!("read {}", file.display())),
        Some("xz") => {
            let mut xz = Command::new("xz");
            xz.arg("-dc").arg(file);
            let output = xz.output().context("cannot start `xz`")?;
            if !output.status.success() {
                bail!("`{}` failed on a file of the cached kernel", command::shown(&xz));
            }
            Ok(output.stdout)
        }
        _ => bail!("{} is packed in an unknown way", file.display()),
    }
}

/// The names in a module's own `depends=` record (strings of its `.modinfo` section, each ended by a zero).
fn dependencies(content: &[u8]) -> Vec<String> {
    const RECORD: &[u8] = b"\0depends=";
    let Some(at) = content.windows(RECORD.len()).position(|window| window == RECORD) else {
        return Vec::new();
    };
    let rest = &content[at + RECORD.len()..];
    let end = rest.iter().position(|byte| *byte == 0).unwrap_or(0);
    String::from_utf8_lossy(&rest[..end])
        .split(',')
        .filter(|name| !name.is_empty())
        .map(|name| name.replace('-', "_"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::dependencies;

    #[test]
    fn dependencies_are_read_from_the_record() {
        let module = b"\x7fELF..license=GPL\0depends=nf-conntrack,libcrc32c\0retpoline=Y\0";
        assert_eq!(dependencies(module), ["nf_conntrack", "libcrc32c"]);
        assert!(dependencies(b"license=GPL\0depends=\0").is_empty());
        assert!(dependencies(b"license=GPL\0").is_empty());
    }
}
