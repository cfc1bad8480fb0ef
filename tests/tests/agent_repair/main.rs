//! What the running agent heals, and what it says of itself and of the traffic.

mod callers;
mod repair;
mod telling;

use std::process::ExitCode;

use lb_tests::{agent::trial, runner};

fn main() -> ExitCode {
    runner::run(vec![
        trial("a_lost_link_is_attached_again", repair::lost_link),
        trial("damaged_contents_are_repaired", repair::damaged_contents),
        trial("observe_mode_sees_and_does_not_touch", telling::observe),
        trial("what_does_not_fit_is_reported_and_heals", repair::capacity),
        trial("more_backends_than_fit_are_reported_and_heal", repair::backend_capacity),
        trial("readiness_follows_the_datapath", telling::readiness),
        trial("metrics_equal_the_traffic", telling::metrics),
        trial("callers_are_known_by_their_workload", callers::callers),
    ])
}
