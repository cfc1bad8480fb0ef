//! A dual-stack Service `web`, and what several targets look at on the way.

use std::{
    fs,
    io::{Read, Write},
    net::TcpStream,
    time::Duration,
};

use anyhow::Result;
use aya::maps::{Array, Map, MapData};
use lb_user::lab::{Server, server::Manner};

use super::{Agent, Node, must, until};
use crate::{
    bpf,
    objects::{cluster_ip, ready, service, slice},
};

/// What clients of `web` dial.
pub const VIP: &str = "10.96.0.10:80";
/// The same over IPv6.
pub const VIP6: &str = "[fd00:96::10]:80";
/// The IPv4 backends.
pub const BACKENDS: [&str; 3] = ["10.244.1.1", "10.244.1.2", "10.244.1.3"];
/// The IPv6 backends.
pub const BACKENDS6: [&str; 2] = ["fd00:244::1", "fd00:244::2"];

/// A dual-stack Service `web` with three IPv4 and two IPv6 backends.
///
/// # Errors
/// Where a file cannot be written.
pub fn write_web(node: &Node, v4: &[&str]) -> Result<()> {
    let web = service("web", cluster_ip(&["10.96.0.10", "fd00:96::10"]));
    node.write("web.yaml", &[web])?;
    write_endpoints(node, v4)?;
    let v6: Vec<_> = BACKENDS6.iter().map(|address| ready(address)).collect();
    node.write("web-v6.yaml", &[slice("web-v6", "web", &v6)])
}

/// Writes the IPv4 endpoints of `web`.
///
/// # Errors
/// Where the file cannot be written.
pub fn write_endpoints(node: &Node, v4: &[&str]) -> Result<()> {
    let v4: Vec<_> = v4.iter().map(|address| ready(address)).collect();
    node.write("web-v4.yaml", &[slice("web-v4", "web", &v4)])
}

/// Serves on all backends of `web`.
///
/// # Errors
/// Where an address cannot be bound.
pub fn serve_all(node: &Node, manner: Manner) -> Result<Server> {
    let all: Vec<&str> = BACKENDS.iter().chain(&BACKENDS6).copied().collect();
    node.serve(&all, manner)
}

/// Greets, and shows that the connection lives: what is sent comes back.
///
/// # Errors
/// Where the connection is dead.
pub fn echo(stream: &mut TcpStream) -> Result<()> {
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    stream.write_all(b"ping\n")?;
    let mut answer = [0; 5];
    stream.read_exact(&mut answer)?;
    must(&answer == b"ping\n", || format!("{answer:?} came back"))
}

/// Connections of `web` that were counted.
///
/// # Errors
/// Why there is no answer.
pub fn started(agent: &Agent) -> Result<u64> {
    Ok(agent.service("web")?.connects)
}

/// In observe mode nothing may be attached that can write to traffic.
///
/// # Errors
/// What is attached besides.
pub fn only_following(node: &Node) -> Result<()> {
    until("the rewriting links to go", || {
        let attached = bpf::attached_hooks(node.cgroup().path())?;
        must(attached == ["sock_ops", "sock_release"], || {
            format!("{attached:?} are attached")
        })
    })?;
    let mut links: Vec<String> = fs::read_dir(node.own_pins())?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<Result<_>>()?;
    // The packet programs' are as many as there are interfaces.
    links.retain(|name| name.starts_with("link-") && !name.starts_with("link-tc_"));
    links.sort();
    must(links == ["link-sock_ops", "link-sock_release"], || {
        format!("{links:?} are pinned")
    })
}

/// A state map of the agent, as root may open it.
///
/// # Errors
/// Where it cannot be opened.
pub fn pinned_map(node: &Node, name: &str) -> Result<MapData> {
    Ok(MapData::from_pin(node.own_pins().join(name))?)
}

/// A state map of the agent that is an array.
///
/// # Errors
/// Where it cannot be opened, or is none.
pub fn pinned_array<T: aya::Pod>(node: &Node, name: &str) -> Result<Array<MapData, T>> {
    Ok(Map::Array(pinned_map(node, name)?).try_into()?)
}
