//! The bpf(2) commands that aya does not offer in the form needed here.

use std::{
    ffi::CString,
    io,
    os::{
        fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use aya_obj::generated::{
    BPF_F_BEFORE, bpf_attach_type, bpf_attr, bpf_cmd, bpf_link_info, bpf_link_type, bpf_stats_type,
};

fn bpf(command: bpf_cmd, attr: &mut bpf_attr) -> io::Result<i32> {
    // SAFETY: `attr` is a whole zero-initialised attribute union, whose pointers outlive the call; the kernel reads and
    // writes no more than its size.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command as libc::c_long,
            std::ptr::from_mut(attr),
            size_of::<bpf_attr>(),
        )
    };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result as i32)
    }
}

fn zeroed() -> bpf_attr {
    // SAFETY: the union is made of integers; all zero is what the kernel wants of unused fields.
    unsafe { std::mem::zeroed() }
}

fn owned(fd: i32) -> OwnedFd {
    // SAFETY: the kernel has just given us this descriptor, and nobody else knows it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// `BPF_OBJ_GET`.
pub(super) fn object_get(path: &Path) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut attr = zeroed();
    attr.__bindgen_anon_4.pathname = path.as_ptr() as u64;
    bpf(bpf_cmd::BPF_OBJ_GET, &mut attr).map(owned)
}

/// `BPF_LINK_UPDATE`: swaps the program of a link atomically.
///
/// # Kernel
/// 5.7 for cgroup links, 6.6 for TCX.
pub(super) fn link_update(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    let mut attr = zeroed();
    attr.link_update.link_fd = link.as_raw_fd() as u32;
    attr.link_update.__bindgen_anon_1.new_prog_fd = program.as_raw_fd() as u32;
    bpf(bpf_cmd::BPF_LINK_UPDATE, &mut attr).map(drop)
}

/// `BPF_OBJ_PIN`.
pub(super) fn object_pin(object: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut attr = zeroed();
    attr.__bindgen_anon_4.pathname = path.as_ptr() as u64;
    attr.__bindgen_anon_4.bpf_fd = object.as_raw_fd() as u32;
    bpf(bpf_cmd::BPF_OBJ_PIN, &mut attr).map(drop)
}

/// `BPF_LINK_DETACH`: once it returns, the program is not run any more, whereas closing a link's last descriptor, or removing
/// its last pin, does so some time later.
///
/// # Kernel
/// 5.9 for cgroup links, 6.6 for TCX.
pub(super) fn link_detach(link: BorrowedFd<'_>) -> io::Result<()> {
    let mut attr = zeroed();
    attr.link_detach.link_fd = link.as_raw_fd() as u32;
    bpf(bpf_cmd::BPF_LINK_DETACH, &mut attr).map(drop)
}

/// Where packets meet a program on their way through an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    /// They come in.
    Ingress,
    /// They leave.
    Egress,
}

impl Direction {
    /// Both.
    pub const BOTH: [Self; 2] = [Self::Ingress, Self::Egress];

    fn tcx(self) -> bpf_attach_type {
        match self {
            Self::Ingress => bpf_attach_type::BPF_TCX_INGRESS,
            Self::Egress => bpf_attach_type::BPF_TCX_EGRESS,
        }
    }
}

/// Where among the programs of an interface a new one stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// Before all that are there.
    First,
    /// Behind all that are there.
    Last,
}

/// `BPF_LINK_CREATE` of a TCX link on an interface of the calling thread's network namespace.
///
/// # Kernel
/// 6.6.
pub(super) fn tcx_link(
    program: BorrowedFd<'_>,
    interface: u32,
    direction: Direction,
    order: Order,
) -> io::Result<OwnedFd> {
    let mut attr = zeroed();
    attr.link_create.__bindgen_anon_1.prog_fd = program.as_raw_fd() as u32;
    attr.link_create.__bindgen_anon_2.target_ifindex = interface;
    attr.link_create.attach_type = direction.tcx() as u32;
    attr.link_create.flags = match order {
        Order::First => BPF_F_BEFORE,
        Order::Last => 0,
    };
    bpf(bpf_cmd::BPF_LINK_CREATE, &mut attr).map(owned)
}

