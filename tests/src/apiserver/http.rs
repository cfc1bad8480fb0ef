//! The wire: requests in, answers and chunked watches out, faults on demand.

use std::{
    collections::HashMap,
    convert::Infallible,
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use hyper::{
    Request, Response, StatusCode,
    body::{Body, Frame, Incoming},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::mpsc,
    time::{Instant, sleep_until},
};

use super::{
    Fault, Shared,
    store::{Page, Resource, Selector},
};

/// A body that is sent part by part; an error cuts the connection.
struct Parts(mpsc::Receiver<io::Result<Bytes>>);

impl Body for Parts {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        self.0.poll_recv(cx).map(|part| part.map(|part| part.map(Frame::data)))
    }
}

fn cut() -> io::Error {
    io::Error::other("the connection is cut on purpose")
}

pub(super) async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    while let Ok((stream, _)) = listener.accept().await {
        tokio::spawn(serve(stream, shared.clone()));
    }
}

async fn serve(stream: TcpStream, shared: Arc<Shared>) {
    let mut cut = shared.cut.subscribe();
    // As a real server has it: the second part of an event does not wait until the first is acknowledged.
    let _ = stream.set_nodelay(true);
    {
        let mut state = shared.state();
        if state.fault == Some(Fault::CloseConnections) {
            state.struck += 1;
            return;
        }
    }
    let service = service_fn(|request| {
        let shared = shared.clone();
        async move { Ok::<_, Infallible>(answer(request, &shared).await) }
    });
    let connection = http1::Builder::new().serve_connection(TokioIo::new(stream), service);
    tokio::select! {
        // An error here is a client that went away, or one of our own cuts.
        _ = connection => {}
        _ = cut.changed() => {}
    }
}

