//! A lab that stands until it is taken down: `up`, `exec`, `down`.
//!
//! A process of its own holds the lab and listens on a socket; who asks it is told where everything is, or has it taken
//! down. One thread waits inside each namespace, so that `/proc` leads there. The invariant: the lab stands exactly as long
//! as its holder lives, and nobody ever signals a process by a number that was written down.

use std::{
    env, fs,
    io::{self, BufRead, BufReader, Write},
    net::Shutdown,
    os::unix::{
        fs::PermissionsExt,
        net::{UnixListener, UnixStream},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use lb_user::lab::{Netns, mounts::BpfFs};
use nix::{
    sched::{CloneFlags, setns},
    unistd::{gettid, setsid},
};
use serde_json::{Value, json};

use super::Lab;
use crate::{agent::until, interrupt};

/// Where the holder listens.
const SOCKET: &str = "/run/evenkeel-lab.sock";
/// The argument that makes this program the holder.
pub const HOLD: &str = "hold";

/// Builds a lab that stands, and says where everything is.
///
/// # Errors
/// Where one stands already or cannot be built.
pub fn up() -> Result<()> {
    ensure!(
        UnixStream::connect(SOCKET).is_err(),
        "a lab stands already; `evenkeel-lab down` removes it"
    );
    let log = env::temp_dir().join("evenkeel-lab.log");
    let mut holder = start_holder(&log)?;
    let stands = until("the lab to stand", || {
        if let Some(status) = holder.try_wait()? {
            // The reason is its last line; waiting on is of no use.
            return Ok(Err(status));
        }
        ask("places").map(Ok)
    });
    match stands {
        Ok(Ok(places)) => {
            say(&describe(&places));
            Ok(())
        }
        Ok(Err(status)) => {
            let said = fs::read_to_string(&log).unwrap_or_default();
            bail!("the lab could not be built ({status}): {}", said.trim())
        }
        Err(error) => {
            // It is our own child and not yet reaped.
            holder.kill().ok();
            holder.wait().ok();
            Err(error)
        }
    }
}

/// Takes a standing lab down and returns when it is gone.
///
/// # Errors
/// Where none stands.
pub fn down() -> Result<()> {
    let gone = ask("down").context("no lab stands")?;
    say(gone.as_str().unwrap_or("the lab is gone"));
    Ok(())
}

/// Replaces this process by a command inside a place of the standing lab.
///
/// # Errors
/// Where there is no such place, or the command cannot be started.
pub fn exec(place: &str, command: &[String]) -> Result<()> {
    let places = ask("places").context("no lab stands")?;
    let found = &places["places"][place];
    ensure!(
        found.is_object(),
        "no place is called {place}; the places are {}",
        names(&places).join(", ")
    );
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let net = text(&found["netns"]).context("the place has a namespace")?;
    if let Some(cgroup) = text(&found["cgroup"]) {
        fs::write(Path::new(&cgroup).join("cgroup.procs"), "0").with_context(|| format!("enter {cgroup}"))?;
    }
    let mounts = text(&places["mounts"]).context("the holder has mounts")?;
    let mounts = fs::File::open(&mounts).with_context(|| format!("open {mounts}"))?;
    let net = fs::File::open(&net).with_context(|| format!("open {net}"))?;
    setns(net, CloneFlags::CLONE_NEWNET).context("enter the network namespace")?;
    setns(mounts, CloneFlags::CLONE_NEWNS).context("enter the lab's mounts")?;
    let (program, arguments) = command.split_first().context("no command is given")?;
    let mut command = Command::new(program);
    command.args(arguments);
    if let Some(socket) = text(&found["socket"]) {
        command.env("EVENKEEL_SOCKET", socket);
    }
    let error = command.exec();
    Err(error).with_context(|| format!("cannot start {program}"))
}

/// Holds a lab until it is asked to let go, or a signal comes.
///
/// # Errors
/// Where the lab cannot be built.
pub fn hold() -> Result<()> {
    interrupt::catch()?;
    let _mounts = BpfFs::enter_private()?;
    let lab = Lab::new()?;
    lab.start_agents()?;
    let (places, _parked) = park(&lab)?;
    // A holder that was killed left its socket, at which nobody answers.
    fs::remove_file(SOCKET).ok();
    let listener = UnixListener::bind(SOCKET).with_context(|| format!("listen on {SOCKET}"))?;
    fs::set_permissions(SOCKET, fs::Permissions::from_mode(0o600))?;
    listener.set_nonblocking(true)?;
    let asked = serve(&listener, &places);
    fs::remove_file(SOCKET).ok();
    drop(lab);
    if let Some(mut stream) = asked? {
        // Who asked may have gone; the lab has gone either way.
        writeln!(stream, "{}", json!("the lab is gone")).ok();
    }
    Ok(())
}

/// Answers until the lab is to go; then gives the stream of who asked for it, if somebody did.
fn serve(listener: &UnixListener, places: &Value) -> Result<Option<UnixStream>> {
    loop {
        if interrupt::check().is_err() {
            return Ok(None);
        }
        let (mut stream, _) = match listener.accept() {
            Ok(came) => came,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                // Not a wait for anything: how often a signal is looked for.
                thread::sleep(Duration::from_millis(50));
                continue;
            }
            Err(error) => return Err(error).context("listen for commands"),
        };
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(Duration::from_secs(1)))?;
        let mut line = String::new();
        // A client that goes away in the middle is no reason to end.
        if BufReader::new(&stream).read_line(&mut line).is_err() {
            continue;
        }
        if line.trim() == "down" {
            return Ok(Some(stream));
        }
        writeln!(stream, "{places}").ok();
    }
}

