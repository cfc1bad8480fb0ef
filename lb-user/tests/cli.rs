//! The binary as people run it: its exit codes, its sentences, and a whole question over a real socket.

#[path = "../src/view/fixture.rs"]
pub mod fixture;

use std::{
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::Arc,
    time::{Duration, Instant},
};

use fixture::Fixture;
use lb_user::{
    control::{ControlSocket, serve},
    datapath::pins::Pins,
};
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;

/// Runs `evenkeel` with nothing of this process's environment but the path.
fn evenkeel(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_evenkeel"));
    command.args(args).env_clear();
    if let Some(path) = std::env::var_os("PATH") {
        command.env("PATH", path);
    }
    command.output().expect("the binary runs")
}

fn code(output: &Output) -> Option<i32> {
    output.status.code()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("text")
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("text")
}

/// An agent that answers from the fixture.
struct Served {
    folder: TempDir,
    _runtime: Runtime,
}

impl Served {
    fn start(ready: bool) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let runtime = Runtime::new().expect("a runtime");
        let socket = runtime
            .block_on(async { ControlSocket::open(&folder.path().join("agent.sock")) })
            .expect("the socket opens");
        runtime.spawn(serve(socket, Arc::new(Fixture { ready }), CancellationToken::new()));
        Self {
            folder,
            _runtime: runtime,
        }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("agent.sock")
    }

    fn ask(&self, args: &[&str]) -> Output {
        let path = self.path();
        let socket = path.to_str().expect("text");
        evenkeel(&[&["--socket", socket], args].concat())
    }
}

