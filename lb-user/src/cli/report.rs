//! `evenkeel report`: the picture of a node over time.

use super::output::Output;
use crate::view::ReportView;

/// Writes the report for people: its diagnoses.
pub(super) fn text(view: &ReportView, output: Output) -> String {
    let items: Vec<_> = view.services.iter().map(|service| service.diagnosis.clone()).collect();
    super::diagnose::text(&view.node, &items, output)
}
