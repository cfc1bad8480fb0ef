//! The requests to the API server, counted: how many, how they ended, and how long the server let wait.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
    time::Instant,
};

use super::wire::WireError;
use crate::metrics::{Buckets, families::kube_proxy::REQUEST_EDGES};

/// Counts of requests since the start.
#[derive(Debug, Default)]
pub struct Requests {
    counts: Mutex<RequestCounts>,
}

/// What was counted, at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestCounts {
    /// How many were answered, by HTTP status.
    pub by_status: BTreeMap<u16, u64>,
    /// How many got no answer: no connection, a cut, silence.
    pub unanswered: u64,
    /// From sending to the head of the answer, or to giving up, in seconds.
    pub durations: Buckets,
}

impl Default for RequestCounts {
    fn default() -> Self {
        Self {
            // So that a rate is there from the first look on.
            by_status: [(200, 0)].into(),
            unanswered: 0,
            durations: Buckets::new(REQUEST_EDGES),
        }
    }
}

impl Requests {
    /// What has been counted.
    pub fn counts(&self) -> RequestCounts {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Makes a request and counts it. One that is dropped before its answer is not counted.
    pub(super) async fn count<T>(&self, request: impl Future<Output = Result<T, WireError>>) -> Result<T, WireError> {
        let sent = Instant::now();
        let answer = request.await;
        let status = match &answer {
            // What a good answer holds is judged after it came.
            Ok(_) | Err(WireError::Answer(_) | WireError::WatchEnded { .. }) => Some(200),
            Err(WireError::Refused { code, .. }) => Some(*code),
            Err(WireError::Unreachable(_) | WireError::Handshake(_) | WireError::Cut(_) | WireError::Silence(_)) => {
                None
            }
            // Nothing was sent.
            Err(WireError::Setup(_)) => return answer,
        };
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        match status {
            Some(status) => *counts.by_status.entry(status).or_default() += 1,
            None => counts.unanswered += 1,
        }
        counts.durations.observe(sent.elapsed().as_secs_f64());
        answer
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn requests_are_counted_by_how_they_ended() {
        let requests = Requests::default();
        let refused = |code| WireError::Refused {
            code,
            message: String::new(),
            retry_after: None,
        };
        assert_eq!(requests.count(async { Ok(7) }).await.ok(), Some(7));
        for error in [
            refused(410),
            refused(503),
            refused(410),
            WireError::Silence(Duration::ZERO),
            WireError::Answer(String::new()),
            WireError::Setup(String::new()),
        ] {
            assert!(requests.count(async { Err::<(), _>(error) }).await.is_err());
        }
        let counts = requests.counts();
        assert_eq!(counts.by_status, [(200, 2), (410, 2), (503, 1)].into());
        assert_eq!((counts.unanswered, counts.durations.count()), (1, 6));
    }
}
