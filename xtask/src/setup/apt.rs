//! Asks Debian's package manager.
//!
//! The invariants: package lists are refreshed at most once a run and only if something is missing; nothing is asked
//! on the terminal; a package that the distribution does not have is left out, so that the others still come.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::command::{logged, output, say, step};
use crate::layout::{Layout, find_program, is_root};
use crate::setup::TRIES;

/// A machine's apt.
#[derive(Debug)]
pub(crate) struct Apt<'a> {
    layout: &'a Layout,
    refreshed: bool,
}

impl<'a> Apt<'a> {
    /// Apt, where the machine has it.
    pub(crate) fn find(layout: &'a Layout) -> Option<Self> {
        (find_program("apt-get").is_some() && find_program("dpkg").is_some()).then_some(Self {
            layout,
            refreshed: false,
        })
    }

    /// Installs those of the packages that the distribution has. Needs root.
    pub(crate) fn install(&mut self, packages: &[&str]) -> Result<()> {
        if packages.is_empty() {
            return Ok(());
        }
        self.refresh();
        let packages: BTreeSet<&str> = packages
            .iter()
            .copied()
            .filter(|package| has_candidate(package))
            .collect();
        if packages.is_empty() {
            return Ok(());
        }
        step(&format!("installing {} packages with apt-get", packages.len()), || {
            logged(
                TRIES,
                &self.layout.log("apt-install"),
                apt_get()
                    .args(["install", "--yes", "--no-install-recommends"])
                    .args(&packages),
            )
        })
    }

    /// Refreshes the package lists, once; a machine whose lists cannot be refreshed may still have good ones.
    pub(crate) fn refresh(&mut self) {
        if self.refreshed || !is_root() {
            return;
        }
        self.refreshed = true;
        let refreshed = step("refreshing the package lists", || {
            logged(TRIES, &self.layout.log("apt-update"), apt_get().arg("update"))
        });
        if let Err(error) = refreshed {
            say(&format!("xtask: {error:#}; going on with the old lists"));
        }
    }

    /// The names of all known packages that begin so.
    pub(crate) fn names(prefix: &str) -> Result<Vec<String>> {
        let names = output(Command::new("apt-cache").args(["pkgnames", prefix]))?;
        Ok(names.lines().map(str::to_owned).collect())
    }

    /// Downloads a package and unpacks it to a folder, in place of what was there, once `whole` finds all that is wanted of it.
    /// It is not installed: nothing of it is configured or started.
    pub(crate) fn unpack(&self, package: &str, folder: &Path, whole: impl FnOnce(&Path) -> bool) -> Result<()> {
        let beside = folder.with_extension(format!("new-{}", std::process::id()));
        let result = (|| {
            let deb_dir = beside.join("deb");
            let files = beside.join("files");
            fs::create_dir_all(&deb_dir).with_context(|| format!("create {}", deb_dir.display()))?;
            self.download(package, &deb_dir)?;
            let deb = fs::read_dir(&deb_dir)
                .context("read the download's folder")?
                .flatten()
                .map(|entry| entry.path())
                .find(|path| path.extension().is_some_and(|extension| extension == "deb"))
                .with_context(|| format!("apt-get download {package} left no file"))?;
            output(Command::new("dpkg").arg("-x").arg(&deb).arg(&files))?;
            if !whole(&files) {
                bail!("the package {package} lacks what is wanted of it");
            }
            if folder.exists() {
                fs::remove_dir_all(folder).with_context(|| format!("remove {}", folder.display()))?;
            }
            fs::rename(&files, folder).with_context(|| format!("rename to {}", folder.display()))
        })();
        // Whatever happened, nothing half-done stays; a failure to tidy does not matter to the caller.
        let _ = fs::remove_dir_all(&beside);
        result
    }

    fn download(&self, package: &str, folder: &Path) -> Result<()> {
        logged(
            TRIES,
            &self.layout.log("apt-download"),
            apt_get().args(["download", package]).current_dir(folder),
        )
    }
}

fn apt_get() -> Command {
    let mut command = Command::new("apt-get");
    command.env("DEBIAN_FRONTEND", "noninteractive");
    // The sandbox user cannot write to a cache below root's home, and apt would warn each time.
    command.args(["-o", "APT::Sandbox::User=root"]);
    // Another apt may be at work, on a machine that has just booted for instance.
    command.args(["-o", "DPkg::Lock::Timeout=120"]);
    command
}

fn has_candidate(package: &str) -> bool {
    output(Command::new("apt-cache").args(["policy", package])).is_ok_and(|policy| {
        policy
            .lines()
            .filter_map(|line| line.trim().strip_prefix("Candidate:"))
            .any(|version| version.trim() != "(none)")
    })
}