#[test]
fn without_an_agent_every_question_ends_with_three_and_one_sentence() {
    for args in [
        &["status"][..],
        &["service", "list"],
        &["service", "get", "web"],
        &["backend", "list"],
        &["conn", "list"],
        &["reuse"],
        &["diagnose"],
        &["observe", "-f"],
        &["graph", "-o", "dot"],
        &["table", "get", "web"],
        &["explain", "10.0.0.1", "10.96.0.1:80"],
        &["map", "list"],
        &["map", "dump", "FRONTENDS"],
        &["report", "--svg", "-"],
        &["top"],
        &["top", "--once"],
    ] {
        let output = evenkeel(&[&["--socket", "/nonexistent/agent.sock"], args].concat());
        let said = stderr(&output);
        assert_eq!(code(&output), Some(3), "{args:?}: {said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(said.contains("/nonexistent/agent.sock"), "{said}");
        assert!(stdout(&output).is_empty());
    }
}

#[test]
fn bad_flags_end_with_two_and_name_the_flag_and_what_is_allowed() {
    for (args, words) in [
        (
            &["agent", "--source", "ftp:x"][..],
            &["--source", "ftp:x", "wanted dir:PATH or kube"][..],
        ),
        (&["agent"], &["--source"]),
        (
            &["agent", "--source", "dir:/nonexistent"],
            &["--source", "/nonexistent", "exists"],
        ),
        (
            &["agent", "--source", "kube", "--mode", "both"],
            &["--mode", "both", "balance, observe"],
        ),
        (
            &["agent", "--source", "kube", "--metrics-address", "nine"],
            &["--metrics-address", "nine", "ADDR:PORT", "none"],
        ),
        (
            &["agent", "--source", "kube", "--max-backends", "0"],
            &["--max-backends", "'0'", "1 to"],
        ),
        (
            &["agent", "--source", "kube", "--pin-name", "../x"],
            &["--pin-name", "../x", "letters"],
        ),
        (
            &["agent", "--source", "kube", "--reuse-horizon", "0"],
            &["--reuse-horizon", "'0'", "1 to 3600"],
        ),
        (
            &["agent", "--source", "kube", "--nodeport-addresses", "some"],
            &["--nodeport-addresses", "some", "primary, all"],
        ),
        (
            &["agent", "--source", "kube", "--node-address", "x"],
            &["--node-address", "'x'"],
        ),
        (
            &["agent", "--source", "kube", "--cgroup", "/proc"],
            &["--cgroup", "/proc", "cgroup v2"],
        ),
        (
            &["agent", "--source", "kube", "--external-ips", "maybe"],
            &["--external-ips", "maybe", "true, false"],
        ),
        (
            &["explain", "10.0.0.1", "10.96.0.1"],
            &["VIP:PORT", "10.96.0.1", "ADDR:PORT"],
        ),
        (&["explain", "10.0.0.1", "10.96.0.1:0"], &["VIP:PORT", "10.96.0.1:0"]),
        (&["service", "get", "A/B"], &["SERVICE", "A/B", "NAMESPACE/NAME"]),
        (&["backend", "list", "web", "-n", "shop"], &["--namespace"]),
        (&["report"], &["--html", "--svg", "-o json"]),
        (&["report", "-o", "wide"], &["--output", "json"]),
        (&["report", "--svg", "-", "web", "-n", "shop"], &["--namespace"]),
        (&["top", "--interval", "0"], &["--interval", "'0'"]),
        (&["top", "-o", "json"], &["--output", "report -o json"]),
        (&["status", "-o", "xml"], &["--output", "xml", "json"]),
        (&["status", "--timeout", "5"], &["--wait"]),
        (
            &["status", "-o", "dot"],
            &["--output dot", "graph", "table, wide, json"],
        ),
        (
            &["diagnose", "-o", "istio-sidecar"],
            &["--output istio-sidecar", "graph"],
        ),
        (&["diagnose", "web", "--all"], &["--all"]),
        (&["observe", "-o", "yaml"], &["--output", "table, wide and json"]),
        (
            &["observe", "--outcome", "lost"],
            &["--outcome", "lost", "timed_out", "same_backend"],
        ),
        (
            &["observe", "--type", "party"],
            &["--type", "party", "connection, reuse, alarm"],
        ),
        (
            &["observe", "--backend", "10.0.0.300"],
            &["--backend", "10.0.0.300", "ADDR:PORT"],
        ),
        (
            &["observe", "--client", "10.0.0.300"],
            &["--client", "10.0.0.300", "NAMESPACE/NAME"],
        ),
        (&["observe", "--last", "5"], &["--from"]),
        (&["observe", "--count", "0"], &["--count", "'0'"]),
        (&["observe", "-f", "--from", "x"], &["--from"]),
        (
            &["observe", "--from", "/nonexistent"],
            &["--from /nonexistent", "No such file"],
        ),
        (
            &["graph", "--cluster-domain", "A"],
            &["--cluster-domain", "`A`", "cluster.local"],
        ),
        (
            &["graph", "--extra-host", "x"],
            &["--extra-host", "`x`", "istio-system/*"],
        ),
        (&["conjure"], &["conjure"]),
        (&[], &["Usage"]),
    ] {
        let output = evenkeel(args);
        let said = stderr(&output);
        assert_eq!(code(&output), Some(2), "{args:?}: {said}");
        for word in words {
            assert!(said.contains(word), "{args:?}: `{word}` is not in: {said}");
        }
    }
}

#[test]
fn an_agent_answers_over_its_socket() {
    let served = Served::start(true);
    let listed = served.ask(&["service", "list", "-n", "shop", "--no-headers"]);
    assert_eq!(code(&listed), Some(0), "{}", stderr(&listed));
    assert!(stdout(&listed).starts_with("shop   web"), "{}", stdout(&listed));

    let got = stdout(&served.ask(&["service", "get", "shop/web"]));
    assert!(got.contains("10.96.7.7:80") && got.contains("[fd00::7]:8080"), "{got}");

    let json = served.ask(&["reuse", "-o", "json"]);
    let value: serde_json::Value = serde_json::from_slice(&json.stdout).expect("JSON");
    assert_eq!(
        (value["schemaVersion"].as_u64(), value["sameBackend"].as_u64()),
        (Some(1), Some(640))
    );

    let names = stdout(&served.ask(&["backend", "list", "shop/web", "-o", "name"]));
    assert_eq!(
        names,
        "backend/10.244.1.5:8080/TCP\nbackend/10.244.1.6:8080/TCP\nbackend/[fd00::7]:8080/TCP\n"
    );
}

#[test]
fn a_diagnosis_ends_with_one_where_something_is_starved() {
    let served = Served::start(true);
    let output = served.ask(&["diagnose"]);
    assert_eq!(code(&output), Some(1), "{}", stderr(&output));
    let text = stdout(&output);
    assert!(text.contains("\nstarved   shop/web   http/TCP/IPv4/cluster"), "{text}");
    assert!(text.contains("\nshop/web http/TCP/IPv4/cluster: STARVED\n"), "{text}");
    let last = text.trim_end().lines().last().expect("a line");
    assert_eq!(last, "  1. Set net.ipv4.vs.conn_reuse_mode to 1.");

    let idle = served.ask(&["diagnose", "dns"]);
    assert_eq!(code(&idle), Some(0), "{}", stderr(&idle));
    assert!(stdout(&idle).starts_with("default/dns dns/UDP/IPv4/cluster: NO TRAFFIC\n"));

    let json = served.ask(&["diagnose", "shop/web", "-o", "json"]);
    assert_eq!(code(&json), Some(1));
    let value: serde_json::Value = serde_json::from_slice(&json.stdout).expect("JSON");
    assert_eq!(value["items"][0]["starved"][0]["cause"], "port_reuse");
    assert_eq!(
        stdout(&served.ask(&["diagnose", "-o", "name"])),
        "diagnosis/shop/web/http/TCP/IPv4/cluster\ndiagnosis/default/dns/dns/UDP/IPv4/cluster\n"
    );
}

#[test]
fn events_are_followed_counted_filtered_and_replayed() {
    let served = Served::start(true);
    let four = served.ask(&["observe", "--count", "4"]);
    assert_eq!(code(&four), Some(0), "{}", stderr(&four));
    assert_eq!(stdout(&four).lines().count(), 4);

    let refused = served.ask(&["observe", "-f", "shop/web", "--outcome", "failed", "--count", "1"]);
    assert_eq!(code(&refused), Some(0), "{}", stderr(&refused));
    assert!(stdout(&refused).contains("refused (errno 111)"), "{}", stdout(&refused));

    // The fixture's stream ends, as that of an agent that is stopped does.
    let ended = served.ask(&["observe", "-f", "-o", "json"]);
    assert_eq!(code(&ended), Some(3));
    assert!(stderr(&ended).contains("it ended the stream"), "{}", stderr(&ended));
    assert_eq!(stdout(&ended).lines().count(), 4);

    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("events.jsonl");
    std::fs::write(&file, [&ended.stdout[..], b"{}\n"].concat()).expect("a file");
    let path = file.to_str().expect("text");
    let replayed = evenkeel(&["observe", "--from", path, "--type", "alarm"]);
    assert_eq!(code(&replayed), Some(1), "for the line that is no event");
    let said = stderr(&replayed);
    assert!(
        said.contains(path) && said.contains("line 5") && said.contains("schemaVersion"),
        "{said}"
    );
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(
        stdout(&replayed).contains("ALARM [fd00::7]:8080"),
        "{}",
        stdout(&replayed)
    );
    assert_eq!(stdout(&replayed).lines().count(), 1);

    let mut child = Command::new(env!("CARGO_BIN_EXE_evenkeel"))
        .args(["observe", "--from", "-", "-o", "json"])
        .stdin(std::fs::File::open(&file).expect("the file"))
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::null())
        .spawn()
        .expect("the binary runs");
    let mut again = Vec::new();
    std::io::Read::read_to_end(&mut child.stdout.take().expect("a pipe"), &mut again).expect("text");
    assert_eq!(child.wait().expect("it ends").code(), Some(1));
    assert_eq!(again, ended.stdout);
}

