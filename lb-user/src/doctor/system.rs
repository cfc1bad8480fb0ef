//! The kernel's version and configuration, file systems, capabilities, and the settings that decide about port reuse.

use std::{fs, path::Path};

use super::{Check, Plan, State};
use crate::{config, node::settings::Sysctls};

pub(super) fn examine(plan: &Plan) -> Vec<Check> {
    vec![
        kernel(&release()),
        btf(Path::new("/sys/kernel/btf/vmlinux")),
        cgroup(plan),
        bpffs(&plan.bpffs),
        capabilities(&fs::read_to_string("/proc/self/status").unwrap_or_default()),
        jit(read("/proc/sys/net/core/bpf_jit_enable").as_deref()),
    ]
}

/// Settings that the agent leaves alone, and that explain what its numbers show.
pub(super) fn neighbours() -> Vec<Check> {
    let sysctls = Sysctls::read();
    vec![
        ports(&sysctls),
        tw_reuse(sysctls.tw_reuse.as_deref()),
        conn_reuse(sysctls.conn_reuse_mode.as_deref()),
        nfs(&release()),
    ]
}

fn read(path: &str) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn release() -> String {
    read("/proc/sys/kernel/osrelease").unwrap_or_default()
}

/// Major and minor number of a kernel's release.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

fn kernel(release: &str) -> Check {
    let state = match version(release) {
        Some(version) if version >= (6, 1) => State::Ok,
        _ => State::Fail,
    };
    Check::new(
        "kernel",
        state,
        release,
        "6.1 or newer",
        "upgrade the node's kernel: older ones lack bpf_set_retval at the connect hooks",
    )
}

fn btf(path: &Path) -> Check {
    let (state, found) = if path.exists() {
        (State::Ok, path.display().to_string())
    } else {
        (State::Fail, "absent".to_owned())
    };
    Check::new(
        "btf",
        state,
        found,
        "/sys/kernel/btf/vmlinux",
        "use a kernel built with CONFIG_DEBUG_INFO_BTF",
    )
}

fn cgroup(plan: &Plan) -> Check {
    let wanted = "a cgroup v2 directory";
    let path = match &plan.cgroup {
        Some(path) => Ok(path.clone()),
        None => config::cgroup2_root(),
    };
    let path = match path {
        Ok(path) => path,
        Err(error) => {
            return Check::new(
                "cgroup2",
                State::Fail,
                error.to_string(),
                wanted,
                "mount -t cgroup2 none /sys/fs/cgroup",
            );
        }
    };
    match config::is_cgroup2(&path) {
        Ok(true) => Check::new("cgroup2", State::Ok, path.display().to_string(), wanted, ""),
        Ok(false) => Check::new(
            "cgroup2",
            State::Fail,
            format!("{} is not on cgroup v2", path.display()),
            wanted,
            "name a directory of the cgroup v2 hierarchy with --cgroup",
        ),
        Err(error) => Check::new(
            "cgroup2",
            State::Fail,
            format!("{}: {error}", path.display()),
            wanted,
            "name a directory that exists with --cgroup",
        ),
    }
}

fn bpffs(path: &Path) -> Check {
    let mount = format!("mount -t bpf bpf {}", path.display());
    let (state, found) = match nix::sys::statfs::statfs(path) {
        Ok(found) if found.filesystem_type() == nix::sys::statfs::BPF_FS_MAGIC => {
            (State::Ok, path.display().to_string())
        }
        Ok(_) => (State::Fail, format!("{} is another file system", path.display())),
        Err(error) => (State::Fail, format!("{}: {}", path.display(), error.desc())),
    };
    Check::new("bpffs", state, found, "a mounted BPF file system", &mount)
}

/// The capabilities that the agent needs, with their numbers in the kernel.
const CAPABILITIES: [(&str, u32); 3] = [("CAP_NET_ADMIN", 12), ("CAP_PERFMON", 38), ("CAP_BPF", 39)];

fn capabilities(status: &str) -> Check {
    let effective = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0);
    let named = |held: bool| {
        let names: Vec<&str> = CAPABILITIES
            .iter()
            .filter(|&&(_, bit)| (effective & (1 << bit) != 0) == held)
            .map(|&(name, _)| name)
            .collect();
        names.join(", ")
    };
    let wanted = "CAP_BPF, CAP_NET_ADMIN, CAP_PERFMON";
    let missing = named(false);
    if missing.is_empty() {
        Check::new("capabilities", State::Ok, named(true), wanted, "")
    } else {
        Check::new(
            "capabilities",
            State::Fail,
            format!("missing {missing}"),
            wanted,
            "run as root, or add the missing capabilities to the container",
        )
    }
}

fn jit(setting: Option<&str>) -> Check {
    let wanted = "net.core.bpf_jit_enable is 1";
    match setting {
        Some("1" | "2") => Check::new("jit", State::Ok, "on", wanted, ""),
        Some("0") => Check::new(
            "jit",
            State::Warn,
            "off: programs are interpreted",
            wanted,
            "sysctl -w net.core.bpf_jit_enable=1",
        ),
        // The setting belongs to the first network namespace alone.
        _ => Check::new(
            "jit",
            State::Warn,
            "not visible from this network namespace",
            wanted,
            "run the doctor in the host's network namespace",
        ),
    }
}

