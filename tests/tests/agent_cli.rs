//! Every verb of the command line against a live agent, its exit codes, and how the agent refuses to start.

use std::{
    collections::BTreeSet,
    io,
    net::TcpListener,
    os::unix::process::CommandExt,
    process::{Command, ExitCode, Output, Stdio},
};

use anyhow::{Context, Result, bail};
use lb_tests::{
    agent::{Node, must, trial, until},
    bpf,
    objects::{cluster_ip, ready, service, slice},
    runner,
};
use lb_user::lab::{Child, cgroup, server::Manner};
use serde_json::Value;

const VIP: &str = "10.96.0.10:80";
const BACKENDS: [&str; 2] = ["10.244.1.1", "10.244.1.2"];

fn main() -> ExitCode {
    runner::run(vec![
        trial("wrong_flags_are_usage_errors", wrong_flags),
        trial("what_the_agent_lacks_is_one_sentence", lacks),
        trial("every_verb_answers_in_every_form", verbs),
        trial("the_observers_verbs_show_live_traffic", observer),
        trial("every_map_is_dumped", maps),
        trial("exit_codes_say_what_was_found", exit_codes),
        trial("status_waits_for_an_agent", status_waits),
        trial("doctor_needs_no_agent", doctor),
        trial("cleanup_removes_all_and_only_without_an_agent", cleanup),
        trial("an_interrupted_demo_says_so_and_leaves_nothing", interrupted_demo),
    ])
}

fn write_web(node: &Node) -> Result<()> {
    let endpoints = BACKENDS.map(ready);
    node.write(
        "web.yaml",
        &[
            service("web", cluster_ip(&["10.96.0.10"])),
            slice("web-v4", "web", &endpoints),
        ],
    )
}

fn text(output: &Output) -> (String, String) {
    let of = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (of(&output.stdout), of(&output.stderr))
}

/// Runs a verb, which must end with a code, and returns its two outputs.
fn ends_with(node: &Node, arguments: &[&str], code: i32) -> Result<(String, String)> {
    let output = node.run(arguments)?;
    let (out, err) = text(&output);
    must(output.status.code() == Some(code), || {
        format!(
            "evenkeel {}: {}, not {code}\n{out}{err}",
            arguments.join(" "),
            output.status
        )
    })?;
    Ok((out, err))
}

/// One sentence: one line, with words in it.
fn is_sentence(said: &str) -> bool {
    said.trim_end().lines().count() == 1 && said.contains(' ') && !said.contains("panicked")
}

fn wrong_flags(node: &Node) -> Result<()> {
    let cases: [(&[&str], &str); 11] = [
        (&["--mode", "both"], "balance"),
        (&["--source", "file:/x"], "dir:PATH"),
        (&["--source", "dir:/nowhere/at/all"], "folder that exists"),
        (&["--cgroup", "/tmp"], "cgroup v2"),
        (&["--cgroup", "/nowhere/at/all"], "--cgroup"),
        (&["--max-frontends", "0"], "1 to"),
        (&["--max-backends", "many"], "1 to"),
        (&["--metrics-address", "localhost"], "ADDR:PORT"),
        (&["--pin-name", "a/b"], "letters"),
        (&["--reuse-horizon", "0"], "1 to 3600"),
        (&["--sideways"], "--sideways"),
    ];
    for (flags, word) in cases {
        let (code, said) = node.run_agent(&mut node.agent_command(flags))?;
        must(code == 2 && said.contains(word), || {
            format!("{flags:?}: {code}: {said}")
        })?;
    }
    must(!node.pins().exists(), || "a refused start left pins".to_owned())
}

/// Takes capabilities away from what a command will start: root without them has them no more.
fn without(command: &mut Command, capabilities: &'static [libc::c_ulong]) {
    let drop = move || {
        for &capability in capabilities {
            // SAFETY: a system call on numbers, between fork and exec.
            if unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) } != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: the closure makes system calls alone and allocates nothing.
    unsafe { command.pre_exec(drop) };
}

const CAP_NET_ADMIN: libc::c_ulong = 12;
const CAP_SYS_ADMIN: libc::c_ulong = 21;
const CAP_BPF: libc::c_ulong = 39;