/// Lets a thread wait inside each namespace, and says how to get there.
fn park(lab: &Lab) -> Result<(Value, Vec<mpsc::Sender<()>>)> {
    let mut places = json!({});
    let mut parked = Vec::new();
    let pid = std::process::id();
    for (name, node, netns) in lab.places() {
        let (let_go, wait) = mpsc::channel::<()>();
        let thread = wait_inside(netns, wait)?;
        parked.push(let_go);
        places[&name] = json!({"netns": format!("/proc/{pid}/task/{thread}/ns/net")});
        if let Some(node) = node {
            let node = lab.node(node);
            places[&name]["cgroup"] = json!(node.cgroup().path());
            places[&name]["socket"] = json!(node.socket());
        }
    }
    let all = json!({
        "places": places,
        "mounts": format!("/proc/{pid}/ns/mnt"),
        "manifests": lab.manifests().path(),
        "folder": lab.folder(),
    });
    Ok((all, parked))
}

/// Starts a thread that stays in a namespace until its other end is dropped; returns its number.
fn wait_inside(netns: &Netns, wait: mpsc::Receiver<()>) -> Result<i32> {
    let (tell, told) = mpsc::channel();
    let netns = netns.clone();
    thread::Builder::new().name("lab-place".to_owned()).spawn(move || {
        let entered = netns.enter_current_thread().map(|()| gettid().as_raw());
        drop(netns);
        // Who started the thread waits for this; if not, it is of no use.
        if tell.send(entered).is_ok() {
            let _ended = wait.recv();
        }
    })?;
    Ok(told.recv().context("a thread did not start")??)
}

fn start_holder(log: &Path) -> Result<Child> {
    let own: PathBuf = env::current_exe().context("find this program")?;
    let out = fs::File::create(log).with_context(|| format!("create {}", log.display()))?;
    let mut command = Command::new(own);
    command
        .arg(HOLD)
        .stdin(Stdio::null())
        .stdout(out.try_clone()?)
        .stderr(out);
    // SAFETY: between fork and exec the closure makes one system call and allocates nothing.
    unsafe { command.pre_exec(|| Ok(setsid().map(drop)?)) };
    command.spawn().context("start the lab's holder")
}

fn ask(what: &str) -> Result<Value> {
    let mut stream = UnixStream::connect(SOCKET).with_context(|| format!("nobody listens on {SOCKET}"))?;
    writeln!(stream, "{what}")?;
    stream.shutdown(Shutdown::Write)?;
    let mut line = String::new();
    BufReader::new(&stream).read_line(&mut line)?;
    ensure!(!line.is_empty(), "the lab's holder ended without an answer");
    Ok(serde_json::from_str(&line)?)
}

fn names(places: &Value) -> Vec<&str> {
    places["places"]
        .as_object()
        .map(|all| all.keys().map(String::as_str).collect())
        .unwrap_or_default()
}

fn describe(places: &Value) -> String {
    let manifests = places["manifests"].as_str().unwrap_or_default();
    format!(
        "The lab stands. Its places: {}.\n\
         Run a command in one:      cargo xtask lab exec client -- ip address\n\
         Ask an agent:              cargo xtask lab exec node-1 -- evenkeel status\n\
         Give the agents Services:  write manifests into {manifests}\n\
         Take it down:              cargo xtask lab down",
        names(places).join(", ")
    )
}

fn say(text: &str) {
    // Nobody to read it is no reason to stop.
    let _ = writeln!(io::stdout(), "{text}");
}
