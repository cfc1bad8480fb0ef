//! Where the agent translates packets: which interfaces it finds, how it follows them, and that it loses none of its programs
//! and leaves none behind.
//!
//! What is attached is asked of the kernel by other means than the agent's: raw bpf(2) on kernels with links for programs, `tc`
//! on those without. Whether packets are translated rightly is tested elsewhere.

mod follow;
mod keep;
mod place;
mod settings;

use std::process::ExitCode;

use lb_tests::{agent::trial, runner};

fn main() -> ExitCode {
    let mut tests = everywhere();
    if !runner::in_guest() {
        tests.extend(here());
    }
    runner::run(tests)
}

/// What an agent makes of netlink's news and of its own flags, which no kernel here tells otherwise: each takes an emulated one
/// a quarter of a minute.
fn here() -> Vec<runner::Test> {
    vec![
        trial("an_uplink_is_followed_down_and_up", follow::down_and_up),
        trial("a_changed_address_is_followed", follow::address),
        trial("a_bridge_takes_the_place_of_its_port", follow::bridge),
        trial("uplinks_by_name_are_awaited", follow::awaited),
        trial("flows_of_a_size_that_nobody_uses_are_not_kept", settings::flow_size),
        trial("flags_are_checked", settings::flags),
    ]
}

/// What rests on links for programs or on `clsact`, and on what devices there are.
fn everywhere() -> Vec<runner::Test> {
    vec![
        trial("an_uplink_is_found_and_described", follow::found),
        trial("a_new_vlan_is_found_and_forgotten", follow::vlan),
        trial("a_renamed_guest_keeps_its_programs", follow::renamed_guest),
        trial(
            "interfaces_without_a_link_header_have_programs_of_their_own",
            follow::raw,
        ),
        trial("a_restart_swaps_programs_in_their_links", keep::restart),
        trial(
            "a_restart_waits_for_the_node_before_it_takes_away",
            keep::restart_unknown,
        ),
        trial("an_upgrade_swaps_programs_in_their_links", keep::upgrade),
        trial("what_refuses_leaves_what_works", keep::refusal),
        trial("a_restart_without_uplinks_takes_all_away", keep::restart_without),
        trial("interfaces_that_are_gone_make_room", keep::crowded),
        trial("what_is_lost_is_attached_again", keep::repair),
        trial("observers_and_translators_share_an_interface", keep::shared),
        trial("what_others_attached_stays", keep::others),
        trial("cleanup_leaves_nothing", keep::cleanup),
        trial("the_doctor_names_uplinks_and_what_they_need", settings::doctor),
    ]
}
