//! The real `evenkeel agent`, in a place of its own, driven as a person drives it.
//!
//! A [`Node`] is a network namespace, a cgroup that this process has joined, a folder of manifests and a folder of pins; an
//! [`Agent`] is a running process in it, asked over its control socket and scraped over HTTP. Addresses of backends and
//! frontends are given to the namespace's loopback device. The invariant: dropping both leaves nothing behind, and every
//! wait has a condition and a deadline.

use std::{
    collections::BTreeMap,
    env, fs,
    io::{self, Read, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream},
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Output},
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use lb_user::{
    control,
    lab::{
        Child, ChildCgroup, Netns, Server,
        client::{self, Attempt, Failure, Load, Way},
        link, manifest,
        server::Manner,
    },
    view::{
        Answer, BackendView, MapDumpView, Query, ReuseView, ServiceFilter, ServiceView, StatusView, TableView,
    },
};
use serde_json::Value;

use crate::{objects, runner};

/// How long any condition may take: guests without hardware virtualisation are slow.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// The address of the node, as the agents are told.
pub const NODE_V4: &str = "192.0.2.10";
/// The node's IPv6 address.
pub const NODE_V6: &str = "2001:db8::10";
/// The node's name.
pub const NODE_NAME: &str = "node-a";
/// Where the agent serves metrics and health; the namespace has nobody else.
const METRICS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9975);
const BPFFS: &str = "/sys/fs/bpf";

static NEXT: AtomicU32 = AtomicU32::new(0);

/// A test on a fresh node; the agent's log stands below a failure.
pub fn trial(name: &str, test: impl Fn(&Node) -> Result<()> + Send + Sync + 'static) -> runner::Test {
    runner::test(name, move || {
        let node = Node::new()?;
        test(&node).map_err(|error| error.context(format!("the agent's log:\n{}", node.log())))
    })
}

/// The program under test: `EVENKEEL_BIN`, else the build's own.
pub fn binary() -> PathBuf {
    env::var_os("EVENKEEL_BIN").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/debug/evenkeel"),
        PathBuf::from,
    )
}

/// Asks until there is an answer; an error says what was waited for and what was there last.
///
/// # Errors
/// The last reason once [`PATIENCE`] is over.
pub fn until<T>(what: &str, mut ask: impl FnMut() -> Result<T>) -> Result<T> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match ask() {
            Ok(found) => return Ok(found),
            Err(error) if Instant::now() >= deadline => {
                return Err(error).with_context(|| format!("waited {} s for: {what}", PATIENCE.as_secs()));
            }
            Err(_) => thread::sleep(Duration::from_millis(10)),
        }
    }
}

/// Turns a condition into what [`until`] takes.
///
/// # Errors
/// When it does not hold.
pub fn must(condition: bool, found: impl FnOnce() -> String) -> Result<()> {
    if condition { Ok(()) } else { bail!("{}", found()) }
}

/// A place for an agent.
#[derive(Debug)]
pub struct Node {
    // Dropped in this order: sockets and processes first, then the cgroup, then the folder.
    netns: Netns,
    group: ChildCgroup,
    manifests: manifest::Folder,
    pin_name: String,
    folder: tempfile::TempDir,
}

impl Node {
    /// Makes the place and joins its cgroup.
    ///
    /// # Errors
    /// Where the process may not (root is needed).
    pub fn new() -> Result<Self> {
        let netns = Netns::new()?;
        for address in [NODE_V4, NODE_V6] {
            add_address(&netns, address)?;
        }
        let folder = tempfile::Builder::new().prefix("evenkeel-test-").tempdir()?;
        let manifests = manifest::Folder::new(folder.path().join("manifests"))?;
        let group = ChildCgroup::new("agent")?;
        group.join()?;
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Ok(Self {
            netns,
            group,
            manifests,
            pin_name: format!("test{number}"),
            folder,
        })
    }

    /// The network namespace.
    pub fn netns(&self) -> &Netns {
        &self.netns
    }

    /// The cgroup that the agent attaches to and that this process is in.
    pub fn cgroup(&self) -> &ChildCgroup {
        &self.group
    }

    /// The folder of this test's pins.
    pub fn pins(&self) -> PathBuf {
        Path::new(BPFFS).join(&self.pin_name)
    }

    /// The name of the folder of pins.
    pub fn pin_name(&self) -> &str {
        &self.pin_name
    }

    /// A folder for files of the test.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The folder of manifests.
    pub fn manifests(&self) -> &manifest::Folder {
        &self.manifests
    }

