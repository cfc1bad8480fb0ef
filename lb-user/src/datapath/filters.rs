//! Programs as filters of the clsact qdisc, for kernels whose interfaces have no links for programs (before 6.6).
//!
//! A filter belongs to nobody: it outlives who made it. Ours are known by their priority together with their name. The
//! invariants: a filter's program is replaced in one step, so that no packet passes between two of them; what others have
//! attached stays, their qdisc included, and so does a clsact qdisc without filters, because whose it is cannot be told.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

use super::syscall::Direction;
use crate::netlink::{
    NLM_F_CREATE, NLM_F_EXCL, Part, attribute, broken, change, dump, native, push, push_text, text, word32,
};

// Numbers of linux/rtnetlink.h, linux/pkt_sched.h and linux/pkt_cls.h; all are part of the kernel's stable interface.
const NEWQDISC: u16 = 36;
const NEWTFILTER: u16 = 44;
const DELTFILTER: u16 = 45;
const GETTFILTER: u16 = 46;
const TCA_KIND: u16 = 1;
const TCA_OPTIONS: u16 = 2;
const TCA_BPF_FD: u16 = 6;
const TCA_BPF_NAME: u16 = 7;
const TCA_BPF_FLAGS: u16 = 8;
const TCA_BPF_ID: u16 = 11;
const DIRECT_ACTION: u32 = 1;
const CLSACT: u32 = 0xffff_fff1;
const CLSACT_HANDLE: u32 = 0xffff_0000;
/// `struct tcmsg`.
const HEADER: usize = 20;
/// Bytes of an attribute's header.
const NESTED: usize = 4;

/// A filter that runs a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter {
    /// Its priority: the lowest runs first.
    pub priority: u16,
    /// Its number within the priority.
    pub handle: u32,
    /// The name that its maker gave it.
    pub name: String,
    /// Its program's id.
    pub program_id: u32,
}

impl Direction {
    fn parent(self) -> u32 {
        match self {
            Self::Ingress => 0xffff_fff2,
            Self::Egress => 0xffff_fff3,
        }
    }
}

fn header(interface: u32, handle: u32, parent: u32, priority: u16) -> Vec<u8> {
    // All protocols, in network order; the family and its padding come first.
    let info = u32::from(priority) << 16 | u32::from((libc::ETH_P_ALL as u16).to_be());
    [0, interface, handle, parent, info]
        .into_iter()
        .flat_map(u32::to_ne_bytes)
        .collect()
}

/// The filters with programs on one side of an interface of the calling thread's network namespace, in the order in which they
/// run. An interface that is not there has none.
///
/// # Errors
/// The kernel's.
pub fn list(interface: u32, direction: Direction) -> io::Result<Vec<Filter>> {
    let body = header(interface, 0, direction.parent(), 0);
    // The protocol is no filter of the dump.
    let body = [&body[..16], &[0; 4]].concat();
    dump(Part::Route, GETTFILTER, &body, Vec::new, |all, kind, payload| {
        if kind == NEWTFILTER {
            all.extend(filter(payload)?);
        }
        Ok(())
    })
}

fn filter(payload: &[u8]) -> io::Result<Option<Filter>> {
    let list = payload.get(HEADER..).ok_or_else(broken)?;
    if text(list, TCA_KIND).as_deref() != Some("bpf") {
        return Ok(None);
    }
    // A priority itself is listed too, without options.
    let Some(options) = attribute(list, TCA_OPTIONS) else {
        return Ok(None);
    };
    Ok(Some(Filter {
        priority: (word32(payload, 16).ok_or_else(broken)? >> 16) as u16,
        handle: word32(payload, 8).ok_or_else(broken)?,
        name: text(options, TCA_BPF_NAME).unwrap_or_default(),
        program_id: native(options, TCA_BPF_ID).unwrap_or_default(),
    }))
}

/// Gives an interface the clsact qdisc, unless it has one.
pub(super) fn add_clsact(interface: u32) -> io::Result<()> {
    let mut body = header(interface, CLSACT_HANDLE, CLSACT, 0);
    body[16..].fill(0);
    push_text(&mut body, TCA_KIND, "clsact");
    match change(Part::Route, NEWQDISC, NLM_F_CREATE | NLM_F_EXCL, &body) {
        Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(()),
        result => result,
    }
}

/// Attaches a program as a new filter, or replaces that of the filter there in one step.
pub(super) fn put(
    interface: u32,
    direction: Direction,
    filter: &Filter,
    program: BorrowedFd<'_>,
    replace: bool,
) -> io::Result<()> {
    let mut body = header(interface, filter.handle, direction.parent(), filter.priority);
    push_text(&mut body, TCA_KIND, "bpf");
    let mut options = Vec::new();
    push(&mut options, TCA_BPF_FD, &program.as_raw_fd().to_ne_bytes());
    push_text(&mut options, TCA_BPF_NAME, &filter.name);
    push(&mut options, TCA_BPF_FLAGS, &DIRECT_ACTION.to_ne_bytes());
    debug_assert!(options.len() + NESTED < usize::from(u16::MAX), "a name is short");
    push(&mut body, TCA_OPTIONS, &options);
    let flags = if replace { 0 } else { NLM_F_CREATE | NLM_F_EXCL };
    change(Part::Route, NEWTFILTER, flags, &body)
}

/// Removes a filter; one that is not there, or whose interface is gone, is removed.
pub(super) fn remove(interface: u32, direction: Direction, filter: &Filter) -> io::Result<()> {
    let mut body = header(interface, filter.handle, direction.parent(), filter.priority);
    push_text(&mut body, TCA_KIND, "bpf");
    match change(Part::Route, DELTFILTER, 0, &body) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENODEV | libc::EINVAL)) => Ok(()),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_of_programs_are_read_and_others_passed_over() {
        let message = |kind: &str, options: Option<&[u8]>| {
            let mut bytes = header(7, 3, Direction::Egress.parent(), 0xe0);
            push_text(&mut bytes, TCA_KIND, kind);
            if let Some(options) = options {
                push(&mut bytes, TCA_OPTIONS, options);
            }
            bytes
        };
        let mut options = Vec::new();
        push_text(&mut options, TCA_BPF_NAME, "lb_egress@evenkeel");
        push(&mut options, TCA_BPF_ID, &42_u32.to_ne_bytes());
        let found = filter(&message("bpf", Some(&options))).expect("a sound message");
        let wanted = Filter {
            priority: 0xe0,
            handle: 3,
            name: "lb_egress@evenkeel".to_owned(),
            program_id: 42,
        };
        assert_eq!(found, Some(wanted));
        assert_eq!(filter(&message("bpf", None)).expect("a sound message"), None);
        assert_eq!(
            filter(&message("flower", Some(&options))).expect("a sound message"),
            None
        );
        assert!(filter(&[0; 19]).is_err());
    }
}
