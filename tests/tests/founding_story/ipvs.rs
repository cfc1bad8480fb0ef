//! IPVS with round robin, in a namespace of ours.

use std::{
    fs, io,
    net::SocketAddr,
    process::{Command, Output},
};

use anyhow::{Context, Result, bail};
use lb_user::lab::Netns;

/// A virtual server; it is removed on drop.
#[derive(Debug)]
pub(crate) struct Ipvs {
    netns: Netns,
    frontend: SocketAddr,
}

impl Ipvs {
    /// Makes the virtual server, and sets what happens to a SYN that meets a kept entry.
    pub(crate) fn new(netns: &Netns, frontend: SocketAddr, reuse_mode: u8) -> Result<Self> {
        netns.write_sysctl("ipv4/vs/conn_reuse_mode", &reuse_mode.to_string())?;
        let ipvs = Self {
            netns: netns.clone(),
            frontend,
        };
        ipvs.admin(&["-A", "-t", &frontend.to_string(), "-s", "rr"])?;
        Ok(ipvs)
    }

    /// Adds a real server, its address translated as kube-proxy has it.
    pub(crate) fn add(&self, backend: SocketAddr) -> Result<()> {
        let (frontend, backend) = (self.frontend.to_string(), backend.to_string());
        self.admin(&["-a", "-t", &frontend, "-r", &backend, "-m"]).map(drop)
    }

    /// Adds a real server with a weight.
    pub(crate) fn add_weighted(&self, backend: SocketAddr, weight: u32) -> Result<()> {
        let (frontend, backend, weight) = (self.frontend.to_string(), backend.to_string(), weight.to_string());
        self.admin(&["-a", "-t", &frontend, "-r", &backend, "-m", "-w", &weight])
            .map(drop)
    }

    /// Changes a real server's weight.
    pub(crate) fn set_weight(&self, backend: SocketAddr, weight: u32) -> Result<()> {
        let (frontend, backend, weight) = (self.frontend.to_string(), backend.to_string(), weight.to_string());
        self.admin(&["-e", "-t", &frontend, "-r", &backend, "-m", "-w", &weight])
            .map(drop)
    }

    /// The namespace's virtual servers as they can be restored, and every setting of IPVS: all but what moves by itself.
    pub(crate) fn snapshot(&self) -> Result<String> {
        let rules = String::from_utf8(self.admin(&["-S", "-n"])?)?;
        let settings = self.netns.run(|| -> io::Result<Vec<_>> {
            fs::read_dir("/proc/sys/net/ipv4/vs")?
                .map(|entry| {
                    let path = entry?.path();
                    Ok(format!("{} = {}", path.display(), fs::read_to_string(&path)?))
                })
                .collect()
        })?;
        let mut settings = settings.context("read the settings of IPVS")?;
        settings.sort();
        Ok(rules + &settings.concat())
    }

    /// Runs a command and gives what it prints.
    fn admin(&self, arguments: &[&str]) -> Result<Vec<u8>> {
        let Output { status, stdout, stderr } = self
            .netns
            .place(Command::new("ipvsadm").args(arguments))
            .output()
            .context("start ipvsadm")?;
        if status.success() {
            return Ok(stdout);
        }
        bail!(
            "ipvsadm {} failed ({status}): {}",
            arguments.join(" "),
            String::from_utf8_lossy(&stderr).trim()
        )
    }
}

impl Drop for Ipvs {
    fn drop(&mut self) {
        // The namespace goes in any case; a test that counts on the removal sees whether it worked.
        let _ = self.admin(&["-D", "-t", &self.frontend.to_string()]);
    }
}
