//! Connections to the API server: from its name to a TCP stream that notices when the other end is gone.
//!
//! Invariants: what is lost on the way costs half a second, not the kernel's next retransmission or the resolver's next
//! server, because another try is begun beside the one that hangs; a name that cannot be looked up just now is served from
//! what it meant last (the server's certificate says whether that is still it); lookups that hang are bounded in number.
//! TLS, credentials and waits between tries are not here.

use std::{
    collections::HashMap,
    fmt, io,
    net::{IpAddr, SocketAddr},
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use futures::{StreamExt, future::BoxFuture, stream::FuturesUnordered};
use hyper::Uri;
use hyper_util::rt::TokioIo;
use nix::sys::socket::{setsockopt, sockopt};
use tokio::{
    net::{TcpStream, lookup_host},
    sync::Semaphore,
    time::{sleep, timeout},
};
use tower_service::Service;

/// How long a lookup or a connection may take before another is begun beside it.
const BESIDE: Duration = Duration::from_millis(500);
/// How many lookups may hang at once, over all feeds. A resolver gives up after 10 to 30 seconds.
const MOST_LOOKUPS: usize = 32;
/// After how long without a word the other end's kernel is asked whether it is there, how often, and how many questions may
/// stay unanswered: a peer that is gone without a word is noticed after five seconds.
const ALIVE_AFTER: u32 = 2;
const ALIVE_EVERY: u32 = 1;
const ALIVE_QUESTIONS: u32 = 3;
/// How long what was sent may stay unacknowledged, in milliseconds.
const UNACKNOWLEDGED_MS: u32 = 5_000;

/// Why there is no connection. Nothing of this reached an API server.
#[derive(Debug, thiserror::Error)]
pub(super) enum DialError {
    #[error("found the URL {0}; wanted one with a host")]
    NoHost(Uri),
    #[error("{name} cannot be looked up: {source}")]
    Lookup {
        name: String,
        #[source]
        source: io::Error,
    },
    #[error("{address} cannot be connected: {source}")]
    Connect {
        address: SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error("no connection to {host} within {limit:?}")]
    Limit { host: String, limit: Duration },
}

/// A name and a port.
type Name = (String, u16);
/// How a name is looked up.
type Resolve = dyn Fn(Name) -> BoxFuture<'static, io::Result<Vec<SocketAddr>>> + Send + Sync;

/// Opens connections. Its copies share what they know of names.
#[derive(Clone)]
pub(super) struct Dialer {
    /// The longest that a connection may take, its lookup included.
    limit: Duration,
    resolve: Arc<Resolve>,
    known: Arc<Mutex<HashMap<Name, Vec<SocketAddr>>>>,
    lookups: Arc<Semaphore>,
}

impl fmt::Debug for Dialer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dialer")
            .field("limit", &self.limit)
            .field("known", &self.known)
            .finish_non_exhaustive()
    }
}

impl Dialer {
    pub(super) fn new(limit: Duration) -> Self {
        Self::with(limit, |(host, port)| {
            Box::pin(async move { Ok(lookup_host((host, port)).await?.collect()) })
        })
    }

    fn with(
        limit: Duration,
        resolve: impl Fn(Name) -> BoxFuture<'static, io::Result<Vec<SocketAddr>>> + Send + Sync + 'static,
    ) -> Self {
        Self {
            limit,
            resolve: Arc::new(resolve),
            known: Arc::default(),
            lookups: Arc::new(Semaphore::new(MOST_LOOKUPS)),
        }
    }

    /// Connects to the host of a URL.
    pub(super) async fn dial(&self, url: &Uri) -> Result<TcpStream, DialError> {
        let host = url
            .host()
            .map(|host| host.trim_start_matches('[').trim_end_matches(']'));
        let Some(host) = host.filter(|host| !host.is_empty()) else {
            return Err(DialError::NoHost(url.clone()));
        };
        let plain = url.scheme_str() == Some("http");
        let port = url.port_u16().unwrap_or(if plain { 80 } else { 443 });
        let connecting = async {
            let addresses = match host.parse::<IpAddr>() {
                Ok(address) => vec![SocketAddr::new(address, port)],
                Err(_) => self.look_up((host.to_owned(), port)).await?,
            };
            connect(&addresses).await
        };
        let stream = timeout(self.limit, connecting).await.map_err(|_| DialError::Limit {
            host: host.to_owned(),
            limit: self.limit,
        })??;
        if let Err(error) = watch_over(&stream) {
            tracing::debug!(%error, "a connection to the API server has no keepalive");
        }
        Ok(stream)
    }

