//! The bpf(2) commands that tests need beside the library: small programs by hand, and runs of programs on crafted packets.
//!
//! No knowledge of the product lives here. The invariant: every descriptor that the kernel gives is owned.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
};

use aya_obj::generated::{bpf_attach_type, bpf_attr, bpf_cmd, bpf_insn, bpf_map_type, bpf_prog_type};

use super::{bpf, owned, zeroed};

/// Makes an array of one counter.
pub fn counter() -> io::Result<OwnedFd> {
    let mut attr = zeroed();
    // SAFETY: the member is plain data; writing it initialises what the command reads.
    let make = unsafe { &mut attr.__bindgen_anon_1 };
    make.map_type = bpf_map_type::BPF_MAP_TYPE_ARRAY as u32;
    make.key_size = 4;
    make.value_size = 8;
    make.max_entries = 1;
    bpf(bpf_cmd::BPF_MAP_CREATE, &mut attr).map(owned)
}

/// Reads a counter made by [`counter`].
pub fn read_counter(map: &OwnedFd) -> io::Result<u64> {
    let (key, mut value) = (0u32, 0u64);
    let mut attr = zeroed();
    // SAFETY: as above.
    let lookup = unsafe { &mut attr.__bindgen_anon_2 };
    lookup.map_fd = map.as_raw_fd() as u32;
    lookup.key = &raw const key as u64;
    lookup.__bindgen_anon_1.value = &raw mut value as u64;
    bpf(bpf_cmd::BPF_MAP_LOOKUP_ELEM, &mut attr)?;
    Ok(value)
}

/// One instruction.
pub fn insn(code: u8, dst: u8, src: u8, off: i16, imm: i32) -> bpf_insn {
    bpf_insn {
        code,
        _bitfield_align_1: [],
        _bitfield_1: bpf_insn::new_bitfield_1(dst, src),
        off,
        imm,
    }
}

/// Loads a sock_ops program.
pub fn load_sock_ops(instructions: &[bpf_insn]) -> io::Result<OwnedFd> {
    load(
        instructions,
        bpf_prog_type::BPF_PROG_TYPE_SOCK_OPS,
        Some(bpf_attach_type::BPF_CGROUP_SOCK_OPS),
    )
}

fn load(instructions: &[bpf_insn], kind: bpf_prog_type, attach: Option<bpf_attach_type>) -> io::Result<OwnedFd> {
    let mut attr = zeroed();
    // SAFETY: as above.
    let load = unsafe { &mut attr.__bindgen_anon_3 };
    load.prog_type = kind as u32;
    load.insns = instructions.as_ptr() as u64;
    load.insn_cnt = instructions.len() as u32;
    load.license = c"GPL".as_ptr() as u64;
    load.expected_attach_type = attach.map_or(0, |attach| attach as u32);
    bpf(bpf_cmd::BPF_PROG_LOAD, &mut attr).map(owned)
}

/// Attaches a sock_ops program to a cgroup, beside others, until the link is dropped.
pub fn attach_sock_ops(program: &OwnedFd, cgroup: impl AsFd) -> io::Result<OwnedFd> {
    let mut attr = zeroed();
    attr.link_create.__bindgen_anon_1.prog_fd = program.as_raw_fd() as u32;
    attr.link_create.__bindgen_anon_2.target_fd = cgroup.as_fd().as_raw_fd() as u32;
    attr.link_create.attach_type = bpf_attach_type::BPF_CGROUP_SOCK_OPS as u32;
    bpf(bpf_cmd::BPF_LINK_CREATE, &mut attr).map(owned)
}

/// Loads a packet program.
pub fn load_classifier(instructions: &[bpf_insn]) -> io::Result<OwnedFd> {
    load(instructions, bpf_prog_type::BPF_PROG_TYPE_SCHED_CLS, None)
}

/// Runs a packet program on one packet of a device several times over; returns nanoseconds a run.
///
/// The packet is not made anew between the runs: each gets what the last one left.
pub fn time_on_device(program: impl AsFd, packet: &[u8], ifindex: u32, repeat: u32) -> io::Result<u32> {
    let context = context_of(ifindex);
    let mut attr = test_of(&program, packet, &context);
    attr.test.repeat = repeat;
    bpf(bpf_cmd::BPF_PROG_TEST_RUN, &mut attr)?;
    // SAFETY: the command has written the duration.
    Ok(unsafe { attr.test.duration })
}

