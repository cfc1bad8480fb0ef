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

use aya_obj::generated::{bpf_attr, bpf_cmd, bpf_link_info, bpf_link_type, bpf_stats_type};

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