async fn answer(request: Request<Incoming>, shared: &Arc<Shared>) -> Response<Parts> {
    let Some(resource) = Resource::at(request.uri().path()) else {
        return status(404, "NotFound", "the server could not find the requested resource");
    };
    let query = query(request.uri().query().unwrap_or_default());
    let is_watch = query.get("watch").is_some_and(|watch| watch == "true");
    let fault = {
        let mut state = shared.state();
        let borne = request
            .headers()
            .get("authorization")
            .and_then(|value| value.to_str().ok());
        let borne = borne.and_then(|value| value.strip_prefix("Bearer "));
        if state.token.is_some() && state.token.as_deref() != borne {
            state.unauthorized += 1;
            return status(401, "Unauthorized", "Unauthorized");
        }
        let requests = state.requests.entry(resource).or_default();
        match (is_watch, query.contains_key("continue")) {
            (true, _) => requests.watches += 1,
            (false, true) => requests.further_pages += 1,
            (false, false) => requests.lists += 1,
        }
        if state.forbidden.contains(&resource) {
            let plural = resource.kind().to_lowercase();
            return status(
                403,
                "Forbidden",
                &format!("{plural}s is forbidden: no role lets this account list them"),
            );
        }
        let fault = state.fault.filter(|fault| !fault.spares_lists());
        if fault.is_some_and(|fault| fault != Fault::ContinueExpired) {
            state.struck += 1;
        }
        fault
    };
    let Some(selector) = Selector::parse(query.get("fieldSelector").map(String::as_str)) else {
        return status(400, "BadRequest", "field label not supported");
    };
    let text = |content_type: &str, code: u16, text: &str| whole(code, content_type, text.to_owned());
    match fault {
        Some(Fault::Silent) => std::future::pending().await,
        Some(Fault::Status(code)) => status(code, "Fault", "a fault was asked for"),
        Some(Fault::Html) => text("text/html", 200, "<html><body>Welcome</body></html>"),
        Some(Fault::HtmlBadGateway) => text("text/html", 502, "<html><body>502 Bad Gateway</body></html>"),
        Some(Fault::EmptyObject) => text("application/json", 200, "{}"),
        Some(Fault::WrongKind) => text(
            "application/json",
            200,
            r#"{"kind":"ConfigMapList","apiVersion":"v1","metadata":{"resourceVersion":"5000"},"items":[]}"#,
        ),
        Some(Fault::EmptyItems) => {
            let kind = resource.kind();
            let text =
                format!(r#"{{"kind":"{kind}List","metadata":{{"resourceVersion":"5000"}},"items":[{{}},{{}}]}}"#);
            whole(200, "application/json", text)
        }
        Some(Fault::TruncatedJson) => text("application/json", 200, r#"{"kind":"ServiceList","metadata":{"resour"#),
        Some(Fault::CutAnswer) => {
            let (sender, response) = parts(200, "application/json");
            let half = r#"{"kind":"ServiceList","apiVersion":"v1","metadata":{"resourceVersion":"5000"},"items":["#;
            let _ = sender.try_send(Ok(half.into()));
            let _ = sender.try_send(Err(cut()));
            response
        }
        fault if is_watch => {
            let content_type = if fault == Some(Fault::WrongContentType) {
                "text/plain"
            } else {
                "application/json"
            };
            watch(resource, selector, &query, content_type, shared)
        }
        fault => list(resource, &selector, &query, fault, shared),
    }
}

fn list(
    resource: Resource,
    selector: &Selector,
    query: &HashMap<String, String>,
    fault: Option<Fault>,
    shared: &Arc<Shared>,
) -> Response<Parts> {
    let limit = query
        .get("limit")
        .and_then(|limit| limit.parse().ok())
        .unwrap_or(usize::MAX);
    let mut state = shared.state();
    let page = match query.get("continue") {
        Some(token) => {
            let token = token.clone();
            if fault == Some(Fault::ContinueExpired) {
                state.struck += 1;
                None
            } else {
                state.store.list_on(&token, limit)
            }
        }
        None => Some(state.store.list(resource, selector, limit)),
    };
    let Some(Page { version, items, next }) = page else {
        return status(410, "Expired", "The provided continue parameter is too old");
    };
    let kind = format!("{}List", resource.kind());
    let api_version = resource.api_version();
    let metadata = json!({"resourceVersion": version.to_string(), "continue": next.unwrap_or_default()});
    let items = items.join(",");
    let list = format!(r#"{{"kind":"{kind}","apiVersion":"{api_version}","metadata":{metadata},"items":[{items}]}}"#);
    let content_type = if fault == Some(Fault::WrongContentType) {
        "text/plain"
    } else {
        "application/json"
    };
    whole(200, content_type, list)
}

fn watch(
    resource: Resource,
    selector: Selector,
    query: &HashMap<String, String>,
    content_type: &str,
    shared: &Arc<Shared>,
) -> Response<Parts> {
    if query.get("sendInitialEvents").is_some_and(|asked| asked == "true") {
        // As a server that cannot stream lists says it: the client falls back to a list.
        let message = "sendInitialEvents: Forbidden: sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled";
        return status(422, "Invalid", message);
    }
    let version = query
        .get("resourceVersion")
        .and_then(|version| version.parse().ok())
        .unwrap_or(0);
    {
        let mut state = shared.state();
        if state.fault == Some(Fault::WatchGoneStatus) {
            state.struck += 1;
            return status(410, "Expired", "too old resource version");
        }
        if state.expired_by_status && state.store.is_expired(version) {
            return status(410, "Expired", "too old resource version");
        }
        if version > state.store.version() {
            return status(504, "Timeout", "Too large resource version");
        }
    }
    let seconds = query
        .get("timeoutSeconds")
        .and_then(|seconds| seconds.parse().ok())
        .unwrap_or(300);
    let (sender, response) = parts(200, content_type);
    let watch = Watch {
        resource,
        selector,
        version,
        bookmarks: query
            .get("allowWatchBookmarks")
            .is_some_and(|allowed| allowed == "true"),
        until: Instant::now() + Duration::from_secs(seconds),
        sender,
        shared: shared.clone(),
    };
    tokio::spawn(watch.run());
    response
}

struct Watch {
    resource: Resource,
    selector: Selector,
    version: u64,
    bookmarks: bool,
    until: Instant,
    sender: mpsc::Sender<io::Result<Bytes>>,
    shared: Arc<Shared>,
}

impl Watch {
    async fn run(mut self) {
        let mut changed = self.shared.changed.subscribe();
        let mut cut = self.shared.cut.subscribe();
        loop {
            // A watch that was cut sends nothing of what happened after the cut.
            if cut.has_changed().unwrap_or(true) || !self.round().await {
                return;
            }
            tokio::select! {
                _ = changed.changed() => {}
                _ = cut.changed() => return,
                () = self.sender.closed() => return,
                () = sleep_until(self.until) => return,
            }
        }
    }

    /// Sends what has happened; tells whether the watch goes on.
    async fn round(&mut self) -> bool {
        let (fault, expired, events) = {
            let mut state = self.shared.state();
            let fault = state.fault;
            let events = state.store.events_after(self.resource, self.version);
            let strikes = match fault {
                Some(Fault::WatchGoneEvent | Fault::WatchErrorEvent | Fault::WatchCloses) => true,
                Some(Fault::EventCut | Fault::EventTruncated | Fault::EventGarbage) => !events.is_empty(),
                _ => false,
            };
            state.struck += u64::from(strikes);
            (fault, state.store.is_expired(self.version), events)
        };
        let error = match fault {
            Some(Fault::WatchCloses) => return false,
            Some(Fault::WatchGoneEvent) => Some((410, "Expired")),
            Some(Fault::WatchErrorEvent) => Some((500, "InternalError")),
            _ if expired => Some((410, "Expired")),
            _ => None,
        };
        if let Some((code, reason)) = error {
            let object = status_object(code, reason, "too old resource version, or so");
            self.line(&json!({"type": "ERROR", "object": object}).to_string()).await;
            return false;
        }
        for event in events {
            self.version = event.version;
            if event.change == "BOOKMARK" && !self.bookmarks {
                continue;
            }
            if event.change != "BOOKMARK" && !self.selector.admits(&event.object) {
                continue;
            }
            let text = json!({"type": event.change, "object": event.object}).to_string();
            let half = text[..text.len() / 2].to_owned();
            match fault {
                Some(Fault::EventCut) => {
                    let _ = self.sender.send(Ok(half.into())).await;
                    let _ = self.sender.send(Err(cut())).await;
                    return false;
                }
                Some(Fault::EventTruncated) => self.part(format!("{half}\n")).await,
                Some(Fault::EventGarbage) => self.part("\u{7f}ELF nonsense\n".to_owned()).await,
                _ => {
                    self.shared.state().hand(event.version);
                    self.line(&text).await;
                }
            }
        }
        true
    }

    /// Sends an event in two parts, so that every client has to put it together.
    async fn line(&self, event: &str) {
        let text = format!("{event}\n");
        let (first, second) = text.split_at(text.len() / 2);
        self.part(first.to_owned()).await;
        self.part(second.to_owned()).await;
    }

    async fn part(&self, part: String) {
        // A client that is gone is seen in the loop.
        let _ = self.sender.send(Ok(part.into())).await;
    }
}

fn parts(code: u16, content_type: &str) -> (mpsc::Sender<io::Result<Bytes>>, Response<Parts>) {
    let (sender, receiver) = mpsc::channel(64);
    let response = Response::builder()
        .status(StatusCode::from_u16(code).expect("a status"))
        .header("content-type", content_type)
        .body(Parts(receiver))
        .expect("a valid head");
    (sender, response)
}

fn whole(code: u16, content_type: &str, text: String) -> Response<Parts> {
    let (sender, response) = parts(code, content_type);
    sender.try_send(Ok(text.into())).expect("room for one part");
    response
}

fn status_object(code: u16, reason: &str, message: &str) -> Value {
    json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message, "reason": reason, "code": code,
    })
}

fn status(code: u16, reason: &str, message: &str) -> Response<Parts> {
    whole(
        code,
        "application/json",
        status_object(code, reason, message).to_string(),
    )
}

/// The parameters of a query, decoded.
fn query(text: &str) -> HashMap<String, String> {
    let pairs = text.split('&').filter_map(|pair| pair.split_once('='));
    pairs.map(|(key, value)| (decode(key), decode(value))).collect()
}

fn decode(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        match byte {
            b'+' => bytes.push(b' '),
            b'%' => {
                let digits: Vec<u8> = rest.by_ref().take(2).collect();
                let digits = String::from_utf8_lossy(&digits).into_owned();
                bytes.push(u8::from_str_radix(&digits, 16).unwrap_or(b'?'));
            }
            other => bytes.push(other),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
