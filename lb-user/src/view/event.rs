//! What happens, as it happens: `evenkeel observe -f`.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

use super::{Origin, Timestamp};

/// One event of the stream.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case", rename_all_fields = "camelCase")]
pub enum EventView {
    /// A connection has ended, or failed to begin.
    Connection {
        /// When it ended.
        time: Timestamp,
        /// The Service's namespace.
        namespace: String,
        /// The Service's name.
        service: String,
        /// The client's address and port; the port is 0 where no packet left.
        client: SocketAddr,
        /// Where it came from: `node` or `outside`.
        #[serde(default)]
        origin: Origin,
        /// The workload that the client is, such as `shop/nginx`, where it is known.
        #[serde(skip_serializing_if = "Option::is_none")]
        workload: Option<String>,
        /// What it dialled.
        frontend: SocketAddr,
        /// `TCP` or `UDP`.
        protocol: String,
        /// The endpoint that it reached; none where it was not seen.
        #[serde(skip_serializing_if = "Option::is_none")]
        backend: Option<SocketAddr>,
        /// `established`, `refused`, `timed_out`, `unreachable`, `no_local_port`, `abandoned` or `other`.
        outcome: String,
        /// The error number, where the kernel told one.
        #[serde(skip_serializing_if = "Option::is_none")]
        errno: Option<u32>,
        /// From the dial to the established connection.
        #[serde(skip_serializing_if = "Option::is_none")]
        connect_seconds: Option<f64>,
        /// From the dial to the end.
        duration_seconds: f64,
    },
    /// A connection reused a client tuple.
    Reuse {
        /// When the reusing connection was judged.
        time: Timestamp,
        /// The Service's namespace.
        namespace: String,
        /// The Service's name.
        service: String,
        /// The client's address and port.
        client: SocketAddr,
        /// Where it came from: `node` or `outside`.
        #[serde(default)]
        origin: Origin,
        /// Since the previous use ended.
        interval_seconds: f64,
        /// `same_backend`, `moved`, `stale_backend` or `unknown_backend`.
        outcome: String,
    },
    /// An endpoint is starved, or is so no longer.
    Alarm {
        /// When.
        time: Timestamp,
        /// The Service's namespace.
        namespace: String,
        /// The Service's name.
        service: String,
        /// The endpoint's address.
        addr: IpAddr,
        /// Its port.
        port: u16,
        /// True when it begins, false when it is over.
        raised: bool,
        /// The cause.
        cause: String,
        /// Connections that it should have got in the window.
        expected: f64,
        /// Connections that it got.
        seen: u64,
        /// How often chance alone would give so few or fewer.
        probability: f64,
        /// The window's length in seconds.
        window_seconds: f64,
    },
    /// Events were left out, because the reader was too slow or too many came at once.
    Lost {
        /// When.
        time: Timestamp,
        /// How many.
        events: u64,
    },
}

impl EventView {
    /// When it happened.
    pub fn time(&self) -> Timestamp {
        match self {
            Self::Connection { time, .. }
            | Self::Reuse { time, .. }
            | Self::Alarm { time, .. }
            | Self::Lost { time, .. } => *time,
        }
    }
}
