//! Manifests: what one file says.
//!
//! Pure: text in, objects and problems out. Ordinary `kubectl get -o yaml` output is understood: several documents,
//! lists, fields and kinds that concern nobody here.

use std::collections::BTreeMap;

use k8s_openapi::api::{core::v1 as core, discovery::v1 as discovery};
use serde::Deserialize;

use super::tree::{self, Located, Tree, Unlocated, Value};
use crate::{
    model::{Kind, Object, ObjectKey, Problem},
    source::convert::{Converted, Converter, Names, PodObject, object_label, quote},
};

/// Lists of lists of lists are nobody's honest manifest.
const DEEPEST_LIST: u32 = 4;

/// What one file says.
#[derive(Debug, Default)]
pub(super) struct Manifest {
    pub(super) objects: BTreeMap<ObjectKey, Object>,
    pub(super) problems: Vec<Problem>,
}

/// The syntax of a file, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Syntax {
    Yaml,
    Json,
}

impl Syntax {
    /// The syntax that a file's name promises; `None` if it is no manifest, or hidden.
    pub(super) fn of(name: &str) -> Option<Self> {
        let (stem, extension) = name.rsplit_once('.')?;
        if stem.is_empty() || name.starts_with('.') {
            return None;
        }
        match extension {
            "yaml" | "yml" => Some(Self::Yaml),
            "json" => Some(Self::Json),
            _ => None,
        }
    }
}

/// Reads a file's text.
///
/// # Errors
/// The file as a whole cannot be understood; nothing of it is taken then, because what came before the error may be half
/// of what was meant.
pub(super) fn parse(file: &str, syntax: Syntax, text: &[u8], names: &mut Names) -> Result<Manifest, Problem> {
    let mut reading = Reading::new(file, names);
    match syntax {
        Syntax::Yaml => reading.yaml(text)?,
        Syntax::Json => reading.json(text)?,
    }
    let manifest = reading.manifest;
    if syntax == Syntax::Json && !manifest.problems.is_empty() {
        // JSON's parser is ten times as fast, and does not tell where a value stands. YAML's does, and understands
        // nearly all JSON.
        let mut located = Reading::new(file, names);
        if located.yaml(text).is_ok() && located.manifest.objects == manifest.objects {
            return Ok(located.manifest);
        }
    }
    Ok(manifest)
}

struct Reading<'a> {
    file: &'a str,
    /// The number of the document at hand, from 1.
    document: usize,
    manifest: Manifest,
    names: &'a mut Names,
}

impl<'a> Reading<'a> {
    fn new(file: &'a str, names: &'a mut Names) -> Self {
        Self {
            file,
            document: 0,
            manifest: Manifest::default(),
            names,
        }
    }

    fn yaml(&mut self, mut text: &[u8]) -> Result<(), Problem> {
        let mut budget = serde_saphyr::Budget::default();
        // Ten thousand Services with their slices may come in one file; aliases keep their tight limits.
        budget.max_documents = 1_000_000;
        budget.max_events = 100_000_000;
        budget.max_nodes = 50_000_000;
        budget.max_total_scalar_bytes = text.len();
        let mut options = serde_saphyr::Options::default();
        options.budget = Some(budget);
        options.with_snippet = false;
        options.emit_comments = false;
        for document in serde_saphyr::read_with_options::<_, Located>(&mut text, options) {
            self.document += 1;
            match document {
                Ok(tree) => self.document(&tree.into(), 0),
                Err(error) => {
                    let line = error.location().map_or(0, |location| location.line());
                    return Err(self.broken("YAML", line, first_line(&error.to_string())));
                }
            }
        }
        Ok(())
    }

    fn json(&mut self, text: &[u8]) -> Result<(), Problem> {
        let documents = serde_json::Deserializer::from_slice(text).into_iter::<Unlocated>();
        for document in documents {
            self.document += 1;
            match document {
                Ok(tree) => self.document(&tree.into(), 0),
                Err(error) => {
                    return Err(self.broken("JSON", error.line() as u64, &error.to_string()));
                }
            }
        }
        Ok(())
    }

    fn broken(&self, syntax: &str, line: u64, message: &str) -> Problem {
        Problem {
            origin: self.origin(line),
            object: "(file)".to_owned(),
            field: "(syntax)".to_owned(),
            message: format!("is no valid {syntax}: {message}; what the file said before still holds"),
        }
    }

    fn origin(&self, line: u64) -> String {
        let mut origin = self.file.to_owned();
        if line > 0 {
            origin = format!("{origin}:{line}");
        }
        if self.document > 1 {
            origin = format!("{origin} (document {})", self.document);
        }
        origin
    }

    fn report(&mut self, line: u64, object: &str, field: &str, message: String) {
        let problem = Problem {
            origin: self.origin(line),
            object: object.to_owned(),
            field: field.to_owned(),
            message,
        };
        self.manifest.problems.push(problem);
    }

