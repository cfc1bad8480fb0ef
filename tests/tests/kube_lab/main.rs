//! Every case of the cluster with a real control plane, which is built once.
//!
//! The cases stand in `lb_tests::kube::cases`, since `cargo xtask kube run` runs them too. Where the control plane's programs are
//! not (they are built by Go), every test says so as a skip.

use std::{
    env,
    process::ExitCode,
    sync::{Arc, Mutex, PoisonError},
};

use anyhow::Context;
use lb_tests::{
    kube::{Cluster, cases, main::main as kube_main, process::POD, programs},
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
                if programs::folder().is_none() {
                    return Err(runner::skip("etcd and Kubernetes are not here: they are built by Go"));
                }
                let mut cluster = shared.lock().unwrap_or_else(PoisonError::into_inner);
                if cluster.is_none() {
                    *cluster = Some(Cluster::new(&|_| {})?);
                }
                let cluster = cluster.as_ref().context("the cluster stands")?;
                let ran = case.run(cluster, *stack);
                ran.map(drop)
                    .map_err(|error| error.context(format!("the agents' logs:\n{}", cluster.logs(40))))
            }));
        }
    }
    let code = runner::run(tests);
    // Taken down here, not when the process ends: cgroups and the folder do not go by themselves.
    drop(shared.lock().unwrap_or_else(PoisonError::into_inner).take());
    code
}
