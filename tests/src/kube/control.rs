//! The control plane: etcd, kube-apiserver and kube-controller-manager in a namespace of their own.
//!
//! TLS with an authority of the lab's own, RBAC on, the API server at `6443` of [`plan::control`], by address and by name.
//! The invariant: the processes end with the value, and their thread is the one that made it.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr},
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};
use lb_user::lab::{Child, Netns};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use super::{api::Api, pki::Pki, programs};
use crate::{
    interrupt,
    lab::{
        plan::{self, Family},
        topology::{Wires, place},
    },
};

/// The port of the API server.
pub const PORT: u16 = 6443;
/// The API server's name.
pub const NAME: &str = "kube.lab.internal";
/// How long a start may take.
const PATIENCE: Duration = Duration::from_mins(1);
/// The controllers that make what proxies read, and what those need.
const CONTROLLERS: &str = "endpointslice-controller,endpointslice-mirroring-controller,endpoints-controller,\
node-lifecycle-controller,node-ipam-controller,pod-garbage-collector-controller,namespace-controller,\
garbage-collector-controller,serviceaccount-controller,serviceaccount-token-controller,\
root-ca-certificate-publisher-controller,service-cidr-controller";

/// The running control plane.
#[derive(Debug)]
pub struct ControlPlane {
    // Dropped in this order.
    controllers: Option<Child>,
    server: Option<Child>,
    etcd: Option<Child>,
    /// Where it runs.
    pub netns: Netns,
    /// Its keys.
    pub pki: Pki,
    folder: PathBuf,
    api: Api,
    // After everything whose connections run on it.
    _runtime: Runtime,
}

impl ControlPlane {
    /// Starts everything and returns when it is well.
    ///
    /// # Errors
    /// Where a program is not there, ends, or does not become well.
    pub fn start(wires: &Wires, folder: &Path) -> Result<Self> {
        let netns = place(false)?;
        wires.join_control(&netns)?;
        let pki = Pki::new(&folder.join("pki"))?;
        issue_server(&pki)?;
        pki.issue_client("admin", "lab", true)?;
        pki.issue_client("controllers", "system:kube-controller-manager", false)?;
        fs::write(folder.join("audit.yaml"), audit_policy().to_string())?;
        let local = format!("https://127.0.0.1:{PORT}");
        let outside = format!("https://{}:{PORT}", plan::control(Family::V4));
        write_kubeconfig(
            &folder.join("admin.kubeconfig"),
            &pki,
            &outside,
            &client_of(&pki, "admin"),
        )?;
        write_kubeconfig(
            &folder.join("local.kubeconfig"),
            &pki,
            &local,
            &client_of(&pki, "admin"),
        )?;
        let user = client_of(&pki, "controllers");
        write_kubeconfig(&folder.join("controllers.kubeconfig"), &pki, &local, &user)?;
        let runtime = runtime(&netns)?;
        let api = runtime.block_on(client(&folder.join("local.kubeconfig")))?;
        let mut plane = Self {
            controllers: None,
            server: None,
            etcd: None,
            netns,
            pki,
            folder: folder.to_owned(),
            api: Api::new(api, runtime.handle().clone()),
            _runtime: runtime,
        };
        plane.start_etcd()?;
        plane.start_server()?;
        plane.start_controllers()?;
        Ok(plane)
    }

    /// The API server, asked by an administrator.
    pub fn api(&self) -> &Api {
        &self.api
    }

    /// A kubeconfig of an administrator, which serves from everywhere in the lab.
    pub fn kubeconfig(&self) -> PathBuf {
        self.folder.join("admin.kubeconfig")
    }

    /// Who asked for what, a JSON object a line.
    pub fn audit_log(&self) -> PathBuf {
        self.folder.join("audit.log")
    }

    /// Starts etcd on the data that lie there.
    ///
    /// # Errors
    /// Where it does not become well.
    pub fn start_etcd(&mut self) -> Result<()> {
        let mut command = self.command("etcd")?;
        command
            .args(["--name", "lab", "--data-dir"])
            .arg(self.folder.join("etcd"))
            .args(["--listen-client-urls", "http://127.0.0.1:2379"])
            .args(["--advertise-client-urls", "http://127.0.0.1:2379"])
            .args(["--listen-peer-urls", "http://127.0.0.1:2380"])
            .args(["--initial-advertise-peer-urls", "http://127.0.0.1:2380"])
            .args(["--initial-cluster", "lab=http://127.0.0.1:2380"])
            .args(["--unsafe-no-fsync", "--log-level", "warn"]);
        self.etcd = Some(Child::start(&mut command, &self.log("etcd"))?);
        Ok(())
    }

