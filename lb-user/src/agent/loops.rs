//! The agent's own loops. Each runs under `supervise`: whatever happens, it begins anew.

use std::{collections::HashMap, sync::Arc, time::Duration};

use aya_log::EbpfLogger;
use lb_common::socket::phase;
use tokio::{
    io::unix::AsyncFd,
    sync::{Mutex as AsyncMutex, mpsc},
    time::{MissedTickBehavior, interval, sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use super::{
    addresses,
    diagnosis::Case,
    health_ports, heap, interfaces,
    probe::Probe,
    rivals,
    state::{Shared, lock},
};
use crate::{
    analysis::{ports::Destination, stickiness::Client},
    compile::Compiled,
    datapath::census::Census,
    model::{ObjectName, Update},
    node::proxy,
    observe::{
        SetKey,
        audience::audiences,
        monotonic_ns,
        ring::Ring,
        sets::{AlarmChange, Sample, Traffic},
        wall,
    },
    source::Running,
    supervise::{Liveness, supervise},
    view::{EventView, Mode},
};

/// How long updates are gathered before they are written: a burst is one plan.
const GATHER: Duration = Duration::from_millis(2);
/// The most updates of one gathering.
const MOST_UPDATES: usize = 4_096;
/// From how many Services on a flush leaves memory behind that is worth giving back.
const LARGE_FLUSH: usize = 1_000;
/// How long a round waits for input, and how soon what failed is tried again.
const ROUND: Duration = Duration::from_secs(1);
/// How often links are checked.
const LINK_CHECK: Duration = Duration::from_secs(2);
/// In how many link checks the contents are checked once.
const CHECKS_PER_CONTENTS: u64 = 30;
/// How often counters are read into the windows.
const READING: Duration = Duration::from_secs(1);
/// How often the self-probe runs while all is well, and while it is not.
const PROBE: Duration = Duration::from_secs(10);
const PROBE_AGAIN: Duration = Duration::from_millis(50);
/// The most records that are taken under one lock.
const MOST_RECORDS: usize = 4_096;

/// In how many readings the open sockets are looked at once.
const READINGS_PER_PORTS: u64 = 10;
/// The most sockets that are looked at for the use of ports.
const MOST_SOCKETS: usize = 65_536;

type Log = EbpfLogger<&'static dyn log::Log>;

/// Starts all loops.
pub(super) fn start(
    shared: &Arc<Shared>,
    running: Running,
    ring: Ring,
    logger: Option<Log>,
    probe: Arc<Probe>,
    cancel: &CancellationToken,
) {
    let (updates, own) = mpsc::channel(16);
    let fixed = shared.config.node_addresses.clone();
    let mut all = vec![
        supervise("addresses", cancel.clone(), move |liveness| {
            let (fixed, updates) = (fixed.clone(), updates.clone());
            async move { addresses::follow(fixed, updates, &liveness).await }
        }),
        {
            let shared = shared.clone();
            let input = Arc::new(AsyncMutex::new((running.updates, own)));
            supervise("reconcile", cancel.clone(), move |liveness| {
                let (shared, input) = (shared.clone(), input.clone());
                async move { reconcile(&shared, &input, &liveness).await }
            })
        },
        {
            let shared = shared.clone();
            supervise("repair", cancel.clone(), move |liveness| {
                let shared = shared.clone();
                async move { repair(&shared, &liveness).await }
            })
        },
        {
            let shared = shared.clone();
            supervise("interfaces", cancel.clone(), move |liveness| {
                let shared = shared.clone();
                async move { interfaces::follow(&shared, &liveness).await }
            })
        },
        {
            let shared = shared.clone();
            let ring = Arc::new(AsyncMutex::new(ring));
            supervise("records", cancel.clone(), move |liveness| {
                let (shared, ring) = (shared.clone(), ring.clone());
                async move { records(&shared, &ring, &liveness).await }
            })
        },
        {
            let shared = shared.clone();
            supervise("readings", cancel.clone(), move |liveness| {
                let shared = shared.clone();
                async move { readings(&shared, &liveness).await }
            })
        },
        {
            let shared = shared.clone();
            supervise("self-probe", cancel.clone(), move |liveness| {
                let (shared, probe) = (shared.clone(), probe.clone());
                async move { probe_again(&shared, &probe, &liveness).await }
            })
        },
    ];
    if shared.config.mode == Mode::Balance {
        // Beside another proxy the ports are that one's.
        let ports = shared.clone();
        all.push(supervise("health ports", cancel.clone(), move |liveness| {
            let shared = ports.clone();
            async move { health_ports::follow(&shared, &liveness).await }
        }));
        let shared = shared.clone();
        all.push(supervise("rivals", cancel.clone(), move |liveness| {
            let shared = shared.clone();
            async move { rivals::follow(&shared, &liveness).await }
        }));
    }
    if let Some(logger) = logger {
        let logger = Arc::new(AsyncMutex::new(Some(logger)));
        all.push(supervise("program log", cancel.clone(), move |liveness| {
            let logger = logger.clone();
            async move { program_log(&logger, &liveness).await }
        }));
    }
    let mut loops = lock(&shared.loops);
    loops.extend(all.into_iter().map(|(_, liveness)| liveness));
}

type Input = AsyncMutex<(mpsc::Receiver<Update>, mpsc::Receiver<Update>)>;

/// Updates in, plans out.
async fn reconcile(shared: &Arc<Shared>, input: &Input, liveness: &Liveness) -> Result<(), String> {
    let mut input = input.lock().await;
    let (source, own) = &mut *input;
    let mut batch = Vec::new();
    loop {
        liveness.beat();
        let first = timeout(ROUND, async {
            tokio::select! {
                update = source.recv() => update,
                update = own.recv() => update,
            }
        })
        .await;
        match first {
            Ok(Some(update)) => {
                batch.push(update);
                sleep(GATHER).await;
                while batch.len() < MOST_UPDATES
                    && let Ok(update) = source.try_recv().or_else(|_| own.try_recv())
                {
                    batch.push(update);
                }
            }
            Ok(None) => return Err("the source has ended".to_owned()),
            Err(_) => {}
        }
        let updates = std::mem::take(&mut batch);
        let shared = shared.clone();
        run_blocking(move || {
            {
                let mut reconciler = lock(&shared.reconciler);
                for update in updates {
                    shared.directory.take(&update);
                    reconciler.take(update);
                }
            }
            let flushed = shared.flush();
            let removed = {
                let mut reconciler = lock(&shared.reconciler);
                reconciler.reclaim();
                reconciler.take_removed()
            };
            lock(&shared.observation).forget_services(&removed.into_iter().collect());
            if flushed.services >= LARGE_FLUSH {
                heap::give_back();
            }
        })
        .await?;
    }
}

/// What takes long, or may block, runs beside the runtime's own threads.
async fn run_blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, String> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|error| error.to_string())
}

