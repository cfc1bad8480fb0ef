//! Manifests of Services and EndpointSlices as a person would keep them in a folder.
//!
//! Rendered as text, so that what is tested is what the agent reads. Reading manifests is `source::convert`'s work.

use std::{
    fmt::Write as _,
    fs, io,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
};

use super::{Doing, Result};
use crate::model::Protocol;

/// A folder of manifests that changes only by whole files.
#[derive(Clone, Debug)]
pub struct Folder {
    path: PathBuf,
}

impl Folder {
    /// Uses a folder; made if it does not exist.
    pub fn new(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        fs::create_dir_all(&path).doing(|| format!("make {}", path.display()))?;
        Ok(Self { path })
    }

    /// The folder's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Puts a file in place in one step: a reader sees the old text or the new one, never a part.
    pub fn write(&self, file: &str, text: &str) -> Result<()> {
        // Hidden and without a manifest's ending, so that no source reads it.
        let draft = self.path.join(format!(".{file}.draft"));
        let target = self.path.join(file);
        fs::write(&draft, text)
            .and_then(|()| fs::rename(&draft, &target))
            .doing(|| format!("write {}", target.display()))
    }

    /// Removes a file; one that is not there is no error.
    pub fn remove(&self, file: &str) -> Result<()> {
        let target = self.path.join(file);
        match fs::remove_file(&target) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
        .doing(|| format!("remove {}", target.display()))
    }
}

/// One port of a Service and of its endpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// The port's name; empty for the only port of a Service.
    pub name: String,
    /// Its protocol.
    pub protocol: Protocol,
    /// The port that clients dial.
    pub port: u16,
    /// The endpoints' port.
    pub target: u16,
}

/// A ClusterIP Service in the namespace `default`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// Its name.
    pub name: String,
    /// `spec.clusterIPs`, the first of them also `spec.clusterIP`.
    pub cluster_ips: Vec<IpAddr>,
    /// Its ports.
    pub ports: Vec<Port>,
    /// Its annotations.
    pub annotations: Vec<(String, String)>,
    /// ClientIP affinity's timeout in seconds, if it is on.
    pub affinity_seconds: Option<u32>,
}

impl Service {
    /// A Service with one TCP port.
    pub fn tcp(name: &str, frontend: SocketAddr, target: u16) -> Self {
        Self {
            name: name.to_owned(),
            cluster_ips: vec![frontend.ip()],
            ports: vec![Port {
                name: String::new(),
                protocol: Protocol::Tcp,
                port: frontend.port(),
                target,
            }],
            annotations: Vec::new(),
            affinity_seconds: None,
        }
    }

    /// The Service as YAML, in the form that `kubectl get -o yaml` prints.
    pub fn to_yaml(&self) -> String {
        let mut y = format!(
            "apiVersion: v1\nkind: Service\nmetadata:\n  name: {}\n  namespace: default\n",
            self.name
        );
        if !self.annotations.is_empty() {
            y.push_str("  annotations:\n");
            for (key, value) in &self.annotations {
                line(&mut y, format_args!("    {key}: {value:?}"));
            }
        }
        y.push_str("spec:\n  type: ClusterIP\n");
        if let Some(first) = self.cluster_ips.first() {
            line(
                &mut y,
                format_args!("  clusterIP: {:?}\n  clusterIPs:", first.to_string()),
            );
            for address in &self.cluster_ips {
                line(&mut y, format_args!("  - {:?}", address.to_string()));
            }
        }
        if let Some(seconds) = self.affinity_seconds {
            line(
                &mut y,
                format_args!(
                    "  sessionAffinity: ClientIP\n  sessionAffinityConfig:\n    clientIP:\n      timeoutSeconds: {seconds}"
                ),
            );
        }
        y.push_str("  ports:\n");
        for port in &self.ports {
            line(
                &mut y,
                format_args!(
                    "  - name: {:?}\n    protocol: {}\n    port: {}\n    targetPort: {}",
                    port.name,
                    kubernetes_name(port.protocol),
                    port.port,
                    port.target
                ),
            );
        }
        y
    }

