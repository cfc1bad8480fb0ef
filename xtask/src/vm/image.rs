//! What a guest holds and what it does.
//!
//! The guest is busybox, the given programs with the libraries they name, the network tools, the kernel's modules and
//! an init script that runs the given commands one after the other. The invariant: whatever a command does, the script
//! goes on, and ends with its last status and the power off.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::archive::Archive;
use super::{MARK, modules};
use crate::command;
use crate::layout::find_program;
use crate::setup::GuestKernel;

/// A program of the host that the guest gets.
#[derive(Debug, Clone)]
pub(crate) struct Program {
    /// Where it lies here.
    pub(crate) host: PathBuf,
    /// Where it lies in the guest.
    pub(crate) guest: PathBuf,
}

/// Tools besides busybox, at a place that its applets of the same name do not hide.
const TOOLS: &[&str] = &["ip", "tc", "nft", "ipvsadm", "ss"];
/// What kube-proxy runs besides.
const KUBE_PROXY_TOOLS: &[&str] = &[
    "ipset",
    "iptables",
    "iptables-restore",
    "iptables-save",
    "ip6tables",
    "ip6tables-restore",
    "ip6tables-save",
];
/// Where iptables has its matches and targets, by distribution; it loads them by this path.
const XTABLES: &[&str] = &[
    "/usr/lib/x86_64-linux-gnu/xtables",
    "/usr/lib64/xtables",
    "/usr/lib/xtables",
];
/// Where a guest has kube-proxy.
const KUBE_PROXY: &str = "/kubernetes/kube-proxy";

/// What a guest holds and does.
#[derive(Debug)]
pub(crate) struct Image {
    programs: Vec<Program>,
    modules: &'static [&'static str],
    commands: String,
}

impl Image {
    /// A guest that holds the programs and does nothing yet.
    pub(crate) fn new(programs: Vec<Program>) -> Self {
        Self {
            programs,
            modules: &[],
            commands: String::new(),
        }
    }

    /// Gives the guest kube-proxy and all that it runs; the suites and the bench find it there.
    pub(crate) fn add_kube_proxy(&mut self, control_plane: &Path) -> Result<()> {
        self.programs.push(Program {
            host: control_plane.join("kube-proxy"),
            guest: PathBuf::from(KUBE_PROXY),
        });
        for tool in KUBE_PROXY_TOOLS {
            // A missing one shows in what kube-proxy says.
            if let Some(host) = find_program(tool) {
                let guest = Path::new("/sbin").join(tool);
                self.programs.push(Program { host, guest });
            }
        }
        for folder in XTABLES.iter().map(Path::new).filter(|folder| folder.is_dir()) {
            for entry in fs::read_dir(folder).with_context(|| format!("read {}", folder.display()))? {
                let host = entry.with_context(|| format!("read {}", folder.display()))?.path();
                self.programs.push(Program {
                    guest: host.clone(),
                    host,
                });
            }
        }
        self.modules = modules::KUBE_PROXY;
        Ok(())
    }

    /// Runs a shell command as the next one.
    pub(crate) fn run(&mut self, command: &str) {
        let _ = writeln!(self.commands, "{command}\ncode=$?");
    }

    /// Runs a test suite as the next command: between marks, and killed if it takes too long.
    pub(crate) fn run_suite(&mut self, name: &str, command: &str, seconds: u64) {
        let _ = writeln!(
            self.commands,
            "printf '\\n{MARK} begin {name}\\n'\n\
             timeout -s KILL {seconds} {command} 2>&1\ncode=$?\n\
             printf '\\n{MARK} end {name} %s\\n' $code"
        );
    }

    /// Makes the archive that the kernel unpacks and starts.
    pub(crate) fn pack(&self, kernel: &GuestKernel) -> Result<Vec<u8>> {
        let mut archive = Archive::default();
        for folder in [
            "/bin", "/dev", "/proc", "/sys", "/tmp", "/run", "/var/run", "/root", "/sbin", "/modules", "/etc",
        ] {
            archive.folder(folder);
        }
        archive.device(Path::new("/dev/console"), 5, 1);
        archive.file(Path::new("/etc/hosts"), 0o644, b"127.0.0.1 localhost\n::1 localhost\n");
        archive.file(Path::new("/etc/passwd"), 0o644, b"root:x:0:0:root:/root:/bin/sh\n");
        archive.file(Path::new("/etc/group"), 0o644, b"root:x:0:\n");
        archive.file(Path::new("/etc/protocols"), 0o644, PROTOCOLS.as_bytes());
        archive.file(Path::new("/sbin/modprobe"), 0o755, MODPROBE.as_bytes());

        let mut libraries = BTreeSet::new();
        let busybox = find_program("busybox").context("there is no busybox")?;
        add(&mut archive, &mut libraries, &busybox, Path::new("/bin/busybox"))?;
        // Not busybox's shell: it runs its own `ip` even if another comes first on the path.
        let shell = Path::new("/bin/sh");
        add(&mut archive, &mut libraries, shell, shell)?;
        for tool in TOOLS {
            // `ss` and `tc` come with `ip`; a missing tool shows in the test that runs it.
            if let Some(host) = find_program(tool) {
                add(&mut archive, &mut libraries, &host, &Path::new("/sbin").join(tool))?;
            }
        }
        for program in &self.programs {
            add(&mut archive, &mut libraries, &program.host, &program.guest)?;
        }
        for library in libraries {
            add_stripped(&mut archive, &library, &library)?;
        }

        let mut load = String::new();
        for module in modules::in_order(&kernel.modules, self.modules)? {
            let path = format!("/modules/{}.ko", module.name);
            archive.file(Path::new(&path), 0o644, &module.content);
            // A guest begins without a spare interface.
            let options = if module.name == "dummy" { " numdummies=0" } else { "" };
            let _ = writeln!(load, "insmod {path}{options}");
        }
        let init = format!("{START}{load}{READY}{}{END}", self.commands);
        archive.file(Path::new("/init"), 0o755, init.as_bytes());
        Ok(archive.finish())
    }
}

