//! A Prometheus that scrapes the node's agent every second, and what is asked of it over HTTP.

use std::{
    fmt::Write as _,
    fs,
    io::{Read, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream},
    path::PathBuf,
    process::Command,
    time::{Duration, SystemTime},
};

use anyhow::{Context, Result, bail, ensure};
use lb_tests::{
    agent::{METRICS, Node, until},
    prometheus::{RULE_FILES, program, rules_folder},
};
use lb_user::lab::{Child, Netns};
use serde_json::Value;

const ADDRESS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9090);

/// A running Prometheus; dropping it kills it.
#[derive(Debug)]
pub(super) struct Prometheus {
    _process: Child,
    netns: Netns,
}

/// The program, before it runs.
#[derive(Debug)]
pub(super) struct Program(PathBuf);

impl Prometheus {
    /// The program; a skip where it is not to be had.
    pub(super) fn find() -> Result<Program> {
        Ok(Program(program("prometheus")?))
    }

    /// The data of an answer.
    pub(super) fn get(&self, path: &str) -> Result<Value> {
        let answer = self.netns.run(|| fetch(path))??;
        let (head, body) = answer
            .split_once("\r\n\r\n")
            .context("an answer without an end of its head")?;
        let mut body: Value = serde_json::from_str(body).with_context(|| format!("{head}\n{body}"))?;
        ensure!(body["status"] == "success" && body["warnings"].is_null(), "{body}");
        Ok(body["data"].take())
    }

    /// The series that an expression gives now.
    pub(super) fn query(&self, expression: &str) -> Result<Vec<Value>> {
        self.series(&format!("/api/v1/query?query={}", escaped(expression)))
    }

    /// The series that an expression gives over the last minute.
    pub(super) fn query_range(&self, expression: &str) -> Result<Vec<Value>> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_secs();
        let query = escaped(expression);
        let start = now - 60;
        self.series(&format!(
            "/api/v1/query_range?start={start}&end={now}&step=2&query={query}"
        ))
    }

    fn series(&self, path: &str) -> Result<Vec<Value>> {
        match self.get(path)?["result"].take() {
            Value::Array(series) => Ok(series),
            other => bail!("not a list of series: {other}"),
        }
    }
}

impl Program {
    /// Starts it in a node's namespace, with this repository's rules.
    pub(super) fn start(&self, node: &Node) -> Result<Prometheus> {
        self.start_as(node, "evenkeel")
    }

    /// Starts it with another name for the job whose target the agent is.
    pub(super) fn start_as(&self, node: &Node, job: &str) -> Result<Prometheus> {
        let folder = node.folder().join("prometheus");
        fs::create_dir(&folder)?;
        for file in RULE_FILES {
            let rules = fs::read_to_string(rules_folder().join(file))?;
            // Half a minute is for clusters; here nobody waits.
            fs::write(folder.join(file), rules.replace("interval: 30s", "interval: 1s"))?;
        }
        let config = format!(
            "global:\n  scrape_interval: 1s\n  evaluation_interval: 1s\n\
             rule_files: [{}]\n\
             scrape_configs:\n  - job_name: {job}\n    static_configs:\n      - targets: ['{METRICS}']\n",
            RULE_FILES.join(", ")
        );
        fs::write(folder.join("prometheus.yml"), config)?;
        let mut command = Command::new(&self.0);
        command
            .arg(format!("--config.file={}", folder.join("prometheus.yml").display()))
            .arg(format!("--storage.tsdb.path={}", folder.join("data").display()))
            .arg(format!("--web.listen-address={ADDRESS}"))
            .arg("--log.level=warn")
            .current_dir(&folder);
        node.netns().place(&mut command);
        let log = folder.join("log");
        let prometheus = Prometheus {
            _process: Child::start(&mut command, &log)?,
            netns: node.netns().clone(),
        };
        until("Prometheus to answer", || prometheus.query("vector(1)"))
            .with_context(|| fs::read_to_string(&log).unwrap_or_default())?;
        Ok(prometheus)
    }
}

/// Sends a request of HTTP/1.0, whose answer ends with the connection.
fn fetch(path: &str) -> Result<String> {
    let mut stream = TcpStream::connect_timeout(&ADDRESS, Duration::from_secs(2))?;
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    write!(stream, "GET {path} HTTP/1.0\r\nHost: prometheus\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// A text as a query's value.
fn escaped(text: &str) -> String {
    text.bytes().fold(String::new(), |mut escaped, byte| {
        if byte.is_ascii_alphanumeric() {
            escaped.push(char::from(byte));
        } else {
            // Writing into a String cannot fail.
            let _infallible = write!(escaped, "%{byte:02X}");
        }
        escaped
    })
}
