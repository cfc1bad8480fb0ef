//! The TC programs. Observe mode has [`observe`], which touches no packet. Balance mode has [`ingress`] and [`egress`], on the
//! interfaces behind which the world or guests with their own kernel lie: destinations change at ingress, sources at egress,
//! and the kernel's own routing lies in between.
//!
//! In reading order: [`skb`] (the packet's bytes), [`sight`] (what was read of it), [`clock`], [`table`] (flows and tuples), [`begin`] (a new flow), [`rewrite`]
//! (addresses and checksums), [`fragments`], [`errors`] (ICMP), [`refuse`] (answers of our own).

mod begin;
mod clock;
mod egress;
mod errors;
mod fragments;
mod ingress;
mod observe;
mod refuse;
mod rewrite;
mod sight;
mod skb;
mod table;

use lb_common::counter::action;

pub use self::{egress::egress, ingress::ingress, observe::observe, sight::Sight};
use crate::count::count;

/// Direction: into the node.
pub const INGRESS: u8 = 0;
/// Direction: out of the node.
pub const EGRESS: u8 = 1;

/// `TC_ACT_UNSPEC`, and `TCX_NEXT`: the next program decides.
const NEXT: i32 = -1;
/// `TC_ACT_SHOT`, and `TCX_DROP`: the packet ends here.
const SHOT: i32 = 2;

/// Counts a packet that goes on as it is now.
#[inline(always)]
fn pass(hook: u32, action: u32) -> i32 {
    count(hook, action);
    NEXT
}

/// Counts a packet that goes no further.
#[inline(always)]
fn shoot(hook: u32, action: u32) -> i32 {
    count(hook, action);
    SHOT
}

/// Counts a packet that was, or could not be, rewritten, and lets it go on.
#[inline(always)]
fn done(hook: u32, rewritten: bool) -> i32 {
    pass(
        hook,
        if rewritten {
            action::TRANSLATED
        } else {
            action::INCONSISTENT
        },
    )
}
