//! The command line's end of the control socket.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    ops::ControlFlow,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    time::Duration,
};

use super::MAX_ANSWER;
use crate::view::{Answer, Document, EventView, Query, QueryError, SCHEMA_VERSION, ServiceFilter};

/// How long the agent may take for an answer.
const ANSWER_DEADLINE: Duration = Duration::from_mins(1);

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// No agent listens there, or this user may not ask it.
    #[error("no agent answers at {} ({source}); is `evenkeel agent` running, and are you root?", path.display())]
    Unreachable {
        /// The socket's path.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The agent took the question and was lost before it answered.
    #[error("the agent at {} did not answer ({source})", path.display())]
    Lost {
        /// The socket's path.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The answer is of another version, or of none.
    #[error("the agent at {} answers in a form that this version does not know ({message}); use the agent's own `evenkeel`", path.display())]
    Garbled {
        /// The socket's path.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },
    /// The agent answered that it cannot.
    #[error(transparent)]
    Refused(#[from] QueryError),
}

/// A question that was sent, and the lines that answer it.
struct Asked<'p> {
    path: &'p Path,
    lines: BufReader<io::Take<UnixStream>>,
}

impl<'p> Asked<'p> {
    fn send(path: &'p Path, query: &Query, deadline: Option<Duration>) -> Result<Self, AskError> {
        let unreachable = |source| AskError::Unreachable {
            path: path.to_owned(),
            source,
        };
        let mut stream = UnixStream::connect(path).map_err(unreachable)?;
        let asked = |stream: UnixStream| Self {
            path,
            lines: BufReader::new(stream.take(MAX_ANSWER)),
        };
        let mut line = match serde_json::to_vec(query) {
            Ok(line) => line,
            Err(error) => return Err(asked(stream).garbled(error.to_string())),
        };
        line.push(b'\n');
        let sent = stream
            .set_read_timeout(deadline)
            .and_then(|()| stream.set_write_timeout(Some(ANSWER_DEADLINE)))
            .and_then(|()| stream.write_all(&line));
        let asked = asked(stream);
        sent.map_err(|source| asked.lost(source))?;
        Ok(asked)
    }

    fn lost(&self, source: io::Error) -> AskError {
        AskError::Lost {
            path: self.path.to_owned(),
            source,
        }
    }

    fn garbled(&self, message: String) -> AskError {
        AskError::Garbled {
            path: self.path.to_owned(),
            message,
        }
    }

    /// The next answer; none at the end.
    fn next(&mut self) -> Result<Option<Answer>, AskError> {
        let mut bytes = Vec::new();
        self.lines.get_mut().set_limit(MAX_ANSWER);
        let read = self.lines.read_until(b'\n', &mut bytes);
        read.map_err(|source| self.lost(source))?;
        if bytes.is_empty() {
            return Ok(None);
        }
        if bytes.last() != Some(&b'\n') {
            return Err(self.lost(io::Error::from(io::ErrorKind::UnexpectedEof)));
        }
        let document: Document = serde_json::from_slice(&bytes).map_err(|error| self.garbled(error.to_string()))?;
        if document.schema_version != SCHEMA_VERSION {
            return Err(self.garbled(format!("schemaVersion {}", document.schema_version)));
        }
        match document.answer {
            Answer::Error(error) => Err(error.into()),
            answer => Ok(Some(answer)),
        }
    }
}

/// Asks the agent at `path` one question.
pub fn ask(path: &Path, query: &Query) -> Result<Answer, AskError> {
    let mut asked = Asked::send(path, query, Some(ANSWER_DEADLINE))?;
    asked
        .next()?
        .ok_or_else(|| asked.lost(io::Error::from(io::ErrorKind::UnexpectedEof)))
}

/// Follows the events of the Services that pass a filter; hands over each until `each` says no or the agent ends.
pub fn follow(
    path: &Path,
    filter: ServiceFilter,
    mut each: impl FnMut(EventView) -> ControlFlow<()>,
) -> Result<(), AskError> {
    let mut asked = Asked::send(path, &Query::Follow { filter }, None)?;
    while let Some(answer) = asked.next()? {
        match answer {
            Answer::Event(event) => {
                if each(*event).is_break() {
                    break;
                }
            }
            other => return Err(asked.garbled(format!("{other:?} in a stream of events"))),
        }
    }
    Ok(())
}
