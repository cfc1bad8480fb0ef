use std::{
    fs,
    io::{BufRead, BufReader, Write},
    os::unix::{
        fs::PermissionsExt,
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    sync::Arc,
};

use tempfile::TempDir;
use tokio::runtime::{Builder, Runtime};
use tokio_util::sync::CancellationToken;

use super::*;
use crate::view::{Answer, Document, Query, QueryError, ServiceFilter, fixture::Fixture};

/// An agent that answers from the fixture, in its own runtime.
struct Served {
    folder: TempDir,
    runtime: Runtime,
    stop: CancellationToken,
}

impl Served {
    fn start() -> Self {
        let folder = tempfile::tempdir().expect("a folder for the socket");
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("a runtime");
        let stop = CancellationToken::new();
        let socket = runtime
            .block_on(async { ControlSocket::open(&folder.path().join("agent.sock")) })
            .expect("the socket opens");
        runtime.spawn(serve(socket, Arc::new(Fixture { ready: true }), stop.clone()));
        Self { folder, runtime, stop }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("agent.sock")
    }

    /// Sends raw bytes and reads the answer.
    fn raw(&self, bytes: &[u8]) -> Document {
        let mut stream = UnixStream::connect(self.path()).expect("the server listens");
        // The server may answer and close before it has read everything.
        let _may_be_cut = stream.write_all(bytes);
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).expect("an answer line");
        serde_json::from_str(&line).expect("the answer is a document")
    }
}

/// JSON after one more reading and writing: reading a number may move its last digit.
fn again(document: Document) -> serde_json::Value {
    serde_json::to_value(document).expect("views are JSON")
}

fn open(path: &Path) -> Result<ControlSocket, ListenError> {
    let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async { ControlSocket::open(path) })
}

#[test]
fn every_query_gets_its_kind_of_answer() {
    let served = Served::start();
    let filter = ServiceFilter::default();
    let (namespace, name) = ("shop".to_owned(), "web".to_owned());
    for (query, kind) in [
        (Query::Status {}, "Status"),
        (Query::Services { filter: filter.clone() }, "ServiceList"),
        (
            Query::Service {
                namespace: namespace.clone(),
                name: name.clone(),
            },
            "Service",
        ),
        (Query::Backends { filter: filter.clone() }, "BackendList"),
        (Query::Reuse { filter }, "Reuse"),
        (Query::Table { namespace, name }, "TableList"),
        (
            Query::Explain {
                source: [10, 244, 0, 9].into(),
                source_port: None,
                vip: ([10, 96, 7, 7], 80).into(),
                protocol: "TCP".into(),
                from: Some(crate::view::Whence::Guest),
            },
            "Explain",
        ),
        (Query::Maps {}, "MapList"),
        (
            Query::MapDump {
                name: "frontends".into(),
            },
            "MapDump",
        ),
    ] {
        let answer = ask(&served.path(), &query).expect("the fixture answers everything");
        let value = serde_json::to_value(Document::from(answer)).expect("views are JSON");
        assert_eq!(
            (value["kind"].as_str(), value["schemaVersion"].as_u64()),
            (Some(kind), Some(1))
        );
        // What came over the socket is what the fixture said.
        let direct = query
            .ask(&Fixture { ready: true })
            .expect("the fixture answers everything");
        let direct = serde_json::to_string(&Document::from(direct)).expect("views are JSON");
        assert_eq!(Some(value), serde_json::from_str(&direct).ok().map(again));
    }
}

#[test]
fn what_does_not_exist_is_not_found() {
    let served = Served::start();
    let query = Query::Service {
        namespace: "shop".into(),
        name: "nothing".into(),
    };
    let error = ask(&served.path(), &query).expect_err("no such Service");
    assert_eq!(error.to_string(), "not found: Service shop/nothing");
}

#[test]
fn bad_requests_are_answered_and_do_no_harm() {
    let served = Served::start();
    let long = vec![b'x'; 100_000];
    for bytes in [
        &b"hello\n"[..],
        b"{}\n",
        b"\xff\xfe\n",
        b"{\"query\":\"status\"",
        &long,
        b"\n",
    ] {
        if bytes == b"{\"query\":\"status\"" {
            // An unfinished line: the client hangs up.
            let mut stream = UnixStream::connect(served.path()).expect("the server listens");
            stream.write_all(bytes).expect("it takes bytes");
            continue;
        }
        let document = served.raw(bytes);
        assert!(
            matches!(document.answer, Answer::Error(QueryError::Invalid(_))),
            "{document:?}"
        );
    }
    ask(&served.path(), &Query::Status {}).expect("the agent still answers");
}

#[test]
fn the_socket_is_for_its_owner_alone_and_goes_with_the_agent() {
    let served = Served::start();
    let mode = fs::metadata(served.path()).expect("it is there").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let path = served.path();
    served.stop.cancel();
    served.runtime.shutdown_timeout(std::time::Duration::from_secs(5));
    assert!(!path.exists());
    assert!(matches!(
        ask(&path, &Query::Status {}),
        Err(AskError::Unreachable { .. })
    ));
}

#[test]
fn a_living_socket_is_left_alone_and_a_dead_one_replaced() {
    let served = Served::start();
    assert!(matches!(open(&served.path()), Err(ListenError::InUse { .. })));

    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("deep/agent.sock");
    fs::create_dir(folder.path().join("deep")).expect("a folder");
    drop(UnixListener::bind(&path).expect("a socket that nobody will answer"));
    let opened = open(&path).expect("a dead socket is replaced");
    assert_eq!(opened.path(), path);

    let file = folder.path().join("file");
    fs::write(&file, "precious").expect("a file");
    assert!(matches!(open(&file), Err(ListenError::NotASocket { .. })));
    assert_eq!(fs::read_to_string(&file).expect("still there"), "precious");
}

#[test]
fn an_agent_of_another_version_is_named_as_such() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("agent.sock");
    let listener = UnixListener::bind(&path).expect("a socket");
    let server = std::thread::spawn(move || {
        for answer in [
            "{\"schemaVersion\":2,\"kind\":\"MapList\",\"items\":[]}\n",
            "{\"schemaVersion\":1",
            "nonsense\n",
        ] {
            let (mut stream, _) = listener.accept().expect("a client");
            let mut line = String::new();
            BufReader::new(stream.try_clone().expect("a second handle"))
                .read_line(&mut line)
                .expect("its line");
            stream.write_all(answer.as_bytes()).expect("it listens");
        }
    });
    assert!(matches!(ask(&path, &Query::Maps {}), Err(AskError::Garbled { .. })));
    assert!(matches!(ask(&path, &Query::Maps {}), Err(AskError::Lost { .. })));
    assert!(matches!(ask(&path, &Query::Maps {}), Err(AskError::Garbled { .. })));
    server.join().expect("the server thread ends");
}
