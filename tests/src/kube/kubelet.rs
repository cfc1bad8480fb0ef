//! The node agent of the lab, where a cluster has a kubelet: it registers its Node and runs the Pods that are bound to it.
//!
//! A Pod gets a network namespace with a link to its node, an address of each family, and a process; one with `hostNetwork` gets
//! the node's own. The node agent reports the Pod as running and ready once it serves, honours the grace of its termination, and
//! removes it at the end. The annotation [`READY`] stands for a readiness probe that fails. Like a real one it keeps its Pods
//! while the API server is away, and says later what it could not say then.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::IpAddr,
    path::PathBuf,
    process::Command,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant, SystemTime},
};

use anyhow::{Context, Result, bail, ensure};
use futures::{StreamExt as _, TryStreamExt as _};
use kube::{
    api::{ApiResource, DynamicObject, GroupVersionKind},
    runtime::watcher::{self, watcher},
};
use lb_user::{
    lab::{Child, Netns},
    view::Timestamp,
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::{
    api::Api,
    process::{POD, SERVING},
};
use crate::{
    agent::until,
    lab::{
        complain,
        node::LabNode,
        plan::{self, Family},
        topology::{self, Wires},
    },
};

/// The annotation of a Pod whose value `false` makes its readiness probe fail.
pub const READY: &str = "lab.evenkeel.io/ready";
/// How often the node agent looks at its Pods when nothing comes.
const TURN: Duration = Duration::from_millis(20);
/// How often it says that the node lives; the node controller waits for 40 s.
const HEARTBEAT: Duration = Duration::from_secs(5);
/// The first and the last number of a Pod on its node.
const NUMBERS: std::ops::RangeInclusive<u8> = 10..=199;

/// Where a Pod runs.
#[derive(Clone, Debug)]
pub struct Place {
    /// Its node's number.
    pub node: u8,
    /// Its network namespace.
    pub netns: Netns,
    /// Its addresses, IPv4 first.
    pub addresses: [IpAddr; 2],
    /// What its process says.
    pub log: PathBuf,
}

impl Place {
    /// Its address of a family.
    pub fn ip(&self, family: Family) -> IpAddr {
        self.addresses[usize::from(family == Family::V6)]
    }
}

/// A running node agent; it ends with the value, and its Pods with it.
#[derive(Debug)]
pub struct Kubelet {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    ended: AtomicBool,
    /// Every Pod that runs, by namespace and name.
    places: Mutex<BTreeMap<(String, String), Place>>,
    /// Pods whose process is to be killed, as by a reboot.
    rebooted: AtomicBool,
}

impl Shared {
    fn places(&self) -> MutexGuard<'_, BTreeMap<(String, String), Place>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kubelet {
    /// Registers a node and starts to run its Pods.
    ///
    /// # Errors
    /// Where the API server refuses the node.
    pub fn start(api: &Api, node: &Arc<LabNode>, wires: &Arc<Wires>, folder: PathBuf) -> Result<Self> {
        fs::create_dir_all(&folder)?;
        register(api, node.number)?;
        let shared = Arc::<Shared>::default();
        let events = watch(api, &node.name());
        let mut agent = NodeAgent {
            api: api.clone(),
            node: Arc::clone(node),
            wires: Arc::clone(wires),
            shared: Arc::clone(&shared),
            pods: BTreeMap::new(),
            listed: None,
            last_number: *NUMBERS.end(),
            folder,
            heard: Instant::now(),
        };
        // Children end with their starter's thread: this one lives as long as the node agent.
        let thread = thread::Builder::new()
            .name(format!("lab-kubelet-{}", node.number))
            .spawn(move || agent.run(&events))
            .context("start a node agent")?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    /// Where a Pod runs, if it does.
    pub fn place(&self, namespace: &str, name: &str) -> Option<Place> {
        self.shared
            .places()
            .get(&(namespace.to_owned(), name.to_owned()))
            .cloned()
    }

    /// Has every Pod's process end and start again, as when the node reboots.
    pub fn reboot(&self) {
        self.shared.rebooted.store(true, Ordering::Relaxed);
    }
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic was told where it happened.
            let _ended = thread.join();
        }
    }
}

type Event = watcher::Event<DynamicObject>;

