//! The real agent, driven by its flags and a folder of manifests, asked over its control socket.

use std::{
    collections::BTreeSet,
    env, fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use lb_user::{
    control,
    datapath::load::REWRITING,
    lab::{
        self, Child, ChildCgroup, Netns, child,
        manifest::{Endpoint, Folder, Service},
        mounts::BpfFs,
    },
    view::{Answer, BackendState, DiagnosisView, Query, ReuseView, ServiceFilter},
};

use super::stage;

/// How long a start or a change may take under emulation.
const PATIENCE: Duration = Duration::from_mins(1);

/// What the agent is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Balance,
    Observe,
}

/// A running agent; it is killed on drop.
#[derive(Debug)]
pub(crate) struct Agent {
    child: Child,
    program: PathBuf,
    manifests: Folder,
    socket: PathBuf,
    // Last: the child's log lies in it.
    _folder: tempfile::TempDir,
}

impl Agent {
    /// Writes the manifests, starts the agent in the cgroup and the node, and waits until it is ready.
    pub(crate) fn start(
        mode: Mode,
        node: &Netns,
        group: &ChildCgroup,
        bpf: &BpfFs,
        backends: &[SocketAddr],
    ) -> Result<Self> {
        let folder = tempfile::tempdir().context("make a folder")?;
        let manifests = Folder::new(folder.path().join("manifests"))?;
        manifests.write("web-service.yaml", &web().to_yaml())?;
        manifests.write("web-endpoints.yaml", &endpoints(backends))?;
        let socket = folder.path().join("agent.sock");
        let program = program()?;
        let mut command = Command::new(&program);
        command.args(["agent", "--node-name", "story", "--metrics-address", "none"]);
        command.args(match mode {
            Mode::Balance => ["--mode", "balance"],
            Mode::Observe => ["--mode", "observe"],
        });
        command
            .arg("--source")
            .arg(format!("dir:{}", manifests.path().display()));
        command.arg("--cgroup").arg(group.path());
        // Pins of its own: an earlier agent's are none of its business.
        command.arg("--bpffs").arg(bpf.path());
        command.args(["--pin-name", &format!("story-{mode:?}").to_lowercase()]);
        command.arg("--socket").arg(&socket);
        child::forget_configuration(&mut command);
        node.place(&mut command);
        group.place(&mut command)?;
        let log = folder.path().join("agent.log");
        let mut agent = Self {
            child: Child::start(&mut command, &log)?,
            program,
            manifests,
            socket,
            _folder: folder,
        };
        let began = Instant::now();
        agent.wait_ready()?;
        println!("agent ready after {:.1} s", began.elapsed().as_secs_f64());
        Ok(agent)
    }

