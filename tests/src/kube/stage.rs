//! Where one case plays: its own Pods and Services, removed when it is over.

use std::{
    cell::RefCell,
    collections::BTreeSet,
    fmt,
    net::{IpAddr, SocketAddr},
};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::{
    Cluster,
    api::path_of,
    kubelet::{Place, READY},
};
use crate::{
    agent::until,
    lab::{
        complain,
        dial::{Dialer, Failure},
        node,
        plan::{self, Family, TARGET, TARGET_SECOND},
        serve::Met,
    },
};

/// The port that Services are dialled at, TCP and UDP.
pub const PORT: u16 = 80;

/// The families of a Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stack {
    /// IPv4 alone.
    V4,
    /// IPv6 alone.
    V6,
    /// Both.
    Dual,
}

impl Stack {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::V4, Self::V6, Self::Dual];

    /// The families, the first one first.
    pub const fn families(self) -> &'static [Family] {
        match self {
            Self::V4 => &[Family::V4],
            Self::V6 => &[Family::V6],
            Self::Dual => &[Family::V4, Family::V6],
        }
    }
}

impl fmt::Display for Stack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V4 => "v4",
            Self::V6 => "v6",
            Self::Dual => "dual",
        })
    }
}

/// A Pod of a case.
#[derive(Clone, Debug)]
pub struct StagePod {
    /// Its name, which its servers say.
    pub name: String,
    /// Where it runs.
    pub place: Place,
}

impl StagePod {
    /// Its address and the port that it serves on.
    pub fn at(&self, family: Family) -> SocketAddr {
        plan::at(self.place.ip(family), TARGET)
    }
}

/// The conditions of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conditions {
    /// Whether it is to get new connections.
    pub ready: bool,
    /// Whether it can serve.
    pub serving: bool,
    /// Whether it is about to end.
    pub terminating: bool,
}

impl Conditions {
    /// Of a Pod that terminates and still serves.
    pub const DRAINING: Self = Self {
        ready: false,
        serving: true,
        terminating: true,
    };

    fn read(object: &Value) -> Self {
        Self {
            ready: object["ready"] == true,
            serving: object["serving"] == true,
            terminating: object["terminating"] == true,
        }
    }
}

/// A Service of a case, as the API server made it.
#[derive(Clone, Debug)]
pub struct StageService {
    /// Its name.
    pub name: String,
    /// The object.
    pub object: Value,
}

impl StageService {
    /// Its path.
    pub fn path(&self) -> String {
        format!("/api/v1/namespaces/default/services/{}", self.name)
    }

    /// The path of its slices.
    pub fn slices_path(&self) -> String {
        let label = format!("labelSelector=kubernetes.io%2Fservice-name%3D{}", self.name);
        format!("/apis/discovery.k8s.io/v1/namespaces/default/endpointslices?{label}")
    }

    /// Its cluster address of a family, with the port.
    ///
    /// # Errors
    /// Where it has none.
    pub fn cluster(&self, family: Family) -> Result<SocketAddr> {
        let all = self.object["spec"]["clusterIPs"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        let found = all
            .iter()
            .filter_map(|ip| ip.as_str()?.parse::<IpAddr>().ok())
            .find(|ip| ip.is_ipv4() == (family == Family::V4));
        Ok(plan::at(
            found.with_context(|| format!("{} has no {family} address: {all:?}", self.name))?,
            PORT,
        ))
    }

    /// Its first port's node port, on a node.
    ///
    /// # Errors
    /// Where it has none.
    pub fn node_port(&self, family: Family, node: u8) -> Result<SocketAddr> {
        self.node_port_of(0, family, node)
    }

    /// The node port of a port by its index, on a node.
    ///
    /// # Errors
    /// Where it has none.
    pub fn node_port_of(&self, index: usize, family: Family, node: u8) -> Result<SocketAddr> {
        let port = self.object["spec"]["ports"][index]["nodePort"].as_u64();
        let port = port.with_context(|| format!("{} has no node port {index}", self.name))?;
        Ok(plan::at(plan::node(family, node), u16::try_from(port)?))
    }
}

/// The place of a case.
#[derive(Debug)]
pub struct Stage<'c> {
    /// The cluster.
    pub cluster: &'c Cluster,
    /// The families of its Services.
    pub stack: Stack,
    /// The case's own name; its Pods are labelled with it.
    pub name: String,
    made: RefCell<Vec<String>>,
    pods: RefCell<usize>,
}

impl<'c> Stage<'c> {
    pub(super) fn new(cluster: &'c Cluster, name: String, stack: Stack) -> Self {
        Self {
            cluster,
            stack,
            name,
            made: RefCell::default(),
            pods: RefCell::default(),
        }
    }