/// Watches the Pods of a node, for ever, whatever happens to the API server.
fn watch(api: &Api, node: &str) -> Receiver<Event> {
    let (sender, events) = channel();
    let kind = ApiResource::from_gvk(&GroupVersionKind::gvk("", "v1", "Pod"));
    let pods = kube::Api::<DynamicObject>::all_with(api.client(), &kind);
    let config = watcher::Config::default().fields(&format!("spec.nodeName={node}"));
    api.runtime().spawn(forward(pods, config, sender));
    events
}

async fn forward(pods: kube::Api<DynamicObject>, config: watcher::Config, sender: Sender<Event>) {
    let mut stream = watcher(pods, config).into_stream().boxed();
    loop {
        match stream.try_next().await {
            Ok(Some(event)) => {
                if sender.send(event).is_err() {
                    return;
                }
            }
            Ok(None) => return,
            // The stream begins anew by itself; this keeps it from doing so in a circle.
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

/// A Pod on its node.
#[derive(Debug)]
struct Pod {
    namespace: String,
    name: String,
    uid: String,
    place: Place,
    /// Its number on the node; none where it has the node's own addresses.
    number: Option<u8>,
    process: Option<Child>,
    /// What its process is told besides its name and addresses.
    arguments: Vec<String>,
    /// Whether the readiness probe would succeed, were it asked.
    probe: bool,
    /// When its grace is over, once it terminates.
    deadline: Option<Instant>,
    /// What the API server has been told: whether it is ready.
    told: Option<bool>,
}

impl Pod {
    fn path(&self) -> String {
        format!("/api/v1/namespaces/{}/pods/{}", self.namespace, self.name)
    }

    fn is_running(&mut self) -> bool {
        self.process
            .as_mut()
            .is_some_and(|process| matches!(process.ended(), Ok(None)))
    }
}

struct NodeAgent {
    api: Api,
    node: Arc<LabNode>,
    wires: Arc<Wires>,
    shared: Arc<Shared>,
    /// By UID.
    pods: BTreeMap<String, Pod>,
    /// The UIDs of a list that is under way.
    listed: Option<BTreeSet<String>>,
    last_number: u8,
    folder: PathBuf,
    heard: Instant,
}

impl NodeAgent {
    fn run(&mut self, events: &Receiver<Event>) {
        while !self.shared.ended.load(Ordering::Relaxed) {
            match events.recv_timeout(TURN) {
                Ok(event) => self.take(event),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            if self.shared.rebooted.swap(false, Ordering::Relaxed) {
                for pod in self.pods.values_mut() {
                    pod.process = None;
                }
            }
            self.look_after();
            if self.heard.elapsed() >= HEARTBEAT {
                self.heard = Instant::now();
                // The next one tries again.
                let _heard = beat(&self.api, self.node.number);
            }
        }
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Init => self.listed = Some(BTreeSet::new()),
            Event::InitApply(pod) | Event::Apply(pod) => {
                if let (Some(listed), Some(uid)) = (&mut self.listed, &pod.metadata.uid) {
                    listed.insert(uid.clone());
                }
                self.see(pod);
            }
            Event::Delete(pod) => {
                if let Some(uid) = pod.metadata.uid {
                    self.forget(&uid);
                }
            }
            Event::InitDone => {
                let listed = self.listed.take().unwrap_or_default();
                let gone: Vec<String> = self.pods.keys().filter(|uid| !listed.contains(*uid)).cloned().collect();
                for uid in gone {
                    self.forget(&uid);
                }
            }
        }
    }

    fn see(&mut self, object: DynamicObject) {
        let Some(uid) = object.metadata.uid.clone() else {
            return;
        };
        if !self.pods.contains_key(&uid) {
            // One that is ending already is not begun.
            if object.metadata.deletion_timestamp.is_some() {
                let name = object.metadata.name.unwrap_or_default();
                let namespace = object.metadata.namespace.unwrap_or_default();
                let path = format!("/api/v1/namespaces/{namespace}/pods/{name}");
                let _gone = self.api.delete(&path, Some(0));
                return;
            }
            match self.begin(&object, &uid) {
                Ok(pod) => {
                    self.shared
                        .places()
                        .insert((pod.namespace.clone(), pod.name.clone()), pod.place.clone());
                    self.pods.insert(uid.clone(), pod);
                }
                Err(error) => {
                    complain("a pod of the lab could not be made", &format!("{error:#}"));
                    return;
                }
            }
        }
        let Some(pod) = self.pods.get_mut(&uid) else {
            return;
        };
        let annotations = object.metadata.annotations.unwrap_or_default();
        pod.probe = annotations.get(READY).is_none_or(|value| value != "false");
        if object.metadata.deletion_timestamp.is_some() {
            let seconds = object.metadata.deletion_grace_period_seconds.unwrap_or(0);
            let end = Instant::now() + Duration::from_secs(seconds.try_into().unwrap_or(0));
            if pod.deadline.is_none()
                && let Some(process) = &pod.process
            {
                // One that has ended already is seen so soon.
                let _told = process.signal(Signal::SIGTERM);
            }
            pod.deadline = Some(pod.deadline.map_or(end, |known| known.min(end)));
        }
    }

    fn begin(&mut self, object: &DynamicObject, uid: &str) -> Result<Pod> {
        let name = object.metadata.name.clone().context("a pod without a name")?;
        let namespace = object.metadata.namespace.clone().context("a pod without a namespace")?;
        let node = self.node.number;
        let spec = &object.data["spec"];
        let log = self.folder.join(format!("{name}-{uid}.log"));
        let (number, place) = if spec["hostNetwork"] == true {
            let addresses = Family::ALL.map(|family| plan::node(family, node));
            let netns = self.node.netns.clone();
            (
                None,
                Place {
                    node,
                    netns,
                    addresses,
                    log,
                },
            )
        } else {
            let number = self.free_number()?;
            let netns = topology::place(false)?;
            self.wires.join_pod(&netns, node, number, &format!("pod{number}"))?;
            let addresses = Family::ALL.map(|family| plan::pod(family, node, number));
            (
                Some(number),
                Place {
                    node,
                    netns,
                    addresses,
                    log,
                },
            )
        };
        let arguments = spec["containers"][0]["args"].as_array().cloned().unwrap_or_default();
        Ok(Pod {
            namespace,
            name,
            uid: uid.to_owned(),
            place,
            number,
            process: None,
            arguments: arguments
                .iter()
                .filter_map(|word| Some(word.as_str()?.to_owned()))
                .collect(),
            probe: true,
            deadline: None,
            told: None,
        })
    }

    /// Numbers go round, so that an address comes back as late as possible.
    fn free_number(&mut self) -> Result<u8> {
        let taken: BTreeSet<u8> = self.pods.values().filter_map(|pod| pod.number).collect();
        for _ in NUMBERS {
            self.last_number = if self.last_number == *NUMBERS.end() {
                *NUMBERS.start()
            } else {
                self.last_number + 1
            };
            if !taken.contains(&self.last_number) {
                return Ok(self.last_number);
            }
        }
        bail!("node {} has no address for another pod", self.node.number)
    }

    fn forget(&mut self, uid: &str) {
        if let Some(pod) = self.pods.remove(uid) {
            let mut places = self.shared.places();
            let key = (pod.namespace.clone(), pod.name.clone());
            // One of the same name may run already.
            if places
                .get(&key)
                .is_some_and(|place| place.addresses == pod.place.addresses)
            {
                places.remove(&key);
            }
        }
    }

    /// Starts what is to run, ends what is to end, and says what has changed.
    fn look_after(&mut self) {
        let mut ended = Vec::new();
        for (uid, pod) in &mut self.pods {
            let runs = pod.is_running();
            if let Some(deadline) = pod.deadline {
                if !runs || Instant::now() >= deadline {
                    pod.process = None;
                    ended.push(uid.clone());
                    continue;
                }
            } else if !runs {
                pod.told = pod.told.map(|_| false);
                match start(&self.node, pod) {
                    Ok(process) => pod.process = Some(process),
                    Err(error) => {
                        complain(
                            &format!("the pod {} could not be started", pod.name),
                            &format!("{error:#}"),
                        );
                        continue;
                    }
                }
            }
            if pod.told != Some(pod.probe) && self.api.patch(&format!("{}/status", pod.path()), &status(pod)).is_ok() {
                pod.told = Some(pod.probe);
            }
        }
        for uid in ended {
            // While the API server is away, the pod is dead and its object stays: the next turn tries again.
            let Some(pod) = self.pods.get(&uid) else { continue };
            if self.api.delete(&pod.path(), Some(0)).is_ok() {
                self.forget(&uid);
            }
        }
    }
}

/// Starts a pod's process in its node's cgroup and its own namespace, and waits until it serves.
fn start(node: &LabNode, pod: &Pod) -> Result<Child> {
    let mut command = Command::new(std::env::current_exe().context("find this program")?);
    command.args([POD, "--name", &pod.name]);
    for address in pod.place.addresses {
        command.args(["--address", &address.to_string()]);
    }
    command.args(&pod.arguments);
    node.cgroup().place(&mut command)?;
    pod.place.netns.place(&mut command);
    let before = fs::metadata(&pod.place.log).map_or(0, |file| file.len());
    let mut process = Child::start(&mut command, &pod.place.log)?;
    until("a pod to serve", || {
        let said = fs::read_to_string(&pod.place.log)?;
        let said = said.get(before as usize..).unwrap_or_default();
        if let Some(status) = process.ended()? {
            // Waiting on is of no use.
            return Ok(Err(anyhow::anyhow!("it ended ({status}): {said}")));
        }
        ensure!(said.contains(SERVING), "it says {said:?}");
        Ok(Ok(()))
    })??;
    Ok(process)
}

/// What the API server is told of a running Pod.
fn status(pod: &Pod) -> Value {
    let word = |yes: bool| if yes { "True" } else { "False" };
    let condition = |kind: &str, yes: bool| json!({"type": kind, "status": word(yes)});
    let ips: Vec<Value> = pod.place.addresses.iter().map(|ip| json!({"ip": ip})).collect();
    let hosts: Vec<Value> = Family::ALL
        .map(|family| json!({"ip": plan::node(family, pod.place.node)}))
        .into();
    let now = now();
    json!({"metadata": {"uid": pod.uid}, "status": {
        "phase": "Running", "startTime": now, "podIP": pod.place.addresses[0], "podIPs": ips,
        "hostIP": plan::node(Family::V4, pod.place.node), "hostIPs": hosts,
        "conditions": [
            condition("Initialized", true), condition("PodScheduled", true),
            condition("ContainersReady", pod.probe), condition("Ready", pod.probe),
        ],
        "containerStatuses": [{
            "name": "serve", "ready": pod.probe, "started": true, "restartCount": 0, "image": "lab", "imageID": "lab",
            "state": {"running": {"startedAt": now}},
        }],
    }})
}

/// The zone of a node: the first two share one.
pub fn zone(node: u8) -> &'static str {
    if node <= 2 { "zone-a" } else { "zone-b" }
}

/// Makes a node's objects: the Node with its addresses, and its lease.
///
/// # Errors
/// Why the server refuses.
pub fn register(api: &Api, number: u8) -> Result<()> {
    let name = crate::lab::node::name(number);
    api.apply(&json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": name, "labels": {
            "kubernetes.io/hostname": name, "kubernetes.io/os": "linux",
            "topology.kubernetes.io/zone": zone(number), "topology.kubernetes.io/region": "lab",
        }},
        "spec": {"podCIDRs": Family::ALL.map(|family| {
            let (block, length) = plan::pod_block(family, number);
            format!("{block}/{length}")
        })},
    }))?;
    beat(api, number)
}

