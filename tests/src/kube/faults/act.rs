//! Playing a schedule, and judging it.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use lb_user::{lab::Netns, view::KindView};

use super::{
    CONVERGENCE, Tally,
    field::Field,
    schedule::{Change, Fault, Schedule},
};
use crate::{
    agent::{Agent, until},
    interrupt,
    kube::{Cluster, account, cluster::wait_for_mark, control},
    lab::{
        complain,
        plan::{self, Family},
    },
    tool,
};

/// How long two views of a cluster that settles may differ.
const SETTLING: Duration = Duration::from_secs(10);

/// Plays a schedule; what is wrong goes into the tally.
///
/// # Errors
/// Where the cluster cannot be driven.
pub(super) fn play(field: &mut Field<'_>, schedule: &Schedule, tally: &mut Tally) -> Result<()> {
    let seed = schedule.seed;
    make(field, &schedule.first)?;
    let cluster = field.stage.cluster;
    cluster.settle()?;
    for (fault, changes) in &schedule.faults {
        *tally.faults.entry(fault.name()).or_default() += 1;
        let struck = strike(field, *fault, changes).with_context(|| format!("schedule {seed}: {fault:?}"))?;
        let Struck { ended, late } = struck;
        if let Some(late) = late {
            tally.late += 1;
            tally.wrong.push(format!("schedule {seed}: during {fault:?} {late}"));
        }
        let took = converge(cluster, ended).with_context(|| format!("schedule {seed}, after {fault:?}"))?;
        let worst = if fault.allowance().is_zero() {
            &mut tally.worst_convergence
        } else {
            &mut tally.worst_after_cut_off
        };
        *worst = took.max(*worst);
        if took > CONVERGENCE + fault.allowance() {
            tally.late += 1;
            tally.wrong.push(format!(
                "schedule {seed}: after {fault:?} the agents were up to date only {} ms later",
                took.as_millis()
            ));
        }
    }
    // Every node in turn, and each that had something of its own to live through.
    let mut nodes = vec![(seed % u64::from(plan::NODES)) as u8 + 1];
    for (fault, _) in &schedule.faults {
        if let Fault::CutOff(node, _)
        | Fault::BeginWithoutNames(node, _)
        | Fault::KillAgent(node)
        | Fault::RebootNode(node) = fault
            && !nodes.contains(node)
        {
            nodes.push(*node);
        }
    }
    for node in nodes {
        if let Some(difference) = differs(cluster, node)? {
            tally.divergences += 1;
            tally.lost_removals += difference.lines().filter(|line| line.starts_with('-')).count() as u64;
            tally.wrong.push(format!(
                "schedule {seed}: node {node} holds (-) what a cold start does not, or lacks (+) what it does:\n{difference}"
            ));
        }
    }
    let (bad, good) = field.losses()?;
    tally.good_dials += good;
    tally.lost_connections += bad.len() as u64;
    tally
        .wrong
        .extend(bad.into_iter().map(|line| format!("schedule {seed}: {line}")));
    Ok(())
}

/// How a node's kernel differs from a cold start's, once both have settled.
fn differs(cluster: &Cluster, node: u8) -> Result<Option<String>> {
    let end = Instant::now() + SETTLING;
    loop {
        // The controllers may still be at work: then the two see different worlds, for a while.
        cluster.settle()?;
        let cold = cluster.cold_contents(node)?;
        cluster.settle()?;
        let difference = cluster.contents(node)?.difference(&cold);
        if difference.is_none() || Instant::now() > end {
            return Ok(difference);
        }
    }
}

fn make(field: &mut Field<'_>, changes: &[Change]) -> Result<()> {
    changes.iter().try_for_each(|change| field.change(*change))
}

/// Waits until all agents have everything; gives the time since `ended`.
fn converge(cluster: &Cluster, ended: Instant) -> Result<Duration> {
    // The mark comes after all changes; its way into the API server is in the time.
    let revision = cluster.mark()?;
    for node in cluster.nodes() {
        wait_for_mark(node, revision)?;
    }
    Ok(ended.elapsed())
}