#[test]
fn the_graph_has_forms_of_its_own() {
    let served = Served::start(true);
    let table = stdout(&served.ask(&["graph", "-n", "shop"]));
    assert!(
        table.contains("shop/nginx") && !table.contains("default/dns"),
        "{table}"
    );
    let dot = served.ask(&["graph", "-o", "dot"]);
    assert_eq!(code(&dot), Some(0), "{}", stderr(&dot));
    assert!(stdout(&dot).starts_with("digraph evenkeel {\n"), "{}", stdout(&dot));
    let domain = ["graph", "-o", "istio-sidecar", "--cluster-domain", "corp.example"];
    let sidecars = stdout(&served.ask(&domain));
    assert!(sidecars.contains("shop/web.shop.svc.corp.example"), "{sidecars}");
    assert!(sidecars.contains("istio-system/*"), "{sidecars}");
    let bare = stdout(&served.ask(&[&domain[..], &["--extra-host", "none"]].concat()));
    assert!(!bare.contains("istio-system/*"), "{bare}");
}

#[test]
fn a_report_is_written_printed_and_drawn_again() {
    let served = Served::start(true);
    let at = |name: &str| served.folder.path().join(name);
    let path = |name: &str| at(name).to_str().expect("text").to_owned();
    let (page, picture, saved, again) = (path("a.html"), path("a.svg"), path("a.json"), path("b.html"));

    let written = served.ask(&["report", "--html", &page, "--svg", &picture]);
    assert_eq!((code(&written), stdout(&written).as_str()), (Some(0), ""));
    let said = stderr(&written);
    let lines: Vec<&str> = said.lines().collect();
    assert!(
        lines[0].starts_with(&format!("evenkeel: wrote {page} (1 Service, ")),
        "{said}"
    );
    assert!(
        lines[1].starts_with(&format!("evenkeel: wrote {picture} (1 Service, ")),
        "{said}"
    );
    let html = std::fs::read_to_string(at("a.html")).expect("a page");
    assert!(html.starts_with("<!DOCTYPE html>") && html.contains("shop/web: one endpoint is starved"));
    assert!(
        std::fs::read_to_string(at("a.svg"))
            .expect("a drawing")
            .starts_with("<svg ")
    );

    let printed = served.ask(&["report", "-o", "json"]);
    let value: serde_json::Value = serde_json::from_slice(&printed.stdout).expect("JSON");
    assert_eq!(
        (value["schemaVersion"].as_u64(), value["kind"].as_str()),
        (Some(1), Some("Report"))
    );
    std::fs::write(at("a.json"), &printed.stdout).expect("a file");
    // A saved report needs no agent, and looks the same.
    let drawn = evenkeel(&["report", "--from", &saved, "--html", &again]);
    assert_eq!(code(&drawn), Some(0), "{}", stderr(&drawn));
    assert_eq!(std::fs::read_to_string(at("b.html")).expect("a page"), html);
    let other = evenkeel(&["report", "shop/other", "--from", &saved, "--html", "-"]);
    assert!(stdout(&other).contains("No Service had traffic on this node"));

    std::fs::write(at("bad.json"), "{\"schemaVersion\": 1,\n  \"kind\": \"Report\"}").expect("a file");
    std::fs::write(
        at("old.json"),
        "{\"schemaVersion\": 7, \"kind\": \"MapList\", \"items\": []}",
    )
    .expect("a file");
    std::fs::write(
        at("maps.json"),
        "{\"schemaVersion\": 1, \"kind\": \"MapList\", \"items\": []}",
    )
    .expect("a file");
    for (name, words, wanted) in [
        ("bad.json", "missing field", 2),
        ("old.json", "schemaVersion 7", 2),
        ("maps.json", "another kind", 2),
        ("none.json", "No such file", 1),
    ] {
        let output = evenkeel(&["report", "--from", &path(name), "--svg", "-"]);
        let said = stderr(&output);
        assert_eq!(code(&output), Some(wanted), "{said}");
        assert!(said.contains(&path(name)) && said.contains(words), "{said}");
    }
    let nowhere = served.ask(&["report", "--svg", "/nonexistent/a.svg"]);
    assert_eq!(code(&nowhere), Some(1));
    assert!(stderr(&nowhere).contains("/nonexistent/a.svg"));
}

