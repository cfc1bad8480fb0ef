//! The agent's end of the control socket.

use std::{
    fs, io,
    os::unix::{
        fs::{MetadataExt, PermissionsExt},
        net::UnixStream as BlockingStream,
    },
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{UnixListener, UnixStream},
    sync::Semaphore,
    task::spawn_blocking,
    time::timeout,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{debug, warn};

use super::{MAX_ANSWER, MAX_REQUEST};
use crate::view::{Answer, Answers, Document, Query, QueryError, ServiceFilter};

/// How long a client may take to send its line.
const READ_DEADLINE: Duration = Duration::from_secs(5);
/// How long a client may take to read its answer.
const WRITE_DEADLINE: Duration = Duration::from_secs(30);
/// Clients served at once; the others wait in the socket's backlog.
const MAX_CLIENTS: usize = 16;

/// Why the control socket cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Somebody answers there.
    #[error("control socket {}: another agent answers there; stop it first, or give this one another --socket", path.display())]
    InUse {
        /// The socket's path.
        path: PathBuf,
    },
    /// Something else than a socket has that name.
    #[error("control socket {}: the path exists and is not a socket", path.display())]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// The system refused.
    #[error("control socket {}: {source}", path.display())]
    Io {
        /// The path.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
}

/// A listening control socket; its file is removed when it is dropped.
#[derive(Debug)]
pub struct ControlSocket {
    listener: UnixListener,
    path: PathBuf,
    inode: u64,
}

impl ControlSocket {
    /// Listens at `path` with mode 0600; a socket there is replaced only if nobody answers it.
    ///
    /// Needs a tokio runtime.
    pub fn open(path: &Path) -> Result<Self, ListenError> {
        let failed = |source| ListenError::Io {
            path: path.to_owned(),
            source,
        };
        match fs::symlink_metadata(path) {
            Ok(found) => {
                use std::os::unix::fs::FileTypeExt;
                if !found.file_type().is_socket() {
                    return Err(ListenError::NotASocket { path: path.to_owned() });
                }
                if BlockingStream::connect(path).is_ok() {
                    return Err(ListenError::InUse { path: path.to_owned() });
                }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed(error)),
        }
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            fs::create_dir_all(folder).map_err(failed)?;
        }
        // Made under another name, closed to others, then renamed: nobody can connect before the mode is right, and a dead
        // socket is replaced in one step.
        let mut staged = path.as_os_str().to_owned();
        staged.push(format!(".{}", std::process::id()));
        let staged = PathBuf::from(staged);
        match fs::remove_file(&staged) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
        let listener = UnixListener::bind(&staged).map_err(failed)?;
        let placed = fs::set_permissions(&staged, fs::Permissions::from_mode(0o600))
            .and_then(|()| fs::rename(&staged, path))
            .and_then(|()| fs::symlink_metadata(path));
        match placed {
            Ok(found) => Ok(Self {
                listener,
                path: path.to_owned(),
                inode: found.ino(),
            }),
            Err(error) => {
                let _already_failing = fs::remove_file(&staged);
                Err(failed(error))
            }
        }
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        // A successor may have put its own socket there.
        if fs::symlink_metadata(&self.path).is_ok_and(|found| found.ino() == self.inode) {
            let _best_effort = fs::remove_file(&self.path);
        }
    }
}

/// Answers clients until `stop` is cancelled, then finishes those being served.
pub async fn serve(socket: ControlSocket, answers: Arc<dyn Answers>, stop: CancellationToken) {
    let clients = TaskTracker::new();
    let room = Arc::new(Semaphore::new(MAX_CLIENTS));
    loop {
        let Ok(place) = Arc::clone(&room).acquire_owned().await else {
            break;
        };
        let accepted = tokio::select! {
            () = stop.cancelled() => break,
            accepted = socket.listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, _)) => {
                let (answers, stop) = (Arc::clone(&answers), stop.clone());
                clients.spawn(async move {
                    if let Err(error) = serve_one(stream, answers, stop).await {
                        debug!(%error, "a control client went away");
                    }
                    drop(place);
                });
            }
            Err(error) => {
                // Out of descriptors, most likely: wait for some to be closed instead of spinning.
                warn!(%error, "the control socket cannot accept");
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        }
    }
    clients.close();
    clients.wait().await;
}

