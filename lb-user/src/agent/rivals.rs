//! Who else translates Services here while this agent balances: looked at again and again, since kube-proxy may come back.
//!
//! An agent that balances does not end for it: its programs are in force, and ending would leave them without care. It says so in its
//! log, among the problems of `evenkeel status`, and so in `evenkeel_problems`. Nothing is changed here.

use std::{sync::Arc, time::Duration};

use tokio::time::{Instant, MissedTickBehavior, interval_at};

use super::state::{Shared, lock};
use crate::{
    doctor::owners::{self, Owners, Running},
    model::Problem,
    supervise::Liveness,
};

/// How often it is looked.
const PERIOD: Duration = Duration::from_secs(15);

/// Looks now and then, until the agent ends; the first look was the start's own.
pub(super) async fn follow(shared: &Arc<Shared>, liveness: &Liveness) -> Result<(), String> {
    let mut ticks = interval_at(Instant::now() + PERIOD, PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        liveness.beat();
        let shared = shared.clone();
        tokio::task::spawn_blocking(move || {
            let found = problems(&owners::find(&shared.config.bpffs), &Running::find());
            let mut known = lock(&shared.rivals);
            for problem in found
                .iter()
                .filter(|&problem| !known.iter().any(|old| same(old, problem)))
            {
                tracing::warn!("{problem}");
            }
            for problem in known
                .iter()
                .filter(|&problem| !found.iter().any(|new| same(new, problem)))
            {
                tracing::info!(system = %problem.object, "does not translate Services here any more");
            }
            *known = found;
        })
        .await
        .map_err(|error| error.to_string())?;
    }
}

/// Whether two problems are about the same; the traces of a proxy at work change all the time.
fn same(one: &Problem, other: &Problem) -> bool {
    one.object == other.object
}

/// What stands beside this agent, by a look.
pub(super) fn problems(owners: &Owners, running: &Running) -> Vec<Problem> {
    let problem = |object: &str, message: String| Problem {
        origin: "this node".to_owned(),
        object: object.to_owned(),
        field: "--mode balance".to_owned(),
        message,
    };
    let mut problems: Vec<Problem> = owners
        .found
        .iter()
        .map(|owner| {
            let message = format!(
                "translates Services beside this agent: {}; what to do: `evenkeel doctor`",
                owner.trace
            );
            problem(owner.name, message)
        })
        .collect();
    if running.is_certain() && !owners.found.iter().any(|owner| owner.system.is_kube_proxy()) {
        let message = format!(
            "runs beside this agent and may write rules: {}; what to do: `evenkeel doctor`",
            running.trace()
        );
        problems.push(problem("kube-proxy", message));
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::owners::{Owner, System};

    #[test]
    fn each_rival_is_a_problem_and_ports_alone_are_none() {
        let owners = Owners {
            found: vec![Owner::new(System::KubeProxyIptables, "chain KUBE-SERVICES".to_owned())],
            unseen: vec![],
        };
        let running = Running {
            process: Some(3),
            ..Running::default()
        };
        let found = problems(&owners, &running);
        assert_eq!(found.len(), 1);
        assert_eq!(
            found[0].to_string(),
            "this node: kube-proxy (iptables): --mode balance: translates Services beside this agent: chain KUBE-SERVICES; what to do: \
             `evenkeel doctor`"
        );
        let found = problems(&Owners::default(), &running);
        assert!(found[0].message.contains("process 3 (kube-proxy)"), "{found:?}");
        let ports = Running {
            ports: [10_256].into(),
            ..Running::default()
        };
        assert_eq!(problems(&Owners::default(), &ports), []);
    }
}
