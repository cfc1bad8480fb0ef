//! Attaching programs: cgroup links and TCX links that are pinned, and netlink filters on kernels before 6.6.
//!
//! A pinned link is never replaced: its program is swapped in one step, so that no connection passes between two agents.

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
        CgroupAttachMode, LinkOrder, Program, ProgramError, SchedClassifier, TcAttachType,
        links::{FdLink, LinkError},
        tc::{self, NlOptions, TcAttachOptions, TcError},
    },
};
use thiserror::Error;

use super::{
    load::{FOLLOWING, LoadError, Mode, PACKET, REWRITING},
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
        /// The cgroup or interface.
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
    /// The list of interfaces.
    #[error("cannot list the interfaces of this network namespace: {0}")]
    List(nix::Error),
    /// The clsact qdisc.
    #[error("cannot add the clsact qdisc to {interface}: {source}")]
    Qdisc {
        /// The interface.
        interface: String,
        /// The cause.
        source: TcError,
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

/// A filter's priority where TC has no links: behind nobody else's default, and easy to recognise.
const PRIORITY: u16 = 0xe1;

/// One attachment.
#[derive(Debug)]
enum Held {
    /// A link that is held by its descriptor alone.
    Link(#[expect(dead_code, reason = "held so that the kernel keeps the link")] FdLink),
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
    /// Observed interfaces, by name and index.
    interfaces: Vec<(String, u32)>,
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
            interfaces: Vec::new(),
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
        if info.target == target {
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

    /// Moves another version's pinned links to our pins, where we have none, so that the next attach swaps their programs.
    ///
    /// Links that this version does not use stay where they are.
    ///
    /// # Errors
    /// When a pin cannot be moved.
    pub fn adopt(&mut self, other: &Pins, interfaces: &[String]) -> Result<(), AttachError> {
        let Some(pins) = &self.pins else { return Ok(()) };
        let failed = |source| AttachError::Predecessor {
            folder: other.folder(),
            source,
        };
        let packet = |link: &str| {
            PACKET
                .iter()
                .filter_map(|program| link.strip_prefix(program)?.strip_prefix('-'))
                .any(|interface| interfaces.iter().any(|ours| pin_word(ours) == interface))
        };
        for link in other.links().map_err(failed)? {
            let used = FOLLOWING.contains(&&*link) || REWRITING.contains(&&*link) || packet(&link);
            if used && !pins.link(&link).exists() {
                std::fs::rename(other.link(&link), pins.link(&link)).map_err(failed)?;
            }
        }
        Ok(())
    }

    /// Attaches the packet programs to an interface.
    ///
    /// # Errors
    /// When the interface does not exist, or the kernel refuses.
    ///
    /// # Kernel
    /// TCX links from 6.6; below, filters on the clsact qdisc, which outlive the agent until `cleanup`.
    pub fn attach_interface(&mut self, object: &mut Ebpf, interface: &str) -> Result<Vec<(String, Done)>, AttachError> {
        let mut done = Vec::new();
        let index = nix::net::if_::if_nametoindex(interface).map_err(|source| AttachError::Interface {
            interface: interface.to_owned(),
            source,
        })?;
        for (name, direction) in [
            ("tc_ingress", TcAttachType::Ingress),
            ("tc_egress", TcAttachType::Egress),
        ] {
            let link_name = packet_link(name, interface);
            let program = object.program_mut(name).ok_or(LoadError::Missing(name))?;
            if let Some(known) = self.swap(program, &link_name, syscall::Target::Interface(index))? {
                done.push((link_name, known));
                continue;
            }
            let Program::SchedClassifier(program) = program else {
                return Err(LoadError::Missing(name).into());
            };
            if has_tcx() {
                let link = attach_tcx(program, name, interface, direction)?;
                self.hold(&link_name, link)?;
            } else {
                attach_filter(program, name, interface, direction)?;
                self.held.insert(link_name.clone(), Held::Filter);
            }
            done.push((link_name, Done::Attached));
        }
        self.interfaces.retain(|(name, _)| name != interface);
        self.interfaces.push((interface.to_owned(), index));
        Ok(done)
    }

    /// Whether the packet programs are on an interface.
    pub fn observes(&self, interface: &str, index: u32) -> bool {
        self.interfaces
            .iter()
            .any(|(name, known)| (name.as_str(), *known) == (interface, index))
    }

    /// Forgets interfaces that are no longer there; their links went with them.
    pub fn keep_interfaces(&mut self, there: &[(String, u32)]) {
        for (interface, _) in self.interfaces.extract_if(.., |known| !there.contains(known)) {
            for program in PACKET {
                let link = packet_link(program, &interface);
                self.held.remove(&link);
                if let Some(pins) = &self.pins {
                    // The pin of a link whose interface has gone holds nothing.
                    let _gone = std::fs::remove_file(pins.link(&link));
                }
            }
        }
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
            if has_tcx() {
                for (interface, _) in self.interfaces.clone() {
                    for (name, done) in self.attach_interface(object, &interface)? {
                        if done != Done::InPlace {
                            repaired.push(name);
                        }
                    }
                }
            }
        }
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
            Held::Link(_) | Held::Filter => None,
        }
    }

    /// Where a map is pinned.
    pub fn map_pin(&self, map: &str) -> Option<PathBuf> {
        let pins = self.pins.as_ref()?;
        Some(if lb_common::maps::SOCKET_MAPS.contains(&map) {
            pins.socket_map(map)
        } else {
            pins.map(map)
        })
    }

    /// Whether a link is in place: its pin is there and its cgroup or interface is not gone.
    pub fn is_attached(&self, name: &str) -> bool {
        match self.held.get(name) {
            None => false,
            Some(Held::Link(_) | Held::Filter) => true,
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
    /// When a pin cannot be removed.
    pub fn detach_all(&mut self) -> Result<(), AttachError> {
        let names: Vec<String> = self.held.keys().cloned().collect();
        for name in names {
            self.detach(&name)?;
        }
        for (interface, _) in std::mem::take(&mut self.interfaces) {
            if !has_tcx() {
                remove_filters(&interface);
            }
        }
        Ok(())
    }
}

/// The name of a packet program's link.
fn packet_link(program: &str, interface: &str) -> String {
    format!("{program}-{}", pin_word(interface))
}

/// An interface's name as a word of a pin's name: a BPF file system refuses dots, and an interface's name has no colon.
fn pin_word(interface: &str) -> String {
    interface.replace('.', ":")
}

/// The interface of a packet program's link, by the link's name.
pub fn interface_of(link: &str) -> Option<(&'static str, String)> {
    PACKET.iter().find_map(|program| {
        Some((
            *program,
            link.strip_prefix(program)?.strip_prefix('-')?.replace(':', "."),
        ))
    })
}

/// The interfaces of this network namespace, by name and index.
///
/// # Errors
/// When the kernel does not tell.
pub fn interfaces() -> Result<Vec<(String, u32)>, AttachError> {
    let all = nix::net::if_::if_nameindex().map_err(AttachError::List)?;
    Ok(all
        .iter()
        .map(|interface| (interface.name().to_string_lossy().into_owned(), interface.index()))
        .collect())
}

fn attach_tcx(
    program: &mut SchedClassifier,
    name: &'static str,
    interface: &str,
    direction: TcAttachType,
) -> Result<FdLink, AttachError> {
    let refused = |source| AttachError::Attach {
        program: name,
        target: format!("interface {interface}"),
        source,
    };
    let options = TcAttachOptions::TcxOrder(LinkOrder::default());
    let id = program
        .attach_with_options(interface, direction, options)
        .map_err(refused)?;
    let link = program.take_link(id).map_err(refused)?;
    FdLink::try_from(link).map_err(|error| AttachError::Pin {
        link: packet_link(name, interface),
        reason: error.to_string(),
    })
}

fn attach_filter(
    program: &mut SchedClassifier,
    name: &'static str,
    interface: &str,
    direction: TcAttachType,
) -> Result<(), AttachError> {
    // An earlier agent, or somebody else, may have added it.
    let there =
        |error: &TcError| matches!(error, TcError::AlreadyAttached) || netlink_errno(error) == Some(libc::EEXIST);
    if let Err(source) = tc::qdisc_add_clsact(interface)
        && !there(&source)
    {
        return Err(AttachError::Qdisc {
            interface: interface.to_owned(),
            source,
        });
    }
    // The same priority and handle replace the filter of an earlier agent in one step.
    let refused = |source| AttachError::Attach {
        program: name,
        target: format!("interface {interface}"),
        source,
    };
    let _ = tc::qdisc_detach_program(interface, direction, name);
    let options = TcAttachOptions::Netlink(NlOptions {
        priority: PRIORITY,
        handle: tc::TcHandle::new(0, 1),
        classid: None,
    });
    let id = program
        .attach_with_options(interface, direction, options)
        .map_err(refused)?;
    // Dropping a netlink link removes its filter; it must outlive this process as a pinned link would.
    let link = program.take_link(id).map_err(refused)?;
    std::mem::forget(link);
    Ok(())
}

/// Removes the filters that [`Attachments::attach_interface`] leaves on kernels before 6.6.
pub fn remove_filters(interface: &str) {
    for (name, direction) in [
        ("tc_ingress", TcAttachType::Ingress),
        ("tc_egress", TcAttachType::Egress),
    ] {
        let _ = tc::qdisc_detach_program(interface, direction, name);
    }
}

fn has_tcx() -> bool {
    use aya::util::KernelVersion;
    KernelVersion::current().is_ok_and(|version| version >= KernelVersion::new(6, 6, 0))
}

/// The errno behind a netlink error.
fn netlink_errno(error: &(dyn std::error::Error + 'static)) -> Option<i32> {
    let mut error = Some(error);
    while let Some(cause) = error {
        if let Some(io) = cause.downcast_ref::<io::Error>() {
            return io.raw_os_error();
        }
        error = cause.source();
    }
    None
}