fn ports(sysctls: &Sysctls) -> Check {
    let id = "sysctl.ip_local_port_range";
    let wanted = "10000 or more source ports";
    match (sysctls.local_ports(), sysctls.usable_ports()) {
        (Some(range), Some(count)) => {
            let state = if count >= 10_000 { State::Ok } else { State::Warn };
            Check::new(
                id,
                state,
                format!("{} to {}: {count} ports", range.start(), range.end()),
                wanted,
                "few ports are reused soon: widen the range, or expect reuse within TIME_WAIT",
            )
        }
        _ => Check::new(
            id,
            State::Warn,
            "cannot be read",
            wanted,
            "run the doctor in the host's network namespace",
        ),
    }
}

fn tw_reuse(setting: Option<&str>) -> Check {
    let found = match setting {
        Some("0") => "0: a port waits 60 s after a close by the client",
        Some("1") => "1: a port can be used again 1 s after a close by the client",
        Some("2") => "2: as 1, on loopback only",
        _ => "cannot be read",
    };
    // For the reader's eyes: each value is sound, and says how soon ports come back.
    Check::new(
        "sysctl.tcp_tw_reuse",
        State::Ok,
        found,
        "any; it decides how soon source ports come back",
        "",
    )
}

fn conn_reuse(setting: Option<&str>) -> Check {
    let id = "sysctl.ipvs_conn_reuse_mode";
    let wanted = "IPVS not loaded, or net.ipv4.vs.conn_reuse_mode=1";
    match setting {
        None => Check::new(id, State::Ok, "IPVS not loaded", wanted, ""),
        Some("0") => Check::new(
            id,
            State::Warn,
            "0: a reused source port is pinned to its old backend",
            wanted,
            "new backends starve under IPVS: set it to 1 (kernel 5.9 or newer), or let Evenkeel balance",
        ),
        Some(other) => Check::new(id, State::Ok, other, wanted, ""),
    }
}

fn nfs(release: &str) -> Check {
    let wanted = "6.6 or newer, or a kernel with commit 0bdf399342c5";
    let state = match version(release) {
        Some(version) if version >= (6, 6) => State::Ok,
        _ => State::Warn,
    };
    Check::new(
        "kernel.nfs",
        state,
        release,
        wanted,
        "an NFS mount on a Service's address may break when it reconnects: mount by an endpoint's address, or check for the backport",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_distributions_write_them() {
        assert_eq!(version("6.1.0-31-cloud-amd64"), Some((6, 1)));
        assert_eq!(version("6.18.44-rc1+"), Some((6, 18)));
        assert_eq!(version("5.15"), Some((5, 15)));
        assert_eq!(version(""), None);
        assert_eq!(version("linux"), None);
    }

    #[test]
    fn the_oldest_kernel_is_six_one() {
        assert_eq!(kernel("6.1.0-31-cloud-amd64").state, State::Ok);
        assert_eq!(kernel("6.12.9").state, State::Ok);
        assert_eq!(kernel("10.0.0").state, State::Ok);
        assert_eq!(kernel("5.19.17").state, State::Fail);
        assert_eq!(kernel("6.0.19").state, State::Fail);
        assert_eq!(kernel("unknown").state, State::Fail);
        assert!(kernel("6.12.9").hint.is_empty());
        assert!(!kernel("5.4.0").hint.is_empty());
    }

    #[test]
    fn missing_capabilities_are_named() {
        let all = "Name:\tx\nCapEff:\t000001ffffffffff\n";
        assert_eq!(capabilities(all).state, State::Ok);
        let no_perfmon = "CapEff:\t0000008000001000\n";
        let found = capabilities(no_perfmon);
        assert_eq!(
            (found.state, found.found.as_str()),
            (State::Fail, "missing CAP_PERFMON")
        );
        assert_eq!(capabilities("").state, State::Fail);
    }

    #[test]
    fn settings_are_judged() {
        let ports = |range: &str| {
            ports(&Sysctls {
                local_ports: Some(range.to_owned()),
                ..Sysctls::default()
            })
        };
        assert_eq!(ports("32768\t60999").found, "32768 to 60999: 28232 ports");
        assert_eq!(ports("32768 60999").state, State::Ok);
        assert_eq!(ports("40000 40199").state, State::Warn);
        assert_eq!(ports("junk").state, State::Warn);
        assert_eq!(ports("60999 32768").state, State::Warn);
        assert_eq!(conn_reuse(Some("0")).state, State::Warn);
        assert_eq!(conn_reuse(Some("1")).state, State::Ok);
        assert_eq!(conn_reuse(None).state, State::Ok);
        assert_eq!(jit(Some("0")).state, State::Warn);
        assert_eq!(jit(Some("1")).state, State::Ok);
        assert_eq!(nfs("6.1.0-31").state, State::Warn);
        assert_eq!(nfs("6.6.1").state, State::Ok);
    }

    #[test]
    fn what_is_not_a_cgroup_or_bpf_file_system_fails() {
        let folder = tempfile::tempdir().expect("a folder");
        assert_eq!(bpffs(folder.path()).state, State::Fail);
        assert_eq!(bpffs(&folder.path().join("absent")).state, State::Fail);
        let plan = |cgroup: &Path| Plan {
            mode: crate::view::Mode::Balance,
            bpffs: folder.path().to_owned(),
            cgroup: Some(cgroup.to_owned()),
            uplinks: config::Uplinks::None,
            guests: Vec::new(),
            node_addresses: Vec::new(),
            snat_ports: config::PortRange::default(),
        };
        assert_eq!(cgroup(&plan(folder.path())).state, State::Fail);
        assert_eq!(cgroup(&plan(&folder.path().join("absent"))).state, State::Fail);
        assert_eq!(btf(&folder.path().join("absent")).state, State::Fail);
    }
}
