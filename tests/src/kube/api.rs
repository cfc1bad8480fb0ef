//! The API server as the lab asks it: plain JSON by path, one blocking call at a time.
//!
//! The lab is an administrator. No knowledge of what is tested lives here.

use anyhow::{Context, Result, bail};
use kube::Client;
use serde_json::{Value, json};
use tokio::runtime::Handle;

/// A client of the API server.
#[derive(Clone)]
pub struct Api {
    client: Client,
    runtime: Handle,
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Api").finish_non_exhaustive()
    }
}

/// How a change is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Patch {
    /// Fields that are given replace those that are there; null removes.
    Merge,
    /// The object is to be as given, whoever owned its fields.
    Apply,
}

impl Api {
    /// Asks through a client, whose connections run on a runtime.
    pub fn new(client: Client, runtime: Handle) -> Self {
        Self { client, runtime }
    }

    /// The client underneath.
    pub fn client(&self) -> Client {
        self.client.clone()
    }

    /// The runtime that the client's connections run on.
    pub fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// What stands at a path; `None` if nothing does.
    ///
    /// # Errors
    /// Why there is no answer.
    pub fn get(&self, path: &str) -> Result<Option<Value>> {
        match self.send("GET", path, None, None) {
            Ok(value) => Ok(Some(value)),
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
            Err(error) => Err(error).with_context(|| format!("GET {path}")),
        }
    }

    /// The items of a collection.
    ///
    /// # Errors
    /// Why there is no answer.
    pub fn items(&self, path: &str) -> Result<Vec<Value>> {
        let list = self.get(path)?.with_context(|| format!("{path} is not there"))?;
        match list["items"].clone() {
            Value::Array(items) => Ok(items),
            other => bail!("{path} has no items: {other}"),
        }
    }

    /// Whether an answer comes, and a good one.
    pub fn is_well(&self, path: &str) -> Result<()> {
        let request = http::Request::get(path).body(Vec::new())?;
        let client = self.client.clone();
        let text = self.wait(async move { client.request_text(request).await })??;
        anyhow::ensure!(text == "ok", "{path} says {text:?}");
        Ok(())
    }

    /// Makes a new object, or asks a question that is made like one (a token, a review).
    ///
    /// # Errors
    /// Why the server refuses.
    pub fn create(&self, collection: &str, object: &Value) -> Result<Value> {
        self.send("POST", collection, Some(object), None)
            .with_context(|| format!("POST {object} to {collection}"))
    }

    /// Lets an object be as given; it is made if it is not there. Fields that others set stay.
    ///
    /// # Errors
    /// Why the server refuses.
    pub fn apply(&self, object: &Value) -> Result<Value> {
        let path = path_of(object)?;
        let query = format!("{path}?fieldManager=lab&force=true");
        self.send("PATCH", &query, Some(object), Some(Patch::Apply))
            .with_context(|| format!("apply {object}"))
    }

    /// Changes fields of the object at a path.
    ///
    /// # Errors
    /// Why the server refuses.
    pub fn patch(&self, path: &str, fields: &Value) -> Result<Value> {
        self.send("PATCH", path, Some(fields), Some(Patch::Merge))
            .with_context(|| format!("PATCH {path} with {fields}"))
    }

    /// Deletes the object at a path, with so many seconds of grace if they are given. One that is not there is no error.
    ///
    /// # Errors
    /// Why the server refuses.
    pub fn delete(&self, path: &str, grace: Option<u32>) -> Result<()> {
        let mut options = json!({"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"});
        if let Some(seconds) = grace {
            options["gracePeriodSeconds"] = json!(seconds);
        }
        match self.send("DELETE", path, Some(&options), None) {
            Ok(_) => Ok(()),
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
            Err(error) => Err(error).with_context(|| format!("DELETE {path}")),
        }
    }

    fn send(&self, method: &str, path: &str, body: Option<&Value>, patch: Option<Patch>) -> kube::Result<Value> {
        let kind = match patch {
            None => "application/json",
            Some(Patch::Merge) => "application/merge-patch+json",
            Some(Patch::Apply) => "application/apply-patch+yaml",
        };
        let bytes = body.map(|body| body.to_string().into_bytes()).unwrap_or_default();
        let request = http::Request::builder()
            .method(method)
            .uri(path)
            .header("content-type", kind)
            .body(bytes)
            .map_err(kube::Error::HttpError)?;
        let client = self.client.clone();
        self.wait(async move { client.request(request).await })
            .map_err(|error| kube::Error::Service(error.into()))?
    }

    /// Waits for something that happens on the runtime's own threads: those are where the API server is.
    fn wait<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, tokio::task::JoinError> {
        self.runtime.block_on(self.runtime.spawn(work))
    }
}

/// Where an object of the kinds that the lab makes has its place.
///
/// # Errors
/// Where the kind is another one, or the object has no name.
pub fn path_of(object: &Value) -> Result<String> {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let name = text(&object["metadata"]["name"]).context("the object has no name")?;
    let namespace = text(&object["metadata"]["namespace"]).unwrap_or_else(|| "default".to_owned());
    let kind = text(&object["kind"]).context("the object has no kind")?;
    Ok(match kind.as_str() {
        "Namespace" => format!("/api/v1/namespaces/{name}"),
        "Node" => format!("/api/v1/nodes/{name}"),
        "Service" => format!("/api/v1/namespaces/{namespace}/services/{name}"),
        "Pod" => format!("/api/v1/namespaces/{namespace}/pods/{name}"),
        "Secret" => format!("/api/v1/namespaces/{namespace}/secrets/{name}"),
        "ServiceAccount" => format!("/api/v1/namespaces/{namespace}/serviceaccounts/{name}"),
        "EndpointSlice" => format!("/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices/{name}"),
        "Lease" => format!("/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}"),
        "ClusterRole" => format!("/apis/rbac.authorization.k8s.io/v1/clusterroles/{name}"),
        "ClusterRoleBinding" => format!("/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/{name}"),
        "RoleBinding" => format!("/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/rolebindings/{name}"),
        other => bail!("the lab makes no {other}"),
    })
}
