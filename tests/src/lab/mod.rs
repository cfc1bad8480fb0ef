//! A small cluster in network namespaces: an outside client, a router, three nodes with their agents, and pods.
//!
//! Here live the places, what the pods serve and how clients dial; what is right is the cases' business. The invariant:
//! everything dies with the [`Lab`], however that ends: namespaces and mounts have no names, processes are killed when
//! their starter ends, and what a killed run left is removed by the next one.

pub mod cases;
pub mod dial;
pub mod hammer;
pub mod main;
pub mod node;
pub mod plan;
pub mod pod;
pub mod report;
pub mod serve;
pub mod service;
pub mod soak;
pub mod standing;
pub mod state;
pub mod topology;

use std::{
    fs,
    io::{self, Write as _},
    net::IpAddr,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU8, AtomicU16, Ordering},
    },
};

use anyhow::{Context, Result};
use lb_user::lab::{Netns, manifest::Folder};
use tokio::runtime::Runtime;

use self::{
    dial::Dialer,
    node::{LabNode, Sizes},
    plan::Family,
    pod::{Joint, Pod},
    serve::Serving,
    service::Service,
    topology::Wires,
};
use crate::agent::{must, until};

/// The number of the pod beyond the narrow link.
const DEEP: u8 = 9;
/// The number of the guest, among the pods of node 1.
const GUEST: u8 = 200;

/// The lab.
#[derive(Debug)]
pub struct Lab {
    // Dropped in this order: agents and servers first, then the wires, then the folder.
    nodes: Vec<LabNode>,
    pods: Vec<Pod>,
    deep: Pod,
    host: Pod,
    /// Somebody with its own kernel on node 1: its sockets are in no node's cgroup.
    pub guest: Netns,
    /// The namespaces and links.
    pub wires: Wires,
    runtime: Runtime,
    manifests: Folder,
    folder: tempfile::TempDir,
    next_number: AtomicU8,
    revision: AtomicU16,
    added: Mutex<u8>,
    ports: AtomicU16,
}

impl Lab {
    /// Builds everything but the agents, which [`Self::start_agents`] starts.
    ///
    /// # Errors
    /// The kernel's, or where the process may not.
    pub fn new() -> Result<Self> {
        Self::with(Sizes::SMALL)
    }

