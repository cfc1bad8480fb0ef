//! An arm: one proxy in a namespace and a cgroup of its own, with an API server of its own and backends that say who they are.
//!
//! A Service's address that nobody serves is refused by the machine behind the node's device, so that a dial tells at once.
//! The invariant: everything of an arm goes with it, the proxy first.

use std::{
    net::{Ipv4Addr, SocketAddrV4},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use lb_user::lab::{ChildCgroup, link, mounts::BpfFs};
use tokio::runtime::Runtime;

use super::{
    proxy::{Api, Home, Kind, Proxy},
    town::{NODE, TARGET, Town},
};
use crate::{
    apiserver::{ApiServer, Resource},
    bench::{
        Bench,
        dial::{self, Acceptor, Manner, Met},
        place::{Place, Topology, enter, serve_in},
    },
    interrupt,
};

/// Services of which each must answer before a start is over, evenly spread over all.
const SAMPLE: u32 = 64;
/// The time between two bookmarks on the watches: a server that is silent for long counts as gone.
const BOOKMARKS: Duration = Duration::from_secs(30);
/// From when on a dialler may pause, and what part of the time that has passed a pause takes.
const TIGHT: Duration = Duration::from_millis(20);
const PAUSE_PART: u32 = 200;

/// What a start took.
#[derive(Clone, Copy, Debug)]
pub(super) struct Start {
    /// Until the last Service of the sample answered; without it, the limit was passed.
    pub(super) served: Option<Duration>,
    /// Until the API server had been asked for its first list of EndpointSlices.
    pub(super) asked: Option<Duration>,
}

/// One proxy and all that it needs.
pub(super) struct Arm {
    // Dropped in this order.
    proxy: Option<Proxy>,
    api: Arc<ApiServer>,
    _runtime: Runtime,
    _backends: Acceptor,
    pub(super) kind: Kind,
    pub(super) town: Town,
    pub(super) place: Place,
    cgroup: ChildCgroup,
    folder: tempfile::TempDir,
    bpf: BpfFs,
    /// Changes of the marked Service so far.
    changes: u32,
}

impl Arm {
    /// Makes everything but the proxy.
    pub(super) fn new(bench: &Bench, bpf: &BpfFs, kind: Kind, town: Town, number: usize) -> Result<Self> {
        let place = Place::new(Topology::Pod)?;
        link::own_block(&place.server, Ipv4Addr::new(10, 96, 0, 0), 16)?;
        let cgroup = bench.home.below(&format!("proxy{number}of{}", town.count()))?;
        let backends = serve_in(&place.server, TARGET, Manner::Tell)?;
        let inside = place.client.clone();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .thread_name("bench-api")
            .on_thread_start(move || {
                // A thread elsewhere would serve nobody, and say so.
                let _entered = inside.enter_current_thread();
            })
            .build()?;
        let api = runtime.block_on(runtime.spawn(ApiServer::start()))?;
        for object in town.objects() {
            api.apply(object);
        }
        // No watch of an earlier version exists yet, and lists do not need the events.
        api.compact();
        let api = Arc::new(api);
        let server = Arc::downgrade(&api);
        runtime.spawn(async move {
            loop {
                tokio::time::sleep(BOOKMARKS).await;
                match server.upgrade() {
                    Some(server) => server.bookmark(),
                    None => return,
                }
            }
        });
        Ok(Self {
            proxy: None,
            api,
            _runtime: runtime,
            _backends: backends,
            kind,
            town,
            place,
            cgroup,
            folder: tempfile::Builder::new().prefix("evenkeel-bench-").tempdir()?,
            bpf: bpf.clone(),
            changes: 0,
        })
    }

    /// Puts the process and the calling thread where the proxy translates.
    pub(super) fn step_in(&self) -> Result<()> {
        enter(&self.cgroup)?;
        Ok(self.place.client.enter_current_thread()?)
    }

    /// Starts the proxy into an empty kernel and waits until its Services answer, or for so long.
    pub(super) fn start(&mut self, limit: Duration) -> Result<Start> {
        self.stop()?;
        self.step_in()?;
        let home = Home {
            netns: &self.place.client,
            cgroup: &self.cgroup,
            bpf: &self.bpf,
            folder: self.folder.path(),
            node: NODE,
        };
        let lists = self.api.requests(Resource::Slices).lists;
        let url = self.api.url();
        let began = Instant::now();
        let mut proxy = Proxy::start(self.kind, home, Api::Url(&url))?;
        let (count, mut asked) = (self.town.count(), None);
        let sample = SAMPLE.min(count);
        for n in 0..=sample {
            // The last one is the marked Service.
            let service = u64::from(n) * u64::from(count) / u64::from(sample);
            let target = self.town.frontend(service as u32);
            loop {
                if asked.is_none() && self.api.requests(Resource::Slices).lists > lists {
                    asked = Some(began.elapsed());
                }
                if matches!(dial::ask(target)?.0, Met::Backend(_)) {
                    break;
                }
                interrupt::check()?;
                proxy.check()?;
                let passed = began.elapsed();
                if passed > limit {
                    self.proxy = Some(proxy);
                    return Ok(Start { served: None, asked });
                }
                pause(passed);
            }
        }
        let served = Some(began.elapsed());
        self.proxy = Some(proxy);
        Ok(Start { served, asked })
    }

    /// Ends the proxy and empties the kernel of what it wrote.
    pub(super) fn stop(&mut self) -> Result<()> {
        match self.proxy.take() {
            Some(proxy) => proxy.end(&self.place.client, &self.bpf),
            None => Ok(()),
        }
    }

    /// Whether the proxy runs.
    pub(super) fn runs(&self) -> bool {
        self.proxy.is_some()
    }

    /// The running proxy.
    pub(super) fn proxy(&self) -> Result<&Proxy> {
        self.proxy
            .as_ref()
            .with_context(|| format!("{} does not run", self.kind))
    }

    /// The API server, for changes of other Services.
    pub(super) fn api(&self) -> Arc<ApiServer> {
        Arc::clone(&self.api)
    }

    /// Replaces the marked Service's endpoint, dials until the new one answers, and returns the time from the event on.
    ///
    /// `None` if it did not within `limit`. The process and the thread must have stepped in.
    pub(super) fn change(&mut self, limit: Duration) -> Result<Option<Duration>> {
        self.changes += 1;
        let wanted = Met::Backend(Town::marked_endpoint(self.changes));
        let target = self.town.marked_frontend();
        let version = self.api.change(self.town.marked_slice(self.changes));
        let Some(met) = dial_until(target, wanted, limit)? else {
            self.proxy.as_mut().context("the proxy does not run")?.check()?;
            return Ok(None);
        };
        let handed = self.api.handed(version);
        let handed = handed.context("the new endpoint was met, and its event was sent to nobody")?;
        Ok(Some(met.saturating_duration_since(handed)))
    }
}

/// Dials until a backend is met, and returns when; `None` if it was not within `limit`.
pub(super) fn dial_until(target: SocketAddrV4, wanted: Met, limit: Duration) -> Result<Option<Instant>> {
    let began = Instant::now();
    loop {
        if dial::ask(target)?.0 == wanted {
            return Ok(Some(Instant::now()));
        }
        interrupt::check()?;
        let passed = began.elapsed();
        if passed > limit {
            return Ok(None);
        }
        pause(passed);
    }
}

/// Between two dials: nothing at first, and then half a hundredth of the time that has passed.
fn pause(passed: Duration) {
    if passed > TIGHT {
        thread::sleep(passed / PAUSE_PART);
    }
}
