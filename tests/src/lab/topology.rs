//! The namespaces of the lab and the links between them.
//!
//! ```text
//! client ──────────┐
//! far ── narrow ═══┤ router ├── node 1 ├── pods, guest
//!      (1400)      │        ├── node 2 ├── pods, ═ hop ── deep pod (1400)
//!                  └────────┴── node 3 ├── pods
//! ```
//! The router knows every node's pod range, so pods are reachable from everywhere by their own addresses; addresses of
//! load balancers are routed to node 1 until a test says otherwise. No knowledge of Services lives here.

use anyhow::Result;
use lb_user::lab::{
    Netns,
    link::{self, Hop},
};

use super::plan::{self, Family};

/// A node's device towards the router.
pub const UPLINK: &str = "uplink0";
/// A pod's or a client's own device.
pub const ETH: &str = "eth0";
/// The node's device towards the guest.
pub const GUEST: &str = "guest0";
/// The longest packet on the narrow links.
pub const NARROW_MTU: u32 = 1400;

/// Makes a namespace whose devices are usable at once and which, if it is to, forwards packets.
///
/// # Errors
/// The kernel's.
pub fn place(forwards: bool) -> Result<Netns> {
    let netns = Netns::new()?;
    // Addresses of links of our own have no duplicates to wait for, and nobody advertises routes.
    netns.write_sysctl("ipv6/conf/default/accept_dad", "0")?;
    netns.write_sysctl("ipv6/conf/default/accept_ra", "0")?;
    netns.write_sysctl("ipv6/conf/default/router_solicitations", "0")?;
    if forwards {
        netns.write_sysctl("ipv4/ip_forward", "1")?;
        netns.write_sysctl("ipv6/conf/all/forwarding", "1")?;
        // As strict as nodes come: what arrives from where its answer would not go is dropped.
        for scope in ["all", "default"] {
            netns.write_sysctl(&format!("ipv4/conf/{scope}/rp_filter"), "1")?;
        }
    }
    Ok(netns)
}

/// The wires of the lab, without pods.
#[derive(Debug)]
pub struct Wires {
    /// Somebody outside the cluster.
    pub client: Netns,
    /// Somebody outside the cluster beyond a narrow link.
    pub far: Netns,
    /// The last hop before [`Self::far`].
    pub narrow: Netns,
    /// What joins the nodes, and the nodes with the outside.
    pub router: Netns,
    /// The nodes; node `n` is the element `n - 1`.
    pub nodes: Vec<Netns>,
}

