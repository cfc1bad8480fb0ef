//! Whose address a client has: this node's Pods, by their addresses.
//!
//! Pure. Invariant: what is found depends on the Pods alone, not on the order in which they came; where two that run claim one
//! address for different workloads, nobody is named. The memory is that of this node's Pods: those of other nodes are passed
//! over.

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
    sync::Arc,
};

use crate::model::{Content, Kind, Object, ObjectKey, ObjectName, Pod, Update};

/// Who a client is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Caller {
    /// A process of the node itself; which of them cannot be told apart (`hostNetwork` Pods among them).
    Node,
    /// This Pod, or one of the same workload.
    Pod(Arc<Pod>),
    /// Somebody outside the node; all of them are one, for there may be any number.
    Outside,
}

impl Caller {
    /// The namespace and the name of the workload, where it is one.
    pub fn workload(&self) -> Option<String> {
        match self {
            Self::Node | Self::Outside => None,
            Self::Pod(pod) => Some(format!("{}/{}", pod.name.namespace, pod.workload.name)),
        }
    }
}

/// This node's Pods by name and by address.
#[derive(Debug, Default)]
pub struct Clients {
    node: Option<Arc<str>>,
    pods: BTreeMap<ObjectName, Arc<Pod>>,
    addresses: HashMap<IpAddr, Vec<Arc<Pod>>>,
}

impl Clients {
    /// No Pods yet; those of another node than this one will be passed over.
    pub fn of_node(node: &str) -> Self {
        Self {
            node: Some(node.into()),
            ..Self::default()
        }
    }

    /// Takes what an update says about Pods.
    pub fn apply(&mut self, update: &Update) {
        match update {
            Update::Replace(Content::Pods(pods)) => {
                self.pods.clear();
                self.addresses.clear();
                for pod in pods {
                    self.put(pod);
                }
            }
            Update::Apply(Object::Pod(pod)) => self.put(pod),
            Update::Delete(ObjectKey { kind: Kind::Pod, name }) => self.remove(name),
            _ => {}
        }
    }

    /// Who has an address.
    pub fn find(&self, address: IpAddr) -> Option<Caller> {
        let claims = self.addresses.get(&address)?;
        if claims.iter().any(|pod| pod.host_network) {
            return Some(Caller::Node);
        }
        let first = claims.first()?;
        let same = |pod: &Arc<Pod>| pod.name.namespace == first.name.namespace && pod.workload == first.workload;
        claims.iter().all(same).then(|| Caller::Pod(first.clone()))
    }

    /// How many Pods are known.
    pub fn len(&self) -> usize {
        self.pods.len()
    }

    /// Whether no Pod is known.
    pub fn is_empty(&self) -> bool {
        self.pods.is_empty()
    }

    fn put(&mut self, pod: &Arc<Pod>) {
        self.remove(&pod.name);
        let elsewhere = |node: &Arc<str>| self.node.as_ref().is_some_and(|own| own != node);
        if pod.node.as_ref().is_some_and(elsewhere) {
            return;
        }
        self.pods.insert(pod.name.clone(), pod.clone());
        for address in &pod.ips {
            let claims = self.addresses.entry(*address).or_default();
            if !claims.iter().any(|claim| claim.name == pod.name) {
                claims.push(pod.clone());
            }
        }
    }