/// A run of a program on a packet in a context, both of which must outlive it.
fn test_of(program: &impl AsFd, packet: &[u8], context: &[u8]) -> bpf_attr {
    let mut attr = zeroed();
    attr.test.prog_fd = program.as_fd().as_raw_fd() as u32;
    attr.test.data_in = packet.as_ptr() as u64;
    attr.test.data_size_in = packet.len() as u32;
    attr.test.ctx_in = context.as_ptr() as u64;
    attr.test.ctx_size_in = context.len() as u32;
    attr
}

/// A `struct __sk_buff` up to its `cb`, with a device; the kernel takes a shorter context.
fn context_of(ifindex: u32) -> [u8; 48] {
    /// Where `ifindex` lies in it.
    const IFINDEX: usize = 40;
    let mut context = [0u8; 48];
    context[IFINDEX..IFINDEX + 4].copy_from_slice(&ifindex.to_ne_bytes());
    context
}

/// Runs a packet program on a packet; returns its verdict and the packet afterwards.
pub fn run_on_packet(program: impl AsFd, packet: &[u8]) -> io::Result<(i32, Vec<u8>)> {
    run_on_device(program, packet, 0)
}

/// Runs a packet program on a packet of a device of this thread's network namespace (0 for its loopback).
pub fn run_on_device(program: impl AsFd, packet: &[u8], ifindex: u32) -> io::Result<(i32, Vec<u8>)> {
    run_flagged(program, packet, ifindex, 0)
}

/// Runs a packet program on a packet of which a network card has summed up every byte, and which must be right afterwards:
/// `EBADMSG` if it is not, `EINVAL` where the kernel cannot say.
///
/// # Kernel
/// 6.17.
pub fn run_on_summed(program: impl AsFd, packet: &[u8], ifindex: u32) -> io::Result<(i32, Vec<u8>)> {
    /// `BPF_F_TEST_SKB_CHECKSUM_COMPLETE`.
    const CHECKSUM_COMPLETE: u32 = 1 << 2;
    run_flagged(program, packet, ifindex, CHECKSUM_COMPLETE)
}

fn run_flagged(program: impl AsFd, packet: &[u8], ifindex: u32, flags: u32) -> io::Result<(i32, Vec<u8>)> {
    let context = context_of(ifindex);
    let mut out = vec![0u8; packet.len() + 256];
    let mut attr = test_of(&program, packet, &context);
    attr.test.data_out = out.as_mut_ptr() as u64;
    attr.test.data_size_out = out.len() as u32;
    attr.test.flags = flags;
    bpf(bpf_cmd::BPF_PROG_TEST_RUN, &mut attr)?;
    // SAFETY: the command has written these integers.
    let (verdict, len) = unsafe { (attr.test.retval.cast_signed(), attr.test.data_size_out as usize) };
    out.truncate(len);
    Ok((verdict, out))
}

/// Reads the first `count` elements of a per-CPU array of eight bytes each, `cpus` values an element.
///
/// # Kernel
/// 5.13, where per-CPU arrays learnt batches.
pub fn read_array(map: i32, count: usize, cpus: usize) -> io::Result<Vec<u64>> {
    let mut keys = vec![0u32; count];
    let mut values = vec![0u64; count * cpus];
    let mut next = 0u32;
    let mut attr = zeroed();
    attr.batch.in_batch = 0;
    attr.batch.out_batch = &raw mut next as u64;
    attr.batch.keys = keys.as_mut_ptr() as u64;
    attr.batch.values = values.as_mut_ptr() as u64;
    attr.batch.count = count as u32;
    attr.batch.map_fd = map as u32;
    match bpf(bpf_cmd::BPF_MAP_LOOKUP_BATCH, &mut attr) {
        Ok(_) => {}
        // The end of the array was reached: all that was asked for, or less.
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
        Err(error) => return Err(error),
    }
    // SAFETY: the command has written the count.
    let read = unsafe { attr.batch.count } as usize;
    if read != count {
        return Err(io::Error::other(format!("{read} of {count} elements were read")));
    }
    Ok(values)
}
