//! `evenkeel top` on a pseudo-terminal: it draws, it obeys, and it leaves the terminal as it found it.

#[path = "../src/view/fixture.rs"]
pub mod fixture;

use std::{
    fs::File,
    io::{ErrorKind, Read, Write},
    os::fd::AsFd,
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use fixture::Fixture;
use lb_user::control::{ControlSocket, serve};
use nix::{
    fcntl::{FcntlArg, OFlag, fcntl},
    pty::{OpenptyResult, Winsize, openpty},
    sys::{
        signal::{Signal, kill},
        termios::{LocalFlags, tcgetattr},
    },
    unistd::Pid,
};
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;

/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(20);
/// What a terminal is sent when a program gives its screen back.
const LEAVE: &str = "\u{1b}[?1049l";

/// A program on a terminal of its own.
struct OnTerminal {
    child: Child,
    screen: File,
    /// Held so that the terminal's settings can be read after the program's end.
    terminal: std::os::fd::OwnedFd,
    shown: String,
}

impl OnTerminal {
    fn start(socket: &Path) -> Self {
        let size = Winsize {
            ws_row: 24,
            ws_col: 80,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        let OpenptyResult { master, slave } = openpty(Some(&size), None).expect("a pseudo-terminal");
        fcntl(&master, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).expect("reads that do not wait");
        let end = || Stdio::from(slave.try_clone().expect("a copy"));
        let child = Command::new(env!("CARGO_BIN_EXE_evenkeel"))
            .args(["top", "--socket"])
            .arg(socket)
            .env_clear()
            .env("TERM", "xterm-256color")
            .stdin(end())
            .stdout(end())
            .stderr(end())
            .spawn()
            .expect("the binary runs");
        Self {
            child,
            screen: File::from(master),
            terminal: slave,
            shown: String::new(),
        }
    }

    /// Reads what was drawn until a text is in it.
    fn until(&mut self, wanted: &str) {
        let deadline = Instant::now() + PATIENCE;
        while !self.shown.contains(wanted) {
            assert!(Instant::now() < deadline, "no `{wanted}` in {:?}", self.shown);
            self.read();
        }
    }

    fn read(&mut self) {
        let mut bytes = [0; 4_096];
        match self.screen.read(&mut bytes) {
            Ok(n) => self.shown.push_str(&String::from_utf8_lossy(&bytes[..n])),
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::sleep(Duration::from_millis(5)),
            Err(error) => panic!("{error}"),
        }
    }

    fn type_keys(&mut self, keys: &str) {
        self.screen.write_all(keys.as_bytes()).expect("keys");
    }

    /// True while keys go to the program one by one and unseen.
    fn is_raw(&self) -> bool {
        let settings = tcgetattr(self.terminal.as_fd()).expect("settings");
        !settings.local_flags.intersects(LocalFlags::ICANON | LocalFlags::ECHO)
    }

    fn ended(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            self.read();
            if let Some(status) = self.child.try_wait().expect("a child") {
                // What it said last is still on the way.
                self.until(LEAVE);
                return status;
            }
            assert!(Instant::now() < deadline, "it does not end: {:?}", self.shown);
        }
    }
}

impl Drop for OnTerminal {
    fn drop(&mut self) {
        let _gone = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// An agent that answers from the fixture, at a path.
fn serve_at(path: &Path) -> Runtime {
    let runtime = Runtime::new().expect("a runtime");
    let socket = runtime
        .block_on(async { ControlSocket::open(path) })
        .expect("the socket opens");
    runtime.spawn(serve(
        socket,
        Arc::new(Fixture { ready: true }),
        CancellationToken::new(),
    ));
    runtime
}

#[test]
fn every_way_out_gives_the_terminal_back() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("agent.sock");
    let _agent = serve_at(&path);
    for way in ["q", "\u{3}", "SIGTERM", "SIGINT", "SIGHUP"] {
        let mut top = OnTerminal::start(&path);
        top.until("STARVED");
        assert!(top.is_raw(), "{way}");
        let pid = Pid::from_raw(top.child.id().cast_signed());
        match way {
            "SIGTERM" => kill(pid, Signal::SIGTERM).expect("it lives"),
            "SIGINT" => kill(pid, Signal::SIGINT).expect("it lives"),
            "SIGHUP" => kill(pid, Signal::SIGHUP).expect("it lives"),
            keys => top.type_keys(keys),
        }
        let status = top.ended();
        assert_eq!(status.code(), Some(0), "{way}");
        assert!(!top.is_raw(), "{way}: the terminal is still raw");
    }
}

#[test]
fn it_waits_for_an_agent_and_notes_its_end() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("agent.sock");
    let mut top = OnTerminal::start(&path);
    top.until("UNREACHABLE");
    let agent = serve_at(&path);
    top.until("STARVED");
    top.shown.clear();
    agent.shutdown_timeout(PATIENCE);
    std::fs::remove_file(&path).ok();
    top.until("UNREACHABLE");
    top.type_keys("q");
    assert_eq!(top.ended().code(), Some(0));
}
