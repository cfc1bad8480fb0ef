//! A question and an answer in JSON over plain HTTP, for etcd's gateway.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// Asks once, from the caller's own namespace.
///
/// # Errors
/// Where no good answer comes.
pub(super) fn post(address: SocketAddr, path: &str, question: &Value) -> Result<Value> {
    let mut stream = TcpStream::connect(address).with_context(|| format!("connect to {address}"))?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    let body = question.to_string();
    // The old version of the protocol, so that the answer comes in one piece and ends with the connection.
    write!(
        stream,
        "POST {path} HTTP/1.0\r\nHost: etcd\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer
        .split_once("\r\n\r\n")
        .context("an answer without an end of its head")?;
    ensure!(
        head.split(' ').nth(1) == Some("200"),
        "{path} answers {head:?} with {body:?}"
    );
    serde_json::from_str(body).with_context(|| format!("{path} answers {body:?}"))
}
