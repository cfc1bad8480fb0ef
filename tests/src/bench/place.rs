//! Where connections are made: two joined namespaces, child cgroups, and the programs of an arm.
//!
//! The server's namespace owns 10.128.0.0/9, so that one listener answers for every endpoint that a Service may have.

use std::{
    fs::{self, File},
    net::{IpAddr, Ipv4Addr},
    num::NonZeroU16,
    os::fd::{AsRawFd, OwnedFd},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
};

use anyhow::{Context, Result};
use aya::{
    Ebpf,
    maps::{MapData, RingBuf},
    programs::{CgroupAttachMode, CgroupSock},
};
use lb_common::maps::feature;
use lb_user::{
    compile::Compiler,
    datapath::{
        attach::{self, Attachments},
        kernel::Kernel,
        load::{self, Mode, Options, Sizes},
    },
    lab::{ChildCgroup, Netns, link},
    observe::{Observation, UsableBackends, monotonic_ns},
    plan::Plan,
};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    sys::{
        signal::SigSet,
        socket::{
            AddressFamily, Backlog, SockFlag, SockType, SockaddrIn, bind, listen, setsockopt, socket,
            sockopt::ReuseAddr,
        },
    },
    unistd::Pid,
};

use super::{
    dial::{Acceptor, Manner},
    population::Population,
};

/// The longest interval that counts as tuple reuse, as the agent has it by default.
const HORIZON_NS: u64 = 120_000_000_000;

/// Where client and server stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Topology {
    /// Both on the node: packets go over loopback, and rules see them leave and arrive.
    Node,
    /// The server behind a pair of Ethernet devices, as a pod is: rules see each packet once.
    Pod,
}

/// A client's namespace and a server's, which may be one.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) client: Netns,
    pub(super) server: Netns,
    /// The other end of the client's device.
    _peer: Netns,
}

impl Place {
    pub(super) fn new(topology: Topology) -> Result<Self> {
        let (client, peer) = (Netns::new()?, Netns::new()?);
        link::join((&client, "node0"), (&peer, "pods0"))?;
        let gateway = IpAddr::from([10, 244, 255, 254]);
        link::add_address(&client, "node0", IpAddr::from([10, 244, 0, 1]), 16)?;
        link::add_address(&peer, "pods0", gateway, 16)?;
        let server = match topology {
            Topology::Node => client.clone(),
            Topology::Pod => peer.clone(),
        };
        link::own_block(&server, Ipv4Addr::new(10, 128, 0, 0), 9)?;
        // A Service's address is routed like any other: what rewrites packets needs a route first.
        link::add_default_route(&client, "node0", gateway)?;
        Ok(Self {
            client,
            server,
            _peer: peer,
        })
    }

    /// Serves a port of every address of the server; its sockets belong to the cgroup that the process is in.
    pub(super) fn serve(&self, port: NonZeroU16) -> Result<Acceptor> {
        serve_in(&self.server, port, Manner::Close)
    }
}

/// Serves a port of every address of a namespace; its sockets belong to the cgroup that the process is in.
pub(super) fn serve_in(netns: &Netns, port: NonZeroU16, manner: Manner) -> Result<Acceptor> {
    let listener = netns.run(|| -> nix::Result<OwnedFd> {
        let listener = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
        // Connections of an earlier server on the port may not have run out yet.
        setsockopt(&listener, ReuseAddr, &true)?;
        bind(listener.as_raw_fd(), &SockaddrIn::new(0, 0, 0, 0, port.get()))?;
        listen(&listener, Backlog::new(2048)?)?;
        Ok(listener)
    })?;
    Acceptor::start(listener.with_context(|| format!("listen on port {port}"))?, manner)
}

/// Moves this process, all its threads included, into a cgroup.
pub(super) fn enter(cgroup: &ChildCgroup) -> Result<()> {
    let procs = cgroup.path().join("cgroup.procs");
    fs::write(&procs, "0").with_context(|| format!("move into {}", procs.display()))
}

/// The CPUs that this process may use, first and last: the client's, and that of whatever runs beside it.
pub(super) fn cpus() -> (usize, usize) {
    let Ok(set) = sched_getaffinity(Pid::from_raw(0)) else {
        return (0, 0);
    };
    let mut allowed = (0..CpuSet::count()).filter(|cpu| set.is_set(*cpu).unwrap_or(false));
    let first = allowed.next().unwrap_or(0);
    (first, allowed.next_back().unwrap_or(first))
}

/// Keeps the calling thread on one CPU.
pub(super) fn pin(cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu)?;
    sched_setaffinity(Pid::from_raw(0), &set).with_context(|| format!("stay on CPU {cpu}"))
}

/// Lets the calling thread, and what it starts, run on every CPU that this process may have.
pub(super) fn unpin() -> Result<()> {
    let mut set = CpuSet::new();
    for cpu in 0..CpuSet::count() {
        set.set(cpu)?;
    }
    // The kernel leaves out those that are not there or not ours.
    sched_setaffinity(Pid::from_raw(0), &set).context("run on every CPU")
}

