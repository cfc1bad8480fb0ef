//! The rules of the old iptables, which are in no netlink dump: a table is copied out by socket options.
//!
//! Only a table that exists in this network namespace is asked for, as asking for another would make it. The copy is a run
//! of entries with byte offsets to one another; it is read by a pure function, bounds-checked, into the same rules that
//! nftables' are read into.

use std::{
    collections::HashMap,
    fs, io,
    os::fd::{AsRawFd, OwnedFd},
};

use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};

use super::nftables::{self, Rule, Target};

/// The option that says how large a table is, and the one that copies it (linux/netfilter_ipv4/ip_tables.h, ip6_tables.h).
const GET_INFO: libc::c_int = 64;
const GET_ENTRIES: libc::c_int = 65;
/// Bytes of a table's name, of `struct ipt_getinfo`, and of what stands before the entries of `struct ipt_get_entries`.
const NAME: usize = 32;
const INFO: usize = 84;
const ENTRIES_HEAD: usize = 40;
/// A larger table than any node's; beyond it nothing is read.
const MAX_TABLE: usize = 512 * 1024 * 1024;

/// Where the parts of an entry lie: `struct ipt_entry` or `struct ip6t_entry`.
#[derive(Clone, Copy, Debug)]
struct Layout {
    family: u8,
    destination: usize,
    mask: usize,
    width: usize,
    protocol: usize,
    inverted: usize,
    target: usize,
    next: usize,
    matches: usize,
}

const V4: Layout = Layout {
    family: 2,
    destination: 4,
    mask: 12,
    width: 4,
    protocol: 80,
    inverted: 83,
    target: 88,
    next: 90,
    matches: 112,
};
const V6: Layout = Layout {
    family: 10,
    destination: 16,
    mask: 48,
    width: 16,
    protocol: 128,
    inverted: 132,
    target: 140,
    next: 142,
    matches: 168,
};
/// Bits of an entry that turn its destination and its protocol into their opposite.
const NOT_DESTINATION: u8 = 0x10;
const NOT_PROTOCOL: u8 = 0x40;
/// Bytes before the data of a match or target: size, name, revision.
const EXTENSION: usize = 32;

/// A family's rules that translate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Nat {
    /// The family's number in netfilter.
    pub(super) family: u8,
    pub(super) rules: Vec<Rule>,
}

/// Whether the old iptables has a table that translates in this network namespace.
pub(super) fn in_use() -> bool {
    [V4, V6].iter().any(|layout| exists(*layout))
}

/// Reads the tables that translate, of both families.
pub(super) fn read() -> io::Result<Vec<Nat>> {
    let mut tables = Vec::new();
    for layout in [V4, V6].into_iter().filter(|&layout| exists(layout)) {
        let (hooks, entries) = copy(layout)?;
        tables.push(Nat {
            family: layout.family,
            rules: rules(layout, &hooks, &entries).ok_or_else(broken)?,
        });
    }
    Ok(tables)
}

fn broken() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "a table of iptables that makes no sense")
}

fn exists(layout: Layout) -> bool {
    let file = if layout.width == 4 {
        "ip_tables_names"
    } else {
        "ip6_tables_names"
    };
    fs::read_to_string(format!("/proc/thread-self/net/{file}"))
        .is_ok_and(|tables| tables.lines().any(|table| table == "nat"))
}