/// A fault that has been.
struct Struck {
    /// When it ended.
    ended: Instant,
    /// What agents did too late while it lasted.
    late: Option<String>,
}

/// Lets a fault come, changes things, and ends the fault.
fn strike(field: &mut Field<'_>, fault: Fault, changes: &[Change]) -> Result<Struck> {
    let cluster = field.stage.cluster;
    let mut late = None;
    match fault {
        Fault::KillServer { compact } => {
            cluster.plane().kill_server()?;
            see_age(cluster)?;
            if compact {
                // Nobody may come back before all has changed: what went must be seen by what is no longer listed.
                let cut = cut_off_all(cluster)?;
                cluster.plane().compact()?;
                cluster.plane().start_server()?;
                let changed = make(field, changes);
                drop(cut);
                changed?;
            } else {
                cluster.plane().start_server()?;
                make(field, changes)?;
            }
        }
        Fault::FreezeServer(milliseconds) => {
            cluster.plane().freeze_server(true)?;
            let lasted = lasts(milliseconds);
            cluster.plane().freeze_server(false)?;
            lasted?;
            make(field, changes)?;
        }
        Fault::CutOff(node, milliseconds) => {
            let netns = cluster.wires.node(node).clone();
            route(&netns, "add")?;
            let changed = make(field, changes).and_then(|()| lasts(milliseconds));
            route(&netns, "del")?;
            changed?;
        }
        Fault::Disconnect => {
            reset_connections(cluster)?;
            make(field, changes)?;
        }
        Fault::RotateCertificate => {
            cluster.plane().rotate_server_certificate()?;
            reset_connections(cluster)?;
            make(field, changes)?;
        }
        Fault::RotateToken => {
            account::write_token(cluster.api(), cluster.token())?;
            reset_connections(cluster)?;
            make(field, changes)?;
        }
        Fault::ExpireToken => {
            account::expire_tokens(cluster.api())?;
            // The API server remembers good tokens for ten seconds, and open watches go on.
            until("the token to be refused", || {
                reset_connections(cluster)?;
                all_say(cluster, |error| error.contains("401"))
            })?;
            make(field, changes)?;
            account::write_token(cluster.api(), cluster.token())?;
        }
        Fault::LoseNames => {
            lose_names(cluster)?;
            see_age(cluster)?;
            make(field, changes)?;
            cluster.names().be_silent(false);
        }
        Fault::BeginWithoutNames(node, milliseconds) => {
            let began = Instant::now();
            cluster.node(node).kill()?;
            lose_names(cluster)?;
            cluster.node(node).launch()?;
            // The others have looked the name up before, and go on with what it meant.
            make(field, changes)?;
            let (revision, marked) = (cluster.mark()?, Instant::now());
            for other in (1..=plan::NODES).filter(|other| *other != node) {
                wait_for_mark(cluster.node(other), revision)?;
            }
            let took = marked.elapsed();
            if took > CONVERGENCE {
                let took = took.as_millis();
                late = Some(format!(
                    "agents that know the address were up to date only {took} ms later"
                ));
            }
            see_nothing_listed(cluster, node)?;
            lasts(milliseconds.saturating_sub(began.elapsed().as_millis() as u64))?;
            see_nothing_listed(cluster, node)?;
            cluster.names().be_silent(false);
        }
        Fault::RevokeRights => {
            account::revoke(cluster.api())?;
            reset_connections(cluster)?;
            see_refusal(cluster, "403")?;
            make(field, changes)?;
            account::grant(cluster.api())?;
        }
        Fault::KillAgent(node) => {
            cluster.node(node).kill()?;
            make(field, changes)?;
            cluster.node(node).start()?;
        }
        Fault::RebootNode(node) => {
            cluster.node(node).wipe()?;
            cluster.kubelet(node).reboot();
            make(field, changes)?;
            cluster.node(node).start()?;
        }
    }
    Ok(Struck {
        ended: Instant::now(),
        late,
    })
}

