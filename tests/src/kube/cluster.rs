//! The cluster: control plane, wires, three nodes with node agents and agents, and who dials from outside.

use std::{
    collections::BTreeMap,
    fs,
    net::{IpAddr, Ipv4Addr},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
};

use anyhow::{Context, Result, ensure};
use lb_user::lab::Netns;
use nix::mount::{MsFlags, mount};
use serde_json::json;

use super::{
    account,
    api::Api,
    contents::Contents,
    control::{self, ControlPlane},
    kubelet::{Kubelet, Place},
    names::NameServer,
    stage::{Stack, Stage},
};
use crate::{
    agent::{must, until},
    lab::{
        dial::Dialer,
        node::{self, LabNode, Sizes},
        plan::{self, Family},
        topology::{self, Wires},
    },
};

/// The Service by which the lab knows that agents are up to date.
const MARKER: &str = "lab-marker";

/// The cluster.
#[derive(Debug)]
pub struct Cluster {
    // Dropped in this order: agents first, then their pods, then what they ask, then the wires.
    shadow_places: Mutex<BTreeMap<u8, Netns>>,
    nodes: Vec<Arc<LabNode>>,
    kubelets: Vec<Kubelet>,
    names: NameServer,
    plane: Mutex<ControlPlane>,
    /// The namespaces and links.
    pub wires: Arc<Wires>,
    api: Api,
    token: PathBuf,
    next: AtomicU32,
    folder: tempfile::TempDir,
}

impl Cluster {
    /// Builds everything and returns when all agents are ready.
    ///
    /// `say` is told of each step. The calling thread must be in mounts of its own, and live as long as the value.
    ///
    /// # Errors
    /// Where something cannot be built.
    pub fn new(say: &dyn Fn(&str)) -> Result<Self> {
        let cluster = Self::without_agents(say)?;
        say("starting the agents");
        cluster.start_agents()?;
        cluster.settle()?;
        Ok(cluster)
    }

