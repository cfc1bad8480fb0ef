//! What the agent takes: the real process, with 10,000 Services of ten endpoints each in a folder of manifests.
//!
//! Pss and its parts come from `/proc/PID/smaps_rollup` once the agent is ready and its memory rests; the peak of the start
//! is the largest Pss of readings 20 ms apart. The maps' memory is what the kernel accounts
//! to each map that the agent holds open (`memlock` of its descriptors), each map once.

use std::{
    collections::BTreeMap,
    env, fs,
    io::{Read, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream},
    path::PathBuf,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use lb_common::maps as names;
use lb_user::lab::{
    Child, Netns, child,
    manifest::{Endpoint, Folder, Service},
    mounts::BpfFs,
};

use super::{Bench, place::enter, population::Population, report::Metric};

const SERVICES: u32 = 10_000;
const ENDPOINTS: u32 = 10;
/// Services of one file.
const A_FILE: u32 = 20;
const METRICS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9464);
const START_PATIENCE: Duration = Duration::from_secs(90);
const STEP: Duration = Duration::from_millis(20);
/// How long memory may stay the same until it counts as at rest.
const REST: Duration = Duration::from_secs(2);

/// Measures the agent.
pub(super) fn measure(bench: &mut Bench) -> Result<()> {
    // A mount namespace belongs to a thread, and so does the agent's life.
    let home = &*bench;
    let metrics = thread::scope(|scope| scope.spawn(|| run(home)).join())
        .map_err(|_| anyhow::anyhow!("the thread that watches the agent panicked"))??;
    for metric in metrics {
        bench.report.add(metric);
    }
    Ok(())
}

fn run(bench: &Bench) -> Result<Vec<Metric>> {
    let program = program()?;
    let bpf = BpfFs::enter_private()?;
    let cgroup = bench.home.below("agent")?;
    let netns = Netns::new()?;
    let folder = tempfile::Builder::new().prefix("evenkeel-bench-").tempdir()?;
    let manifests = Folder::new(folder.path().join("manifests"))?;
    write_manifests(&manifests)?;
    bench.say("memory: manifests are written");

    let mut command = Command::new(program);
    command.args([
        "agent",
        "--mode",
        "balance",
        "--node-name",
        "bench",
        "--log-level",
        "warn",
        "--source",
    ]);
    command.arg(format!("dir:{}", manifests.path().display()));
    command.arg("--cgroup").arg(cgroup.path());
    command.arg("--bpffs").arg(bpf.folder("bench")?);
    command.arg("--socket").arg(folder.path().join("agent.sock"));
    command.args(["--metrics-address", &METRICS.to_string()]);
    child::forget_configuration(&mut command);
    netns.place(&mut command);
    cgroup.place(&mut command)?;
    let log = folder.path().join("agent.log");
    let began = Instant::now();
    let mut agent = Child::start(&mut command, &log)?;
    let mut peak = 0;
    // A reading asks for the lines of half a million pages: as seldom as a peak can be seen.
    while !is_ready(&netns) {
        bench.check()?;
        peak = peak.max(rollup(agent.pid()).map_or(0, |memory| memory.pss));
        if let Some(status) = agent.ended()? {
            bail!(
                "the agent did not start ({status}): {}",
                fs::read_to_string(&log).unwrap_or_default()
            );
        }
        if began.elapsed() > START_PATIENCE {
            bail!("the agent was not ready after {} s", START_PATIENCE.as_secs());
        }
        thread::sleep(STEP);
    }
    let ready = began.elapsed();
    bench.say("memory: the agent is ready");
    let memory = at_rest(bench, agent.pid(), &mut peak)?;
    let maps = map_memory(agent.pid())?;
    let frontends = served(&netns)?;
    anyhow::ensure!(
        frontends >= SERVICES,
        "the agent serves {frontends} of {SERVICES} Services"
    );
    agent.kill()?;
    enter(&bench.home)?;

    let mib = |kib: u64| kib as f64 / 1024.0;
    let without = |left_out: &[&str]| -> f64 {
        let kept = maps.iter().filter(|(name, _)| !left_out.contains(&name.as_str()));
        kept.map(|(_, bytes)| *bytes as f64).sum::<f64>() / f64::from(1 << 20)
    };
    let tuples = [
        names::SOCKETS,
        names::UDP_REVERSE,
        names::UDP_SOCKETS,
        names::AFFINITY,
        names::EVENTS,
    ];
    let mut kernel = Metric::new("kernel_maps_mb@10000x10", "MiB", without(&[]), maps.len())
        .with("without_sockets_affinity_events", without(&tuples));
    for (name, bytes) in &maps {
        if *bytes >= 1 << 20 {
            kernel = kernel.with(name, *bytes as f64 / f64::from(1 << 20));
        }
    }
    Ok(vec![
        Metric::new("agent_pss_mb@10000x10", "MiB", mib(memory.pss), 1)
            .with("peak", mib(peak))
            .with("anonymous", mib(memory.anonymous))
            .with("shared_maps", mib(memory.shmem))
            .with("file", mib(memory.file))
            .with("ready_s", ready.as_secs_f64()),
        kernel,
    ])
}