    /// As [`Self::new`], with agents' tables of other sizes.
    ///
    /// # Errors
    /// The kernel's, or where the process may not.
    pub fn with(sizes: Sizes) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .thread_name("lab-servers")
            .build()?;
        let folder = tempfile::Builder::new().prefix("evenkeel-lab-").tempdir()?;
        let manifests = Folder::new(folder.path().join("manifests"))?;
        let wires = Wires::new().context("lay the wires")?;
        let guest = topology::place(false)?;
        wires.join_pod(&guest, 1, GUEST, topology::GUEST)?;
        let nodes: Vec<LabNode> = (1..=plan::NODES)
            .map(|n| {
                let netns = wires.node(n).clone();
                LabNode::new(n, netns, folder.path(), &agent_flags(n, &manifests), sizes)
            })
            .collect::<Result<_>>()?;
        let make = |node: u8, n: u8, joint| -> Result<Pod> {
            let node = &nodes[usize::from(node) - 1];
            Pod::new(&wires, runtime.handle(), node, n, joint).with_context(|| format!("pod {n} of {}", node.name()))
        };
        let pods = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2)]
            .into_iter()
            .map(|(node, n)| make(node, n, Joint::Link))
            .collect::<Result<_>>()?;
        let deep = make(2, DEEP, Joint::Deep)?;
        let host = make(3, 0, Joint::Host)?;
        let lab = Self {
            nodes,
            pods,
            deep,
            host,
            guest,
            wires,
            runtime,
            manifests,
            folder,
            next_number: AtomicU8::new(1),
            revision: AtomicU16::new(1000),
            added: Mutex::new(100),
            ports: AtomicU16::new(0),
        };
        lab.warm()?;
        Ok(lab)
    }

    /// Waits until packets come through everywhere.
    fn warm(&self) -> Result<()> {
        for family in Family::ALL {
            for pod in self.pods.iter().chain([&self.deep, &self.host]) {
                for from in [&self.wires.client, &self.wires.far, &self.guest] {
                    until("the wires", || Ok(Dialer::new(from).dial(pod.target(family))?))
                        .with_context(|| format!("reach {} over {family}", pod.name))?;
                }
            }
        }
        Ok(())
    }

    /// Starts the agents of all nodes that have none, and waits until they are ready.
    ///
    /// # Errors
    /// Where one does not become ready.
    pub fn start_agents(&self) -> Result<()> {
        self.nodes.iter().try_for_each(LabNode::launch)?;
        self.nodes.iter().try_for_each(LabNode::wait_ready)
    }

    /// Kills all agents and takes what they left in the kernel.
    ///
    /// # Errors
    /// The kernel's.
    pub fn wipe_agents(&self) -> Result<()> {
        self.nodes.iter().try_for_each(LabNode::wipe)
    }

    /// The nodes.
    pub fn nodes(&self) -> &[LabNode] {
        &self.nodes
    }

    /// A node; nodes count from 1.
    ///
    /// # Panics
    /// Where there is no such node.
    pub fn node(&self, number: u8) -> &LabNode {
        self.nodes
            .get(usize::from(number).wrapping_sub(1))
            .expect("the lab has three nodes, counted from 1")
    }

    /// Pod `n` (1 or 2) of a node.
    ///
    /// # Panics
    /// Where there is no such pod.
    pub fn pod(&self, node: u8, n: u8) -> &Pod {
        let name = format!("pod-{node}-{n}");
        self.pods
            .iter()
            .find(|pod| pod.name == name)
            .expect("every node has pods 1 and 2")
    }

    /// The pod of node 2 beyond a narrow link.
    pub fn deep_pod(&self) -> &Pod {
        &self.deep
    }

    /// The pod of node 3 that has the node's own addresses.
    pub fn host_pod(&self) -> &Pod {
        &self.host
    }

    /// Makes a further pod, which lasts as long as the value.
    ///
    /// # Errors
    /// The kernel's.
    pub fn add_pod(&self, node: u8) -> Result<Pod> {
        let n = {
            let mut next = self.added.lock().unwrap_or_else(PoisonError::into_inner);
            *next = if *next >= 199 { 100 } else { *next + 1 };
            *next
        };
        Pod::new(&self.wires, self.runtime.handle(), self.node(node), n, Joint::Link)
    }

    /// Somebody outside who dials.
    pub fn outside(&self) -> Dialer<'_> {
        Dialer::new(&self.wires.client)
    }

    /// Has the guest serve, as an endpoint of its own; it is closed when the value is dropped.
    ///
    /// # Errors
    /// The kernel's.
    pub fn serve_in_guest(&self) -> Result<Serving> {
        let addresses = Family::ALL.map(|family| plan::pod(family, 1, GUEST));
        Serving::start(self.runtime.handle(), &self.guest, "guest", &addresses)
    }

    /// The guest's address.
    pub fn guest_ip(&self, family: Family) -> IpAddr {
        plan::pod(family, 1, GUEST)
    }

    /// A source port of the outside client that no case has used.
    pub fn next_port(&self) -> u16 {
        // Below what the kernel gives by itself.
        2_000 + self.ports.fetch_add(1, Ordering::Relaxed) % 28_000
    }

    /// A health-check node port that no other Service has.
    pub fn next_health_port(&self) -> u16 {
        32_000 + self.ports.fetch_add(1, Ordering::Relaxed) % 500
    }

    /// A NodePort Service with numbers of its own; nothing is written yet.
    pub fn service(&self, family: Family) -> Service<'_> {
        let taken = self.next_number.fetch_add(1, Ordering::Relaxed);
        // Long before the numbers come round, the Services that had them are gone.
        Service::new(self, family, taken % 240 + 10)
    }

    /// The folder of manifests that all agents read.
    pub fn manifests(&self) -> &Folder {
        &self.manifests
    }

    /// The folder of everything that the lab wrote.
    pub fn folder(&self) -> &std::path::Path {
        self.folder.path()
    }

    /// Every namespace by its name, with the number of the node that it belongs to.
    pub fn places(&self) -> Vec<(String, Option<u8>, &Netns)> {
        let outside = [
            ("client", &self.wires.client),
            ("far", &self.wires.far),
            ("narrow", &self.wires.narrow),
            ("router", &self.wires.router),
            ("guest", &self.guest),
        ];
        let mut places: Vec<_> = outside
            .into_iter()
            .map(|(name, netns)| (name.to_owned(), None, netns))
            .collect();
        for node in &self.nodes {
            places.push((node.name(), Some(node.number), &node.netns));
        }
        for pod in self.pods.iter().chain([&self.deep]) {
            places.push((pod.name.clone(), Some(pod.node), &pod.netns));
        }
        places
    }

    /// What the agents have said, node by node: the last lines of each.
    pub fn logs(&self, lines: usize) -> String {
        node::logs(&self.nodes, lines)
    }

    fn next_revision(&self) -> u16 {
        self.revision.fetch_add(1, Ordering::Relaxed)
    }

    /// Waits until every running agent has brought a revision of a file into its kernel.
    fn wait_for_revision(&self, marker: &str, revision: u16) -> Result<()> {
        for node in self.nodes.iter().filter(|node| node.runs()) {
            until("the agents to take a change", || {
                node.ask(|agent| {
                    let found = agent.service(marker)?;
                    must(found.frontends.iter().any(|one| one.port == revision), || {
                        format!("{found:?} is not revision {revision}")
                    })?;
                    let sync = agent.status()?.sync;
                    must(sync.pending_since.is_none(), || format!("{sync:?}"))
                })
            })?;
        }
        Ok(())
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        // Sockets that wait for nobody must not hold the end up.
        for pod in &mut self.pods {
            pod.serving = None;
        }
        let _gone = fs::remove_dir_all(self.manifests.path());
    }
}

/// Says what could not be cleaned up where nobody can be told by a result.
pub(crate) fn complain(what: &str, error: &dyn std::fmt::Display) {
    // Nobody to read it is no reason to stop.
    let _ = writeln!(io::stderr(), "{what}: {error}");
}

/// What the agent of a node is told besides where it is.
fn agent_flags(node: u8, manifests: &Folder) -> Vec<String> {
    let mut flags = vec!["--uplink".to_owned(), "auto".to_owned()];
    flags.extend(["--source".to_owned(), format!("dir:{}", manifests.path().display())]);
    for family in Family::ALL {
        flags.extend(["--node-address".to_owned(), plan::node(family, node).to_string()]);
    }
    if node == 1 {
        flags.extend(["--guest-interface".to_owned(), topology::GUEST.to_owned()]);
    }
    flags
}
