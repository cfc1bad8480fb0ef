//! A name server that knows one name, and can be told to know nothing: the API server's name, when names fail.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context, Result};
use lb_user::lab::Netns;

/// How often the server looks whether it is to end.
const TURN: Duration = Duration::from_millis(100);
/// The type of an IPv4 address record.
const A: u16 = 1;

/// A running name server; it ends with the value.
#[derive(Debug)]
pub struct NameServer {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    silent: AtomicBool,
    ended: AtomicBool,
    asked: AtomicU64,
}

impl NameServer {
    /// Serves port 53 of an address in a namespace: `name` has the address `answer`, nothing else exists.
    ///
    /// # Errors
    /// Where the address cannot be bound.
    pub fn start(netns: &Netns, at: IpAddr, name: &str, answer: Ipv4Addr) -> Result<Self> {
        let socket = netns.run(|| UdpSocket::bind(SocketAddr::new(at, 53)))??;
        socket.set_read_timeout(Some(TURN))?;
        let shared = Arc::<Shared>::default();
        let own = Arc::clone(&shared);
        let wanted = encode(name);
        let thread = thread::Builder::new()
            .name("lab-names".to_owned())
            .spawn(move || serve(&socket, &own, &wanted, answer))
            .context("start the name server")?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    /// From now on, answers nothing; or answers again.
    pub fn be_silent(&self, silent: bool) {
        self.shared.silent.store(silent, Ordering::Relaxed);
    }

    /// Questions so far, answered or not.
    pub fn asked(&self) -> u64 {
        self.shared.asked.load(Ordering::Relaxed)
    }
}

impl Drop for NameServer {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // It panics nowhere; if it did, that was told.
            let _ended = thread.join();
        }
    }
}

fn serve(socket: &UdpSocket, shared: &Shared, wanted: &[u8], answer: Ipv4Addr) {
    let mut question = [0; 512];
    while !shared.ended.load(Ordering::Relaxed) {
        let Ok((len, from)) = socket.recv_from(&mut question) else {
            continue;
        };
        shared.asked.fetch_add(1, Ordering::Relaxed);
        if shared.silent.load(Ordering::Relaxed) {
            continue;
        }
        if let Some(reply) = reply(&question[..len], wanted, answer) {
            // Who asked may be gone.
            let _sent = socket.send_to(&reply, from);
        }
    }
}

/// A name as RFC 1035 writes it: each label behind its length, a zero at the end.
fn encode(name: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    for label in name.split('.') {
        bytes.push(label.len() as u8);
        bytes.extend(label.bytes());
    }
    bytes.push(0);
    bytes
}

/// The answer to a question of RFC 1035; none for what is no question.
fn reply(question: &[u8], wanted: &[u8], answer: Ipv4Addr) -> Option<Vec<u8>> {
    const HEADER: usize = 12;
    let body = question.get(HEADER..)?;
    let end = body.iter().position(|byte| *byte == 0)? + 1;
    let name = body.get(..end)?;
    let kind = u16::from_be_bytes(body.get(end..end + 2)?.try_into().ok()?);
    let asked = question.get(..HEADER + end + 4)?;
    let is_known = name.eq_ignore_ascii_case(wanted);
    let has_answer = is_known && kind == A;
    let mut reply = question.get(..2)?.to_vec();
    // An answer, with recursion; name error for what is not known.
    reply.extend([0x81, if is_known { 0x80 } else { 0x83 }]);
    reply.extend([0, 1, 0, u8::from(has_answer), 0, 0, 0, 0]);
    reply.extend(&asked[HEADER..]);
    if has_answer {
        // The name is the one at offset 12; class IN, a second to live, four bytes.
        reply.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 1, 0, 4]);
        reply.extend(answer.octets());
    }
    Some(reply)
}

#[cfg(test)]
mod tests {
    use super::{encode, reply};

    fn question(name: &str, kind: u8) -> Vec<u8> {
        let mut bytes = vec![7, 9, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        bytes.extend(encode(name));
        bytes.extend([0, kind, 0, 1]);
        bytes
    }

    #[test]
    fn the_one_name_has_one_address_and_no_other_name_exists() {
        let wanted = encode("kube.lab.internal");
        let known = reply(&question("KUBE.lab.internal", 1), &wanted, [10, 2, 0, 2].into()).expect("an answer");
        assert_eq!(known[..4], [7, 9, 0x81, 0x80]);
        assert!(known.ends_with(&[0, 4, 10, 2, 0, 2]));
        let six = reply(&question("kube.lab.internal", 28), &wanted, [10, 2, 0, 2].into()).expect("an answer");
        assert_eq!(six[3..8], [0x80, 0, 1, 0, 0]);
        let other = reply(&question("else.lab.internal", 1), &wanted, [10, 2, 0, 2].into()).expect("an answer");
        assert_eq!(other[3] & 0xf, 3);
        assert_eq!(reply(&[1, 2, 3], &wanted, [10, 2, 0, 2].into()), None);
    }
}