/// The agent's binary: the one that `EVENKEEL_BIN` names, else the one beside this one.
pub(super) fn program() -> Result<PathBuf> {
    let named = env::var_os("EVENKEEL_BIN").map(PathBuf::from);
    let beside = || env::current_exe().map(|own| own.with_file_name("evenkeel"));
    let program = match named {
        Some(program) => program,
        None => beside()?,
    };
    if !program.is_file() {
        bail!(
            "there is no agent at {}: `cargo xtask bench` builds it, EVENKEEL_BIN names another",
            program.display()
        );
    }
    Ok(program)
}

fn write_manifests(folder: &Folder) -> Result<()> {
    let port = std::num::NonZeroU16::new(8080).context("the port is not 0")?;
    let population = Population::new(SERVICES, ENDPOINTS, port);
    for file in 0..SERVICES / A_FILE {
        let mut documents = Vec::new();
        for n in file * A_FILE..(file + 1) * A_FILE {
            let service = Service::tcp(
                &format!("filler-{n}"),
                SocketAddr::V4(population.frontend(n)),
                port.get(),
            );
            let endpoints: Vec<Endpoint> = (0..ENDPOINTS)
                .map(|e| Endpoint::ready(IpAddr::V4(*population.endpoint(n, e).ip())))
                .collect();
            documents.push(service.to_yaml());
            documents.push(service.endpoints_to_yaml(&endpoints));
        }
        folder.write(&format!("services-{file}.yaml"), &documents.join("---\n"))?;
    }
    Ok(())
}

/// Memory of a process in KiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Memory {
    pub(super) pss: u64,
    pub(super) anonymous: u64,
    pub(super) shmem: u64,
    pub(super) file: u64,
}

/// Memory of a process now.
pub(super) fn rollup(pid: u32) -> Result<Memory> {
    let path = format!("/proc/{pid}/smaps_rollup");
    let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|line| line.split_whitespace().next()?.parse().ok())
            .unwrap_or(0)
    };
    Ok(Memory {
        pss: field("Pss:"),
        anonymous: field("Pss_Anon:"),
        shmem: field("Pss_Shmem:"),
        file: field("Pss_File:"),
    })
}

/// Waits until the agent's memory has not moved by a hundredth for a while.
fn at_rest(bench: &Bench, pid: u32, peak: &mut u64) -> Result<Memory> {
    let mut base = rollup(pid)?;
    let mut since = Instant::now();
    let deadline = since + START_PATIENCE;
    while since.elapsed() < REST {
        bench.check()?;
        anyhow::ensure!(Instant::now() < deadline, "the agent's memory does not come to rest");
        thread::sleep(STEP);
        let now = rollup(pid)?;
        *peak = (*peak).max(now.pss);
        if now.pss.abs_diff(base.pss) * 100 > base.pss {
            (base, since) = (now, Instant::now());
        }
    }
    rollup(pid)
}

/// Bytes of each map that a process holds open, by name.
pub(super) fn map_memory(pid: u32) -> Result<BTreeMap<String, u64>> {
    let mut bytes_by_id = BTreeMap::new();
    let folder = PathBuf::from(format!("/proc/{pid}/fdinfo"));
    for entry in fs::read_dir(&folder).with_context(|| format!("read {}", folder.display()))? {
        // A descriptor may close while it is looked at.
        let Ok(text) = fs::read_to_string(entry?.path()) else {
            continue;
        };
        let field = |name: &str| {
            text.lines()
                .find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok())
        };
        if let (Some(id), Some(bytes)) = (field("map_id:"), field("memlock:")) {
            bytes_by_id.insert(id, bytes);
        }
    }
    let mut bytes_by_name = BTreeMap::new();
    for info in aya::maps::loaded_maps().flatten() {
        if let Some(bytes) = bytes_by_id.get(&u64::from(info.id())) {
            *bytes_by_name
                .entry(info.name_as_str().unwrap_or("?").to_owned())
                .or_default() += bytes;
        }
    }
    Ok(bytes_by_name)
}

/// Asks the readiness endpoint.
fn is_ready(netns: &Netns) -> bool {
    netns
        .run(|| get("/readyz"))
        .is_ok_and(|answer| answer.is_ok_and(|answer| answer.starts_with("HTTP/1.1 200")))
}

/// How many frontends the agent says are in the kernel.
fn served(netns: &Netns) -> Result<u32> {
    let answer = netns.run(|| get("/metrics"))?.context("ask for metrics")?;
    let line = answer
        .lines()
        .find(|line| line.starts_with("evenkeel_bpf_map_entries{") && line.contains(names::FRONTENDS));
    let count = line
        .and_then(|line| line.split_whitespace().last())
        .context("the metrics do not count frontends")?;
    Ok(count.parse::<f64>()? as u32)
}

fn get(path: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&METRICS, Duration::from_secs(1))?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n"
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_memory_and_its_parts() {
        let memory = rollup(std::process::id()).expect("our own memory is ours to read");
        assert!(memory.pss > 0 && memory.anonymous > 0);
        assert!(memory.anonymous + memory.shmem + memory.file <= memory.pss + 3);
    }
}