    /// As [`Self::new`], and starts no agent.
    ///
    /// # Errors
    /// Where something cannot be built.
    pub fn without_agents(say: &dyn Fn(&str)) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("evenkeel-kube-").tempdir()?;
        say("laying the wires");
        let wires = Arc::new(Wires::new().context("lay the wires")?);
        say("starting etcd, kube-apiserver and kube-controller-manager");
        let plane = ControlPlane::start(&wires, folder.path())?;
        let api = plane.api().clone();
        let v4 = plan::control(Family::V4);
        let IpAddr::V4(answer) = v4 else {
            unreachable!("an IPv4 address was asked for");
        };
        let names = NameServer::start(&plane.netns, v4, control::NAME, answer)?;
        ask_names_at(folder.path(), v4)?;
        account::grant(&api)?;
        let token = folder.path().join("token");
        account::write_token(&api, &token)?;
        let kubeconfig = folder.path().join("agent.kubeconfig");
        plane.write_account_kubeconfig(&kubeconfig, control::NAME, &token)?;
        say("registering three nodes");
        let (mut nodes, mut kubelets) = (Vec::new(), Vec::new());
        for number in 1..=plan::NODES {
            let netns = wires.node(number).clone();
            let flags = agent_flags(&kubeconfig);
            let node = Arc::new(LabNode::new(number, netns, folder.path(), &flags, Sizes::SMALL)?);
            let pods = folder.path().join(format!("pods{number}"));
            kubelets.push(Kubelet::start(&api, &node, &wires, pods)?);
            nodes.push(node);
        }
        until("the default account, without which no pod may be made", || {
            api.get("/api/v1/namespaces/default/serviceaccounts/default")?
                .context("it is not there")
        })?;
        Ok(Self {
            shadow_places: Mutex::default(),
            nodes,
            kubelets,
            names,
            plane: Mutex::new(plane),
            wires,
            api,
            token,
            next: AtomicU32::new(1),
            folder,
        })
    }

    /// Starts the agents of all nodes that have none, and waits until they are ready.
    ///
    /// # Errors
    /// Where one does not become ready.
    pub fn start_agents(&self) -> Result<()> {
        self.nodes.iter().try_for_each(|node| node.launch())?;
        let ready = self.nodes.iter().try_for_each(|node| node.wait_ready());
        ready.with_context(|| self.logs(12))
    }

    /// The API server, asked by an administrator.
    pub fn api(&self) -> &Api {
        &self.api
    }

    /// The control plane's processes.
    pub fn plane(&self) -> MutexGuard<'_, ControlPlane> {
        self.plane.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The name server.
    pub fn names(&self) -> &NameServer {
        &self.names
    }

    /// The file with the agents' token.
    pub fn token(&self) -> &Path {
        &self.token
    }

    /// The nodes.
    pub fn nodes(&self) -> &[Arc<LabNode>] {
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

    /// A node's node agent.
    pub fn kubelet(&self, number: u8) -> &Kubelet {
        &self.kubelets[usize::from(number) - 1]
    }

    /// The folder of everything that the cluster wrote.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// A place for one case: its objects are removed when the value is dropped.
    pub fn stage(&self, purpose: &str, stack: Stack) -> Stage<'_> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}-{number}", purpose.to_lowercase().replace('_', "-"));
        Stage::new(self, name, stack)
    }

    /// Somebody outside who dials.
    pub fn outside(&self) -> Dialer<'_> {
        Dialer::new(&self.wires.client)
    }

    /// Where a Pod of the namespace `default` runs.
    ///
    /// # Errors
    /// Where it does not run.
    pub fn place(&self, name: &str) -> Result<Place> {
        self.kubelets
            .iter()
            .find_map(|kubelet| kubelet.place("default", name))
            .with_context(|| format!("the pod {name} does not run"))
    }

    /// Dials from inside a Pod, with sockets in its node's cgroup.
    ///
    /// # Errors
    /// Where the Pod does not run.
    pub fn inside<T>(&self, place: &Place, work: impl FnOnce(Dialer<'_>) -> T) -> Result<T> {
        self.node(place.node).inside(|| work(Dialer::new(&place.netns)))
    }

    /// Returns once every running agent has brought into its kernel whatever the API server had when this was called.
    ///
    /// # Errors
    /// Where an agent does not come that far.
    pub fn settle(&self) -> Result<()> {
        let revision = self.mark()?;
        for node in self.nodes.iter().filter(|node| node.runs()) {
            wait_for_mark(node, revision)?;
        }
        Ok(())
    }

    /// Leaves a mark in the API server behind everything that it has now; agents that have it have all before it.
    ///
    /// Versions are one sequence over all kinds, and each kind is followed in its own order: so the mark is one in each kind.
    ///
    /// # Errors
    /// Why the server refuses.
    pub fn mark(&self) -> Result<u16> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let revision = 1_000 + (number % 60_000) as u16;
        self.api.apply(&json!({
            "apiVersion": "v1", "kind": "Service", "metadata": {"name": MARKER, "namespace": "default"},
            "spec": {
                "clusterIPs": null, "ipFamilyPolicy": "SingleStack", "ipFamilies": ["IPv4"],
                "ports": [{"name": "mark", "port": revision, "protocol": "TCP"}],
            },
        }))?;
        self.api.apply(&json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": {"name": MARKER, "namespace": "default", "labels": {"kubernetes.io/service-name": MARKER}},
            // An address by which the slice's own revision is known.
            "endpoints": [{"addresses": [marker_address(revision)]}],
            "ports": [{"name": "mark", "port": revision, "protocol": "TCP"}],
        }))?;
        Ok(revision)
    }

    /// What a node's kernel holds, in words that do not depend on how it came about.
    ///
    /// # Errors
    /// Where its agent does not answer.
    pub fn contents(&self, number: u8) -> Result<Contents> {
        Contents::of(self.node(number))
    }

    /// What a node's kernel would hold after a cold start now.
    ///
    /// # Errors
    /// Where that agent does not become ready.
    pub fn cold_contents(&self, number: u8) -> Result<Contents> {
        let revision = self.mark()?;
        self.beside(number, |cold| {
            cold.start()?;
            wait_for_mark(cold, revision)?;
            Contents::of(cold)
        })
    }

    /// Does something with a second machine of a node's name, in a place of its own; no agent runs on it yet.
    ///
    /// # Errors
    /// Where it cannot be made.
    pub fn beside<T>(&self, number: u8, work: impl FnOnce(&LabNode) -> Result<T>) -> Result<T> {
        let netns = self.shadow_place(number)?;
        let folder = self.folder.path().join(format!("shadow{number}"));
        let kubeconfig = self.folder.path().join("shadow.kubeconfig");
        self.plane()
            .write_account_kubeconfig(&kubeconfig, &plan::control(Family::V4).to_string(), &self.token)?;
        let cold = LabNode::new(number, netns, &folder, &agent_flags(&kubeconfig), Sizes::SMALL)?;
        work(&cold).with_context(|| format!("the machine beside node {number} said:\n{}", cold.log()))
    }

    /// The namespace beside a node's, made once.
    fn shadow_place(&self, number: u8) -> Result<Netns> {
        let mut places = self.shadow_places.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = places.get(&number) {
            return Ok(place.clone());
        }
        let place = topology::place(true)?;
        self.wires.join_shadow(&place, number)?;
        places.insert(number, place.clone());
        Ok(place)
    }

    /// What everybody has said last.
    pub fn logs(&self, lines: usize) -> String {
        node::logs(self.nodes.iter().map(AsRef::as_ref), lines)
    }

    /// Every namespace by its name, with the number of the node that it belongs to.
    pub fn places(&self) -> Vec<(String, Option<u8>, Netns)> {
        let mut places = vec![
            ("client".to_owned(), None, self.wires.client.clone()),
            ("router".to_owned(), None, self.wires.router.clone()),
            ("control".to_owned(), None, self.plane().netns.clone()),
        ];
        for node in &self.nodes {
            places.push((node.name(), Some(node.number), node.netns.clone()));
        }
        places
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // Agents first: they would only tell that everything goes.
        for node in &self.nodes {
            if let Err(error) = node.wipe() {
                crate::lab::complain("a node of the lab left something behind", &format!("{error:#}"));
            }
        }
    }
}

