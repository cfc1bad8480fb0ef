//! The Internet checksum (RFC 1071), from scratch: what incremental updates are compared with.

use std::net::IpAddr;

/// The one's complement sum of 16-bit words; an odd last byte is padded by zero.
pub fn sum(bytes: &[u8]) -> u32 {
    let mut sum = 0u32;
    for pair in bytes.chunks(2) {
        sum += u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0));
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum
}

/// Folds a sum, carries included, and complements it.
pub fn fold(mut sum: u32) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// The checksum of a header or message; 0 over one that holds its right checksum.
pub fn of(bytes: &[u8]) -> u16 {
    fold(sum(bytes))
}

/// The sum of the pseudo header (RFC 9293, RFC 8200).
///
/// # Panics
/// When the addresses are of two families.
pub fn pseudo(src: IpAddr, dst: IpAddr, proto: u8, length: usize) -> u32 {
    let addresses = match (src, dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => sum(&src.octets()) + sum(&dst.octets()),
        (IpAddr::V6(src), IpAddr::V6(dst)) => sum(&src.octets()) + sum(&dst.octets()),
        _ => panic!("{src} and {dst} are not of one family"),
    };
    addresses + u32::from(proto) + (length as u32 >> 16) + (length as u32 & 0xffff)
}

/// The checksum of a transport header and its payload; 0 over one that holds its right checksum.
pub fn transport(src: IpAddr, dst: IpAddr, proto: u8, bytes: &[u8]) -> u16 {
    fold(pseudo(src, dst, proto, bytes.len()) + sum(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_of_rfc_1071() {
        assert_eq!(sum(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]), 0xddf2);
        assert_eq!(of(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]), !0xddf2);
    }

    #[test]
    fn an_odd_byte_is_padded() {
        assert_eq!(sum(&[0x12]), 0x1200);
    }

    #[test]
    fn a_real_header_sums_to_zero() {
        // The IPv4 header that Wikipedia's article on its checksum works through.
        let header = [
            0x45, 0x00, 0x00, 0x73, 0x00, 0x00, 0x40, 0x00, 0x40, 0x11, 0xb8, 0x61, 0xc0, 0xa8, 0x00, 0x01, 0xc0, 0xa8,
            0x00, 0xc7,
        ];
        assert_eq!(of(&header), 0);
    }
}
