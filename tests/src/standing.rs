//! Something that stands until it is taken down: `up`, `exec`, `down`.
//!
//! A process of its own holds it and listens on a socket; who asks it is told where everything is, or has it taken down. One
//! thread waits inside each namespace, so that `/proc` leads there. The invariant: it stands exactly as long as its holder
//! lives, and nobody ever signals a process by a number that was written down.

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
use lb_user::lab::Netns;
use nix::{
    sched::{CloneFlags, setns},
    unistd::{gettid, setsid},
};
use serde_json::{Map, Value, json};

use crate::{agent::until, command_line::say, interrupt};

/// The argument that makes a program the holder.
pub const HOLD: &str = "hold";

/// What stands, or may.
#[derive(Clone, Copy, Debug)]
pub struct Standing {
    /// What people call it.
    pub name: &'static str,
    /// Where its holder listens.
    pub socket: &'static str,
    /// The file of the temporary folder in which its holder says what goes wrong.
    pub log: &'static str,
    /// The task by which people drive it.
    pub task: &'static str,
}

/// A place that a person can enter.
#[derive(Clone, Debug)]
pub struct Place {
    /// Its name.
    pub name: String,
    /// Its network namespace.
    pub netns: Netns,
    /// Its cgroup, if it has one of its own.
    pub cgroup: Option<PathBuf>,
    /// What commands in it find in their environment.
    pub environment: Vec<(&'static str, String)>,
}

impl Standing {
    /// Starts a holder and returns what it says of where everything is.
    ///
    /// # Errors
    /// Where one stands already or cannot be built.
    pub fn up(&self) -> Result<Value> {
        ensure!(
            UnixStream::connect(self.socket).is_err(),
            "a {} stands already; `{} down` removes it",
            self.name,
            self.task
        );
        let log = env::temp_dir().join(self.log);
        let mut holder = start_holder(&log)?;
        let stands = until(&format!("the {} to stand", self.name), || {
            if let Some(status) = holder.try_wait()? {
                // The reason is its last line; waiting on is of no use.
                return Ok(Err(status));
            }
            self.ask("places").map(Ok)
        });
        match stands {
            Ok(Ok(places)) => Ok(places),
            Ok(Err(status)) => {
                let said = fs::read_to_string(&log).unwrap_or_default();
                bail!("the {} could not be built ({status}): {}", self.name, said.trim())
            }
            Err(error) => {
                // It is our own child and not yet reaped.
                holder.kill().ok();
                holder.wait().ok();
                Err(error)
            }
        }
    }

    /// Takes what stands down and returns when it is gone.
    ///
    /// # Errors
    /// Where nothing stands.
    pub fn down(&self) -> Result<()> {
        let gone = self.ask("down").with_context(|| format!("no {} stands", self.name))?;
        say(gone.as_str().unwrap_or("it is gone"));
        Ok(())
    }

    /// Replaces this process by a command inside a place of what stands.
    ///
    /// # Errors
    /// Where there is no such place, or the command cannot be started.
    pub fn exec(&self, place: &str, command: &[String]) -> Result<()> {
        let places = self.ask("places").with_context(|| format!("no {} stands", self.name))?;
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
        setns(mounts, CloneFlags::CLONE_NEWNS).context("enter its mounts")?;
        let (program, arguments) = command.split_first().context("no command is given")?;
        let mut command = Command::new(program);
        command.args(arguments);
        for (name, value) in found["environment"].as_object().into_iter().flatten() {
            if let Some(value) = value.as_str() {
                command.env(name, value);
            }
        }
        let error = command.exec();
        Err(error).with_context(|| format!("cannot start {program}"))
    }

    /// Says where everything is until it is to go, or a signal comes, and then lets go of what stands.
    ///
    /// `status` answers who asks how it is.
    ///
    /// # Errors
    /// Where nobody can be listened to.
    pub fn serve<T>(
        &self,
        held: T,
        places: &[Place],
        further: Map<String, Value>,
        status: impl Fn(&T) -> Value,
    ) -> Result<()> {
        let (mut told, _parked) = park(places)?;
        for (name, value) in further {
            told[name] = value;
        }
        // A holder that was killed left its socket, at which nobody answers.
        fs::remove_file(self.socket).ok();
        let listener = UnixListener::bind(self.socket).with_context(|| format!("listen on {}", self.socket))?;
        fs::set_permissions(self.socket, fs::Permissions::from_mode(0o600))?;
        listener.set_nonblocking(true)?;
        let asked = answer(&listener, &told, || status(&held));
        fs::remove_file(self.socket).ok();
        drop(held);
        if let Some(mut stream) = asked? {
            // Who asked may have gone; it has gone either way.
            writeln!(stream, "{}", json!(format!("the {} is gone", self.name))).ok();
        }
        Ok(())
    }

    /// Asks the holder.
    ///
    /// # Errors
    /// Where none answers.
    pub fn ask(&self, what: &str) -> Result<Value> {
        let mut stream =
            UnixStream::connect(self.socket).with_context(|| format!("nobody listens on {}", self.socket))?;
        writeln!(stream, "{what}")?;
        stream.shutdown(Shutdown::Write)?;
        let mut line = String::new();
        BufReader::new(&stream).read_line(&mut line)?;
        ensure!(!line.is_empty(), "the holder ended without an answer");
        Ok(serde_json::from_str(&line)?)
    }
}

/// Answers until it is to go; then gives the stream of who asked for it, if somebody did.
fn answer(listener: &UnixListener, places: &Value, status: impl Fn() -> Value) -> Result<Option<UnixStream>> {
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
        match line.trim() {
            "down" => return Ok(Some(stream)),
            "status" => writeln!(stream, "{}", status()).ok(),
            _ => writeln!(stream, "{places}").ok(),
        };
    }
}

/// Lets a thread wait inside each namespace, and says how to get there.
fn park(places: &[Place]) -> Result<(Value, Vec<mpsc::Sender<()>>)> {
    let mut told = json!({});
    let mut parked = Vec::new();
    let pid = std::process::id();
    for place in places {
        let (let_go, wait) = mpsc::channel::<()>();
        let thread = wait_inside(&place.netns, wait)?;
        parked.push(let_go);
        let environment: Map<String, Value> = place
            .environment
            .iter()
            .map(|(name, value)| ((*name).to_owned(), json!(value)))
            .collect();
        told[&place.name] = json!({
            "netns": format!("/proc/{pid}/task/{thread}/ns/net"),
            "cgroup": place.cgroup,
            "environment": environment,
        });
    }
    let all = json!({
        "places": told,
        "mounts": format!("/proc/{pid}/ns/mnt"),
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
    command.spawn().context("start the holder")
}

/// The names of all places.
pub fn names(places: &Value) -> Vec<&str> {
    places["places"]
        .as_object()
        .map(|all| all.keys().map(String::as_str).collect())
        .unwrap_or_default()
}
