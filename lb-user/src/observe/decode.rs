//! From the ring buffer's bytes to records; whatever does not fit is an error, never a panic.

use bytes::Buf;
use lb_common::{
    addr::{Addr, Port},
    event::{ConnRecord, PacketRecord, kind},
};
use thiserror::Error;

/// One record of the ring buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Record {
    /// A connection that has ended.
    Connection(ConnRecord),
    /// A packet that begins or ends a connection.
    Packet(PacketRecord),
}

/// Why bytes are no record.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum DecodeError {
    /// An unknown kind.
    #[error("a record of unknown kind {0}")]
    UnknownKind(u32),
    /// Too few or too many bytes.
    #[error("a record of kind {kind} with {found} bytes where {wanted} are wanted")]
    Length {
        /// The record's kind; 0 where not even that is there.
        kind: u32,
        /// Bytes found.
        found: usize,
        /// Bytes wanted.
        wanted: usize,
    },
}

/// Reads one record; numbers are in the machine's order, addresses and ports in network order.
///
/// # Errors
/// When the bytes are no record of this build.
pub fn record(bytes: &[u8]) -> Result<Record, DecodeError> {
    let length = |kind, wanted| DecodeError::Length {
        kind,
        found: bytes.len(),
        wanted,
    };
    let kind = bytes.get(..4).ok_or(length(0, 4))?.get_u32_ne();
    let wanted = match kind {
        kind::CONNECTION => size_of::<ConnRecord>(),
        kind::PACKET => size_of::<PacketRecord>(),
        other => return Err(DecodeError::UnknownKind(other)),
    };
    // The length is checked once here, so that the reads below cannot run out.
    if bytes.len() != wanted {
        return Err(length(kind, wanted));
    }
    let mut bytes = bytes;
    Ok(if kind == kind::CONNECTION {
        Record::Connection(connection(&mut bytes))
    } else {
        Record::Packet(packet(&mut bytes))
    })
}

fn connection(bytes: &mut &[u8]) -> ConnRecord {
    ConnRecord {
        kind: bytes.get_u32_ne(),
        errno: bytes.get_u32_ne(),
        start_ns: bytes.get_u64_ne(),
        established_ns: bytes.get_u64_ne(),
        end_ns: bytes.get_u64_ne(),
        netns_cookie: bytes.get_u64_ne(),
        client: addr(bytes),
        vip: addr(bytes),
        service_id: bytes.get_u32_ne(),
        backend_id: bytes.get_u32_ne(),
        client_port: Port(bytes.get_u16_ne()),
        vip_port: Port(bytes.get_u16_ne()),
        proto: bytes.get_u8(),
        outcome: bytes.get_u8(),
        marks: bytes.get_u16_ne(),
    }
}

fn packet(bytes: &mut &[u8]) -> PacketRecord {
    PacketRecord {
        kind: bytes.get_u32_ne(),
        ifindex: bytes.get_u32_ne(),
        time_ns: bytes.get_u64_ne(),
        src: addr(bytes),
        dst: addr(bytes),
        src_port: Port(bytes.get_u16_ne()),
        dst_port: Port(bytes.get_u16_ne()),
        flags: bytes.get_u8(),
        proto: bytes.get_u8(),
        direction: bytes.get_u8(),
        pad: bytes.get_u8(),
    }
}

fn addr(bytes: &mut &[u8]) -> Addr {
    let mut words = [0; 4];
    for word in &mut words {
        *word = bytes.get_u32_ne();
    }
    Addr { words }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bytes_of<T: aya::Pod>(value: &T) -> Vec<u8> {
        // SAFETY: the type has no uninitialised bytes, which `Pod` promises.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast(), size_of::<T>()) }.to_vec()
    }

    #[test]
    fn what_the_kernel_writes_is_read_back() {
        let connection = ConnRecord {
            kind: kind::CONNECTION,
            errno: 111,
            start_ns: 1,
            established_ns: 2,
            end_ns: 3,
            netns_cookie: 4,
            client: Addr { words: [5, 6, 7, 8] },
            vip: Addr { words: [9, 10, 11, 12] },
            service_id: 13,
            backend_id: 14,
            client_port: Port(15),
            vip_port: Port(16),
            proto: 6,
            outcome: 1,
            marks: 0,
        };
        assert_eq!(record(&bytes_of(&connection)), Ok(Record::Connection(connection)));
        let packet = PacketRecord {
            kind: kind::PACKET,
            ifindex: 1,
            time_ns: 2,
            src: Addr { words: [3, 4, 5, 6] },
            dst: Addr { words: [7, 8, 9, 10] },
            src_port: Port(11),
            dst_port: Port(12),
            flags: 2,
            proto: 6,
            direction: 1,
            pad: 0,
        };
        assert_eq!(record(&bytes_of(&packet)), Ok(Record::Packet(packet)));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_record_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200), known: bool) {
            let mut bytes = bytes;
            if known && bytes.len() >= 4 {
                let kind = u32::from(bytes[0] % 3);
                bytes[..4].copy_from_slice(&kind.to_ne_bytes());
            }
            let _ = record(&bytes);
        }
    }
}
