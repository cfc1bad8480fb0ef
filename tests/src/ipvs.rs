//! Whether IPVS can be had here.

use std::{fs, process::Command};

use anyhow::{Context, Result};
use lb_user::lab::Netns;

/// Why it cannot, in one line, if it cannot.
///
/// # Errors
/// Where one cannot even ask.
pub fn missing() -> Result<Option<String>> {
    // Asked in a namespace of its own, as the file shows a namespace's.
    let netns = Netns::new()?;
    let listed = netns.run(|| fs::exists("/proc/thread-self/net/ip_vs"))?;
    if !listed.context("look for IPVS")? {
        return Ok(Some("this kernel has no IPVS (no /proc/net/ip_vs)".to_owned()));
    }
    let mut version = Command::new("ipvsadm");
    version.arg("--version");
    Ok(match version.output() {
        Ok(_) => None,
        Err(error) => Some(format!("ipvsadm does not start: {error}")),
    })
}
