//! The tasks of the repository: `cargo xtask TASK`.
//!
//! Each task is one module; what they share is where things lie (`layout`) and how other programs are run (`command`).
//! Tasks bring what they need themselves, so that a fresh clone needs no other step.

mod agent;
mod bench;
mod bless;
mod ci;
mod command;
mod ebpf;
mod layout;
mod lint;
mod setup;
mod story;
mod test;
mod vm;

use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::layout::Layout;
use crate::setup::KernelLine;

/// Build, test, demo and bench tasks of Evenkeel.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Install what building, testing and linting need, or say what is missing.
    ///
    /// As root on a machine with apt, packages are installed; everything else goes into the cache ($EVENKEEL_CACHE,
    /// else ~/.cache/evenkeel). Where something cannot be installed, it is named with how to get it. The other tasks
    /// call this themselves for their own needs.
    #[command(after_help = "Examples:\n  cargo xtask setup\n  cargo xtask setup --check")]
    Setup {
        /// Only say what is missing; exit 1 if anything is.
        #[arg(long)]
        check: bool,
    },
    /// Build the kernel object and the binary `evenkeel` with it inside.
    #[command(after_help = "Examples:\n  cargo xtask build\n  cargo xtask build --release")]
    Build {
        /// Optimise the agent (the kernel object always is).
        #[arg(long)]
        release: bool,
    },
    /// Check formatting, clippy, and the dependencies' licences and sources.
    #[command(after_help = "Example:\n  cargo xtask lint")]
    Lint,
    /// Run all tests here, and the real-socket tests inside virtual machines with older kernels.
    ///
    /// Ends with a table of suites and one line `N passed, N failed, N skipped`. With CI=true in the environment, a
    /// skip that tests/expected-skips.txt does not name fails the run.
    #[command(
        after_help = "Examples:\n  cargo xtask test\n  cargo xtask test --no-vm maglev\n  cargo xtask test --kernel 6.1 \
                      sock_affinity\n\nSuites whose name contains FILTER run whole; of the others, the tests whose \
                      name contains it."
    )]
    Test(test::Options),
    /// Run a command inside a virtual machine with an older kernel.
    ///
    /// The guest has the workspace's binary `evenkeel`, the real-socket tests below /tests, busybox, ip, nft and
    /// ipvsadm; no network but loopback and what the command makes. It is gone when the command ends.
    #[command(
        after_help = "Examples:\n  cargo xtask vm --kernel 6.1 -- uname -r\n  cargo xtask vm --kernel 6.12 -- sh -c \
                      'ipvsadm -A -t 10.0.0.1:80 -s rr && ipvsadm -L -n'\n  cargo xtask vm --kernel 6.1 -- evenkeel \
                      doctor"
    )]
    Vm(vm::Options),
    /// Show the product at work on this machine: real connections, in private namespaces (needs root).
    ///
    /// All arguments go to `evenkeel demo`.
    #[command(
        after_help = "Examples:\n  cargo xtask demo\n  cargo xtask demo --json demo.json\n  cargo xtask demo -- --help"
    )]
    Demo {
        /// Arguments of `evenkeel demo`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    /// Tell the founding story in a virtual machine: IPVS starves a new endpoint, and Evenkeel says which and why.
    ///
    /// IPVS runs with conn_reuse_mode 0, then 1; a client with 200 source ports connects as fast as it can; a third backend
    /// joins two. Prints what `evenkeel diagnose` says of the first run, and the outcome of both.
    #[command(
        after_help = "Examples:\n  cargo xtask story --kernel 6.12\n  cargo xtask story --kernel 6.1 --json story.json\n  \
                      cargo xtask story --kernel 6.12 --report report.json && evenkeel report --from report.json --html \
                      story.html"
    )]
    Story(story::Options),
    /// Measure connect cost, sync time, evenness and memory on this machine (needs root).
    ///
    /// All further arguments go to `evenkeel-bench`. With --kernel it runs inside a virtual machine, where kube-proxy has IPVS.
    #[command(
        after_help = "Examples:\n  cargo xtask bench\n  cargo xtask bench --json bench.json\n  cargo xtask bench -- --help\n  \
                            cargo xtask bench --kernel 6.12 --json ipvs.json --kube --kube-modes ipvs --kube-services 100,1000 \
                            --kube-api-services 0"
    )]
    Bench(bench::Options),
    /// A cluster of three nodes in network namespaces: build it, look around, run the contract's cases in it (needs root).
    ///
    /// `run` builds a lab of its own, runs every case in both families, prints a table and removes the lab; it exits with 1
    /// if a case fails. `up` leaves a lab standing until `down`; `exec` runs a command in one of its places.
    #[command(
        after_help = "Examples:\n  cargo xtask lab run\n  cargo xtask lab run --json lab.json C9 K1\n  cargo xtask lab up\n  \
                      cargo xtask lab exec node-1 -- evenkeel status\n  cargo xtask lab down"
    )]
    Lab {
        /// Arguments of `evenkeel-lab`: up, down, run [--json FILE] [ROW..], exec PLACE -- COMMAND.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
        arguments: Vec<OsString>,
    },
    /// A real control plane with three lab nodes: API server, controllers, pods, agents (needs root, and Go once).
    ///
    /// `run` builds one of its own, runs every row of the contract, the behaviours of Kubernetes' own tests and schedules of
    /// faults in it, prints tables and removes it; it exits with 1 if anything fails. `up` leaves one standing until `down`;
    /// `status` tells what stands, `exec` runs a command in one of its places.
    #[command(
        after_help = "Examples:\n  cargo xtask kube run\n  cargo xtask kube run --json kube.json\n  cargo xtask kube up\n  \
                      cargo xtask kube exec control -- kubectl get endpointslices -A\n  cargo xtask kube down"
    )]
    Kube {
        /// Arguments of `evenkeel-kube`: up, down, status, run [--json FILE] [NAME..], exec PLACE -- COMMAND.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
        arguments: Vec<OsString>,
    },
    /// Reuse tuples at scale, and scan the flow table under load (needs root; some minutes).
    ///
    /// All arguments go to `evenkeel-lab soak`.
    #[command(
        after_help = "Examples:\n  cargo xtask soak\n  cargo xtask soak --connections 100000\n  cargo xtask soak -- --help"
    )]
    Soak {
        /// Arguments of `evenkeel-lab soak`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    /// Compare the packet parser and programs with a plain model of them, on millions of broken packets (needs root).
    ///
    /// Ten million of each, if nothing else is said. All arguments go to `evenkeel-fuzz`; a failure prints the seed and the
    /// shortest script that still fails.
    #[command(
        after_help = "Examples:\n  cargo xtask fuzz\n  cargo xtask fuzz --count 100000 --seed 7\n  cargo xtask fuzz -- --help"
    )]
    Fuzz {
        /// Arguments of `evenkeel-fuzz`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    /// Write anew what tests compare with: golden cases and generated documents.
    ///
    /// The difference is then to be read by a person: `git diff`.
    #[command(after_help = "Example:\n  cargo xtask bless")]
    Bless,
    /// What continuous integration runs: lint, then test.
    #[command(after_help = "Example:\n  CI=true cargo xtask ci")]
    Ci,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(arguments.task) {
        Ok(code) => code,
        Err(error) => {
            command::say(&format!("xtask: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task) -> Result<ExitCode> {
    let layout = Layout::find()?;
    match task {
        Task::Setup { check } => setup::command(&layout, check)?,
        Task::Build { release } => agent::command(&layout, release)?,
        Task::Lint => lint::command(&layout)?,
        Task::Test(options) => return test::command(&layout, &options),
        Task::Vm(options) => return vm::command(&layout, &options),
        Task::Story(options) => return story::command(&layout, &options),
        Task::Demo { arguments } => agent::demo(&layout, &arguments)?,
        Task::Fuzz { arguments } => agent::fuzz(&layout, &arguments)?,
        Task::Bench(options) => return bench::command(&layout, &options),
        Task::Lab { arguments } => agent::lab(&layout, &arguments)?,
        Task::Kube { arguments } => agent::kube(&layout, &arguments)?,
        Task::Soak { arguments } => agent::soak(&layout, &arguments)?,
        Task::Bless => bless::command(&layout)?,
        Task::Ci => return ci::command(&layout),
    }
    Ok(ExitCode::SUCCESS)
}

/// Parses `--kernel` where only a virtual machine's kernel makes sense.
fn kernel_line(text: &str) -> Result<KernelLine, String> {
    KernelLine::ALL
        .iter()
        .copied()
        .find(|line| line.name() == text)
        .ok_or_else(|| {
            let names: Vec<_> = KernelLine::ALL.iter().map(|line| line.name()).collect();
            format!("the kernels are {}", names.join(" and "))
        })
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::{Arguments, Task};

    fn demo_arguments(words: &[&str]) -> Vec<String> {
        let line = ["cargo xtask", "demo"].iter().chain(words);
        let Task::Demo { arguments } = Arguments::try_parse_from(line).expect("good").task else {
            panic!("another task was parsed");
        };
        arguments
            .into_iter()
            .map(|word| word.into_string().expect("UTF-8"))
            .collect()
    }

    #[test]
    fn the_demo_gets_its_arguments_unread() {
        assert!(demo_arguments(&[]).is_empty());
        assert_eq!(
            demo_arguments(&["--json", "d.json", "--keep"]),
            ["--json", "d.json", "--keep"]
        );
        assert_eq!(demo_arguments(&["--", "--help"]), ["--help"]);
    }
}
