//! The real `evenkeel agent`, in a place of its own, driven as a person drives it.
//!
//! A [`Node`] is a network namespace, a cgroup that this process has joined, a folder of manifests and a folder of pins; an
//! [`Agent`] is a running process in it, asked over its control socket and scraped over HTTP. Addresses of backends and
//! frontends are given to the namespace's loopback device. The invariant: dropping both leaves nothing behind, and every
//! wait has a condition and a deadline.

mod process;
pub mod web;

use std::{
    collections::BTreeMap,
    env, fs,
    io::{self, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use lb_common::abi::ABI_VERSION;
use lb_user::lab::{
    Child, ChildCgroup, Netns, Server, child,
    client::{self, Attempt, Failure, Load, Way},
    link, manifest,
    server::Manner,
};
use serde_json::Value;

use crate::{interrupt, objects, runner};

pub use self::process::{Agent, Page};

/// How long any condition may take on a machine; see [`patience`].
const PATIENCE: Duration = Duration::from_mins(1);
/// The address of the node, as the agents are told.
pub const NODE_V4: &str = "192.0.2.10";
/// The node's IPv6 address.
pub const NODE_V6: &str = "2001:db8::10";
/// The node's name.
pub const NODE_NAME: &str = "node-a";
/// Where the agent serves metrics and health; the namespace has nobody else.
pub const METRICS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9975);
const BPFFS: &str = "/sys/fs/bpf";

static NEXT: AtomicU32 = AtomicU32::new(0);

/// A test on a fresh node; the agent's log stands below a failure.
pub fn trial(name: &str, test: impl Fn(&Node) -> Result<()> + Send + Sync + 'static) -> runner::Test {
    runner::test(name, move || {
        let node = Node::new()?;
        test(&node).map_err(|error| runner::with_log(error, || node.log()))
    })
}

/// The program under test: `EVENKEEL_BIN`, else the build's own.
pub fn binary() -> PathBuf {
    env::var_os("EVENKEEL_BIN").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/debug/evenkeel"),
        PathBuf::from,
    )
}

/// How long any condition may take here. A guest verifies programs at a fiftieth of the speed, and slower where its machine has other work.
pub fn patience() -> Duration {
    PATIENCE * if runner::in_guest() { 3 } else { 1 }
}

/// Asks until there is an answer; an error says what was waited for and what was there last.
///
/// # Errors
/// The last reason once [`patience`] is over.
pub fn until<T>(what: &str, mut ask: impl FnMut() -> Result<T>) -> Result<T> {
    let patience = patience();
    let deadline = Instant::now() + patience;
    loop {
        match ask() {
            Ok(found) => return Ok(found),
            Err(error) if Instant::now() >= deadline => {
                return Err(error).with_context(|| format!("waited {} s for: {what}", patience.as_secs()));
            }
            Err(_) => thread::sleep(Duration::from_millis(10)),
        }
        interrupt::check()?;
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

    /// The folder of the pins of this build's own version.
    pub fn own_pins(&self) -> PathBuf {
        self.pins().join(ABI_VERSION.to_string())
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
        addresses
            .iter()
            .try_for_each(|address| add_address(&self.netns, address))
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
    ///
    /// # Panics
    /// Where the process may not enter its own namespace; it has made it.
    pub fn attempt(&self, load: &Load) -> Attempt {
        self.netns
            .run(|| client::try_once(load))
            .expect("root may enter its own namespace")
    }

    /// Opens a TCP connection, which stays until it is dropped.
    ///
    /// # Errors
    /// The connect's.
    pub fn open(&self, target: &str) -> Result<TcpStream> {
        let target = parse(target);
        Ok(self
            .netns
            .run(|| client::connect_tcp(target, Duration::from_secs(10)))??)
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
        if runner::in_guest() {
            // Maps are filled when they are made: emulated, the ordinary sizes take longer than all else of a start.
            for (flag, entries) in [
                ("--max-frontends", "4096"),
                ("--max-backends", "4096"),
                ("--max-sockets", "4096"),
                ("--max-flows", "16384"),
            ] {
                default(flag, entries);
            }
        }
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
        child::forget_configuration(&mut command);
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

    /// Removes what a stopped agent left in the kernel; gives what the verb said.
    ///
    /// # Errors
    /// Where the verb fails, with what it said.
    pub fn cleanup(&self) -> Result<String> {
        let output = self.run(&["cleanup", "--pin-name", &self.pin_name])?;
        must(output.status.success(), || format!("{output:?}"))?;
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Runs an agent that is expected to end by itself, and returns its exit code and what it said.
    ///
    /// # Errors
    /// Where it does not end; it is killed then.
    pub fn run_agent(&self, command: &mut Command) -> Result<(i32, String)> {
        self.group.place(command)?;
        let log = self
            .folder
            .path()
            .join(format!("run-{}.log", NEXT.fetch_add(1, Ordering::Relaxed)));
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
        Agent::start(
            &mut command,
            &self.folder.path().join("agent.log"),
            self.socket(),
            &self.netns,
        )
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if thread::panicking() {
            // The panic is reported either way.
            let _ = writeln!(io::stderr(), "--- the agent's log:\n{}", self.log());
        }
        // A balancing agent's maps outlive it by their pins: some 90 MB a test, which a guest has not for all of a suite's.
        let _gone = fs::remove_dir_all(self.pins());
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
