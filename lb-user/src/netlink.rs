//! Talking to the kernel over netlink: the request, the messages of the answer, and the attributes in a message.
//!
//! What messages mean is known by those who ask. [`dump`] and [`ask`] only read; [`change`] is for `datapath`. The
//! invariant: everything received is bounds-checked, and a message that makes no sense ends the talk with an error.

use std::{
    io,
    ops::ControlFlow,
    os::fd::{AsRawFd, OwnedFd},
};

use nix::sys::{
    socket::{
        AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send, setsockopt, socket,
        sockopt::ReceiveTimeout,
    },
    time::TimeVal,
};

const NLM_F_REQUEST: u16 = 0x1;
const NLM_F_ACK: u16 = 0x4;
/// Fails where the entry is there already.
pub(crate) const NLM_F_EXCL: u16 = 0x200;
/// Makes the entry where it is not there.
pub(crate) const NLM_F_CREATE: u16 = 0x400;
const NLM_F_DUMP: u16 = 0x300;
/// The table changed while it was dumped: what came may miss entries.
const NLM_F_DUMP_INTR: u16 = 0x10;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
/// Bytes of a netlink message's header.
const HEADER: usize = 16;
/// Bits of an attribute's kind that say how it is written.
const KIND_MASK: u16 = 0x3fff;
/// How often a dump is asked for anew after a change came into it.
const ATTEMPTS: usize = 4;
/// More entries than any proxy makes; beyond it the look ends with an error.
const MAX_MESSAGES: usize = 2_000_000;

/// Which part of the kernel is talked to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Packet filtering: chains and rules.
    Netfilter,
    /// Links, addresses, routes, and traffic control.
    Route,
}

/// Asks for all entries of one kind; each entry's kind and payload go to `entry`, in the kernel's order.
///
/// The dump is made in the calling thread's network namespace, and made anew where the table changed meanwhile: `start` is called
/// before each attempt.
pub(crate) fn dump<T>(
    part: Part,
    kind: u16,
    body: &[u8],
    start: impl Fn() -> T,
    mut entry: impl FnMut(&mut T, u16, &[u8]) -> io::Result<()>,
) -> io::Result<T> {
    for _ in 0..ATTEMPTS {
        let mut whole = start();
        if once(part, kind, body, |kind, payload| entry(&mut whole, kind, payload))? {
            return Ok(whole);
        }
    }
    Err(io::Error::other("the table changed during each of several looks at it"))
}

