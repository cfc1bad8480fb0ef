//! The calls as Istio Sidecars: each namespace's proxies get the configuration of what its workloads call, and no more.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
};

use serde::Serialize;

use crate::{
    cli::Failure,
    view::{
        GraphView,
        wording::numbers::{count, counted},
    },
};

/// Callers of these kinds are in no namespace whose proxies could be told anything.
const OUTSIDE: [&str; 3] = ["Address", "Node", "Outside"];

/// The name by which Istio's own texts call a namespace's only Sidecar.
const NAME: &str = "default";

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Sidecar<'a> {
    api_version: &'static str,
    kind: &'static str,
    metadata: Metadata<'a>,
    spec: Spec,
}

#[derive(Serialize)]
struct Metadata<'a> {
    name: &'static str,
    namespace: &'a str,
}

#[derive(Serialize)]
struct Spec {
    egress: [Egress; 1],
}

#[derive(Serialize)]
struct Egress {
    hosts: Vec<String>,
}

/// Writes one Sidecar a namespace whose workloads call something, as documents of one YAML stream.
pub(super) fn manifests(view: &GraphView, domain: &str, extra: &[&str]) -> Result<String, Failure> {
    let mut hosts: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    let mut outside = BTreeSet::new();
    let mut misnamed = BTreeSet::new();
    for call in &view.calls {
        let client = &call.client;
        let names = [client.namespace.as_str(), &call.namespace, &call.service];
        if client.namespace.is_empty() || OUTSIDE.contains(&client.kind.as_str()) {
            outside.insert(client);
        } else if names.into_iter().any(|name| !is_label(name)) {
            misnamed.insert(client);
        } else {
            let of_namespace = hosts.entry(&client.namespace).or_default();
            of_namespace.insert(format!(
                "{}/{}.{}.svc.{domain}",
                call.namespace, call.service, call.namespace
            ));
        }
    }
    let mut out = String::new();
    // Writing into a String cannot fail.
    let _infallible = writeln!(
        out,
        "# What this node's workloads were seen to call since {}.\n\
         # A call that was not made in that time, or from another node, is missing: put the nodes together first.\n\
         # A Sidecar `{NAME}` without a selector holds for its whole namespace and takes the place of one that is there.",
        view.since
    );
    for (left_out, why) in [
        (outside.len(), "in no namespace (nodes, addresses, and clients outside)"),
        (misnamed.len(), "with a name that Kubernetes does not allow"),
    ] {
        if left_out > 0 {
            let _infallible = writeln!(out, "# Left out: {} {why}.", counted(left_out as u64, "caller"));
        }
    }
    if view.forgotten > 0 {
        let _infallible = writeln!(
            out,
            "# Incomplete: {} forgotten for want of room ({} remembered).",
            counted(view.forgotten, "call"),
            count(view.calls.len() as u64)
        );
    }
    if hosts.is_empty() {
        out.push_str("# No workload in a namespace was seen to call a Service.\n");
    }
    for (namespace, called) in hosts {
        let sidecar = Sidecar {
            api_version: "networking.istio.io/v1",
            kind: "Sidecar",
            metadata: Metadata { name: NAME, namespace },
            spec: Spec {
                egress: [Egress {
                    hosts: extra.iter().map(|&host| host.to_owned()).chain(called).collect(),
                }],
            },
        };
        let text = serde_saphyr::to_string(&sidecar).map_err(anyhow::Error::from)?;
        let _infallible = write!(out, "---\n{}\n", text.trim_end());
    }
    Ok(out)
}

/// Whether a text is a label of DNS as Kubernetes names namespaces and Services.
fn is_label(text: &str) -> bool {
    let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    (1..=63).contains(&text.len()) && text.bytes().all(inner) && !text.starts_with('-') && !text.ends_with('-')
}

/// Reads a DNS domain.
pub(super) fn parse_domain(text: &str) -> Result<String, String> {
    if text.len() <= 253 && text.split('.').all(is_label) {
        Ok(text.to_owned())
    } else {
        Err(format!("`{text}` is not a DNS domain, such as cluster.local"))
    }
}

/// Reads a host as Sidecars name them, or `none`.
pub(super) fn parse_host(text: &str) -> Result<String, String> {
    let fits = text == "none"
        || text.split_once('/').is_some_and(|(namespace, host)| {
            let name = host.strip_prefix("*.").unwrap_or(host);
            (is_label(namespace) || ["*", ".", "~"].contains(&namespace)) && (host == "*" || parse_domain(name).is_ok())
        });
    if fits {
        Ok(text.to_owned())
    } else {
        Err(format!(
            "`{text}` is not a Sidecar's host; allowed are NAMESPACE/HOST, such as istio-system/*, and none"
        ))
    }
}
