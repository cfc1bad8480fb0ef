//! What a stranger with root can do to the agent's links, and how a test sees what is attached.
//!
//! Raw bpf(2) commands on pins; the agent's own code is not asked, so that a test does not believe what it checks.

use std::{
    ffi::CString,
    fs::File,
    io,
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use aya_obj::generated::{bpf_attach_type, bpf_cmd};

use super::{bpf, zeroed};

/// The cgroup hooks that Evenkeel may use, by the name of its program.
pub const HOOKS: [(&str, bpf_attach_type); 10] = [
    ("connect4", bpf_attach_type::BPF_CGROUP_INET4_CONNECT),
    ("connect6", bpf_attach_type::BPF_CGROUP_INET6_CONNECT),
    ("sendmsg4", bpf_attach_type::BPF_CGROUP_UDP4_SENDMSG),
    ("sendmsg6", bpf_attach_type::BPF_CGROUP_UDP6_SENDMSG),
    ("recvmsg4", bpf_attach_type::BPF_CGROUP_UDP4_RECVMSG),
    ("recvmsg6", bpf_attach_type::BPF_CGROUP_UDP6_RECVMSG),
    ("getpeername4", bpf_attach_type::BPF_CGROUP_INET4_GETPEERNAME),
    ("getpeername6", bpf_attach_type::BPF_CGROUP_INET6_GETPEERNAME),
    ("sock_ops", bpf_attach_type::BPF_CGROUP_SOCK_OPS),
    ("sock_release", bpf_attach_type::BPF_CGROUP_INET_SOCK_RELEASE),
];

/// Opens a pinned link, map or program.
///
/// # Errors
/// The kernel's.
pub fn open_pin(path: &Path) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut attr = zeroed();
    attr.__bindgen_anon_4.pathname = path.as_ptr() as u64;
    let fd = bpf(bpf_cmd::BPF_OBJ_GET, &mut attr)?;
    // SAFETY: the kernel has just given us this descriptor, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Detaches a pinned link by force; its pin stays.
///
/// # Errors
/// The kernel's.
pub fn detach_pinned_link(path: &Path) -> io::Result<()> {
    let link = open_pin(path)?;
    let mut attr = zeroed();
    attr.link_detach.link_fd = link.as_raw_fd() as u32;
    bpf(bpf_cmd::BPF_LINK_DETACH, &mut attr).map(drop)
}

/// How many programs are attached to a cgroup itself at one hook.
///
/// # Errors
/// The kernel's.
pub fn attached(cgroup: &Path, hook: bpf_attach_type) -> io::Result<u32> {
    let cgroup = File::open(cgroup)?;
    let mut attr = zeroed();
    attr.query.__bindgen_anon_1.target_fd = cgroup.as_raw_fd() as u32;
    attr.query.attach_type = hook as u32;
    bpf(bpf_cmd::BPF_PROG_QUERY, &mut attr)?;
    // SAFETY: the kernel has written the count; the member is an integer.
    Ok(unsafe { attr.query.__bindgen_anon_2.prog_cnt })
}

/// How many programs are attached to an interface of the calling thread's namespace by TCX (from 6.6 on; below, none can be).
///
/// # Errors
/// The kernel's.
pub fn attached_to_interface(index: u32, hook: bpf_attach_type) -> io::Result<u32> {
    let mut attr = zeroed();
    attr.query.__bindgen_anon_1.target_ifindex = index;
    attr.query.attach_type = hook as u32;
    match bpf(bpf_cmd::BPF_PROG_QUERY, &mut attr) {
        // SAFETY: as above.
        Ok(_) => Ok(unsafe { attr.query.__bindgen_anon_2.prog_cnt }),
        // A kernel without TCX does not know the hook; one with it, an interface that never had a program.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOENT)) => Ok(0),
        Err(error) => Err(error),
    }
}

/// (link, program), by id, of an interface of the calling thread's namespace, in the order in which they run; from 6.6 on.
///
/// # Errors
/// The kernel's.
pub fn programs_of_interface(index: u32, hook: bpf_attach_type) -> io::Result<Vec<(u32, u32)>> {
    let (mut programs, mut links) = ([0_u32; 64], [0_u32; 64]);
    let mut attr = zeroed();
    attr.query.__bindgen_anon_1.target_ifindex = index;
    attr.query.attach_type = hook as u32;
    attr.query.prog_ids = programs.as_mut_ptr() as u64;
    attr.query.link_ids = links.as_mut_ptr() as u64;
    attr.query.__bindgen_anon_2.count = 64;
    match bpf(bpf_cmd::BPF_PROG_QUERY, &mut attr) {
        Ok(_) => {}
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(Vec::new()),
        Err(error) => return Err(error),
    }
    // SAFETY: as above.
    let count = unsafe { attr.query.__bindgen_anon_2.count } as usize;
    Ok(links.into_iter().zip(programs).take(count).collect())
}

/// The names of the hooks at which programs are attached to a cgroup itself, in the order of [`HOOKS`].
///
/// # Errors
/// The kernel's.
pub fn attached_hooks(cgroup: &Path) -> io::Result<Vec<&'static str>> {
    let mut found = Vec::new();
    for (name, hook) in HOOKS {
        if attached(cgroup, hook)? > 0 {
            found.push(name);
        }
    }
    Ok(found)
}