/// `ipset` reads protocols by name.
const PROTOCOLS: &str = "icmp 1 ICMP\ntcp 6 TCP\nudp 17 UDP\nipv6-icmp 58 IPv6-ICMP\nsctp 132 SCTP\n";

/// All modules are loaded at the start: to ask for one of them succeeds.
const MODPROBE: &str = "#!/bin/sh
for name in \"$@\"; do
  case $name in
    -*) ;;
    *) grep -q \"^$name \" /proc/modules || exit 1 ;;
  esac
done
";

const START: &str = "#!/bin/sh
export PATH=/sbin:/usr/sbin:/bin:/usr/bin HOME=/root TERM=dumb
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mkdir -p /dev/shm /dev/pts
mount -t tmpfs tmpfs /dev/shm
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t bpf bpf /sys/fs/bpf
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /run
ln -sf /proc/self/fd /dev/fd
";

// Setting lo up also shows that the network tools run.
const READY: &str = "ip link set lo up
hostname evenkeel-vm
cd /root
# The default of 1,024 files is not enough for thousands of connections.
ulimit -n 65536
export EVENKEEL_IN_VM=1 EVENKEEL_BIN=/bin/evenkeel EVENKEEL_CONTROL_PLANE=/kubernetes RUST_BACKTRACE=1
code=0
";

const END: &str = "printf '\\nEVENKEEL-VM: exit %s\\n' $code
exec busybox poweroff -f
";

/// Puts a word into quotes for a shell, if it needs them.
pub(crate) fn quote(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,@%+".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// Adds a program, and notes the libraries that it names.
fn add(archive: &mut Archive, libraries: &mut BTreeSet<PathBuf>, host: &Path, guest: &Path) -> Result<()> {
    if archive.has(guest) {
        return Ok(());
    }
    // A static program makes `ldd` fail, which means that there is nothing to add.
    if let Ok(text) = command::output(Command::new("ldd").arg(host)) {
        libraries.extend(libraries_of(&text));
    }
    add_stripped(archive, host, guest)
}

/// Adds an ELF file without its debug records, which the guest has no use for and would hold in memory.
fn add_stripped(archive: &mut Archive, host: &Path, guest: &Path) -> Result<()> {
    let beside = std::env::temp_dir().join(format!("evenkeel-strip-{}", std::process::id()));
    let mut strip = Command::new("strip");
    strip.args(["--strip-debug", "-o"]).arg(&beside).arg(host);
    let content = match command::output(&mut strip) {
        Ok(_) => {
            let content = fs::read(&beside);
            // Left behind it would only cost space.
            let _ = fs::remove_file(&beside);
            content
        }
        // No ELF file, a script for instance: as it is.
        Err(_) => fs::read(host),
    };
    let content = content.with_context(|| format!("read {}", host.display()))?;
    archive.file(guest, 0o755, &content);
    Ok(())
}

/// The files that `ldd` names: `libc.so.6 => /lib/libc.so.6 (0x…)` and `/lib64/ld-linux-x86-64.so.2 (0x…)`.
fn libraries_of(ldd: &str) -> Vec<PathBuf> {
    ldd.lines()
        .filter_map(|line| {
            let line = line.trim();
            let file = line.split_once(" => ").map_or(line, |(_, file)| file);
            let (file, _) = file.rsplit_once(" (")?;
            file.starts_with('/').then(|| PathBuf::from(file))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{libraries_of, quote};
    use std::path::PathBuf;

    #[test]
    fn ldd_lines_with_files_are_taken() {
        let text = "\tlinux-vdso.so.1 (0x00007f)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n\
                    \tlibgone.so => not found\n\t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        assert_eq!(
            libraries_of(text),
            ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"].map(PathBuf::from)
        );
    }

    #[test]
    fn shells_read_quoted_words_back() {
        assert_eq!(quote("ipvsadm"), "ipvsadm");
        assert_eq!(quote("a b; c"), "'a b; c'");
        assert_eq!(quote("it's"), r"'it'\''s'");
        assert_eq!(quote(""), "''");
    }
}