fn lacks(node: &Node) -> Result<()> {
    write_web(node)?;
    let refused = |what: &str, command: &mut Command, words: &[&str]| -> Result<()> {
        let (code, said) = node.run_agent(command)?;
        let whole = code == 1 && is_sentence(&said) && words.iter().all(|word| said.contains(word));
        must(whole, || format!("{what}: {code}: {said}"))
    };
    refused(
        "no BPF file system",
        &mut node.agent_command(&["--bpffs", "/tmp"]),
        &["/tmp", "mount -t bpf"],
    )?;

    let taken = node.netns().run(|| TcpListener::bind("127.0.0.1:9975"))??;
    refused(
        "a port in use",
        &mut node.agent_command(&[]),
        &["--metrics-address", "127.0.0.1:9975"],
    )?;
    drop(taken);

    let file = node.folder().join("no-socket");
    std::fs::write(&file, "")?;
    let path = file.display().to_string();
    refused(
        "no socket",
        &mut node.agent_command(&["--socket", &path]),
        &["not a socket"],
    )?;

    // The folder of manifests is root's alone; another one is anybody's.
    let open = tempfile::Builder::new().prefix("evenkeel-test-").tempdir()?;
    let set_open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(open.path(), set_open)?;
    let source = format!("dir:{}", open.path().display());
    let mut nobody = node.agent_command(&["--source", &source]);
    // SAFETY: between fork and exec the closure makes system calls alone and allocates nothing.
    unsafe {
        nobody.pre_exec(|| {
            if libc::setgroups(0, std::ptr::null()) != 0 || libc::setgid(65_534) != 0 || libc::setuid(65_534) != 0 {
                return Err(io::Error::last_os_error());
            }
            Ok(())
        });
    }
    refused("nobody", &mut nobody, &["root"])?;

    let mut no_bpf = node.agent_command(&[]);
    without(&mut no_bpf, &[CAP_SYS_ADMIN, CAP_BPF]);
    refused("no CAP_BPF", &mut no_bpf, &["CAP_BPF"])?;
    let mut no_net = node.agent_command(&[]);
    without(&mut no_net, &[CAP_SYS_ADMIN, CAP_NET_ADMIN]);
    refused("no CAP_NET_ADMIN", &mut no_net, &["CAP_NET_ADMIN"])
}

fn verbs(node: &Node) -> Result<()> {
    let _servers = node.serve(&BACKENDS, Manner::Greet)?;
    write_web(node)?;
    let agent = node.start(&[])?;
    node.dial_many(VIP, 40)?;
    until("the connections to be judged", || {
        let judged = agent.reuse()?.connections;
        must(judged == 40, || format!("{judged} of 40"))
    })?;
    // Verb, kind of its document, a word of its table, whether it lists names.
    let cases: [(&[&str], &str, &str, bool); 12] = [
        (&["status"], "Status", "balance mode", false),
        (
            &["status", "--wait", "--timeout", "30"],
            "Status",
            "live, ready, healthy",
            false,
        ),
        (&["service", "list"], "ServiceList", "web", true),
        (&["service", "get", "web"], "Service", "10.96.0.10", true),
        (&["backend", "list"], "BackendList", "10.244.1.2", true),
        (&["backend", "list", "default/web"], "BackendList", "10.244.1.1", true),
        (&["reuse"], "Reuse", "40", false),
        (&["table", "get", "web"], "TableList", "10.244.1.1", true),
        (&["explain", "10.0.0.1", VIP], "Explain", "default/web", false),
        (&["map", "list"], "MapList", "FRONTENDS", true),
        (&["diagnose", "web"], "DiagnosisList", "default/web", true),
        (&["graph"], "Graph", "default/web", false),
    ];
    for (verb, kind, word, named) in cases {
        let with = |form: &'static str| [verb, &["-o", form]].concat();
        let (table, _) = ends_with(node, verb, 0)?;
        must(table.contains(word), || {
            format!("{verb:?} does not say {word}:\n{table}")
        })?;
        let (wide, _) = ends_with(node, &with("wide"), 0)?;
        must(wide.contains(word), || format!("{verb:?} does not say {word}:\n{wide}"))?;
        let (json, _) = ends_with(node, &with("json"), 0)?;
        let document: Value = serde_json::from_str(&json).with_context(|| format!("{verb:?}: {json}"))?;
        must(document["schemaVersion"] == 1 && document["kind"] == kind, || {
            format!("{verb:?}: {json}")
        })?;
        let (yaml, _) = ends_with(node, &with("yaml"), 0)?;
        must(yaml.contains("schemaVersion: 1") && yaml.contains(kind), || {
            format!("{verb:?}: {yaml}")
        })?;
        let (names, _) = ends_with(node, &with("name"), if named { 0 } else { 2 })?;
        must(names.is_empty() != named, || format!("{verb:?}: {names}"))?;
    }
    let (json, _) = ends_with(node, &["service", "get", "web", "-o", "json"], 0)?;
    let web: Value = serde_json::from_str(&json)?;
    must(web["connects"] == 40 && web["backends"]["active"] == 2, || json.clone())?;
    let (json, _) = ends_with(node, &["explain", "10.0.0.1", VIP, "-o", "json"], 0)?;
    let flow: Value = serde_json::from_str(&json)?;
    let candidates = flow["candidates"].as_array().map_or(0, Vec::len);
    must(flow["verdict"] == "translated" && candidates == 2, || json.clone())?;
    let (json, _) = ends_with(node, &["explain", "10.0.0.1", "10.96.0.99:80", "-o", "json"], 0)?;
    must(json.contains("passed"), || json.clone())?;
    let (bare, _) = ends_with(node, &["service", "list", "--no-headers"], 0)?;
    must(bare.lines().count() == 1, || bare.clone())?;
    let (other, _) = ends_with(node, &["service", "list", "-n", "elsewhere", "-o", "name"], 0)?;
    must(other.is_empty(), || other.clone())?;
    agent.stop()
}