    /// The families of its Services.
    pub fn families(&self) -> &'static [Family] {
        self.stack.families()
    }

    /// A Pod of this case on a node, not yet made.
    pub fn pod_object(&self, node: u8) -> Value {
        let mut number = self.pods.borrow_mut();
        *number += 1;
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "name": format!("{}-p{number}", self.name), "namespace": "default", "labels": {"app": self.name},
                "annotations": {},
            },
            "spec": {
                "nodeName": node::name(node), "terminationGracePeriodSeconds": 120,
                "automountServiceAccountToken": false, "tolerations": [{"operator": "Exists"}],
                "containers": [{"name": "serve", "image": "lab"}],
            },
        })
    }

    /// Makes a Pod and waits until it runs, ready or not.
    ///
    /// # Errors
    /// Where it does not come to run.
    pub fn make_pod(&self, object: &Value) -> Result<StagePod> {
        let path = self.make(object)?;
        let name = object["metadata"]["name"]
            .as_str()
            .context("a pod has a name")?
            .to_owned();
        until("a pod to run", || {
            let found = self.cluster.api().get(&path)?.context("the pod is gone")?;
            ensure!(found["status"]["phase"] == "Running", "it is {}", found["status"]);
            Ok(())
        })
        .with_context(|| format!("the pod {name}"))?;
        let place = self.cluster.place(&name)?;
        Ok(StagePod { name, place })
    }

    /// A ready Pod on a node.
    ///
    /// # Errors
    /// Where it does not come to run.
    pub fn pod(&self, node: u8) -> Result<StagePod> {
        self.make_pod(&self.pod_object(node))
    }

    /// Ready Pods, one on each of these nodes.
    ///
    /// # Errors
    /// Where one does not come to run.
    pub fn pods(&self, nodes: &[u8]) -> Result<Vec<StagePod>> {
        nodes.iter().map(|node| self.pod(*node)).collect()
    }

    /// A Pod on a node that no Service of the case selects.
    ///
    /// # Errors
    /// Where it does not come to run.
    pub fn client(&self, node: u8) -> Result<StagePod> {
        let mut object = self.pod_object(node);
        object["metadata"]["labels"] = json!({"role": "client"});
        self.make_pod(&object)
    }

    /// Has a Pod's readiness probe succeed or fail.
    ///
    /// # Errors
    /// Why the server refuses.
    pub fn set_ready(&self, pod: &StagePod, ready: bool) -> Result<()> {
        let value = if ready { "true" } else { "false" };
        self.cluster
            .api()
            .patch(&pod_path(pod), &json!({"metadata": {"annotations": {READY: value}}}))
            .map(drop)
    }

    /// Begins a Pod's termination, with its whole grace to come.
    ///
    /// # Errors
    /// Why the server refuses.
    pub fn terminate(&self, pod: &StagePod) -> Result<()> {
        self.cluster.api().delete(&pod_path(pod), None)
    }

    /// Ends a Pod at once, and waits until its process is gone and no EndpointSlice names it.
    ///
    /// For a moment the controllers may call it one that terminates and serves.
    ///
    /// # Errors
    /// Why the server refuses.
    pub fn end(&self, pod: &StagePod) -> Result<()> {
        self.cluster.api().delete(&pod_path(pod), Some(0))?;
        until("a pod's end", || {
            ensure!(self.cluster.place(&pod.name).is_err(), "it still runs");
            let slices = self
                .cluster
                .api()
                .items("/apis/discovery.k8s.io/v1/namespaces/default/endpointslices")?;
            let named = slices
                .iter()
                .flat_map(|slice| slice["endpoints"].as_array().map(Vec::as_slice).unwrap_or_default())
                .any(|endpoint| endpoint["targetRef"]["name"] == pod.name.as_str());
            ensure!(!named, "a slice still names it");
            Ok(())
        })
    }

    /// The `spec` of a Service of this case's Pods: TCP port 80.
    pub fn service_spec(&self) -> Value {
        let families: Vec<&str> = self.families().iter().map(|family| family.kubernetes_name()).collect();
        let policy = if self.stack == Stack::Dual {
            "RequireDualStack"
        } else {
            "SingleStack"
        };
        json!({
            "selector": {"app": self.name}, "ipFamilyPolicy": policy, "ipFamilies": families,
            "ports": [{"name": "tcp", "protocol": "TCP", "port": PORT, "targetPort": TARGET}],
        })
    }

    /// The ports of a Service that serves TCP and UDP at one number.
    pub fn both_ports() -> Value {
        json!([
            {"name": "tcp", "protocol": "TCP", "port": PORT, "targetPort": TARGET},
            {"name": "udp", "protocol": "UDP", "port": PORT, "targetPort": TARGET},
        ])
    }

    /// A Service of this case's Pods, its `spec` changed.
    ///
    /// # Errors
    /// Why the server refuses.
    pub fn service(&self, change: impl FnOnce(&mut Value)) -> Result<StageService> {
        let mut spec = self.service_spec();
        change(&mut spec);
        self.named_service("s", spec, &json!({}))
    }

    /// As [`Self::service`], with a name of its own within the case, and metadata besides.
    ///
    /// # Errors
    /// Why the server refuses.
    pub fn named_service(&self, suffix: &str, spec: Value, metadata: &Value) -> Result<StageService> {
        let mut metadata = metadata.clone();
        let name = format!("{}-{suffix}", self.name);
        metadata["name"] = json!(name);
        metadata["namespace"] = json!("default");
        let mut object = json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata});
        object["spec"] = spec;
        self.made.borrow_mut().push(path_of(&object)?);
        let object = self
            .cluster
            .api()
            .create("/api/v1/namespaces/default/services", &object)?;
        Ok(StageService { name, object })
    }

    /// Changes fields of a Service's `spec`.
    ///
    /// # Errors
    /// Why the server refuses.
    pub fn change(&self, service: &mut StageService, spec: &Value) -> Result<()> {
        service.object = self.cluster.api().patch(&service.path(), &json!({"spec": spec}))?;
        Ok(())
    }

    /// Makes an EndpointSlice by hand, for a Service without a selector.
    ///
    /// # Errors
    /// Why the server refuses.
    pub fn slice(&self, suffix: &str, service: &str, family: Family, endpoints: &Value) -> Result<String> {
        let object = self.slice_object(suffix, service, family, endpoints);
        self.put(&object)
    }

    /// An EndpointSlice by hand, not yet made.
    pub fn slice_object(&self, suffix: &str, service: &str, family: Family, endpoints: &Value) -> Value {
        json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": family.kubernetes_name(),
            "metadata": {
                "name": format!("{}-{suffix}-{family}", self.name), "namespace": "default",
                "labels": {"kubernetes.io/service-name": service},
            },
            "endpoints": endpoints,
            "ports": [{"name": "tcp", "protocol": "TCP", "port": TARGET}],
        })
    }

    /// Makes an object, or changes it to be as given; it is removed with the case. Gives its path.
    ///
    /// # Errors
    /// Why the server refuses.
    pub fn put(&self, object: &Value) -> Result<String> {
        let path = path_of(object)?;
        self.made.borrow_mut().push(path.clone());
        self.cluster.api().apply(object)?;
        Ok(path)
    }

    fn make(&self, object: &Value) -> Result<String> {
        let path = path_of(object)?;
        self.made.borrow_mut().push(path.clone());
        let collection = path.rsplit_once('/').context("an object has a collection")?.0;
        self.cluster.api().create(collection, object)?;
        Ok(path)
    }

    /// A Service's slices in the API server.
    ///
    /// # Errors
    /// Why there is no answer.
    pub fn slices(&self, service: &StageService) -> Result<Vec<Value>> {
        self.cluster.api().items(&service.slices_path())
    }

    /// Waits until the API server has exactly these ready endpoints, and every agent what the API server has.
    ///
    /// # Errors
    /// What there is instead.
    pub fn have(&self, service: &StageService, pods: &[&StagePod]) -> Result<()> {
        self.wait_endpoints(service, pods)?;
        self.cluster.settle()
    }

    /// Waits until a node's agent has counted exactly so many connections and flows to a Service.
    ///
    /// # Errors
    /// How many it has counted instead.
    pub fn wait_connects(&self, node: u8, service: &StageService, wanted: u64) -> Result<()> {
        until("connections counted", || {
            let found = self.connects(node, service)?;
            ensure!(found == wanted, "{found} connections are counted, and not {wanted}");
            Ok(())
        })
        .with_context(|| format!("node {node}, Service {}", service.name))
    }

    /// Connections and flows to a Service that a node's agent has counted.
    ///
    /// # Errors
    /// Where it does not answer or does not know the Service.
    pub fn connects(&self, node: u8, service: &StageService) -> Result<u64> {
        let view = self.cluster.node(node).ask(|agent| agent.service(&service.name))?;
        Ok(view.connects)
    }

    /// Waits until the API server's slices of a Service have exactly these ready endpoints, by Pod name.
    ///
    /// # Errors
    /// What they have instead.
    pub fn wait_endpoints(&self, service: &StageService, pods: &[&StagePod]) -> Result<()> {
        let wanted: BTreeSet<&str> = pods.iter().map(|pod| &*pod.name).collect();
        until("the endpoint controller", || {
            let slices = self.slices(service)?;
            for family in self.families() {
                let of_family = slices
                    .iter()
                    .filter(|slice| slice["addressType"] == family.kubernetes_name());
                let found: BTreeSet<&str> = of_family
                    .flat_map(|slice| slice["endpoints"].as_array().map(Vec::as_slice).unwrap_or_default())
                    .filter(|endpoint| endpoint["conditions"]["ready"] == true)
                    .filter_map(|endpoint| endpoint["targetRef"]["name"].as_str())
                    .collect();
                ensure!(found == wanted, "{family} has {found:?} and not {wanted:?}");
            }
            Ok(())
        })
    }

    /// Waits until the API server's slices of a Service hold a Pod under these conditions, in each family.
    ///
    /// # Errors
    /// What they have instead.
    pub fn wait_conditions(&self, service: &StageService, pod: &StagePod, wanted: Conditions) -> Result<()> {
        until("the endpoint controller", || {
            let slices = self.slices(service)?;
            for family in self.families() {
                let found: Vec<Conditions> = slices
                    .iter()
                    .filter(|slice| slice["addressType"] == family.kubernetes_name())
                    .flat_map(|slice| slice["endpoints"].as_array().map(Vec::as_slice).unwrap_or_default())
                    .filter(|endpoint| endpoint["targetRef"]["name"] == pod.name.as_str())
                    .map(|endpoint| Conditions::read(&endpoint["conditions"]))
                    .collect();
                ensure!(
                    !found.is_empty() && found.iter().all(|one| *one == wanted),
                    "{family} of {} has {found:?} and not {wanted:?}",
                    pod.name
                );
            }
            Ok(())
        })
    }

    /// Dials so often, and says who answered.
    ///
    /// # Errors
    /// The first failure.
    pub fn dial_many(&self, from: &From<'_>, target: SocketAddr, count: usize) -> Result<Vec<Met>> {
        self.through(from, |dialer| dialer.dial_many(target, count))?
    }

    /// Dials once.
    ///
    /// # Errors
    /// Where the Pod that dials does not run.
    pub fn dial(&self, from: &From<'_>, target: SocketAddr) -> Result<Result<Met, Failure>> {
        self.through(from, |dialer| dialer.dial(target))
    }

    /// Does something as somebody.
    ///
    /// # Errors
    /// Where the Pod does not run.
    pub fn through<T>(&self, from: &From<'_>, work: impl FnOnce(Dialer<'_>) -> T) -> Result<T> {
        match from {
            From::Outside => Ok(work(self.cluster.outside())),
            From::Pod(pod) => self.cluster.inside(&pod.place, work),
            From::Node(node) => {
                let node = self.cluster.node(*node);
                node.inside(|| work(Dialer::new(&node.netns)))
            }
        }
    }

    /// The second TCP port of a Service's pods, as another port of the Service.
    pub fn second_port(name: &str, port: u16) -> Value {
        json!({"name": name, "protocol": "TCP", "port": port, "targetPort": TARGET_SECOND})
    }

    /// Gives a load balancer's Service the address that a cloud would.
    ///
    /// # Errors
    /// Why the server refuses.
    pub fn give_address(&self, service: &mut StageService, address: IpAddr, ip_mode: &str) -> Result<()> {
        let status = json!({"status": {"loadBalancer": {"ingress": [{"ip": address, "ipMode": ip_mode}]}}});
        let path = format!("{}/status", service.path());
        service.object = self.cluster.api().patch(&path, &status)?;
        Ok(())
    }
}

impl Drop for Stage<'_> {
    fn drop(&mut self) {
        for path in self.made.borrow().iter().rev() {
            let grace = path.contains("/pods/").then_some(0);
            if let Err(error) = self.cluster.api().delete(path, grace) {
                complain("a case of the lab left something behind", &format!("{error:#}"));
            }
        }
    }
}

/// Who dials.
#[derive(Clone, Copy, Debug)]
pub enum From<'p> {
    /// Somebody outside the cluster.
    Outside,
    /// A Pod.
    Pod(&'p StagePod),
    /// A process of a node itself.
    Node(u8),
}

impl fmt::Display for From<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Outside => f.write_str("outside"),
            Self::Pod(pod) => write!(f, "the pod {} of node {}", pod.name, pod.place.node),
            Self::Node(node) => write!(f, "node {node} itself"),
        }
    }
}

fn pod_path(pod: &StagePod) -> String {
    format!("/api/v1/namespaces/default/pods/{}", pod.name)
}
