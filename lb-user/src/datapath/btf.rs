//! Just enough of BTF to find where a member lies in a struct, and whether an enumerator exists.
//!
//! aya parses BTF but keeps its types private; the format is small and fixed
//! (<https://docs.kernel.org/bpf/btf.html>), so it is read here. Serves the running kernel (offsets of `struct sock`, flags of helpers) and
//! the test that compares the built object with [`lb_common`].

use std::collections::HashMap;

use thiserror::Error;

/// Why BTF could not be read.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum BtfError {
    /// The magic number is wrong: not BTF, or of the other byte order.
    #[error("this is not BTF of this machine's byte order")]
    NotBtf,
    /// The data ends inside a record.
    #[error("BTF ends inside the record at byte {0}")]
    Truncated(usize),
}

/// One member of a struct.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its name.
    pub name: String,
    /// Its offset from the struct's beginning, in bytes.
    pub offset: u32,
    /// The id of its type.
    pub type_id: u32,
}

/// One struct.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Struct {
    /// Its size in bytes.
    pub size: u32,
    /// Its members, in order.
    pub members: Vec<Member>,
}

const MAGIC: u16 = 0xeb9f;
const KIND_STRUCT: u32 = 4;
const KIND_ENUM: u32 = 6;
const KIND_ENUM64: u32 = 19;

/// Reads all structs with one of the given names; an anonymous or repeated one keeps its first definition.
///
/// # Errors
/// When the data is not BTF, or is cut off.
pub fn structs(data: &[u8], wanted: impl Fn(&str) -> bool) -> Result<HashMap<String, Struct>, BtfError> {
    Ok(read(data, wanted, "")?.0)
}

/// Reads structs, and whether an enumerator of this name stands in any enumeration; one pass over all types.
fn read(
    data: &[u8],
    wanted: impl Fn(&str) -> bool,
    enumerator: &str,
) -> Result<(HashMap<String, Struct>, bool), BtfError> {
    let reader = Reader { data };
    if reader.u16(0)? != MAGIC {
        return Err(BtfError::NotBtf);
    }
    let header = reader.u32(4)? as usize;
    let types = header + reader.u32(8)? as usize;
    let types_end = types + reader.u32(12)? as usize;
    let strings = header + reader.u32(16)? as usize;

    // Names are compared by where they lie: tens of thousands of enumerators need no look at their text then.
    let enumerator = reader.find_string(strings, enumerator);
    let mut has_enumerator = false;
    let mut found = HashMap::new();
    let mut at = types;
    while at < types_end {
        let (name, info, size) = (reader.u32(at)?, reader.u32(at + 4)?, reader.u32(at + 8)?);
        let (kind, count) = ((info >> 24) & 0x1f, (info & 0xffff) as usize);
        // With the kind flag set, a member's offset word holds the bit-field size in its top byte.
        let flagged = info >> 31 == 1;
        at += 12;
        if kind == KIND_STRUCT && name != 0 {
            let name = reader.string(strings + name as usize)?;
            if wanted(name) && !found.contains_key(name) {
                let mut members = Vec::with_capacity(count);
                for i in 0..count {
                    let member = at + 12 * i;
                    let bits = reader.u32(member + 8)?;
                    let bits = if flagged { bits & 0x00ff_ffff } else { bits };
                    members.push(Member {
                        name: reader.string(strings + reader.u32(member)? as usize)?.to_owned(),
                        offset: bits / 8,
                        type_id: reader.u32(member + 4)?,
                    });
                }
                found.insert(name.to_owned(), Struct { size, members });
            }
        }
        if let Some(wanted) = enumerator
            && matches!(kind, KIND_ENUM | KIND_ENUM64)
            && !has_enumerator
        {
            let stride = extra(kind, 1);
            for i in 0..count {
                has_enumerator |= reader.u32(at + stride * i)? == wanted;
            }
        }
        at += extra(kind, count);
    }
    Ok((found, has_enumerator))
}

/// Bytes that follow a type's three words.
fn extra(kind: u32, count: usize) -> usize {
    match kind {
        // INT, VAR, DECL_TAG
        1 | 14 | 17 => 4,
        // ARRAY
        3 => 12,
        // STRUCT, UNION, DATASEC, ENUM64
        4 | 5 | 15 | 19 => 12 * count,
        // ENUM, FUNC_PROTO
        6 | 13 => 8 * count,
        _ => 0,
    }
}

struct Reader<'a> {
    data: &'a [u8],
}

impl<'a> Reader<'a> {
    fn u16(&self, at: usize) -> Result<u16, BtfError> {
        let bytes = self.data.get(at..at + 2).ok_or(BtfError::Truncated(at))?;
        Ok(u16::from_ne_bytes([bytes[0], bytes[1]]))
    }