/// Which programs an arm attaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Programs {
    /// The rewriting hooks, without memory of any socket.
    Hook,
    /// And per-socket state, which the release hook removes.
    State,
    /// And `sock_ops`, with records in the ring buffer: all that the agent attaches.
    All,
    /// Those of observe mode, on the cgroup and on every interface of the client's namespace: somebody else translates.
    Observe,
}

/// Loaded programs with their maps, attached to a cgroup.
pub(super) struct Datapath {
    pub(super) object: Ebpf,
    pub(super) kernel: Kernel,
    pub(super) compiler: Compiler,
    _attachments: Attachments,
    reader: Reader,
}

impl Datapath {
    /// Loads the programs and attaches them; those that see packets to the interfaces of the client's namespace.
    pub(super) fn new(cgroup: &Path, programs: Programs, client: &Netns) -> Result<Self> {
        let follow = matches!(programs, Programs::All | Programs::Observe);
        let observe = programs == Programs::Observe;
        let mode = if observe { Mode::Observe } else { Mode::Balance };
        let options = Options {
            mode,
            sizes: Sizes::default(),
            features: if programs == Programs::Hook { 0 } else { feature::STATE },
            log_level: 0,
            follow_connections: follow,
            packets: observe,
            translate: false,
        };
        let mut object = load::load(&options, None)?;
        let (kernel, events) = Kernel::take(&mut object, observe)?;
        let reader = Reader::start(events)?;
        let mut attachments = Attachments::new(cgroup, None)?;
        if programs == Programs::State {
            attach_release(&mut object, cgroup)?;
        }
        attachments.attach_cgroup(&mut object, mode, follow)?;
        if observe {
            client.run(|| -> Result<()> {
                for (interface, _) in attach::interfaces()? {
                    attachments.attach_interface(&mut object, &interface)?;
                }
                Ok(())
            })??;
        }
        Ok(Self {
            object,
            compiler: Compiler::new(kernel.capacity()),
            kernel,
            _attachments: attachments,
            reader,
        })
    }

    /// Records that the reader has taken so far, and how often it was woken for them.
    pub(super) fn heard(&self) -> (u64, u64) {
        let heard = &self.reader.heard;
        (
            heard.records.load(Ordering::Relaxed),
            heard.wakeups.load(Ordering::Relaxed),
        )
    }

    /// Writes the Services into the maps.
    pub(super) fn fill(&mut self, population: &Population) -> Result<()> {
        let mut plan = Plan::default();
        for n in 0..population.count {
            let compiled = self.compiler.compile(&population.desired(n), None, &mut plan.tables)?;
            plan.merge(Plan::between(None, Some(&compiled)));
        }
        Ok(self.kernel.apply(&plan)?)
    }
}

/// Attaches the release hook alone; the object holds the link.
fn attach_release(object: &mut Ebpf, cgroup: &Path) -> Result<()> {
    let program: &mut CgroupSock = object
        .program_mut("sock_release")
        .context("the object has no sock_release")?
        .try_into()?;
    program.load()?;
    program.attach(File::open(cgroup)?, CgroupAttachMode::Single)?;
    Ok(())
}

/// Takes records as they come, as the agent does, with all that the agent makes of them.
struct Reader {
    heard: Arc<Heard>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// What a reader has heard.
#[derive(Debug, Default)]
struct Heard {
    records: AtomicU64,
    wakeups: AtomicU64,
}

impl Reader {
    fn start(mut events: RingBuf<MapData>) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&stop);
        let heard = Arc::new(Heard::default());
        let count = Arc::clone(&heard);
        let (_, cpu) = cpus();
        let thread = thread::Builder::new().name("bench-reader".to_owned()).spawn(move || {
            SigSet::all().thread_block().ok();
            // Beside the client, where there is room.
            pin(cpu).ok();
            let usable = UsableBackends::new(1);
            let mut observation = Observation::new(HORIZON_NS, Arc::default());
            while !told.load(Ordering::Relaxed) {
                while let Some(record) = events.next() {
                    observation.take(&record, &usable);
                    count.records.fetch_add(1, Ordering::Relaxed);
                }
                observation.advance(monotonic_ns(), &usable);
                count.wakeups.fetch_add(u64::from(wait(&events)), Ordering::Relaxed);
            }
        })?;
        Ok(Self {
            heard,
            stop,
            thread: Some(thread),
        })
    }
}

/// Waits for a wake-up of the programs, or a tenth of a second; true if it was woken.
fn wait(events: &RingBuf<MapData>) -> bool {
    // SAFETY: the ring buffer keeps its descriptor open while it is borrowed.
    let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(events.as_raw_fd()) };
    let mut fds = [PollFd::new(fd, PollFlags::POLLIN)];
    // A wait that ends early only looks again.
    poll(&mut fds, PollTimeout::from(100u8)).is_ok_and(|ready| ready > 0)
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic has been printed.
            let _ = thread.join();
        }
    }
}
