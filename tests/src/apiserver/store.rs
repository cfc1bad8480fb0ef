//! The objects, their versions and their history.

use std::{collections::BTreeMap, sync::Arc};

use serde_json::{Value, json};

/// A collection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Resource {
    /// `/api/v1/services`.
    Services,
    /// `/apis/discovery.k8s.io/v1/endpointslices`.
    Slices,
    /// `/api/v1/nodes`.
    Nodes,
    /// `/api/v1/pods`.
    Pods,
    /// `/apis/networking.k8s.io/v1/servicecidrs`.
    ServiceCidrs,
}

impl Resource {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::Services,
        Self::Slices,
        Self::Nodes,
        Self::Pods,
        Self::ServiceCidrs,
    ];

    /// Those that agents follow.
    pub const FOLLOWED: [Self; 4] = [Self::Services, Self::Slices, Self::Nodes, Self::Pods];

    /// The collection at a path.
    pub(super) fn at(path: &str) -> Option<Self> {
        match path {
            "/api/v1/services" => Some(Self::Services),
            "/apis/discovery.k8s.io/v1/endpointslices" => Some(Self::Slices),
            "/api/v1/nodes" => Some(Self::Nodes),
            "/api/v1/pods" => Some(Self::Pods),
            "/apis/networking.k8s.io/v1/servicecidrs" => Some(Self::ServiceCidrs),
            _ => None,
        }
    }

    /// The kind of the collection's objects.
    pub fn kind(self) -> &'static str {
        match self {
            Self::Services => "Service",
            Self::Slices => "EndpointSlice",
            Self::Nodes => "Node",
            Self::Pods => "Pod",
            Self::ServiceCidrs => "ServiceCIDR",
        }
    }

    /// The API version of the collection's objects.
    pub fn api_version(self) -> &'static str {
        match self {
            Self::Services | Self::Nodes | Self::Pods => "v1",
            Self::Slices => "discovery.k8s.io/v1",
            Self::ServiceCidrs => "networking.k8s.io/v1",
        }
    }

    fn of(object: &Value) -> Option<Self> {
        Self::ALL.into_iter().find(|resource| object["kind"] == resource.kind())
    }
}

/// What a request's `fieldSelector` admits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Selector {
    /// Everything.
    All,
    /// `metadata.name=`
    Name(String),
    /// `spec.nodeName=`
    Node(String),
    /// `spec.clusterIP!=None`
    WithAddress,
}

impl Selector {
    /// Reads a selector; `None` if it is one that this server does not know.
    pub(super) fn parse(text: Option<&str>) -> Option<Self> {
        match text.map(|text| text.split_once('=')) {
            None => Some(Self::All),
            Some(Some(("spec.clusterIP!", "None"))) => Some(Self::WithAddress),
            Some(Some(("metadata.name", name))) => Some(Self::Name(name.to_owned())),
            Some(Some(("spec.nodeName", node))) => Some(Self::Node(node.to_owned())),
            Some(_) => None,
        }
    }

    pub(super) fn admits(&self, object: &Value) -> bool {
        match self {
            Self::All => true,
            Self::Name(name) => object["metadata"]["name"] == **name,
            Self::Node(node) => object["spec"]["nodeName"] == **node,
            Self::WithAddress => object["spec"]["clusterIP"] != "None",
        }
    }
}

/// One entry of the history.
#[derive(Clone, Debug)]
pub(super) struct Event {
    pub(super) version: u64,
    pub(super) resource: Resource,
    /// `ADDED`, `MODIFIED`, `DELETED` or `BOOKMARK`.
    pub(super) change: &'static str,
    pub(super) object: Value,
}

/// A page of a list.
#[derive(Debug)]
pub(super) struct Page {
    pub(super) version: u64,
    pub(super) items: Vec<Item>,
    pub(super) next: Option<String>,
}

/// An object as JSON, as it stands in a list.
type Item = Arc<str>;

/// An object as it is now.
#[derive(Debug)]
struct Stored {
    object: Value,
    /// Written once, so that a list of thousands costs its reader's time and not this server's.
    item: Item,
}

impl Stored {
    fn new(object: Value) -> Self {
        let mut item = object.clone();
        // The items of a typed list do not say what they are.
        if let Some(item) = item.as_object_mut() {
            item.remove("kind");
            item.remove("apiVersion");
        }
        Self {
            item: item.to_string().into(),
            object,
        }
    }
}

