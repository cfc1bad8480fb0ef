//! MPTCP has two sockets: the application's, which `getpeername` and `sock_release` see, and its first subflow, a TCP socket
//! that the connect hooks and the socket callbacks see. State is kept by the subflow's cookie; here it is found from the
//! application's socket.

use crate::globals;
use aya_ebpf::{cty::c_void, helpers::generated::bpf_probe_read_kernel};

/// The protocol number of an MPTCP socket.
pub const IPPROTO_MPTCP: u32 = 262;

/// The cookie of the first subflow of the MPTCP socket (a kernel address); 0 where it cannot be known.
#[inline(always)]
pub fn subflow_cookie(socket: *const c_void) -> u64 {
    let (first, cookie) = (globals::mptcp_first_offset(), globals::sk_cookie_offset());
    if first == 0 || cookie == 0 {
        return 0;
    }
    // SAFETY: `struct mptcp_sock` begins with its `struct sock`, and a fault reads as zero.
    let subflow = unsafe { word(socket.cast::<u8>().add(first).cast()) };
    if subflow == 0 {
        return 0;
    }
    // SAFETY: the address of a `struct sock`; a fault reads as zero.
    unsafe { word((subflow as *const u8).add(cookie).cast()) }
}

/// The eight bytes at a kernel address; 0 if they cannot be read.
///
/// # Safety
///
/// The helper checks the address; what is read there is a number, whatever it means.
#[inline(always)]
pub unsafe fn word(address: *const c_void) -> u64 {
    let mut value: u64 = 0;
    // SAFETY: the destination is eight bytes of our own.
    let failed = unsafe { bpf_probe_read_kernel((&raw mut value).cast(), size_of::<u64>() as u32, address) };
    if failed == 0 { value } else { 0 }
}