    /// The control socket's path.
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("agent.sock")
    }

    /// What the agents of this node have said so far.
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("agent.log")).unwrap_or_default()
    }

    /// Writes objects into a file of the folder of manifests.
    ///
    /// # Errors
    /// Where the file cannot be written.
    pub fn write(&self, file: &str, items: &[Value]) -> Result<()> {
        Ok(self.manifests.write(file, &objects::documents(items))?)
    }

    /// Gives the namespace addresses of its own.
    ///
    /// # Errors
    /// The kernel's.
    pub fn add_addresses(&self, addresses: &[&str]) -> Result<()> {
        addresses.iter().try_for_each(|address| add_address(&self.netns, address))
    }

    /// Serves TCP port 8080 on addresses, which the namespace is given.
    ///
    /// # Errors
    /// Where an address cannot be bound.
    pub fn serve(&self, addresses: &[&str], manner: Manner) -> Result<Server> {
        self.add_addresses(addresses)?;
        let all: Vec<SocketAddr> = addresses
            .iter()
            .map(|address| Ok(SocketAddr::new(address.parse()?, 8080)))
            .collect::<Result<_>>()?;
        Ok(Server::start(&self.netns, &all, manner)?)
    }

    /// Makes one TCP connection and tells which backend answered.
    ///
    /// # Errors
    /// Where the attempt failed, and how.
    pub fn dial(&self, target: &str) -> Result<SocketAddr, Failure> {
        self.attempt(&Load {
            total: Some(1),
            concurrency: 1,
            ..Load::tcp(parse(target))
        })
        .outcome
    }

    /// Sends one datagram, over a connected socket, and tells which backend answered.
    ///
    /// # Errors
    /// Where the attempt failed, and how.
    pub fn ask_datagram(&self, target: &str) -> Result<SocketAddr, Failure> {
        self.attempt(&Load {
            way: Way::UdpConnected,
            timeout: Duration::from_secs(2),
            ..Load::tcp(parse(target))
        })
        .outcome
    }

    /// Makes one attempt inside the namespace.
    pub fn attempt(&self, load: &Load) -> Attempt {
        self.netns.run(|| client::try_once(load)).expect("root may enter its own namespace")
    }

    /// Opens a TCP connection, which stays until it is dropped.
    ///
    /// # Errors
    /// The connect's.
    pub fn open(&self, target: &str) -> Result<TcpStream> {
        let target = parse(target);
        Ok(self.netns.run(|| client::connect_tcp(target, Duration::from_secs(10)))??)
    }

    /// The backends that answered a number of TCP connections, one after another.
    ///
    /// # Errors
    /// The first attempt that failed.
    pub fn dial_many(&self, target: &str, count: usize) -> Result<BTreeMap<SocketAddr, usize>> {
        let load = Load {
            total: Some(count as u64),
            concurrency: 2,
            ..Load::tcp(parse(target))
        };
        let mut met = BTreeMap::new();
        for attempt in client::Client::start(&self.netns, &load)?.wait() {
            *met.entry(attempt.outcome?).or_default() += 1;
        }
        Ok(met)
    }

    /// The command line that starts an agent here, with further flags.
    pub fn agent_command(&self, flags: &[&str]) -> Command {
        let mut command = self.command(&["agent"]);
        let given = |flag: &str| flags.contains(&flag);
        let mut default = |flag: &str, value: &str| {
            if !given(flag) {
                command.args([flag, value]);
            }
        };
        default("--source", &format!("dir:{}", self.manifests.path().display()));
        default("--cgroup", &self.group.path().display().to_string());
        default("--bpffs", BPFFS);
        default("--pin-name", &self.pin_name);
        default("--node-name", NODE_NAME);
        default("--metrics-address", &METRICS.to_string());
        if !given("--node-address") {
            command.args(["--node-address", NODE_V4, "--node-address", NODE_V6]);
        }
        command.args(flags);
        command
    }

    /// A command line of the program in this namespace and cgroup, asking this node's agent.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(binary());
        command.args(arguments);
        // The agent is what its flags say, whatever the caller's own agent is configured to be.
        for (name, _) in env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("EVENKEEL_")) {
            command.env_remove(name);
        }
        command.env("EVENKEEL_SOCKET", self.socket());
        self.netns.place(&mut command);
        command
    }

    /// Runs a verb to its end.
    ///
    /// # Errors
    /// Where it cannot be started.
    pub fn run(&self, arguments: &[&str]) -> Result<Output> {
        self.command(arguments).output().context("run evenkeel")
    }

    /// Runs an agent that is expected to end by itself, and returns its exit code and what it said.
    ///
    /// # Errors
    /// Where it does not end; it is killed then.
    pub fn run_agent(&self, command: &mut Command) -> Result<(i32, String)> {
        self.group.place(command)?;
        let log = self.folder.path().join(format!("run-{}.log", NEXT.fetch_add(1, Ordering::Relaxed)));
        let mut process = Child::start(command, &log)?;
        let status = until("the process to end", || process.ended()?.context("it still runs"))?;
        let said = fs::read_to_string(&log)?;
        Ok((status.code().context("it was ended by a signal")?, said))
    }

    /// Starts an agent and waits until it is ready.
    ///
    /// # Errors
    /// Where it ends or does not become ready.
    pub fn start(&self, flags: &[&str]) -> Result<Agent> {
        let mut agent = self.launch(flags)?;
        agent.wait_ready()?;
        Ok(agent)
    }

    /// Starts an agent, ready or not.
    ///
    /// # Errors
    /// Where it cannot be started.
    pub fn launch(&self, flags: &[&str]) -> Result<Agent> {
        let mut command = self.agent_command(flags);
        self.group.place(&mut command)?;
        Ok(Agent {
            process: Child::start(&mut command, &self.folder.path().join("agent.log"))?,
            socket: self.socket(),
            netns: self.netns.clone(),
        })
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if thread::panicking() {
            // The panic is reported either way.
            let _ = writeln!(io::stderr(), "--- the agent's log:\n{}", self.log());
        }
    }
}

