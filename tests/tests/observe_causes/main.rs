//! The real agent beside real rules: each cause by its own fixture, and silence where all is well.
//!
//! Port reuse and a weight of zero need IPVS; they are told in `founding_story`.

mod fair;
mod starved;

use std::process::ExitCode;

use lb_tests::{agent::trial, runner};

fn main() -> ExitCode {
    runner::run(vec![
        trial("connections_that_are_kept_are_long_lived", starved::long_lived),
        trial("clients_that_are_kept_are_affinity", starved::affinity),
        trial("an_endpoint_without_a_rule_is_not_programmed", starved::not_programmed),
        trial("where_all_is_well_there_is_no_alarm", fair::silence),
    ])
}
