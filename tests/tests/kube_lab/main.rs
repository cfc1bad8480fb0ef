//! Every case of the cluster with a real control plane, which is built once.
//!
//! The cases stand in `lb_tests::kube::cases`, since `cargo xtask kube run` runs them too. Where the control plane's programs are
//! not (they are built by Go), every test says so as a skip.

use std::{
    env,
    path::PathBuf,
    process::ExitCode,
    sync::{Arc, Mutex, PoisonError},
};

use anyhow::{Context, Result, ensure};
use lb_tests::{
    kube::{Cluster, cases, faults, main::main as kube_main, process::POD, programs},
    runner,
};

fn main() -> ExitCode {
    // Pods are processes of this very program.
    if env::args().nth(1).is_some_and(|verb| verb == POD) {
        return kube_main();
    }
    let shared: Arc<Mutex<Option<Cluster>>> = Arc::default();
    let mut tests = Vec::new();
    for case in cases::all() {
        for stack in case.stacks {
            let shared = Arc::clone(&shared);
            tests.push(runner::test(case.title(*stack), move || {
                with_cluster(&shared, |cluster| case.run(cluster, *stack).map(drop))
            }));
        }
    }
    for (name, body) in FAULTS {
        let shared = Arc::clone(&shared);
        tests.push(runner::test(*name, move || with_cluster(&shared, body)));
    }
    let code = runner::run(tests);
    // Taken down here, not when the process ends: cgroups and the folder do not go by themselves.
    drop(shared.lock().unwrap_or_else(PoisonError::into_inner).take());
    code
}

type Shared = Arc<Mutex<Option<Cluster>>>;
type Body = fn(&Cluster) -> Result<()>;

/// The tests of faults. `cargo xtask kube run` plays many more schedules.
const FAULTS: &[(&str, Body)] = &[
    ("faults::schedules_end_where_a_cold_start_ends", schedules),
    ("faults::a_build_that_loses_removals_is_caught", defect),
];

/// Schedules that are played here: each has another fault first.
const SEEDS: std::ops::RangeInclusive<u64> = 7..=12;

/// Does something with the cluster, which the first test builds.
fn with_cluster(shared: &Shared, work: impl Fn(&Cluster) -> Result<()>) -> Result<()> {
    if programs::folder().is_none() {
        return Err(runner::skip("etcd and Kubernetes are not here: they are built by Go"));
    }
    let mut cluster = shared.lock().unwrap_or_else(PoisonError::into_inner);
    if cluster.is_none() {
        *cluster = Some(Cluster::new(&|_| {})?);
    }
    let cluster = cluster.as_ref().context("the cluster stands")?;
    work(cluster).map_err(|error| runner::with_log(error, || cluster.logs(40)))
}

fn schedules(cluster: &Cluster) -> Result<()> {
    let tally = faults::run(cluster, SEEDS)?;
    ensure!(tally.is_good(), "{}\n{tally}", tally.wrong.join("\n"));
    ensure!(
        tally.schedules == 6 && tally.good_dials > 500,
        "too little happened:\n{tally}"
    );
    Ok(())
}

/// The negative control: agents that keep what a second list no longer has.
fn defect(cluster: &Cluster) -> Result<()> {
    let program = env::var_os("EVENKEEL_DEFECT_BIN").map(PathBuf::from);
    let Some(program) = program else {
        return Err(runner::skip(
            "no agent with a defect was built: `cargo xtask test` builds one",
        ));
    };
    for node in cluster.nodes() {
        node.stop()?;
        node.set_program(Some(program.clone()));
    }
    let played = faults::play(cluster, [faults::Schedule::of_removals()]);
    for node in cluster.nodes() {
        // What the defect left in the kernel is not to be met by anybody else.
        node.wipe()?;
        node.set_program(None);
    }
    let tally = played?;
    ensure!(
        tally.divergences > 0 && tally.lost_removals > 0,
        "the schedules do not see removals that are lost:\n{tally}"
    );
    Ok(())
}
