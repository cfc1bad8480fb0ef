//! `evenkeel diagnose`: why load is uneven, in sentences.

use super::output::Output;
use crate::view::{DiagnosisView, NodeFactsView};

/// Writes the diagnoses for people.
pub(super) fn text(_node: &NodeFactsView, items: &[DiagnosisView], _output: Output) -> String {
    super::output::one_a_line(items.iter().flat_map(|item| item.sentences.clone()))
}
