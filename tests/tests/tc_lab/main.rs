//! Every case of the lab, in both families, in a cluster of three nodes that is built once.
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

fn main() -> ExitCode {
    let shared: Arc<Mutex<Option<Lab>>> = Arc::default();
    let mut tests = Vec::new();
    for case in cases::all() {
        for family in Family::ALL {
            let shared = Arc::clone(&shared);
            tests.push(runner::test(case.title(family), move || {
                let mut lab = shared.lock().unwrap_or_else(PoisonError::into_inner);
                if lab.is_none() {
                    *lab = Some(Lab::new()?);
                }
                let lab = lab.as_ref().context("the lab stands")?;
                let ran = case.run(lab, family);
                ran.map(drop)
                    .map_err(|error| error.context(format!("the agents' logs:\n{}", lab.logs(40))))
            }));
        }
    }
    let code = runner::run(tests);
    // Taken down here, not when the process ends: cgroups and the folder do not go by themselves.
    drop(shared.lock().unwrap_or_else(PoisonError::into_inner).take());
    code
}
