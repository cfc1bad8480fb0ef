//! Where links and maps are pinned, and the lock that keeps a second agent out.
//!
//! `<bpffs>/<name>/<abi>/` holds maps and links of one ABI, `<bpffs>/<name>/sockets-<version>/` the per-socket maps and
//! `<bpffs>/<name>/flows-<version>/` the flows of packets, both of which are carried across ABIs.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use lb_common::abi::{ABI_VERSION, FLOW_VERSION, SOCKET_VERSION};

/// The folders of one installation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pins {
    root: PathBuf,
    abi: u32,
}

impl Pins {
    /// The pins of this build's ABI under `<bpffs>/<name>`.
    pub fn new(bpffs: &Path, name: &str) -> Self {
        Self::of_abi(bpffs, name, ABI_VERSION)
    }

    /// The pins of another ABI.
    pub fn of_abi(bpffs: &Path, name: &str, abi: u32) -> Self {
        Self {
            root: bpffs.join(name),
            abi,
        }
    }

    /// The folder of everything.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The folder of this ABI.
    pub fn folder(&self) -> PathBuf {
        self.root.join(self.abi.to_string())
    }

    /// The folder of the per-socket maps.
    pub fn socket_folder(&self) -> PathBuf {
        self.root.join(format!("sockets-{SOCKET_VERSION}"))
    }

    /// The folder of the flows of packets.
    pub fn flow_folder(&self) -> PathBuf {
        self.root.join(format!("flows-{FLOW_VERSION}"))
    }

    /// Path of a map.
    pub fn map(&self, name: &str) -> PathBuf {
        self.folder().join(name)
    }

    /// Path of a per-socket map.
    pub fn socket_map(&self, name: &str) -> PathBuf {
        self.socket_folder().join(name)
    }

    /// Path of a map of flows.
    pub fn flow_map(&self, name: &str) -> PathBuf {
        self.flow_folder().join(name)
    }

    /// Path of a link; the prefix keeps links apart from maps.
    pub fn link(&self, name: &str) -> PathBuf {
        self.folder().join(format!("link-{name}"))
    }

    /// Makes the folders.
    ///
    /// # Errors
    /// The folder that could not be made, and why.
    pub fn create(&self) -> Result<(), (PathBuf, io::Error)> {
        for folder in [self.folder(), self.socket_folder(), self.flow_folder()] {
            fs::create_dir_all(&folder).map_err(|error| (folder.clone(), error))?;
        }
        Ok(())
    }

    /// Names of the pinned links, without their prefix.
    ///
    /// # Errors
    /// When the folder cannot be read; a missing folder has no links.
    pub fn links(&self) -> io::Result<Vec<String>> {
        let entries = match fs::read_dir(self.folder()) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let mut names = Vec::new();
        for entry in entries {
            if let Some(name) = entry?.file_name().to_str().and_then(|n| n.strip_prefix("link-")) {
                names.push(name.to_owned());
            }
        }
        names.sort();
        Ok(names)
    }

    /// The ABIs that have a folder here, other than this one.
    ///
    /// # Errors
    /// When the folder cannot be read; a missing folder has none.
    pub fn other_abis(&self) -> io::Result<Vec<u32>> {
        let entries = match fs::read_dir(&self.root) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let mut abis = Vec::new();
        for entry in entries {
            if let Some(abi) = entry?.file_name().to_str().and_then(|n| n.parse::<u32>().ok())
                && abi != self.abi
            {
                abis.push(abi);
            }
        }
        abis.sort_unstable();
        Ok(abis)
    }

    /// The same installation, another ABI.
    #[must_use]
    pub fn with_abi(&self, abi: u32) -> Self {
        Self {
            root: self.root.clone(),
            abi,
        }
    }

    /// Removes this ABI's folder: links first, so that programs detach before their maps go.
    ///
    /// # Errors
    /// When something cannot be removed.
    pub fn remove_folder(&self) -> io::Result<()> {
        for link in self.links()? {
            fs::remove_file(self.link(&link))?;
        }
        remove_flat_folder(&self.folder())
    }

    /// Removes the pins of the flows; their folder goes too.
    ///
    /// # Errors
    /// When something cannot be removed.
    pub fn remove_flows(&self) -> io::Result<()> {
        remove_flat_folder(&self.flow_folder())
    }

    /// Removes everything of this installation, of every ABI. Returns how many pins were removed.
    ///
    /// # Errors
    /// When something cannot be removed.
    pub fn remove_all(&self) -> io::Result<usize> {
        let before = count_files(&self.root);
        for abi in self.other_abis()? {
            self.with_abi(abi).remove_folder()?;
        }
        self.remove_folder()?;
        let folders = match fs::read_dir(&self.root) {
            Ok(entries) => entries.collect::<Result<Vec<_>, _>>()?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
            Err(error) => return Err(error),
        };
        for entry in folders {
            remove_flat_folder(&entry.path())?;
        }
        fs::remove_dir(&self.root)?;
        Ok(before)
    }

    /// Takes the lock of this installation, until the returned handle is dropped.
    ///
    /// # Errors
    /// `WouldBlock` while another agent holds it.
    pub fn lock(&self) -> io::Result<Lock> {
        fs::create_dir_all(&self.root)?;
        let folder = fs::File::open(&self.root)?;
        match nix::fcntl::Flock::lock(folder, nix::fcntl::FlockArg::LockExclusiveNonblock) {
            Ok(held) => Ok(Lock { _held: held }),
            Err((_, errno)) => Err(errno.into()),
        }
    }
}

/// The lock on an installation's folder.
#[derive(Debug)]
pub struct Lock {
    _held: nix::fcntl::Flock<fs::File>,
}

fn remove_flat_folder(folder: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    for entry in entries {
        fs::remove_file(entry?.path())?;
    }
    fs::remove_dir(folder)
}

fn count_files(root: &Path) -> usize {
    let Ok(entries) = fs::read_dir(root) else {
        return 0;
    };
    entries
        .flatten()
        .map(|entry| match entry.file_type() {
            Ok(kind) if kind.is_dir() => count_files(&entry.path()),
            _ => 1,
        })
        .sum()
}
