//! Running a program on a packet that is said to be on a device, and reading per-CPU counters in one call.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd},
};

use anyhow::{Context, Result};

use super::{Device, Hook, Plane};
use crate::bpf;

/// What a program made of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// The next program decides (`TC_ACT_UNSPEC`).
    Next,
    /// Dropped (`TC_ACT_SHOT`).
    Drop,
    /// Sent elsewhere (`TC_ACT_REDIRECT`): answered.
    Answer,
    /// Anything else, which no program should say.
    Other(i32),
}

impl From<i32> for Verdict {
    fn from(code: i32) -> Self {
        match code {
            -1 => Self::Next,
            2 => Self::Drop,
            7 => Self::Answer,
            other => Self::Other(other),
        }
    }
}

impl Plane {
    /// Runs the program of a hook on a packet that a device has; returns its verdict and the packet afterwards.
    ///
    /// # Errors
    /// Where the kernel does not take the packet: it refuses less than an Ethernet header and, on some kernels, an IP
    /// packet without its IP header.
    pub fn run(&self, hook: Hook, device: Device, packet: &[u8]) -> Result<(Verdict, Vec<u8>)> {
        self.run_program(hook.program(), device, packet)
    }

    /// Runs the program of a hook, for devices without link headers, on a packet that begins with its IP header.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn run_bare(&self, hook: Hook, device: Device, packet: &[u8]) -> Result<(Verdict, Vec<u8>)> {
        let name = match hook {
            Hook::Ingress => "raw_ingress",
            Hook::Egress => "raw_egress",
        };
        self.run_program(name, device, packet)
    }

    /// Runs the program of a hook on a packet that a card has summed up; `None` where the kernel cannot tell what the program
    /// made of the sum.
    ///
    /// # Errors
    /// Where the sum is wrong afterwards, and as [`Self::run`].
    pub fn run_summed(&self, hook: Hook, device: Device, packet: &[u8]) -> Result<Option<(Verdict, Vec<u8>)>> {
        let name = match hook {
            Hook::Ingress => "lb_ingress",
            Hook::Egress => "lb_egress",
        };
        let program = self.program(name)?.fd()?.as_fd();
        match bpf::run_on_summed(program, packet, self.index(device)) {
            Ok((verdict, out)) => Ok(Some((verdict.into(), out))),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(None),
            Err(error) => Err(error).with_context(|| format!("run {name} on a packet that was summed up")),
        }
    }

    /// Runs a program by its name.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn run_program(&self, name: &str, device: Device, packet: &[u8]) -> Result<(Verdict, Vec<u8>)> {
        let program = self.program(name)?.fd()?.as_fd();
        let (verdict, out) = bpf::run_on_device(program, packet, self.index(device))
            .with_context(|| format!("run {name} on {} bytes", packet.len()))?;
        Ok((verdict.into(), out))
    }
}

/// The values of a per-CPU array of counters, each summed over the CPUs.
pub fn summed(map: BorrowedFd<'_>) -> io::Result<Vec<u64>> {
    let cpus = aya::util::nr_cpus().map_err(|(_, error)| error)?;
    let count = lb_common::counter::COUNTERS as usize;
    let values = bpf::read_array(map.as_raw_fd(), count, cpus)?;
    Ok(values.chunks(cpus).map(|cell| cell.iter().sum()).collect())
}
