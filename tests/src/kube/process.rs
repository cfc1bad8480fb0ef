//! What a pod of the lab runs: a process of its own that serves until it is killed, and may dial.
//!
//! SIGTERM changes nothing: the pod serves on through its grace, as an application that drains does. With `--end-on-term` it ends
//! at once, as one that does not care. One that dials writes each failure as a line, and a line of sums now and then.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    net::{IpAddr, SocketAddr, TcpStream},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use clap::Args;
use lb_user::lab::Netns;

use crate::{
    command_line::say,
    interrupt,
    lab::{dial::Dialer, serve::Serving},
};

/// The verb by which this program becomes a Pod's process.
pub const POD: &str = "pod";
/// The line by which the process says that it serves.
pub const SERVING: &str = "serving";
/// How long a dial or an answer may take before it counts as failed.
const LIMIT: Duration = Duration::from_secs(5);
/// The time between two dials, and between two questions on a connection that is held.
const PAUSE: Duration = Duration::from_millis(20);
/// Dials or questions between two lines of sums.
const BETWEEN_SUMS: u64 = 10;
/// The word before an address that was reached, over TCP and over UDP.
pub const REACHED: &str = "reached";
/// The word before an address that was not reached, and why.
pub const MISSED: &str = "missed";
/// How long a client that reaches for addresses rests between two of them.
const REST: Duration = Duration::from_millis(2);

/// How a pod's process is started.
#[derive(Debug, Args)]
pub struct PodArgs {
    /// The pod's name, which its servers say
    #[arg(long)]
    name: String,
    /// An address of the pod
    #[arg(long = "address", required = true)]
    addresses: Vec<IpAddr>,
    /// End at SIGTERM instead of serving on
    #[arg(long)]
    end_on_term: bool,
    /// Dial this address all the time, a connection after the other
    #[arg(long)]
    dial: Vec<SocketAddr>,
    /// Hold a connection to this address and ask something on it all the time
    #[arg(long)]
    hold: Vec<SocketAddr>,
    /// Reach this address again and again, by a connection and a datagram each time, and say how each went
    #[arg(long)]
    reach: Vec<SocketAddr>,
}

/// Serves until a signal ends the process.
///
/// # Errors
/// Where an address cannot be bound.
pub fn run(args: &PodArgs) -> Result<()> {
    interrupt::catch()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let _serving = Serving::start(runtime.handle(), &Netns::current()?, &args.name, &args.addresses)?;
    say(SERVING);
    if !args.reach.is_empty() {
        let (netns, targets) = (Netns::current()?, args.reach.clone());
        thread::Builder::new()
            .name("lab-client".to_owned())
            .spawn(move || reach_on(Dialer::new(&netns), &targets))?;
    }
    for target in args.dial.clone() {
        thread::Builder::new().spawn(move || dial(target))?;
    }
    for target in args.hold.clone() {
        thread::Builder::new().spawn(move || hold(target))?;
    }
    runtime.block_on(async {
        loop {
            // Not a wait for anything: how often a signal is looked for.
            tokio::time::sleep(PAUSE).await;
            if args.end_on_term && interrupt::check().is_err() {
                return;
            }
        }
    });
    Ok(())
}

fn dial(target: SocketAddr) {
    let mut count = 0_u64;
    loop {
        let began = Instant::now();
        let result = open(target).map(drop);
        let took = began.elapsed();
        if let Err(error) = result {
            say(&format!("failed {target} after {} ms: {error:#}", took.as_millis()));
        }
        count += 1;
        if count.is_multiple_of(BETWEEN_SUMS) {
            say(&format!("dialled {target} {count}"));
        }
        thread::sleep(PAUSE);
    }
}

fn hold(target: SocketAddr) {
    let mut count = 0_u64;
    loop {
        let lost = converse(target, &mut count);
        let why = lost.map_or_else(|error| format!("{error:#}"), |never| match never {});
        say(&format!("lost {target} after {count} answers: {why}"));
        thread::sleep(PAUSE);
    }
}

/// Asks on one connection until it is lost.
fn converse(target: SocketAddr, count: &mut u64) -> Result<std::convert::Infallible> {
    let mut stream = open(target)?;
    let mut line = String::new();
    loop {
        stream.get_mut().write_all(b"still there\n")?;
        line.clear();
        stream.read_line(&mut line)?;
        ensure!(line == "still there\n", "the answer is {line:?}");
        *count += 1;
        if count.is_multiple_of(BETWEEN_SUMS) {
            say(&format!("held {target} {count}"));
        }
        thread::sleep(PAUSE);
    }
}

/// Connects and reads who is there.
fn open(target: SocketAddr) -> Result<BufReader<TcpStream>> {
    let stream = TcpStream::connect_timeout(&target, LIMIT).context("connect")?;
    stream.set_read_timeout(Some(LIMIT))?;
    stream.set_write_timeout(Some(LIMIT))?;
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    stream.read_line(&mut line).context("read who is there")?;
    ensure!(!line.is_empty(), "the connection ended at once");
    Ok(stream)
}

/// What a dialling Pod has met so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dialled {
    /// Dials and answers on held connections, at least so many.
    pub good: u64,
    /// Lines of failed dials and lost connections.
    pub bad: Vec<String>,
}

impl Dialled {
    /// Reads what a dialling Pod has written.
    ///
    /// # Errors
    /// Where its log cannot be read.
    pub fn read(log: &Path) -> Result<Self> {
        let text = fs::read_to_string(log).with_context(|| format!("read {}", log.display()))?;
        let mut found = Self::default();
        let mut sums = std::collections::BTreeMap::new();
        for line in text.lines() {
            let mut words = line.split(' ');
            match (words.next(), words.next(), words.next()) {
                (Some(what @ ("dialled" | "held")), Some(target), Some(count)) => {
                    sums.insert((what, target), count.parse::<u64>().unwrap_or(0));
                }
                (Some("failed" | "lost"), ..) => found.bad.push(line.to_owned()),
                _ => {}
            }
        }
        found.good = sums.values().sum();
        Ok(found)
    }
}

/// Reaches for the addresses in turn until nobody listens to how it went.
fn reach_on(dialer: Dialer<'_>, targets: &[SocketAddr]) {
    loop {
        for target in targets {
            let connection = dialer.open(*target).and_then(|mut talk| talk.say("well?"));
            let line = match connection.and_then(|()| dialer.ask(*target)) {
                Ok(met) => format!("{REACHED} {target} {}", met.name),
                Err(failure) => format!("{MISSED} {target} {failure}"),
            };
            if writeln!(std::io::stdout(), "{line}").is_err() {
                return;
            }
            thread::sleep(REST);
        }
    }
}
