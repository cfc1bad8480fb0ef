//! Attaching programs: cgroup links and TCX links that are pinned, and netlink filters on kernels before 6.6.
//!
//! Programs of interfaces are attached in `packet`; which interfaces those are is decided elsewhere. A pinned link is never
//! replaced: its program is swapped in one step, so that no connection passes between two agents.

mod packet;

use std::{
    collections::BTreeMap,
    fs::File,
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::{Path, PathBuf},
};

use aya::{
    Ebpf,
    programs::{
        CgroupAttachMode, Program, ProgramError,
        links::{FdLink, LinkError},
    },
};
use thiserror::Error;

use self::packet::Carried;
pub use self::packet::{Layer, has_tcx, interfaces, remove_filters};
use super::{
    load::{FOLLOWING, LoadError, Mode, REWRITING},
    pins::Pins,
    syscall,
};

/// Why a program could not be attached.
#[derive(Debug, Error)]
pub enum AttachError {
    /// The cgroup.
    #[error("cannot open cgroup {path}: {source}")]
    Cgroup {
        /// Its path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The kernel refuses.
    #[error("cannot attach {program} to {target}: {source}")]
    Attach {
        /// The program.
        program: &'static str,
        /// The cgroup.
        target: String,
        /// The cause.
        source: ProgramError,
    },
    /// The interface.
    #[error("no interface {interface} in this network namespace: {source}")]
    Interface {
        /// Its name.
        interface: String,
        /// The cause.
        source: nix::Error,
    },
    /// The kernel refuses a program at an interface.
    #[error("cannot attach {program} to interface {interface}: {source}")]
    Hook {
        /// The program.
        program: &'static str,
        /// The interface's name.
        interface: String,
        /// The cause.
        source: io::Error,
    },
    /// What is attached to an interface cannot be listed or removed.
    #[error("cannot {operation} the programs of interface {interface}: {source}")]
    Filters {
        /// `list` or `remove`.
        operation: &'static str,
        /// The interface's name.
        interface: String,
        /// The cause.
        source: io::Error,
    },
    /// The list of interfaces.
    #[error("cannot list the interfaces of this network namespace: {0}")]
    List(nix::Error),
    /// The clsact qdisc.
    #[error("cannot add the clsact qdisc to {interface}: {source}")]
    Qdisc {
        /// The interface.
        interface: String,
        /// The cause.
        source: io::Error,
    },
    /// The pin.
    #[error("cannot pin link {link}: {reason}")]
    Pin {
        /// The link's name.
        link: String,
        /// The cause.
        reason: String,
    },
    /// The swap of the program of a pinned link.
    #[error("cannot swap the program of pinned link {link}: {source}")]
    Swap {
        /// The link's name.
        link: String,
        /// The cause.
        source: io::Error,
    },
    /// The pins of another version.
    #[error("cannot replace the pins of another version in {}: {source}", folder.display())]
    Predecessor {
        /// Their folder.
        folder: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The object.
    #[error(transparent)]
    Object(#[from] LoadError),
}

/// One attachment.
#[derive(Debug)]
enum Held {
    /// A link that is held by its descriptor alone.
    Link(#[expect(dead_code, reason = "held so that the kernel keeps the link")] FdLink),
    /// A link of an interface that is held by its descriptor alone.
    Tcx(#[expect(dead_code, reason = "held so that the kernel keeps the link")] OwnedFd),
    /// A pinned link.
    Pinned,
    /// A netlink filter, which nothing holds; kept for its removal.
    Filter,
}

/// What is attached, by link name.
#[derive(Debug)]
pub struct Attachments {
    cgroup: PathBuf,
    cgroup_fd: File,
    pins: Option<Pins>,
    held: BTreeMap<String, Held>,
    /// Interfaces with programs of ours, by index.
    interfaces: BTreeMap<u32, Carried>,
    /// Whether another version of this installation was taken over, whose filters do not say whose they are.
    succeeds: bool,
}

/// What became of one link at an attach or check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Done {
    /// It is in place and runs our program.
    InPlace,
    /// Its program was swapped for ours.
    Swapped,
    /// It was not there: attached anew.
    Attached,
}

impl Attachments {
    /// Opens the cgroup; nothing is attached yet.
    ///
    /// # Errors
    /// When the cgroup cannot be opened.
    pub fn new(cgroup: &Path, pins: Option<Pins>) -> Result<Self, AttachError> {
        let cgroup_fd = File::open(cgroup).map_err(|source| AttachError::Cgroup {
            path: cgroup.to_owned(),
            source,
        })?;
        Ok(Self {
            cgroup: cgroup.to_owned(),
            cgroup_fd,
            pins,
            held: BTreeMap::new(),
            interfaces: BTreeMap::new(),
            succeeds: false,
        })
    }

    /// Attaches the programs of a mode to the cgroup, or swaps them into the pinned links. Rewriting links of another
    /// mode are removed last.
    ///
    /// # Errors
    /// At the first program that cannot be attached.
    pub fn attach_cgroup(
        &mut self,
        object: &mut Ebpf,
        mode: Mode,
        follow: bool,
    ) -> Result<Vec<(String, Done)>, AttachError> {
        let mut done = Vec::new();
        // The reverse hooks first: an address that is translated must already be translated back.
        let mut order: Vec<&'static str> = Vec::new();
        if follow {
            order.extend(FOLLOWING);
        }
        if mode == Mode::Balance {
            order.extend(REWRITING.iter().rev());
        }
        for name in order {
            done.push((name.to_owned(), self.attach_one(object, name)?));
        }
        if mode == Mode::Observe {
            for name in REWRITING {
                self.detach(name)?;
            }
        }
        Ok(done)
    }

    fn attach_one(&mut self, object: &mut Ebpf, name: &'static str) -> Result<Done, AttachError> {
        let target = self.cgroup_target()?;
        let program = object.program_mut(name).ok_or(LoadError::Missing(name))?;
        if let Some(done) = self.swap(program, name, target)? {
            return Ok(done);
        }
        let refused = |source| AttachError::Attach {
            program: name,
            target: self.cgroup.display().to_string(),
            source,
        };
        let mode = CgroupAttachMode::Single;
        let link: Result<FdLink, LinkError> = match program {
            Program::CgroupSockAddr(program) => {
                let id = program.attach(&self.cgroup_fd, mode).map_err(refused)?;
                program.take_link(id).map_err(refused)?.try_into()
            }
            Program::CgroupSock(program) => {
                let id = program.attach(&self.cgroup_fd, mode).map_err(refused)?;
                program.take_link(id).map_err(refused)?.try_into()
            }
            Program::SockOps(program) => {
                let id = program.attach(&self.cgroup_fd, mode).map_err(refused)?;
                program.take_link(id).map_err(refused)?.try_into()
            }
            _ => return Err(LoadError::Missing(name).into()),
        };
        let link = link.map_err(|error| AttachError::Pin {
            link: name.to_owned(),
            reason: error.to_string(),
        })?;
        self.hold(name, link)?;
        Ok(Done::Attached)
    }

    /// Keeps a new link: pinned where there are pins.
    fn hold(&mut self, name: &str, link: FdLink) -> Result<(), AttachError> {
        let held = match &self.pins {
            Some(pins) => {
                link.pin(pins.link(name)).map_err(|error| AttachError::Pin {
                    link: name.to_owned(),
                    reason: error.to_string(),
                })?;
                Held::Pinned
            }
            None => Held::Link(link),
        };
        self.held.insert(name.to_owned(), held);
        Ok(())
    }

    /// Swaps our program into the pinned link, if there is one that still is attached to `target`.
    fn swap(&mut self, program: &Program, name: &str, target: syscall::Target) -> Result<Option<Done>, AttachError> {
        let Some(pins) = &self.pins else {
            return Ok(None);
        };
        let path = pins.link(name);
        let link: OwnedFd = match syscall::object_get(&path) {
            Ok(link) => link,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => {
                return Err(AttachError::Swap {
                    link: name.to_owned(),
                    source,
                });
            }
        };
        let failed = |source| AttachError::Swap {
            link: name.to_owned(),
            source,
        };
        let info = syscall::link_info(link.as_fd()).map_err(failed)?;
        if info.target == target && packet::is_here(info) {
            let ours = program.info().map_err(|e| failed(io::Error::other(e)))?.id();
            let done = if info.program_id == ours {
                Done::InPlace
            } else {
                let fd = program.fd().map_err(|e| failed(io::Error::other(e)))?;
                match syscall::link_update(link.as_fd(), fd.as_fd()) {
                    Ok(()) => Done::Swapped,
                    // A link of another type of program, of whatever origin: it cannot become ours.
                    Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                        std::fs::remove_file(&path).map_err(failed)?;
                        return Ok(None);
                    }
                    Err(error) => return Err(failed(error)),
                }
            };
            self.held.insert(name.to_owned(), Held::Pinned);
            return Ok(Some(done));
        }
        // The link's cgroup or interface is gone, or is another one: the pin holds nothing of use.
        std::fs::remove_file(&path).map_err(failed)?;
        Ok(None)
    }

    fn cgroup_target(&self) -> Result<syscall::Target, AttachError> {
        match self.cgroup_fd.metadata() {
            Ok(metadata) => Ok(syscall::Target::Cgroup(metadata.ino())),
            Err(source) => Err(AttachError::Cgroup {
                path: self.cgroup.clone(),
                source,
            }),
        }
    }

    fn detach(&mut self, name: &str) -> Result<(), AttachError> {
        self.held.remove(name);
        if let Some(pins) = &self.pins {
            if let Ok(link) = syscall::object_get(&pins.link(name)) {
                // One that is detached already refuses; without its pin it is gone in any case.
                let _refused = syscall::link_detach(link.as_fd());
            }
            match std::fs::remove_file(pins.link(name)) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(source) => {
                    return Err(AttachError::Swap {
                        link: name.to_owned(),
                        source,
                    });
                }
            }
        }
        Ok(())
    }

    /// Checks every link of the mode, and attaches again what is gone. Returns the links that were repaired.
    ///
    /// # Errors
    /// When a lost link cannot be attached again.
    pub fn repair(&mut self, object: &mut Ebpf, mode: Mode, follow: bool) -> Result<Vec<String>, AttachError> {
        let mut repaired = Vec::new();
        if self.pins.is_some() {
            for (name, done) in self.attach_cgroup(object, mode, follow)? {
                if done != Done::InPlace {
                    repaired.push(name);
                }
            }
        }
        repaired.extend(self.repair_interfaces(object));
        Ok(repaired)
    }

    /// Names of what is attached.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.held.keys().map(String::as_str)
    }

    /// Where a link is pinned.
    pub fn pin(&self, name: &str) -> Option<PathBuf> {
        match self.held.get(name)? {
            Held::Pinned => self.pins.as_ref().map(|pins| pins.link(name)),
            Held::Link(_) | Held::Tcx(_) | Held::Filter => None,
        }
    }

    /// Where a map is pinned.
    pub fn map_pin(&self, map: &str) -> Option<PathBuf> {
        let pins = self.pins.as_ref()?;
        Some(if lb_common::maps::SOCKET_MAPS.contains(&map) {
            pins.socket_map(map)
        } else if lb_common::maps::FLOW_MAPS.contains(&map) {
            pins.flow_map(map)
        } else {
            pins.map(map)
        })
    }

    /// Whether a link is in place: its pin is there and its cgroup or interface is not gone.
    pub fn is_attached(&self, name: &str) -> bool {
        match self.held.get(name) {
            None => false,
            Some(Held::Link(_) | Held::Tcx(_)) => true,
            Some(Held::Filter) => self.filter_is_there(name),
            Some(Held::Pinned) => {
                let Some(pins) = &self.pins else { return false };
                syscall::object_get(&pins.link(name))
                    .and_then(|link| syscall::link_info(link.as_fd()))
                    .is_ok_and(|info| {
                        !matches!(info.target, syscall::Target::Cgroup(0) | syscall::Target::Interface(0))
                    })
            }
        }
    }

    /// Detaches everything, pins included.
    ///
    /// # Errors
    /// When something cannot be removed.
    pub fn detach_all(&mut self) -> Result<(), AttachError> {
        for index in self.interfaces.keys().copied().collect::<Vec<u32>>() {
            self.detach_interface(index)?;
        }
        let names: Vec<String> = self.held.keys().cloned().collect();
        for name in names {
            self.detach(&name)?;
        }
        Ok(())
    }
}