/// Asks for one thing; its kind and payload go to `entry`.
pub(crate) fn ask<T>(part: Part, kind: u16, body: &[u8], entry: impl Fn(u16, &[u8]) -> Option<T>) -> io::Result<T> {
    let socket = send_request(part, &request(kind, NLM_F_REQUEST, body))?;
    let mut buffer = [0_u8; 4096];
    let length = recv(socket.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
    let mut answer = None;
    let _end = Dump::default().take(buffer.get(..length).unwrap_or_default(), &mut |kind, payload| {
        answer = entry(kind, payload);
        Ok(())
    })?;
    answer.ok_or_else(broken)
}

/// Changes one thing, and waits until the kernel has done so; `flags` say whether it may or must be new.
pub(crate) fn change(part: Part, kind: u16, flags: u16, body: &[u8]) -> io::Result<()> {
    let socket = send_request(part, &request(kind, NLM_F_REQUEST | NLM_F_ACK | flags, body))?;
    let mut buffer = [0_u8; 4096];
    loop {
        let length = recv(socket.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
        if Dump::default()
            .take(buffer.get(..length).unwrap_or_default(), &mut |_, _| Ok(()))?
            .is_break()
        {
            return Ok(());
        }
    }
}

/// Makes one dump; false where a change came into it.
fn once(part: Part, kind: u16, body: &[u8], mut entry: impl FnMut(u16, &[u8]) -> io::Result<()>) -> io::Result<bool> {
    let socket = send_request(part, &request(kind, NLM_F_REQUEST | NLM_F_DUMP, body))?;
    let mut buffer = vec![0_u8; 64 * 1024];
    let mut dump = Dump::default();
    while dump.messages < MAX_MESSAGES {
        let length = recv(socket.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
        let batch = buffer.get(..length).unwrap_or_default();
        if dump.take(batch, &mut entry)?.is_break() {
            return Ok(!dump.interrupted);
        }
    }
    Err(io::Error::other(format!("more than {MAX_MESSAGES} entries")))
}

/// Opens a socket and sends a request; the answer is what the socket receives.
fn send_request(part: Part, request: &[u8]) -> io::Result<OwnedFd> {
    let socket = socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        match part {
            Part::Netfilter => SockProtocol::NetlinkNetFilter,
            Part::Route => SockProtocol::NetlinkRoute,
        },
    )?;
    bind(socket.as_raw_fd(), &NetlinkAddr::new(0, 0))?;
    // The kernel answers at once, or not at all where that part of it is not built in.
    setsockopt(&socket, ReceiveTimeout, &TimeVal::new(2, 0))?;
    send(socket.as_raw_fd(), request, MsgFlags::empty())?;
    Ok(socket)
}

fn request(kind: u16, flags: u16, body: &[u8]) -> Vec<u8> {
    let mut message = Vec::with_capacity(HEADER + body.len());
    message.extend(((HEADER + body.len()) as u32).to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend(flags.to_ne_bytes());
    // Sequence number and port: one request is under way, and the kernel fills in the port.
    message.extend([0; 8]);
    message.extend(body);
    message
}

/// How far a dump has come.
#[derive(Debug, Default)]
struct Dump {
    messages: usize,
    interrupted: bool,
}

impl Dump {
    /// Reads a batch of messages; breaks at the end of the dump.
    fn take(
        &mut self,
        mut batch: &[u8],
        entry: &mut impl FnMut(u16, &[u8]) -> io::Result<()>,
    ) -> io::Result<ControlFlow<()>> {
        while !batch.is_empty() {
            let length = word32(batch, 0).ok_or_else(broken)? as usize;
            let kind = word16(batch, 4).ok_or_else(broken)?;
            let flags = word16(batch, 6).ok_or_else(broken)?;
            let message = batch
                .get(..length)
                .filter(|message| message.len() >= HEADER)
                .ok_or_else(broken)?;
            let payload = &message[HEADER..];
            self.interrupted |= flags & NLM_F_DUMP_INTR != 0;
            match kind {
                NLMSG_DONE => return Ok(ControlFlow::Break(())),
                NLMSG_ERROR => {
                    let code = word32(payload, 0).ok_or_else(broken)?.cast_signed();
                    if code == 0 {
                        // The acknowledgement of a change.
                        return Ok(ControlFlow::Break(()));
                    }
                    return Err(io::Error::from_raw_os_error(code.saturating_neg()));
                }
                kind => entry(kind, payload)?,
            }
            self.messages += 1;
            batch = batch.get(align(length)..).unwrap_or_default();
        }
        Ok(ControlFlow::Continue(()))
    }
}

/// The error for bytes that are no message.
pub(crate) fn broken() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "a netlink message that makes no sense")
}

/// The attributes of a list, each with its kind, up to the first that makes no sense.
pub(crate) fn attributes(mut list: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = usize::from(word16(list, 0)?);
        let kind = word16(list, 2)? & KIND_MASK;
        let value = list.get(4..length)?;
        list = list.get(align(length)..).unwrap_or_default();
        Some((kind, value))
    })
}

/// The value of the first attribute of a kind.
pub(crate) fn attribute(list: &[u8], wanted: u16) -> Option<&[u8]> {
    attributes(list).find_map(|(kind, value)| (kind == wanted).then_some(value))
}

/// The text of an attribute, which ends at a zero byte.
pub(crate) fn text(list: &[u8], wanted: u16) -> Option<String> {
    let value = attribute(list, wanted)?;
    let text = value.split(|&byte| byte == 0).next()?;
    Some(String::from_utf8_lossy(text).into_owned())
}

/// The number of an attribute, written in network order.
pub(crate) fn number(list: &[u8], wanted: u16) -> Option<u32> {
    Some(u32::from_be_bytes(attribute(list, wanted)?.try_into().ok()?))
}

