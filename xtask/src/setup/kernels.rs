//! Debian's cloud kernels for the virtual machines, unpacked into the cache.
//!
//! They are never installed on the machine. The invariant: a folder of the cache is a whole unpacked package or does
//! not exist.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow, bail};

use super::apt::Apt;
use crate::command::step;
use crate::layout::Layout;

/// A kernel series that is tested in a virtual machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum KernelLine {
    /// The oldest kernel that is supported, Debian 12's own.
    V6_1,
    /// The long-term kernel of Debian 13, as Debian 12's security suite has it.
    V6_12,
}

impl KernelLine {
    /// All of them, oldest first.
    pub(crate) const ALL: &[Self] = &[Self::V6_1, Self::V6_12];

    /// The series as Debian's packages write it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::V6_1 => "6.1",
            Self::V6_12 => "6.12",
        }
    }

    /// Where the kernel lies in the cache.
    pub(crate) fn folder(self, layout: &Layout) -> PathBuf {
        layout.cache.join(format!("kernel-{self}"))
    }
}

impl fmt::Display for KernelLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An unpacked kernel package.
#[derive(Debug, Clone)]
pub(crate) struct GuestKernel {
    /// The bootable image.
    pub(crate) image: PathBuf,
    /// The folder of its modules, `lib/modules/RELEASE`.
    pub(crate) modules: PathBuf,
    /// What `uname -r` says inside.
    pub(crate) release: String,
}

impl GuestKernel {
    /// Finds a kernel in the cache.
    pub(crate) fn find(layout: &Layout, line: KernelLine) -> Option<Self> {
        Self::in_folder(&line.folder(layout))
    }

    fn in_folder(folder: &Path) -> Option<Self> {
        let boot = fs::read_dir(folder.join("boot")).ok()?;
        let release = boot
            .flatten()
            .find_map(|entry| Some(entry.file_name().to_str()?.strip_prefix("vmlinuz-")?.to_owned()))?;
        let modules = ["lib/modules", "usr/lib/modules"]
            .map(|dir| folder.join(dir).join(&release))
            .into_iter()
            .find(|dir| dir.is_dir())?;
        Some(Self {
            image: folder.join("boot").join(format!("vmlinuz-{release}")),
            modules,
            release,
        })
    }
}

/// Downloads the newest kernel of a series and unpacks it into the cache.
pub(crate) fn fetch(layout: &Layout, apt: &mut Apt<'_>, line: KernelLine) -> Result<()> {
    apt.refresh();
    let candidates = candidates(Apt::names(&format!("linux-image-{line}."))?);
    if candidates.is_empty() {
        bail!("this distribution has no package linux-image-{line}.*-cloud-amd64");
    }
    step(&format!("downloading Debian's cloud kernel {line}"), || {
        let mut last = anyhow!("no package was tried");
        // Old builds stay in the lists after their files are gone from the archive.
        for package in candidates.iter().take(4) {
            match unpack(layout, apt, line, package) {
                Ok(()) => return Ok(()),
                Err(error) => last = error,
            }
        }
        Err(last)
    })
}

fn unpack(layout: &Layout, apt: &Apt<'_>, line: KernelLine, package: &str) -> Result<()> {
    apt.unpack(package, &line.folder(layout), |files| {
        GuestKernel::in_folder(files).is_some()
    })
}

/// The cloud images among package names, newest first; of one version the signed before the unsigned.
fn candidates(names: Vec<String>) -> Vec<String> {
    let mut found: Vec<(Vec<u64>, bool, String)> = names
        .into_iter()
        .filter_map(|name| {
            let version = name.strip_prefix("linux-image-")?;
            let (version, signed) = match version.strip_suffix("-cloud-amd64") {
                Some(version) => (version, true),
                None => (version.strip_suffix("-cloud-amd64-unsigned")?, false),
            };
            let numbers = version
                .split(|c: char| !c.is_ascii_digit())
                .filter_map(|part| part.parse().ok())
                .collect();
            Some((numbers, signed, name))
        })
        .collect();
    found.sort();
    found.into_iter().rev().map(|(.., name)| name).collect()
}

#[cfg(test)]
mod tests {
    use super::candidates;

    #[test]
    fn newest_cloud_image_comes_first() {
        let names = [
            "linux-image-6.1.0-9-cloud-amd64",
            "linux-image-6.1.0-57-cloud-amd64-unsigned",
            "linux-image-6.1.0-57-cloud-amd64",
            "linux-image-6.1.0-57-cloud-amd64-dbg",
            "linux-image-6.1.0-58-amd64",
        ];
        assert_eq!(
            candidates(names.map(str::to_owned).to_vec()),
            [
                "linux-image-6.1.0-57-cloud-amd64",
                "linux-image-6.1.0-57-cloud-amd64-unsigned",
                "linux-image-6.1.0-9-cloud-amd64",
            ]
        );
    }
}
