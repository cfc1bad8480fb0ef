//! `evenkeel-lab`: a cluster of three nodes in network namespaces; `cargo xtask lab` builds and starts it.

use std::process::ExitCode;

fn main() -> ExitCode {
    lb_tests::lab::main::main()
}
