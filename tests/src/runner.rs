//! The small shared runner of the real-socket tests.
//!
//! The tests of a target run one after another on the thread that entered the private mounts: a process is in one
//! cgroup at a time, and threads share their starter's mounts. No knowledge of what is tested lives here. The invariant:
//! a test passes, fails, or says in one line why it cannot run here.

use std::{
    fmt,
    io::{self, Write},
    process::ExitCode,
};

use lb_user::lab::mounts::BpfFs;
use libtest_mimic::{Arguments, Failed, Trial};

use crate::world::Dial;

/// A test: its name and its body.
pub struct Test {
    name: String,
    body: Box<dyn Fn() -> anyhow::Result<()> + Send + Sync>,
}

impl fmt::Debug for Test {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Test").field(&self.name).finish()
    }
}

/// Makes a test.
pub fn test(name: impl Into<String>, body: impl Fn() -> anyhow::Result<()> + Send + Sync + 'static) -> Test {
    Test {
        name: name.into(),
        body: Box::new(body),
    }
}

/// The body of a test that is run for each way of dialling.
pub type Body = fn(Dial) -> anyhow::Result<()>;

/// Makes a test of each body for each way: `NAME::v4`, `NAME::v6`, `NAME::mapped`.
pub fn each(dials: &[Dial], bodies: &[(&str, Body)]) -> Vec<Test> {
    let mut tests = Vec::new();
    for (name, body) in bodies.iter().copied() {
        for dial in dials.iter().copied() {
            tests.push(test(format!("{name}::{dial}"), move || body(dial)));
        }
    }
    tests
}

/// Why a test cannot run here; returned as its error, it counts as a skip.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Skip(String);

/// The error that makes a test a skip.
pub fn skip(reason: impl Into<String>) -> anyhow::Error {
    Skip(reason.into()).into()
}

/// A failure with a log below it; what failed stays in the first lines, which a summary shows. A skip stays one.
pub fn with_log(error: anyhow::Error, log: impl FnOnce() -> String) -> anyhow::Error {
    if error.is::<Skip>() {
        return error;
    }
    anyhow::anyhow!("{error:?}\n\nWhat was logged:\n{}", log())
}

/// Runs the tests that the command line selects, with private mounts.
pub fn run(tests: Vec<Test>) -> ExitCode {
    run_with(tests, true)
}

/// Runs tests that touch neither sockets nor mounts, and so need no root.
pub fn run_plain(tests: Vec<Test>) -> ExitCode {
    run_with(tests, false)
}

fn run_with(tests: Vec<Test>, private_mounts: bool) -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    // Held to the end; where it cannot be had, no test can run.
    let mounts = if arguments.list || !private_mounts {
        None
    } else {
        Some(BpfFs::enter_private().map_err(|error| error.to_string()))
    };
    let refused = mounts.and_then(Result::err);
    let trials = tests
        .into_iter()
        .map(|test| {
            let refused = refused.clone();
            Trial::test(test.name.clone(), move || run_one(&test, refused))
        })
        .collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn run_one(test: &Test, refused: Option<String>) -> Result<(), Failed> {
    let result = match refused {
        Some(reason) => Err(skip(format!("real sockets need root ({reason})"))),
        None => (test.body)(),
    };
    match result {
        Ok(()) => Ok(()),
        Err(error) => match error.downcast_ref::<Skip>() {
            Some(skip) => {
                let mut out = io::stdout().lock();
                let reason = skip.to_string().replace('\n', " ");
                // On a line of its own: the test's name stands before it.
                writeln!(out, "\nSKIP {}: {reason}", test.name.trim()).map_err(|e| e.to_string())?;
                Ok(())
            }
            None => Err(format!("{error:?}").into()),
        },
    }
}

/// True inside a virtual machine, where everything is twenty to fifty times slower.
pub fn in_guest() -> bool {
    std::env::var_os("EVENKEEL_IN_VM").is_some_and(|v| v == "1")
}

/// A count for this place: `here` on a machine, `guest` in a virtual one.
pub fn scaled(here: usize, guest: usize) -> usize {
    if in_guest() { guest } else { here }
}
