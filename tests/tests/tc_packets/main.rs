//! The packet programs on crafted packets, kind by kind: a sentence, the packet in, the verdict, the packet out, and which
//! counters moved. No traffic, no time but what a test adds to the flow clock.

mod errors;
mod forms;
mod forward;
mod fragments;
mod masquerade;
mod refuse;
mod reuse;
mod scene;
mod table;
mod trust;
mod udp;

use std::process::ExitCode;

use lb_tests::{runner, world::Dial};

fn main() -> ExitCode {
    let families = [Dial::V4, Dial::V6];
    let mut tests = Vec::new();
    for cases in [
        forward::CASES,
        reuse::CASES,
        udp::CASES,
        refuse::CASES,
        masquerade::CASES,
        errors::CASES,
        fragments::CASES,
        forms::CASES,
        table::CASES,
        trust::CASES,
    ] {
        tests.extend(runner::each(&families, cases));
    }
    runner::run(tests)
}