    /// The addresses of a name: as it is now, or as it was last where that cannot be said soon.
    async fn look_up(&self, name: Name) -> Result<Vec<SocketAddr>, DialError> {
        let mut lookups = FuturesUnordered::new();
        loop {
            if let Ok(permit) = self.lookups.clone().try_acquire_owned() {
                let (resolving, known, of) = ((self.resolve)(name.clone()), self.known.clone(), name.clone());
                // A task of its own: it goes on, and is learned from, when nobody waits for it any more.
                lookups.push(tokio::spawn(async move {
                    let found = resolving.await;
                    if let Ok(addresses) = &found
                        && !addresses.is_empty()
                    {
                        let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
                        known.insert(of, addresses.clone());
                    }
                    drop(permit);
                    found
                }));
            }
            let failed = tokio::select! {
                Some(found) = lookups.next() => match found {
                    Ok(Ok(addresses)) if !addresses.is_empty() => return Ok(addresses),
                    Ok(Ok(_)) => Some(io::Error::other("it has no address")),
                    Ok(Err(error)) => Some(error),
                    Err(error) => Some(error.into()),
                },
                () = sleep(BESIDE) => None,
            };
            // Another feed's lookup, or an earlier one of ours, may have told by now.
            let known = self
                .known
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .get(&name)
                .cloned();
            match (known, failed) {
                (Some(addresses), _) => return Ok(addresses),
                (None, Some(source)) => {
                    let (name, _) = name;
                    return Err(DialError::Lookup { name, source });
                }
                (None, None) => {}
            }
        }
    }
}

/// Connects to whichever address answers first. An address that refuses gives way to the next at once, one that says
/// nothing after a while; when all have refused, the last one's reason is the reason.
async fn connect(addresses: &[SocketAddr]) -> Result<TcpStream, DialError> {
    let mut tries = FuturesUnordered::new();
    let mut refused = 0;
    for &address in addresses.iter().cycle() {
        tries.push(async move {
            let stream = TcpStream::connect(address).await;
            stream.map_err(|source| DialError::Connect { address, source })
        });
        tokio::select! {
            Some(tried) = tries.next() => match tried {
                Ok(stream) => return Ok(stream),
                Err(error) => {
                    refused += 1;
                    if refused >= addresses.len() {
                        return Err(error);
                    }
                }
            },
            () = sleep(BESIDE) => {}
        }
    }
    unreachable!("a lookup brings one address at least, and they are gone through in a circle")
}

/// Has the kernel notice that the other end is gone without a word: a host that lost its power, a path that lost its state.
fn watch_over(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    setsockopt(stream, sockopt::KeepAlive, &true)?;
    setsockopt(stream, sockopt::TcpKeepIdle, &ALIVE_AFTER)?;
    setsockopt(stream, sockopt::TcpKeepInterval, &ALIVE_EVERY)?;
    setsockopt(stream, sockopt::TcpKeepCount, &ALIVE_QUESTIONS)?;
    setsockopt(stream, sockopt::TcpUserTimeout, &UNACKNOWLEDGED_MS)?;
    Ok(())
}

impl Service<Uri> for Dialer {
    type Response = TokioIo<TcpStream>;
    type Error = DialError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, DialError>> + Send>>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), DialError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, url: Uri) -> Self::Future {
        let dialer = self.clone();
        Box::pin(async move { dialer.dial(&url).await.map(TokioIo::new) })
    }
}

#[cfg(test)]
mod tests {
    use std::{
        net::Ipv4Addr,
        sync::atomic::{AtomicUsize, Ordering},
        time::Instant,
    };

    use nix::sys::socket::getsockopt;
    use tokio::net::TcpListener;

    use super::*;

    /// What a resolver says, time after time; then it hangs.
    fn saying(answers: Vec<io::Result<Vec<SocketAddr>>>, asked: &Arc<AtomicUsize>) -> Dialer {
        let answers = Mutex::new(answers.into_iter());
        let asked = asked.clone();
        Dialer::with(Duration::from_secs(10), move |_| {
            asked.fetch_add(1, Ordering::Relaxed);
            let answer = answers.lock().expect("no test panics here").next();
            Box::pin(async move {
                match answer {
                    Some(answer) => answer,
                    None => std::future::pending().await,
                }
            })
        })
    }

