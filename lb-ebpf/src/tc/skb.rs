//! The packet's bytes and the few fields of its context that the programs read.
//!
//! Bytes are read and written through helpers, so that they may lie anywhere in the packet's memory, shared or not.

use aya_ebpf::{
    bindings::{__sk_buff, BPF_F_RECOMPUTE_CSUM},
    helpers::{bpf_skb_load_bytes, bpf_skb_store_bytes},
};
use lb_common::packet::{Read, Wire};

/// A packet as [`lb_common::packet`] reads it.
pub struct Bytes(pub *mut __sk_buff);

impl Read for Bytes {
    #[inline(always)]
    fn read<T: Wire>(&self, offset: usize) -> Option<T> {
        let mut value = core::mem::MaybeUninit::<T>::uninit();
        // SAFETY: the helper writes the whole value, or nothing and an error.
        unsafe {
            let failed = bpf_skb_load_bytes(
                self.0.cast(),
                offset as u32,
                value.as_mut_ptr().cast(),
                size_of::<T>() as u32,
            );
            if failed == 0 { Some(value.assume_init()) } else { None }
        }
    }
}

/// Writes bytes at an offset; false if they cannot be written.
#[inline(always)]
pub fn write<T: Wire>(skb: *mut __sk_buff, offset: u32, value: &T) -> bool {
    // SAFETY: the helper reads the value alone.
    unsafe { bpf_skb_store_bytes(skb.cast(), offset, (&raw const *value).cast(), size_of::<T>() as u32, 0) == 0 }
}

/// Writes bytes that no checksum in the packet makes good, so that a sum over all of it, as a network card gives, changes with
/// them; false if they cannot be written.
#[inline(always)]
pub fn write_alone<T: Wire>(skb: *mut __sk_buff, offset: u32, value: &T) -> bool {
    // SAFETY: the helper reads the value alone.
    unsafe {
        bpf_skb_store_bytes(
            skb.cast(),
            offset,
            (&raw const *value).cast(),
            size_of::<T>() as u32,
            BPF_F_RECOMPUTE_CSUM as u64,
        ) == 0
    }
}

/// The protocol behind the link header, network order.
#[inline(always)]
pub fn protocol(skb: *mut __sk_buff) -> u16 {
    // SAFETY: a field of the context, read as the kernel lays it out.
    unsafe { core::ptr::read_volatile(&raw const (*skb).protocol) as u16 }
}

/// The index of the interface.
#[inline(always)]
pub fn ifindex(skb: *mut __sk_buff) -> u32 {
    // SAFETY: as above.
    unsafe { core::ptr::read_volatile(&raw const (*skb).ifindex) }
}