/// `BPF_PROG_QUERY`: what an interface of the calling thread's network namespace runs, in its order: (link, program), by id. A
/// program that is attached without a link has 0 as its link.
///
/// # Errors
/// The kernel's.
///
/// # Kernel
/// 6.6.
pub fn tcx_programs(interface: u32, direction: Direction) -> io::Result<Vec<(u32, u32)>> {
    /// The most programs that an interface runs each way: `BPF_MPROG_MAX` in the kernel.
    const MOST: usize = 64;
    let (mut programs, mut links) = ([0_u32; MOST], [0_u32; MOST]);
    let mut attr = zeroed();
    attr.query.__bindgen_anon_1.target_ifindex = interface;
    attr.query.attach_type = direction.tcx() as u32;
    attr.query.prog_ids = programs.as_mut_ptr() as u64;
    attr.query.link_ids = links.as_mut_ptr() as u64;
    attr.query.__bindgen_anon_2.count = MOST as u32;
    match bpf(bpf_cmd::BPF_PROG_QUERY, &mut attr) {
        Ok(_) => {}
        // Nothing was ever attached there.
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(Vec::new()),
        Err(error) => return Err(error),
    }
    // SAFETY: both members of the union are the same integer.
    let count = unsafe { attr.query.__bindgen_anon_2.count } as usize;
    Ok(links.into_iter().zip(programs).take(count).collect())
}

/// What a link is attached to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    /// A cgroup, by id (its inode); 0 once it is gone.
    Cgroup(u64),
    /// An interface, by index; 0 once it is gone.
    Interface(u32),
    /// Something that Evenkeel does not attach to.
    Other,
}

/// What the kernel says of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LinkInfo {
    /// Its own id.
    pub(super) id: u32,
    /// Id of its program.
    pub(super) program_id: u32,
    /// What it is attached to.
    pub(super) target: Target,
}

/// `BPF_OBJ_GET_INFO_BY_FD` of a link.
pub(super) fn link_info(link: BorrowedFd<'_>) -> io::Result<LinkInfo> {
    // SAFETY: the struct is made of integers.
    let mut info: bpf_link_info = unsafe { std::mem::zeroed() };
    let mut attr = zeroed();
    attr.info.bpf_fd = link.as_raw_fd() as u32;
    attr.info.info_len = size_of::<bpf_link_info>() as u32;
    attr.info.info = &raw mut info as u64;
    bpf(bpf_cmd::BPF_OBJ_GET_INFO_BY_FD, &mut attr)?;
    // SAFETY: the member of the union is the one that the link's type names, and all are integers.
    let target = unsafe {
        match info.type_ {
            CGROUP_LINK => Target::Cgroup(info.__bindgen_anon_1.cgroup.cgroup_id),
            TCX_LINK => Target::Interface(info.__bindgen_anon_1.tcx.ifindex),
            _ => Target::Other,
        }
    };
    Ok(LinkInfo {
        id: info.id,
        program_id: info.prog_id,
        target,
    })
}

const CGROUP_LINK: u32 = bpf_link_type::BPF_LINK_TYPE_CGROUP as u32;
const TCX_LINK: u32 = bpf_link_type::BPF_LINK_TYPE_TCX as u32;

/// `BPF_ENABLE_STATS`: run statistics of programs are kept while the descriptor is open.
///
/// # Errors
/// The kernel's; it needs CAP_SYS_ADMIN.
///
/// # Kernel
/// 5.8.
pub fn enable_stats() -> io::Result<OwnedFd> {
    let mut attr = zeroed();
    attr.enable_stats.type_ = bpf_stats_type::BPF_STATS_RUN_TIME as u32;
    bpf(bpf_cmd::BPF_ENABLE_STATS, &mut attr).map(owned)
}
