//! What the kernel programs count, hook by hook: which actions a hook can have, and what they mean there.
//!
//! Series exist for these pairs alone. A pair that is missing here is not exported; `map dump COUNTERS` shows every counter
//! that is not zero.

use lb_common::counter::{action, hook};

use crate::view::Mode;

const CONNECT: &[u32] = &[
    action::MISS,
    action::TRANSLATED,
    action::REFUSED,
    action::UNREACHABLE,
    action::OPTED_OUT,
    action::STATE_FULL,
    action::INCONSISTENT,
];
const REVERSE: &[u32] = &[action::MISS, action::TRANSLATED];
const INGRESS: &[u32] = &[
    action::MISS,
    action::TRANSLATED,
    action::REFUSED,
    action::INCONSISTENT,
    action::NEW_FLOW,
    action::REUSED,
    action::RESUMED,
    action::RERESOLVED,
    action::POLICY_DROPPED,
    action::SOURCE_DENIED,
    action::FLOWS_FULL,
    action::FRAGMENT_UNKNOWN,
    action::ICMP_TRANSLATED,
    action::MALFORMED,
    action::RECLAIMED,
    action::EVICTED,
    action::UNANSWERED,
    action::COLLISION,
];
const EGRESS: &[u32] = &[
    action::MISS,
    action::TRANSLATED,
    action::INCONSISTENT,
    action::PORTS_EXHAUSTED,
    action::NO_SOURCE,
    action::FRAGMENT_UNKNOWN,
    action::ICMP_TRANSLATED,
    action::MALFORMED,
];

/// The actions of a hook that have series in a mode. Records are not among them: those that are lost have a metric of their own.
pub fn actions(hook: u32, mode: Mode) -> &'static [u32] {
    match hook {
        hook::CONNECT4 | hook::CONNECT6 | hook::SENDMSG4 | hook::SENDMSG6 => CONNECT,
        hook::RECVMSG4 | hook::RECVMSG6 | hook::GETPEERNAME4 | hook::GETPEERNAME6 => REVERSE,
        hook::INGRESS if mode == Mode::Balance => INGRESS,
        hook::EGRESS if mode == Mode::Balance => EGRESS,
        _ => &[],
    }
}

/// (action, what it says at ingress and egress), for those that read differently there, or are there alone.
pub(super) const PACKETS: [(u32, &str); 20] = [
    (action::MISS, "neither a flow nor a frontend: passed untouched"),
    (
        action::TRANSLATED,
        "a packet whose address was rewritten, in either direction",
    ),
    (
        action::REFUSED,
        "answered with RST or \"port unreachable\": no usable backend, or no port was free for the node's own source",
    ),
    (
        action::INCONSISTENT,
        "the maps contradict each other, or the packet could not be written: passed",
    ),
    (
        action::NEW_FLOW,
        "a flow was begun: by a SYN, or by the first datagram of a tuple",
    ),
    (
        action::REUSED,
        "of the new flows, those by a SYN on the tuple of an earlier one, which was ended and chosen anew in the same packet",
    ),
    (
        action::RESUMED,
        "a packet in the middle of a connection that the table does not know: chosen again by its tuple",
    ),
    (
        action::RERESOLVED,
        "a UDP flow whose backend had left: another was chosen",
    ),
    (
        action::POLICY_DROPPED,
        "dropped: no usable backend here, and the traffic policy is Local",
    ),
    (
        action::SOURCE_DENIED,
        "dropped: the source lies outside the Service's source ranges",
    ),
    (action::FLOWS_FULL, "dropped: the flow table had no slot for a new flow"),
    (
        action::PORTS_EXHAUSTED,
        "dropped: no port was free for the node's own source; the client's next packet is refused",
    ),
    (action::NO_SOURCE, "dropped: the interface has no address to send from"),
    (
        action::FRAGMENT_UNKNOWN,
        "a later fragment whose first one was not seen: passed untouched",
    ),
    (action::ICMP_TRANSLATED, "an ICMP error about a flow was translated"),
    (
        action::MALFORMED,
        "headers that are cut off, or longer than is read: passed untouched",
    ),
    (action::RECLAIMED, "an expired flow gave its slot to a new one"),
    (
        action::EVICTED,
        "an unanswered or ended flow gave its slot to a new one before it expired: none was free",
    ),
    (action::UNANSWERED, "dropped: a refusal could not be sent"),
    (
        action::COLLISION,
        "refused: from this port the client talks to each backend that was tried already, through another frontend",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_action_of_packets_is_explained() {
        for hook in [hook::INGRESS, hook::EGRESS] {
            for found in actions(hook, Mode::Balance) {
                let explained = PACKETS.iter().any(|(action, _)| action == found);
                assert!(explained, "{}", action::NAMES[*found as usize]);
            }
        }
    }

    #[test]
    fn series_are_few_and_packets_have_some_in_balance_mode_alone() {
        let count = |mode: Mode| (0..hook::COUNT).map(|hook| actions(hook, mode).len()).sum::<usize>();
        assert_eq!((count(Mode::Balance), count(Mode::Observe)), (62, 36));
        let names = |hook: u32| {
            actions(hook, Mode::Balance)
                .iter()
                .map(|found| action::NAMES[*found as usize])
        };
        for hook in 0..hook::COUNT {
            let all: std::collections::BTreeSet<_> = names(hook).collect();
            assert_eq!(
                all.len(),
                names(hook).count(),
                "twice at {}",
                hook::NAMES[hook as usize]
            );
        }
    }
}
