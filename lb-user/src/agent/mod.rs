//! The daemon: joins the rooms and runs until it is told to stop.
//!
//! Loops, each supervised: the source's own, addresses (→ updates), reconcile (updates → kernel), links and contents
//! (repair), health ports (what load balancers outside ask), records (ring buffer → observation), readings (counters → windows),
//! probe (readiness). They share
//! [`state::Shared`]; none waits for another but through the channel of updates. The kernel works without any of them.

mod addresses;
mod answers;
mod conns;
mod diagnosis;
mod dump;
mod explain;
mod facts;
mod graph;
mod health_ports;
mod heap;
mod interfaces;
mod loops;
mod numbers;
mod probe;
mod process;
mod report;
mod rivals;
mod state;
mod uplinks;

use std::{
    collections::HashMap,
    fs,
    sync::{Arc, Mutex},
    time::{Instant, SystemTime},
};

use anyhow::{Context, Result, bail};
use lb_common::maps::feature;
use tokio::{
    runtime::Builder,
    signal::unix::{SignalKind, signal},
    sync::Notify,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing_subscriber::{layer::SubscriberExt, util::SubscriberInitExt};

use self::state::{Programs, Readiness, Shared, Timings, lock};
use crate::{
    config::{self, Config, LogFormat, LogLevel, SourceSpec},
    control::{self, ControlSocket},
    datapath::{
        attach::Attachments,
        census::Census,
        kernel::Kernel,
        load::{self, Options, Sizes},
        pins::Pins,
    },
    desired::{self, Desired},
    doctor::owners,
    http,
    metrics::{DEFAULT_SERVICE_CAP, Exporter},
    model::{Kind, Problem},
    observe::{Directory, Observation, ring::Ring},
    reconcile::Reconciler,
    source::{self, Running},
    view::Mode,
};

/// Runs the agent until SIGTERM or SIGINT. In balance mode its programs stay in place, in observe mode they are detached.
///
/// # Errors
/// When the datapath cannot be set up: one sentence says what is missing.
pub fn run(config: Config) -> Result<()> {
    heap::share_arena();
    start_log(&config);
    let runtime = Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("start the runtime")?;
    runtime.block_on(serve(config))
}

fn start_log(config: &Config) {
    let filter = tracing_subscriber::filter::Targets::new()
        .with_default(config.log_level.filter())
        // What the libraries say below a warning is of no use to an operator.
        .with_target("hyper", tracing::Level::WARN)
        .with_target("rustls", tracing::Level::WARN)
        .with_target("tower", tracing::Level::WARN)
        .with_target("kube_client", tracing::Level::WARN);
    let base = tracing_subscriber::registry().with(filter);
    // A second start in one process (tests) keeps the first log.
    let _ = match config.log_format {
        LogFormat::Text => base
            .with(
                tracing_subscriber::fmt::layer()
                    .with_writer(std::io::stderr)
                    .with_ansi(false),
            )
            .try_init(),
        LogFormat::Json => base
            .with(tracing_subscriber::fmt::layer().json().with_writer(std::io::stderr))
            .try_init(),
    };
}

fn refuse_other_owners(config: &Config) -> Result<Vec<Problem>> {
    if config.mode == Mode::Observe {
        return Ok(Vec::new());
    }
    let (owners, running) = (owners::find(&config.bpffs), owners::Running::find());
    match owners::refusal(&owners, &running, config.beside_kube_proxy) {
        Some(refusal) => bail!(refusal),
        None => Ok(rivals::problems(&owners, &running)),
    }
}

fn sizes(config: &Config) -> Sizes {
    let defaults = Sizes::default();
    let limits = &config.limits;
    let scale = |default: u32, wanted: u32, base: u32| {
        (u64::from(default) * u64::from(wanted) / u64::from(base)).clamp(1024, 1 << 24) as u32
    };
    Sizes {
        frontends: limits.frontends.get(),
        sets: limits.frontends.get().max(1024),
        backends: limits.backends.get().max(2),
        lists: scale(defaults.lists, limits.backends.get(), defaults.backends),
        tables: scale(defaults.tables, limits.backends.get(), defaults.backends).max(1 << 17),
        services: limits
            .frontends
            .get()
            .clamp(1024, defaults.services.max(limits.frontends.get() / 2)),
        sockets: limits.sockets.get(),
        flows: limits.flows.get(),
    }
}

fn desired_config(config: &Config) -> desired::Config {
    let mut awaited = vec![Kind::Service, Kind::Slice, Kind::Addresses];
    if config.source == SourceSpec::Kube {
        awaited.push(Kind::Node);
    }
    desired::Config {
        node_name: config.node_name.clone(),
        proxy_name: config.proxy_name.clone(),
        external_ips: config.external_ips,
        node_port_addresses: config.nodeport_addresses.clone(),
        awaited,
    }
}

/// Loads into the pins, whose lock the caller holds, and attaches.
fn set_up(config: &Config, pins: &Pins) -> Result<(Reconciler, Programs, aya::maps::RingBuf<aya::maps::MapData>)> {
    let mode = match config.mode {
        Mode::Balance => load::Mode::Balance,
        Mode::Observe => load::Mode::Observe,
    };
    let mut features = feature::STATE;
    if !config.opt_out_cgroups.is_empty() {
        features |= feature::OPT_OUT;
    }
    let options = Options {
        mode,
        sizes: sizes(config),
        features,
        log_level: match config.log_level {
            LogLevel::Trace => aya_log::Level::Trace as u8,
            _ => 0,
        },
        follow_connections: true,
        packets: config.interfaces.any(),
        translate: config.translates(),
    };
    let mut object = load::load_but_translators(&options, Some(pins))?;
    let (mut kernel, events) = Kernel::take(&mut object, mode == load::Mode::Observe || config.interfaces.any())?;
    let mut opted_out = Vec::new();
    for path in &config.opt_out_cgroups {
        let id = std::os::unix::fs::MetadataExt::ino(
            &fs::metadata(path).with_context(|| format!("--opt-out-cgroup {}", path.display()))?,
        );
        kernel.opt_out(id)?;
        opted_out.push(id);
    }
    kernel.opt_in_all_but(&opted_out)?;
    kernel
        .flows_mut()
        .set_ports(config.snat_ports.first, config.snat_ports.last)?;
    let reconciler = Reconciler::new(Desired::new(desired_config(config)), kernel)?;

    let mut programs = Programs {
        object,
        attachments: Attachments::new(&config.cgroup, Some(pins.clone()))?,
        predecessors: pins
            .other_abis()
            .context("list the pins of other versions")?
            .into_iter()
            .map(|abi| pins.with_abi(abi))
            .collect(),
    };
    // The programs of another version go on until our maps are filled: see `Programs::take_over`.
    if programs.predecessors.is_empty() {
        programs.attach(mode, &config.interfaces)?;
    }
    Ok((reconciler, programs, events))
}

fn start_source(config: &Config, requests: &Arc<source::kube::Requests>, cancel: &CancellationToken) -> Running {
    match &config.source {
        SourceSpec::Dir(path) => source::dir::start(path.clone(), cancel),
        SourceSpec::Kube => source::kube::start(
            source::kube::Options {
                node_name: config.node_name.clone(),
                url: config.kube_url.clone(),
                kubeconfig: config.kubeconfig.clone(),
                timing: source::kube::Timing::default(),
                requests: requests.clone(),
                defects: source::kube::Defects::default(),
            },
            cancel,
        ),
    }
}

async fn serve(config: Config) -> Result<()> {
    let rivals = refuse_other_owners(&config)?;
    // The lock is taken before anything is touched, and held until the process ends.
    let pins = Pins::new(&config.bpffs, &config.pin_name);
    if !load::is_bpffs(&config.bpffs) {
        bail!(
            "{} is not a BPF file system; mount one (mount -t bpf bpf {}) or name another with --bpffs",
            config.bpffs.display(),
            config.bpffs.display()
        );
    }
    let _lock = match pins.lock() {
        Ok(lock) => lock,
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
            bail!(
                "another agent holds {}; stop it first, or give this one another --pin-name",
                pins.root().display()
            )
        }
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => bail!(
            "{} cannot be opened ({error}); run the agent as root, or with CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON and a BPF \
             file system that its user may write to",
            pins.root().display()
        ),
        Err(error) => return Err(error).with_context(|| format!("lock {}", pins.root().display())),
    };
    let socket = ControlSocket::open(&config.socket)?;
    let listener = match config.metrics_address {
        Some(address) => Some(http::listen(address).await?),
        None => None,
    };
    let cancel = CancellationToken::new();
    // Ends what was started, however this function ends.
    let _cancelled = cancel.clone().drop_guard();
    let requests = Arc::new(source::kube::Requests::default());
    // The source lists while the kernel verifies the programs; what it says waits in its channel.
    let running = start_source(&config, &requests, &cancel);
    let (mut reconciler, mut programs, events) = set_up(&config, &pins)?;
    let logger = match config.log_level {
        LogLevel::Trace => aya_log::EbpfLogger::init(&mut programs.object).ok(),
        _ => None,
    };
    let probe = Arc::new(probe::Probe::new(config.mode).context("listen for the self-probe")?);
    if config.kube_proxy_metrics {
        reconciler.count_changes();
    }
    reconciler.add_own(probe.service());
    let directory = Arc::new(Directory::of_node(&config.node_name));
    reconciler.keep_directory(directory.clone());
    let ring = Ring::new(events).context("watch the ring buffer")?;

    let horizon_ns = config.reuse_horizon.as_nanos() as u64;
    let mount = config::cgroup2_root().ok();
    let inside = mount
        .as_deref()
        .and_then(|mount| probe::lives_in(&config.cgroup, mount));
    let shared = Arc::new(Shared {
        started: SystemTime::now(),
        began: Instant::now(),
        kernel_release: nix::sys::utsname::uname()
            .map(|u| u.release().to_string_lossy().into_owned())
            .unwrap_or_default(),
        usable: reconciler.usable(),
        census: Census::new(reconciler.kernel()),
        reconciler: Mutex::new(reconciler),
        observation: Mutex::new(Observation::new(horizon_ns, directory.clone())),
        directory,
        facts: Mutex::new(None),
        earlier: Mutex::new(HashMap::new()),
        programs: Mutex::new(programs),
        uplinks: Mutex::new(uplinks::Uplinks::default()),
        source: running.status.clone(),
        loops: Mutex::new(running.loops.clone()),
        readiness: Mutex::new(Readiness {
            ready: Err("the first synchronisation is not done".to_owned()),
            unprobed: (inside == Some(false)).then(|| {
                format!(
                    "the self-probe is left out: the agent does not live in {}, so its own connections pass elsewhere",
                    config.cgroup.display()
                )
            }),
        }),
        timings: Mutex::new(Timings::default()),
        flushed: Notify::new(),
        health_ports: Mutex::new(Vec::new()),
        rivals: Mutex::new(rivals),
        probed: state::Probed::default(),
        requests,
        config,
    });
    for problem in shared.own_problems(&lock(&shared.reconciler)) {
        tracing::warn!("{problem}");
    }
    // Where packets are translated is translated from the first moment on; what fails here is tried again by the loop.
    if let Err(error) = shared.follow_uplinks() {
        tracing::error!(%error, "the interfaces could not be looked at; it is tried again");
    }
    tracing::info!(
        mode = %shared.config.mode,
        source = %shared.config.source,
        cgroup = %shared.config.cgroup.display(),
        pins = %pins.folder().display(),
        "attached"
    );

    let tracker = TaskTracker::new();
    loops::start(&shared, running, ring, logger, probe, &cancel);
    tracker.spawn(control::serve(socket, shared.clone(), cancel.clone()));
    if let Some(listener) = listener {
        let exporter = Arc::new(Exporter::new(shared.clone(), DEFAULT_SERVICE_CAP)?);
        let router = http::router(exporter, shared.clone(), http::HEALTH_TIMEOUT);
        let stop = cancel.clone();
        tracker.spawn(async move {
            if let Err(error) = http::serve(listener, router, stop).await {
                tracing::error!(%error, "metrics and health are not served any more");
            }
        });
    }
    tracker.close();

    let mut terminate = signal(SignalKind::terminate()).context("wait for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("wait for SIGINT")?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    cancel.cancel();
    tracker.wait().await;
    stop(&shared)
}

/// Balance keeps its pins, so that the datapath goes on; observe leaves nothing attached.
fn stop(shared: &Shared) -> Result<()> {
    if shared.config.mode == Mode::Observe {
        lock(&shared.programs).attachments.detach_all()?;
        let pins = Pins::new(&shared.config.bpffs, &shared.config.pin_name);
        pins.remove_all().context("remove the pins")?;
        tracing::info!("detached");
    } else {
        tracing::info!("stopped; the datapath goes on without the agent (`evenkeel cleanup` removes it)");
    }
    Ok(())
}
