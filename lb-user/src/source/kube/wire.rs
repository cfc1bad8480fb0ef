//! Requests to the API server, and everything that can go wrong with an answer.

use std::{
    error::Error,
    io,
    task::{Context, Poll},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use futures::future::BoxFuture;
use http_body_util::BodyExt;
use hyper::{body::Incoming, header::AUTHORIZATION};
use hyper_util::{
    client::legacy::{self, connect::Connect},
    rt::TokioExecutor,
};
use kube::{
    Client, Config,
    client::{Body, ClientBuilder, ConfigExt},
    config::{KubeConfigOptions, Kubeconfig},
    core::{
        Request,
        params::{ListParams, WatchParams},
    },
};
use tokio::time::timeout;
use tower_service::Service;

use super::{
    Options,
    dial::{DialError, Dialer},
    token::TokenFile,
    waits::Trouble,
};
use crate::{model::Kind, source::convert::quote};

/// The largest page of a list, and the largest event, that is taken in.
const LARGEST_ANSWER: usize = 256 << 20;
/// How much of an error's text is read.
const LARGEST_ERROR: usize = 64 << 10;

/// Why a request brought nothing, or not all.
#[derive(Debug, thiserror::Error)]
pub(super) enum WireError {
    /// The configuration or the credentials cannot be used.
    #[error("cannot set up the connection to the API server: {0}")]
    Setup(String),
    /// Nobody was met: no address, or no connection.
    #[error("cannot reach the API server: {0}")]
    Unreachable(String),
    /// The two sides could not agree on each other: a certificate that does not fit, for example.
    #[error("cannot trust the API server, or it does not trust this node: {0}")]
    Handshake(String),
    /// Somebody was met, and the connection was cut.
    #[error("the connection to the API server was cut: {0}")]
    Cut(String),
    /// The server was silent for too long.
    #[error("the API server was silent for {0:?}")]
    Silence(Duration),
    /// The server refused.
    #[error("the API server refused with {code}: {message}")]
    Refused {
        /// The HTTP status.
        code: u16,
        /// What it said.
        message: String,
        /// How long it asks to be left alone.
        retry_after: Option<Duration>,
    },
    /// The answer is none that an API server gives.
    #[error("the API server's answer cannot be understood: {0}")]
    Answer(String),
    /// The watch ended with an error event.
    #[error("the API server ended the watch with {code}: {message}")]
    WatchEnded {
        /// The status code in the event.
        code: i64,
        /// What it said.
        message: String,
    },
}

impl WireError {
    /// Whether what was known of the server's version history is of no use any more.
    pub(super) fn needs_list(&self) -> bool {
        match self {
            Self::Refused { code, .. } => *code == 410,
            Self::Answer(_) | Self::WatchEnded { .. } => true,
            Self::Setup(_) | Self::Unreachable(_) | Self::Handshake(_) | Self::Cut(_) | Self::Silence(_) => false,
        }
    }

    /// After how long with the same configuration and credentials they should be read anew, because they may be the
    /// reason; `None` if they are not. It may cost a process (credential plugins), so it is not done at every try.
    pub(super) fn setup_lasts(&self) -> Option<Duration> {
        match self {
            Self::Setup(_) | Self::Handshake(_) | Self::Refused { code: 401, .. } => Some(Duration::from_secs(1)),
            Self::Refused { code: 403, .. } => Some(Duration::from_secs(10)),
            _ => None,
        }
    }

    /// What this cost the server.
    pub(super) fn trouble(&self) -> Trouble {
        match self {
            Self::Unreachable(_) => Trouble::Unreachable,
            Self::Silence(_) => Trouble::Overloaded { retry_after: None },
            Self::Refused { code, retry_after, .. } if *code == 429 || *code >= 500 => Trouble::Overloaded {
                retry_after: *retry_after,
            },
            Self::Setup(_)
            | Self::Handshake(_)
            | Self::Cut(_)
            | Self::Refused { .. }
            | Self::Answer(_)
            | Self::WatchEnded { .. } => Trouble::Unserved,
        }
    }

    fn of_kube(error: &kube::Error) -> Self {
        if let kube::Error::Auth(_) = error {
            return Self::Setup(chain(error));
        }
        let mut cause: Option<&(dyn Error + 'static)> = Some(error);
        while let Some(error) = cause {
            if error.is::<DialError>() {
                return Self::Unreachable(chain(error));
            }
            // What TLS objects to arrives as invalid data; a cut within its handshake is a cut.
            if let Some(io) = error.downcast_ref::<io::Error>()
                && io.kind() == io::ErrorKind::InvalidData
            {
                return Self::Handshake(chain(error));
            }
            cause = error.source();
        }
        Self::Cut(chain(error))
    }
}

/// An error with all its causes, in one line.
fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        if !text.contains(&next) {
            text = format!("{text}: {next}");
        }
        cause = error.source();
    }
    text
}