fn observer(node: &Node) -> Result<()> {
    let _servers = node.serve(&BACKENDS, Manner::Greet)?;
    write_web(node)?;
    let agent = node.start(&[])?;
    // Whoever follows sees what happens from then on; how soon it has begun to is not said, so there is always more to see.
    let mut follower = node.command(&["observe", "web", "--count", "5", "--type", "connection", "-o", "json"]);
    let follower = follower.stdout(Stdio::piped()).spawn().context("start observe")?;
    let seen = std::thread::scope(|scope| -> Result<Output> {
        let waiting = scope.spawn(move || follower.wait_with_output());
        let mut dialled = 0;
        until("five events", || {
            node.dial_many(VIP, 20)?;
            dialled += 20;
            must(waiting.is_finished() || dialled > 20_000, || {
                format!("{dialled} dialled")
            })
        })?;
        waiting
            .join()
            .map_err(|_| anyhow::anyhow!("the watcher panicked"))?
            .context("wait for observe")
    })?;
    let (lines, _) = text(&seen);
    must(seen.status.success() && lines.lines().count() == 5, || lines.clone())?;
    for line in lines.lines() {
        let event: Value = serde_json::from_str(line).with_context(|| line.to_owned())?;
        let backend = event["backend"].as_str().unwrap_or_default();
        must(
            event["schemaVersion"] == 1
                && event["event"] == "connection"
                && event["outcome"] == "established"
                && BACKENDS.iter().any(|known| backend == format!("{known}:8080")),
            || line.to_owned(),
        )?;
    }

    // The first reading of the counters is where it starts to count from; what is dialled after it is shown.
    until("the new connections to be read", || {
        node.dial_many(VIP, 20)?;
        let (json, _) = ends_with(node, &["diagnose", "web", "-o", "json"], 0)?;
        let document: Value = serde_json::from_str(&json)?;
        must(document["items"][0]["newConnections"]["n"].as_u64() > Some(0), || json)
    })?;
    let (json, _) = ends_with(node, &["diagnose", "web", "-o", "json"], 0)?;
    let document: Value = serde_json::from_str(&json)?;
    let web = &document["items"][0];
    let told = &web["attribution"];
    must(told["connects"] == told["attributed"] && told["unknown"] == 0, || {
        json.clone()
    })?;
    must(document["node"]["mode"] == "balance", || json.clone())?;
    let (screen, _) = ends_with(node, &["top", "--once"], 0)?;
    must(screen.contains("default/web"), || screen.clone())?;
    let (page, _) = ends_with(node, &["report", "web", "--html", "-"], 0)?;
    must(page.contains("</html>") && page.contains("default/web"), || {
        page.clone()
    })?;
    let (calls, _) = ends_with(node, &["graph", "-o", "json"], 0)?;
    let calls: Value = serde_json::from_str(&calls)?;
    must(
        calls["calls"][0]["client"]["kind"] == "Node" && calls["calls"][0]["service"] == "web",
        || calls.to_string(),
    )?;
    let (_, said) = ends_with(node, &["diagnose", "nobody"], 1)?;
    must(said.contains("nobody"), || said.clone())?;
    agent.stop()
}

