//! `evenkeel observe`: what happens, as it happens.

use super::output::Output;
use crate::view::EventView;

/// Writes one event for people.
pub(super) fn line(event: &EventView, _output: Output) -> String {
    format!("{event:?}\n")
}