/// The way to an API server, with everything that its configuration says. Its copies share connections.
#[derive(Clone)]
pub(super) struct Connection {
    client: Client,
    token: Option<TokenFile>,
}

/// The HTTP client below what kube adds to requests, which wants errors of any type.
#[derive(Clone)]
struct Sender<C>(legacy::Client<C, Body>);

impl<C> Service<hyper::Request<Body>> for Sender<C>
where
    C: Connect + Clone + Send + Sync + 'static,
{
    type Response = hyper::Response<Incoming>;
    type Error = Box<dyn Error + Send + Sync>;
    type Future = BoxFuture<'static, Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.0.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, request: hyper::Request<Body>) -> Self::Future {
        let answer = self.0.request(request);
        Box::pin(async move { answer.await.map_err(Into::into) })
    }
}

/// Sets up the way to the server. Nothing is sent yet.
pub(super) async fn connection(options: &Options, dialer: &Dialer) -> Result<Connection, WireError> {
    let setup = |error: &dyn Error| WireError::Setup(chain(error));
    let mut config = match (&options.url, &options.kubeconfig) {
        (Some(url), _) => {
            let url = url.parse().map_err(|_| {
                WireError::Setup(format!(
                    "found {}; wanted a URL such as https://10.0.0.1:6443",
                    quote(url)
                ))
            })?;
            Config::new(url)
        }
        (None, Some(path)) => {
            let kubeconfig = Kubeconfig::read_from(path).map_err(|error| setup(&error))?;
            let chosen = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await;
            chosen.map_err(|error| setup(&error))?
        }
        (None, None) => Config::infer().await.map_err(|error| setup(&error))?,
    };
    if let Some(proxy) = &config.proxy_url {
        return Err(WireError::Setup(format!(
            "found the proxy {}; wanted none, as the API server is dialled directly",
            quote(proxy.to_string())
        )));
    }
    let token = TokenFile::take(&mut config.auth_info);
    // A plain server needs no trust, and the system's certificates need not be read for it.
    let client = if config.cluster_url.scheme_str() == Some("http") {
        client(&config, dialer.clone())
    } else {
        let https = config.rustls_https_connector_with_connector(dialer.clone());
        client(&config, https.map_err(|error| setup(&error))?)
    };
    let client = client.map_err(|error| setup(&error))?;
    Ok(Connection { client, token })
}

/// A client that adds to each request what the configuration says. Nothing in it tries again by itself: the loop above does,
/// and a client that did so too would hide the reason.
fn client<C>(config: &Config, connector: C) -> Result<Client, kube::Error>
where
    C: Connect + Clone + Send + Sync + 'static,
{
    let sender = Sender(legacy::Client::builder(TokioExecutor::new()).build(connector));
    let client = ClientBuilder::new(sender, config.default_namespace.clone())
        .with_layer(&config.base_uri_layer())
        .with_layer(&config.extra_headers_layer()?);
    Ok(match config.auth_layer()? {
        Some(auth) => client.with_layer(&auth).build(),
        None => client.build(),
    })
}

/// The path and the field selector of a kind's collection.
fn collection(kind: Kind, node_name: &str) -> (Request, Option<String>) {
    match kind {
        Kind::Slice => (Request::new("/apis/discovery.k8s.io/v1/endpointslices"), None),
        Kind::Node => (
            Request::new("/api/v1/nodes"),
            Some(format!("metadata.name={node_name}")),
        ),
        // Thousands of nodes ask this: each is told of its own Pods alone.
        Kind::Pod => (Request::new("/api/v1/pods"), Some(format!("spec.nodeName={node_name}"))),
        Kind::Service | Kind::Addresses => (Request::new("/api/v1/services"), None),
    }
}

/// Fetches one page of a list, whole.
pub(super) async fn page(
    connection: &Connection,
    kind: Kind,
    options: &Options,
    continue_token: Option<String>,
) -> Result<Bytes, WireError> {
    let (request, field_selector) = collection(kind, &options.node_name);
    let mut params = ListParams {
        field_selector,
        limit: Some(options.timing.page),
        continue_token,
        ..ListParams::default()
    };
    if kind == Kind::Pod {
        // A node has few Pods, and the server finds them by its cache's index; asked for pages, it would read the Pods of the
        // whole cluster out of its store for each node that asks. What is a moment old is brought up to date by the watch.
        params.limit = None;
        params = params.match_any();
    }
    let request = request.list(&params).map_err(|error| WireError::Setup(chain(&error)))?;
    let answer = options.timing.answer;
    let mut body = ask(connection, request.map(Body::from), options).await?;
    let mut text = BytesMut::new();
    while let Some(part) = body.part(answer).await? {
        if text.len() + part.len() > LARGEST_ANSWER {
            return Err(WireError::Answer(format!("a page of more than {LARGEST_ANSWER} bytes")));
        }
        text.extend_from_slice(&part);
    }
    Ok(text.freeze())
}

