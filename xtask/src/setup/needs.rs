//! What the tasks need from the machine, in groups, and how each thing is had.
//!
//! Nothing is installed here. The invariant: a need is present exactly if the tasks that use it will find it, by the
//! same search.

use crate::command::succeeds;
use crate::ebpf::{self, Llvm, Route};
use crate::layout::{Layout, find_program};
use crate::setup::cargo_deny;
use crate::setup::control_plane;
use crate::setup::kernels::{GuestKernel, KernelLine};
use crate::setup::prometheus;

/// For what something is needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Group {
    /// To build the kernel object and the agent.
    Build,
    /// For the real-socket tests, the demo and the bench on this kernel.
    Sockets,
    /// For the same tests inside virtual machines.
    Vm,
    /// To check rules and dashboard, and to ask a real Prometheus.
    Prometheus,
    /// For tests and benches with a real control plane.
    ControlPlane,
    /// For kube-proxy inside virtual machines.
    KubeProxy,
    /// For `cargo xtask lint`.
    Lint,
}

impl Group {
    /// All groups, in the order in which they are told.
    pub(crate) const ALL: &[Self] = &[
        Self::Build,
        Self::Sockets,
        Self::Vm,
        Self::Prometheus,
        Self::ControlPlane,
        Self::KubeProxy,
        Self::Lint,
    ];

    /// The words after "Missing".
    pub(crate) fn purpose(self) -> &'static str {
        match self {
            Self::Build => "to build",
            Self::Sockets => "for real-socket tests, the demo and the bench",
            Self::Vm => "for tests inside virtual machines",
            Self::Prometheus => "for tests with Prometheus",
            Self::ControlPlane => "for tests with a real control plane",
            Self::KubeProxy => "for kube-proxy inside virtual machines",
            Self::Lint => "for lint",
        }
    }
}

/// One thing that is missing.
#[derive(Debug, Clone)]
pub(crate) struct Need {
    pub(crate) group: Group,
    pub(crate) name: String,
    /// How a person gets it.
    pub(crate) how: String,
    /// Debian's packages for it.
    pub(crate) apt: &'static [&'static str],
    pub(crate) cure: Cure,
}

/// What else has to happen besides installing packages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cure {
    /// Nothing.
    Packages,
    /// Without fitting packages, a nightly toolchain.
    BpfCompiler,
    /// Build the BPF linker.
    Linker,
    /// Build `cargo-deny`.
    Deny,
    /// Add a component to rustup's toolchain.
    Component(&'static str),
    /// Download and unpack a kernel.
    Kernel(KernelLine),
    /// Download and unpack Prometheus.
    Prometheus,
    /// Build etcd and Kubernetes.
    ControlPlane,
}

/// A program, its packages and its group.
const PROGRAMS: &[(Group, &str, &[&str])] = &[
    (Group::Build, "cc", &["gcc", "libc6-dev"]),
    (Group::Sockets, "ip", &["iproute2"]),
    (Group::Sockets, "nft", &["nftables"]),
    (Group::Sockets, "iptables", &["iptables"]),
    (Group::Sockets, "haproxy", &["haproxy"]),
    (Group::Vm, "qemu-system-x86_64", &["qemu-system-x86"]),
    (Group::Vm, "busybox", &["busybox-static"]),
    (Group::Vm, "ipvsadm", &["ipvsadm"]),
    (Group::Vm, "xz", &["xz-utils"]),
    (Group::Vm, "strip", &["binutils"]),
    (Group::Vm, "ldd", &["libc-bin"]),
    (Group::KubeProxy, "ipset", &["ipset"]),
    (Group::KubeProxy, "iptables", &["iptables"]),
];

