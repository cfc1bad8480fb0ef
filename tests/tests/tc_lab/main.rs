//! Every case of the lab, in both families, in a cluster of three nodes that is built once. In a guest, where three agents and
//! their clients share an emulated processor, the contract and what goes its own way through the kernel: hairpins, fragments, path MTU,
//! resets. What is about numbers and time (shares, restarts, affinity's timeout) runs on the host.
//!
//! The cases stand in `lb_tests::lab::cases`, since `cargo xtask lab run` runs them too.

use std::{
    process::ExitCode,
    sync::{Arc, Mutex, PoisonError},
};

use anyhow::Context;
use lb_tests::{
    lab::{Lab, cases, plan::Family},
    runner,
};

/// The rows that run in guests.
const IN_GUESTS: [&str; 18] = [
    "C9", "C10", "C11", "C12", "C13", "C14", "C15", "C16", "C17", "C19", "C20", "C21", "K6", "K9", "K20", "K40",
    "FRAG", "PMTU",
];

fn main() -> ExitCode {
    let shared: Arc<Mutex<Option<Lab>>> = Arc::default();
    let mut tests = Vec::new();
    for case in cases::all() {
        if runner::in_guest() && !IN_GUESTS.contains(&case.row) {
            continue;
        }
        for family in Family::ALL {
            let shared = Arc::clone(&shared);
            tests.push(runner::test(case.title(family), move || {
                let mut lab = shared.lock().unwrap_or_else(PoisonError::into_inner);
                if lab.is_none() {
                    *lab = Some(Lab::new()?);
                }
                let lab = lab.as_ref().context("the lab stands")?;
                let ran = case.run(lab, family);
                ran.map(drop).map_err(|error| runner::with_log(error, || lab.logs(40)))
            }));
        }
    }
    let code = runner::run(tests);
    // Taken down here, not when the process ends: cgroups and the folder do not go by themselves.
    drop(shared.lock().unwrap_or_else(PoisonError::into_inner).take());
    code
}