    /// The Service's endpoints as the YAML of one EndpointSlice a family.
    ///
    /// Slices are named `<service>-v4` and `<service>-v6`; a family without endpoints has no slice.
    pub fn endpoints_to_yaml(&self, endpoints: &[Endpoint]) -> String {
        let families = [("IPv4", "v4", false), ("IPv6", "v6", true)];
        let slices = families.into_iter().filter_map(|(family, suffix, ipv6)| {
            let own: Vec<_> = endpoints.iter().filter(|e| e.address.is_ipv6() == ipv6).collect();
            (!own.is_empty()).then(|| self.slice_to_yaml(family, suffix, &own))
        });
        slices.collect::<Vec<_>>().join("---\n")
    }

    fn slice_to_yaml(&self, family: &str, suffix: &str, endpoints: &[&Endpoint]) -> String {
        let name = &self.name;
        let mut y = format!(
            "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata:\n  name: {name}-{suffix}\n  \
             namespace: default\n  labels:\n    kubernetes.io/service-name: {name}\naddressType: {family}\nports:\n"
        );
        for port in &self.ports {
            line(
                &mut y,
                format_args!(
                    "- name: {:?}\n  protocol: {}\n  port: {}",
                    port.name,
                    kubernetes_name(port.protocol),
                    port.target
                ),
            );
        }
        y.push_str("endpoints:\n");
        for endpoint in endpoints {
            let (ready, serving, terminating) = match endpoint.state {
                EndpointState::Ready => (true, true, false),
                EndpointState::NotReady => (false, false, false),
                EndpointState::Draining => (false, true, true),
                EndpointState::Ending => (false, false, true),
            };
            line(
                &mut y,
                format_args!(
                    "- addresses: [{:?}]\n  conditions: {{ready: {ready}, serving: {serving}, terminating: {terminating}}}",
                    endpoint.address.to_string()
                ),
            );
        }
        y
    }
}

/// One endpoint of a Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Its address.
    pub address: IpAddr,
    /// Its conditions.
    pub state: EndpointState,
}

impl Endpoint {
    /// An endpoint that takes connections.
    pub fn ready(address: IpAddr) -> Self {
        Self {
            address,
            state: EndpointState::Ready,
        }
    }
}

/// The combinations of conditions that an endpoint goes through in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndpointState {
    /// ready, serving.
    Ready,
    /// Not ready, not serving, not terminating: it starts, or its probe fails.
    NotReady,
    /// Terminating but serving.
    Draining,
    /// Terminating and no longer serving.
    Ending,
}

/// Appends a line; writing to a `String` cannot fail.
fn line(text: &mut String, content: std::fmt::Arguments<'_>) {
    let _ = writeln!(text, "{content}");
}

fn kubernetes_name(protocol: Protocol) -> &'static str {
    match protocol {
        Protocol::Tcp => "TCP",
        Protocol::Udp => "UDP",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn web() -> Service {
        let mut web = Service::tcp("web", "10.96.0.10:80".parse().expect("an address"), 8080);
        web.cluster_ips.push("fd00::10".parse().expect("an address"));
        web.annotations.push(("example.org/a".to_owned(), "b \"c\"".to_owned()));
        web.affinity_seconds = Some(30);
        web
    }

    #[test]
    fn a_service_renders_in_kubectls_form() {
        insta::assert_snapshot!(web().to_yaml());
    }

    #[test]
    fn endpoints_render_as_one_slice_a_family() {
        let endpoint = |address: &str, state| Endpoint {
            address: address.parse().expect("an address"),
            state,
        };
        insta::assert_snapshot!(web().endpoints_to_yaml(&[
            endpoint("10.244.1.1", EndpointState::Ready),
            endpoint("10.244.1.2", EndpointState::Draining),
            endpoint("fd00:1::1", EndpointState::NotReady),
        ]));
    }

    #[test]
    fn a_file_is_replaced_whole_and_no_draft_stays() {
        let dir = tempfile::tempdir().expect("a folder");
        let folder = Folder::new(dir.path()).expect("a folder");
        folder.write("web.yaml", "one").expect("written");
        folder.write("web.yaml", "two").expect("written");
        let names: Vec<_> = fs::read_dir(dir.path())
            .expect("a folder")
            .flatten()
            .map(|e| e.file_name())
            .collect();
        assert_eq!(names, ["web.yaml"]);
        assert_eq!(fs::read_to_string(dir.path().join("web.yaml")).expect("a file"), "two");
        folder.remove("web.yaml").expect("removed");
        folder.remove("web.yaml").expect("removing nothing is fine");
    }
}