#[derive(Debug)]
pub(super) struct Store {
    version: u64,
    objects: BTreeMap<(Resource, String, String), Stored>,
    history: Vec<Event>,
    /// Events up to this version are forgotten.
    compacted: u64,
    /// Lists under way: what is left of each, at the version that it shows.
    continued: BTreeMap<String, (u64, Vec<Item>)>,
    tokens: u64,
}

impl Default for Store {
    fn default() -> Self {
        Self {
            version: 1000,
            objects: BTreeMap::new(),
            history: Vec::new(),
            compacted: 0,
            continued: BTreeMap::new(),
            tokens: 0,
        }
    }
}

impl Store {
    pub(super) fn apply(&mut self, mut object: Value) {
        let resource = Resource::of(&object).expect("an object of a kind that is served");
        let name = object["metadata"]["name"].as_str().expect("a name").to_owned();
        let namespace = match resource {
            Resource::Nodes | Resource::ServiceCidrs => String::new(),
            _ => object["metadata"]["namespace"].as_str().unwrap_or("default").to_owned(),
        };
        if !matches!(resource, Resource::Nodes | Resource::ServiceCidrs) {
            object["metadata"]["namespace"] = json!(namespace);
        }
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        let stored = Stored::new(object.clone());
        let old = self.objects.insert((resource, namespace, name), stored);
        self.history.push(Event {
            version: self.version,
            resource,
            change: if old.is_some() { "MODIFIED" } else { "ADDED" },
            object,
        });
    }

    pub(super) fn delete(&mut self, resource: Resource, namespace: &str, name: &str) {
        let Some(stored) = self.objects.remove(&(resource, namespace.to_owned(), name.to_owned())) else {
            return;
        };
        let mut object = stored.object;
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.history.push(Event {
            version: self.version,
            resource,
            change: "DELETED",
            object,
        });
    }

    pub(super) fn bookmark(&mut self) {
        // Something that nobody watches happened: the counter went on.
        self.version += 1;
        for resource in Resource::ALL {
            self.history.push(Event {
                version: self.version,
                resource,
                change: "BOOKMARK",
                object: json!({
                    "kind": resource.kind(),
                    "apiVersion": resource.api_version(),
                    "metadata": {"resourceVersion": self.version.to_string(), "creationTimestamp": null},
                }),
            });
        }
    }

    pub(super) fn objects(&self, resource: Resource) -> Vec<Value> {
        self.of_kind(resource).map(|stored| stored.object.clone()).collect()
    }

    fn of_kind(&self, resource: Resource) -> impl Iterator<Item = &Stored> {
        let of_kind = self.objects.iter().filter(move |((kind, _, _), _)| *kind == resource);
        of_kind.map(|(_, stored)| stored)
    }

    pub(super) fn compact(&mut self) {
        self.compacted = self.version;
        self.history.clear();
        self.continued.clear();
    }

    pub(super) fn restore_older_versions(&mut self) {
        self.version /= 2;
        self.compacted = 0;
        self.history.clear();
        self.continued.clear();
        for stored in self.objects.values_mut() {
            stored.object["metadata"]["resourceVersion"] = json!(self.version.to_string());
            *stored = Stored::new(stored.object.take());
        }
    }

    pub(super) fn version(&self) -> u64 {
        self.version
    }

    /// Whether a watch from this version on has lost events.
    pub(super) fn is_expired(&self, version: u64) -> bool {
        version < self.compacted
    }

    /// What happened after a version, or the version itself lies in the past that is forgotten.
    pub(super) fn events_after(&self, resource: Resource, version: u64) -> Vec<Event> {
        // The history is in the order of versions, and long.
        let from = self.history.partition_point(|event| event.version <= version);
        let later = self.history.iter().skip(from);
        later.filter(|event| event.resource == resource).cloned().collect()
    }

    /// The first page of a list.
    pub(super) fn list(&mut self, resource: Resource, selector: &Selector, limit: usize) -> Page {
        let admitted = self.of_kind(resource).filter(|stored| selector.admits(&stored.object));
        let items = admitted.map(|stored| Arc::clone(&stored.item)).collect();
        self.page(self.version, items, limit)
    }

    /// A further page; `None` if the token has expired.
    pub(super) fn list_on(&mut self, token: &str, limit: usize) -> Option<Page> {
        let (version, items) = self.continued.remove(token)?;
        Some(self.page(version, items, limit))
    }

    fn page(&mut self, version: u64, mut items: Vec<Item>, limit: usize) -> Page {
        let rest = items.split_off(limit.min(items.len()));
        let next = (!rest.is_empty()).then(|| {
            self.tokens += 1;
            let token = format!("token-{}", self.tokens);
            self.continued.insert(token.clone(), (version, rest));
            token
        });
        Page { version, items, next }
    }
}
