//! The command line's end of the control socket.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    time::Duration,
};

use super::MAX_ANSWER;
use crate::view::{Answer, Document, Query, QueryError, SCHEMA_VERSION};

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

/// Asks the agent at `path` one question.
pub fn ask(path: &Path, query: &Query) -> Result<Answer, AskError> {
    let unreachable = |source| AskError::Unreachable {
        path: path.to_owned(),
        source,
    };
    let lost = |source| AskError::Lost {
        path: path.to_owned(),
        source,
    };
    let garbled = |message: String| AskError::Garbled {
        path: path.to_owned(),
        message,
    };
    let mut stream = UnixStream::connect(path).map_err(unreachable)?;
    stream
        .set_read_timeout(Some(ANSWER_DEADLINE))
        .and_then(|()| stream.set_write_timeout(Some(ANSWER_DEADLINE)))
        .map_err(lost)?;
    let mut line = serde_json::to_vec(query).map_err(|error| garbled(error.to_string()))?;
    line.push(b'\n');
    stream.write_all(&line).map_err(lost)?;

    let mut bytes = Vec::new();
    BufReader::new(stream.take(MAX_ANSWER))
        .read_until(b'\n', &mut bytes)
        .map_err(lost)?;
    if bytes.last() != Some(&b'\n') {
        return Err(lost(io::Error::from(io::ErrorKind::UnexpectedEof)));
    }
    let document: Document = serde_json::from_slice(&bytes).map_err(|error| garbled(error.to_string()))?;
    if document.schema_version != SCHEMA_VERSION {
        return Err(garbled(format!("schemaVersion {}", document.schema_version)));
    }
    match document.answer {
        Answer::Error(error) => Err(error.into()),
        answer => Ok(answer),
    }
}