    #[expect(
        clippy::redundant_closure_for_method_calls,
        reason = "the methods' paths fix a lifetime of Converter that the closures leave open"
    )]
    fn document(&mut self, tree: &Tree, depth: u32) {
        if tree.value == Value::Null {
            return;
        }
        if !matches!(tree.value, Value::Map(_)) {
            let message = format!(
                "found {}; wanted a Kubernetes object with apiVersion and kind",
                tree.describe()
            );
            return self.report(tree.line, "(document)", "(top)", message);
        }
        let (Some(version), Some(kind)) = (tree.text("apiVersion"), tree.text("kind")) else {
            let missing = if tree.text("kind").is_none() {
                "kind"
            } else {
                "apiVersion"
            };
            let message = format!("is missing or no text; wanted a Kubernetes object with {missing}");
            return self.report(tree.line, "(document)", missing, message);
        };
        match (version, kind) {
            ("v1", "List" | "ServiceList" | "NodeList" | "PodList") | ("discovery.k8s.io/v1", "EndpointSliceList") => {
                self.list(tree, kind, depth);
            }
            ("v1", "Service") => self.object::<core::Service>(tree, Kind::Service, |c, o| c.service(o)),
            ("v1", "Node") => self.object::<core::Node>(tree, Kind::Node, |c, o| c.node(o)),
            ("v1", "Pod") => self.object::<PodObject>(tree, Kind::Pod, |c, o| c.pod(o)),
            ("discovery.k8s.io/v1", "EndpointSlice") => {
                self.object::<discovery::EndpointSlice>(tree, Kind::Slice, |c, o| c.slice(o));
            }
            (other, "EndpointSlice") => {
                let message = format!("found {}; wanted discovery.k8s.io/v1", quote(other));
                self.report(
                    tree.line_of("apiVersion"),
                    &label(Kind::Slice, tree),
                    "apiVersion",
                    message,
                );
            }
            _ => tracing::debug!(
                file = self.file,
                version,
                kind,
                "an object of another kind is passed over"
            ),
        }
    }

    fn list(&mut self, tree: &Tree, kind: &str, depth: u32) {
        let items = match tree.get("items").map(|items| &items.value) {
            Some(Value::List(items)) => items,
            Some(Value::Null) => return,
            _ => {
                return self.report(
                    tree.line,
                    kind,
                    "items",
                    "is missing or no list; wanted a list".to_owned(),
                );
            }
        };
        if depth >= DEEPEST_LIST {
            let message = format!("lists lie more than {DEEPEST_LIST} deep in each other; wanted a plain list");
            return self.report(tree.line, kind, "items", message);
        }
        // In a typed list the items do not repeat what they are.
        let item_kind = kind.strip_suffix("List").filter(|kind| !kind.is_empty());
        for item in items {
            match item_kind {
                Some(item_kind) if item.get("kind").is_none() => {
                    let mut item = item.clone();
                    if let (Value::Map(entries), Some(version)) = (&mut item.value, tree.get("apiVersion")) {
                        let line = item.line;
                        entries.retain(|(key, _)| key != "apiVersion");
                        entries.push(("apiVersion".to_owned(), version.clone()));
                        let kind = Value::Text(item_kind.to_owned());
                        entries.push(("kind".to_owned(), Tree { line, value: kind }));
                    }
                    self.document(&item, depth + 1);
                }
                _ => self.document(item, depth + 1),
            }
        }
    }

    fn object<T>(&mut self, tree: &Tree, kind: Kind, convert: impl FnOnce(&mut Converter<'_>, &T) -> Converted)
    where
        T: for<'de> Deserialize<'de>,
    {
        let typed: T = match tree::read(tree) {
            Ok(typed) => typed,
            Err(mismatch) => {
                let line = if mismatch.line == 0 { tree.line } else { mismatch.line };
                let field = if mismatch.field.is_empty() {
                    "(object)"
                } else {
                    &mismatch.field
                };
                return self.report(line, &label(kind, tree), field, mismatch.message);
            }
        };
        let mut converter = Converter {
            origin: self.names.share(self.file),
            names: self.names,
        };
        let converted = convert(&mut converter, &typed);
        for problem in converted.problems {
            let line = tree.line_of(&problem.field);
            self.report(line, &problem.object, &problem.field, problem.message);
        }
        let (Some(key), Some(object)) = (converted.key, converted.object) else {
            return;
        };
        if self.manifest.objects.contains_key(&key) {
            let message = "stands in this file twice; the first one counts".to_owned();
            return self.report(tree.line, &label(kind, tree), "metadata.name", message);
        }
        self.manifest.objects.insert(key, object);
    }
}

fn label(kind: Kind, tree: &Tree) -> String {
    let metadata = tree.get("metadata");
    let text = |key| metadata.and_then(|metadata| metadata.text(key));
    let namespace = if kind == Kind::Node {
        ""
    } else {
        text("namespace").unwrap_or("default")
    };
    object_label(kind, namespace, text("name").unwrap_or_default())
}

fn first_line(message: &str) -> &str {
    message.lines().next().unwrap_or_default().trim_end_matches('.')
}
