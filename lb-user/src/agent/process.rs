//! What the agent's own process uses, as the kernel counts it.

use std::fs;

use nix::{
    sys::resource::{UsageWho, getrusage},
    unistd::{SysconfVar, sysconf},
};

/// Resident memory in bytes, mapped kernel maps included; none where it cannot be read.
pub(super) fn resident_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = text.split(' ').nth(1)?.parse().ok()?;
    let page = sysconf(SysconfVar::PAGE_SIZE).ok()??;
    Some(pages * u64::try_from(page).ok()?)
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
