//! The binary `evenkeel`.

use std::process::ExitCode;

fn main() -> ExitCode {
    lb_user::cli::run()
}