/// How long a fault lasts: no wait for anything but a signal that ends the run.
fn lasts(milliseconds: u64) -> Result<()> {
    let end = Instant::now() + Duration::from_millis(milliseconds);
    while let Some(left) = end.checked_duration_since(Instant::now()) {
        interrupt::check()?;
        thread::sleep(left.min(Duration::from_millis(100)));
    }
    Ok(())
}

/// Waits until every agent says that its state grows old: what is wrong, and since when it knows nothing new.
fn see_age(cluster: &Cluster) -> Result<()> {
    see(cluster, "an agent to say that it cannot follow", |_| true)
}

fn see_refusal(cluster: &Cluster, code: &str) -> Result<()> {
    see(cluster, "an agent to say that it is refused", |error| {
        error.contains(code)
    })
}

fn see(cluster: &Cluster, what: &str, fits: impl Fn(&str) -> bool) -> Result<()> {
    until(what, || all_say(cluster, &fits))
}

/// Has nobody know the API server's name from now on, and returns when the agents have asked for it.
fn lose_names(cluster: &Cluster) -> Result<()> {
    cluster.names().be_silent(true);
    let asked = cluster.names().asked();
    reset_connections(cluster)?;
    until("the agents to ask for the name", || {
        ensure!(cluster.names().asked() >= asked + 3, "nobody asks");
        Ok(())
    })
}

/// Waits until a node's agent says that it could not look the API server's name up, and has listed nothing.
fn see_nothing_listed(cluster: &Cluster, node: u8) -> Result<()> {
    until("an agent to say that it cannot look the name up", || {
        let kinds = cluster.node(node).ask(Agent::status)?.source.kinds;
        let told = |kind: &KindView| {
            let looked_up = kind.error.as_deref().is_some_and(|error| error.contains("looked up"));
            looked_up && kind.synced.is_none()
        };
        ensure!(!kinds.is_empty() && kinds.iter().all(told), "{kinds:?}");
        Ok(())
    })
}

/// Whether each agent says of a kind that something is wrong with it, and until when it was known.
fn all_say(cluster: &Cluster, fits: impl Fn(&str) -> bool) -> Result<()> {
    for node in cluster.nodes() {
        let status = node.ask(Agent::status)?;
        let kinds = &status.source.kinds;
        let told = kinds.iter().find(|kind| kind.error.as_deref().is_some_and(&fits));
        let told = told.with_context(|| format!("{kinds:?}"))?;
        ensure!(told.synced.is_some(), "{told:?} was never confirmed");
    }
    Ok(())
}

/// Has the way from a node to the API server lead nowhere, or no longer.
fn route(netns: &Netns, verb: &str) -> Result<()> {
    let control = format!("{}/32", plan::control(Family::V4));
    tool::run(netns, "ip", &["route", verb, "blackhole", &control]).map(drop)
}

/// All nodes cut off, until the value is dropped.
struct CutOff(Vec<Netns>);

impl Drop for CutOff {
    fn drop(&mut self) {
        for netns in &self.0 {
            if let Err(error) = route(netns, "del") {
                complain("a node of the lab stays cut off", &format!("{error:#}"));
            }
        }
    }
}

fn cut_off_all(cluster: &Cluster) -> Result<CutOff> {
    let mut cut = CutOff(Vec::new());
    for node in cluster.nodes() {
        route(&node.netns, "add")?;
        cut.0.push(node.netns.clone());
    }
    Ok(cut)
}

/// Resets every connection of the nodes' agents to the API server, in the nodes' own namespaces.
fn reset_connections(cluster: &Cluster) -> Result<()> {
    let control = plan::control(Family::V4).to_string();
    let port = format!(":{}", control::PORT);
    for node in cluster.nodes() {
        tool::run(&node.netns, "ss", &["--kill", "dst", &control, "dport", "=", &port])?;
    }
    Ok(())
}
