//! Services of a case: written as manifests that all agents of the lab read.
//!
//! Every Service has numbers of its own, so cases do not meet each other's addresses or flows. The invariant: what a case
//! wrote goes with it.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::{
    Lab,
    plan::{self, Family, TARGET, TARGET_DF},
};
use crate::{agent::until, objects};

/// The port that Services are dialled at, TCP and UDP.
pub const PORT: u16 = 80;
/// The UDP port whose answers must not be fragmented.
pub const PORT_DF: u16 = 81;
const FIRST_NODE_PORT: u16 = 30_000;
const FIRST_NODE_PORT_DF: u16 = 30_500;

/// A Service of a case.
#[derive(Debug)]
pub struct Service<'l> {
    lab: &'l Lab,
    /// Its family.
    pub family: Family,
    /// Its name.
    pub name: String,
    number: u8,
    /// The pods' TCP port.
    target: u16,
    /// Its `spec`, to be changed at will before [`Self::apply`].
    pub spec: Value,
    /// Its `status`, likewise.
    pub status: Value,
}

impl<'l> Service<'l> {
    /// A NodePort Service; nothing is written yet.
    pub(super) fn new(lab: &'l Lab, family: Family, number: u8) -> Self {
        let address = plan::cluster_ip(family, number);
        let (port, port_df) = (
            FIRST_NODE_PORT + u16::from(number),
            FIRST_NODE_PORT_DF + u16::from(number),
        );
        Self {
            lab,
            family,
            name: format!("s{number}"),
            number,
            target: TARGET,
            spec: json!({
                "type": "NodePort",
                "clusterIP": address,
                "clusterIPs": [address],
                "ipFamilies": [family.kubernetes_name()],
                "ports": [
                    {"name": "tcp", "protocol": "TCP", "port": PORT, "targetPort": TARGET, "nodePort": port},
                    {"name": "udp", "protocol": "UDP", "port": PORT, "targetPort": TARGET, "nodePort": port},
                    {"name": "df", "protocol": "UDP", "port": PORT_DF, "targetPort": TARGET_DF, "nodePort": port_df},
                ],
            }),
            status: json!({}),
        }
    }

    /// Changes the `spec`.
    #[must_use]
    pub fn with(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.spec[key] = value.into();
        self
    }

    /// Makes it a load balancer's, with its own address [`Self::routed`].
    #[must_use]
    pub fn load_balancer(self, ip_mode: &str) -> Self {
        let mut changed = self.with("type", "LoadBalancer");
        changed.status = json!({"loadBalancer": {"ingress": [{"ip": changed.routed_ip(), "ipMode": ip_mode}]}});
        changed
    }

    /// Leads TCP to another port of the pods.
    #[must_use]
    pub fn to_port(mut self, target: u16) -> Self {
        self.target = target;
        self.spec["ports"][0]["targetPort"] = target.into();
        self
    }

    /// Its cluster address.
    pub fn cluster(&self) -> SocketAddr {
        plan::at(plan::cluster_ip(self.family, self.number), PORT)
    }

    /// The address that the router sends to a node.
    pub fn routed_ip(&self) -> IpAddr {
        plan::routed(self.family, self.number)
    }

    /// [`Self::routed_ip`] with the Service's port.
    pub fn routed(&self) -> SocketAddr {
        plan::at(self.routed_ip(), PORT)
    }

    /// [`Self::routed_ip`] with the port whose answers are not fragmented.
    pub fn routed_df(&self) -> SocketAddr {
        plan::at(self.routed_ip(), PORT_DF)
    }

    /// Its node port on a node.
    pub fn node_port(&self, node: u8) -> SocketAddr {
        plan::at(plan::node(self.family, node), FIRST_NODE_PORT + u16::from(self.number))
    }

    /// Its node port without fragments on a node.
    pub fn node_port_df(&self, node: u8) -> SocketAddr {
        plan::at(
            plan::node(self.family, node),
            FIRST_NODE_PORT_DF + u16::from(self.number),
        )
    }

    /// Has the router send the Service's own address to some nodes.
    ///
    /// # Errors
    /// The kernel's.
    pub fn route_to(&self, nodes: &[u8]) -> Result<()> {
        self.lab
            .wires
            .route_to_nodes((self.routed_ip(), self.family.host_len()), nodes)
    }

    /// Writes the Service with these endpoints, and waits until every running agent has it in its kernel.
    ///
    /// # Errors
    /// Where an agent does not take it.
    pub fn apply(&self, endpoints: &[Value]) -> Result<()> {
        let revision = self.write(endpoints)?;
        self.lab.wait_for_revision(&self.marker(), revision)
    }

    /// Writes the Service with these endpoints and waits for nobody; returns the revision.
    ///
    /// # Errors
    /// Where the file cannot be written.
    pub fn write(&self, endpoints: &[Value]) -> Result<u16> {
        let mut service = objects::service(&self.name, self.spec.clone());
        service["status"] = self.status.clone();
        let mut slice = objects::slice(&format!("{}-{}", self.name, self.family), &self.name, endpoints);
        slice["addressType"] = self.family.kubernetes_name().into();
        slice["ports"] = json!([
            {"name": "tcp", "protocol": "TCP", "port": self.target},
            {"name": "udp", "protocol": "UDP", "port": TARGET},
            {"name": "df", "protocol": "UDP", "port": TARGET_DF},
        ]);
        let revision = self.lab.next_revision();
        // In the same file, so that who has seen it has seen all of the file.
        let marker = objects::service(
            &self.marker(),
            json!({
                "type": "ClusterIP",
                "clusterIP": plan::cluster_ip(Family::V4, 0),
                "clusterIPs": [plan::cluster_ip(Family::V4, 0)],
                "ports": [{"name": "revision", "protocol": "TCP", "port": revision}],
            }),
        );
        let text = objects::documents(&[service, slice, marker]);
        self.lab.manifests.write(&self.file(), &text)?;
        Ok(revision)
    }

    /// Connections and flows to the Service that a node's agent has counted.
    ///
    /// # Errors
    /// Where it does not answer or does not know the Service.
    pub fn connects(&self, node: u8) -> Result<u64> {
        self.lab.node(node).ask(|agent| Ok(agent.service(&self.name)?.connects))
    }

    /// Waits until a node's agent has counted exactly so many connections and flows to the Service.
    ///
    /// # Errors
    /// How many there are instead.
    pub fn wait_connects(&self, node: u8, wanted: u64) -> Result<()> {
        until("connections counted", || {
            let found = self.connects(node)?;
            anyhow::ensure!(found == wanted, "{found} connections are counted, and not {wanted}");
            Ok(())
        })
        .with_context(|| format!("node {node}, Service {}", self.name))
    }

    fn marker(&self) -> String {
        format!("{}-revision", self.name)
    }

    fn file(&self) -> String {
        format!("{}.yaml", self.name)
    }
}

impl Drop for Service<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.lab.manifests.remove(&self.file()) {
            super::complain("a Service of the lab could not be removed", &error);
        }
    }
}