/// Links every two seconds, contents every minute.
async fn repair(shared: &Arc<Shared>, liveness: &Liveness) -> Result<(), String> {
    let mut ticks = interval(LINK_CHECK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut round: u64 = 0;
    loop {
        ticks.tick().await;
        liveness.beat();
        round += 1;
        let shared = shared.clone();
        run_blocking(move || -> Result<(), String> {
            let repaired = shared.repair_links().map_err(|error| error.to_string())?;
            let mut reconciler = lock(&shared.reconciler);
            if !repaired.is_empty() {
                tracing::warn!(links = ?repaired, "links were gone or held other programs; attached again");
                reconciler.count_repairs(repaired.len() as u64);
            }
            // A lost link says that somebody was at work here: the contents are looked at as well.
            if round.is_multiple_of(CHECKS_PER_CONTENTS) || !repaired.is_empty() {
                reconciler.check().map_err(|error| error.to_string())?;
                let swept = reconciler
                    .kernel_mut()
                    .sweep_reverse()
                    .map_err(|error| error.to_string())?;
                if swept > 0 {
                    tracing::debug!(swept, "removed reverse entries of sockets that are gone");
                }
                let applied: std::collections::HashSet<u32> = reconciler
                    .applied()
                    .values()
                    .map(|service| service.service_id)
                    .collect();
                lock(&shared.observation).keep_services(|id| applied.contains(&id));
            }
            Ok(())
        })
        .await??;
    }
}

/// The ring buffer's records, into the observation.
async fn records(shared: &Arc<Shared>, ring: &AsyncMutex<Ring>, liveness: &Liveness) -> Result<(), String> {
    let mut ring = ring.lock().await;
    loop {
        ring.wait().await.map_err(|error| error.to_string())?;
        liveness.beat();
        // What ended before this moment is in the buffer by now.
        let now = monotonic_ns();
        while !take_records(shared, &mut ring, now) {
            tokio::task::yield_now().await;
        }
    }
}

/// Takes one portion; true if the buffer is empty then.
fn take_records(shared: &Shared, ring: &mut Ring, now_ns: u64) -> bool {
    let mut observation = lock(&shared.observation);
    let taken = ring.drain(MOST_RECORDS, |bytes| observation.take(bytes, &shared.usable));
    let empty = taken < MOST_RECORDS;
    if empty {
        observation.advance(now_ns, &shared.usable);
    }
    empty
}

/// Counters of the Services with traffic, into their windows.
async fn readings(shared: &Arc<Shared>, liveness: &Liveness) -> Result<(), String> {
    let mut ticks = interval(READING);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut round: u64 = 0;
    loop {
        ticks.tick().await;
        liveness.beat();
        round += 1;
        let shared = shared.clone();
        run_blocking(move || {
            if round.is_multiple_of(READINGS_PER_PORTS) {
                let open = open_ports(&shared.census);
                lock(&shared.observation).set_open_ports(&open);
            }
            read_counters(&shared)
        })
        .await??;
    }
}

fn read_counters(shared: &Shared) -> Result<(), String> {
    let begun = read_sets(shared)?;
    if begun.relay {
        // Whether a process relays the connections is looked up; the next reading goes by it.
        shared.fresh_facts();
    }
    if begun.alarms {
        explain_alarms(shared);
    }
    tell_alarms(shared, &begun.changes);
    Ok(())
}

/// What a reading found.
#[derive(Default)]
struct Read {
    changes: Vec<(ObjectName, AlarmChange, SetKey)>,
    /// Whether any alarm holds.
    alarms: bool,
    /// Whether the connections of some Service look as if a process relayed them.
    relay: bool,
}

/// Who chooses endpoints on this node, by what is known now.
fn traffic(shared: &Shared) -> Traffic {
    if shared.config.mode == Mode::Balance {
        return Traffic::Balanced;
    }
    let facts = lock(&shared.facts);
    match facts.as_ref().map(|facts| facts.proxy.kind) {
        Some(proxy::Kind::Userspace) => Traffic::Relayed,
        _ => Traffic::Translated,
    }
}

fn read_sets(shared: &Shared) -> Result<Read, String> {
    let traffic = traffic(shared);
    let flows = shared.silent();
    let reconciler = lock(&shared.reconciler);
    let kernel = reconciler.kernel();
    let all = Shared::all_service_counters(&reconciler, &flows.silent).map_err(|error| error.to_string())?;
    let counters_of = |service: &Compiled| all.get(service.service_id as usize).copied().unwrap_or_default();
    let with_traffic = || {
        reconciler.applied().iter().filter(|(name, service)| {
            let counters = counters_of(service);
            counters.connects + counters.direct > 0 && !reconciler.is_own(name)
        })
    };
    let ids = with_traffic().flat_map(|(_, service)| service.backends.iter().map(|(id, _)| *id));
    let mut counters = kernel.backend_counters_of(ids).map_err(|error| error.to_string())?;
    for (id, counters) in &mut counters {
        flows.silent.settle_backend(*id, counters);
    }
    let mut observation = lock(&shared.observation);
    let now = monotonic_ns();
    let mut read = Read::default();
    for (name, service) in with_traffic() {
        let of_service = counters_of(service);
        read.relay |= traffic == Traffic::Translated
            && of_service.direct * 2 >= of_service.connects
            && of_service.attributed * 10 < of_service.connects;
        for (set, audience) in service.sets.iter().zip(audiences(service, shared.has_guests())) {
            let samples: Vec<Sample> = set
                .members
                .iter()
                .map(|(id, weight)| Sample {
                    backend: *id,
                    weight: u32::from(*weight),
                    counters: counters.get(id).copied().unwrap_or_default(),
                })
                .collect();
            let key = (service.service_id, set.set_id);
            let changes = observation.read_set(key, now, traffic, audience, &of_service, &samples);
            read.changes
                .extend(changes.into_iter().map(|change| (name.clone(), change, key)));
            read.alarms |= observation
                .watch(key)
                .is_some_and(|watch| watch.alarms().next().is_some());
        }
    }
    let there = with_traffic().flat_map(|(_, service)| service.sets.iter().map(|set| (service.service_id, set.set_id)));
    for (key, change) in observation.keep_sets(&there.collect()) {
        if let Some(name) = shared.directory.service(key.0) {
            read.changes.push((name, change, key));
        }
    }
    Ok(read)
}

/// Connections open now, by Service, client and destination.
///
/// Two system calls a socket: it is done without any lock, and not at every reading.
fn open_ports(census: &Census) -> HashMap<(u32, Client, Destination), u64> {
    let mut open = HashMap::new();
    for state in census.sockets().take(MOST_SOCKETS) {
        if state.client_port.0 == 0 || state.phase == phase::RECORDED {
            continue;
        }
        let client = Client {
            netns: 0,
            address: state.client.octets(),
        };
        let destination = Destination {
            address: state.vip.octets(),
            port: state.vip_port.get(),
            protocol: state.proto,
        };
        *open.entry((state.service_id, client, destination)).or_default() += 1;
    }
    open
}

/// Names the causes of the alarms that hold, by what the node says now.
fn explain_alarms(shared: &Shared) {
    let facts = shared.fresh_facts();
    let reconciler = lock(&shared.reconciler);
    let mut observation = lock(&shared.observation);
    let mut verdicts = Vec::new();
    for (name, service) in reconciler.applied() {
        for set in &service.sets {
            let key = (service.service_id, set.set_id);
            let watch = observation.watch(key).filter(|watch| watch.alarms().next().is_some());
            let Some(watch) = watch else { continue };
            let case = Case {
                name,
                service,
                set,
                watch,
            };
            for alarm in watch.alarms() {
                let verdict = shared.verdict(&case, &reconciler, &observation, &facts, alarm);
                verdicts.push((key, alarm.backend, verdict));
            }
        }
    }
    for (key, backend, verdict) in verdicts {
        if let Some(watch) = observation.watch_mut(key) {
            watch.explain(backend, verdict);
        }
    }
}

/// Logs alarms that begin or end, and hands them to those who follow events.
fn tell_alarms(shared: &Shared, changes: &[(ObjectName, AlarmChange, SetKey)]) {
    let mut observation = lock(&shared.observation);
    for (name, change, key) in changes {
        let known = observation
            .watch(*key)
            .and_then(|watch| watch.alarms().find(|a| a.backend == change.alarm.backend));
        let alarm = known.filter(|_| change.raised).unwrap_or(&change.alarm).clone();
        let Some(endpoint) = alarm.endpoint else { continue };
        let cause = alarm.verdict.cause.name();
        if change.raised {
            tracing::warn!(
                service = %name, %endpoint, cause, view = alarm.kind.name(), expected = alarm.expected, seen = alarm.seen,
                probability = alarm.probability, window_seconds = alarm.window_seconds, "an endpoint is starved"
            );
        } else {
            tracing::info!(service = %name, %endpoint, cause, "the alarm is over: it has recovered or left, or cannot be told any more");
        }
        let event = EventView::Alarm {
            time: wall(monotonic_ns()),
            namespace: name.namespace.to_string(),
            service: name.name.to_string(),
            addr: endpoint.ip(),
            port: endpoint.port(),
            raised: change.raised,
            cause: cause.to_owned(),
            expected: alarm.expected,
            seen: alarm.seen,
            probability: alarm.probability,
            window_seconds: alarm.window_seconds,
        };
        observation.followers.tell(name, &event);
    }
}

/// Readiness: the first synchronisation is written, and the agent's own connection passes through the datapath.
async fn probe_again(shared: &Arc<Shared>, probe: &Arc<Probe>, liveness: &Liveness) -> Result<(), String> {
    loop {
        liveness.beat();
        let (state, prober) = (shared.clone(), probe.clone());
        let found = run_blocking(move || probe_once(&state, &prober)).await?;
        let wait = if found.is_ok() { PROBE } else { PROBE_AGAIN };
        {
            let mut readiness = lock(&shared.readiness);
            if readiness.ready.is_ok() != found.is_ok() {
                match &found {
                    Ok(()) => tracing::info!("ready"),
                    Err(error) => tracing::warn!(%error, "not ready"),
                }
            }
            readiness.ready = found;
        }
        sleep(wait).await;
    }
}

fn probe_once(shared: &Shared, probe: &Probe) -> Result<(), String> {
    let counted = |shared: &Shared| -> Result<Option<u64>, String> {
        let reconciler = lock(&shared.reconciler);
        if !reconciler.is_synced() {
            return Err("the first synchronisation is not done".to_owned());
        }
        let Some(service) = reconciler.applied().get(&Probe::name()) else {
            return Err("the self-probe's Service is not applied".to_owned());
        };
        let counters = reconciler.kernel().service_counter(service.service_id);
        Ok(counters.ok().map(|c| c.connects))
    };
    let before = counted(shared)?;
    if lock(&shared.readiness).unprobed.is_some() {
        return Ok(());
    }
    probe.connect()?;
    let after = counted(shared)?;
    if before == after {
        return Err("the self-probe's connection was not counted: the programs do not see it".to_owned());
    }
    Ok(())
}

/// What the programs log, for development (`--log-level trace`).
async fn program_log(logger: &AsyncMutex<Option<Log>>, liveness: &Liveness) -> Result<(), String> {
    let mut held = logger.lock().await;
    let Some(inner) = held.take() else {
        return Err("the log was lost with an earlier run of this loop".to_owned());
    };
    // SAFETY: the logger keeps one descriptor open for as long as it lives, and is dropped together with this.
    let registered = unsafe { AsyncFd::register_with_interest(inner, tokio::io::Interest::READABLE) };
    let mut log = registered.map_err(|error| error.to_string())?;
    loop {
        liveness.beat();
        if let Ok(ready) = timeout(ROUND, log.readable_mut()).await {
            let mut ready = ready.map_err(|error| error.to_string())?;
            ready.get_inner_mut().flush();
            ready.clear_ready();
        }
    }
}
