//! `cargo xtask bless`: writes anew what tests compare with.
//!
//! The tests themselves write, so that what is written is what they would have found. The verifier's numbers are left
//! out: they are written as root, on the machine whose kernel they are of.

use anyhow::Result;

use crate::command::{self, cargo, say, step};
use crate::ebpf;
use crate::layout::Layout;
use crate::setup::{self, Group};

/// The tests that can write: arguments of `cargo test`.
const TESTS: [&[&str]; 4] = [
    &["-p", "lb-tests", "--test", "golden", "--test", "contract_desired"],
    &[
        "-p",
        "lb-user",
        "--lib",
        "metrics::tests::the_documentation_is_up_to_date",
    ],
    &["-p", "lb-tests", "--test", "deploy", "--", "the_manifest"],
    &["-p", "lb-tests", "--test", "tc_model", "--", "the_seeds"],
];

/// `cargo xtask bless`.
pub(crate) fn command(layout: &Layout) -> Result<()> {
    setup::require(layout, &[Group::Build])?;
    // The agent's build script wants the object.
    ebpf::build(layout)?;
    for tests in TESTS {
        step(&format!("blessing: cargo test {}", tests.join(" ")), || {
            command::run(cargo(&layout.root).arg("test").args(tests).env("EVENKEEL_BLESS", "1"))
        })?;
    }
    say("xtask: written; read the difference before you commit it (git diff)");
    Ok(())
}