/// Opens a watch from a version on.
pub(super) async fn watch(
    connection: &Connection,
    kind: Kind,
    options: &Options,
    version: &str,
) -> Result<Events, WireError> {
    let (request, field_selector) = collection(kind, &options.node_name);
    let params = WatchParams {
        field_selector,
        timeout: u32::try_from(options.timing.watch.as_secs().max(1)).ok(),
        bookmarks: true,
        ..WatchParams::default()
    };
    let mut request = request
        .watch(&params, version)
        .map_err(|error| WireError::Setup(chain(&error)))?;
    // A compressed stream cannot be taken apart event by event.
    let plain = "identity".parse().map_err(|_| WireError::Setup("header".to_owned()))?;
    request.headers_mut().insert("accept-encoding", plain);
    Ok(Events {
        body: ask(connection, request.map(Body::from), options).await?,
        text: BytesMut::new(),
        searched: 0,
    })
}

/// Sends a request, counts it, and takes the head of its answer: JSON with a good status, or an error.
async fn ask(connection: &Connection, request: hyper::Request<Body>, options: &Options) -> Result<Answer, WireError> {
    let answer = send(connection, request, options.timing.answer);
    options.requests.count(answer).await
}

async fn send(
    connection: &Connection,
    mut request: hyper::Request<Body>,
    limit: Duration,
) -> Result<Answer, WireError> {
    if let Some(token) = &connection.token {
        let header = token.header().await.map_err(|error| WireError::Setup(chain(&error)))?;
        request.headers_mut().insert(AUTHORIZATION, header);
    }
    let response = timeout(limit, connection.client.send(request))
        .await
        .map_err(|_| WireError::Silence(limit))?
        .map_err(|error| WireError::of_kube(&error))?;
    let (head, body) = response.into_parts();
    let header = |name: &str| head.headers.get(name).and_then(|value| value.to_str().ok());
    let content_type = header("content-type").map(str::to_owned);
    let retry_after = header("retry-after")
        .and_then(|text| text.parse().ok())
        .map(Duration::from_secs);
    let status = head.status;
    let mut body = Answer { body };
    if !status.is_success() {
        return Err(WireError::Refused {
            code: status.as_u16(),
            message: body.error_text(limit).await,
            retry_after,
        });
    }
    match content_type {
        Some(found) if !found.starts_with("application/json") => Err(WireError::Answer(format!(
            "content type {}; wanted application/json",
            quote(found)
        ))),
        _ => Ok(body),
    }
}

/// The body of an answer.
#[derive(Debug)]
struct Answer {
    body: Body,
}

impl Answer {
    /// The next part; `None` at the proper end. A cut is an error.
    async fn part(&mut self, limit: Duration) -> Result<Option<Bytes>, WireError> {
        loop {
            let frame = timeout(limit, self.body.frame())
                .await
                .map_err(|_| WireError::Silence(limit))?;
            match frame {
                None => return Ok(None),
                Some(Err(error)) => return Err(WireError::of_kube(&error)),
                Some(Ok(frame)) => {
                    if let Ok(part) = frame.into_data() {
                        return Ok(Some(part));
                    }
                }
            }
        }
    }

    /// What a refusal says: the message of a Status, else the beginning of whatever it is.
    async fn error_text(&mut self, limit: Duration) -> String {
        let mut text = BytesMut::new();
        while text.len() < LARGEST_ERROR
            && let Ok(Some(part)) = self.part(limit).await
        {
            text.extend_from_slice(&part);
        }
        match serde_json::from_slice::<serde_json::Value>(&text) {
            Ok(status) if status["message"].is_string() => status["message"].as_str().unwrap_or_default().to_owned(),
            _ => quote(String::from_utf8_lossy(&text).trim()),
        }
    }
}

/// An open watch.
#[derive(Debug)]
pub(super) struct Events {
    body: Answer,
    text: BytesMut,
    /// How much of `text` is known to hold no line end.
    searched: usize,
}

impl Events {
    /// The next event's text; `None` when the server ended the watch. An end in the middle of an event is an error.
    ///
    /// Safe to drop before it is done: nothing that has arrived is lost.
    pub(super) async fn next(&mut self, silence: Duration) -> Result<Option<Bytes>, WireError> {
        loop {
            if let Some(end) = self.text[self.searched..].iter().position(|&byte| byte == b'\n') {
                let line = self.text.split_to(self.searched + end + 1).freeze();
                self.searched = 0;
                if line.trim_ascii().is_empty() {
                    continue;
                }
                return Ok(Some(line));
            }
            self.searched = self.text.len();
            if self.text.len() > LARGEST_ANSWER {
                return Err(WireError::Answer(format!(
                    "an event of more than {LARGEST_ANSWER} bytes"
                )));
            }
            match self.body.part(silence).await? {
                Some(part) => self.text.extend_from_slice(&part),
                None if self.text.trim_ascii().is_empty() => return Ok(None),
                None => {
                    let reason = "the watch ended in the middle of an event".to_owned();
                    return Err(WireError::Cut(reason));
                }
            }
        }
    }
}