    /// Starts the API server and returns when it is ready.
    ///
    /// # Errors
    /// Where it ends or does not become ready.
    pub fn start_server(&mut self) -> Result<()> {
        let mut command = self.command("kube-apiserver")?;
        let file = |name| self.pki.file(name).display().to_string();
        let ranges = "10.96.0.0/16,fd00:96::/112";
        let control = plan::control(Family::V4).to_string();
        let folder = self.folder.display();
        let flags = [
            "--etcd-servers=http://127.0.0.1:2379".to_owned(),
            format!("--secure-port={PORT}"),
            format!("--advertise-address={control}"),
            format!("--service-cluster-ip-range={ranges}"),
            format!("--client-ca-file={}", file("ca.crt")),
            format!("--tls-cert-file={}", file("server.crt")),
            format!("--tls-private-key-file={}", file("server.key")),
            format!("--service-account-issuer=https://{NAME}"),
            format!("--service-account-key-file={}", file("tokens.pub")),
            format!("--service-account-signing-key-file={}", file("tokens.key")),
            "--authorization-mode=Node,RBAC".to_owned(),
            "--allow-privileged=true".to_owned(),
            format!("--audit-policy-file={folder}/audit.yaml"),
            format!("--audit-log-path={folder}/audit.log"),
            // What has no fixed end is ended soon, so that tests see many ends.
            "--min-request-timeout=60".to_owned(),
            "--shutdown-delay-duration=0s".to_owned(),
            "--profiling=false".to_owned(),
        ];
        command.args(flags);
        self.server = Some(Child::start(&mut command, &self.log("kube-apiserver"))?);
        self.wait_for_server()
    }

    /// Waits until the API server says that it is ready.
    ///
    /// # Errors
    /// Where it ends, or is not ready in time.
    pub fn wait_for_server(&mut self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(server) = &mut self.server
                && let Some(status) = server.ended()?
            {
                bail!("kube-apiserver ended ({status}): {}", tail(server.log()));
            }
            match self.api.is_well("/readyz") {
                Ok(()) => return Ok(()),
                Err(error) if Instant::now() >= deadline => {
                    return Err(error).with_context(|| format!("kube-apiserver is not ready:\n{}", self.logs()));
                }
                Err(_) => thread::sleep(Duration::from_millis(20)),
            }
            interrupt::check()?;
        }
    }

    /// Starts the controllers.
    ///
    /// # Errors
    /// Where they cannot be started.
    pub fn start_controllers(&mut self) -> Result<()> {
        let mut command = self.command("kube-controller-manager")?;
        let config = self.folder.join("controllers.kubeconfig").display().to_string();
        let flags = [
            format!("--kubeconfig={config}"),
            format!("--controllers={CONTROLLERS}"),
            "--leader-elect=false".to_owned(),
            "--use-service-account-credentials=true".to_owned(),
            format!(
                "--service-account-private-key-file={}",
                self.pki.file("tokens.key").display()
            ),
            format!("--root-ca-file={}", self.pki.file("ca.crt").display()),
            "--allocate-node-cidrs=false".to_owned(),
            "--secure-port=0".to_owned(),
            "--kube-api-qps=500".to_owned(),
            "--kube-api-burst=1000".to_owned(),
            "--concurrent-service-endpoint-syncs=10".to_owned(),
        ];
        command.args(flags);
        self.controllers = Some(Child::start(&mut command, &self.log("kube-controller-manager"))?);
        Ok(())
    }

    /// Kills the API server without warning.
    ///
    /// # Errors
    /// The kernel's.
    pub fn kill_server(&mut self) -> Result<()> {
        match self.server.take() {
            Some(mut server) => Ok(server.kill()?),
            None => Ok(()),
        }
    }

    /// Stops the API server's processor time, or lets it go on: connections stay open and nobody answers.
    ///
    /// # Errors
    /// Where it does not run.
    pub fn freeze_server(&self, frozen: bool) -> Result<()> {
        let server = self.server.as_ref().context("the API server does not run")?;
        Ok(server.signal(if frozen { Signal::SIGSTOP } else { Signal::SIGCONT })?)
    }

    /// Ends all of etcd's history before now: who reads from an older version is told that it is gone.
    ///
    /// # Errors
    /// What etcd answers.
    pub fn compact(&self) -> Result<()> {
        let status = self.ask_etcd("/v3/maintenance/status", &json!({}))?;
        let revision = status["header"]["revision"]
            .as_str()
            .context("etcd names no revision")?;
        self.ask_etcd("/v3/kv/compaction", &json!({"revision": revision, "physical": true}))
            .map(drop)
    }

    /// Gives the API server a fresh certificate, which it reads by itself.
    ///
    /// # Errors
    /// Where it cannot be written.
    pub fn rotate_server_certificate(&self) -> Result<()> {
        issue_server(&self.pki)
    }

    /// Writes a kubeconfig for somebody with a token in a file, who knows the server by a host name or address.
    ///
    /// # Errors
    /// Where it cannot be written.
    pub fn write_account_kubeconfig(&self, path: &Path, host: &str, token: &Path) -> Result<()> {
        let server = format!("https://{host}:{PORT}");
        write_kubeconfig(path, &self.pki, &server, &json!({"tokenFile": token}))
    }

    /// What each process has said last.
    pub fn logs(&self) -> String {
        ["etcd", "kube-apiserver", "kube-controller-manager"]
            .map(|name| format!("--- {name}:\n{}", tail(&self.log(name))))
            .join("\n")
    }

    fn command(&self, program: &str) -> Result<Command> {
        let mut command = Command::new(programs::find(program)?);
        command.current_dir(&self.folder);
        self.netns.place(&mut command);
        Ok(command)
    }

    fn log(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{name}.log"))
    }

    fn ask_etcd(&self, path: &str, question: &Value) -> Result<Value> {
        let address = (Ipv4Addr::LOCALHOST, 2379);
        let answer = self.netns.run(|| super::web::post(address.into(), path, question))??;
        Ok(answer)
    }
}