/// Copies the table `nat` out of the kernel: where its hooks begin, and its entries.
fn copy(layout: Layout) -> io::Result<([u32; 5], Vec<u8>)> {
    let (family, level) = if layout.width == 4 {
        (AddressFamily::Inet, libc::IPPROTO_IP)
    } else {
        (AddressFamily::Inet6, libc::IPPROTO_IPV6)
    };
    let socket = socket(family, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None::<SockProtocol>)?;
    // A table that grows between the two questions is asked for anew.
    for _ in 0..4 {
        let mut info = vec![0; INFO];
        info[..3].copy_from_slice(b"nat");
        ask(&socket, level, GET_INFO, &mut info)?;
        let size = word32(&info, 80).ok_or_else(broken)? as usize;
        if size > MAX_TABLE {
            return Err(io::Error::other(format!("a table of {size} bytes")));
        }
        let mut hooks = [0; 5];
        for (n, hook) in hooks.iter_mut().enumerate() {
            *hook = word32(&info, NAME + 4 + 4 * n).ok_or_else(broken)?;
        }
        let mut table = vec![0; ENTRIES_HEAD + size];
        table[..3].copy_from_slice(b"nat");
        table[NAME..NAME + 4].copy_from_slice(&(size as u32).to_ne_bytes());
        match ask(&socket, level, GET_ENTRIES, &mut table) {
            Ok(()) => return Ok((hooks, table.split_off(ENTRIES_HEAD))),
            Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::other("the table changed during each of several looks at it"))
}

fn ask(socket: &OwnedFd, level: libc::c_int, option: libc::c_int, buffer: &mut [u8]) -> io::Result<()> {
    let mut length = buffer.len() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes, and that is the buffer's size.
    let answer = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            level,
            option,
            buffer.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    if answer == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Reads a table's entries; none where they make no sense.
///
/// An entry whose target is `ERROR` names the chain that begins behind it; a chain of a hook begins where the hook says.
fn rules(layout: Layout, hooks: &[u32; 5], entries: &[u8]) -> Option<Vec<Rule>> {
    let mut chain = String::new();
    let hook_names = ["PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"];
    let mut starts: HashMap<usize, String> = HashMap::new();
    // Each rule, and the offset of the entry that its verdict jumps to.
    let mut found: Vec<(Rule, Option<usize>)> = Vec::new();
    let mut at = 0;
    while at < entries.len() {
        let entry = entries.get(at..)?;
        let next = usize::from(word16(entry, layout.next)?);
        let entry = entry.get(..next).filter(|entry| entry.len() > layout.matches)?;
        if let Some((_, name)) = hooks.iter().zip(hook_names).find(|&(&start, _)| start as usize == at) {
            name.clone_into(&mut chain);
        }
        let target = entry.get(usize::from(word16(entry, layout.target)?)..)?;
        let (name, data) = (text(target.get(2..31)?), target.get(EXTENSION..)?);
        if name == "ERROR" {
            chain = text(data);
            starts.insert(at + next, chain.clone());
        } else {
            let mut rule = conditions(layout, &chain, entry)?;
            let mut jump = None;
            if name.is_empty() {
                let verdict = word32(data, 0)?.cast_signed();
                jump = usize::try_from(verdict).ok();
            } else if name == "DNAT" {
                let dnat = nftables::iptables_dnat(layout.family, (*target.get(31)?).into(), data);
                rule.target = Some(dnat.map_or(Target::Computed, Target::Dnat));
            }
            found.push((rule, jump));
        }
        at += next;
    }
    let resolve = |(mut rule, jump): (Rule, Option<usize>)| {
        if let Some(jump) = jump {
            // Every jump leads to the start of a chain; one to the next entry is none.
            rule.target = starts.get(&jump).cloned().map(Target::Chain);
        }
        rule
    };
    Some(found.into_iter().map(resolve).collect())
}

/// What an entry asks for.
fn conditions(layout: Layout, chain: &str, entry: &[u8]) -> Option<Rule> {
    let mut rule = Rule {
        chain: chain.to_owned(),
        ..Rule::default()
    };
    let inverted = *entry.get(layout.inverted)?;
    let mask = entry.get(layout.mask..layout.mask + layout.width)?;
    if inverted & NOT_DESTINATION == 0 && mask.iter().all(|&byte| byte == 0xff) {
        rule.address = nftables::address(entry.get(layout.destination..layout.destination + layout.width)?);
    }
    if inverted & NOT_PROTOCOL == 0 {
        let number = u8::try_from(word16(entry, layout.protocol)?).ok()?;
        rule.protocol = nftables::protocol(number);
    }
    let end = usize::from(word16(entry, layout.target)?);
    let mut matches = entry.get(layout.matches..end)?;
    while !matches.is_empty() {
        let size = usize::from(word16(matches, 0)?);
        let one = matches.get(..size).filter(|one| one.len() >= EXTENSION)?;
        rule.ask_iptables(&text(&one[2..31]), &one[EXTENSION..]);
        matches = &matches[size..];
    }
    Some(rule)
}

fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

fn word16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn word32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::model::Protocol;

    fn extension(name: &str, revision: u8, data: &[u8]) -> Vec<u8> {
        let mut out = vec![0; EXTENSION];
        out[2..2 + name.len()].copy_from_slice(name.as_bytes());
        out[31] = revision;
        out.extend(data);
        out.resize(out.len().next_multiple_of(8), 0);
        let size = out.len() as u16;
        out[..2].copy_from_slice(&size.to_ne_bytes());
        out
    }

    /// An entry of IPv4 to one address and protocol, or to any.
    fn entry(to: Option<[u8; 4]>, protocol: u16, matches: &[Vec<u8>], target: &[u8]) -> Vec<u8> {
        let mut out = vec![0; V4.matches];
        if let Some(to) = to {
            out[4..8].copy_from_slice(&to);
            out[12..16].copy_from_slice(&[0xff; 4]);
        }
        out[80..82].copy_from_slice(&protocol.to_ne_bytes());
        out.extend(matches.concat());
        let target_at = (out.len() as u16).to_ne_bytes();
        out[88..90].copy_from_slice(&target_at);
        out.extend(target);
        let next = (out.len() as u16).to_ne_bytes();
        out[90..92].copy_from_slice(&next);
        out
    }

    fn head(chain: &str) -> Vec<u8> {
        let mut name = vec![0; 30];
        name[..chain.len()].copy_from_slice(chain.as_bytes());
        entry(None, 0, &[], &extension("ERROR", 0, &name))
    }

    fn verdict(number: i32) -> Vec<u8> {
        extension("", 0, &number.to_ne_bytes())
    }

    /// OUTPUT jumps to KUBE-SERVICES, that to an endpoint's chain, which translates.
    fn table() -> Vec<u8> {
        let range = |address: [u8; 4], port: u16| {
            let wide = [&address[..], &[0; 12]].concat();
            let port = port.to_be_bytes();
            [&3_u32.to_ne_bytes()[..], &wide, &wide, &port, &port, &[0; 4]].concat()
        };
        let tcp = extension("tcp", 0, &[0, 0, 0xff, 0xff, 80, 0, 80, 0, 0, 0, 0, 0]);
        let tcp = if cfg!(target_endian = "big") {
            extension("tcp", 0, &[0, 0, 0xff, 0xff, 0, 80, 0, 80, 0, 0, 0, 0])
        } else {
            tcp
        };
        let build = |services: i32, endpoint: i32| {
            vec![
                entry(None, 0, &[], &verdict(services)),
                entry(None, 0, &[], &verdict(-2)),
                head("KUBE-SERVICES"),
                entry(Some([10, 96, 0, 10]), 6, std::slice::from_ref(&tcp), &verdict(endpoint)),
                head("KUBE-SEP-1"),
                entry(None, 6, &[], &extension("DNAT", 2, &range([10, 244, 1, 1], 8080))),
                entry(None, 0, &[], &verdict(-5)),
                head("ERROR"),
            ]
        };
        let sizes: Vec<usize> = build(0, 0).iter().map(Vec::len).collect();
        let offset = |n: usize| i32::try_from(sizes[..n].iter().sum::<usize>()).expect("a small table");
        build(offset(3), offset(5)).concat()
    }

    #[test]
    fn entries_become_rules_with_their_chains() {
        let none = u32::MAX;
        let rules = rules(V4, &[none, none, none, 0, none], &table()).expect("a table");
        let chains: Vec<_> = rules.iter().map(|rule| rule.chain.as_str()).collect();
        assert_eq!(
            chains,
            ["OUTPUT", "OUTPUT", "KUBE-SERVICES", "KUBE-SEP-1", "KUBE-SEP-1"]
        );
        let to = |chain: &str| Some(Target::Chain(chain.to_owned()));
        assert_eq!(rules[0].target, to("KUBE-SERVICES"));
        assert_eq!(rules[1].target, None);
        assert_eq!(rules[2].target, to("KUBE-SEP-1"));
        assert_eq!(rules[2].address, Some([10, 96, 0, 10].into()));
        assert_eq!((rules[2].protocol, rules[2].port), (Some(Protocol::Tcp), Some(80)));
        let Some(Target::Dnat(dnat)) = rules[3].target else {
            panic!("a translation: {:?}", rules[3]);
        };
        assert_eq!(dnat.endpoint(80).to_string(), "10.244.1.1:8080");
    }

    #[test]
    fn a_table_that_is_cut_off_is_none() {
        let table = table();
        let whole = (1..table.len()).filter(|&length| rules(V4, &[0; 5], &table[..length]).is_some());
        // Between the eight entries alone.
        assert_eq!(whole.count(), 7);
    }

    proptest! {
        #[test]
        fn any_bytes_are_rules_or_none(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _outcome = (rules(V4, &[0; 5], &bytes), rules(V6, &[0; 5], &bytes));
        }

        #[test]
        fn any_change_to_a_table_is_rules_or_none(at in any::<prop::sample::Index>(), byte in any::<u8>()) {
            let mut table = table();
            let at = at.index(table.len());
            table[at] = byte;
            let _outcome = rules(V4, &[0; 5], &table);
        }
    }
}