/// What of the groups is missing on this machine.
pub(crate) fn missing(layout: &Layout, groups: &[Group]) -> Vec<Need> {
    let mut needs = Vec::new();
    for (group, program, packages) in PROGRAMS {
        if groups.contains(group) && find_program(program).is_none() {
            needs.push(Need {
                group: *group,
                name: (*program).to_owned(),
                how: format!("install your distribution's package (Debian: {})", packages.join(", ")),
                apt: packages,
                cure: Cure::Packages,
            });
        }
    }
    if groups.contains(&Group::Build) {
        build_tools(layout, &mut needs);
    }
    if groups.contains(&Group::Vm) {
        for line in KernelLine::ALL {
            if GuestKernel::find(layout, *line).is_none() {
                needs.push(kernel(layout, *line));
            }
        }
    }
    if groups.contains(&Group::Prometheus) && prometheus::find(layout).is_none() {
        needs.push(Need {
            group: Group::Prometheus,
            name: "prometheus, promtool".to_owned(),
            how: format!(
                "put both on the PATH, or unpack Debian's package prometheus (dpkg -x) to {}",
                prometheus::folder(layout).display()
            ),
            apt: &[],
            cure: Cure::Prometheus,
        });
    }
    if groups.contains(&Group::ControlPlane) && control_plane::find(layout).is_none() {
        needs.push(control_plane());
    }
    if groups.contains(&Group::Lint) {
        lint_tools(layout, &mut needs);
    }
    needs
}

fn build_tools(layout: &Layout, needs: &mut Vec<Need>) {
    let route = Route::detect();
    if route.is_none() {
        needs.push(Need {
            group: Group::Build,
            name: "compiler for eBPF".to_owned(),
            how: "Debian 12: apt-get install rustc-web libstd-rust-web-dev-bpf rust-web-llvm; elsewhere: \
                  rustup toolchain install nightly --component rust-src"
                .to_owned(),
            apt: &["rustc-web", "libstd-rust-web-dev-bpf", "rust-web-llvm"],
            cure: Cure::BpfCompiler,
        });
    }
    if ebpf::find_linker(layout, route).is_none() {
        let major = route.and_then(Route::llvm_major).unwrap_or(ebpf::DEFAULT_LLVM);
        let llvm = route.and_then(Llvm::for_route);
        let prefix = llvm.map_or_else(
            || format!("/usr/lib/llvm-{major}"),
            |llvm| llvm.prefix.display().to_string(),
        );
        needs.push(Need {
            group: Group::Build,
            name: "bpf-linker".to_owned(),
            how: format!(
                "with LLVM {major}'s development files (Debian: llvm-{major}-dev zlib1g-dev libzstd-dev libxml2-dev): \
                 LLVM_PREFIX={prefix} cargo install bpf-linker --version {} --no-default-features \
                 --features llvm-{major} --locked",
                ebpf::LINKER_VERSION
            ),
            apt: &["llvm-22-dev", "zlib1g-dev", "libzstd-dev", "libxml2-dev"],
            cure: Cure::Linker,
        });
    }
}

fn control_plane() -> Need {
    let (name, how) = if control_plane::go().is_some() {
        (
            "etcd and Kubernetes",
            "built by this task from tests/kube/go.mod, where modules can be downloaded",
        )
    } else {
        (
            "Go",
            "install Go 1.26 or newer from https://go.dev/dl/ and put it on the PATH",
        )
    };
    Need {
        group: Group::ControlPlane,
        name: name.to_owned(),
        how: how.to_owned(),
        apt: &[],
        cure: Cure::ControlPlane,
    }
}

fn lint_tools(layout: &Layout, needs: &mut Vec<Need>) {
    for (subcommand, component) in [("fmt", "rustfmt"), ("clippy", "clippy")] {
        if !succeeds(crate::command::cargo(&layout.root).args([subcommand, "--version"])) {
            needs.push(Need {
                group: Group::Lint,
                name: component.to_owned(),
                how: format!("rustup component add {component}"),
                apt: &[],
                cure: Cure::Component(component),
            });
        }
    }
    if cargo_deny(layout).is_none() {
        needs.push(Need {
            group: Group::Lint,
            name: "cargo-deny".to_owned(),
            how: format!("cargo install cargo-deny --version {} --locked", super::DENY_VERSION),
            apt: &[],
            cure: Cure::Deny,
        });
    }
}

fn kernel(layout: &Layout, line: KernelLine) -> Need {
    Need {
        group: Group::Vm,
        name: format!("Debian kernel {line}"),
        how: format!(
            "unpack a package linux-image-{line}.*-cloud-amd64 of Debian 12 (dpkg -x) to {}",
            line.folder(layout).display()
        ),
        apt: &[],
        cure: Cure::Kernel(line),
    }
}
