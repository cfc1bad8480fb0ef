//! The real kube-proxy as a process, and what it leaves in a network namespace.
//!
//! It is configured so that nothing of the machine but its own network namespace changes. Who starts it where is the caller's.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use lb_user::lab::Netns;
use nix::{errno::Errno, net::if_::if_nametoindex};
use serde_json::json;

use super::Mode;
use crate::{ipvs, kube::programs, tool};

/// The period that comes nearest to none: zero in a configuration is kube-proxy's word for its default, one second.
pub const AT_ONCE: &str = "1ms";
/// The device that carries the addresses of Services in the IPVS mode.
const DEVICE: &str = "kube-ipvs0";

/// Where a proxy finds the API server.
#[derive(Clone, Copy, Debug)]
pub enum Api<'a> {
    /// Plain HTTP at a URL.
    Url(&'a str),
    /// As a kubeconfig says.
    Kubeconfig(&'a Path),
}

/// How kube-proxy is to run.
#[derive(Clone, Copy, Debug)]
pub struct Settings<'a> {
    /// Its mode.
    pub mode: Mode,
    /// Whether it waits [`AT_ONCE`] between two synchronisations, instead of its default of one second.
    pub at_once: bool,
    /// The node's name.
    pub node: &'a str,
    /// Its source.
    pub api: Api<'a>,
    /// A folder for its configuration.
    pub folder: &'a Path,
}

/// Why a mode cannot run on this machine, if it cannot: in one line.
///
/// # Errors
/// Where one cannot even ask.
pub fn missing(mode: Mode) -> Result<Option<String>> {
    if programs::find("kube-proxy").is_err() {
        return Ok(Some("kube-proxy is not here: it is built by Go".to_owned()));
    }
    if mode == Mode::Ipvs {
        if let Some(reason) = ipvs::missing()? {
            return Ok(Some(reason));
        }
        // Its cleanup asks so, and leaves everything where the answer is no.
        let asked = Command::new("modprobe").args(["-va", "ip_vs"]).output();
        if !asked.is_ok_and(|output| output.status.success()) {
            let reason = "`modprobe ip_vs` does not succeed, which kube-proxy's cleanup needs";
            return Ok(Some(reason.to_owned()));
        }
    }
    let programs: &[&str] = match mode {
        Mode::Nftables => &["nft"],
        Mode::Iptables => &["iptables-restore", "ip6tables-restore"],
        Mode::Ipvs => &["ipset", "iptables-restore", "ip6tables-restore"],
    };
    let starts = |program: &str| Command::new(program).arg("--version").output().is_ok();
    let absent = programs.iter().find(|program| !starts(program));
    Ok(absent.map(|program| format!("{program} does not start, which kube-proxy needs")))
}

/// Its command line; the caller places it.
///
/// # Errors
/// Where the program is not there, or its configuration cannot be written.
pub fn command(settings: Settings<'_>) -> Result<Command> {
    let Settings {
        mode,
        at_once,
        node,
        api,
        folder,
    } = settings;
    // The harness speaks JSON alone; from the real server kube-proxy takes its own default.
    let (kubeconfig, content_type) = match api {
        Api::Url(_) => (Path::new(""), "application/json"),
        Api::Kubeconfig(path) => (path, "application/vnd.kubernetes.protobuf"),
    };
    let mut config = json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",
        "mode": mode.name(), "hostnameOverride": node,
        "clientConnection": {"kubeconfig": kubeconfig, "contentType": content_type},
        // No setting of the machine is touched, and nothing of its priorities.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        "oomScoreAdj": 0,
        "healthzBindAddress": "127.0.0.1:10256", "metricsBindAddress": "127.0.0.1:10249",
    });
    if at_once {
        config[mode.name()] = json!({"minSyncPeriod": AT_ONCE});
    }
    let file = folder.join("kube-proxy.json");
    fs::write(&file, config.to_string()).with_context(|| format!("write {}", file.display()))?;
    let mut command = Command::new(program()?);
    command.arg("--config").arg(file);
    if let Api::Url(url) = api {
        command.args(["--master", url]);
    }
    Ok(command)
}

/// The command that removes what kube-proxy wrote, whatever its mode was.
///
/// # Errors
/// Where the program is not there.
pub fn cleanup() -> Result<Command> {
    let mut command = Command::new(program()?);
    command.arg("--cleanup");
    Ok(command)
}

fn program() -> Result<PathBuf> {
    programs::find("kube-proxy")
}

/// Empties a namespace, in which nobody else has rules, of what a mode writes; much faster than [`cleanup`].
///
/// # Errors
/// What could not be removed.
pub fn wipe(mode: Mode, netns: &Netns) -> Result<()> {
    tool::run(netns, "nft", &["flush", "ruleset"])?;
    if mode == Mode::Ipvs {
        tool::run(netns, "ipset", &["destroy"])?;
        tool::run(netns, "ipvsadm", &["--clear"])?;
        match netns.run(|| if_nametoindex(DEVICE))? {
            Ok(_) => drop(tool::run(netns, "ip", &["link", "delete", DEVICE])?),
            Err(Errno::ENODEV) => {}
            Err(error) => return Err(error).context(DEVICE),
        }
    }
    Ok(())
}
