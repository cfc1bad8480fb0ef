//! The running agent: what it is asked, what it says, and how it is ended.

use std::{
    collections::BTreeMap,
    io::{self, Read, Write},
    net::{IpAddr, SocketAddr, TcpStream},
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::{Command, ExitStatus},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use lb_user::{
    control,
    lab::{Child, Netns},
    view::{
        Answer, BackendView, ConnFilter, ConnListView, DiagnosisView, MapDumpView, Query, ReuseView, ServiceFilter,
        ServiceView, StatusView, TableView,
    },
};

use super::{METRICS, must, patience, until};

/// A running agent; dropping it kills it.
#[derive(Debug)]
pub struct Agent {
    process: Child,
    socket: PathBuf,
    netns: Netns,
}

/// An answer over HTTP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// The status code.
    pub status: u16,
    /// The header lines.
    pub head: String,
    /// The body.
    pub body: String,
}

impl Agent {
    /// Starts a process that `command` makes an agent.
    pub(crate) fn start(command: &mut Command, log: &Path, socket: PathBuf, netns: &Netns) -> Result<Self> {
        Ok(Self {
            process: Child::start(command, log)?,
            socket,
            netns: netns.clone(),
        })
    }

    /// Waits until the agent says that it is ready.
    ///
    /// # Errors
    /// Where it ends or does not become ready.
    pub fn wait_ready(&mut self) -> Result<()> {
        let deadline = Instant::now() + patience();
        loop {
            if let Some(status) = self.process.ended()? {
                bail!("the agent ended ({status})");
            }
            match self.get("/readyz") {
                Ok(page) if page.status == 200 => return Ok(()),
                answer if Instant::now() >= deadline => bail!("the agent is not ready: {answer:?}"),
                _ => thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Whether it has not ended yet.
    pub fn is_running(&mut self) -> bool {
        matches!(self.process.ended(), Ok(None))
    }

    /// Kills it without warning.
    ///
    /// # Errors
    /// The kernel's.
    pub fn kill(mut self) -> Result<()> {
        Ok(self.process.kill()?)
    }

    /// Asks it to stop (SIGTERM) and waits for its end.
    ///
    /// # Errors
    /// Where it does not end.
    pub fn terminate(mut self) -> Result<ExitStatus> {
        let raw = i32::try_from(self.pid())?;
        // SAFETY: the child is ours and not yet reaped, so its id is nobody else's.
        must(unsafe { libc::kill(raw, libc::SIGTERM) } == 0, || {
            "no signal could be sent".to_owned()
        })?;
        until("the agent's end", || self.process.ended()?.context("it still runs"))
    }

    /// Stops it by SIGTERM; anything but a clean exit is an error.
    ///
    /// # Errors
    /// Where it does not end, or not with 0.
    pub fn stop(self) -> Result<()> {
        let status = self.terminate()?;
        must(status.success(), || {
            format!("the agent ended with {:?}, signal {:?}", status.code(), status.signal())
        })
    }

    /// Asks a question.
    ///
    /// # Errors
    /// Why there is no answer.
    pub fn ask(&self, query: &Query) -> Result<Answer> {
        Ok(control::ask(&self.socket, query)?)
    }

    /// How it is.
    ///
    /// # Errors
    /// Why there is no answer.
    pub fn status(&self) -> Result<StatusView> {
        match self.ask(&Query::Status {})? {
            Answer::Status(view) => Ok(*view),
            other => bail!("not a status: {other:?}"),
        }
    }

    /// All Services.
    ///
    /// # Errors
    /// Why there is no answer.
    pub fn services(&self) -> Result<Vec<ServiceView>> {
        match self.ask(&Query::Services {
            filter: ServiceFilter::default(),
        })? {
            Answer::ServiceList { items } => Ok(items),
            other => bail!("not Services: {other:?}"),
        }
    }

    /// One Service of the namespace `default`.
    ///
    /// # Errors
    /// Why there is no answer.
    pub fn service(&self, name: &str) -> Result<ServiceView> {
        match self.ask(&Query::Service {
            namespace: "default".to_owned(),
            name: name.to_owned(),
        })? {
            Answer::Service(view) => Ok(*view),
            other => bail!("not a Service: {other:?}"),
        }
    }

    /// All backends.
    ///
    /// # Errors
    /// Why there is no answer.
    pub fn backends(&self) -> Result<Vec<BackendView>> {
        match self.ask(&Query::Backends {
            filter: ServiceFilter::default(),
        })? {
            Answer::BackendList { items } => Ok(items),
            other => bail!("not backends: {other:?}"),
        }
    }

    /// The connections of the node and of the world outside, the youngest of them.
    ///
    /// # Errors
    /// Why there is no answer.
    pub fn conns(&self) -> Result<ConnListView> {
        match self.ask(&Query::Conns {
            filter: ServiceFilter::default(),
            which: ConnFilter::default(),
        })? {
            Answer::ConnList(view) => Ok(view),
            other => bail!("not connections: {other:?}"),
        }
    }

    /// The verdict on the one set of a Service of the namespace `default`.
    ///
    /// # Errors
    /// Why there is no answer, or that the Service has several sets.
    pub fn diagnosis(&self, name: &str) -> Result<DiagnosisView> {
        let filter = ServiceFilter {
            namespace: Some("default".to_owned()),
            name: Some(name.to_owned()),
        };
        match self.ask(&Query::Diagnose { filter })? {
            Answer::DiagnosisList { mut items, .. } if items.len() == 1 => Ok(items.swap_remove(0)),
            other => bail!("not one diagnosis: {other:?}"),
        }
    }

    /// The tables of one Service of the namespace `default`.
    ///
    /// # Errors
    /// Why there is no answer.
    pub fn tables(&self, name: &str) -> Result<Vec<TableView>> {
        match self.ask(&Query::Table {
            namespace: "default".to_owned(),
            name: name.to_owned(),
        })? {
            Answer::TableList { items } => Ok(items),
            other => bail!("not tables: {other:?}"),
        }
    }

    /// Tuple reuse of all Services.
    ///
    /// # Errors
    /// Why there is no answer.
    pub fn reuse(&self) -> Result<ReuseView> {
        match self.ask(&Query::Reuse {
            filter: ServiceFilter::default(),
        })? {
            Answer::Reuse(view) => Ok(view),
            other => bail!("not reuse: {other:?}"),
        }
    }

    /// A map's contents.
    ///
    /// # Errors
    /// Why there is no answer.
    pub fn dump(&self, map: &str) -> Result<MapDumpView> {
        match self.ask(&Query::MapDump { name: map.to_owned() })? {
            Answer::MapDump(view) => Ok(view),
            other => bail!("not a map: {other:?}"),
        }
    }

    /// The contents of the maps that hold the desired state, by map: equal dumps are an unchanged kernel.
    ///
    /// # Errors
    /// Why there is no answer.
    pub fn dump_state(&self) -> Result<BTreeMap<&'static str, MapDumpView>> {
        ["FRONTENDS", "SETS", "LISTS", "TABLES", "BACKENDS", "MEMBERS", "SOURCES"]
            .into_iter()
            .map(|map| Ok((map, self.dump(map)?)))
            .collect()
    }

    /// Waits until the backends that may get connections are exactly these (addresses of port 8080), over all Services.
    ///
    /// # Errors
    /// What there is instead.
    pub fn wait_backends(&self, addresses: &[&str]) -> Result<()> {
        let mut wanted: Vec<IpAddr> = addresses.iter().map(|text| Ok(text.parse()?)).collect::<Result<_>>()?;
        wanted.sort();
        until("these backends", || {
            let mut found: Vec<IpAddr> = self
                .backends()?
                .iter()
                .filter(|backend| backend.weight > 0)
                .map(|backend| backend.addr)
                .collect();
            found.sort();
            must(found == wanted, || format!("{found:?} are active, and not {wanted:?}"))
        })
    }

    /// Fetches a page of the metrics address.
    ///
    /// # Errors
    /// Where nobody answers.
    pub fn get(&self, path: &str) -> Result<Page> {
        self.get_from(METRICS, path)
    }

    /// Fetches a page from an address of the agent's node.
    ///
    /// # Errors
    /// Where nobody answers.
    pub fn get_from(&self, address: SocketAddr, path: &str) -> Result<Page> {
        let ask = || -> io::Result<String> {
            let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(2))?;
            stream.set_read_timeout(Some(Duration::from_secs(10)))?;
            write!(stream, "GET {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n")?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer)?;
            Ok(answer)
        };
        let answer = self.netns.run(ask)??;
        let (head, body) = answer
            .split_once("\r\n\r\n")
            .context("an answer without an end of its head")?;
        let status = head.split(' ').nth(1).context("no status")?.parse()?;
        Ok(Page {
            status,
            head: head.to_owned(),
            body: body.to_owned(),
        })
    }

    /// Every series of a scrape with its value, by its text such as `name{label="x"}`.
    ///
    /// # Errors
    /// Where the scrape fails or a line is not a sample.
    pub fn metrics(&self) -> Result<BTreeMap<String, f64>> {
        let page = self.get("/metrics")?;
        must(page.status == 200, || format!("{page:?}"))?;
        page.body
            .lines()
            .filter(|line| !line.is_empty() && !line.starts_with('#'))
            .map(|line| {
                let (series, value) = line.rsplit_once(' ').with_context(|| format!("not a sample: {line}"))?;
                Ok((series.to_owned(), value.parse()?))
            })
            .collect()
    }
}