impl Wires {
    /// Makes all of it.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new() -> Result<Self> {
        let nodes = (0..plan::NODES).map(|_| place(true)).collect::<Result<_>>()?;
        let wires = Self {
            client: place(false)?,
            far: place(false)?,
            narrow: place(true)?,
            router: place(true)?,
            nodes,
        };
        // Where several nodes get one address, each flow goes to one of them, not each pair of hosts.
        for version in ["ipv4", "ipv6"] {
            wires
                .router
                .write_sysctl(&format!("{version}/fib_multipath_hash_policy"), "1")?;
        }
        wires.join_outside()?;
        for node in 1..=plan::NODES {
            wires.join_node(node)?;
        }
        for family in Family::ALL {
            wires.route_to_node(plan::routed_block(family), 1)?;
        }
        Ok(wires)
    }

    /// A node's namespace; nodes count from 1.
    ///
    /// # Panics
    /// Where there is no such node.
    pub fn node(&self, node: u8) -> &Netns {
        self.nodes
            .get(usize::from(node).wrapping_sub(1))
            .expect("the lab has three nodes, counted from 1")
    }

    fn join_outside(&self) -> Result<()> {
        link::join((&self.client, ETH), (&self.router, "client0"))?;
        link::join((&self.far, ETH), (&self.narrow, "far0"))?;
        link::join((&self.narrow, "router0"), (&self.router, "narrow0"))?;
        link::set_mtu(&self.narrow, "router0", NARROW_MTU)?;
        link::set_mtu(&self.router, "narrow0", NARROW_MTU)?;
        for family in Family::ALL {
            let len = if family == Family::V4 { 24 } else { 64 };
            // The first is to be the usual source: IPv4 takes the one that was first there, IPv6 the last.
            let mut numbers = [1, 2, 3, 4];
            if family == Family::V6 {
                numbers.reverse();
            }
            for n in numbers {
                link::add_address(&self.client, ETH, plan::client(family, n), len)?;
            }
            link::add_address(&self.router, "client0", plan::client_gateway(family), len)?;
            link::add_default_route(&self.client, ETH, plan::client_gateway(family))?;

            link::add_address(&self.far, ETH, plan::far(family), len)?;
            link::add_address(&self.narrow, "far0", plan::far_gateway(family), len)?;
            link::add_default_route(&self.far, ETH, plan::far_gateway(family))?;
            let (inner, outer) = (plan::transfer(family, 1, 1), plan::transfer(family, 1, 2));
            link::add_address(&self.router, "narrow0", inner, len)?;
            link::add_address(&self.narrow, "router0", outer, len)?;
            link::add_default_route(&self.narrow, "router0", inner)?;
            link::set_route(&self.router, plan::far_block(family), &[Hop::through("narrow0", outer)])?;
        }
        Ok(())
    }

    /// Joins the control plane's machine with the router.
    ///
    /// # Errors
    /// The kernel's.
    pub fn join_control(&self, control: &Netns) -> Result<()> {
        link::join((control, ETH), (&self.router, "control0"))?;
        for family in Family::ALL {
            let len = if family == Family::V4 { 24 } else { 64 };
            link::add_address(control, ETH, plan::control(family), len)?;
            link::add_address(&self.router, "control0", plan::control_gateway(family), len)?;
            link::add_default_route(control, ETH, plan::control_gateway(family))?;
        }
        Ok(())
    }

    /// Joins a machine that has a node's addresses with the router, without a way back to those: it can ask, and is not dialled.
    ///
    /// # Errors
    /// The kernel's.
    pub fn join_shadow(&self, shadow: &Netns, node: u8) -> Result<()> {
        let port = format!("shadow{node}");
        link::join((shadow, UPLINK), (&self.router, &port))?;
        for family in Family::ALL {
            let len = if family == Family::V4 { 24 } else { 64 };
            let (inner, outer) = (
                plan::transfer(family, 10 + node, 1),
                plan::transfer(family, 10 + node, 2),
            );
            link::add_address(&self.router, &port, inner, len)?;
            link::add_address(shadow, UPLINK, outer, len)?;
            link::add_address(shadow, "lo", plan::node(family, node), family.host_len())?;
            link::add_default_route(shadow, UPLINK, inner)?;
        }
        Ok(())
    }

    fn join_node(&self, node: u8) -> Result<()> {
        let netns = self.node(node);
        let port = router_port(node);
        link::join((netns, UPLINK), (&self.router, &port))?;
        for family in Family::ALL {
            let len = if family == Family::V4 { 24 } else { 64 };
            let (own, gateway) = (plan::node(family, node), plan::node_gateway(family, node));
            link::add_address(netns, UPLINK, own, len)?;
            link::add_address(&self.router, &port, gateway, len)?;
            link::add_default_route(netns, UPLINK, gateway)?;
            link::set_route(&self.router, plan::pod_block(family, node), &[Hop::through(&port, own)])?;
        }
        Ok(())
    }

    /// Has the router send a block of addresses to a node.
    ///
    /// # Errors
    /// The kernel's.
    pub fn route_to_node(&self, block: plan::Block, node: u8) -> Result<()> {
        self.route_to_nodes(block, &[node])
    }

    /// Has the router send a block of addresses to several nodes, each flow to one of them.
    ///
    /// # Errors
    /// The kernel's.
    pub fn route_to_nodes(&self, block: plan::Block, nodes: &[u8]) -> Result<()> {
        let family = if block.0.is_ipv4() { Family::V4 } else { Family::V6 };
        let ports: Vec<String> = nodes.iter().map(|node| router_port(*node)).collect();
        let hops: Vec<Hop<'_>> = nodes
            .iter()
            .zip(&ports)
            .map(|(node, port)| Hop::through(port, plan::node(family, *node)))
            .collect();
        Ok(link::set_route(&self.router, block, &hops)?)
    }

    /// Joins a namespace to a node as a pod is: by a link of its own, on which the node is the gateway.
    ///
    /// # Errors
    /// The kernel's.
    pub fn join_pod(&self, pod: &Netns, node: u8, n: u8, device: &str) -> Result<()> {
        let netns = self.node(node);
        link::join((netns, device), (pod, ETH))?;
        for family in Family::ALL {
            join_leaf(
                netns,
                pod,
                device,
                plan::pod_gateway(family, node),
                plan::pod(family, node, n),
            )?;
        }
        Ok(())
    }

    /// Joins a namespace to a node as a pod beyond a hop with a narrow link; returns the hop.
    ///
    /// # Errors
    /// The kernel's.
    pub fn join_deep_pod(&self, pod: &Netns, node: u8, n: u8, device: &str) -> Result<Netns> {
        let netns = self.node(node);
        let hop = place(true)?;
        link::join((netns, device), (&hop, "node0"))?;
        link::set_mtu(netns, device, NARROW_MTU)?;
        link::set_mtu(&hop, "node0", NARROW_MTU)?;
        link::join((&hop, "pod0"), (pod, ETH))?;
        for family in Family::ALL {
            let len = if family == Family::V4 { 24 } else { 64 };
            let (inner, outer) = (plan::transfer(family, 2, 1), plan::transfer(family, 2, 2));
            let address = plan::pod(family, node, n);
            link::add_address(netns, device, inner, len)?;
            link::add_address(&hop, "node0", outer, len)?;
            link::add_default_route(&hop, "node0", inner)?;
            link::set_route(netns, (address, family.host_len()), &[Hop::through(device, outer)])?;
            join_leaf(&hop, pod, "pod0", plan::pod_gateway(family, node), address)?;
        }
        Ok(hop)
    }
}

/// The router's device towards a node.
pub fn router_port(node: u8) -> String {
    format!("node{node}")
}

/// Gives both ends of a pod's link what they need: the pod knows nobody but its gateway.
fn join_leaf(
    host: &Netns,
    pod: &Netns,
    device: &str,
    gateway: std::net::IpAddr,
    address: std::net::IpAddr,
) -> Result<()> {
    let host_len = if address.is_ipv4() { 32 } else { 128 };
    link::add_address(host, device, gateway, host_len)?;
    link::set_route(host, (address, host_len), &[Hop::on_link(device)])?;
    link::add_address(pod, ETH, address, host_len)?;
    link::set_route(pod, (gateway, host_len), &[Hop::on_link(ETH)])?;
    link::add_default_route(pod, ETH, gateway)?;
    Ok(())
}