    fn u32(&self, at: usize) -> Result<u32, BtfError> {
        let bytes = self.data.get(at..at + 4).ok_or(BtfError::Truncated(at))?;
        Ok(u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    }

    /// Where a whole string lies in the section that begins at `strings`; the compiler writes each string once.
    fn find_string(&self, strings: usize, text: &str) -> Option<u32> {
        if text.is_empty() {
            return None;
        }
        let section = self.data.get(strings..)?;
        let whole = [b"\0", text.as_bytes(), b"\0"].concat();
        let at = section.windows(whole.len()).position(|window| window == whole)?;
        u32::try_from(at + 1).ok()
    }

    fn string(&self, at: usize) -> Result<&'a str, BtfError> {
        let rest = self.data.get(at..).ok_or(BtfError::Truncated(at))?;
        let end = rest.iter().position(|b| *b == 0).ok_or(BtfError::Truncated(at))?;
        std::str::from_utf8(&rest[..end]).map_err(|_| BtfError::Truncated(at))
    }
}

/// What the running kernel says of itself: offsets in its socket structs, in bytes, 0 where it does not tell; flags that it knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelFacts {
    /// `sk_err` in `struct sock`.
    pub error: u32,
    /// `sk_dst_cache` in `struct sock`.
    pub route: u32,
    /// `skc_cookie` in `struct sock_common`, with which `struct sock` begins.
    pub cookie: u32,
    /// `first` in `struct mptcp_sock`: its first subflow.
    pub first_subflow: u32,
    /// Whether `bpf_l4_csum_replace` has the flag for IPv6 addresses (`BPF_F_IPV6`).
    pub csum_ipv6: bool,
}

/// Reads the running kernel's BTF; without it outcomes are told less finely.
pub fn kernel_facts() -> KernelFacts {
    let Ok(data) = std::fs::read("/sys/kernel/btf/vmlinux") else {
        return KernelFacts::default();
    };
    let wanted = |name: &str| matches!(name, "sock" | "sock_common" | "mptcp_sock");
    let Ok((found, csum_ipv6)) = read(&data, wanted, "BPF_F_IPV6") else {
        return KernelFacts::default();
    };
    let offset = |name: &str, member: &str| {
        found
            .get(name)
            .and_then(|s| s.members.iter().find(|m| m.name == member))
            .map_or(0, |m| m.offset)
    };
    KernelFacts {
        error: offset("sock", "sk_err"),
        route: offset("sock", "sk_dst_cache"),
        cookie: offset("sock_common", "skc_cookie"),
        first_subflow: offset("mptcp_sock", "first"),
        csum_ipv6,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A type section of an enumeration of each kind, and its strings: "ONE" and "BPF_F_IPV6".
    fn enumerations(second_name: u32) -> Vec<u8> {
        let types: Vec<u32> = [
            [0, KIND_ENUM << 24 | 1, 4].as_slice(),
            &[1, 1],
            &[0, KIND_ENUM64 << 24 | 1, 8],
            &[second_name, 0x80, 0],
        ]
        .concat();
        let strings = b"\0ONE\0BPF_F_IPV6\0";
        let length = types.len() as u32 * 4;
        let mut data = vec![0x9f, 0xeb, 1, 0];
        for word in [24, 0, length, length, strings.len() as u32] {
            data.extend(u32::to_ne_bytes(word));
        }
        data.extend(types.iter().flat_map(|word| word.to_ne_bytes()));
        data.extend(strings);
        data
    }

    #[test]
    fn an_enumerator_is_found_by_its_whole_name() {
        let has = |data: &[u8], name| read(data, |_| false, name).map(|(_, has)| has);
        assert_eq!(has(&enumerations(5), "BPF_F_IPV6"), Ok(true));
        assert_eq!(has(&enumerations(5), "ONE"), Ok(true));
        for absent in ["BPF_F_IPV", "PF_F_IPV6", "TWO", ""] {
            assert_eq!(has(&enumerations(5), absent), Ok(false), "{absent}");
        }
        // A string that no enumerator bears.
        assert_eq!(has(&enumerations(1), "BPF_F_IPV6"), Ok(false));
    }

    #[test]
    fn garbage_is_an_error_not_a_panic() {
        assert_eq!(structs(b"", |_| true), Err(BtfError::Truncated(0)));
        assert_eq!(structs(b"hello world, this is no BTF", |_| true), Err(BtfError::NotBtf));
        let mut cut = vec![
            0x9f, 0xeb, 1, 0, 24, 0, 0, 0, 0, 0, 0, 0, 12, 0, 0, 0, 12, 0, 0, 0, 1, 0, 0, 0,
        ];
        cut.extend([1, 0, 0, 0]);
        assert!(matches!(structs(&cut, |_| true), Err(BtfError::Truncated(_))));
    }
}
