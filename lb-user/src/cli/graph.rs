//! `evenkeel graph`: who calls whom.

use super::output::{Output, one_a_line};
use crate::view::GraphView;

/// Writes the calls for people.
pub(super) fn text(view: &GraphView, _output: Output) -> String {
    one_a_line(view.calls.iter().map(|call| {
        format!(
            "{}/{} -> {}/{}",
            call.client.namespace, call.client.name, call.namespace, call.service
        )
    }))
}