#[test]
fn top_without_a_terminal_prints_one_screen() {
    let served = Served::start(true);
    for args in [&["top"][..], &["top", "--once"]] {
        let output = served.ask(args);
        assert_eq!(code(&output), Some(0), "{}", stderr(&output));
        let text = stdout(&output);
        assert_eq!(text.lines().count(), 24, "{text}");
        assert!(
            text.contains("shop/web") && text.contains("STARVED") && !text.contains('\x1b'),
            "{text}"
        );
    }
}

#[test]
fn what_does_not_exist_ends_with_one() {
    let served = Served::start(true);
    for (args, what) in [
        (&["service", "get", "shop/none"][..], "Service shop/none"),
        (&["diagnose", "shop/none"], "Service shop/none"),
        (&["table", "get", "none"], "Service default/none"),
        (&["map", "dump", "nothing"], "map nothing"),
    ] {
        let output = served.ask(args);
        assert_eq!(code(&output), Some(1), "{args:?}");
        assert!(stderr(&output).contains(what), "{}", stderr(&output));
    }
}

#[test]
fn status_waits_for_readiness_and_gives_up_in_time() {
    // The fixture has a program that is not attached, so its status is never fine.
    let served = Served::start(true);
    let begun = Instant::now();
    let output = served.ask(&["status", "--wait", "--timeout", "1"]);
    assert_eq!(code(&output), Some(1));
    assert!(begun.elapsed() >= Duration::from_secs(1));
    assert!(stdout(&output).contains("shop/web, which is older"));
    let nobody = evenkeel(&[
        "--socket",
        "/nonexistent/agent.sock",
        "status",
        "--wait",
        "--timeout",
        "0",
    ]);
    assert_eq!(code(&nobody), Some(3));
}