/// Waits until an agent has brought a mark into its kernel.
///
/// # Errors
/// What it has instead.
pub fn wait_for_mark(node: &LabNode, revision: u16) -> Result<()> {
    let address = marker_address(revision);
    until("an agent to take all changes", || {
        node.ask(|agent| {
            let found = agent.service(MARKER)?;
            must(found.frontends.iter().any(|one| one.port == revision), || {
                format!("{found:?} is not revision {revision}")
            })?;
            let backends = agent.backends()?;
            must(
                backends
                    .iter()
                    .any(|one| one.service == MARKER && one.addr == IpAddr::from(address)),
                || format!("no backend is {address}"),
            )?;
            let sync = agent.status()?.sync;
            must(sync.pending_since.is_none(), || format!("{sync:?}"))
        })
    })
}

/// Addresses of the benchmarking block, which nobody routes.
fn marker_address(revision: u16) -> Ipv4Addr {
    let [high, low] = revision.to_be_bytes();
    Ipv4Addr::new(198, 18, high, low)
}

/// What the agents are told besides where they are.
fn agent_flags(kubeconfig: &Path) -> Vec<String> {
    let kubeconfig = kubeconfig.display().to_string();
    let flags = ["--uplink", "auto", "--source", "kube", "--kubeconfig", &kubeconfig];
    flags.map(str::to_owned).into()
}

/// Has this process and those that it starts ask one name server, for names that no file tells.
fn ask_names_at(folder: &Path, server: IpAddr) -> Result<()> {
    let file = folder.join("resolv.conf");
    fs::write(&file, format!("nameserver {server}\noptions timeout:1 attempts:1\n"))?;
    ensure!(
        Path::new("/etc/resolv.conf").exists(),
        "/etc/resolv.conf is not there, so it cannot be replaced for the lab"
    );
    let no_data = None::<&str>;
    mount(Some(&file), "/etc/resolv.conf", no_data, MsFlags::MS_BIND, no_data)
        .context("replace /etc/resolv.conf in the lab's own mounts")
}
