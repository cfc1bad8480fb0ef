//! Loading the kernel object: sizes, features, pins.

use std::{io, path::Path};

use aya::{
    Ebpf, EbpfError, EbpfLoader, VerifierLogLevel,
    maps::MapError,
    programs::{Program, ProgramError},
};
use lb_common::maps as names;
use thiserror::Error;

use super::{btf, pins::Pins};

/// The kernel object, built by `cargo xtask build`.
pub static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/evenkeel.bpf.o"));

/// Sizes of the maps, in entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Frontends.
    pub frontends: u32,
    /// Sets.
    pub sets: u32,
    /// List entries.
    pub lists: u32,
    /// Table elements, of four slots each.
    pub tables: u32,
    /// Backends.
    pub backends: u32,
    /// Services.
    pub services: u32,
    /// Sockets with state, of each kind.
    pub sockets: u32,
    /// Flows of packets that are translated, where any are.
    pub flows: u32,
}

impl Default for Sizes {
    fn default() -> Self {
        Self {
            frontends: names::MAX_FRONTENDS,
            sets: names::MAX_SETS,
            lists: names::MAX_LIST_ENTRIES,
            tables: names::MAX_TABLE_ELEMENTS,
            backends: names::MAX_BACKENDS,
            services: names::MAX_SERVICES,
            sockets: names::MAX_SOCKETS,
            flows: names::MAX_FLOWS,
        }
    }
}

/// Which programs run, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Rewrites connections, and observes them.
    Balance,
    /// Observes alone: no rewriting program is loaded.
    Observe,
}

/// How to load the object.
#[derive(Clone, Debug)]
pub struct Options {
    /// Which programs are wanted.
    pub mode: Mode,
    /// Sizes of maps that do not exist yet.
    pub sizes: Sizes,
    /// Bits of [`lb_common::maps::feature`], besides those that the mode sets.
    pub features: u32,
    /// Log level of the programs (aya-log), 0 for none: for development only.
    pub log_level: u8,
    /// Whether sock_ops and sock_release are loaded; measurements of the hooks alone leave them out.
    pub follow_connections: bool,
    /// Whether interfaces are observed: then packets tell the backend of a followed socket.
    pub packets: bool,
    /// Whether packets of clients without a socket here are translated: balance mode alone does that.
    pub translate: bool,
}

