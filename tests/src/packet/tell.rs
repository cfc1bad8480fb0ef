//! Packets in one line, for people who read a failure.

use std::{fmt::Write as _, net::SocketAddr};

use super::{
    Layers, check,
    read::{inner, layers},
    wire,
};

/// Tells a packet in one line: `198.51.100.7:40000 > 203.0.113.1:80 TCP S seq 1000 ack 0 len 0 ttl 64`.
pub fn tell(bytes: &[u8], bare: bool) -> String {
    let mut text = String::new();
    match layers(bytes, bare) {
        Ok(layers) => {
            for _ in 0..layers.tags {
                text.push_str("VLAN ");
            }
            one(&mut text, bytes, &layers);
            if let Some(inner) = inner(bytes, &layers) {
                text.push_str(" [");
                one(&mut text, bytes, &inner.layers);
                text.push(']');
            }
            for fault in check(bytes, bare) {
                let _ = write!(
                    text,
                    " WRONG {} checksum {:#06x} for {:#06x}",
                    fault.what, fault.found, fault.right
                );
            }
        }
        Err(reason) => {
            let _ = write!(text, "a packet {reason}");
        }
    }
    let _ = write!(text, " ({} bytes)", bytes.len());
    text
}

fn one(text: &mut String, bytes: &[u8], layers: &Layers) {
    let body = bytes.get(layers.body..).unwrap_or_default();
    let end = layers.end.saturating_sub(layers.body);
    let two = |at: usize| body.get(at..at + 2).map(|b| u16::from_be_bytes([b[0], b[1]]));
    let four = |at: usize| {
        body.get(at..at + 4)
            .map_or(0, |b| u32::from_be_bytes([b[0], b[1], b[2], b[3]]))
    };
    let ports = matches!(layers.proto, wire::TCP | wire::UDP) && !layers.is_later_fragment();
    match (ports, two(0), two(2)) {
        (true, Some(src), Some(dst)) => {
            let (src, dst) = (SocketAddr::new(layers.src, src), SocketAddr::new(layers.dst, dst));
            let _ = write!(text, "{src} > {dst}");
        }
        _ => {
            let _ = write!(text, "{} > {}", layers.src, layers.dst);
        }
    }
    let _ = match layers.proto {
        _ if layers.is_later_fragment() => write!(text, " protocol {}", layers.proto),
        wire::TCP => {
            let set = body.get(13).copied().unwrap_or(0);
            let names: String = "FSRPAUEC"
                .chars()
                .enumerate()
                .filter(|(bit, _)| set >> bit & 1 == 1)
                .map(|(_, name)| name)
                .collect();
            let header = body.get(12).map_or(20, |byte| usize::from(byte >> 4) * 4);
            let len = end.saturating_sub(header);
            write!(text, " TCP {names} seq {} ack {} len {len}", four(4), four(8))
        }
        wire::UDP => write!(text, " UDP len {}", end.saturating_sub(8)),
        wire::ICMP | wire::ICMPV6 => {
            let kind = body.first().copied().unwrap_or(0);
            let code = body.get(1).copied().unwrap_or(0);
            write!(text, " ICMP type {kind} code {code} rest {}", four(4))
        }
        other => write!(text, " protocol {other}"),
    };
    if let Some(fragment) = layers.fragment {
        let more = if fragment.more { "+" } else { "" };
        let _ = write!(text, " fragment {}@{}{more}", fragment.id, fragment.offset * 8);
    }
    if layers.tos != 0 {
        let _ = write!(text, " tos {:#04x}", layers.tos);
    }
    let _ = write!(text, " ttl {}", layers.ttl);
}

/// Bytes as hexadecimal digits in rows of sixteen, for what one line does not tell.
pub fn hex(bytes: &[u8]) -> String {
    let mut text = String::new();
    for (row, chunk) in bytes.chunks(16).enumerate() {
        let _ = write!(text, "\n  {:04x}:", row * 16);
        for byte in chunk {
            let _ = write!(text, " {byte:02x}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::{error, flags, tcp};

    #[test]
    fn one_line_says_what_matters() {
        let syn = tcp(
            "198.51.100.7:40000".parse().expect("an address"),
            "203.0.113.1:80".parse().expect("an address"),
            flags::SYN | flags::ACK,
        );
        assert_eq!(
            tell(&syn.bytes(), false),
            "198.51.100.7:40000 > 203.0.113.1:80 TCP SA seq 1000 ack 7000 len 0 ttl 64 (54 bytes)"
        );
        assert_eq!(
            tell(&syn.cut(20), false),
            "a packet cut off in its IPv4 header (20 bytes)"
        );
        let message = error(
            "192.0.2.9".parse().expect("an address"),
            syn.src,
            (3, 4, 1_400),
            &syn,
            28,
        );
        assert_eq!(
            tell(&message.wrong_body(1).bytes(), false),
            "192.0.2.9 > 198.51.100.7 ICMP type 3 code 4 rest 1400 ttl 64 [198.51.100.7:40000 > 203.0.113.1:80 TCP  \
             seq 1000 ack 0 len 0 ttl 64] WRONG ICMP checksum 0x570c for 0x570b (70 bytes)"
        );
    }
}
