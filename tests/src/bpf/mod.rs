//! The bpf(2) commands that tests need beside the library: what is attached, what a stranger with root can do to it, small
//! programs by hand, and runs of programs on crafted packets.
//!
//! The agent's own code is not asked, so that a test does not believe what it checks. Every descriptor that the kernel
//! gives is owned.

mod links;
mod programs;

use std::{
    io,
    os::fd::{FromRawFd, OwnedFd},
};

use aya_obj::generated::{bpf_attr, bpf_cmd};

pub use links::*;
pub use programs::*;

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
    i32::try_from(result)
        .ok()
        .filter(|result| *result >= 0)
        .ok_or_else(io::Error::last_os_error)
}

fn zeroed() -> bpf_attr {
    // SAFETY: the union is made of integers; all zero is what the kernel wants of unused fields.
    unsafe { std::mem::zeroed() }
}

fn owned(fd: i32) -> OwnedFd {
    // SAFETY: the kernel has just given us this descriptor, and nobody else knows it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}
