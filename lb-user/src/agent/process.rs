//! What the agent's own process uses, as the kernel counts it.

use nix::sys::resource::{UsageWho, getrusage};
use procfs::process::Process;

/// Resident memory in bytes, mapped kernel maps included; none where it cannot be read.
pub(super) fn resident_bytes() -> Option<u64> {
    let memory = Process::myself().and_then(|me| me.statm()).ok()?;
    Some(memory.resident * procfs::page_size())
}

/// Seconds on CPUs, in user space and in the kernel; none where it cannot be read.
pub(super) fn cpu_seconds() -> Option<f64> {
    let used = getrusage(UsageWho::RUSAGE_SELF).ok()?;
    let seconds = |time: nix::sys::time::TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
    Some(seconds(used.user_time()) + seconds(used.system_time()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_uses_memory_and_time() {
        let held = vec![1_u8; 8 << 20];
        assert!(resident_bytes().is_some_and(|bytes| bytes > 8 << 20));
        assert!(held.iter().all(|&byte| byte == 1));
        let before = cpu_seconds().expect("readable");
        while cpu_seconds().expect("readable") <= before {}
    }
}
