//! An API server for tests: list and watch of Services, EndpointSlices, Nodes, Pods and ServiceCIDRs over real HTTP/1.1.
//!
//! What it proves: that a client pages through lists, resumes watches from the right version, takes bookmarks,
//! relists after 410 (as an HTTP status and as an event), and lives through cuts, silence, refusals and nonsense. Its
//! rules are the API server's own: one version counter for all objects, events in the order of versions, `ADDED` /
//! `MODIFIED` / `DELETED` with the object as it was last, lists that show one version over all their pages, expired
//! versions and continue tokens after a compaction.
//!
//! What it cannot prove: TLS, authentication beyond one bearer token (it hands out 401 and 403 on demand), objects that come into a selection or
//! leave it by a change (a Pod's node is never another one), admission and defaulting (objects
//! are stored as they are given), the timing of a real server's bookmarks, protobuf, and everything behind etcd. That
//! the real server speaks this protocol is to be shown once against a real one.

mod fault;
mod http;
mod store;

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use lb_user::source::convert::{Converted, Converter, Names};
use serde_json::Value;
use tokio::{
    net::{TcpListener, TcpSocket},
    sync::watch,
    task::JoinHandle,
};

use self::store::Store;
pub use self::{fault::Fault, store::Resource};

/// A running API server. It ends with its owner.
#[derive(Debug)]
pub struct ApiServer {
    address: SocketAddr,
    shared: Arc<Shared>,
    listener: Mutex<Option<JoinHandle<()>>>,
}

/// What requests of one kind were made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Requests {
    /// First pages of lists.
    pub lists: u64,
    /// Further pages.
    pub further_pages: u64,
    /// Watches.
    pub watches: u64,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Wakes watches: the store or the fault changed.
    changed: watch::Sender<u64>,
    /// Ends all connections that are older than its last change.
    cut: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct State {
    store: Store,
    fault: Option<Fault>,
    /// The bearer token that every request has to bear; `None` asks for none.
    token: Option<String>,
    /// Requests that did not bear it.
    unauthorized: u64,
    /// Kinds that nobody may read.
    forbidden: std::collections::BTreeSet<Resource>,
    requests: std::collections::BTreeMap<Resource, Requests>,
    /// Requests that met the fault.
    struck: u64,
    /// Whether a watch from a forgotten version is refused with HTTP 410 instead of opened and ended with an event.
    expired_by_status: bool,
    /// When the events of these versions were first given to a watch's connection; the latest [`MOST_HANDED`] of them.
    handed: std::collections::BTreeMap<u64, std::time::Instant>,
}

/// How many events' times are kept.
const MOST_HANDED: usize = 8_192;

impl State {
    /// Notes that a watch is about to write the event of a version.
    fn hand(&mut self, version: u64) {
        self.handed.entry(version).or_insert_with(std::time::Instant::now);
        while self.handed.len() > MOST_HANDED {
            self.handed.pop_first();
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        self.changed.send_modify(|count| *count += 1);
    }
}

impl ApiServer {
    /// Starts on a free port of 127.0.0.1.
    ///
    /// # Panics
    /// No port can be bound.
    pub async fn start() -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a free port");
        let server = Self {
            address: listener.local_addr().expect("the listener has an address"),
            shared: Arc::new(Shared {
                state: Mutex::default(),
                changed: watch::Sender::new(0),
                cut: watch::Sender::new(0),
            }),
            listener: Mutex::new(None),
        };
        server.accept(listener);
        server
    }

    /// The server's URL.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Stores an object, new or changed.
    ///
    /// # Panics
    /// The value is of no kind that is served, or has no name.
    pub fn apply(&self, object: Value) {
        self.shared.state().store.apply(object);
        self.shared.wake();
    }

    /// Stores an object, new or changed, and returns the version that it has now.
    ///
    /// # Panics
    /// The value is of no kind that is served, or has no name.
    pub fn change(&self, object: Value) -> u64 {
        let version = {
            let mut state = self.shared.state();
            state.store.apply(object);
            state.store.version()
        };
        self.shared.wake();
        version
    }

    /// When the event of a version was first given to a watch's connection, if that is not long ago.
    pub fn handed(&self, version: u64) -> Option<std::time::Instant> {
        self.shared.state().handed.get(&version).copied()
    }

