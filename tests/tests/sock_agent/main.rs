//! The life of the agent's process: restart, upgrade, change of mode.

mod restart;

use std::process::ExitCode;

use lb_tests::{agent::trial, runner};

fn main() -> ExitCode {
    runner::run(vec![
        trial(
            "c24_a_killed_agent_fails_no_connection_and_changes_nothing",
            restart::kill,
        ),
        trial(
            "a_terminated_agent_leaves_the_datapath_in_balance",
            restart::terminate_balance,
        ),
        trial(
            "a_terminated_agent_leaves_nothing_in_observe",
            restart::terminate_observe,
        ),
        trial(
            "c24_a_restart_applies_what_changed_meanwhile",
            restart::changed_meanwhile,
        ),
        trial("c24_an_unreadable_folder_deletes_nothing", restart::unreadable_folder),
        trial("c24_a_silent_source_deletes_nothing", restart::silent_source),
        trial(
            "pins_of_another_abi_are_replaced_without_a_failed_connection",
            restart::other_abi,
        ),
        trial("a_second_agent_is_refused", restart::second_agent),
        trial("modes_are_switched_by_a_restart", restart::switch_modes),
    ])
}