#[test]
fn cleanup_refuses_beside_an_agent_and_removes_what_is_left() {
    let root = tempfile::tempdir().expect("a folder");
    let pins = root.path().join("evenkeel");
    std::fs::create_dir_all(pins.join("1")).expect("folders");
    std::fs::write(pins.join("1/link-connect4"), "").expect("a file");
    let bpffs = root.path().to_str().expect("text");

    // As an agent does for as long as it lives.
    let lock = Pins::new(root.path(), "evenkeel").lock().expect("nobody else has it");
    let refused = evenkeel(&["cleanup", "--bpffs", bpffs]);
    assert_eq!(code(&refused), Some(1));
    assert!(stderr(&refused).contains("stop it first"), "{}", stderr(&refused));
    assert!(pins.join("1/link-connect4").exists());
    drop(lock);

    let args = ["cleanup", "--bpffs", bpffs];
    let planned = evenkeel(&[&args[..], &["--dry-run"]].concat());
    assert!(stdout(&planned).starts_with("would remove "), "{}", stdout(&planned));
    assert!(pins.exists());
    let done = evenkeel(&args);
    assert_eq!(code(&done), Some(0), "{}", stderr(&done));
    assert!(!pins.exists() && Path::new(bpffs).exists());
    assert_eq!(stdout(&evenkeel(&args)), "nothing to remove\n");
}

#[test]
fn doctor_judges_every_check_and_its_exit_code_follows() {
    let output = evenkeel(&["doctor", "-o", "json", "--bpffs", "/proc"]);
    let value: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let checks = value["checks"].as_array().expect("a list");
    let state = |id: &str| {
        let check = checks
            .iter()
            .find(|check| check["id"] == id)
            .expect("the check is there");
        check["state"].as_str().map(str::to_owned)
    };
    for id in [
        "kernel",
        "btf",
        "cgroup2",
        "capabilities",
        "jit",
        "program.sock_ops",
        "helper.set_retval",
        "owner.cilium",
    ] {
        assert!(state(id).is_some(), "{id}");
    }
    // /proc is no BPF file system, so this one must fail, and with it the whole.
    assert_eq!(state("bpffs").as_deref(), Some("fail"));
    assert_eq!(code(&output), Some(1));
    for check in checks {
        let fine = check["state"] == "ok";
        assert_eq!(check["hint"].is_null(), fine, "{check}: a hint where it is needed");
    }
}

#[test]
fn completion_and_version_need_nobody() {
    for shell in ["bash", "zsh", "fish"] {
        let output = evenkeel(&["completion", shell]);
        assert_eq!(code(&output), Some(0));
        assert!(stdout(&output).contains("evenkeel"));
    }
    let version = evenkeel(&["version", "-o", "json"]);
    let value: serde_json::Value = serde_json::from_slice(&version.stdout).expect("JSON");
    assert_eq!(value["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(
        stdout(&evenkeel(&["--version"])),
        format!("evenkeel {}\n", env!("CARGO_PKG_VERSION"))
    );
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let served = Served::start(true);
    let mut child = Command::new(env!("CARGO_BIN_EXE_evenkeel"))
        .args(["service", "list", "--socket"])
        .arg(served.path())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("the binary runs");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("it ends");
    assert_eq!((code(&output), stderr(&output).as_str()), (Some(0), ""));
}