    fn wait_ready(&mut self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.ended()? {
                bail!("the agent ended ({status}): {}", self.log());
            }
            let now = match control::ask(&self.socket, &Query::Status {}) {
                Ok(Answer::Status(status)) if status.health.ready => return Ok(()),
                Ok(answer) => format!("{answer:?}"),
                Err(error) => error.to_string(),
            };
            ensure!(
                Instant::now() < deadline,
                "the agent is not ready: {now}; it logged: {}",
                self.log()
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn log(&self) -> String {
        fs::read_to_string(self.child.log()).unwrap_or_default()
    }

    /// What the agent says of the Service now.
    pub(crate) fn diagnosis(&self) -> Result<DiagnosisView> {
        match control::ask(&self.socket, &Query::Diagnose { filter: web_alone() })? {
            Answer::DiagnosisList { items, .. } => items.into_iter().next().context("a diagnosis of the Service"),
            other => bail!("{other:?} to diagnose"),
        }
    }

    /// The Service over time.
    pub(crate) fn report(&self) -> Result<Answer> {
        Ok(control::ask(&self.socket, &Query::Report { filter: web_alone() })?)
    }

    /// Writes the Service's endpoints; returns the moment before.
    pub(crate) fn set_endpoints(&self, backends: &[SocketAddr]) -> Result<Instant> {
        let written = Instant::now();
        self.manifests.write("web-endpoints.yaml", &endpoints(backends))?;
        Ok(written)
    }

    /// Waits until exactly these backends are active.
    pub(crate) fn wait_active(&self, backends: &[SocketAddr]) -> Result<()> {
        let wanted: BTreeSet<_> = backends.iter().copied().collect();
        ensure!(
            lab::holds_within(PATIENCE, || self.active().is_ok_and(|found| found == wanted)),
            "the agent lists {:?} and not {wanted:?}",
            self.active()
        );
        Ok(())
    }

    fn active(&self) -> Result<BTreeSet<SocketAddr>> {
        match self.ask(&Query::Backends { filter: web_only() })? {
            Answer::BackendList { items } => Ok(items
                .into_iter()
                .filter(|backend| backend.state == BackendState::Active)
                .map(|backend| SocketAddr::new(backend.addr, backend.port))
                .collect()),
            other => bail!("not a list of backends: {other:?}"),
        }
    }

    /// The counts of tuple reuse of the story's Service.
    pub(crate) fn reuse(&self) -> Result<ReuseView> {
        match self.ask(&Query::Reuse { filter: web_only() })? {
            Answer::Reuse(view) => Ok(view),
            other => bail!("no reuse: {other:?}"),
        }
    }

    /// Waits until at least so many connections are judged.
    pub(crate) fn wait_judged(&self, connections: u64) -> Result<()> {
        ensure!(
            lab::holds_within(PATIENCE, || self
                .reuse()
                .is_ok_and(|view| view.connections >= connections)),
            "fewer than {connections} connections were judged in {} s: {:?}",
            PATIENCE.as_secs(),
            self.reuse()
        );
        Ok(())
    }

    /// Waits until exactly so many connections are judged: every one has ended, none was lost.
    pub(crate) fn wait_counted(&self, connections: u64) -> Result<()> {
        ensure!(
            lab::holds_within(PATIENCE, || self
                .reuse()
                .is_ok_and(|view| view.connections == connections)),
            "not {connections} connections were judged: {:?}",
            self.reuse()
        );
        Ok(())
    }

    /// Programs that write to traffic and are attached.
    pub(crate) fn rewriting_programs(&self) -> Result<Vec<String>> {
        match self.ask(&Query::Status {})? {
            Answer::Status(status) => Ok(status
                .programs
                .into_iter()
                .filter(|program| program.attached && REWRITING.contains(&program.name.as_str()))
                .map(|program| program.name)
                .collect()),
            other => bail!("no status: {other:?}"),
        }
    }

    /// What the command line prints for these words, whether it found a problem (exit 1) or not.
    pub(crate) fn says(&self, words: &[&str]) -> Result<String> {
        let output = Command::new(&self.program)
            .args(words)
            .arg("--socket")
            .arg(&self.socket)
            .output()
            .context("start evenkeel")?;
        ensure!(
            matches!(output.status.code(), Some(0 | 1)) && output.stderr.is_empty(),
            "evenkeel {words:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn ask(&self, query: &Query) -> Result<Answer> {
        Ok(control::ask(&self.socket, query)?)
    }
}

fn web() -> Service {
    Service::tcp("web", stage::WEB, stage::TARGET)
}

fn web_only() -> ServiceFilter {
    ServiceFilter {
        namespace: Some("default".to_owned()),
        name: Some(web().name),
    }
}

fn endpoints(backends: &[SocketAddr]) -> String {
    let endpoints: Vec<_> = backends.iter().map(|b| Endpoint::ready(b.ip())).collect();
    web().endpoints_to_yaml(&endpoints)
}

/// The binary under test: `EVENKEEL_BIN`, else the debug build beside this suite's own.
fn program() -> Result<PathBuf> {
    if let Some(program) = env::var_os("EVENKEEL_BIN") {
        return Ok(program.into());
    }
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/debug/evenkeel");
    ensure!(
        program.is_file(),
        "no binary at {}: `cargo xtask build` makes it",
        program.display()
    );
    Ok(program)
}

fn web_alone() -> ServiceFilter {
    ServiceFilter {
        namespace: Some("default".to_owned()),
        name: Some("web".to_owned()),
    }
}
