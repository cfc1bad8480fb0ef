//! `evenkeel-fuzz`: broken packets for the parser and the programs, as many as wanted; `cargo xtask fuzz` builds and starts it.

use std::process::ExitCode;

fn main() -> ExitCode {
    lb_tests::model::fuzz::main()
}