fn parse(target: &str) -> SocketAddr {
    target.parse().expect("tests name addresses and ports")
}

fn add_address(netns: &Netns, address: &str) -> Result<()> {
    let address: IpAddr = address.parse()?;
    let prefix = if address.is_ipv6() { 128 } else { 32 };
    Ok(link::add_address(netns, "lo", address, prefix)?)
}

/// A running agent; dropping it kills it.
#[derive(Debug)]
pub struct Agent {
    process: Child,
    socket: PathBuf,
    netns: Netns,
}

/// An answer over HTTP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// The status code.
    pub status: u16,
    /// The header lines.
    pub head: String,
    /// The body.
    pub body: String,
}

impl Agent {
    /// Waits until the agent says that it is ready.
    ///
    /// # Errors
    /// Where it ends or does not become ready.
    pub fn wait_ready(&mut self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.process.ended()? {
                bail!("the agent ended ({status})");
            }
            match self.get("/readyz") {
                Ok(page) if page.status == 200 => return Ok(()),
                answer if Instant::now() >= deadline => bail!("the agent is not ready: {answer:?}"),
                _ => thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Kills it without warning.
    ///
    /// # Errors
    /// The kernel's.
    pub fn kill(mut self) -> Result<()> {
        Ok(self.process.kill()?)
    }

    /// Asks it to stop (SIGTERM) and waits for its end.
    ///
    /// # Errors
    /// Where it does not end.
    pub fn terminate(mut self) -> Result<ExitStatus> {
        let raw = i32::try_from(self.pid())?;
        // SAFETY: the child is ours and not yet reaped, so its id is nobody else's.
        must(unsafe { libc::kill(raw, libc::SIGTERM) } == 0, || "no signal could be sent".to_owned())?;
        until("the agent's end", || self.process.ended()?.context("it still runs"))
    }

    /// Stops it by SIGTERM; anything but a clean exit is an error.
    ///
    /// # Errors
    /// Where it does not end, or not with 0.
    pub fn stop(self) -> Result<()> {
        let status = self.terminate()?;
        must(status.success(), || {
            format!("the agent ended with {:?}, signal {:?}", status.code(), status.signal())
        })
    }

    /// Asks a question.
    ///
    /// # Errors
    /// Why there is no answer.
    pub fn ask(&self, query: &Query) -> Result<Answer> {
        Ok(control::ask(&self.socket, query)?)
    }

    /// How it is.
    ///
    /// # Errors
    /// Why there is no answer.
    pub fn status(&self) -> Result<StatusView> {
        match self.ask(&Query::Status {})? {
            Answer::Status(view) => Ok(*view),
            other => bail!("not a status: {other:?}"),
        }
    }

    /// All Services.
    ///
    /// # Errors
    /// Why there is no answer.
    pub fn services(&self) -> Result<Vec<ServiceView>> {
        match self.ask(&Query::Services {
            filter: ServiceFilter::default(),
        })? {
            Answer::ServiceList { items } => Ok(items),
            other => bail!("not Services: {other:?}"),
        }
    }

    /// One Service of the namespace `default`.
    ///
    /// # Errors
    /// Why there is no answer.
    pub fn service(&self, name: &str) -> Result<ServiceView> {
        match self.ask(&Query::Service {
            namespace: "default".to_owned(),
            name: name.to_owned(),
        })? {
            Answer::Service(view) => Ok(*view),
            other => bail!("not a Service: {other:?}"),
        }
    }

    /// All backends.
    ///
    /// # Errors
    /// Why there is no answer.
    pub fn backends(&self) -> Result<Vec<BackendView>> {
        match self.ask(&Query::Backends {
            filter: ServiceFilter::default(),
        })? {
            Answer::BackendList { items } => Ok(items),
            other => bail!("not backends: {other:?}"),
        }
    }

    /// The tables of one Service of the namespace `default`.
    ///
    /// # Errors
    /// Why there is no answer.
    pub fn tables(&self, name: &str) -> Result<Vec<TableView>> {
        match self.ask(&Query::Table {
            namespace: "default".to_owned(),
            name: name.to_owned(),
        })? {
            Answer::TableList { items } => Ok(items),
            other => bail!("not tables: {other:?}"),
        }
    }

    /// Tuple reuse of all Services.
    ///
    /// # Errors
    /// Why there is no answer.
    pub fn reuse(&self) -> Result<ReuseView> {
        match self.ask(&Query::Reuse {
            filter: ServiceFilter::default(),
        })? {
            Answer::Reuse(view) => Ok(view),
            other => bail!("not reuse: {other:?}"),
        }
    }

    /// A map's contents.
    ///
    /// # Errors
    /// Why there is no answer.
    pub fn dump(&self, map: &str) -> Result<MapDumpView> {
        match self.ask(&Query::MapDump { name: map.to_owned() })? {
            Answer::MapDump(view) => Ok(view),
            other => bail!("not a map: {other:?}"),
        }
    }

    /// The contents of the maps that hold the desired state, by map: equal dumps are an unchanged kernel.
    ///
    /// # Errors
    /// Why there is no answer.
    pub fn dump_state(&self) -> Result<BTreeMap<&'static str, MapDumpView>> {
        ["FRONTENDS", "SETS", "LISTS", "TABLES", "BACKENDS", "MEMBERS"]
            .into_iter()
            .map(|map| Ok((map, self.dump(map)?)))
            .collect()
    }

    /// Waits until the backends that may get connections are exactly these (addresses of port 8080), over all Services.
    ///
    /// # Errors
    /// What there is instead.
    pub fn wait_backends(&self, addresses: &[&str]) -> Result<()> {
        let mut wanted: Vec<IpAddr> = addresses.iter().map(|text| Ok(text.parse()?)).collect::<Result<_>>()?;
        wanted.sort();
        until("these backends", || {
            let mut found: Vec<IpAddr> = self
                .backends()?
                .iter()
                .filter(|backend| backend.weight > 0)
                .map(|backend| backend.addr)
                .collect();
            found.sort();
            must(found == wanted, || format!("{found:?} are active, and not {wanted:?}"))
        })
    }

    /// Fetches a page of the metrics address.
    ///
    /// # Errors
    /// Where nobody answers.
    pub fn get(&self, path: &str) -> Result<Page> {
        let ask = || -> io::Result<String> {
            let mut stream = TcpStream::connect_timeout(&METRICS, Duration::from_secs(2))?;
            stream.set_read_timeout(Some(Duration::from_secs(10)))?;
            write!(stream, "GET {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n")?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer)?;
            Ok(answer)
        };
        let answer = self.netns.run(ask)??;
        let (head, body) = answer.split_once("\r\n\r\n").context("an answer without an end of its head")?;
        let status = head.split(' ').nth(1).context("no status")?.parse()?;
        Ok(Page {
            status,
            head: head.to_owned(),
            body: body.to_owned(),
        })
    }

    /// Every series of a scrape with its value, by its text such as `name{label="x"}`.
    ///
    /// # Errors
    /// Where the scrape fails or a line is not a sample.
    pub fn metrics(&self) -> Result<BTreeMap<String, f64>> {
        let page = self.get("/metrics")?;
        must(page.status == 200, || format!("{page:?}"))?;
        page.body
            .lines()
            .filter(|line| !line.is_empty() && !line.starts_with('#'))
            .map(|line| {
                let (series, value) = line.rsplit_once(' ').with_context(|| format!("not a sample: {line}"))?;
                Ok((series.to_owned(), value.parse()?))
            })
            .collect()
    }
}
