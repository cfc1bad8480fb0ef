//! Fragments: the first one has the ports, the later ones find them by what all of them have.

use lb_common::{
    flow::{FragmentKey, FragmentPorts},
    packet::{Packet, fragment},
};

use crate::maps::FRAGMENTS;

/// Notes the ports of a first fragment, or gives a later one its ports; false if its first one was not seen.
#[inline(always)]
pub fn complete(packet: &mut Packet) -> bool {
    let key = FragmentKey {
        src: packet.src,
        dst: packet.dst,
        id: packet.id,
        proto: packet.proto,
        pad: [0; 3],
    };
    if packet.fragment == fragment::FIRST {
        let ports = FragmentPorts {
            src_port: packet.src_port,
            dst_port: packet.dst_port,
        };
        // A full map gives up its oldest entry; without memory the later fragments are lost, as they would be on the way.
        let _ = FRAGMENTS.insert(&key, &ports, 0);
        return true;
    }
    let Some(ports) = FRAGMENTS.get_ptr(&key) else {
        return false;
    };
    // SAFETY: an element of the map; it may be reused while we look, and then a fragment goes astray as on a lossy way.
    let ports = unsafe { *ports };
    packet.src_port = ports.src_port;
    packet.dst_port = ports.dst_port;
    true
}