async fn serve_one(mut stream: UnixStream, answers: Arc<dyn Answers>, stop: CancellationToken) -> io::Result<()> {
    let mut line = Vec::new();
    let read = {
        let mut bounded = BufReader::new((&mut stream).take(MAX_REQUEST + 1));
        timeout(READ_DEADLINE, bounded.read_until(b'\n', &mut line)).await
    };
    let answer = match read {
        Err(_elapsed) => refused(format!("no request line within {} s", READ_DEADLINE.as_secs())),
        Ok(Err(error)) => return Err(error),
        Ok(Ok(0)) => return Ok(()),
        Ok(Ok(_)) if line.len() as u64 > MAX_REQUEST => {
            refused(format!("the request is longer than {MAX_REQUEST} bytes"))
        }
        Ok(Ok(_)) => match serde_json::from_slice::<Query>(&line) {
            Ok(Query::Follow { filter }) => return stream_events(stream, &filter, &*answers, stop).await,
            Ok(query) => answer(query, answers).await,
            Err(error) => refused(format!("the request is not a known query: {error}")),
        },
    };
    send(&mut stream, answer).await?;
    stream.shutdown().await
}

/// Sends events until the reader goes away or the agent ends.
async fn stream_events(
    mut stream: UnixStream,
    filter: &ServiceFilter,
    answers: &dyn Answers,
    stop: CancellationToken,
) -> io::Result<()> {
    let mut events = match answers.follow(filter) {
        Ok(events) => events,
        Err(error) => return send(&mut stream, Answer::Error(error)).await,
    };
    // Whoever follows sends nothing more: a read that ends says that it went away.
    let mut nothing = [0; 1];
    loop {
        let event = tokio::select! {
            () = stop.cancelled() => return Ok(()),
            _ = stream.read(&mut nothing) => return Ok(()),
            event = events.recv() => event,
        };
        let Some(event) = event else { return Ok(()) };
        send(&mut stream, Answer::Event(Box::new(event))).await?;
    }
}

async fn send(stream: &mut UnixStream, answer: Answer) -> io::Result<()> {
    let mut bytes = encode(answer);
    if bytes.len() as u64 >= MAX_ANSWER {
        bytes = encode(Answer::Error(QueryError::Failed(format!(
            "the answer is longer than {MAX_ANSWER} bytes; ask with a filter"
        ))));
    }
    timeout(WRITE_DEADLINE, stream.write_all(&bytes))
        .await
        .map_err(|_elapsed| io::Error::from(io::ErrorKind::TimedOut))?
}

async fn answer(query: Query, answers: Arc<dyn Answers>) -> Answer {
    // Reading maps blocks; a panic there ends with the task and is reported instead of taking the agent down.
    let asked = spawn_blocking(move || query.ask(answers.as_ref())).await;
    match asked {
        Ok(Ok(answer)) => answer,
        Ok(Err(error)) => Answer::Error(error),
        Err(error) => {
            warn!(%error, "a query ended early");
            Answer::Error(QueryError::Failed(
                "the query ended early; the agent's log says why".to_owned(),
            ))
        }
    }
}

fn refused(message: String) -> Answer {
    Answer::Error(QueryError::Invalid(message))
}

fn encode(answer: Answer) -> Vec<u8> {
    let mut bytes = serde_json::to_vec(&Document::from(answer)).unwrap_or_else(|error| {
        // Views hold nothing that JSON cannot carry; should one ever, say so rather than send half a line.
        format!(
            r#"{{"schemaVersion":1,"kind":"Error","reason":"failed","message":"answer not encodable ({})"}}"#,
            error.line()
        )
        .into_bytes()
    });
    bytes.push(b'\n');
    bytes
}
