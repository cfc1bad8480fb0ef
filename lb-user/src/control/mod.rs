//! The control socket: one question a line, one answer a line, over a UNIX socket that only root can open.
//!
//! Whoever connects sends one [`Query`](crate::view::Query) as a line of JSON and gets one
//! [`Document`](crate::view::Document) back; a follower gets one a line until it goes away. Requests and answers are bounded in size and time; a bad request gets an answer
//! that says so, and never harms the agent. The meaning of the questions is [`view`](crate::view).

mod client;
mod server;
#[cfg(test)]
mod tests;

pub use client::{AskError, ask, follow};
pub use server::{ControlSocket, ListenError, serve};

/// Where the agent listens unless told otherwise.
pub const DEFAULT_SOCKET: &str = "/run/evenkeel/agent.sock";

/// The longest request line in bytes.
const MAX_REQUEST: u64 = 64 * 1024;
/// The longest answer in bytes; a node with 100,000 backends needs some 30 MB.
const MAX_ANSWER: u64 = 256 * 1024 * 1024;
