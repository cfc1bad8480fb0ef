//! Program types, helpers and map types, each tried by loading something tiny.

use aya::{
    maps::MapType,
    programs::ProgramType,
    sys::{BpfHelper, is_helper_supported, is_map_supported, is_program_supported},
};

use super::{Check, State};

/// The program types that the agent loads, with the hooks that they serve.
const PROGRAMS: [(&str, ProgramType, &str); 4] = [
    (
        "cgroup_sock_addr",
        ProgramType::CgroupSockAddr,
        "connect, sendmsg, recvmsg and getpeername hooks",
    ),
    ("cgroup_sock", ProgramType::CgroupSock, "the sock_release hook"),
    ("sock_ops", ProgramType::SockOps, "connection outcomes and latencies"),
    ("sched_cls", ProgramType::SchedClassifier, "the packet programs"),
];

/// The helpers that the programs call.
const HELPERS: [(&str, ProgramType, BpfHelper); 17] = [
    (
        "set_retval",
        ProgramType::CgroupSockAddr,
        BpfHelper::BPF_FUNC_set_retval,
    ),
    (
        "get_socket_cookie",
        ProgramType::CgroupSockAddr,
        BpfHelper::BPF_FUNC_get_socket_cookie,
    ),
    (
        "get_netns_cookie",
        ProgramType::CgroupSockAddr,
        BpfHelper::BPF_FUNC_get_netns_cookie,
    ),
    (
        "get_current_cgroup_id",
        ProgramType::CgroupSockAddr,
        BpfHelper::BPF_FUNC_get_current_cgroup_id,
    ),
    (
        "get_current_ancestor_cgroup_id",
        ProgramType::CgroupSockAddr,
        BpfHelper::BPF_FUNC_get_current_ancestor_cgroup_id,
    ),
    (
        "ktime_get_ns",
        ProgramType::CgroupSockAddr,
        BpfHelper::BPF_FUNC_ktime_get_ns,
    ),
    (
        "sock_ops_cb_flags_set",
        ProgramType::SockOps,
        BpfHelper::BPF_FUNC_sock_ops_cb_flags_set,
    ),
    (
        "skc_to_tcp_sock",
        ProgramType::SockOps,
        BpfHelper::BPF_FUNC_skc_to_tcp_sock,
    ),
    (
        "probe_read_kernel",
        ProgramType::SockOps,
        BpfHelper::BPF_FUNC_probe_read_kernel,
    ),
    (
        "ringbuf_output",
        ProgramType::SockOps,
        BpfHelper::BPF_FUNC_ringbuf_output,
    ),
    (
        "l4_csum_replace",
        ProgramType::SchedClassifier,
        BpfHelper::BPF_FUNC_l4_csum_replace,
    ),
    ("redirect", ProgramType::SchedClassifier, BpfHelper::BPF_FUNC_redirect),
    (
        "skb_adjust_room",
        ProgramType::SchedClassifier,
        BpfHelper::BPF_FUNC_skb_adjust_room,
    ),
    (
        "skb_change_tail",
        ProgramType::SchedClassifier,
        BpfHelper::BPF_FUNC_skb_change_tail,
    ),
    (
        "skb_load_bytes",
        ProgramType::SchedClassifier,
        BpfHelper::BPF_FUNC_skb_load_bytes,
    ),
    (
        "skb_store_bytes",
        ProgramType::SchedClassifier,
        BpfHelper::BPF_FUNC_skb_store_bytes,
    ),
    (
        "ktime_get_coarse_ns",
        ProgramType::SchedClassifier,
        BpfHelper::BPF_FUNC_ktime_get_coarse_ns,
    ),
];

/// The map types that the programs use.
const MAPS: [(&str, MapType); 6] = [
    ("hash", MapType::Hash),
    ("array", MapType::Array),
    ("percpu_array", MapType::PerCpuArray),
    ("lru_hash", MapType::LruHash),
    ("lpm_trie", MapType::LpmTrie),
    ("ringbuf", MapType::RingBuf),
];

pub(super) fn examine() -> Vec<Check> {
    let programs = PROGRAMS.iter().map(|&(name, kind, purpose)| {
        let wanted = format!("loads ({purpose})");
        judge(&format!("program.{name}"), &wanted, is_program_supported(kind))
    });
    let helpers = HELPERS.iter().map(|&(name, kind, helper)| {
        judge(
            &format!("helper.{name}"),
            "available",
            is_helper_supported(kind, helper),
        )
    });
    let maps = MAPS
        .iter()
        .map(|&(name, kind)| judge(&format!("map.{name}"), "can be made", is_map_supported(kind)));
    programs.chain(helpers).chain(maps).collect()
}

fn judge<E: std::error::Error>(id: &str, wanted: &str, supported: Result<bool, E>) -> Check {
    match supported {
        Ok(true) => Check::new(id, State::Ok, "yes", wanted, ""),
        Ok(false) => Check::new(
            id,
            State::Fail,
            "no",
            wanted,
            "use a kernel from 6.1 on, built with CONFIG_CGROUP_BPF and CONFIG_NET_CLS_BPF",
        ),
        Err(error) => Check::new(
            id,
            State::Fail,
            format!("cannot tell: {}", cause(&error)),
            wanted,
            "run as root, or with CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON",
        ),
    }
}

/// The innermost cause, which is what the kernel said.
fn cause(error: &dyn std::error::Error) -> String {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    innermost.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_answer_of_a_probe_has_its_state() {
        let eperm = || std::io::Error::from_raw_os_error(libc::EPERM);
        assert_eq!(judge("x", "y", Ok::<_, std::io::Error>(true)).state, State::Ok);
        assert_eq!(judge("x", "y", Ok::<_, std::io::Error>(false)).state, State::Fail);
        let refused = judge("x", "y", Err(eperm()));
        assert_eq!(refused.state, State::Fail);
        assert!(refused.found.contains("not permitted"), "{refused:?}");
    }
}
