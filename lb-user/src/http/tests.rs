use std::sync::Mutex;

use http_body_util::{BodyExt, Empty};
use hyper::{Method, Request, body::Bytes};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use super::*;
use crate::{
    analysis::reuse::ReuseCounts,
    metrics::{Buckets, MetricSource, Snapshot, families},
    view::Mode,
};

const NOW: i64 = 1_790_000_000_000;

struct Told {
    report: Mutex<HealthReport>,
    live: bool,
    ready: bool,
    answered: Mutex<Vec<(Probe, bool)>>,
}

impl Probes for Told {
    fn health(&self) -> HealthReport {
        *self.report.lock().expect("no test panics while it holds this")
    }

    fn live(&self) -> Result<(), String> {
        if self.live {
            Ok(())
        } else {
            Err("the reconcile loop has stopped".into())
        }
    }

    fn answered(&self, probe: Probe, fine: bool) {
        self.answered.lock().expect("no panic").push((probe, fine));
    }

    fn ready(&self) -> Result<(), String> {
        if self.ready {
            Ok(())
        } else {
            Err("the self-probe found no frontend".into())
        }
    }
}

impl MetricSource for Told {
    fn snapshot(&self) -> Snapshot {
        Snapshot {
            time: Timestamp::from_unix_millis(NOW),
            started: Timestamp::from_unix_millis(0),
            version: "0.1.0",
            abi: 1,
            mode: Mode::Balance,
            connects: vec![],
            services: vec![],
            reuse: ReuseCounts::default(),
            reuse_evicted: 0,
            forgotten: vec![],
            network_programming: Buckets::new(families::PROGRAMMING_EDGES),
            sync: vec![],
            sync_last: None,
            sync_last_queued: None,
            source_synced: vec![],
            flows: vec![],
            maps: vec![],
            programs: vec![],
            events_lost: vec![],
            repairs: 0,
            problems: 0,
            kube_proxy: None,
        }
    }
}

fn at(seconds_ago: i64) -> Timestamp {
    Timestamp::from_unix_millis(NOW - seconds_ago * 1_000)
}

fn well() -> Told {
    Told {
        report: Mutex::new(HealthReport {
            time: at(0),
            last_updated: Some(at(3_600)),
            pending_since: None,
            node_eligible: true,
        }),
        live: true,
        ready: true,
        answered: Mutex::default(),
    }
}

/// Sends one request over a real connection: (status, content type, body).
async fn ask(told: impl Into<Arc<Told>>, method: Method, path: &str) -> (u16, String, String) {
    let told: Arc<Told> = told.into();
    let exporter = Exporter::new(told.clone(), 10).expect("the families are sound");
    let listener = listen(([127, 0, 0, 1], 0).into()).await.expect("a free port");
    let address = listener.local_addr().expect("it is bound");
    let stop = CancellationToken::new();
    let served = tokio::spawn(serve(
        listener,
        router(Arc::new(exporter), told, HEALTH_TIMEOUT),
        stop.clone(),
    ));

    let stream = TcpStream::connect(address).await.expect("the server listens");
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .expect("it speaks HTTP");
    let driver = tokio::spawn(connection);
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header("host", "localhost")
        .body(Empty::<Bytes>::new())
        .expect("a request");
    let response = sender.send_request(request).await.expect("an answer");
    let status = response.status().as_u16();
    let kind = response
        .headers()
        .get("content-type")
        .map_or_else(String::new, |value| value.to_str().expect("text").to_owned());
    let body = response.into_body().collect().await.expect("the whole body").to_bytes();
    drop(sender);
    stop.cancel();
    served.await.expect("no panic").expect("an orderly end");
    driver.await.expect("no panic").expect("an orderly end");
    (status, kind, String::from_utf8(body.to_vec()).expect("text"))
}

async fn status(told: Told, path: &str) -> u16 {
    ask(told, Method::GET, path).await.0
}

fn waiting(seconds: i64) -> Told {
    let told = well();
    told.report.lock().expect("alone").pending_since = Some(at(seconds));
    told
}

fn leaving() -> Told {
    let told = well();
    told.report.lock().expect("alone").node_eligible = false;
    told
}

#[tokio::test]
async fn metrics_are_the_text_format_exactly() {
    let (status, kind, body) = ask(well(), Method::GET, "/metrics").await;
    assert_eq!((status, kind.as_str()), (200, "text/plain; version=0.0.4"));
    assert!(
        body.contains("evenkeel_build_info{version=\"0.1.0\",abi=\"1\"} 1\n"),
        "{body}"
    );
}