fn maps(node: &Node) -> Result<()> {
    let _servers = node.serve(&BACKENDS, Manner::Stay)?;
    write_web(node)?;
    let agent = node.start(&[])?;
    let open = node.open(VIP)?;
    let (json, _) = ends_with(node, &["map", "list", "-o", "json"], 0)?;
    let list: Value = serde_json::from_str(&json)?;
    let names: Vec<&str> = list["items"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|item| item["name"].as_str())
        .collect();
    must(names.len() >= 13, || json.clone())?;
    let mut refused = BTreeSet::new();
    for name in names {
        let output = node.run(&["map", "dump", name, "-o", "json"])?;
        let (out, err) = text(&output);
        match output.status.code() {
            Some(0) => {
                let dump: Value = serde_json::from_str(&out)?;
                let whole = dump["kind"] == "MapDump" && dump["name"] == name && dump["rows"].is_array();
                must(whole, || out.clone())?;
            }
            // What the agent alone reads says so.
            Some(2) => {
                must(is_sentence(&err), || err.clone())?;
                refused.insert(name.to_owned());
            }
            code => bail!("map dump {name}: {code:?}: {out}{err}"),
        }
    }
    must(
        refused.iter().all(|name| name == "EVENTS" || name == "BACKEND_INDEX"),
        || format!("{refused:?}"),
    )?;
    for (map, row) in [
        ("frontends", "10.96.0.10:80/TCP"),
        ("Backends", "10.244.1.2:8080/TCP"),
        ("SOCKETS", "10.96.0.10:80/TCP"),
        ("COUNTERS", "connect4 translated"),
        ("SERVICE_STATS", "connects=1"),
    ] {
        let (table, _) = ends_with(node, &["map", "dump", map], 0)?;
        must(table.contains(row), || format!("{map} does not say {row}:\n{table}"))?;
    }
    drop(open);
    agent.stop()
}

fn exit_codes(node: &Node) -> Result<()> {
    let asking: [&[&str]; 9] = [
        &["status"],
        &["service", "list"],
        &["service", "get", "web"],
        &["backend", "list"],
        &["reuse"],
        &["table", "get", "web"],
        &["explain", "10.0.0.1", VIP],
        &["map", "list"],
        &["map", "dump", "FRONTENDS"],
    ];
    for verb in asking {
        let (out, err) = ends_with(node, verb, 3)?;
        must(
            out.is_empty() && is_sentence(&err) && err.contains("agent.sock"),
            || format!("{verb:?}: {out}{err}"),
        )?;
    }
    write_web(node)?;
    let agent = node.start(&[])?;
    let missing: [&[&str]; 3] = [
        &["service", "get", "nobody"],
        &["table", "get", "elsewhere/web"],
        &["map", "dump", "NOTHING"],
    ];
    for verb in missing {
        let (out, err) = ends_with(node, verb, 1)?;
        must(out.is_empty() && is_sentence(&err) && err.contains("not found"), || {
            format!("{verb:?}: {out}{err}")
        })?;
    }
    let wrong: [&[&str]; 5] = [
        &["service", "get", "Not A Name"],
        &["explain", "somewhere", VIP],
        &["explain", "10.0.0.1", "10.96.0.10"],
        &["status", "--sideways"],
        &["status", "-o", "xml"],
    ];
    for verb in wrong {
        let (out, err) = ends_with(node, verb, 2)?;
        must(out.is_empty() && !err.is_empty(), || format!("{verb:?}: {out}{err}"))?;
    }
    // A link that is lost is a problem until it is repaired.
    let link = node.own_pins().join("link-connect4");
    until("a problem to be told", || {
        // Between a repair's removal and its new pin there is nothing to detach.
        let _ = bpf::detach_pinned_link(&link);
        ends_with(node, &["status"], 1).map(drop)
    })?;
    until("the repair", || ends_with(node, &["status"], 0).map(drop))?;
    agent.stop()?;

    let (version, _) = ends_with(node, &["version"], 0)?;
    must(version.contains(env!("CARGO_PKG_VERSION")), || version.clone())?;
    for shell in ["bash", "zsh", "fish"] {
        let (script, _) = ends_with(node, &["completion", shell], 0)?;
        must(script.contains("evenkeel"), || script.clone())?;
    }
    ends_with(node, &["completion", "tcsh-of-old"], 2)?;
    Ok(())
}

