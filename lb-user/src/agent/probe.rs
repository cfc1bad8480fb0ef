//! The self-probe: a connection of the agent's own through the datapath.
//!
//! The agent listens on loopback and is a Service of its own: in balance mode behind a loopback address that nobody
//! listens on, so that only a translated connection arrives; in observe mode behind the listener's own address. Either
//! way the Service's counter must move. An agent whose programs are attached to a cgroup that it does not live in
//! cannot probe; it says so.

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

/// The address that the probe dials in balance mode. Untranslated it leads to loopback, where nobody listens.
const DIALLED: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 255, 77, 1));
const DIALLED_PORT: NonZeroU16 = NonZeroU16::new(7).expect("seven is not zero");
const PATIENCE: Duration = Duration::from_secs(1);
/// Sent by the listener, so that the probe knows whom it reached.
const GREETING: u8 = 0xe7;

/// The listening side of the probe.
#[derive(Debug)]
pub(super) struct Probe {
    listener: SocketAddr,
    mode: Mode,
}

impl Probe {
    /// Listens on loopback; the listener's thread ends with the process.
    pub(super) fn listen(mode: Mode) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let address = listener.local_addr()?;
        thread::Builder::new().name("self-probe".to_owned()).spawn(move || {
            for peer in listener.incoming().flatten() {
                let _ = peer.set_write_timeout(Some(PATIENCE));
                let _ = io::Write::write_all(&mut &peer, &[GREETING]);
            }
        })?;
        Ok(Self {
            listener: address,
            mode,
        })
    }

    /// The Service's name; no object of Kubernetes can have it.
    pub(super) fn name() -> ObjectName {
        ObjectName::new("", "self-probe")
    }

    /// What the probe wants in the kernel.
    pub(super) fn service(&self) -> DesiredService {
        let port = NonZeroU16::new(self.listener.port()).unwrap_or(NonZeroU16::MIN);
        let (addr, dialled) = match self.mode {
            Mode::Balance => (DIALLED, DIALLED_PORT),
            Mode::Observe => (self.listener.ip(), port),
        };
        DesiredService {
            name: Self::name(),
            frontends: vec![Frontend {
                addr,
                port: dialled,
                protocol: Protocol::Tcp,
                kind: FrontendKind::ClusterIp,
                set: 0,
                when_empty: WhenEmpty::Refuse,
                affinity_seconds: None,
            }],
            sets: vec![BackendSet {
                name: SetName {
                    port_name: "".into(),
                    protocol: Protocol::Tcp,
                    ipv6: false,
                    scope: Scope::Cluster,
                },
                members: vec![Member {
                    addr: self.listener.ip(),
                    port,
                    weight: 1,
                }],
                draining: Vec::new(),
            }],
        }
    }

    /// Makes one connection; an error is a sentence.
    pub(super) fn connect(&self) -> Result<(), String> {
        let target = match self.mode {
            Mode::Balance => SocketAddr::new(DIALLED, DIALLED_PORT.get()),
            Mode::Observe => self.listener,
        };
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
