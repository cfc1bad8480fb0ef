//! The agent as the demo's child, and what it answers when asked.
//!
//! It is driven as a person would drive it: by its flags, manifests in a folder, its readiness endpoint, and the control
//! socket that the command line asks too.

use std::{
    collections::BTreeSet,
    fs,
    io::{Read, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

use super::{
    outcome::{Reuse, ReuseBucket},
    stage::{self, Stage},
};
use crate::{
    control,
    interrupt::Interrupts,
    lab::{
        Child, ChildCgroup, Netns, child,
        manifest::{Endpoint, Folder, Service},
        mounts::BpfFs,
    },
    model::Protocol,
    view::{Answer, BackendState, Query, ReportView, ReuseView, ServiceFilter},
};

/// In the client's namespace, where nobody else is.
const METRICS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9464);
/// How long a start may take.
const START_PATIENCE: Duration = Duration::from_secs(20);
/// How long a change may take to be reported.
const CHANGE_PATIENCE: Duration = Duration::from_secs(10);
/// The agent and the means to drive it.
#[derive(Debug)]
pub(super) struct Agent<'a> {
    program: PathBuf,
    group: &'a ChildCgroup,
    netns: Netns,
    interrupts: &'a Interrupts,
    manifests: Folder,
    pins: PathBuf,
    socket: PathBuf,
    log: PathBuf,
    child: Option<Child>,
    reuse: ReuseMeter,
}

impl<'a> Agent<'a> {
    /// Writes the first manifests (three backends), starts the agent and waits until it is ready.
    pub(super) fn start(
        program: &Path,
        folder: &stage::Folder,
        bpf: &BpfFs,
        group: &'a ChildCgroup,
        stage: &Stage,
        interrupts: &'a Interrupts,
    ) -> Result<Self> {
        let mut agent = Self {
            program: program.to_owned(),
            group,
            netns: stage.client.clone(),
            interrupts,
            manifests: Folder::new(folder.manifests())?,
            pins: bpf.folder("demo")?,
            socket: folder.socket(),
            log: folder.log(),
            child: None,
            reuse: ReuseMeter::default(),
        };
        agent.manifests.write("web-service.yaml", &web().to_yaml())?;
        agent.manifests.write("names-service.yaml", &names().to_yaml())?;
        let all: Vec<_> = stage::backends(stage::BACKENDS)
            .iter()
            .map(|b| Endpoint::ready(b.ip()))
            .collect();
        agent
            .manifests
            .write("names-endpoints.yaml", &names().endpoints_to_yaml(&all))?;
        agent.set_endpoints(&stage::backends(3))?;
        agent.launch()?;
        Ok(agent)
    }

    /// Starts the process and waits until it says that it is ready.
    fn launch(&mut self) -> Result<()> {
        let mut command = Command::new(&self.program);
        command.args(["agent", "--mode", "balance", "--node-name", "demo", "--source"]);
        command.arg(format!("dir:{}", self.manifests.path().display()));
        command.arg("--cgroup").arg(self.group.path());
        command.arg("--bpffs").arg(&self.pins);
        command.arg("--socket").arg(&self.socket);
        command.args(["--metrics-address", &METRICS.to_string()]);
        child::forget_configuration(&mut command);
        self.netns.place(&mut command);
        self.group.place(&mut command)?;
        let child = self
            .child
            .insert(Child::start(&mut command, &self.log).context("start the agent")?);
        let deadline = Instant::now() + START_PATIENCE;
        while !is_ready(&self.netns) {
            self.interrupts.check()?;
            if let Some(status) = child.ended()? {
                bail!("the agent did not start ({status}): {}", last_words(&self.log));
            }
            if Instant::now() > deadline {
                bail!(
                    "the agent was not ready after {} s: {}",
                    START_PATIENCE.as_secs(),
                    last_words(&self.log)
                );
            }
            self.interrupts.pass(Duration::from_millis(10))?;
        }
        Ok(())
    }

    /// Writes the web Service's endpoints and returns when that was.
    pub(super) fn set_endpoints(&mut self, backends: &[SocketAddr]) -> Result<Instant> {
        let endpoints: Vec<_> = backends.iter().map(|b| Endpoint::ready(b.ip())).collect();
        let text = web().endpoints_to_yaml(&endpoints);
        let written = Instant::now();
        self.manifests.write("web-endpoints.yaml", &text)?;
        Ok(written)
    }

    /// Waits until the agent lists exactly these backends as active for the web Service, and returns when it did.
    pub(super) fn wait_programmed(&self, backends: &[SocketAddr]) -> Result<Instant> {
        let wanted: BTreeSet<_> = backends.iter().copied().collect();
        let deadline = Instant::now() + CHANGE_PATIENCE;
        let mut found = BTreeSet::new();
        while Instant::now() < deadline {
            self.interrupts.check()?;
            match self.active_backends() {
                Ok(backends) => found = backends,
                // It may be busy, or just starting: the deadline decides.
                Err(error) => tracing::debug!(error = %format!("{error:#}"), "no answer yet"),
            }
            if found == wanted {
                return Ok(Instant::now());
            }
            self.interrupts.pass(Duration::from_millis(2))?;
        }
        bail!(
            "the agent did not report the change after {} s: it lists {found:?} and not {wanted:?}",
            CHANGE_PATIENCE.as_secs()
        )
    }

    /// Kills the agent without warning.
    pub(super) fn kill(&mut self) -> Result<()> {
        self.read_reuse()?;
        if let Some(mut child) = self.child.take() {
            child.kill()?;
        }
        Ok(())
    }

    /// Starts it again and waits until it is ready.
    pub(super) fn restart(&mut self) -> Result<()> {
        self.launch()?;
        let now = self.ask_reuse()?;
        self.reuse.note_restart(&now);
        Ok(())
    }