/// A number of an attribute, written in the machine's order.
pub(crate) fn native(list: &[u8], wanted: u16) -> Option<u32> {
    Some(u32::from_ne_bytes(attribute(list, wanted)?.try_into().ok()?))
}

/// Appends an attribute that holds a text.
pub(crate) fn push_text(message: &mut Vec<u8>, kind: u16, text: &str) {
    push(message, kind, &[text.as_bytes(), &[0]].concat());
}

/// Appends an attribute.
pub(crate) fn push(message: &mut Vec<u8>, kind: u16, value: &[u8]) {
    message.extend(((value.len() + 4) as u16).to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend(value);
    message.resize(align(message.len()), 0);
}

/// Messages and attributes begin at multiples of four bytes.
pub(crate) const fn align(length: usize) -> usize {
    (length + 3) & !3
}

pub(crate) fn word16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

pub(crate) fn word32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn message(kind: u16, flags: u16, payload: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(((HEADER + payload.len()) as u32).to_ne_bytes());
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(flags.to_ne_bytes());
        bytes.extend([0; 8]);
        bytes.extend(payload);
        bytes.resize(align(bytes.len()), 0);
        bytes
    }

    /// Whether the dump ended, whether it was interrupted, and the messages.
    type Taken = (bool, bool, Vec<(u16, Vec<u8>)>);

    fn take(batch: &[u8]) -> io::Result<Taken> {
        let (mut dump, mut seen) = (Dump::default(), Vec::new());
        let end = dump.take(batch, &mut |kind, payload| {
            seen.push((kind, payload.to_owned()));
            Ok(())
        })?;
        Ok((end.is_break(), dump.interrupted, seen))
    }

    #[test]
    fn messages_are_read_to_the_end_of_the_dump() {
        let batch = [
            message(77, 2, b"one"),
            message(78, 2, b"three"),
            message(NLMSG_DONE, 2, &[0; 4]),
            message(79, 2, b"beyond"),
        ]
        .concat();
        let (ended, interrupted, seen) = take(&batch).expect("a sound batch");
        assert!(ended && !interrupted);
        assert_eq!(seen, [(77, b"one".to_vec()), (78, b"three".to_vec())]);
    }

    #[test]
    fn a_change_during_the_dump_is_noticed() {
        let batch = [message(77, NLM_F_DUMP_INTR, b"one"), message(NLMSG_DONE, 0, &[0; 4])].concat();
        let (ended, interrupted, _) = take(&batch).expect("a sound batch");
        assert!(ended && interrupted);
    }

    #[test]
    fn an_error_message_is_the_kernels_error() {
        let error = take(&message(NLMSG_ERROR, 0, &(-libc::EPERM).to_ne_bytes()));
        assert_eq!(error.expect_err("it is an error").raw_os_error(), Some(libc::EPERM));
    }

    #[test]
    fn an_acknowledgement_ends_a_change() {
        let (ended, _, seen) = take(&message(NLMSG_ERROR, 0, &[0; 20])).expect("no error");
        assert!(ended && seen.is_empty());
    }

    #[test]
    fn attributes_are_found_behind_others_whatever_their_marks() {
        let mut list = Vec::new();
        push_text(&mut list, 1, "nat");
        push_text(&mut list, 0x8000 | 7, "nested");
        list.extend([8_u16.to_ne_bytes(), 3_u16.to_ne_bytes()].concat());
        list.extend(5_u32.to_be_bytes());
        assert_eq!(text(&list, 1).as_deref(), Some("nat"));
        assert_eq!(text(&list, 7).as_deref(), Some("nested"));
        assert_eq!(number(&list, 3), Some(5));
        assert_eq!(number(&list, 7), None);
        assert_eq!(attribute(&list, 9), None);
        assert_eq!(attributes(&list).count(), 3);
    }

    proptest! {
        #[test]
        fn any_bytes_end_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _outcome = take(&bytes);
            let _outcome = attributes(&bytes).count();
        }

        #[test]
        fn any_attributes_end_without_a_panic(bytes in proptest::collection::vec(0_u8..24, 0..200)) {
            let _outcome = (text(&bytes, 1), number(&bytes, 2));
        }
    }
}