    async fn listener() -> (TcpListener, SocketAddr) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
        let address = listener.local_addr().expect("it has an address");
        (listener, address)
    }

    /// An address that refuses.
    async fn closed() -> SocketAddr {
        listener().await.1
    }

    fn url(port: u16) -> Uri {
        format!("http://api.example:{port}/").parse().expect("a URL")
    }

    #[tokio::test]
    async fn a_name_that_cannot_be_looked_up_any_more_means_what_it_meant_last() {
        let (_listener, address) = listener().await;
        let failed = || Err(io::Error::other("no resolver answers"));
        let asked = Arc::default();
        let dialer = saying(vec![failed(), Ok(vec![address]), failed(), Ok(Vec::new())], &asked);
        let error = dialer.dial(&url(1)).await.expect_err("nothing is known");
        assert!(matches!(error, DialError::Lookup { .. }), "{error}");
        // It is found, fails, has no address, and hangs.
        for round in 0..4 {
            let started = Instant::now();
            let stream = dialer
                .dial(&url(1))
                .await
                .unwrap_or_else(|error| panic!("round {round}: {error}"));
            assert_eq!(stream.peer_addr().expect("connected"), address);
            assert!(started.elapsed() < 2 * BESIDE, "round {round}: {:?}", started.elapsed());
        }
        assert_eq!(asked.load(Ordering::Relaxed), 5);
    }

    #[tokio::test]
    async fn a_lookup_that_hangs_gets_another_beside_it() {
        let (_listener, address) = listener().await;
        let asked = Arc::new(AtomicUsize::new(0));
        let count = asked.clone();
        let dialer = Dialer::with(Duration::from_secs(10), move |_| {
            let first = count.fetch_add(1, Ordering::Relaxed) == 0;
            Box::pin(async move {
                if first {
                    std::future::pending::<()>().await;
                }
                Ok(vec![address])
            })
        });
        let started = Instant::now();
        dialer.dial(&url(1)).await.expect("the second lookup brings it");
        assert!(started.elapsed() < 2 * BESIDE, "{:?}", started.elapsed());
        assert_eq!(asked.load(Ordering::Relaxed), 2);
    }

    #[tokio::test]
    async fn lookups_that_hang_are_bounded() {
        let asked = Arc::default();
        let mut dialer = saying(Vec::new(), &asked);
        dialer.lookups = Arc::new(Semaphore::new(2));
        dialer.limit = 4 * BESIDE;
        let error = dialer.dial(&url(1)).await.expect_err("no lookup ends");
        assert!(matches!(error, DialError::Limit { .. }), "{error}");
        assert_eq!(asked.load(Ordering::Relaxed), 2);
    }

    #[tokio::test]
    async fn an_address_that_refuses_gives_way_to_the_next() {
        let (_listener, address) = listener().await;
        let asked = Arc::default();
        let dialer = saying(
            vec![Ok(vec![closed().await, address]), Ok(vec![closed().await])],
            &asked,
        );
        let started = Instant::now();
        let stream = dialer.dial(&url(1)).await.expect("the second address answers");
        assert_eq!(stream.peer_addr().expect("connected"), address);
        let error = dialer.dial(&url(1)).await.expect_err("the only address refuses");
        assert!(matches!(error, DialError::Connect { .. }), "{error}");
        assert!(started.elapsed() < BESIDE, "nothing waits: {:?}", started.elapsed());
    }

    #[tokio::test]
    async fn a_connection_notices_that_the_other_end_is_gone() {
        let (_listener, address) = listener().await;
        let stream = Dialer::new(Duration::from_secs(5))
            .dial(&format!("http://{address}/").parse().expect("a URL"))
            .await
            .expect("an address needs no lookup");
        assert!(getsockopt(&stream, sockopt::KeepAlive).expect("an option"));
        let noticed = getsockopt(&stream, sockopt::TcpKeepIdle).expect("an option")
            + getsockopt(&stream, sockopt::TcpKeepInterval).expect("an option")
                * getsockopt(&stream, sockopt::TcpKeepCount).expect("an option");
        assert_eq!(noticed, 5);
        assert_eq!(
            getsockopt(&stream, sockopt::TcpUserTimeout).expect("an option"),
            UNACKNOWLEDGED_MS
        );
    }

    #[tokio::test]
    async fn urls_without_a_port_mean_the_schemes_own_and_addresses_may_have_brackets() {
        let dialer = Dialer::with(Duration::from_secs(5), |(_, port)| {
            Box::pin(async move { Err(io::Error::other(format!("asked for port {port}"))) })
        });
        for (url, port) in [
            ("https://api.example/", 443),
            ("http://api.example/", 80),
            ("https://api.example:6443", 6443),
        ] {
            let error = dialer
                .dial(&url.parse().expect("a URL"))
                .await
                .expect_err("no lookup succeeds");
            assert!(
                error.to_string().ends_with(&format!("asked for port {port}")),
                "{error}"
            );
        }
        let error = dialer
            .dial(&"http://[::1]:1/".parse().expect("a URL"))
            .await
            .expect_err("nobody listens");
        assert!(
            matches!(error, DialError::Connect { address, .. } if address.is_ipv6()),
            "{error}"
        );
    }
}
