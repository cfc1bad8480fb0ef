//! The calls as a Graphviz digraph: a cluster a namespace, an edge a call.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
};

use crate::view::{CallView, GraphView};

/// Writes the digraph; ids are quoted, so that every name is a valid one.
pub(super) fn digraph(view: &GraphView) -> String {
    // (namespace) to its nodes' statements; what is in no namespace comes first, outside of all clusters.
    let mut nodes: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for call in &view.calls {
        let client = &call.client;
        let label = format!("{}\n{}", client.name, client.kind);
        let of_caller = nodes.entry(&client.namespace).or_default();
        of_caller.insert(format!("{} [shape=box, label={}];", caller(call), quoted(&label)));
        let label = format!("{}\nService", call.service);
        let of_service = nodes.entry(&call.namespace).or_default();
        of_service.insert(format!("{} [shape=ellipse, label={}];", service(call), quoted(&label)));
    }
    let mut out = String::from("digraph evenkeel {\n  rankdir=LR;\n  node [fontname=\"sans-serif\"];\n");
    for (namespace, statements) in &nodes {
        let indent = if namespace.is_empty() {
            "  "
        } else {
            // Writing into a String cannot fail.
            let _infallible = writeln!(
                out,
                "  subgraph {} {{\n    label={};",
                quoted(&format!("cluster_{namespace}")),
                quoted(namespace)
            );
            "    "
        };
        for statement in statements {
            let _infallible = writeln!(out, "{indent}{statement}");
        }
        if !namespace.is_empty() {
            out.push_str("  }\n");
        }
    }
    for call in &view.calls {
        let color = if call.failures > 0 {
            ", color=red, fontcolor=red"
        } else {
            ""
        };
        let _infallible = writeln!(
            out,
            "  {} -> {} [label={}{color}];",
            caller(call),
            service(call),
            quoted(&format!("{}/{}", call.connections, call.failures))
        );
    }
    out.push_str("}\n");
    out
}

fn caller(call: &CallView) -> String {
    let client = &call.client;
    quoted(&format!("{}/{}/{}", client.kind, client.namespace, client.name))
}

fn service(call: &CallView) -> String {
    quoted(&format!("Service/{}/{}", call.namespace, call.service))
}

/// A quoted string of the DOT language: a quote is escaped, a line break becomes one of a label.
fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            c if c.is_control() => out.push(char::REPLACEMENT_CHARACTER),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}
