//! The ways in which the server can go wrong.

/// One way to go wrong. While it is set, every request (or every event, where it says so) meets it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    /// Nobody listens: connections are refused.
    RefuseConnections,
    /// Connections are taken and closed.
    CloseConnections,
    /// Requests are taken and never answered.
    Silent,
    /// A Status object with this HTTP status.
    Status(u16),
    /// HTML with status 200.
    Html,
    /// HTML with status 502.
    HtmlBadGateway,
    /// Status 200 and the right content type, but the JSON ends in the middle, with the answer's proper end after it.
    TruncatedJson,
    /// Status 200 and half of the answer, then the connection is cut.
    CutAnswer,
    /// `{}` with status 200.
    EmptyObject,
    /// A list of another kind, with status 200.
    WrongKind,
    /// A list whose items are empty objects.
    EmptyItems,
    /// The right JSON as `text/plain`.
    WrongContentType,
    /// Watches are refused with HTTP 410.
    WatchGoneStatus,
    /// Watches are opened and end with a 410 event.
    WatchGoneEvent,
    /// Watches are opened and end with a 500 event.
    WatchErrorEvent,
    /// Watches are opened and closed at once.
    WatchCloses,
    /// Instead of the next event half of it comes, then the connection is cut.
    EventCut,
    /// Instead of the next event half of it comes as a whole line; the watch goes on after it.
    EventTruncated,
    /// Instead of the next event a line of nonsense comes; the watch goes on after it.
    EventGarbage,
    /// Continue tokens are refused with 410.
    ContinueExpired,
}

impl Fault {
    /// All of them.
    pub const ALL: [Self; 24] = [
        Self::RefuseConnections,
        Self::CloseConnections,
        Self::Silent,
        Self::Status(500),
        Self::Status(503),
        Self::Status(429),
        Self::Status(401),
        Self::Status(403),
        Self::Status(404),
        Self::Html,
        Self::HtmlBadGateway,
        Self::TruncatedJson,
        Self::CutAnswer,
        Self::EmptyObject,
        Self::WrongKind,
        Self::EmptyItems,
        Self::WrongContentType,
        Self::WatchGoneStatus,
        Self::WatchGoneEvent,
        Self::WatchErrorEvent,
        Self::WatchCloses,
        Self::EventCut,
        Self::EventTruncated,
        Self::EventGarbage,
    ];

    /// Whether a list that was asked for during the fault still succeeds.
    pub fn spares_lists(self) -> bool {
        matches!(
            self,
            Self::WatchGoneStatus
                | Self::WatchGoneEvent
                | Self::WatchErrorEvent
                | Self::WatchCloses
                | Self::EventCut
                | Self::EventTruncated
                | Self::EventGarbage
        )
    }
}
