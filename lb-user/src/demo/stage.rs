//! The place of an arm of the demo: a client namespace, a namespace with six backends, and the folder of the run.

use std::{
    collections::BTreeMap,
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
    process,
};

use anyhow::{Context, Result};

use crate::lab::{
    Netns, Server,
    client::{Client, Load},
    link,
    server::Manner,
};

/// How many source ports the client has: few, so that each is used again within a moment.
pub(super) const SOURCE_PORTS: u16 = 200;
const FIRST_SOURCE_PORT: u16 = 40_000;
/// The Service that is dialled over TCP.
pub(super) const WEB: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 96, 0, 10)), 80);
/// The Service that is dialled over UDP.
pub(super) const NAMES: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 96, 0, 53)), 53);
/// The backends' TCP port.
pub(super) const TARGET: u16 = 8080;
/// The backends' UDP port.
pub(super) const NAMES_TARGET: u16 = 5353;
/// All backends of the demo, in the order in which they join.
pub(super) const BACKENDS: u8 = 6;

/// The TCP address of the `n`th backend, counted from 1.
pub(super) fn backend(n: u8) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::new(10, 244, 1, n), TARGET))
}

/// The TCP addresses of the first `n` backends.
pub(super) fn backends(n: u8) -> Vec<SocketAddr> {
    (1..=n).map(backend).collect()
}

/// The two namespaces of an arm and the servers in one of them.
#[derive(Debug)]
pub(super) struct Stage {
    /// The node: the client and the balancer are here.
    pub(super) client: Netns,
    pods: Netns,
    web: BTreeMap<SocketAddr, Server>,
    _names: Server,
}

impl Stage {
    /// Sets the namespaces up and starts every server.
    pub(super) fn new() -> Result<Self> {
        let (client, pods) = (Netns::new()?, Netns::new()?);
        link::join((&client, "node0"), (&pods, "pods0"))?;
        let gateway = IpAddr::from([10, 244, 255, 254]);
        link::add_address(&client, "node0", IpAddr::from([10, 244, 0, 1]), 16)?;
        link::add_address(&pods, "pods0", gateway, 16)?;
        for backend in backends(BACKENDS) {
            link::add_address(&pods, "pods0", backend.ip(), 16)?;
        }
        // A Service's address is routed like any other: what rewrites packets needs a route first.
        link::add_default_route(&client, "node0", gateway)?;
        client.set_local_ports(FIRST_SOURCE_PORT, FIRST_SOURCE_PORT + SOURCE_PORTS - 1)?;
        let names: Vec<_> = backends(BACKENDS)
            .iter()
            .map(|b| SocketAddr::new(b.ip(), NAMES_TARGET))
            .collect();
        let names = Server::start(&pods, &names, Manner::Datagram)?;
        let mut stage = Self {
            client,
            pods,
            web: BTreeMap::new(),
            _names: names,
        };
        for address in backends(BACKENDS) {
            stage.start_server(address)?;
        }
        Ok(stage)
    }

    /// Starts a backend's server (again).
    pub(super) fn start_server(&mut self, address: SocketAddr) -> Result<()> {
        let server = Server::start(&self.pods, &[address], Manner::Greet)?;
        self.web.insert(address, server);
        Ok(())
    }

    /// Stops a backend's server: from now on its port refuses.
    pub(super) fn stop_server(&mut self, address: SocketAddr) {
        self.web.remove(&address);
    }

    /// A slow client for those who stay to look around.
    pub(super) fn trickle(&self) -> Result<Client> {
        let load = Load {
            rate: Some(50.0),
            concurrency: 1,
            ..Load::tcp(WEB)
        };
        Ok(Client::start(&self.client, &load)?)
    }
}

/// The run's folder with manifests, control socket and log.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    keep: bool,
}

const PREFIX: &str = "evenkeel-demo-";

impl Folder {
    /// Makes the folder, for root's eyes alone, and removes those of demos that were killed.
    pub(super) fn new() -> Result<Self> {
        let base = std::env::temp_dir();
        remove_stale(&base);
        let path = base.join(format!("{PREFIX}{}", process::id()));
        fs::DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .with_context(|| format!("make the folder {}", path.display()))?;
        let folder = Self { path, keep: false };
        fs::create_dir(folder.manifests()).context("make the folder for manifests")?;
        // Told apart from kept ones, which nobody may remove but their owner.
        fs::write(folder.path.join(DISPOSABLE), "").context("mark the folder")?;
        Ok(folder)
    }

    /// Lets the folder stay when the demo ends.
    pub(super) fn keep(&mut self) -> Result<()> {
        fs::remove_file(self.path.join(DISPOSABLE)).context("unmark the folder")?;
        self.keep = true;
        Ok(())
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn manifests(&self) -> PathBuf {
        self.path.join("manifests")
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.path.join("agent.sock")
    }

    pub(super) fn log(&self) -> PathBuf {
        self.path.join("agent.log")
    }
}

const DISPOSABLE: &str = ".disposable";

impl Drop for Folder {
    fn drop(&mut self) {
        if !self.keep
            && let Err(error) = fs::remove_dir_all(&self.path)
        {
            tracing::warn!(%error, folder = %self.path.display(), "the demo's folder was left behind");
        }
    }
}

fn remove_stale(base: &Path) {
    for entry in fs::read_dir(base).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let maker = name
            .to_str()
            .and_then(|n| n.strip_prefix(PREFIX))
            .and_then(|pid| pid.parse::<u32>().ok());
        let path = entry.path();
        if let Some(pid) = maker
            && !Path::new("/proc").join(pid.to_string()).exists()
            && entry.metadata().is_ok_and(|meta| meta.is_dir() && meta.uid() == 0)
            && path.join(DISPOSABLE).exists()
        {
            // In the way of nobody; the next demo tries again.
            let _ = fs::remove_dir_all(path);
        }
    }
}
