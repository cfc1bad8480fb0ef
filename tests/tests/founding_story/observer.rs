//! The observer beside IPVS: it tells which backend each connection met, who starves, and why.
//!
//! Lines that begin with `STORY-JSON`, `STORY-TEXT` and `STORY-REPORT` are what `cargo xtask story` takes from the guest's console.

use std::{
    env,
    io::{self, Write},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use lb_user::{
    lab::{
        self, ChildCgroup,
        client::{Client, Load},
        mounts::BpfFs,
    },
    view::{DiagnosisView, Document},
};
use serde_json::json;

use super::{
    PHASE, STARVED,
    agent::{Agent, Mode},
    ipvs::Ipvs,
    load, per_backend, reach,
    stage::{self, Stage},
    table::{self, Row},
};

/// How long after the third backend's birth the verdict may come, and for how long none may come where all is well.
const WATCHED: Duration = Duration::from_secs(30);

/// One run: IPVS in one of its modes, and what the observer says of it.
struct Run {
    mode: u8,
    after: Row,
    verdict: DiagnosisView,
    /// Alarms that were seen at any moment of the watch.
    alarms: usize,
}

impl Run {
    fn to_json(&self) -> serde_json::Value {
        let starved = self.verdict.starved.first();
        json!({
            "mode": self.mode,
            "new_endpoint_share": self.after.share_of_third(),
            "verdict": {
                "starved": starved.is_some(),
                "cause": starved.map(|found| found.cause.clone()),
                "seconds_to_verdict": starved.and_then(|found| found.seconds_to_verdict),
            },
            "connections_after_birth": self.after.connections(),
            "attributed": self.verdict.attribution.attributed,
            "unknown": self.verdict.attribution.unknown,
        })
    }
}

pub(crate) fn names_the_starved_endpoint_and_the_cause(bpf: &BpfFs) -> Result<()> {
    let kept = watch(bpf, 0)?;
    let fresh = watch(bpf, 1)?;
    table::print(&[kept.after.clone(), fresh.after.clone()])?;
    for run in [&kept, &fresh] {
        writeln!(io::stdout(), "STORY-JSON {}", run.to_json())?;
    }

    ensure!(
        kept.after.of_third() <= STARVED,
        "IPVS did not starve the third backend: {:?}",
        kept.after
    );
    let [starved] = kept.verdict.starved.as_slice() else {
        anyhow::bail!("one endpoint starves: {:#?}", kept.verdict);
    };
    ensure!(
        (starved.addr, starved.port) == (stage::backend(3).ip(), stage::backend(3).port()),
        "another endpoint was named: {starved:?}"
    );
    ensure!(starved.cause == "port_reuse", "another cause was named: {starved:#?}");
    let seconds = starved.seconds_to_verdict.context("the birth was seen")?;
    ensure!(seconds <= WATCHED.as_secs_f64(), "the verdict came late: {seconds} s");
    ensure!(
        fresh.verdict.starved.is_empty() && fresh.alarms == 0,
        "an alarm where all is well: {:#?}",
        fresh.verdict
    );
    // Where IPVS chooses anew for a kept entry, the backends of some connections are not seen (up to 1.6 % in the runs so far; why is
    // not known). They are told to be unknown, and are far fewer than would keep anybody from being judged.
    for (run, of) in [(&kept, 100), (&fresh, 20)] {
        let told = run.verdict.attribution;
        ensure!(
            told.unknown * of <= told.connects && told.attributed > PHASE,
            "too few connections were told by endpoint: {told:?}"
        );
        ensure!(run.after.failed == 0, "failed connections: {:?}", run.after);
    }
    Ok(())
}

fn watch(bpf: &BpfFs, mode: u8) -> Result<Run> {
    let stage = Stage::new()?;
    let group = ChildCgroup::new("story")?;
    group.join()?;
    let ipvs = Ipvs::new(&stage.node, stage::WEB, mode)?;
    for backend in stage::backends(2) {
        ipvs.add(backend)?;
    }
    let agent = Agent::start(Mode::Observe, &stage.node, &group, bpf, &stage::backends(2))?;
    let client = Client::start(&stage.node, &load())?;
    agent.wait_judged(PHASE)?;

    ipvs.add(stage::backend(3))?;
    let born = Instant::now();
    agent.set_endpoints(&stage::backends(3))?;
    agent.wait_active(&stage::backends(3))?;
    let mut alarms = 0;
    let mut verdict = agent.diagnosis()?;
    // Where an alarm is due the watch ends with it, where none may come it lasts.
    lab::holds_within(WATCHED, || {
        if let Ok(now) = agent.diagnosis() {
            alarms = alarms.max(now.starved.len());
            verdict = now;
        }
        mode == 0 && alarms > 0
    });
    let attempts_at = client.made();
    reach(&client, attempts_at + PHASE / 10)?;
    let attempts = client.stop();
    let verdict = if mode == 0 { agent.diagnosis()? } else { verdict };
    let [_, after] = table::rows(&format!("IPVS {mode}, Evenkeel observes"), &attempts, born);

    if env::var_os("EVENKEEL_STORY").is_some() {
        let mut out = io::stdout().lock();
        for line in agent.says(&["diagnose", "default/web"])?.lines() {
            writeln!(out, "STORY-TEXT {mode} {line}")?;
        }
        let report = serde_json::to_string(&Document::from(agent.report()?))?;
        writeln!(out, "STORY-REPORT {mode} {report}")?;
    }
    Ok(Run {
        mode,
        after,
        verdict,
        alarms,
    })
}

pub(crate) fn names_a_weight_of_zero(bpf: &BpfFs) -> Result<()> {
    let stage = Stage::new()?;
    let group = ChildCgroup::new("story")?;
    group.join()?;
    // Reuse pins nobody here: the weight is the only reason.
    let ipvs = Ipvs::new(&stage.node, stage::WEB, 1)?;
    for backend in stage::backends(2) {
        ipvs.add(backend)?;
    }
    let agent = Agent::start(Mode::Observe, &stage.node, &group, bpf, &stage::backends(2))?;
    let client = Client::start(&stage.node, &load())?;
    agent.wait_judged(PHASE / 4)?;

    ipvs.add_weighted(stage::backend(3), 0)?;
    agent.set_endpoints(&stage::backends(3))?;
    agent.wait_active(&stage::backends(3))?;
    let mut verdict = agent.diagnosis()?;
    let told = lab::holds_within(WATCHED, || {
        if let Ok(now) = agent.diagnosis() {
            verdict = now;
        }
        !verdict.starved.is_empty()
    });
    ensure!(told, "nobody starves after {} s: {verdict:#?}", WATCHED.as_secs());
    let [starved] = verdict.starved.as_slice() else {
        anyhow::bail!("one endpoint starves: {verdict:#?}");
    };
    ensure!(
        starved.addr == stage::backend(3).ip() && starved.cause == "zero_weight" && starved.seen == 0,
        "another verdict: {verdict:#?}"
    );
    let weights: Vec<_> = verdict.endpoints.iter().map(|endpoint| endpoint.proxy_weight).collect();
    ensure!(weights == [Some(1), Some(1), Some(0)], "IPVS's weights: {weights:?}");
    ensure!(client.failed() == 0, "{} connections failed", client.failed());
    Ok(())
}

pub(crate) fn leaves_ipvs_as_it_was(bpf: &BpfFs) -> Result<()> {
    let stage = Stage::new()?;
    let group = ChildCgroup::new("story")?;
    group.join()?;
    let ipvs = Ipvs::new(&stage.node, stage::WEB, 0)?;
    for backend in stage::backends(3) {
        ipvs.add(backend)?;
    }
    let before = ipvs.snapshot()?;
    let client = Client::start(&stage.node, &load())?;
    let agent = Agent::start(Mode::Observe, &stage.node, &group, bpf, &stage::backends(3))?;
    agent.wait_judged(PHASE / 4)?;
    // The question makes it read IPVS's tables and settings.
    let attributed = agent.diagnosis()?.attribution.attributed;
    ensure!(attributed > 0, "it does not observe");
    let during = ipvs.snapshot()?;
    ensure!(during == before, "changed while it observes: {before}\nbecame {during}");
    drop(agent);
    let after = ipvs.snapshot()?;
    ensure!(after == before, "changed for good: {before}\nbecame {after}");
    ensure!(client.failed() == 0, "{} connections failed", client.failed());
    // The negative control: a change is seen.
    ipvs.set_weight(stage::backend(1), 7)?;
    ensure!(ipvs.snapshot()? != before, "the snapshot does not see a weight");
    Ok(())
}

pub(crate) fn rewrites_nothing(bpf: &BpfFs) -> Result<()> {
    let stage = Stage::new()?;
    let group = ChildCgroup::new("story")?;
    group.join()?;
    let agent = Agent::start(Mode::Observe, &stage.node, &group, bpf, &stage::backends(3))?;
    let rewriting = agent.rewriting_programs()?;
    ensure!(rewriting.is_empty(), "attached in observe mode: {rewriting:?}");
    // Without IPVS nobody answers at the Service's address, unless somebody rewrites it.
    let load = Load {
        total: Some(3),
        timeout: Duration::from_millis(500),
        ..Load::tcp(stage::WEB)
    };
    let answered = per_backend(&Client::start(&stage.node, &load)?.wait());
    ensure!(answered.is_empty(), "rewritten in observe mode: {answered:?}");
    Ok(())
}
