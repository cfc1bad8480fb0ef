//! The agent as the demo's child, and what it answers when asked.
//!
//! It is driven as a person would drive it: manifests in a folder, its command line, its readiness endpoint. Answers are
//! read leniently and in this file alone, so that a new field in them breaks nothing.

use std::{
    collections::BTreeSet,
    fs,
    io::{Read, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail};
use serde_json::Value;

use super::{
    interrupt::Interrupts,
    outcome::{Reuse, ReuseBucket},
    stage::{self, Stage},
};
use crate::{
    lab::{
        Child, ChildCgroup, Netns,
        manifest::{Endpoint, Folder, Service},
        mounts::BpfFs,
    },
    model::Protocol,
};

/// In the client's namespace, where nobody else is.
const METRICS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9464);
/// How long a start may take.
const START_PATIENCE: Duration = Duration::from_secs(20);
/// How long a change may take to be reported.
const CHANGE_PATIENCE: Duration = Duration::from_secs(10);
/// How long an answer of the command line may take.
const ANSWER_PATIENCE: Duration = Duration::from_secs(5);

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
        agent
            .manifests
            .write("web-service.yaml", &web().to_yaml())?;
        agent
            .manifests
            .write("names-service.yaml", &names().to_yaml())?;
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
        command.args([
            "agent",
            "--mode",
            "balance",
            "--node-name",
            "demo",
            "--source",
        ]);
        command.arg(format!("dir:{}", self.manifests.path().display()));
        command.arg("--cgroup").arg(self.group.path());
        command.arg("--bpffs").arg(&self.pins);
        command.arg("--socket").arg(&self.socket);
        command.args(["--metrics-address", &METRICS.to_string()]);
        self.netns.place(&mut command);
        self.group.place(&mut command)?;
        let child = self
            .child
            .insert(Child::start(&mut command, &self.log).context("start the agent")?);
        let deadline = Instant::now() + START_PATIENCE;
        while !is_ready(&self.netns) {
            self.interrupts.check()?;
            if let Some(status) = child.ended()? {
                bail!(
                    "the agent did not start ({status}): {}",
                    last_words(&self.log)
                );
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
            match self.ask(&["backend", "list", "-o", "json"]) {
                Ok(answer) => found = active_backends(&answer, "web"),
                // It may be busy, or just starting: the deadline decides.
                Err(error) => tracing::debug!(error = %format!("{error:#}"), "no answer yet"),
            }
            if found == wanted {
                return Ok(Instant::now());
            }
            self.interrupts.pass(Duration::from_millis(5))?;
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
        let now = parse_reuse(&self.ask(&["reuse", "-o", "json"])?);
        self.reuse.note_restart(&now);
        Ok(())
    }

    /// Reads the reuse counts since the demo's start.
    pub(super) fn read_reuse(&mut self) -> Result<Reuse> {
        let now = parse_reuse(&self.ask(&["reuse", "-o", "json"])?);
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
            commands.push(format!(
                "nsenter -t {} -m ls -R {}",
                child.pid(),
                self.pins.display()
            ));
        }
        commands
    }

    fn ask(&self, words: &[&str]) -> Result<Value> {
        let mut child = Command::new(&self.program)
            .args(words)
            .arg("--socket")
            .arg(&self.socket)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .context("start the command line")?;
        let mut stdout = child
            .stdout
            .take()
            .context("the command line has no output")?;
        // Read beside the wait: an answer longer than a pipe holds would otherwise never end.
        let reader = std::thread::spawn(move || {
            let mut text = String::new();
            stdout.read_to_string(&mut text).map(|_| text)
        });
        let deadline = Instant::now() + ANSWER_PATIENCE;
        let status = loop {
            if let Some(status) = child.try_wait().context("wait for the command line")? {
                break Some(status);
            }
            if Instant::now() > deadline {
                child.kill().context("kill the command line")?;
                child.wait().context("wait for the command line")?;
                break None;
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        let text = reader
            .join()
            .map_err(|_| anyhow!("the reader of the answer panicked"))?
            .context("read the answer")?;
        let verb = words.join(" ");
        match status {
            Some(status) if status.success() => {
                serde_json::from_str(&text).with_context(|| format!("read the answer to {verb:?}"))
            }
            Some(status) => bail!("{verb:?} ended with {status}"),
            None => bail!("{verb:?} gave no answer in {} s", ANSWER_PATIENCE.as_secs()),
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
    let lines: Vec<_> = text
        .lines()
        .filter(|line| !line.trim().is_empty())
        .collect();
    let last = lines[lines.len().saturating_sub(3)..].join(" / ");
    if last.is_empty() {
        "it said nothing".to_owned()
    } else {
        last
    }
}

/// Finds the active backends of a Service in an answer, whatever the list is called and however it nests.
///
/// A backend is an object with an address (`addr:port` in one field, or an address beside a `port`); its `state`, if it
/// has one, must be `active`; its `service`, if it has one, must end in the Service's name.
fn active_backends(answer: &Value, service: &str) -> BTreeSet<SocketAddr> {
    let mut found = BTreeSet::new();
    collect_backends(answer, service, &mut found);
    // Where the list does not say which Service a backend serves, its port does.
    found.retain(|backend| backend.port() == stage::TARGET);
    found
}

fn collect_backends(value: &Value, service: &str, found: &mut BTreeSet<SocketAddr>) {
    match value {
        Value::Array(items) => items
            .iter()
            .for_each(|item| collect_backends(item, service, found)),
        Value::Object(fields) => {
            let text = |key: &str| fields.get(key).and_then(Value::as_str);
            let foreign =
                text("service").is_some_and(|name| name.rsplit('/').next() != Some(service));
            let idle = text("state").is_some_and(|state| !state.eq_ignore_ascii_case("active"));
            if foreign || idle {
                return;
            }
            let port = fields
                .get("port")
                .and_then(Value::as_u64)
                .and_then(|port| u16::try_from(port).ok());
            for key in ["backend", "address", "addr", "ip"] {
                let Some(text) = text(key) else { continue };
                if let Ok(address) = text.parse::<SocketAddr>() {
                    found.insert(address);
                } else if let (Ok(ip), Some(port)) = (text.parse::<IpAddr>(), port) {
                    found.insert(SocketAddr::new(ip, port));
                }
            }
            fields
                .values()
                .for_each(|field| collect_backends(field, service, found));
        }
        _ => {}
    }
}

/// Reads the answer to `reuse`, however deep its counts lie; what is absent counts nothing.
fn parse_reuse(answer: &Value) -> Reuse {
    let Some(counts) = find_counts(answer) else {
        return Reuse::default();
    };
    let field = |names: &[&str]| names.iter().find_map(|name| counts.get(*name));
    let count = |names: &[&str]| field(names).and_then(Value::as_u64).unwrap_or(0);
    let buckets = field(&["intervals", "histogram"]).and_then(Value::as_array);
    Reuse {
        total: count(&["total"]),
        same_backend: count(&["sameBackend", "same_backend"]),
        moved: count(&["moved"]),
        stale_backend: count(&["staleBackend", "stale_backend"]),
        overlap: count(&["overlap"]),
        histogram: buckets
            .into_iter()
            .flatten()
            .filter_map(|bucket| {
                // The open bucket's edge is no number.
                let edge = bucket.get("upToSeconds").or_else(|| bucket.get("le"));
                let le = edge.and_then(Value::as_f64);
                let count = bucket.get("count")?.as_u64()?;
                Some(ReuseBucket { le, count })
            })
            .collect(),
    }
}

/// The outermost object that has a total.
fn find_counts(value: &Value) -> Option<&Value> {
    match value {
        Value::Object(fields) if fields.contains_key("total") => Some(value),
        Value::Object(fields) => fields.values().find_map(find_counts),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn set(texts: &[&str]) -> BTreeSet<SocketAddr> {
        texts
            .iter()
            .map(|t| t.parse().expect("an address"))
            .collect()
    }

    #[test]
    fn backends_are_found_in_a_flat_list() {
        let answer = json!({"schemaVersion": 1, "backends": [
            {"service": "default/web", "address": "10.244.1.1:8080", "state": "active"},
            {"service": "default/web", "address": "10.244.1.2:8080", "state": "draining"},
            {"service": "default/names", "address": "10.244.1.3:8080", "state": "active"},
        ]});
        assert_eq!(active_backends(&answer, "web"), set(&["10.244.1.1:8080"]));
    }

    #[test]
    fn backends_are_found_below_their_service() {
        let answer = json!([{"service": "web", "backends": [{"ip": "10.244.1.1", "port": 8080}]}]);
        assert_eq!(active_backends(&answer, "web"), set(&["10.244.1.1:8080"]));
    }

    #[test]
    fn reuse_is_read_with_and_without_its_parts() {
        let answer = json!({"schemaVersion": 1, "reuse": {"total": 5, "sameBackend": 2, "moved": 3, "intervals": [
            {"upToSeconds": 1.0, "count": 4}, {"count": 1},
        ]}});
        let reuse = parse_reuse(&answer);
        assert_eq!(
            (reuse.total, reuse.same_backend, reuse.moved, reuse.overlap),
            (5, 2, 3, 0)
        );
        assert_eq!(reuse.histogram.len(), 2);
        assert_eq!(reuse.histogram[1].le, None);
        assert_eq!(parse_reuse(&json!({})), Reuse::default());
    }

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