    /// Deletes an object, if it is there.
    pub fn delete(&self, resource: Resource, namespace: &str, name: &str) {
        self.shared.state().store.delete(resource, namespace, name);
        self.shared.wake();
    }

    /// All objects of a kind, as a client would get them.
    pub fn objects(&self, resource: Resource) -> Vec<Value> {
        self.shared.state().store.objects(resource)
    }

    /// What an agent makes of all objects of the kinds that it follows.
    ///
    /// # Panics
    /// An object is none of its kind.
    pub fn converted(&self) -> Vec<Converted> {
        let mut names = Names::default();
        let mut converter = Converter {
            origin: names.share("API server"),
            names: &mut names,
        };
        let mut all = Vec::new();
        for resource in Resource::FOLLOWED {
            for object in self.objects(resource) {
                all.push(match resource {
                    Resource::Services => converter.service(&serde_json::from_value(object).expect("a Service")),
                    Resource::Slices => converter.slice(&serde_json::from_value(object).expect("a slice")),
                    Resource::Nodes => converter.node(&serde_json::from_value(object).expect("a Node")),
                    Resource::Pods => converter.pod(&serde_json::from_value(object).expect("a Pod")),
                    // Other proxies read them.
                    Resource::ServiceCidrs => continue,
                });
            }
        }
        all
    }

    /// Forgets all events so far: watches from older versions, and lists that are under way, meet 410.
    pub fn compact(&self) {
        self.shared.state().store.compact();
    }

    /// How a watch from a forgotten version learns of it: by HTTP 410, or (as at first) by an event on an open watch.
    pub fn say_expired_by_status(&self, by_status: bool) {
        self.shared.state().expired_by_status = by_status;
    }

    /// Goes back to a lower version counter, as after a restored backup; objects stay as they are.
    pub fn restore_older_versions(&self) {
        self.shared.state().store.restore_older_versions();
        self.disconnect();
    }

    /// Sends a bookmark on all watches.
    pub fn bookmark(&self) {
        self.shared.state().store.bookmark();
        self.shared.wake();
    }

    /// From now on, goes wrong in this way; `None` heals.
    ///
    /// # Panics
    /// The former port cannot be bound again.
    pub async fn set_fault(&self, fault: Option<Fault>) {
        let was = std::mem::replace(&mut self.shared.state().fault, fault);
        if fault == Some(Fault::RefuseConnections) {
            let listener = self.listener.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(listener) = listener {
                listener.abort();
                // The port is free when the task is gone, not before.
                let _ = listener.await;
            }
        } else if was == Some(Fault::RefuseConnections) {
            let socket = TcpSocket::new_v4().expect("a socket");
            socket.set_reuseaddr(true).expect("reuse of the port");
            socket.bind(self.address).expect("the former port");
            self.accept(socket.listen(64).expect("a listener"));
        }
        self.shared.wake();
    }

    /// From now on, refuses requests with 401 that do not bear this token. Watches that are open stay open.
    pub fn require_token(&self, token: &str) {
        self.shared.state().token = Some(token.to_owned());
    }

    /// How many requests were refused with 401 for their token.
    pub fn unauthorized(&self) -> u64 {
        self.shared.state().unauthorized
    }

    /// From now on, refuses one kind with 403, as without the right to read it; or no longer.
    pub fn forbid(&self, resource: Resource, forbidden: bool) {
        let mut state = self.shared.state();
        if forbidden {
            state.forbidden.insert(resource);
        } else {
            state.forbidden.remove(&resource);
        }
    }

    /// How many requests met the present or an earlier fault. Refused connections do not count: nobody sees them.
    pub fn struck(&self) -> u64 {
        self.shared.state().struck
    }

    /// Cuts all connections that exist now.
    pub fn disconnect(&self) {
        self.shared.cut.send_modify(|count| *count += 1);
    }

    /// What was asked about a kind so far.
    pub fn requests(&self, resource: Resource) -> Requests {
        self.shared.state().requests.get(&resource).copied().unwrap_or_default()
    }

    fn accept(&self, listener: TcpListener) {
        let task = tokio::spawn(http::accept(listener, self.shared.clone()));
        *self.listener.lock().unwrap_or_else(PoisonError::into_inner) = Some(task);
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        if let Some(listener) = self.listener.lock().unwrap_or_else(PoisonError::into_inner).take() {
            listener.abort();
        }
        self.disconnect();
    }
}
