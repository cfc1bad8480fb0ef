//! What is answered, and which ports are open, over loopback.

use std::num::NonZeroU16;

use http_body_util::BodyExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;

fn report() -> HealthReport {
    HealthReport {
        time: Timestamp::from_system(SystemTime::now()),
        last_updated: None,
        pending_since: None,
        node_eligible: true,
    }
}

fn facts(local_endpoints: usize) -> Facts {
    Facts {
        local_endpoints,
        report: report(),
        seen: Instant::now(),
    }
}

/// Status, weight and body of an answer.
async fn said(facts: &Facts) -> (u16, String, String) {
    let response = answer(&ObjectName::new("shop", "web"), facts);
    assert_eq!(response.headers()[CONTENT_TYPE], "application/json");
    assert_eq!(response.headers()[X_CONTENT_TYPE_OPTIONS], "nosniff");
    let weight = &response.headers()["X-Load-Balancing-Endpoint-Weight"];
    let (status, weight) = (response.status().as_u16(), weight.to_str().unwrap().to_owned());
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (status, weight, String::from_utf8(body.to_vec()).unwrap())
}

fn body(endpoints: usize, healthy: bool) -> String {
    let service = r#"{"namespace":"shop","name":"web"}"#;
    format!("{{\"service\":{service},\"localEndpoints\":{endpoints},\"serviceProxyHealthy\":{healthy}}}\n")
}

#[tokio::test]
async fn endpoints_here_and_a_proxy_that_keeps_up_are_200() {
    assert_eq!(said(&facts(2)).await, (200, "2".to_owned(), body(2, true)));
    assert_eq!(said(&facts(0)).await, (503, "0".to_owned(), body(0, true)));
}

#[tokio::test]
async fn a_proxy_that_does_not_keep_up_is_503() {
    let ago = |age: Duration| Some(Timestamp::from_system(SystemTime::now().checked_sub(age).unwrap()));
    let mut late = facts(2);
    late.report.pending_since = ago(HEALTH_TIMEOUT + Duration::from_secs(5));
    assert_eq!(said(&late).await, (503, "2".to_owned(), body(2, false)));
    late.report.pending_since = ago(HEALTH_TIMEOUT.checked_sub(Duration::from_secs(5)).unwrap());
    assert_eq!(said(&late).await.0, 200);

    let mut forgotten = facts(2);
    forgotten.seen = Instant::now().checked_sub(HEALTH_TIMEOUT * 2).unwrap();
    assert_eq!(said(&forgotten).await, (503, "2".to_owned(), body(2, false)));
}

/// A node that is about to leave still serves the endpoints that it has.
#[tokio::test]
async fn a_node_that_leaves_is_no_less_healthy() {
    let mut leaving = facts(1);
    leaving.report.node_eligible = false;
    assert_eq!(said(&leaving).await.0, 200);
}

fn check(service: &str, port: u16, local_endpoints: usize) -> HealthCheck {
    HealthCheck {
        port: NonZeroU16::new(port).unwrap(),
        service: ObjectName::new("shop", service),
        origin: "test".to_owned(),
        local_endpoints,
    }
}

fn wanted(checks: Vec<HealthCheck>) -> Wanted {
    Wanted {
        checks,
        addresses: vec![Ipv4Addr::LOCALHOST.into()],
        report: report(),
    }
}

/// Ports that nobody has, as far as anybody can know.
async fn free_ports<const N: usize>() -> [u16; N] {
    let mut held = Vec::new();
    for _ in 0..N {
        held.push(TcpListener::bind("127.0.0.1:0").await.unwrap());
    }
    std::array::from_fn(|i| held[i].local_addr().unwrap().port())
}

/// The name in an answer, or why there is none.
async fn ask(port: u16) -> io::Result<String> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await?;
    stream
        .write_all(b"GET /anything HTTP/1.1\r\nHost: node\r\n\r\n")
        .await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    let (_, after) = answer.split_once("\"name\":\"").expect("a name");
    Ok(format!(
        "{} {}",
        answer.split(' ').nth(1).expect("a status"),
        after.split('"').next().expect("its end")
    ))
}

#[tokio::test]
async fn ports_come_change_hands_and_go() {
    let [first, second] = free_ports().await;
    let mut open = BTreeMap::new();
    assert_eq!(settle(&mut open, &wanted(vec![check("a", first, 1)])).await, []);
    assert_eq!(ask(first).await.unwrap(), "200 a");
    assert_eq!(settle(&mut open, &wanted(vec![check("a", first, 0)])).await, []);
    assert_eq!(ask(first).await.unwrap(), "503 a");

    // Another Service takes the port over in one step; the first one goes to another port.
    let both = wanted(vec![check("b", first, 1), check("a", second, 1)]);
    assert_eq!(settle(&mut open, &both).await, []);
    assert_eq!(ask(first).await.unwrap(), "200 b");
    assert_eq!(ask(second).await.unwrap(), "200 a");

    assert_eq!(settle(&mut open, &wanted(vec![])).await, []);
    for port in [first, second] {
        assert_eq!(ask(port).await.unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    }
}

#[tokio::test]
async fn a_port_that_somebody_has_is_reported_and_tried_again() {
    let somebody = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let taken = somebody.local_addr().unwrap().port();
    let [free] = free_ports().await;
    let both = wanted(vec![check("a", taken, 1), check("b", free, 1)]);
    let mut open = BTreeMap::new();
    let problems = settle(&mut open, &both).await;
    assert_eq!(problems.len(), 1);
    assert_eq!(
        (&*problems[0].object, &*problems[0].field),
        ("Service shop/a", "spec.healthCheckNodePort")
    );
    assert!(
        problems[0].message.contains(&format!("127.0.0.1:{taken}")),
        "{problems:?}"
    );
    assert_eq!(
        ask(free).await.unwrap(),
        "200 b",
        "the other one is not kept from its port"
    );

    drop(somebody);
    assert_eq!(settle(&mut open, &both).await, []);
    assert_eq!(ask(taken).await.unwrap(), "200 a");
}

#[tokio::test]
async fn clients_that_say_nothing_make_room_for_others() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let facts = Arc::new(Mutex::new(facts(1)));
    // Longer than any test: nobody goes because of his age.
    let lifetime = Duration::from_hours(1);
    let served = tokio::spawn(serve(listener, ObjectName::new("shop", "web"), facts, lifetime));
    let mut silent = Vec::new();
    for _ in 0..CLIENTS {
        silent.push(TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.unwrap());
    }
    // All places are taken: whoever comes now has the oldest one's.
    let asked = timeout(Duration::from_secs(10), ask(port)).await;
    assert_eq!(asked.expect("nobody waits for a place").unwrap(), "200 web");
    let mut nothing = Vec::new();
    let ended = silent[0].read_to_end(&mut nothing).await;
    assert!(nothing.is_empty(), "{ended:?} {nothing:?}");
    served.abort();
}

#[tokio::test]
async fn the_unspecified_address_is_both_families() {
    let [port] = free_ports().await;
    let listener = listen((Ipv6Addr::UNSPECIFIED, port).into()).unwrap();
    let dialled = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.unwrap();
    let (_, from) = listener.accept().await.unwrap();
    assert_eq!(from.port(), dialled.local_addr().unwrap().port());
}