/// Why the object could not be loaded.
#[derive(Debug, Error)]
pub enum LoadError {
    /// The pin folder.
    #[error("cannot make the pin folder {path}: {source}")]
    PinFolder {
        /// The folder.
        path: String,
        /// The cause.
        source: io::Error,
    },
    /// The object or its maps.
    #[error("cannot create the maps: {source}{}", hint(.source))]
    Object {
        /// The cause.
        #[from]
        source: EbpfError,
    },
    /// A program.
    #[error("the kernel refuses program {program}: {source}{}", hint(.source))]
    Program {
        /// Its name.
        program: &'static str,
        /// The cause.
        source: ProgramError,
    },
    /// The object lacks a program or map: it belongs to another build.
    #[error("the kernel object has no {0}: it belongs to another build of evenkeel")]
    Missing(&'static str),
    /// A map that exists has another layout or size.
    #[error("map {name}: {source}")]
    Map {
        /// Its name.
        name: &'static str,
        /// The cause.
        source: MapError,
    },
    /// The backends of an earlier agent could not be read, or not be indexed.
    #[error("cannot index the backends: {0}")]
    Index(#[from] super::kernel::MapsError),
    /// What the packet programs know of the node cannot be written.
    #[error("cannot write the settings: {0}")]
    Settings(#[source] super::kernel::MapsError),
    /// A pinned map does not fit.
    #[error(
        "the pinned map {name} has {found} where {wanted} is wanted; `evenkeel cleanup` removes it (connections lose their state)"
    )]
    Layout {
        /// Its name.
        name: &'static str,
        /// What was found, such as `value size 24`.
        found: String,
        /// What is wanted.
        wanted: String,
    },
}

impl LoadError {
    /// Whether another try would fail alike: all but a want of memory or of patience.
    pub fn is_final(&self) -> bool {
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(self);
        while let Some(error) = cause {
            if let Some(io) = error.downcast_ref::<io::Error>() {
                return !matches!(io.raw_os_error(), Some(libc::ENOMEM | libc::EAGAIN | libc::EINTR));
            }
            cause = error.source();
        }
        true
    }
}

/// What to do about a refusal for want of a capability; nothing about other causes.
fn hint(error: &(dyn std::error::Error + 'static)) -> &'static str {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(io) = error.downcast_ref::<io::Error>()
            && matches!(io.raw_os_error(), Some(libc::EPERM | libc::EACCES))
        {
            return "; root, or CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON, are needed";
        }
        cause = error.source();
    }
    ""
}

/// The hooks of balance mode that rewrite, by program name.
pub const REWRITING: [&str; 8] = [
    "connect4",
    "connect6",
    "sendmsg4",
    "sendmsg6",
    "recvmsg4",
    "recvmsg6",
    "getpeername4",
    "getpeername6",
];

/// The hooks that follow connections, by program name.
pub const FOLLOWING: [&str; 2] = ["sock_ops", "sock_release"];

/// The packet programs, by name.
pub const PACKET: [&str; 2] = ["tc_ingress", "tc_egress"];

/// The programs that translate packets behind an Ethernet header, by name: where they come in, and where they leave.
pub const TRANSLATING: [&str; 2] = ["lb_ingress", "lb_egress"];

/// The programs that translate packets on interfaces without a link header.
pub const TRANSLATING_RAW: [&str; 2] = ["raw_ingress", "raw_egress"];

/// The size of a map that the options have no use for.
const UNUSED_ENTRIES: u32 = 64;

/// The flag of `bpf_l4_csum_replace`, on kernels that have it.
const BPF_F_IPV6: u32 = 0x80;

/// Creates the maps, or opens those that are pinned, and loads the programs of the mode.
///
/// # Errors
/// When the kernel refuses a map or program, or a pinned map has another layout.
///
/// # Kernel
/// 6.1; `bpf_set_retval` in the address hooks came with 5.18.
pub fn load(options: &Options, pins: Option<&Pins>) -> Result<Ebpf, LoadError> {
    let mut object = load_but_translators(options, pins)?;
    if options.translate && options.mode == Mode::Balance {
        for name in TRANSLATING {
            load_program(&mut object, name)?;
        }
    }
    Ok(object)
}

/// As [`load`], without the programs that translate packets: those are loaded when the first interface wants them, since the
/// kernel takes seconds to verify them.
///
/// # Errors
/// As for [`load`].
pub fn load_but_translators(options: &Options, pins: Option<&Pins>) -> Result<Ebpf, LoadError> {
    let facts = btf::kernel_facts();
    let translate = options.translate && options.mode == Mode::Balance;
    let mut features = options.features;
    if options.mode == Mode::Observe {
        features |= names::feature::OBSERVE;
        if options.packets {
            features |= names::feature::PACKETS;
        }
    }
    // Nobody writes to what is not wanted, but a map has entries.
    let dials = if features & names::feature::PACKETS == 0 {
        UNUSED_ENTRIES
    } else {
        options.sizes.sockets
    };
    let passages = if options.packets {
        names::MAX_PASSAGES
    } else {
        UNUSED_ENTRIES
    };
    let (flows, fragments) = if translate {
        (options.sizes.flows, names::MAX_FRAGMENTS)
    } else {
        (UNUSED_ENTRIES, UNUSED_ENTRIES)
    };
    let csum_ipv6_flag = if facts.csum_ipv6 { BPF_F_IPV6 } else { 0 };
    let mut loader = EbpfLoader::new();
    let sizes = options.sizes;
    loader
        .override_global(names::FEATURES, &features, true)
        .override_global(names::SK_ERR_OFFSET, &facts.error, true)
        .override_global("SK_DST_OFFSET", &facts.route, true)
        .override_global("SK_COOKIE_OFFSET", &facts.cookie, true)
        .override_global("MPTCP_FIRST_OFFSET", &facts.first_subflow, true)
        .override_global(names::CSUM_IPV6_FLAG, &csum_ipv6_flag, false)
        .override_global(aya_log::LEVEL, &options.log_level, true)
        .verifier_log_level(VerifierLogLevel::DEBUG | VerifierLogLevel::STATS)
        .map_max_entries(names::FRONTENDS, sizes.frontends)
        .map_max_entries(names::SETS, sizes.sets)
        .map_max_entries(names::LISTS, sizes.lists)
        .map_max_entries(names::TABLES, sizes.tables)
        .map_max_entries(names::BACKENDS, sizes.backends)
        .map_max_entries(names::BACKEND_INDEX, sizes.backends.saturating_mul(2))
        .map_max_entries(names::DIALS, dials)
        .map_max_entries(names::PASSAGES, passages)
        .map_max_entries(names::BACKEND_STATS, sizes.backends)
        .map_max_entries(names::SERVICE_STATS, sizes.services)
        .map_max_entries(names::SOCKETS, sizes.sockets)
        .map_max_entries(names::UDP_REVERSE, sizes.sockets)
        .map_max_entries(names::UDP_SOCKETS, sizes.sockets)
        .map_max_entries(names::FLOWS, flows)
        .map_max_entries(names::TUPLES, flows.saturating_mul(names::TUPLES_PER_FLOW))
        .map_max_entries(names::FRAGMENTS, fragments);
    if let Some(pins) = pins {
        pins.create().map_err(|(path, source)| LoadError::PinFolder {
            path: path.display().to_string(),
            source,
        })?;
        for name in names::STATE_MAPS {
            loader.map_pin_path(name, pins.map(name));
        }
        for name in names::SOCKET_MAPS {
            loader.map_pin_path(name, pins.socket_map(name));
        }
        if translate {
            for name in names::FLOW_MAPS {
                loader.map_pin_path(name, pins.flow_map(name));
            }
        } else {
            // A table in the size of one that nobody uses must not be what the next agent finds; programs that still run
            // keep theirs until they are detached.
            pins.remove_flows().map_err(|source| LoadError::PinFolder {
                path: pins.flow_folder().display().to_string(),
                source,
            })?;
        }
    }
    let mut object = loader.load(OBJECT)?;

    let mut wanted: Vec<&'static str> = Vec::new();
    if options.mode == Mode::Balance {
        wanted.extend(REWRITING);
    }
    if options.follow_connections {
        wanted.extend(FOLLOWING);
    }
    wanted.extend(PACKET);
    for name in wanted {
        load_program(&mut object, name)?;
    }
    Ok(object)
}

/// Loads a program, unless it is.
///
/// # Errors
/// When the kernel refuses it, or the object has no such program.
pub fn load_program(object: &mut Ebpf, name: &'static str) -> Result<(), LoadError> {
    let program = object.program_mut(name).ok_or(LoadError::Missing(name))?;
    if program.fd().is_ok() {
        return Ok(());
    }
    let result = match program {
        Program::CgroupSockAddr(program) => program.load(),
        Program::SockOps(program) => program.load(),
        Program::CgroupSock(program) => program.load(),
        Program::SchedClassifier(program) => program.load(),
        _ => return Err(LoadError::Missing(name)),
    };
    result.map_err(|source| LoadError::Program { program: name, source })
}

/// True if `path` lies on a BPF file system.
pub fn is_bpffs(path: &Path) -> bool {
    nix::sys::statfs::statfs(path).is_ok_and(|fs| fs.filesystem_type() == nix::sys::statfs::BPF_FS_MAGIC)
}
