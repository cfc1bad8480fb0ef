//! The life of the agent's process: restart, upgrade, repair, modes, capacity, health, metrics.

mod repair;
mod restart;
mod telling;

use std::{
    fs,
    io::{Read, Write},
    net::TcpStream,
    process::ExitCode,
    time::Duration,
};

use anyhow::Result;
use lb_tests::{
    agent::{Agent, Node, must, trial, until},
    bpf,
    objects::{cluster_ip, ready, service, slice},
    runner,
};
use lb_user::lab::server::Manner;

const VIP: &str = "10.96.0.10:80";
const VIP6: &str = "[fd00:96::10]:80";
const BACKENDS: [&str; 3] = ["10.244.1.1", "10.244.1.2", "10.244.1.3"];
const BACKENDS6: [&str; 2] = ["fd00:244::1", "fd00:244::2"];

fn main() -> ExitCode {
    runner::run(vec![
        trial(
            "c24_a_killed_agent_fails_no_connection_and_changes_nothing",
            restart::kill,
        ),
        trial(
            "a_terminated_agent_leaves_the_datapath_in_balance",
            restart::terminate_balance,
        ),
        trial(
            "a_terminated_agent_leaves_nothing_in_observe",
            restart::terminate_observe,
        ),
        trial(
            "c24_a_restart_applies_what_changed_meanwhile",
            restart::changed_meanwhile,
        ),
        trial("c24_an_unreadable_folder_deletes_nothing", restart::unreadable_folder),
        trial(
            "pins_of_another_abi_are_replaced_without_a_failed_connection",
            restart::other_abi,
        ),
        trial("a_second_agent_is_refused", restart::second_agent),
        trial("modes_are_switched_by_a_restart", restart::switch_modes),
        trial("a_lost_link_is_attached_again", repair::lost_link),
        trial("damaged_contents_are_repaired", repair::damaged_contents),
        trial("observe_mode_sees_and_does_not_touch", telling::observe),
        trial("what_does_not_fit_is_reported_and_heals", repair::capacity),
        trial("readiness_follows_the_datapath", telling::readiness),
        trial("metrics_equal_the_traffic", telling::metrics),
    ])
}

/// A dual-stack Service `web` with three IPv4 and two IPv6 backends.
fn write_web(node: &Node, v4: &[&str]) -> Result<()> {
    let web = service("web", cluster_ip(&["10.96.0.10", "fd00:96::10"]));
    node.write("web.yaml", &[web])?;
    write_endpoints(node, v4)?;
    let v6: Vec<_> = BACKENDS6.iter().map(|address| ready(address)).collect();
    node.write("web-v6.yaml", &[slice("web-v6", "web", &v6)])
}

fn write_endpoints(node: &Node, v4: &[&str]) -> Result<()> {
    let v4: Vec<_> = v4.iter().map(|address| ready(address)).collect();
    node.write("web-v4.yaml", &[slice("web-v4", "web", &v4)])
}

fn serve_all(node: &Node, manner: Manner) -> Result<lb_user::lab::Server> {
    let all: Vec<&str> = BACKENDS.iter().chain(&BACKENDS6).copied().collect();
    node.serve(&all, manner)
}

/// Greets, and shows that the connection lives: what is sent comes back.
fn echo(stream: &mut TcpStream) -> Result<()> {
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    stream.write_all(b"ping\n")?;
    let mut answer = [0; 5];
    stream.read_exact(&mut answer)?;
    must(&answer == b"ping\n", || format!("{answer:?} came back"))
}

fn started(agent: &Agent) -> Result<u64> {
    Ok(agent.service("web")?.connects)
}

/// In observe mode nothing may be attached that can write to traffic.
fn only_following(node: &Node) -> Result<()> {
    until("the rewriting links to go", || {
        let attached = bpf::attached_hooks(node.cgroup().path())?;
        must(attached == ["sock_ops", "sock_release"], || {
            format!("{attached:?} are attached")
        })
    })?;
    let mut links: Vec<String> = fs::read_dir(node.pins().join("1"))?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<Result<_>>()?;
    links.retain(|name| name.starts_with("link-"));
    links.sort();
    must(links == ["link-sock_ops", "link-sock_release"], || {
        format!("{links:?} are pinned")
    })
}
