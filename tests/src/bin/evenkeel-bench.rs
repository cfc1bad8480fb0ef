//! `evenkeel-bench`: measures what Evenkeel costs and how well it balances; `cargo xtask bench` builds and starts it.

use std::process::ExitCode;

fn main() -> ExitCode {
    lb_tests::bench::main()
}