/// Says that a node lives and what its addresses are.
fn beat(api: &Api, number: u8) -> Result<()> {
    let name = crate::lab::node::name(number);
    let now = now();
    let addresses: Vec<Value> = Family::ALL
        .map(|family| json!({"type": "InternalIP", "address": plan::node(family, number)}))
        .into_iter()
        .chain([json!({"type": "Hostname", "address": name})])
        .collect();
    let ready = json!({
        "type": "Ready", "status": "True", "reason": "LabNodeReady", "message": "the node agent lives",
        "lastHeartbeatTime": now,
    });
    api.patch(
        &format!("/api/v1/nodes/{name}/status"),
        &json!({"status": {
            "addresses": addresses, "conditions": [ready],
            "capacity": {"pods": "200", "cpu": "1", "memory": "1Gi"},
            "allocatable": {"pods": "200", "cpu": "1", "memory": "1Gi"},
        }}),
    )?;
    api.apply(&json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": {"name": name, "namespace": "kube-node-lease"},
        "spec": {
            "holderIdentity": name, "leaseDurationSeconds": 40,
            // With microseconds, as leases want them.
            "renewTime": format!("{}.000000Z", &now[..19]),
        },
    }))
    .map(drop)
}

fn now() -> String {
    Timestamp::from_system(SystemTime::now()).to_string()
}