fn status_waits(node: &Node) -> Result<()> {
    ends_with(node, &["status", "--wait", "--timeout", "1"], 3)?;
    write_web(node)?;
    let log = node.folder().join("waiter.log");
    let mut waiter = Child::start(&mut node.command(&["status", "--wait", "--timeout", "60"]), &log)?;
    let agent = node.launch(&[])?;
    let status = until("the waiter to end", || waiter.ended()?.context("it still waits"))?;
    let said = std::fs::read_to_string(&log)?;
    must(status.success() && said.contains("live, ready, healthy"), || {
        format!("{status}: {said}")
    })?;
    agent.stop()
}

fn doctor(node: &Node) -> Result<()> {
    write_web(node)?;
    let cgroup = node.cgroup().path().display().to_string();
    let examine = || -> Result<()> {
        let output = node.run(&["doctor", "--cgroup", &cgroup, "-o", "json"])?;
        let (out, err) = text(&output);
        let document: Value = serde_json::from_str(&out).with_context(|| format!("{out}{err}"))?;
        let checks = document["checks"].as_array().context("no checks")?;
        let whole = document["schemaVersion"] == 1 && document["kind"] == "Doctor" && checks.len() >= 5;
        must(whole, || out.clone())?;
        let failed = checks.iter().any(|check| check["state"] == "fail");
        must(output.status.code() == Some(i32::from(failed)), || {
            format!("{}: {out}", output.status)
        })?;
        let table = node.run(&["doctor", "--cgroup", &cgroup])?;
        must(text(&table).0.lines().count() > checks.len(), || text(&table).0)
    };
    examine().context("without an agent")?;
    let agent = node.start(&[])?;
    examine().context("beside an agent")?;
    agent.stop()?;

    let output = node.run(&["doctor", "--bpffs", "/tmp", "--cgroup", "/tmp"])?;
    must(output.status.code() == Some(1), || text(&output).0)
}

fn cleanup(node: &Node) -> Result<()> {
    let _servers = node.serve(&BACKENDS, Manner::Greet)?;
    write_web(node)?;
    let run = |flags: &[&str], code: i32| {
        ends_with(
            node,
            &[&["cleanup", "--pin-name", node.pin_name()], flags].concat(),
            code,
        )
    };
    must(run(&[], 0)?.0.contains("nothing to remove"), || {
        "something was removed".to_owned()
    })?;
    let agent = node.start(&[])?;
    let (_, refused) = run(&[], 1)?;
    must(is_sentence(&refused) && refused.contains("stop it first"), || {
        refused.clone()
    })?;
    node.dial(VIP)?;
    agent.stop()?;

    let (planned, _) = run(&["--dry-run"], 0)?;
    must(
        planned.contains("link-connect4") && planned.contains("FRONTENDS"),
        || planned.clone(),
    )?;
    node.dial(VIP).context("after a dry run")?;
    let (json, _) = run(&["-o", "json"], 0)?;
    let document: Value = serde_json::from_str(&json)?;
    let removed = document["removed"].as_array().map_or(0, Vec::len);
    let whole = document["schemaVersion"] == 1 && document["dryRun"] == false && removed == planned.lines().count();
    must(whole, || json.clone())?;
    must(!node.pins().exists(), || "pins are left".to_owned())?;
    until("no program on the cgroup", || {
        let left = bpf::attached_hooks(node.cgroup().path())?;
        must(left.is_empty(), || format!("{left:?}"))
    })?;
    must(run(&[], 0)?.0.contains("nothing to remove"), || {
        "something is left".to_owned()
    })
}

fn interrupted_demo(node: &Node) -> Result<()> {
    let log = node.folder().join("demo.log");
    let mut demo = Child::start(&mut node.command(&["demo", "--connections", "2000"]), &log)?;
    let prefix = format!("evenkeel-demo-{}-", demo.pid());
    let cgroups = || -> Result<bool> {
        let entries = std::fs::read_dir(cgroup::hierarchy()?)?;
        Ok(entries
            .flatten()
            .any(|entry| entry.file_name().to_string_lossy().starts_with(&prefix)))
    };
    until("the demo to begin", || {
        must(cgroups()?, || "it has no cgroup yet".to_owned())
    })?;
    demo.signal(nix::sys::signal::Signal::SIGINT)?;
    let status = until("the demo's end", || demo.ended()?.context("it still plays"))?;
    let said = std::fs::read_to_string(&log)?;
    must(status.code() == Some(130) && said.contains("Interrupted"), || {
        format!("{status}: {said}")
    })?;
    must(!cgroups()?, || "its cgroup is left".to_owned())
}