    /// Reads the reuse counts since the demo's start.
    pub(super) fn read_reuse(&mut self) -> Result<Reuse> {
        let now = self.ask_reuse()?;
        Ok(self.reuse.note(now))
    }

    /// The reuse counts as they were last read.
    pub(super) fn reuse_total(&self) -> Reuse {
        self.reuse.total()
    }

    /// What a person would type to look inside.
    pub(super) fn commands(&self) -> Vec<String> {
        let socket = self.socket.display();
        let verbs = [
            "status",
            "service list",
            "backend list",
            "reuse",
            "explain 10.244.0.1 10.96.0.10:80",
        ];
        let mut commands: Vec<_> = verbs
            .iter()
            .map(|verb| format!("evenkeel {verb} --socket {socket}"))
            .collect();
        if let Some(child) = &self.child {
            // The pins are in the mount namespace of the demo and its children.
            commands.push(format!("nsenter -t {} -m ls -R {}", child.pid(), self.pins.display()));
        }
        commands
    }

    /// Lists the web Service's active backends.
    fn active_backends(&self) -> Result<BTreeSet<SocketAddr>> {
        let query = Query::Backends {
            filter: ServiceFilter {
                namespace: Some("default".to_owned()),
                name: Some(web().name),
            },
        };
        match control::ask(&self.socket, &query)? {
            Answer::BackendList { items } => Ok(items
                .into_iter()
                .filter(|backend| backend.state == BackendState::Active)
                .map(|backend| SocketAddr::new(backend.addr, backend.port))
                .collect()),
            other => bail!("the agent answered a question for backends with {other:?}"),
        }
    }

    /// Connections to the web Service that the kernel programs have counted.
    pub(super) fn web_connects(&self) -> Result<u64> {
        let query = Query::Service {
            namespace: "default".to_owned(),
            name: "web".to_owned(),
        };
        match control::ask(&self.socket, &query)? {
            Answer::Service(view) => Ok(view.connects),
            other => bail!("the agent answered a question for a Service with {other:?}"),
        }
    }

    /// What this life of the agent saw, over time.
    pub(super) fn report(&self) -> Result<ReportView> {
        let query = Query::Report {
            filter: ServiceFilter::default(),
        };
        match control::ask(&self.socket, &query)? {
            Answer::Report(view) => Ok(*view),
            other => bail!("the agent answered a question for a report with {other:?}"),
        }
    }

    /// Asks for the counts of this life of the agent.
    fn ask_reuse(&self) -> Result<Reuse> {
        let query = Query::Reuse {
            filter: ServiceFilter::default(),
        };
        match control::ask(&self.socket, &query)? {
            Answer::Reuse(view) => Ok(Reuse::from(view)),
            other => bail!("the agent answered a question for reuse with {other:?}"),
        }
    }
}

impl From<ReuseView> for Reuse {
    fn from(view: ReuseView) -> Self {
        Self {
            total: view.total,
            same_backend: view.same_backend,
            moved: view.moved,
            stale_backend: view.stale_backend,
            overlap: view.overlap,
            histogram: view
                .intervals
                .iter()
                .map(|bucket| ReuseBucket {
                    le: bucket.up_to_seconds,
                    count: bucket.count,
                })
                .collect(),
        }
    }
}

/// Counts that survive the agent's restart, whether its own counts do or not.
#[derive(Debug, Default)]
struct ReuseMeter {
    /// What earlier lives of the agent counted.
    before: Reuse,
    /// What the present life counted when it was last asked.
    last: Reuse,
}

impl ReuseMeter {
    fn note(&mut self, now: Reuse) -> Reuse {
        self.last = now;
        self.total()
    }

    fn note_restart(&mut self, first: &Reuse) {
        // Counts that went on from where they were still contain the earlier life.
        if first.total < self.last.total {
            self.before = self.total();
            self.last = Reuse::default();
        }
    }

    fn total(&self) -> Reuse {
        self.before.plus(&self.last)
    }
}

fn web() -> Service {
    Service::tcp("web", stage::WEB, stage::TARGET)
}

fn names() -> Service {
    let mut names = Service::tcp("names", stage::NAMES, stage::NAMES_TARGET);
    for port in &mut names.ports {
        port.protocol = Protocol::Udp;
    }
    names
}

/// Asks the readiness endpoint inside the namespace.
fn is_ready(netns: &Netns) -> bool {
    let ask = || -> std::io::Result<bool> {
        let mut stream = TcpStream::connect_timeout(&METRICS, Duration::from_secs(1))?;
        stream.set_read_timeout(Some(Duration::from_secs(2)))?;
        stream.write_all(b"GET /readyz HTTP/1.1\r\nHost: demo\r\nConnection: close\r\n\r\n")?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        Ok(answer.split(u8::is_ascii_whitespace).nth(1) == Some(b"200"))
    };
    netns.run(ask).is_ok_and(|answer| answer.unwrap_or(false))
}

/// The last lines of a log, on one line.
fn last_words(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<_> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    let last = lines[lines.len().saturating_sub(3)..].join(" / ");
    if last.is_empty() {
        "it said nothing".to_owned()
    } else {
        last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_add_up_over_a_restart_that_forgets_and_one_that_remembers() {
        let counted = |total| Reuse {
            total,
            ..Reuse::default()
        };
        let mut forgets = ReuseMeter::default();
        forgets.note(counted(100));
        forgets.note_restart(&counted(0));
        assert_eq!(forgets.note(counted(30)).total, 130);
        let mut remembers = ReuseMeter::default();
        remembers.note(counted(100));
        remembers.note_restart(&counted(110));
        assert_eq!(remembers.note(counted(130)).total, 130);
    }
}