#[tokio::test]
async fn idle_is_healthy_and_the_body_says_since_when() {
    let (status, kind, body) = ask(well(), Method::GET, "/healthz").await;
    assert_eq!((status, kind.as_str()), (200, "application/json"));
    let body: serde_json::Value = serde_json::from_str(&body).expect("JSON");
    assert_eq!(body["nodeEligible"], true);
    assert_eq!(body["currentTime"], at(0).to_string());
    assert_eq!(body["lastUpdated"], at(3_600).to_string());
}

#[tokio::test]
async fn a_change_that_waits_too_long_is_unhealthy() {
    assert_eq!(status(waiting(59), "/healthz").await, 200);
    assert_eq!(status(waiting(60), "/healthz").await, 200);
    assert_eq!(status(waiting(61), "/healthz").await, 503);
    assert_eq!(status(waiting(61), "/livez").await, 503);
}

#[tokio::test]
async fn answers_to_probes_are_told() {
    for (told, path, expected) in [
        (well(), "/healthz", vec![(Probe::Healthz, true)]),
        (leaving(), "/healthz", vec![(Probe::Healthz, false)]),
        (leaving(), "/livez", vec![(Probe::Livez, true)]),
        (waiting(61), "/livez", vec![(Probe::Livez, false)]),
        (Told { live: false, ..well() }, "/livez", vec![(Probe::Livez, false)]),
        (well(), "/readyz", vec![]),
        (well(), "/metrics", vec![]),
    ] {
        let told = Arc::new(told);
        ask(told.clone(), Method::GET, path).await;
        assert_eq!(*told.answered.lock().expect("alone"), expected, "{path}");
    }
}

#[tokio::test]
async fn a_leaving_node_is_unhealthy_but_alive() {
    assert_eq!(status(leaving(), "/healthz").await, 503);
    assert_eq!(status(leaving(), "/livez").await, 200);
}

#[tokio::test]
async fn a_dead_loop_and_a_failed_probe_say_why() {
    let dead = Told { live: false, ..well() };
    let (status, _, body) = ask(dead, Method::GET, "/livez").await;
    assert_eq!((status, body.as_str()), (503, "the reconcile loop has stopped\n"));
    let unready = Told { ready: false, ..well() };
    let (status, _, body) = ask(unready, Method::GET, "/readyz").await;
    assert_eq!((status, body.as_str()), (503, "the self-probe found no frontend\n"));
    assert_eq!(ask(well(), Method::GET, "/readyz").await.0, 200);
}

#[tokio::test]
async fn nothing_else_is_served_and_nothing_can_be_written() {
    for path in ["/", "/debug/pprof", "/metrics/x", "/healthz/"] {
        assert_eq!(status(well(), path).await, 404, "{path}");
    }
    for method in [Method::POST, Method::PUT, Method::DELETE] {
        assert_eq!(ask(well(), method, "/metrics").await.0, 405);
    }
}

#[tokio::test]
async fn an_address_in_use_is_named() {
    let taken = listen(([127, 0, 0, 1], 0).into()).await.expect("a free port");
    let address = taken.local_addr().expect("it is bound");
    let error = listen(address).await.expect_err("it is taken").to_string();
    assert!(error.starts_with(&format!("--metrics-address {address}: ")), "{error}");
}

#[tokio::test]
async fn a_client_that_never_finishes_does_not_keep_the_agent_from_stopping() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    let told = Arc::new(well());
    let exporter = Exporter::new(told.clone(), 10).expect("the families are sound");
    let listener = listen(([127, 0, 0, 1], 0).into()).await.expect("a free port");
    let address = listener.local_addr().expect("it is bound");
    let stop = CancellationToken::new();
    let served = tokio::spawn(serve(
        listener,
        router(Arc::new(exporter), told, HEALTH_TIMEOUT),
        stop.clone(),
    ));
    let mut stream = TcpStream::connect(address).await.expect("the server listens");
    // One whole request, so that the connection is known to be served, and half of another.
    stream
        .write_all(b"GET /readyz HTTP/1.1\r\nhost: a\r\n\r\nGET /metrics HTTP/1.1\r\n")
        .await
        .expect("it listens");
    let mut byte = [0; 1];
    stream.read_exact(&mut byte).await.expect("the first answer");
    stop.cancel();
    tokio::time::timeout(GRACE * 5, served)
        .await
        .expect("it stops in time")
        .expect("no panic")
        .expect("an orderly end");
}
