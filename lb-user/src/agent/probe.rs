//! The self-probe: a connection of the agent's own through the datapath.
//!
//! The probe is a Service of the agent's own, behind a loopback address that nobody listens on. In balance mode the agent
//! listens elsewhere on loopback, so that only a translated connection arrives. In observe mode it listens nowhere: the dial
//! is refused, and that the programs saw it is what counts. Either way the Service's counter must move. An agent whose
//! programs are attached to a cgroup that it does not live in cannot probe; it says so.

use std::{
    fs,
    io::{self, Read},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    num::NonZeroU16,
    os::unix::fs::MetadataExt,
    path::Path,
    thread,
    time::Duration,
};

use crate::{
    model::{
        BackendSet, DesiredService, Frontend, FrontendKind, Member, ObjectName, Protocol, Scope, SetName, WhenEmpty,
    },
    view::Mode,
};

/// The address that the probe dials. Untranslated it leads to loopback, where nobody listens.
const DIALLED: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 255, 77, 1));
const DIALLED_PORT: NonZeroU16 = NonZeroU16::new(7).expect("seven is not zero");
const PATIENCE: Duration = Duration::from_secs(1);
/// Sent by the listener, so that the probe knows whom it reached.
const GREETING: u8 = 0xe7;

/// What the probe dials, and who answers.
#[derive(Debug)]
pub(super) struct Probe {
    /// The agent's own listener; none in observe mode, which opens none.
    listener: Option<SocketAddr>,
}

impl Probe {
    /// Makes the probe of a mode; in balance mode it listens on loopback, on a thread that ends with the process.
    pub(super) fn new(mode: Mode) -> io::Result<Self> {
        let listener = match mode {
            Mode::Balance => Some(listen()?),
            Mode::Observe => None,
        };
        Ok(Self { listener })
    }

    /// The Service's name; no object of Kubernetes can have it.
    pub(super) fn name() -> ObjectName {
        ObjectName::new("", "self-probe")
    }

    /// What the probe wants in the kernel.
    pub(super) fn service(&self) -> DesiredService {
        let members = (self.listener)
            .and_then(|listener| {
                Some(Member {
                    addr: listener.ip(),
                    port: NonZeroU16::new(listener.port())?,
                    weight: 1,
                })
            })
            .into_iter()
            .collect();
        DesiredService {
            name: Self::name(),
            frontends: vec![Frontend {
                addr: DIALLED,
                port: DIALLED_PORT,
                protocol: Protocol::Tcp,
                kind: FrontendKind::ClusterIp,
                set: 0,
                when_empty: WhenEmpty::Refuse,
                affinity_seconds: None,
                outside: None,
            }],
            sets: vec![BackendSet {
                name: SetName {
                    port_name: "".into(),
                    protocol: Protocol::Tcp,
                    ipv6: false,
                    scope: Scope::Cluster,
                },
                members,
                draining: Vec::new(),
            }],
            sources: Vec::new(),
        }
    }

    /// Makes one connection; an error is a sentence. Whether the programs saw it is for the caller to ask.
    pub(super) fn connect(&self) -> Result<(), String> {
        let target = SocketAddr::new(DIALLED, DIALLED_PORT.get());
        if self.listener.is_none() {
            // It is refused, or met by whoever listens on all of loopback: neither says anything.
            let _ = TcpStream::connect_timeout(&target, PATIENCE);
            return Ok(());
        }
        let mut stream = TcpStream::connect_timeout(&target, PATIENCE)
            .map_err(|error| format!("the self-probe's connection to {target} was not translated: {error}"))?;
        let mut greeting = [0];
        let read = stream
            .set_read_timeout(Some(PATIENCE))
            .and_then(|()| stream.read_exact(&mut greeting));
        match read {
            Ok(()) if greeting == [GREETING] => Ok(()),
            Ok(()) => Err(format!("the self-probe's connection to {target} reached somebody else")),
            Err(error) => Err(format!(
                "the self-probe's connection to {target} got no answer: {error}"
            )),
        }
    }
}

/// Greets everybody who comes, for as long as the process lives.
fn listen() -> io::Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let address = listener.local_addr()?;
    thread::Builder::new().name("self-probe".to_owned()).spawn(move || {
        for peer in listener.incoming().flatten() {
            let _ = peer.set_write_timeout(Some(PATIENCE));
            let _ = io::Write::write_all(&mut &peer, &[GREETING]);
        }
    })?;
    Ok(address)
}

/// Whether this process's sockets pass through programs that are attached to `cgroup`; `None` where nobody can tell.
pub(super) fn lives_in(cgroup: &Path, mount: &Path) -> Option<bool> {
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = own.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let wanted = fs::metadata(cgroup).ok()?;
    let mut at = mount.join(own);
    loop {
        let found = fs::metadata(&at).ok()?;
        if (found.dev(), found.ino()) == (wanted.dev(), wanted.ino()) {
            return Some(true);
        }
        if at == mount || !at.pop() {
            return Some(false);
        }
    }
}