fn issue_server(pki: &Pki) -> Result<()> {
    let addresses: Vec<IpAddr> = [
        Ipv4Addr::LOCALHOST.into(),
        plan::control(Family::V4),
        plan::control(Family::V6),
        plan::cluster_ip(Family::V4, 1),
    ]
    .into();
    pki.issue_server(&[NAME, "localhost", "kubernetes.default.svc"], &addresses)
}

/// A runtime whose threads are in a namespace: what it connects to is there.
fn runtime(netns: &Netns) -> Result<Runtime> {
    let inside = netns.clone();
    Ok(tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .thread_name("lab-kube")
        .on_thread_start(move || {
            // A thread elsewhere would only fail to connect, and say so.
            let _entered = inside.enter_current_thread();
        })
        .build()?)
}

async fn client(kubeconfig: &Path) -> Result<Client> {
    let kubeconfig = Kubeconfig::read_from(kubeconfig)?;
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    Ok(Client::try_from(config)?)
}

fn client_of(pki: &Pki, name: &str) -> Value {
    json!({
        "client-certificate": pki.file(&format!("{name}.crt")),
        "client-key": pki.file(&format!("{name}.key")),
    })
}

fn write_kubeconfig(path: &Path, pki: &Pki, server: &str, user: &Value) -> Result<()> {
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "lab",
        "clusters": [{"name": "lab", "cluster": {"server": server, "certificate-authority": pki.file("ca.crt")}}],
        "users": [{"name": "lab", "user": user}],
        "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "lab"}}],
    });
    // JSON is YAML.
    fs::write(path, config.to_string()).with_context(|| format!("write {}", path.display()))
}

/// Tells what accounts ask for, and nothing of what administrators and controllers do.
fn audit_policy() -> Value {
    json!({
        "apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"],
        "rules": [
            {"level": "Metadata", "users": [super::account::USER]},
            {"level": "None"},
        ],
    })
}

fn tail(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let from = text.lines().count().saturating_sub(30);
    text.lines().skip(from).collect::<Vec<_>>().join("\n")
}