    fn remove(&mut self, name: &ObjectName) {
        let Some(pod) = self.pods.remove(name) else {
            return;
        };
        for address in &pod.ips {
            if let Some(claims) = self.addresses.get_mut(address) {
                claims.retain(|claim| claim.name != *name);
                if claims.is_empty() {
                    self.addresses.remove(address);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Workload;

    fn pod(name: &str, workload: &str, ips: &[&str]) -> Pod {
        Pod {
            name: ObjectName::new("shop", name),
            node: Some("node-1".into()),
            ips: ips.iter().map(|ip| ip.parse().expect("an address")).collect(),
            workload: Workload {
                kind: "Deployment".into(),
                name: workload.into(),
            },
            host_network: false,
        }
    }

    fn apply(clients: &mut Clients, pod: Pod) {
        clients.apply(&Update::Apply(Object::Pod(Arc::new(pod))));
    }

    fn delete(clients: &mut Clients, name: &str) {
        clients.apply(&Update::Delete(ObjectKey {
            kind: Kind::Pod,
            name: ObjectName::new("shop", name),
        }));
    }

    fn found(clients: &Clients, address: &str) -> Option<String> {
        let caller = clients.find(address.parse().expect("an address"))?;
        Some(caller.workload().unwrap_or_else(|| "the node".to_owned()))
    }

    #[test]
    fn addresses_come_change_and_go_with_their_pods() {
        let mut clients = Clients::of_node("node-1");
        apply(&mut clients, pod("web-1", "web", &["10.0.0.1", "fd00::1"]));
        assert_eq!(found(&clients, "10.0.0.1").as_deref(), Some("shop/web"));
        assert_eq!(found(&clients, "fd00::1").as_deref(), Some("shop/web"));
        assert_eq!(found(&clients, "10.0.0.2"), None);
        apply(&mut clients, pod("web-1", "web", &["10.0.0.2"]));
        assert_eq!(found(&clients, "10.0.0.1"), None, "its sandbox was made anew");
        assert_eq!(found(&clients, "10.0.0.2").as_deref(), Some("shop/web"));
        let all = Content::Pods(vec![Arc::new(pod("db-0", "db", &["10.0.0.3"]))]);
        clients.apply(&Update::Replace(all));
        assert_eq!(found(&clients, "10.0.0.2"), None);
        assert_eq!(found(&clients, "10.0.0.3").as_deref(), Some("shop/db"));
        delete(&mut clients, "db-0");
        delete(&mut clients, "db-0");
        assert!(clients.is_empty() && clients.addresses.is_empty());
    }

    #[test]
    fn an_address_that_two_workloads_claim_is_nobodys() {
        for order in [["old", "new"], ["new", "old"]] {
            let mut clients = Clients::of_node("node-1");
            for name in order {
                apply(&mut clients, pod(name, name, &["10.0.0.1"]));
            }
            assert_eq!(found(&clients, "10.0.0.1"), None);
            delete(&mut clients, "old");
            assert_eq!(found(&clients, "10.0.0.1").as_deref(), Some("shop/new"));
        }
        let mut clients = Clients::of_node("node-1");
        apply(&mut clients, pod("web-1", "web", &["10.0.0.1"]));
        apply(&mut clients, pod("web-2", "web", &["10.0.0.1"]));
        assert_eq!(
            found(&clients, "10.0.0.1").as_deref(),
            Some("shop/web"),
            "whichever it is"
        );
    }

    #[test]
    fn pods_on_the_hosts_network_are_the_node_and_those_of_other_nodes_nobody() {
        let mut clients = Clients::of_node("node-1");
        for name in ["proxy-1", "dns-1"] {
            let host_network = Pod {
                host_network: true,
                ..pod(name, name, &["192.0.2.1"])
            };
            apply(&mut clients, host_network);
        }
        assert_eq!(found(&clients, "192.0.2.1").as_deref(), Some("the node"));
        let elsewhere = Pod {
            node: Some("node-2".into()),
            ..pod("web-1", "web", &["10.0.0.1"])
        };
        apply(&mut clients, elsewhere);
        assert_eq!(found(&clients, "10.0.0.1"), None);
        assert_eq!(clients.len(), 2);
        let unsaid = Pod {
            node: None,
            ..pod("web-1", "web", &["10.0.0.1"])
        };
        apply(&mut clients, unsaid);
        assert_eq!(found(&clients, "10.0.0.1").as_deref(), Some("shop/web"));
    }
}
