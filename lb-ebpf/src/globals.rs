//! Constants that the loader sets. The verifier knows their values, so code behind a feature that is off costs nothing.

use aya_ebpf::Global;

/// Bits of [`lb_common::maps::feature`].
#[unsafe(no_mangle)]
static FEATURES: Global<u32> = Global::new(lb_common::maps::feature::STATE);

/// Offset of `sk_err` in `struct sock`, in bytes; 0 where it is not known.
#[unsafe(no_mangle)]
static SK_ERR_OFFSET: Global<u32> = Global::new(0);

/// Offset of `sk_dst_cache` in `struct sock`, in bytes; 0 where it is not known.
#[unsafe(no_mangle)]
static SK_DST_OFFSET: Global<u32> = Global::new(0);

/// Offset of `skc_cookie` in `struct sock`, in bytes; 0 where it is not known.
#[unsafe(no_mangle)]
static SK_COOKIE_OFFSET: Global<u32> = Global::new(0);

/// Offset of `first` in `struct mptcp_sock`, in bytes; 0 where it is not known, or there is no MPTCP.
#[unsafe(no_mangle)]
static MPTCP_FIRST_OFFSET: Global<u32> = Global::new(0);

/// `BPF_F_IPV6` where the kernel knows it, else 0.
#[unsafe(no_mangle)]
static CSUM_IPV6_FLAG: Global<u32> = Global::new(0);

/// True if the feature's bit is set.
#[inline(always)]
pub fn has(feature: u32) -> bool {
    FEATURES.load() & feature != 0
}

/// Offset of `sk_err`, 0 if unknown.
#[inline(always)]
pub fn sk_err_offset() -> usize {
    SK_ERR_OFFSET.load() as usize
}

/// Offset of `sk_dst_cache`, 0 if unknown.
#[inline(always)]
pub fn sk_dst_offset() -> usize {
    SK_DST_OFFSET.load() as usize
}

/// Offset of `skc_cookie`, 0 if unknown.
#[inline(always)]
pub fn sk_cookie_offset() -> usize {
    SK_COOKIE_OFFSET.load() as usize
}

/// Offset of the pointer to the first subflow, 0 if unknown.
#[inline(always)]
pub fn mptcp_first_offset() -> usize {
    MPTCP_FIRST_OFFSET.load() as usize
}

/// What tells `bpf_l4_csum_replace` that an IPv6 address changes, 0 where the kernel does not ask.
#[inline(always)]
pub fn csum_ipv6_flag() -> u64 {
    CSUM_IPV6_FLAG.load() as u64
}
