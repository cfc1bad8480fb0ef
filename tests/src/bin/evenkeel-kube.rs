//! `evenkeel-kube`: a real control plane with nodes and pods in network namespaces; `cargo xtask kube` builds and starts it.

use std::process::ExitCode;

fn main() -> ExitCode {
    lb_tests::kube::main::main()
}
